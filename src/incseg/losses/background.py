"""Background as a union (MiB): background of a step contains old classes, and that of its teacher contains new ones.

So the label "background" is scored by the probability of background or any old class, and the teacher's probability of
background is compared with that of background or any new class. Outputs are in the order of learning: background, old
foreground classes, new ones. Classes are dimension 1; any shape may follow.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from incseg.losses.distillation import output_distillation_sum
from incseg.types import BACKGROUND, IGNORE


def background_cross_entropy_sum(logits: Tensor, target: Tensor, num_old: int) -> Tensor:
    """Return −log p_y with p_0 = Σ_{c∈O} softmax(z)_c, O the first `num_old` outputs including background: the sum over
    the pixels that are not ignored.

    logits (B, C, …), target (B, …) learnt labels. A pixel that is labelled with an old foreground class (by a
    pseudo-label) is known to show it, so it is scored by that class alone, −log softmax(z)_y, and not by the union.
    A label beyond the outputs is an error. Equals cross-entropy when only background is old (num_old = 1).
    """
    _require_outputs(logits, num_old)
    log_p = logits.log_softmax(1)
    not_new = log_p[:, :num_old].logsumexp(1, keepdim=True)
    scored = torch.cat([not_new, log_p[:, BACKGROUND + 1 :]], dim=1)
    return F.nll_loss(scored, target.long(), ignore_index=IGNORE, reduction="sum")


def background_distillation_sum(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Return −(1/|O|) [q_0·log(p_0 + Σ_{c∈N} p_c) + Σ_{c∈O\\0} q_c·log p_c]: the sum over all pixels.

    q is the teacher's softmax over its outputs O, p the student's over all, N the outputs that the teacher lacks;
    logits (B, C, …), teacher_logits (B, |O|, …). Equals `output_distillation_sum` when nothing is new.
    """
    return output_distillation_sum(fold_new_into_background(logits, teacher_logits.shape[1]), teacher_logits)


def fold_new_into_background(logits: Tensor, num_old: int) -> Tensor:
    """(B, C, …) → (B, num_old, …): channel 0 is the score of "background or new", log Σ exp z; others do not change.

    The softmax gives the probabilities of these events. If nothing is new, this is the identity.
    """
    _require_outputs(logits, num_old)
    background_or_new = torch.cat([logits[:, :1], logits[:, num_old:]], dim=1).logsumexp(1, keepdim=True)
    return torch.cat([background_or_new, logits[:, 1:num_old]], dim=1)


def _require_outputs(logits: Tensor, num_old: int) -> None:
    if not 1 <= num_old <= logits.shape[1]:
        raise ValueError(f"num_old is {num_old}; it must be from 1 (background) to all {logits.shape[1]} outputs")
