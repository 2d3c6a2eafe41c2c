"""Trees of fixed shape against hand examples and enumeration: chains, rank paths, SpecInfer, Medusa, Sequoia."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from itertools import product

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
    Path,
    PathModel,
    accuracies,
    best_tokens,
    closed_choices,
    drafted,
    grown,
    models,
    rank_paths,
    rates,
    selected,
)

from eagle_tree.apps.common import conf_dir
from eagle_tree.noise import Noise
from eagle_tree.policy import Chain, Static, medusa, sequoia, specinfer
from eagle_tree.policy.fixed import sequoia_table
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


# Medusa


def path_value(accuracy: list[list[float]], path: Path) -> float:
    return math.prod(accuracy[depth][rank] for depth, rank in enumerate(path))


def test_medusas_greedy_tree_by_hand():
    """Values: 0 is .6, 1 is .25; below, 00 is .3, 01 is .24, 10 is .125, 11 is .1."""
    accuracy = [[0.6, 0.25], [0.5, 0.4]]
    assert medusa(accuracy, 1).choices == ((0,),)
    assert medusa(accuracy, 2).choices == ((0,), (0, 0))
    assert medusa(accuracy, 4).choices == ((0,), (0, 0), (1,), (0, 1))
    assert medusa(accuracy, 6).choices == medusa(accuracy, 63).choices == ((0,), (0, 0), (1,), (0, 1), (1, 0), (1, 1))


@settings(max_examples=100, deadline=None)
@given(accuracies, st.integers(1, 70))
def test_medusas_greedy_tree_is_the_best_paths_of_all(accuracy: list[list[float]], budget: int):
    """At ties the shallower path, then the one of lower ranks; a path without a chance is no candidate."""
    ranks = range(len(accuracy[0]))
    every = [path for depth in range(len(accuracy)) for path in product(ranks, repeat=depth + 1)]
    possible = [path for path in every if path_value(accuracy, path) > 0]
    best = sorted(possible, key=lambda path: (-path_value(accuracy, path), len(path), path))
    assert list(medusa(accuracy, budget).choices) == best[:budget]  # `Static` has checked that it is closed


@pytest.mark.parametrize(
    "accuracy", [[], [[]], [0.5], 0.5, None, [[0.5], [0.5, 0.1]], [[1.1]], [[-0.1]], [[math.nan]], [["x"]]], ids=repr
)
def test_medusa_refuses_what_is_no_table_of_probabilities(accuracy: object):
    with pytest.raises(ValueError, match=r"medusa: accuracy=.* a table of rows of one length of probabilities in 0…1"):
        medusa(accuracy)


def test_medusa_refuses_a_table_without_a_first_step():
    with pytest.raises(ValueError, match="medusa: accuracy holds no first candidate that is ever right"):
        medusa([[0.0, 0.0], [0.5, 0.5]])


@BAD_COUNTS
def test_medusa_refuses_a_budget_that_is_no_integer_of_at_least_1(value: object):
    with pytest.raises(ValueError, match=rf"medusa: budget={value!r} must be an integer >= 1"):
        medusa([[0.5]], value)


# Sequoia against all ordered trees. A tree is the tuple of its root's children.


@cache
def ordered_trees(n_nodes: int) -> tuple[tuple, ...]:
    """Every ordered tree of so many nodes, the root counted."""
    return tuple(forests(n_nodes - 1))


def forests(n_nodes: int) -> Iterator[tuple]:
    if n_nodes == 0:
        yield ()
    for first in range(1, n_nodes + 1):
        for tree, others in product(ordered_trees(first), tuple(forests(n_nodes - first))):
            yield (tree, *others)


def height(tree: tuple) -> int:
    return max((1 + height(child) for child in tree), default=0)


def width(tree: tuple) -> int:
    return max(len(tree), *map(width, tree), 0)


def expected_tokens(tree: tuple, acceptance: list[float]) -> float:
    return 1 + sum(rate * expected_tokens(child, acceptance) for rate, child in zip(acceptance, tree))


def test_the_number_of_ordered_trees_is_catalans():
    assert [len(ordered_trees(n_nodes)) for n_nodes in range(1, 8)] == [1, 1, 2, 5, 14, 42, 132]


BUDGET = 6


@settings(max_examples=60, deadline=None)
@given(rates)
def test_sequoias_table_holds_the_best_of_all_ordered_trees(acceptance: list[float]):
    table = sequoia_table(acceptance, BUDGET, BUDGET).value
    worth = {
        tree: expected_tokens(tree, acceptance)
        for n_nodes in range(1, BUDGET + 2)
        for tree in ordered_trees(n_nodes)
        if width(tree) <= len(acceptance)
    }
    for levels, n_nodes in product(range(BUDGET + 1), range(1, BUDGET + 2)):
        possible = [worth[tree] for tree in ordered_trees(n_nodes) if tree in worth and height(tree) <= levels]
        assert table[levels, n_nodes] == max(possible, default=-math.inf)


def value(choices: list[Path], acceptance: list[float]) -> float:
    return 1 + sum(math.prod(acceptance[rank] for rank in path) for path in choices)


def full_size(n_children: int, depth: int) -> int:
    return sum(n_children**level for level in range(1, depth + 1))


@settings(max_examples=100, deadline=None)
@given(rates, st.integers(1, 40), st.integers(1, 7))
def test_sequoias_tree_has_the_value_of_the_table_the_budget_and_the_depth(acceptance, budget: int, depth: int):
    largest = full_size(len(acceptance), depth)
    if budget > largest:
        with pytest.raises(ValueError, match=rf"sequoia: budget={budget} must be at most {largest}, the nodes of"):
            sequoia(acceptance, budget, depth)
        return
    choices = sequoia(acceptance, budget, depth).choices
    assert len(choices) == budget
    assert max(map(len, choices)) <= depth
    assert math.isclose(value(choices, acceptance), sequoia_table(acceptance, budget, depth).value[-1, -1])


@settings(max_examples=60, deadline=None)
@given(rates, st.integers(1, 12), st.integers(1, 5))
def test_sequoias_value_grows_with_depth_and_budget(acceptance: list[float], budget: int, depth: int):
    table = sequoia_table(acceptance, budget, depth).value
    assert (table[1:] >= table[:-1]).all()
    larger, smaller = table[:, 2:], table[:, 1:-1]
    assert (larger >= smaller)[np.isfinite(larger)].all()


@settings(max_examples=60, deadline=None)
@given(rates, st.integers(1, 30), st.integers(1, 5))
def test_where_the_first_is_the_likeliest_sequoia_is_medusas_greedy(acceptance, budget: int, depth: int):
    """With rates that fall by rank the best paths are a tree; in general an earlier sibling is in the way."""
    acceptance = sorted((rate for rate in acceptance if rate), reverse=True) or [0.5]
    budget = min(budget, full_size(len(acceptance), depth))
    greedy = medusa([acceptance] * depth, budget).choices
    assert math.isclose(value(sequoia(acceptance, budget, depth).choices, acceptance), value(greedy, acceptance))


def test_sequoias_tree_by_hand():
    """
    Rates ½, 0, ½: a third child needs a second one, which is never accepted. Two nodes: the chain is worth ½ + ¼, two
    children ½ + 0. Three nodes: three children are worth ½ + 0 + ½, the chain ½ + ¼ + ⅛. The trees do not nest.
    """
    assert set(sequoia([0.5, 0, 0.5], 2, 3).choices) == {(0,), (0, 0)}
    assert set(sequoia([0.5, 0, 0.5], 3, 3).choices) == {(0,), (1,), (2,)}


def test_a_bound_on_depth_widens_sequoias_tree():
    assert set(sequoia([0.6, 0.3], 2, 2).choices) == {(0,), (0, 0)}
    assert set(sequoia([0.6, 0.3], 2, 1).choices) == {(0,), (1,)}


def test_sequoia_meets_rates_of_zero_without_a_warning(recwarn):
    assert len(sequoia([0.0, 0.0], 6, 2).choices) == 6
    assert not recwarn.list


@pytest.mark.parametrize("acceptance", [[], 0.5, None, [[0.5]], [1.1], [-0.1], [math.nan], ["x"]], ids=repr)
def test_sequoia_refuses_what_is_no_list_of_probabilities(acceptance: object):
    with pytest.raises(ValueError, match=r"sequoia: acceptance=.* must be a list of probabilities in 0…1"):
        sequoia(acceptance, 1, 1)


def test_sequoia_refuses_children_that_are_accepted_more_than_once():
    with pytest.raises(ValueError, match=r"sequoia: acceptance sums to 1.200: of all children at most one is accepted"):
        sequoia([0.7, 0.5], 1, 1)
    sequoia([0.1] * 10, 1, 1)  # rounding is no offence


@BAD_COUNTS
@pytest.mark.parametrize("name", ["budget", "depth"])
def test_sequoia_refuses_what_is_no_integer_of_at_least_1(name: str, value: object):
    with pytest.raises(ValueError, match=rf"sequoia: {name}={value!r} must be an integer >= 1"):
        sequoia([0.5], **{"budget": 1, "depth": 1, name: value})
