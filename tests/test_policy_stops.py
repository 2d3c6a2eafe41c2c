"""Stops by hand: when a wrapped policy's growth ends, and that the rest of the policy passes through."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_models import (
    DYNAMIC,
    FIXED,
    HAND,
    STOPS,
    FakeDrafter,
    HandDrafter,
    PathModel,
    SameDrafter,
    Transfers,
    drafted,
    grown,
    models,
    paths_of,
)

from eagle_tree.policy import (
    Autoregressive,
    Chain,
    ConfidenceStop,
    DepthStop,
    Eagle2,
    EntropyStop,
    Policy,
    Static,
)

EVEN = [0.5, 0.5]


def levels_of(drafter: HandDrafter, policy: Policy) -> int:
    return len(grown(drafter, policy).levels)


# When growth ends


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_depth_stop_ends_growth_after_its_levels(depth: int):
    drafter = FakeDrafter(PathModel(0, (0.0, 1.0)))
    assert len(grown(drafter, DepthStop(Eagle2(9, 2, 5), depth)).levels) == drafter.calls == depth


def test_a_depth_stop_deeper_than_the_policy_changes_nothing():
    assert levels_of(HandDrafter({}, EVEN), DepthStop(Chain(3), 9)) == 3


@pytest.mark.parametrize(
    ("beam", "threshold", "levels"),
    [
        (1, 0.7, 1),  # the best of the root's candidates has .6
        (1, 0.5, 2),  # below them au has .36
        (1, 0.3, 3),  # below that every node has a quarter of its parent's
        (2, 0.99, 2),  # both of the root's candidates have 1 together, au and av .6
        (2, 0.59, 3),
        (4, 0.99, 3),  # all four below them have 1 together, the four below au and av .3
        (4, 0.29, 4),  # the policy's own end
        (4, 0.0, 4),
    ],
)
def test_a_confidence_stop_adds_the_best_of_a_level(beam: int, threshold: float, levels: int):
    policy = ConfidenceStop(Eagle2(9, 2, 3), beam=beam, threshold=threshold)
    assert levels_of(HandDrafter(HAND, [0.25, 0.25]), policy) == levels


def test_a_confidence_stop_of_a_chain_compares_the_path_product():
    """.8, .64, .512, .41, .33, .26: the first below .3 is the sixth."""
    assert levels_of(HandDrafter({}, [0.8]), ConfidenceStop(Chain(12), threshold=0.3)) == 6


def test_an_entropy_stop_of_a_chain_compares_the_root_of_the_last_expansions_entropy():
    """The entropy of ½, ½ is ln 2 = .693, its root .833; that of 1, 0 is 0. The third expansion is unsure."""
    drafter = HandDrafter({(0, 0): EVEN}, [1.0, 0.0])
    assert levels_of(drafter, EntropyStop(Chain(6), threshold=0.83)) == 3
    assert levels_of(drafter, EntropyStop(Chain(6), threshold=0.84)) == 6


def test_an_entropy_stop_of_a_tree_weighs_the_expanded_nodes_by_their_paths():
    """
    The root's .6, .4 has an entropy of .6730, so has a's; b's .5, .5 has .6931. The second level's mean is
    .6 · .6730 + .4 · .6931 = .6811, of root .8253. Unweighted it would be .6831, of root .8265.
    """
    assert math.sqrt(0.6 * 0.6730117 + 0.4 * 0.6931472) == pytest.approx(0.8253, abs=5e-5)
    drafter = HandDrafter(HAND, [1.0, 0.0])
    assert levels_of(drafter, EntropyStop(Eagle2(9, 2, 2), threshold=0.825)) == 2
    assert levels_of(drafter, EntropyStop(Eagle2(9, 2, 2), threshold=0.826)) == 3
    assert levels_of(drafter, EntropyStop(Eagle2(9, 2, 2), threshold=0.82)) == 1  # √.6730 = .8204


@pytest.mark.parametrize("kind", [ConfidenceStop, EntropyStop], ids=lambda kind: kind.__name__)
def test_every_stop_has_a_bound_on_depth(kind: type):
    never = {"threshold": 0.0 if kind is ConfidenceStop else 99.0}
    assert levels_of(HandDrafter({}, EVEN), kind(Chain(50), depth=4, **never)) == 4
    assert levels_of(HandDrafter({}, EVEN), kind(Chain(50), **never)) == 12


# What passes through


@settings(max_examples=60, deadline=None)
@given(models, st.one_of(FIXED[Chain], FIXED[Static], DYNAMIC[Eagle2]), st.integers(1, 4))
def test_a_stopped_policy_selects_from_the_levels_that_it_was_left(model: PathModel, policy: Policy, depth: int):
    """Chains and static trees keep what lies above; EAGLE-2 has fewer levels to choose from."""
    tree = drafted(model, DepthStop(policy, depth))[1]
    assert tree.n_nodes and tree.depth.max() <= depth
    if not isinstance(policy, Eagle2):
        whole = drafted(model, policy)[1]
        assert paths_of(tree) == [path for path in paths_of(whole) if len(path) <= depth]
    elif depth <= policy.depth:
        assert depth == 1 or paths_of(tree) == paths_of(
            drafted(model, Eagle2(policy.budget, policy.top_k, depth - 1, policy.value, policy.rerank))[1]
        )


class Watching(Policy):
    """Keeps what it is shown."""

    def __init__(self):
        self.seen = []

    def max_candidates(self) -> int:
        return 7

    def observe(self, row) -> None:
        self.seen.append(row)


STOP = pytest.mark.parametrize("kind", STOPS, ids=lambda kind: kind.__name__)


@STOP
def test_a_stop_hands_through_what_it_does_not_decide(kind: type):
    policy = Watching()
    stop = kind(policy)
    assert stop.max_candidates() == 7
    stop.observe("a row")
    kind(stop).observe("another")  # stops can be nested
    assert policy.seen == ["a row", "another"]


@STOP
def test_a_stopped_policy_that_never_drafts_does_not_draft(kind: type):
    assert grown(None, kind(Autoregressive())).n_nodes == 0


def test_the_first_of_nested_stops_ends_growth():
    for outer, inner in ((2, 4), (4, 2)):
        assert levels_of(HandDrafter({}, EVEN), DepthStop(DepthStop(Chain(9), inner), outer)) == 2


@pytest.mark.parametrize("policy", [ConfidenceStop(Chain(5), threshold=0.0), EntropyStop(Chain(5), threshold=9.0)])
def test_a_stop_that_looks_at_confidences_costs_one_transfer_a_level(policy: Policy):
    with Transfers() as transfers:
        growing = grown(SameDrafter([0.5, 0.5]), policy)
    assert (len(growing.levels), transfers.count) == (5, 5)


# Parameters


@STOP
@pytest.mark.parametrize("policy", [None, "eagle2", Chain, {}], ids=str)
def test_a_stop_refuses_what_is_no_policy(kind: type, policy: object):
    with pytest.raises(ValueError, match=rf"{kind.__name__}: policy=.* must be a Policy, the one that is stopped"):
        kind(policy)


@STOP
@pytest.mark.parametrize("value", [0, -1, 2.5, "3", True, None], ids=repr)
def test_a_stop_refuses_a_depth_that_is_no_integer_of_at_least_1(kind: type, value: object):
    with pytest.raises(ValueError, match=rf"{kind.__name__}: depth={value!r} must be an integer >= 1"):
        kind(Chain(), depth=value)


def test_a_confidence_stop_refuses_a_beam_that_is_no_integer_of_at_least_1():
    with pytest.raises(ValueError, match="ConfidenceStop: beam=0 must be an integer >= 1"):
        ConfidenceStop(Chain(), beam=0)


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, math.inf, "0.3", None, True], ids=repr)
def test_a_confidence_stop_refuses_what_is_no_probability(value: object):
    with pytest.raises(ValueError, match=f"ConfidenceStop: threshold={value!r} must be a number in 0…1"):
        ConfidenceStop(Chain(), threshold=value)


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, "0.3", None, True], ids=repr)
def test_an_entropy_stop_refuses_what_is_no_number_of_at_least_0(value: object):
    with pytest.raises(ValueError, match=f"EntropyStop: threshold={value!r} must be a number >= 0"):
        EntropyStop(Chain(), threshold=value)
