"""Figures of time and of promises: what is drawn of hand-made frames."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from test_cost import points

from eagle_tree import analysis, plots
from eagle_tree.record import PASS_SCHEMA


def test_costs_are_drawn_relative_to_one_position_and_modelled_ones_dashed():
    measured = points("verify", {1: 2.0, 8: 2.0, 16: 5.0}).assign(machine="here")
    modelled = points("verify", {1: 1.0, 16: 1.0}).assign(machine="there (modelled)", repeats=0)
    other = points("draft", {1: 9.0}).assign(machine="here")
    (axis,) = plots.verify_cost(pd.concat([measured, modelled, other])).axes
    here, there = (line for line in axis.lines if line.get_label() and not line.get_label().startswith("_"))
    assert here.get_xdata().tolist() == [1, 8, 16] and here.get_ydata().tolist() == [1, 1, 2.5]
    assert there.get_ydata().tolist() == [1, 1] and there.get_linestyle() == "--"
    assert "here" in here.get_label() and "repeats" in here.get_label() and "repeats" not in there.get_label()
    (empty,) = plots.verify_cost(other).axes
    assert "no verify time" in empty.texts[0].get_text()


def test_speeds_are_marks_where_measured_and_a_line_where_predicted():
    rows = [
        ("a", 4, 29.0, 30.0, 29.5, 31.0),
        ("a", 8, 31.0, np.nan, np.nan, np.nan),
        ("b", 2, 27.0, 28.0, np.nan, np.nan),
    ]
    names = ["family", "nodes", "predicted", "tokens_per_second", "tokens_per_second_low", "tokens_per_second_high"]
    table = pd.DataFrame(rows, columns=names).assign(prompts=3)
    figure = plots.speed_by_size(table, baseline=25.0)
    (axis,) = figure.axes
    assert [line.get_label() for line in axis.lines if line.get_label() in "ab"] == ["a", "b"]
    assert axis.lines[0].get_ydata().tolist() == [29.0, 31.0]
    marks = [container.lines[0] for container in axis.containers]
    assert [mark.get_xdata().tolist() for mark in marks] == [[4], [2]]
    assert [mark.get_ydata().tolist() for mark in marks] == [[30.0], [28.0]]
    ends = axis.containers[0].lines[2][0].get_segments()[0][:, 1]
    assert ends.tolist() == [29.5, 31.0]
    assert axis.lines[-1].get_ydata()[0] == 25.0


def timed(policy: str, prompt: str, number: int, **seconds: float) -> dict:
    zeros = dict.fromkeys(PASS_SCHEMA.names, 0.0)
    return {**zeros, "policy": policy, "prompt_id": prompt, "pass_id": number, **seconds}


PASS = {"grow_s": 0.003, "drafter_forward_s": 0.002, "verify_s": 0.006, "target_forward_s": 0.005, "select_s": 0.001}


def test_stages_add_up_to_the_pass_without_recording():
    """12 ms of which 1 is recording: 2 + 1 drafter and grow, 1 select, 5 + 1 target and verify, so 1 is other."""
    rows = [timed("a", prompt, 0, pass_s=0.012, record_s=0.001, **PASS) for prompt in "pq"]
    (row,) = analysis.stage_times(pd.DataFrame(rows)).to_dict("records")
    expected = {"drafter forward": 2, "grow": 1, "select": 1, "target forward": 5, "verify": 1, "other": 1}
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert (row["total"], row["total_low"], row["total_high"]) == pytest.approx((11, 11, 11))
    assert sum(row[name] for name in analysis.STAGES) == pytest.approx(row["total"])
    (axis,) = plots.pass_times(pd.DataFrame([row])).axes
    assert [bar.get_height() for bar in axis.patches] == pytest.approx([row[name] for name in analysis.STAGES])
    assert axis.patches[-1].get_y() + axis.patches[-1].get_height() == pytest.approx(11)
    assert axis.get_xticklabels()[0].get_text() == "a\nn = 2"


def test_stages_of_a_replay_are_refused_and_of_nothing_drawn_as_such():
    row = timed("a", "p", 0, verify_s=float("nan"))
    with pytest.raises(ValueError, match="replayed or followed"):
        analysis.stage_times(pd.DataFrame([row]))
    (axis,) = plots.pass_times(pd.DataFrame(columns=["policy", "total"])).axes
    assert "no pass was timed" in axis.texts[0].get_text()


def test_promises_by_prompt_are_means_over_its_passes():
    rows = [timed("a", "p", k, expected_draft=2.0 + k, expected_target=2.0, accepted=k, n_nodes=3) for k in (0, 1)]
    rows += [timed("a", "q", 0, expected_draft=3.0, expected_target=np.nan, accepted=4, n_nodes=3)]
    rows += [timed("autoregressive", "p", 0, expected_draft=1.0, expected_target=1.0)]
    table = analysis.by_prompt(pd.DataFrame(rows))
    assert table.realised.tolist() == [1.5, 5.0, 1.0] and table.passes.tolist() == [2, 1, 1]
    left, right = plots.expected_by_prompt(table).axes
    assert left.lines[0].get_xdata().tolist() == [2.5, 3.0] and left.lines[0].get_ydata().tolist() == [1.5, 5.0]
    assert left.lines[0].get_label() == "a (n = 2 prompts, 3 passes)"
    assert [line.get_label() for line in left.lines if line.get_label().startswith("autoregressive")] == []
    assert right.lines[0].get_xdata()[0] == 2.0
