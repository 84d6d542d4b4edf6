"""`incseg report`: write one HTML page of some runs, and its figures as PNG and SVG."""

from __future__ import annotations

import argparse
import logging
import shlex
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import incseg
from incseg.cli.main import add_common
from incseg.config import usual_settings
from incseg.gallery import cached_models, extension_block, report_blocks
from incseg.io import counted, remove_temporary, write_text
from incseg.report.page import (
    FIGURES_FOLDER,
    PageSection,
    increments_section,
    is_extension,
    own_photographs,
    page,
    section_blocks,
    table_sections,
    unfinished_section,
)
from incseg.report.runs import RunRecord, collected_warnings, read_runs, require_some
from incseg.report.sections import sections_of, task_title
from incseg.report.tables import set_apart
from incseg.types import UserError

log = logging.getLogger("incseg")

HELP = "write a page with tables, curves, pictures and uncertainty of some runs, and its figures as PNG and SVG"
IMAGES = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser, "runs")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the page (default: RUN/report)")
    parser.add_argument(
        "--images", type=int, default=IMAGES, metavar="N",
        help=f"test images for the models to predict, evenly chosen; 0 needs no data or models (default: {IMAGES})",
    )  # fmt: skip
    parser.add_argument("--root", metavar="DIR", help="folder of the dataset, if it has moved since training")
    add_common(parser, "--method", "--device", "--threads")
    parser.epilog = f"Writes DIR/index.html, which needs no other file, and DIR/{FIGURES_FOLDER}/*.png and *.svg."


def run(args: argparse.Namespace) -> int:
    if args.images < 0:
        raise UserError(f"--images is {args.images}; give a number of test images, or 0 for none")
    began = time.monotonic()
    with collected_warnings() as left_out:
        found = read_runs(args.runs, usual_settings)
    left_out += [record.how_far for record in found if not record.rows and not record.finished]
    records = [record for record in found if record.rows or record.finished]
    require_some(records, left_out)
    out = _folder(args)
    figures = out / FIGURES_FOLDER
    remove_temporary(out, "index.html")  # of a report that was killed
    remove_temporary(figures, "*.png", "*.svg")
    with collected_warnings(show=True) as warnings:
        for line in left_out:
            log.warning(line)
        sections = _sections(records, figures, args)
    text = page(_title(records), _about(records), warnings, sections, _footer(args, began))
    write_text(out / "index.html", text)
    seconds, megabytes = time.monotonic() - began, len(text.encode()) / 1e6
    count = len(list(figures.glob("*.png")))
    print(f"{out / 'index.html'} ({megabytes:.1f} MB) and {count} figures in {figures}, in {seconds:.0f} s")
    return 0


def _sections(records: Sequence[RunRecord], figures: Path, args: argparse.Namespace) -> list[PageSection]:
    methods, _ = set_apart(records, args.runs)  # ablations would hide the methods among their variants
    sections, extensions = own_photographs(records), [record for record in records if is_extension(record)]
    models = cached_models(args.device, args.threads, args.method)
    if args.images:
        for record in extensions:
            own = next(one for one in sections if one.title == (record.folder.name or str(record.folder)))
            own.blocks.insert(1, extension_block(record, args.root, figures, models))
    records = [record for record in records if record not in extensions]
    methods = [record for record in methods if record not in extensions]
    sections += table_sections(records)
    sections += [one for one in (unfinished_section(records), increments_section(methods, figures)) if one]
    drawn = sections_of(records)
    of_runs = [PageSection(one.title, section_blocks(one, figures)) for one in drawn]
    if args.images:
        compared, across = report_blocks(drawn, args.images, args.root, figures, models)
        for section, blocks in zip(of_runs, compared, strict=True):
            section.blocks += blocks
        of_runs += [PageSection("Task against task", across)] if across else []
    return sections + of_runs


def _folder(args: argparse.Namespace) -> Path:
    if args.out is None and len(args.runs) > 1:
        raise UserError(f"{len(args.runs)} folders were given; set the folder of their page with --out DIR")
    if args.out is None and not Path(args.runs[0]).is_dir():
        raise UserError(f"{args.runs[0]} is a file; set the folder of its page with --out DIR")
    out: Path = args.out or Path(args.runs[0]) / "report"
    if out.exists() and not out.is_dir():
        raise UserError(f"--out '{out}' is a file; choose a folder")
    return out


def _title(records: Sequence[RunRecord]) -> str:
    return "incseg: " + ", ".join(sorted({f"{record.dataset} {task_title(record.task)}" for record in records}))


def _about(records: Sequence[RunRecord]) -> str:
    runs = [record for record in records if record.retest is None]
    methods = ", ".join(f"`{name}`" for name in sorted({record.method for record in runs}))
    seeds = ", ".join(str(seed) for seed in sorted({record.seed for record in runs}))
    return f"{counted(len(runs), 'run')} of {methods}; seed{'s' * (',' in seeds)} {seeds}."


def _footer(args: argparse.Namespace, began: float) -> str:
    words = ["incseg", "report", *(Path(given).name for given in args.runs), "--images", str(args.images)]
    when = datetime.now().strftime("%Y-%m-%d %H:%M")
    return f"Written {when} by incseg {incseg.__version__}: `{shlex.join(words)}`."
