"""Calibration: the fit finds the distortion that was put in, keeps order, and policies see it."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_models import COARSE, FakeDrafter, PathModel, grown, models

from eagle_tree import calibration
from eagle_tree.calibration import (
    SLOPE,
    Isotonic,
    Temperatures,
    by_outcome,
    expected_calibration_error,
    fit_isotonic,
    fit_temperatures,
    judged_nodes,
    path_sums,
)
from eagle_tree.policy import BestFirst, Calibrated, DepthStop, Eagle2, OptTree, Policy
from eagle_tree.tree import Draft, Frontier, GrowingTree


def sigmoid(odds):
    return 1 / (1 + np.exp(-odds))


def recorded(temperatures: tuple[float, ...], passes: int = 4000, seed: int = 0) -> pd.DataFrame:
    """Chains whose node at depth d is accepted with σ(logit(confidence) / temperatures[d - 1]); the draws are real."""
    dice = np.random.default_rng(seed)
    rows = []
    for number in range(passes):
        alive = True
        for depth, temperature in enumerate(temperatures, 1):
            confidence = dice.uniform(0.05, 0.95)
            truth = sigmoid(math.log(confidence / (1 - confidence)) / temperature)
            accepted = alive and dice.uniform() < truth
            log_prob = 0.0 if accepted else -np.inf
            rows.append((number, depth, depth - 1, depth, 0, math.log(confidence), alive, accepted, log_prob))
            alive = accepted
    names = ["pass_id", "node", "parent", "depth", "rank", "log_conf", "parent_accepted", "accepted", "target_log_prob"]
    return pd.DataFrame(rows, columns=names).assign(policy="chain", prompt_id="a")


def test_a_temperature_by_hand():
    """Odds of 9 to 1 at temperature 2: √9 to 1, 3/4. Deeper than fitted uses the last; certainty stays below 1."""
    fitted = Temperatures((1.0, 2.0), greedy=True)
    log_conf = torch.tensor([0.9, 0.9, 0.9, 1.0]).log()
    edge = fitted.edge(log_conf, torch.tensor([1, 2, 7, 1]), torch.zeros(4, dtype=torch.long)).exp()
    assert edge.tolist() == pytest.approx([0.9, 0.75, 0.75, 1.0], abs=1e-5)
    impossible = fitted.edge(torch.tensor([-torch.inf]), torch.tensor([1]), torch.tensor([0]))
    assert impossible.exp().item() == 0


def test_temperatures_are_found_again_depth_by_depth():
    """An honest first depth, an overconfident second, an underconfident third: 1, 2 and 1/2."""
    fitted = fit_temperatures(recorded((1.0, 2.0, 0.5), passes=6000), greedy=True)
    assert fitted.temperature == pytest.approx((1.0, 2.0, 0.5), rel=0.15)


def test_an_isotonic_fit_finds_the_acceptance_at_each_confidence():
    nodes = recorded((2.0,), passes=20000)
    fitted = fit_isotonic(nodes, greedy=True)
    confidence = torch.tensor([0.2, 0.5, 0.8])
    edge = fitted.edge(confidence.log(), torch.ones(3, dtype=torch.long), torch.zeros(3, dtype=torch.long)).exp()
    assert edge.tolist() == pytest.approx(sigmoid(np.log([0.25, 1.0, 4.0]) / 2).tolist(), abs=0.04)


def test_an_isotonic_curve_is_strict():
    """Where acceptance is flat, a larger confidence still gets a larger value: siblings keep their order."""
    flat = pd.DataFrame({"confidence": [0.1, 0.5, 0.9], "label": [0.3, 0.3, 0.3]})
    curve = np.array(calibration.isotonic_curve(flat))
    assert (np.diff(curve) > 0).all()
    assert curve == pytest.approx(0.3, abs=2 * SLOPE)
    assert curve[0] > 0 and curve[-1] < 1


def test_both_keep_the_order_of_siblings():
    nodes = recorded((1.5, 0.7), passes=2000)
    log_conf = torch.linspace(0.001, 0.999, 200).log()
    for fitted in (fit_temperatures(nodes, True), fit_isotonic(nodes, True)):
        for depth in (1, 2, 5):
            edge = fitted.edge(log_conf, torch.full((200,), depth), torch.zeros(200, dtype=torch.long))
            assert (edge.double().diff() > 0).all()
            assert (edge < 0).all()


def test_ranks_with_few_nodes_share_their_depths_curve():
    nodes = pd.concat([recorded((1.0,), passes=500), recorded((1.0,), passes=50, seed=1).assign(rank=1, pass_id=-1)])
    curve = fit_isotonic(nodes, True).curve
    assert curve[0][0] != curve[0][1]
    together = calibration.isotonic_curve(judged_nodes(nodes))
    assert curve[0][1] == pytest.approx(together)


def test_only_nodes_whose_parent_was_accepted_are_judged():
    nodes = recorded((1.0, 1.0), passes=200)
    judged = judged_nodes(nodes)
    assert len(judged) == nodes.parent_accepted.sum() < len(nodes)
    assert judged.label.isin([0.0, 1.0]).all()
    with pytest.raises(ValueError, match="record_nodes=true"):
        judged_nodes(nodes.assign(parent_accepted=False))


def test_outcomes_stand_for_probabilities_where_these_are_not_the_events():
    """A certain node that was rejected, an unlikely one that was accepted, one that the target was not asked about."""
    nodes = pd.DataFrame({"accepted": [False, True, False], "target_log_prob": [0.0, -3.0, np.nan]})
    assert by_outcome(nodes).target_log_prob.fillna(9).tolist() == [-np.inf, 0.0, 9]


def test_path_sums_by_hand():
    r"""
        root ── 0 (1) ── 1 (10) ── 3 (1000)
                  \───── 2 (100)
    """  # fmt: skip
    assert path_sums(np.array([1.0, 10, 100, 1000]), np.array([-1, 0, 0, 1])).tolist() == [1, 11, 101, 1011]


def test_calibration_error_by_hand():
    """Two bins: 0.2 where a half is accepted, twice; 0.9 where all is, once: (2·0.3 + 0.1) / 3."""
    error = expected_calibration_error(np.array([0.2, 0.2, 0.9]), np.array([1.0, 0.0, 1.0]), bins=2)
    assert error == pytest.approx((0.6 + 0.1) / 3)


def test_fitting_lowers_the_calibration_error_on_other_passes():
    train, test = recorded((3.0, 3.0), seed=0), judged_nodes(recorded((3.0, 3.0), seed=1))
    before = expected_calibration_error(test.confidence.to_numpy(), test.label.to_numpy())
    for fitted in (fit_temperatures(train, True), fit_isotonic(train, True)):
        columns = (torch.tensor(test[name].to_numpy().copy()) for name in ("log_conf", "depth", "rank"))
        after = expected_calibration_error(fitted.edge(*columns).double().exp().numpy(), test.label.to_numpy())
        assert after < 0.3 * before


@pytest.mark.parametrize("fit", [fit_temperatures, fit_isotonic])
def test_a_fit_is_written_and_read_back(tmp_path, fit):
    fitted = fit(recorded((1.5, 0.7), passes=300), greedy=False)
    calibration.save(fitted, tmp_path / "fit.json")
    assert calibration.load(tmp_path / "fit.json") == fitted


def test_missing_and_damaged_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="eagle-tree calibrate nodes=RUN"):
        calibration.load(tmp_path / "none.json")
    (tmp_path / "other.json").write_text('{"kind": "Guess"}')
    with pytest.raises(ValueError, match="holds no calibration"):
        calibration.load(tmp_path / "other.json")


# --- policies on calibrated confidences ---


def pool() -> GrowingTree:
    """Two candidates of 0.6 and 0.4; the first one's child of 0.6."""
    growing = GrowingTree.from_root(torch.tensor([9]))
    first = Draft(torch.tensor([[1, 2]]), torch.tensor([[0.6, 0.4]]).log(), torch.zeros(1))
    growing = growing.append(Frontier(torch.tensor([0]), 2), first)
    second = Draft(torch.tensor([[3]]), torch.tensor([[0.6]]).log(), torch.zeros(1))
    return growing.append(Frontier(torch.tensor([1]), 1), second)


def test_a_calibrated_policy_selects_by_acceptance():
    """Raw: 0.6 · 0.6 = 0.36 loses to 0.4. With depth 2 calibrated to odds squared, 0.69, the grandchild wins: 0.42."""
    plain = Eagle2(budget=2, top_k=2, depth=1)
    assert sorted(plain.select(pool()).tolist()) == [1, 2]
    calibrated = Calibrated(plain, Temperatures((1.0, 0.5), greedy=True))
    assert sorted(calibrated.select(pool()).tolist()) == [1, 3]
    seen = calibrated.calibrated(pool())
    assert seen.score.exp().tolist() == pytest.approx([1, 0.6, 0.4, 0.6 * 0.36 / 0.52], abs=1e-4)


class Counting(Temperatures):
    """Remembers how many edges it was asked for, call by call."""

    def edge(self, log_conf, depth, rank):
        asked.append(len(log_conf))
        return super().edge(log_conf, depth, rank)


asked: list[int] = []


@settings(max_examples=40, deadline=None)
@given(
    models, st.sampled_from([Eagle2(6, 3, 2), BestFirst(6, 2, 3, 3), OptTree(6, 0.0, 3), DepthStop(Eagle2(6, 3, 4), 2)])
)
def test_every_level_is_mapped_once_a_pass(model: PathModel, inner: Policy):
    """And the trees, pass after pass, are those of mapping the whole pool."""
    policy = Calibrated(inner, Counting((1.0, 0.5, 2.0), greedy=True))
    drafter = FakeDrafter(model)
    for _ in range(2):
        asked.clear()
        growing = grown(drafter, policy)
        chosen = policy.select(growing)
        assert asked == [end - start for start, end in growing.levels]
        assert chosen.tolist() == inner.select(policy.calibrated(growing)).tolist()


def test_nothing_is_kept_from_one_pool_to_the_next():
    """Whether a pass was broken off before its selection, or two pools are selected from without growth."""
    policy = Calibrated(Eagle2(6, 3, 2), Temperatures((1.0, 0.5), greedy=True))
    first, second = (FakeDrafter(PathModel(seed, COARSE)) for seed in (0, 1))
    grown(first, policy)
    for growing in (grown(second, policy), pool()):
        assert policy.select(growing).tolist() == policy.policy.select(policy.calibrated(growing)).tolist()


def test_a_stop_outside_leaves_the_last_level_to_the_selection():
    policy = Calibrated(Eagle2(6, 3, 4), Temperatures((1.0, 0.5), greedy=True))
    growing = grown(FakeDrafter(PathModel(0, COARSE)), DepthStop(policy, 2))
    assert policy.select(growing).tolist() == policy.policy.select(policy.calibrated(growing)).tolist()


def test_rank_reaches_the_curve():
    """Curves by rank: the first candidate's says 0.1, the second's 0.9."""
    low, high = (tuple([value] * (calibration.GRID + 1)) for value in (0.1, 0.9))
    fitted = Isotonic(((low, high),), greedy=True)
    seen = Calibrated(Eagle2(), fitted).calibrated(pool())
    assert seen.score.exp().tolist() == pytest.approx([1, 0.1, 0.9, 0.01], abs=1e-6)


def test_a_calibration_of_the_other_event_is_refused():
    policy = Calibrated(Eagle2(), Temperatures((1.0,), greedy=True))
    policy.check_machine({"greedy": True})
    with pytest.raises(ValueError, match="fitted at T = 0; at T > 0 acceptance is another event"):
        policy.check_machine({"greedy": False})


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "Expecting property name"),
        ("[]", "holds no calibration"),
        ('{"kind": "Temperatures", "temperature": [], "greedy": true}', "temperature=() must be numbers above 0"),
        ('{"kind": "Temperatures", "temperature": [0], "greedy": true}', "temperature=(0,) must be numbers above 0"),
        ('{"kind": "Temperatures", "temperature": [NaN], "greedy": true}', "temperature=(nan,) must be numbers"),
        ('{"kind": "Temperatures", "temperature": ["a"], "greedy": true}', "temperature=('a',) must be numbers"),
        ('{"kind": "Isotonic", "curve": [], "greedy": true}', "curve of shape (0,) must be one of 65 points"),
        ('{"kind": "Isotonic", "curve": [[[0.1]]], "greedy": true}', "curve of shape (1, 1, 1) must be one of 65"),
        (f'{{"kind": "Isotonic", "curve": [[{[2.0] * 65}]], "greedy": true}}', "curve must hold probabilities"),
        (f'{{"kind": "Isotonic", "curve": [[{[0.0] * 65}]], "greedy": true}}', "above 0 but for confidence 0"),
    ],
)
def test_a_damaged_calibration_is_named(tmp_path, content, named):
    path = tmp_path / "fit.json"
    path.write_text(content)
    with pytest.raises(ValueError) as caught:
        calibration.load(path)
    assert str(path) in str(caught.value) and named in str(caught.value)
