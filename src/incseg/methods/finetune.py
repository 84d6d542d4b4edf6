"""Fine-tuning: softmax cross-entropy on whatever the step labels. The floor: it forgets.

Background is an ordinary output, so old classes, labelled background in later steps, are unlearnt.
"""

from __future__ import annotations

from incseg.methods.base import CROSS_ENTROPY, Method


class Finetune(Method):
    first_step = CROSS_ENTROPY
