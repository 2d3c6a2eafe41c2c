"""How a drafter's candidates are taken from its distribution: the most likely ones, or drawn.

* `top_k`: the most likely tokens, without randomness (EAGLE-2, arXiv 2406.16858).
* `with_replacement`: independent draws from q (SpecInfer, arXiv 2305.09781; MCSD, arXiv 2401.06706).
* `without_replacement`: the next one from q without those drawn before, by the Gumbel-top-k trick (Sequoia, arXiv
  2402.12374; RSD, arXiv 2402.14160).
* `hybrid`: the k - 1 most likely tokens, and *one* draw from q outside of them, which stands first (Hu et al., arXiv
  2502.18779). `log_q` is then the law of that draw.
* `coupled`: the tokens of largest log q + g, where g is the Gumbel vector that the target will draw its own token with
  (Daliri et al., arXiv 2408.07978). The drafter and the target then agree far more often than chance would have it, and
  the emitted token is still argmax(log p + g).

q is taken at the sampling temperature, since the target's law is: a coupled drafter at another temperature perturbs
another law than the target's.

**Confidences of coupled candidates** are derived, with one parameter to be fitted. Given q and g, the target's token is
argmax(log p + g). Suppose that log p = log q + s·ε up to a constant, with independent standard Gumbel errors ε. Then
(Gumbel-max) it is token x with probability softmax((log q + g) / s)(x), which is the candidate's confidence. s is
`Draw.error_scale`; what the supposition misses is left to `eagle-tree calibrate` on a coupled run.

The nodes of one level share their noise: a walk passes through one of them alone, so their laws need not be
independent, only right.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_tree.noise import PassNoise
from eagle_tree.tree import Draft, Frontier, GrowingTree, stable_topk


def candidates(
    log_q: Tensor, growing: GrowingTree, frontier: Frontier, noise: PassNoise | None, target_id: Tensor | None = None
) -> Draft:
    """The draft of a frontier from the drafter's log-probabilities.

    Args:
        log_q: `[F, W] f32`, at temperature 1, normalised.
        growing: the pool; frontier: its nodes `[F]`, and how their candidates are drawn.
        noise: of the pass; `top_k` does not look at it, and it may be None.
        target_id: `[W] i64`, target ids of the drafter's vocabulary; None: it proposes target ids as they are.

    Raises:
        ValueError: a draw that needs noise, and none.
    """
    draw, k = frontier.draw, frontier.n_candidates
    if draw.kind != "top_k" and noise is None:
        raise ValueError(f"draw.kind={draw.kind} draws with the noise of a pass, and none is given")
    if draw.kind != "top_k" and draw.temperature not in (1, None):
        log_q = (log_q / draw.temperature).log_softmax(-1)
    level, law = len(growing.levels), None
    if draw.kind == "top_k":
        log_conf, index = stable_topk(log_q, k)
    elif draw.kind == "coupled":
        gumbel = noise.target_gumbel(level + 1)  # of depth 0 … level: no frontier node lies deeper
        gumbel = gumbel if target_id is None else gumbel[:, target_id]
        perturbed = log_q + gumbel[growing.depth[frontier.node]]
        index = stable_topk(perturbed, k)[1]
        log_conf = (perturbed / draw.error_scale).log_softmax(-1).gather(-1, index)
    else:
        index, law = SAMPLERS[draw.kind](log_q, k, level, noise)
        log_conf = log_q.gather(-1, index)
    entropy = -(log_q.exp() * log_q).nan_to_num(0.0).sum(-1)
    token = index if target_id is None else target_id[index]
    return Draft(token, log_conf, entropy, law, None if law is None else target_id)


def with_replacement(log_q: Tensor, k: int, level: int, noise: PassNoise) -> tuple[Tensor, Tensor]:
    """Candidates `[F, k]` by inverting the distribution function at k uniforms, and their law `[F, W]`."""
    cumulative = log_q.double().exp().cumsum(-1)
    place = noise.draft_uniform(level, k) * cumulative[:, -1:]
    # "right" skips tokens without mass; the clamp keeps indices legal where q is NaN, which acceptance reports
    return torch.searchsorted(cumulative, place, right=True).clamp(max=log_q.shape[-1] - 1), log_q


def without_replacement(log_q: Tensor, k: int, level: int, noise: PassNoise) -> tuple[Tensor, Tensor]:
    """Candidates `[F, k]` in the order of a draw one by one, and the law `[F, W]` of the first."""
    return stable_topk(log_q + noise.draft_gumbel(level, log_q.shape[-1]), k)[1], log_q


def hybrid(log_q: Tensor, k: int, level: int, noise: PassNoise) -> tuple[Tensor, Tensor]:
    """The draw and the k - 1 most likely tokens `[F, k]`, and the draw's law `[F, W]`."""
    likely = stable_topk(log_q, k - 1)[1]
    rest = log_q.scatter(-1, likely, -torch.inf).log_softmax(-1)
    drawn = stable_topk(rest + noise.draft_gumbel(level, log_q.shape[-1]), 1)[1]
    return torch.cat([drawn, likely], -1), rest


SAMPLERS = {"with_replacement": with_replacement, "without_replacement": without_replacement, "hybrid": hybrid}
