"""Medusa's typical acceptance. **Lossy**: its text is not the target's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from eagle_tree.accept.base import Accepted, Rule, ended_at, probabilities
from eagle_tree.checks import is_number
from eagle_tree.noise import GumbelRows
from eagle_tree.tree import Tree, stable_topk
from eagle_tree.warp import Law


@dataclass(frozen=True)
class Typical(Rule):
    """Lossy. Accept every token that is not too unlikely, p(x) > min(ε, α·exp(-H(p))) (Medusa, 2401.10774, §2.3.1).

    Of the paths whose tokens all pass, the longest is taken, of those the most likely. The token that follows is drawn
    from p restricted to what passes. It emits likely text, more of it a pass, and of another law than the target's,
    except at temperature 0, where it is the match rule.

    Attributes:
        epsilon: hard threshold; alpha: factor of the one that falls with entropy. Both at least 0 and below 1.
    """

    lossless: ClassVar[bool] = False
    draws: ClassVar[tuple[str, ...]] = ("top_k",)

    epsilon: float = 0.09
    alpha: float = 0.3

    def __post_init__(self) -> None:
        for name in ("epsilon", "alpha"):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value < 1:
                raise ValueError(f"Typical: {name}={value!r} must be a number >= 0 and below 1")

    def accept(self, tree: Tree, law: Law, noise: GumbelRows, position: int) -> Accepted:
        chance = noise.for_pass(position)
        p, broken, end = self.longest(tree, law)
        scores = p[end].log().masked_fill(p[end] <= self.threshold(p[end]), -torch.inf)
        token = chance.draw_at(tree.depth[end], tree.max_depth + 1, scores)
        return ended_at(tree, end, token, broken, torch.zeros_like(end[0]))

    def threshold(self, p: Tensor) -> Tensor:
        """`[m, 1]` of laws `[m, V]`. Always below the largest probability, which is at least exp(-H)."""
        entropy = torch.special.entr(p).sum(-1, keepdim=True)
        return (self.alpha * (-entropy).exp()).clamp(max=self.epsilon)

    def longest(self, tree: Tree, law: Law) -> tuple[Tensor, Tensor, Tensor]:
        """The laws `[N+1, V]`, whether one that was looked at is broken, and the last node `[1]` of the path taken."""
        p, broken = probabilities(law, torch.arange(tree.token.shape[0], device=tree.token.device))
        parent = tree.parent.clamp(min=0)
        probability = p[parent].gather(1, tree.token[:, None])[:, 0]
        passes = probability > self.threshold(p)[parent, 0]
        passes[0], probability[0] = True, 1.0
        whole = (passes | ~tree.mask).all(-1)  # the node and its ancestors all pass
        likelihood = torch.where(tree.mask, probability.log(), 0.0).sum(-1)
        depth = tree.depth.masked_fill(~whole, -1)
        best = likelihood.masked_fill(depth < depth.max(), -torch.inf)
        end = stable_topk(best, 1)[1]
        return p, (broken & whole).any(), end

    def reach(self, tree: Tree, node_log_prob: Tensor, law: Law | None = None) -> Tensor:
        """`[N+1] f64`: nothing is drawn before the last token, so a node is accepted or not."""
        end = self.longest(tree, law)[2]
        return tree.mask[end[0]].double()
