"""The rules by which experiments 04 to 08 and 10 come to their verdicts, on hand-made numbers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from test_cost import points, table

import eagle_tree

EXPERIMENTS = Path(eagle_tree.__file__).parents[1] / "experiments"
pytestmark = pytest.mark.skipif(not EXPERIMENTS.is_dir(), reason="experiments are not part of an installed package")


def analysis_of(name: str):
    """An experiment's analyse.py as a module."""
    spec = importlib.util.spec_from_file_location(f"analyse_{name}", EXPERIMENTS / name / "analyse.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bins(rates: dict[int, float], width: float = 0.01, error: float = 0.02, count: int = 500) -> pd.DataFrame:
    rows = [{"bin": place, "hit_rate": rate, "count": count, "error": error} for place, rate in sorted(rates.items())]
    frame = pd.DataFrame(rows)
    frame = frame.assign(confidence=frame.bin / 20 + 0.02)
    return frame.assign(hit_rate_low=frame.hit_rate - width, hit_rate_high=frame.hit_rate + width)


GOOD = {0: 0.02, 10: 0.5, 19: 0.97}


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (bins(GOOD), "holds"),
        (bins(GOOD, error=0.06), "holds partly"),
        (bins({**GOOD, 0: 0.2}), "holds partly"),
        (bins({**GOOD, 19: 0.8}), "holds partly"),
        (bins({0: 0.02, 10: 0.5}), "holds partly"),  # nothing was above 0.95
        (bins({**GOOD, 11: 0.4}), "does not hold"),
        (bins({**GOOD, 11: 0.48}, width=0.1), "holds"),  # not significantly below
        (bins({**GOOD, 12: 0.5}), "holds partly"),  # where confidence is 0.62
        (bins({**GOOD, 11: 0.48}, count=99), "holds"),  # too few nodes to say so
    ],
)
def test_confidence_predicts_if_acceptance_rises_and_its_ends_are_near(found, verdict):
    module = analysis_of("04_confidence")
    assert module.verdict({"T = 0": bins(GOOD), "T = 1": found}) == verdict


def positions(rates: list[float], p: float, apart: bool, nodes: int = 500, coverage: float = 1.0) -> pd.DataFrame:
    frame = pd.DataFrame({"acceptance": rates, "spread_p": p, "nodes": nodes, "coverage": coverage})
    frame = frame.assign(acceptance_low=frame.acceptance - 0.05, acceptance_high=frame.acceptance + 0.05)
    return frame.assign(least_confident_high=0.2, most_confident_low=0.3 if apart else 0.1)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (positions([0.8, 0.2], 0.01, True), "holds"),
        (positions([0.8, 0.2], 0.5, True), "holds partly"),
        (positions([0.8, 0.2], 0.01, False), "holds partly"),
        (positions([0.8, 0.2], 0.01, True, coverage=0.9), "does not hold"),  # nothing to judge by
        (positions([0.8, 0.2], 0.01, True, nodes=99), "does not hold"),
        (positions([0.25, 0.2], 0.01, True), "does not hold"),
    ],
)
def test_position_and_context_matter_if_intervals_are_apart_and_prompts_differ(found, verdict):
    module = analysis_of("05_position_and_context")
    assert module.verdict([positions([0.8, 0.2], 0.01, True), found]) == verdict


def test_the_headline_of_positions_counts_where_prompts_differ_and_says_so_if_none_is_judged():
    module = analysis_of("05_position_and_context")
    found = {0: positions([0.8, 0.2], 0.01, True), 1: positions([0.8, 0.2], 0.5, True, nodes=99)}
    counted = "positions where prompts differ: 2 of 2 at T = 0, 0 of 0 at T = 1"
    assert module.headline(found) == f"{counted}; accepted 0.20 (0.15–0.25) to 0.80 (0.75–0.85) by position at T = 0"
    assert module.headline({0: found[1]}) == "positions where prompts differ: 0 of 0 at T = 0"


def test_positions_are_told_apart_in_thirds_of_their_own_contexts():
    """Three nodes a position, one a third: the surest context of each is accepted, whatever the other position has."""
    module = analysis_of("05_position_and_context")
    rows = [("0", c, c == 0.9) for c in (0.3, 0.6, 0.9)] + [("1", c, c == 0.2) for c in (0.05, 0.1, 0.2)]
    frame = pd.DataFrame(rows, columns=["position", "confidence", "label"]).assign(prompt_id="p", parent_accepted=True)
    with np.errstate(divide="ignore"):
        frame = frame.assign(log_conf=np.log(frame.confidence), target_log_prob=np.log(frame.label.astype(float)))
    thirds = module.in_thirds(frame)
    assert thirds[["position", "third"]].to_numpy().tolist() == [[name, n] for name in "01" for n in range(3)]
    assert thirds.acceptance.tolist() == [0, 0, 1, 0, 0, 1]


def worth(**questions: list[float]) -> pd.DataFrame:
    rows = [(name.replace("_", " "), value) for name, values in questions.items() for value in values]
    frame = pd.DataFrame(rows, columns=["question", "reach"])
    return frame.assign(reach_low=0.9 * frame.reach, reach_high=1.1 * frame.reach)


@pytest.mark.parametrize(
    ("depths", "verdict"),
    [([0.5, 0.3, 0.1], "holds"), ([0.5, 0.1, 0.3], "holds partly"), ([0.5, 0.5, 0.5], "holds partly")],
)
def test_returns_diminish_if_no_group_is_worth_more_than_the_one_before(depths, verdict):
    module = analysis_of("06_diminishing_returns")
    falling = {"place_in_the_tree": [0.5, 0.1], "rank_among_siblings": [0.3, 0.2]}
    assert module.verdict([worth(**falling, depth=[0.4, 0.1]), worth(**falling, depth=depths)]) == verdict
    rising = {name: values[::-1] for name, values in falling.items()}
    assert module.verdict([worth(**rising, depth=depths[::-1])]) == "does not hold"


def test_the_price_of_a_node_is_its_time_in_tokens_of_plain_decoding():
    """0.5 fixed and T(1) = 1: a token takes 1.5 s; four nodes take 2 s more, so each must add 1/3 of a token."""
    module = analysis_of("06_diminishing_returns")
    assert module.price(table(points("verify", {1: 1.0, 5: 3.0})), 4) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("times", "verdict"),
    [
        ({1: 1.0, 4: 1.1, 60: 1.2}, "holds"),
        ({1: 1.0, 4: 1.2, 60: 4.0}, "holds partly"),
        ({1: 1.0, 4: 1.8, 60: 4.0}, "does not hold"),
    ],
)
def test_one_pass_is_about_one_step_within_a_quarter(times, verdict):
    module = analysis_of("07_one_pass")
    assert module.verdict(table(points("verify", times))) == verdict
    behind = table(points("verify", {1: 1.0, 4: 1.0, 60: 1.0}), points("verify", times, context=500))
    assert module.verdict(behind) == verdict  # the worst context counts


def test_what_is_free_ends_where_the_time_has_grown_by_a_quarter():
    module = analysis_of("07_one_pass")
    assert module.free(table(points("verify", {1: 1.0, 11: 1.5}))) == 6  # a twentieth a position
    assert module.ratios(table(points("verify", {1: 2.0, 11: 3.0})), 11) == {100: 1.5}


def children(rates: dict[str, float]) -> pd.DataFrame:
    rows = [(text, 1.0, rule, 4, 1.0, rate) for rule, rate in rates.items() for text in "pq"]
    return pd.DataFrame(rows, columns=["sequence", "temperature", "rule", "k", "entropy", "accepted"])


@pytest.mark.parametrize(
    ("rates", "verdict"),
    [((0.5, 0.6, 0.7), "holds"), ((0.5, 0.6, 0.55), "holds partly"), ((0.5, 0.5, 0.4), "does not hold")],
)
def test_rules_are_ranked_by_paired_gains(rates, verdict):
    module = analysis_of("08_acceptance_rules")
    found = module.pairs(children(dict(zip(("with replacement", "without replacement", "hybrid"), rates, strict=True))))
    assert found.gain.tolist() == pytest.approx([rates[1] / rates[0], rates[2] / rates[1]])
    assert module.verdict(found) == verdict


def test_the_headline_of_the_rules_has_both_gains_and_counts_of_all_comparisons():
    module = analysis_of("08_acceptance_rules")
    rates = {"with replacement": 0.5, "without replacement": 0.6, "hybrid": 0.54}
    drawn = pd.concat([children(rates), children(rates).assign(k=8), children(rates).assign(temperature=0.5)])
    found = module.pairs(drawn)
    assert module.headline(found) == (
        "accepted of 4 at T = 1: without over with × 1.20 (1.20–1.20), hybrid over without × 0.90 (0.90–0.90); "
        "3 of 6 significantly above, 3 below"
    )
    assert len(module.headline(found)) <= 140
    nodes = module.of_nodes(drawn)
    trees = pd.DataFrame(
        {"temperature": [1.0], "arm": ["tree, match"], "tokens": 2.0, "tokens_low": 1.8, "tokens_high": 2.2}
    )
    coupled = pd.DataFrame(
        {
            "arm": ["A, match", "A, coupled"],
            "gain": [np.nan, 1.5],
            "gain_low": [np.nan, 1.2],
            "gain_high": [np.nan, 1.8],
        }
    )
    numbers = module.numbers(found, nodes, trees, coupled)
    assert "At T = 1, of 4 children accepted: with replacement 0.50" in numbers
    assert numbers.endswith("τ of coupled over match, replayed: A × 1.50 (1.20–1.80)")


def test_accepted_children_are_counted_in_thirds_of_the_entropy():
    module = analysis_of("08_acceptance_rules")
    rows = [("p", 1.0, "match", 1, entropy, 1 - entropy / 6) for entropy in range(6)]
    nodes = pd.DataFrame(rows, columns=["sequence", "temperature", "rule", "k", "entropy", "accepted"])
    found = module.of_nodes(nodes).set_index("entropy_third")
    assert found.positions.to_dict() == {"all": 6, "lowest": 2, "middle": 2, "highest": 2}
    assert found.accepted["lowest"] == pytest.approx((1 + 5 / 6) / 2)
    assert found.accepted["highest"] == pytest.approx((2 / 6 + 1 / 6) / 2)


def test_coupled_drafts_have_no_expectation_and_are_counted_as_realised():
    module = analysis_of("08_acceptance_rules")
    rows = [
        ("tree, match", 1.5, 0),
        ("tree, match", 2.5, 2),
        ("tree, coupled", np.nan, 1),
        ("tree, coupled", np.nan, 2),
    ]
    passes = pd.DataFrame(rows, columns=["policy", "expected_target", "accepted"])
    passes = passes.assign(temperature=1.0, prompt_id="p", emitted=passes.accepted + 1, n_nodes=21)
    match, coupled = module.of_trees(passes).to_dict("records")
    assert (match["tokens"], match["realised"], match["kind"]) == (2.0, 2.0, "expected")
    assert (coupled["tokens"], coupled["kind"]) == (2.5, "realised")


@pytest.mark.parametrize(
    ("change", "gain", "verdict"),
    [
        (-0.01, (1.02, 1.01), "holds"),
        (-0.01, (1.02, 0.9), "holds partly"),  # one policy loses
        (-0.01, (1.0, 1.0), "holds partly"),
        (0.01, (1.02, 1.01), "does not hold"),
    ],
)
def test_calibration_helps_if_the_error_falls_and_speed_rises(change, gain, verdict):
    module = analysis_of("10_calibration")
    errors = pd.DataFrame({"change_high": [0.0, change]})
    gains = pd.DataFrame({"speed_gain_low": np.array(gain) - 0.005, "speed_gain_high": np.array(gain) + 0.005})
    assert module.verdict({0: errors, 1: errors}, {0: gains, 1: gains}) == verdict
