"""Files of the shape that Label Studio 1.23, LabelMe 6.3, Datumaro 1.13, CVAT's Datumaro and Ultralytics 8.4 were seen
to write or to need."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from test_formats import box, coco, labelme, one_image, only, photograph, polygon, text, yolo

from incseg.data import build_source
from incseg.data.coco import Coco
from incseg.data.convert import convert
from incseg.data.cvat import Cvat
from incseg.data.files import FileError
from incseg.data.labelme import LabelMe
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
