"""Does the drafter's confidence say how likely a node is to be accepted?

python analyse.py WORK [OUT]

Verdict: *holds* if at every temperature acceptance rises with confidence (no bin of 100 nodes lies significantly below
the bin before it), the ends are near the paper's (below 0.05 at most 0.10 accepted, above 0.95 at least 0.90), and
confidence is close to acceptance: no bin of 100 nodes is off by more than 0.10, nor all nodes together, by calibration
error, by more than 0.05 (most nodes have little confidence, so that this alone says little of the others). *Holds
partly* if acceptance rises but the numbers are others; else it *does not hold*.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common

from eagle_tree import analysis, curves, plots
from eagle_tree.calibration import judged_nodes

CLAIM = "The drafter's confidence is close to the acceptance rate of a node"
SOURCE = "EAGLE-2, arXiv 2406.16858, Figure 6"
BINS, FEWEST = 20, 100
UNSURE, SURE, FAR, ERROR = 0.10, 0.90, 0.10, 0.05


def measured(nodes: pd.DataFrame) -> pd.DataFrame:
    """Acceptance by bin of confidence, and the calibration error."""
    bins = curves.confidence_bins(judged_nodes(nodes), bins=BINS)
    error, low, high = curves.binned_error(bins)
    return analysis.reliability(bins).assign(error=error, error_low=low, error_high=high)


def rises(points: pd.DataFrame) -> bool:
    """Whether no well-filled bin lies significantly below the one before it."""
    filled = points[points["count"] >= FEWEST]
    return bool((filled.hit_rate_high.to_numpy()[1:] >= filled.hit_rate_low.to_numpy()[:-1]).all())


def farthest(points: pd.DataFrame) -> pd.Series:
    """The well-filled bin (the fullest, if none is) whose acceptance is farthest from its confidence."""
    filled = points[points["count"] >= min(FEWEST, points["count"].max())]
    return filled.loc[(filled.hit_rate - filled.confidence).abs().idxmax()]


def close(points: pd.DataFrame) -> bool:
    """Whether both ends are as the paper has them, and confidence close to acceptance."""
    ends, worst = points.set_index("bin").hit_rate.reindex([0, BINS - 1]), farthest(points)
    near = abs(worst.hit_rate - worst.confidence) <= FAR and points.error.iloc[0] <= ERROR
    return bool(ends[0] <= UNSURE and ends[BINS - 1] >= SURE and near)


def verdict(by_temperature: dict[str, pd.DataFrame]) -> str:
    if not all(rises(points) for points in by_temperature.values()):
        return common.DOES_NOT_HOLD
    return common.HOLDS if all(close(points) for points in by_temperature.values()) else common.HOLDS_PARTLY


def headline(by_temperature: dict[str, pd.DataFrame]) -> str:
    found = {name: farthest(points) for name, points in by_temperature.items()}
    told = [
        f"{worst.confidence:.2f}, accepted {common.interval(worst, 'hit_rate')}, at {name}"
        for name, worst in found.items()
    ]
    return f"confidence farthest off: {'; '.join(told)}"


def numbers(by_temperature: dict[str, pd.DataFrame]) -> str:
    parts = []
    for name, points in by_temperature.items():
        first, last = (points[points.bin == place] for place in (0, BINS - 1))
        ends = [
            f"{common.interval(row, 'hit_rate')} {where}"
            for where, rows in (("below 0.05", first), ("above 0.95", last))
            for row in rows.to_dict("records")
        ]
        error, worst = common.interval(points.iloc[0], "error", digits=3), farthest(points)
        off = f"{common.interval(worst, 'hit_rate')} at {worst.confidence:.2f}"
        parts.append(f"{name}: accepted {', '.join(ends)}, farthest off {off}; calibration error {error}")
    return ". ".join(parts)


def main(work: Path, out: Path) -> None:
    found = {
        f"T = {temperature}": measured(common.published(common.nodes(work, temperature)))
        for temperature in common.TEMPERATURES
    }
    table = pd.concat(points.assign(kind=name, temperature=int(name[-1])) for name, points in found.items())
    table = table.assign(confidence_from=table.bin / BINS, confidence_to=(table.bin + 1) / BINS)
    figure = plots.reliability_diagram(table, "Confidence against acceptance, EAGLE-2's published tree")
    table = table.drop(columns=["kind", "bin"])
    common.write(out, CLAIM, SOURCE, verdict(found), headline(found), numbers(found), table, figure, work)


if __name__ == "__main__":
    main(*common.folders(sys.argv, __file__))
