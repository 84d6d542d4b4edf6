"""`incseg export`: write a trained model as a file that runs without incseg."""

from __future__ import annotations

import argparse
from pathlib import Path

from incseg.cli.main import add_common
from incseg.cli.settings import check_method_options, method_overrides
from incseg.export import TOLERANCE, agreement_line, export_onnx
from incseg.inference import load
from incseg.io import require_file_name
from incseg.types import UserError

HELP = "write a trained model as an ONNX file that runs without incseg: raw pixels in, decision out"
PASS_UNKNOWN = ("--method.",)  # the options of the method are known only when the model is loaded


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser, "model")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the .onnx file to write")
    parser.add_argument("--format", choices=["onnx"], default="onnx", help="default: onnx")
    parser.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help=f"compare graph and model at three sizes, and write the file only if they agree to {TOLERANCE:g} "
        "(default: --check)",
    )
    add_common(parser, "--step", "--method")
    parser.epilog = (
        "The graph takes uint8 RGB (batch, 3, height, width) of any size and gives probabilities, uncertainty, labels "
        "and logits; class names, ids, colours and more are in its metadata: see docs/how-to/predict-and-export.md. "
        "Options of the model's method are given as --method.NAME=VALUE, for example --method.balancing=odds, and "
        "become part of the graph. Needs pip install 'incseg[onnx]'."
    )


def run(args: argparse.Namespace) -> int:
    check_method_options(args)
    if args.out.suffix != ".onnx":
        raise UserError(f"--out is '{args.out}'; give a file name that ends in .onnx")
    require_file_name(args.out)
    predictor = load(args.model, args.step, "cpu", method=args.method)
    if args.unknown:
        name = str(predictor.info["method"]["name"])
        predictor = predictor.with_options(**method_overrides("incseg export", name, args.unknown))
    differences = export_onnx(predictor, args.out, args.check)
    print(f"{args.out}: {len(predictor.classes)} classes, background included, {args.out.stat().st_size / 1e6:.1f} MB")
    if differences:
        print(agreement_line(differences))
    return 0
