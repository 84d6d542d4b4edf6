"""Own data: folders of images and index masks, and a list of class names. `export` writes any source in this form."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from PIL import Image

from incseg.data.files import (
    FileError,
    FileSource,
    PairFiles,
    PathLike,
    list_file,
    overlap_note,
    text_lines,
    without_duplicates,
)
from incseg.data.presence import Progress
from incseg.data.source import SPLITS, Source, Split
from incseg.io import counted, first_few, replacing, write_text
from incseg.types import IGNORE, MAX_CLASSES, DatasetInfo, UserError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp")
UNREADABLE_SUFFIXES = (".heic", ".heif", ".avif", ".gif", ".jfif", ".jp2", ".dng", ".cr2", ".nef", ".arw")
"""Image formats that are not read: such files are reported."""
VAL_SHARE = 5
"""Without lists, one image in this many is for testing."""


class Folder(FileSource):
    """root/images, root/masks (a PNG of the same name each), root/classes.txt.

    classes.txt has one name per line, id 1 first; a first line "background" is id 0. The lists root/train.txt and
    root/val.txt have image names, with or without suffix. If one of them is missing, its split gets all images that
    the other does not list. Without both, a hash of the name chooses one image in five for testing, so the split of an
    image does not change when others are added.

    void: the value that means "not annotated" in the masks.
    """

    preset = "laptop"
    own = True

    def __init__(self, root: PathLike, classes_file: PathLike | None = None, void: int = IGNORE) -> None:
        self.root = require_folder(root)
        names_file = classes_file or self.root / "classes.txt"
        classes = read_classes(names_file)
        self.background_named = names_background(names_file)
        self.info = DatasetInfo("folder", classes, has_background=True)
        self.void = _checked_void(void, len(classes))
        self.notes: list[str] = []
        images = _by_stem(self.root / "images", IMAGE_SUFFIXES)
        masks = _by_stem(self.root / "masks", (".png",))
        if note := unreadable_note((self.root / "images").iterdir()):
            self.notes.append(f"folder: {note}")
        if unused := masks.keys() - images.keys():
            self.notes.append(f"folder: {len(unused)} masks without an image are left out ('{min(unused)}' …)")
        splits, notes = chosen_splits(self.root, "folder", images, lambda file: _listed(file, images))
        self.notes += notes
        self.val_given = (self.root / "val.txt").is_file()
        self._files = {split: self._pairs(split, names, images, masks) for split, names in splits.items()}
        self.notes += overlap_note("folder", self.names("train"), self.names("val"))

    def files(self, split: Split) -> PairFiles:
        return self._files[split]

    def _pairs(self, split: Split, names: list[str], images: dict[str, Path], masks: dict[str, Path]) -> PairFiles:
        if without := [name for name in names if name not in masks]:  # reading one of them is an error
            self.notes.append(
                f"folder: {len(without)} of {len(names)} {split} images have no mask ({first_three(without)}); "
                f"add masks/NAME.png for each, or leave them out of {split}.txt"
            )
        expected = (masks.get(name, self.root / "masks" / f"{name}.png") for name in names)
        return PairFiles(tuple(names), tuple(images[name] for name in names), tuple(expected))


def require_folder(root: PathLike) -> Path:
    """Return the folder of a dataset. Raise a UserError if it does not exist."""
    folder = Path(root).expanduser()
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise UserError(f"the dataset folder '{root}' {problem}; give its folder with --root DIR")
    return folder


def chosen_splits(
    root: Path, kind: str, names: Iterable[str], listed: Callable[[Path], list[str] | None]
) -> tuple[dict[Split, list[str]], list[str]]:
    """Return the images of each split, by the lists train.txt and val.txt or by a hash of the names, and notes on it.

    listed: function that returns the images in such a list, or None for a list that does not count.
    """
    images, notes = list(names), []
    train, val = (listed(file) if file.is_file() else None for file in (root / "train.txt", root / "val.txt"))
    if train is None and val is None:
        train, val = hash_split(images)
        notes.append(
            f"{kind}: no train.txt or val.txt divides the images, so a hash of their names chose "
            f"{counted(len(train), 'image')} for training and {len(val)} for testing"
        )
    elif train is None or val is None:
        missing = "train" if train is None else "val"
        given = set(train or val or ())
        rest = [name for name in images if name not in given]
        notes.append(f"{kind}: no {missing}.txt, so {missing} is the {counted(len(rest), 'image')} left over")
        train, val = (rest, val) if train is None else (train, rest)
    if not train:
        raise UserError(f"'{root}' has no image left for training; correct train.txt and val.txt")
    return {"train": train, "val": val or []}, notes


def read_classes(path: PathLike) -> tuple[str, ...]:
    """Return the class names of a file, id 1 first; a first line "background" is id 0 and left out."""
    names = [line.strip() for line in text_lines(path)]
    while names and not names[-1]:
        names.pop()
    if "" in names:
        raise FileError(
            path, f"line {names.index('') + 1} is blank", "delete it: the line number of a name is its class id"
        )
    if names and names[0].lower() == "background":
        names = names[1:]
    if "background" in (name.lower() for name in names):
        raise FileError(path, "'background' is not on the first line", "move it there or delete it: its id is 0")
    if not 1 <= len(names) <= MAX_CLASSES:
        raise FileError(path, f"it has {len(names)} classes", f"name 1 to {MAX_CLASSES}, one per line")
    return tuple(without_duplicates(names, path))


def names_background(path: PathLike) -> bool:
    """Return whether the file states that 0 is background, by a first line "background"."""
    return [line.strip().lower() for line in text_lines(path)[:1]] == ["background"]


def unreadable_note(files: Iterable[Path]) -> str:
    """Return a note if some of the files are photographs in a format that cannot be read, else an empty string."""
    left_out = sorted(file.name for file in files if file.suffix.lower() in UNREADABLE_SUFFIXES)
    if not left_out:
        return ""
    some = f"{len(left_out)} file{'s' * (len(left_out) != 1)}"
    return f"{some} left out ({first_three(left_out)}): convert to JPEG or PNG; known are {', '.join(IMAGE_SUFFIXES)}"


def hash_split(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return (train, val) in sorted order: a name is in val if its hash is divisible by `VAL_SHARE`."""
    hashes = {name: int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") for name in sorted(names)}
    val = {name for name, value in hashes.items() if value % VAL_SHARE == 0}
    by_hash = sorted(hashes, key=hashes.__getitem__)
    # All hashes of a few images can fall on one side. Of two or more images, each side gets at least one.
    if not val and len(by_hash) > 1:
        val = {by_hash[0]}
    elif len(val) == len(by_hash):
        val.remove(by_hash[-1])
    return [name for name in hashes if name not in val], sorted(val)


def _checked_void(void: int, num_classes: int) -> int:
    if not num_classes < void <= IGNORE:
        raise UserError(
            f"void={void} is not free: 0 to {num_classes} are classes; give the masks' void value, "
            f"{num_classes + 1} to {IGNORE}"
        )
    return void


def _by_stem(folder: Path, suffixes: tuple[str, ...]) -> dict[str, Path]:
    """Return the files with one of the suffixes by name without it, sorted; names compare in Unicode's form C."""
    if not folder.is_dir():
        raise UserError(f"no folder '{folder}'; a dataset needs images/, masks/ and classes.txt")
    files: dict[str, Path] = {}
    for file in sorted(folder.iterdir()):
        if file.name.startswith(".") or file.suffix.lower() not in suffixes:
            continue
        stem = unicodedata.normalize("NFC", file.stem)
        if stem in files:
            raise UserError(
                f"'{files[stem].name}' and '{file.name}' in '{folder}' share the name '{stem}'; rename or remove one"
            )
        if not stem.isprintable():
            raise UserError(f"the name {file.name!r} in '{folder}' has unprintable characters; rename the file")
        files[stem] = file
    if not files:
        raise UserError(f"'{folder}' has no files of type {', '.join(suffixes)}; put them directly into it")
    return dict(sorted(files.items()))


def _listed(path: Path, images: dict[str, Path]) -> list[str]:
    names = []
    for line in list_file(path):
        name = unicodedata.normalize("NFC", line)
        if "/" in name or "\\" in name:
            raise FileError(path, f"'{name}' is a path", "list the names of files in images/ alone")
        stem, dot, suffix = name.rpartition(".")
        names.append(stem if name not in images and f"{dot}{suffix}".lower() in IMAGE_SUFFIXES else name)
    if unknown := [name for name in names if name not in images]:
        raise FileError(
            path,
            f"{len(unknown)} of {len(names)} names have no image ({first_three(unknown)})",
            "add the files to images/ or delete the lines",
        )
    return without_duplicates(names, path)


def first_three(names: Sequence[str]) -> str:
    """Return "'a', 'b', 'c', …"."""
    return first_few(f"'{name}'" for name in names)


def export(
    source: Source,
    out: Path,
    splits: Sequence[Split] = SPLITS,
    limit: int | None = None,
    progress: Progress | None = None,
) -> int:
    """Write the first `limit` pairs of each split to `out`, and return the number written."""
    _require_elsewhere(source, out)
    chosen = [(split, i) for split in splits for i in range(len(source.names(split)))[:limit]]
    palette = source.palette.flatten().tolist()
    flat: dict[str, str] = {}
    taken: set[str] = set()
    for done, (split, index) in enumerate(chosen, start=1):
        image, mask = source.pair(split, index)
        own = source.names(split)[index]
        if own not in flat:
            flat[own] = flat_name(own, taken)
        name = f"{flat[own]}.png"
        index_mask = Image.fromarray(mask)
        index_mask.putpalette(palette)
        for folder, picture in (("images", image), ("masks", index_mask)):
            with replacing(out / folder / name) as temporary:
                picture.save(temporary, format="PNG")
        if progress is not None:
            progress(done, len(chosen))
    for split in splits:
        names = [flat[source.names(s)[i]] for s, i in chosen if s == split]
        write_text(out / f"{split}.txt", "".join(f"{name}\n" for name in names))
    lines = ("background", *source.info.classes) if source.info.has_background else source.info.classes
    write_text(out / "classes.txt", "".join(f"{name}\n" for name in lines))
    return len(chosen)


def flat_name(name: str, taken: set[str]) -> str:
    """Return a unique file name for a name that may be a path, and add it to `taken`."""
    flat = found = "".join(c if c.isprintable() and c not in "/\\" else "_" for c in name)
    number = 2
    while found.casefold() in taken:
        found, number = f"{flat}_{number}", number + 1
    taken.add(found.casefold())
    return found


def _require_elsewhere(source: Source, out: Path) -> None:
    """Refuse a folder that the dataset is read from: its images and masks would be replaced."""
    if not isinstance(source, FileSource):
        return
    files = [file for split in SPLITS for file in (*source.files(split).images, *source.files(split).masks)]
    read_from = {folder.resolve() for folder in {file.parent for file in files}}
    for folder in (out / "images", out / "masks"):
        if folder.resolve() in read_from:
            raise UserError(
                f"the dataset is read from '{folder}', and the export would replace it; choose another --out"
            )
