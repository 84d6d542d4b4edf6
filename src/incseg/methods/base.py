"""What a method is: losses for training, a rule for prediction, and a few hooks. One file per method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from PIL import Image
from torch import Tensor, nn

from incseg.models.segmenter import Segmenter
from incseg.protocol import Step
from incseg.types import Batch, Increment, Inputs, Output, Prediction

CROSS_ENTROPY = "cross_entropy"
"""Step 0 by plain softmax cross-entropy."""


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _unheard(text: str) -> None:
    pass


@dataclass
class StepContext:
    """What the hooks at the ends of a step may look at.

    model:    the network, already grown for the step; its parameters may be changed in `begin_step`.
    teacher:  the frozen model of the step before, None in step 0.
    num_images: how many training images the step has.
    batches:  one pass over the step's training images without augmentation, in order; the same in every process. With
              a list of positions, over those images alone.
    mean:     of a tensor over the processes of the run.
    total:    the sum over them.
    share:    this process's part of a list; the parts of all make up the whole.
    say:      a line to the user.
    inputs:   photographs from elsewhere as this run's model takes them: normalised, or through a kept backbone.
    label_counts: (256,) how many pixels of the step's training images carry each training label.
    """

    step: Step
    model: Segmenter
    teacher: Segmenter | None
    batches: Callable[..., Iterable[Batch]]
    mean: Callable[[Tensor], Tensor] = _as_it_is
    inputs: Callable[[Sequence[Image.Image]], Inputs] | None = None
    total: Callable[[Tensor], Tensor] = _as_it_is
    share: Callable[[Sequence[int]], list[int]] = list
    say: Callable[[str], None] = _unheard
    label_counts: Callable[[], Tensor] | None = None
    num_images: int = 0


@dataclass(frozen=True)
class Judged:
    """What a model reaches on held-back images.

    iou:   mean over the new classes.
    kept:  percent of the old classes' pixels that stay as they were.
    shift: what must be added to the scores of the new classes for it.
    """

    iou: float
    kept: float
    shift: float


class Method(ABC):
    """A way to learn classes one step after the other.

    A subclass sets `background_output`, gives a dataclass `Config` of its options (they become
    `--method.*` flags), and defines `losses` and `predict`. The trainer owns everything else: it grows the
    network, runs the teacher once per batch, sums the losses, steps the optimiser and saves `state`.
    """

    background_output: ClassVar[bool]
    """Whether the network's first channel is a background score."""
    single_step: ClassVar[bool] = False
    """Whether all classes are learnt at once, whatever the task says."""
    adds_to_a_frozen_model: ClassVar[bool] = False
    """Whether a later step can be learnt by its own classifier alone, without a teacher: no output is shared."""

    inference_options: ClassVar[frozenset[str]] = frozenset()
    """Options that only `predict` reads."""
    later_options: ClassVar[frozenset[str]] = frozenset()
    """Options that step 0 does not read."""
    first_step: ClassVar[str | None] = None
    """What step 0 is trained by, where several methods train it alike and can share it. Those of CROSS_ENTROPY have no
    state that step 0's batches make; others that share a name make the same state in step 0."""

    revision: ClassVar[int] = 1
    """Raised where a method trains otherwise than before with the same options: its kept steps are then not reused."""

    needs_batch_sums: ClassVar[bool] = False
    """Whether `losses` reads more of the whole batch than `Batch.counts`: then `batch_sums` and `take_batch_sums` come
    before it. With micro-batches that costs another forward pass."""

    own_outputs: ClassVar[bool] = False
    """Whether the outputs mean something of this method's own: it extends its own models only, and nothing else can."""

    @dataclass
    class Config:
        """No options."""

    def __init__(self, config: Any = None) -> None:
        self.config = config if config is not None else self.Config()

    @abstractmethod
    def losses(self, batch: Batch, out: Output, teacher: Output | None, step: Step) -> dict[str, Tensor]:
        """Named scalar losses, already weighted; the trainer minimises their sum. `teacher` is None in step 0."""

    @abstractmethod
    def predict(self, logits: Tensor, increments: Sequence[Increment]) -> Prediction:
        """The rule of decision, pixel by pixel, on logits of any size (B, C, H, W)."""

    def begin_step(self, context: StepContext) -> None:
        """Before the first batch of a step: initialise classifiers, collect statistics."""

    def extend(self, batch: Batch) -> Batch:
        """Before a process's batch is cut into micro-batches: a method that replays adds images to it."""
        return batch

    def batch_sums(self, batch: Batch, out: Output, teacher: Output | None, step: Step) -> Tensor:
        """Sums over the images of a part, without gradient."""
        raise NotImplementedError(f"{type(self).__name__} asks for batch sums and makes none")

    def take_batch_sums(self, sums: Tensor, step: Step) -> None:
        """Once in an update, before its first `losses`: the mean of `batch_sums` over all parts of the batch."""

    def after_backward(self, model: nn.Module) -> None:
        """The gradients of the whole batch are there, the optimiser has not moved yet."""

    def end_step(self, context: StepContext) -> None:
        """After the last batch: consolidate what the next step will need."""

    def complete(self, context: StepContext) -> bool:
        """After a step that another run or another method trained by the same recipe: add what it lacks.

        Returns whether something was added.
        """
        return False

    def solves(self, step: Step) -> bool:
        """Whether a step is learnt by `solve`, from sums over one pass, and not by SGD."""
        return False

    def solve(self, context: StepContext) -> None:
        """Learn a step from one pass over its images: grow the model by its classes and set their weights."""
        raise NotImplementedError(f"{type(self).__name__} solves a step and does not say how")

    def tune(self, context: StepContext, judge: Callable[[], Judged]) -> None:
        """After `solve`, where held-back images may be looked at: choose what they show to be best.

        `judge` says what the model as it is reaches on them.
        """

    @property
    def closed_form_ridge(self) -> float | None:
        """The ridge by which this method solves classes in closed form; None where it trains them."""
        return None

    def without_background_output(self, model: Segmenter) -> Segmenter | None:
        """Return a model that has a background output in a form without one; None where there is no such form."""
        return None

    def recipe(self, step: int) -> dict[str, Any]:
        """What decides how this method trains a step: where two agree, the trained model can serve both."""
        if step == 0 and self.first_step is not None:
            return {"method": self.first_step}
        left_out = self.inference_options | (self.later_options if step == 0 else frozenset())
        options = {name: value for name, value in asdict(self.config).items() if name not in left_out}
        revision = {"revision": self.revision} if self.revision > 1 else {}
        return {"method": f"{type(self).__module__}:{type(self).__qualname__}", **revision, **options}

    def state(self) -> dict[str, Tensor]:
        """What must survive an interruption and be carried into the next step."""
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take up a `state`."""
