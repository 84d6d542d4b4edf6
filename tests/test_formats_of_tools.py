"""Files of the shape that Label Studio 1.23, LabelMe 6.3, Datumaro 1.13, CVAT's Datumaro and Ultralytics 8.4 were seen
to write or to need."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from test_formats import box, coco, one_image, only, polygon, text

from incseg.data.coco import Coco

EVERYWHERE = {"size": [30, 40], "counts": [0, 1200]}

"""Run lengths that cover an image."""


# --- COCO of CVAT and Datumaro ---------------------------------------------------------------------------------


def test_a_brush_mask_among_polygons_of_cvat_is_an_object(tmp_path: Path) -> None:
    """CVAT writes iscrowd 1 for a brush mask, also in a file of polygons. Each of its shapes has `occluded`."""
    cvat = {"attributes": {"occluded": False}}
    shapes = [{"segmentation": polygon(), **cvat} for _ in range(3)]
    text(one_image(tmp_path) / "x.json", coco([*shapes, {"segmentation": EVERYWHERE, "iscrowd": 1, **cvat}]))
    assert (only(Coco(tmp_path)) == 1).all()
    text(tmp_path / "x.json", coco([*shapes, {"segmentation": EVERYWHERE, "iscrowd": 1, "category_id": 90}]))
    assert np.array_equal(only(Coco(tmp_path)), np.where(box(1), 1, 255)), "COCO's own crowds have no attributes"
