"""Static trees of measured acceptance, Medusa's and Sequoia's, against hand examples and enumeration; their files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path as File

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cost import HERE, points, table
from tree_models import Path, accuracies, rates

from eagle_tree.policy import Accuracy, medusa, medusa_from_file, sequoia, sequoia_from_file, sequoia_sized
from eagle_tree.policy.measured import sequoia_table, widths

BAD_COUNTS = pytest.mark.parametrize("value", [0, -1, 1.0, 2.5, "32", True, None, math.nan], ids=repr)


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


# The size that a machine wants


def costs(verify: dict[int, float], step: float = 0.0):
    """Verify times by positions, and drafter steps that cost the same at every width."""
    return table(points("verify", verify), points("draft", {1: step or 1e-9}), fixed=0.0)


def test_where_width_is_free_the_largest_tree_is_taken():
    chosen = sequoia_sized([0.6, 0.3], 4, costs({1: 1.0, 8: 1.0}))
    assert len(chosen.choices) == 7
    assert set(chosen.choices) == set(sequoia([0.6, 0.3], 7, 4).choices)


def test_a_size_behind_a_stair_is_not_taken_unless_it_pays():
    """
    One rank of 1/2. Two nodes in a row are worth 1.75 tokens, three 1.875, which is 7.1 % more: that is what the fourth
    position may cost.
    """
    for fourth, depth in ((1.08, 2), (1.07, 3)):
        chosen = sequoia_sized([0.5], 3, costs({1: 1.0, 2: 1.0, 3: 1.0, 4: fourth}))
        assert chosen.choices == tuple((0,) * level for level in range(1, depth + 1))


def test_a_dear_drafter_step_makes_the_tree_flat():
    """Two nodes: the chain is worth 1.96 tokens and takes two steps, two children 1.9 and one step."""
    times = {1: 1.0, 2: 9.0, 3: 1.0}  # read as 1, 5, 5: two nodes cost as much as one
    assert set(sequoia_sized([0.6, 0.3], 2, costs(times)).choices) == {(0,), (0, 0)}
    assert set(sequoia_sized([0.6, 0.3], 2, costs(times, step=0.5)).choices) == {(0,), (1,)}


@settings(max_examples=40, deadline=None)
@given(rates, st.integers(1, 4), st.lists(st.sampled_from([0.0, 0.1, 0.5]), min_size=7, max_size=7))
def test_the_chosen_tree_is_the_fastest_of_all_sizes_and_depths(acceptance, depth: int, rises: list[float]):
    times = dict(enumerate((1 + np.cumsum(rises)).tolist(), 1))
    machine = costs(times, step=0.2)

    def speed(choices) -> float:
        return value(choices, acceptance) / (times[len(choices) + 1] + 0.2 * max(map(len, choices)))

    chosen = speed(sequoia_sized(acceptance, depth, machine).choices)
    for levels in range(1, depth + 1):
        for budget in range(1, min(6, full_size(len(acceptance), levels)) + 1):
            assert chosen >= speed(sequoia(acceptance, budget, levels).choices) - 1e-9


def test_steps_are_as_wide_as_the_levels_with_children():
    """0 and 1 have children, then 00: steps over the root, over two nodes, over one."""
    assert widths([(0,), (1,), (2,), (0, 0), (1, 0), (0, 0, 0)]) == [1, 2, 1]


def test_a_size_chosen_for_another_machine_is_refused():
    chosen = sequoia_sized([0.5], 2, costs({1: 1.0, 3: 1.0}))
    chosen.check_machine(HERE)
    with pytest.raises(ValueError, match="threads 2 there, 9 here"):
        chosen.check_machine({**HERE, "threads": 9})
    sequoia_sized([0.5], 2, costs({1: 1.0, 3: 1.0}), other_machine=True).check_machine({**HERE, "threads": 9})
    with pytest.raises(ValueError, match="the cost table ends at 1 position"):
        sequoia_sized([0.5], 2, costs({1: 1.0}))


# Files


def measured(tmp_path: File, **changes) -> str:
    """At the root's children 10 places: rank 0 right in 6, rank 1 in 2; one level deeper 5 places: 2 and 1."""
    fields = {"positions": [10, 5], "accepted": [[6, 2], [2, 1]], **changes}
    (tmp_path / "accuracy.json").write_text(json.dumps({name: one for name, one in fields.items() if one is not None}))
    return str(tmp_path / "accuracy.json")


def test_accuracies_by_depth_and_by_rank_are_ratios_of_sums(tmp_path):
    """By rank over both depths: (6 + 2) / 15 and (2 + 1) / 15; over the first alone 6/10 and 2/10."""
    accuracy = Accuracy.load(measured(tmp_path))
    assert accuracy.by_depth().tolist() == [[0.6, 0.2], [0.4, 0.2]]
    assert accuracy.by_rank(2).tolist() == accuracy.by_rank(9).tolist() == pytest.approx([8 / 15, 3 / 15])
    assert accuracy.by_rank(1).tolist() == [0.6, 0.2]


def test_trees_are_made_of_a_file(tmp_path):
    file = measured(tmp_path)
    assert medusa_from_file(file, 3) == medusa([[0.6, 0.2], [0.4, 0.2]], 3)
    assert sequoia_from_file(file, 3, 2) == sequoia([8 / 15, 3 / 15], 3, 2)


def test_a_budget_of_none_asks_the_cost_table(tmp_path):
    file, machine = measured(tmp_path), costs({1: 1.0, 4: 1.0})
    machine.save(tmp_path / "cost")
    chosen = sequoia_from_file(file, None, 2, str(tmp_path / "cost"))
    assert chosen.choices == sequoia_sized([8 / 15, 3 / 15], 2, machine).choices
    for budget, cost in ((None, None), (3, str(tmp_path / "cost"))):
        with pytest.raises(ValueError, match=rf"sequoia: budget={budget} and cost=.*give the one.*or the other"):
            sequoia_from_file(file, budget, 2, cost)
    with pytest.raises(FileNotFoundError, match="eagle-tree calibrate"):
        sequoia_from_file(file, None, 2, str(tmp_path / "none"))


def test_accuracies_are_written_and_read_back(tmp_path):
    accuracy = Accuracy([10, 5], [[6.0, 2.5], [2.0, 1.0]], {"temperature": 1.0})
    accuracy.save(tmp_path / "new" / "accuracy.json")
    assert Accuracy.load(tmp_path / "new" / "accuracy.json") == accuracy


def test_rounding_of_summed_probabilities_is_no_offence():
    accuracy = Accuracy([3], [[3.000001, 0.0]])
    assert medusa(accuracy.by_depth().tolist()).choices == ((0,),)
    assert sequoia(accuracy.by_rank(1).tolist(), 1, 1).choices == ((0,),)


def test_a_missing_file_is_named_with_the_command_that_writes_it():
    with pytest.raises(FileNotFoundError, match=r"accuracy='none.json': there is no file none.json.*evaluate"):
        medusa_from_file("none.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": None}, "missing.*'positions'"),
        ({"accepted": [[6, 2]]}, "as many rows"),
        ({"accepted": [[6, 2], [2]]}, "as many rows of one length"),
        ({"accepted": [[6, "x"], [2, 1]]}, "as many rows"),
        ({"positions": [], "accepted": []}, "as many rows"),
        ({"positions": [0, 5]}, r"positions=\[0, 5\] must be counts above 0"),
        ({"accepted": [[6, 2], [-1, 1]]}, r"accepted\[1\]=\[-1.0, 1.0\] must be at least 0"),
        ({"accepted": [[6, 2], [4, 2]]}, r"accepted\[1\]=\[4.0, 2.0\] must .* sum to at most 5"),
        ({"depth": 3}, "depth"),
    ],
    ids=repr,
)
def test_a_malformed_file_is_named_with_what_is_wrong(tmp_path, changes: dict, message: str):
    with pytest.raises(ValueError, match=f"accuracy=.*accuracy.json.*must be an accuracy.json of.*{message}"):
        medusa_from_file(measured(tmp_path, **changes))


@pytest.mark.parametrize("text", ["", "[1, 2]", "{", "\x00"], ids=repr)
def test_a_file_that_is_none_is_named(tmp_path, text: str):
    (tmp_path / "accuracy.json").write_text(text)
    with pytest.raises(ValueError, match=r"must be an accuracy.json of `eagle-tree evaluate`"):
        sequoia_from_file(str(tmp_path / "accuracy.json"), 4, 2)
