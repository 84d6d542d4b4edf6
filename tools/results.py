"""A study as pages: results/NAME/main, ablations, unknown and classes, each as .md and .json, and the paper's table,
ours beside the published, as results/NAME/paper.md, .tex, .csv and .json.

    python tools/results.py [runs/voc-laptop] [--out results/voc-laptop]

Of every finished run under RUNS a small file is kept in results/NAME/runs, and the pages are made from all that were
ever kept there: run folders may be gone, or lie on another machine. Runs under ablations/ are held against the run of
the same task, setting, method and seed elsewhere. No model is loaded and nothing is trained; the same files give the
same pages.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from incseg.config import usual_settings
from incseg.files import write_json, write_text
from incseg.report.compare import compare
from incseg.report.kept import keep_runs
from incseg.report.pages import ablations_page, classes_page, main_page, unknown_page
from incseg.report.records import read_runs, shown_path
from incseg.report.writers import FORMATS, written
from incseg.types import UserError

PHOTOGRAPHS = (
    "`replay web`: photographs of old classes that the other methods do not have. They are no crawl of the web but "
    "images of the dataset itself, which the step of their class was trained on and later steps may not use, taken "
    "without their masks (tools/web_images.py): kinder than the published RECALL's."
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("runs", type=Path, nargs="?", default=Path("runs/voc-laptop"))
    parser.add_argument("--out", type=Path, help="default: results/ and the name of the folder of runs")
    args = parser.parse_args(argv)
    out: Path = args.out or Path("results") / args.runs.resolve().name
    kept = out / "runs"
    if not args.runs.is_dir() and not kept.is_dir():
        return fail(f"{args.runs} is no folder of runs; train some first (incseg train … --out {args.runs}/NAME)")
    said: dict[str, None] = {}

    def warn(line: str) -> None:
        if line not in said:
            print(f"warning: {line}", file=sys.stderr)
        said[line] = None

    try:
        if args.runs.is_dir():
            here = read_runs([args.runs], usual_settings, warn)
            for record in here:
                if not record.finished:
                    warn(record.how_far)
            print(f"kept {len(keep_runs(here, args.runs, kept, warn))} finished runs of {args.runs} in {kept}")
        records = read_runs([kept], usual_settings, warn) if kept.is_dir() else []
    except UserError as error:
        return fail(str(error))
    if not records:
        return fail(f"{args.runs} holds no finished run yet")
    apart = kept / "ablations"
    ablations = [record for record in records if apart in record.folder.parents]
    study = [record for record in records if apart not in record.folder.parents]
    trained = [record for record in study if record.retest is None]
    made_by = f"python tools/results.py {shown_path(args.runs)}"
    notes = [PHOTOGRAPHS] if any("replay" in record.options for record in trained) else []
    pages = [main_page(trained, made_by, warn, notes)]
    pages += [page(trained, made_by, warn) for page in (unknown_page, classes_page)]
    pages.append(ablations_page(study, ablations, made_by, warn))
    for page in pages:
        write_text(out / f"{page.name}.md", page.text)
        write_json(out / f"{page.name}.json", page.data)
        print(f"wrote {out / page.name}.md and .json")
    tables = compare(trained, published=True, warn=warn)
    for table in tables:
        table.notes += notes
    for kind, ending in FORMATS.items():
        write_text(out / f"paper{ending}", written(kind, tables, trained))
    print(f"wrote {out / 'paper'} as {', '.join(FORMATS.values())}")
    return 0


def fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
