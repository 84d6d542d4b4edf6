"""`incseg data`: check a whole dataset, or write it in another format."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from incseg.data import build_source
from incseg.data.check import Report, check, grouped, values_line
from incseg.data.convert import FOLDER, FORMATS, TOLERANCE_HELP, convert, require_tolerance
from incseg.data.files import FileSource
from incseg.data.folder import export
from incseg.data.presence import Progress as Callback
from incseg.data.presence import joined
from incseg.data.sheet import contact_sheet, require_own_sheet, save_sheet
from incseg.data.source import SPLITS, Source
from incseg.io import counted, require_file_name
from incseg.types import BACKGROUND, IGNORE, UserError

HELP = "check: read a dataset and list every fault; convert: write it in another format; export: as a folder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["check", "convert", "export"], help="what to do")
    parser.add_argument(
        "--data", required=True, metavar="NAME",
        help="folder, coco, labelme, yolo, cvat, labelstudio, auto (which of them it is), voc, ade20k or shapes",
    )  # fmt: skip
    parser.add_argument("--root", type=Path, metavar="DIR", help="folder of the dataset")
    parser.add_argument("--all", action="store_true", help="check: list every file with a fault, not one line per kind")
    parser.add_argument(
        "--sheet", type=Path, metavar="FILE",
        help="check: where to write the contact sheet, a PNG of some photographs with their masks (default: "
        "NAME-sheet.png, for the dataset's folder NAME); none writes no sheet",
    )  # fmt: skip
    parser.add_argument("--to", choices=FORMATS, help="convert: the format to write")
    parser.add_argument("--out", type=Path, metavar="DIR", help="convert, export: the folder to write")
    parser.add_argument("--split", choices=SPLITS, help="convert, export: train or val (default: both)")
    parser.add_argument(
        "--limit", type=int, metavar="N", help="convert, export: the first N images of a split (default: all)"
    )
    parser.add_argument("--tolerance", type=float, default=0.0, metavar="PIXELS", help=f"convert: {TOLERANCE_HELP}")


def run(args: argparse.Namespace) -> int:
    source = build_source(args.data, root=args.root)
    console = Console(highlight=False)
    for note in source.notes:
        _print(console, note)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(args.action, total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        if args.action != "check":
            return _write(args, source, console, progress)
        sheet = _sheet_file(args)
        report = check(source, progress=progress)
        if not any(pixels.sizes.any() for pixels in report.pixels.values()):
            sheet = None  # no mask could be read, so there is nothing to show
        if sheet is not None:
            _write_sheet(source, report, sheet, args.root)
    _show(console, source, report, sheet, args.all)
    return 0 if report.ok else 1


def _write(args: argparse.Namespace, source: Source, console: Console, progress: Callback) -> int:
    if args.out is None:
        raise UserError(f"{args.action} needs a folder to write; give --out DIR")
    if args.limit is not None and args.limit < 1:
        raise UserError(f"--limit is {args.limit}; give a number of images from 1")
    if args.action == "convert" and args.to is None:
        raise UserError(f"convert needs the format to write; give --to, one of {', '.join(FORMATS)}")
    require_tolerance(args.tolerance)
    splits = [args.split] if args.split else SPLITS
    if args.action == "export":
        to, written = FOLDER, export(source, args.out, splits, args.limit, progress)
    else:
        to, written = args.to, convert(source, args.to, args.out, splits, args.limit, args.tolerance, progress)
    what = "masks" if to == FOLDER else "labels"
    where = f"{counted(written, 'image')} with {what} in {args.out}; use them with --data {to} --root {args.out}"
    _print(console, where)
    return 0


def _show(console: Console, source: Source, report: Report, sheet: Path | None, every: bool) -> None:
    void = source.void if isinstance(source, FileSource) else IGNORE
    _print(console, _table(source, report))
    for split, counts in report.counts.items():
        _print(
            console,
            f"{split}: {counted(counts.images, 'image')}, {len(counts.unlabelled)} with background or void only",
        )
    if report.classes_without_image:
        _print(console, f"no image shows: {', '.join(report.classes_without_image)}")
    _print(console, f"the masks are read as: {values_line(source.info, void)}")
    totals = joined([*report.pixels.values()]).totals
    if totals[IGNORE]:
        _print(console, f"{void}, not annotated, are {_percent(totals[IGNORE] / totals.sum())} of all pixels")
    if sheet is not None:
        _print(console, f"contact sheet: {sheet}")
    for note in report.notes:
        _print(console, f"note: {note}")
    lines = [str(fault) for fault in report.faults] if every else grouped(report.faults)
    for line in [*lines, *report.meaning]:
        _print(console, line)
    if not every and len(lines) < len(report.faults):
        _print(console, "--all lists every file")
    _print(console, "no faults" if report.ok else f"{len(lines) + len(report.meaning)} faults")


def _table(source: Source, report: Report) -> Table:
    """Return a table of the classes: number, images that show it, and share of the labelled pixels of all splits."""
    table = Table(title="images that show each class", title_justify="left")
    table.add_column("number", justify="right")
    table.add_column("class")
    for split in report.counts:
        table.add_column(split, justify="right")
    table.add_column("pixels", justify="right")
    totals = joined([*report.pixels.values()]).totals
    first = BACKGROUND if source.info.has_background else BACKGROUND + 1
    labelled = max(1, int(totals[first:IGNORE].sum()))
    for number, name in enumerate(["background", *source.info.classes]):
        if number >= first:
            images = [str(pixels.images[number]) for pixels in report.pixels.values()]
            table.add_row(str(number), Text(name), *images, _percent(totals[number] / labelled))
    return table


def _percent(share: float) -> str:
    if share == 0:
        return "0 %"
    return f"{100 * share:.1f} %" if share >= 0.001 else "<0.1 %"


def _print(console: Console, what: str | Table) -> None:
    console.print(what, markup=False, soft_wrap=isinstance(what, str))


def _sheet_file(args: argparse.Namespace) -> Path | None:
    """Return the file of the contact sheet; None for none. Refuse an existing file that is not a contact sheet."""
    if args.sheet is not None and str(args.sheet).lower() == "none":
        return None
    file = args.sheet or Path(f"{_folder_name(args.root) or args.data}-sheet.png")
    require_file_name(file)
    require_own_sheet(file)
    return file


def _folder_name(root: Path | None) -> str | None:
    return root.expanduser().resolve().name if root is not None else None


def _write_sheet(source: Source, report: Report, file: Path, root: Path | None) -> None:
    try:
        save_sheet(contact_sheet(source, report.pixels, title=_folder_name(root)), file)
    except OSError as error:
        raise UserError(
            f"the contact sheet {file} cannot be written ({error.strerror or error}); give another file with --sheet "
            "FILE, or --sheet none"
        ) from error
