"""What a method is: losses for training, a rule for prediction, and a few hooks. One file per method."""

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
"""Step 0 by plain softmax cross-entropy."""


@dataclass(frozen=True)
class StepImages:
    """The training images of a step; `len` says how many there are.

    batches:      one pass over them without augmentation, in order, the same in every process; with a list of
                  positions, over those images alone.
    label_counts: (256,) how many of their pixels carry each training label.
    inputs:       any other images as the model takes them: normalised, or through the frozen backbone.
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
        """Return the mean of a tensor over all of them."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all of them."""

    def share(self, rows: Sequence[int]) -> list[int]:
        """Return this process's part of a list; the parts of all make up the whole."""


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
    agreement: percent of the old classes' pixels whose label is unchanged.
    shift:     what must be added to the scores of the new classes to get this result.
    """

    iou: float
    agreement: float
    shift: float


@dataclass(frozen=True)
class StepContext:
    """What the hooks at the beginning and at the end of a step can use.

    model:             the network, already grown for the step (not in `solve`); `begin_step` may change its parameters.
    teacher:           the frozen model of the step before; None in step 0.
    score_on_held_out: tests the model as it is on held-out images; None where the run may not use them.
    """

    step: Step
    model: Segmenter
    teacher: Segmenter | None
    images: StepImages
    processes: Processes = field(default_factory=Alone)
    score_on_held_out: Callable[[], HeldOutScore] | None = None


Average = Callable[[Callable[[Batch, Output, Output | None], Tensor]], Tensor]
"""A function of (batch, output, teacher's output) → its mean over all parts of the batch, in all processes."""


class Method:
    """A way to learn classes one step after the other. As it stands it is fine-tuning by softmax cross-entropy.

    A subclass gives a dataclass `Config` of its options, which become `--method.*` flags, and overrides what it does
    differently. The trainer owns everything else: it grows the network, runs the teacher once per batch, normalises and
    sums the losses, steps the optimiser and saves `state`.
    """

    background_output: ClassVar[bool] = True
    """Whether the network's first channel is a background score. Without one no output is shared between steps."""
    single_step: ClassVar[bool] = False
    """Whether all classes are learnt at once, whatever the task says."""
    first_step: ClassVar[str | None] = None
    """What step 0 is trained by, where several methods train it alike and can share it. Those of CROSS_ENTROPY have no
    state that step 0's batches make; others that share a name make the same state in step 0."""
    revision: ClassVar[int] = 1
    """Raised where a method trains otherwise than before with the same options: cached steps are then not reused."""

    own_outputs: ClassVar[bool] = False
    """Whether the outputs mean something of this method's own: it extends its own models only, and nothing else can."""

    @dataclass
    class Config:
        """No options."""

    def __init__(self, config: Any = None) -> None:
        self.config = config if config is not None else self.Config()

    # Learning by SGD.

    def pixel_losses(self, logits: Tensor, labels: Tensor, teacher: Tensor | None, step: Step) -> dict[str, PixelTerm]:
        """Return the named loss terms of a strip of rows, at the labels' resolution.

        teacher: the teacher's logits, None in step 0.
        """
        return {"ce": PixelMean(cross_entropy_sum(logits, labels))}

    def losses(self, batch: Batch, out: Output, teacher: Output | None, step: Step) -> dict[str, Term]:
        """Return all named loss terms; the trainer normalises them and minimises their sum."""
        loss = partial(self.pixel_losses, step=step)
        return {**pixelwise(loss, batch, out.logits, teacher.logits if teacher else None)}

    def begin_step(self, context: StepContext) -> None:
        """Before the first batch of a step: initialise classifiers, collect statistics."""

    def extend(self, batch: Batch) -> Batch:
        """Before a process's batch is cut into micro-batches: a method that replays adds images to it."""
        return batch

    def before_update(self, average: Average, step: Step) -> None:
        """Before the first `losses` of an update: take what they need of the whole batch.

        With micro-batches each call of `average` costs another forward pass.
        """

    def after_backward(self, model: nn.Module) -> None:
        """The gradients of the whole batch are there, the optimiser has not moved yet."""

    def end_step(self, context: StepContext) -> None:
        """After the last batch: consolidate what the next step will need."""

    # Learning from sums over one pass.

    def solve(self, context: StepContext) -> bool:
        """Grow the model by the step's classes and set their weights from one pass over its images.

        Return False, having done nothing, where the step is learnt by SGD.
        """
        return False

    def complete(self, context: StepContext) -> bool:
        """After a step that another run or method trained by the same recipe: add what it lacks.

        Return whether something was added.
        """
        return False

    # Both.

    def predict(self, logits: Tensor, increments: Sequence[Increment]) -> Prediction:
        """Decide, pixel by pixel, on logits of any size (B, C, H, W)."""
        return softmax_prediction(logits)

    @property
    def closed_form_ridge(self) -> float | None:
        """The ridge by which this method solves classes in closed form; None where it trains them."""
        return None

    def without_background_output(self, model: Segmenter) -> Segmenter | None:
        """Return a model that has a background output in a form without one; None where there is no such form."""
        return None

    def recipe(self, step: int) -> dict[str, Any]:
        """Return what decides how this method trains a step: where two agree, the trained model can serve both."""
        if step == 0 and self.first_step is not None:
            return {"method": self.first_step}
        revision = {"revision": self.revision} if self.revision > 1 else {}
        affecting: tuple[Affects, ...] = ("training", "later") if step else ("training",)
        return {
            "method": f"{type(self).__module__}:{type(self).__qualname__}",
            **revision,
            **changed_values(self.config, *affecting),
        }

    def state(self) -> dict[str, Tensor]:
        """Return what must survive an interruption and be carried into the next step."""
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take up a `state`."""
