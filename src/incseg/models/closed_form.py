"""A head that is solved, not trained: fixed random features of the frozen network, and scores by least squares.

It stores sums over the cells of all images so far (losses/least_squares.py), but no image and no feature of an image.
The sums are saved with the model. So a class can be added, learnt further or removed in seconds, against everything
that the model has seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from incseg.losses.least_squares import Sums, double, log_odds, packed, unpacked
from incseg.outputs.evidential import Rectifier, odds_log_probabilities
from incseg.types import BACKGROUND

_OFFSET_STD = 0.3
_LEAST_SCALE = 1e-3


@dataclass(frozen=True)
class Design:
    """Settings of the random features; saved with the model.

    columns:   number of random features; more are more accurate, and the sums grow with their square.
    seed:      seed of the random weights.
    embedding: weight of the trained head's embedding among the inputs; 0 if the head was never trained.
    """

    columns: int = 2048
    seed: int = 0
    embedding: float = 3.0


class ClosedForm(nn.Module):
    """Random features φ = [ReLU(P·x + b), 1] of a cell, scores W·φ of background and classes, and the sums for W.

    x is the trained head's embedding, the backbone's stages, and the mean of the last stage over the image,
    standardised. P and b are drawn from a seed.

    weights:   (L,) weight of a cell of each label in the sums; set when the label is first learnt.
    shifts:    (L,) added to the log-odds of each class: how readily it is predicted.
    waiting:   classes that are about to be learnt further; `waiting_cross` and `waiting_counts` have their sums.
    sgd_share: weight of the trained odds against the solved ones, for classes with a trained classifier.
    """

    mean: Tensor
    scale: Tensor
    gram: Tensor
    cross: Tensor
    counts: Tensor
    weights: Tensor
    shifts: Tensor
    weight: Tensor
    waiting_cross: Tensor
    waiting_counts: Tensor
    projection: Tensor
    offset: Tensor

    def __init__(self, design: Design, widths: Sequence[int], rectifier: Rectifier = "exp_sigmoid") -> None:
        """widths: channels of the embedding and of the stages that the head reads."""
        super().__init__()
        self.design, self.widths, self.rectifier = design, tuple(widths), rectifier
        self.sgd_share = 1.0
        self.waiting: list[str] = []
        inputs = (widths[0] if design.embedding else 0) + sum(widths[1:]) + widths[-1]
        size = design.columns + 1
        self.register_buffer("mean", torch.zeros(inputs))
        self.register_buffer("scale", torch.ones(inputs))
        self.register_buffer("gram", torch.zeros(size * (size + 1) // 2))
        for name in ("cross", "weight"):
            self.register_buffer(name, torch.zeros(1, size))
        for name in ("counts", "shifts"):
            self.register_buffer(name, torch.zeros(1))
        self.register_buffer("weights", torch.ones(1))
        # numpy promises that this generator gives the same numbers in every version.
        random = np.random.RandomState(design.seed)
        emphasis = np.ones(inputs)
        emphasis[: widths[0] if design.embedding else 0] = design.embedding
        projection = random.standard_normal((design.columns, inputs)) * emphasis / np.linalg.norm(emphasis)
        offset = _OFFSET_STD * random.standard_normal(design.columns)
        self.register_buffer("projection", torch.from_numpy(projection).float(), persistent=False)
        self.register_buffer("offset", torch.from_numpy(offset).float(), persistent=False)

    @property
    def num_labels(self) -> int:
        return len(self.counts)

    def about(self) -> dict[str, Any]:
        """Return the description for a model file."""
        described = {"widths": self.widths, "rectifier": self.rectifier, "sgd_share": self.sgd_share}
        return {**asdict(self.design), **described, "labels": self.num_labels, "waiting": self.waiting}

    @staticmethod
    def from_about(about: dict[str, Any]) -> ClosedForm:
        design = Design(int(about["columns"]), int(about["seed"]), float(about["embedding"]))
        if not 1 <= design.columns <= 2**14 or not all(type(w) is int and 0 < w < 2**16 for w in about["widths"]):
            raise ValueError(f"its closed form has {design.columns} columns and widths {about['widths']}")
        solved = ClosedForm(design, about["widths"], about["rectifier"])
        solved.sgd_share = float(about["sgd_share"])
        solved.set_labels(int(about["labels"]))
        for name in about.get("waiting", []):
            solved._wait(str(name), solved.cross[:1], solved.counts[:1])
        return solved

    def set_labels(self, labels: int) -> None:
        """Extend to `labels` labels, including background. New labels have no cell yet."""
        more = labels - self.num_labels
        if more < 0:
            raise ValueError(f"there are {self.num_labels} labels, more than {labels}")
        for name, value in (("cross", 0.0), ("weight", 0.0), ("counts", 0.0), ("shifts", 0.0), ("weights", 1.0)):
            old = self.get_buffer(name)
            self.register_buffer(name, torch.cat([old, old.new_full((more, *old.shape[1:]), value)]))

    def drop_label(self, label: int) -> None:
        """Remove a label. Its cells become background."""
        sums, weight = self.sums().without(label), without_row(self.weight, label)
        keep = [i for i in range(self.num_labels) if i != label]
        for name in ("cross", "counts", "shifts", "weights"):
            self.register_buffer(name, self.get_buffer(name)[keep])
        self.weight = weight
        self.take(sums)

    def set_aside(self, label: int, name: str) -> None:
        """Remove a label, and store its sums until the class is learnt further."""
        self._wait(name, self.cross[label : label + 1], self.counts[label : label + 1])
        self.cross[label] = self.weight[label] = 0  # nothing is left to become background
        self.counts[label] = 0
        self.drop_label(label)

    def _wait(self, name: str, cross: Tensor, counts: Tensor) -> None:
        self.register_buffer("waiting_cross", torch.cat([self.waiting_cross, cross]) if self.waiting else cross.clone())
        self.register_buffer(
            "waiting_counts", torch.cat([self.waiting_counts, counts]) if self.waiting else counts.clone()
        )
        self.waiting.append(name)

    def take_back(self, names: Sequence[str], sums: Sums, first: int) -> Sums:
        """Add the stored sums of classes that were set aside; `names` have the labels from `first` on."""
        cross, counts = sums.cross.clone(), sums.counts.clone()
        for label, name in enumerate(names, start=first):
            if name in self.waiting:
                place = self.waiting.index(name)
                cross[label] += double(self.waiting_cross[place])
                counts[label] += double(self.waiting_counts[place])
        return Sums(sums.gram, cross, counts)

    def nothing_waits(self) -> None:
        if self.waiting:
            self.waiting = []
            del self.waiting_cross, self.waiting_counts

    def knows(self, label: int) -> bool:
        """Return whether the sums have cells of this label."""
        return label < self.num_labels and bool(self.counts[label] > 0)

    def sums(self) -> Sums:
        size = self.design.columns + 1
        return Sums(unpacked(double(self.gram), size), double(self.cross), double(self.counts))

    def take(self, sums: Sums) -> None:
        """Store these sums."""
        self.gram = packed(sums.gram).to(self.gram)
        self.cross, self.counts = sums.cross.to(self.cross), sums.counts.to(self.counts)

    def standardise(self, inputs: Tensor) -> None:
        """Set mean and deviation to those of (n, d) inputs of some cells."""
        self.mean, self.scale = inputs.mean(0), inputs.std(0) + _LEAST_SCALE

    def inputs(self, embedding: Tensor, stages: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the inputs of each cell, (B, d_local, h, w), and those of the whole image, (B, d_image, 1, 1)."""
        last, size = stages[-1], embedding.shape[-2:]
        maps = [*([embedding] if self.design.embedding else []), *stages]
        maps = [
            m if m.shape[-2:] == size else F.interpolate(m, size, mode="bilinear", align_corners=False) for m in maps
        ]
        return torch.cat(maps, 1), last.mean((2, 3), keepdim=True)

    def features(self, embedding: Tensor, stages: Sequence[Tensor]) -> Tensor:
        """Return (B, D, h, w) random features, without the constant one."""
        local, image = self.inputs(embedding, stages)
        number = local.shape[1]
        weight = (self.projection / self.scale)[..., None, None]
        offset = self.offset - (self.projection / self.scale) @ self.mean
        return F.relu(F.conv2d(local, weight[:, :number], offset) + F.conv2d(image, weight[:, number:]))

    def cell_features(self, local: Tensor, image: Tensor) -> Tensor:
        """Return (n, D + 1) `features` and the constant one, of cells with inputs (n, d_local) and (n, d_image)."""
        x = (torch.cat([local, image], 1) - self.mean) / self.scale
        found = F.relu(F.linear(x, self.projection, self.offset))
        return torch.cat([found, found.new_ones(len(found), 1)], 1)

    def cell_log_odds(self, found: Tensor) -> Tensor:
        """Return (n, L − 1) log-odds of cells with `cell_features`."""
        return log_odds(found @ self.weight.T) + self.shifts[1:]

    def forward(self, random: Tensor) -> Tensor:
        """Return (B, L − 1, h, w) log-odds of every class against background, from `features`."""
        return log_odds(_scores(random, self.weight)) + self.shifts[1:].view(1, -1, 1, 1)

    def combine(self, trained: Tensor | None, sizes: Sequence[int], labels: Sequence[int], solved: Tensor) -> Tensor:
        """Return the (B, C, …) scores of all classes, in the order of learning.

        Trained odds are sharper than solved ones, so a solved class does not compete with them directly. Its distance
        from the best trained class is that of the closed form alone. All scores are log-odds, and trained classes mix
        their odds with the solved ones.

        trained: raw scores of increments with trained classifiers, of `sizes` classes each, whose labels are `labels`.
        solved:  (B, C, …) output of `forward`, of the same height and width.
        """
        if trained is None:
            return solved
        own, known = solved[:, [label - 1 for label in labels]], [self.knows(label) for label in labels]
        best = own[:, known].amax(1, keepdim=True).clamp(min=0) if any(known) else torch.zeros_like(solved[:, :1])
        log_p = odds_log_probabilities(trained, sizes, self.rectifier)
        odds = log_p[:, 1:] - log_p[:, :1]
        shape = (1, -1, *[1] * (odds.ndim - 2))
        share = torch.tensor([self.sgd_share if k else 1.0 for k in known]).to(odds).view(shape)
        scores = share * odds + (1 - share) * own
        lift = scores.amax(1, keepdim=True).clamp(min=0) - best
        of_trained = dict(zip(labels, scores.split(1, dim=1), strict=True))
        parts = [of_trained.get(label, score + lift) for label, score in enumerate(solved.split(1, dim=1), start=1)]
        return torch.cat(parts, 1)


class Addition(nn.Module):
    """The classes of one extension, solved beside a model that does not change.

    It has the solution for all labels of that time: earlier ones, with which its classes compete, and its own, which
    are last. The score of a class is its distance to the best earlier label by the closed form, so the class wins where
    the score is above 0. No later extension changes it.

    weight: (L, D + 1) the solution.
    shifts: (n,) added to the log-odds of its own classes: how readily they are predicted.
    """

    weight: Tensor
    shifts: Tensor

    def __init__(self, columns: int, labels: int, classes: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(labels, columns + 1))
        self.register_buffer("shifts", torch.zeros(classes))

    def drop_label(self, label: int) -> None:
        """Remove a label. It becomes background."""
        first_own = len(self.weight) - len(self.shifts)
        if first_own <= label < len(self.weight):
            self.shifts = torch.cat([self.shifts[: label - first_own], self.shifts[label - first_own + 1 :]])
        if label < len(self.weight):
            self.weight = without_row(self.weight, label)

    def cell_log_odds(self, found: Tensor) -> Tensor:
        """Return (n, L − 1) log-odds of cells with `ClosedForm.cell_features`."""
        return log_odds(found @ self.weight.T)

    def forward(self, random: Tensor) -> Tensor:
        """Return (B, L − 1, h, w) log-odds of every class against background, from `ClosedForm.features`."""
        return log_odds(_scores(random, self.weight))

    def ahead(self, solved: Tensor) -> Tensor:
        """Return the (B, n, …) scores of its own classes, from log-odds of all."""
        before, own = solved.split([solved.shape[1] - len(self.shifts), len(self.shifts)], 1)
        shifts = self.shifts.view(1, -1, *[1] * (solved.ndim - 2))
        return own + shifts - before.amax(1, keepdim=True).clamp(min=0)


def _scores(random: Tensor, weight: Tensor) -> Tensor:
    """(B, D, h, w) random features → (B, L, h, w) scores."""
    return F.conv2d(random, weight[:, :-1, None, None], weight[:, -1])


def without_row(weight: Tensor, label: int) -> Tensor:
    """Return the solution for sums in which the cells of a label became background. The solution is linear in Q, so the
    row of the label is added to that of background, and no other row changes."""
    smaller = torch.cat([weight[:label], weight[label + 1 :]])
    smaller[BACKGROUND] += weight[label]
    return smaller
