"""`incseg cache`: list or delete the caches on disk."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from incseg.data.features import StoredCache, clear, stored_caches
from incseg.io import cache_path, cache_root, no_folder, unknown
from incseg.types import UserError

HELP = "list: features and other caches on disk; clear: delete some of them; they are made again when needed"
_OTHERS = {
    "contents": ("digests of datasets", ("*",)),
    "pixels": ("pixels of each class in each image", ("*.npy",)),
    "presence": ("lists of the classes in each image", ("*.txt",)),
    "steps": (
        "trained steps for --reuse",
        ("*/step.json", "*/model.safetensors", "*/state.safetensors", "*/kept.json"),
    ),
}
"""Caches other than features: their content, and patterns of their files. The first pattern has one file per entry."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=["list", "clear"], default="list", help="default: list")
    parser.add_argument("names", nargs="*", metavar="NAME", help="clear: a name from the list, or a prefix of several")
    parser.add_argument("--all", action="store_true", help="clear: everything")
    parser.epilog = (
        "Clearing the features of a run that trains does not disturb it; the disk space is free when the run ends. "
        "Features that a run is computing are not cleared. INCSEG_CACHE sets the folder of all caches."
    )


def run(args: argparse.Namespace) -> int:
    if obstacle := no_folder(cache_root()):
        raise UserError(
            f"the folder of caches is '{cache_root()}', but {obstacle} is not a folder; set INCSEG_CACHE to another"
        )
    features = list(stored_caches(cache_path("features")))
    others = {name: files for name in _OTHERS if (files := _files(name))}
    if args.action == "list":
        if args.names or args.all:
            raise UserError("incseg cache list shows all caches; names and --all belong to incseg cache clear")
        return _print(_listed(features, others))
    if bool(args.names) == args.all:
        raise UserError("incseg cache clear needs either names, as incseg cache lists them, or --all")
    names = [*(cache.folder.name for cache in features), *others]
    chosen = set(names) if args.all else {name for begin in args.names for name in _beginning_with(begin, names)}
    for kind in ("features", *_OTHERS):
        if cache_path(kind).is_symlink():
            raise UserError(f"{cache_path(kind)} is a link to another folder; delete that by hand")
    freed = clear([cache for cache in features if cache.folder.name in chosen])
    for name in chosen & others.keys():
        freed += _size(others[name])
        _delete(others[name], cache_path(name))
    return _print([f"cleared {', '.join(sorted(chosen)) or 'nothing, there is none'}: {_gigabytes(freed)} GB"])


def _beginning_with(begin: str, names: list[str]) -> list[str]:
    found = [name for name in names if begin and name.startswith(begin)]
    if not found:
        raise UserError(unknown("cache", begin, names or ["none, there is nothing to clear"]))
    return found


def _files(name: str) -> list[Path]:
    root = cache_path(name)
    found = [file for pattern in _OTHERS[name][1] for file in sorted(root.glob(pattern))]
    return [file for file in found if not file.parent.is_symlink() or file.parent == root]


def _delete(files: Sequence[Path], root: Path) -> None:
    for file in files:
        file.unlink(missing_ok=True)
    for folder in {file.parent for file in files} - {root}:
        if not any(folder.iterdir()):
            folder.rmdir()


def _listed(features: list[StoredCache], others: dict[str, list[Path]]) -> list[str]:
    lines = [line for cache in features for line in _describe(cache)]
    for name, files in others.items():
        what, patterns = _OTHERS[name]
        count, last = sum(file.match(patterns[0]) for file in files), max(file.stat().st_mtime for file in files)
        lines += [name, f"  {count} {what}, {_gigabytes(_size(files))} GB, last made {_date(last)}"]
    total = sum(cache.bytes for cache in features) + sum(_size(files) for files in others.values())
    return [*lines, f"{_gigabytes(total)} GB in {cache_root()}; INCSEG_CACHE sets another folder"]


def _describe(cache: StoredCache) -> list[str]:
    about, usage = cache.about, f"{_gigabytes(cache.bytes)} GB, last used {_date(cache.last_used)}"
    try:
        maps = " + ".join("×".join(map(str, stage)) for stage in about["stages"])
        details = [
            f"  {about['dataset']} {about['split']}, {cache.images_done} of {about['images']} images, {usage}",
            f"  {about['backbone']} at {about['size']} pixels, of each image {maps}{' twice' * about['flips']}",
        ]
    except (KeyError, TypeError, ValueError):
        details = [f"  {usage}; its about.json is damaged"]
    return [cache.folder.name, *details]


def _size(files: Sequence[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.3f}"


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _print(lines: list[str]) -> int:
    Console(highlight=False).print("\n".join(lines), markup=False, soft_wrap=True)
    return 0
