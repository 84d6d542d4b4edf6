"""Label Studio's exports: JSON with polygons, brush strokes, bitmasks, rectangles and ellipses, and brush PNGs."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    png_of_text,
    subset_of,
    unlabelled_note,
)
from incseg.data.brushes import Brush, brush_pngs, opaque
from incseg.data.files import FileError, stored_size
from incseg.data.json_parts import BROKEN, parts, read_part
from incseg.data.outlines import Patch, Ring, ellipse, rectangle
from incseg.data.writing import Writer, size_of
from incseg.io import replacing, write_text
from incseg.types import UserError

_CONFIG = "config.xml"
_LABEL = re.compile(r"<Label\b[^>]*?\bvalue\s*=\s*([\"'])(.*?)\1", re.DOTALL)
_MEMBERS = re.compile(rb'"(annotations|annotation_id|data|rle|points|imageDataURL)"')
_TAG = re.compile(r"<(?:BrushLabels|Labels)\b[^>]*?\bname\s*=\s*([\"'])(.*?)\1", re.DOTALL)


@dataclass(frozen=True)
class _Task:
    """An entry of a JSON file.

    image:      the name of its image.
    place:      where the entry is in the file.
    labels:     the names of its classes; None if it is not labelled yet.
    annotation: the number of its annotation in JSON_MIN, which has an entry for each annotation; else 0.
    """

    name: str
    image: str
    file: Path
    place: tuple[int, int]
    labels: set[str] | None
    annotation: int


class LabelStudio(Annotated):
    """Label Studio's JSON or JSON_MIN export: polygons, brush, bitmasks, rectangles, ellipses; or its brush PNGs.

    Brush PNGs name only their task. The image of a task follows from a JSON file with the tasks, or it is named
    task-ID.jpg. Classes are numbered as config.xml, the labelling interface, lists them, else in alphabetical order.
    """

    format = "labelstudio"

    def scan(self) -> Scan:
        config = self.images.path(_CONFIG)
        interface = "" if config is None else config.read_bytes()[:1_000_000].decode("utf-8", "replace")
        names = _values(_LABEL, interface)
        brushes = brush_pngs(self.images, _values(_TAG, interface), names)
        image_of = {image.stem[5:]: image for image in self.images.images() if re.fullmatch(r"task-\d+", image.stem)}
        found: dict[Path, _Task] = {}
        missing, without, number, tasks = list[str](), list[str](), 0, set[str]()
        for task in self._tasks():
            number += 1
            tasks.add(task.name)
            image = self.images.find(task.image.partition("?d=")[2] or task.image.partition("?")[0], task.file)
            if image is None:
                missing.append(task.image)
                continue
            image_of[task.name] = image
            if task.labels is None:
                without += [task.image] if task.name not in brushes else []
                continue
            known = found.setdefault(image, task)
            if known is not task and not (task.annotation and (known.name, known.file) == (task.name, task.file)):
                raise FileError(task.file, f"'{task.image}' has more than one task", "keep one of them")
            if known.annotation < task.annotation:
                found[image] = task
        subsets: dict[str, list[Labelled]] = {"train": [], "val": [], "test": [], "": []}
        for image, task in found.items():
            subsets[subset_of(task.file.stem)].append(Labelled(image, task.file, task.place))
        used = {label for task in found.values() for label in task.labels or ()}
        for name, pngs in brushes.items():
            if name not in image_of:
                missing += [f"task-{name}"] if name not in tasks else []
            elif image_of[name] not in found:
                first, *more = pngs
                subsets[""].append(Labelled(image_of[name], first, pngs, tuple(more)))
                used |= {label for label in pngs.values() if label is not None}
        others = {name for name, image in image_of.items() if image not in found} - tasks - brushes.keys()
        without += sorted(image_of[name].name for name in others)
        number += len(brushes.keys() - tasks) + len(others)
        if not (tasks or brushes):
            raise UserError(f"no tasks of Label Studio are in '{self.root}'; export as JSON, and put it there")
        if missing and not any(subsets.values()):
            if not tasks:
                raise UserError(f"the brush PNGs in '{self.root}' name tasks ('{missing[0]}' …), not images; put the "
                                "JSON export beside them, or name the images task-ID.jpg")  # fmt: skip
            raise UserError(f"no image of the tasks is under '{self.root}' ('{missing[0]}' …); put them there")
        notes = missing_note(missing, number) + empty_note(sum(not task.labels for task in found.values()))
        notes += unlabelled_note(without, number, "submit its task without a region")
        return Scan([*dict.fromkeys([*names, *sorted(used, key=str.casefold)])], subsets, notes, used)

    def _tasks(self) -> Iterator[_Task]:
        """Yield the entries of the JSON files."""
        for file in self.images.with_suffix(".json"):
            for part in parts(file) if looks_like_labelstudio(file) else ():
                try:
                    one, results = part.value, _results(part.value)
                    labels = {label for result in results or () if (label := _label(result["value"])) is not None}
                    place, annotation = (part.offset, part.length), int(one.get("annotation_id") or 0)
                    image, named = _image_name(one), None if results is None else labels
                    yield _Task(str(one.get("id")), image, file, place, named, annotation)
                except BROKEN as error:
                    fault = f"the task at byte {part.offset} is not one of Label Studio ({error})"
                    raise FileError(file, fault, "export it again") from None

    def shapes(self, item: Labelled, sizes: Sequence[Size]) -> tuple[Size, list[Region], list[str]]:
        if isinstance(item.labels, dict):
            return self._brushes(item, sizes)
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
            if "imageDataURL" in value:
                regions.append(Region(label, patch=_bitmask(value["imageDataURL"], size)))
                continue
            ring = _ring(value, size)
            reason = "of a kind that has no area" if ring is None else left_out(ring, size)
            if reason or ring is None:
                remarks.append(f"regions {reason}")
            else:
                regions.append(Region(label, [ring]))
        return size, regions, remarks

    def _brushes(self, item: Labelled, sizes: Sequence[Size]) -> tuple[Size, list[Region], list[str]]:
        size = labelled_size(item, *stored_size(item.file)[0], sizes)
        named = [(self.label(name, file), file) for file, name in item.labels.items() if name is not None]
        remarks = ["brush PNGs without a label"] * (len(item.labels) - len(named))
        return size, [Brush(label, file=file, size=size) for label, file in named], remarks


def looks_like_labelstudio(file: Path) -> bool:
    """Return whether a JSON file begins as a list of tasks. In JSON_MIN the first one may begin with a long region."""
    with file.open("rb") as stream:
        text = stream.read(1 << 16).lstrip(b"\xef\xbb\xbf \t\r\n")
    return text.startswith(b"[") and _MEMBERS.search(text) is not None


def _values(pattern: re.Pattern[str], interface: str) -> list[str]:
    """Return the names that a pattern finds in a labelling interface, in their order."""
    return [clean_name(html.unescape(value)) for _, value in pattern.findall(interface)]


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
    covered = opaque(stroke.reshape(height, width, 4)[..., 3]).T.ravel()
    changes = np.flatnonzero(covered[1:] != covered[:-1]) + 1
    runs = np.diff(np.concatenate([[0], changes, [covered.size]]))
    return np.concatenate([[0], runs]) if covered[0] else runs


def _bitmask(address: str, size: Size) -> Patch:
    """Return the pixels of a bitmask, a PNG of the image's size in a data URL, which are not transparent."""
    image = png_of_text(address.partition(",")[2], size)
    if image.size != size:
        raise ValueError(f"a bitmask of {image.width}×{image.height} pixels")
    return 0, 0, np.asarray(image.convert("RGBA"))[..., 3] > 0


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
        self._written = 0

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
        self._written += 1
        task = {"id": self._written, "data": {"image": place}, "annotations": [{"result": results}]}
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
