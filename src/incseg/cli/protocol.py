"""`incseg protocol`: print the steps of a task with their classes and image counts, and the label rules."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from incseg.data import OWN, build_source, dataset_info
from incseg.data.presence import Presence, presence_of, read_presence
from incseg.data.source import Source, Split
from incseg.protocol import ORDERS, RULES, SETTINGS, Protocol
from incseg.types import DatasetInfo

HELP = "show the steps of a task: classes, image counts, label rules"

# All names of a step of VOC are shown, but those of a base step of ADE20k would fill the screen.
_MOST_NAMES = 20
_NAMES_WHEN_SHORTENED = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", required=True, metavar="NAME", help="a dataset of incseg list")
    parser.add_argument("--root", type=Path, metavar="DIR", help="folder of the dataset")
    parser.add_argument(
        "--task", required=True, help="for example 15-1 or joint, or groups of class names: cat,dog/bird"
    )
    parser.add_argument("--setting", default="overlapped", help=f"{', '.join(SETTINGS)} (default: overlapped)")
    parser.add_argument("--rules", default="plop", help=f"label rules: {', '.join(RULES)} (default: plop)")
    parser.add_argument("--order", default="a", help=f"class order of ade20k: {', '.join(ORDERS)} (default: a)")
    parser.add_argument(
        "--presence",
        type=Path,
        metavar="FILE",
        help="file with the classes of each training image, one line 'name id id …' each, instead of reading masks",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with every class name")


def run(args: argparse.Namespace) -> int:
    notes: tuple[str, ...] = ()
    if args.presence is not None and args.root is None and args.data not in OWN:
        info = dataset_info(args.data)
        protocol = _protocol(info, args)
        train, test = read_presence(args.presence, len(info.classes)), None
    else:
        source = build_source(args.data, root=args.root)
        protocol = _protocol(source.info, args)
        train = _presence(source, "train", args.presence)
        test = _presence(source, "val") if source.names("val") else None
        notes = tuple(source.notes)
    summary = protocol.as_dict(train.classes, test.classes if test else None)
    if args.json:
        print(json.dumps(summary, indent=2, ensure_ascii=False))
    else:
        _show(protocol, summary, train, notes)
    return 0


def _protocol(info: DatasetInfo, args: argparse.Namespace) -> Protocol:
    return Protocol(info, args.task, args.setting, args.rules, args.order)


def _presence(source: Source, split: Split, file: Path | None = None) -> Presence:
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        reading = bar.add_task(f"reading the {split} masks", total=None)
        return presence_of(
            source, split, file, progress=lambda done, total: bar.update(reading, completed=done, total=total)
        )


def _show(protocol: Protocol, summary: dict[str, Any], train: Presence, notes: Sequence[str]) -> None:
    with_test = "test_images" in summary["steps"][0]
    order = f", order {protocol.order}" if protocol.dataset.name == "ade20k" else ""
    table = Table(
        title=Text(f"{protocol.dataset.name} {protocol.task}, {protocol.setting}{order}"),
        title_justify="left",
    )
    for heading in ("step", "classes"):
        table.add_column(heading, justify="right")
    table.add_column("names", overflow="fold")
    table.add_column("ids", overflow="fold")
    for heading in ("train\nimages", "test\nimages")[: 1 + with_test]:
        table.add_column(heading, justify="right")
    for step in summary["steps"]:
        counts = [step["train_images"], step["test_images"]] if with_test else [step["train_images"]]
        table.add_row(
            str(step["index"]),
            str(len(step["ids"])),
            Text(_shortened(step["classes"])),
            _ranges(step["ids"]),
            *map(str, counts),
        )
    console = Console()
    console.print(table)
    for line in (f"training images in the dataset: {len(train.names)}", *notes, *protocol.describe_rules()):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _shortened(names: Sequence[str]) -> str:
    if len(names) <= _MOST_NAMES:
        return ", ".join(names)
    shown = ", ".join(names[:_NAMES_WHEN_SHORTENED])
    return f"{shown} and {len(names) - _NAMES_WHEN_SHORTENED} more"


def _ranges(ids: Sequence[int]) -> str:
    """Return 1, 2, 3, 7 as "1-3 7"."""
    runs = []
    for _, run_ in groupby(enumerate(ids), key=lambda pair: pair[1] - pair[0]):
        members = [i for _, i in run_]
        runs.append(f"{members[0]}-{members[-1]}" if len(members) > 1 else str(members[0]))
    return " ".join(runs)
