"""Published figures, copied from tables of papers into published.csv, for comparison with ours.

VOC and ADE20k with all four figures: tables 3 and 4 of Holmquist, Klasén, Felsberg, Evidential Deep Learning for
Class-Incremental Semantic Segmentation (2022), who quote MiB, SDR, PLOP and RECALL from the papers named with each.
According to their text, the number after ± on VOC is the variance over seeds 42, 1337, 2001; that of New on 15-5
disjoint is printed as 0.0.8 and left out. They give no seeds for joint training and ADE20k.

"collected" has only All, with a ResNet-101, from the methods' own papers. On ADE20k these are of the overlapped setting
in order a, and so not comparable with the paper's.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, field
from pathlib import Path

from incseg.metrics import FIGURES

Column = tuple[str, str]
"""Task and setting. On ADE20k rows have a setting, and columns have none."""

PAPER = "Holmquist, Klasén, Felsberg 2022"
SOURCES = {
    PAPER: f"{PAPER}: tables 3 (VOC) and 4 (ADE20k, pseudo-disjoint, mean of orders a and b), ResNet-101 at 512; "
    "MiB, SDR, PLOP and RECALL as quoted there. Its Base of MiB (Cermelli 2020) is about a point low, because it was "
    "worked out from an All without background; the variance of its New on 15-5 disjoint is misprinted and left out",
    "collected": "collected: All with a ResNet-101, from the papers of MiB (Cermelli 2020), SDR (Michieli 2021), PLOP "
    "(Douillard 2021), SSUL (Cha 2021), RCIL (Zhang 2022), DKD (Baek 2022) and STAR (Chen 2023)",
}

FAMILIES = (
    "finetune", "lwf", "lwfmc", "ilt", "ewc", "pi", "rw", "mib", "sdr", "sdrmib", "plop", "rcil", "ewf", "dkd", "ssul",
    "star", "recall", "evidential", "analytic",
)  # fmt: skip
"""The order of rows. Other methods follow them, joint training is last."""
UNRANKED = ("recall", "joint")
"""Methods that use more data than the others."""


@dataclass(frozen=True)
class Published:
    """A row of a published table.

    seeds:    number of seeds; 0 if it is not published.
    figures:  Base, New, All, Inc in percent by column; None if not published.
    variance: variances of the figures over the seeds.
    """

    dataset: str
    family: str
    label: str
    source: str
    seeds: int
    ranked: bool
    figures: dict[Column, tuple[float | None, ...]] = field(default_factory=dict, hash=False)
    variance: dict[Column, tuple[float | None, ...]] = field(default_factory=dict, hash=False)


def family_of(method: str) -> str:
    """Return the name in lower case without punctuation: SDR+MiB and sdr_mib are sdrmib."""
    return re.sub(r"[^a-z0-9]", "", method.lower())


def family_rank(method: str) -> int:
    family = family_of(method)
    if family == "joint":
        return len(FAMILIES) + 1
    return FAMILIES.index(family) if family in FAMILIES else len(FAMILIES)


def _read() -> list[Published]:
    found: dict[tuple[str, str], Published] = {}
    with Path(__file__).with_name("published.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            about = (row["dataset"], row["family"], row["label"], row["source"], int(row["seeds"]))
            one = found.setdefault((row["dataset"], row["label"]), Published(*about, row["ranked"] == "yes"))
            column = row["task"], row["setting"]
            one.figures[column] = _numbers(row, "")
            if any(variance := _numbers(row, "_variance")):
                one.variance[column] = variance
    return list(found.values())


def _numbers(row: dict[str, str], ending: str) -> tuple[float | None, ...]:
    return tuple(float(text) if (text := row[name + ending]) else None for name in FIGURES)


PUBLISHED = _read()
