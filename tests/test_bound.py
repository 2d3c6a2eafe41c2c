"""The shortest path through known texts, against every sequence of trees; and the modelled tables, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cost import points, table
from test_policy_rate import costs
from test_replay import traced
from test_trace import SETTINGS, Walking, part_of, reading_of
from tree_models import COARSE, FINE, PathModel, closed_subtrees, every_policy, models

from eagle_tree.bound import fastest, shortest, spelled_ahead
from eagle_tree.decode import grow
from eagle_tree.policy import Autoregressive, Chain, Eagle2, RateOptimal
from eagle_tree.replay import replay
from eagle_tree.roofline import CONTEXTS, Shape, roofline
from eagle_tree.trace import Trace, recorded

PAIR = Eagle2(6, 2, 1)  # two candidates, and two of each: a pool of six
rising = st.lists(st.sampled_from([0.0, 0.1, 0.5, 2.0]), min_size=6, max_size=6)


def trees(trace: Trace, model: PathModel, position: int, text: list[int], cost) -> list[tuple[int, float]]:
    """Tokens emitted and seconds of every closed tree of the pool at a position, drafted with as little as it needs."""
    drafter = Walking(model)
    drafter.position = position
    pool = grow(drafter, PAIR, torch.tensor(text[position : position + 1]))
    token, parent, depth = pool.token.tolist(), pool.parent.tolist(), pool.depth.tolist()
    found = []
    for kept in closed_subtrees(parent):
        node, accepted = 0, 0
        while position + accepted + 1 < len(text):
            below = [one for one in kept if parent[one] == node and token[one] == text[position + accepted + 1]]
            if not below:
                break
            node, accepted = below[0], accepted + 1
        widths = [len({parent[one] for one in kept if depth[one] == level}) for level in (1, 2)]
        steps = tuple(width for width in widths if width)
        found.append((accepted + 1, float(cost.seconds(len(kept), steps, trace.context[position]))))
    return found


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 99), rising, st.sampled_from([0.01, 0.3, 2.0]), st.lists(st.integers(0, 2), min_size=2, max_size=6)
)
def test_the_bound_is_the_best_of_all_sequences_of_trees(seed: int, rises: list[float], step: float, text: list[int]):
    model = PathModel(seed, COARSE, vocab=3)
    cost = costs((1 + np.cumsum([0.0, *rises])).tolist(), step)
    trace = traced(model, [PAIR], [text])
    rest = [0.0]
    for position in range(len(text) - 2, -1, -1):
        left = len(text) - 1 - position
        rest.insert(
            0, min(time + rest[min(emitted, left) - 1] for emitted, time in trees(trace, model, position, text, cost))
        )
    (row,) = fastest(trace, cost).to_dict("records")
    assert row["seconds"] == pytest.approx(rest[0])
    assert row["emitted"] == len(text) - 1


@settings(max_examples=60, deadline=None)
@given(models, every_policy, st.lists(st.integers(0, 5), min_size=2, max_size=12), rising, st.sampled_from([0.01, 0.3]))
def test_no_policy_is_faster_than_the_bound(model, policy, text, rises, step):
    cost = costs((1 + np.cumsum([0.0, *rises, *[0.2] * 150])).tolist(), step)
    trace = traced(model, [policy, Chain(2)], [text])
    for one in (policy, Autoregressive(), RateOptimal(cost, 6, 2, 2)):
        assert fastest(trace, cost).seconds.sum() <= replay(trace, one, cost).passes.pass_s.sum() + 1e-9


def test_a_shortest_path_by_hand():
    """Three positions; a pass that emits one token takes 1, one of two takes 1.5, one of three takes 5."""
    seconds = np.tile([1.0, 1.5, 5.0], (3, 1))
    assert shortest(seconds).tolist() == [2.5, 1.5, 1.0, 0.0]
    seconds[0, 1] = np.inf  # nothing is accepted at the first position
    assert shortest(seconds)[0] == 2.5
    seconds[1, 1] = np.inf  # nor at the second
    assert shortest(seconds)[0] == 3.0


def test_how_far_the_candidates_spell_the_text():
    """A chain's own tokens as a text, recorded three deep: all three are spelled, or as many as are right."""
    model, chain = PathModel(3, FINE), Chain(3)
    drafter = Walking(model)
    drafter.start(None, None, None)
    spelled = grow(drafter, chain, torch.tensor([0])).token.tolist()
    for wrong, ahead in ((None, 3), (3, 2), (2, 1), (1, 0)):
        text = [(token + 1) % 6 if place == wrong else token for place, token in enumerate(spelled)]
        part = replace(part_of(text[:2]), ahead_ids=text[2:])
        trace = Trace(SETTINGS, (recorded(part, Walking(model), {"c": chain}, reading_of(text[:2])),))
        assert spelled_ahead(trace).tolist() == [ahead]


# --- modelled tables ---

MODEL = dict(parameters=1e9, layers=2, hidden=8, kv_width=4, weight_bytes=2)


def test_a_forward_takes_the_longer_of_reading_and_multiplying():
    """2e9 bytes of weights at 1e12 a second: 2 ms, whatever n. Multiplying: 2e9 a position at 1e12 a second, 2 ms each.
    Entries of the cache: 4·2·4 = 32 bytes a position; 4·2·8·n·(c + n) operations of attention."""
    shape = Shape(**MODEL)
    seconds = shape.seconds(np.array([1, 2, 100]), 1000, bandwidth=1e12, operations=1e14)
    assert seconds[0] == pytest.approx((2e9 + 32 * 1001) / 1e12)
    assert seconds[1] == pytest.approx((2e9 + 32 * 1002) / 1e12)
    slow = shape.seconds(np.array([100]), 1000, bandwidth=1e12, operations=1e12)
    assert slow[0] == pytest.approx((2e9 * 100 + 64 * 100 * 1100) / 1e12)


def test_a_modelled_table_says_so_and_holds_the_formulas_times(tmp_path):
    modelled = roofline("a card", 1e12, 1e14, MODEL, {**MODEL, "parameters": 1e7})
    assert (
        modelled.about["modelled"]
        and "modelled" in modelled.about["device"]
        and "bandwidth" in modelled.about["formula"]
    )
    shape = Shape(**MODEL)
    for context in CONTEXTS:
        for n in (1, 60, 200, 512):
            assert modelled.verify(context)[n] == pytest.approx(shape.seconds(np.array([n]), context, 1e12, 1e14)[0])
    assert modelled.fixed == 0 and modelled.largest_n == 512
    modelled.save(tmp_path)
    assert type(modelled).load(tmp_path).about["formula"] == modelled.about["formula"]


def test_times_of_steps_of_several_widths_add_up():
    """T(3) = 2 at context 100; a step of one node 0.1, of four 0.3, of two between them; 0.5 fixed."""
    both = table(points("verify", {1: 1.0, 3: 2.0}), points("draft", {1: 0.1, 4: 0.3}))
    expected = 2.0 + 0.1 + 2 * 0.3 + 0.1 + 0.2 / 3 + 0.5
    assert both.seconds(2, (1, 4, 4, 2), 100) == pytest.approx(expected)
    assert both.seconds(np.array([0, 2]), (), np.array([50, 100])).tolist() == [1.5, 2.5]
    assert both.seconds(2, (1, 4, 4), 100) == both.pass_seconds(2, 3, 9, 100)


@pytest.mark.parametrize("change", [{"parameters": 0}, {"layers": -1}, {"weight_bytes": "2"}, {"hidden": True}])
def test_numbers_that_are_not_positive_are_named(change):
    with pytest.raises(ValueError, match=rf"roofline: {next(iter(change))}=\S+ must be a positive number"):
        roofline("a card", 1e12, 1e14, {**MODEL, **change}, MODEL)
