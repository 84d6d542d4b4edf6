"""The sigmoid model of a pixel: every output says yes or no for itself.

If exactly one of several independent classes is true, class c is with probability ∝ exp(z_c): so `softmax_prediction`
is the rule of decision here too, and its arg-max is the strongest sigmoid.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from incseg.outputs.softmax import softmax_prediction
from incseg.types import Prediction


def foreground_prediction(logits: Tensor) -> Prediction:
    """Scores of foreground classes only: background, of score zero, wins where no sigmoid exceeds a half."""
    return softmax_prediction(torch.cat([torch.zeros_like(logits[:, :1]), logits], dim=1))


def sigmoid_prediction(logits: Tensor) -> Prediction:
    """The output with the highest score, background among them.

    Probabilities are the sigmoids divided by their sum, formed by logarithms so that scores which are all far below
    zero still have one; they keep the order of the scores. The uncertainty is 1 − max_c σ(z_c): one where no output
    says yes, which a softmax cannot express.
    """
    highest = logits.max(1)
    return Prediction(
        labels=highest.indices.to(torch.uint8),
        probabilities=lambda: F.logsigmoid(logits).softmax(1),
        uncertainty=lambda: (-highest.values).sigmoid(),
    )
