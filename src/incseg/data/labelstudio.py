"""Label Studio's JSON export: polygons, brush strokes, rectangles and ellipses."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote
from xml.sax.saxutils import quoteattr

import numpy as np

from incseg.data.annotated import (
    Annotated,
    Labelled,
    Region,
    Scan,
    Size,
    as_ring,
    clean_name,
    empty_note,
    labelled_size,
    left_out,
    missing_note,
    subset_of,
    unlabelled_note,
)
from incseg.data.files import FileError
from incseg.data.json_parts import BROKEN, parts, read_part
from incseg.data.outlines import Ring, ellipse, rectangle
from incseg.data.writing import Writer, size_of
from incseg.io import replacing, write_text
from incseg.types import UserError

_CONFIG = "config.xml"
_LABEL = re.compile(r"<Label\b[^>]*?\bvalue\s*=\s*([\"'])(.*?)\1", re.DOTALL)
_UPLOAD = re.compile(r"^[0-9a-f]{8}-")
"""What Label Studio puts before the names of files that were uploaded."""
_OPAQUE = 128
"""Of 255: a brush stroke covers a pixel from half on."""


class LabelStudio(Annotated):
    """Label Studio's JSON or JSON_MIN export: polygons, brush, rectangles, ellipses. Brush PNGs are not needed.

    Classes are numbered as config.xml, the labelling interface, lists them, else in alphabetical order.
    """

    format = "labelstudio"

    def scan(self) -> Scan:
        subsets: dict[str, list[Labelled]] = {"train": [], "val": [], "test": [], "": []}
        used: set[str] = set()
        found: dict[Path, Path] = {}
        missing, without, empty, number = list[str](), list[str](), 0, 0
        for file in self.images.with_suffix(".json"):
            if not looks_like_labelstudio(file):
                continue
            for part in parts(file):
                try:
                    name, results = _image_name(part.value), _results(part.value)
                    labels = {label for result in results or () if (label := _label(result["value"])) is not None}
                except BROKEN as error:
                    fault = f"the task at byte {part.offset} is not one of Label Studio ({error})"
                    raise FileError(file, fault, "export it again") from None
                number += 1
                image = self._find(name, file)
                if image is None:
                    missing.append(name)
                elif results is None:
                    without.append(name)
                elif image in found:
                    raise FileError(file, f"'{name}' has more than one task", "keep one of them")
                else:
                    found[image] = file
                    used |= labels
                    empty += not labels
                    subsets[subset_of(file.stem)].append(Labelled(image, file, (part.offset, part.length)))
        if not number:
            hint = "; brush PNGs alone do not say of which image they are" if self._brush_pngs() else ""
            raise UserError(f"no tasks of Label Studio are in '{self.root}'{hint}; export as JSON, and put it there")
        if missing and not found:
            raise UserError(f"no image of the tasks is under '{self.root}' ('{missing[0]}' …); put them there")
        config = self.images.path(_CONFIG)
        listed = [] if config is None else names_of_config(config)
        notes = missing_note(missing, number) + empty_note(empty)
        notes += unlabelled_note(without, number, "submit its task without a region")
        return Scan([*dict.fromkeys([*listed, *sorted(used, key=str.casefold)])], subsets, notes, used)

    def _brush_pngs(self) -> bool:
        return any(re.match(r"task-\d+-annotation-\d+-", path.name) for path in self.images.images())

    def _find(self, name: str, file: Path) -> Path | None:
        plain = name.partition("?d=")[2] or name.partition("?")[0]
        last = plain.replace("\\", "/").rpartition("/")[2]
        return self.images.find(plain, file) or self.images.find(_UPLOAD.sub("", last), file)

    def shapes(self, item: Labelled, sizes: Sequence[Size]) -> tuple[Size, list[Region], list[str]]:
        with item.file.open("rb") as stream:
            task = read_part(stream, *item.labels)
        regions: list[Region] = []
        remarks: list[str] = []
        size = sizes[0]
        for result in _results(task) or ():
            value = result["value"]
            name = _label(value)
            if name is None:
                continue  # a choice, a text
            if result.get("image_rotation"):
                what = f"'{item.image.name}' was turned in Label Studio by {result['image_rotation']}°"
                raise FileError(item.file, what, "turn the image itself and label it again")
            size = labelled_size(item, result.get("original_width"), result.get("original_height"), sizes)
            label = self.label(name, item.file)
            if "rle" in value:
                regions.append(Region(label, runs=_stroke(value["rle"], size)))
                continue
            ring = _ring(value, size)
            reason = "of a kind that has no area" if ring is None else left_out(ring, size)
            if reason or ring is None:
                remarks.append(f"regions {reason}")
            else:
                regions.append(Region(label, [ring]))
        return size, regions, remarks


def looks_like_labelstudio(file: Path) -> bool:
    """Return whether a JSON file begins as a list of tasks."""
    with file.open("rb") as stream:
        text = stream.read(1 << 16).lstrip(b"\xef\xbb\xbf \t\r\n")
    return text.startswith(b"[") and (b'"annotations"' in text or b'"annotation_id"' in text or b'"data"' in text)


def names_of_config(file: Path) -> list[str]:
    """Return the labels of a labelling interface in their order."""
    text = file.read_bytes()[:1_000_000].decode("utf-8", "replace")
    return [clean_name(html.unescape(value)) for _, value in _LABEL.findall(text)]


def _image_name(task: dict[str, Any]) -> str:
    """Return where the image of a task is, by the first value that names an image."""
    data = task["data"] if isinstance(task.get("data"), dict) else task
    for value in (data.get("image"), *data.values()):
        if isinstance(value, str) and ("/" in value or "." in value):
            return value
    raise ValueError("it names no image")


def _results(task: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the regions of a task, of its last annotation that was not skipped; None where there is none."""
    if "data" in task:
        given = [one for one in task.get("annotations") or () if not one.get("was_cancelled")]
        return [result for result in given[-1]["result"] if isinstance(result.get("value"), dict)] if given else None
    # JSON_MIN has the values alone, in lists by the names of the tags.
    lists = [value for value in task.values() if isinstance(value, list)]
    regions = [one for value in lists for one in value if isinstance(one, dict)]
    return [{**one, "value": one} for one in regions]


def _label(value: dict[str, Any]) -> str | None:
    """Return the class of a region; None for a choice, a text and the like, or where it has none."""
    for key, names in value.items():
        if key.endswith("labels") and isinstance(names, list) and names:
            return clean_name(str(names[0]))
    return None


def _ring(value: dict[str, Any], size: Size) -> Ring | None:
    """Return the outline of a region, which is in percent of the image; None where it has no area."""
    scale = np.array(size) / 100
    if "points" in value:
        return as_ring(value["points"]) * scale
    numbers = {key: float(value[key]) for key in ("x", "y", "width", "height", "radiusX", "radiusY") if key in value}
    across, down, turn = scale[0], scale[1], float(value.get("rotation") or 0)
    if {"x", "y", "radiusX", "radiusY"} <= numbers.keys():
        found = ellipse(
            numbers["x"] * across, numbers["y"] * down, numbers["radiusX"] * across, numbers["radiusY"] * down, turn
        )
    elif {"x", "y", "width", "height"} <= numbers.keys():
        left, top = numbers["x"] * across, numbers["y"] * down
        found = rectangle(left, top, left + numbers["width"] * across, top + numbers["height"] * down, turn)
    else:
        return None
    return as_ring(found)


def _stroke(codes: Sequence[int], size: Size) -> np.ndarray:
    """Return the run lengths, as COCO has them, of a brush stroke.

    Label Studio packs the bytes (height, width, RGBA) into bits: how many there are (32), the bits of a byte less one
    (5), four lengths of counts less one (4 each). Then blocks: whether the bytes are the same (1), which length the
    count has (2), the count less one, and one byte or as many as the count says.
    """
    width, height = size
    bits = _Bits(bytes(codes))
    total = bits.read(32)
    if total != width * height * 4:
        raise ValueError(f"a brush stroke of {total} bytes instead of {width * height * 4}")
    word = bits.read(5) + 1
    lengths = [bits.read(4) + 1 for _ in range(4)]
    stroke = np.zeros(total, dtype=np.uint8)
    at = 0
    while at < total:
        same = bits.read(1)
        count = bits.read(lengths[bits.read(2)]) + 1
        if same:
            stroke[at : at + count] = min(255, bits.read(word))
        else:
            block = bytes(min(255, bits.read(word)) for _ in range(min(count, total - at)))
            stroke[at : at + len(block)] = np.frombuffer(block, dtype=np.uint8)
        at += count
    opaque = (stroke.reshape(height, width, 4)[..., 3] >= _OPAQUE).T.ravel()
    changes = np.flatnonzero(opaque[1:] != opaque[:-1]) + 1
    runs = np.diff(np.concatenate([[0], changes, [opaque.size]]))
    return np.concatenate([[0], runs]) if opaque[0] else runs


class _Bits:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def read(self, number: int) -> int:
        """Return the next bits as a number, the highest first."""
        end = self._at + number
        if end > 8 * len(self._data):
            raise ValueError("a brush stroke that ends too early")
        window = int.from_bytes(self._data[self._at // 8 : (end + 7) // 8], "big")
        self._at = end
        return (window >> (-end % 8)) & ((1 << number) - 1)


class LabelStudioWriter(Writer):
    """images/, tasks.json (tasks_train.json and tasks_val.json where there are splits) and config.xml, the labelling
    interface. Serve the folder to Label Studio as local files."""

    format = "labelstudio"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._streams: dict[str, IO[str]] = {}

    def image_file(self, name: str, split: str) -> Path:
        return self.out / "images" / name

    def write(self, name: str, image: Path, mask: np.ndarray, split: str) -> None:
        first = split not in self._streams
        if first:
            temporary = self._open.enter_context(replacing(self.out / f"tasks{split and f'_{split}'}.json"))
            self._streams[split] = self._open.enter_context(temporary.open("w", encoding="utf-8"))
        width, height = size_of(mask)
        results = [
            {
                "id": f"r{number}",
                "type": "polygonlabels",
                "from_name": "label",
                "to_name": "image",
                "original_width": width,
                "original_height": height,
                "image_rotation": 0,
                "value": {
                    "points": (ring * 100 / (width, height)).tolist(),
                    "closed": True,
                    "polygonlabels": [self.name_of(label)],
                },
            }
            for number, (label, ring) in enumerate(self.objects(mask))
        ]
        place = f"/data/local-files/?d={quote(f'images/{image.name}')}"
        task = {"data": {"image": place}, "annotations": [{"result": results}]}
        self._streams[split].write("[\n" if first else ",\n")
        json.dump(task, self._streams[split], ensure_ascii=False)

    def finish(self) -> None:
        for stream in self._streams.values():
            stream.write("\n]\n")
        labels = "".join(
            f"    <Label value={quoteattr(name)} background={quoteattr(colour)}/>\n" for name, colour in self._colours()
        )
        interface = (
            '<View>\n  <Image name="image" value="$image"/>\n  <PolygonLabels name="label" toName="image">\n'
            f"{labels}  </PolygonLabels>\n</View>\n"
        )
        write_text(self.out / _CONFIG, interface)

    def _colours(self) -> Iterator[tuple[str, str]]:
        for number, name in enumerate(self.names):
            red, green, blue = (int(part) for part in self.palette[number + 1])
            yield name, f"#{red:02x}{green:02x}{blue:02x}"
