"""Trees of fixed shape against hand examples and enumeration: chains, rank paths, SpecInfer."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_models import (
    COARSE,
    FINE,
    ROOT_TOKEN,
    FakeDrafter,
    PathModel,
    best_tokens,
    closed_choices,
    drafted,
    grown,
    models,
    rank_paths,
    selected,
)

from eagle_tree.apps.common import conf_dir
from eagle_tree.policy import Chain, Static, specinfer
from eagle_tree.tree import GrowingTree

BAD_COUNTS = pytest.mark.parametrize("value", [0, -1, 1.0, 2.5, "32", True, None, math.nan], ids=repr)


# Chains


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_a_chain_follows_the_drafters_first_choices(depth: int):
    model, drafter = PathModel(5, COARSE), FakeDrafter(PathModel(5, COARSE))
    growing = grown(drafter, Chain(depth))
    path = [ROOT_TOKEN]
    for _ in range(depth):
        log_probs = model.log_probs(tuple(path)).tolist()
        path.append(log_probs.index(max(log_probs)))
    tree = selected(growing, Chain(depth))
    assert tree.token.tolist() == path
    assert tree.parent.tolist() == list(range(-1, depth))
    assert drafter.calls == depth
    assert Chain(depth).max_candidates() == 1


@BAD_COUNTS
def test_a_chain_refuses_what_is_no_integer_of_at_least_1(value: object):
    with pytest.raises(ValueError, match=rf"Chain: depth={value!r} must be an integer >= 1"):
        Chain(depth=value)


# Static trees


EAGLE_1 = yaml.safe_load((conf_dir() / "policy" / "eagle1.yaml").read_text())["choices"]


def test_a_static_tree_by_hand():
    """
        root            level 1: 3 candidates of the root, pool 1 2 3; rank 1 is not in the tree
        0     2         level 2: the nodes 1 and 3 have children, the highest rank is 1: pool 4 5 and 6 7
      0 1     1         level 3: node 5 alone, the highest rank is 0: pool 8
        0
    """  # fmt: skip
    policy = Static([[0, 1, 0], [0], [2], [2, 1], [0, 0], [0, 1]])
    model = PathModel(3, FINE)
    drafter = FakeDrafter(model)
    growing = grown(drafter, policy)
    assert drafter.asked == [([0], 3), ([1, 3], 2), ([5], 1)]
    assert growing.n_nodes == 8
    assert policy.select(growing).tolist() == [1, 3, 4, 5, 7, 8]
    assert policy.max_candidates() == 3
    tree = selected(growing, policy)
    assert rank_paths(tree, best_tokens(model)) == [(0,), (2,), (0, 0), (0, 1), (2, 1), (0, 1, 0)]


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
    tree = selected(grown(drafter, policy), policy)
    assert drafter.calls == 5
    assert torch.bincount(tree.depth).tolist() == [1, 4, 8, 8, 3, 2]
    assert sorted(rank_paths(tree, best_tokens(drafter.model))) == sorted(map(tuple, EAGLE_1))


def test_a_static_tree_that_was_grown_in_part_keeps_its_upper_levels():
    policy, drafter = Static(EAGLE_1), FakeDrafter(PathModel(4, COARSE))
    growing = GrowingTree.from_root(torch.tensor([ROOT_TOKEN]))
    for nodes in (4, 12):
        frontier = policy.frontier(growing, None)
        growing = growing.append(frontier, drafter.expand(growing, frontier, None))
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
        ([0, 1], r"choices=\[0, 1\] must be a list of rank paths"),
        (3, "choices=3 must be a list of rank paths"),
    ],
    ids=repr,
)
def test_static_refuses_paths_that_draw_no_tree(choices: list, message: str):
    with pytest.raises(ValueError, match=f"Static: choices.*{message}|Static: {message}"):
        Static(choices)


# SpecInfer


def test_specinfers_vector_by_hand():
    """⟨2, 3, 1⟩: two candidates of the root, three of each of them, one of each of those."""
    tree = specinfer([2, 3, 1])
    assert set(tree.choices) == {
        (0,), (1,),
        (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2),
        (0, 0, 0), (0, 1, 0), (0, 2, 0), (1, 0, 0), (1, 1, 0), (1, 2, 0),
    }  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(models, st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda widths: math.prod(widths) <= 64))
def test_specinfers_levels_are_the_cumulative_products(model: PathModel, widths: list[int]):
    growing, tree = drafted(model, specinfer(widths))
    assert torch.bincount(tree.depth).tolist() == np.cumprod([1, *widths]).tolist()
    assert growing.n_nodes == tree.n_nodes  # nothing is drafted in vain


@pytest.mark.parametrize("branching", [[], 3, None, [2, 0], [2, -1], [2.0], [True], ["2"], "22"], ids=repr)
def test_specinfer_refuses_what_is_no_list_of_widths(branching: object):
    with pytest.raises(ValueError, match=r"specinfer: branching=.* must be a list of integers >= 1, one a level"):
        specinfer(branching)
