"""SDR: repulsion and attraction of sparse and disentangled representations (Michieli and Zanuttigh, 2021).

Forgetting is fought where classes take shape, in the features: those of an old class stay at its prototype
(`matching`), every class gathers round its own (`attraction`), classes move apart (`repulsion`), and a term meant to
make features sparse leaves room for more (`sparsity_sum`). On the outputs: cross-entropy and distillation
(`output: kd`), or the two losses of MiB (`output: mib`, the paper's SDR+MiB).

Prototypes are running means of features (`running_mean`) over the positions that the labels give to a class, in the
step that learns it; later it rests, and the positions of an old class are background where the teacher's arg-max
says so. Features are the encoder's last stage; where the backbone is frozen it cannot change, and the head's output
(`Output.embedding`) is taken instead. Step 0 is plain cross-entropy, during which prototypes are gathered.

Where ours departs: background has no prototype in any setting (the paper gives it one in disjoint step 0), and the
old classes that the teacher sees are gathered and parted too, where the paper's code takes labels alone; sparsity
takes the maximum per class and image, not per class and batch, so that it does not depend on the number of processes,
reads negative features as zero, and is bounded (`sparsity_sum`). Its network ends each block in ReLU, ours may not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
from incseg.protocol import Step
from incseg.types import Batch, Output


class SDR(Method):
    first_step = "cross_entropy+prototypes"

    @dataclass
    class Config:
        """Options of SDR.

        Args:
            output: losses on the outputs: cross-entropy and distillation (kd), or those of MiB (mib).
            lambda_kd: weight of the distillation.
            lambda_matching: weight of the distance between an old class's mean and its prototype.
            lambda_attraction: weight of the distance between features and the prototype of their class.
            lambda_repulsion: weight of the inverse distance between the means of classes.
            lambda_sparsity: weight of the sparsity of features.
        """

        output: Literal["kd", "mib"] = "kd"
        lambda_kd: float = 100.0  # the authors' preset; they advise 1 to 100
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
        """Room for the prototypes of the new classes: row 0, background's, stays empty."""
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
        """Take the means of classes over the whole batch; prototypes of the new classes move before they are used.

        Distances between means are not sums over images, so each part needs the means of all of them.
        """
        self._sums = average(self._class_sums)
        means, counts = means_of(self._sums)
        new = torch.arange(len(counts), device=counts.device) > len(step.old)
        self._prototypes, self._seen = running_mean(self._prototypes, self._seen, means, counts * new)

    def _class_sums(self, batch: Batch, out: Output, teacher: Output | None) -> Tensor:
        features, _, members = self._positions(batch, out, teacher)
        return class_sums(flatten_positions(features), members)

    def _positions(self, batch: Batch, out: Output, teacher: Output | None) -> tuple[Tensor, Tensor, Tensor]:
        """Features, the labels of their positions, and to which classes these belong."""
        features = out.embedding if self._reads_embedding else out.stages[-1]
        size = (features.shape[-2], features.shape[-1])
        labels = position_labels(batch.labels, teacher.logits if teacher else None, size)
        return features, labels, membership(labels, len(self._seen))

    def pixel_losses(self, logits: Tensor, labels: Tensor, teacher: Tensor | None, step: Step) -> dict[str, PixelTerm]:
        if teacher is None:
            return {"ce": PixelMean(cross_entropy_sum(logits, labels))}
        if self.config.output == "mib":
            ce = background_cross_entropy_sum(logits, labels, teacher.shape[1])
            kd = background_distillation_sum(logits, teacher)
        else:
            ce, kd = cross_entropy_sum(logits, labels), output_distillation_sum(logits, teacher)
        return {"ce": PixelMean(ce), "kd": PixelMean(kd, self.config.lambda_kd, over="all")}

    def losses(self, batch: Batch, out: Output, teacher: Output | None, step: Step) -> dict[str, Term]:
        return super().losses(batch, out, teacher, step) | self._feature_losses(batch, out, teacher, step)

    def _feature_losses(self, batch: Batch, out: Output, teacher: Output | None, step: Step) -> dict[str, Term]:
        """None in step 0, where prototypes are only gathered."""
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

    def state(self) -> dict[str, Tensor]:
        return {"prototypes": self._prototypes, "seen": self._seen}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self._prototypes, self._seen = state["prototypes"], state["seen"]
