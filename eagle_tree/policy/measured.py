"""Static trees made of what was measured: how often the candidate of each rank is accepted at each depth."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from pathlib import Path

import numpy as np

from eagle_tree.checks import as_path, check_count, check_flag
from eagle_tree.cost import CostTable
from eagle_tree.files import write_json
from eagle_tree.policy.fixed import Static

BUNDLED = Path(__file__).parents[1] / "assets" / "smollm2-135m-eagle3" / "accuracy.json"


@dataclass(frozen=True)
class Accuracy:
    """Counts of what `eagle-tree evaluate` saw along the target's texts, in `accuracy.json` beside its evaluation.

    Attributes:
        positions: `[D]`, places looked at from each depth of self-feeding; row 0 is of the root's children.
        accepted: `[D, K]`, the target's probability of the candidate of each rank there, summed over places (at T = 0:
            how often it was the text's next token). Of siblings at most one is accepted, so a row sums to at most its
            positions.
        about: what it was measured on.

    Raises:
        ValueError: counts of another shape or range, named.
    """

    positions: Sequence[int]
    accepted: Sequence[Sequence[float]]
    about: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            positions, accepted = np.array(self.positions, dtype=float), np.array(self.accepted, dtype=float)
        except (TypeError, ValueError):
            positions = accepted = np.empty(0)
        if positions.ndim != 1 or accepted.ndim != 2 or len(positions) != len(accepted) or not accepted.size:
            raise ValueError("accuracy: positions must be a list, and accepted as many rows of one length")
        if not (np.isfinite(positions) & (positions > 0)).all():
            raise ValueError(f"accuracy: positions={list(self.positions)} must be counts above 0")
        for depth, (row, count) in enumerate(zip(accepted, positions)):
            if not ((row >= 0).all() and row.sum() <= count * (1 + 1e-6)):
                raise ValueError(
                    f"accuracy: accepted[{depth}]={row.tolist()} must be at least 0 and sum to at most {count:g}, the "
                    "positions of that depth"
                )

    def by_depth(self) -> np.ndarray:
        """`[D, K]`, P(the candidate of a rank is accepted | its parent was), by depth."""
        return np.minimum(np.array(self.accepted, dtype=float) / np.array(self.positions, dtype=float)[:, None], 1)

    def by_rank(self, depth: int) -> np.ndarray:
        """`[K]`, the same whatever the depth: a ratio of sums over the first `depth` levels."""
        rate = np.array(self.accepted, dtype=float)[:depth].sum(0) / sum(self.positions[:depth])
        return rate / max(1.0, rate.sum())  # sums of fp32 probabilities can exceed 1 by their rounding

    def save(self, path: str | Path) -> None:
        """Write as JSON."""
        write_json(path, vars(self), default=str)

    @classmethod
    def load(cls, path: str | Path) -> Accuracy:
        """Read from a file; `bundled` is the one of the head that ships.

        Raises:
            FileNotFoundError: there is none. ValueError: the file holds something else.
        """
        place = BUNDLED if path == "bundled" else as_path("accuracy", path)
        if not place.is_file():
            raise FileNotFoundError(
                f"accuracy={str(path)!r}: there is no file {place}; measure one with `eagle-tree evaluate "
                "drafter=… policies=[] run=FOLDER`, which writes FOLDER/accuracy.json"
            )
        try:
            return cls(**json.loads(place.read_text()))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"accuracy={str(path)!r}: {place} must be an accuracy.json of `eagle-tree evaluate`: {error}"
            ) from None


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


def medusa_from_file(accuracy: str, budget: int = 63) -> Static:
    """`medusa` with the accuracies in a file of `eagle-tree evaluate`, or `bundled`."""
    return medusa(Accuracy.load(accuracy).by_depth().tolist(), budget)


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

    def paths(self, budget: int, depth: int) -> list[tuple[int, ...]]:
        """Rank paths of the best tree of `budget` draft nodes, at most `depth` deep."""
        found, waiting = [], [((), depth, budget + 1)]
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
    return Static(table.paths(budget, depth))


@dataclass(frozen=True)
class Sized(Static):
    """A static tree whose size was chosen for a machine.

    Attributes:
        cost: the machine's table; other_machine: use the tree elsewhere too.
    """

    cost: CostTable = field(kw_only=True, repr=False, compare=False)
    other_machine: bool = field(kw_only=True, default=False)

    def check_machine(self, about: dict) -> None:
        if not self.other_machine:
            self.cost.check_machine(about)


def sequoia_sized(
    acceptance: Sequence[float], depth: int, cost: CostTable, context: int = 256, other_machine: bool = False
) -> Sized:
    """Sequoia's hardware-aware tree (arXiv 2402.12374): the size and depth of the most expected tokens per second.

    Every size that the table knows and every depth up to `depth` is tried. A pass takes the target's forward, one
    drafter step a level over the nodes that have children, and what is fixed. Whether to draft at all is not asked: the
    tree has one node at least.

    Args:
        acceptance: as in `sequoia_table`. context: tokens before the pass, at which times are read.

    Raises:
        ValueError: a bad argument, named; a table that ends at one position.
    """
    check_count("sequoia: context", context)
    largest = cost.largest_n - 1
    if largest < 1:
        raise ValueError("sequoia: the cost table ends at 1 position; a tree needs times of 2 at least")
    table = sequoia_table(acceptance, largest, depth)

    def tokens_per_second(levels: int, budget: int) -> float:
        steps = sum(cost.draft(width, context) for width in widths(table.paths(budget, levels)))
        return table.value[levels, budget + 1] / (cost.pass_seconds(budget, 0, 0, context) + steps)

    possible = np.argwhere(np.isfinite(table.value[1:, 2:])) + 1
    levels, budget = max(possible.tolist(), key=lambda size: tokens_per_second(*size))
    return Sized(table.paths(budget, levels), cost=cost, other_machine=other_machine)


def widths(paths: Sequence[tuple[int, ...]]) -> list[int]:
    """How many nodes each drafter step of a static tree expands, the root's first."""
    parents = {path[:-1] for path in paths}
    return [sum(len(parent) == depth for parent in parents) for depth in range(1 + max(map(len, parents)))]


def sequoia_from_file(
    accuracy: str,
    budget: int | None,
    depth: int,
    cost: str | CostTable | None = None,
    context: int = 256,
    other_machine: bool = False,
) -> Static:
    """Sequoia's tree with the acceptance by rank of a file of `eagle-tree evaluate`, or `bundled`.

    Args:
        budget: nodes; None: as many as a cost table says. cost: that table, or its folder; None with a budget.

    Raises:
        ValueError: both or neither are given.
    """
    if (budget is None) == (cost is None):
        shown = "a table" if isinstance(cost, CostTable) else repr(cost)
        raise ValueError(
            f"sequoia: budget={budget!r} and cost={shown}: give the one, a number of nodes, or the other, the folder "
            "of a cost table (`eagle-tree calibrate`) that chooses it"
        )
    check_count("sequoia: depth", depth)
    check_flag("sequoia: other_machine", other_machine)
    acceptance = Accuracy.load(accuracy).by_rank(depth).tolist()
    if cost is None:
        return sequoia(acceptance, budget, depth)
    table = cost if isinstance(cost, CostTable) else CostTable.load(cost)
    return sequoia_sized(acceptance, depth, table, context, other_machine)


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
