"""The page of `incseg report`: its sections from run folders, and their HTML.

The template escapes every text; only figures are inserted as they are.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup, escape

from incseg.config import OWN
from incseg.engine.rundir import RunDir
from incseg.io import read_json
from incseg.metrics import FIGURES, TRIMAP_WIDTHS, percent
from incseg.report import figures
from incseg.report.extension import CLASS_HEADS, class_rows, in_words, try_heads, try_rows, where
from incseg.report.runs import BROKEN, RunRecord
from incseg.report.sections import MethodRuns, Section, ladders_of
from incseg.report.style import Drawn, save_figure
from incseg.report.tables import Table, compare
from incseg.report.writers import cells_of, figure_text, seeds_text

log = logging.getLogger("incseg")

FIGURES_FOLDER = "figures"
"""Folder of the figures beside the page."""
_MOST_TAKINGS = 6
_MOST_COMMANDS = 8
"""Most commands in an open block; more are folded."""


@dataclass
class HtmlTable:
    """Rows whose first cell is a name. `above` is a title over all columns but two; rows in `ours` are highlighted."""

    heading: Sequence[str]
    rows: Sequence[Sequence[str]]
    above: str = ""
    ours: Sequence[int] = ()


@dataclass
class Block:
    """A part of a section. The fields are in the order of the page; a `folded` block is closed at first."""

    title: str
    texts: list[str] = field(default_factory=list)
    tables: list[HtmlTable] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    figures: list[Drawn] = field(default_factory=list)
    folded: bool = False


@dataclass
class PageSection:
    title: str
    blocks: list[Block]


def page(title: str, about: str, warnings: Sequence[str], sections: Sequence[PageSection], footer: str) -> str:
    """Return the page as HTML. Figures share their glyphs."""
    glyphs: dict[str, str] = {}
    for figure in (figure for section in sections for block in section.blocks for figure in block.figures):
        glyphs |= figure.glyphs
    return _template("page.html.jinja").render(
        title=title, about=about, warnings=warnings, sections=sections, footer=footer, glyphs="".join(glyphs.values())
    )


def caption(of: str, *values: Any, **named: Any) -> str:
    """Return a caption of captions.jinja."""
    return " ".join(str(getattr(_template("captions.jinja").module, of)(*values, **named)).split())


@functools.cache
def _template(name: str) -> jinja2.Template:
    is_html = name.endswith(".html.jinja")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), undefined=jinja2.StrictUndefined, autoescape=is_html,
        trim_blocks=is_html, lstrip_blocks=is_html, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters["inline"] = inline_html
    environment.globals["figures_folder"] = FIGURES_FOLDER
    return environment.get_template(name)


def inline_html(text: str) -> Markup:
    """Return Markdown's **bold** and `code` as HTML elements, and all other characters escaped."""
    escaped = re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", str(escape(text)))
    return Markup(re.sub("`([^`]*)`", r"<code>\1</code>", escaped))


# --- sections ------------------------------------------------------------------------------------------------


def table_sections(records: Sequence[RunRecord]) -> list[PageSection]:
    """Return a section for each dataset: our results beside published ones, label rules and commands."""
    sections = []
    for table in compare([record for record in records if record.retest is None], True):
        under = [*table.notes, *(f"**Warning**: {warning}." for warning in table.warnings)]
        own = table.dataset.split(" ")[0] in OWN  # the sections of one's own photographs are more useful
        title = "Base / New / All / Inc" if own else ""
        blocks = [
            Block(title, tables=_by_column(table), notes=under, folded=own),
            Block("Commands", commands=table.commands, folded=len(table.commands) > _MOST_COMMANDS),
        ]
        tested = {record.folder for record in records if record.retest is not None and record.dataset == table.dataset}
        if tested:
            (other,) = compare([record for record in records if record.folder in tested], False, quiet=True)
            title = "The same models, tested with other inference options"
            blocks.append(Block(title, tables=_by_column(other), commands=other.commands, folded=True))
        of_dataset = [record for record in records if record.dataset == table.dataset and record.retest is None]
        blocks += _quality_at_edges(of_dataset)
        sections.append(PageSection(f"Results on {table.dataset}", blocks))
    return sections


def _quality_at_edges(records: Sequence[RunRecord]) -> list[Block]:
    """Return a table of the runs whose last test measured boundaries (--eval.boundary true)."""
    measured = [record for record in records if record.rows and record.rows[-1].get("boundary")]
    if not measured:
        return []
    heading = ["run", "step", "all pixels", "boundary IoU", *(f"within {width} pixels" for width in TRIMAP_WIDTHS)]
    rows = []
    for record in measured:
        last, at_edges = record.rows[-1], record.rows[-1]["boundary"]
        values = [last["all"], at_edges["iou"], *(at_edges[f"within_{width}"] for width in TRIMAP_WIDTHS)]
        name = f"{record.method} {record.task}, seed {record.seed}"
        rows.append([name, str(last["index"]), *(percent(value) for value in values)])
    return [Block("Quality at edges", tables=[HtmlTable(heading, rows)], notes=[caption("edges")])]


def own_photographs(records: Sequence[RunRecord]) -> list[PageSection]:
    """Return a section for each run on one's own photographs: its classes, or the result of an extension."""
    sections = []
    for record in records:
        own = record.settings.get("data.name") in OWN
        if not own or record.retest is not None or record.is_summary or not record.rows:
            continue
        blocks = _extension(RunDir(record.folder))
        if blocks:
            blocks.append(Block("Commands", commands=[record.command]))
        else:
            ious = record.rows[-1]["iou"].items()
            rows = [[name, percent(share)] for name, share in ious]
            blocks = [Block("IoU on held-back photographs", tables=[HtmlTable(["class", "IoU"], rows)])]
        sections.append(PageSection(record.folder.name or str(record.folder), blocks))
    return sections


def is_extension(record: RunRecord) -> bool:
    """Return whether a run extended a model by own photographs. Their masks label the new classes only, so its figures
    over all classes do not measure the model."""
    own = record.settings.get("data.name") in OWN and not record.is_summary and record.retest is None
    return own and bool(record.rows) and RunDir(record.folder).forgetting.is_file()


def _extension(run: RunDir) -> list[Block]:
    """Return the blocks of an extension; none if the run is not one, or its version did not write all fields."""
    if not run.forgetting.is_file():
        return []
    try:
        report = read_json(run.forgetting)
        blocks = [
            Block("In words", [f"{line[:1].upper()}{line[1:]}." for line in in_words(report)]),
            Block(f"Classes on {where(report)}", tables=[HtmlTable(CLASS_HEADS, class_rows(report))]),
        ]
        if len(report["tries"]) > 1:
            tried = HtmlTable(try_heads(report), try_rows(report))
            blocks.append(Block("What was tried", tables=[tried], folded=True))
        return blocks
    except BROKEN as error:
        log.warning(f"{run.forgetting} cannot be shown ({' '.join(str(error).split())})")
        return []


def _by_column(table: Table) -> list[HtmlTable]:
    """Return one table for each task and setting: side by side they are too wide for a screen."""
    run = {(g.first.task, g.first.setting) for line in table.lines for g in line.groups}
    columns = [(task, setting) for task, setting in table.columns if _was_run(run, task, setting)] or table.columns
    heading = ["method", "seeds", *(name.capitalize() for name in FIGURES)]
    found = []
    for column in columns:
        lines = [replace(line, cells={column: line.cells[column]}) for line in table.lines if column in line.cells]
        one = replace(table, columns=[column], lines=lines)
        rows = [[line.label, seeds_text(line), *cells_of(one, line)] for line in lines]
        ours = [index for index, line in enumerate(lines) if not line.published]
        found.append(HtmlTable(heading, rows, " ".join(column).strip(), ours))
    return found


def _was_run(run: set[tuple[str, str]], task: str, setting: str) -> bool:
    """Return whether a column was run. On ADE20k columns have no setting."""
    return (task, setting) in run if setting else task in {task for task, _ in run}


def increments_section(records: Sequence[RunRecord], folder: Path) -> PageSection | None:
    """Draw the score against the number of increments; None if no method has finished tasks with two numbers."""
    blocks = []
    for ladder in ladders_of(records):
        seeds = any(found.seeds > 1 for line in ladder.drawn for found in line.scores.values())
        replaying = [line.label for line in ladder.drawn if line.replays]
        shared = len(set(ladder.increments.values())) < len(ladder.increments)
        text = caption("increments", ladder, seeds, shared, replaying)
        drawn = save_figure(figures.against_increments(ladder), folder, f"{ladder.key}-increments", text)
        heading = [f"{task}: {number} increment{'s' * (number > 1)}" for task, number in ladder.increments.items()]
        rows = [
            [line.label, *(figure_text(line.scores.get(task)) for task in ladder.increments)] for line in ladder.lines
        ]
        blocks.append(Block(ladder.title, tables=[HtmlTable(["All", *heading], rows)], figures=[drawn]))
    return PageSection("The number of increments", blocks) if blocks else None


def section_blocks(section: Section, folder: Path) -> list[Block]:
    """Draw curves, forgetting, classes and confusions. Classes and confusions of other methods are folded."""
    seeds = any(len(method.runs.seeds) > 1 for method in section.methods)
    drawn = save_figure(figures.curves(section), folder, f"{section.key}-curves", caption("curves", section, seeds))
    rows = [[method.label, *(_at(method, step) for step in range(len(section.steps)))] for method in section.methods]
    steps = HtmlTable(["All / Inc after", *section.step_names], rows)
    blocks = [Block("Step by step", tables=[steps], figures=[drawn])]
    lost = figures.forgetting(section)
    if lost is not None:
        text = caption("forgetting", section.main.label, merged=len(section.main.classes) > figures.MOST_ROWS)
        blocks.append(Block("Forgetting", figures=[save_figure(lost, folder, f"{section.key}-forgetting", text)]))
    areas = figures.unknown_areas(section)
    if areas is not None:
        drawn = save_figure(areas, folder, f"{section.key}-unknown-steps", caption("unknown_steps"))
        blocks.append(Block("Classes not learnt yet", figures=[drawn]))
    for index, method in enumerate(section.methods):
        blocks.append(_class_block(section, method, index, folder))
    return blocks


def _at(method: MethodRuns, step: int) -> str:
    if step >= method.num_steps:
        return ""
    return " / ".join(figure_text(method.figure(name, step)) or "–" for name in ("all", "inc"))


def _class_block(section: Section, method: MethodRuns, index: int, folder: Path) -> Block:
    heat = figures.class_heat_map(method, section.step_names)
    drawn = [save_figure(heat, folder, f"{section.key}-classes-{index}", caption("classes", method.label))]
    texts = []
    confusions = [method.confusion(step) for step in range(method.num_steps)]
    last = confusions[-1]
    classes = [(name, step) for name, step in method.classes if name != "background"]
    if last is not None and len(classes) <= figures.MOST_ROWS:
        names, learnt = ["background", *(n for n, _ in classes)], [0, *(step for _, step in classes)]
        has_background = "background" in method.longest.rows[0]["iou"]
        shares = last if has_background else np.where(np.arange(len(last))[:, None] == 0, np.nan, last)
        confusion = figures.confusion_map(shares, names, learnt)
        drawn.append(
            save_figure(confusion, folder, f"{section.key}-confusion-{index}", caption("confusion", method.label))
        )
    taken = figures.takings(confusions, section.steps[: method.num_steps])[:_MOST_TAKINGS]
    if taken:
        sentences = [_sentence(one, method.num_steps) for one in taken]
        texts.append(f"New classes predicted on old ones: {'; '.join(sentences)}.")
    return Block(f"Class by class: {method.label}", texts, figures=drawn, folded=index > 0)


def _sentence(one: figures.Taking, num_steps: int) -> str:
    later = f", {100 * one.now:.0f} % at the end" if one.step < num_steps - 1 else ""
    return f"**{one.taker} took {100 * one.then:.0f} % of {one.victim}**{later}"


def unfinished_section(records: Sequence[RunRecord]) -> PageSection | None:
    """Return the last rows of unfinished runs; None if there are none."""
    rows = []
    for record in (record for record in records if not record.finished and record.rows):
        last = record.rows[-1]
        label = f"{record.dataset} {record.task} {record.setting}, `{record.method}`, seed {record.seed}"
        rows.append([label, f"{len(record.rows)} of {record.num_steps}", *(percent(last[name]) for name in FIGURES)])
    if not rows:
        return None
    heading = ["run", "steps done", *(name.capitalize() for name in FIGURES)]
    text = "The figures of the last finished step. These runs are in the curves, not in the tables above."
    return PageSection("In progress", [Block("", [text], tables=[HtmlTable(heading, rows)])])
