"""Check a dataset: open every pair, list all faults, and detect masks whose values follow another rule than ours.

Masks are read by one rule: 0 is background, i is the i-th name of classes.txt, 255 is not annotated. Masks made by
another rule can be read without any error, but then every name is wrong. Three signs reveal them:

Only 0 and 255. Many tools write a binary mask as black and white. 255 is not a class here, so no class is shown.

Numbered from 0. The first name of classes.txt is 0, not 1, so no mask has the number of the last name. But a correct
dataset may also lack its last class. The value 0 makes the difference. A background is in nearly every photograph and
often its largest area; a first class is usually neither. If the first name is that of an area, such as the sky, a
background must be the largest area of nearly all photographs. There are three cases:
  - fault: all other classes are shown, the last is not, and 0 does not look like a background. A few photographs are
    not enough for this, unless the last name means void. It is the same fault if the last number is used for void:
    this number is then in nearly every photograph, never the largest area, and nothing else is void.
  - fault: the first name means background or void ("_background_"), and no mask has the last number.
  - note: all other classes are shown, the last is not, and 0 looks like a background.
Nothing is reported if masks show only some of the classes, with 0 elsewhere.

If the first line of classes.txt is "background", 0 is background, and nothing is guessed.

Nothing shown. Every pixel is background: there is nothing to learn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image

from incseg.data.extended import Extended, folded
from incseg.data.files import BOXES, COLOURS, MISSING, SIZES, UNNAMED, UNREADABLE, VALUES, FileError, as_file_error
from incseg.data.folder import Folder, first_three
from incseg.data.presence import PixelCounts, Progress, as_seen_by, histogram, in_threads, joined, pixel_counts, store
from incseg.data.source import SPLITS, Source, Split
from incseg.io import counted, first_few
from incseg.types import BACKGROUND, IGNORE, DatasetInfo, UserError

_MOST_VALUES = 8


def grouped(faults: Sequence[FileError]) -> list[str]:
    """Return one line per kind of fault, with the number of files and the first three; a single fault is unchanged."""
    kinds: dict[str, list[FileError]] = {}
    for number, fault in enumerate(faults):
        kinds.setdefault(fault.kind or f"{number}", []).append(fault)
    return [str(alike[0]) if len(alike) == 1 else _line(kind, alike) for kind, alike in kinds.items()]


def _line(kind: str, faults: Sequence[FileError]) -> str:
    number, files = len(faults), _some_files(faults)
    if kind == COLOURS:
        what = f"{number} masks hold colours instead of class numbers, {_some_found(faults)} ({files})"
    elif kind == UNNAMED:
        what = f"{number} masks hold {_some_found(faults)}, which the list does not name ({files})"
    elif kind == VALUES:
        allowed = faults[0].fault.partition(", but ")[2]
        what = f"{number} masks hold {_some_found(faults)}, but {allowed} ({files})"
    elif kind == SIZES:
        what = f"{number} photographs differ in size from their masks ({files})"
    elif kind == BOXES:
        what = f"{number} files hold boxes instead of polygons ({files})"
    else:
        what = {
            MISSING: f"{number} files are missing ({files})",
            UNREADABLE: f"{number} files cannot be read as images ({files})",
        }[kind]
    remedy = {
        COLOURS: "save each mask as a single-channel or palette PNG whose pixels are class numbers",
        UNNAMED: faults[0].remedy,
        BOXES: faults[0].remedy,
        VALUES: faults[0].remedy,
        SIZES: "export both at one size",
        MISSING: "restore them, or take their names off the list",
        UNREADABLE: "export or copy them again",
    }[kind]
    return f"{what}; {remedy}"


def _some_files(faults: Sequence[FileError]) -> str:
    return first_few(fault.file if fault.kind == SIZES else "/".join(Path(fault.file).parts[-2:]) for fault in faults)


def _some_found(faults: Sequence[FileError]) -> str:
    """Return the values or colours that the faults report: values in ascending order, colours most frequent first."""
    files: dict[int | str, int] = {}
    for fault in faults:
        for one in fault.found:
            files[one] = files.get(one, 0) + 1
    numbers = sorted(one for one in files if isinstance(one, int))
    found: Sequence[int | str] = numbers or sorted(files, key=lambda one: -files[one])
    shown = ", ".join(str(one) for one in found[:_MOST_VALUES])
    if len(found) <= _MOST_VALUES:
        return shown
    return f"{shown}, … {found[-1]}" if numbers else f"{shown}, …"


_BACKGROUND_NAMES = {"background", "bg", "none", "nothing"}
_VOID_NAMES = {
    "void", "unlabelled", "unlabeled", "ignore", "ignored", "ignorelabel", "notannotated", "unannotated", "dontcare",
}  # fmt: skip
_AREAS = {
    "sky", "road", "street", "wall", "walls", "building", "buildings", "floor", "ground", "grass", "water", "sea",
    "land", "terrain", "soil", "tree", "trees", "vegetation", "impervioussurface", "impervioussurfaces",
}  # fmt: skip
"""First classes of datasets in which every pixel is labelled: Cityscapes, ADE20k, CamVid, Potsdam, NYU."""
_FEWEST_IMAGES, _FEWEST_CLASSES = 4, 3
"""With fewer images or classes, a class that is not shown proves nothing."""
_MISSING_SHARE = 10
"""One class in this many may be missing; the others then still count as shown."""
_USUAL, _LARGEST, _LARGEST_BESIDE_AREAS = 0.75, 0.25, 0.9
"""A background is in at least the first share of the photographs, and the largest area of the second share of them. If
the first class is an area such as the road, which is often the largest too, the third share replaces the second."""
_VOID_IMAGES, _VOID_LARGEST, _VOID_PIXELS = 0.95, 0.02, 0.1
"""Void is in at least this share of the photographs, the largest area of at most this share,
and at most this share of all pixels."""


@dataclass(frozen=True)
class Meaning:
    """Result of `check_meaning`: whether the mask values follow our rule.

    faults: one line each, with the remedy; a dataset with faults should not be trained on.
    notes:  one line each, for the user to judge.
    pixels: the pixels of each value in each mask, by split.
    """

    faults: list[str]
    notes: list[str]
    pixels: dict[Split, PixelCounts]

    def require_sound(self) -> None:
        if self.faults:
            more = f" (and {len(self.faults) - 1} more faults)" if len(self.faults) > 1 else ""
            raise UserError(f"{self.faults[0]}{more}; incseg data check shows what the masks mean")


def check_meaning(source: Source, progress: Progress | None = None) -> Meaning:
    """Read all masks, or the cache of an earlier reading, and check what their values mean.

    A mask that cannot be read does not raise; it is among the faults, and many of a kind are one line.
    """
    original = source
    while isinstance(original, Extended):
        original = original.inner
    pixels, unreadable = pixel_counts(original, progress)
    faults, notes = judge(original, joined([*pixels.values()]))
    return Meaning([*grouped(unreadable), *faults], notes, as_seen_by(source, pixels))


def judge(source: Source, pixels: PixelCounts) -> tuple[list[str], list[str]]:
    """Return (faults, notes) of the mask values. Only masks of a user's folder can be numbered by another rule."""
    if isinstance(source, Folder):
        return meaning_of(pixels, source.info.classes, source.background_named, source.void)
    if source.own and pixels.sizes.any() and not (pixels.images[1 : len(source.info.classes) + 1] > 0).any():
        return [f"no image shows any of the classes {first_few(source.info.classes, 8)}; label some objects"], []
    return [], []


def meaning_of(
    pixels: PixelCounts, classes: Sequence[str], background_named: bool = False, void: int = IGNORE
) -> tuple[list[str], list[str]]:
    """Return (faults, notes) of masks with these pixels, see the top of this module.

    background_named: classes.txt states that 0 is background.
    void:             the value in the mask files that `pixels` count as 255.
    """
    sizes = pixels.sizes
    if 2 * (sizes > 0).sum() <= len(sizes):
        return [], []  # most masks cannot be read, and the others prove little
    shown = pixels.images > 0
    if not shown[1 : len(classes) + 1].any():
        return [_nothing_shown(shown, classes, void)], []
    if background_named or not shown[BACKGROUND]:
        return [], []
    return _numbering(pixels, classes, void)


def _nothing_shown(shown: np.ndarray, classes: Sequence[str], void: int) -> str:
    numbers = f"1 ('{classes[0]}')" if len(classes) == 1 else f"its number, 1 to {len(classes)},"
    if not shown[IGNORE]:
        return f"every mask is 0, background, all over, so no class is shown; write {numbers} where a class is"
    held = f"only 0 and {void}" if shown[BACKGROUND] else f"only {void}"
    if len(classes) == 1:
        remedy = f"if {void} is '{classes[0]}' in these masks, write 1 instead of {void}"
    else:
        remedy = f"write {numbers} instead of {void} where a class is; one mask shows all classes of its photograph"
    return f"the masks hold {held}, and {void} means 'not annotated' here, so no class is shown; {remedy}"


def _numbering(pixels: PixelCounts, classes: Sequence[str], void: int) -> tuple[list[str], list[str]]:
    number, shown = len(classes), pixels.images > 0
    first, last = classes[0], classes[-1]
    is_background = "if 0 is background, write 'background' as a new first line of classes.txt"
    shift = f"add 1 to every value except {void}"
    never = f"no mask holds {number} ('{last}')"
    if not shown[number] and folded(first) in _BACKGROUND_NAMES | _VOID_NAMES:
        fault = (
            f"classes.txt begins with '{first}', which is number 1 here, and {never}, so the masks look numbered from "
            f"0; if 0 is '{first}' in these masks, write 'background' instead, which stands for 0"
        )
        if folded(first) in _VOID_NAMES:
            fault += f", and {void} in the masks where 0 is not annotated"
        return [fault], []
    missing = int((~shown[1:number]).sum())
    others_shown = number > 1 and missing <= (number - 1) // _MISSING_SHARE
    looks = _unlike_background(pixels, first) if number >= _FEWEST_CLASSES and others_shown else None
    enough = int((pixels.sizes > 0).sum()) >= _FEWEST_IMAGES
    if not shown[number] and others_shown:
        what = f"the masks hold 0 to {number - 1} and {never}"
        void_named = folded(last) in _VOID_NAMES
        if looks is not None and (enough or void_named):
            remedy = f"write {void} for '{last}', delete its line and {shift}" if void_named else shift
            why = f"so they look numbered from 0, and every name would be shifted: {looks}"
            return [f"{what}, {why}; {remedy}, or {is_background}"], []
        return [], [f"{what}; look at the contact sheet, and if 0 is '{first}', {shift}"]
    if shown[number] and others_shown and enough and not shown[IGNORE] and _last_looks_void(pixels, number):
        small = f"{number} ('{last}') is in nearly every photograph but never much of it"
        remedy = f"write {void} instead of {number} and {shift}"
        if looks is None:
            return [], [f"{small}; look at the contact sheet, and if {number} is void and 0 is '{first}', {remedy}"]
        why = f"with {number} for void, and every name would be shifted: {looks}, and {small}"
        return [f"the masks look numbered from 0, {why}; {remedy}, or {is_background}"], []
    if shown[number] and folded(last) in _VOID_NAMES:
        return [], [f"'{last}' is class {number} and would be learnt like the others; write {void} for void"]
    return [], []


def _unlike_background(pixels: PixelCounts, first: str) -> str | None:
    """Return why 0 does not look like a background but like the first class; None where it looks like a background."""
    zero, largest, measured = _areas(pixels, BACKGROUND)
    usual, most = (zero > 0)[measured].mean(), ((zero > 0) & (zero >= largest))[measured].mean()
    is_area = folded(first) in _AREAS
    if usual >= _USUAL and most >= (_LARGEST_BESIDE_AREAS if is_area else _LARGEST):
        return None
    alike = f"like '{first}' rather than" if is_area else "unlike"
    return (
        f"0 is in {_percent(usual)} of the photographs and the largest area of {_percent(most)}, {alike} a background"
    )


def _last_looks_void(pixels: PixelCounts, number: int) -> bool:
    last, largest, measured = _areas(pixels, number)
    return bool(
        (last > 0)[measured].mean() >= _VOID_IMAGES
        and (last >= largest)[measured].mean() <= _VOID_LARGEST
        and last.sum() <= _VOID_PIXELS * pixels.sizes.sum()
    )


def _areas(pixels: PixelCounts, value: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return, per image, the pixels of a value, those of the most frequent other, and whether any is annotated."""
    rows = pixels.rows[(pixels.rows[:, 1] != value) & (pixels.rows[:, 1] != IGNORE)]
    largest = np.zeros(len(pixels.names), dtype=np.int64)
    np.maximum.at(largest, rows[:, 0], rows[:, 2].astype(np.int64))
    own = pixels.of(value)
    return own, largest, own + largest > 0


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def values_line(info: DatasetInfo, void: int = IGNORE, most: int = 8) -> str:
    """Return the meaning of mask values: 0 = background, 1 = skin, …, 255 = not annotated."""
    names = [f"{number} = {name}" for number, name in enumerate(info.classes, start=1)]
    if len(names) > most:
        names = [*names[: most - 1], "…", names[-1]]
    zero = "background" if info.has_background else "unlabelled, not counted"
    return ", ".join([f"0 = {zero}", *names, f"{void} = not annotated"])


@dataclass
class SplitCounts:
    """The content of a split, as far as its masks could be read."""

    images: int
    images_per_class: dict[str, int]
    """Number of images that show each class, in the order of the ids."""
    unlabelled: list[str] = field(default_factory=list)
    """Images whose mask is background or void all over."""


@dataclass
class Report:
    """All faults of a dataset, and its content. A dataset with faults, of files or of meaning, is not `ok`."""

    faults: list[FileError]
    """Faults of single files."""
    meaning: list[str]
    """Faults of all masks together: their values do not mean what is assumed."""
    notes: list[str]
    """Lines for the user to judge."""
    counts: dict[Split, SplitCounts]
    pixels: dict[Split, PixelCounts]

    @property
    def ok(self) -> bool:
        return not self.faults and not self.meaning

    @property
    def classes_without_image(self) -> list[str]:
        """Classes that no image of the checked splits shows."""
        per_class = [split.images_per_class for split in self.counts.values()]
        return [name for name in (per_class[0] if per_class else ()) if not any(one[name] for one in per_class)]


def check(source: Source, progress: Progress | None = None) -> Report:
    """Read every image and mask. Faults are not raised; the report has all of them.

    `progress` counts over all splits together.
    """
    pairs = [(split, index) for split in SPLITS for index in range(len(source.names(split)))]
    results = in_threads(lambda i: _check_pair(source, *pairs[i]), len(pairs), progress)
    faults: list[FileError] = []
    pixels: dict[Split, PixelCounts] = {}
    left_out: dict[str, list[str]] = {}

    def histograms(names: Sequence[str]) -> Iterator[np.ndarray | None]:
        for name, (found, pixels_of, remarks) in zip(names, islice(results, len(names)), strict=True):
            faults.extend(found)
            for remark in remarks:
                left_out.setdefault(remark, []).append(name)
            yield pixels_of

    for split in SPLITS:
        names = source.names(split)
        pixels[split] = PixelCounts.of_histograms(names, histograms(names))
        if pixels[split].complete:
            store(source, split, pixels[split])
    meaning, notes = judge(source, joined([*pixels.values()]))
    for remark, names in left_out.items():
        images = list(dict.fromkeys(names))
        shown = counted(len(images), "image")
        notes.append(f"left out: {remark}, {len(names)} in {shown} ({first_three(images)})")
    counts = {split: _counts(source, pixels[split]) for split in SPLITS}
    return Report(faults, meaning, notes, counts, pixels)


def _counts(source: Source, pixels: PixelCounts) -> SplitCounts:
    images, presence = pixels.images, pixels.presence
    per_class = {name: int(images[number]) for number, name in enumerate(source.info.classes, start=1)}
    read = pixels.sizes > 0
    unlabelled = [
        name for name, ids, one in zip(presence.names, presence.classes, read, strict=True) if one and not ids
    ]
    return SplitCounts(len(pixels.names), per_class, unlabelled)


def _check_pair(source: Source, split: Split, index: int) -> tuple[list[FileError], np.ndarray | None, Sequence[str]]:
    """Return the faults of a pair, the pixels of each value in its mask if it could be read, and why objects are left
    out of it."""
    where = f"{source.info.name} {split} '{source.names(split)[index]}'"
    faults: list[FileError] = []
    image: Image.Image | None = None
    mask: np.ndarray | None = None
    remarks: Sequence[str] = ()
    try:
        image = source.image(split, index)
    except UserError as error:
        faults.append(as_file_error(error, where))
    try:
        mask = source.mask(split, index)
        remarks = source.remarks(split, index)
    except UserError as error:
        faults.append(as_file_error(error, where))
    if image is not None and mask is not None and image.size != mask.shape[::-1]:
        sizes = f"the image is {image.width}×{image.height} but its mask {mask.shape[1]}×{mask.shape[0]}"
        faults.append(FileError(where, sizes, "export both at one size", SIZES))
    return faults, None if mask is None else histogram(mask), remarks
