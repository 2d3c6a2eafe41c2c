"""Tree policies against plain Python: lists, loops and `sorted`, compared node for node.

The drafter is a function from a path of tokens to logits over a few tokens. Its logits take few values,
so that exact ties are common; in half precision a confident edge has log-probability exactly 0, so that
parent and child tie too.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle_tree.apps.common import conf_dir
from eagle_tree.decode import grow
from eagle_tree.drafter.base import Drafter
from eagle_tree.noise import Noise
from eagle_tree.policy import Autoregressive, Chain, Eagle2, Policy, Static, greedy_closed
from eagle_tree.tree import Draft, Frontier, GrowingTree, Tree, stable_topk

VOCAB = 6
ROOT_TOKEN = 3
Path = tuple[int, ...]

# What a drafter's logits are drawn from: fine, coarse, confident, or all equal.
FINE = tuple(i / 101 for i in range(500))
COARSE = (0.0, 0.5, 1.0, 2.0)
CONFIDENT = (0.0, 0.0, 0.0, 20.0)
EQUAL = (0.0,)


@dataclass(frozen=True)
class PathModel:
    """Log-probabilities `[VOCAB]` as a pure function of the tokens of a path, the pending token first."""

    seed: int
    logits: tuple[float, ...]
    dtype: torch.dtype = torch.float32

    def log_probs(self, path: Path) -> Tensor:
        dice = random.Random(f"{self.seed} {path}")
        logits = torch.tensor([dice.choice(self.logits) for _ in range(VOCAB)], dtype=self.dtype)
        return logits.log_softmax(-1)


class FakeDrafter(Drafter):
    """Proposes the best tokens of a `PathModel`, equal ones in token order."""

    vocab_size = VOCAB

    def __init__(self, model: PathModel):
        self.model = model
        self.calls = 0

    def expand(self, growing: GrowingTree, frontier: Frontier, noise: Noise) -> Draft:
        self.calls += 1
        log_probs = torch.stack([self.model.log_probs(path_of(growing, node)) for node in frontier.node.tolist()])
        token = stable_topk(log_probs, frontier.n_candidates)[1]
        return Draft(token, log_probs.gather(-1, token), log_probs.new_zeros(len(token)))


def path_of(growing: GrowingTree, node: int) -> Path:
    """Tokens from the root to a pool node."""
    above = () if node == 0 else path_of(growing, growing.parent[node].item())
    return (*above, growing.token[node].item())


def drafted(model: PathModel, policy: Policy) -> tuple[GrowingTree, Tree]:
    """The pool and the draft tree of a policy; the tree is closed."""
    growing = grow(FakeDrafter(model), policy, torch.tensor([ROOT_TOKEN]), Noise(0, 0))
    tree, _, closed = growing.select(policy.select(growing))
    assert closed
    return growing, tree


# EAGLE-2 in plain Python


@dataclass
class Node:
    """A candidate; `index` is its place in the pool, 0 the root's."""

    index: int
    parent: int
    depth: int
    path: Path
    log_conf: float
    score: np.float32


def candidates(model: PathModel, parent: Node, top_k: int, first_index: int) -> list[Node]:
    log_probs = model.log_probs(parent.path).tolist()
    best = sorted(range(VOCAB), key=lambda token: (-log_probs[token], token))[:top_k]
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


Criterion = Callable[[Node], float]


def path_product(node: Node) -> float:
    return float(node.score)


def edge_confidence(node: Node) -> float:
    return node.log_conf


def best(nodes: list[Node], count: int, criterion: Criterion) -> list[Node]:
    """The best nodes, in pool order."""
    ranked = sorted(nodes, key=lambda node: (-criterion(node), node.depth, node.index))
    return sorted(ranked[:count], key=lambda node: node.index)


def expansion_phase(model: PathModel, top_k: int, depth: int, criterion: Criterion) -> list[list[Node]]:
    """The levels of the pool: the root's top-k, then `depth` rounds that expand the best k of the level before."""
    root = Node(0, -1, 0, (ROOT_TOKEN,), 0.0, np.float32(0))
    levels = [candidates(model, root, top_k, 1)]
    for _ in range(depth):
        level: list[Node] = []
        for node in best(levels[-1], top_k, criterion):
            level += candidates(model, node, top_k, levels[-1][-1].index + 1 + len(level))
        levels.append(level)
    return levels


def greedily_parent_first(pool: list[Node], budget: int, criterion: Criterion) -> list[Node]:
    """One after the other, the best node whose parent is kept already."""
    kept: list[Node] = []
    while len(kept) < min(budget, len(pool)):
        indices = {0, *(node.index for node in kept)}
        open_nodes = [node for node in pool if node.parent in indices and node.index not in indices]
        kept += best(open_nodes, 1, criterion)
    return sorted(kept, key=lambda node: node.index)


def eagle2(model: PathModel, policy: Eagle2) -> list[Node]:
    """What EAGLE-2 keeps, in pool order, for any setting of the two switches."""
    criterion = path_product if policy.value else edge_confidence
    levels = expansion_phase(model, policy.top_k, policy.depth, criterion)
    pool = [node for level in levels for node in level]
    if not policy.rerank:
        beams = [node for level in levels for node in best(level, policy.top_k, criterion)]
        return beams[: policy.budget]
    if not policy.value:
        return greedily_parent_first(pool, policy.budget, criterion)
    return best(pool, policy.budget, criterion)


def assert_same_tree(tree: Tree, nodes: list[Node]) -> None:
    """Tokens, parents and fp32 scores, node for node."""
    place = {0: 0, **{node.index: number for number, node in enumerate(nodes, 1)}}
    assert tree.token.tolist() == [ROOT_TOKEN, *(node.path[-1] for node in nodes)]
    assert tree.parent.tolist() == [-1, *(place[node.parent] for node in nodes)]
    assert tree.depth.tolist() == [0, *(node.depth for node in nodes)]
    assert tree.score.tolist() == [0.0, *(float(node.score) for node in nodes)]


models = st.builds(
    PathModel,
    seed=st.integers(0, 10**6),
    logits=st.sampled_from([FINE, COARSE, CONFIDENT, EQUAL, (*COARSE, *CONFIDENT)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
sizes = dict(budget=st.integers(1, 60), top_k=st.integers(1, 4), depth=st.integers(1, 4))


@settings(max_examples=150, deadline=None)
@given(models, st.builds(Eagle2, **sizes))
def test_eagle2_keeps_the_nodes_of_the_plain_reference(model: PathModel, policy: Eagle2):
    growing, tree = drafted(model, policy)
    k = policy.top_k
    assert growing.n_nodes == k + policy.depth * k**2
    assert growing.depth.max() == len(growing.levels) == policy.depth + 1
    assert tree.n_nodes == min(policy.budget, growing.n_nodes)
    assert_same_tree(tree, eagle2(model, policy))


@settings(max_examples=80, deadline=None)
@given(models, st.builds(Eagle2, **sizes, value=st.just(False)))
def test_without_value_nodes_are_ranked_by_their_own_edge_and_kept_parent_first(model: PathModel, policy: Eagle2):
    growing, tree = drafted(model, policy)
    assert tree.n_nodes == min(policy.budget, growing.n_nodes)
    assert_same_tree(tree, eagle2(model, policy))


@settings(max_examples=80, deadline=None)
@given(models, st.builds(Eagle2, **sizes, value=st.booleans(), rerank=st.just(False)))
def test_without_rerank_the_beams_of_the_expansion_phase_are_kept(model: PathModel, policy: Eagle2):
    _, tree = drafted(model, policy)
    assert tree.n_nodes == min(policy.budget, policy.top_k * (policy.depth + 1))
    assert_same_tree(tree, eagle2(model, policy))


def test_the_reference_meets_ties_between_parent_and_child_and_between_siblings():
    """The comparison above is empty where nothing ties: it is not."""
    levels = expansion_phase(PathModel(0, CONFIDENT, torch.bfloat16), 3, 3, path_product)
    nodes = {node.index: node for level in levels for node in level}
    assert any(node.parent and node.score == nodes[node.parent].score for node in nodes.values())
    assert any(
        a.parent == b.parent and a.score == b.score for a in nodes.values() for b in nodes.values() if a is not b
    )


def test_the_published_setting_grows_a_pool_of_510_and_keeps_59():
    """EAGLE-2's evaluation scripts: total 60 with the root, top-k 10, depth 5; here the vocabulary has 12 tokens."""

    class Flat(FakeDrafter):
        vocab_size = 12

        def expand(self, growing: GrowingTree, frontier: Frontier, noise: Noise) -> Draft:
            self.calls += 1
            log_conf = torch.arange(1, 11).neg().float().expand(len(frontier.node), 10)
            return Draft(torch.arange(10).expand(len(frontier.node), 10), log_conf, log_conf[:, 0])

    drafter, policy = Flat(PathModel(0, EQUAL)), Eagle2(budget=59, top_k=10, depth=5)
    growing = grow(drafter, policy, torch.tensor([0]), Noise(0, 0))
    tree, _, closed = growing.select(policy.select(growing))
    assert (growing.n_nodes, growing.depth.max().item(), drafter.calls) == (510, 6, 6)
    assert tree.n_nodes == 59 and closed


# By hand

#            root
#         0.6    0.4          The product ranks  a .6, ax .36, b .4, ay .24, bx .2, by .2
#        a          b         the edge ranks     a .6, ax .6, b .4, ay .4, bx .5, by .5
#     .6   .4    .5   .5
#    x      y    x     y
HAND = {(): [0.6, 0.4], (0,): [0.6, 0.4], (1,): [0.5, 0.5]}


class HandDrafter(Drafter):
    vocab_size = 2

    def expand(self, growing: GrowingTree, frontier: Frontier, noise: Noise) -> Draft:
        rows = [HAND[path_of(growing, node)[1:]] for node in frontier.node.tolist()]
        log_conf = torch.tensor(rows).log()
        return Draft(torch.arange(2).expand(len(rows), 2), log_conf, log_conf[:, 0])


@pytest.mark.parametrize(
    "switches, kept",
    [
        ({}, "a b ax ay"),
        ({"value": False}, "a b ax bx"),
        ({"rerank": False}, "a b ax ay"),
        ({"value": False, "rerank": False}, "a b ax bx"),
    ],
    ids=str,
)
def test_the_switches_of_the_ablation_by_hand(switches: dict, kept: str):
    policy = Eagle2(budget=4, top_k=2, depth=1, **switches)
    growing = grow(HandDrafter(), policy, torch.tensor([7]), Noise(0, 0))
    names = {}
    for node in range(1, growing.n_nodes + 1):
        first, *second = path_of(growing, node)[1:]
        names[node] = "ab"[first] + "".join("xy"[token] for token in second)
    assert {names[node] for node in policy.select(growing).tolist()} == set(kept.split())


def test_an_impossible_edge_is_kept_last_but_before_an_orphan():
    """Node 1's edge has probability 0, its child 3's has 1: 3 opens only once 1 is kept."""
    growing = GrowingTree.from_root(torch.tensor([0]))
    growing = growing.append(
        Frontier(torch.tensor([0]), 2), Draft(torch.tensor([[1, 2]]), torch.tensor([[-math.inf, -1.0]]), torch.zeros(1))
    )
    growing = growing.append(
        Frontier(torch.tensor([1]), 1), Draft(torch.tensor([[3]]), torch.tensor([[0.0]]), torch.zeros(1))
    )
    assert [greedy_closed(growing, growing.log_conf, budget).tolist() for budget in (1, 2, 3)] == [
        [2],
        [2, 1],
        [2, 1, 3],
    ]


# Small and large settings


@pytest.mark.parametrize("switches", [{}, {"value": False}], ids=str)
def test_a_budget_above_the_pool_keeps_it_whole(switches: dict):
    growing, tree = drafted(PathModel(1, COARSE), Eagle2(budget=10_000, top_k=3, depth=2, **switches))
    assert tree.n_nodes == growing.n_nodes == 3 + 2 * 9


def test_a_beam_of_one_is_a_chain():
    model = PathModel(2, COARSE)
    _, tree = drafted(model, Eagle2(budget=100, top_k=1, depth=4))
    _, chain = drafted(model, Chain(depth=5))
    assert tree.token.tolist() == chain.token.tolist()
    assert tree.parent.tolist() == chain.parent.tolist() == [-1, 0, 1, 2, 3, 4]


def test_a_beam_of_two_yields_a_tree_smaller_than_the_published_budget():
    growing, tree = drafted(PathModel(2, COARSE), Eagle2(budget=59, top_k=2, depth=5))
    assert tree.n_nodes == growing.n_nodes == 2 + 5 * 4


# Chain, autoregressive


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_a_chain_follows_the_drafters_first_choices(depth: int):
    model, drafter = PathModel(5, COARSE), FakeDrafter(PathModel(5, COARSE))
    growing = grow(drafter, Chain(depth), torch.tensor([ROOT_TOKEN]), Noise(0, 0))
    path = [ROOT_TOKEN]
    for _ in range(depth):
        log_probs = model.log_probs(tuple(path)).tolist()
        path.append(log_probs.index(max(log_probs)))
    tree, _, closed = growing.select(Chain(depth).select(growing))
    assert closed
    assert tree.token.tolist() == path
    assert tree.parent.tolist() == list(range(-1, depth))
    assert drafter.calls == depth
    assert Chain(depth).max_candidates() == 1


def test_autoregressive_decoding_is_the_empty_tree_without_a_drafter():
    growing = grow(None, Autoregressive(), torch.tensor([ROOT_TOKEN]), Noise(0, 0))
    tree, _, closed = growing.select(Autoregressive().select(growing))
    assert closed
    assert (tree.token.tolist(), tree.n_nodes, growing.levels) == ([ROOT_TOKEN], 0, ())
    assert Autoregressive().max_candidates() == 0


def test_eagle2_asks_for_top_k_candidates_at_most():
    assert Eagle2(top_k=7).max_candidates() == 7


# Static trees


def rank_paths(tree: Tree, candidates: Callable[[Path], list[int]]) -> list[Path]:
    """Every node's rank path, from the tokens on its path and what the drafter proposed there."""
    found = []
    for node in range(1, tree.n_nodes + 1):
        tokens: list[int] = []
        while node >= 0:
            tokens.insert(0, tree.token[node].item())
            node = tree.parent[node].item()
        steps = range(1, len(tokens))
        found.append(tuple(candidates(tuple(tokens[:end])).index(tokens[end]) for end in steps))
    return found


def best_tokens(model: PathModel) -> Callable[[Path], list[int]]:
    """All tokens after a path, the best first, equal ones in token order."""

    def ranked(path: Path) -> list[int]:
        log_probs = model.log_probs(path).tolist()
        return sorted(range(VOCAB), key=lambda token: (-log_probs[token], token))

    return ranked


EAGLE_1 = yaml.safe_load((conf_dir() / "policy" / "eagle1.yaml").read_text())["choices"]


def test_a_static_tree_by_hand():
    """
        root            level 1: 3 candidates of the root, pool 1 2 3; rank 1 is not in the tree
        0     2         level 2: the nodes 1 and 3 have children, the highest rank is 1: pool 4 5 and 6 7
      0 1     1         level 3: node 5 alone, the highest rank is 0: pool 8
        0
    """  # fmt: skip
    policy = Static([[0, 1, 0], [0], [2], [2, 1], [0, 0], [0, 1]])
    model, frontiers = PathModel(3, FINE), []

    class Watching(FakeDrafter):
        def expand(self, growing: GrowingTree, frontier: Frontier, noise: Noise) -> Draft:
            frontiers.append((frontier.node.tolist(), frontier.n_candidates))
            return super().expand(growing, frontier, noise)

    growing = grow(Watching(model), policy, torch.tensor([ROOT_TOKEN]), Noise(0, 0))
    assert frontiers == [([0], 3), ([1, 3], 2), ([5], 1)]
    assert growing.n_nodes == 8
    assert policy.select(growing).tolist() == [1, 3, 4, 5, 7, 8]
    assert policy.max_candidates() == 3
    tree, _, closed = growing.select(policy.select(growing))
    assert closed
    assert rank_paths(tree, best_tokens(model)) == [(0,), (2,), (0, 0), (0, 1), (2, 1), (0, 1, 0)]


closed_choices = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=12).map(
    lambda paths: [list(path) for path in {tuple(path[:end]) for path in paths for end in range(1, len(path) + 1)}]
)


@settings(max_examples=60, deadline=None)
@given(models, closed_choices)
def test_a_static_tree_has_exactly_its_rank_paths(model: PathModel, choices: list[list[int]]):
    policy = Static(choices)
    for _ in range(2):  # what is computed once serves every pass
        _, tree = drafted(model, policy)
        expected = sorted(map(tuple, choices), key=lambda path: (len(path), path))
        assert rank_paths(tree, best_tokens(model)) == expected


def test_eagle_1_has_25_nodes_in_5_levels():
    """The released tree (mc_sim_7b_63): 4, 8, 8, 3 and 2 nodes; the drafter runs once a level."""
    drafter, policy = FakeDrafter(PathModel(4, COARSE)), Static(EAGLE_1)
    growing = grow(drafter, policy, torch.tensor([ROOT_TOKEN]), Noise(0, 0))
    tree, _, closed = growing.select(policy.select(growing))
    assert closed and drafter.calls == 5
    assert torch.bincount(tree.depth).tolist() == [1, 4, 8, 8, 3, 2]
    assert sorted(rank_paths(tree, best_tokens(drafter.model))) == sorted(map(tuple, EAGLE_1))


def test_a_static_tree_that_was_grown_in_part_keeps_its_upper_levels():
    policy, drafter = Static(EAGLE_1), FakeDrafter(PathModel(4, COARSE))
    growing = GrowingTree.from_root(torch.tensor([ROOT_TOKEN]))
    for nodes in (4, 12):
        frontier = policy.frontier(growing, None)
        growing = growing.append(frontier, drafter.expand(growing, frontier, Noise(0, 0)))
        assert len(policy.select(growing)) == nodes


def test_static_trees_of_one_shape_are_equal_and_can_be_keys():
    assert len({Static([[0], [0, 1]]), Static(((0,), (0, 1)))}) == 1
    assert repr(Static([[0]])) == "Static(choices=((0,),))"


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([], "choices is empty"),
        ([[0], [1, 0]], r"hold \[1, 0\] but not its parent \[1\]"),
        ([[0], [0, 1, 2]], r"hold \[0, 1, 2\] but not its parent \[0, 1\]"),
        ([[0], [1], [0]], r"hold \[0\] twice"),
        ([[0], []], r"hold the root \[\]"),
        ([[0], [-1]], r"\[-1\], whose ranks must be integers >= 0"),
        ([[True]], r"\[True\], whose ranks"),
        ([[0.0]], r"\[0.0\], whose ranks"),
        ([["0"]], r"\['0'\], whose ranks"),
    ],
    ids=repr,
)
def test_static_refuses_paths_that_draw_no_tree(choices: list, message: str):
    with pytest.raises(ValueError, match=f"Static: choices.*{message}|Static: {message}"):
        Static(choices)


# Parameters

BAD_VALUES = pytest.mark.parametrize("value", [0, -1, 1.0, 2.5, "32", True, None, math.nan], ids=repr)


@BAD_VALUES
@pytest.mark.parametrize("name", ["budget", "top_k", "depth"])
def test_eagle2_refuses_what_is_no_integer_of_at_least_1(name: str, value: object):
    with pytest.raises(ValueError, match=rf"Eagle2: {name}={value!r} must be an integer >= 1"):
        Eagle2(**{name: value})


@BAD_VALUES
def test_a_chain_refuses_what_is_no_integer_of_at_least_1(value: object):
    with pytest.raises(ValueError, match=rf"Chain: depth={value!r} must be an integer >= 1"):
        Chain(depth=value)
