"""EWF, endpoints weight fusion (Xiao et al., 2023): after a step, a mean of the model before it and after it.

Two networks that began from the same weights lie in one valley, so that a point between them remembers what the old one
knew and has learnt what the new one did; the more classes are old, the nearer to the old one (`fusion_share`). It costs
nothing in training and goes with any method (`--train.fusion ewf`); `fuse` is the whole of it.

Where ours departs: the share counts foreground classes, the authors' also background (√(1/16) against √(1/17) in the
first step of 15-1). Their MiB+EWF trains no old classifier (`--method.freeze_old true`), ours does unless told so.
"""

from __future__ import annotations

import math

import torch

from incseg.models.segmenter import Segmenter


def fusion_share(num_new: int, num_all: int) -> float:
    """a = √(n_new / n_all), the share of the new model: n_new classes of the step, n_all seen with it."""
    return math.sqrt(num_new / num_all)


@torch.no_grad()
def fuse(model: Segmenter, old: Segmenter, share: float) -> None:
    """θ ← (1 − a)·θ_old + a·θ for every parameter and running statistic that `old` has; the new classifier stays.

    `share` 1 leaves the model as it is, 0 gives back the old one beside the new classifier. Counters, which are
    integers, stay the new model's.
    """
    state = model.state_dict()
    for name, before in old.state_dict().items():
        if before.is_floating_point():
            state[name].copy_(torch.lerp(before, state[name], share))
