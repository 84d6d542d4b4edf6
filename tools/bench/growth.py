"""Time and memory of an image against the number of classes, steps and pixels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from incseg.losses.means import normalised
from incseg.losses.pixelwise import row_strips
from incseg.methods import Evidential
from incseg.models.segmenter import Segmenter
from incseg.types import Batch
from tools.bench.measure import Aim, Figures, Section, Settings, Spread, cost, fresh, ratios
from tools.bench.stage import QUICK_NETWORK, grown, made_up_labels, step_of

STRIDE = 16
IMAGES = 2
NETWORK = replace(QUICK_NETWORK, output_stride=STRIDE, width=256, freeze_backbone=True)
WORK = {"update": "a training update", "prediction": "a prediction"}


@dataclass(frozen=True)
class Axis:
    """A quantity that grows while the others are constant. exponent: expected exponent of the growth of the work."""

    values: tuple[int, ...]
    quick: tuple[int, ...]
    exponent: int
    title: str
    must: str
    note: str = ""


AXES = {
    "classes": Axis(
        (20, 150, 1000),
        (4, 8),
        1,
        "classes",
        "in proportion to the classes",
        "Half of them are new. Labels are bytes, so a run has at most 253 classes; for 1000 they are wider here.",
    ),
    "steps": Axis(
        (2, 10, 50),
        (2, 4),
        0,
        "steps, for as many classes",
        "not at all",
        "The last step is the same in all; the classifiers of all steps run as one convolution.",
    ),
    "side": Axis((256, 512, 1024), (32, 64), 2, "side of the image", "in proportion to the pixels"),
}


def run(settings: Settings) -> list[Section]:
    return [_section(name, axis, settings) for name, axis in AXES.items()]


def measure(case: str, settings: Settings) -> Figures:
    axis, value = case.split("/")
    figures: Figures = {}
    for work in reversed(WORK):  # the case that needs most memory last
        found = cost(lambda size, work=work: prepare(axis, int(value), work, size), settings)  # type: ignore[misc]
        figures |= {f"{work} {figure}": amount for figure, amount in found.items()}
    return figures


def prepare(axis: str, value: int, work: str, settings: Settings) -> Callable[[], object]:
    """Prepare an update of the head with teacher and losses, or the prediction of a label for every pixel."""
    value = settings.pick(value, min(value, AXES[axis].quick[-1]))
    classes = value if axis == "classes" else settings.pick(150, 12)
    side = value if axis == "side" else settings.pick(512, 32)
    new = classes // 2 if axis == "classes" else classes // 3
    old = classes - new
    sizes = (*_parts(old, value - 1 if axis == "steps" else 1), new)
    model, method = grown(NETWORK, sizes).train(), Evidential()
    features = (torch.randn(IMAGES, model.backbone.channels[-1], side // STRIDE, side // STRIDE),)
    if work == "prediction":
        return lambda: predict(model.eval(), method, features, side)
    teacher, step = grown(NETWORK, sizes[:-1]).frozen_copy(), step_of(old, new)
    labels = made_up_labels(IMAGES, side, old, classes)
    batch = Batch(features, labels, torch.bincount(labels.flatten(), minlength=256).float())

    def update() -> None:
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            taught = teacher(features)
        torch.stack(
            list(normalised(method.losses(batch, model(features), taught, step), batch).values())
        ).sum().backward()

    return update


@torch.no_grad()
def predict(model: Segmenter, method: Evidential, features: tuple[Tensor, ...], side: int) -> Tensor:
    """Predict like the evaluator."""
    strips = row_strips(model(features).logits, (side, side))
    return torch.cat([method.predict(strip, model.increments).labels for _, strip in strips], dim=1)


def _parts(total: int, count: int) -> list[int]:
    """Split `total` into `count` parts that differ by at most one."""
    return [total // count + (number < total % count) for number in range(count)]


def _section(name: str, axis: Axis, settings: Settings) -> Section:
    values = settings.pick(axis.values, axis.quick)
    found = fresh("growth", [f"{name}/{value}" for value in values], settings)

    def of(value: int, work: str, figure: str) -> list[float]:
        return [run[f"{work} {figure}"] / IMAGES for run in found[f"{name}/{value}"]]

    per_image = {
        work: {
            str(value): {
                "milliseconds": asdict(Spread.of([1e3 * s for s in of(value, work, "seconds")])),
                "megabytes": asdict(Spread.of([b / 1e6 for b in of(value, work, "extra_bytes")])),
            }
            for value in values
        }
        for work in WORK
    }
    last, before = values[-1], values[0 if axis.exponent == 0 else -2]
    expected = (last / before) ** axis.exponent
    aims = [
        Aim(
            f"{words} of {what} for {last}, over {expected:.3g} times that for {before}",
            "at most",
            1.1,
            ratios(of(last, work, figure), [expected * v for v in of(before, work, figure)]),
        )
        for work, what in WORK.items()
        for figure, words in (("seconds", "time"), ("extra_bytes", "memory"))
    ]
    return Section(
        title=f"Growth: {axis.title}",
        heading=[name, *(f"{what}: {unit}" for what in WORK.values() for unit in ("ms an image", "extra MB an image"))],
        rows=[
            [
                str(value),
                *(
                    Spread.of(of(value, work, figure)).text(scale)
                    for work in WORK
                    for figure, scale in (("seconds", 1e3), ("extra_bytes", 1e-6))
                ),
            ]
            for value in values
        ],
        aims=aims,
        notes=[f"The work itself grows {axis.must}. {axis.note}".strip(), _network_note(settings)],
        figures={"axis": name, "title": axis.title, "exponent": axis.exponent, "per_image": per_image, "runs": found},
    )


def _network_note(settings: Settings) -> str:
    side, classes = settings.pick(512, 32), settings.pick(150, 12)
    return (
        f"Where nothing else is said {classes} classes, a third of them new, at {side}²: the head of width "
        f"{NETWORK.width} on kept features at a {STRIDE}th of the size, {IMAGES} images at once."
    )
