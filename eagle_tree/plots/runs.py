"""Figures of recorded runs, of drafters on their own and of policies by size."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eagle_tree.analysis import binned, reliability
from eagle_tree.plots.style import COLORS, MARKERS, look


def expected_against_realised(passes: pd.DataFrame, title: str = "") -> Figure:
    """Tokens per pass that were expected and that came, by policy.

    Left: what the drafter's confidences promised (1 + sum of exp(score)). Right: what the target's own
    probabilities of the drafted nodes promised (1 + sum of reach). Points are quantile bins of passes
    with two standard errors; on the diagonal the promise was kept.
    """
    figure, panels = expectation_panels(title or "Expected and realised tokens per pass")
    drafting = [(name, group) for name, group in passes.groupby("policy", sort=False) if group.n_nodes.any()]
    top = 1.5
    for axis, column in panels.items():
        for index, (name, group) in enumerate(drafting):
            if group[column].isna().all():
                continue
            points, label = binned(group, column), f"{name} (n = {len(group)})"
            axis.errorbar(
                points.expected, points.realised, 2 * points.error, label=label, capsize=2, ms=5, **look(index)
            )
            top = max(top, points.expected.max(), (points.realised + 2 * points.error).max())
    return on_the_diagonal(figure, panels, 1, top)


def expected_by_prompt(table: pd.DataFrame, title: str = "") -> Figure:
    """The same prompt by prompt, one mark a prompt (`analysis.by_prompt`): means over its passes."""
    figure, panels = expectation_panels(title or "Expected and realised tokens per pass, by prompt")
    columns = ["expected_draft", "expected_target", "realised"]
    drafting = table[table.groupby("policy").expected_draft.transform("max") > 1]
    for axis, column in panels.items():
        for index, (name, group) in enumerate(drafting.groupby("policy", sort=False)):
            if group[column].notna().any():
                label = f"{name} (n = {len(group)} prompts, {group.passes.sum()} passes)"
                axis.plot(group[column], group.realised, ls="", ms=5, alpha=0.8, label=label, **look(index))
    top = max(1.5, drafting[columns].max(axis=None)) if len(drafting) else 1.5
    return on_the_diagonal(figure, panels, 1, top)


def expectation_panels(title: str) -> tuple[Figure, dict[Axes, str]]:
    """Two panels, and the column of expected tokens that each shows."""
    figure = Figure(figsize=(9.5, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    left.set(xlabel="expected by the drafter (tokens per pass)", ylabel="realised (tokens per pass)")
    right.set(xlabel="expected under the target (tokens per pass)")
    figure.suptitle(title, fontsize=11)
    return figure, {left: "expected_draft", right: "expected_target"}


def on_the_diagonal(figure: Figure, panels: Iterable[Axes], low: float, high: float) -> Figure:
    """The diagonal from low to high in every panel, and a legend in the first that shows something."""
    drawn = [axis for axis in panels if axis.get_legend_handles_labels()[0]]
    for axis in panels:
        axis.plot([low, high], [low, high], color="0.6", lw=1, ls="--", zorder=0)
        axis.set(xlim=(low - 0.1, 1.03 * high), ylim=(low - 0.1, 1.03 * high))
        axis.grid(alpha=0.25)
    if drawn:
        drawn[0].legend(frameon=False, fontsize=9, loc="upper left")
    return figure


def training_curve(metrics: pd.DataFrame) -> Figure:
    """Loss, and agreement with the target's first choice by self-fed depth, against optimiser steps."""
    figure = Figure(figsize=(9.5, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    smooth = metrics.drop(columns="step").rolling(max(1, len(metrics) // 50), min_periods=1).mean()
    left.plot(metrics.step, metrics.loss, color="0.8", lw=0.6)
    left.plot(metrics.step, smooth.loss, color=COLORS[0])
    left.set(xlabel="optimiser step", ylabel="loss (nats, weighted sum over depths)")
    left.set_ylim(0, metrics.loss.quantile(0.98) * 1.2)
    for index, name in enumerate(column for column in metrics if column.startswith("agreement_")):
        depth = name.removeprefix("agreement_")
        right.plot(metrics.step, smooth[name], color=COLORS[index % len(COLORS)], label=f"depth {depth}")
    right.set(xlabel="optimiser step", ylabel="share of positions that agree", ylim=(0, None))
    right.legend(frameon=False, fontsize=9)
    for axis in (left, right):
        axis.grid(alpha=0.25)
    return figure


def drafter_alone(rates: pd.DataFrame, bins: pd.DataFrame, title: str = "") -> Figure:
    """A drafter along the target's own texts: hit rates (`analysis.hit_rates`) and confidences (`evaluate.measure`).

    Left: share of positions whose true token is among the first k candidates, by depth of self-feeding, with
    95 % intervals over prompts. Right: hit rate of candidates against their confidence; on the diagonal it
    means what it says. The bars count the candidates.
    """
    figure = Figure(figsize=(9.5, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    ranks = [int(name.removeprefix("hit_")) for name in rates if name.removeprefix("hit_").isdigit()]
    for index, rank in enumerate(ranks):
        value, low, high = (rates[f"hit_{rank}{end}"] for end in ("", "_low", "_high"))
        error = [(value - low).fillna(0.0).clip(lower=0), (high - value).fillna(0.0).clip(lower=0)]
        style = {"color": COLORS[index % len(COLORS)], "marker": MARKERS[index % len(MARKERS)]}
        label = "first candidate" if rank == 1 else f"among the first {rank}"
        left.errorbar(rates.depth, value, error, label=label, capsize=2, ms=5, **style)
    left.set(xlabel="depth (own outputs fed back)", ylabel="share of positions with the true token", ylim=(0, 1.02))
    left.set_xticks(rates.depth)
    left.legend(frameon=False, fontsize=9)
    points = reliability(bins)
    right.plot([0, 1], [0, 1], color="0.6", lw=1, ls="--", zorder=1)
    right.plot(points.confidence, points.hit_rate, color=COLORS[0], marker="o", ms=5, zorder=3)
    right.set(xlabel="confidence of a candidate", ylabel="share that is the true token", xlim=(0, 1), ylim=(0, 1.02))
    counts, width = right.twinx(), 1 / (bins.bin.max() + 1)
    counts.bar((points.bin + 0.5) * width, points["count"], 0.9 * width, color="0.88", zorder=0)
    counts.set(yscale="log", ylabel="candidates")
    right.set_zorder(counts.get_zorder() + 1)
    right.patch.set_visible(False)
    for axis in (left, right):
        axis.grid(alpha=0.25)
    figure.suptitle(title or "The drafter along the target's own texts", fontsize=11)
    return figure


def waterfall(regret: pd.DataFrame, title: str = "") -> Figure:
    """Where expected tokens are lost, one panel a policy (`regret.decomposed`): from its tree to one accepted whole.

    The first bar is the policy's expected tokens per pass under the target; each step adds what one cause costs, with
    its 95 % interval over prompts; the last bar is 1 + min(N, D), every node on one path accepted.
    """
    steps = {
        "ordering": "ordering",
        "pool": "pool",
        "vocabulary": "draft\nvocabulary",
        "no_drafter": "no drafter\ncould give",
    }
    figure = Figure(figsize=(1.2 + 4.2 * len(regret), 4), layout="constrained")
    panels = figure.subplots(1, len(regret), sharey=True, squeeze=False)[0]
    for axis, row in zip(panels, regret.to_dict("records"), strict=True):
        level = row["policy"]
        axis.bar(0, level, color=COLORS[0])
        axis.annotate(f"{level:.2f}", (0, level), ha="center", va="bottom", fontsize=9)
        for place, name in enumerate(steps, 1):
            error = [[max(0.0, row[name] - row[f"{name}_low"])], [max(0.0, row[f"{name}_high"] - row[name])]]
            axis.bar(place, row[name], bottom=level, color=COLORS[place])
            if not any(math.isnan(side[0]) for side in error):
                axis.errorbar(place, level + row[name], error, color="0.3", capsize=2, lw=1)
            axis.plot([place - 1.4, place + 0.4], [level, level], color="0.6", lw=0.8)
            level += row[name]
            axis.annotate(f"+{row[name]:.2f}", (place, level), ha="center", va="bottom", fontsize=9)
        axis.bar(len(steps) + 1, row["whole"], color="0.6")
        axis.annotate(f"{row['whole']:.2f}", (len(steps) + 1, row["whole"]), ha="center", va="bottom", fontsize=9)
        axis.set_xticks(range(len(steps) + 2), ["policy", *steps.values(), "accepted\nwhole"], fontsize=8)
        axis.set_title(f"{row['name']} (N = {row['nodes']:.0f}, {row['positions']} positions)", fontsize=10)
        axis.grid(axis="y", alpha=0.25)
    panels[0].set_ylabel("expected tokens per pass under the target")
    if title:
        figure.suptitle(title, fontsize=11)
    return figure
