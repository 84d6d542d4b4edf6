"""Closed-form increments: the base trained as `evidential`, every later class solved by least squares in seconds.

After the base step the network is frozen. Each position of its feature map, a cell, becomes a vector of random
features. Two sums over all cells seen so far are saved with the model (models/closed_form.py), and new classes are
solved against them. So every cell of earlier steps is a negative for a new class, background included. A one-class step
has no such negatives, because all its images show the class. No image is stored, nothing is tuned, and no old class is
changed by training.

Background of a later step may be an old object. Its label is the prediction of the previous model.

The method stays evidential. The scores become log-odds o_c of each class against background, evidence is e_c =
N·exp(o_c), and u = N / (N + Σe) is the probability of background. Classes of the base mix trained and solved odds. The
distance of a solved class to the best of them is that of the closed form alone.

Related: analytic class-incremental learning (ACIL) and, for segmentation, CFSSeg (arXiv 2412.10834). They have no
evidential base, no soft targets and no u.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from incseg.data.files import read_image
from incseg.data.unlabelled import image_files
from incseg.losses.least_squares import Sums, cell_targets, fill_background, label_weights
from incseg.losses.means import Term
from incseg.methods.base import HeldOutScore, Method, StepContext, StepImages
from incseg.methods.evidential import Evidential
from incseg.metrics import ALLOWED, best
from incseg.models.closed_form import ClosedForm, Design
from incseg.models.segmenter import Segmenter, resized
from incseg.outputs.evidential import Rectifier, odds_evidence_probabilities, odds_log_probabilities
from incseg.protocol import Step
from incseg.settings import setting
from incseg.types import BACKGROUND, Batch, Increment, Output, Prediction, UserError

log = logging.getLogger("incseg")

_SAMPLED = 1024
"""Number of images that mean and deviation of the inputs are computed from."""
_MOST_CELLS_OF_BASE, _MOST_CELLS = 100_000, 40_000
"""About the most cells of foreground, and of background, that a step counts. More are thinned evenly, and each counts
more. This costs no accuracy (docs/lab-log.md) and bounds the time of a step."""
_SAMPLED_OF_FOLDER = 64
"""The same if the backbone must see each image; also the images from which the frequency of old classes is found."""
_IMAGES_AT_ONCE = 16
BOOSTS = (1.0, 4.0, 16.0)
"""Factors of the weight of new classes' cells that are tried on held-back images."""


class Analytic(Method):
    background_output = False

    @dataclass
    class Config:
        """Options of the closed form; the first five are those of the evidential base.

        Args:
            rectifier: function from score to evidence in the base; exp_sigmoid is exp(z)·σ(z).
            lambda_new: weight of the loss of the base.
            foreground_weight: weight foreground and background pixels of the base by their inverse share of the batch.
            max_weight: upper limit of that weight.
            class_weight: exponent of the weight of rare classes of the base; 0 weights all classes equally.
            base: learn step 0 by SGD (trained), or in closed form (solved), which is faster and less accurate.
            columns: number of random features of a cell; the sums grow with its square.
            seed: seed of the random features.
            embedding: weight of the trained head's embedding among the inputs of the random features.
            power: exponent p; a cell of a class with n cells has the weight n^(−p).
            ridge: γ, the regularisation, as a share of the mean diagonal of the sums.
            sgd_share: share of the trained odds of the base classes in their mixture with the solved ones, from 0 to 1.
            shift: number added to the log-odds of solved classes.
            images: for a model without sums, a folder of any images that show its classes, to compute the sums from.
            sharpness: factor of all log-odds before they become probabilities; it changes no label.
        """

        rectifier: Rectifier = "exp_sigmoid"
        lambda_new: float = 1.0
        foreground_weight: bool = False
        max_weight: float = 10.0
        class_weight: float = 0.0
        base: Literal["trained", "solved"] = "trained"
        columns: int = 2048
        seed: int = 0
        embedding: float = 3.0
        power: float = 0.5
        ridge: float = 1e-3
        sgd_share: float = 0.7
        shift: float = 0.0
        images: str | None = None
        sharpness: float = setting(1.0, affects="inference")

        def __post_init__(self) -> None:
            if not 16 <= self.columns <= 16384:
                raise UserError(f"columns is {self.columns}; give 16 to 16384, such as 2048")
            for name, most in (("power", 1.0), ("sgd_share", 1.0)):
                if not 0 <= getattr(self, name) <= most:
                    raise UserError(f"{name} is {getattr(self, name)}; give a number from 0 to {most:g}")
            for name in ("ridge", "sharpness"):
                if not 0 < getattr(self, name) < math.inf:
                    raise UserError(f"{name} is {getattr(self, name)}; give a number above 0")
            if not 0 <= self.embedding < math.inf:
                raise UserError(f"embedding is {self.embedding}; give a weight from 0")

    config: Config

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        c = self.config
        self._base = Evidential(
            Evidential.Config(
                rectifier=c.rectifier,
                lambda_new=c.lambda_new,
                foreground_weight=c.foreground_weight,
                max_weight=c.max_weight,
                class_weight=c.class_weight,
            )
        )

    # The base is that of evidential, to the last bit, so both share one trained step.

    def begin_step(self, context: StepContext) -> None:
        self._base.begin_step(context)

    def losses(self, batch: Batch, out: Output, teacher: Output | None, step: Step) -> dict[str, Term]:
        return self._base.losses(batch, out, teacher, step)

    def recipe(self, step: int) -> dict[str, Any]:
        return self._base.recipe(0) if step == 0 and not self._base_is_solved else super().recipe(step)

    def end_step(self, context: StepContext) -> None:
        self.complete(context)

    def complete(self, context: StepContext) -> bool:
        """Compute the sums of a step that was learnt by SGD, if it has none. Return whether they were computed."""
        form, design = context.model.closed_form, self._design()
        if form is not None and (form.design == design or any(i.solved for i in context.model.increments)):
            return False
        if self.config.images is None and not len(context.images):
            return False
        context.model.drop_closed_form()  # one of another design
        if self.config.images is not None:
            log.info(f"computing the sums of the old classes from the images in {self.config.images}")
            images = _of_folder(context.images, Path(self.config.images).expanduser())
            self._count(context, images, found=True)
        else:
            self._count(context, context.images, found=context.step.index > 0)
        return True

    # Later steps are solved.

    def solve(self, context: StepContext) -> bool:
        """Add the step's classes to the model.

        With `sgd_share` 1 they get a solution of their own, and nothing else of the model changes. Otherwise all solved
        classes are solved again, together.
        """
        model, step = context.model, context.step
        if step.index == 0 and not self._base_is_solved:
            return False
        beside = self.config.sgd_share == 1 and bool(model.increments)
        if not beside and any(increment.beside for increment in model.increments):
            raise UserError(
                f"method.sgd_share is {self.config.sgd_share:g}, and this model has classes that were added beside "
                "earlier ones; continue with --method.sgd_share 1"
            )
        if model.closed_form is None and model.increments:
            log.info(
                "note: the model file has no sums of its training images, so the new classes are solved against these "
                "images alone and may be predicted where they are not; incseg extend --images DIR computes the sums "
                "from a folder of images that show the old classes"
            )
        self._count(context, context.images, found=True)
        form = model.closed_form
        assert form is not None
        form.nothing_waits()
        if not beside:
            form.sgd_share = self.config.sgd_share
        head = len(model.heads) + 1 if beside else list(model.heads).index(form) + 1
        model.grow(Increment(step.names, step.new, len(context.images), head, solved=True, beside=beside))
        model.shift_newest([self.config.shift] * len(step.new))
        self._take(model, 1.0)
        if context.score_on_held_out is not None:
            self._tune(model, form, len(step.new), context.score_on_held_out)
        return True

    def _tune(self, model: Segmenter, form: ClosedForm, num_new: int, score: Callable[..., HeldOutScore]) -> None:
        """Choose the weight of the new classes' cells, and how readily they are predicted, on held-out images."""
        scores = []
        for boost in BOOSTS:
            self._take(model, boost)
            scores.append(score())
        chosen = best([(one.iou, one.agreement) for one in scores], ALLOWED)
        self._take(model, BOOSTS[chosen])
        form.weights[-num_new:] *= BOOSTS[chosen]
        model.shift_newest(score(apart=True).shifts)

    def _take(self, model: Segmenter, boost: float) -> None:
        """Solve with the weight of the cells of the step's own classes multiplied by `boost`."""
        sums = self._rest + self._own.times(boost)
        model.take_solution(sums, sums.solve(self.config.ridge))

    def predict(self, logits: Tensor, increments: Sequence[Increment]) -> Prediction:
        """Return the decision of the classes that were learnt together, and of those of extensions.

        A class of an extension wins where its score, the distance to the best earlier class, is above 0; the latest
        wins first.
        """
        together = [increment for increment in increments if not increment.beside]
        sizes = [len(increment.classes) for increment in increments[len(together) :]]
        scores, *added = logits.split([logits.shape[1] - sum(sizes), *sizes], 1)
        solved = any(increment.solved for increment in together)
        if not solved and not added:
            return self._base.predict(scores, together)
        if solved:
            best = scores.max(1)
            labels = torch.where(best.values > 0, best.indices + 1, BACKGROUND)
        else:
            labels = self._base.predict(scores, together).labels.long()
        first = scores.shape[1] + 1
        for ahead in added:
            best = ahead.max(1)
            labels = torch.where(best.values > 0, best.indices + first, labels)
            first += ahead.shape[1]

        @cache
        def probabilities() -> Tensor:
            odds = scores
            if not solved:
                log_p = odds_log_probabilities(scores, [len(i.classes) for i in together], self.config.rectifier)
                odds = log_p[:, 1:] - log_p[:, :1]
            for ahead in added:
                odds = torch.cat([odds, ahead + odds.amax(1, keepdim=True).clamp(min=0)], 1)
            return odds_evidence_probabilities(self.config.sharpness * odds)

        return Prediction(labels.to(torch.uint8), probabilities, lambda: probabilities()[:, 0])

    # Sums.

    def _design(self) -> Design:
        """Return the design of the random features. They do not read the embedding of a head that was never trained."""
        return Design(self.config.columns, self.config.seed, 0.0 if self._base_is_solved else self.config.embedding)

    @property
    def _base_is_solved(self) -> bool:
        return self.config.base == "solved"

    @torch.no_grad()
    def _count(self, context: StepContext, images: StepImages, found: bool) -> None:
        """Add the cells of the images to the sums. With `found`, background gets the label that the model predicts.

        The model must not have grown by the step's classes yet.
        """
        model, step = context.model.eval(), context.step
        form = model.closed_form
        if form is None:
            form = model.add_closed_form(self._design(), self.config.rectifier)
            sampled = _SAMPLED if images is context.images else _SAMPLED_OF_FOLDER
            _standardise(model, form, images.batches(range(0, len(images), max(1, len(images) // sampled))))
        labels = len(step.seen) + 1
        form.set_labels(max(labels, form.num_labels))
        pixels = torch.zeros(256, dtype=torch.float64)
        pixels[BACKGROUND] = 1
        if images.label_counts is not None:
            pixels = images.label_counts().double()
        if found and model.increments and not form.counts.any():
            shares = self._shares_found(model, images)  # no cell was counted: their frequency is unknown
            hidden = pixels[BACKGROUND] * shares
            pixels[BACKGROUND] = 0
            pixels += hidden
        columns, device = form.design.columns + 1, form.gram.device
        sums, own, before = Sums.zero(columns, labels, device), Sums.zero(columns, labels, device), form.sums()
        every, passed, first_own = (1, 1), 0, len(step.old) + 1 if found else labels
        positions = context.processes.share(range(len(images)))
        most = _MOST_CELLS if model.increments and found else _MOST_CELLS_OF_BASE
        for batch in images.batches(positions):
            local, image, embedding = model.closed_form_inputs(batch.inputs)
            height, width = local.shape[-2:]
            if not passed:
                self._weigh(form, pixels, height * width * len(images))
                every = _thinning(pixels, height * width * len(images), most)
            targets, labelled = cell_targets(batch.labels, height, width, labels)
            targets, labelled = targets.flatten(0, 1), labelled.flatten()
            numbers = torch.tensor(positions[passed : passed + len(batch.labels)], device=targets.device)
            chosen, times = _thinned(targets, labelled, numbers, every)
            passed += len(batch.labels)
            targets = targets[chosen]
            cells = form.cell_features(_rows(local)[chosen], _rows(image.expand(-1, -1, height, width))[chosen])
            if found and model.increments:
                decided = self._decided(model, batch, embedding, cells, chosen, (height, width))
                targets = fill_background(targets, decided)
            amount, label = labelled[chosen] * times, targets.argmax(1)
            weights, is_own = amount * form.weights[label], label >= first_own
            own.add(cells[is_own], targets[is_own], weights[is_own], amount[is_own])
            sums.add(cells[~is_own], targets[~is_own], weights[~is_own], amount[~is_own])
        rest = (before + _over_all(sums, context)).with_labels(form.num_labels)
        self._rest, self._own = form.take_back(step.names, rest, len(step.old) + 1), _over_all(own, context)
        form.take(self._rest + self._own)

    def _shares_found(self, model: Segmenter, images: StepImages) -> Tensor:
        """Return (256,) the share of each label in what the model predicts on the background of some images."""
        counts = torch.zeros(256, dtype=torch.float64)
        for batch in images.batches(range(0, len(images), max(1, len(images) // _SAMPLED_OF_FOLDER))):
            logits = model(batch.inputs).logits
            labels = self.predict(logits, model.increments).labels
            given = F.interpolate(batch.labels[:, None].float(), labels.shape[-2:], mode="nearest")[:, 0]
            counts += torch.bincount(labels[given == BACKGROUND].long().cpu(), minlength=256)
        return counts / counts.sum().clamp(min=1)

    def _weigh(self, form: ClosedForm, pixels: Tensor, cells: int) -> None:
        """Set the weight of a cell of each label that has none yet. It does not change afterwards."""
        counts = pixels[: form.num_labels].to(form.counts) * (cells / max(float(pixels.sum()), 1.0))
        fresh = form.counts == 0
        form.weights[fresh] = label_weights(counts, self.config.power).to(form.weights)[fresh]

    def _decided(
        self, model: Segmenter, batch: Batch, embedding: Tensor, cells: Tensor, chosen: Tensor, size: tuple[int, int]
    ) -> Tensor:
        """Return (n,) the labels that the model predicts for the chosen cells."""
        logits = model.cell_logits(_rows(embedding)[chosen], cells)
        if logits is None:
            logits = _rows(resized(model(batch.inputs).logits, size))[chosen]
        return self.predict(logits.T[None, ..., None], model.increments).labels.flatten().long()


def _standardise(model: Segmenter, form: ClosedForm, batches: Iterable[Batch]) -> None:
    rows = []
    for batch in batches:
        local, image, _ = model.closed_form_inputs(batch.inputs)
        inputs = torch.cat([local, image.expand(-1, -1, *local.shape[-2:])], 1)
        rows.append(_rows(inputs)[::7])
    form.standardise(torch.cat(rows))


def _of_folder(images: StepImages, folder: Path) -> StepImages:
    """Return the images of a folder, without labels."""
    files, as_inputs = image_files(folder), images.inputs
    assert as_inputs is not None

    def batches(positions: Sequence[int]) -> Iterable[Batch]:
        for first in range(0, len(positions), _IMAGES_AT_ONCE):
            opened = [read_image(files[i]) for i in positions[first : first + _IMAGES_AT_ONCE]]
            labels = torch.zeros(len(opened), 64, 64, dtype=torch.uint8)
            yield Batch(as_inputs(opened), labels, torch.bincount(labels.flatten().long(), minlength=256).float())

    return StepImages(batches, len(files))


def _over_all(sums: Sums, context: StepContext) -> Sums:
    """Return the sums over all processes of the run."""
    return Sums(*(context.processes.sum(part) for part in (sums.gram, sums.cross, sums.counts)))


def _rows(maps: Tensor) -> Tensor:
    """(B, C, h, w) → (B·h·w, C): one row for each cell."""
    return maps.permute(0, 2, 3, 1).flatten(0, 2)


def _thinning(pixels: Tensor, cells: int, most: int) -> tuple[int, int]:
    """Return (k, m): every k-th cell of background and every m-th of foreground is counted."""
    share = float(pixels[BACKGROUND] / pixels.sum()) if pixels.any() else 1.0
    return max(1, math.ceil(cells * share / most)), max(1, math.ceil(cells * (1 - share) / most))


def _thinned(targets: Tensor, labelled: Tensor, images: Tensor, every: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return which of (n, L) cells are counted, and how many cells each of them stands for.

    images: numbers of the images of the cells, so that the result does not depend on the process that counts them.
    every:  every k-th cell of background and every m-th of foreground is counted.
    """
    per_image = len(targets) // len(images)
    place = (images.unsqueeze(1) * per_image + torch.arange(per_image, device=images.device)).flatten()
    is_foreground = targets[:, BACKGROUND] < 0.5
    step = torch.where(is_foreground, every[1], every[0])
    chosen = (place % step == 0) & (labelled > 0)
    return chosen, step[chosen].float()
