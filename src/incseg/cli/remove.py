"""`incseg remove`: write a model without some of its classes, without training or images."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from incseg.cli.main import add_common
from incseg.engine.rundir import model_file
from incseg.io import counted, require_file_name, require_known
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
    left, gone, near = remove(args.model, args.classes, args.out, args.step)
    print(f"{args.out} knows {counted(len(left), 'class')}: {', '.join(left)}")
    if near:
        print(f"where {', '.join(gone)} was found, {', '.join(near)} may change a little; all else stays as it is")
    print(f"next: incseg predict {args.out} IMAGE… --out DIR")
    return 0


def remove(
    path: str | os.PathLike[str], classes: str | Sequence[str], out: Path, step: int | None = None
) -> tuple[list[str], list[str], list[str]]:
    """Write a model without some of its classes; a text may name several, with commas.

    Return the names of the other classes, of the removed ones, and of the others that may change a little.
    """
    if out.suffix != ".safetensors":
        raise UserError(f"--out is '{out}'; give a file name that ends in .safetensors")
    require_file_name(out)
    file = model_file(Path(path).expanduser(), step)
    if out.exists():
        raise UserError(f"'{out}' exists already and would be overwritten; give another --out")
    model, about = load_segmenter(file)
    known = [name for increment in model.increments for name in increment.classes]
    if isinstance(classes, str):
        classes = [classes] if classes in known else [n.strip() for n in classes.split(",") if n.strip()]
    for name in classes:
        require_known("class", name, known)
    if not classes or len(set(classes)) == len(known):
        raise UserError(f"'{', '.join(classes)}' names all classes or none; choose some of {', '.join(known)}")
    touched: list[str] = []
    for name in dict.fromkeys(classes):
        touched += model.solved_against(name)
        label = model.remove(name)
        if label < len(about.get("palette", [])):
            del about["palette"][label]
    save_segmenter(out, model, about)
    left = [name for increment in model.increments for name in increment.classes]
    return left, list(dict.fromkeys(classes)), [name for name in left if name in touched]
