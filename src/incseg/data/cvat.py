"""Masks in colours or numbers with a list of what they mean: CVAT's "Segmentation mask", Roboflow's semantic masks."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from incseg.data.annotated import (
    Annotated,
    Labelled,
    Scan,
    Size,
    agreement,
    clean_name,
    missing_note,
    subset_of,
    unlabelled_note,
)
from incseg.data.files import UNNAMED, FileError, read_stored, text_lines
from incseg.data.folder import first_three
from incseg.data.source import voc_palette
from incseg.data.writing import Writer
from incseg.io import replacing, write_text
from incseg.types import BACKGROUND, IGNORE, UNSEEN, UserError

LABELMAP, VALUES_FILE = "labelmap.txt", "_classes.csv"
_MASKS, _OBJECTS = "SegmentationClass", "SegmentationObject"
_ENTRY = re.compile(r"^(?P<name>.*?):(?P<colour>\s*\d+\s*,\s*\d+\s*,\s*\d+\s*)?:[^:]*:[^:]*$")
_UNKNOWN = UNSEEN
"""Stands for colours and values without a name; no class has this number."""


class Cvat(Annotated):
    """CVAT's "Segmentation mask 1.1" (labelmap.txt, SegmentationClass), Roboflow's masks (NAME_mask.png, _classes.csv).

    CVAT exports no images by default: put them anywhere under the root.
    """

    format = "cvat"

    def scan(self) -> Scan:
        maps = [path for path in self.images.with_suffix(".txt") if path.name == LABELMAP]
        lists = [path for path in self.images.with_suffix(".csv") if path.name == VALUES_FILE]
        if not maps and not lists:
            raise UserError(
                f"'{self.root}' has neither {LABELMAP} nor {VALUES_FILE}; export 'Segmentation mask 1.1' from CVAT, or "
                "choose another --data"
            )
        self._colours: dict[Path, dict[int, str]] = {}
        self._numbers: dict[Path, dict[int, str]] = {}
        names: dict[str, None] = {}
        subsets: dict[str, list[Labelled]] = {"train": [], "val": [], "test": [], "": []}
        masks: list[tuple[Path, Path, str]] = []
        for file in maps:
            names |= dict.fromkeys(self._read_labelmap(file))
            masks += self._masks_of_cvat(file)
        for file in lists:
            names |= dict.fromkeys(self._read_values(file))
            masks += self._masks_of_roboflow(file)
        images, missing, used = self._photographs([mask for mask, _, _ in masks]), list[str](), set[Path]()
        by_stem: dict[str, list[Path]] = {}
        for image in images:
            by_stem.setdefault(image.stem, []).append(image)
        for mask, file, subset in masks:
            photograph = self._image_of(mask, by_stem)
            if photograph is None:
                missing.append(mask.name)
            elif photograph in used:
                raise FileError(mask, f"'{self.images.key(photograph)}' has another mask", "keep one of them")
            else:
                used.add(photograph)
                subsets[subset].append(Labelled(photograph, mask, file))
        if missing and not used:
            raise UserError(
                f"no image of the masks is under '{self.root}' ('{missing[0]}' …); CVAT leaves them out of an export "
                "unless asked: put them there"
            )
        without = [self.images.key(image) for image in images if image not in used]
        notes = missing_note(missing, len(masks)) + unlabelled_note(without, len(images), "add a mask of background")
        return Scan([*names], subsets, notes)

    def _read_labelmap(self, file: Path) -> list[str]:
        """Read lines "name:r,g,b:parts:actions". If no line has a colour, they have VOC's, as Datumaro reads them."""
        entries = [line for line in text_lines(file) if line.strip() and not line.startswith("#")]
        colours, numbers = self._colours.setdefault(file, {}), self._numbers.setdefault(file, {})
        for number, line in enumerate(entries):
            match = _ENTRY.match(line)
            if match is None:
                raise FileError(file, f"'{line[:60]}' is not of the form name:r,g,b::", "correct the line")
            name = clean_name(match["name"])
            numbers[number] = name
            if match["colour"]:
                red, green, blue = (int(part) for part in match["colour"].split(","))
                if max(red, green, blue) > 255:
                    raise FileError(file, f"'{line[:60]}' has a colour above 255", "correct the line")
                code = _code(red, green, blue)
                if colours.setdefault(code, name) != name:
                    raise FileError(file, f"'{colours[code]}' and '{name}' have one colour", "give each its own")
        if not colours:
            palette = voc_palette().tolist()
            colours |= {_code(*palette[number]): name for number, name in numbers.items() if number < len(palette)}
        colours.setdefault(0, "background")
        return [*numbers.values()]

    def _read_values(self, file: Path) -> list[str]:
        numbers = self._numbers.setdefault(file, {})
        for row in csv.reader(text_lines(file)[1:]):
            if len(row) < 2 or not row[0].strip().isdecimal() or int(row[0]) > 255:
                raise FileError(file, f"'{','.join(row)[:60]}' is not a value and a class", "correct the line")
            numbers[int(row[0])] = clean_name(row[1])
        return [*numbers.values()]

    def _masks_of_cvat(self, file: Path) -> list[tuple[Path, Path, str]]:
        """Return masks, each with the file that explains it and its split, by the lists in ImageSets."""
        base = self.images.key(file).rpartition("/")[0]
        start = f"{base}/" if base else ""
        masks = {self._stem(path, f"{start}{_MASKS}/"): path for path in self.images.under(f"{start}{_MASKS}")}
        subsets = {
            line.strip(): subset_of(path.stem)
            for path in self.images.with_suffix(".txt")
            if self.images.key(path).startswith(f"{start}ImageSets/Segmentation/")
            for line in text_lines(path)
        }
        return [(path, file, subsets.get(stem, "")) for stem, path in masks.items()]

    def _stem(self, path: Path, start: str) -> str:
        return self.images.key(path).removeprefix(start).removesuffix(path.suffix)

    def _masks_of_roboflow(self, file: Path) -> list[tuple[Path, Path, str]]:
        subset = subset_of(self.images.key(file))
        return [
            (path, file, subset)
            for path in self.images.images()
            if path.parent == file.parent and path.stem.endswith("_mask")
        ]

    def _photographs(self, masks: Sequence[Path]) -> list[Path]:
        """Return the images that are neither masks nor in CVAT's folders of them."""
        known = set(masks)
        return [
            image
            for image in self.images.images()
            if image not in known and not {_MASKS, _OBJECTS} & set(self.images.key(image).split("/"))
        ]

    def _image_of(self, mask: Path, by_stem: dict[str, list[Path]]) -> Path | None:
        """Return the image whose path ends as that of the mask does, suffix aside."""
        stem = mask.stem.removesuffix("_mask") if mask.parent.joinpath(VALUES_FILE).is_file() else mask.stem
        options = by_stem.get(stem, [])
        folders = self._folders(mask)
        return max(options, key=lambda image: agreement(self._folders(image), folders), default=None)

    def _folders(self, path: Path) -> list[str]:
        return self.images.key(path).split("/")[:-1]

    def draw(self, item: Labelled, sizes: Sequence[Size]) -> np.ndarray:
        mask = read_stored(item.file, sizes)
        in_numbers = item.labels not in self._colours or mask.mode in ("1", "L", "I") or mask.mode.startswith("I;16")
        if in_numbers:
            values = np.asarray(mask).astype(np.int64)
            if item.labels in self._colours and not self._by_position(values, item.labels):
                values, in_numbers = values * 0x10101, False  # grey colours
        else:
            values = np.asarray(mask.convert("RGB")).astype(np.int64) @ (1 << 16, 1 << 8, 1)
        meanings = self._numbers[item.labels] if in_numbers else self._colours[item.labels]
        table = np.full(256 if in_numbers else 1 << 24, _UNKNOWN, dtype=np.uint8)
        for value, name in meanings.items():
            table[value] = self.label_of.get(name, BACKGROUND)
        found: np.ndarray = table[np.clip(values, 0, len(table) - 1)]
        if (unknown := (found == _UNKNOWN) | (values >= len(table)) | (values < 0)).any():
            raise self._fault(item, np.unique(values[unknown]), in_numbers)
        return found

    def _by_position(self, values: np.ndarray, file: Path) -> bool:
        """Return whether a grey mask counts the lines of labelmap.txt, as CVAT's import allows."""
        return bool(values.max(initial=0) < len(self._numbers[file]))

    def _fault(self, item: Labelled, values: np.ndarray, in_numbers: bool) -> FileError:
        remedy = f"name them in {item.labels.name}, or export it again"
        if in_numbers:
            numbers = tuple(values[:8].tolist())
            allowed = ", ".join(map(str, self._numbers[item.labels]))
            what = f"the mask holds {', '.join(map(str, numbers))}, but {item.labels.name} names {allowed}"
            return FileError(item.file, what, remedy, UNNAMED, numbers)
        colours = tuple(f"#{value:06x}" for value in values[:8].tolist())
        what = f"the mask has colours that {item.labels.name} does not name ({first_three(colours)})"
        return FileError(item.file, what, remedy, UNNAMED, colours)


class CvatWriter(Writer):
    """JPEGImages/, SegmentationClass/ in colours, labelmap.txt and ImageSets/Segmentation/: CVAT's "Segmentation mask
    1.1"."""

    format = "cvat"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._splits: dict[str, list[str]] = {}

    def image_file(self, name: str, split: str) -> Path:
        return self.out / "JPEGImages" / name

    def write(self, name: str, image: Path, mask: np.ndarray, split: str) -> None:
        with replacing(self.out / _MASKS / f"{name}.png") as temporary:
            Image.fromarray(self.palette[mask]).save(temporary, format="PNG")
        self._splits.setdefault(split or "default", []).append(name)

    def finish(self) -> None:
        lines = [f"background:{_colour(self.palette[BACKGROUND])}::\n"]
        for number, name in enumerate(self.names):
            label = IGNORE if number == len(self.classes) else number + 1
            lines.append(f"{name}:{_colour(self.palette[label])}::\n")
        write_text(self.out / LABELMAP, "# label:color_rgb:parts:actions\n" + "".join(lines))
        for split, names in self._splits.items():
            write_text(self.out / "ImageSets" / "Segmentation" / f"{split}.txt", "".join(f"{n}\n" for n in names))


def _code(red: int, green: int, blue: int) -> int:
    return red << 16 | green << 8 | blue


def _colour(colour: np.ndarray) -> str:
    return ",".join(str(int(part)) for part in colour)
