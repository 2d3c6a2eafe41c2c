"""Trees whose shape is known before anything is drafted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import groupby, product

import numpy as np
import torch
from torch import Tensor

from eagle_tree.policy.base import Policy, check_at_least_one, check_count
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
        if not all(isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 for rank in path):
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
    if not widths or not all(isinstance(width, int) and not isinstance(width, bool) and width >= 1 for width in widths):
        raise ValueError(f"specinfer: branching={branching!r} must be a list of integers >= 1, one a level")
    return Static([path for depth in range(len(widths)) for path in product(*map(range, widths[: depth + 1]))])


def medusa(accuracy: Sequence[Sequence[float]], budget: int = 63) -> Static:
    """Medusa's calibrated tree (Cai et al., arXiv 2401.10774, §3.3): greedily, nodes of largest product of accuracies.

    A node's value is the product of the measured accuracies of its head and rank along its path. A product never
    exceeds its prefix's, so the greedy choice is the `budget` best paths of all, and they are closed.

    Args:
        accuracy: `[D, K]`, how often candidate k of depth d is right given that its parent is.
        budget: N; fewer if fewer paths have a chance.

    Raises:
        ValueError: accuracies outside 0…1, rows of different lengths, no path of positive value.
    """
    table = np.array(checked_rates("medusa: accuracy", accuracy, 2))
    check_count("medusa: budget", budget)
    chosen: list[tuple[int, ...]] = []
    waiting = [(-value, 1, (rank,)) for rank, value in enumerate(table[0]) if value > 0]
    heapify(waiting)
    while waiting and len(chosen) < budget:
        value, depth, path = heappop(waiting)
        chosen.append(path)
        if depth < len(table):
            for rank, rate in enumerate(table[depth]):
                if rate > 0:
                    heappush(waiting, (value * rate, depth + 1, (*path, rank)))
    if not chosen:
        raise ValueError("medusa: accuracy holds no first candidate that is ever right")
    return Static(chosen)


@dataclass(frozen=True)
class SequoiaTable:
    """Sequoia's dynamic programme (Chen et al., arXiv 2402.12374, §3.1; DESIGN §4).

    Attributes:
        value: `[D+1, M+1]`, the largest expected tokens of m nodes (the root counted) of depth at most l; -inf where
            no such tree exists.
        children: `[D+1, M+1]`, how many children its root has.
        rest: `[D+1, B+1, M+1]`, nodes that are left to the root and its first b-1 children if it has b.
    """

    value: np.ndarray
    children: np.ndarray
    rest: np.ndarray

    def paths(self, budget: int) -> list[tuple[int, ...]]:
        """Rank paths of the best tree of `budget` draft nodes."""
        found, waiting = [], [((), self.value.shape[0] - 1, budget + 1)]
        while waiting:
            path, levels, size = waiting.pop()
            for rank in range(int(self.children[levels, size]), 0, -1):
                rest = int(self.rest[levels, rank, size])
                child = (*path, rank - 1)
                found.append(child)
                waiting.append((child, levels - 1, size - rest))
                size = rest
        return found


def sequoia_table(acceptance: Sequence[float], budget: int, depth: int) -> SequoiaTable:
    """Fill the table for trees of up to `budget` draft nodes and `depth` levels.

    Args:
        acceptance: `[K]`, P(the rank-b child is the accepted one | its parent was), the sum at most 1.
    """
    rates = checked_rates("sequoia: acceptance", acceptance, 1)
    if sum(rates) > 1 + 1e-9:
        raise ValueError(f"sequoia: acceptance sums to {sum(rates):.3f}: of all children at most one is accepted")
    check_count("sequoia: budget", budget)
    check_count("sequoia: depth", depth)
    sizes, width = budget + 1, min(len(rates), budget)
    alone = np.full(sizes + 1, -np.inf)
    alone[1] = 1.0  # a root without children
    value, children = np.tile(alone, (depth + 1, 1)), np.zeros((depth + 1, sizes + 1), dtype=np.int64)
    rest = np.zeros((depth + 1, width + 1, sizes + 1), dtype=np.int64)
    # given[m, y]: nodes left for the new child if the others keep y of m; 0, which is no tree, above the diagonal
    given = np.arange(sizes + 1)[:, None] - np.arange(sizes + 1)
    given[given < 0] = 0
    for levels in range(1, depth + 1):
        exact = alone
        for rank in range(1, width + 1):
            child = np.full(sizes + 1, -np.inf)  # 0 times -inf would be no number
            np.multiply(rates[rank - 1], value[levels - 1], out=child, where=np.isfinite(value[levels - 1]))
            options = exact[None, :] + child[given]
            rest[levels, rank] = options.argmax(1)
            exact = options.max(1)
            better = exact > value[levels]
            value[levels][better], children[levels][better] = exact[better], rank
    return SequoiaTable(value, children, rest)


def sequoia(acceptance: Sequence[float], budget: int, depth: int) -> Static:
    """Sequoia's tree of `budget` nodes, at most `depth` deep: the most expected tokens when every node's children are
    accepted by rank with the same probabilities.

    Raises:
        ValueError: acceptance is no list of probabilities that sum to at most 1, or no tree of that depth, with as
            many children a node as there are probabilities, has that many nodes.
    """
    table = sequoia_table(acceptance, budget, depth)
    if not np.isfinite(table.value[-1, -1]):
        largest = int(np.isfinite(table.value[-1]).sum()) - 1
        raise ValueError(
            f"sequoia: budget={budget} must be at most {largest}, the nodes of a full tree of depth {depth} in which "
            f"a node has {len(acceptance)} children, one for each acceptance probability"
        )
    return Static(table.paths(budget))


def checked_rates(name: str, rates: Sequence, dimensions: int) -> list:
    """Probabilities as plain lists, or ValueError unless they have that many dimensions and lie in 0…1."""
    try:
        table = np.array(rates, dtype=float)
    except (TypeError, ValueError):
        table = np.empty(0)
    if table.ndim != dimensions or not table.size or not ((table >= 0) & (table <= 1)).all():
        shape = "a list" if dimensions == 1 else "a table of rows of one length"
        raise ValueError(f"{name}={rates!r} must be {shape} of probabilities in 0…1")
    return table.tolist()
