"""An evidential step with its teacher in the trainer's loop, against the sum of its parts."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from incseg.engine.runtime import started
from incseg.losses.means import normalised
from incseg.models.segmenter import ModelConfig
from incseg.types import Batch, Output
from tools.bench.measure import Aim, Section, Settings, in_turn, ratios, seconds
from tools.bench.stage import NETWORK, QUICK_NETWORK, fit_seconds, second_step

PARTS = ("student, forward and backward", "teacher, forward", "loss, forward and backward")


def run(settings: Settings) -> list[Section]:
    network = settings.pick(NETWORK, QUICK_NETWORK)
    frozen = replace(network, freeze_backbone=True)
    return [
        _section("the whole network", network, settings.pick((8, 224, 4), (2, 64, 2)), settings),
        _section("the head, on kept features", frozen, settings.pick((16, 224, 12), (2, 64, 2)), settings),
    ]


def _section(name: str, network: ModelConfig, amount: tuple[int, int, int], settings: Settings) -> Section:
    images, size, updates = amount
    with (
        tempfile.TemporaryDirectory() as folder,
        started("cpu", "float32", settings.threads) as runtime,
    ):
        trainer, teacher = second_step(network, images, size, updates, runtime, Path(folder))
        model, method, step = trainer.model, trainer.method, trainer.protocol.steps[-1]
        inputs, labels, _ = next(trainer.loaders.plain(step, images))
        batch = Batch(inputs, labels, torch.bincount(labels.flatten(), minlength=256).float())
        with torch.no_grad():
            logits, taught = model(inputs).logits, teacher(inputs)
        gradient = torch.randn_like(logits) / logits.numel()

        def student() -> None:
            model.zero_grad(set_to_none=True)
            model(inputs).logits.backward(gradient)

        @torch.no_grad()
        def teach() -> None:
            teacher(inputs)

        def loss() -> None:
            z = logits.clone().requires_grad_()
            torch.stack(
                list(normalised(method.losses(batch, Output(z, z), taught, step), batch).values())
            ).sum().backward()

        def repeated(part: int) -> float:
            return seconds(lambda: [(student, teach, loss)[part]() for _ in range(updates)])

        found = in_turn(
            {"step": lambda: fit_seconds(trainer, teacher)}
            | {part: lambda number=number: repeated(number) for number, part in enumerate(PARTS)},  # type: ignore[misc]
            settings.repeats,
        )
    found["all parts"] = [sum(times) for times in zip(*(found[part] for part in PARTS), strict=True)]
    count = [float(images * updates)] * settings.repeats
    return Section(
        title=f"Step: second step of 15-5, {name}",
        heading=["", "ms an image", "images/s"],
        rows=[[row, ratios(t, count).text(1e3), ratios(count, t).text()] for row, t in found.items()],
        aims=[
            Aim("images/s of the step, over its parts'", "at least", 0.95, ratios(found["all parts"], found["step"])),
        ],
        notes=[
            f"{network.backbone} at {size}² with batches of {images} in memory, {updates} updates a round. The step is "
            "the trainer's loop with optimiser, counts, checks and progress; its last checkpoint is not counted."
        ],
        figures=found,
    )
