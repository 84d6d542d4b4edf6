"""Figures that others published, typed from their tables, to stand beside ours.

VOC and ADE20k with all four figures: tables 3 and 4 of Holmquist, Klasén, Felsberg, Evidential Deep Learning for
Class-Incremental Semantic Segmentation (2022), who quote MiB, SDR, PLOP and RECALL from the papers named with each.
All alone: figures of the methods' own papers with a ResNet-101, as collected in this project's FIELD.md; on ADE20k
these are of the overlapped setting in order a, and so not comparable with the paper's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from incseg.metrics.continual import FIGURES

Column = tuple[str, str]
"""Task and setting; no setting on ADE20k, where a row has one."""

PAPER = "Holmquist, Klasén, Felsberg 2022"
SOURCES = {
    PAPER: f"{PAPER}: tables 3 (VOC) and 4 (ADE20k, pseudo-disjoint, mean of orders a and b), ResNet-101 at 512; "
    "MiB, SDR, PLOP and RECALL as quoted there. Its Base of MiB (Cermelli 2020) is about a point low, because it was "
    "worked out from an All without background; the variance of its New on 15-5 disjoint is misprinted and left out",
    "collected": "collected: All in the methods' own papers, ResNet-101 (notes of this project, FIELD.md)",
}

FAMILIES = (
    "finetune", "lwf", "lwfmc", "ilt", "ewc", "pi", "rw", "mib", "sdr", "sdrmib", "plop", "rcil", "ewf", "dkd", "ssul",
    "star", "recall", "evidential", "analytic",
)  # fmt: skip
"""The order of rows; a method of another name stands after them, joint training last."""
UNRANKED = ("recall", "joint")
"""More data than the others have."""


@dataclass(frozen=True)
class Published:
    """A row of a published table.

    figures:  at each column Base, New, All, Inc in percent, None where nothing was published.
    variance: of the same, over the seeds.
    seeds:    how many; 0 where it is not told.
    """

    dataset: str
    family: str
    label: str
    source: str
    figures: dict[Column, tuple[float | None, ...]]
    variance: dict[Column, tuple[float | None, ...]]
    seeds: int
    ranked: bool


def family_of(method: str) -> str:
    """sdr_mib, SDR+MiB → sdrmib."""
    return re.sub(r"[^a-z0-9]", "", method.lower())


def family_rank(method: str) -> int:
    family = family_of(method)
    if family == "joint":
        return len(FAMILIES) + 1
    return FAMILIES.index(family) if family in FAMILIES else len(FAMILIES)


_VOC: tuple[Column, ...] = tuple((task, setting) for task in ("15-5", "15-1") for setting in ("disjoint", "overlapped"))
_ADE: tuple[Column, ...] = (("100-50", ""), ("50-50", ""), ("100-10", ""))
_COLLECTED: dict[str, tuple[Column, ...]] = {
    "voc": (("15-5", "overlapped"), ("15-1", "overlapped"), ("10-1", "overlapped")),
    "ade20k": (("100-50", ""), ("100-10", "")),
}

# Four figures at each column of _VOC or _ADE.
_X = None  # not published
_PAPER_VOC: dict[tuple[str, str], tuple[float | None, ...]] = {
    ("mib", "MiB (Cermelli 2020)"): (
        71.4, 43.3, 64.7, 57.4, 75.1, 49.4, 69.0, 62.3, 45.7, 12.9, 37.9, 18.4, 34.8, 13.5, 29.7, 17.1,
    ),
    ("mib", "MiB (Michieli 2021)"): (
        47.5, 34.1, 44.3, 40.8, 73.1, 44.5, 66.3, 58.8, 39.0, 15.0, 33.3, 19.0, 44.5, 11.7, 36.7, 17.2,
    ),
    ("sdr", "SDR (Michieli 2021)"): (
        73.5, 47.3, 67.2, 60.4, 75.4, 52.6, 69.9, 64.0, 59.2, 12.9, 48.1, 20.6, 44.7, 21.8, 39.2, 25.6,
    ),
    ("sdrmib", "SDR+MiB (Michieli 2021)"): (
        73.6, 44.1, 67.3, 58.8, 76.3, 50.2, 70.1, 63.3, 59.4, 14.3, 48.7, 21.8, 47.3, 14.7, 39.5, 20.1,
    ),
    ("plop", "PLOP (Douillard 2021)"): (
        _X, _X, _X, _X, 75.7, 51.7, 70.1, 63.7, _X, _X, _X, _X, 65.1, 21.1, 54.6, 28.4,
    ),
    ("recall", "RECALL, GAN (Maracani 2021)"): (
        67.8, 49.8, 63.5, 58.8, 68.1, 50.9, 64.0, 59.5, 67.5, 44.9, 62.1, 48.7, 69.0, 49.2, 64.3, 52.5,
    ),
    ("recall", "RECALL, web (Maracani 2021)"): (
        70.5, 52.9, 66.3, 61.7, 69.1, 54.3, 65.6, 61.7, 67.4, 47.8, 62.7, 51.1, 69.1, 50.9, 64.8, 53.9,
    ),
    ("evidential", f"Evidential ({PAPER})"): (
        73.8, 44.8, 66.9, 59.3, 76.3, 53.6, 70.9, 64.9, 63.8, 15.9, 52.4, 23.9, 68.5, 24.4, 58.0, 31.8,
    ),
    ("joint", f"Joint, evidential ({PAPER})"): (
        _X, _X, 78.8, _X, _X, _X, 78.8, _X, _X, _X, 78.8, _X, _X, _X, 78.8, _X,
    ),
}  # fmt: skip
# Printed after ±; the paper's text on VOC says that it is the variance over seeds 42, 1337, 2001.
# New on 15-5 disjoint is printed as 0.0.8.
_PAPER_VOC_VARIANCE = (0.1, _X, 0.1, 0.3, 0.9, 7.4, 1.5, 2.8, 1.6, 3.8, 1.0, 1.6, 0.3, 2.6, 0.03, 1.6)
_PAPER_ADE: dict[tuple[str, str], tuple[float | None, ...]] = {
    ("mib", "MiB (Cermelli 2020)"): (37.9, 27.9, 34.6, 32.9, 35.5, 22.9, 27.1, 27.1, 31.8, 14.1, 25.9, 17.0),
    ("mib", "MiB (Michieli 2021)"): (37.6, 24.7, 33.3, 31.2, 39.1, 22.6, 28.1, 28.1, 21.0, 5.3, 15.8, 7.9),
    ("sdr", "SDR (Michieli 2021)"): (37.4, 24.8, 33.2, 31.1, 40.9, 23.8, 29.5, 29.5, 28.9, 7.4, 21.7, 11.0),
    ("sdrmib", "SDR+MiB (Michieli 2021)"): (37.5, 25.5, 33.5, 31.5, 42.9, 25.4, 31.3, 31.3, 28.9, 11.7, 23.2, 14.6),
    ("evidential", f"Evidential ({PAPER})"): (33.3, 29.1, 31.9, 31.2, 34.4, 27.4, 29.8, 29.8, 28.5, 22.6, 26.5, 23.6),
    ("joint", f"Joint ({PAPER})"): (_X, _X, 41.1, _X, _X, _X, 41.1, _X, _X, _X, 41.1, _X),
}
# All at the columns of _COLLECTED: VOC 15-5, 15-1, 10-1, and ADE20k 100-50, 100-10.
_COLLECTED_ALL: dict[tuple[str, str], tuple[float | None, ...]] = {
    ("mib", "MiB (collected)"): (70.0, 32.2, 20.1, 32.8, 29.2),
    ("sdr", "SDR (collected)"): (70.1, 39.5, 25.1, _X, _X),
    ("plop", "PLOP (collected)"): (70.1, 54.6, 30.5, 32.9, 31.6),
    ("rcil", "RCIL (collected)"): (72.4, 59.4, 34.3, 34.5, 32.1),
    ("dkd", "DKD (collected)"): (74.0, 70.5, 60.4, 35.6, 34.5),
    ("ssul", "SSUL (collected)"): (71.2, 67.6, 59.3, 33.6, 33.1),
    ("ssul", "SSUL with memory (collected)"): (73.0, 71.4, 64.1, _X, _X),
    ("star", "STAR (collected)"): (74.9, 72.9, 64.9, 36.4, 34.9),
    ("star", "STAR with memory (collected)"): (75.8, 74.0, 66.6, _X, _X),
}


def _by_column(columns: tuple[Column, ...], values: tuple[float | None, ...]) -> dict[Column, tuple[float | None, ...]]:
    width = len(FIGURES)
    return {column: values[i * width : (i + 1) * width] for i, column in enumerate(columns)}


def _rows() -> list[Published]:
    rows = []
    for dataset, columns, table in (("voc", _VOC, _PAPER_VOC), ("ade20k", _ADE, _PAPER_ADE)):
        for (family, label), values in table.items():
            variance = _by_column(columns, _PAPER_VOC_VARIANCE) if (dataset, family) == ("voc", "evidential") else {}
            figures = _by_column(columns, values)
            # the paper's text: three seeds, the methods it quotes one; it tells nothing of joint and of ADE20k
            seeds = 3 if variance else 0 if PAPER in label else 1
            rows.append(Published(dataset, family, label, PAPER, figures, variance, seeds, family not in UNRANKED))
    for dataset, part in (("voc", slice(0, 3)), ("ade20k", slice(3, 5))):
        for (family, label), values in _COLLECTED_ALL.items():
            shown = label if dataset == "voc" else label.replace("(", "(overlapped, order a, ")
            figures = {
                column: (None, None, value, None)
                for column, value in zip(_COLLECTED[dataset], values[part], strict=True)
                if value is not None
            }
            if figures:
                ranked = dataset == "voc" and "memory" not in label
                rows.append(Published(dataset, family, shown, "collected", figures, {}, 0, ranked))
    return sorted(rows, key=lambda row: family_rank(row.family))


PUBLISHED = _rows()
