"""`incseg remove`: a model without some of its classes, in a moment and without any image."""

from __future__ import annotations

import argparse
from pathlib import Path

from incseg.engine.rundir import model_file
from incseg.io import require_file_name, require_known
from incseg.models.files import load_segmenter, save_segmenter
from incseg.types import UserError

HELP = "forget classes of a model: nothing is trained, no image is needed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="run folder, a folder of its steps/, or a .safetensors model")
    parser.add_argument("--classes", required=True, metavar="NAMES", help='such as "helmet,vest"')
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the .safetensors model to write")
    parser.add_argument("--step", type=int, metavar="K", help="which step of the run (default: the last)")
    parser.epilog = (
        "A class that was solved in closed form is gone as if it had always been background. Of a class that was "
        "trained the output is dropped; the network may still know it in its features."
    )


def run(args: argparse.Namespace) -> int:
    if args.out.suffix != ".safetensors":
        raise UserError(f"--out is '{args.out}'; give a file name that ends in .safetensors")
    require_file_name(args.out)
    file = model_file(Path(args.model).expanduser(), args.step)
    if args.out.exists():
        raise UserError(f"'{args.out}' is there already and would be overwritten; give another --out")
    model, about = load_segmenter(file)
    known = [name for increment in model.increments for name in increment.classes]
    names = [args.classes] if args.classes in known else [n.strip() for n in args.classes.split(",") if n.strip()]
    for name in names:
        require_known("class", name, known)
    if not names or len(set(names)) == len(known):
        raise UserError(f"'{args.classes}' leaves no class or names none; choose some of {', '.join(known)}")
    touched: list[str] = []
    for name in dict.fromkeys(names):
        touched += model.solved_against(name)
        label = model.remove(name)
        if label < len(about.get("palette", [])):
            del about["palette"][label]
    save_segmenter(args.out, model, about)
    left = [name for increment in model.increments for name in increment.classes]
    print(f"{args.out} knows {len(left)} classes: {', '.join(left)}")
    if near := [name for name in left if name in touched]:
        gone = ", ".join(dict.fromkeys(names))
        print(f"where {gone} was found, {', '.join(near)} may change a little; all else stays as it is")
    print(f"next: incseg predict {args.out} IMAGE… --out DIR")
    return 0
