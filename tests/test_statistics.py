"""Comparisons of policies: sums, pairs, one correction for all; and the waterfall of what is lost."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from eagle_tree import analysis, plots
from eagle_tree.analysis import compared, gain_of, holm
from eagle_tree.regret import BOUNDS, PARTS, decomposed


def sums(**policies: list[tuple[float, float]]) -> pd.DataFrame:
    """Emitted and seconds of each policy, prompt by prompt."""
    rows = [
        {"policy": name, "prompt_id": place, "emitted": emitted, "seconds": seconds}
        for name, prompts in policies.items()
        for place, (emitted, seconds) in enumerate(prompts)
    ]
    return pd.DataFrame(rows).set_index(["policy", "prompt_id"])


def test_a_gain_is_a_ratio_of_ratios_of_sums():
    """(1 + 99) / (1 + 9) = 10 a second against (1 + 99) / (4 + 16) = 5: twice, whatever single prompts say."""
    table = compared(sums(a=[(1, 1), (99, 9)], b=[(1, 4), (99, 16)]), "emitted", "seconds", "b")
    (row,) = table.to_dict("records")
    assert (row["policy"], row["prompts"], row["gain"]) == ("a", 2, 2.0)
    assert row["gain_low"] == pytest.approx(16 / 9) and row["gain_high"] == 4.0  # resamples of one prompt alone


def test_pairing_takes_out_what_prompts_differ_in():
    """Prompts differ a hundredfold and each is 10 % faster: the interval of the gain is a point."""
    slow = [(100.0, float(3**place)) for place in range(12)]
    table = compared(sums(slow=slow, fast=[(e, s / 1.1) for e, s in slow]), "emitted", "seconds", "slow")
    assert table.gain[0] == pytest.approx(1.1)
    assert (table.gain_low[0], table.gain_high[0]) == (pytest.approx(1.1), pytest.approx(1.1))
    assert table.p[0] == pytest.approx(2 / 2001)


def test_no_difference_has_p_1_and_prompts_that_one_lacks_are_left_out():
    same = [(5, 2), (7, 3)]
    table = compared(sums(a=same, b=[*same, (1, 100)]), "emitted", "seconds", "b")
    assert (table.gain[0], table.p[0], table.prompts[0]) == (1.0, 1.0, 2)
    with pytest.raises(ValueError, match="reference='c' is not among the policies a, b"):
        compared(sums(a=same, b=same), "emitted", "seconds", "c")


def test_a_single_prompt_has_no_interval_and_no_times_no_gain():
    assert gain_of(np.array([[4.0, 1.0, 2.0, 1.0]]))[0] == 2.0
    assert np.isnan(gain_of(np.array([[4.0, 1.0, 2.0, 1.0]]))[1:]).all()
    assert np.isnan(gain_of(np.array([[4.0, np.nan, 2.0, 1.0]] * 3))).all()
    assert np.isnan(gain_of(np.empty((0, 4)))).all()


def test_holm_by_hand():
    """0.01·4, 0.02·3, 0.03·2, 0.04·1 in order; none below one before it; at most 1."""
    assert holm(np.array([0.03, 0.01, 0.04, 0.02])).tolist() == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm(np.array([0.6, np.nan, 0.9])).tolist()[::2] == [1.0, 1.0]
    assert np.isnan(holm(np.array([0.6, np.nan]))[1]) and holm(np.array([0.6, np.nan]))[0] == 0.6
    assert holm(np.array([])).tolist() == []


def test_the_rows_of_a_replay_are_sums_too():
    """4 tokens in 2 passes of 1 s, and 2 in 2 passes of 2 s: τ 1.5, 1 token a second, twice the baseline."""
    columns = ["policy", "prompt_id", "pass_id", "n_nodes", "expected_draft", "accepted", "emitted", "pass_s"]
    rows = [("p", "a", 0, 3, 2.0, 1, 2, 1.0), ("p", "a", 1, 3, 2.0, 1, 2, 1.0)]
    rows += [("p", "b", 0, 3, 1.0, 0, 1, 2.0), ("p", "b", 1, 3, 1.0, 0, 1, 2.0)]
    rows += [
        ("autoregressive", prompt, place, 0, 1.0, 0, 1, 2.0) for prompt, n in (("a", 4), ("b", 2)) for place in range(n)
    ]
    bound = pd.DataFrame({"prompt_id": ["a", "b"], "emitted": [4, 2], "seconds": [1.0, 2.0]})
    table = analysis.replayed(pd.DataFrame(rows, columns=columns), bound).set_index("policy")
    row = table.loc["p"]
    assert (row.tau, row.tokens_per_second, row.speedup, row.bound_share) == (1.5, 1.0, 2.0, 0.5)
    assert (row.tokens_per_second_low, row.tokens_per_second_high) == (0.5, 2.0)
    assert (table.loc["autoregressive"].speedup, table.loc["autoregressive"].bound_share) == (1.0, 0.25)
    without = analysis.replayed(pd.DataFrame(rows, columns=columns).assign(pass_s=np.nan))
    assert without.tau[0] == 1.5 and without[["tokens_per_second", "speedup", "bound_share"]].isna().all().all()


def test_the_waterfall_climbs_from_the_policy_to_a_tree_accepted_whole():
    values = {"policy": 2.0, "pool_best": 2.5, "drafted_best": 3.0, "best": 3.25, "whole": 5.0}
    parts = {"ordering": 0.5, "pool": 0.5, "vocabulary": 0.25, "no_drafter": 1.75}
    rows = pd.DataFrame([{"name": "p", "prompt_id": prompt, "nodes": 8, **values, **parts} for prompt in "ab"])
    assert set(values) == set(BOUNDS) and set(parts) == set(PARTS)
    figure = plots.waterfall(decomposed(rows))
    (axis,) = figure.axes
    bars = [(bar.get_y(), bar.get_height()) for bar in axis.patches]
    assert bars == [(0, 2.0), (2.0, 0.5), (2.5, 0.5), (3.0, 0.25), (3.25, 1.75), (0, 5.0)]
    assert "N = 8, 2 positions" in axis.get_title()
