"""`incseg import`: convert a DeepLabv3 checkpoint to a model that incseg can extend."""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path

import incseg
from incseg.data.folder import read_classes
from incseg.data.source import voc_palette
from incseg.engine.trainer import TrainConfig
from incseg.io import counted, require_known
from incseg.methods import METHODS
from incseg.methods.base import CROSS_ENTROPY
from incseg.methods.evidential import Evidential
from incseg.models.files import save_segmenter
from incseg.models.pretrained import evidential_from_softmax, read_deeplab
from incseg.outputs.evidential import deciding_evidence
from incseg.types import UserError

HELP = "convert a DeepLabv3 checkpoint with torchvision's names to a model that can be extended"
# torchvision tests at shorter side 520 and trains on crops of 480; rate and epochs are the paper's for later steps
_SIZE = 520
_TRAIN = TrainConfig(epochs=30, batch_size=8, lr_later=0.001, crop=480, frozen_later="statistics")
_ALLOWED = [name for name, kind in METHODS.items() if kind is Evidential or kind.first_step == CROSS_ENTROPY]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT",
        help="state dict of deeplabv3_resnet50 or 101, .pth or .safetensors",
    )
    parser.add_argument(
        "--classes", required=True, metavar="FILE_OR_LIST",
        help='names in the order of the outputs, without background or with it first: one per line, or "cat,dog"',
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write model.safetensors to")
    parser.add_argument(
        "--size", type=int, default=_SIZE, metavar="N",
        help=f"shorter side of images in prediction; 0 for their own size (default: {_SIZE})",
    )  # fmt: skip
    parser.add_argument(
        "--method", default="evidential", metavar="NAME",
        help="method that will extend the model (default: evidential); softmax methods retain the background output",
    )  # fmt: skip
    parser.epilog = (
        "Evidential models have no background output. Scores are converted to scores relative to background, and all "
        "biases are shifted so that the model decides like the checkpoint."
    )


def run(args: argparse.Namespace) -> int:
    require_known("method for an imported model", args.method, _ALLOWED)
    if args.size < 0:
        raise UserError(f"--size is {args.size}; give the shorter side in pixels, or 0 for images of their own size")
    model = read_deeplab(args.checkpoint, _names(args.classes))
    faithful = "it decides like the checkpoint"
    if args.method == "evidential":
        model = evidential_from_softmax(model, Evidential.Config().rectifier)
        faithful += _where_faithful(model.num_classes)
    about = {
        "incseg": incseg.__version__,
        "method": {"name": args.method},
        "palette": voc_palette()[: model.num_classes + 1].tolist(),
        "test_size": args.size,
        "train": {**dataclasses.asdict(_TRAIN), "crop": min(_TRAIN.crop, args.size or _TRAIN.crop)},
    }
    file = args.out / "model.safetensors"
    try:
        save_segmenter(file, model, about)
    except OSError as error:
        raise UserError(f"cannot write {file} ({error}); choose another --out") from error
    known = [name for increment in model.increments for name in increment.classes]
    print(f"{file}: {model.config.backbone}, {counted(len(known), 'class')}: {', '.join(known)}")
    print(faithful)
    return 0


def _where_faithful(num_classes: int) -> str:
    """Return where an evidential model decides like the checkpoint; see `deciding_evidence`."""
    margin = math.log(deciding_evidence(num_classes) / num_classes)
    if margin == 0:
        return ""
    return (
        f" where that predicts a class, or background by at least {margin:.2f} in log-odds; where background leads by "
        "less and several classes compete, it may predict the strongest of them"
    )


def _names(given: str) -> tuple[str, ...]:
    """Return class names from a file or a list, without background."""
    if Path(given).is_file():
        names = read_classes(given)
    else:
        names = tuple(name.strip() for name in given.split(",") if name.strip())
    if names and names[0].strip("_").lower() == "background":
        names = names[1:]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"--classes names '{twice[0]}' twice; give each class its own name")
    return names
