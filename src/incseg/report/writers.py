"""A table as Markdown, LaTeX, CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from incseg.metrics import FIGURES
from incseg.report.runs import RunRecord, options_text
from incseg.report.tables import Line, Spread, Table, as_json

FORMATS = {"markdown": ".md", "latex": ".tex", "csv": ".csv", "json": ".json"}
"""The formats of tables, with their file endings."""


def written(kind: str, tables: Sequence[Table], records: Sequence[RunRecord]) -> str:
    """Return tables of these records in one of FORMATS."""
    if kind == "json":
        return json.dumps(as_json(tables, records), indent=1, ensure_ascii=False) + "\n"
    if kind == "csv":
        return to_csv(tables)
    return "\n".join(map({"markdown": to_markdown, "latex": to_latex}[kind], tables))


def markdown_table(heading: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> list[str]:
    """Return the lines of a table. The first `left` columns are text, the others figures."""
    rule = ["---" if i < left else "---:" for i in range(len(heading))]
    return [_markdown_row(heading), f"|{'|'.join(rule)}|", *(_markdown_row(row) for row in rows)]


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def figure_text(value: Spread | None) -> str:
    """Return 49.1, or 49.1 ± 1.2 over seeds, or 49.1 (var 1.4) if only the variance is known."""
    if value is None:
        return ""
    if value.deviation is not None:
        return f"{value.mean:.1f} ± {value.deviation:.1f}"
    if value.variance is None:
        return f"{value.mean:.1f}"
    return f"{value.mean:.1f} (var {value.variance:.{1 if value.variance >= 0.1 else 2}f})"


def cells_of(table: Table, line: Line) -> list[str]:
    """Return the figures of a line at all columns of its table, the best in **bold**."""
    texts = []
    for column in table.columns:
        cell = line.cells.get(column, {})
        for figure in FIGURES:
            text = figure_text(cell.get(figure))
            if text and len(line.seeds) > 1 and cell[figure].seeds < line.seeds[-1]:
                text += f" (n={cell[figure].seeds})"
            texts.append(f"**{text}**" if table.is_best(line, column, figure) else text)
    return texts


def seeds_text(line: Line) -> str:
    """Return the number of seeds as 3, or 1–3 if cells differ; empty if it is not published."""
    if not line.seeds or line.seeds == [0]:
        return ""
    return "–".join(str(seeds) for seeds in dict.fromkeys((line.seeds[0], line.seeds[-1])))


def to_markdown(table: Table) -> str:
    tasks = [cell for column in table.columns for cell in (" ".join(column).strip(), *[""] * (len(FIGURES) - 1))]
    rows = [["method", "seeds", *[figure.capitalize() for figure in FIGURES] * len(table.columns)]]
    rows += [[line.label, seeds_text(line), *cells_of(table, line)] for line in table.lines]
    lines = [f"## {table.title}", "", *markdown_table(["", "", *tasks], rows), "", *_under(table)]
    return "\n".join(lines) + "\n"


def _under(table: Table) -> list[str]:
    return [
        *(f"- {note}" for note in table.notes),
        *(f"- **Warning**: {warning}." for warning in table.warnings),
        *(["- Commands:", "", *code_block(table.commands)] if table.commands else []),
    ]


def code_block(lines: Iterable[str]) -> list[str]:
    return ["```", *lines, "```"]


def to_latex(table: Table) -> str:
    """Return a tabular in the paper's layout, with two lines of headings. It needs no LaTeX package."""
    width = len(FIGURES)
    spans, settings = [], []
    for task, columns in groupby(table.columns, key=lambda column: column[0]):
        of_task = list(columns)
        spans.append(rf"\multicolumn{{{width * len(of_task)}}}{{c}}{{{_latex(task)}}}")
        settings += [rf"\multicolumn{{{width}}}{{c}}{{{_latex(setting)}}}" for _, setting in of_task]
    names = [figure.capitalize() for figure in FIGURES] * len(table.columns)
    lines = [
        *(f"% {note}" for note in table.notes),
        *(f"% Warning: {warning}." for warning in table.warnings),
        *(f"% {command}" for command in table.commands),
        rf"\begin{{tabular}}{{lc|{'|'.join(['r' * width] * len(table.columns))}}}",
        rf" & & {' & '.join(spans)} \\",
        *([rf" & & {' & '.join(settings)} \\"] if any(setting for _, setting in table.columns) else []),
        rf"method & seeds & {' & '.join(names)} \\",
        r"\hline",
    ]
    for line in table.lines:
        cells = [_latex(cell) for cell in (line.label, seeds_text(line))]
        cells += [_latex(cell) for cell in cells_of(table, line)]
        lines.append(rf"{' & '.join(cells)} \\")
    return "\n".join([*lines, r"\end{tabular}"]) + "\n"


_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "–": "--",
}  # fmt: skip


def _latex(text: str) -> str:
    """Turn Markdown's **bold** and `code` into LaTeX commands, and escape all other characters."""
    parts = re.split("`([^`]*)`", text.removeprefix("**").removesuffix("**"))
    shown = "".join(rf"\texttt{{{_escaped(part)}}}" if i % 2 else _escaped(part) for i, part in enumerate(parts))
    return rf"\textbf{{{shown}}}" if text.startswith("**") else shown


def _escaped(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def to_csv(tables: Iterable[Table]) -> str:
    """Return a line for each method, task and setting, with standard deviations and variances."""
    text = io.StringIO()
    parts = ("", "_standard_deviation", "_variance")
    names = ("dataset", "source", "method", "options", "task", "setting", "order", "preset", "rules", "seeds")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*names, *(figure + part for figure in FIGURES for part in parts)])
    for table in tables:
        for line in table.lines:
            for one in line.groups:
                run = one.first
                about = (run.dataset, "incseg", run.method, options_text(run.options), run.task, run.setting, run.order)
                figures = _numbers({figure: one.figure(figure) for figure in FIGURES})
                writer.writerow([*about, run.preset or "", run.rules["name"], len(one.seeds), *figures])
            if line.published:
                for (task, setting), cell in line.cells.items():
                    start = [table.dataset, "published", line.label, "", task, setting, "", "", ""]
                    writer.writerow([*start, seeds_text(line), *_numbers(cell)])
    return text.getvalue()


def _numbers(cell: Mapping[str, Spread | None]) -> list[str]:
    numbers: list[float | None] = []
    for figure in FIGURES:
        found = cell.get(figure)
        numbers += (found.mean, found.deviation, found.variance) if found else (None,) * 3
    return ["" if number is None else f"{number:.4g}" for number in numbers]
