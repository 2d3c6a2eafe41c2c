"""What the target thinks of a trace's candidates, at a sample of positions.

At a sampled position every candidate that the trace holds is verified under a tree mask, some at a time, and two
trees are grown by the target itself: the best over the whole vocabulary and the best over the drafter's, no deeper
than the trace's candidates there. Under the match rule a node is accepted with the product of the target's
probabilities along its path (DESIGN §4), so the best tree of N nodes is the N largest products: best-first growth
with the target's own law as the drafter. `regret` says what is lost between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from eagle_tree.cache import KVCache
from eagle_tree.decode import grow
from eagle_tree.drafter.base import Drafter
from eagle_tree.evaluate import log_laws
from eagle_tree.noise import PassNoise
from eagle_tree.policy import BestFirst
from eagle_tree.target import Target
from eagle_tree.trace import APPRAISAL_SCHEMA, Part
from eagle_tree.tree import Draft, Frontier, GrowingTree, Tree, stable_topk
from eagle_tree.warp import Sampling

CHUNK = 64
"""Nodes whose laws are computed in one forward; their ancestors come with them."""


def sample(part: Part, count: int) -> tuple[int, ...]:
    """At most `count` positions of a part, without replacement, a function of seed and prompt alone."""
    positions = len(part.text.answer_ids) - 1
    key = [part.settings["seed"], *part.text.prompt_id.encode()]
    chosen = np.random.default_rng(key).permutation(positions)[:count]
    return tuple(sorted(chosen.tolist()))


@dataclass(frozen=True)
class Pool:
    """All candidates of a trace at one position, as a tree.

    Attributes:
        tree: node 0 is the root, then the candidates, expansion by expansion.
        row: `[R]`, the expansions' rows; node: `[R]`, the node that each expanded; size: `[R]`, its candidates.
    """

    tree: Tree
    row: np.ndarray
    node: np.ndarray
    size: np.ndarray

    @classmethod
    def at(cls, part: Part, position: int, device: torch.device | str = "cpu") -> Pool:
        """The pool of a position, its tree on a device."""
        table = part.expansions
        row = np.flatnonzero(table["position"].to_numpy() == position)
        here = table.take(row).combine_chunks()
        lists = here["token"].combine_chunks()
        size = lists.value_lengths().to_numpy().astype(np.int64)
        first = 1 + np.cumsum(size) - size
        place = np.searchsorted(row, here["parent"].to_numpy())  # parents are rows of the same position
        node = np.where(
            here["parent"].to_numpy() < 0, 0, first[np.minimum(place, len(row) - 1)] + here["rank"].to_numpy()
        )
        token = np.append(part.text.answer_ids[position], lists.flatten().to_numpy()).astype(np.int64)
        token, parent = (torch.from_numpy(one).to(device) for one in (token, np.append(-1, np.repeat(node, size))))
        tree = Tree(token, parent, torch.zeros(len(token), device=device), len(row))
        return cls(replace(tree, max_depth=int(tree.depth.max())), row, node, size)


def with_ancestors(parent: Tensor, node: Tensor) -> Tensor:
    """Indices, ascending, of some nodes `[n]` and all above them in the tree with these parents `[N+1]`."""
    kept = torch.zeros_like(parent, dtype=torch.bool)
    while node.numel():
        kept[node] = True
        node = parent[node].unique()
        node = node[node >= 0]
        node = node[~kept[node]]
    return kept.nonzero().squeeze(-1)


class Prefix:
    """A text in the target's cache, behind any prefix of which trees are verified."""

    def __init__(self, target: Target, ids: Tensor, sampling: Sampling):
        self.target, self.sampling = target, sampling
        # nodes of several paths stand side by side in the cache, so it may hold more than the context has positions
        self.cache: KVCache = target.new_cache(max_length=ids.shape[0] + (CHUNK + 1) * target.max_length)
        target.prefill(ids, self.cache)

    def laws(self, length: int, tree: Tree, node: Tensor) -> Tensor:
        """Log laws `[n, V]` behind some nodes of a tree whose root stands at position `length`.

        Lengths must not grow from call to call: verifying overwrites what stood behind the prefix.
        """
        kept = with_ancestors(tree.parent, node)
        place = torch.searchsorted(kept, tree.parent[kept].clamp(min=0))
        place[0] = -1
        part = Tree(tree.token[kept], place, tree.log_conf[kept], tree.max_depth)
        self.cache.reset(length=length)
        logits = self.target.verify([part], self.cache)[0].logits
        return log_laws(logits[torch.searchsorted(kept, node)], self.sampling)

    def chunks(self, length: int, tree: Tree) -> Iterator[tuple[Tensor, Tensor]]:
        """Nodes and their log laws, some at a time."""
        for node in torch.arange(tree.n_nodes + 1, device=tree.token.device).split(CHUNK):
            yield node, self.laws(length, tree, node)


class OwnLaw(Drafter):
    """The target as its own drafter: its law behind each node, over all tokens or those that a drafter can propose."""

    def __init__(self, prefix: Prefix, length: int, target_id: Tensor | None):
        self.prefix, self.length, self.target_id = prefix, length, target_id
        self.vocab_size = prefix.target.vocab_size if target_id is None else len(target_id)

    def expand(self, growing: GrowingTree, frontier: Frontier, noise: PassNoise | None) -> Draft:
        tree = Tree(growing.token, growing.parent, growing.log_conf, len(growing.levels))
        log_prob = self.prefix.laws(self.length, tree, frontier.node)
        if self.target_id is not None:
            log_prob = log_prob[:, self.target_id]
        log_conf, token = stable_topk(log_prob, frontier.n_candidates)
        token = token if self.target_id is None else self.target_id[token]
        return Draft(token, log_conf, entropy(log_prob))


def entropy(log_prob: Tensor) -> Tensor:
    """Nats `[n]` of log laws `[n, V]`."""
    return torch.special.entr(log_prob.exp()).sum(-1).float()


def best_tree(drafter: OwnLaw, pending: Tensor, budget: int, depth: int) -> np.ndarray:
    """P(accepted) of the nodes of the best tree of `budget` nodes and `depth` levels, the most probable first."""
    policy = BestFirst(budget, batch=CHUNK, top_k=min(budget, drafter.vocab_size), depth=depth)
    growing = grow(drafter, policy, pending)
    return growing.score[policy.select(growing)].exp().numpy(force=True)


@torch.inference_mode()
def appraised(
    part: Part, target: Target, sampling: Sampling, positions: Sequence[int], budget: int, target_id: Tensor | None
) -> Part:
    """The part with the target's opinion of every candidate at some positions.

    Args:
        sampling: how the text was decoded. positions: of the answer. budget: nodes of the best trees.
        target_id: `[vocabulary]`, what the drafter can propose; None for all tokens.
    """
    columns = {name: [None] * part.expansions.num_rows for name in APPRAISAL_SCHEMA.names}
    ids = torch.tensor([*part.text.prompt_ids, *part.text.answer_ids], device=target.device)
    prefix = Prefix(target, ids[:-1], sampling)
    for position in sorted(positions, reverse=True):
        length, pool = len(part.text.prompt_ids) + position, Pool.at(part, position, target.device)
        tree = pool.tree
        log_prob, nats = (torch.zeros(tree.n_nodes + 1, device=target.device) for _ in range(2))
        for node, law in prefix.chunks(length, tree):
            nats[node] = entropy(law)
            child, above = (tree.parent[:, None] == node).nonzero().T
            log_prob[child] = law[above, tree.token[child]].float()
        log_prob, nats = log_prob.numpy(force=True), nats.numpy(force=True)
        ends = 1 + np.cumsum(pool.size)
        for row, end, size in zip(pool.row, ends, pool.size, strict=True):
            columns["target_log_prob"][row] = log_prob[end - size : end]
            columns["target_entropy"][row] = nats[end - size : end]
        root = pool.row[0]
        columns["root_entropy"][root], columns["levels"][root] = nats[0], tree.max_depth
        for name, ids_allowed in (("best", None), ("best_drafted", target_id)):
            own = OwnLaw(prefix, length, ids_allowed)
            columns[name][root] = best_tree(own, ids[length : length + 1], budget, tree.max_depth)
    table = pa.table({name: pa.array(values, APPRAISAL_SCHEMA.field(name).type) for name, values in columns.items()})
    table = table.cast(APPRAISAL_SCHEMA)
    return replace(part, sampled=tuple(sorted(positions)), tree_budget=budget, appraisal=table)
