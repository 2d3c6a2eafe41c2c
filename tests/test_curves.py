"""Estimators over nodes by hand, and what the figures made of them draw."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from eagle_tree import analysis, curves, plots
from eagle_tree.calibration import judged_nodes


def nodes(*rows: tuple, **columns) -> pd.DataFrame:
    """Rows (prompt, node, parent, depth, rank, confidence, target's probability, parent accepted, accepted)."""
    names = ["prompt_id", "node", "parent", "depth", "rank", "confidence", "p", "parent_accepted", "accepted"]
    frame = pd.DataFrame(rows, columns=names).assign(policy="a", pass_id=0, **columns)
    with np.errstate(divide="ignore"):
        frame = frame.assign(log_conf=np.log(frame.pop("confidence")), target_log_prob=np.log(frame.pop("p")))
    return frame.assign(score=frame.log_conf)


def two_levels(prompt: str, first: float, second: float, below: float) -> list[tuple]:
    """Two children of the root, and one child of the first of them: the target's probabilities of the three."""
    return [
        (prompt, 1, 0, 1, 0, 0.6, first, True, True),
        (prompt, 2, 0, 1, 1, 0.2, second, True, False),
        (prompt, 3, 1, 2, 0, 0.5, below, True, False),
    ]


# --- acceptance ---


def test_acceptance_counts_only_nodes_whose_parent_was_accepted():
    table = nodes(*two_levels("p", 1, 0, 0.5), ("p", 4, 2, 2, 0, 0.9, 1.0, False, False))
    by_depth = curves.acceptance(table, ["depth"])
    assert by_depth.depth.tolist() == [1, 2]
    assert by_depth.acceptance.tolist() == [0.5, 0.5]  # node 4 would make the second 0.75
    assert by_depth.nodes.tolist() == [2, 1]
    assert by_depth.confidence.tolist() == pytest.approx([0.4, 0.5])
    assert by_depth.acceptance_low.isna().all()  # one prompt: no interval


def test_acceptance_is_a_ratio_of_sums_with_an_interval_over_prompts():
    """p: three nodes at 1, q: one at 0. Of four nodes three, not the mean of the prompts, 1/2."""
    rows = [("p", place, 0, 1, 0, 0.5, 1.0, True, True) for place in (1, 2, 3)] + [
        ("q", 1, 0, 1, 0, 0.5, 0, True, False)
    ]
    (row,) = curves.acceptance(nodes(*rows), ["depth"]).to_dict("records")
    assert (row["acceptance"], row["acceptance_low"], row["acceptance_high"]) == (0.75, 0.0, 1.0)
    assert (row["nodes"], row["prompts"]) == (4, 2)


def test_a_table_without_accepted_parents_is_refused():
    with pytest.raises(ValueError, match="no node whose parent was accepted"):
        curves.acceptance(nodes(("p", 1, 0, 1, 0, 0.5, 1.0, False, False)), ["depth"])


def test_the_figure_of_acceptance_draws_depths_ranks_and_the_map():
    table = curves.acceptance_by_place(nodes(*two_levels("p", 1, 0.25, 0.5), *two_levels("q", 0.5, 0.25, 0)))
    left, middle, right = plots.acceptance_by_position(table).axes[:3]
    assert left.lines[0].get_xdata().tolist() == [1, 2]
    assert left.lines[0].get_ydata().tolist() == pytest.approx([0.5, 0.25])
    assert middle.lines[0].get_ydata().tolist() == pytest.approx([0.5, 0.25])  # (1.5 + 0.5) / 4 and 0.5 / 2
    drawn = right.images[0].get_array()
    assert drawn.shape == (2, 2)
    assert np.ma.filled(drawn, np.nan) == pytest.approx(np.array([[0.75, 0.25], [0.25, np.nan]]), nan_ok=True)
    assert [text.get_text() for text in right.texts] == ["0.75\n2", "0.25\n2", "0.25\n2"]


def test_positions_are_paths_of_ranks_and_coverage_says_what_was_left_out():
    r"""
        p: root ── 0 ── 0.0       q: root ── 0      (its child is not in the tree)
               └── 1
    """  # fmt: skip
    table = nodes(*two_levels("p", 1, 0, 0.5), ("q", 1, 0, 1, 0, 0.5, 1.0, True, True))
    table = curves.with_position(table)
    assert table.position.tolist() == ["0", "1", "0.0", "0"]
    assert table.above.tolist() == ["", "", "0", ""]
    found = curves.by_position(table, ["0", "0.0", "1", "7"]).set_index("position")
    assert found.index.tolist() == ["0", "0.0", "1"]
    assert found.coverage.to_dict() == {"0": 1.0, "0.0": 0.5, "1": 0.5}


def test_the_spread_between_groups_by_hand():
    """
    Groups (0, 1) and (2, 3): within 1/2 a degree of freedom, among 4, so (4 - 1/2) / 2 between them. Of the 6 ways to
    deal the four values, 2 differ as much.
    """
    spread, p = curves.between([np.array([0.0, 1.0]), np.array([2.0, 3.0])])
    assert spread == pytest.approx(math.sqrt(3.5 / 2))
    assert p == pytest.approx(1 / 3, abs=0.04)
    assert curves.between([np.array([0.0, 1.0]), np.array([1.0, 0.0])]) == (0, 1)  # noise alone
    assert curves.between([np.zeros(9), np.ones(9)]) == (pytest.approx(math.sqrt(0.5)), pytest.approx(1 / 2001))
    assert np.isnan(curves.between([np.array([0.0, 1.0])])).all()
    assert np.isnan(curves.between([np.ones(2), np.ones(2)])).all()


def test_the_figure_of_contexts_draws_prompts_and_thirds():
    position = pd.DataFrame({"position": ["0", "1"], "nodes": [4, 1200], "prompts": 2, "acceptance": [0.8, 0.2]})
    position = position.assign(acceptance_low=[0.7, 0.1], acceptance_high=[0.9, 0.3])
    prompts = pd.DataFrame({"position": ["0", "0", "1"], "prompt_id": ["p", "q", "p"], "acceptance": [0.7, 0.9, 0.2]})
    thirds = pd.DataFrame({"position": ["0", "0"], "third": [0, 2], "acceptance": [0.5, 1.0]})
    thirds = thirds.assign(acceptance_low=np.nan, acceptance_high=np.nan)
    left, right = plots.by_context(position, prompts, thirds).axes
    assert left.lines[0].get_ydata().tolist() == [0.7, 0.9, 0.2]
    assert left.lines[0].get_xdata().round().tolist() == [0, 0, 1]
    assert [label.get_text() for label in right.get_xticklabels()] == ["0\nn = 4", "1\nn = 1.2k"]
    assert [container.lines[0].get_ydata().tolist() for container in right.containers] == [[0.5], [1.0]]


# --- confidence ---


def test_bins_hold_sums_by_prompt_and_the_diagram_draws_their_ratios():
    table = judged_nodes(nodes(*two_levels("p", 1, 0, 0.5), *two_levels("q", 0.5, 0, 0)))
    bins = curves.confidence_bins(table, bins=2)
    assert bins[bins.prompt_id == "p"][["bin", "count", "hits"]].to_numpy().tolist() == [[0, 1, 0], [1, 2, 1.5]]
    points = analysis.reliability(bins)
    assert points.hit_rate.tolist() == pytest.approx([0, 0.5])  # 0 of 2; 1 + 0.5 + 0.5 + 0 of 4
    assert points.hit_rate_low.tolist() == pytest.approx([0, 0.25])
    assert points.hit_rate_high.tolist() == pytest.approx([0, 0.75])
    assert points["count"].tolist() == [2, 4]
    both = pd.concat([points.assign(kind="as drafted", error=0.2), points.assign(kind="isotonic", error=0.1)])
    upper, lower = plots.reliability_diagram(both).axes
    assert [box.get_label() for box in upper.containers] == [
        "as drafted (calibration error 0.200)", "isotonic (calibration error 0.100)",
    ]  # fmt: skip
    assert upper.containers[0].lines[0].get_ydata().tolist() == points.hit_rate.tolist()
    assert lower.lines[1].get_ydata().tolist() == [2, 4]
    assert upper.get_legend().get_title().get_text() == "95 % intervals over 2 prompts"


def test_the_calibration_error_and_its_change_by_hand():
    """Confidence 0.6 and 0.2 in halves, acceptance 1 and 0: (0.4 + 0.2) / 2; calibrated to 0.9 and 0.1: 0.1."""
    rows = [
        (prompt, node, 0, 1, node - 1, c, y, True, False)
        for prompt in "pq"
        for node, c, y in ((1, 0.6, 1), (2, 0.2, 0))
    ]
    judged = judged_nodes(nodes(*rows))
    judged = judged.assign(calibrated=np.where(judged.confidence > 0.5, 0.9, 0.1))
    before, after = (curves.confidence_bins(judged, name, bins=2) for name in ("confidence", "calibrated"))
    assert curves.binned_error(before) == pytest.approx((0.3, 0.3, 0.3))  # both prompts are alike
    assert curves.binned_error(before)[0] == pytest.approx(analysis.calibration_error(before))
    assert curves.error_change(before, after) == pytest.approx((-0.2, -0.2, -0.2))
    with pytest.raises(ValueError, match="not of the same nodes"):
        curves.error_change(before, after[after.prompt_id == "p"])


def test_a_single_prompt_has_an_error_and_no_interval_and_the_figure_says_so():
    bins = curves.confidence_bins(judged_nodes(nodes(*two_levels("p", 1, 0, 0.5))))
    error, low, high = curves.binned_error(bins)
    assert error > 0 and math.isnan(low) and math.isnan(high)
    points = analysis.reliability(bins)
    assert points.hit_rate_low.isna().all()
    upper, _ = plots.reliability_diagram(points.assign(kind="as drafted")).axes
    assert upper.get_legend().get_title().get_text() == "interval n/a (1 prompt)"
    assert all(np.ptp(part[:, 1]) == 0 for part in upper.containers[0].lines[2][0].get_segments())  # no bars


def test_a_diagram_of_nothing_says_why_it_is_empty():
    points = analysis.reliability(pd.DataFrame(columns=["prompt_id", "bin", "count", "confidence", "hits"]))
    (axis,) = plots.reliability_diagram(points.assign(kind="as drafted")).axes
    assert "no node's parent was accepted" in axis.texts[0].get_text()


# --- worth ---


def test_the_marginal_value_is_the_reach_by_place():
    """Scores 0.6, 0.5, 0.2 put the child second: it adds first × below."""
    table = curves.marginal_value(nodes(*two_levels("p", 1, 0.25, 0.5), *two_levels("q", 0.5, 0, 0)))
    assert table.place.tolist() == [1, 2, 3]
    assert table.reach.tolist() == pytest.approx([0.75, 0.25, 0.125])
    assert table.together.tolist() == pytest.approx([1.75, 2.0, 2.125])
    assert table.passes.tolist() == [2, 2, 2]
    left, right = plots.marginal_value(table, price=0.02).axes
    assert left.lines[0].get_ydata().tolist() == pytest.approx([0.6, 0.5, 0.2])
    assert left.containers[0].lines[0].get_ydata().tolist() == pytest.approx([0.75, 0.25, 0.125])
    assert 0.02 in [line.get_ydata()[0] for line in left.lines]
    assert right.lines[0].get_ydata().tolist() == pytest.approx([1.75, 2.0, 2.125])


def test_folklore_groups_add_up_to_all_nodes():
    table = curves.folklore(nodes(*two_levels("p", 1, 0.25, 0.5), *two_levels("q", 0.5, 0, 0)))
    for _, group in table.groupby("question"):
        assert group.node_share.sum() == pytest.approx(1)
        assert group.reach_share.sum() == pytest.approx(1)
    assert table[table.question == "place in the tree"].group.tolist() == ["1", "2", "3"]
    assert table[table.question == "rank among siblings"].group.tolist() == ["0", "1"]


# --- rules ---


def test_the_figure_of_rules_draws_the_least_and_the_most_children_and_whole_trees():
    rows = [(t, rule, k, k * t / 10) for t in (0.5, 1.0) for rule in ("match", "hybrid") for k in (1, 4)]
    frame = pd.DataFrame(rows, columns=["temperature", "rule", "k", "accepted"]).assign(prompts=2)
    frame = frame.assign(accepted_low=frame.accepted, accepted_high=frame.accepted)
    trees = pd.DataFrame({"temperature": [0.5, 0.5, 1.0], "arm": ["chain", "tree", "tree"], "tokens": [1.5, 2.0, 1.8]})
    trees = trees.assign(tokens_low=np.nan, tokens_high=np.nan, prompts=1)
    left, middle, right = plots.acceptance_rules(frame, trees).axes
    assert [left.get_title(), middle.get_title()] == ["1 child of a node", "4 children of a node"]
    assert left.containers[0].lines[0].get_ydata().tolist() == [0.05, 0.1]
    assert middle.containers[1].lines[0].get_ydata().tolist() == [0.2, 0.4]
    assert [box.get_label() for box in middle.containers] == ["match", "hybrid"]
    assert [bar.get_width() for bar in right.patches] == [1.5, 2.0, 1.8]
    assert [label.get_text() for label in right.get_yticklabels()] == ["chain", "tree"]
    assert right.get_xlabel() == "tokens a pass (interval n/a (1 prompt))"


def test_a_diagram_has_a_panel_for_each_temperature():
    points = analysis.reliability(curves.confidence_bins(judged_nodes(nodes(*two_levels("p", 1, 0, 0.5)))))
    both = pd.concat(points.assign(kind="as drafted", panel=f"T = {name}") for name in (0, 1))
    axes = plots.reliability_diagram(both).axes
    assert [axis.get_title() for axis in axes] == ["T = 0", "T = 1", "", ""]
    assert axes[1].containers[0].lines[0].get_ydata().tolist() == points.hit_rate.tolist()
