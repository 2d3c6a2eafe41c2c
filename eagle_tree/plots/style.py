"""What all figures share: colours, marks, intervals, and how a figure is written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eagle_tree.files import replacing

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe-Ito, colour-blind safe
MARKERS = "osD^vPX"


def look(index: int) -> dict[str, str]:
    """Colour and mark of the index-th series; marks shift when colours come round again, so that no two are alike."""
    return {"color": COLORS[index % len(COLORS)], "marker": MARKERS[(index + index // len(COLORS)) % len(MARKERS)]}


def bars(table: pd.DataFrame, column: str) -> np.ndarray:
    """`[2, M]`, lengths of error bars from `column_low` and `column_high`; 0, which draws none, where they are NaN."""
    value, low, high = (table[f"{column}{end}"].to_numpy(float) for end in ("", "_low", "_high"))
    return np.nan_to_num(np.stack([value - low, high - value])).clip(min=0)


def interval_note(table: pd.DataFrame, column: str) -> str:
    """What the bars of a column are: intervals over how many prompts, or that there are none."""
    prompts = int(table.prompts.max()) if len(table) else 0
    if not table[f"{column}_low"].notna().any():
        return f"interval n/a ({prompts} prompt{'s' * (prompts != 1)})"
    return f"95 % intervals over {prompts} prompts"


def nothing_to_draw(figure: Figure, axis: Axes, why: str) -> Figure:
    """A figure that says why it is empty."""
    axis.set_axis_off()
    axis.text(0.5, 0.5, why, ha="center", va="center", transform=axis.transAxes)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a PNG."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=130)
