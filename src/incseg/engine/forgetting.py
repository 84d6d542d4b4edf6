"""What learning new classes did to the old ones: the model before and the model after, on the same images."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from incseg.data.feeds import Feed, Loaded
from incseg.engine.evaluator import EvalConfig
from incseg.engine.progress import Reporter
from incseg.engine.rundir import RunDir
from incseg.engine.runtime import Runtime
from incseg.files import read_json, read_tensors, write_json
from incseg.losses.pixelwise import row_strips_of_all
from incseg.methods import build_method
from incseg.methods.base import Method
from incseg.metrics.confusion import confusion_counts, iou
from incseg.models.files import load_segmenter
from incseg.models.segmenter import Segmenter
from incseg.protocol import Step
from incseg.types import BACKGROUND, IGNORE, UNSEEN

WORSE_BY = 2.0
"""Points of IoU that an old class must lose to be warned of."""
KEPT_AT_LEAST = 0.9
"""The share of the old classes' pixels that must stay as they were for no warning."""


def tell_changes(
    folder: RunDir, step: Step, feed: Feed, method_settings: dict[str, Any], config: EvalConfig, runtime: Runtime,
    reporter: Reporter,
) -> None:  # fmt: skip
    """Say what became of the classes of step 0 up to `step`, and keep it in the run folder.

    Held-out images are asked, or, where the dataset has none, the step's training images.
    """
    digest = folder.row_digest(step.index)
    changes = read_json(folder.changes) if folder.changes.exists() else {}
    if changes.get("row_digest") != digest:
        models = [_saved(folder, index, method_settings, runtime) for index in (0, step.index)]
        held_out = bool(feed.test_images)
        if held_out:
            batches = feed.testing(step, range(len(feed.test_images)), config.batch_size if config.size else 1)
        else:  # with all the labels that a test would have
            batches = feed.plain(replace(step, train_table=step.test_table), config.batch_size)
        reporter.begin("before and after", len(feed.test_images) or len(feed.train_images[step.index]))
        found = compare_models(models, batches, runtime, reporter)
        reporter.end()
        changes = {"row_digest": digest, "held_out": held_out, **found}
        write_json(folder.changes, changes)
    kind = "held-out" if changes["held_out"] else "training"
    for line in describe(changes, f"{changes['images']} {kind} images"):
        reporter.say(line)


def _saved(folder: RunDir, step: int, settings: dict[str, Any], runtime: Runtime) -> tuple[Segmenter, Method]:
    method = build_method(settings)
    state, _ = read_tensors(folder.state(step))
    method.load_state({name: tensor.to(runtime.device) for name, tensor in state.items()})
    model, _ = load_segmenter(folder.model(step), runtime.device)
    return model, method


@torch.no_grad()
def compare_models(
    models: Sequence[tuple[Segmenter, Method]], batches: Iterable[Loaded], runtime: Runtime, reporter: Reporter
) -> dict[str, Any]:
    """Predict with the (model, method) before and after, on batches with all labels known to the one after; for JSON.

    Per old class: the pixels that the one before takes for it outside the masks of new classes, the share of them that
    the one after gives the same class, a new one, or something else; and both IoUs where the masks show the class.
    Classes of the dataset that neither knows are background.
    """
    (before, _), (after, _) = models
    num_old, num_labels = before.num_classes, after.num_classes + 1
    moved = torch.zeros(num_labels, num_labels, dtype=torch.int64, device=runtime.device)
    confusions = [torch.zeros_like(moved), torch.zeros_like(moved)]
    num_images = 0
    for inputs, labels, indices in batches:
        num_images += len(indices)
        labels, inputs = labels.to(runtime.device), runtime.move(inputs)
        with runtime.autocast():
            logits = [model.eval()(inputs).logits for model, _ in models]
        for rows, strips in row_strips_of_all(logits, (labels.shape[-2], labels.shape[-1])):
            target = torch.where(labels[:, rows] == UNSEEN, BACKGROUND, labels[:, rows])
            found = [
                method.predict(strip, model.increments).labels
                for strip, (model, method) in zip(strips, models, strict=True)
            ]
            is_new = (target > num_old) | (target == IGNORE)
            moved += confusion_counts(found[1], torch.where(is_new, IGNORE, found[0]), num_labels)
            for confusion, labels_found in zip(confusions, found, strict=True):
                confusion += confusion_counts(labels_found, target, num_labels)
        reporter.advance(len(indices))
    names = [name for increment in before.increments for name in increment.classes]
    return {"images": num_images, **_summary(moved.cpu(), [c.cpu() for c in confusions], names)}


def _summary(moved: Tensor, confusions: Sequence[Tensor], names: Sequence[str]) -> dict[str, Any]:
    shown = confusions[0].sum(1)
    shares = [iou(confusion) for confusion in confusions]
    num_old = len(names)
    classes = {}
    for label, name in enumerate(names, start=1):
        classes[name] = {
            **_fates(int(moved[label].sum()), int(moved[label, label]), int(moved[label, num_old + 1 :].sum())),
            "iou": [round(100 * float(share[label]), 2) for share in shares] if shown[label] else None,
        }
    rows = moved[1 : num_old + 1]
    kept = int(rows[:, 1 : num_old + 1].diagonal().sum())
    return {**_fates(int(rows.sum()), kept, int(rows[:, num_old + 1 :].sum())), "classes": classes}


def _fates(pixels: int, kept: int, new: int) -> dict[str, Any]:
    return {"pixels": pixels, "kept": kept, "became_new": new, "became_other": pixels - kept - new}


def describe(changes: dict[str, Any], where: str) -> list[str]:
    """In plain English, a line each; `where` names the images."""
    lines, pixels = [], changes["pixels"]
    if pixels:
        parts = [f"{100 * changes[key] / pixels:.1f} %" for key in ("kept", "became_new", "became_other")]
        lines.append(
            f"old classes on {where}, outside the masks of new ones: of {pixels} pixels that were predicted as old "
            f"classes {parts[0]} are the same now, {parts[1]} a new class, {parts[2]} background or another old one"
        )
    else:
        lines.append(f"old classes on {where}: none was predicted before, so nothing can be said of them")
    tested = {name: of_class["iou"] for name, of_class in changes["classes"].items() if of_class["iou"]}
    if tested:
        shown = ", ".join(f"{name} {pair[0]:.1f} → {pair[1]:.1f}" for name, pair in tested.items())
        lines.append(f"IoU of old classes in the masks, before → after: {shown}")
    worse = [name for name, (was, now) in tested.items() if was - now > WORSE_BY]
    remedy = "a lower --train.lr_later, fewer --train.epochs or --train.frozen_later head keeps more"
    if worse:
        lines.append(f"warning: {', '.join(worse)} lost more than {WORSE_BY:g} points of IoU; {remedy}")
    elif pixels and not tested and changes["kept"] < KEPT_AT_LEAST * pixels:
        lines.append(f"warning: less than {KEPT_AT_LEAST:.0%} of the old classes' pixels stayed the same; {remedy}")
    return lines
