"""`incseg predict`: masks, uncertainty and overlays of images, or labels to correct, from a trained model."""

from __future__ import annotations

import argparse
import contextlib
import glob
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from incseg.cli.main import add_common, is_out_of_memory
from incseg.cli.settings import check_method_options, method_overrides
from incseg.data.convert import TOLERANCE_HELP, WRITERS, require_tolerance
from incseg.data.files import FileError, image_size
from incseg.data.folder import unreadable_note
from incseg.data.source import voc_palette
from incseg.data.writing import require_new
from incseg.export import with_onnx
from incseg.inference import ONNX_SUFFIX, TILE, Predictor, Result, distinct_name, images_among, load, open_image
from incseg.io import counted, read_json, write_json
from incseg.types import UserError

HELP = "segment images with a trained model: masks, uncertainty, overlays"
PASS_UNKNOWN = ("--method.",)  # the method's own options are known only when the model is

_AHEAD = 2
"""Images that are read before the network asks for them, and results that wait to be written: they bound the memory."""
_LARGE = 32_000_000
"""Pixels of an image from which on one at a time is in memory."""
_PRE_ANNOTATIONS = ("coco", "labelme", "yolo")
_PREDICTED = "predicted"
"""Key of the file that holds predicted labels until images are ranked."""
_FAST = 1
"""Compression of these files."""
RESULTS = "predictions.json"
"""The list of what a folder has: model, classes, and the images in order."""
_Made = TypeVar("_Made")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="run folder, one of its steps/, a .safetensors or an .onnx file")
    parser.add_argument("images", metavar="IMAGE", nargs="+", help="image files, folders of images, or patterns")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the results go")
    parser.add_argument("--step", type=int, metavar="K", help="which step of the run (default: the last)")
    parser.add_argument(
        "--size", type=int, metavar="N", help="shorter side the network sees; 0 as it is (default: as in testing)"
    )
    parser.add_argument(
        "--tile", type=int, default=TILE, metavar="N", help=f"predict larger images in tiles (default: {TILE})"
    )
    add_common(parser, "--flip", "--scales")
    parser.add_argument(
        "--method", metavar="NAME", help="of a model trained by your own package.module:Class: its name"
    )
    parser.add_argument(
        "--backend",
        choices=["torch", "onnx"],
        help="runs the network (default: torch, but onnx for .onnx files)",
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:N, mps or auto (default: auto)")
    parser.add_argument("--threads", type=int, help="of torch (default: its own choice)")
    parser.add_argument("--probabilities", action="store_true", help="also NAME_probabilities.npy, float16 (C+1, H, W)")
    parser.add_argument(
        "--format", choices=["png", *_PRE_ANNOTATIONS], default="png",
        help="png, or the labels of a labelling tool, to be corrected there: images with labels in a new folder, the "
        "most uncertain first (default: png)",
    )  # fmt: skip
    parser.add_argument(
        "--top", type=int, metavar="N", help="with --format coco, labelme or yolo: only the N most uncertain images"
    )
    parser.add_argument("--tolerance", type=float, default=0.0, metavar="PIXELS", help=f"with these: {TOLERANCE_HELP}")
    parser.epilog = (
        "Writes NAME_mask.png (indexed, the dataset's class ids), NAME_uncertainty.png (viridis, index = 255 u) and "
        "NAME_overlay.png for each image, and predictions.json with the classes and what came of which file. "
        "Options of the model's method are given as --method.NAME=VALUE, such as --method.balancing=odds."
    )


def run(args: argparse.Namespace) -> int:
    check_method_options(args)
    files = find_images(args.images, args.out)
    as_labels = _labels_wanted(args)
    predictor = _predictor(args)
    about = _about(predictor)
    earlier = [] if as_labels else _earlier(args.out, about, files)
    names = _names(files, earlier)
    if not (as_labels or (args.out / RESULTS).exists()):
        _require_free(args.out, names)
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    earlier = [one for one in earlier if one["file"] not in set(map(_readable, files))]
    if not as_labels:
        write_json(args.out / RESULTS, {**about, "images": earlier, "skipped": []})  # marks the folder as ours
    with _place_of_results(args, as_labels) as place:
        is_background = not predictor.method.background_output
        write = partial(_save_labels if as_labels else _write, is_background=is_background)
        outcomes = _predict_all(predictor, dict(zip(files, names, strict=True)), args, write, place)
        done = [outcome for outcome in outcomes if "error" not in outcome]
        skipped = [outcome for outcome in outcomes if "error" in outcome]
        if as_labels:
            of_file = zip(files, outcomes, strict=True)
            done = _write_labels(predictor, [pair for pair in of_file if "error" not in pair[1]], args)
    write_json(args.out / RESULTS, {**about, "images": [*earlier, *done], "skipped": skipped})
    seconds = time.monotonic() - began
    rate = f" ({len(done) / seconds:.1f} img/s)" if done else ""
    left_out = f"; {len(skipped)} skipped" if skipped else ""
    print(f"{counted(len(done), 'image')} in {seconds:.1f} s{rate}, in {args.out}{left_out}")
    return 1 if skipped else 0


def _predictor(args: argparse.Namespace) -> Predictor:
    is_onnx = Path(args.model).suffix == ONNX_SUFFIX
    if is_onnx and args.backend == "torch":
        raise UserError(f"'{args.model}' is an ONNX file, which --backend torch cannot run; leave --backend out")
    converted = args.backend == "onnx" and not is_onnx
    predictor = load(args.model, args.step, "cpu" if converted else args.device, args.threads, args.method)
    if args.unknown:
        name = str(predictor.info["method"]["name"])
        predictor = predictor.with_options(**method_overrides("incseg predict", name, args.unknown))
    predictor = predictor.averaging(args.flip, args.scales)
    return with_onnx(predictor, args.threads) if converted else predictor


def _earlier(out: Path, about: dict[str, Any], files: Sequence[Path]) -> list[dict[str, Any]]:
    """Return what an earlier call wrote to this folder. Refuse results of another model that would remain there."""
    try:
        found = read_json(out / RESULTS)
        images = [one for one in found["images"] if isinstance(one["file"], str) and isinstance(one["name"], str)]
    except (UserError, OSError, KeyError, TypeError):
        return []  # nothing there, or nothing that can be read
    remaining = {one["file"] for one in images} - set(map(_readable, files))
    if remaining and any(found.get(key) != value for key, value in about.items()):
        others = counted(len(remaining), "other image")
        raise UserError(
            f"--out '{out}' has predictions of {others} by another model or with other options; choose another --out"
        )
    return images


def _names(files: Sequence[Path], earlier: Sequence[dict[str, Any]]) -> list[str]:
    """Return a distinct name for the results of each file: that of an earlier call, if there was one."""
    known = {one["file"]: one["name"] for one in earlier}
    taken = {name.casefold() for name in known.values()}
    return [known.get(_readable(file)) or distinct_name(file.stem, taken) for file in files]


def _require_free(out: Path, names: Iterable[str]) -> None:
    """Refuse to overwrite files in a folder that `incseg predict` did not write."""
    for name in names:
        for file in (out / f"{name}_{kind}" for kind in ("mask.png", "uncertainty.png", "overlay.png")):
            if file.exists():
                raise UserError(f"'{file}' exists and is not of incseg predict; choose another --out")


def _labels_wanted(args: argparse.Namespace) -> bool:
    """Return whether labels to be corrected are asked for; options that do not fit are refused."""
    if args.format == "png":
        if args.top is not None or args.tolerance:
            name = "--top" if args.top is not None else "--tolerance"
            raise UserError(f"{name} is for labels to be corrected; add --format, {', '.join(_PRE_ANNOTATIONS)}")
        return False
    if args.probabilities:
        raise UserError("--probabilities are written with --format png alone; leave one of them out")
    if args.top is not None and args.top < 1:
        raise UserError(f"--top is {args.top}; give a number of images from 1")
    require_tolerance(args.tolerance)
    require_new(args.out)
    return True


@contextlib.contextmanager
def _place_of_results(args: argparse.Namespace, as_labels: bool) -> Iterator[Path]:
    """Yield the folder that results are written to; labels are in a temporary one until all images are ranked."""
    if not as_labels:
        yield args.out
        return
    with tempfile.TemporaryDirectory(prefix=".incseg-", dir=args.out.parent) as folder:
        yield Path(folder)


def _save_labels(result: Result, folder: Path, name: str, is_background: bool) -> dict[str, Any]:
    file = folder / f"{name}.png"
    Image.fromarray(result.labels).save(file, compress_level=_FAST)
    return {**_summary(result, name, is_background), _PREDICTED: file}


def _summary(result: Result, name: str, is_background: bool) -> dict[str, Any]:
    uncertain = image_uncertainty(result.uncertainty, is_background)
    return {"name": _readable(name), "classes": result.shares, "uncertainty": uncertain}


def image_uncertainty(uncertainty: np.ndarray, is_background: bool) -> float:
    """Return how uncertain a prediction is as a whole, from 0 to 1: the mean over its pixels.

    is_background: the uncertainty of a pixel is its probability of background, which is sure of itself near 0 and
                   near 1. Else an image without any object would rank first.
    """
    pixels = 1 - np.abs(2 * uncertainty - 1) if is_background else uncertainty
    return round(float(pixels.mean(dtype=np.float64)), 6)


def _write_labels(
    predictor: Predictor, done: list[tuple[Path, dict[str, Any]]], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Write images with their labels, the most uncertain first, and return what was written in that order."""
    done.sort(key=lambda one: -one[1]["uncertainty"])
    palette = voc_palette()
    palette[: len(predictor.palette)] = predictor.palette
    written = []
    with WRITERS[args.format](args.out, predictor.classes[1:], palette, args.tolerance) as writer:
        for file, outcome in done[: args.top]:
            with Image.open(outcome.pop(_PREDICTED)) as labels:
                writer.add(outcome["name"], file, np.asarray(labels))
            written.append(outcome)
    return written


def _predict_all(
    predictor: Predictor, named: Mapping[Path, str], args: argparse.Namespace,
    write: Callable[[Result, Path, str], dict[str, Any]], place: Path,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return the outcome of each file, in their order. The network computes here, while other threads read and write:
    Pillow releases Python's lock while it decodes and encodes.

    named: the files with the names of their results.
    """
    files, names = list(named), list(named.values())
    outcomes: list[dict[str, Any]] = [{"file": _readable(file)} for file in files]
    writing: deque[tuple[int, Future[dict[str, Any]]]] = deque()
    ahead = 0 if any(map(_is_large, files)) else _AHEAD
    # Probabilities are too big to wait in memory for their turn.
    most_waiting = 0 if args.probabilities else ahead

    def finish(index: int, future: Future[dict[str, Any]]) -> None:
        with _faults_of(files[index], outcomes[index]):
            outcomes[index] |= future.result()

    with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(2) as writers, _progress(len(files)) as advance:
        for index, image in enumerate(_ahead(reader, open_image, files, ahead)):
            with _faults_of(files[index], outcomes[index]):
                result = predictor.predict(image.result(), args.size, args.tile, args.probabilities)
                del image
                writing.append((index, writers.submit(write, result, place, names[index])))
                del result
            while len(writing) > most_waiting:
                finish(*writing.popleft())
            advance()
        while writing:
            finish(*writing.popleft())
    return outcomes


def _is_large(file: Path) -> bool:
    with contextlib.suppress(FileError):  # reading it gives the error
        width, height = image_size(file)
        return width * height > _LARGE
    return False


def _ahead(
    pool: Executor, function: Callable[[Any], _Made], items: Iterable[Any], number: int
) -> Iterator[Future[_Made]]:
    """`function` of every item, in order, begun while up to `number` others wait."""
    begun: deque[Future[_Made]] = deque()
    for item in items:
        begun.append(pool.submit(function, item))
        if len(begun) > number:
            yield begun.popleft()
    while begun:
        yield begun.popleft()


@contextlib.contextmanager
def _faults_of(file: Path, outcome: dict[str, Any]) -> Iterator[None]:
    """Notes why an image is skipped instead of stopping the others."""
    try:
        yield
        return
    except FileError as error:
        fault = f"{file}: {error.fault}; {error.remedy}"
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not is_out_of_memory(error):
            raise
        fault = f"{file}: out of memory; give a smaller --tile or --size, or leave out --probabilities"
    outcome["error"] = _one_line(fault)
    print(f"skipped: {outcome['error']}", file=sys.stderr)


def _write(result: Result, folder: Path, name: str, is_background: bool) -> dict[str, Any]:
    result.name = name
    result.save(folder)
    return _summary(result, name, is_background)


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
        if note := unreadable_note(path.iterdir()):
            print(f"warning: {path}: {note}", file=sys.stderr)
        return images_among(path.iterdir(), f"the folder '{item}'")
    if path.exists():
        return [path]
    if glob.has_magic(item):
        return images_among(map(Path, glob.glob(item, recursive=True)), f"the pattern '{item}'")
    raise UserError(f"no image '{item}'; give files, folders or patterns, right behind the model")


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar with images per second and the time left, on a terminal; gives what advances it."""
    console = Console(stderr=True)
    columns = (TextColumn("predicting"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    began = time.monotonic()
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=total, rate="")

        def advance() -> None:
            done = bar.tasks[0].completed + 1
            bar.update(task, advance=1, rate=f"{done / (time.monotonic() - began):.1f} img/s")

        yield advance


def _about(predictor: Predictor) -> dict[str, Any]:
    rows = zip(predictor.ids, predictor.classes, predictor.palette.tolist(), strict=True)
    return {
        "model": _readable(predictor.info["file"]),
        "step": predictor.info["step"],
        "method": predictor.info["method"],
        "views": {"flip": predictor.flip, "scales": list(predictor.scales)},
        "classes": [{"id": id_, "name": name, "colour": colour} for id_, name, colour in rows],
    }


def _readable(name: str | os.PathLike[str]) -> str:
    """A file name as text that any file can hold, also where its bytes are not UTF-8."""
    return os.fsencode(name).decode("utf-8", "replace")


def _one_line(message: object) -> str:
    return _readable(str(message)).replace("\n", "\\n")
