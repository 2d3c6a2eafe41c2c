"""Does one forward over N positions take as long as one over a single position?

python analyse.py WORK [OUT]

Verdict, of the measured table alone: *holds* if T(60)/T(1) is at most 1.25 behind every measured context, *holds
partly* if T(4)/T(1) is; else it *does not hold*. What a roofline says of an H100 stands beside it: a model, not a
measurement.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
from omegaconf import OmegaConf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common

from eagle_tree import plots
from eagle_tree.apps.common import build, conf_dir
from eagle_tree.cost import CostTable

CLAIM = "Verifying a tree in one forward takes about as long as decoding one token"
SOURCE = "SpecInfer, arXiv 2305.09781; Leviathan et al., arXiv 2211.17192: decoding is bound by memory"
TREE, SMALL, ABOUT = 60, 4, 1.25
CONTEXT = 1024
"""Of the modelled lines; there the cache is a small part of what is read, and other contexts look the same."""
LISTED = (1, 4, 16, 64, 128, 256, 512)
"""Positions of the modelled rows in results.csv."""
TIMES = {"": "seconds", "_low": "low", "_high": "high"}
MODELLED = {"h100_8b": "Llama-3.1-8B, H100 roofline", "h100_70b": "Llama-3.3-70B, H100 roofline"}


def relative(cost: CostTable, machine: str) -> pd.DataFrame:
    """Verify times of a table behind each of its contexts, with T(n)/T(1)."""
    points = cost.stage("verify", 1).assign(machine=machine).sort_values(["context", "n"])
    return points.assign(relative=points.seconds / points.groupby("context").seconds.transform("first"))


def ratios(cost: CostTable, n: int) -> dict[int, float]:
    """T(n)/T(1) by context."""
    contexts, curves = cost.curves("verify", 1)
    return {int(context): float(curve[min(n, cost.largest_n)] / curve[1]) for context, curve in zip(contexts, curves)}


def verdict(cost: CostTable) -> str:
    if max(ratios(cost, TREE).values()) <= ABOUT:
        return common.HOLDS
    return common.HOLDS_PARTLY if max(ratios(cost, SMALL).values()) <= ABOUT else common.DOES_NOT_HOLD


def free(cost: CostTable) -> int:
    """The largest n whose forward takes at most 1.25 times as long as one position's, behind the shortest context."""
    curve = cost.curves("verify", 1)[1][0]
    return int((curve[1:] <= ABOUT * curve[1]).nonzero()[0].max()) + 1


def headline(measured: CostTable, modelled: dict[str, CostTable]) -> str:
    tree, small = (max(ratios(measured, n).values()) for n in (TREE, SMALL))
    model = max(max(ratios(cost, TREE).values()) for cost in modelled.values())
    return (
        f"{TREE} positions take {tree:.2f} times as long as one, {SMALL} take {small:.2f}, on "
        f"{measured.about['device']}; {TREE} take {model:.2f} modelled on an H100"
    )


def numbers(measured: CostTable, modelled: dict[str, CostTable]) -> str:
    here = [
        f"T({n})/T(1) = " + ", ".join(f"{value:.2f} at context {at}" for at, value in ratios(measured, n).items())
        for n in (SMALL, 16, TREE)
    ]
    there = [
        f"{name} {max(ratios(cost, TREE).values()):.2f}, within {ABOUT} to n = {free(cost)}"
        for name, cost in modelled.items()
    ]
    return (
        f"measured on {measured.about['device']}: {'; '.join(here)}; within {ABOUT} to n = {free(measured)}. "
        f"Modelled T({TREE})/T(1): {'; '.join(there)}"
    )


def main(work: Path, out: Path) -> None:
    measured = CostTable.load(work / "cost")
    modelled = {
        label: build(OmegaConf.load(conf_dir() / "cost" / f"{name}.yaml"))() for name, label in MODELLED.items()
    }
    here = relative(measured, "measured here")
    there = pd.concat(relative(cost, name) for name, cost in modelled.items())
    there = there[there.context == CONTEXT]
    title = f"One forward over n positions ({measured.about['device']}, {measured.about['dtype']})"
    figure = plots.verify_cost(pd.concat([here, there[there.n <= here.n.max()]]), title)
    table = pd.concat([here, there[there.n.isin(LISTED)]])
    milliseconds = {f"milliseconds{end}": 1e3 * table[name] for end, name in TIMES.items()}
    table = table.assign(**milliseconds, modelled=table.repeats == 0)
    columns = ["machine", "modelled", "context", "n", *milliseconds, "repeats", "relative"]
    about = common.machine(measured.about)
    told = headline(measured, modelled), numbers(measured, modelled)
    common.write(out, CLAIM, SOURCE, verdict(measured), *told, table[columns], figure, about)


if __name__ == "__main__":
    main(*common.folders(sys.argv, __file__))
