"""`incseg predict`: masks, uncertainty and overlays of images, from a trained model."""

from __future__ import annotations

import argparse
import glob
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.progress import track

from incseg.cli.settings import method_overrides
from incseg.data.files import FileError
from incseg.data.folder import IMAGE_SUFFIXES
from incseg.files import replacing, write_array, write_json
from incseg.inference import TILE, Predictor, Result, load
from incseg.names import unknown
from incseg.report.draw import overlay, palette_image, uncertainty_image
from incseg.types import UserError

HELP = "segment images with a trained model: masks, uncertainty, overlays"
PASS_UNKNOWN = ("--method.",)  # the method's own options are known only when the model is

_LONGEST_STEM = 180
"""In bytes: names of files have at most 255, and ours get longer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="run folder, a folder of its steps/, or a .safetensors model")
    parser.add_argument("images", metavar="IMAGE", nargs="+", help="image files, folders of images, or patterns")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the results go")
    parser.add_argument("--step", type=int, metavar="K", help="which step of the run (default: the last)")
    parser.add_argument(
        "--size", type=int, metavar="N", help="shorter side the network sees; 0 as it is (default: as in testing)"
    )
    parser.add_argument(
        "--tile", type=int, default=TILE, metavar="N", help=f"predict larger images in tiles (default: {TILE})"
    )
    parser.add_argument(
        "--method", metavar="NAME", help="of a model trained by your own package.module:Class: its name"
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:N or auto (default: auto)")
    parser.add_argument("--threads", type=int, help="of torch (default: its own choice)")
    parser.add_argument("--probabilities", action="store_true", help="also NAME_probabilities.npy, float16 (C+1, H, W)")
    parser.epilog = (
        "Writes NAME_mask.png (indexed, the dataset's class ids), NAME_uncertainty.png (viridis, index = 255 u) and "
        "NAME_overlay.png for each image, and predictions.json with the classes and what came of which file. "
        "Options of the model's method are given as --method.NAME=VALUE, such as --method.balancing=odds."
    )


def run(args: argparse.Namespace) -> int:
    _check_unknown(args)
    files = find_images(args.images, args.out)
    predictor = load(args.model, args.step, args.device, args.threads, args.method)
    if args.unknown:
        name = str(predictor.info["method"]["name"])
        predictor = predictor.with_options(**method_overrides("incseg predict", name, args.unknown))
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    done, skipped = [], []
    for file, stem in _with_progress(list(zip(files, distinct_stems(files), strict=True))):
        try:
            result = predictor.predict(file, args.size, args.tile, args.probabilities)
        except FileError as error:
            skipped.append({"file": _readable(file), "error": _one_line(error)})
        except (MemoryError, torch.OutOfMemoryError):
            fault = f"{file}: out of memory; give a smaller --tile or --size, or leave out --probabilities"
            skipped.append({"file": _readable(file), "error": _one_line(fault)})
        else:
            save(result, args.out, stem, predictor.palette_by_id)
            done.append({"file": _readable(file), "name": _readable(stem), "classes": _present(result)})
            continue
        print(f"skipped: {skipped[-1]['error']}", file=sys.stderr)
    write_json(args.out / "predictions.json", {**_about(predictor), "images": done, "skipped": skipped})
    seconds = time.monotonic() - began
    rate = f" ({len(done) / seconds:.1f} img/s)" if done else ""
    left_out = f"; {len(skipped)} skipped" if skipped else ""
    print(f"{len(done)} image{'s' * (len(done) != 1)} in {seconds:.1f} s{rate}, in {args.out}{left_out}")
    return 1 if skipped else 0


def save(result: Result, folder: Path, stem: str, palette_by_id: np.ndarray) -> None:
    """Write the files of one image."""
    _save_png(palette_image(result.ids, palette_by_id), folder / f"{stem}_mask.png")
    _save_png(uncertainty_image(result.uncertainty), folder / f"{stem}_uncertainty.png")
    drawn = overlay(result.image, result.labels, result.palette, result.classes)
    _save_png(drawn, folder / f"{stem}_overlay.png")
    if result.probabilities is not None:
        write_array(folder / f"{stem}_probabilities.npy", result.probabilities.astype(np.float16))


def find_images(given: Iterable[str], out: Path) -> list[Path]:
    """The files that paths, folders and patterns stand for, in that order, each once."""
    files: dict[Path, None] = {}
    for item in given:
        files |= dict.fromkeys(_expanded(item))
    # Results must neither replace an image nor be taken for one the next time.
    if inside := [file for file in files if file.resolve().parent == out.resolve()]:
        raise UserError(f"the image '{inside[0]}' lies in the folder for the results; choose another --out")
    if out.exists() and not out.is_dir():
        raise UserError(f"--out '{out}' is a file; choose a folder")
    return list(files)


def _expanded(item: str) -> list[Path]:
    path = Path(item)
    if path.is_dir():
        return _images_among(path.iterdir(), f"the folder '{item}'")
    if path.exists():
        return [path]
    if glob.has_magic(item):
        return _images_among(map(Path, glob.glob(item, recursive=True)), f"the pattern '{item}'")
    raise UserError(f"no image '{item}'; give files, folders or patterns, right behind the model")


def _images_among(paths: Iterable[Path], where: str) -> list[Path]:
    files = sorted(p for p in paths if p.suffix.lower() in IMAGE_SUFFIXES and p.name[0] != "." and p.is_file())
    if not files:
        raise UserError(f"{where} holds no image; known are {', '.join(IMAGE_SUFFIXES)}")
    return files


def distinct_stems(files: Sequence[Path]) -> list[str]:
    """A name for the results of each file: its stem, numbered where another file has it, in upper or lower case."""
    stems: list[str] = []
    taken: set[str] = set()
    for file in files:
        stem = name = os.fsdecode(os.fsencode(file.stem)[:_LONGEST_STEM])
        number = 2
        while name.casefold() in taken:
            name, number = f"{stem}_{number}", number + 1
        taken.add(name.casefold())
        stems.append(name)
    return stems


def _check_unknown(args: argparse.Namespace) -> None:
    """Refuse what is no option of a method, before the model is loaded."""
    tokens = iter(args.unknown)
    for token in tokens:
        if token.startswith("--method."):
            # argparse has taken the value for MODEL or IMAGE where it stood before them.
            if "=" not in token and next(tokens, "--").startswith("--"):
                raise UserError(f"{token} has no value; write {token}=VALUE")
        elif token.startswith("-"):
            flags = [f"--{name}" for name in vars(args) if name not in ("model", "images", "unknown")]
            raise UserError(unknown("option", token.split("=")[0], [*flags, "--method.NAME"]))
        else:
            raise UserError(f"unexpected '{token}'; put all images right behind the model")


def _with_progress(items: Sequence[tuple[Path, str]]) -> Iterator[tuple[Path, str]]:
    console = Console(stderr=True)
    yield from track(items, "predicting", console=console, transient=True, disable=not console.is_terminal)


def _about(predictor: Predictor) -> dict[str, Any]:
    rows = zip(predictor.ids, predictor.classes, predictor.palette.tolist(), strict=True)
    return {
        "model": _readable(predictor.info["file"]),
        "step": predictor.info["step"],
        "method": predictor.info["method"],
        "classes": [{"id": id_, "name": name, "colour": colour} for id_, name, colour in rows],
    }


def _present(result: Result) -> dict[str, float]:
    """The share of each class that the image shows."""
    counts = np.bincount(result.labels.ravel(), minlength=len(result.classes)) / result.labels.size
    return {name: round(float(share), 6) for name, share in zip(result.classes, counts, strict=True) if share > 0}


def _save_png(image: Image.Image, path: Path) -> None:
    with replacing(path) as temporary:
        image.save(temporary, format="PNG")


def _readable(name: str | os.PathLike[str]) -> str:
    """A file name as text that any file can hold, also where its bytes are not UTF-8."""
    return os.fsencode(name).decode("utf-8", "replace")


def _one_line(message: object) -> str:
    return _readable(str(message)).replace("\n", "\\n")
