"""The seam that every policy keeps, and EAGLE-2 against plain Python: lists, loops and `sorted`, node for node."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hydra.errors import InstantiationException
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from tree_models import (
    ALL_POLICIES,
    COARSE,
    CONFIDENT,
    DYNAMIC,
    HAND,
    ROOT,
    ROOT_TOKEN,
    FakeDrafter,
    HandDrafter,
    Node,
    PathModel,
    SameDrafter,
    candidates,
    drafted,
    every_policy,
    grown,
    models,
    most_nodes,
    names_of,
    selected,
    sizes,
)

from eagle_tree.apps import common
from eagle_tree.decode import grow
from eagle_tree.policy import (
    Autoregressive,
    BestFirst,
    Chain,
    Eagle2,
    Policy,
    Static,
    greedy_closed,
    measured,
    specinfer,
)
from eagle_tree.policy.stops import DepthStop
from eagle_tree.tree import Draft, Frontier, GrowingTree, Tree

EVERY_POLICY = pytest.mark.parametrize("kind", ALL_POLICIES, ids=lambda kind: kind.__name__)


# Every policy


@EVERY_POLICY
@settings(max_examples=40, deadline=None)
@given(model=models, data=st.data())
def test_every_tree_is_closed_within_its_budget_and_siblings_differ(kind, model: PathModel, data: st.DataObject):
    policy = data.draw(ALL_POLICIES[kind])
    drafter = FakeDrafter(model)
    tree = selected(grown(drafter, policy), policy)
    assert tree.n_nodes <= most_nodes(policy)
    edges = list(zip(tree.parent.tolist(), tree.token.tolist()))
    assert len(set(edges)) == len(edges)
    assert all(asked <= policy.max_candidates() for _, asked in drafter.asked)
    expanded = [node for nodes, _ in drafter.asked for node in nodes]
    assert len(set(expanded)) == len(expanded)  # no node twice


@pytest.mark.parametrize("kind", DYNAMIC, ids=lambda kind: kind.__name__)
@settings(max_examples=40, deadline=None)
@given(model=models, data=st.data())
def test_on_one_pool_a_larger_budget_only_adds_nodes(kind, model: PathModel, data: st.DataObject):
    """Whatever these policies select is the head of one order of the pool.

    On pools of their own this holds for EAGLE-2 alone, which grows without regard to the budget. Nor do the
    trees of Sequoia nest (test_policy_fixed.py).
    """
    policy = data.draw(DYNAMIC[kind])
    growing = grown(FakeDrafter(model), policy)
    larger = replace(policy, budget=policy.budget + 1)
    assert set(policy.select(growing).tolist()) <= set(larger.select(growing).tolist())


@settings(max_examples=60, deadline=None)
@given(models, every_policy, st.integers(1, 4))
def test_no_policy_expands_a_node_below_which_the_drafter_cannot_propose(model: PathModel, policy: Policy, limit: int):
    growing = grown(FakeDrafter(model, limit), policy)
    assert growing.depth.max() <= limit
    assert growing.depth[growing.parent[1:]].max() < limit if growing.n_nodes else True
    selected(growing, policy)


# A policy that asks no value of the device grows and selects on the meta device, where tensors have none.

BLIND = [
    Chain(6),
    specinfer([2, 2, 1, 1]),
    Static([[0], [1], [1, 0], [1, 0, 0], [1, 0, 0, 0]]),
    *(Eagle2(9, 2, 4, value, rerank) for value in (True, False) for rerank in (True, False)),
    DepthStop(Eagle2(9, 2, 4), 3),
]


@pytest.mark.parametrize("max_depth", [None, 1, 2], ids=lambda limit: f"max_depth={limit}")
@pytest.mark.parametrize("policy", BLIND, ids=repr)
def test_a_fixed_growth_costs_no_transfer_even_where_the_drafter_ends_it(policy: Policy, max_depth: int | None):
    drafter = SameDrafter([0.6, 0.4], max_depth, "meta")
    growing = grow(drafter, policy, torch.zeros(1, dtype=torch.int64, device="meta"))
    policy.select(growing)
    assert len(growing.levels) == max_depth or max_depth is None


def test_the_meta_device_tells_a_growth_that_asks_for_values():
    with pytest.raises(NotImplementedError):
        drafter = SameDrafter([0.6, 0.4], None, "meta")
        grow(drafter, BestFirst(3, 2, 2), torch.zeros(1, dtype=torch.int64, device="meta"))


@pytest.mark.parametrize("name", sorted(path.stem for path in (common.conf_dir() / "policy").glob("*.yaml")))
def test_every_config_builds_a_policy_or_says_what_to_measure_first(name: str, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # no measurements here
    monkeypatch.setattr(measured, "BUNDLED", tmp_path / "accuracy.json")
    config = OmegaConf.load(common.conf_dir() / "policy" / f"{name}.yaml")
    if config["_target_"].endswith(("from_folder", "from_file")):
        # hydra wraps what a policy inside another raises
        with pytest.raises((FileNotFoundError, InstantiationException), match=r"`eagle-tree (calibrate|evaluate)"):
            common.build_policy(config)
        return
    policy = common.build_policy(config)
    assert isinstance(policy, Policy)
    assert drafted(PathModel(0, COARSE, vocab=12), policy)[1].n_nodes <= most_nodes(policy)


# EAGLE-2 in plain Python

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
    levels = [candidates(model, ROOT, top_k, 1)]
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


@settings(max_examples=100, deadline=None)
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
    policy = Eagle2(budget=59, top_k=10, depth=5)
    growing = grown(FakeDrafter(PathModel(0, COARSE, vocab=12)), policy)
    tree = selected(growing, policy)
    assert (growing.n_nodes, growing.depth.max().item(), len(growing.levels)) == (510, 6, 6)
    assert tree.n_nodes == 59


# By hand


@pytest.mark.parametrize(
    "switches, kept",
    [
        ({}, "a b au av"),
        ({"value": False}, "a b au bu"),
        ({"rerank": False}, "a b au av"),
        ({"value": False, "rerank": False}, "a b au bu"),
    ],
    ids=str,
)
def test_the_switches_of_the_ablation_by_hand(switches: dict, kept: str):
    policy = Eagle2(budget=4, top_k=2, depth=1, **switches)
    assert names_of(selected(grown(HandDrafter(HAND), policy), policy)) == kept


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


def test_autoregressive_decoding_is_the_empty_tree_without_a_drafter():
    growing = grown(None, Autoregressive())
    tree = selected(growing, Autoregressive())
    assert (tree.token.tolist(), tree.n_nodes, growing.levels) == ([ROOT_TOKEN], 0, ())
    assert Autoregressive().max_candidates() == 0


def test_eagle2_asks_for_top_k_candidates_at_most():
    assert Eagle2(top_k=7).max_candidates() == 7


# Parameters

BAD_VALUES = pytest.mark.parametrize("value", [0, -1, 1.0, 2.5, "32", True, None, math.nan], ids=repr)


@BAD_VALUES
@pytest.mark.parametrize("name", ["budget", "top_k", "depth"])
def test_eagle2_refuses_what_is_no_integer_of_at_least_1(name: str, value: object):
    with pytest.raises(ValueError, match=rf"Eagle2: {name}={value!r} must be an integer >= 1"):
        Eagle2(**{name: value})
