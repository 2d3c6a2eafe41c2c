"""Figures of time: what a forward costs, where a pass goes, and tokens per second."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from eagle_tree.analysis import STAGES
from eagle_tree.plots.style import COLORS, bars, interval_note, look, nothing_to_draw


def verify_cost(points: pd.DataFrame, title: str = "") -> Figure:
    """T(n)/T(1) of the target's forward, with quartiles; the stairs are what a tree's size has to fit.

    Args:
        points: of a cost table (`cost.POINT_COLUMNS`). A column `machine` tells several tables apart; modelled ones, of
            0 repeats, are dashed lines.
    """
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axis = figure.subplots()
    verify = points[points.stage == "verify"]
    if verify.empty:
        return nothing_to_draw(figure, axis, "no verify time was measured")
    for index, (name, part) in enumerate(verify.groupby([*(["machine"] if "machine" in verify else []), "context"])):
        part = part.sort_values("n")
        base, modelled = part.seconds.iloc[0], not part.repeats.any()
        color, mark = look(index).values()
        label = ", ".join([*map(str, name[:-1]), f"context {name[-1]}"])
        least, most = part.repeats.min(), part.repeats.max()
        repeats = f"{least}" if least == most else f"{least}–{most}"
        label += "" if modelled else f" ({repeats} repeats a point, quartiles)"
        style = {"ls": "--"} if modelled else {"marker": mark, "ms": 4}
        axis.plot(part.n, part.seconds / base, color=color, lw=1.2, label=label, **style)
        axis.fill_between(part.n, part.low / base, part.high / base, color=color, alpha=0.2, lw=0)
    axis.axhline(1, color="0.6", lw=1, zorder=0)
    axis.set(xlabel="positions verified in one forward, n", ylabel="T(n) / T(1)", ylim=(0, None))
    axis.set_xlim(0, 1.05 * verify.n[verify.repeats > 0].max() if verify.repeats.any() else None)
    axis.grid(alpha=0.25)
    figure.legend(*axis.get_legend_handles_labels(), frameon=False, fontsize=8, loc="outside lower center", ncols=2)
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def speed_by_size(table: pd.DataFrame, baseline: float | None = None, title: str = "") -> Figure:
    """Tokens per second against N: filled marks are measured, hollow ones and lines are what the cost table says.

    Args:
        table: one row a policy and size: family, nodes (a pass), predicted tokens per second, tokens_per_second with
            `_low` and `_high` (NaN where it was not measured), prompts.
        baseline: tokens per second of autoregressive decoding, a line across.
    """
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axis = figure.subplots()
    for index, (family, group) in enumerate(table.groupby("family", sort=False)):
        group, style = group.sort_values("nodes"), look(index)
        axis.plot(group.nodes, group.predicted, lw=1.2, mfc="none", mew=0.7, ms=5, label=family, **style)
        known = group[group.tokens_per_second.notna()]
        if len(known):
            axis.errorbar(
                known.nodes, known.tokens_per_second, bars(known, "tokens_per_second"), ls="", capsize=2, ms=5, **style
            )
    if baseline is not None:
        axis.axhline(baseline, color="0.4", lw=1, ls="--", label="autoregressive")
    note = "hollow marks and lines: cost table"
    if table.tokens_per_second.notna().any():
        note = f"filled marks: measured, {interval_note(table, 'tokens_per_second')}\n{note}"
    axis.set(xlabel="draft nodes a pass, N", ylabel="tokens per second", xlim=(0, None), ylim=(0, None))
    axis.grid(alpha=0.25)
    figure.legend(
        *axis.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8,
        title=note, title_fontsize=8,
    )  # fmt: skip
    figure.suptitle(title or "Tokens per second by size", fontsize=11)
    return figure


def pass_times(table: pd.DataFrame, title: str = "") -> Figure:
    """Milliseconds of a pass by stage, stacked, one bar a policy (`analysis.stage_times`); the bar on top is the
    interval of the whole."""
    figure = Figure(figsize=(2.6 + 1.3 * max(2, len(table)), 4.4), layout="constrained")
    axis = figure.subplots()
    if table.empty:
        return nothing_to_draw(figure, axis, "no pass was timed")
    level = pd.Series(0.0, table.index)
    for index, stage in enumerate(STAGES):
        color = "0.75" if index == len(COLORS) else COLORS[index]
        axis.bar(range(len(table)), table[stage], bottom=level, width=0.62, color=color, label=stage)
        level += table[stage]
    axis.errorbar(range(len(table)), table.total, bars(table, "total"), ls="", color="0.2", capsize=3, lw=1)
    labels = [f"{row.policy}\nn = {row.passes}" for row in table.itertuples()]
    axis.set_xticks(range(len(table)), labels, fontsize=8)
    axis.set(ylabel="milliseconds a pass", ylim=(0, None))
    axis.grid(axis="y", alpha=0.25)
    handles, names = axis.get_legend_handles_labels()
    note = f"{interval_note(table, 'total')}\nof the whole pass"
    figure.legend(
        handles[::-1], names[::-1], loc="outside right upper", frameon=False, fontsize=8, title=note, title_fontsize=8
    )
    figure.suptitle(title or "Where a pass goes", fontsize=11)
    return figure
