"""Measure speed and memory on this machine, as ratios, each against its target: `python -m tools.bench`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from incseg.io import require_file_name, require_known
from incseg.types import UserError
from tools.bench import BENCHES
from tools.bench.measure import Settings
from tools.bench.page import save_sections


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmarks that the arguments name; return the exit code."""
    args = _parser().parse_args(argv)
    try:
        return _run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench",
        description="Measure speed and memory on this machine against their targets.",
        epilog="Needs a quiet machine: the load is printed under every table. Tables of benchmarks that are not named "
        "stay in OUT.md as they were.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(BENCHES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it works")
    parser.add_argument("--threads", type=int, default=1, help="of torch, in each process (default: 1)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds (default: 5)")
    parser.add_argument("--root", help="a VOC2012 folder for cache (default: drawn scenes)")
    parser.add_argument(
        "--out",
        type=Path,
        help="for OUT.md, OUT.json and plots (default: results/bench, with --quick runs/bench-quick)",
    )
    return parser


def _run(args: argparse.Namespace) -> int:
    for name in args.names:
        require_known("bench", name, tuple(BENCHES))
    for flag in ("threads", "repeats"):
        if getattr(args, flag) < 1:
            raise UserError(f"--{flag} is {getattr(args, flag)}; give a number from 1")
    out = args.out or Path("runs/bench-quick" if args.quick else "results/bench")
    if not out.name:
        raise UserError(f"--out is '{out}'; give the name that its files begin with, such as results/bench")
    for ending in (".json", ".md"):  # now, not when the first benchmark has been measured
        require_file_name(out.with_name(out.name + ending))
    settings = Settings(args.quick, args.threads, args.repeats, args.root)
    console = Console(highlight=False, markup=False)
    for name in args.names or BENCHES:
        console.print(f"{name} …")
        sections = BENCHES[name](settings)
        save_sections(out, name, sections, settings, tuple(BENCHES))
        for section in sections:
            for aim in section.aims:
                result = f"{aim.what}: {aim.measured.text()}, {aim.kind} {aim.limit:.3g}"
                console.print(f"  {'met    ' if aim.met else 'NOT MET'}  {section.title}: {result}", soft_wrap=True)
            for note in section.notes:
                if "not installed" in note:
                    console.print(f"  {note}", soft_wrap=True)
    console.print(f"written: {out}.md, {out}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
