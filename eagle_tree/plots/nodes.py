"""Figures of drafted nodes: confidence, acceptance, and what one more node is worth."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from eagle_tree.plots.style import bars, interval_note, look, nothing_to_draw

WHITE_ON = 0.55
"""Cells of a map that are darker than this share of its range carry white figures."""
SHADES = ("0.75", "0.5", "0.3")
"""Of bars by temperature, beside colours that mean rules."""
LEAST_VALUE = 1e-4
"""Tokens a pass below which the value of a node is off the figure."""


def reliability_diagram(points: pd.DataFrame, title: str = "") -> Figure:
    """Confidence against acceptance, with counts; before and after calibration, one series a `kind`.

    Args:
        points: rows of `analysis.reliability` with a column `kind`, such as "as drafted" and "isotonic", in the order
            of the legend. If they are there: `error`, the kind's calibration error, goes into the legend; `panel`, such
            as a temperature, divides the figure.
    """
    points = points if "panel" in points else points.assign(panel="")
    groups = list(points.groupby("panel", sort=False))
    figure = Figure(figsize=(1.2 + 5.2 * max(1, len(groups)), 6.2), layout="constrained")
    if points.empty:
        return nothing_to_draw(figure, figure.subplots(), "no node's parent was accepted")
    panels = figure.subplots(2, len(groups), sharex=True, sharey="row", height_ratios=(3, 1), squeeze=False)
    for (name, group), upper, lower in zip(groups, *panels, strict=True):
        upper.plot([0, 1], [0, 1], color="0.6", lw=1, ls="--", zorder=0)
        for index, (kind, part) in enumerate(group.groupby("kind", sort=False)):
            style, label = look(index), kind
            if "error" in part:
                label += f" (calibration error {part.error.iloc[0]:.3f})"
            rate = (part.confidence, part.hit_rate, bars(part, "hit_rate"))
            upper.errorbar(*rate, label=label, capsize=2, ms=5, lw=1.2, **style)
            lower.plot(part.confidence, part["count"], ms=4, lw=1.2, **style)
        upper.set(ylim=(-0.02, 1.02), title=name)
        note = interval_note(group, "hit_rate")
        upper.legend(frameon=False, fontsize=9, loc="upper left", title=note, title_fontsize=8)
        lower.set(xlabel="confidence of a node", yscale="log", xlim=(-0.02, 1.02))
        for axis in (upper, lower):
            axis.grid(alpha=0.25)
    panels[0, 0].set_ylabel("acceptance, given the parent's")
    panels[1, 0].set_ylabel("nodes in the bin")
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
    left.legend(frameon=False, fontsize=8, loc="upper right")
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
        axis.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    left.set_ylabel("acceptance, given the parent's")
    figure.suptitle(title or "Acceptance by position and context", fontsize=11)
    return figure


def acceptance_rules(nodes: pd.DataFrame, trees: pd.DataFrame, title: str = "") -> Figure:
    """What acceptance rules accept, by temperature: of one node's children, and of whole trees.

    Args:
        nodes: temperature, rule, k, accepted (expected children, with `_low` and `_high`), prompts; the least k is on
            the left, the largest in the middle.
        trees: temperature, arm (from above in their order), tokens (expected a pass, with `_low`, `_high`),
            prompts.
    """
    figure = Figure(figsize=(14, 4.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1, 1.3))
    for axis, k in ((left, nodes.k.min()), (middle, nodes.k.max())):
        for index, (rule, group) in enumerate(nodes[nodes.k == k].groupby("rule", sort=False)):
            at = (group.temperature, group.accepted, bars(group, "accepted"))
            axis.errorbar(*at, label=rule, capsize=2, ms=5, lw=1.2, **look(index))
        axis.set(xlabel="temperature", ylim=(0, 1.02), title=f"{k} child{'ren' if k > 1 else ''} of a node")
        axis.set_xticks(sorted(nodes.temperature.unique()))
        axis.grid(alpha=0.25)
    left.set_ylabel("probability that a child is accepted")
    arms = list(dict.fromkeys(trees.arm))
    groups = list(trees.groupby("temperature"))
    for index, (temperature, group) in enumerate(groups):
        height = 0.8 / len(groups)
        place = group.arm.map(arms.index) + height * (index - (len(groups) - 1) / 2)
        right.barh(place, group.tokens, height, color=SHADES[index % len(SHADES)], label=f"T = {temperature:g}")
        right.errorbar(group.tokens, place, xerr=bars(group, "tokens"), ls="", color="0.2", capsize=2, lw=0.8)
    right.set_yticks(range(len(arms)), arms, fontsize=8)
    right.invert_yaxis()
    right.set(xlabel=f"tokens a pass ({interval_note(trees, 'tokens')})", xlim=(0, None))
    right.grid(axis="x", alpha=0.25)
    for axis, side, columns in ((left, "left", 5), (right, "right", len(groups))):
        note = f"accepted: {interval_note(nodes, 'accepted')}" if axis is left else None
        figure.legend(
            *axis.get_legend_handles_labels(), loc=f"outside lower {side}", ncols=columns, frameon=False, fontsize=8,
            title=note, title_fontsize=8,
        )  # fmt: skip
    right.set_title("whole chains and trees", fontsize=10)
    figure.suptitle(title or "What acceptance rules accept", fontsize=11)
    return figure
