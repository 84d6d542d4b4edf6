"""The base class of all methods: losses for training, a rule for prediction, and a few hooks. One file per method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Protocol

from PIL import Image
from torch import Tensor, nn

from incseg.losses.means import PixelMean, PixelTerm, Term
from incseg.losses.pixelwise import pixelwise
from incseg.losses.softmax import cross_entropy_sum
from incseg.models.segmenter import Segmenter
from incseg.outputs.softmax import softmax_prediction
from incseg.protocol import Step
from incseg.settings import Affects, changed_values
from incseg.types import Batch, Increment, Inputs, Output, Prediction

CROSS_ENTROPY = "cross_entropy"
"""The `first_step` of methods that train step 0 by plain softmax cross-entropy."""


@dataclass(frozen=True)
class StepImages:
    """The training images of a step; `len` is their number.

    batches:      one pass over the images without augmentation, in order, the same in every process; with a list of
                  positions, over those images only.
    label_counts: (256,) number of pixels with each training label.
    inputs:       any other images → model inputs: normalised, or passed through the frozen backbone.
    """

    batches: Callable[..., Iterable[Batch]]
    number: int = 0
    label_counts: Callable[[], Tensor] | None = None
    inputs: Callable[[Sequence[Image.Image]], Inputs] | None = None

    def __len__(self) -> int:
        return self.number


class Processes(Protocol):
    """The processes of a run."""

    def mean(self, tensor: Tensor) -> Tensor:
        """Return the mean of a tensor over all processes."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes."""

    def share(self, rows: Sequence[int]) -> list[int]:
        """Return this process's part of a list; together the parts are the whole list."""


class Alone:
    """The only process."""

    def mean(self, tensor: Tensor) -> Tensor:
        return tensor

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def share(self, rows: Sequence[int]) -> list[int]:
        return list(rows)


@dataclass(frozen=True)
class HeldOutScore:
    """The result of a model on held-out images.

    iou:       mean IoU of the new classes.
    agreement: percent of the old classes' pixels whose label is unchanged, as the rule counts it (metrics.unchanged).
    shifts:    numbers to add to the scores of the new classes for this result, one for each class.
    """

    iou: float
    agreement: float
    shifts: tuple[float, ...]


@dataclass(frozen=True)
class StepContext:
    """The arguments of the hooks at the beginning and at the end of a step.

    model:             the network, already grown for the step (not in `solve`); `begin_step` may change its parameters.
    teacher:           the frozen model of the previous step; None in step 0.
    score_on_held_out: function that tests the current model on held-out images; None if the run may not use them. With
                       apart=True it finds a shift for each new class instead of one for all.
    """

    step: Step
    model: Segmenter
    teacher: Segmenter | None
    images: StepImages
    processes: Processes = field(default_factory=Alone)
    score_on_held_out: Callable[..., HeldOutScore] | None = None


Average = Callable[[Callable[[Batch, Output, Output | None], Tensor]], Tensor]
"""Function of (batch, output, teacher's output) → its mean over all parts of the batch in all processes."""


class Method:
    """A way to learn classes step by step. The base class itself is fine-tuning by softmax cross-entropy.

    A subclass has a dataclass `Config` of its options, which become `--method.*` flags, and overrides what differs.
    The trainer does the rest: it grows the network, runs the teacher once per batch, normalises and sums the losses,
    steps the optimiser and saves `state`.
    """

    background_output: ClassVar[bool] = True
    """Whether the first output of the network is a background score."""
    own_outputs: ClassVar[bool] = False
    """Whether only this method can read its outputs. Then it extends only its own models, and no other method can."""
    single_step: ClassVar[bool] = False
    """Whether all classes are learnt at once, for any task."""
    first_step: ClassVar[str | None] = None
    """A name for the training of step 0. Methods with the same name train step 0 alike and share its model and state.
    Methods with CROSS_ENTROPY have no state after step 0."""

    @dataclass
    class Config:
        """No options."""

    def __init__(self, config: Any = None) -> None:
        self.config = config if config is not None else self.Config()

    # Learning by SGD.

    def pixel_losses(self, logits: Tensor, labels: Tensor, teacher: Tensor | None, step: Step) -> dict[str, PixelTerm]:
        """Return the named loss terms of a strip of rows, at the resolution of the labels.

        teacher: the logits of the teacher; None in step 0.
        """
        return {"ce": PixelMean(cross_entropy_sum(logits, labels))}

    def losses(self, batch: Batch, out: Output, teacher: Output | None, step: Step) -> dict[str, Term]:
        """Return all named loss terms. The trainer normalises them and minimises their sum."""
        loss = partial(self.pixel_losses, step=step)
        return {**pixelwise(loss, batch, out.logits, teacher.logits if teacher else None)}

    def begin_step(self, context: StepContext) -> None:
        """Prepare a step, before its first batch: initialise classifiers, collect statistics."""

    def extend(self, batch: Batch) -> Batch:
        """Add images to a batch of this process, for replay. It is split into micro-batches afterwards."""
        return batch

    def before_update(self, average: Average, step: Step) -> None:
        """Compute quantities of the whole batch for `losses`, before its first call in an update.

        With micro-batches each call of `average` costs another forward pass.
        """

    def after_backward(self, model: nn.Module) -> None:
        """Read or change the gradients of the whole batch, before the optimiser uses them."""

    def end_step(self, context: StepContext) -> None:
        """Finish a step, after its last batch: compute what the next step needs."""

    # Learning from sums over one pass.

    def solve(self, context: StepContext) -> bool:
        """Grow the model by the step's classes and set their weights by one pass over its images.

        Return False and change nothing if the step must be learnt by SGD.
        """
        return False

    def complete(self, context: StepContext) -> bool:
        """Add what this method needs to a step that another run or method trained by the same recipe.

        Return whether something was added.
        """
        return False

    # Both.

    def predict(self, logits: Tensor, increments: Sequence[Increment]) -> Prediction:
        """Return the decision at each pixel of logits of any size (B, C, H, W)."""
        return softmax_prediction(logits)

    def without_background_output(self, model: Segmenter) -> Segmenter | None:
        """Return a model with a background output, converted to one without; None if this method cannot convert it."""
        return None

    def recipe(self, step: int) -> dict[str, Any]:
        """Return everything that decides how this method trains a step. A step is reused if the recipes are equal.

        If a change of the code makes the same options train differently, add a version number here.
        """
        if step == 0 and self.first_step is not None:
            return {"method": self.first_step}
        affecting: tuple[Affects, ...] = ("training", "later") if step else ("training",)
        name = f"{type(self).__module__}:{type(self).__qualname__}"
        return {"method": name, **changed_values(self.config, *affecting)}

    def state(self) -> dict[str, Tensor]:
        """Return the tensors to save in checkpoints and at the end of the step."""
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore a `state`."""
