"""Figures of policies beside each other: tokens per pass, how many are accepted, and speed ratios."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eagle_tree.plots.style import COLORS, bars, interval_note, look

SHARES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
MOST_TICKS = 8
"""Sizes that an axis names one by one; of more it names powers of two."""
TAU = "τ (tokens per pass, bonus included)"


def by_temperature(table: pd.DataFrame, width: float, height: float) -> tuple[Figure, list[tuple[Axes, pd.DataFrame]]]:
    """A figure with one panel a temperature, side by side on one scale, and the rows that belong into each."""
    groups = list(table.groupby("temperature"))
    figure = Figure(figsize=(width * len(groups), height), layout="constrained")
    axes = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    for axis, (temperature, _) in zip(axes, groups, strict=True):
        axis.set_title(f"T = {temperature:g}", fontsize=10)
        axis.grid(axis="y", alpha=0.25)
    return figure, [(axis, rows) for axis, (_, rows) in zip(axes, groups, strict=True)]


def legend_below(figure: Figure, axis: Axes, title: str) -> None:
    """One legend for all panels, under them."""
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False, fontsize=8,
        title=title, title_fontsize=8,
    )  # fmt: skip


def tau_by_size(table: pd.DataFrame, title: str = "") -> Figure:
    """τ against the number of draft nodes that are verified, a line a policy, a panel a temperature.

    Args:
        table: one row a temperature, policy and size: temperature, policy, nodes, tau with `_low` and `_high`, prompts.
    """
    figure, panels = by_temperature(table, 5.2, 4.6)
    names = list(dict.fromkeys(table.policy))
    for axis, rows in panels:
        for index, name in enumerate(names):
            line = rows[rows.policy == name].sort_values("nodes")
            axis.errorbar(line.nodes, line.tau, bars(line, "tau"), label=name, capsize=2, ms=5, lw=1.2, **look(index))
        sizes = sorted(rows.nodes.unique())
        if len(sizes) > MOST_TICKS:
            sizes = [2**place for place in range(int(np.log2(sizes[-1])) + 1)]
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, [f"{size:g}" for size in sizes], minor=False)
        axis.minorticks_off()
        axis.set_xlabel("draft nodes verified in a pass, N")
    panels[0][0].set_ylim(1, 1.04 * table[["tau", "tau_high"]].max(axis=None))
    panels[0][0].set_ylabel(TAU)
    legend_below(figure, panels[0][0], interval_note(table, "tau"))
    figure.suptitle(title or "Tokens per pass by size", fontsize=11)
    return figure


def tau_by_task(table: pd.DataFrame, title: str = "") -> Figure:
    """τ of policies by task, bars in groups, a panel a temperature; the last group is the whole.

    Args:
        table: one row a temperature, task and policy: temperature, task, policy, tau with `_low` and `_high`, prompts
            (of the task). Tasks and policies stand in the order of their first appearance.
    """
    tasks, names = list(dict.fromkeys(table.task)), list(dict.fromkeys(table.policy))
    groups = list(table.groupby("temperature"))
    figure = Figure(figsize=(2.2 + 1.25 * len(tasks), 1.2 + 2.7 * len(groups)), layout="constrained")
    axes = figure.subplots(len(groups), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    width = 0.84 / len(names)
    for axis, (temperature, rows) in zip(axes, groups, strict=True):
        for index, name in enumerate(names):
            part = rows[rows.policy == name].set_index("task").reindex(tasks)
            place = np.arange(len(tasks)) + (index - (len(names) - 1) / 2) * width
            color = COLORS[index % len(COLORS)]
            hatch = "" if index < len(COLORS) else "//"
            axis.bar(place, part.tau, width, color=color, hatch=hatch, edgecolor="white", lw=0.3, label=name)
            axis.errorbar(place, part.tau, bars(part, "tau"), ls="", color="0.25", lw=0.7)
        axis.set_title(f"T = {temperature:g}", fontsize=10)
        axis.set(ylabel="τ (1: autoregressive)", ylim=(1, None))
        axis.grid(axis="y", alpha=0.25)
    counts = table.groupby("task").prompts.max()
    axes[-1].set_xticks(range(len(tasks)), [f"{task}\nn = {counts[task]}" for task in tasks], fontsize=8)
    legend_below(figure, axes[0], "n prompts; bars: 95 % intervals over prompts")
    figure.suptitle(title or "Tokens per pass by task", fontsize=11)
    return figure


def tau_by_variant(table: pd.DataFrame, title: str = "") -> Figure:
    """τ of a policy's variants, a bar each, a panel a temperature; the value stands in its bar.

    Args:
        table: one row a temperature and variant: temperature, variant, tau with `_low` and `_high`, prompts.
    """
    figure, panels = by_temperature(table, 4.4, 4.2)
    for axis, rows in panels:
        place = range(len(rows))
        axis.bar(place, rows.tau, 0.66, color=[COLORS[index % len(COLORS)] for index in place])
        axis.errorbar(place, rows.tau, bars(rows, "tau"), ls="", color="0.2", capsize=3, lw=1)
        for x, tau in zip(place, rows.tau, strict=True):
            axis.annotate(f"{tau:.2f}", (x, 0), (0, 6), textcoords="offset points", ha="center", color="white")
        axis.set_xticks(place, [name.replace(" and ", "\nand ") for name in rows.variant], fontsize=8)
        axis.set(xlabel=interval_note(rows, "tau"), ylim=(0, None))
    panels[0][0].set_ylabel(TAU)
    figure.suptitle(title or "Tokens per pass by variant", fontsize=11)
    return figure


def accepted_lengths(table: pd.DataFrame, title: str = "") -> Figure:
    """How far a chain gets, and what a geometric law with one acceptance rate says; a column of panels a temperature.

    Top: share of passes that accept at least k tokens, on a logarithmic scale, where a geometric law is straight.
    Bottom: the acceptance of the k-th token given the one before, and the constant of the law.

    Args:
        table: one row a temperature and k ≥ 1: temperature, depth (k), at_least and acceptance with `_low` and `_high`,
            geometric (its share of passes that accept at least k), rate (its constant), passes, prompts.
    """
    groups = list(table.groupby("temperature"))
    figure = Figure(figsize=(4.8 * len(groups), 6.4), layout="constrained")
    axes = figure.subplots(2, len(groups), sharex=True, sharey="row", squeeze=False)
    for (top, bottom), (temperature, rows) in zip(axes.T, groups, strict=True):
        for axis, column, law in ((top, "at_least", rows.geometric), (bottom, "acceptance", rows.rate)):
            axis.errorbar(rows.depth, rows[column], bars(rows, column), label="measured", capsize=2, ms=5, **look(0))
            axis.plot(rows.depth, law, color=COLORS[1], ls="--", label=f"geometric, α = {rows.rate.iloc[0]:.2f}")
            axis.grid(alpha=0.25)
        top.set_yscale("log")
        top.set_yticks(SHARES, [f"{share:g}" for share in SHARES])
        top.minorticks_off()
        top.set_title(
            f"T = {temperature:g} ({rows.passes.iloc[0]} passes, {interval_note(rows, 'at_least')})", fontsize=9
        )
        top.legend(frameon=False, fontsize=8)
        bottom.set(xlabel="draft token of the chain, k", ylim=(0, 1))
        bottom.set_xticks(rows.depth)
    least = table[["at_least", "geometric"]].where(lambda shares: shares > 0).min(axis=None)
    axes[0, 0].set_ylim(0.7 * least, 1)
    axes[0, 0].set_ylabel("share of passes that accept\nk tokens or more")
    axes[1, 0].set_ylabel("acceptance of the k-th token\ngiven the (k − 1)-th")
    figure.suptitle(title or "Accepted tokens of a chain", fontsize=11)
    return figure


def speed_ratios(table: pd.DataFrame, title: str = "") -> Figure:
    """Speed ratios with 95 % intervals, a row each, in groups; the line is at 1.

    Args:
        table: one row a comparison: label, group, ratio with `_low` and `_high`, prompts.
    """
    figure = Figure(figsize=(7.6, 1.3 + 0.36 * len(table)), layout="constrained")
    axis = figure.subplots()
    names = list(dict.fromkeys(table.group))
    place = np.arange(len(table))[::-1]
    for index, name in enumerate(names):
        mine = (table.group == name).to_numpy()
        rows = table[mine]
        axis.errorbar(
            rows.ratio, place[mine], xerr=bars(rows, "ratio"), ls="", capsize=3, ms=6, label=name, **look(index)
        )
    axis.axvline(1, color="0.5", lw=1, ls="--", zorder=0)
    axis.set_yticks(place, table.label, fontsize=8)
    axis.set(xlabel=f"ratio of tokens per second ({interval_note(table, 'ratio')})", ylim=(-0.6, len(table) - 0.4))
    axis.grid(axis="x", alpha=0.25)
    figure.legend(
        *axis.get_legend_handles_labels(), loc="outside lower center", ncols=len(names), frameon=False, fontsize=8
    )
    figure.suptitle(title or "Speed ratios", fontsize=11)
    return figure
