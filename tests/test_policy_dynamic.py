"""OPT-Tree, best-first and TALON against hand examples and enumeration of the whole tree."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tree_models import (
    HAND,
    VOCAB,
    FakeDrafter,
    HandDrafter,
    Node,
    PathModel,
    SameDrafter,
    Transfers,
    drafted,
    full_tree,
    grown,
    models,
    names_of,
    paths_of,
    selected,
    sizes,
)

from eagle_tree.policy import BestFirst, Eagle2, OptTree, Policy, Talon
from eagle_tree.tree import GrowingTree, Tree

BAD_COUNTS = pytest.mark.parametrize("value", [0, -1, 1.0, "32", True, None, math.nan], ids=repr)


# OPT-Tree


#            root             Best three:
#         ½        ¼          level 1  ½ ¼          sum ¾, gained ¾
#        a          b         level 2  ½ ⅜ ¼        sum 9/8, gained ⅜
#     ¾    ¼     ½   ½        level 3  ½ ⅜ 21/64    gained 5/64
#    au(⅜) av(⅛) bu(⅛) bv(⅛)  level 4  and on: nothing
#   ⅞  ⅛
THREE_LEVELS = {(): [0.5, 0.25], (0,): [0.75, 0.25], (0, 0): [0.875, 0.125]}


@pytest.mark.parametrize(
    ("delta", "levels"),
    [(0.8, 1), (0.7, 2), (0.4, 2), (0.3, 3), (0.08, 3), (0.07, 4), (0.01, 4), (0.0, 6)],
)
def test_opt_tree_ends_with_the_level_that_gained_less_than_delta(delta: float, levels: int):
    policy = OptTree(budget=3, delta=delta, top_k=2, depth=6)
    growing = grown(HandDrafter(THREE_LEVELS, [0.5, 0.5]), policy)
    assert len(growing.levels) == levels
    kept = {1: "a b", 2: "a b au", 3: "a au auu", 4: "a au auu", 6: "a au auu"}
    assert names_of(selected(growing, policy)) == kept[levels]


def expected(scores: list[float], budget: int) -> float:
    return math.fsum(sorted(map(math.exp, scores), reverse=True)[:budget])


opt_trees = st.builds(
    OptTree,
    budget=st.integers(1, 12),
    delta=st.floats(0.001, 1.2),
    top_k=st.integers(1, 4),
    width=st.sampled_from([None, 1, 3]),
    depth=st.integers(1, 5),
)


@settings(max_examples=100, deadline=None)
@given(models, opt_trees)
def test_opt_tree_grows_exactly_while_levels_gain_delta_and_keeps_the_best_of_its_pool(model, policy: OptTree):
    growing, tree = drafted(model, policy)
    scores = growing.score.tolist()
    for level, (start, end) in enumerate(growing.levels, 1):
        gain = expected(scores[1:end], policy.budget) - expected(scores[1:start], policy.budget)
        assume(abs(gain - policy.delta) > 1e-9)
        if level < len(growing.levels):
            assert gain > policy.delta
        else:
            assert gain < policy.delta or level == policy.depth
    for (start, end), (next_start, next_end) in zip(growing.levels, growing.levels[1:]):
        width = min(policy.width or policy.budget, end - start)
        expanded = set(growing.parent[next_start:next_end].tolist())
        assert len(expanded) == width
        assert sorted(scores[node] for node in expanded) == sorted(scores[start:end])[-width:]
    best = sorted(range(1, len(scores)), key=lambda node: (-scores[node], growing.depth[node].item(), node))
    assert policy.select(growing).tolist() == best[: policy.budget]
    assert tree.n_nodes == min(policy.budget, growing.n_nodes)


@settings(max_examples=60, deadline=None)
@given(models, st.builds(OptTree, **sizes, delta=st.just(0.0)))
def test_without_a_delta_opt_tree_grows_to_its_depth(model: PathModel, policy: OptTree):
    assert len(drafted(model, policy)[0].levels) == policy.depth


def test_a_level_that_adds_nothing_is_no_loss_by_rounding():
    """The rounded sum of seven probabilities is not that of the same seven and 23 zeros, where the order differs."""
    for seed in range(50):
        first = torch.rand(7, generator=torch.Generator().manual_seed(seed)).sort(descending=True).values
        drafter = HandDrafter({(): (first / first.sum()).tolist()}, [1e-30] * 7)
        assert len(grown(drafter, OptTree(budget=30, delta=0.0, top_k=7, depth=3)).levels) == 3


# Best-first against the whole tree


def possible(nodes: list[Node]) -> list[Node]:
    return [node for node in nodes if node.score > -math.inf]


def assert_best_of(tree: Tree, nodes: list[Node], budget: int) -> None:
    """The tree's scores are the `budget` best of all; what is better than the last of them is in it for certain."""
    best = sorted((float(node.score) for node in possible(nodes)), reverse=True)[:budget]
    found = sorted((score for score in tree.score[1:].tolist() if score > -math.inf), reverse=True)
    assert found == best
    certain = {node.path[1:] for node in nodes if node.score > best[-1]}
    assert certain <= set(paths_of(tree))


small_models = st.builds(
    lambda model, vocab: PathModel(model.seed, model.logits, model.dtype, vocab), models, st.integers(1, 3)
)


@settings(max_examples=80, deadline=None)
@given(small_models, st.integers(1, 5), st.integers(1, 6))
def test_best_first_is_the_best_of_the_whole_tree(model: PathModel, budget: int, batch: int):
    """A tree of N nodes is at most N deep."""
    policy = BestFirst(budget=budget, batch=batch, top_k=model.vocab, depth=None)
    assert_best_of(drafted(model, policy)[1], full_tree(model, budget), budget)


@settings(max_examples=80, deadline=None)
@given(small_models, st.integers(1, 40), st.integers(1, 8), st.integers(1, 3), st.sampled_from(["policy", "drafter"]))
def test_best_first_is_the_best_of_a_bounded_tree(model: PathModel, budget: int, batch: int, depth: int, bound: str):
    """Whether the policy's depth bounds the tree or the drafter's, which leaves as many rounds: enough if full."""
    if bound == "policy":
        policy, drafter = BestFirst(budget, batch, model.vocab, depth), FakeDrafter(model)
    else:
        policy, drafter = BestFirst(budget, budget, model.vocab, None), FakeDrafter(model, depth)
    assert_best_of(selected(grown(drafter, policy), policy), full_tree(model, depth), budget)


def test_a_node_too_deep_to_be_expanded_blocks_nothing():
    """The best open nodes are au and av, at the last depth; b is open too. A drafter that ends there ends growth."""
    drafter = HandDrafter({(): [0.7, 0.3], (0,): [0.5, 0.5], (1,): [1.0, 0.0]})
    policy = BestFirst(budget=5, batch=1, top_k=2, depth=2)
    assert names_of(selected(grown(drafter, policy), policy)) == "a b au av bu"
    drafter.max_depth = 2
    policy = BestFirst(budget=5, batch=1, top_k=2, depth=None)
    assert names_of(selected(grown(drafter, policy), policy)) == "a b au av"


@settings(max_examples=60, deadline=None)
@given(models, st.integers(1, VOCAB))
def test_eagle2_with_all_candidates_of_all_nodes_is_best_first(model: PathModel, budget: int):
    """N nodes of one level at most can be among the best N: a beam of at least N misses none."""
    eagle2 = drafted(model, Eagle2(budget, top_k=VOCAB, depth=max(1, budget - 1)))[1]
    best_first = drafted(model, BestFirst(budget, batch=2, top_k=VOCAB, depth=None))[1]
    scores, found = eagle2.score[1:].tolist(), best_first.score[1:].tolist()
    assert sorted(scores) == sorted(found)
    last = min(scores)
    certain = [path for path, score in zip(paths_of(eagle2), scores) if score > last]
    assert set(certain) == {path for path, score in zip(paths_of(best_first), found) if score > last}


def test_best_first_by_hand():
    """One node a round: the root, then a (.6), b (.4) and au (.36); what av (.24) leads to comes after it."""
    drafter = HandDrafter(HAND, [0.5, 0.5])
    policy = BestFirst(budget=4, batch=1, top_k=2, depth=None)
    growing = grown(drafter, policy)
    expanded = growing.parent[[start for start, _ in growing.levels]].tolist()
    assert names_of(growing.select(torch.arange(1, growing.n_nodes + 1))[0]) == "a b au av bu bv auu auv"
    assert expanded == [0, 1, 2, 3]
    assert names_of(selected(growing, policy)) == "a b au av"


@pytest.mark.parametrize("probabilities", [[0.6, 0.4], [1.0, 1.0], [1.0, 0.0]], ids=str)
def test_best_first_of_300_nodes_one_at_a_time(probabilities: list[float]):
    """A wide tree, one in which all nodes tie, and a chain: more rounds than a byte can count."""
    policy = BestFirst(budget=300, batch=1, top_k=2, depth=None)
    growing = grown(SameDrafter(probabilities), policy)
    tree = selected(growing, policy)
    assert len(growing.levels) == tree.n_nodes == 300
    if probabilities == [1.0, 0.0]:
        assert tree.parent.tolist() == list(range(-1, 300))
    if probabilities == [1.0, 1.0]:  # at ties the shallower node first: whole levels
        assert torch.bincount(tree.depth).tolist() == [1, 2, 4, 8, 16, 32, 64, 128, 300 - 254]


def test_best_first_never_expands_the_impossible():
    policy = BestFirst(budget=9, batch=4, top_k=2, depth=3)
    growing = grown(HandDrafter({(0, 0): [0.0, 0.0]}, [1.0, 0.0]), policy)
    expanded = growing.parent[[start for start, _ in growing.levels]].tolist()
    assert [growing.score[node].item() for node in expanded] == [0.0, 0.0, 0.0]
    assert names_of(selected(growing, policy)) == "a b au av auu auv"


# TALON

SURE = [0.9, 0.1]
UNSURE = {(): [0.55, 0.45], (0,): [0.6, 0.4], (1,): [0.5, 0.5]}


def test_where_the_drafter_is_sure_talon_is_deep_and_narrow():
    """Of 9 : 1 a gate of .2 lets the better one through: below the root a chain, to the last of the budget."""
    policy = Talon(budget=6, top_k=2, gate=0.2)
    growing = grown(HandDrafter({}, SURE), policy)
    assert names_of(selected(growing, policy)) == "a b au auu auuu auuuu"
    assert [end - start for start, end in growing.levels] == [2] * 5


@pytest.mark.parametrize(
    ("budget", "kept"),
    [
        (1, "a"),
        (2, "a b"),
        (3, "a b au"),  # .33
        (4, "a b au bu"),  # .225
        (5, "a b au bu bv"),  # .225
        (6, "a b au av bu bv"),  # .22
    ],
)
def test_where_the_drafter_is_unsure_talon_is_shallow_and_wide(budget: int, kept: str):
    """All of level 2 is within .2 of its best: whole levels from the top, of the last the best."""
    policy = Talon(budget=budget, top_k=2, gate=0.2)
    growing = grown(HandDrafter(UNSURE, [0.5, 0.5]), policy)
    assert names_of(selected(growing, policy)) == kept
    assert len(growing.levels) == (1 if budget <= 2 else 2)


def test_the_roots_candidates_are_kept_but_expanded_only_above_the_gate():
    policy = Talon(budget=20, top_k=2, gate=0.5, depth=2)
    growing = grown(HandDrafter({(): [0.7, 0.3]}, [0.6, 0.4]), policy)
    assert names_of(selected(growing, policy)) == "a b au av"


def test_a_gate_of_one_keeps_the_best_of_a_level_and_its_equals():
    drafter = HandDrafter({(): [0.6, 0.4], (0, 0): [0.5, 0.5]}, [0.75, 0.25])
    policy = Talon(budget=20, top_k=2, gate=1.0, depth=4)
    assert names_of(selected(grown(drafter, policy), policy)) == "a b au auu auv auuu auvu"


def test_without_a_gate_all_is_kept_but_the_impossible():
    drafter = HandDrafter({(1,): [1.0, 0.0]}, [1 - 2**-24, 1e-38])
    policy = Talon(budget=20, top_k=2, gate=0.0, depth=2)
    assert names_of(selected(grown(drafter, policy), policy)) == "a b au av bu"
    drafter = HandDrafter({}, [1e-38, 1e-38])
    policy = Talon(budget=99, top_k=2, gate=0.0, depth=5)
    assert selected(grown(drafter, policy), policy).n_nodes == 2 + 4 + 8 + 16 + 32


def test_talon_never_keeps_or_expands_the_impossible():
    drafter = HandDrafter({(0,): [0.0, 0.0]}, [1.0, 0.0])
    policy = Talon(budget=9, top_k=2, gate=0.0, depth=5)
    growing = grown(drafter, policy)
    assert names_of(selected(growing, policy)) == "a"
    assert len(growing.levels) == 2


def test_talon_of_a_root_without_candidates_is_the_empty_tree():
    policy = Talon(budget=9, top_k=2, gate=0.5, depth=5)
    growing = grown(HandDrafter({}, [0.0, 0.0]), policy)
    assert (len(growing.levels), selected(growing, policy).n_nodes) == (1, 0)


def talon(growing: GrowingTree, policy: Talon) -> list[list[int]]:
    """The levels that TALON keeps, the best first, in plain Python."""
    scores = growing.score.tolist()
    kept = []
    for level, (start, end) in enumerate(growing.levels):
        worth = {node: math.exp(scores[node]) for node in range(start, end)}
        gate = policy.gate * max(worth.values()) if level else 0.0
        for value in worth.values():
            assume(value == max(worth.values()) or abs(value - gate) > 1e-6 * gate)
        level_nodes = [node for node in worth if worth[node] > 0 and worth[node] >= gate]
        kept.append(sorted(level_nodes, key=lambda node: (-scores[node], node)))
    return kept


@settings(max_examples=100, deadline=None)
@given(models, st.builds(Talon, **sizes, gate=st.sampled_from([0.0, 0.13, 0.57, 1.0])))
def test_talon_keeps_whole_levels_and_the_best_of_the_last(model: PathModel, policy: Talon):
    growing, tree = drafted(model, policy)
    levels = talon(growing, policy)
    *above, last = levels
    assert sum(map(len, above)) < policy.budget
    assert policy.select(growing).tolist() == [node for level in levels for node in level][: policy.budget]
    assert len(levels) == policy.depth or not last or sum(map(len, levels)) >= policy.budget
    assert tree.n_nodes <= policy.budget


# Transfers


@pytest.mark.parametrize(
    ("policy", "levels"),
    [
        (OptTree(budget=20, delta=0.0, top_k=2, depth=5), 5),
        (BestFirst(budget=9, batch=2, top_k=2), 5),
        (Talon(budget=99, top_k=2, gate=0.0, depth=5), 5),
    ],
    ids=repr,
)
def test_a_growth_that_looks_at_confidences_costs_one_transfer_a_level(policy: Policy, levels: int):
    with Transfers() as growth:
        growing = grown(SameDrafter([0.5, 0.5]), policy)
    assert len(growing.levels) == levels
    assert growth.count <= levels
    with Transfers() as selection:
        policy.select(growing)
    assert selection.count == (1 if isinstance(policy, Talon) else 0)  # the number of nodes


# Parameters


@BAD_COUNTS
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((OptTree, name) for name in ("budget", "top_k", "width", "depth")),
        *((BestFirst, name) for name in ("budget", "batch", "top_k", "depth")),
        *((Talon, name) for name in ("budget", "top_k", "depth")),
    ],
)
def test_refuses_what_is_no_integer_of_at_least_1(kind: type, name: str, value: object):
    if value is None and (kind, name) in ((OptTree, "width"), (BestFirst, "depth")):
        return  # no bound
    with pytest.raises(ValueError, match=rf"{kind.__name__}: {name}={value!r} must be an integer >= 1"):
        kind(**{name: value})


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, "0.2", None, True], ids=repr)
def test_opt_tree_refuses_a_delta_that_is_no_number_of_at_least_0(value: object):
    with pytest.raises(ValueError, match=f"OptTree: delta={value!r} must be a number >= 0"):
        OptTree(delta=value)


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, math.inf, "0.2", None, True], ids=repr)
def test_talon_refuses_a_gate_that_is_no_probability(value: object):
    with pytest.raises(ValueError, match=f"Talon: gate={value!r} must be a number in 0…1"):
        Talon(gate=value)


@pytest.mark.parametrize("policy", [OptTree(top_k=7), BestFirst(top_k=7), Talon(top_k=7)], ids=repr)
def test_asks_for_top_k_candidates_at_most(policy: Policy):
    assert policy.max_candidates() == 7
