"""`incseg push`: upload a model with a model card to the Hugging Face Hub."""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Any

from incseg import hub
from incseg.cli.main import add_common
from incseg.engine.rundir import model_file
from incseg.io import write_text
from incseg.models.files import load_segmenter, save_segmenter
from incseg.report.card import model_card
from incseg.types import UserError

HELP = "upload a model with a model card to the Hugging Face Hub"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser, "model")
    parser.add_argument("repo", metavar="REPO", help="owner/name; it is created if it does not exist")
    parser.add_argument("--out", type=Path, metavar="DIR", help="upload nothing: write the files to this folder")
    parser.add_argument("--private", action="store_true", help="create a private repository")
    parser.add_argument("--revision", metavar="NAME", help="branch; it is created if it does not exist (default: main)")
    parser.add_argument(
        "--license", default="unknown", metavar="ID", help="of the model, such as apache-2.0 (default: unknown)"
    )
    add_common(parser, "--step")
    parser.epilog = (
        "Uploads model.safetensors and README.md with classes, training and limits, and with the IoU of each class if "
        "the model is in its run folder. Paths in the settings of the model are left out. Needs pip install "
        "'incseg[hub]' and a token: hf auth login, or HF_TOKEN. Use the model as hf://owner/name in place of MODEL."
    )


def run(args: argparse.Namespace) -> int:
    address = push(args.model, args.repo, args.out, args.private, args.revision, args.license, args.step)
    if args.license == "unknown":
        print("note: the card names no licence, so nobody knows what they may do; --license apache-2.0 names one")
    if args.out is not None:
        print(f"{args.out}: the files for {address}; nothing was uploaded")
    else:
        print(f"uploaded; next: incseg predict {address} IMAGE… --out DIR")
    return 0


def push(
    model: str | os.PathLike[str],
    repo: str,
    out: Path | None,
    private: bool,
    revision: str | None,
    licence: str,
    step: int | None,
) -> str:
    """Upload a model with its card, or write both to the folder `out`. Return the address for `incseg.load`."""
    address = f"hf://{repo}" + (f"@{revision}" if revision else "")
    hub.parsed(address)
    file = model_file(Path(model).expanduser(), step)
    network, about = load_segmenter(file)
    if not (network.increments and isinstance(about.get("method"), dict)):
        raise UserError(f"model file '{file}' has learnt no class yet; give the model of a finished step")
    about["method"] = {key: value for key, value in about["method"].items() if not _is_path(value)}
    if _is_path(network.config.weights):
        network.config.weights = None  # they are in the file
    card = model_card(address, file, about, dataclasses.asdict(network.config), network.increments, licence)

    def write(folder: Path) -> None:
        save_segmenter(folder / hub.MODEL_FILE, network, about)
        write_text(folder / hub.CARD_FILE, card)

    if out is None:
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder))
            return hub.upload(Path(folder), repo, private, revision)
    for name in (hub.MODEL_FILE, hub.CARD_FILE):
        if (out / name).exists():
            raise UserError(f"'{out / name}' exists already and would be overwritten; give another --out")
    write(out)
    return address


def _is_path(value: Any) -> bool:
    """Return whether a setting names a file or folder of this machine, which is private."""
    return isinstance(value, str) and Path(value).name != value
