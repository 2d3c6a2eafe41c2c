"""The rate-optimal policy: the best size over all sizes, levels that pay, and drafters that do not."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cost import HERE, points, table
from tree_models import COARSE, FakeDrafter, PathModel, grown

from eagle_tree.cost import CostTable
from eagle_tree.policy import DepthStop, RateOptimal, rate
from eagle_tree.tree import Draft, Frontier, GrowingTree, top_nodes


def costs(verify: list[float], step: float = 0.1, fixed: float = 0.0) -> CostTable:
    """Verify times of 1, 2, … positions, and a drafter step that costs the same at every width."""
    return table(points("verify", dict(enumerate(verify, 1))), points("draft", {1: step}), fixed=fixed)


def star(*confidences: float) -> GrowingTree:
    """A root with children of these confidences."""
    log_conf = torch.tensor([confidences]).log()
    draft = Draft(torch.arange(len(confidences))[None], log_conf, torch.zeros(1))
    return GrowingTree.from_root(torch.tensor([9])).append(Frontier(torch.tensor([0]), len(confidences)), draft)


def passed(accepted: int, steps: int = 2, n_nodes: int = 4):
    """What a policy learns from: a finished pass."""
    emitted = accepted + 1
    row = dict(accepted=accepted, emitted=emitted, draft_steps=steps, expanded=2 * steps, n_nodes=n_nodes)
    return SimpleNamespace(**row, context_length=100)


def chosen(policy: RateOptimal, growing: GrowingTree) -> int:
    return len(policy.select(growing))


def test_where_width_is_free_the_whole_budget_is_taken():
    assert chosen(RateOptimal(costs([1.0] * 5), budget=4), star(0.4, 0.3, 0.2, 0.1)) == 4


def test_where_width_costs_more_than_it_earns_nothing_is_taken():
    """At one token a second, a node of probability 0.4 must not cost half a second."""
    assert chosen(RateOptimal(costs([1.0, 1.5, 2.0, 2.5, 3.0]), budget=4), star(0.4, 0.3, 0.2, 0.1)) == 0


def test_a_stair_is_climbed_for_what_lies_behind_it():
    """T jumps by 0.5 at the second position and is flat then: 0.4 alone does not pay, 0.4 + 0.3 does."""
    policy = RateOptimal(costs([1.0, 1.5, 1.5, 1.5, 1.5]), budget=4)
    assert chosen(policy, star(0.4, 0.05, 0.04)) == 0
    assert chosen(policy, star(0.4, 0.3, 0.2, 0.05)) == 4


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(0.01, 1.0), min_size=1, max_size=8),
    st.lists(st.sampled_from([0.0, 0.0, 0.05, 0.3, 0.6]), min_size=8, max_size=8),
)
def test_the_size_is_the_best_of_all_sizes(confidences: list[float], rises: list[float]):
    """Against a loop over n: tokens minus ρ times the extra seconds, ρ being one token in T(1)."""
    times = (1 + np.cumsum([0.0, *rises])).tolist()
    growing = star(*sorted(confidences, reverse=True))
    size = chosen(RateOptimal(costs(times), budget=8), growing)
    scores = sorted(growing.score[1:].double().exp().tolist(), reverse=True)
    worth = [sum(scores[:n]) - (times[n] - times[0]) for n in range(len(scores) + 1)]
    assert worth[size] == pytest.approx(max(worth), abs=1e-9)


def test_a_level_is_drafted_while_its_mass_pays_for_the_step():
    """New, a level is thought to add 0.7 of the mass before it. A step of 0.1 s at one token a second costs 0.1."""
    policy = RateOptimal(costs([1.0] * 61, step=0.1), budget=10, top_k=2)
    for confidence, goes_on in ((0.5, True), (0.05, False)):
        assert policy.frontier(GrowingTree.from_root(torch.tensor([9])), None) is not None
        frontier = policy.frontier(star(confidence, confidence / 10), None)
        assert (frontier is not None) == goes_on


def test_growth_ends_at_the_depth():
    policy = RateOptimal(costs([1.0] * 61, step=1e-6), depth=1, top_k=2)
    policy.frontier(GrowingTree.from_root(torch.tensor([9])), None)
    assert policy.frontier(star(0.5, 0.4), None) is None


def drafted_passes(policy: RateOptimal, accepted, passes: int) -> list[int]:
    """Which of so many passes ask the drafter, if pass i accepts `accepted(i)` tokens of a tree."""
    asked = []
    for index in range(passes):
        if policy.frontier(GrowingTree.from_root(torch.tensor([9])), None) is None:
            policy.observe(passed(0, steps=0, n_nodes=0))
        else:
            asked.append(index)
            policy.promised = 1.0  # by what was selected
            policy.observe(passed(accepted(index)))
    return asked


def test_a_drafter_that_is_never_right_is_asked_ever_more_rarely():
    """Silences of 8, 16, 32 … passes: a handful of probes in 512, and less than 5 % of the time lost."""
    policy = RateOptimal(costs([1.0, 1.1, 1.2, 1.3, 1.4], step=0.1), budget=4)
    asked = drafted_passes(policy, lambda index: 0, 512)
    silences = np.diff(asked)
    assert silences[silences > 1].tolist() == [9, 17, 33, 65, 129]
    lost = len(asked) * (1.4 + 2 * 0.1 - 1.0)
    assert lost < 0.05 * 512
    assert policy.honesty.value < 0.2


def test_a_drafter_that_pays_is_always_asked():
    policy = RateOptimal(costs([1.0, 1.1, 1.2, 1.3, 1.4], step=0.1), budget=4)
    assert drafted_passes(policy, lambda index: index % 3, 200) == list(range(200))
    assert policy.best_rate == pytest.approx(2 / 1.6, rel=0.05)  # two tokens a pass of 1.4 + 0.2 seconds


def test_a_drafter_that_becomes_right_is_asked_again():
    policy = RateOptimal(costs([1.0, 1.1, 1.2, 1.3, 1.4], step=0.1), budget=4)
    asked = drafted_passes(policy, lambda index: 0 if index < 100 else 3, 400)
    assert len([index for index in asked if index >= 300]) == 100


def test_scores_are_discounted_by_what_they_kept_of_their_promises():
    """Promised 1 and accepted 1/4 for long: a node of confidence 0.4 earns 0.1."""
    policy = RateOptimal(costs([1.0, 1.2, 9.0], step=0.01), budget=2)
    assert chosen(policy, star(0.4)) == 1
    policy.promised = 1.0  # by what was selected
    for index in range(300):
        policy.observe(passed(int(index % 4 == 0)))
    assert policy.honesty.value == pytest.approx(0.25, rel=0.1)
    assert chosen(policy, star(0.4)) == 0


def test_what_cannot_be_used_is_named():
    with pytest.raises(ValueError, match="budget=4 needs verify times up to 5 positions; the cost table ends at 3"):
        RateOptimal(costs([1.0, 1.0, 1.0]), budget=4)
    with pytest.raises(ValueError, match="top_k=0 must be an integer >= 1"):
        RateOptimal(costs([1.0] * 9), budget=4, top_k=0)
    policy = RateOptimal(costs([1.0] * 9), budget=4)
    with pytest.raises(ValueError, match="measured elsewhere"):
        DepthStop(policy, 3).check_machine({**HERE, "threads": 9})
    RateOptimal(costs([1.0] * 9), budget=4, other_machine=True).check_machine({**HERE, "threads": 9})


def test_a_probe_that_pays_shortens_the_next_silence():
    """Wrong up to the probe at 28, silent for 32; the next is right: not enough to be asked always, but sooner."""
    policy = RateOptimal(costs([1.0, 1.1, 1.2, 1.3, 1.4], step=0.1), budget=4)
    asked = drafted_passes(policy, lambda index: int(index == 61), 200)
    assert asked[:6] == [0, 1, 2, 11, 28, 61]
    assert np.diff(asked[5:]).tolist()[:3] == [9, 17, 33]


def test_a_level_is_worth_what_it_adds_to_the_best_tree():
    """Two nodes of 0.5 and 0.3 where width is free: the first level is worth 0.8 tokens."""
    policy = RateOptimal(costs([1.0] * 61), budget=10, top_k=2)
    policy.frontier(GrowingTree.from_root(torch.tensor([9])), None)
    policy.frontier(star(0.5, 0.3), None)
    assert policy.judged.value == pytest.approx(0.8)


def test_what_was_promised_is_the_selected_trees_mass():
    policy = RateOptimal(costs([1.0, 1.0, 1.0, 9.0]), budget=3)
    assert chosen(policy, star(0.4, 0.3, 0.2)) == 2
    assert policy.promised == pytest.approx(0.7)


def test_every_pool_is_ranked_once(monkeypatch):
    """Four levels, four pools: the selection finds the last one ranked."""
    ranked = []
    monkeypatch.setattr(rate, "top_nodes", lambda *pool: ranked.append(pool) or top_nodes(*pool))
    policy = RateOptimal(costs([1.0] * 61, step=1e-6), budget=10, top_k=3, depth=4)
    growing = grown(FakeDrafter(PathModel(0, COARSE)), policy)
    policy.select(growing)
    assert len(growing.levels) == len(ranked) == 4


def test_a_selection_without_growth_works_the_tree_out_itself():
    """A wrapper may end growth without asking; and one pool's tree is not another's."""
    policy = RateOptimal(costs([1.0, 1.0, 1.0, 9.0]), budget=3, top_k=3)
    policy.frontier(GrowingTree.from_root(torch.tensor([9])), None)
    policy.frontier(star(0.4, 0.3, 0.2), None)
    assert policy.select(star(0.3, 0.6)).tolist() == [2, 1]


def test_every_pass_begins_with_nothing_drafted():
    """A first level of 0.8 tokens adds 0.8 in the second pass as in the first."""
    policy = RateOptimal(costs([1.0] * 61), budget=10, top_k=2)
    for passes in (1, 2):
        policy.frontier(GrowingTree.from_root(torch.tensor([9])), None)
        policy.frontier(star(0.5, 0.3), None)
        prior = 0.7 * (1 - 1 / rate.MEMORY) ** passes
        added = 0.8 if passes == 1 else 0.8 * (2 - 1 / rate.MEMORY)
        assert policy.added[0].numerator == pytest.approx(prior + added)
