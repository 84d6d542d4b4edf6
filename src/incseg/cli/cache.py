"""`incseg cache`: what is kept on disk to save work, and how to be rid of it."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rich.console import Console

from incseg.data.features import StoredCache, clear, stored_caches
from incseg.data.presence import cache_path
from incseg.names import unknown
from incseg.types import UserError

HELP = "list: features and presence lists kept on disk; clear: delete some of them; both are made again when needed"
_PRESENCE = "presence"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=["list", "clear"], default="list", help="default: list")
    parser.add_argument("names", nargs="*", metavar="NAME", help="clear: a folder, or how the names of several begin")
    parser.add_argument("--all", action="store_true", help="clear: everything")
    parser.epilog = (
        "A run under way does not need what it has read already: clearing does not disturb it, and the disk is free "
        "when it ends. A cache that a run is making is not cleared. INCSEG_CACHE names the folder all of them lie in."
    )


def run(args: argparse.Namespace) -> int:
    features = list(stored_caches(cache_path("features")))
    presence = sorted(cache_path(_PRESENCE).glob("*.txt"))
    console = Console(highlight=False)
    if args.action == "list":
        if args.names or args.all:
            raise UserError("list shows all there is; names and --all belong to incseg cache clear")
        _show(console, features, presence)
        return 0
    if bool(args.names) == args.all:
        raise UserError("say what to clear: names, as incseg cache lists them, or --all")
    names = [*(cache.folder.name for cache in features), *([_PRESENCE] if presence else [])]
    chosen = set(names) if args.all else {name for begin in args.names for name in _beginning_with(begin, names)}
    freed = clear([cache for cache in features if cache.folder.name in chosen])
    if _PRESENCE in chosen:
        freed += _size(presence)
        for file in presence:
            file.unlink(missing_ok=True)
    shown = ", ".join(sorted(chosen)) or "nothing, there is none"
    console.print(f"cleared {shown}: {_gigabytes(freed)} GB", markup=False, soft_wrap=True)
    return 0


def _beginning_with(begin: str, names: list[str]) -> list[str]:
    found = [name for name in names if begin and name.startswith(begin)]
    if not found:
        raise UserError(unknown("cache", begin, names or ["none, there is nothing to clear"]))
    return found


def _show(console: Console, features: list[StoredCache], presence: list[Path]) -> None:
    lines = [line for cache in features for line in _describe(cache)]
    if presence:
        last = _date(max(file.stat().st_mtime for file in presence))
        lines += [_PRESENCE, f"  {len(presence)} files, {_gigabytes(_size(presence))} GB, last made {last}"]
    total = _gigabytes(sum(cache.bytes for cache in features) + _size(presence))
    lines.append(f"{total} GB in {cache_path('features').parent}; INCSEG_CACHE names another place")
    console.print("\n".join(lines), markup=False, soft_wrap=True)


def _describe(cache: StoredCache) -> list[str]:
    about, kept = cache.about, f"{_gigabytes(cache.bytes)} GB, last used {_date(cache.last_used)}"
    try:
        maps = " + ".join("×".join(map(str, stage)) for stage in about["stages"])
        details = [
            f"  {about['dataset']} {about['split']}, {cache.images_done} of {about['images']} images, {kept}",
            f"  {about['backbone']} at {about['size']} pixels, of each image {maps}{' twice' * about['flips']}",
        ]
    except (KeyError, TypeError, ValueError):
        details = [f"  {kept}; its about.json is damaged"]
    return [cache.folder.name, *details]


def _size(files: list[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.3f}"


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
