"""Training from cached features against the same updates with batches in memory: the cost of reading."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice

import torch

from incseg.config import DataConfig, RunConfig
from incseg.data.loaders import EpochOrder, Loaded
from incseg.engine.evaluator import EvalConfig
from incseg.engine.runtime import started
from incseg.engine.trainer import TrainConfig
from incseg.losses.means import normalised
from incseg.methods import build_method
from incseg.models.pretrained import build_segmenter
from incseg.models.segmenter import ModelConfig
from incseg.presets import preset_for
from incseg.run import Setup
from incseg.types import Batch, Increment
from tools.bench.measure import Aim, Section, Settings, Spread, in_turn, ratios, seconds


def run(settings: Settings) -> list[Section]:
    config = _config(settings)
    updates = settings.pick(60 if settings.root else 16, 4)
    method = build_method(config.method)
    with _cache_of_its_own(not settings.root), started("cpu", "float32", settings.threads) as runtime:
        setup = Setup.of(config, method)
        model = build_segmenter(config.model, method.background_output, lambda line: None)
        loaders = setup.loaders(config, model, runtime, train=True)
        step = setup.protocol.steps[0]
        images = len(setup.train_images[0])
        model.grow(Increment(step.names, step.new, images))
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.01, 0.9, nesterov=True)
        model.train()
        drawn = 0

        def update(batches: Iterable[Loaded]) -> None:
            for inputs, labels, _ in batches:
                batch = Batch(inputs, labels, torch.bincount(labels.flatten(), minlength=256).float())
                optimizer.zero_grad(set_to_none=True)
                torch.stack(
                    list(normalised(method.losses(batch, model(inputs), None, step), batch).values())
                ).sum().backward()
                optimizer.step()

        def from_cache() -> Iterator[Loaded]:
            nonlocal drawn
            order = EpochOrder(images, config.train.batch_size, 1000, (config.seed, 0), drawn)
            drawn += updates
            return islice(loaders.training(step, order), updates)

        in_memory = list(islice(from_cache(), 4)) * (updates // 4)
        amount = updates * config.train.batch_size
        found = in_turn(
            {
                "from the cache": lambda: amount / seconds(lambda: update(from_cache())),
                "from memory": lambda: amount / seconds(lambda: update(in_memory)),
            },
            settings.repeats,
        )
    return [
        Section(
            title=f"Cache: the head's updates on {config.data.name}, features kept on disk",
            heading=["", "images/s"],
            rows=[[name, Spread.of(rates).text()] for name, rates in found.items()],
            aims=[
                Aim("images/s from the cache, over those from memory", "at least", 0.9, ratios(*found.values())),
            ],
            notes=[
                f"{config.model.backbone} at {config.train.crop}², batches of {config.train.batch_size}, {updates} "
                "updates a round, the base step. From the cache the run's own loader reads, converts and relabels."
            ],
            figures=found,
        )
    ]


def _config(settings: Settings) -> RunConfig:
    """Return the preset voc-laptop; without a VOC folder on drawn scenes and with a backbone without weights."""
    preset = preset_for("voc-laptop", "evidential")
    model, train = ModelConfig(**preset["model"]), TrainConfig(**preset["train"])
    data, task, testing = DataConfig("voc", settings.root), preset["task"], EvalConfig(**preset["eval"])
    if settings.root is None:
        count, model.weights, task = settings.pick(256, 8), None, "6-2"
        data = DataConfig(train_size=count, val_size=2, image_size=settings.pick(224, 64))
    if settings.quick:
        model.backbone, model.stages, train.crop, train.batch_size, testing = "tiny", None, 64, 2, EvalConfig(64)
    return RunConfig(task=task, data=data, model=model, train=train, eval=testing)


@contextmanager
def _cache_of_its_own(wanted: bool) -> Iterator[None]:
    """Use a cache of its own for features of drawn scenes, not that of the user."""
    if not wanted:
        yield
        return
    before = os.environ.get("INCSEG_CACHE")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["INCSEG_CACHE"] = folder
        try:
            yield
        finally:
            del os.environ["INCSEG_CACHE"]
            if before is not None:
                os.environ["INCSEG_CACHE"] = before
