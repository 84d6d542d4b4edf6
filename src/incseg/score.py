"""Test a model on any labelled photographs. Classes are matched by name.

Every photograph is predicted whole and at its own size, like in `incseg predict`, so the figures are those of the
masks that a user gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from rich.table import Table
from rich.text import Text

from incseg.data.extended import folded
from incseg.data.source import Source, Split
from incseg.engine.progress import show_progress
from incseg.inference import Predictor
from incseg.io import counted, first_few
from incseg.metrics import boundary_counts, boundary_iou, confusion_counts, iou, percent
from incseg.types import BACKGROUND, IGNORE, UserError


def score(predictor: Predictor, source: Source, splits: Sequence[Split]) -> dict[str, Any]:
    """Return IoU and boundary IoU of each class that model and dataset share, over all photographs of the splits.

    Classes of the dataset that the model does not know are background. So are predictions of classes that only the
    model knows: masks of new classes alone call an old object background, and to find it is not an error.
    """
    label_of = {folded(name): label for label, name in enumerate(predictor.classes)}
    table = np.full(256, IGNORE, dtype=np.uint8)
    table[BACKGROUND] = BACKGROUND if source.info.has_background else IGNORE
    shared: dict[int, str] = {}
    for number, name in enumerate(source.info.classes, start=1):
        label = label_of.get(folded(name), BACKGROUND)
        table[number] = label if label or source.info.has_background else IGNORE
        if label:
            shared[label] = name
    if not shared:
        raise UserError(
            f"the model knows none of the classes of {source.info.name}; they are {first_few(source.info.classes, 8)}, "
            f"and it knows {first_few(predictor.classes[1:], 8)}"
        )
    pairs = [(split, index) for split in splits for index in range(len(source.names(split)))]
    if not pairs:
        raise UserError(f"{source.info.name} has no photograph in {' and '.join(splits)}; choose another --split")
    num_labels = len(predictor.classes)
    as_shared = np.array([label if label in shared else BACKGROUND for label in range(num_labels)], dtype=np.uint8)
    confusion = torch.zeros(num_labels, num_labels, dtype=torch.int64)
    at_edges = torch.zeros(3, num_labels, dtype=torch.int64)
    images = np.zeros(num_labels, dtype=np.int64)
    with show_progress("testing", len(pairs)) as advance:
        for split, index in pairs:
            photograph, mask = source.pair(split, index)
            target = table[mask]
            predicted = as_shared[predictor.predict(photograph).labels]
            maps = torch.from_numpy(predicted)[None], torch.from_numpy(target)[None]
            confusion += confusion_counts(*maps, num_labels)
            at_edges += boundary_counts(*maps, num_labels)
            images += np.bincount(target.ravel(), minlength=256)[:num_labels] > 0
            advance()
    measures = {"iou": iou(confusion), "boundary_iou": boundary_iou(at_edges)}
    labels = [BACKGROUND, *shared] if source.info.has_background else [*shared]
    classes: dict[str, dict[str, Any]] = {
        predictor.classes[label]: {
            "images": int(images[label]),
            **{
                name: round(100 * float(shares[label]), 2) if images[label] else None
                for name, shares in measures.items()
            },
        }
        for label in sorted(labels)
    }
    shown = [one for one in classes.values() if one["images"]]
    means = {name: round(sum(one[name] for one in shown) / len(shown), 2) if shown else None for name in measures}
    return {"images": len(pairs), "mean": means["iou"], "boundary_mean": means["boundary_iou"], "classes": classes}


def score_table(found: dict[str, Any]) -> Table:
    """Return a table with one row per class, and their mean."""
    table = Table(
        title=Text(f"IoU on {counted(found['images'], 'photograph')}"), title_justify="left", header_style="bold"
    )
    table.add_column("class")
    table.add_column("photographs", justify="right")
    table.add_column("IoU", justify="right")
    table.add_column("at edges", justify="right")
    for name, one in found["classes"].items():
        table.add_row(Text(name), str(one["images"]), percent(one["iou"]), percent(one["boundary_iou"]))
    table.add_section()
    shown = sum(one["iou"] is not None for one in found["classes"].values())
    table.add_row(f"mean of {shown}", "", percent(found["mean"]), percent(found["boundary_mean"]))
    return table
