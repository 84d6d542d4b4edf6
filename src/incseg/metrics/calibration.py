"""Calibration: does a probability of 0.8 come true in 8 of 10 pixels? Expected calibration error, from integer counts.

Guo et al., 2017, with 15 bins of equal width. Probabilities are counted in finer bins first, so that integer counts
make the figures independent of batches and processes.
"""

from __future__ import annotations

import torch
from torch import Tensor

BINS = 15
_FINER = 100
FINE_BINS = BINS * _FINER


def reliability_counts(probabilities: Tensor, came_true: Tensor, counted: Tensor) -> Tensor:
    """(2, FINE_BINS) int64: how many of the counted pixels fall into each bin without coming true, and with."""
    place = (probabilities[counted].float() * FINE_BINS).long().clamp_(0, FINE_BINS - 1)
    return torch.bincount(came_true[counted].long() * FINE_BINS + place, minlength=2 * FINE_BINS).view(2, FINE_BINS)


def expected_calibration_error(counts: Tensor) -> float | None:
    """Σ_bins share · |mean probability − share that came true|, in percent; None where nothing was counted."""
    total = counts.sum(0).double()
    if total.sum() == 0:
        return None
    centres = (torch.arange(FINE_BINS, dtype=torch.float64) + 0.5) / FINE_BINS
    claimed, came_true = ((side).view(BINS, _FINER).sum(1) for side in (total * centres, counts[1].double()))
    return float(100 * (claimed - came_true).abs().sum() / total.sum())
