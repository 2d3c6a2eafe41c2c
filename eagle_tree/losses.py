"""What a drafter is trained to lower: pure functions, one value a position; who averages over what is the caller's.

A *law* is the target's distribution restricted to the draft vocabulary and not renormalised: what lies outside
cannot be drafted, and counts as lost acceptance.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def soft_cross_entropy(logits: Tensor, law: Tensor) -> Tensor:
    """-Σ law · log softmax(logits), in nats: `[n, v]` and `[n, v]` to `[n]`."""
    return -(law * logits.log_softmax(-1)).sum(-1)


def overlap(logits: Tensor, law: Tensor) -> Tensor:
    """Σ min(law, softmax(logits)): the acceptance probability of one drawn token; `[n, v]`, `[n, v]` to `[n]`.

    Leviathan et al., arXiv 2211.17192, Theorem 3.5.
    """
    return logits.softmax(-1).minimum(law).sum(-1)


def total_variation(logits: Tensor, law: Tensor) -> Tensor:
    """Distance of the two distributions, 1 - `overlap`: the rejection itself as a loss (DSpark, arXiv 2607.05147)."""
    return 1 - overlap(logits, law)


def feature_distance(predicted: Tensor, true: Tensor) -> Tensor:
    """Smooth-L1 distance of features, a mean over their width: `[n, h]`, `[n, h]` to `[n]`.

    EAGLE, arXiv 2401.15077, §3.
    """
    return F.smooth_l1_loss(predicted, true, reduction="none").mean(-1)


def agreement(logits: Tensor, law: Tensor) -> Tensor:
    """Whether the first choices are the same token; `[n, v]`, `[n, v]` to `[n] bool`."""
    return logits.argmax(-1) == law.argmax(-1)
