"""The match rule (DESIGN §4).

EAGLE-2's candidates are the drafter's top-k, no randomness, so each child's proposal is a point mass, and trying
siblings one after the other against the residual accepts child x with total probability exactly p(x). The whole rule
is then: draw y from p once; if y is a child, descend to it, otherwise y is the emitted token. No lossless rule accepts
more on a tree that does not look at the noise, since no rule can emit a prefix more often than the target does.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from eagle_tree.accept.base import Rule, Step
from eagle_tree.noise import PassNoise
from eagle_tree.tree import SAMPLED, Tree
from eagle_tree.warp import Law


class Match(Rule):
    """Draw y from the target's law; descend if y is a child, emit it if not (Chen & Leviathan with point masses).

    The token at absolute position t is `argmax(log p_t + g_t)`: it depends on neither drafter, tree nor
    policy. Lossless at every temperature, for every tree.
    """

    draws: ClassVar[tuple[str, ...]] = ("top_k", *SAMPLED)

    def step(self, tree: Tree, law: Law, node: Tensor, alive: Tensor, chance: PassNoise, level: int) -> Step:
        scores = law.scores(node)
        best, token = scores.max(-1)
        if not law.sampling.greedy:
            token = chance.draw(level, scores)
        return Step(child_with(tree, node, token), token, ~best.isfinite()[0], torch.zeros_like(node[0]))

    def edges(self, tree: Tree, node_log_prob: Tensor, law: Law | None) -> Tensor:
        edge = node_log_prob.double().exp()
        if tree.drawn is None:
            return edge
        # of siblings that carry the same token, which draws with replacement make, the first is accepted
        twin = (tree.parent[:, None] == tree.parent) & (tree.token[:, None] == tree.token)
        return edge.masked_fill(twin.tril(-1).any(-1), 0.0)


class Coupled(Match):
    """`Match`, on a tree that looked at the noise g_t which decides (Daliri et al., arXiv 2408.07978).

    The emitted token is still argmax(log p_t + g_t), so it is lossless by construction. What is accepted is now
    settled by the noise that the tree was made of: `reach` is unknown (NaN) but at temperature 0, and the acceptance
    meter is silent. The surprisal meter speaks.
    """

    draws: ClassVar[tuple[str, ...]] = ("coupled",)

    def edges(self, tree: Tree, node_log_prob: Tensor, law: Law) -> Tensor:
        if law.sampling.greedy:
            return super().edges(tree, node_log_prob, law)
        return torch.full_like(node_log_prob, torch.nan, dtype=torch.float64)


def child_with(tree: Tree, node: Tensor, token: Tensor) -> Tensor:
    """The first child `[1]` of `node [1]` that carries `token [1]`; 0 if none does."""
    return ((tree.parent == node) & (tree.token == token)).long().argmax(keepdim=True)
