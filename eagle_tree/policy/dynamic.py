"""Trees that follow the drafter's confidences, pass by pass."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_tree.checks import check_counts, check_flag, check_number
from eagle_tree.policy.base import Policy
from eagle_tree.tree import Draft, Frontier, GrowingTree, stable_topk, top_nodes


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

    fixed_shape = True

    budget: int = 59
    top_k: int = 10
    depth: int = 7
    value: bool = True
    rerank: bool = True

    def __post_init__(self) -> None:
        check_counts(self, "budget", "top_k", "depth")
        for name in ("value", "rerank"):
            check_flag(f"Eagle2: {name}", getattr(self, name))

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


@dataclass(frozen=True)
class OptTree(Policy):
    """OPT-Tree (Wang et al., arXiv 2406.17276): grow while a level adds to the best tree of the budget.

    Every level expands its `width` best nodes. The best `budget` nodes of the pool are the tree of the most
    expected tokens (by the drafter's own probabilities); growth ends when a level raised that sum by less than
    `delta`. A policy that decides by what was drafted: one device-to-host transfer a level.

    Attributes:
        budget: N; delta: expected tokens that a level must add to be followed by another.
        top_k: candidates per node; width: nodes expanded per level, None for the budget, as in the paper.
        depth: levels at most.
    """

    budget: int = 50
    delta: float = 0.2
    top_k: int = 10
    width: int | None = None
    depth: int = 10

    def __post_init__(self) -> None:
        check_counts(self, "budget", "top_k", "depth", *(["width"] if self.width is not None else []))
        check_number(self, "delta")

    def max_candidates(self) -> int:
        return self.top_k

    def best(self, score: Tensor) -> Tensor:
        """Path probabilities `[budget] f64` of the best nodes of scores `[M]`, 0 where there are fewer."""
        best = stable_topk(score, min(self.budget, score.shape[0]))[0].double().exp()
        return F.pad(best, (0, self.budget - best.shape[0]))

    def frontier(self, growing: GrowingTree, draft: Draft | None) -> Frontier | None:
        if not growing.levels:
            return Frontier(growing.token.new_zeros(1), self.top_k)
        start, end = growing.levels[-1]
        if len(growing.levels) == self.depth:
            return None
        # place by place no term is negative; a difference of two sums can be, by rounding
        gain = (self.best(growing.score[1:]) - self.best(growing.score[1:start])).sum()
        if bool(gain < self.delta):
            return None
        best = stable_topk(growing.score[start:end], min(self.width or self.budget, end - start))[1]
        return Frontier(start + best.sort().values, self.top_k)

    def select(self, growing: GrowingTree) -> Tensor:
        return top_nodes(growing, growing.score, self.budget)


@dataclass(frozen=True)
class BestFirst(Policy):
    """The exact best nodes of the whole tree (DySpec, arXiv 2410.11744; DDTree, arXiv 2604.12989).

    A child's score never exceeds its parent's, so a node outside the best `budget` of the pool needs no expansion,
    and growth is complete once every one inside has been expanded (but the last of them, whose children come after
    it). Those still open are expanded `batch` at a time, the best first: the papers' heap, in rounds. One
    device-to-host transfer a round.

    Attributes:
        budget: N; batch: nodes expanded per round. A drafter of limited depth ends growth after as many rounds: there
            the tree is exact with a batch of at least N.
        top_k: candidates per node: exact if at least N (or the vocabulary), since N siblings at most can be chosen.
        depth: levels at most; None for no limit.
    """

    budget: int = 59
    batch: int = 10
    top_k: int = 10
    depth: int | None = 10

    def __post_init__(self) -> None:
        check_counts(self, "budget", "batch", "top_k", *(["depth"] if self.depth is not None else []))

    def max_candidates(self) -> int:
        return self.top_k

    def frontier(self, growing: GrowingTree, draft: Draft | None) -> Frontier | None:
        if not growing.levels:
            return Frontier(growing.token.new_zeros(1), self.top_k)
        best = top_nodes(growing, growing.score, self.budget)
        if best.shape[0] == self.budget:
            best = best[:-1]
        expanded = torch.zeros_like(growing.token, dtype=torch.bool)
        expanded[growing.parent[1:]] = True
        is_open = ~expanded[best] & (growing.score[best] > -torch.inf)
        if self.depth is not None:
            is_open &= growing.depth[best] < self.depth
        node = best[is_open][: self.batch]
        return Frontier(node, self.top_k) if node.shape[0] else None

    def select(self, growing: GrowingTree) -> Tensor:
        return top_nodes(growing, growing.score, self.budget)


@dataclass(frozen=True)
class Talon(Policy):
    """TALON (arXiv 2601.07353): a wide root, then levels gated by confidence, until the budget is spent.

    The root's `top_k` candidates are kept. Of every later level those are kept whose score is at least `gate` times
    the level's best (as probabilities): few where the drafter is sure, which makes the tree deep and narrow; many
    where it is not, which makes it shallow and wide. Kept nodes above the gate are expanded. Levels are kept from
    the top, the last one cut to the budget by score. One device-to-host transfer a level.

    Attributes:
        budget: N; top_k: candidates per node; gate: in 0…1; depth: levels at most.
    """

    budget: int = 59
    top_k: int = 10
    gate: float = 0.1
    depth: int = 12

    def __post_init__(self) -> None:
        check_counts(self, "budget", "top_k", "depth")
        check_number(self, "gate", most=1)

    def max_candidates(self) -> int:
        return self.top_k

    def passes_gate(self, score: Tensor) -> Tensor:
        """`[M] bool` of a level's scores `[M]`."""
        gate = math.log(self.gate) if self.gate > 0 else -torch.inf
        return (score >= score.max() + gate) & (score > -torch.inf)

    def kept(self, growing: GrowingTree) -> Tensor:
        """`[M] bool`: kept so far, before the cut; the root is not."""
        kept = growing.score > -torch.inf
        kept[0] = False
        for start, end in growing.levels[1:]:
            kept[start:end] = self.passes_gate(growing.score[start:end])
        return kept

    def frontier(self, growing: GrowingTree, draft: Draft | None) -> Frontier | None:
        if not growing.levels:
            return Frontier(growing.token.new_zeros(1), self.top_k)
        if len(growing.levels) == self.depth:
            return None
        start, end = growing.levels[-1]
        there_is_room = self.kept(growing).sum() < self.budget  # asked together with the gate: one transfer
        node = start + (self.passes_gate(growing.score[start:end]) & there_is_room).nonzero().squeeze(-1)
        return Frontier(node, self.top_k) if node.shape[0] else None

    def select(self, growing: GrowingTree) -> Tensor:
        kept = self.kept(growing).nonzero().squeeze(-1)
        # whole levels before the one that overflows, whose best nodes fill the budget
        by_level = (-growing.depth[kept]).float()
        order = stable_topk(growing.score[kept], kept.shape[0])[1]
        return kept[order][stable_topk(by_level[order], min(self.budget, kept.shape[0]))[1]]
