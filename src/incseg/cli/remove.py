"""`incseg remove`: write a model without some of its classes, without training or images."""

from __future__ import annotations

import argparse
from pathlib import Path

from incseg.cli.main import add_common
from incseg.engine.rundir import model_file
from incseg.io import require_file_name, require_known
from incseg.models.files import load_segmenter, save_segmenter
from incseg.types import UserError

HELP = "remove classes from a model, without training or images"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser, "model")
    parser.add_argument("--classes", required=True, metavar="NAMES", help='for example "helmet,vest"')
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the .safetensors model to write")
    add_common(parser, "--step")
    parser.epilog = (
        "Without a class that was solved in closed form, the model is as if the class had always been background. Of a "
        "class that was trained by SGD only the output is removed; the features of the network may still represent it."
    )


def run(args: argparse.Namespace) -> int:
    if args.out.suffix != ".safetensors":
        raise UserError(f"--out is '{args.out}'; give a file name that ends in .safetensors")
    require_file_name(args.out)
    file = model_file(Path(args.model).expanduser(), args.step)
    if args.out.exists():
        raise UserError(f"'{args.out}' exists already and would be overwritten; give another --out")
    model, about = load_segmenter(file)
    known = [name for increment in model.increments for name in increment.classes]
    names = [args.classes] if args.classes in known else [n.strip() for n in args.classes.split(",") if n.strip()]
    for name in names:
        require_known("class", name, known)
    if not names or len(set(names)) == len(known):
        raise UserError(f"'{args.classes}' names all classes or none; choose some of {', '.join(known)}")
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
