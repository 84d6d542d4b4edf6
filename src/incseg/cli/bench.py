"""`incseg bench`: speed and memory on this machine, as ratios, each against its aim."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from incseg.files import require_file_name
from incseg.names import require_known
from incseg.types import UserError

HELP = "measure speed and memory on this machine against what they should be"
NAMES = ("loss", "step", "data", "metrics", "cache", "growth", "ddp")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(NAMES)}; all where none is named")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it works")
    parser.add_argument("--threads", type=int, default=1, help="of torch, in each process; default 1")
    parser.add_argument("--repeats", type=int, default=5, help="rounds; default 5")
    parser.add_argument("--root", help="a VOC2012 folder for cache, which takes drawn scenes without one")
    parser.add_argument(
        "--out",
        type=Path,
        help="for OUT.md, OUT.json and plots; default results/bench, with --quick runs/bench-quick",
    )
    parser.epilog = (
        "Needs a quiet machine: the load is printed under every table. Benches that are not named keep their tables in "
        "OUT.md from an earlier call."
    )


def run(args: argparse.Namespace) -> int:
    from incseg.bench import BENCHES  # it loads matplotlib and the whole engine, which other commands need not wait for
    from incseg.bench.measure import Settings
    from incseg.bench.page import keep

    for name in args.names:
        require_known("bench", name, NAMES)
    for flag in ("threads", "repeats"):
        if getattr(args, flag) < 1:
            raise UserError(f"--{flag} is {getattr(args, flag)}; give a number from 1")
    out = args.out or Path("runs/bench-quick" if args.quick else "results/bench")
    if not out.name:
        raise UserError(f"--out is '{out}'; give the name that its files begin with, such as results/bench")
    for ending in (".json", ".md"):  # told now, not when the first bench has been measured
        require_file_name(out.with_name(out.name + ending))
    settings = Settings(args.quick, args.threads, args.repeats, args.root)
    console = Console(highlight=False, markup=False)
    for name in args.names or NAMES:
        console.print(f"{name} …")
        sections = BENCHES[name](settings)
        keep(out, name, sections, settings, NAMES)
        for section in sections:
            for aim in section.aims:
                said = f"{aim.what}: {aim.measured.text()}, {aim.kind} {aim.limit:.3g}"
                console.print(f"  {'met    ' if aim.met else 'NOT MET'}  {section.title}: {said}", soft_wrap=True)
            for note in section.notes:
                if "not installed" in note:
                    console.print(f"  {note}", soft_wrap=True)
    console.print(f"written: {out}.md, {out}.json")
    return 0
