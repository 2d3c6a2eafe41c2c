"""The p-oracle against enumeration: no closed subtree of the pool holds more of the target's text."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from tree_models import (
    DYNAMIC,
    HAND,
    FakeDrafter,
    HandDrafter,
    PathModel,
    closed_subtrees,
    every_policy,
    grown,
    models,
    names_of,
    path_of,
)

from eagle_tree.policy import BestFirst, Chain, Eagle2, OptTree, Policy, hindsight, specinfer
from eagle_tree.policy.hindsight import target_score
from eagle_tree.tree import GrowingTree


def target_log_prob(target: PathModel, growing: GrowingTree) -> Tensor:
    """`[M+1]`, of each pool node's token after its parent's path; the root's is not looked at."""
    edges = [math.nan]
    for node in range(1, growing.n_nodes + 1):
        *above, token = path_of(growing, node)
        edges.append(target.log_probs(tuple(above))[token].item())
    return torch.tensor(edges)


def reach(growing: GrowingTree, log_prob: Tensor) -> list[float]:
    """P(node is reached) in plain Python."""
    found = [1.0]
    for node in range(1, growing.n_nodes + 1):
        found.append(found[growing.parent[node]] * math.exp(log_prob[node]))
    return found


small_pools = st.sampled_from(
    [Chain(8), specinfer([2, 2]), specinfer([4, 1]), Eagle2(1, 2, 1), OptTree(4, 0.0, 2, 1, 4), BestFirst(4, 1, 2)]
)


@settings(max_examples=80, deadline=None)
@given(models, models, small_pools, st.data())
def test_no_closed_subtree_of_its_size_expects_more_tokens(drafter: PathModel, target: PathModel, policy, data):
    growing = grown(FakeDrafter(drafter), policy)
    log_prob = target_log_prob(target, growing)
    worth = reach(growing, log_prob)
    budget = data.draw(st.integers(1, growing.n_nodes))
    node, expected = hindsight(growing, log_prob, budget)
    assert growing.n_nodes <= 8
    assert growing.select(node)[2] and len(node) == budget
    best = max(
        sum(worth[node] for node in kept) for kept in closed_subtrees(growing.parent.tolist()) if len(kept) == budget
    )
    assert expected.item() == pytest.approx(1 + best, rel=1e-6)
    assert expected.item() == pytest.approx(1 + sum(worth[index] for index in node.tolist()), rel=1e-9)


@settings(max_examples=80, deadline=None)
@given(models, models, every_policy)
def test_it_bounds_what_any_policy_selects_from_the_same_pool(drafter: PathModel, target: PathModel, policy: Policy):
    growing = grown(FakeDrafter(drafter), policy)
    log_prob = target_log_prob(target, growing)
    kept = policy.select(growing)
    if len(kept):
        worth = reach(growing, log_prob)
        expected = 1 + sum(worth[node] for node in kept.tolist())
        assert hindsight(growing, log_prob, len(kept))[1].item() >= expected * (1 - 1e-6)


@settings(max_examples=30, deadline=None)
@given(models, DYNAMIC[BestFirst])
def test_a_drafter_that_is_the_target_leaves_nothing_to_hindsight(model: PathModel, policy: BestFirst):
    growing = grown(FakeDrafter(model), policy)
    log_prob = target_log_prob(model, growing)
    kept = policy.select(growing)
    expected = target_score(growing, log_prob)[kept].exp().sum()
    assert hindsight(growing, log_prob, policy.budget)[1].item() == pytest.approx(1 + expected.item(), rel=1e-6)


def test_hindsight_by_hand():
    """The drafter ranks a .6, au .36, b .4, av .24, bu = bv .2. The target goes to b for certain, then to v three
    times in four: two nodes hold 1 + ¾ tokens besides the bonus, where the drafter's own best two, a and b, hold 1."""
    growing = grown(HandDrafter(HAND), Eagle2(2, 2, 1))
    log_prob = torch.tensor([math.nan, 0.0, 1.0, 0.5, 0.5, 0.25, 0.75]).log()
    node, expected = hindsight(growing, log_prob, 2)
    assert names_of(growing.select(node)[0]) == "b bv"
    assert expected.item() == pytest.approx(1 + 1 + 0.75)


def test_a_greedy_targets_text_is_the_oracles_chain():
    """At temperature 0 probabilities are 0 and 1: what is impossible comes last, and its parent before it."""
    growing = grown(HandDrafter(HAND), Eagle2(2, 2, 1))
    log_prob = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0]).log()
    expected = [hindsight(growing, log_prob, budget)[1].item() for budget in range(1, 7)]
    assert expected == [2, 3, 3, 3, 3, 3]
    for budget in range(1, 8):
        node, _ = hindsight(growing, log_prob, budget)
        assert growing.select(node)[2] and len(node) == min(budget, 6)
