"""Does acceptance depend on a node's position in the tree, and at one position on the context?

python analyse.py WORK [OUT]

Positions are judged that have 100 nodes and that the tree nearly always has (95 % of the passes that accepted the
parent): elsewhere it was chosen by confidence. Verdict: *position* matters if the intervals of the most and the least
accepted one are apart; *context* matters if, at more than half of the positions, prompts differ beyond noise
(permutation test, Holm, 0.05), and if the intervals of the least and the most confident third of contexts are apart.
*Holds* if all three are so at every temperature, *holds partly* if position matters at every one and context by one
measure at one; else it *does not hold*.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common

from eagle_tree import curves, plots
from eagle_tree.analysis import holm
from eagle_tree.calibration import judged_nodes

CLAIM = "Acceptance depends on the position in the tree, and at one position on the context"
SOURCE = "EAGLE-2, arXiv 2406.16858, Figure 5"
POSITIONS = ("0", "1", "2", "0.0", "0.1", "1.0", "0.0.0", "0.0.0.0")
COVERED, FEWEST, LEVEL = 0.95, 100, 0.05


def in_thirds(nodes: pd.DataFrame) -> pd.DataFrame:
    """Acceptance at each position in thirds of its contexts, by the drafter's confidence in the node."""
    here = judged_nodes(nodes)
    third = here.groupby("position").confidence.rank(pct=True, method="first").mul(3).apply(np.ceil).astype(int) - 1
    return curves.acceptance(here.assign(third=third), ["position", "third"])


def measured(nodes: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """By position; by position and prompt; by position and third."""
    nodes = curves.with_position(nodes)
    table = curves.by_position(nodes, POSITIONS)
    table = table.assign(spread_p=holm(table.spread_p.to_numpy(float)))
    here = nodes[nodes.position.isin(table.position)]
    thirds = in_thirds(here)
    ends = thirds.pivot(index="position", columns="third", values=["acceptance", "acceptance_low", "acceptance_high"])
    for third, name in ((0, "least"), (2, "most")):
        for end in ("", "_low", "_high"):
            column = ends.get((f"acceptance{end}", third), pd.Series(dtype=float))
            table[f"{name}_confident{end}"] = table.position.map(column)
    return table, curves.acceptance(here, ["position", "prompt_id"]), thirds


def judged(table: pd.DataFrame) -> pd.DataFrame:
    """The positions that the verdict is of."""
    return table[(table.coverage >= COVERED) & (table.nodes >= FEWEST)]


def matters(table: pd.DataFrame) -> tuple[bool, bool, bool]:
    """Whether position does, prompts do, the drafter's confidence in the context does."""
    table = judged(table)
    apart = table.acceptance_low.max() > table.acceptance_high.min()
    prompts = (table.spread_p < LEVEL).mean() > 0.5
    return bool(apart), bool(prompts), bool((table.most_confident_low > table.least_confident_high).mean() > 0.5)


def verdict(tables: list[pd.DataFrame]) -> str:
    found = [matters(table) for table in tables]
    if all(all(one) for one in found):
        return common.HOLDS
    partly = all(one[0] for one in found) and any(one[1] or one[2] for one in found)
    return common.HOLDS_PARTLY if partly else common.DOES_NOT_HOLD


def headline(tables: dict[int, pd.DataFrame]) -> str:
    found = {temperature: judged(table) for temperature, table in tables.items()}
    differ = {temperature: f"{(rows.spread_p < LEVEL).sum()} of {len(rows)}" for temperature, rows in found.items()}
    told = f"positions where prompts differ: {common.at_each(differ)}"
    temperature, rows = next(iter(found.items()))
    if rows.empty:
        return told
    least, most = (rows.loc[place] for place in (rows.acceptance.idxmin(), rows.acceptance.idxmax()))
    ends = [common.interval(end, "acceptance") for end in (least, most)]
    return f"{told}; accepted {' to '.join(ends)} by position at T = {temperature}"


def numbers(tables: dict[int, pd.DataFrame]) -> str:
    parts = []
    for temperature, table in tables.items():
        if (rows := judged(table)).empty:
            parts.append(f"T = {temperature}: no position has {FEWEST} nodes")
            continue
        most, least, first = rows.loc[rows.acceptance.idxmax()], rows.loc[rows.acceptance.idxmin()], rows.iloc[0]
        thirds = [common.interval(first, f"{name}_confident") for name in ("least", "most")]
        parts.append(
            f"T = {temperature}: accepted at {most.position} {common.interval(most, 'acceptance')}, at "
            f"{least.position} {common.interval(least, 'acceptance')}; prompts differ at "
            f"{(rows.spread_p < LEVEL).sum()} of {len(rows)} positions; at {first.position}, standard deviation "
            f"{first.spread:.2f} between prompts, the least confident third of contexts {thirds[0]}, the most "
            f"{thirds[1]}"
        )
    return ". ".join(parts)


def main(work: Path, out: Path) -> None:
    found = {
        temperature: measured(common.published(common.nodes(work, temperature))) for temperature in common.TEMPERATURES
    }
    tables = {temperature: table for temperature, (table, _, _) in found.items()}
    table = pd.concat(table.assign(temperature=temperature) for temperature, table in tables.items())
    figure = plots.by_context(*found[0], "Acceptance by position and context, T = 0 (EAGLE-2's published tree)")
    told = headline(tables), numbers(tables)
    common.write(out, CLAIM, SOURCE, verdict(list(tables.values())), *told, table, figure, work)


if __name__ == "__main__":
    main(*common.folders(sys.argv, __file__))
