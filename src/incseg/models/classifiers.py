"""Classifiers: how scores are made of the embedding, and how those of a new step may start."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from incseg.io import find_class

if TYPE_CHECKING:
    from incseg.models.segmenter import Segmenter

CLASSIFIER_STD = 0.01
"""Small weights and zero bias: a new class starts undecided."""


class Classifier(nn.Conv2d):
    """The outputs of one step: a 1×1 convolution with weight (outputs, width, 1, 1) and bias (outputs,)."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__(width, outputs, 1)
        nn.init.normal_(self.weight, std=CLASSIFIER_STD)
        nn.init.zeros_(self.get_parameter("bias"))

    @staticmethod
    def scores(embedding: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return the (B, outputs, h, w) scores of an embedding (B, width, h, w), for the outputs of several steps."""
        return F.conv2d(embedding, weight, bias)


CLASSIFIERS: dict[str, type[Classifier]] = {"linear": Classifier}


def find_classifier(name: str | None) -> type[Classifier]:
    """Return the class behind a name of CLASSIFIERS or behind `package.module:Class`."""
    return find_class("classifier", name or "linear", CLASSIFIERS, Classifier)


@torch.no_grad()
def initialise_from_background(model: Segmenter, move_background: bool = True) -> None:
    """Start the newest classes as equal shares of background (MiB): w = w_bg, b = b_bg − ln(|C^t| + 1), b_bg too.

    The |C^t| + 1 of them then have together the probability that background had, and old classes are unchanged.
    Without `move_background` b_bg is unchanged: the new ones start the same, the sum does not hold.
    """
    first, newest = model.classifiers[0], model.classifiers[-1]
    background_bias = first.get_parameter("bias")[0]
    share = background_bias - math.log(len(model.increments[-1].classes) + 1)
    newest.get_parameter("weight").copy_(first.get_parameter("weight")[:1].expand_as(newest.get_parameter("weight")))
    newest.get_parameter("bias").copy_(share.expand_as(newest.get_parameter("bias")))
    if move_background:
        background_bias.copy_(share)
