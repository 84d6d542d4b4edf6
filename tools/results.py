"""Write the pages of a study: results/NAME/main.md, ablations.md, unknown.md and classes.md, and the paper's table with
our results beside published ones as results/NAME/paper.md, .tex and .csv.

    python tools/results.py [runs/voc-laptop] [--out results/voc-laptop]

Summaries of all finished runs under RUNS are added to results/NAME/runs.jsonl, and the pages are made from this file
alone: run folders may be deleted, or be on another machine. Runs under ablations/ are compared with the run of the
same task, setting, method and seed outside. No model is loaded or trained; the same file gives the same pages.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from incseg.config import usual_settings
from incseg.io import write_text
from incseg.metrics import FIGURES
from incseg.report.class_statistics import LEAST_SHARE, ClassStatistics
from incseg.report.published import Column
from incseg.report.runs import (
    ALL_FIGURES,
    RunRecord,
    changes,
    collected_warnings,
    options_text,
    print_warning,
    read_runs,
    shown_path,
    value_text,
    write_summaries,
)
from incseg.report.tables import (
    JOINT,
    Group,
    Line,
    Spread,
    Table,
    commands_of,
    compare,
    group,
    lines_of,
    mixtures,
    origin_line,
    present_columns,
    rules_lines,
    spread,
)
from incseg.report.writers import FORMATS, code_block, figure_text, markdown_table, written
from incseg.types import UserError

PHOTOGRAPHS = (
    "`replay web`: photographs of old classes that the other methods do not have. They are no crawl of the web but "
    "images of the dataset itself, which the step of their class was trained on and later steps may not use, taken "
    "without their masks (tools/web_images.py): kinder than the published RECALL's."
)
_SEEDS_NOTE = "± is the standard deviation (n − 1) over seeds; variances stand apart. A cell that was not run is empty."
_MOST_NAMED = 4
"""Most classes in a cell of confused classes."""
_NUMBERS = ("iou_learnt", "iou_end", "recall_learnt", "recall_end", "precision")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("runs", type=Path, nargs="?", default=Path("runs/voc-laptop"))
    parser.add_argument("--out", type=Path, help="default: results/ and the name of the folder of runs")
    args = parser.parse_args(argv)
    out: Path = args.out or Path("results") / args.runs.resolve().name
    if not args.runs.is_dir() and not (out / "runs.jsonl").is_file():
        return fail(f"{args.runs} is not a folder of runs; train some first (incseg train … --out {args.runs}/NAME)")
    try:
        with collected_warnings(show=True):
            return write_pages(args.runs, out)
    except UserError as error:
        return fail(str(error))


def write_pages(runs: Path, out: Path) -> int:
    """Add the finished runs of a folder to the summaries of a study, and write its pages."""
    file = out / "runs.jsonl"
    if runs.is_dir():
        here = read_runs([runs], usual_settings)
        for record in here:
            if not record.finished:
                print_warning(record.how_far)
        if any(record.finished for record in here):
            print(f"wrote {write_summaries(here, runs, file)} finished runs of {runs} into {file}")
    records = read_runs([file], usual_settings) if file.is_file() else []
    if not records:
        return fail(f"{runs} holds no finished run yet")
    apart = file / "ablations"
    ablations = [record for record in records if apart in record.folder.parents]
    study = [record for record in records if apart not in record.folder.parents]
    trained = [record for record in study if record.retest is None]
    made_by = f"python tools/results.py {shown_path(runs)}"
    notes = [PHOTOGRAPHS] if any("replay" in record.options for record in trained) else []
    tables = compare(trained, published=True)
    for table in tables:
        table.notes += notes
    pages = {
        "main.md": main_page(trained, made_by, notes),
        "unknown.md": unknown_page(trained, made_by),
        "classes.md": classes_page(trained, made_by),
        "ablations.md": ablations_page(study, ablations, made_by),
        **{f"paper{ending}": written(kind, tables, trained) for kind, ending in FORMATS.items() if kind != "json"},
    }
    for name, text in pages.items():
        write_text(out / name, text)
    print(f"wrote {', '.join(pages)} in {out}")
    return 0


def fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


# --- what all pages share ------------------------------------------------------------------------------------


def _page(title: str, body: list[str], records: Sequence[RunRecord], made_by: str) -> str:
    """Return a page with the common end of all pages: warnings, label rules, time, commits, machine, commands."""
    if not records:
        return "\n".join([f"# {title}", "", *body, f"- Made by `{made_by}`."]) + "\n"
    end = [
        *(f"- **Warning**: {warning}." for warning in mixtures(records)),
        *(f"- {line}" for line in rules_lines(records)),
        f"- {origin_line(records)}",
        f"- Made by `{made_by}` from the run folders of these commands:",
        "",
        *code_block(commands_of(group(records))),
    ]
    return "\n".join([f"# {title}", "", *body, *end]) + "\n"


def _sections(records: Sequence[RunRecord]) -> Iterator[tuple[str, Column, Table]]:
    """Yield for each dataset, task and setting its heading and the table of all methods."""
    for dataset in sorted({record.dataset for record in records}):
        groups = group(record for record in records if record.dataset == dataset)
        columns = present_columns(dataset, groups)
        table = Table(dataset, dataset, columns, lines_of(dataset, groups, columns))
        for column in columns:
            yield f"## {dataset} {' '.join(column).strip()}", column, table


def _of_column(line: Line, column: Column) -> list[Group]:
    """Return the groups of a line with this task and setting. Joint training has no setting."""
    return [
        one
        for one in line.groups
        if one.first.task == column[0] and one.first.setting in (column[1] or one.first.setting, JOINT)
    ]


# --- main ----------------------------------------------------------------------------------------------------


def main_page(records: Sequence[RunRecord], made_by: str, notes: Sequence[str] = ()) -> str:
    """Return tasks × settings × methods, mean and spread over seeds, below `notes`."""
    body = [f"Percent mIoU of the last model; Avg is the mean of All over the steps. {_SEEDS_NOTE} Best in bold; "
            "joint training and replayed images (RECALL), which use more data, are not ranked.", ""]  # fmt: skip
    body += [line for note in notes for line in (note, "")]
    heading = ["method", "seeds", *(figure.capitalize() for figure in ALL_FIGURES), "minutes"]
    variances = []
    for title, column, table in _sections(records):
        rows = []
        for line in table.lines:
            cell = line.cells.get(column)
            if cell is None:
                continue
            own = _of_column(line, column)
            minutes = spread(record.seconds / 60 for one in own for record in one.records)
            seeds = str(max(found.seeds for found in cell.values()))
            figures = [_bold_if_best(table, line, column, name) for name in ALL_FIGURES]
            rows.append([line.label, seeds, *figures, f"{minutes.mean:.0f}" if minutes else ""])
            if any(found.variance is not None for found in cell.values()):
                shown = [_variance(cell.get(name)) for name in ALL_FIGURES]
                variances.append([title.removeprefix("## "), line.label, seeds, *shown])
        body += [title, "", *markdown_table(heading, rows), ""]
    if variances:
        body += ["## Variances over the same seeds", ""]
        body += [*markdown_table(["task", *heading[:-1]], variances, left=2), ""]
    return _page("Methods side by side", body, records, made_by)


def _bold_if_best(table: Table, line: Line, column: Column, name: str) -> str:
    text = figure_text(line.cells[column].get(name))
    return f"**{text}**" if table.is_best(line, column, name) else text


def _variance(value: Spread | None) -> str:
    return "" if value is None or value.variance is None else f"{value.variance:.2f}"


# --- ablations -----------------------------------------------------------------------------------------------


@dataclass
class _Ablation:
    """Runs or retests with the same change, each paired with the default run of its seed, or None."""

    change: str
    pairs: list[tuple[RunRecord, RunRecord | None]]

    def row(self) -> list[str]:
        """Return the change, seeds, the figures, and how All and Inc differ from the same seed without the change."""
        cells = [figure_text(spread(record.figure(name) for record, _ in self.pairs)) for name in FIGURES]
        return [self.change, str(len(self.pairs)), *cells, *(_signed(self.difference(name)) for name in ("all", "inc"))]

    def difference(self, name: str) -> Spread | None:
        both = [(record.figure(name), default.figure(name)) for record, default in self.pairs if default]
        return spread(here - there if here is not None and there is not None else None for here, there in both)


def _signed(value: Spread | None) -> str:
    if value is None:
        return ""
    return f"{value.mean:+.1f}" + (f" ± {value.deviation:.1f}" if value.deviation is not None else "")


def ablations_page(main: Sequence[RunRecord], ablations: Sequence[RunRecord], made_by: str) -> str:
    """Compare runs of `ablations` with the run of the same task, setting, method and seed and a subset of their
    options, and retests with their run."""
    runs = [record for record in ablations if record.retest is None]
    retests = [record for record in (*main, *ablations) if record.retest is not None]
    trained = _ablations([(record, _default_of(record, (*main, *runs))) for record in runs])
    owners = {_place(record): record for record in (*main, *ablations) if record.retest is None}
    tested = _ablations([(record, owners[_place(record)]) for record in retests])
    used = {id(record): record for record in (*runs, *retests)}
    for found in (*trained, *tested):
        used |= {id(default): default for _, default in found.pairs if default}
    body = [f"Percent mIoU of the last model; the last two columns are differences to the default, seed by seed. "
            f"{_SEEDS_NOTE.replace('; variances stand apart', '')}", ""]  # fmt: skip
    body += ["## Trained otherwise", "", *_ablation_tables(trained, "default")]
    body += ["## The same models, tested otherwise", "", *_ablation_tables(tested, "as trained")]
    return _page("Ablations", body, list(used.values()), made_by)


def _default_of(mine: RunRecord, runs: Sequence[RunRecord]) -> RunRecord | None:
    """Return the run of the same task, setting, method and seed with the largest proper subset of its options."""
    found = [
        record
        for record in runs
        if record.retest is None
        and (_kind(record), record.seed) == (_kind(mine), mine.seed)
        and record.options.items() < mine.options.items()
    ]
    return max(found, key=lambda record: len(record.options), default=None)


def _kind(record: RunRecord) -> tuple[str, ...]:
    return record.dataset, record.task, record.setting, record.order, record.method


def _place(record: RunRecord) -> str:
    return str(record.folder.resolve())


def _ablations(pairs: Sequence[tuple[RunRecord, RunRecord | None]]) -> list[_Ablation]:
    """Group the pairs over seeds, by their change."""
    default_of = {id(record): default for record, default in pairs}
    found = []
    for one in group((record for record, _ in pairs)):
        by_change: dict[str, list[tuple[RunRecord, RunRecord | None]]] = {}
        for record in one.records:
            default = default_of[id(record)]
            by_change.setdefault(_change(record, default), []).append((record, default))
        found += [_Ablation(change, members) for change, members in by_change.items()]
    return found


def _change(record: RunRecord, default: RunRecord | None) -> str:
    if default is None:
        return f"{options_text(record.options) or 'nothing'} (no default run of this seed)"
    differing = changes(record, default)
    texts = {key: f"{key} {value_text(old)} → {value_text(new)}" for key, (old, new) in differing.items()}
    retested = {key: f"{key} {value_text(value)}" for key, value in (record.retest or {}).items()}
    return ", ".join(text for _, text in sorted({**retested, **texts}.items())) or "nothing"


def _ablation_tables(ablations: Sequence[_Ablation], name: str) -> list[str]:
    """Return a table for each task, setting and method: first the default itself, then each change."""
    if not ablations:
        return ["None was run.", ""]
    lines = []
    heading = ["change", "seeds", *(figure.capitalize() for figure in FIGURES), "Δ All", "Δ Inc"]
    kinds = dict.fromkeys((_kind(found.pairs[0][0]), _own_options(found)) for found in ablations)
    for kind, options in kinds:
        members = [one for one in ablations if (_kind(one.pairs[0][0]), _own_options(one)) == (kind, options)]
        defaults = {id(default): default for one in members for _, default in one.pairs if default}
        dataset, task, setting, order, method = kind
        ordered = f", order {order}" if dataset == "ade20k" else ""
        lines += [f"### {dataset} {task} {setting}{ordered}, `{method}`{f' ({options})' if options else ''}", ""]
        rows = []
        if defaults:
            same = [(default, None) for default in sorted(defaults.values(), key=lambda record: record.seed)]
            rows.append(_Ablation(name, list(same)).row())
        lines += [*markdown_table(heading, [*rows, *(one.row() for one in members)]), ""]
    return lines


def _own_options(ablation: _Ablation) -> str:
    default = ablation.pairs[0][1]
    return options_text(default.options) if default else ""


# --- unseen classes ------------------------------------------------------------------------------------------

_RANKINGS = ("auroc", "average_precision", "fpr95")
_OWN_SCORE = {"background": "not_background", "seen": "uncertainty"}
_SCORE_TEXT = {
    "not_background": "1 − P(background)",
    "uncertainty": "the method's own uncertainty",
    "background": "P(background)",
    "entropy": "the entropy of the probabilities",
    "not_strongest": "1 − the largest probability",
}
_OTHER_TEXT = {"background": "true background", "seen": "classes learnt before"}


def _rankings(row: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, float]]]:
    """Yield (other class of pixels, score, AUROC and others) of a step's row, if there are unseen classes."""
    for other, own in _OWN_SCORE.items():
        scores = {own: row["unseen"].get(f"from_{other}"), **(row["unseen"].get(f"from_{other}_by") or {})}
        yield from ((other, score, found) for score, found in scores.items() if found)


def unknown_page(records: Sequence[RunRecord], made_by: str) -> str:
    """Return how well uncertainty separates classes not learnt yet from background and from learnt classes."""
    body = ["AUROC / average precision / FPR at 95 % recall of \"a pixel of a class not learnt yet scores higher\", "
            "after each step, means over seeds.", ""]  # fmt: skip
    found_any = False
    for title, column, table in _sections(records):
        tables: dict[tuple[str, str], dict[str, dict[int, list[dict[str, float]]]]] = {}
        for line in table.lines:
            for record in (record for one in _of_column(line, column) for record in one.records):
                for row in record.rows:
                    for other, score, found in _rankings(row):
                        by_step = tables.setdefault((other, score), {}).setdefault(line.label, {})
                        by_step.setdefault(row["index"], []).append(found)
        found_any = found_any or bool(tables)
        for (other, score), by_method in tables.items():
            steps = sorted({step for by_step in by_method.values() for step in by_step})
            cells = [
                [label, str(max(map(len, by_step.values()))), *(_ranking_text(by_step.get(step)) for step in steps)]
                for label, by_step in by_method.items()
            ]
            body += [f"{title}: unseen against {_OTHER_TEXT[other]}, by {_SCORE_TEXT.get(score, score)}", ""]
            body += [*markdown_table(["method", "seeds", *(f"after step {step}" for step in steps)], cells), ""]
    if not found_any:
        body += ["No step of these runs had an unseen class at test.", ""]
    return _page("Classes not learnt yet", body, records, made_by)


def _ranking_text(found: list[dict[str, float]] | None) -> str:
    if not found:
        return ""
    means = [spread(ranking[name] for ranking in found) for name in _RANKINGS]
    return " / ".join(f"{mean.mean:.3f}" for mean in means if mean)


# --- single classes ------------------------------------------------------------------------------------------


def classes_page(records: Sequence[RunRecord], made_by: str) -> str:
    """Return the IoU of each class when it was learnt and at the end, and which class took whose pixels."""
    body = ["IoU in percent after the step that learnt a class → after the last step, means over seeds. Then, from the "
            "confusion matrices of the last test (means over seeds): whose pixels each class of a later step took, "
            "and to whom the classes of step 0 lost theirs since the test after step 0.", ""]  # fmt: skip
    for title, column, table in _sections(records):
        by_label = {line.label: _mean_statistics(one) for line in table.lines for one in _of_column(line, column)}
        names = dict.fromkeys(one.name for of_method in by_label.values() for one in of_method)
        by_name = {label: {one.name: one for one in of_method} for label, of_method in by_label.items()}
        cells = [[name, *(_iou_text(by_name[label].get(name)) for label in by_label)] for name in names]
        body += [title, "", *markdown_table(["class", *by_label], cells), ""]
        for label, of_method in by_label.items():
            body += _class_tables(f"{title.removeprefix('## ')}, {label}", of_method)
    return _page("Class by class", body, records, made_by)


def _mean_statistics(one: Group) -> list[ClassStatistics]:
    """Return the classes of a group, as means over the seeds whose statistics are known."""
    by_seed = [found for record in one.records if (found := record.class_statistics)]
    return [_mean(of_class) for of_class in zip(*by_seed, strict=True)] if by_seed else []


def _mean(of_seeds: Sequence[ClassStatistics]) -> ClassStatistics:
    found = {name: spread(getattr(one, name) for one in of_seeds) for name in _NUMBERS}
    means = {name: value.mean if value else None for name, value in found.items()}
    shares = {name: _mean_shares([getattr(one, name) for one in of_seeds]) for name in ("lost_to", "taken_from")}
    return of_seeds[0]._replace(**means, **shares)


def _mean_shares(shares: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for one in shares for name in one)
    return {name: sum(one.get(name, 0.0) for one in shares) / len(shares) for name in names}


def _iou_text(found: ClassStatistics | None) -> str:
    if found is None:
        return ""
    return " → ".join("–" if value is None else f"{value:.1f}" for value in (found.iou_learnt, found.iou_end))


def _class_tables(title: str, classes: Sequence[ClassStatistics]) -> list[str]:
    later, old = [one for one in classes if one.step > 0], [one for one in classes if one.recall_learnt is not None]
    lines = []
    if later:
        heading = ["class", "learnt in step", "found", "right where called so", "in truth elsewhere"]
        rows = [
            [one.name, str(one.step), _percent(one.recall_end), _percent(one.precision), _named(one.taken_from)]
            for one in later
        ]
        lines += [f"### {title}: what is called by a new name", "", *markdown_table(heading, rows, left=5), ""]
    if old:
        heading = ["class", "found after step 0 → at the end", "lost to"]
        rows = [
            [one.name, f"{_percent(one.recall_learnt)} → {_percent(one.recall_end)}", _named(one.lost_to)]
            for one in old
        ]
        lines += [f"### {title}: what the classes of step 0 lost", "", *markdown_table(heading, rows, left=3), ""]
    return lines


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"


def _named(shares: dict[str, float]) -> str:
    """Return the largest few: background 41.0, cow 20.3."""
    largest = sorted(shares.items(), key=lambda item: (-item[1], item[0]))[:_MOST_NAMED]
    return ", ".join(f"{name} {_percent(share)}" for name, share in largest if share >= LEAST_SHARE)


if __name__ == "__main__":
    sys.exit(main())
