"""The draft tree: flat tensors, ancestor-closed, every derived field vectorised.

Node 0 is the root, the *pending token*: already emitted, its key/value not yet cached. Nodes stand in an
order in which parents precede children. Nothing here loops over nodes or synchronises with a device;
loops run over levels, whose number the host knows.

Symbols: N draft nodes (the root excluded), M nodes grown so far, F nodes of a frontier, K candidates
per node, D depth of the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from eagle_tree.checks import is_number


@dataclass(frozen=True)
class Tree:
    """A draft tree of N nodes and its root.

    Attributes:
        token: `[N+1] i64`.
        parent: `[N+1] i64`, `parent[0] = -1`, `parent[i] < i`.
        log_conf: `[N+1] f32`, the drafter's log confidence of the edge into the node; 0 at the root.
        max_depth: a bound on the depth that the host knows (the number of levels grown); loops use it.
        max_children: a bound on the children of a node that the host knows; None: N.
        drawn: what the children were drawn from; None: they were not drawn (the drafter's most likely tokens).
    """

    token: Tensor
    parent: Tensor
    log_conf: Tensor
    max_depth: int
    max_children: int | None = None
    drawn: Drawn | None = None

    @classmethod
    def from_lists(
        cls,
        token: Sequence[int],
        parent: Sequence[int],
        log_conf: Sequence[float] | None = None,
        device="cpu",
        drawn: Drawn | None = None,
    ) -> Tree:
        """Build a tree from Python lists and check every invariant.

        Raises:
            ValueError: the lists disagree in length, a parent does not precede its child, a log confidence is
                positive or NaN, or siblings that were not drawn carry the same token.
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
        if drawn is None and len(set(edges)) < len(edges):
            raise ValueError("siblings of a deterministic tree must carry distinct tokens")
        depth = [0] * len(parent)
        for node in range(1, len(parent)):
            depth[node] = depth[parent[node]] + 1
        return cls(
            torch.tensor(token, dtype=torch.int64, device=device),
            torch.tensor(parent, dtype=torch.int64, device=device),
            torch.tensor(log_conf, dtype=torch.float32, device=device),
            max(depth),
            max((parent.count(node) for node in set(parent[1:])), default=0),
            drawn,
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
    def children(self) -> Tensor:
        """`[N+1, max_children] i64`, the children of each node in rank order, 0 where there are fewer.

        Node 0 is the root, nobody's child.
        """
        most = self.n_nodes if self.max_children is None else self.max_children
        children = torch.zeros((self.token.shape[0], most), dtype=torch.int64, device=self.token.device)
        index = torch.arange(self.token.shape[0], device=self.token.device)
        children[self.parent[1:], self.rank[1:]] = index[1:]
        return children

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
        return Tree(
            self.token[:end],
            self.parent[:end],
            self.log_conf[:end],
            min(self.max_depth, n_nodes),
            self.max_children,
            self.drawn and replace(self.drawn, row=self.drawn.row[:end]),
        )


def descend(start: Tensor, parent: Tensor, edge: Tensor, levels: int) -> Tensor:
    """`value[v] = value[parent[v]] + edge[v]` level by level, with `edge[0] = 0` at the root."""
    value = start
    for _ in range(levels):
        value = value[parent] + edge
    return value


DRAWS = ("top_k", "with_replacement", "without_replacement", "hybrid", "coupled")
SAMPLED = ("with_replacement", "without_replacement", "hybrid")
"""Draws by chance: acceptance rules that read q are exact on all children drawn, in their order, and on no others."""


@dataclass(frozen=True)
class Draw:
    """How candidates are taken from the drafter's distribution (`draw.py` says what each kind is).

    Attributes:
        kind: one of `DRAWS`.
        temperature: of the drafter's distribution; None: the sampling temperature. `top_k` ranks and scores at
            temperature 1, as EAGLE-2 does, whatever is said here.
        error_scale: how far a `coupled` drafter's log-probabilities are from the target's; sets its confidences.
    """

    kind: str = "top_k"
    temperature: float | None = None
    error_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in DRAWS:
            raise ValueError(f"draw: kind={self.kind!r} is not one of {', '.join(DRAWS)}")
        for name in ("temperature", "error_scale"):
            value = getattr(self, name)
            if not (is_number(value) and value > 0) and not (name == "temperature" and value is None):
                raise ValueError(f"draw: {name}={value!r} must be a number above 0")

    @property
    def sampled(self) -> bool:
        """Whether candidates are drawn by chance, from a distribution that the acceptance rule has to know."""
        return self.kind in SAMPLED

    def at(self, temperature: float) -> Draw:
        """This draw, of a text that is sampled at a temperature: where none was given, the drafter's is the same.

        At temperature 0 nothing is random: coupled candidates are the most likely ones.

        Raises:
            ValueError: a sampled draw of a text without randomness, and no temperature of its own.
        """
        if temperature == 0 and self.kind == "coupled":
            return Draw("top_k")
        if temperature == 0 and self.sampled and self.temperature is None:
            raise ValueError(
                f"draw={self.kind} at temperature=0 has no distribution to draw from; draw the drafter's most likely "
                "tokens (draw.kind=top_k), or give the drafter a temperature of its own (draw.temperature=1)"
            )
        return self if self.temperature is not None else replace(self, temperature=temperature or 1.0)


TOP_K = Draw()


@dataclass(frozen=True)
class Drawn:
    """What the children of a sampled tree's nodes were drawn from: one row an expanded node.

    Attributes:
        log_q: `[E, W]`, log-probabilities over the drafter's vocabulary.
        row: `[N+1] i64`, the row that a node's children were drawn from; -1 if it was never expanded.
        target_id: `[W] i64`, target ids of the drafter's vocabulary, each once; None: the vocabularies are the same.
        in_order: `[] bool`, of drawn siblings the first ones are there (a later one's law holds given those before).
    """

    log_q: Tensor
    row: Tensor
    target_id: Tensor | None = None
    in_order: Tensor | None = None

    def at(self, node: Tensor, vocab_size: int) -> Tensor:
        """`[m, V] f64`, log q over the target's vocabulary at nodes `[m]`, as the drafter gave it (not normalised).

        Nodes that were never expanded have -inf everywhere.
        """
        row = self.row[node]
        log_q = self.log_q[row.clamp(min=0)].double().masked_fill((row < 0)[:, None], -torch.inf)
        if self.target_id is None:
            return log_q
        return log_q.new_full((node.shape[0], vocab_size), -torch.inf).index_copy(1, self.target_id, log_q)

    def extended(self, frontier: Frontier, draft: Draft, size: int) -> Drawn:
        """With a frontier's rows appended, for a pool that has `size` nodes then."""
        row = torch.nn.functional.pad(self.row, (0, size - self.row.shape[0]), value=-1)
        row[frontier.node] = self.log_q.shape[0] + torch.arange(frontier.node.shape[0], device=row.device)
        return Drawn(torch.cat([self.log_q, draft.log_q]), row, draft.target_id)


@dataclass(frozen=True)
class Frontier:
    """Which nodes of a growing tree to expand next, `node [F] i64`, with how many candidates each, and how drawn.

    Policies leave `draw` alone: `decode.grow` sets it to that of the run.
    """

    node: Tensor
    n_candidates: int
    draw: Draw = TOP_K


@dataclass(frozen=True)
class Draft:
    """What a drafter proposes for a frontier: best candidate first, or in the order in which they were drawn.

    Attributes:
        token: `[F, K] i64`, target vocabulary.
        log_conf: `[F, K] f32`, clamped to at most 0.
        entropy: `[F] f32`, of the drafter's distribution, in nats.
        log_q: `[F, W] f32`, log-probabilities that the candidates were drawn with; only for sampled drafts.
        target_id: `[W] i64`, target ids of the columns of `log_q`; None: they are the target's.
    """

    token: Tensor
    log_conf: Tensor
    entropy: Tensor
    log_q: Tensor | None = None
    target_id: Tensor | None = None


@dataclass(frozen=True)
class GrowingTree:
    """The candidate pool: append-only, node indices are stable. Node 0 is the root.

    Attributes:
        token, parent, depth: `[M] i64`; log_conf, score: `[M] f32`.
        levels: `(start, end)` of the nodes that each expansion appended; the root is no level.
        widths: how many nodes each expansion expanded: what its drafter step cost depends on.
        max_children: the most candidates that a node has; drawn: what they were drawn from, if they were.
    """

    token: Tensor
    parent: Tensor
    depth: Tensor
    log_conf: Tensor
    score: Tensor
    levels: tuple[tuple[int, int], ...] = field(default=())
    widths: tuple[int, ...] = ()
    max_children: int = 0
    drawn: Drawn | None = None

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
        end = start + parent.shape[0]
        drawn = self.drawn
        if draft.log_q is not None:
            drawn = drawn or Drawn(draft.log_q[:0], self.parent.new_empty(0))
            drawn = drawn.extended(frontier, draft, end)
        return GrowingTree(
            torch.cat([self.token, draft.token.flatten()]),
            torch.cat([self.parent, parent]),
            torch.cat([self.depth, self.depth[parent] + 1]),
            torch.cat([self.log_conf, log_conf]),
            torch.cat([self.score, self.score[parent] + log_conf]),
            (*self.levels, (start, end)),
            (*self.widths, frontier.node.shape[0]),
            max(self.max_children, draft.token.shape[1]),
            drawn,
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
        tree = Tree(self.token[index], parent, self.log_conf[index], len(self.levels), self.max_children)
        if self.drawn:
            in_order = (tree.rank == self.rank[index]).all()
            tree = replace(tree, drawn=replace(self.drawn, row=self.drawn.row[index], in_order=in_order))
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
