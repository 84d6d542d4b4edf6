"""Write the tables of README.md and docs/results/voc-laptop.md from the runs in results/voc-laptop/runs.jsonl.

    python tools/doc_tables.py [--check]

Each table is between `<!-- table NAME -->` and `<!-- end -->`. No number there is typed by hand. --check writes
nothing and fails if a table differs. `make results` runs this after it has written the pages of results/.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from incseg.config import usual_settings
from incseg.io import write_text
from incseg.metrics import FIGURES
from incseg.report.published import PUBLISHED
from incseg.report.runs import collected_warnings, read_runs
from incseg.report.tables import Group, group
from incseg.report.writers import figure_text, markdown_table
from incseg.types import UserError

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "results/voc-laptop/runs.jsonl"
PRINTED = {"balancing": "none", "start_score": 0.0, "train.clip_later": None, "train.frozen_later": "nothing"}
PRIOR = {"balancing": "odds", "prior": 0.2}
JOINT = "joint"


@dataclass(frozen=True)
class Row:
    """A method of the tables: its name in README and in docs, its runs, and the published row beside it."""

    headline: str
    name: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    published: str | None = None


ROWS = (
    Row("fine-tuning (floor)", "fine-tuning", "finetune"),
    Row("EWC", "`ewc`", "ewc"),
    Row("PI", "`pi`", "pi"),
    Row("RW", "`rw`", "rw"),
    Row("LwF", "`lwf`", "lwf"),
    Row("LwF-MC", "`lwf_mc`", "lwf_mc"),
    Row("ILT", "`ilt`", "ilt"),
    Row("MiB", "`mib`", "mib", published="MiB (Cermelli 2020)"),
    Row("MiB with EWF", "`mib`, EWF", "mib", {"train.fusion": "ewf"}),
    Row("SDR, its authors' preset", "`sdr`", "sdr", published="SDR (Michieli 2021)"),
    Row("SDR, the flags of its README", "`sdr`, MiB's cross-entropy, plain distillation", "sdr",
        {"lambda_kd": 100.0, "output": "mib_ce"}),
    Row("", "`sdr`, plain losses", "sdr", {"lambda_kd": 100.0, "output": "kd"}),
    Row("SDR+MiB", "`sdr`, start of MiB", "sdr", {"start_from_background": True}, "SDR+MiB (Michieli 2021)"),
    Row("PLOP", "`plop`", "plop", published="PLOP (Douillard 2021)"),
    Row("SSUL, without its detector", "`ssul`, without detector", "ssul"),
    Row("DKD", "`dkd`", "dkd"),
    Row("", "`dkd`, λ 5 as published", "dkd", {"lambda_dkd": 5.0, "lambda_kd": 5.0}),
    Row("", "`dkd`, λ 5, positive pixels not weighted", "dkd",
        {"lambda_dkd": 5.0, "lambda_kd": 5.0, "positive_weight": 1.0}),
    Row("**evidential**", "`evidential`", "evidential", published="Evidential (Holmquist, Klasén, Felsberg 2022)"),
    Row("evidential as the paper prints it for VOC", "`evidential` as printed", "evidential", PRINTED),
    Row("**evidential**, `odds` with prior 0.2", "`evidential`, `odds`, prior 0.2", "evidential", PRIOR),
    Row("**analytic**: evidential base, later classes in closed form", "`analytic`", "analytic"),
    Row("", "`evidential`, pseudo-labels 0.5", "evidential", {"pseudo_labels": 0.5}),
    Row("", "`evidential`, POD 0.0001", "evidential", {"pod": 0.0001}),
    Row("", "`evidential`, EWF", "evidential", {"train.fusion": "ewf"}),
    Row("RECALL, replay images from VOC itself, without masks", "`recall`, replay images", "recall",
        {"replay": "web"}, "RECALL, web (Maracani 2021)"),
    Row("", "`recall`, replay images, filled in as in its code", "recall", {"replay": "web", "fill": "new"}),
    Row("evidential with the same replay images", "`evidential`, replay images", "evidential",
        {"lambda_kd": 1.0, "replay": "web", "train.lr_later": 0.15}),
)  # fmt: skip
CEILINGS = (
    Row("all classes at once, evidential (ceiling)", "", "evidential", published="Joint, evidential"),
    Row("all classes at once, softmax", "", "joint"),
)
SHORT = ("finetune", "mib", "dkd", "evidential", "analytic")
OVERLAPPED = tuple((task, "overlapped") for task in ("15-5", "15-1", "10-1"))
DISJOINT = tuple((task, "disjoint") for task in ("15-5", "15-1", "10-1"))


class Study:
    """The runs of a file of summaries, over seeds."""

    def __init__(self, file: Path) -> None:
        with collected_warnings() as broken:
            self._groups = group(read_runs([file], usual_settings))
        if broken:
            raise UserError(broken[0])

    def find(self, row: Row, task: str, setting: str) -> Group | None:
        wanted = (row.method, row.options, task, setting)
        for one in self._groups:
            first = one.first
            if wanted == (first.method, first.options, first.task, first.setting):
                return one
        return None

    def cell(self, row: Row, column: tuple[str, str], figures: Sequence[str], seeds: bool = True) -> str:
        """Return 62.4 ± 0.6 / 56.9 ± 0.5, or the means alone; an empty string if it was not run."""
        found = self.find(row, *column)
        if found is None:
            return ""
        spreads = [found.figure(name) for name in figures]
        return " / ".join(figure_text(s) if seeds else f"{s.mean:.1f}" for s in spreads if s)


def published_cell(row: Row, column: tuple[str, str], figures: Sequence[str]) -> str:
    for line in PUBLISHED:
        if line.dataset == "voc" and row.published and line.label.startswith(row.published) and column in line.figures:
            values = dict(zip(FIGURES, line.figures[column], strict=True))
            return " / ".join(str(values[name]) for name in figures if values[name] is not None)
    return ""


def headline(study: Study) -> list[str]:
    """Return All / Inc of six methods on two tasks, for README."""
    columns = OVERLAPPED[:2]
    rows = [
        [row.headline, *(study.cell(row, column, ("all", "inc")) for column in columns)]
        for row in ROWS if row.method in SHORT and row.options in ({}, PRINTED)
    ]  # fmt: skip
    ceiling = CEILINGS[0]
    rows.append([ceiling.headline, *[study.cell(ceiling, ("15-1", JOINT), ("all",))] * len(columns)])
    return markdown_table(["VOC overlapped, All / Inc", "15-5", "15-1"], rows)


def overlapped(study: Study) -> list[str]:
    """Return All / Inc of the overlapped tasks, beside published values."""
    both = ("all", "inc")
    heading = ["VOC overlapped, All / Inc", "15-5", "15-1", "10-1", "published: 15-5", "15-1"]
    rows = [
        [row.headline, *(study.cell(row, column, both) for column in OVERLAPPED),
         *(published_cell(row, column, both) for column in OVERLAPPED[:2])]
        for row in ROWS if row.headline
    ]  # fmt: skip
    for row in CEILINGS:
        everywhere = [study.cell(row, ("15-1", JOINT), ("all",))] * len(OVERLAPPED)
        rows.append([row.headline, *everywhere, *(published_cell(row, column, ("all",)) for column in OVERLAPPED[:2])])
    return markdown_table(heading, rows)


def rivals(study: Study) -> list[str]:
    """Return all four figures of every method, means over seeds."""
    columns = (*OVERLAPPED[:2], *DISJOINT[:2], OVERLAPPED[2])
    heading = ["Base / New / All / Inc", *(" ".join(column) for column in columns)]
    return markdown_table(
        heading, [[row.name, *(study.cell(row, column, FIGURES, seeds=False) for column in columns)] for row in ROWS]
    )


def prior(study: Study) -> list[str]:
    """Return the default beside the remedy for new classes that are predicted too often."""
    plain, remedy = (row for row in ROWS if row.method == "evidential" and row.options in ({}, PRIOR))
    rows = []
    for column in (*OVERLAPPED, *DISJOINT):
        found, tested = study.find(plain, *column), study.find(remedy, *column)
        if found is not None and tested is not None:
            seeds = f"{len(found.seeds)}" + (f", {len(tested.seeds)}" if found.seeds != tested.seeds else "")
            cells = [study.cell(row, column, ("all", "inc")) for row in (plain, remedy)]
            rows.append([" ".join(column), seeds, *cells])
    return markdown_table(["All / Inc", "seeds", "`ratio`, the default", "`odds`, prior 0.2"], rows)


def analytic(study: Study) -> list[str]:
    """Return the closed form beside SGD on every task that it was run on."""
    solved = next(row for row in ROWS if row.method == "analytic")
    trained = next(row for row in ROWS if row.method == "evidential" and not row.options)
    rows = []
    others = tuple((task, "overlapped") for task in ("19-1", "5-15", "5-1"))
    for column in (*OVERLAPPED, *DISJOINT, *others):
        found = study.find(solved, *column)
        if found is not None:
            cells = [study.cell(row, column, FIGURES) for row in (trained, solved)]
            rows.append([" ".join(column), f"{len(found.seeds)}", *cells])
    return markdown_table(["Base / New / All / Inc", "seeds", "`evidential`", "`analytic`"], rows)


TABLES: dict[str, Callable[[Study], list[str]]] = {
    "headline": headline, "overlapped": overlapped, "rivals": rivals, "prior": prior, "analytic": analytic,
}  # fmt: skip
PAGES = (ROOT / "README.md", ROOT / "docs/results/voc-laptop.md")


def with_tables(text: str, study: Study) -> str:
    """Return the text of a page with its tables made from the runs."""

    def table(match: re.Match[str]) -> str:
        if match[1] not in TABLES:
            raise UserError(f"there is no table '{match[1]}'; choose from {', '.join(TABLES)}")
        return "\n".join([f"<!-- table {match[1]} -->", "", *TABLES[match[1]](study), "", "<!-- end -->"])

    return re.sub(r"<!-- table (\S+) -->.*?<!-- end -->", table, text, flags=re.DOTALL)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a table differs")
    args = parser.parse_args(argv)
    try:
        study = Study(RUNS)
        before = {page: page.read_text(encoding="utf-8") for page in PAGES}
        after = {page: with_tables(text, study) for page, text in before.items()}
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    differing = [page for page in PAGES if after[page] != before[page]]
    if args.check and differing:
        names = ", ".join(page.name for page in differing)
        print(f"error: the tables of {names} differ from the runs; run make results", file=sys.stderr)
        return 1
    for page in differing:
        write_text(page, after[page])
        print(f"wrote the tables of {page.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
