"""Figures of policies beside each other: what is drawn of hand-made frames."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from eagle_tree import plots


def rows(names: list[str], *values: tuple) -> pd.DataFrame:
    return pd.DataFrame(list(values), columns=names)


def errors_of(container) -> list[list[float]]:
    """The ends of the error bars of an `errorbar`, upright or lying."""
    segments = container.lines[2][0].get_segments()
    upright = all(start[0] == end[0] for start, end in segments)
    return [[start[int(upright)], end[int(upright)]] for start, end in segments]


SIZES = rows(
    ["temperature", "policy", "nodes", "tau", "tau_low", "tau_high"],
    (0, "chain", 8, 1.9, 1.8, 2.0),
    (0, "chain", 2, 1.5, 1.4, 1.7),
    (0, "tree", 8, 2.5, 2.25, 2.75),
    (1, "chain", 2, 1.25, np.nan, np.nan),
).assign(prompts=3)


def test_tau_by_size_draws_a_line_a_policy_in_order_of_size_with_its_interval():
    cold, warm = plots.tau_by_size(SIZES).axes
    assert [axis.get_title() for axis in (cold, warm)] == ["T = 0", "T = 1"]
    chain, tree = cold.containers
    assert chain.lines[0].get_xdata().tolist() == [2, 8] and chain.lines[0].get_ydata().tolist() == [1.5, 1.9]
    assert errors_of(chain) == [pytest.approx([1.4, 1.7]), pytest.approx([1.8, 2.0])]
    assert tree.lines[0].get_ydata().tolist() == [2.5] and tree.get_label() == "tree"
    assert warm.containers[0].lines[0].get_ydata().tolist() == [1.25]
    assert cold.get_ylim() == warm.get_ylim() and cold.get_ylim()[1] > 2.75
    assert [label.get_text() for label in cold.get_xticklabels()] == ["2", "8"]


def test_tau_by_size_names_powers_of_two_where_sizes_are_many():
    many = pd.DataFrame({"temperature": 0, "policy": "a", "nodes": range(3, 20), "tau": 2.0, "prompts": 1})
    (axis,) = plots.tau_by_size(many.assign(tau_low=2.0, tau_high=2.0)).axes
    assert [label.get_text() for label in axis.get_xticklabels()] == ["1", "2", "4", "8", "16"]


def test_tau_by_size_says_how_many_prompts_the_intervals_are_over():
    (legend,) = plots.tau_by_size(SIZES).legends
    assert legend.get_title().get_text() == "95 % intervals over 3 prompts"
    assert [text.get_text() for text in legend.get_texts()] == ["chain", "tree"]


def test_tau_by_task_groups_bars_by_task_with_the_number_of_prompts_under_each():
    table = rows(
        ["temperature", "task", "policy", "tau", "tau_low", "tau_high", "prompts"],
        (0, "code", "static", 2.0, 1.5, 2.5, 3),
        (0, "code", "dynamic", 3.0, 2.5, 3.5, 3),
        (0, "all", "static", 1.75, 1.5, 2.0, 15),
        (0, "all", "dynamic", 2.25, 2.0, 2.5, 15),
        (1, "code", "dynamic", 1.5, 1.25, 1.75, 3),
    )
    cold, warm = plots.tau_by_task(table).axes
    static, dynamic = (container for container in cold.containers if hasattr(container, "patches"))
    assert [bar.get_height() for bar in static] == [2.0, 1.75] and static.get_label() == "static"
    assert [bar.get_height() for bar in dynamic] == [3.0, 2.25]
    assert [bar.get_x() + bar.get_width() for bar in static] == pytest.approx([bar.get_x() for bar in dynamic])
    drawn = [container for container in cold.containers if not hasattr(container, "patches")]
    assert errors_of(drawn[1]) == [pytest.approx([2.5, 3.5]), pytest.approx([2.0, 2.5])]
    assert [label.get_text() for label in warm.get_xticklabels()] == ["code\nn = 3", "all\nn = 15"]
    heights = [bar.get_height() for bar in warm.containers[2]]
    assert heights[0] == 1.5 and np.isnan(heights[1])


def test_tau_by_variant_draws_a_bar_a_variant_from_zero_and_names_its_value():
    table = rows(
        ["temperature", "variant", "tau", "tau_low", "tau_high"],
        (0, "without value and rerank", 1.5, 1.25, 1.75),
        (0, "full", 2.5, 2.25, 2.75),
        (1, "without value and rerank", 1.25, 1.0, 1.5),
        (1, "full", 2.0, 1.75, 2.25),
    ).assign(prompts=4)
    cold, warm = plots.tau_by_variant(table).axes
    assert [bar.get_height() for bar in cold.containers[0]] == [1.5, 2.5]
    assert [bar.get_height() for bar in warm.containers[0]] == [1.25, 2.0]
    assert [text.get_text() for text in cold.texts] == ["1.50", "2.50"]
    assert errors_of(cold.containers[1]) == [[1.25, 1.75], [2.25, 2.75]]
    assert cold.get_ylim()[0] == 0 and cold.get_xlabel() == "95 % intervals over 4 prompts"
    assert cold.get_xticklabels()[0].get_text() == "without value\nand rerank"


def test_accepted_lengths_are_drawn_beside_the_geometric_law_on_a_logarithmic_scale():
    table = rows(
        ["depth", "at_least", "at_least_low", "at_least_high", "acceptance", "acceptance_low", "acceptance_high"],
        (1, 0.5, 0.4, 0.6, 0.5, 0.4, 0.6),
        (2, 0.3, 0.2, 0.4, 0.6, 0.5, 0.7),
    ).assign(temperature=0, geometric=[0.55, 0.3025], rate=0.55, passes=20, prompts=5)
    top, bottom = plots.accepted_lengths(table).axes
    for axis, measured, law in ((top, [0.5, 0.3], [0.55, 0.3025]), (bottom, [0.5, 0.6], [0.55, 0.55])):
        assert axis.containers[0].lines[0].get_ydata().tolist() == measured
        dashed = next(line for line in axis.lines if line.get_label().startswith("geometric"))
        assert dashed.get_ydata().tolist() == law and dashed.get_label() == "geometric, α = 0.55"
    assert errors_of(bottom.containers[0]) == [pytest.approx([0.4, 0.6]), pytest.approx([0.5, 0.7])]
    assert top.get_yscale() == "log" and "20 passes" in top.get_title() and "5 prompts" in top.get_title()


def test_speed_ratios_stand_from_the_top_down_in_their_groups_beside_the_line_at_one():
    table = rows(
        ["label", "group", "ratio", "ratio_low", "ratio_high"],
        ("over best fixed", "replayed", 1.0, 0.95, 1.05),
        ("over best fixed", "measured", 0.9, 0.8, 1.1),
        ("over the default", "replayed", 1.5, 1.25, 1.75),
    ).assign(prompts=6)
    (axis,) = plots.speed_ratios(table).axes
    replayed, measured = axis.containers
    assert replayed.lines[0].get_xdata().tolist() == [1.0, 1.5] and replayed.lines[0].get_ydata().tolist() == [2, 0]
    assert measured.lines[0].get_xdata().tolist() == [0.9] and measured.lines[0].get_ydata().tolist() == [1]
    assert errors_of(replayed) == [pytest.approx([0.95, 1.05]), pytest.approx([1.25, 1.75])]
    assert [label.get_text() for label in axis.get_yticklabels()] == [
        "over best fixed",
        "over best fixed",
        "over the default",
    ]
    assert [1, 1] in [list(line.get_xdata()) for line in axis.lines]
