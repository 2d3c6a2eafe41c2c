"""Figures of drafted nodes: confidence, acceptance, and what one more node is worth."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from eagle_tree.plots.style import bars, interval_note, look, nothing_to_draw

WHITE_ON = 0.55
"""Cells of a map that are darker than this share of its range carry white figures."""
LEAST_VALUE = 1e-4
"""Tokens a pass below which the value of a node is off the figure."""


def reliability_diagram(points: pd.DataFrame, title: str = "") -> Figure:
    """Confidence against acceptance, with counts; before and after calibration, one series a `kind`.

    Args:
        points: rows of `analysis.reliability` with a column `kind`, such as "as drafted" and "isotonic", in the order
            of the legend; a column `error`, the kind's calibration error, goes into the legend if it is there.
    """
    figure = Figure(figsize=(6.4, 6.2), layout="constrained")
    if points.empty:
        return nothing_to_draw(figure, figure.subplots(), "no node's parent was accepted")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    upper.plot([0, 1], [0, 1], color="0.6", lw=1, ls="--", zorder=0)
    for index, (kind, group) in enumerate(points.groupby("kind", sort=False)):
        style, label = look(index), kind
        if "error" in group:
            label += f" (calibration error {group.error.iloc[0]:.3f})"
        upper.errorbar(
            group.confidence, group.hit_rate, bars(group, "hit_rate"), label=label, capsize=2, ms=5, lw=1.2, **style
        )
        lower.plot(group.confidence, group["count"], ms=4, lw=1.2, **style)
    upper.set(ylabel="acceptance, given the parent's", ylim=(-0.02, 1.02))
    upper.legend(frameon=False, fontsize=9, loc="upper left", title=interval_note(points, "hit_rate"), title_fontsize=8)
    lower.set(xlabel="confidence of a node", ylabel="nodes in the bin", yscale="log", xlim=(-0.02, 1.02))
    for axis in (upper, lower):
        axis.grid(alpha=0.25)
    figure.suptitle(title or "What confidences are worth", fontsize=11)
    return figure


def acceptance_by_position(table: pd.DataFrame, title: str = "") -> Figure:
    """Acceptance given the parent's: by depth, by rank among siblings, and by both (`curves.acceptance_by_place`).

    The hollow marks are the mean confidence that the drafter had; cells of the map say how many nodes they count.
    """
    figure = Figure(figsize=(12.5, 4.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1, 1.5))
    for axis, by in ((left, "depth"), (middle, "rank")):
        group, style = table[table.by == by].sort_values(by), look(0)
        axis.errorbar(
            group[by], group.acceptance, bars(group, "acceptance"), capsize=2, ms=5, label="accepted", **style
        )
        axis.plot(group[by], group.confidence, "o", mfc="none", color="0.4", ms=6, label="confidence")
        axis.set(xlabel=by if by == "depth" else "rank among siblings, 0 is the drafter's first", ylim=(-0.02, 1.02))
        axis.set_xticks(group[by])
        axis.grid(alpha=0.25)
    left.set_ylabel("acceptance, given the parent's")
    left.legend(frameon=False, fontsize=9, title=interval_note(table, "acceptance"), title_fontsize=8)
    both = table[table.by == "depth × rank"]
    rates, counts = (both.pivot(index="rank", columns="depth", values=name) for name in ("acceptance", "nodes"))
    image = right.imshow(rates.to_numpy(float), cmap="cividis_r", vmin=0, vmax=1, aspect="auto", origin="upper")
    for row, rank in enumerate(rates.index):
        for column, depth in enumerate(rates.columns):
            if not np.isnan(value := rates.loc[rank, depth]):
                text = f"{value:.2f}\n{short(int(counts.loc[rank, depth]))}"
                color = "white" if value > WHITE_ON else "black"
                right.text(column, row, text, ha="center", va="center", fontsize=7, color=color)
    right.set_xticks(range(rates.shape[1]), rates.columns)
    right.set_yticks(range(rates.shape[0]), rates.index)
    right.set(xlabel="depth", ylabel="rank among siblings")
    right.set_title("acceptance, and nodes counted", fontsize=9)
    figure.colorbar(image, ax=right, label="acceptance, given the parent's")
    figure.suptitle(title or "Acceptance by depth and rank", fontsize=11)
    return figure


def short(count: int) -> str:
    """A count in few characters: 12, 3.4k."""
    return str(count) if count < 1000 else f"{count / 1000:.1f}k"


def marginal_value(table: pd.DataFrame, price: float | None = None, title: str = "") -> Figure:
    """What the N-th best node of a tree adds to a pass (`curves.marginal_value`), and what the N best yield together.

    Args:
        price: tokens that a node must add to pay for its own time, a line across the left panel.
    """
    figure = Figure(figsize=(10.5, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    seen = table[table.reach > 0]  # a logarithmic axis has no place for the others
    left.plot(table.place, table.promised, color="0.4", ls="--", lw=1.2, label="promised by the drafter, exp(score)")
    left.errorbar(
        seen.place, seen.reach, bars(seen, "reach"), capsize=1.5, ms=3.5, lw=0, elinewidth=0.7, **look(0),
        label=f"under the target, {interval_note(table, 'reach')}",
    )  # fmt: skip
    if price is not None:
        left.axhline(price, color=look(1)["color"], lw=1, label="what a node must add to pay for its time")
    left.set(xlabel="N, nodes in order of score", ylabel="tokens a pass that the N-th node adds", yscale="log")
    left.set_ylim(LEAST_VALUE, 1.5)
    left.legend(frameon=False, fontsize=8, loc="lower left")
    right.plot(table.place, table.together, ms=3.5, lw=1.2, **look(0), label="under the target")
    right.plot(table.place, 1 + table.promised.cumsum(), color="0.4", ls="--", lw=1.2, label="promised by the drafter")
    right.set(xlabel="N, nodes in order of score", ylabel="expected tokens a pass of the N best", ylim=(0.9, None))
    right.legend(frameon=False, fontsize=8, loc="lower right")
    for axis in (left, right):
        axis.grid(alpha=0.25)
    passes = int(table.passes.max()) if len(table) else 0
    figure.suptitle(title or f"What one more node is worth ({passes} passes)", fontsize=11)
    return figure


def by_context(table: pd.DataFrame, of_prompt: pd.DataFrame, thirds: pd.DataFrame, title: str = "") -> Figure:
    """Acceptance at positions of the tree, and how far it depends on the context.

    Left: all contexts together (black, with intervals) and each prompt (dots). Right: the same positions in the thirds
    of contexts where the drafter was least and most confident of that node.

    Args:
        table: `curves.by_position`; of_prompt: position, prompt_id, acceptance; thirds: position, third (0 … 2) and
            `curves.acceptance`.
    """
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    place = {position: index for index, position in enumerate(table.position)}
    jitter = of_prompt.groupby("position").cumcount() / max(1, of_prompt.prompt_id.nunique()) - 0.5
    left.plot(
        of_prompt.position.map(place) + 0.5 * jitter, of_prompt.acceptance, ".", color=look(5)["color"], ms=5,
        label="a prompt", zorder=1,
    )  # fmt: skip
    left.errorbar(
        range(len(table)), table.acceptance, bars(table, "acceptance"), ls="", marker="_", ms=22, color="black",
        capsize=3, label=f"all, {interval_note(table, 'acceptance')}",
    )  # fmt: skip
    names = {0: "least confident third", 1: "middle third", 2: "most confident third"}
    for third, group in thirds.groupby("third"):
        x = group.position.map(place) + 0.18 * (third - 1)
        right.errorbar(
            x, group.acceptance, bars(group, "acceptance"), ls="", capsize=2, ms=6, label=names[third], **look(third)
        )
    labels = [f"{row.position}\nn = {short(row.nodes)}" for row in table.itertuples()]
    for axis in (left, right):
        axis.set_xticks(range(len(table)), labels, fontsize=8)
        axis.set(xlabel="position in the tree (ranks from the root)", ylim=(-0.03, 1.03))
        axis.grid(axis="y", alpha=0.25)
        axis.legend(frameon=False, fontsize=8, loc="upper right")
    left.set_ylabel("acceptance, given the parent's")
    figure.suptitle(title or "Acceptance by position and context", fontsize=11)
    return figure
