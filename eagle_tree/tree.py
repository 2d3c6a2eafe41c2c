"""The draft tree: flat tensors, ancestor-closed, every derived field vectorised.

Node 0 is the root, the *pending token*: already emitted, its key/value not yet cached. Nodes stand in an
order in which parents precede children. Nothing here loops over nodes or synchronises with a device;
loops run over levels, whose number the host knows.

Symbols: N draft nodes (the root excluded), M nodes grown so far, F nodes of a frontier, K candidates
per node, D depth of the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tree:
    """A draft tree of N nodes and its root.

    Attributes:
        token: `[N+1] i64`.
        parent: `[N+1] i64`, `parent[0] = -1`, `parent[i] < i`.
        log_conf: `[N+1] f32`, the drafter's log confidence of the edge into the node; 0 at the root.
        max_depth: a bound on the depth that the host knows (the number of levels grown); loops use it.
    """

    token: Tensor
    parent: Tensor
    log_conf: Tensor
    max_depth: int

    @classmethod
    def from_lists(
        cls, token: Sequence[int], parent: Sequence[int], log_conf: Sequence[float] | None = None, device="cpu"
    ) -> Tree:
        """Build a tree from Python lists and check every invariant.

        Raises:
            ValueError: the lists disagree in length, a parent does not precede its child, siblings carry
                the same token, or a log confidence is positive or NaN.
        """
        log_conf = [0.0] * len(token) if log_conf is None else log_conf
        if not len(token) == len(parent) == len(log_conf) >= 1:
            raise ValueError(f"token, parent, log_conf have lengths {len(token)}, {len(parent)}, {len(log_conf)}")
        if parent[0] != -1 or log_conf[0] != 0:
            raise ValueError(f"the root has parent {parent[0]} (must be -1) and log_conf {log_conf[0]} (must be 0)")
        for node in range(1, len(parent)):
            if not 0 <= parent[node] < node:
                raise ValueError(f"parent[{node}]={parent[node]} must be in 0…{node - 1}")
            if not log_conf[node] <= 0:
                raise ValueError(f"log_conf[{node}]={log_conf[node]} must be at most 0")
        edges = list(zip(parent[1:], token[1:], strict=True))
        if len(set(edges)) < len(edges):
            raise ValueError("siblings of a deterministic tree must carry distinct tokens")
        depth = [0] * len(parent)
        for node in range(1, len(parent)):
            depth[node] = depth[parent[node]] + 1
        return cls(
            torch.tensor(token, dtype=torch.int64, device=device),
            torch.tensor(parent, dtype=torch.int64, device=device),
            torch.tensor(log_conf, dtype=torch.float32, device=device),
            max(depth),
        )

    @property
    def n_nodes(self) -> int:
        """N, the draft nodes (the root is not counted)."""
        return self.token.shape[0] - 1

    @cached_property
    def _parent_or_root(self) -> Tensor:
        return self.parent.clamp(min=0)

    @cached_property
    def depth(self) -> Tensor:
        """`[N+1] i64`, 0 at the root."""
        step = (self.parent >= 0).long()
        depth = torch.zeros_like(step)
        for _ in range(self.max_depth):  # after i rounds every node of depth <= i is right
            depth = step * (depth[self._parent_or_root] + 1)
        return depth

    @property
    def position_offset(self) -> Tensor:
        """`[N+1] i64`, a node's position relative to the root: its depth, never its flat index."""
        return self.depth

    @cached_property
    def score(self) -> Tensor:
        """`[N+1] f32`, log of the path product of confidences (EAGLE-2 §4.2).

        Rounded level by level, `score[v] = score[parent] + log_conf[v]`: one product `mask @ log_conf`
        rounds differently and can put a child above its parent.
        """
        return descend(torch.zeros_like(self.log_conf), self._parent_or_root, self.log_conf, self.max_depth)

    @cached_property
    def mask(self) -> Tensor:
        """`[N+1, N+1] bool`: v sees u iff u is v or an ancestor of v."""
        index = torch.arange(self.token.shape[0], device=self.token.device)
        jump = self._parent_or_root
        mask = (index[:, None] == index) | (index == jump[:, None])
        covered = 1  # generations that the mask reaches so far
        while covered < self.max_depth:
            mask = mask | mask[jump]
            jump = jump[jump]
            covered *= 2
        return mask

    @cached_property
    def rank(self) -> Tensor:
        """`[N+1] i64`, the node's place among its siblings, 0 first."""
        siblings = self.parent[:, None] == self.parent
        return siblings.tril(-1).sum(-1)

    @cached_property
    def paths(self) -> Tensor:
        """`[N+1, D+1] i64`, node indices from the root to each node, -1 behind its end."""
        index = torch.arange(self.token.shape[0], device=self.token.device)
        paths = torch.full((self.token.shape[0], self.max_depth + 1), -1, device=self.token.device)
        place = self.depth.expand_as(self.mask).masked_fill(~self.mask, self.max_depth + 1)
        wide = torch.nn.functional.pad(paths, (0, 1), value=-1)  # one column swallows the non-ancestors
        return wide.scatter(1, place, index.expand_as(self.mask))[:, :-1]

    @property
    def expected_draft(self) -> Tensor:
        """Expected tokens of a pass if the drafter's confidences were acceptance rates: 1 + sum exp(score)."""
        return self.score.double().exp().sum()

    def head(self, n_nodes: int) -> Tree:
        """The first `n_nodes` nodes; closed because parents precede children."""
        if n_nodes >= self.n_nodes:
            return self
        end = n_nodes + 1
        return Tree(self.token[:end], self.parent[:end], self.log_conf[:end], min(self.max_depth, n_nodes))


def descend(start: Tensor, parent: Tensor, edge: Tensor, levels: int) -> Tensor:
    """`value[v] = value[parent[v]] + edge[v]` level by level, with `edge[0] = 0` at the root."""
    value = start
    for _ in range(levels):
        value = value[parent] + edge
    return value


@dataclass(frozen=True)
class Frontier:
    """Which nodes of a growing tree to expand next, `node [F] i64`, with how many candidates each."""

    node: Tensor
    n_candidates: int


@dataclass(frozen=True)
class Draft:
    """What a drafter proposes for a frontier, best candidate first.

    Attributes:
        token: `[F, K] i64`, target vocabulary.
        log_conf: `[F, K] f32`, clamped to at most 0.
        entropy: `[F] f32`, of the drafter's distribution, in nats.
        q: `[F, V]`, the distribution the candidates were drawn from; only for sampled drafts.
    """

    token: Tensor
    log_conf: Tensor
    entropy: Tensor
    q: Tensor | None = None


@dataclass(frozen=True)
class GrowingTree:
    """The candidate pool: append-only, node indices are stable. Node 0 is the root.

    Attributes:
        token, parent, depth: `[M] i64`; log_conf, score: `[M] f32`.
        levels: `(start, end)` of the nodes that each expansion appended; the root is no level.
        widths: how many nodes each expansion expanded: what its drafter step cost depends on.
    """

    token: Tensor
    parent: Tensor
    depth: Tensor
    log_conf: Tensor
    score: Tensor
    levels: tuple[tuple[int, int], ...] = field(default=())
    widths: tuple[int, ...] = ()

    @classmethod
    def from_root(cls, token: Tensor) -> GrowingTree:
        """A pool that holds the pending token `[1]` alone."""
        zero = torch.zeros(1, dtype=torch.int64, device=token.device)
        return cls(token, zero - 1, zero, zero.float(), zero.float())

    @property
    def expanded(self) -> int:
        """Nodes that frontiers asked for, the root included."""
        return sum(self.widths)

    @property
    def n_nodes(self) -> int:
        """Candidates in the pool (the root is not counted)."""
        return self.token.shape[0] - 1

    @property
    def rank(self) -> Tensor:
        """`[M] i64`, a candidate's place among its siblings, 0 first; siblings are appended side by side."""
        index = torch.arange(self.parent.shape[0], device=self.parent.device)
        first = torch.cat([index[:1] == 0, self.parent.diff() != 0])
        return index - torch.where(first, index, 0).cummax(0).values

    def path_sums(self, edge: Tensor) -> Tensor:
        """`[M]`, sums along each node's path of a value per edge `[M]` (the root's is not read), level by level."""
        edge = edge.clone()
        edge[0] = 0
        return descend(torch.zeros_like(edge), self.parent.clamp(min=0), edge, len(self.levels))

    def append(self, frontier: Frontier, draft: Draft) -> GrowingTree:
        """The pool with a frontier's candidates appended, parent by parent, best candidate first."""
        parent = frontier.node[:, None].expand_as(draft.token).flatten()
        log_conf = draft.log_conf.float().clamp(max=0).flatten()
        start = self.token.shape[0]
        return GrowingTree(
            torch.cat([self.token, draft.token.flatten()]),
            torch.cat([self.parent, parent]),
            torch.cat([self.depth, self.depth[parent] + 1]),
            torch.cat([self.log_conf, log_conf]),
            torch.cat([self.score, self.score[parent] + log_conf]),
            (*self.levels, (start, start + parent.shape[0])),
            (*self.widths, frontier.node.shape[0]),
        )

    def select(self, node: Tensor) -> tuple[Tree, Tensor, Tensor]:
        """The draft tree of the selected pool nodes (the root excluded, in any order).

        Returns:
            the tree, with nodes in pool order; `index [N+1]`, each tree node's pool index; `closed`, a
            boolean scalar on the device: every selected node's parent is selected, none twice. The
            caller asserts it once the pass's transfer has arrived.
        """
        index = torch.cat([node.new_zeros(1), node.sort().values])
        # out of place, so that `torch.vmap` can run it over many trees
        place = torch.full_like(self.parent, -1).scatter(0, index, torch.arange(index.shape[0], device=index.device))
        parent = place[self.parent[index].clamp(min=0)]
        closed = (parent >= 0).all() & (index.diff() > 0).all()
        # An orphan is caught by the flag above; hanging it under the root keeps the indices legal till then.
        parent = parent.clamp(min=0)
        parent[0] = -1
        tree = Tree(self.token[index], parent, self.log_conf[index], len(self.levels))
        # a closed selection keeps its ancestors, so what the pool knows holds in the tree: no need to derive it again
        vars(tree).update(depth=self.depth[index], score=self.score[index])
        return tree, index, closed


def stable_topk(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of the last dimension, sorted; equal values in index order, on every device alike.

    `torch.topk` leaves the order of ties open. Here value and index are packed into one integer key, so
    no two keys are equal: `values [..., M]` (taken as fp32) with M < 2**32.
    """
    order = torch.arange(values.shape[-1], device=values.device)
    chosen = first_by(values, order, k)
    return values.float().gather(-1, chosen), chosen


def first_by(values: Tensor, order: Tensor, k: int) -> Tensor:
    """The `order` of the k largest values; it also breaks ties, the least first: distinct integers in 0…2**32 - 1."""
    values = values.float() + 0.0  # -0.0 becomes 0.0: they are equal and must tie
    bits = values.contiguous().view(torch.int32)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()  # integer order = float order
    key <<= 32
    key |= 0xFFFFFFFF - order
    return 0xFFFFFFFF - (key.topk(k, -1).values & 0xFFFFFFFF)


def top_nodes(pool: GrowingTree, score: Tensor, budget: int) -> Tensor:
    """Pool indices of the `budget` best nodes by (score, depth, index), the root excluded.

    A smaller pool is returned whole. With a score that never exceeds the parent's the result is closed:
    at a tie the parent, being shallower, comes first.
    """
    index_bits = 32 - len(pool.levels).bit_length()  # depth, at most the number of levels, has the upper bits
    if pool.n_nodes >= 1 << index_bits:
        raise ValueError(f"a pool of {pool.n_nodes} nodes and {len(pool.levels)} levels is too large to be ranked")
    index = torch.arange(1, pool.n_nodes + 1, device=score.device)
    order = (pool.depth[1:] << index_bits) | index
    return first_by(score[1:], order, min(budget, pool.n_nodes)) & ((1 << index_bits) - 1)
