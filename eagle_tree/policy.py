"""Tree policies: which nodes to expand, which to keep.

A policy answers two questions about the growing candidate pool and never touches a model:

* `frontier(growing, draft)`: which nodes to expand next, with how many candidates each; None ends growth;
* `select(growing)`: the pool indices that become the draft tree, closed under parents.

`observe(row)` tells those that learn online how a pass went. `budget` counts draft nodes without the
root; EAGLE's `total_token` and SGLang's `num_draft_tokens` count it: total_token = budget + 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_tree.tree import Draft, Frontier, GrowingTree, stable_topk, top_nodes


def check_at_least_one(policy: object, *names: str) -> None:
    """Raise ValueError unless the named attributes are integers >= 1."""
    for name in names:
        value = getattr(policy, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{type(policy).__name__}: {name}={value!r} must be an integer >= 1")


class Policy:
    """The seam. A subclass overrides `frontier` and `select`; `observe` where it learns."""

    def max_candidates(self) -> int:
        """The most candidates it asks of one node: at most the drafter's vocabulary; 0 means that it never drafts."""
        return 0

    def frontier(self, growing: GrowingTree, draft: Draft | None) -> Frontier | None:
        """The next nodes to expand, or None. `draft` answered the previous frontier (None at the start)."""
        raise NotImplementedError

    def select(self, growing: GrowingTree) -> Tensor:
        """Pool indices `[N] i64` to keep (the root excluded), closed under parents."""
        raise NotImplementedError

    def observe(self, row) -> None:
        """See the finished pass (a `PassRow`)."""


@dataclass(frozen=True)
class Autoregressive(Policy):
    """The empty tree: one target forward, one token. The baseline of every speed-up, on the same engine."""

    def frontier(self, growing: GrowingTree, draft: Draft | None) -> None:
        return None

    def select(self, growing: GrowingTree) -> Tensor:
        return growing.token.new_empty(0)


@dataclass(frozen=True)
class Chain(Policy):
    """A chain of the drafter's first choices (Leviathan et al. 2211.17192; Chen et al. 2302.01318).

    Attributes:
        depth: draft tokens in a row.
    """

    depth: int = 5

    def __post_init__(self) -> None:
        check_at_least_one(self, "depth")

    def max_candidates(self) -> int:
        return 1

    def frontier(self, growing: GrowingTree, draft: Draft | None) -> Frontier | None:
        if len(growing.levels) == self.depth:
            return None
        return Frontier(growing.token.new_full((1,), growing.n_nodes), 1)

    def select(self, growing: GrowingTree) -> Tensor:
        return torch.arange(1, growing.n_nodes + 1, device=growing.token.device)


@dataclass(frozen=True)
class Eagle2(Policy):
    """EAGLE-2's dynamic draft tree (Li et al., arXiv 2406.16858, §4), counted as its released code counts.

    Growth: the root's top-k; then `depth` rounds, each expanding the best `top_k` of the candidates that
    the round before produced (in round 1: all top_k of them), by the path product of confidences. The pool
    holds top_k + depth * top_k² nodes, the deepest at depth + 1. Rerank: the best `budget` of the whole pool.

    The two switches are the paper's ablation (Table 3), read as follows:

    * `value=False`: a node is ranked by its own edge confidence instead of the path product, in growth and
      in rerank. That criterion is not monotone along a path, so the rerank keeps, greedily, the best node
      whose parent is kept already.
    * `rerank=False`: the draft tree is the beam of the expansion phase as it is: the top_k nodes of every
      level that were chosen for expansion (of the last level, those that would be), breadth-first. It holds
      top_k * (depth + 1) nodes, cut to the budget at the end.

    Attributes:
        budget: N, draft nodes kept (a smaller pool is kept whole).
        top_k: beam width and candidates per node.
        depth: expansion rounds after the root's.
    """

    budget: int = 59
    top_k: int = 10
    depth: int = 7
    value: bool = True
    rerank: bool = True

    def __post_init__(self) -> None:
        check_at_least_one(self, "budget", "top_k", "depth")

    def max_candidates(self) -> int:
        return self.top_k

    def criterion(self, growing: GrowingTree) -> Tensor:
        """`[M] f32`, what nodes are ranked by."""
        return growing.score if self.value else growing.log_conf

    def beam(self, growing: GrowingTree, level: int) -> Tensor:
        """Pool indices of the best top_k nodes of a level, in pool order."""
        start, end = growing.levels[level]
        chosen = stable_topk(self.criterion(growing)[start:end], min(self.top_k, end - start))[1]
        return start + chosen.sort().values

    def frontier(self, growing: GrowingTree, draft: Draft | None) -> Frontier | None:
        rounds = len(growing.levels)
        if rounds == 0:
            return Frontier(growing.token.new_zeros(1), self.top_k)
        if rounds > self.depth:
            return None
        return Frontier(self.beam(growing, rounds - 1), self.top_k)

    def select(self, growing: GrowingTree) -> Tensor:
        if not self.rerank:
            beams = [self.beam(growing, level) for level in range(len(growing.levels))]
            return torch.cat(beams)[: self.budget]
        if not self.value:
            return greedy_closed(growing, growing.log_conf, self.budget)
        return top_nodes(growing, growing.score, self.budget)


def greedy_closed(growing: GrowingTree, criterion: Tensor, budget: int) -> Tensor:
    """Take `budget` times the best node whose parent is taken, by (criterion, depth, index).

    For criteria that may rise along a path. Each choice opens new ones, so the choices are sequential: a
    loop over the budget, on the device, which only the ablation pays.
    """
    by_depth = growing.depth.argsort(stable=True)  # position in this order breaks ties
    place = by_depth.argsort()
    parent = place[growing.parent[by_depth].clamp(min=0)]
    worth = criterion[by_depth].clamp(min=torch.finfo(torch.float32).min)  # below every open node: -inf, not open
    kept = torch.zeros_like(worth, dtype=torch.bool)
    kept[0] = True
    chosen = []
    for _ in range(min(budget, growing.n_nodes)):
        open_worth = torch.where(kept[parent] & ~kept, worth, -torch.inf)
        best = stable_topk(open_worth, 1)[1]
        kept[best] = True
        chosen.append(best)
    return by_depth[torch.cat(chosen)]
