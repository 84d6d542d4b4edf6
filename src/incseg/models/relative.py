"""A softmax model as an evidential one: its class scores relative to background are the first increment."""

from __future__ import annotations

import torch

from incseg.models.segmenter import Segmenter
from incseg.outputs.evidential import Rectifier, deciding_score
from incseg.types import Increment


@torch.no_grad()
def evidential_from_softmax(model: Segmenter, rectifier: Rectifier) -> Segmenter:
    """The same network without background output: w_i − w_0 and b_i − b_0, so that the odds of every class against
    background are kept, plus the one shift of all biases by which evidence decides as the arg-max did.

    How near both decisions are is said in `deciding_score`. All classes become one increment: they shared one softmax.
    """
    weight = torch.cat([classifier.get_parameter("weight") for classifier in model.classifiers])
    bias = torch.cat([classifier.get_parameter("bias") for classifier in model.classifiers])
    known = Increment(
        classes=tuple(name for increment in model.increments for name in increment.classes),
        ids=tuple(i for increment in model.increments for i in increment.ids),
        train_images=sum(increment.train_images for increment in model.increments),
    )
    with torch.random.fork_rng(devices=[]):  # building draws weights that are overwritten at once
        converted = Segmenter(model.config, background_output=False)
        converted.grow(known)
    shared = {name: value for name, value in model.state_dict().items() if not name.startswith("classifiers.")}
    converted.load_state_dict(shared, strict=False)
    classifier = converted.classifiers[0]
    classifier.get_parameter("weight").copy_(weight[1:] - weight[:1])
    classifier.get_parameter("bias").copy_(bias[1:] - bias[0] + deciding_score(len(known.classes), rectifier))
    return converted.to(weight.device).eval()
