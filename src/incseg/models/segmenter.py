"""The segmenter: backbone, head (ASPP) and one 1×1 convolution per step.

Classes that are added later may get a head of their own (`Increment.head`). Then nothing that was learnt before
changes, and each head may look at the image at its own size (`shrinks`): small new objects want a larger input, and the
old classes go on to see the size that they were trained at. One of the heads may be a `ClosedForm`: its classes are
solved, not trained, and the logits are then log-odds against background. Classes that are solved beside the ones before
have an `Addition` each time, and the logits of those before are unchanged.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from incseg.losses.least_squares import Sums
from incseg.models.aspp import ASPP, Neck, TorchvisionHead, default_dilations
from incseg.models.backbones import build_backbone
from incseg.models.classifiers import Classifier, find_classifier
from incseg.models.closed_form import Addition, ClosedForm, Design
from incseg.models.sharpen import GUIDE_STRIDE, guide_of, sharpened
from incseg.outputs.evidential import Rectifier
from incseg.settings import setting
from incseg.types import Increment, Inputs, Output, UserError

FINER = 4
"""Scores of heads that see the image at different sizes are combined on a grid this many times finer. Interpolated
straight to the features' grid and then to the image, small objects of the old classes would be smoothed away."""
MOST_ROUNDS = 20
"""Of `sharpen`: each takes time and widens what is averaged."""
Frozen = Literal["nothing", "statistics", "norms", "head", "model"]


@dataclass
class ModelConfig:
    """The network.

    Args:
        backbone: tiny, efficientnet-lite0 (lite1, lite2), resnet18, resnet50, resnet101, timm:NAME, or
            package.module:Class.
        weights: Pretrained backbone: a file (.pth, .pt, .safetensors), 'imagenet' where available, or none.
        output_stride: Pixels of the image per position of the logits; strides beyond it become dilation.
        width: Channels of the head.
        stages: Which stages of the backbone the head reads, 0 the shallowest; all are brought to the resolution of
            the first named. Empty for the last one alone, as in DeepLabv3.
        dilations: Of the head's three 3x3 convolutions; by default 6, 12, 18 at stride 16, doubled at 8.
        norm: batch; group (no batch statistics); frozen (the backbone's running statistics never
            change, its affine parameters train; the head, which has no pretrained statistics, uses batch); or
            frozen-group (the same backbone, group in the head: no statistics of batches anywhere).
        dilate_first: where a stride of a ResNet became dilation, dilate the first block of the stage, too, as the
            networks of MiB and PLOP do; torchvision's does not. Other backbones ignore it.
        freeze_backbone: Train the head only; neither parameters nor statistics of the backbone change.
        head: Empty for the field's (MiB's); torchvision for that of its DeepLabv3, which has one layer more
            (incseg import makes such models).
        classifier: how scores are made of the head's output: empty for linear, or package.module:Class.
        sharpen: At test and prediction, how many rounds move the scores to the edges of the image (models/sharpen.py);
            0 for plain interpolation.
    """

    backbone: str = "resnet101"
    weights: str | None = None
    output_stride: int = 16
    width: int = 256
    stages: tuple[int, ...] | None = None
    dilations: tuple[int, int, int] | None = None
    norm: Literal["batch", "group", "frozen", "frozen-group"] = "batch"
    freeze_backbone: bool = False
    dilate_first: bool = False
    head: Literal["torchvision"] | None = None
    classifier: str | None = None
    sharpen: int = setting(0, affects="inference")

    def __post_init__(self) -> None:
        if not 0 <= self.sharpen <= MOST_ROUNDS:
            raise UserError(f"model.sharpen is {self.sharpen}; give a number of rounds from 0 to {MOST_ROUNDS}")


class Seen(NamedTuple):
    """What the heads read of images at one size: stages of the backbone and, to sharpen scores, the image's colours."""

    stages: tuple[Tensor, ...]
    guide: Tensor | None


class Head(nn.Module):
    """What the backbone's stages become before a classifier reads them: (B, width, h, w)."""

    def __init__(self, neck: Neck | None, aspp: ASPP | TorchvisionHead) -> None:
        super().__init__()
        self.neck, self.aspp = neck, aspp

    def forward(self, features: tuple[Tensor, ...]) -> Tensor:
        return self.aspp(features[0] if self.neck is None else self.neck(features))


class Segmenter(nn.Module):
    """Logits of every class learnt so far; it starts with none and grows by one increment per step.

    With `background_output` the first classifier has one more output, the background's, before the others.

    heads:   those of later increments, numbered from 1; head 0 is `neck` and `aspp`.
    shrinks: for each head, 0 first, how many times smaller than the input its image is: 1, 2, 4, …
    sizes:   those at which `features` looks at an image, the largest image first: the shrinks of all heads, and of the
             one that is to come.
    """

    SHRINKS = (1, 2, 4, 8)
    """Powers of two, so that a smaller image is the mean of whole pixels."""

    def __init__(self, config: ModelConfig, background_output: bool):
        super().__init__()
        self.config = config
        self.background_output = background_output
        self.increments: list[Increment] = []
        norm = "frozen" if config.norm == "frozen-group" else config.norm
        self.backbone = build_backbone(config.backbone, config.output_stride, norm)
        if config.dilate_first:
            self.backbone.dilate_first_blocks()
        dilations = config.dilations or default_dilations(config.output_stride)
        head_norm: Literal["batch", "group"] = "group" if config.norm in ("group", "frozen-group") else "batch"
        channels = [self.backbone.channels[stage] for stage in self._stages_read()]
        self.neck = Neck(channels, config.width, head_norm) if config.stages else None
        head = ASPP if config.head is None else TorchvisionHead
        self.aspp = head(config.width if config.stages else channels[0], config.width, dilations, head_norm)
        self.classifiers = nn.ModuleList()
        self._classifier = find_classifier(config.classifier)
        self.heads = nn.ModuleList()
        self.shrinks, self.sizes = [1], [1]
        self.backbone.requires_grad_(not config.freeze_backbone)
        self.train()

    @property
    def num_classes(self) -> int:
        """Foreground classes learnt so far."""
        return sum(len(increment.classes) for increment in self.increments)

    @property
    def num_outputs(self) -> int:
        """Channels of the logits."""
        return self.num_classes + (self.background_output and bool(self.increments))

    @property
    def closed_form(self) -> ClosedForm | None:
        """The head whose classes are solved, with the sums of all images so far; None if the model has none."""
        return next((head for head in self.heads if isinstance(head, ClosedForm)), None)

    @property
    def _shrinks_read(self) -> set[int]:
        """The shrink factors of the heads that classes use. A head that only has sums does not count."""
        return {self.shrinks[increment.head] for increment in self.increments} or {self.shrinks[0]}

    @property
    def finer(self) -> int:
        """Positions of the logits per position of the features, along a side; above 1 if heads see different sizes."""
        return FINER if len(self._shrinks_read) > 1 and not self.config.sharpen else 1

    @property
    def stride(self) -> int:
        """Pixels of the image per position of `scores`."""
        of_head = GUIDE_STRIDE if self.config.sharpen else self.backbone.strides[self._stages_read()[0]]
        return of_head * min(self._shrinks_read) // self.finer

    @property
    def unit(self) -> int:
        """An image may be cut at multiples of this number of pixels without moving a position of any map."""
        return self.config.output_stride * max(self._shrinks_read)

    def enlarge(self, factor: int) -> None:
        """Accept images that are `factor` times larger. All classes so far see them at the same size as before."""
        read = {increment.head for increment in self.increments} | {0}
        shrinks = [shrink * factor if head in read else 1 for head, shrink in enumerate(self.shrinks)]
        if not set(shrinks) <= set(self.SHRINKS):
            raise UserError(
                f"an input {factor} times larger would be shrunk by {max(shrinks)} for the first classes, and "
                f"{self.SHRINKS[-1]} is the most; give a smaller --size"
            )
        self.shrinks, self.sizes = shrinks, sorted({1, *shrinks})

    def add_closed_form(self, design: Design, rectifier: Rectifier) -> ClosedForm:
        """Return a closed form without sums. It replaces one that no class uses."""
        self.drop_closed_form()
        return self.attach(ClosedForm(design, self.widths_read, rectifier))

    @property
    def widths_read(self) -> list[int]:
        """Channels of the embedding and of the stages that the heads read: those that a closed form reads."""
        return [self.config.width, *(self.backbone.channels[stage] for stage in self._stages_read())]

    def attach(self, closed_form: ClosedForm) -> ClosedForm:
        self.heads.append(closed_form.to(self.aspp.mix.weight))
        self.shrinks.append(1)
        self.sizes = sorted({*self.sizes, 1})
        return closed_form

    def drop_closed_form(self) -> None:
        """Remove the sums, which are valid for this network only. Refuse if classes were solved from them."""
        if self.closed_form is None:
            return
        if any(increment.solved for increment in self.increments):
            raise UserError(
                "some classes of this model were solved in closed form for this network, so it must not change; add "
                "classes with method analytic (incseg extend --recipe closed-form)"
            )
        place = list(self.heads).index(self.closed_form)
        if any(increment.head > place + 1 for increment in self.increments):
            return  # the number of a later head would change
        del self.heads[place], self.shrinks[place + 1]

    def grow(self, increment: Increment) -> None:
        """Add the classifier of a new step; everything learnt before is unchanged.

        If the increment names a head that does not exist yet, it starts as a copy of the first. A solved increment has
        no classifier: its scores come from the closed form, or from a new addition.
        """
        if increment.solved:
            self._grow_solved(increment)
            return
        if increment.head > len(self.heads):
            if increment.head > len(self.heads) + 1:
                raise ValueError(f"head {increment.head} is named, but there are {len(self.heads)}")
            self.heads.append(Head(copy.deepcopy(self.neck), copy.deepcopy(self.aspp)).requires_grad_(True))
            self.shrinks.append(1)
            self.sizes = sorted({*self.sizes, 1})
        outputs = len(increment.classes) + (self.background_output and not self.increments)
        classifier = self._classifier(self.config.width, outputs)
        # Drawn on the CPU and moved, so that a seed gives the same weights on every device.
        self.classifiers.append(classifier.to(self.aspp.mix.weight))
        self.increments.append(increment)

    def _grow_solved(self, increment: Increment) -> None:
        form = self.closed_form
        if form is None:
            raise ValueError(f"{increment.classes} are solved, but the model has no closed form")
        if increment.beside:
            labels = 1 + self.num_classes + len(increment.classes)
            if not self.increments or increment.head != len(self.heads) + 1:
                raise ValueError(f"head {increment.head} is named as an addition, but there are {len(self.heads)}")
            addition = Addition(form.design.columns, labels, len(increment.classes))
            self.heads.append(addition.to(form.weight))
            self.shrinks.append(1)
            self.sizes = sorted({*self.sizes, 1})
        elif self.heads[increment.head - 1] is not form or any(i.beside for i in self.increments):
            raise ValueError(f"head {increment.head} is named as the closed form, but it is not")
        self.increments.append(increment)
        self.classifiers.append(nn.Identity())
        form.set_labels(max(form.num_labels, self.num_classes + 1))

    def solved_against(self, name: str) -> list[str]:
        """Return the solved classes that compete with a class: all those learnt with it or after it. For a class that
        was not added beside others, these are all solved classes."""
        place = next(i for i, increment in enumerate(self.increments) if name in increment.classes)
        others = self.increments[place if self.increments[place].beside else 0 :]
        return [other for increment in others if increment.solved for other in increment.classes if other != name]

    @torch.no_grad()
    def remove(self, name: str, to_learn_further: bool = False) -> int:
        """Remove a class and return the label that it had. Later labels move up by one.

        The cells of a solved class become background in the sums. A trained class loses its output. With
        `to_learn_further` the sums of the class are stored until it is learnt again.
        """
        names = [n for increment in self.increments for n in increment.classes]
        label = 1 + names.index(name)
        place = next(i for i, increment in enumerate(self.increments) if name in increment.classes)
        increment, row = self.increments[place], self.increments[place].classes.index(name)
        form = self.closed_form
        if form is not None and label < form.num_labels:
            if to_learn_further:
                form.set_aside(label, name)
            else:
                form.drop_label(label)
        for head in self.heads:
            if isinstance(head, Addition):
                head.drop_label(label)
        keep = [i for i in range(len(increment.classes)) if i != row]
        classifier = self.classifiers[place]
        if isinstance(classifier, Classifier):
            first = classifier.out_channels - len(increment.classes)  # 1 where it has the background's output, too
            rows = [*range(first), *(first + i for i in keep)]
            smaller = self._classifier(classifier.in_channels, max(len(rows), 1)).to(classifier.weight)
            if rows:
                smaller.weight.copy_(classifier.weight[rows])
                smaller.get_parameter("bias").copy_(classifier.get_parameter("bias")[rows])
            self.classifiers[place] = smaller
        if keep or (self.background_output and place == 0):
            classes = tuple(increment.classes[i] for i in keep)
            self.increments[place] = replace(increment, classes=classes, ids=tuple(increment.ids[i] for i in keep))
        else:
            del self.increments[place], self.classifiers[place]
            own = increment.head and not increment.solved and all(i.head != increment.head for i in self.increments)
            if increment.beside or own:
                del self.heads[increment.head - 1], self.shrinks[increment.head]
                self.increments = [
                    replace(i, head=i.head - 1) if i.head > increment.head else i for i in self.increments
                ]
        return label

    @torch.no_grad()
    def take_solution(self, sums: Sums, weight: Tensor) -> None:
        """Store these sums, and for the newest classes the solution (L, D + 1) of them."""
        form, newest = self._solving(), self.increments[-1]
        form.take(sums)
        reader = self.heads[newest.head - 1] if newest.beside else form
        reader.weight = weight.to(form.weight)

    @torch.no_grad()
    def shift_newest(self, amounts: Sequence[float]) -> None:
        """Add a number to the scores of each of the newest classes: how readily it is predicted."""
        newest = self.increments[-1]
        if newest.beside:
            scores = self.heads[newest.head - 1].get_buffer("shifts")
        elif newest.solved and self.closed_form is not None:
            scores = self.closed_form.shifts[-len(newest.classes) :]
        else:
            scores = self.classifiers[-1].get_parameter("bias").data
        scores += torch.tensor(amounts).to(scores)

    def train(self, mode: bool = True) -> Segmenter:
        super().train(mode)
        if self.config.freeze_backbone:
            self.backbone.eval()
        return self

    def freeze(self, part: Frozen) -> None:
        """Freeze a part for the training that follows. Call it again after every call of `train`.

        statistics: of every batch norm. norms: also the parameters of the batch norms. head: all but the classifiers.
        model: all but the newest classifier and, if it has one of its own, its head.
        """
        if part == "model":
            self.eval().requires_grad_(False)
            own = self.increments[-1].head
            trained = [self.classifiers[-1], *([self.heads[own - 1]] if own else [])]
            for module in trained:
                module.train().requires_grad_(True)
        for name, module in self.named_children():
            if part == "head" and name != "classifiers":
                module.eval().requires_grad_(False)
        if part in ("statistics", "norms"):
            for module in self.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
                    if part == "norms":
                        module.requires_grad_(False)

    def encode(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return the backbone's stages without their last activation. A frozen backbone gives no gradient."""
        if self.config.freeze_backbone:
            with torch.no_grad():
                return self.backbone(images)
        return self.backbone(images)

    def read_by_head(self, stages: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return those of the backbone's stages that a head reads."""
        return tuple(self.backbone.activate(stages[stage]) for stage in self._stages_read())

    def features(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs of the heads for images, at each of `sizes`. The feature cache stores these."""
        found = list[Tensor]()
        for size in self.sizes:
            image = shrunk(images, size)
            stages, guide = self._seen(self.encode(image), image)
            found += [*stages, *([] if guide is None else [guide])]
        return tuple(found)

    def by_size(self, features: tuple[Tensor, ...]) -> dict[int, Seen]:
        """Return the output of `features` for each of `sizes`."""
        stages, guides = len(self._stages_read()), 1 if self.config.sharpen else 0
        found = {}
        for index, size in enumerate(self.sizes):
            first = index * (stages + guides)
            guide = features[first + stages] if guides else None
            found[size] = Seen(features[first : first + stages], guide)
        return found

    def _seen(self, stages: tuple[Tensor, ...], images: Tensor) -> Seen:
        """Return the inputs of the heads, from all stages of the backbone and their images."""
        if not self.config.sharpen:
            return Seen(self.read_by_head(stages), None)
        mean, std = (images.new_tensor(part).view(3, 1, 1) for part in (self.backbone.mean, self.backbone.std))
        return Seen(self.read_by_head(stages), guide_of(images) * std + mean)

    def decode(self, features: tuple[Tensor, ...]) -> Output:
        """Run heads and classifiers on the output of `features`."""
        return self._decode(self.by_size(features))

    def forward(self, inputs: Inputs) -> Output:
        """Run the network on (B, 3, H, W) normalised images or on their features; logits have its own resolution."""
        seen, stages = self._look(inputs)
        return self._decode(seen, stages)

    def scores(self, inputs: Inputs) -> Tensor:
        """Return the logits for predictions: those of `forward`, sharpened if the model has `sharpen`."""
        if not self.config.sharpen:
            return self(inputs).logits
        seen, _ = self._look(inputs)
        return self._decode(seen, sharpen=self.config.sharpen).logits

    def _look(self, inputs: Inputs) -> tuple[dict[int, Seen], tuple[Tensor, ...]]:
        """Return the inputs of the heads at each size and, for images, all stages at the first head's size."""
        if not isinstance(inputs, Tensor):
            return self.by_size(inputs), ()
        seen: dict[int, Seen] = {}
        of_first: tuple[Tensor, ...] = ()
        for size in sorted({*self._shrinks_read, self.shrinks[0]}):
            image = shrunk(inputs, size)
            stages = self.encode(image)
            seen[size] = self._seen(stages, image)
            of_first = stages if size == self.shrinks[0] else of_first
        return seen, of_first

    def _decode(self, seen: dict[int, Seen], stages: tuple[Tensor, ...] = (), sharpen: int = 0) -> Output:
        """Run heads and classifiers on their inputs at each size; sharpen the scores of each."""
        if not self.classifiers:
            raise RuntimeError("the model has no classes yet; call grow first")

        def at_edges(logits: Tensor, shrink: int) -> Tensor:
            guide = seen[shrink].guide
            return sharpened(logits, guide, sharpen) if sharpen and guide is not None else logits

        embedding = self._embedding(0, seen[self.shrinks[0]].stages)
        if all(increment.head == 0 for increment in self.increments):
            logits = at_edges(self._classified(embedding, range(len(self.classifiers))), self.shrinks[0])
            return self._output(logits, embedding, stages)
        finest = seen[min(self._shrinks_read)]
        if sharpen and finest.guide is not None:
            size = finest.guide.shape[-2:]
        else:
            size = torch.Size(
                FINER * side if len(self._shrinks_read) > 1 else side for side in finest.stages[0].shape[-2:]
            )
        by_increment: dict[int, Tensor] = {}
        for head, shrink in enumerate(self.shrinks):
            own = [index for index, increment in enumerate(self.increments) if increment.head == head]
            if not own or self.increments[own[0]].solved:
                continue
            read = embedding if head == 0 else self._embedding(head, seen[shrink].stages)
            logits = resized(at_edges(self._classified(read, own), shrink), size)
            widths = [self.classifiers[index].get_parameter("bias").numel() for index in own]
            by_increment |= dict(zip(own, logits.split(widths, dim=1), strict=True))
        if len(by_increment) == len(self.increments):
            logits = torch.cat([by_increment[i] for i in sorted(by_increment)], 1)
            return self._output(logits, embedding, stages)
        form, solving, solved = self._solving(), self._solving_heads(), dict[int, Tensor]()
        for shrink in sorted({self.shrinks[head] for head in solving}):
            read = embedding if shrink == self.shrinks[0] else self._embedding(0, seen[shrink].stages)
            random = form.features(read, seen[shrink].stages)
            for head in solving:
                if self.shrinks[head] == shrink:
                    solved[head] = resized(at_edges(self.heads[head - 1](random), shrink), size)
        scores = torch.cat([by_increment[i] for i in sorted(by_increment)], 1) if by_increment else None
        return self._output(self._combined(scores, solved), embedding, stages)

    def _output(self, logits: Tensor, embedding: Tensor, stages: tuple[Tensor, ...]) -> Output:
        return Output(logits, embedding, stages, self.backbone.activate(stages[-1]) if stages else None)

    def _solving(self) -> ClosedForm:
        form = self.closed_form
        if form is None:
            raise RuntimeError("the model has no closed form")
        return form

    def _solving_heads(self) -> list[int]:
        """Return the numbers of the heads whose classes are solved."""
        return sorted({increment.head for increment in self.increments if increment.solved})

    def _combined(self, trained: Tensor | None, solved: dict[int, Tensor]) -> Tensor:
        """Return the scores of all classes, from trained scores and the log-odds of each head that is solved."""
        parts, first, labels, sizes = list[Tensor](), 1, list[int](), list[int]()
        together = [increment for increment in self.increments if not increment.beside]
        for increment in together:
            if not increment.solved:
                labels += range(first, first + len(increment.classes))
                sizes.append(len(increment.classes))
            first += len(increment.classes)
        of_form = [increment.head for increment in together if increment.solved]
        if of_form:  # sums may know more classes
            parts.append(self._solving().combine(trained, sizes, labels, solved[of_form[0]][:, : first - 1]))
        elif trained is not None:
            parts.append(trained)
        for number, head in enumerate(self.heads, start=1):
            if isinstance(head, Addition):
                parts.append(head.ahead(solved[number]))
        return torch.cat(parts, 1)

    def closed_form_inputs(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Return `ClosedForm.inputs` of images or of their features, and the first head's embedding of the same size.
        Images are not shrunk."""
        stages = self.by_size(self.features(inputs) if isinstance(inputs, Tensor) else inputs)[1].stages
        embedding = self._embedding(0, stages)
        return *self._solving().inputs(embedding, stages), embedding

    def cell_logits(self, embedding: Tensor, random: Tensor) -> Tensor | None:
        """Return (n, C) logits of single cells from (n, width) embedding and (n, D + 1) random features. Return None if
        heads see the image at different sizes, because their cells differ."""
        trained = [index for index, increment in enumerate(self.increments) if not increment.solved]
        if self._shrinks_read != {1} or any(self.increments[index].head for index in trained):
            return None
        scores = self._classified(embedding[..., None, None], trained)[..., 0, 0] if trained else None
        if len(trained) == len(self.increments):
            return scores
        solved = dict[int, Tensor]()
        for number in self._solving_heads():
            head = self.heads[number - 1]
            assert isinstance(head, ClosedForm | Addition)
            solved[number] = head.cell_log_odds(random)
        return self._combined(scores, solved)

    def _embedding(self, head: int, features: tuple[Tensor, ...]) -> Tensor:
        """Return the output of a head. The first is not a module, so that the names of its tensors are unchanged."""
        if head > 0:
            return self.heads[head - 1](features)
        return self.aspp(features[0] if self.neck is None else self.neck(features))

    def _classified(self, embedding: Tensor, increments: Sequence[int]) -> Tensor:
        """Return the scores of some increments, by one convolution."""
        weight = torch.cat([self.classifiers[i].get_parameter("weight") for i in increments])
        bias = torch.cat([self.classifiers[i].get_parameter("bias") for i in increments])
        return self._classifier.scores(embedding, weight, bias)

    def _stages_read(self) -> tuple[int, ...]:
        count = len(self.backbone.channels)
        chosen = self.config.stages or (count - 1,)
        if any(not 0 <= stage < count for stage in chosen) or list(chosen) != sorted(set(chosen)):
            raise UserError(
                f"model.stages is {list(chosen)}; {self.config.backbone} has stages 0 to {count - 1}, "
                "name each at most once, the shallowest first"
            )
        return tuple(chosen)

    def frozen_copy(self) -> Segmenter:
        """Return a teacher: a copy in evaluation mode that takes no gradient."""
        return copy.deepcopy(self).eval().requires_grad_(False)


def shrunk(images: Tensor, factor: int) -> Tensor:
    """Return (B, C, H, W) images with each side `factor` times smaller, by averaging pixels."""
    if factor == 1:
        return images
    return F.avg_pool2d(images, factor, ceil_mode=True, count_include_pad=False)


def resized(logits: Tensor, size: Sequence[int]) -> Tensor:
    if logits.shape[-2:] == torch.Size(size):
        return logits
    return F.interpolate(logits, (size[0], size[1]), mode="bilinear", align_corners=False)


def fusion_share(num_new: int, num_all: int) -> float:
    """Return a = √(n_new / n_all), the share of the new model: n_new classes of the step, n_all seen with it."""
    return math.sqrt(num_new / num_all)


@torch.no_grad()
def fuse(model: Segmenter, old: Segmenter, share: float) -> None:
    """Endpoints weight fusion, EWF (Xiao et al., 2023): average the models before and after a step.

    θ ← (1 − a)·θ_old + a·θ for every parameter and running statistic that `old` has; `share` is a. Share 1 leaves the
    model unchanged. Share 0 restores the old model beside the new classifier. Integer counters stay the new model's.
    It costs nothing in training and works with any method (`--train.fusion ewf`).

    Differences: our share counts foreground classes, the authors' counts background too (√(1/16) against √(1/17) in the
    first step of 15-1). Their MiB+EWF freezes the old classifiers; ours does so with `--method.freeze_old true`.
    """
    state = model.state_dict()
    for name, before in old.state_dict().items():
        if before.is_floating_point():
            state[name].copy_(torch.lerp(before, state[name], share))
