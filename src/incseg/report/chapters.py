"""From run folders to the chapters of a page: the tables, and for each section what its runs alone tell."""

from __future__ import annotations

import html
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from incseg.engine.rundir import RunDir
from incseg.files import read_json
from incseg.metrics.continual import FIGURES
from incseg.report.compare import Table, compare
from incseg.report.extension import CLASS_HEADS, class_rows, in_words, try_heads, try_rows, where
from incseg.report.figures import (
    MOST_ROWS,
    Taking,
    against_increments,
    class_heat_map,
    confusion_map,
    curves,
    forgetting,
    takings,
    unknown_areas,
)
from incseg.report.page import Block, Chapter, bullets, plain_table
from incseg.report.runs import RunRecord
from incseg.report.sections import MethodRuns, Section, ladders_of
from incseg.report.style import keep
from incseg.report.writers import figure_text, to_html
from incseg.types import UserError

log = logging.getLogger("incseg")

_MOST_TAKINGS = 6


def table_chapters(records: Sequence[RunRecord]) -> list[Chapter]:
    """For each dataset ours beside the published, label rules and commands under it; other inference options folded."""
    chapters = []
    for table in compare([record for record in records if record.retest is None], True):
        under = [*table.notes, *(f"**Warning**: {warning}." for warning in table.warnings)]
        own = table.dataset.startswith("folder")  # for people the chapters of own photographs say more
        blocks = [
            Block("Base / New / All / Inc" if own else "", body=_by_column(table) + bullets(under), folded=own),
            Block("Commands", body=f"<pre>{html.escape(chr(10).join(table.commands))}</pre>"),
        ]
        tested = {record.folder for record in records if record.retest is not None and record.dataset == table.dataset}
        if tested:
            (other,) = compare([record for record in records if record.folder in tested], False, quiet=True)
            body = _by_column(other) + f"<pre>{html.escape(chr(10).join(other.commands))}</pre>"
            blocks.append(Block("The same models, tested with other inference options", body=body, folded=True))
        chapters.append(Chapter(f"Results on {table.dataset}", blocks))
    return chapters


def own_photographs(records: Sequence[RunRecord]) -> list[Chapter]:
    """For each run on a folder of one's own: its classes, and of an extension what it did, before all tables."""
    chapters = []
    for record in records:
        own = record.settings.get("data.name") == "folder"
        if not own or record.retest is not None or record.is_summary or not record.rows:
            continue
        blocks = _extension(RunDir(record.folder))
        if not blocks:
            ious = record.rows[-1]["iou"].items()
            rows = [[name, "–" if share is None else f"{share:.1f}"] for name, share in ious]
            blocks = [Block("IoU on held-back photographs", body=plain_table(["class", "IoU"], rows))]
        chapters.append(Chapter(record.folder.name or str(record.folder), blocks))
    return chapters


def _extension(run: RunDir) -> list[Block]:
    """Nothing where the run is not an extension, or of a version that did not write all of this."""
    if not run.changes.is_file():
        return []
    try:
        report = read_json(run.changes)
        blocks = [
            Block("In words", [f"{line[:1].upper()}{line[1:]}." for line in in_words(report)]),
            Block(f"Classes on {where(report)}", body=plain_table(list(CLASS_HEADS), class_rows(report))),
        ]
        if len(report["tries"]) > 1:
            blocks.append(Block("What was tried", body=plain_table(try_heads(report), try_rows(report)), folded=True))
        return blocks
    except (UserError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        log.warning(f"{run.changes} cannot be shown ({' '.join(str(error).split())})")
        return []


def _by_column(table: Table) -> str:
    """A table for each task and setting that was run: all of them beside each other are too wide for a screen."""
    run = {(g.first.task, g.first.setting) for line in table.lines for g in line.groups}
    columns = [(task, setting) for task, setting in table.columns if _was_run(run, task, setting)] or table.columns
    parts = []
    for column in columns:
        lines = [replace(line, cells={column: line.cells[column]}) for line in table.lines if column in line.cells]
        parts.append(f'<div class="scroll">{to_html(replace(table, columns=[column], lines=lines))}</div>')
    return "".join(parts)


def _was_run(run: set[tuple[str, str]], task: str, setting: str) -> bool:
    """On ADE20k a column has no setting."""
    return (task, setting) in run if setting else task in {task for task, _ in run}


def increments_chapter(records: Sequence[RunRecord], folder: Path) -> Chapter | None:
    """The score against the number of increments; None where no method has finished tasks of two numbers."""
    blocks = []
    for ladder in ladders_of(records):
        seeds = any(found.seeds > 1 for line in ladder.drawn for found in line.scores.values())
        replaying = [line.label for line in ladder.drawn if line.replays]
        fewer = len(ladder.drawn) < len(ladder.lines)
        shared = len(set(ladder.increments.values())) < len(ladder.increments)
        caption = (
            "mIoU over all classes after the last step, against the number of increments (the paper's figure 1, right)."
            + " Points are means, bars ± one standard deviation over seeds." * seeds
            + f" Drawn are {len(ladder.drawn)} of {len(ladder.lines)} lines: first those with the most numbers of "
            "increments, then methods without options, then the highest scores. The table has all."
            * fewer
            + " Tasks of the same number stand side by side, in the order of their names." * shared
            + f" With more images than the others: {', '.join(replaying)}." * bool(replaying)
            + " Dashed level: all classes learnt at once." * bool(ladder.ceilings)
        )
        drawn = keep(against_increments(ladder), folder, f"{ladder.key}-increments", caption)
        heading = [f"{task}: {number} increment{'s' * (number > 1)}" for task, number in ladder.increments.items()]
        rows = [
            [line.label, *(figure_text(line.scores.get(task)) for task in ladder.increments)] for line in ladder.lines
        ]
        blocks.append(Block(ladder.title, figures=[drawn], body=plain_table(["All", *heading], rows)))
    return Chapter("The number of increments", blocks) if blocks else None


def section_blocks(section: Section, folder: Path) -> list[Block]:
    """Curves, forgetting, classes and confusions; the main method's open, the others' folded away."""
    seeds = any(len(method.runs.seeds) > 1 for method in section.methods)
    drawn = keep(
        curves(section), folder, f"{section.key}-curves",
        "mIoU of the model after every step." + (" Lines are means, bands ± one standard deviation over seeds." * seeds)
        + (" Dashed level: all classes learnt at once." if section.ceilings else "")
        + (" Inc gives every step the same weight, whatever its number of classes, so new classes count more in it."
           if len(section.steps) > 1 else ""),
    )  # fmt: skip
    rows = [[method.label, *(_at(method, step) for step in range(len(section.steps)))] for method in section.methods]
    steps = plain_table(["All / Inc after", *section.step_names], rows)
    blocks = [Block("Step by step", figures=[drawn], body=steps)]
    lost = forgetting(section)
    if lost is not None:
        caption = (
            "Forgetting: IoU right after a class was learnt minus IoU after the last step"
            + (", as means of increments" if len(section.main.classes) > MOST_ROWS else "")
            + f". Sorted by {section.main.label}. Short lines are good."
        )
        blocks.append(Block("Forgetting", figures=[keep(lost, folder, f"{section.key}-forgetting", caption)]))
    areas = unknown_areas(section)
    if areas is not None:
        caption = (
            "Classes to come, on the whole test set: how well their pixels are told from learnt classes by the "
            "uncertainty, and from true background by 1 − P(background). 1 is perfect, the dashed line guessing."
        )
        drawn = keep(areas, folder, f"{section.key}-unknown-steps", caption)
        blocks.append(Block("Classes not learnt yet", figures=[drawn]))
    for index, method in enumerate(section.methods):
        blocks.append(_class_block(section, method, index, folder))
    return blocks


def _at(method: MethodRuns, step: int) -> str:
    if step >= method.num_steps:
        return ""
    return " / ".join(figure_text(method.figure(name, step)) or "–" for name in ("all", "inc"))


def _class_block(section: Section, method: MethodRuns, index: int, folder: Path) -> Block:
    heat = keep(
        class_heat_map(method, section.step_names), folder, f"{section.key}-classes-{index}",
        f"{method.label}: left the IoU of every class after every step, right what each step changed: orange is what a "
        "new class cost the old ones, purple what they gained. Lines separate the steps that learnt the classes.",
    )  # fmt: skip
    figures, texts = [heat], []
    confusions = [method.confusion(step) for step in range(method.num_steps)]
    last = confusions[-1]
    classes = [(name, step) for name, step in method.classes if name != "background"]
    if last is not None and len(classes) <= MOST_ROWS:
        names, learnt = ["background", *(n for n, _ in classes)], [0, *(step for _, step in classes)]
        has_background = "background" in method.longest.rows[0]["iou"]
        shares = last if has_background else np.where(np.arange(len(last))[:, None] == 0, np.nan, last)
        caption = (
            f"{method.label}, after the last step: where the pixels of each true class went, in percent of the row. In "
            "the columns behind the first line stands what later classes took; small shares are left out."
        )
        name = f"{section.key}-confusion-{index}"
        figures.append(keep(confusion_map(shares, names, learnt), folder, name, caption))
    taken = takings(confusions, section.steps[: method.num_steps])[:_MOST_TAKINGS]
    if taken:
        texts.append("Who took whose pixels: " + "; ".join(_sentence(one, method.num_steps) for one in taken) + ".")
    return Block(f"Class by class: {method.label}", texts, figures, folded=index > 0)


def _sentence(one: Taking, num_steps: int) -> str:
    later = f", and holds {100 * one.now:.0f} % at the end" if one.step < num_steps - 1 else ""
    return f"**{one.taker} took {100 * one.then:.0f} % of {one.victim}**{later}"


def under_way(records: Sequence[RunRecord]) -> Chapter | None:
    """The rows so far of runs that are not finished."""
    going = [record for record in records if not record.finished and record.rows]
    rows = []
    for record in going:
        last = record.rows[-1]
        values = [f"{last[name]:.1f}" if last[name] is not None else "–" for name in FIGURES]
        label = f"{record.dataset} {record.task} {record.setting}, `{record.method}`, seed {record.seed}"
        rows.append([label, f"{len(record.rows)} of {record.num_steps}", *values])
    if not rows:
        return None
    heading = ["run", "steps done", *(name.capitalize() for name in FIGURES)]
    text = "The figures of the last step that is done. These runs are in the curves, not in the tables above."
    return Chapter("Under way", [Block("", [text], body=plain_table(heading, rows))])
