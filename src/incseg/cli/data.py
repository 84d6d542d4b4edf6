"""`incseg data`: check a whole dataset, or export one as a folder of images and masks."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from incseg.data import build_source
from incseg.data.check import Report, check
from incseg.data.export import export
from incseg.data.presence import Progress as Callback
from incseg.data.source import SPLITS, Source
from incseg.types import UserError

HELP = "check: walk a dataset and list every fault; export: write one as a folder of images and masks"
_MOST_FAULTS = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["check", "export"], help="what to do")
    parser.add_argument("--data", required=True, metavar="NAME", help="voc, ade20k, folder or shapes")
    parser.add_argument("--root", type=Path, metavar="DIR", help="folder of the dataset")
    parser.add_argument("--all", action="store_true", help=f"check: list more than the first {_MOST_FAULTS} faults")
    parser.add_argument("--out", type=Path, metavar="DIR", help="export: the folder to write")
    parser.add_argument("--split", choices=SPLITS, help="export: train or val (default: both)")
    parser.add_argument("--limit", type=int, metavar="N", help="export: the first N images of a split (default: all)")


def run(args: argparse.Namespace) -> int:
    source = build_source(args.data, root=args.root)
    console = Console(highlight=False)
    for note in source.notes:
        console.print(note, markup=False, soft_wrap=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(args.action, total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        if args.action == "export":
            return _export(args, source, console, progress)
        report = check(source, progress=progress)
    _show(console, report, None if args.all else _MOST_FAULTS)
    return 0 if report.ok else 1


def _export(args: argparse.Namespace, source: Source, console: Console, progress: Callback) -> int:
    if args.out is None:
        raise UserError("export needs a folder to write; give --out DIR")
    if args.limit is not None and args.limit < 1:
        raise UserError(f"--limit is {args.limit}; give a number of images from 1")
    splits = [args.split] if args.split else SPLITS
    written = export(source, args.out, splits, args.limit, progress)
    where = f"{written} images with masks in {args.out}; use them with --data folder --root {args.out}"
    console.print(where, markup=False, soft_wrap=True)
    return 0


def _show(console: Console, report: Report, most: int | None) -> None:
    table = Table(title="images that show each class", title_justify="left")
    table.add_column("class")
    for split in report.counts:
        table.add_column(split, justify="right")
    for name in next(iter(report.counts.values())).images_per_class:
        table.add_row(Text(name), *(str(counts.images_per_class[name]) for counts in report.counts.values()))
    console.print(table)
    for split, counts in report.counts.items():
        console.print(f"{split}: {counts.images} images, {len(counts.unlabelled)} with background or void only")
    if report.classes_without_image:
        console.print(f"no image shows: {', '.join(report.classes_without_image)}", markup=False, soft_wrap=True)
    for fault in report.faults[:most]:
        console.print(str(fault), markup=False, soft_wrap=True)
    hidden = len(report.faults) - len(report.faults[:most])
    if hidden:
        console.print(f"… and {hidden} more; --all lists them")
    console.print("no faults" if report.ok else f"{len(report.faults)} faults")
