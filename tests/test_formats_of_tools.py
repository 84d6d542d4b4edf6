"""Files of the shape that Label Studio 1.23, LabelMe 6.3, Datumaro 1.13, CVAT's Datumaro and Ultralytics 8.4 were seen
to write or to need."""

from __future__ import annotations

import base64
import io
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from test_formats import SIZE, box, brush, coco, labelme, one_image, only, photograph, polygon, task, text, yolo

from incseg.data import build_source
from incseg.data.check import check
from incseg.data.coco import Coco
from incseg.data.convert import convert
from incseg.data.cvat import Cvat
from incseg.data.detect import detect
from incseg.data.files import FileError
from incseg.data.labelme import LabelMe
from incseg.data.labelstudio import LabelStudio
from incseg.data.shapes import Shapes
from incseg.data.source import voc_palette
from incseg.data.yolo import Yolo
from incseg.types import UserError

EVERYWHERE = {"size": [30, 40], "counts": [0, 1200]}
"""Run lengths that cover an image."""


def png(pixels: np.ndarray) -> str:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, format="PNG")
    return base64.b64encode(stream.getvalue()).decode()


# --- COCO of CVAT and Datumaro ---------------------------------------------------------------------------------


def test_a_brush_mask_among_polygons_of_cvat_is_an_object(tmp_path: Path) -> None:
    """CVAT writes iscrowd 1 for a brush mask, also in a file of polygons. Each of its shapes has `occluded`."""
    cvat = {"attributes": {"occluded": False}}
    shapes = [{"segmentation": polygon(), **cvat} for _ in range(3)]
    text(one_image(tmp_path) / "x.json", coco([*shapes, {"segmentation": EVERYWHERE, "iscrowd": 1, **cvat}]))
    assert (only(Coco(tmp_path)) == 1).all()
    text(tmp_path / "x.json", coco([*shapes, {"segmentation": EVERYWHERE, "iscrowd": 1, "category_id": 90}]))
    assert np.array_equal(only(Coco(tmp_path)), np.where(box(1), 1, 255)), "COCO's own crowds have no attributes"


def test_panoptic_pngs_are_not_taken_for_images(tmp_path: Path) -> None:
    """Datumaro writes annotations/panoptic_train/0.png beside the instances of images/train/0.png."""
    content = coco([{"segmentation": polygon()}])
    content["images"][0]["file_name"] = "0.png"
    text(tmp_path / "annotations/instances_train.json", content)
    text(tmp_path / "annotations/panoptic_train.json", coco([{"segments_info": []}]))
    for folder in ("images/train", "annotations/panoptic_train"):
        photograph(tmp_path / folder / "0.png")
    source = Coco(tmp_path)
    assert source.files("train").images == (tmp_path / "images/train/0.png",)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", coco([{"segments_info": []}]), r"a\.json: has panoptic segments, which are not read; export inst"),
        ("a.xml", "<?xml version='1.0'?>\n<annotations><version>1.1</version></annotations>",
         r"labels as XML, which are not read; export 'COCO 1\.0' or 'Segmentation mask 1\.1' from CVAT"),
        ("a.json", {"info": {}, "categories": {"label": {"labels": [{"name": "cat"}]}},
                    "items": [{"id": "0", "annotations": []}]}, r"no labels of a known format"),
    ],
)  # fmt: skip
def test_formats_that_are_not_read_have_a_remedy(name: str, content: Any, message: str, tmp_path: Path) -> None:
    text(one_image(tmp_path) / name, content)
    with pytest.raises(UserError, match=message) as error:
        build_source("auto", tmp_path)
    assert "\n" not in str(error.value)


# --- masks in colours ------------------------------------------------------------------------------------------


def test_a_labelmap_without_colours_has_those_of_voc(tmp_path: Path) -> None:
    text(one_image(tmp_path) / "labelmap.txt", "# label:color_rgb:parts:actions\nbackground:::\ndog:::\ncat:::\n")
    (tmp_path / "SegmentationClass").mkdir()
    Image.fromarray(voc_palette()[box(2)]).save(tmp_path / "SegmentationClass" / "0.png")
    assert np.array_equal(only(Cvat(tmp_path)), box(2))


# --- YOLO ------------------------------------------------------------------------------------------------------


def test_a_task_of_cvat_is_divided_although_its_list_names_all_images(tmp_path: Path) -> None:
    text(tmp_path / "data.yaml", "names:\n  0: a\npath: .\ntrain: train.txt\n")
    for i in range(5):
        photograph(tmp_path / f"images/train/{i}.jpg")
        text(tmp_path / f"labels/train/{i}.txt", yolo())
    text(tmp_path / "train.txt", "".join(f"data/images/train/{i}.jpg\n" for i in range(5)))
    source = Yolo(tmp_path)
    assert len(source.names("train")) + len(source.names("val")) == 5
    assert source.names("val")
    text(tmp_path / "val.txt", "3.jpg\n")
    assert source.root == tmp_path
    assert Yolo(tmp_path).names("val") == ("train/3",)


def test_ultralytics_finds_the_images_from_any_folder(tmp_path: Path) -> None:
    """A path of "." means the current folder there; without path, it is the folder of data.yaml. Both splits are
    needed."""
    convert(Shapes(train_size=2, val_size=1, image_size=32), "yolo", tmp_path / "out", ["train"])
    settings = yaml.safe_load((tmp_path / "out/data.yaml").read_text())
    assert "path" not in settings
    assert settings["train"] == settings["val"] == "images/train"
    source = Yolo(tmp_path / "out")
    assert len(source.names("train")) + len(source.names("val")) == 2


# --- LabelMe ---------------------------------------------------------------------------------------------------


def test_a_mask_that_was_dragged_in_labelme_lies_between_pixels(tmp_path: Path) -> None:
    for shift in (0.0, 0.25, 0.5, -0.25):
        points = [[4 + shift, 5 + shift], [13 + shift, 14 + shift]]
        shape = {"label": "a", "points": points, "shape_type": "mask", "mask": png(np.eye(10, dtype=np.uint8))}
        text(one_image(tmp_path) / "images/0.json", labelme([shape]))
        mask = only(LabelMe(tmp_path))
        assert np.array_equal(mask[5:15, 4:14], np.eye(10, dtype=np.uint8)), shift


# --- Label Studio ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["15598245-", "28782273__"])
def test_the_prefix_of_uploads_in_other_formats_of_label_studio(prefix: str, tmp_path: Path) -> None:
    content = coco([{"segmentation": polygon()}])
    content["images"][0]["file_name"] = f"../../label-studio/data/media/upload/2/{prefix}0.jpg"
    text(one_image(tmp_path) / "result.json", content)
    assert np.array_equal(only(Coco(tmp_path)), box(1))
    (tmp_path / "result.json").unlink()
    text(tmp_path / "classes.txt", "a\n")
    labels = text(tmp_path / "labels" / f"{prefix}0.txt", yolo())
    assert np.array_equal(only(Yolo(tmp_path)), box(1))
    text(tmp_path / "labels" / "0123abcd-0.txt", yolo())
    with pytest.raises(FileError, match=r"0\.txt: '.*0\.txt' is for the same image; keep one of them"):
        Yolo(tmp_path)
    photograph(tmp_path / "images" / f"{prefix}0.jpg")
    (tmp_path / "images" / "0.jpg").unlink()
    assert np.array_equal(only(Yolo(tmp_path)), box(1)), "an export with images has the prefix in both"
    assert labels.is_file()


def test_a_brush_stroke_that_is_half_transparent(tmp_path: Path) -> None:
    """The strokes that label_studio_sdk makes of contours have the value 100 instead of 255."""
    results = [{"type": "brushlabels", "value": {"format": "rle", "rle": brush(box(1), 100), "brushlabels": ["a"]}}]
    text(one_image(tmp_path) / "export.json", [task(results)])
    assert np.array_equal(only(LabelStudio(tmp_path)), box(1))


def test_bitmasks_of_label_studio(tmp_path: Path) -> None:
    """The black pixels of a transparent PNG."""

    def write(alpha: np.ndarray) -> LabelStudio:
        pixels = np.zeros((*alpha.shape, 4), dtype=np.uint8)
        pixels[..., 3] = alpha
        value = {"imageDataURL": f"data:image/png;base64,{png(pixels)}", "bitmasklabels": ["a"]}
        text(one_image(tmp_path) / "export.json", [task([{"type": "bitmasklabels", "value": value}])])
        return LabelStudio(tmp_path)

    assert np.array_equal(only(write(box(255))), box(1))
    for wrong, message in (
        (box(255, (39, 30)), "a bitmask of 39×30 pixels"),
        (box(255, (50, 50)), "a mask larger than the image"),
    ):
        with pytest.raises(FileError, match=message):
            only(write(wrong))


def test_the_last_annotation_of_a_task_counts_in_the_short_form(tmp_path: Path) -> None:
    region = {"points": [[0, 0], [100, 0], [100, 100], [0, 100]], "polygonlabels": ["new"],
              "original_width": SIZE[0], "original_height": SIZE[1]}  # fmt: skip
    short = [
        {"image": "/x/0.jpg", "id": 13, "tag": [region], "annotation_id": 25},
        {"image": "/x/0.jpg", "id": 13, "tag": [{**region, "polygonlabels": ["old"]}], "annotation_id": 13},
    ]
    for entries in (short, short[::-1]):
        text(one_image(tmp_path) / "export.json", entries)
        source = LabelStudio(tmp_path)
        assert source.info.classes == ("new",)
        assert (only(source) == 1).all()
    text(tmp_path / "export.json", [short[0], {**short[1], "id": 14}])
    with pytest.raises(FileError, match="has more than one task; keep one of them"):
        LabelStudio(tmp_path)


def test_a_long_stroke_at_the_start_of_the_short_form_is_recognised(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    noise = generator.integers(0, 2, (150, 200), dtype=np.uint8)
    region = {"format": "rle", "rle": brush(noise), "brushlabels": ["a"], "original_width": 200, "original_height": 150}
    photograph(tmp_path / "0.jpg", (200, 150))
    file = text(tmp_path / "export.json", [{"image": "0.jpg", "id": 3, "tag": [region], "annotation_id": 5}])
    assert file.read_text().index("annotation_id") > 1 << 16
    assert np.array_equal(only(build_source("auto", tmp_path)), noise)


def test_written_tasks_have_numbers(tmp_path: Path) -> None:
    """label_studio_sdk's converter needs them. Label Studio itself gives its own."""
    convert(Shapes(train_size=2, val_size=1, image_size=32), "labelstudio", tmp_path / "out")
    tasks = [one for file in sorted((tmp_path / "out").glob("tasks_*.json")) for one in json.loads(file.read_text())]
    assert [one["id"] for one in tasks] == [1, 2, 3]


# --- brush PNGs of Label Studio --------------------------------------------------------------------------------


def brush_png(root: Path, label: str, mask: np.ndarray, number: int = 0, task: int = 13, annotation: int = 15) -> Path:
    path = root / f"task-{task}-annotation-{annotation}-by-1-{label}-{number}.png"
    Image.fromarray(mask).save(path)
    return path


def tasks_of(root: Path, **images: str) -> Path:
    listed = [{"id": int(task[1:]), "data": {"image": image}} for task, image in images.items()]
    return text(root / "tasks.json", listed)


def test_brush_pngs_with_a_list_of_tasks(tmp_path: Path) -> None:
    """Of several annotations of a task the last counts. Smaller strokes are drawn over larger ones."""
    root = one_image(tmp_path)
    photograph(root / "images" / "1.jpg")
    photograph(root / "images" / "2.jpg")
    tasks_of(root, t13="/data/upload/2/15598245-0.jpg", t14="/data/upload/2/44797aa4-1.jpg", t15="/x/2.jpg")
    brush_png(root, "tag-wall", np.full(SIZE[::-1], 255, dtype=np.uint8))
    brush_png(root, "tag-cat", box(255), 3)
    brush_png(root, "tag-old", box(255), annotation=9)
    brush_png(root, "tag-cat", box(100), task=14)
    assert detect(root) == "labelstudio"
    source = LabelStudio(root)
    assert source.info.classes == ("cat", "wall")
    masks = {name: source.mask(split, i) for split in ("train", "val") for i, name in enumerate(source.names(split))}
    assert np.array_equal(masks["0"], np.where(box(1), 1, 2))
    assert np.array_equal(masks["1"], box(1))
    assert "1 of 3 images have no labels yet and are left out ('/x/2.jpg')" in " ".join(source.notes)
    assert check(source).ok


def test_brush_pngs_with_images_that_are_named_by_their_tasks(tmp_path: Path) -> None:
    photograph(tmp_path / "photos" / "task-13.jpg")
    photograph(tmp_path / "photos" / "task-14.jpg")
    first = brush_png(tmp_path, "tag-wall", np.full(SIZE[::-1], 255, dtype=np.uint8))
    second = brush_png(tmp_path, "tag-cat", box(255))
    brush_png(tmp_path, "tag-no_label", box(255))
    source = LabelStudio(tmp_path)
    assert np.array_equal(only(source), np.where(box(1), 1, 2))
    assert "1 of 2 images have no labels yet and are left out ('task-14.jpg')" in " ".join(source.notes)
    assert "left out: brush PNGs without a label, 1 in 1 image ('photos/task-13')" in check(source).notes
    prints = [source.fingerprint("train")]
    for file in (first, second):
        Image.fromarray(box(255)[::-1].copy()).save(file)
        prints.append(LabelStudio(tmp_path).fingerprint("train"))
    assert len(set(prints)) == 3, "every PNG of an image counts"


def test_the_interface_separates_the_tag_from_the_label(tmp_path: Path) -> None:
    photograph(tmp_path / "task-13.jpg")
    labels = "".join(f'<Label value="{label}"/>' for label in ("a", "a-b", "on/off &amp; up"))
    text(tmp_path / "config.xml", f'<View><BrushLabels toName="image" name="my-tag">{labels}</BrushLabels></View>')
    for number, (label, mask) in enumerate(
        [("a-b", box(255)), ("on-off & up", box(255)[::-1]), ("a-on-off & up", box(255)[:, ::-1])]
    ):
        brush_png(tmp_path, f"my-tag-{label}", mask.copy(), number)
    source = LabelStudio(tmp_path)
    assert source.info.classes == ("a", "a-b", "on/off & up")
    mask = only(source)
    assert (mask[10, 8], mask[20, 8], mask[10, 30]) == (2, 3, 1)


def alone(root: Path) -> None:
    (root / "task-13.jpg").rename(root / "photo.jpg")


def of_another_size(root: Path) -> None:
    brush_png(root, "tag-cat", box(255, (41, 30)), 1)


def broken(root: Path) -> None:
    file = brush_png(root, "tag-cat", box(255), 1)
    file.write_bytes(file.read_bytes()[:60])


def of_an_unknown_label(root: Path) -> None:
    text(root / "config.xml", '<View><BrushLabels name="tag"><Label value="dog"/></BrushLabels></View>')


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (alone, r"\('task-13' …\), not images; put the JSON export beside them, or name the images task-ID\.jpg"),
        (of_another_size, r"1-tag-cat-1\.png: the mask is 41×30 but its image 40×30; export both at one size"),
        (broken, r"1-tag-cat-1\.png: cannot be read as an image"),
        (of_an_unknown_label, r"1-tag-cat-0\.png: its label is not in config\.xml; add it there"),
    ],
)  # fmt: skip
def test_faulty_brush_pngs_are_one_line(change: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    photograph(tmp_path / "task-13.jpg")
    brush_png(tmp_path, "tag-cat", box(255))
    change(tmp_path)
    with pytest.raises(UserError, match=message) as error:
        only(LabelStudio(tmp_path))
    assert "\n" not in str(error.value)


def test_many_brush_pngs_of_a_photograph_take_the_memory_of_a_few(tmp_path: Path) -> None:
    size = (2400, 1600)
    photograph(tmp_path / "task-13.jpg", size)
    for number in range(12):
        stroke = np.zeros(size[::-1], dtype=np.uint8)
        stroke[100 * number :, 50:900] = 255
        brush_png(tmp_path, f"tag-{number:02}", stroke)
    source = LabelStudio(tmp_path)
    tracemalloc.start()
    mask = source.mask("train", 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert mask[1150, 60] == 12
    assert mask[50, 60] == 1
    assert peak < 6 * mask.size, "all twelve take more than twice as much"
