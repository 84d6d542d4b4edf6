"""Fine-tuning: softmax cross-entropy on the labels of the step. The lower bound: it forgets.

Background is an ordinary output. Later steps label old classes as background, so the model unlearns them.
"""

from __future__ import annotations

from incseg.methods.base import CROSS_ENTROPY, Method


class Finetune(Method):
    first_step = CROSS_ENTROPY
