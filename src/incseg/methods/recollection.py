"""Recollection: how old classes looked in feature space, without an image of them.

At the end of a step every class it learnt leaves the mean and covariance of its features (`losses.gaussians`), step 0
also those of background. Later steps draw old features from them, which stand in for the negatives that a step does not
show: a one-class step sees little but its class. The idea of replaying prototypes is STAR's (Chen et al., 2023).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from incseg.losses.gaussians import Gaussians, moments
from incseg.losses.prototypes import flatten_positions, membership, nearest
from incseg.methods.base import StepContext

PER_UPDATE = 2048
"""Features drawn for an update, about as many as the positions of ten images at 224 pixels."""
_STATE = ("counts", "means", "factors")


class Recollection:
    """The spread of every class learnt so far and of step 0's background, and the features drawn for an update.

    The draws are made of the run's seed, the step and the number of the update, which is the state: an interrupted step
    goes on with the same ones, and every process has them. Features were kept as the network of their own step gave
    them; what distillation holds still is what makes them hold later.

    Memory: D·(D + 1) values a class, 37 KB with the 96 channels of voc-laptop, 264 KB with 256.
    """

    def __init__(self) -> None:
        self._kept: Gaussians | None = None
        self._drawn: Tensor | None = None
        self._updates = 0
        self._seed: tuple[int, int] = (0, 0)

    @property
    def drawn(self) -> Tensor | None:
        """(PER_UPDATE, D) features of old pixels for this update; None where nothing is known of them."""
        return self._drawn

    def begin_step(self, context: StepContext) -> None:
        self._drawn, self._updates = None, 0
        self._seed = (torch.initial_seed(), context.step.index)
        if context.teacher is not None and self._kept is None:
            context.say("recollect: the model was learnt without it and kept no statistics, so nothing is drawn")

    def draw(self) -> None:
        """For the next update."""
        if self._kept is not None and self._seed[1] > 0:
            seed = int(np.random.SeedSequence([*self._seed, self._updates]).generate_state(1)[0])
            self._drawn = self._kept.draw(PER_UPDATE, torch.Generator().manual_seed(seed))
        self._updates += 1

    @torch.no_grad()
    def end_step(self, context: StepContext) -> None:
        """Keep the spread of the step's classes, in step 0 of background too: later background hides old classes."""
        step, model = context.step, context.model
        first = 0 if context.teacher is None else len(step.old) + 1
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        total: Tensor | None = None
        for batch in context.batches():
            embedding = model(batch.inputs).embedding
            labels = nearest(batch.labels, (embedding.shape[-2], embedding.shape[-1]))
            members = membership(labels, len(step.seen) + 1)[:, first:]
            found = moments(flatten_positions(embedding), members)
            total = found if total is None else total + found
        for module, mode in modes:
            module.training = mode
        if total is not None:
            new = Gaussians.of(total)
            self._kept = new if self._kept is None else self._kept.joined(new)

    def state(self) -> dict[str, Tensor]:
        kept = {} if self._kept is None else {f"recollection.{name}": getattr(self._kept, name) for name in _STATE}
        return {**kept, "recollection.updates": torch.tensor(self._updates)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        if "recollection.means" in state:
            self._kept = Gaussians(*(state[f"recollection.{name}"] for name in _STATE))
        self._updates = int(state.get("recollection.updates", torch.zeros(())))
