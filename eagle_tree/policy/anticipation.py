"""Does a policy look ahead? Whether it may be used on children that are drawn by chance.

A rule that reads q is exact if a child, given that it is there, has the law it was drawn from. So whether a node is
kept may depend on what was drawn before it (the levels above, its earlier siblings), and not on its own token or later
ones: of two children of which the better one is kept, the kept one is no draw from q (DESIGN §4).
"""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_tree.policy.base import Policy
from eagle_tree.tree import Draft, Frontier, GrowingTree

TRIALS, SCALES, MOST_ROUNDS = 8, (0.3, 1.0, 4.0), 16
FOUND: dict[int, tuple[weakref.ref, str | None]] = {}
"""Policies that were run already, as objects: equal ones need not do the same."""


@dataclass(frozen=True)
class Change:
    """From where on two drafts differ: the candidates of that rank and later ones of a level, and all levels below."""

    level: int
    rank: int


def looks_ahead(policy: Policy) -> str | None:
    """What a policy does that it must not do on drawn children, in words; None if it was not seen to.

    The policy is run on random drafts that differ only from one draw on; what it keeps of the nodes that were drawn
    before, and the one drawn there, must be the same.
    """
    known = FOUND.get(id(policy))
    if known is None or known[0]() is not policy:
        known = FOUND[id(policy)] = weakref.ref(policy), fault_of(policy)
    return known[1]


def fault_of(policy: Policy) -> str | None:
    """What `looks_ahead` returns, found anew."""
    for trial in range(TRIALS):
        pool, kept = grown(policy, trial, None)
        for level, (start, end) in enumerate(pool.levels):
            candidates = int(pool.rank[start:end].max()) + 1
            change = Change(level, trial % candidates)
            _, other = grown(policy, trial, change)
            before = [node for node in range(1, end) if node < start or pool.rank[node] <= change.rank]
            for node in before:
                if (node in kept) != (node in other):
                    own = node >= start and pool.rank[node] == change.rank
                    return f"keeps a node or not by {'its own drawn token' if own else 'tokens drawn after it'}"
    return None


def grown(policy: Policy, trial: int, change: Change | None) -> tuple[GrowingTree, set[int]]:
    """A pool of random candidates, and the indices that the policy keeps of it."""
    policy = copy.deepcopy(policy)  # those that learn must not learn from this
    growing, draft = GrowingTree.from_root(torch.zeros(1, dtype=torch.int64)), None
    for level in range(MOST_ROUNDS):
        frontier = policy.frontier(growing, draft)
        if frontier is None:
            break
        draft = random_draft(frontier, trial, level, change)
        growing = growing.append(frontier, draft)
    return growing, set(policy.select(growing).tolist())


def random_draft(frontier: Frontier, trial: int, level: int, change: Change | None) -> Draft:
    """Candidates that depend on trial and level, and from `change` on are others."""
    shape = (frontier.node.shape[0], frontier.n_candidates)
    after = change is not None and level > change.level
    token, log_conf, entropy = drawn(shape, trial, level, after)
    if change is not None and level == change.level:
        other_token, other_conf, _ = drawn(shape, trial, level, True)
        later = torch.arange(shape[1]) >= change.rank
        token, log_conf = torch.where(later, other_token, token), torch.where(later, other_conf, log_conf)
    return Draft(token, log_conf, entropy)


def drawn(shape: tuple[int, int], trial: int, level: int, other: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Random tokens and log confidences `[F, K]` and entropies `[F]`."""
    generator = torch.Generator().manual_seed(1000 * trial + 2 * level + other)
    token = torch.randint(1 << 20, shape, generator=generator)
    scale = SCALES[trial % len(SCALES)]
    log_conf = scale * torch.rand(shape, generator=generator).log()
    return token, log_conf, scale * torch.rand(shape[0], generator=generator)
