"""Tree policies: which nodes to expand, which to keep.

A policy answers two questions about the growing candidate pool and never touches a model:

* `frontier(growing, draft)`: which nodes to expand next, with how many candidates each; None ends growth;
* `select(growing)`: the pool indices that become the draft tree, closed under parents.

`observe(row)` tells those that learn online how a pass went. `budget` counts draft nodes without the
root; EAGLE's `total_token` and SGLang's `num_draft_tokens` count it: total_token = budget + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

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
class Static(Policy):
    """A tree of one fixed shape, drawn as rank paths (EAGLE-1, arXiv 2401.15077; Medusa, arXiv 2401.10774).

    A path names a node by the rank of every candidate on the way to it: `(0, 2)` is the third candidate after
    the first one. The shape is known before anything is drafted, so every pass has the same frontiers and
    keeps the same pool indices: they are computed once, and a pass computes none.

    Growth: level by level. A frontier holds the nodes of its level that have children, and each is asked for as
    many candidates as the level's highest rank needs. A drafter that ends sooner gives the tree's upper levels.

    Attributes:
        choices: rank paths `[N]`, closed under prefixes, each once, in any order.

    Raises:
        ValueError: no path, a rank that is no integer >= 0, a path given twice, or one whose parent is missing.
    """

    choices: Sequence[Sequence[int]]
    _frontiers: tuple[tuple[tuple[int, ...], int], ...] = field(init=False, repr=False, compare=False)
    _kept: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    _placed: dict = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        paths = tuple(tuple(path) for path in self.choices)
        check_rank_paths(paths)
        object.__setattr__(self, "choices", paths)
        frontiers, kept, index, size = [], [], {(): 0}, 1
        ordered = sorted(paths, key=lambda path: (len(path), path))  # the pool's order
        for _, level in groupby(ordered, key=len):
            level = list(level)
            parents = sorted({path[:-1] for path in level})
            n_candidates = 1 + max(path[-1] for path in level)
            frontiers.append((tuple(index[parent] for parent in parents), n_candidates))
            place = {parent: size + n_candidates * row for row, parent in enumerate(parents)}
            index |= {path: place[path[:-1]] + path[-1] for path in level}
            kept.append(tuple(index[path] for path in level))
            size += n_candidates * len(parents)
        object.__setattr__(self, "_frontiers", tuple(frontiers))
        object.__setattr__(self, "_kept", tuple(kept))

    def max_candidates(self) -> int:
        return max(n_candidates for _, n_candidates in self._frontiers)

    def placed(self, device: torch.device) -> tuple[list[Frontier], list[Tensor]]:
        """The frontier of every level, and the pool indices kept of the first 0, 1, 2 … levels, on a device."""
        if device not in self._placed:
            frontiers = [Frontier(torch.tensor(node, device=device), count) for node, count in self._frontiers]
            kept = torch.tensor([index for level in self._kept for index in level], device=device)
            ends = [sum(map(len, self._kept[:levels])) for levels in range(len(self._kept) + 1)]
            self._placed[device] = frontiers, [kept[:end] for end in ends]
        return self._placed[device]

    def frontier(self, growing: GrowingTree, draft: Draft | None) -> Frontier | None:
        rounds = len(growing.levels)
        return self.placed(growing.token.device)[0][rounds] if rounds < len(self._frontiers) else None

    def select(self, growing: GrowingTree) -> Tensor:
        return self.placed(growing.token.device)[1][len(growing.levels)]


def check_rank_paths(paths: Sequence[tuple[int, ...]]) -> None:
    """Raise ValueError unless the paths draw a tree: some, each once, of ranks >= 0, with every parent among them."""
    if not paths:
        raise ValueError("Static: choices is empty; give at least one rank path")
    known = {()}
    for path in sorted(paths, key=len):
        if not all(isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 for rank in path):
            raise ValueError(f"Static: choices hold {list(path)}, whose ranks must be integers >= 0")
        if path in known:
            raise ValueError(f"Static: choices hold {list(path)} twice" if path else "Static: choices hold the root []")
        if path[:-1] not in known:
            raise ValueError(f"Static: choices hold {list(path)} but not its parent {list(path[:-1])}")
        known.add(path)


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
