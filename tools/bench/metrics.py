"""The confusion matrix of a batch of label maps, against torchmetrics, numpy and scikit-learn if installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from incseg.metrics import confusion_counts
from incseg.types import IGNORE, UserError
from tools.bench.measure import Aim, Section, Settings, Spread, in_turn, ratios, seconds

Count = Callable[[Tensor, Tensor, int], Any]


def run(settings: Settings) -> list[Section]:
    torch.set_num_threads(settings.threads)
    return [_section(labels, settings) for labels in settings.pick((21, 151), (21,))]


def _section(labels: int, settings: Settings) -> Section:
    shape = settings.pick((8, 512, 512), (1, 64, 64))
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(0, labels, shape, generator=generator, dtype=torch.uint8)
    predicted = torch.where(torch.rand(shape, generator=generator) < 0.8, target, target.flip(-1))
    target[:, :4] = IGNORE
    counters: dict[str, Count] = {"ours": confusion_counts, "numpy": _by_numpy}
    missing = []
    for name, module, make in (
        ("torchmetrics", "torchmetrics.functional.classification", _by_torchmetrics),
        ("scikit-learn", "sklearn.metrics", _by_sklearn),
    ):
        try:
            counters[name] = make(importlib.import_module(module))
        except ImportError:
            missing.append(f"{name} is not installed and not measured: pip install 'incseg[bench]', or make bench.")
    right = confusion_counts(predicted, target, labels).tolist()
    for name, count in counters.items():
        if np.asarray(count(predicted, target, labels)).tolist() != right:
            raise UserError(f"{name} counts another confusion matrix than incseg; the bench cannot compare them")
    found = in_turn(
        {name: partial(seconds, partial(count, predicted, target, labels)) for name, count in counters.items()},
        settings.repeats,
    )
    aims = []
    if "torchmetrics" in found:
        aims.append(Aim("torchmetrics' time, over ours", "at least", 4.0, ratios(found["torchmetrics"], found["ours"])))
    return Section(
        title=f"Metrics: confusion matrix of {labels} labels, {' × '.join(map(str, shape))} pixels",
        heading=["", "ms", "times ours"],
        rows=[[name, Spread.of(times).text(1e3), ratios(times, found["ours"]).text()] for name, times in found.items()],
        aims=aims,
        notes=["From uint8 maps as the evaluator has them; all give the same matrix.", *missing],
        figures=found,
    )


def _by_numpy(predicted: Tensor, target: Tensor, labels: int) -> np.ndarray:
    p, t = predicted.numpy().ravel(), target.numpy().ravel()
    kept = t != IGNORE
    pair = t[kept].astype(np.int64) * labels + p[kept]
    return np.bincount(pair, minlength=labels**2).reshape(labels, labels)


def _by_torchmetrics(module: Any) -> Count:
    def count(predicted: Tensor, target: Tensor, labels: int) -> Tensor:
        # it takes int64 targets; the conversion is part of using it
        return module.multiclass_confusion_matrix(predicted.long(), target.long(), labels, ignore_index=IGNORE)

    return count


def _by_sklearn(module: Any) -> Count:
    def count(predicted: Tensor, target: Tensor, labels: int) -> np.ndarray:
        p, t = predicted.numpy().ravel(), target.numpy().ravel()
        kept = t != IGNORE
        return module.confusion_matrix(t[kept], p[kept], labels=range(labels))

    return count
