"""Trees whose shape is known before anything is drafted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, product

import torch
from torch import Tensor

from eagle_tree.checks import check_counts, is_count
from eagle_tree.policy.base import Policy
from eagle_tree.tree import Draft, Frontier, GrowingTree


@dataclass(frozen=True)
class Chain(Policy):
    """A chain of the drafter's first choices (Leviathan et al. 2211.17192; Chen et al. 2302.01318).

    Attributes:
        depth: draft tokens in a row.
    """

    fixed_shape = True

    depth: int = 5

    def __post_init__(self) -> None:
        check_counts(self, "depth")

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

    fixed_shape = True

    choices: Sequence[Sequence[int]]
    _frontiers: tuple[tuple[tuple[int, ...], int], ...] = field(init=False, repr=False, compare=False)
    _kept: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    _placed: dict = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        try:
            paths = tuple(tuple(path) for path in self.choices)
        except TypeError:
            raise ValueError(f"Static: choices={self.choices!r} must be a list of rank paths, each a list") from None
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
        if not all(is_count(rank, 0) for rank in path):
            raise ValueError(f"Static: choices hold {list(path)}, whose ranks must be integers >= 0")
        if path in known:
            raise ValueError(f"Static: choices hold {list(path)} twice" if path else "Static: choices hold the root []")
        if path[:-1] not in known:
            raise ValueError(f"Static: choices hold {list(path)} but not its parent {list(path[:-1])}")
        known.add(path)


def specinfer(branching: Sequence[int]) -> Static:
    """SpecInfer's tree (Miao et al., arXiv 2305.09781, §3): every node of depth i has `branching[i]` children.

    Raises:
        ValueError: an empty vector, or a width below 1.
    """
    widths = list(branching) if isinstance(branching, Iterable) else []
    if not widths or not all(is_count(width) for width in widths):
        raise ValueError(f"specinfer: branching={branching!r} must be a list of integers >= 1, one a level")
    return Static([path for depth in range(len(widths)) for path in product(*map(range, widths[: depth + 1]))])
