"""`incseg compare`: print tables of runs in the paper's layout, beside published results."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from incseg.cli.main import add_common
from incseg.config import usual_settings
from incseg.io import write_text
from incseg.report.runs import collected_warnings, print_warning, read_runs, require_some
from incseg.report.tables import ABLATIONS, apart_line, compare, set_apart
from incseg.report.writers import FORMATS, written

HELP = "print a table of finished runs, mean over seeds, beside published results"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser, "runs")
    parser.add_argument("--format", choices=[*FORMATS], default="markdown", help="default: markdown")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write to a file (default: print)")
    parser.add_argument(
        "--published", choices=["true", "false"], default="true", help="with published results (default: true)"
    )
    parser.add_argument(
        "--everything",
        action="store_true",
        help=f"also show runs below a folder {ABLATIONS}/ and tests with other inference options; without it they are "
        "shown only if the run itself is given",
    )
    parser.add_argument(
        "--commands", action="store_true", help="print the commands of all runs, not only of run folders"
    )
    parser.epilog = "incseg eval RUN --method.NAME VALUE --save adds a row with other inference options of RUN."


def run(args: argparse.Namespace) -> int:
    with collected_warnings() as broken:
        records = read_runs(args.runs, usual_settings)
    records, apart = (records, []) if args.everything else set_apart(records, args.runs)
    unfinished = [record.how_far for record in records if not record.finished]
    records = [record for record in records if record.finished]
    note = apart_line(apart)
    require_some(records, [*broken, *unfinished, *([note] if note else [])])
    for line in (*broken, *unfinished):
        print_warning(line)
    if note:
        print(f"note: {note}", file=sys.stderr)
    with collected_warnings(show=True):
        tables = compare(records, args.published == "true", all_commands=args.commands)
    for warning in (warning for table in tables for warning in table.warnings):
        print_warning(warning)
    text = written(args.format, tables, records)
    if args.out is None:
        sys.stdout.write(text)
    else:
        write_text(args.out, text)
    return 1 if broken else 0
