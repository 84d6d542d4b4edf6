"""The training loop: for each step grow → fit → evaluate → save → write the row."""

from __future__ import annotations

import contextlib
import itertools
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor, nn

from incseg.data.loaders import EpochOrder, Loaded, Loaders
from incseg.engine.calibration import Calibration
from incseg.engine.checkpoint import Progress, SavedStep, load_checkpoint, load_step, save_checkpoint
from incseg.engine.curves import Curves
from incseg.engine.evaluator import Evaluator
from incseg.engine.progress import log, log_rows, show_progress, with_progress
from incseg.engine.rundir import RunDir
from incseg.engine.runtime import Runtime, seed_everything
from incseg.engine.step_cache import StepCache
from incseg.io import write_array, write_record, write_tensors
from incseg.losses.means import normalised
from incseg.methods.base import HeldOutScore, Method, StepContext, StepImages
from incseg.metrics import FIGURES, plop_average
from incseg.models.files import save_segmenter
from incseg.models.segmenter import Frozen, Segmenter, fuse, fusion_share
from incseg.protocol import Protocol, Step
from incseg.settings import setting
from incseg.types import Batch, Increment, Inputs, Output, UserError

Fast = Literal["channels_last", "compile", "fused"]

_MOST_TO_CALIBRATE = 64
"""Training images that also calibrate, about, if no held-back image shows a new class."""
_SPIKE = 10.0
"""Warn of a gradient norm above this many times the mean of the earlier ones. Normal steps on VOC stay below 9."""


@dataclass
class TrainConfig:
    """How a step is trained: SGD with Nesterov momentum and a polynomial schedule per iteration.

    Args:
        epochs: passes over the images of a step.
        epochs_later: passes in the steps after the first; empty for the same number.
        batch_size: images per update, over all processes.
        accumulate: micro-batches per update and process, to use less memory; only the statistics of batch norms differ
            from those of the whole batch. Empty for one.
        lr: learning rate of step 0.
        lr_later: learning rate of later steps.
        head_rate: factor of the learning rate of everything but the backbone; the authors of DKD use 10.
        momentum: Nesterov momentum of SGD.
        weight_decay: weight decay of all parameters.
        decay_later: parameters with weight decay in later steps: all, or new for those of the new classifier alone, as
            DKD has it.
        power: exponent of the schedule lr·(1 − iteration/total)^power.
        frozen_later: parts of the model that later steps do not change: nothing (the paper); statistics of the batch
            norms, which would otherwise adapt to the step's images; norms, their parameters too; head, all but the
            classifiers; or model, all of it: the new classes then get a classifier only, or a head of their own
            (own_head).
        own_head: with a frozen model, give the classes of a later step a head of their own, which starts as a copy of
            the first. The scores of the old classes do not change at all.
        calibrate: after a step with a frozen model, shift the scores of its classes to label held-back images best.
            Not for benchmarks: it uses the images of the test.
        protect: old classes that do not give way to a new class that lies on them, as a dress lies on a person: with
            calibrate, they may lose as few pixels as other old classes. Empty for none.
        crop: side of the training images.
        scale: range of the random crop's share of the image's area; empty for no random crop: the shorter side
            becomes `crop` and the centre is used, as in the test.
        label_stride: train against every N-th label in both directions; 1 is the full resolution.
        flip: mirror half of the images.
        clip: largest norm of the gradient; empty for no limit.
        clip_later: the same in later steps, where a single image can have a gradient a hundred times larger than the
            others; empty for the same as `clip`.
        fast: ways to save time on a GPU: channels_last, compile and fused (the optimiser's update); they change the
            last digits of results. Empty for none.
        fusion: ewf fuses the model with that of the previous step at the end of every later step; empty for none.
        workers: loader processes; empty for a choice by machine and data.
        checkpoint_seconds: seconds between checkpoints, the most work that an interruption loses.
    """

    epochs: int = 30
    epochs_later: int | None = setting(None, affects="later")
    batch_size: int = 20
    accumulate: int | None = None
    lr: float = 0.01
    lr_later: float = setting(0.001, affects="later")
    head_rate: float = 1.0
    momentum: float = 0.9
    weight_decay: float = 1e-4
    decay_later: Literal["all", "new"] = setting("all", affects="later")
    power: float = 0.9
    frozen_later: Frozen = setting("nothing", affects="later")
    own_head: bool = setting(False, affects="later")
    calibrate: bool = setting(False, affects="later")
    protect: tuple[str, ...] | None = setting(None, affects="later")
    crop: int = 512
    scale: tuple[float, float] | None = (0.5, 2.0)
    label_stride: int = 1
    flip: bool = True
    clip: float | None = None
    clip_later: float | None = setting(None, affects="later")
    fast: tuple[Fast, ...] | None = None
    fusion: Literal["ewf"] | None = setting(None, affects="later")
    workers: int | None = setting(None, affects="machine")
    checkpoint_seconds: float = setting(120.0, affects="machine")

    def __post_init__(self) -> None:
        for name, least in (
            ("epochs", 1),
            ("epochs_later", 1),
            ("batch_size", 1),
            ("accumulate", 1),
            ("crop", 1),
            ("label_stride", 1),
            ("workers", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"train.{name} is {value}; it must be at least {least}")
        for name in ("lr", "lr_later", "head_rate", "weight_decay", "power", "checkpoint_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"train.{name} is {getattr(self, name)}; it must be a finite number from 0")
        if not 0 <= self.momentum < 1:
            raise UserError(f"train.momentum is {self.momentum}; it must be from 0 to below 1")
        for name in ("clip", "clip_later"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"train.{name} is {value}; it must be above 0, or left out for no limit")
        if self.own_head and self.frozen_later != "model":
            raise UserError("train.own_head needs train.frozen_later model; set both")

    def uses(self, way: Fast) -> bool:
        return way in (self.fast or ())

    def clip_of(self, index: int) -> float | None:
        """Return the largest allowed norm of a gradient in a step; None for no limit."""
        return self.clip_later if index > 0 and self.clip_later is not None else self.clip

    def for_step(self, index: int) -> tuple[int, float, Frozen]:
        """Return (epochs, learning rate, what is frozen) of a step."""
        if index == 0:
            return self.epochs, self.lr, "nothing"
        return self.epochs_later or self.epochs, self.lr_later, self.frozen_later


@dataclass
class Trainer:
    """The objects that a run needs. `run` resumes from the state of the run folder and trains to the end."""

    protocol: Protocol
    loaders: Loaders
    evaluator: Evaluator
    method: Method
    model: Segmenter
    train: TrainConfig
    seed: int
    runtime: Runtime
    folder: RunDir
    curves: Curves
    cache: StepCache
    about: dict[str, Any]
    """The metadata of the model files."""
    title: str = ""
    notes: Sequence[str] = ()
    """Title of the table of steps, and the lines below it."""
    class_images: Mapping[str, tuple[int, int]] | None = None
    """Number of training and test images that show each class, for a table with one row per class."""
    warm_start: SavedStep | None = None
    """Step 0, if the run starts from an existing model."""

    def run(self, only_step_0: bool = False) -> dict[str, Any]:
        """Learn the steps that are not done yet and return the content of results.json; of step 0 alone, nothing."""
        if self.train.frozen_later == "model" and self.method.background_output:
            raise UserError(
                "train.frozen_later is model, and this method cannot add classes to a frozen model; use evidential, or "
                "another value"
            )
        done = len(self.folder.steps_done())
        if done == len(self.protocol.steps):
            log.info(f"{self.folder.root} is finished; nothing is left to learn")
        elif done:
            self._resume_after(done - 1)
        for step in self.protocol.steps[done : 1 if only_step_0 else None]:
            row = self._learn(step)
            if self.runtime.is_main:
                self._finish_step(step, row)
            self.runtime.barrier()
        return {} if only_step_0 else self._finish()

    def _resume_after(self, step: int) -> None:
        try:
            self.model = load_step(self.folder.model(step)).restore(self.method, self.runtime.device)
        except UserError as error:
            raise UserError(
                f"{error}, or delete it and the row.json beside it, and the same command learns step {step} again"
            ) from error
        log.info(f"resuming after step {step} in {self.folder.root}")

    def _learn(self, step: Step) -> dict[str, Any]:
        seed_everything(self.seed, step.index)
        images = self.loaders.train_images[step.index]
        so_far = self.protocol.steps[: step.index + 1]
        reused = self.warm_start if step.index == 0 else None
        if reused is None:
            if not images:
                raise UserError(
                    f"step {step.index} ({', '.join(step.names)}) has no training image; see incseg protocol"
                )
            reused = self.cache.find(so_far, self.loaders.train_images)
            if self.cache.root is not None and self.runtime.any(reused is None):
                reused = None  # another run may cache the step meanwhile: all processes reuse it, or all train
            if reused is not None:
                log.info(f"step {step.index} was trained before by the same recipe and is reused from {reused.origin}")
        to_cache = reused is None
        if reused is not None:
            self.model, progress = reused.restore(self.method, self.runtime.device), reused.progress
            to_cache = self.method.complete(self._context(step, None)) and reused is not self.warm_start
        else:
            progress = self._solve(step) or self._train(step)
        evaluated = time.monotonic()
        counts = self.evaluator.count(self.model, self.method, step)
        row = {
            "index": step.index,
            "classes": list(step.names),
            "ids": list(step.new),
            "train_images": len(images),
            **self.evaluator.figures(counts, step),
            "losses": progress.mean_losses,
            "gradient": progress.gradient,
            "reused_from": reused.origin if reused else None,
            "seconds": {"train": round(progress.seconds, 2), "eval": round(time.monotonic() - evaluated, 2)},
        }
        if self.runtime.is_main:
            self.folder.require_there()
            save_segmenter(self.folder.model(step.index), self.model, self.about)
            write_tensors(self.folder.state(step.index), self.method.state(), {})
            write_array(self.folder.confusion(step.index), counts.confusion.numpy())
            if to_cache:
                self.cache.add(so_far, self.loaders.train_images, self.folder, progress)
        return row

    def _train(self, step: Step) -> Progress:
        """Grow the model by the step's classes and fit it."""
        if step.index and self.train.frozen_later != "model":
            self.model.drop_closed_form()  # it is valid only for the current network
        own_head = bool(step.index) and self.train.own_head
        # A frozen model needs no teacher: it cannot forget.
        teacher = self.model.frozen_copy() if step.index and self.train.frozen_later != "model" else None
        head = len(self.model.heads) + 1 if own_head else 0
        self.model.grow(Increment(step.names, step.new, len(self.loaders.train_images[step.index]), head))
        self.model.to(self.runtime.device).train()
        if self.train.uses("channels_last"):
            for network in (self.model, teacher):
                if network is not None:
                    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model.freeze(self.train.for_step(step.index)[2])
        context = self._context(step, teacher)
        self.method.begin_step(context)
        progress = self._fit(step, teacher)
        if self.train.fusion == "ewf" and teacher is not None:
            fuse(self.model, teacher, fusion_share(len(step.new), len(step.seen)))
        self.method.end_step(context)
        if self._may_use_held_out(step):
            self.model.shift_newest(self._calibration(step).score(self.model, apart=True).shifts)
        return progress

    def _solve(self, step: Step) -> Progress | None:
        """Learn the step in closed form by one pass over its images; return None if the method does not."""
        started = time.monotonic()
        solved = self.method.solve(self._context(step, None))
        return Progress(seconds=time.monotonic() - started) if solved else None

    def _context(self, step: Step, teacher: Segmenter | None) -> StepContext:
        images = StepImages(
            batches=lambda positions=None: self._plain_batches(step, positions),
            number=len(self.loaders.train_images[step.index]),
            label_counts=lambda: self.loaders.label_counts(step),
            inputs=self._inputs,
        )

        def score(apart: bool = False) -> HeldOutScore:
            return self._calibration(step).score(self.model, apart)

        may_score = self._may_use_held_out(step)
        return StepContext(step, self.model, teacher, images, self.runtime, score if may_score else None)

    def _may_use_held_out(self, step: Step) -> bool:
        """Return whether held-out images may decide how readily new classes are predicted."""
        frozen = self.train.frozen_later == "model" and step.index > 0
        return self.train.calibrate and frozen and bool(self.loaders.test_images)

    def _calibration(self, step: Step) -> Calibration:
        held_back, config, some = len(self.loaders.test_images), self.evaluator.config, range(0)
        if unshown := [name for name in step.names if self.class_images and not self.class_images[name][1]]:
            log.info(
                f"note: no held-back photograph shows {', '.join(unshown)}, so the photographs to learn from also "
                "choose how readily new classes are predicted"
            )
            count = len(self.loaders.train_images[step.index])
            some = range(0, count, max(1, count // _MOST_TO_CALIBRATE))

        def batches() -> Iterator[Loaded]:
            of_test = self.loaders.testing(step, range(held_back), config.batch_size if config.size else 1)
            shown = itertools.chain(of_test, self.loaders.plain(step, config.batch_size, some) if some else ())
            return iter(with_progress(shown, "calibrating", held_back + len(some)))

        return Calibration(self.method, batches, self.runtime, self.train.protect or ())

    def _fit(self, step: Step, teacher: Segmenter | None) -> Progress:
        """Train the step, or the rest of an interrupted one. Ctrl-C saves a checkpoint first."""
        epochs, base_lr, _ = self.train.for_step(step.index)
        compiled = self.train.uses("compile")
        wrapped = self.runtime.wrap(torch.compile(self.model) if compiled else self.model)  # type: ignore[arg-type]
        optimizer = build_optimizer(self.model, self.train, step.index)
        scaler = self.runtime.grad_scaler()
        progress = load_checkpoint(
            self.folder.checkpoint,
            step.index,
            self.model,
            optimizer,
            scaler,
            self.method,
            self.runtime,
        )
        order = self._order(step, epochs, progress.iteration)
        per_epoch, total = order.batches_per_epoch, order.batches_per_epoch * epochs
        before, started = progress.seconds, time.monotonic()
        saved = started

        def save() -> None:
            progress.seconds = before + time.monotonic() - started
            if self.runtime.is_main:
                self.folder.require_there()
                save_checkpoint(
                    self.folder.checkpoint, step.index, progress, self.model, optimizer, scaler, self.method
                )

        what = f"step {step.index}/{len(self.protocol.steps) - 1}"
        with show_progress(what, total, progress.iteration) as advance, _interruptible() as stop:
            for inputs, labels, images in self.loaders.training(step, order):
                iteration = progress.iteration
                for group in optimizer.param_groups:
                    group["lr"] = group["factor"] * base_lr * (1 - iteration / total) ** self.train.power
                batch = self._to_batch(inputs, labels, images)
                terms, norm = self._update(wrapped, teacher, optimizer, scaler, batch, step, iteration)
                progress.add(terms, norm, starts_epoch=iteration % per_epoch == 0)
                means = "  ".join(f"{name} {value:.3f}" for name, value in progress.mean_losses.items())
                advance(1, f"epoch {iteration // per_epoch + 1}/{epochs}  {means}")
                if progress.iteration % per_epoch == 0:
                    self.curves.losses(
                        progress.mean_losses, self._epochs_before(step.index) + progress.iteration // per_epoch
                    )
                if self.runtime.any(stop.is_set()):
                    save()
                    raise KeyboardInterrupt
                if self.runtime.any(time.monotonic() - saved > self.train.checkpoint_seconds):
                    save()
                    saved = time.monotonic()
        self.runtime.share_buffers(self.model)
        save()
        if teacher is not None and progress.spike > _SPIKE and self.train.clip_of(step.index) is None:
            log.info(
                f"step {step.index}: the gradient of update {progress.spike_at} was {progress.spike:.0f} times the "
                "mean of the earlier ones; such a spike can destroy an old class; --train.clip_later 1 limits it"
            )
        return progress

    def _update(
        self, wrapped: nn.Module, teacher: Segmenter | None, optimizer: torch.optim.SGD, scaler: torch.amp.GradScaler,
        batch: Batch, step: Step, iteration: int,
    ) -> tuple[dict[str, float], float]:  # fmt: skip
        """Make one optimiser update and return the losses and the norm of their gradient.

        If a loss or the gradient is not finite, stop the run before the model changes.
        """
        parts = self.method.extend(batch).parts(self.train.accumulate or 1)
        optimizer.zero_grad(set_to_none=True)
        if len(parts) > 1:
            self.method.before_update(lambda of: self._average(of, parts, teacher), step)
        values = torch.zeros(())
        for number, part in enumerate(parts, start=1):
            with self.runtime.synced(wrapped, now=number == len(parts)):
                out, old = self._forward(wrapped, teacher, part)
                if len(parts) == 1:
                    self.method.before_update(lambda of: self.runtime.mean(of(part, out, old)), step)  # noqa: B023
                losses = normalised(self.method.losses(part, out, old, step), part)
                terms_of_part = torch.stack(list(losses.values())) / len(parts)
                scaler.scale(terms_of_part.sum()).backward()
            values = values.to(terms_of_part) + terms_of_part.detach()
        scaler.unscale_(optimizer)
        self.method.after_backward(self.model)
        limit = self.train.clip_of(step.index) or math.inf
        norm = float(nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], limit))
        terms = dict(zip(losses, self.runtime.mean(values).tolist(), strict=True))
        # float16 overflows now and then by design: its scaler skips such an update and lowers the scale.
        if not math.isfinite(sum(terms.values())) or not (scaler.is_enabled() or math.isfinite(norm)):
            shown = ", ".join(f"{name} {value:g}" for name, value in terms.items())
            raise UserError(
                f"step {step.index}, iteration {iteration}: the loss or its gradient is not finite ({shown}, gradient "
                f"norm {norm:g}); the last good state is saved in {self.folder.root}; lower the learning rate or set "
                "--train.clip 1, with another --out"
            )
        scaler.step(optimizer)
        scaler.update()
        return terms, norm

    def _forward(self, model: nn.Module, teacher: Segmenter | None, batch: Batch) -> tuple[Output, Output | None]:
        """Return the outputs of the model and of its teacher, which has no gradient."""
        old: Output | None = None
        with self.runtime.autocast():
            if teacher is not None:
                with torch.no_grad():
                    old = teacher(batch.inputs)
            return model(batch.inputs), old

    def _average(
        self, of: Callable[[Batch, Output, Output | None], Tensor], parts: list[Batch], teacher: Segmenter | None
    ) -> Tensor:
        """Return the mean of a function of (batch, output, teacher's output) over all parts in all processes."""
        with torch.no_grad(), _buffers_unchanged(self.model):
            found = [of(part, *self._forward(self.model, teacher, part)) for part in parts]
        return self.runtime.mean(torch.stack(found).mean(0))

    def _to_batch(self, inputs: Inputs, labels: Tensor, images: Sequence[int], alone: bool = False) -> Batch:
        """Return a batch on the device. Its counts are means over all processes, or with `alone` those of this one."""
        labels = labels.to(self.runtime.device, non_blocking=True)
        if self.train.uses("channels_last") and isinstance(inputs, Tensor):
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        counts = torch.bincount(labels.flatten(), minlength=256).float()
        return Batch(self.runtime.move(inputs), labels, counts if alone else self.runtime.mean(counts), images)

    def _inputs(self, images: Sequence[Image.Image]) -> Inputs:
        """Return images from outside the dataset in the form that the loaders give."""

        def encode(pixels: Tensor) -> Inputs:
            return self.model.features(pixels.to(self.runtime.device))

        return self.runtime.move(self.loaders.inputs(images, encode))

    def _order(self, step: Step, epochs: int, first: int) -> EpochOrder:
        size, world, parts = self.train.batch_size, self.runtime.world, self.train.accumulate or 1
        if size < world * parts:
            needed = f"{world} processes" + (f" of {parts} micro-batches each" if parts > 1 else "")
            raise UserError(f"train.batch_size is {size}, less than the {needed}; raise it, or use fewer")
        images = len(self.loaders.train_images[step.index])
        return EpochOrder(images, size, epochs, (self.seed, step.index), first, self.runtime.rank, world)

    def _plain_batches(self, step: Step, positions: Sequence[int] | None = None) -> Iterator[Batch]:
        """Yield the step's training images, prepared as in the test, or those at `positions`.

        Every process gets all of them, so that a method computes the same from them in each.
        """
        images = len(self.loaders.train_images[step.index] if positions is None else positions)
        loaded = self.loaders.plain(step, self.evaluator.config.batch_size, positions)
        for inputs, labels, indices in with_progress(loaded, f"reading step {step.index}", images):
            yield self._to_batch(inputs, labels, indices, alone=True)

    def _finish_step(self, step: Step, row: dict[str, Any]) -> None:
        self.folder.require_there()
        write_record(self.folder.row(step.index), row)
        self.folder.checkpoint.unlink(missing_ok=True)
        self.curves.row(row, self._epochs_before(step.index + 1))
        log_rows(self.title, self._rows(step.index + 1), self.notes, self.class_images)

    def _rows(self, done: int) -> list[dict[str, Any]]:
        """Return the rows of the `done` finished steps."""
        rows = self.folder.rows()
        if len(rows) < done:
            raise UserError(f"{self.folder.row(len(rows))} is missing; the same command learns step {len(rows)} again")
        return rows

    def _epochs_before(self, step: int) -> int:
        return sum(self.train.for_step(index)[0] for index in range(step))

    def _finish(self) -> dict[str, Any]:
        rows = self._rows(len(self.protocol.steps))
        last = rows[-1]
        results = {
            "final": {
                **{name: last[name] for name in FIGURES},
                "avg": plop_average([row["all"] for row in rows]),
                "iou": last["iou"],
            },
            "steps": rows,
            "rules": self.protocol.rules.as_dict(),
            "seconds": round(sum(sum(row["seconds"].values()) for row in rows), 2),
        }
        if self.runtime.is_main:
            write_record(self.folder.results, results)
            self.folder.checkpoint.unlink(missing_ok=True)
        return results


def build_optimizer(model: Segmenter, config: TrainConfig, index: int) -> torch.optim.SGD:
    """Return SGD over the parameters that a step trains, in groups that differ in their rate or weight decay."""
    _, lr, _ = config.for_step(index)
    newest = set(model.classifiers[-1].parameters())
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        factor = 1.0 if name.startswith("backbone.") else config.head_rate
        decays = config.decay_later == "all" or index == 0 or parameter in newest
        if parameter.requires_grad:
            groups.setdefault((factor, config.weight_decay if decays else 0.0), []).append(parameter)
    return torch.optim.SGD(
        [
            {"params": parameters, "lr": factor * lr, "weight_decay": decay, "factor": factor}
            for (factor, decay), parameters in groups.items()
        ],
        momentum=config.momentum,
        nesterov=config.momentum > 0,
        fused=config.uses("fused") or None,  # else torch's own choice
    )


@contextlib.contextmanager
def _buffers_unchanged(model: nn.Module) -> Iterator[None]:
    """Restore the running statistics after the block."""
    before = [buffer.clone() for buffer in model.buffers()]
    yield
    for buffer, value in zip(model.buffers(), before, strict=True):
        buffer.copy_(value)


@contextlib.contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C or SIGTERM sets. The second one acts as usual."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def request(number: int, frame: FrameType | None) -> None:
        stop.set()
        restore()

    previous = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    try:
        yield stop
    finally:
        restore()
