"""Forgetting: compare the models before and after new classes were learnt, on the same images."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from incseg.data.loaders import Loaded, Loaders
from incseg.engine.checkpoint import load_step
from incseg.engine.evaluator import EvalConfig
from incseg.engine.progress import with_progress
from incseg.engine.rundir import RunDir
from incseg.engine.runtime import Runtime
from incseg.io import read_json, write_json
from incseg.losses.pixelwise import row_strips_of_all
from incseg.methods import build_method
from incseg.methods.base import Method
from incseg.metrics import confusion_counts, iou
from incseg.models.files import load_segmenter
from incseg.models.segmenter import Segmenter
from incseg.protocol import Step
from incseg.types import BACKGROUND, IGNORE, UNSEEN


def measure_forgetting(
    folder: RunDir, step: Step, loaders: Loaders, method_settings: dict[str, Any], config: EvalConfig, runtime: Runtime,
    improved: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Compare the models of step 0 and of `step`. The result is saved in the run folder and measured only once.

    Compare on the held-back images or, if the dataset has none, on the step's training images.

    improved: the model that was extended if it knew some of the new classes, which the model of step 0 does not.
    """
    digest = folder.row_digest(step.index)
    found = read_json(folder.forgetting) if folder.forgetting.exists() else {}
    if found.get("row_digest") != digest:
        models = [_saved(folder, index, method_settings, runtime) for index in (0, step.index)]
        extended = None
        if improved:  # a model file may have no state of its method beside it
            extended = load_segmenter(improved)[0].to(runtime.device), build_method(method_settings)
        held_out = bool(loaders.test_images)
        if held_out:
            batches = loaders.testing(step, range(len(loaders.test_images)), config.batch_size if config.size else 1)
        else:  # with the labels of the test
            batches = loaders.plain(replace(step, train_table=step.test_table), config.batch_size)
        total = len(loaders.test_images) or len(loaders.train_images[step.index])
        compared = compare_models(models, with_progress(batches, "before and after", total), runtime, extended)
        found = {"row_digest": digest, "held_out": held_out, **compared}
        write_json(folder.forgetting, found)
    return found


def _saved(folder: RunDir, step: int, settings: dict[str, Any], runtime: Runtime) -> tuple[Segmenter, Method]:
    method = build_method(settings)
    return load_step(folder.model(step)).restore(method, runtime.device), method


@torch.no_grad()
def compare_models(
    models: Sequence[tuple[Segmenter, Method]],
    batches: Iterable[Loaded],
    runtime: Runtime,
    extended: tuple[Segmenter, Method] | None = None,
) -> dict[str, Any]:
    """Predict with the (model, method) before and after, and return the comparison as plain values.

    The batches have the labels of all classes that the model after knows; other classes are background.

    classes: for each old class, the pixels that the model before gives it outside new objects; the numbers of these
             that the model after gives the same class, a new one (by name) or another label; and both IoUs if the masks
             show the class.
    new:     for each new class, the images and pixels with its label, the pixels predicted as it, its IoU, and the old
             class that it lies on: the one that the model before predicts on at least half of its pixels, if there is
             one. If the model `extended` knows the class, also the IoU of that model, as iou_before.
    """
    (before, _), (after, _) = models
    names = _names(after)
    counted = zero_counts(after.num_classes, before.num_classes)
    # all classes of the extended model are among those of the model after, in another order
    known = _names(extended[0]) if extended else []
    labels_after = torch.tensor([BACKGROUND, *(names.index(name) + 1 for name in known)], device=runtime.device)
    models = [*models, *([extended] if extended else [])]
    for inputs, labels, _ in batches:
        counted.add_images(labels)
        labels, inputs = labels.to(runtime.device), runtime.move(inputs)
        with runtime.autocast():
            logits = [model.eval().scores(inputs) for model, _ in models]
        near = near_new_objects(labels, before.num_classes, MARGIN)
        for rows, strips in row_strips_of_all(logits, (labels.shape[-2], labels.shape[-1])):
            first, second, *third = (
                method.predict(strip, model.increments).labels
                for strip, (model, method) in zip(strips, models, strict=True)
            )
            counted.add(first, second, labels[:, rows], near[:, rows])
            if third:
                counted.add_extended(labels_after[third[0].long()], labels[:, rows])
    return counted.summary(names, known)


def _names(model: Segmenter) -> list[str]:
    return [name for increment in model.increments for name in increment.classes]


MARGIN = 8
"""Width in pixels of the border of a new object, half a cell of the feature map. Old classes are not compared there."""


@dataclass
class Counted:
    """Pixel counts of the models before and after.

    moved:      (N+1, N+1) by the label before and the label after, outside new objects and a margin around them.
    confusions: confusion matrices of both models, row = mask.
    showing:    (N+1,) number of images that show each label.
    extended:   confusion matrix of the model that was extended, if it knew some of the new classes.
    """

    num_old: int
    moved: Tensor
    confusions: tuple[Tensor, Tensor]
    showing: Tensor
    extended: Tensor
    images: int = 0

    def add_images(self, labels: Tensor) -> None:
        self.images += len(labels)
        for one in labels:
            self.showing += (torch.bincount(one.flatten(), minlength=256)[: len(self.showing)] > 0).cpu()

    def add(self, before: Tensor, after: Tensor, labels: Tensor, near: Tensor) -> None:
        """Count (B, H, W) learnt labels by both models, the labels of the masks including UNSEEN and IGNORE, and
        whether a pixel belongs to a new object or is near one."""
        num_labels = len(self.moved)
        target = torch.where(labels == UNSEEN, BACKGROUND, labels)
        self.moved += confusion_counts(after, torch.where(near, IGNORE, before), num_labels).cpu()
        for confusion, found in zip(self.confusions, (before, after), strict=True):
            confusion += confusion_counts(found, target, num_labels).cpu()

    def add_extended(self, found: Tensor, labels: Tensor) -> None:
        """Count (B, H, W) labels by the model that was extended, and the labels of the masks."""
        target = torch.where(labels == UNSEEN, BACKGROUND, labels)
        self.extended += confusion_counts(found, target, len(self.moved)).cpu()

    def summary(self, names: Sequence[str], known: Sequence[str] = ()) -> dict[str, Any]:
        """Return plain values. `names` are the names of the labels from 1, `known` those of the extended model."""
        labelled = self.confusions[0].sum(1)
        shares = [iou(confusion) for confusion in self.confusions]
        num_old, new = self.num_old, range(self.num_old + 1, len(names) + 1)

        def percent(share: Tensor, label: int) -> float:
            return round(100 * float(share[label]), 2)

        def before_of(label: int) -> float | None:
            return percent(iou(self.extended), label) if labelled[label] else None

        classes = {}
        for label, name in enumerate(names[:num_old], start=1):
            row = self.moved[label]
            classes[name] = {
                **_shares(int(row.sum()), int(row[label]), int(row[num_old + 1 :].sum())),
                "taken_by": {names[other - 1]: int(row[other]) for other in new if row[other]},
                "iou": [percent(share, label) for share in shares] if labelled[label] else None,
            }
        rows = self.moved[1 : num_old + 1]
        unchanged = int(rows[:, 1 : num_old + 1].diagonal().sum())
        return {
            "images": self.images,
            **_shares(int(rows.sum()), unchanged, int(rows[:, num_old + 1 :].sum())),
            "classes": classes,
            "new": {
                names[label - 1]: {
                    "images": int(self.showing[label]),
                    "labelled": int(labelled[label]),
                    "predicted": int(self.confusions[1][:, label].sum()),
                    "iou": percent(shares[1], label) if labelled[label] else None,
                    "lies_on": self._host(names, label),
                    **({"iou_before": before_of(label)} if names[label - 1] in known else {}),
                }
                for label in new
            },
        }

    def _host(self, names: Sequence[str], label: int) -> str | None:
        """Return the old class that the model before predicts on at least half of the pixels of a new label."""
        predicted = self.confusions[0][label]
        most = predicted[1 : self.num_old + 1].max(0) if self.num_old else None
        is_host = most is not None and 0 < predicted.sum() <= 2 * most.values
        return names[int(most.indices)] if most is not None and is_host else None


def near_new_objects(labels: Tensor, num_old: int, margin: int) -> Tensor:
    """Return (B, H, W): whether a pixel is void, of a class after the first `num_old`, or within `margin` pixels of
    one."""
    is_new = (labels > num_old) & (labels != UNSEEN) & (labels != IGNORE)
    wide = F.max_pool2d(is_new[:, None].float(), 2 * margin + 1, stride=1, padding=margin)[:, 0] > 0
    return wide | (labels == IGNORE)


def zero_counts(num_classes: int, num_old: int) -> Counted:
    """Return counts of zero for models with these numbers of classes after and before."""
    zero = torch.zeros(num_classes + 1, num_classes + 1, dtype=torch.int64)
    showing = torch.zeros(num_classes + 1, dtype=torch.int64)
    return Counted(num_old, zero, (zero.clone(), zero.clone()), showing, zero.clone())


def _shares(pixels: int, unchanged: int, new: int) -> dict[str, Any]:
    return {"pixels": pixels, "kept": unchanged, "became_new": new, "became_other": pixels - unchanged - new}
