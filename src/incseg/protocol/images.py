"""Which images a step uses, from the classes that each image shows. No pixel is read."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from incseg.types import UserError

Presence = Sequence[Collection[int]]
"""The foreground ids, from 1, that each image shows."""


def presence_matrix(presence: Presence, num_classes: int) -> np.ndarray:
    """Return (images, num_classes + 1) bool; column i is dataset id i, column 0 stays false."""
    matrix = np.zeros((len(presence), num_classes + 1), dtype=bool)
    for image, ids in enumerate(presence):
        if len(ids) and not (min(ids) >= 1 and max(ids) <= num_classes):
            raise UserError(
                f"presence of image {image} is {sorted(ids)}, but the dataset has the ids 1..{num_classes}; "
                "use the presence list of this dataset"
            )
        matrix[image, list(ids)] = True
    return matrix


def overlapped(shown: np.ndarray, groups: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Return, per step, a mask of the images with at least one of its classes."""
    return [np.any(shown[:, list(group)], axis=1) for group in groups]


def disjoint(shown: np.ndarray, groups: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Return `overlapped` without the images that show a class of a later step or of none."""
    masks = []
    not_yet = set(range(1, shown.shape[1]))
    for group, with_new in zip(groups, overlapped(shown, groups), strict=True):
        not_yet -= set(group)
        masks.append(with_new & ~shown[:, sorted(not_yet)].any(axis=1))
    return masks


def pseudo_disjoint(shown: np.ndarray, groups: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Assign each image with a class of the task to exactly one step, rare and so far neglected classes first.

    The greedy rule of MiB's ADE20k lists: images are visited class by class; an image goes to the step of
    its class with the highest score 120·(1 − assigned/total) + (Σ totals of the image's classes)/total.
    """
    step_of = np.full(shown.shape[1], -1)
    for step, group in enumerate(groups):
        step_of[list(group)] = step
    learnt = shown & (step_of >= 0)
    totals = learnt.sum(axis=0)
    assigned = np.zeros_like(totals)
    step_of_image = np.full(len(shown), -1)
    for visited_class in range(1, shown.shape[1]):
        for image in np.flatnonzero(learnt[:, visited_class]):
            if step_of_image[image] >= 0:
                continue
            ids = np.flatnonzero(learnt[image])
            scores = 120 * (1 - assigned[ids] / totals[ids]) + totals[ids].sum() / totals[ids]
            step = step_of[ids[scores.argmax()]]
            step_of_image[image] = step
            assigned[ids[step_of[ids] == step]] += 1
    return [step_of_image == step for step in range(len(groups))]


def held_out(count: int, every: int | None) -> range:
    """Return the training images that are tested on instead of trained with: every N-th, from the middle."""
    if every is None:
        return range(0)
    if not 2 <= every <= count:
        raise UserError(f"data.holdout is {every}; it holds out every N-th of {count} images; give 2 to {count}")
    return range(every // 2, count, every)


def evenly(images: Sequence[int], most: int | None) -> tuple[int, ...]:
    """Return at most `most` of the images, evenly spread."""
    if most is None or len(images) <= most:
        return tuple(images)
    if most < 1:
        raise UserError(f"a limit of {most} images leaves none; give at least 1")
    return tuple(images[i] for i in np.linspace(0, len(images) - 1, most).round().astype(int))
