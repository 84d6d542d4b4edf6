"""How the classifier of a new step may start."""

from __future__ import annotations

import math

import torch

from incseg.models.segmenter import Segmenter


@torch.no_grad()
def initialise_from_background(model: Segmenter, move_background: bool = True) -> None:
    """Start the newest classes as equal shares of background (MiB): w = w_bg, b = b_bg − ln(|C^t| + 1), b_bg too.

    The |C^t| + 1 of them then have together the probability that background had, and every old class keeps its own.
    Without `move_background` b_bg stays as it is: the new ones start the same, the sum does not hold.
    """
    first, newest = model.classifiers[0], model.classifiers[-1]
    background_bias = first.get_parameter("bias")[0]
    share = background_bias - math.log(len(model.increments[-1].classes) + 1)
    newest.get_parameter("weight").copy_(first.get_parameter("weight")[:1].expand_as(newest.get_parameter("weight")))
    newest.get_parameter("bias").copy_(share.expand_as(newest.get_parameter("bias")))
    if move_background:
        background_bias.copy_(share)
