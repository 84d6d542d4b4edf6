"""Decoding and augmentation against the rate of the network, loader processes, and relabelling by table."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from incseg.data.folder import Folder
from incseg.data.loaders import EpochOrder, PixelLoaders, StepView
from incseg.data.transforms import TestTransform, TrainTransform
from incseg.protocol import Step
from incseg.types import Inputs
from tools.bench.measure import Aim, Section, Settings, Spread, in_turn, ratios, seconds
from tools.bench.stage import NETWORK, QUICK_NETWORK, grown, protocol_of

CLASSES = 20


def run(settings: Settings) -> list[Section]:
    with tempfile.TemporaryDirectory() as folder:
        source = _photographs(Path(folder), settings.pick(64, 4))
        step = protocol_of((CLASSES,)).steps[0]
        return [_loading(source, step, settings), _relabelling(source, step, settings)]


def _photographs(folder: Path, count: int) -> Folder:
    """Make JPEGs of 500×375 with masks, about as large as those of VOC."""
    generator = np.random.default_rng(0)
    for kind in ("images", "masks"):
        (folder / kind).mkdir()
    for number in range(count):
        coarse = generator.integers(0, 256, (24, 32, 3), dtype=np.uint8)
        photo = np.asarray(Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC), dtype=np.int16)
        photo = (photo + generator.integers(-12, 13, photo.shape)).clip(0, 255).astype(np.uint8)
        Image.fromarray(photo).save(folder / "images" / f"{number:03}.jpg", quality=90)
        mask = generator.integers(0, CLASSES + 1, (6, 8), dtype=np.uint8)
        Image.fromarray(mask).resize((500, 375), Image.Resampling.NEAREST).save(folder / "masks" / f"{number:03}.png")
    (folder / "classes.txt").write_text("\n".join(f"class {i}" for i in range(CLASSES)))
    (folder / "train.txt").write_text("\n".join(f"{number:03}" for number in range(count)))
    return Folder(folder)


def _loading(source: Folder, step: Step, settings: Settings) -> Section:
    torch.set_num_threads(settings.threads)
    size, batch, updates = settings.pick((512, 4, 3), (64, 2, 2))
    images = range(len(source.names("train")))
    model = grown(settings.pick(NETWORK, QUICK_NETWORK), (CLASSES,)).train()
    transform = TrainTransform(size, model.backbone.mean, model.backbone.std)
    view = StepView(source, "train", images, step.train_table, transform, (0,))
    kept = torch.randn(batch, 3, size, size)
    default = source.default_workers(1)
    choices = settings.pick(sorted({0, 1, 2, 4, default}), [0, default])
    amount = batch * updates

    def train_on(batches: Iterable[Inputs]) -> None:
        for inputs in batches:
            model.zero_grad(set_to_none=True)
            model(inputs).logits.square().mean().backward()

    def decode() -> float:
        return amount / seconds(lambda: [view[0, i % len(view)] for i in range(amount)])

    def network() -> float:
        return amount / seconds(lambda: train_on([kept] * updates))

    def both(workers: int) -> float:
        plain = TestTransform(size)
        loaders = PixelLoaders([images], (), 0, source, "val", transform, plain, plain, 1, workers, 0, False)
        loaded = loaders.training(step, EpochOrder(len(images), batch, 1000, (0,)))
        next(loaded)  # do not count the start of the loader
        return amount / seconds(lambda: train_on(inputs for inputs, _, _ in islice(loaded, updates)))

    found = in_turn(
        {"decode and augment, one process": decode, "network alone, forward and backward": network}
        | {_with(workers): lambda workers=workers: both(workers) for workers in choices},  # type: ignore[misc]
        settings.repeats,
    )
    decoded, alone = list(found.values())[:2]
    best = [max(rates) for rates in zip(*(found[_with(workers)] for workers in choices), strict=True)]
    return Section(
        title=f"Data: JPEGs of 500×375 to crops of {size}²",
        heading=["", "images/s", "of the network's rate"],
        rows=[[name, Spread.of(rates).text(), ratios(rates, alone).text()] for name, rates in found.items()],
        aims=[
            Aim("decode and augment in one process, over the network's rate", "at least", 1.0, ratios(decoded, alone)),
            Aim(
                f"training with the default, {_workers(default)}, over the best count tried",
                "at least",
                0.9,
                ratios(found[_with(default)], best),
            ),
        ],
        notes=[f"The network is {model.config.backbone} without its loss, in batches of {batch}."],
        figures=found,
    )


def _with(workers: int) -> str:
    return f"training with {_workers(workers)}"


def _workers(count: int) -> str:
    return f"{count} loader process{'es' if count != 1 else ''}"


def _relabelling(source: Folder, step: Step, settings: Settings) -> Section:
    mask = source.mask("train", 0)
    if settings.quick:
        mask = mask[:50, :50]
    table = step.train_table
    label_of = {int(i): int(table[i]) for i in range(256)}

    def by_table() -> float:
        return seconds(lambda: [table[mask] for _ in range(100)]) / 100

    def by_lambda() -> float:
        return seconds(lambda: torch.from_numpy(mask.copy()).apply_(lambda label: label_of.get(label, 255)))

    found = in_turn({"table": by_table, "lambda": by_lambda}, settings.repeats)
    return Section(
        title=f"Data: relabelling a mask of {mask.shape[1]}×{mask.shape[0]}",
        heading=["", "ms"],
        rows=[
            ["by table, ours", Spread.of(found["table"]).text(1e3)],
            ["a function for every pixel, as in the field's older code", Spread.of(found["lambda"]).text(1e3)],
        ],
        aims=[Aim("time by the function, over that by table", "at least", 10, ratios(found["lambda"], found["table"]))],
        figures=found,
    )
