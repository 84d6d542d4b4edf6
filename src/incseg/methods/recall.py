"""RECALL (Maracani, Michieli, Toldo, Zanuttigh, 2021): replay of images of old classes from the web or a generator.

A replay image is labelled by a helper decoder that was trained when its class was learnt. Replay images are mixed 1:1
with the new data. The model of the previous step fills in the background of both, so that old objects in it are not
unlearnt. The encoder is frozen after step 0, so that the helpers stay valid.

Formulas: y' = y where y is not background, else arg-max of the teacher (`fill_background`); −log softmax(z)_y' over
both kinds of images (`cross_entropy_sum`); labels of a replay image: arg-max of its helper (`Replay`, `fit_helper`).

Differences from RECALL: the helper of step 0 is the decoder of step 0 itself, so that other methods can share step 0.
Later helpers start from the step's own decoder with its norm statistics and are trained for a few epochs. Replay
images are not augmented. The authors' code fills in void pixels too, but not the background of replay images
(`fill: new`). Without replay images the method only fills in background and freezes the encoder.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from incseg.losses.labels import fill_background, shifted
from incseg.losses.means import PixelMean, PixelTerm, Term
from incseg.losses.pixelwise import pixelwise
from incseg.losses.softmax import cross_entropy_sum
from incseg.methods.base import CROSS_ENTROPY, Method, StepContext
from incseg.methods.replay import open_replay
from incseg.models.segmenter import Segmenter
from incseg.outputs.softmax import softmax_prediction
from incseg.protocol import Step
from incseg.settings import setting
from incseg.types import BACKGROUND, IGNORE, Batch, Increment, Inputs, Output, UserError

log = logging.getLogger("incseg")

_ENCODER = "backbone."


class Recall(Method):
    first_step = CROSS_ENTROPY

    @dataclass
    class Config:
        """Options of RECALL.

        Args:
            replay: folder with one folder of unlabelled images per class, named by the class (RECALL, web).
            generator: package.module:callable that makes the images instead; it is called as
                generator(class_name, count, seed) and returns Pillow images (RECALL, GAN).
            replay_images: most images of a class; empty for 100.
            fill: where the teacher fills in background: in all images (all, the paper); or, as in the authors' code, in
                the step's own images alone, and in their void pixels too (new).
            helper_epochs: passes over a step's images that train its helper decoder.
            helper_lr: initial learning rate of the helper decoders; it falls linearly to zero.
        """

        replay: str | None = None
        generator: str | None = None
        replay_images: int | None = None
        fill: Literal["all", "new"] = setting("all", affects="later")
        helper_epochs: int = 4
        helper_lr: float = 0.01

        def __post_init__(self) -> None:
            if self.helper_epochs < 0 or self.helper_lr < 0:
                raise UserError(
                    f"helper_epochs is {self.helper_epochs} and helper_lr {self.helper_lr}; both must be at least 0"
                )

    config: Config

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._replay = open_replay(self.config.replay, self.config.generator, self.config.replay_images)
        self._helpers: dict[int, dict[str, Tensor]] = {}

    def begin_step(self, context: StepContext) -> None:
        teacher = context.teacher
        if teacher is not None:
            context.model.backbone.eval().requires_grad_(False)
        if self._replay is None:
            if teacher is not None:
                log.info("recall has no replay images and only fills in background; set --method.replay or .generator")
            return
        if teacher is None:
            self._helpers = {}
            return self._replay.begin_step(context)
        if len(teacher.increments) == 1:
            self._helpers[0] = decoder_tensors(teacher)
        if len(self._helpers) < len(teacher.increments):
            raise UserError(
                "recall needs the decoders saved after each step to label replay images, and this model has none; put "
                "the state.safetensors of its run beside it, or leave out --method.replay and .generator"
            )
        helpers = [
            build_helper(teacher, increment, self._helpers[number])
            for number, increment in enumerate(teacher.increments)
        ]

        def scores(number: int, inputs: Inputs) -> Tensor:
            return helpers[number](inputs).logits

        self._replay.begin_step(context, scores)

    def extend(self, batch: Batch) -> Batch:
        return batch if self._replay is None else self._replay.extend(batch)

    def pixel_losses(self, logits: Tensor, labels: Tensor, teacher: Tensor | None, step: Step) -> dict[str, PixelTerm]:
        if teacher is not None:
            labels = fill_background(labels, softmax_prediction(teacher).labels)
        return super().pixel_losses(logits, labels, teacher, step)

    def losses(self, batch: Batch, out: Output, teacher: Output | None, step: Step) -> dict[str, Term]:
        if teacher is None or self.config.fill == "all":
            return super().losses(batch, out, teacher, step)
        own = torch.tensor([number >= 0 for number in batch.images], device=batch.labels.device).view(-1, 1, 1)

        def strip(logits: Tensor, labels: Tensor, old: Tensor | None) -> dict[str, PixelTerm]:
            assert old is not None
            filled = own & ((labels == BACKGROUND) | (labels == IGNORE))
            labels = torch.where(filled, softmax_prediction(old).labels, labels)
            return {"ce": PixelMean(cross_entropy_sum(logits, labels), over="all")}  # no void is left

        return {**pixelwise(strip, batch, out.logits, teacher.logits)}

    def end_step(self, context: StepContext) -> None:
        if self._replay is not None and context.step.index > 0:
            helper = fit_helper(context, self.config.helper_epochs, self.config.helper_lr)
            self._helpers[len(context.model.increments) - 1] = decoder_tensors(helper)

    def recipe(self, step: int) -> dict[str, Any]:
        recipe = super().recipe(step)
        return recipe if self._replay is None else self._replay.in_recipe(recipe)

    def state(self) -> dict[str, Tensor]:
        if self._replay is None:
            return {}
        helpers = {f"helper.{n}.{name}": t for n, tensors in self._helpers.items() for name, t in tensors.items()}
        return {**helpers, **self._replay.state()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self._helpers = {}
        for key, tensor in state.items():
            kind, _, rest = key.partition(".")
            if kind == "helper":
                number, _, name = rest.partition(".")
                self._helpers.setdefault(int(number), {})[name] = tensor
        if self._replay is not None:
            self._replay.load_state(state)


def decoder_tensors(model: Segmenter) -> dict[str, Tensor]:
    """Return copies of all parameters and buffers except the encoder's."""
    return {name: t.clone() for name, t in model.state_dict().items() if not name.startswith(_ENCODER)}


def build_helper(model: Segmenter, increment: Increment, tensors: dict[str, Tensor]) -> Segmenter:
    """Return the helper decoder of an increment, on the encoder of `model`."""
    helper = _own_decoder(model, increment)
    helper.load_state_dict(tensors, strict=False)
    return helper


def fit_helper(context: StepContext, epochs: int, lr: float) -> Segmenter:
    """Return a helper decoder for background and the classes of a later step, trained on the step's images.

    The encoder and the statistics of all norms do not change. The helper starts as the model's decoder with the
    classifier rows of background and the new classes. With 0 epochs it is the model restricted to these outputs.
    """
    model, skipped = context.model, len(context.step.old)
    helper = _own_decoder(model, model.increments[-1])
    first, last = model.classifiers[0], model.classifiers[-1]
    for name, own in helper.classifiers[0].named_parameters():
        own.data.copy_(torch.cat([first.get_parameter(name)[:1], last.get_parameter(name)]).detach())
    parameters = [p for name, p in helper.named_parameters() if not name.startswith(_ENCODER)]
    for parameter in parameters:
        parameter.requires_grad_(True)
    # momentum and weight decay as for the model itself
    optimizer = torch.optim.SGD(parameters, lr, momentum=0.9, weight_decay=1e-4, nesterov=True)
    for epoch in range(epochs):
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 - epoch / epochs)
        for batch in context.images.batches():
            optimizer.zero_grad(set_to_none=True)
            _helper_loss(helper(batch.inputs), batch, skipped).backward()
            optimizer.step()
    return helper


def _helper_loss(out: Output, batch: Batch, skipped: int) -> Tensor:
    def strip(logits: Tensor, labels: Tensor, _: Tensor | None) -> dict[str, PixelTerm]:
        return {"ce": PixelMean(cross_entropy_sum(logits, shifted(labels, skipped)))}

    return pixelwise(strip, batch, out.logits)["ce"]


def _own_decoder(model: Segmenter, increment: Increment) -> Segmenter:
    """Return a frozen copy of `model` on the same encoder, in evaluation mode, with one new classifier."""
    helper = model.frozen_copy()
    helper.backbone = model.backbone
    helper.classifiers, helper.increments = nn.ModuleList(), []
    helper.grow(increment)
    return helper
