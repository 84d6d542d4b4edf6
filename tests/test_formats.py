"""Labels of other tools: each format is read, written and read back, with its variants, faults and attacks."""

from __future__ import annotations

import base64
import io
import json
import pickle
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

import incseg.data.coco
from incseg.cli import main
from incseg.data import build_source, json_parts
from incseg.data.annotated import Annotated, ImageFiles, subset_of
from incseg.data.check import check
from incseg.data.coco import Coco
from incseg.data.convert import FORMATS, convert
from incseg.data.cvat import Cvat
from incseg.data.detect import detect
from incseg.data.files import FileError
from incseg.data.folder import Folder
from incseg.data.labelme import LabelMe
from incseg.data.labelstudio import LabelStudio
from incseg.data.presence import presence_of
from incseg.data.source import SPLITS, Source
from incseg.data.yolo import Yolo
from incseg.types import UserError

SIZE = (40, 30)
BOX = [[4, 5], [14, 5], [14, 15], [4, 15]]
"""A square of 10 × 10 pixels."""
COLUMN, ROW = 4, 5


def photograph(path: Path, size: tuple[int, int] = SIZE, orientation: int = 1) -> Path:
    """Write an image. With an orientation its stored size is `size`, and viewers rotate it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.new("RGB", size, "grey").save(path, exif=exif)
    return path


def text(path: Path, content: str | dict[str, Any] | list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def coco(annotations: list[dict[str, Any]], images: int = 1, **more: Any) -> dict[str, Any]:
    listed = [{"id": 7 + i, "file_name": f"{i}.jpg", "width": SIZE[0], "height": SIZE[1]} for i in range(images)]
    numbered = [{"id": i, "image_id": 7, "category_id": 5, "iscrowd": 0, **one} for i, one in enumerate(annotations)]
    categories = [{"id": 90, "name": "cat"}, {"id": 5, "name": "dog"}]
    return {"images": listed, "annotations": numbered, "categories": categories, **more}


def polygon(points: Any = BOX) -> list[list[float]]:
    return [[value for point in points for value in point]]


def labelme(shapes: list[dict[str, Any]], name: str = "0.jpg", size: tuple[int, int] | None = SIZE) -> dict[str, Any]:
    named = {"imageWidth": size[0], "imageHeight": size[1]} if size else {}
    return {"version": "5.5.0", "imagePath": name, "imageData": "QUJD", "shapes": shapes, **named}


def task(results: list[dict[str, Any]], image: str = "/data/upload/1/0123abcd-0.jpg") -> dict[str, Any]:
    sized = [{"original_width": SIZE[0], "original_height": SIZE[1], **one} for one in results]
    return {"id": 1, "data": {"image": image}, "annotations": [{"result": sized, "was_cancelled": False}]}


def yolo(points: Any = BOX, number: int = 0) -> str:
    return f"{number} " + " ".join(f"{x / SIZE[0]:.6f} {y / SIZE[1]:.6f}" for x, y in points) + "\n"


def only(source: Source) -> np.ndarray:
    """Return the mask of the only image."""
    [(split, index)] = [(split, i) for split in SPLITS for i in range(len(source.names(split)))]
    image, mask = source.pair(split, index)
    assert image.size == mask.shape[::-1]
    return mask


def box(value: int, size: tuple[int, int] = SIZE) -> np.ndarray:
    mask = np.zeros(size[::-1], dtype=np.uint8)
    mask[5:15, 4:14] = value
    return mask


def one_image(root: Path) -> Path:
    photograph(root / "images" / "0.jpg")
    return root


# --- each format -----------------------------------------------------------------------------------------------


def made_coco(root: Path) -> type[Annotated]:
    text(root / "annotations/instances_default.json", coco([{"segmentation": polygon(), "category_id": 90}]))
    return Coco


def made_labelme(root: Path) -> type[Annotated]:
    text(root / "images/0.json", labelme([{"label": "cat", "points": BOX, "shape_type": "polygon"}]))
    text(root / "labels.txt", "__ignore__\n_background_\ndog\ncat\n")
    return LabelMe


def made_yolo(root: Path) -> type[Annotated]:
    text(root / "data.yaml", "train: ../train/images\nnames: {3: dog, 17: cat}\n")
    text(root / "labels/0.txt", yolo(number=17))
    return Yolo


def made_cvat(root: Path) -> type[Annotated]:
    text(root / "labelmap.txt", "# label:color_rgb:parts:actions\nbackground:0,0,0::\ndog:0,200,0::\ncat:9,8,7::\n")
    (root / "SegmentationClass").mkdir()
    Image.fromarray(np.array([(0, 0, 0), (9, 8, 7)], dtype=np.uint8)[box(1)]).save(root / "SegmentationClass/0.png")
    return Cvat


def made_labelstudio(root: Path) -> type[Annotated]:
    points = [[100 * x / SIZE[0], 100 * y / SIZE[1]] for x, y in BOX]
    value = {"points": points, "polygonlabels": ["cat"]}
    text(root / "project-1.json", [task([{"type": "polygonlabels", "value": value}])])
    text(root / "config.xml", '<View><Label value="dog"/><Label background="#f00" value="cat"/></View>')
    return LabelStudio


MADE = {
    "coco": made_coco,
    "labelme": made_labelme,
    "yolo": made_yolo,
    "cvat": made_cvat,
    "labelstudio": made_labelstudio,
}


@pytest.mark.parametrize("name", MADE)
def test_a_small_dataset_of_each_format(name: str, tmp_path: Path) -> None:
    """Ids with gaps become 1, 2, …. The format is detected, and readers of other formats name it."""
    kind = MADE[name](one_image(tmp_path))
    assert detect(tmp_path) == name
    source = build_source("auto", tmp_path)
    assert type(source) is kind
    assert source.info.classes == ("dog", "cat")
    assert np.array_equal(only(source), box(2))
    report = check(source)
    assert report.ok
    assert report.counts["train"].images_per_class == {"dog": 0, "cat": 1}
    assert presence_of(source, "train").classes == ((2,),)
    again = pickle.loads(pickle.dumps(source))
    assert np.array_equal(only(again), box(2))
    assert again.fingerprint("train") == source.fingerprint("train")
    with pytest.raises(UserError, match=rf"classes\.txt: no such file.*looks like {name}: try --data {name}"):
        build_source("folder", tmp_path)


@pytest.mark.parametrize("name", MADE)
def test_labels_for_an_image_that_is_turned_by_its_exif(name: str, tmp_path: Path) -> None:
    """The size in the labels decides whether they refer to the image as shown or as stored."""
    kind = MADE[name](tmp_path)
    shown = photograph(tmp_path / "images" / "0.jpg", SIZE[::-1], orientation=6)
    assert np.array_equal(only(kind(tmp_path)), box(2))
    if name != "yolo":  # which states no size
        photograph(shown, SIZE, orientation=6)
        assert np.array_equal(only(kind(tmp_path)), np.rot90(box(2), -1))
        photograph(shown, (SIZE[0] + 1, SIZE[1]))
        source = kind(tmp_path)
        with pytest.raises(FileError, match=r"41×30.*; export both at one size"):
            source.mask("train", 0)
        assert not check(source).ok


@pytest.mark.parametrize("name", MADE)
def test_the_fingerprint_follows_labels_and_names(name: str, tmp_path: Path) -> None:
    kind = MADE[name](one_image(tmp_path))
    first = kind(tmp_path).fingerprint("train")
    assert kind(tmp_path).fingerprint("train") == first
    for file in sorted(tmp_path.rglob("*")):
        if file.is_file() and file.suffix in (".json", ".txt", ".yaml", ".xml"):
            content = file.read_text()
            file.write_text(re.sub(r"\bcat\b", "rat", content))
    source = kind(tmp_path)
    assert "rat" in source.info.classes
    assert source.fingerprint("train") != first


@pytest.mark.parametrize("name", MADE)
def test_new_names_for_the_classes(name: str, tmp_path: Path) -> None:
    kind = MADE[name](one_image(tmp_path))
    names = text(tmp_path / "names.of.mine", "hound\nkitten\n")
    assert kind(tmp_path, classes_file=names).info.classes == ("hound", "kitten")
    text(names, "hound\n")
    with pytest.raises(FileError, match="has 1 names, but the dataset has 2 classes"):
        kind(tmp_path, classes_file=names)


# --- round trips -----------------------------------------------------------------------------------------------


def odd_folder(root: Path) -> Folder:
    """Write images with awkward names and masks: noise, holes, void, single pixels, blanks, percent signs."""
    generator = np.random.default_rng(0)
    names = ["plain", "with blank", "50% off", "größe", "a%20b"]
    for i, name in enumerate(names):
        size = (23 + i, 17 + 3 * i)
        photograph(root / "images" / f"{name}.{'jpg' if i % 2 else 'png'}", size, orientation=1 + 5 * (i == 3))
        mask = generator.choice([0, 0, 1, 2, 3, 255], size[::-1]).astype(np.uint8)
        mask[3:14, 3:14] = 1
        mask[5:9, 5:9] = 0
        Image.fromarray(mask if i != 3 else np.rot90(mask).copy()).save(root / "masks" / f"{name}.png")
    text(root / "classes.txt", "background\nthird class\nÄpfel & <Birnen>\nyes: no\n")
    text(root / "val.txt", "größe\nplain\n")
    return Folder(root)


@pytest.mark.parametrize("to", FORMATS)
def test_every_format_gives_back_the_same_masks(to: str, tmp_path: Path) -> None:
    (tmp_path / "first" / "masks").mkdir(parents=True)
    source = odd_folder(tmp_path / "first")
    assert convert(source, to, tmp_path / "second") == 5
    back = build_source("auto", tmp_path / "second")
    assert back.info.name == to
    assert back.info.classes == source.info.classes
    for split in SPLITS:
        assert sorted(name.split("/")[-1] for name in back.names(split)) == sorted(source.names(split))
        for index, name in enumerate(back.names(split)):
            own = list(source.names(split)).index(name.split("/")[-1])
            assert np.array_equal(back.mask(split, index), source.mask(split, own)), name
            assert back.image(split, index).tobytes() == source.image(split, own).tobytes()
    assert check(back).ok
    assert convert(back, "folder", tmp_path / "third") == 5
    third = Folder(tmp_path / "third")
    assert sum(int(m.sum()) for s in SPLITS for m in (third.mask(s, i) for i in range(len(third.names(s))))) == sum(
        int(m.sum()) for s in SPLITS for m in (source.mask(s, i) for i in range(len(source.names(s))))
    )


def test_convert_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    made_coco(one_image(tmp_path / "mine"))
    argv = ["data", "convert", "--data", "auto", "--root", "mine", "--to", "labelme", "--out", "new"]
    assert main(argv) == 0
    assert "1 image with labels in new; use them with --data labelme --root new" in capsys.readouterr().out
    assert main(argv) == 2
    assert "'new' exists and is not an empty folder; choose a new one" in capsys.readouterr().err
    for wrong, message in (
        (["--to", "labelme"], "needs a folder to write; give --out DIR"),
        (["--out", "x"], "give --to, one of folder, coco, labelme, yolo, cvat, labelstudio"),
        (["--out", "x", "--to", "yolo", "--tolerance", "-1"], "--tolerance is -1; give pixels"),
        (["--out", "x", "--to", "yolo", "--limit", "0"], "--limit is 0"),
    ):
        assert main(["data", "convert", "--data", "coco", "--root", "mine", *wrong]) != 0
        assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("name", ["yolo", "ccp"])
def test_real_labels_make_the_round(name: str, shared: Path, tmp_path: Path) -> None:
    root = shared / ("coco_yolo" if name == "yolo" else "ccp")
    source = build_source("auto", root)
    for to in FORMATS[1:]:
        convert(source, to, tmp_path / to, ["val"], limit=2)
        back = build_source(to, tmp_path / to)
        names = [*back.names("train"), *back.names("val")]
        assert len(names) == 2
        table = np.arange(256)
        for number, own in enumerate(back.info.classes, start=1):
            table[number] = source.info.classes.index(own) + 1
        for split in SPLITS:
            for index, own in enumerate(back.names(split)):
                expected = source.mask("val", list(source.names("val")).index(own.split("/")[-1]))
                assert np.array_equal(table[back.mask(split, index)], expected)


def test_real_polygons_agree_with_the_index_masks_beside_them(shared: Path) -> None:
    source = Yolo(shared / "coco_yolo")
    ids = np.array([0, *yaml.safe_load((shared / "coco_yolo" / "data.yaml").read_text())["names"]])
    same = pixels = 0
    for split in SPLITS:
        for index, name in enumerate(source.names(split)):
            drawn = ids[source.mask(split, index)]
            expected = np.asarray(Image.open(shared / "coco_yolo" / "masks" / f"{name}.png"))
            same += int((drawn == np.where(np.isin(expected, ids), expected, 0)).sum())
            pixels += drawn.size
    assert same / pixels > 0.99


# --- COCO ------------------------------------------------------------------------------------------------------


def coco_mask(root: Path, annotations: list[dict[str, Any]], **more: Any) -> np.ndarray:
    text(root / "x.json", coco(annotations, **more))
    return only(Coco(root))


def test_coco_shapes(tmp_path: Path) -> None:
    root = one_image(tmp_path)
    hole = [[6, 7], [10, 7], [10, 11], [6, 11]]
    expected = box(1)
    expected[7:11, 6:10] = 0
    assert np.array_equal(coco_mask(root, [{"segmentation": [*polygon(), *polygon(hole)]}]), expected)
    runs = {"size": [30, 40], "counts": [4 * 30 + 5, *[10, 20] * 9, 10, 26 * 30 + 15]}
    assert np.array_equal(coco_mask(root, [{"segmentation": runs}]), box(1))
    packed = {"segmentation": {"size": [30, 40], "counts": "0`U1"}, "category_id": 90}
    assert np.array_equal(coco_mask(root, [{"segmentation": polygon()}, packed]), np.where(box(1), 1, 2))
    crowd = {"segmentation": {"size": [30, 40], "counts": [0, 1200]}, "iscrowd": 1}
    drawn = coco_mask(root, [crowd, {"segmentation": polygon()}, {"segmentation": polygon(hole), "category_id": 90}])
    expected = box(1)
    expected[7:11, 6:10], expected[expected == 0] = 2, 255
    assert np.array_equal(drawn, expected), "the crowd is void, smaller objects lie on larger ones"


def test_coco_brush_masks_of_cvat_are_not_crowds(tmp_path: Path) -> None:
    runs = {"size": [30, 40], "counts": [0, 1200]}
    assert (coco_mask(one_image(tmp_path), [{"segmentation": runs, "iscrowd": 1}]) == 1).all()
    assert "iscrowd is read as run lengths, not crowds" in " ".join(Coco(tmp_path).notes)


def test_coco_reports_what_it_leaves_out(tmp_path: Path) -> None:
    shapes = [
        {"segmentation": polygon()},
        {"segmentation": polygon(BOX[:2])},
        {"segmentation": [[100, 100, 120, 100, 120, 120]]},
        {"segmentation": [], "bbox": [1, 2, 3, 4]},
        {"segmentation": polygon(), "image_id": 99},
        {"segmentation": [[-50, -50, 20, -50, 20, 10, -50, 10]], "category_id": 90},
    ]
    text(one_image(tmp_path) / "x.json", coco(shapes, images=3))
    photograph(tmp_path / "images" / "1.jpg")
    source = Coco(tmp_path)
    notes = " | ".join(source.notes)
    assert "1 of 3 images are not under the root and are left out ('2.jpg')" in notes
    assert "1 image has an entry without any object and count as background" in notes
    assert "1 annotations refer to no image" in notes
    report = check(source)
    assert report.ok
    assert "left out: polygons with fewer than 3 points, 1 in 1 image ('0')" in report.notes
    assert "left out: polygons outside the image, 1 in 1 image ('0')" in report.notes
    assert "left out: objects with a box but no outline, 1 in 1 image ('0')" in report.notes
    [split] = [split for split in SPLITS if "0" in source.names(split)]
    mask = source.mask(split, list(source.names(split)).index("0"))
    assert (mask[:5, :20] == 2).all(), "a polygon is cut to the image"


@pytest.mark.parametrize(
    "names",
    [
        ("annotations/instances_train2017.json", "annotations/instances_val2017.json", "train2017", "val2017"),
        ("train/_annotations.coco.json", "valid/_annotations.coco.json", "train", "valid"),
        ("train.json", "val.json", "images", "images"),
    ],
)
def test_coco_splits_in_the_layouts_of_tools(names: tuple[str, str, str, str], tmp_path: Path) -> None:
    for i, (file, folder) in enumerate(zip(names[:2], names[2:], strict=True)):
        content = coco([{"segmentation": polygon()}])
        content["images"][0]["file_name"] = f"{'ab'[i]}.jpg"
        content["categories"].insert(0, {"id": 0, "name": "my-project", "supercategory": "none"})
        text(tmp_path / file, content)
        photograph(tmp_path / folder / f"{'ab'[i]}.jpg")
    text(tmp_path / "annotations" / "captions_train2017.json", {"images": [], "annotations": []})
    if names[0].startswith("train"):
        (tmp_path / "annotations" / "captions_train2017.json").unlink()
    source = Coco(tmp_path)
    assert [name.split("/")[-1] for split in SPLITS for name in source.names(split)] == ["a", "b"]
    assert source.info.classes == ("dog", "cat"), "Roboflow's category 0 is the project"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"segmentation": {"size": [30, 40], "counts": [10**15]}}, r"run lengths of '0.jpg' do not fill its 40×30"),
        ({"segmentation": {"size": [30, 40], "counts": [-1, 1201]}}, r"do not fill"),
        ({"segmentation": {"size": [10**6, 10**6], "counts": [10**12]}}, r"do not fill"),
        ({"segmentation": {"size": [30, 40], "counts": "é"}}, r"labels of '0.jpg' are not those of coco"),
        ({"segmentation": {"counts": [1]}}, r"not those of coco"),
        ({"segmentation": [["a", "b"]]}, r"not those of coco"),
        ({"segmentation": [[1e400, 0, 1, 1, 2, 2]]}, r"a coordinate is not a number"),
        ({"segmentation": [[1, 2, 3]]}, r"not those of coco"),
        ({"segmentation": polygon(), "category_id": 1}, r"the class None is not in the list of names"),
    ],
)
def test_faulty_annotations_are_one_line(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    text(one_image(tmp_path) / "x.json", coco([change]))
    report = check(Coco(tmp_path))
    [fault] = report.faults
    assert "\n" not in str(fault)
    with pytest.raises(FileError, match=message):
        raise fault


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"images": [1, 2], "annotations": []', r"'images' is not one of COCO"),
        ('{"images": [{"id": 1}], "annotations": []}', r"is not one of COCO \('file_name'\)"),
        ('{"images": [], "annotations": []}', r"it has no images"),
        ('{"images": [], "annotations": [{"image_id": [1]}]}', r"'annotations' is not one of COCO"),
        ('{"images": [, "annotations"', r"x\.json: is not valid JSON at byte 12"),
        ('{"images" "annotations"', r"at byte 10 is '\"' instead of ':'"),
        ('{"images": [], "annotations": [' + '{"a":' * 100_000, r"nested too deeply|not valid JSON"),
        ('{"images": [], "annotations": ' + "[" * 100_000, r"nested too deeply|not valid JSON"),
    ],
)
def test_damaged_json_is_one_line(content: str, message: str, tmp_path: Path) -> None:
    text(one_image(tmp_path) / "x.json", content)
    with pytest.raises(UserError, match=message) as error:
        Coco(tmp_path)
    assert "\n" not in str(error.value)


def test_names_of_files_lead_nowhere_outside(tmp_path: Path) -> None:
    photograph(tmp_path / "secret.jpg")
    root = one_image(tmp_path / "root")
    for name in ("../secret.jpg", str(tmp_path / "secret.jpg"), "images/../../secret.jpg", "%2e%2e/secret.jpg"):
        content = coco([{"segmentation": polygon()}])
        content["images"][0]["file_name"] = name
        text(root / "x.json", content)
        with pytest.raises(UserError, match=r"no image of the annotations is under .*secret\.jpg"):
            Coco(root)
    content["images"][0]["file_name"] = "C:\\elsewhere\\images\\0.jpg"
    text(root / "x.json", content)
    assert np.array_equal(only(Coco(root)), box(1)), "the end of a path of another machine counts"


def test_a_large_file_is_read_entry_by_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four megabytes of annotations need a fraction of that in memory: the window and the places of the entries."""
    monkeypatch.setattr(json_parts, "_CHUNK", 1 << 14)
    monkeypatch.setattr(incseg.data.coco, "MOST_BYTES", 1_000_000)
    root = one_image(tmp_path)
    photograph(root / "images" / "1.jpg")
    points = polygon([[4 + i % 10, 5 + i % 10] for i in range(1_000)])
    content = coco([{"segmentation": polygon()}, *[{"segmentation": points, "image_id": 8}] * 500], images=2)
    size = text(root / "x.json", content).stat().st_size
    assert size > 3_000_000
    del content, points
    tracemalloc.start()
    source = Coco(root)
    [split] = [split for split in SPLITS if "0" in source.names(split)]
    mask = source.mask(split, list(source.names(split)).index("0"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.array_equal(mask, box(1))
    assert peak < size, "all of it at once takes ten times its size"
    [other] = [split for split in SPLITS if "1" in source.names(split)]
    with pytest.raises(FileError, match=r"annotations of '1.jpg' take \d+ MB; at most 1 MB are allowed"):
        source.mask(other, list(source.names(other)).index("1"))


def test_an_annotation_of_too_many_points_is_refused_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_parts, "MOST_BYTES", 1_000_000)
    monkeypatch.setattr(json_parts, "_CHUNK", 1 << 16)
    file = tmp_path / "x.json"
    with file.open("w") as stream:
        stream.write('{"images": [], "annotations": [{"segmentation": [[')
        for _ in range(200):
            stream.write("1.5, 2.5, " * 10_000)
    with file.open("rb") as opened:
        reader = json_parts._Reader(file, opened)
        with pytest.raises(FileError, match=r"the entry at byte 31 takes more than 1 MB; export it with fewer points"):
            list(reader.parts())
        assert opened.tell() < 4_000_000 < file.stat().st_size, "the rest is not even read"


# --- LabelMe ---------------------------------------------------------------------------------------------------


def test_labelme_shapes(tmp_path: Path) -> None:
    stroke = io.BytesIO()
    Image.fromarray(np.eye(10, dtype=np.uint8) * 255).save(stroke, format="PNG")
    shapes = [
        {"label": "a mask", "points": [[4, 5], [13, 14]], "shape_type": "mask",
         "mask": base64.b64encode(stroke.getvalue()).decode()},
        {"label": "square", "points": [[30, 9], [20, 1]], "shape_type": "rectangle"},
        {"label": "round", "points": [[30, 20], [30, 25]], "shape_type": "circle"},
        {"label": "line", "points": [[0, 0], [9, 9]], "shape_type": "line"},
        {"label": "__ignore__", "points": [[0, 28], [40, 28], [40, 30], [0, 30]]},
    ]  # fmt: skip
    text(one_image(tmp_path) / "images/0.json", labelme(shapes))
    photograph(tmp_path / "images" / "not yet.jpg")
    source = LabelMe(tmp_path)
    mask = only(source)
    assert source.info.classes == ("a mask", "line", "round", "square"), "by name"
    assert np.array_equal(mask[5:15, 4:14] == 1, np.eye(10, dtype=bool))
    assert (mask[1:9, 20:30] == 4).all()
    assert abs((mask == 3).sum() - np.pi * 25) < 4
    assert (mask[28:] == 255).all()
    assert "1 of 2 images have no labels yet and are left out ('images/not yet.jpg')" in " ".join(source.notes)
    assert "'__ignore__' is read as not annotated" in " ".join(source.notes)
    assert "left out: shapes of the kind 'line', 1 in 1 image ('0')" in check(source).notes


def test_a_mask_larger_than_its_image_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    bomb = io.BytesIO()
    Image.new("1", (5_000, 5_000)).save(bomb, format="PNG")
    shape = {"label": "a", "points": [[0, 0], [4_999, 4_999]], "shape_type": "mask",
             "mask": base64.b64encode(bomb.getvalue()).decode()}  # fmt: skip
    text(one_image(tmp_path) / "images/0.json", labelme([shape]))
    source = LabelMe(tmp_path)
    with pytest.raises(FileError, match="a mask larger than the image"):
        source.mask("train", 0)
    shape |= {"mask": base64.b64encode(b"not a picture").decode(), "points": [[0, 0], [9, 9]]}
    text(tmp_path / "images/0.json", labelme([shape]))
    with pytest.raises(FileError, match="a mask that cannot be read"):
        LabelMe(tmp_path).mask("train", 0)


@pytest.mark.parametrize("name", ["images\\0.jpg", "../images/0.jpg", "gone/0.jpg"])
def test_labelme_files_in_a_folder_of_their_own(name: str, tmp_path: Path) -> None:
    text(one_image(tmp_path) / "labels/zero.json", labelme([{"label": "a", "points": BOX}], name))
    text(tmp_path / "labels/package.json", {"shapes": 3, "name": "not ours"})
    assert np.array_equal(only(LabelMe(tmp_path)), box(1))


# --- YOLO ------------------------------------------------------------------------------------------------------


def yolo_layout(root: Path, images: str, labels: str) -> None:
    photograph(root / images / "0.jpg")
    text(root / labels / "0.txt", yolo())


@pytest.mark.parametrize(
    ("layout", "files"),
    [
        (("train/images", "train/labels"), {"data.yaml": "train: ../train/images\nval: ../valid/images\nnames: [a]"}),
        (("images/train", "labels/train"), {"data.yaml": "path: ./\ntrain: train.txt\nnames:\n  0: a\n",
                                            "train.txt": "data/images/train/0.jpg\n"}),
        (("images", "labels"), {"classes.txt": "a\n", "notes.json": '{"categories": []}'}),
        (("obj_train_data", "obj_train_data"), {"obj.names": "a\n", "obj.data": "classes = 1",
                                                "train.txt": "data/obj_train_data/0.jpg\n"}),
        (("images/train", "labels/train"), {"my.yaml": "path: /gone/dataset\ntrain: [images/train]\nnames: {0: a}"}),
        (("deep/images", "deep/labels"), {"deep/data.yaml": "train: images\nval: images\nnames: [a]"}),
    ],
)  # fmt: skip
def test_yolo_in_the_layouts_of_tools(layout: tuple[str, str], files: dict[str, str], tmp_path: Path) -> None:
    yolo_layout(tmp_path, *layout)
    for name, content in files.items():
        text(tmp_path / name, content)
    assert np.array_equal(only(Yolo(tmp_path)), box(1))


def test_yolo_without_labels_is_not_labelled_yet_and_empty_is_background(tmp_path: Path) -> None:
    text(tmp_path / "data.yaml", "train: images/train\nval: images/val\nnames: [a]\n")
    for split in ("train", "val"):
        photograph(tmp_path / "images" / split / f"{split}.jpg")
        text(tmp_path / "labels" / split / f"{split}.txt", yolo())
    photograph(tmp_path / "images" / "train" / "nothing there.jpg")
    text(tmp_path / "labels" / "train" / "nothing there.txt", "")
    photograph(tmp_path / "images" / "train" / "not yet.jpg")
    source = Yolo(tmp_path)
    assert source.names("train") == ("train/nothing there", "train/train")
    assert source.names("val") == ("val/val",)
    assert not source.mask("train", 0).any()
    assert "1 of 4 images have no labels yet" in " ".join(source.notes)
    assert "write an empty NAME.txt" in " ".join(source.notes)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0 0.1 0.1 0.5 0.5", r"0\.txt:1: it is a box, not a polygon; export for segmentation"),
        ("7 0.1 0.1 0.5 0.5 0.1 0.5", r"0\.txt:1: the class 7 has no name"),
        ("x 0.1 0.1 0.5 0.5 0.1 0.5", "not those of yolo"),
        ("0 4 5 14 5 14 15", "its points are not between 0 and 1"),
        ("0 nan 0.1 0.5 0.5 0.1 0.5", "a coordinate is not a number"),
    ],
)
def test_faulty_lines_of_yolo(line: str, message: str, tmp_path: Path) -> None:
    made_yolo(one_image(tmp_path))
    text(tmp_path / "data.yaml", "names: [a]")
    text(tmp_path / "labels/0.txt", line)
    with pytest.raises(FileError, match=message):
        only(Yolo(tmp_path))


def test_many_boxes_are_one_line(tmp_path: Path) -> None:
    text(tmp_path / "data.yaml", "names: [a]")
    for i in range(4):
        photograph(tmp_path / "images" / f"{i}.jpg")
        text(tmp_path / "labels" / f"{i}.txt", "0 0.1 0.1 0.5 0.5")
    assert main(["data", "check", "--data", "yolo", "--root", str(tmp_path), "--sheet", "none"]) == 1


def test_a_track_or_score_behind_the_points_is_left_out(tmp_path: Path) -> None:
    made_yolo(one_image(tmp_path))
    text(tmp_path / "labels/0.txt", yolo(number=17).strip() + " 0.93\n")
    assert np.array_equal(only(Yolo(tmp_path)), box(2))


def test_yaml_bombs_are_refused(tmp_path: Path) -> None:
    bomb = "a: &a [x, x]\nb: &b [*a, *a]\nnames: [*b, *b]\n"
    for content, message in ((bomb, "aliases"), ("[" * 30_000, "data.yaml"), ("names: 3", "cannot be read as yolo")):
        text(one_image(tmp_path) / "data.yaml", content)
        with pytest.raises(UserError, match=message) as error:
            Yolo(tmp_path)
        assert "\n" not in str(error.value)


# --- masks in colours ------------------------------------------------------------------------------------------


def test_masks_of_roboflow(tmp_path: Path) -> None:
    for split in ("train", "valid"):
        photograph(tmp_path / split / f"{split}_1.rf.0.jpg")
        Image.fromarray(box(3)).save(tmp_path / split / f"{split}_1.rf.0_mask.png")
        text(tmp_path / split / "_classes.csv", "Pixel Value, Class\n 0, background\n 3, cat\n 1, dog\n")
    source = Cvat(tmp_path)
    assert source.info.classes == ("cat", "dog")
    assert [len(source.names(split)) for split in SPLITS] == [1, 1]
    assert np.array_equal(source.mask("train", 0), box(1))
    assert not [note for note in source.notes if "no labels yet" in note]


def test_masks_of_cvat_by_position_and_with_foreign_colours(tmp_path: Path) -> None:
    made_cvat(one_image(tmp_path))
    mask = tmp_path / "SegmentationClass" / "0.png"
    Image.fromarray(box(2)).save(mask)
    assert np.array_equal(only(Cvat(tmp_path)), box(2)), "grey masks count the lines"
    Image.fromarray(np.array([(0, 0, 0), (1, 2, 3)], dtype=np.uint8)[box(1)]).save(mask)
    with pytest.raises(FileError, match=r"colours that labelmap\.txt does not name \('#010203'\)"):
        only(Cvat(tmp_path))
    text(tmp_path / "labelmap.txt", "cat 1 2 3\n")
    with pytest.raises(FileError, match="'cat 1 2 3' is not of the form name:r,g,b::"):
        Cvat(tmp_path)


def test_cvat_lists_give_the_splits(tmp_path: Path) -> None:
    made_cvat(one_image(tmp_path))
    content = (tmp_path / "SegmentationClass" / "0.png").read_bytes()
    (tmp_path / "SegmentationClass" / "cam 1").mkdir()
    (tmp_path / "SegmentationClass" / "cam 1" / "b.png").write_bytes(content)
    photograph(tmp_path / "JPEGImages" / "cam 1" / "b.jpg")
    photograph(tmp_path / "JPEGImages" / "cam 2" / "b.jpg")
    text(tmp_path / "ImageSets/Segmentation/train.txt", "0\n")
    text(tmp_path / "ImageSets/Segmentation/val.txt", "cam 1/b\n")
    source = Cvat(tmp_path)
    assert (source.names("train"), source.names("val")) == (("0",), ("cam 1/b",))
    assert "1 of 3 images have no labels yet and are left out ('JPEGImages/cam 2/b.jpg')" in " ".join(source.notes)


# --- Label Studio ----------------------------------------------------------------------------------------------


def brush(mask: np.ndarray, strongest: int = 255) -> list[int]:
    """Label Studio's packing of a mask, written from its description: runs of at most 8, single bytes between."""
    values = np.repeat(mask.astype(np.uint8).ravel() * strongest, 4)
    bits = f"{len(values):032b}{7:05b}" + "".join(f"{length - 1:04b}" for length in (3, 4, 8, 16))
    at = 0
    while at < len(values):
        run = 1
        while run < 8 and at + run < len(values) and values[at + run] == values[at]:
            run += 1
        if run > 1:
            bits += f"1{0:02b}{run - 1:03b}{values[at]:08b}"
        else:
            bits += f"0{1:02b}{0:04b}{values[at]:08b}"
        at += run
    bits += "0" * (-len(bits) % 8)
    return [int(bits[i : i + 8], 2) for i in range(0, len(bits), 8)]


def test_labelstudio_regions(tmp_path: Path) -> None:
    results = [
        {"type": "brushlabels", "value": {"format": "rle", "rle": brush(box(1)), "brushlabels": ["painted"]}},
        {"type": "rectanglelabels", "value": {"x": 50, "y": 10, "width": 25, "height": 20, "rotation": 0,
                                              "rectanglelabels": ["square"]}},
        {"type": "ellipselabels", "value": {"x": 75, "y": 75, "radiusX": 10, "radiusY": 20, "rotation": 90,
                                            "ellipselabels": ["round"]}},
        {"type": "keypointlabels", "value": {"x": 1, "y": 1, "width": 0.5, "keypointlabels": ["point"]}},
        {"type": "choices", "value": {"choices": ["good"]}},
    ]  # fmt: skip
    text(one_image(tmp_path) / "export.json", [task(results), {"id": 2, "data": {"image": "/x/1.jpg"}}])
    photograph(tmp_path / "images" / "1.jpg")
    source = LabelStudio(tmp_path)
    mask = only(source)
    assert source.info.classes == ("painted", "point", "round", "square")
    assert np.array_equal(mask == 1, box(1) > 0)
    assert (mask[3:9, 20:30] == 4).all()
    assert (mask == 4).sum() == 60
    assert abs((mask == 3).sum() - np.pi * 4 * 6) < 4
    assert mask[22, 35] == 3, "turned: 6 pixels to the sides, 4 up and down"
    assert "1 of 2 images have no labels yet and are left out ('/x/1.jpg')" in " ".join(source.notes)


def test_labelstudio_in_its_short_form(tmp_path: Path) -> None:
    points = [[100 * x / SIZE[0], 100 * y / SIZE[1]] for x, y in BOX]
    region = {"points": points, "polygonlabels": ["a"], "original_width": SIZE[0], "original_height": SIZE[1]}
    short = {"image": "/data/local-files/?d=images/0.jpg", "id": 3, "tag": [region], "annotation_id": 5}
    text(one_image(tmp_path) / "export.json", [short])
    assert np.array_equal(only(LabelStudio(tmp_path)), box(1))


@pytest.mark.parametrize("codes", [[255] * 20, [0, 0, 0x12, 0xC0, 0xFF], [], [300]])
def test_damaged_strokes_are_one_line(codes: list[int], tmp_path: Path) -> None:
    results = [{"type": "brushlabels", "value": {"rle": codes, "brushlabels": ["a"]}}]
    text(one_image(tmp_path) / "export.json", [task(results)])
    with pytest.raises(FileError, match="not those of labelstudio"):
        only(LabelStudio(tmp_path))


# --- all of them -----------------------------------------------------------------------------------------------


def test_images_of_one_name_are_distinguished_by_their_folders(tmp_path: Path) -> None:
    for folder in ("train/cam", "val/cam", "other"):
        photograph(tmp_path / folder / "a.jpg")
    text(tmp_path / "val" / "labels.json", "{}")
    files = ImageFiles(tmp_path)
    assert files.find("train/cam/a.jpg") == tmp_path / "train/cam/a.jpg"
    assert files.find("a.jpg", tmp_path / "val" / "labels.json") == tmp_path / "val/cam/a.jpg"
    with pytest.raises(UserError, match=r"'a\.jpg' can be .*; rename one of them"):
        files.find("a.jpg")
    assert files.find("b.jpg") is None


def test_links_in_circles_end(tmp_path: Path) -> None:
    photograph(tmp_path / "here" / "a.jpg")
    (tmp_path / "here" / "again").symlink_to(tmp_path)
    assert len(ImageFiles(tmp_path).images()) == 1


@pytest.mark.parametrize(
    ("name", "subset"),
    [
        ("instances_train2017.json", "train"), ("valid/_annotations.coco.json", "val"), ("images/validation/x", "val"),
        ("test/a", "test"), ("training", "train"), ("contest/latest/trainer", ""), ("default", ""),
    ],
)  # fmt: skip
def test_names_of_splits(name: str, subset: str) -> None:
    assert subset_of(name) == subset


def two_images_of_one_name(root: Path) -> None:
    made_coco(root)
    content = coco([{"segmentation": polygon()}], images=2)
    content["images"][1]["file_name"] = "0.png"
    photograph(root / "images" / "0.png")
    text(root / "annotations/instances_default.json", content)


def too_many_classes(root: Path) -> None:
    content = coco([{"segmentation": polygon()}])
    content["categories"] = [{"id": 5 + i, "name": f"c{i}"} for i in range(300)]
    content["annotations"] = [{**content["annotations"][0], "category_id": 5 + i} for i in range(300)]
    text(root / "x.json", content)


def boxes_alone(root: Path) -> None:
    text(root / "x.json", coco([{"bbox": [1, 2, 3, 4]}]))


def nothing_there(root: Path) -> None:
    (root / "x.json").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (two_images_of_one_name, r"'images/0\.jpg' and 'images/0\.png' share the name '0'"),
        (too_many_classes, "has 300 classes .* 1 to 253 are allowed"),
        (boxes_alone, "are boxes without outlines; export polygons or masks"),
        (nothing_there, "has no JSON file of COCO"),
    ],
)
def test_datasets_that_cannot_be_used(make: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    make(one_image(tmp_path))
    with pytest.raises(UserError, match=message):
        Coco(tmp_path)


def test_a_folder_of_no_format_and_of_two(tmp_path: Path) -> None:
    one_image(tmp_path)
    with pytest.raises(UserError, match="no labels of a known format; name the format with --data: folder, coco"):
        detect(tmp_path)
    made_coco(tmp_path)
    made_yolo(tmp_path)
    with pytest.raises(UserError, match="labels of coco and yolo; name the format"):
        detect(tmp_path)


def test_lists_split_formats_that_have_no_splits(tmp_path: Path) -> None:
    for i in range(3):
        photograph(tmp_path / "cam 1" / f"{i}.jpg")
        text(tmp_path / "cam 1" / f"{i}.json", labelme([{"label": "a", "points": BOX}], f"{i}.jpg"))
    text(tmp_path / "val.txt", "cam 1/0\n2.jpg\n")
    source = LabelMe(tmp_path)
    assert source.names("val") == ("cam 1/0", "cam 1/2")
    assert source.names("train") == ("cam 1/1",)
    assert source.val_given
    text(tmp_path / "val.txt", "gone.jpg\n")
    with pytest.raises(FileError, match=r"1 of 1 names have no labelled image \('gone\.jpg'\)"):
        LabelMe(tmp_path)


def test_no_object_anywhere_is_a_fault(tmp_path: Path) -> None:
    text(one_image(tmp_path) / "images/0.json", labelme([]))
    text(tmp_path / "labels.txt", "cat\n")
    report = check(LabelMe(tmp_path))
    assert report.meaning == ["no image shows any of the classes cat; label some objects"]
