"""SDR: repulsion and attraction of sparse and disentangled representations (Michieli and Zanuttigh, 2021).

SDR counters forgetting in the feature space. Features of an old class stay at its prototype (`matching`), features of
every class are drawn to its prototype (`attraction`), classes are pushed apart (`repulsion`), and sparse features leave
room for later classes (`sparsity_sum`).

The losses on the outputs come in three forms, because the paper and the authors' public code differ (`output`):

mib:    cross-entropy and distillation of MiB: the authors' preset, `--method SDR` of their code. The default.
mib_ce: MiB's cross-entropy and plain distillation: the flags of the explicit command in their README.
kd:     plain cross-entropy and distillation, as the paper describes SDR alone. None of their commands does this.

`start_from_background` also starts new classifiers as MiB does: the paper's SDR+MiB.

A prototype is the running mean of the features (`running_mean`) at the positions labelled with its class, in the step
that learns the class; it is fixed afterwards. In later steps, positions of an old class are those background positions
where the teacher's arg-max is that class. Features are the encoder's last stage, or the head's output
(`Output.embedding`) if the backbone is frozen. Step 0 is trained by cross-entropy alone and collects prototypes.

The losses on features follow the paper, not its code, where the two differ: the code reshapes features in a way that
mixes channels if a batch has more than one image, and draws background to a prototype of zeros.

Differences from the paper: background has no prototype in any setting (the paper gives it one in disjoint step 0).
Attraction and repulsion include the old classes that the teacher predicts; the authors use labels alone. Sparsity takes
the maximum per class and image, not per class and batch, so it does not depend on the number of processes; it reads
negative features as zero and is bounded (`sparsity_sum`). The paper's network ends each block in a ReLU; networks here
may not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from incseg.losses.background import background_cross_entropy_sum, background_distillation_sum
from incseg.losses.distillation import output_distillation_sum
from incseg.losses.means import PixelMean, PixelTerm, Term
from incseg.losses.prototypes import (
    attraction,
    class_means,
    class_sums,
    flatten_positions,
    matching,
    means_of,
    membership,
    position_labels,
    repulsion,
    running_mean,
    sparsity_sum,
)
from incseg.losses.softmax import cross_entropy_sum
from incseg.methods.base import Average, Method, StepContext
from incseg.models.classifiers import initialise_from_background
from incseg.protocol import Step
from incseg.settings import setting
from incseg.types import Batch, Output


class SDR(Method):
    first_step = "cross_entropy+prototypes"

    @dataclass
    class Config:
        """Options of SDR.

        Args:
            output: losses on the outputs: MiB's cross-entropy and distillation (mib, the authors' preset), MiB's
                cross-entropy and plain distillation (mib_ce, their README), or plain ones (kd).
            start_from_background: start new classifiers as shares of background, as MiB does; the authors' preset does
                not.
            lambda_kd: weight of the distillation.
            lambda_matching: weight of the distance between an old class's mean and its prototype.
            lambda_attraction: weight of the distance between features and the prototype of their class.
            lambda_repulsion: weight of the inverse distance between the means of classes.
            lambda_sparsity: weight of the sparsity of features.
        """

        output: Literal["mib", "mib_ce", "kd"] = setting("mib", affects="later")
        start_from_background: bool = setting(False, affects="later")
        lambda_kd: float = setting(100.0, affects="later")  # the authors' preset; they advise 1 to 100
        lambda_matching: float = 0.01  # the authors' preset, as all below
        lambda_attraction: float = 1e-3
        lambda_repulsion: float = 1e-3
        lambda_sparsity: float = 1e-3

    config: Config

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        self._prototypes, self._seen = torch.zeros(0, 0), torch.zeros(0)
        self._reads_embedding = False
        self._sums = torch.zeros(0, 0)

    def begin_step(self, context: StepContext) -> None:
        """Start the new classifiers, and add rows for their prototypes. Row 0, of background, stays empty."""
        if context.teacher is not None and self.config.start_from_background:
            initialise_from_background(context.model)
        config, backbone = context.model.config, context.model.backbone
        self._reads_embedding = config.freeze_backbone
        width = config.width if self._reads_embedding else backbone.channels[-1]
        rows = len(context.step.seen) + 1
        like = context.model.classifiers[0].get_parameter("weight")
        prototypes, seen = like.new_zeros(rows, width), like.new_zeros(rows)
        if known := len(self._seen):
            prototypes[:known], seen[:known] = self._prototypes, self._seen
        self._prototypes, self._seen = prototypes, seen

    def before_update(self, average: Average, step: Step) -> None:
        """Compute the class means of the whole batch, and update the prototypes of the new classes before their use.

        Distances between means are not sums over images, so each part of the batch needs the means of the whole.
        """
        self._sums = average(self._class_sums)
        means, counts = means_of(self._sums)
        new = torch.arange(len(counts), device=counts.device) > len(step.old)
        self._prototypes, self._seen = running_mean(self._prototypes, self._seen, means, counts * new)

    def _class_sums(self, batch: Batch, out: Output, teacher: Output | None) -> Tensor:
        features, _, members = self._positions(batch, out, teacher)
        return class_sums(flatten_positions(features), members)

    def _positions(self, batch: Batch, out: Output, teacher: Output | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the features, the labels of their positions, and the membership of the positions in classes."""
        features = out.embedding if self._reads_embedding or out.encoded is None else out.encoded
        size = (features.shape[-2], features.shape[-1])
        labels = position_labels(batch.labels, teacher.logits if teacher else None, size)
        return features, labels, membership(labels, len(self._seen))

    def pixel_losses(self, logits: Tensor, labels: Tensor, teacher: Tensor | None, step: Step) -> dict[str, PixelTerm]:
        if teacher is None:
            return {"ce": PixelMean(cross_entropy_sum(logits, labels))}
        if self.config.output == "kd":
            ce = cross_entropy_sum(logits, labels)
        else:
            ce = background_cross_entropy_sum(logits, labels, teacher.shape[1])
        distillation = background_distillation_sum if self.config.output == "mib" else output_distillation_sum
        kd = distillation(logits, teacher)
        return {"ce": PixelMean(ce), "kd": PixelMean(kd, self.config.lambda_kd, over="all")}

    def losses(self, batch: Batch, out: Output, teacher: Output | None, step: Step) -> dict[str, Term]:
        return super().losses(batch, out, teacher, step) | self._feature_losses(batch, out, teacher, step)

    def _feature_losses(self, batch: Batch, out: Output, teacher: Output | None, step: Step) -> dict[str, Term]:
        """Return the losses on features; none in step 0, which only collects prototypes."""
        if teacher is None:
            return {}
        config = self.config
        features, labels, members = self._positions(batch, out, teacher)
        positions = flatten_positions(features)
        means, counts = class_means(positions, members, self._sums)
        row = torch.arange(len(counts), device=counts.device)
        is_old = (row > 0) & (row <= len(step.old))
        present = (counts > 0) & (self._seen > 0)
        return {
            "matching": config.lambda_matching * matching(means, self._prototypes, present & is_old),
            "attraction": config.lambda_attraction * attraction(positions, members, self._prototypes, counts, present),
            "repulsion": config.lambda_repulsion * repulsion(means, present),
            "sparsity": config.lambda_sparsity * sparsity_sum(features, labels) / counts.sum().clamp(min=1),
        }

    def recipe(self, step: int) -> dict[str, Any]:
        # until 2026-11 the default of `output` was kd
        return super().recipe(step) | ({"revision": 2} if step else {})

    def state(self) -> dict[str, Tensor]:
        return {"prototypes": self._prototypes, "seen": self._seen}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self._prototypes, self._seen = state["prototypes"], state["seen"]
