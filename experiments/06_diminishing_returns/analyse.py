"""What are later nodes, later siblings and deeper nodes worth?

python analyse.py WORK [OUT]

A node is worth what it adds to the expected tokens of a pass under the target (its reach). Verdict: returns diminish
along a question (place in the tree, rank among siblings, depth) if no group is worth significantly more than the one
before it and the last is worth significantly less than the first. *Holds* if they do along all three at
every temperature, *holds partly* if along one at least at every temperature; else it *does not hold*.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common

from eagle_tree import curves, plots
from eagle_tree.cost import CostTable

CLAIM = "Returns diminish with the number of nodes, the rank among siblings and the depth"
SOURCE = "folklore of tree drafting; Sequoia, arXiv 2402.12374, and EAGLE-2, arXiv 2406.16858, build on it"
QUESTIONS = ("place in the tree", "rank among siblings", "depth")


def diminishes(table: pd.DataFrame, question: str) -> bool:
    """Whether no group is worth significantly more than the one before, and the last less than the first."""
    rows = table[(table.question == question) & table.reach_low.notna()]
    low, high = rows.reach_low.to_numpy(), rows.reach_high.to_numpy()
    return bool((low[1:] <= high[:-1]).all() and high[-1] < low[0])


def verdict(tables: list[pd.DataFrame]) -> str:
    found = [[diminishes(table, question) for question in QUESTIONS] for table in tables]
    if all(map(all, found)):
        return common.HOLDS
    return common.HOLDS_PARTLY if all(map(any, found)) else common.DOES_NOT_HOLD


def headline(tables: dict[int, pd.DataFrame]) -> str:
    found = {
        temperature: f"{sum(diminishes(table, question) for question in QUESTIONS)} of {len(QUESTIONS)}"
        for temperature, table in tables.items()
    }
    temperature, table = next(iter(tables.items()))
    rows = table[table.question == QUESTIONS[0]]
    first, last = (rows.iloc[place] for place in (0, -1))
    return (
        f"diminishing: {common.at_each(found)}; node {first.group} adds {common.interval(first, 'reach', 3)} tokens, "
        f"one of {last.group} {common.interval(last, 'reach', 3)} at T = {temperature}"
    )


def numbers(tables: dict[int, pd.DataFrame]) -> str:
    parts = []
    for temperature, table in tables.items():
        ends = []
        for question in QUESTIONS:
            rows = table[table.question == question]
            first, last = (rows.iloc[place] for place in (0, -1))
            ends.append(
                f"{question} {first.group} {common.interval(first, 'reach', digits=3)}, {last.group} "
                f"{common.interval(last, 'reach', digits=3)}"
            )
        shaky = table[table.group == f"depth {curves.DEEP} on, under a shaky ancestor"]
        ends += [
            f"deep nodes under shaky ancestors {row.node_share:.0%} of nodes, {row.reach_share:.1%} of accepted ones"
            for row in shaky.itertuples()
        ]
        parts.append(f"T = {temperature}, tokens a node: {'; '.join(ends)}")
    return ". ".join(parts)


def price(cost: CostTable, nodes: int, context: int = 256) -> float:
    """Tokens that a node must add to pay for its time, at the speed of decoding without a tree."""
    seconds = cost.pass_seconds([0, nodes], [0, 0], [1, 1], [context] * 2)
    return float((seconds[1] - seconds[0]) / nodes / seconds[0])


def main(work: Path, out: Path) -> None:
    found = {temperature: common.published(common.nodes(work, temperature)) for temperature in common.TEMPERATURES}
    tables = {temperature: curves.folklore(nodes) for temperature, nodes in found.items()}
    table = pd.concat(table.assign(temperature=temperature) for temperature, table in tables.items())
    value = curves.marginal_value(found[0])
    figure = plots.marginal_value(
        value, price(CostTable.load(work / "cost"), int(value.place.max())),
        f"What one more node is worth, T = 0 (EAGLE-2's published tree, {value.passes.max()} passes)",
    )  # fmt: skip
    told = headline(tables), numbers(tables)
    common.write(out, CLAIM, SOURCE, verdict(list(tables.values())), *told, table, figure, work)


if __name__ == "__main__":
    main(*common.folders(sys.argv, __file__))
