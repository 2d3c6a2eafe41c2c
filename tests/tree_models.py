"""Drafters that are functions of a path, and plain-Python references: what the tests of tree policies share.

The drafter is a function from a path of tokens to logits over a few tokens. Its logits take few values,
so that exact ties are common; in half precision a confident edge has log-probability exactly 0, so that
parent and child tie too.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eagle_tree.decode import grow
from eagle_tree.drafter.base import Drafter
from eagle_tree.noise import PassNoise
from eagle_tree.policy import (
    Autoregressive,
    BestFirst,
    Chain,
    ConfidenceStop,
    DepthStop,
    Eagle2,
    EntropyStop,
    OptTree,
    Policy,
    Static,
    Talon,
    medusa,
    sequoia,
    specinfer,
)
from eagle_tree.tree import Draft, Frontier, GrowingTree, Tree, stable_topk

VOCAB = 6
ROOT_TOKEN = 3
Path = tuple[int, ...]

# What a drafter's logits are drawn from: fine, coarse, confident, all equal, or some tokens ruled out.
FINE = tuple(math.sqrt(i) / 2 for i in range(60))
COARSE = (0.0, 0.5, 1.0, 2.0)
CONFIDENT = (0.0, 0.0, 0.0, 20.0)
EQUAL = (0.0,)
IMPOSSIBLE = (0.0, 1.0, -math.inf)


# Drafters


@dataclass(frozen=True)
class PathModel:
    """Log-probabilities `[vocab]` as a pure function of the tokens of a path, the pending token first."""

    seed: int
    logits: tuple[float, ...]
    dtype: torch.dtype = torch.float32
    vocab: int = VOCAB

    def log_probs(self, path: Path) -> Tensor:
        dice = random.Random(f"{self.seed} {path}")
        logits = [dice.choice(self.logits) for _ in range(self.vocab)]
        if max(logits) == -math.inf:  # some token must come
            logits[0] = 0.0
        return torch.tensor(logits, dtype=self.dtype).log_softmax(-1)


class FakeDrafter(Drafter):
    """Proposes the best tokens of a `PathModel`, equal ones in token order.

    Attributes:
        asked: every frontier so far, as (nodes, candidates).
    """

    def __init__(self, model: PathModel, max_depth: int | None = None):
        self.model = model
        self.vocab_size = model.vocab
        self.max_depth = max_depth
        self.asked: list[tuple[list[int], int]] = []

    @property
    def calls(self) -> int:
        return len(self.asked)

    def expand(self, growing: GrowingTree, frontier: Frontier, noise: PassNoise | None) -> Draft:
        self.asked.append((frontier.node.tolist(), frontier.n_candidates))
        log_probs = torch.stack([self.model.log_probs(path_of(growing, node)) for node in frontier.node.tolist()])
        token = stable_topk(log_probs, frontier.n_candidates)[1]
        return Draft(token, log_probs.gather(-1, token), torch.special.entr(log_probs.double().exp()).sum(-1).float())


class HandDrafter(Drafter):
    """Probabilities by hand: `table` maps the tokens below the root to those of tokens 0, 1, …, the best first."""

    def __init__(self, table: dict[Path, list[float]], otherwise: list[float] | None = None):
        self.table = table
        self.otherwise = otherwise
        self.vocab_size = max(map(len, [*table.values(), otherwise or []]))

    def expand(self, growing: GrowingTree, frontier: Frontier, noise: PassNoise | None) -> Draft:
        paths = [path_of(growing, node)[1:] for node in frontier.node.tolist()]
        rows = torch.tensor([self.table.get(path, self.otherwise) for path in paths])
        token = torch.arange(frontier.n_candidates).expand(len(paths), -1)
        return Draft(token, rows[:, : frontier.n_candidates].log(), torch.special.entr(rows).sum(-1))


class SameDrafter(Drafter):
    """Proposes the same candidates everywhere and looks at no value: it works on the meta device, which has none."""

    def __init__(self, probabilities: list[float], max_depth: int | None = None, device: str = "cpu"):
        self.row = torch.tensor(probabilities, device=device)
        self.vocab_size = len(probabilities)
        self.max_depth = max_depth

    def expand(self, growing: GrowingTree, frontier: Frontier, noise: PassNoise | None) -> Draft:
        shape = (frontier.node.shape[0], frontier.n_candidates)
        token = torch.arange(shape[1], device=self.row.device).expand(shape)
        entropy = torch.special.entr(self.row).sum().expand(shape[0])
        return Draft(token, self.row[: shape[1]].log().expand(shape), entropy)


#            root
#         0.6    0.4          The product ranks  a .6, au .36, b .4, av .24, bu .2, bv .2
#        a          b         the edge ranks     a .6, au .6, b .4, av .4, bu .5, bv .5
#     .6   .4    .5   .5
#    u      v    u     v
HAND = {(): [0.6, 0.4], (0,): [0.6, 0.4], (1,): [0.5, 0.5]}


def path_of(growing: GrowingTree, node: int) -> Path:
    """Tokens from the root to a pool node."""
    above = () if node == 0 else path_of(growing, growing.parent[node].item())
    return (*above, growing.token[node].item())


def grown(drafter: Drafter | None, policy: Policy) -> GrowingTree:
    """The pool of a policy."""
    return grow(drafter, policy, torch.tensor([ROOT_TOKEN]))


def selected(growing: GrowingTree, policy: Policy) -> Tree:
    """The draft tree of a policy, which is closed."""
    tree, _, closed = growing.select(policy.select(growing))
    assert closed
    return tree


def drafted(model: PathModel, policy: Policy) -> tuple[GrowingTree, Tree]:
    """The pool and the draft tree of a policy; the tree is closed."""
    growing = grown(FakeDrafter(model), policy)
    return growing, selected(growing, policy)


def paths_of(tree: Tree) -> list[Path]:
    """Tokens below the root of every draft node, in the tree's order."""
    return [tuple(tree.token[[node for node in row if node >= 0]].tolist())[1:] for row in tree.paths[1:].tolist()]


NAMES = "abcdefgh", "uvwxyz", "uvwxyz", "uvwxyz", "uvwxyz"


def names_of(tree: Tree) -> str:
    """The draft nodes by name, shallow first: a, b below the root, then au, av, …; `au` is the path of tokens 0, 0."""
    names = ["".join(letters[token] for letters, token in zip(NAMES, path)) for path in paths_of(tree)]
    return " ".join(sorted(names, key=lambda name: (len(name), name)))


@dataclass
class Transfers(TorchDispatchMode):
    """Counts device-to-host transfers while it is entered, as a GPU would have to make them."""

    count: int = field(default=0)

    def __post_init__(self):
        super().__init__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        operation = function.overloadpacket
        by_mask = operation is torch.ops.aten.index and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if by_mask or operation in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero):
            self.count += 1
        return function(*args, **(kwargs or {}))


# Candidates in plain Python


@dataclass
class Node:
    """A candidate; `index` is its place in the pool, 0 the root's."""

    index: int
    parent: int
    depth: int
    path: Path
    log_conf: float
    score: np.float32


ROOT = Node(0, -1, 0, (ROOT_TOKEN,), 0.0, np.float32(0))


def candidates(model: PathModel, parent: Node, top_k: int, first_index: int) -> list[Node]:
    log_probs = model.log_probs(parent.path).tolist()
    best = sorted(range(model.vocab), key=lambda token: (-log_probs[token], token))[:top_k]
    return [
        Node(
            index=first_index + rank,
            parent=parent.index,
            depth=parent.depth + 1,
            path=(*parent.path, token),
            log_conf=log_probs[token],
            score=np.float32(parent.score + np.float32(log_probs[token])),
        )
        for rank, token in enumerate(best)
    ]


def full_tree(model: PathModel, depth: int) -> list[Node]:
    """Every path of at most that many tokens, the root excluded."""
    nodes, level = [ROOT], [ROOT]
    for _ in range(depth):
        above, level = level, []
        for parent in above:
            level += candidates(model, parent, model.vocab, len(nodes) + len(level))
        nodes += level
    return nodes[1:]


def rank_paths(tree: Tree, candidates: Callable[[Path], list[int]]) -> list[Path]:
    """Every node's rank path, from the tokens on its path and what the drafter proposed there."""
    return [
        tuple(candidates((ROOT_TOKEN, *path[:end])).index(token) for end, token in enumerate(path))
        for path in paths_of(tree)
    ]


def best_tokens(model: PathModel) -> Callable[[Path], list[int]]:
    """All tokens after a path, the best first, equal ones in token order."""

    def ranked(path: Path) -> list[int]:
        log_probs = model.log_probs(path).tolist()
        return sorted(range(model.vocab), key=lambda token: (-log_probs[token], token))

    return ranked


def closed_subtrees(parent: list[int]) -> Iterator[tuple[int, ...]]:
    """Every set of nodes, the root 0 excluded, that holds the parents of its nodes (`parent[i] < i`)."""
    if len(parent) == 1:
        yield ()
        return
    node = len(parent) - 1
    for kept in closed_subtrees(parent[:-1]):
        yield kept
        if parent[node] in (0, *kept):
            yield (*kept, node)


# What hypothesis draws

models = st.builds(
    PathModel,
    seed=st.integers(0, 10**6),
    logits=st.sampled_from([FINE, COARSE, CONFIDENT, EQUAL, IMPOSSIBLE, (*COARSE, *CONFIDENT)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
sizes = dict(budget=st.integers(1, 60), top_k=st.integers(1, 4), depth=st.integers(1, 4))
rates = st.lists(st.integers(0, 8), min_size=1, max_size=4).map(
    lambda counts: [n / (16 if sum(counts) <= 16 else 32) for n in counts]
)
"""Acceptance by rank: products and sums of a few are exact, so that ties are too."""

accuracies = st.lists(
    st.tuples(st.integers(1, 16), st.integers(0, 8), st.integers(0, 8)).map(lambda row: [n / 16 for n in row]),
    min_size=1,
    max_size=4,
)
"""Accuracy by depth and rank, in sixteenths."""

closed_choices = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=12).map(
    lambda paths: [list(path) for path in {tuple(path[:end]) for path in paths for end in range(1, len(path) + 1)}]
)

FIXED: dict[type | Callable, st.SearchStrategy[Policy]] = {
    Autoregressive: st.builds(Autoregressive),
    Chain: st.builds(Chain, st.integers(1, 6)),
    Static: st.builds(Static, closed_choices),
    specinfer: st.builds(specinfer, st.lists(st.integers(1, 3), min_size=1, max_size=3)),
    medusa: st.builds(medusa, accuracies, st.integers(1, 20)),
    sequoia: st.builds(sequoia, rates, st.integers(1, 4), st.integers(4, 6)),
}
DYNAMIC: dict[type, st.SearchStrategy[Policy]] = {
    Eagle2: st.builds(Eagle2, **sizes, value=st.booleans(), rerank=st.booleans()),
    OptTree: st.builds(
        OptTree,
        **{**sizes, "budget": st.integers(1, 20)},
        delta=st.sampled_from([0.0, 0.1, 0.5]),
        width=st.sampled_from([None, 1, 3]),
    ),
    BestFirst: st.builds(
        BestFirst,
        budget=st.integers(1, 20),
        batch=st.integers(1, 5),
        top_k=st.integers(1, VOCAB),
        depth=st.sampled_from([None, 1, 3]),
    ),
    Talon: st.builds(Talon, **sizes, gate=st.sampled_from([0.0, 0.1, 0.5, 1.0])),
}
inner = st.one_of(FIXED[Chain], FIXED[Static], DYNAMIC[Eagle2], DYNAMIC[OptTree], DYNAMIC[BestFirst])
STOPS: dict[type, st.SearchStrategy[Policy]] = {
    DepthStop: st.builds(DepthStop, inner, st.integers(1, 4)),
    ConfidenceStop: st.builds(
        ConfidenceStop, inner, beam=st.integers(1, 5), threshold=st.sampled_from([0.0, 0.3, 0.9])
    ),
    EntropyStop: st.builds(EntropyStop, inner, threshold=st.sampled_from([0.0, 0.7, 1.2])),
}
ALL_POLICIES = {**FIXED, **DYNAMIC, **STOPS}
every_policy = st.one_of(*ALL_POLICIES.values())


def most_nodes(policy: Policy) -> int:
    """The budget of any policy."""
    match policy:
        case Autoregressive():
            return 0
        case Chain():
            return policy.depth
        case Static():
            return len(policy.choices)
        case DepthStop():
            return most_nodes(policy.policy)
    return policy.budget
