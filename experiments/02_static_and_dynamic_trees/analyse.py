"""Does EAGLE-2's dynamic tree yield more tokens a pass than static trees, at the same number of nodes?

python analyse.py WORK [OUT]

Every static tree is compared with EAGLE-2's best as many nodes of one pool (top-k 10, 6 levels), paired by prompt.
Verdict: it *holds* if the dynamic tree is significantly above every static one of at least 8 nodes at both
temperatures; it *does not hold* if it is significantly below one, or above none; else it *holds partly*.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common

from eagle_tree import analysis, plots
from eagle_tree.cost import CostTable

CLAIM = "A tree that follows the drafter's confidences yields more tokens a pass than a static one of as many nodes"
SOURCE = "EAGLE-2, arXiv 2406.16858, Table 1"
SMALLEST = 8
SIZES = (8, 16, 32, 59)
BRANCHING = ([2, 1], [2, 2, 1], [3, 2, 1, 1], [3, 2, 2, 1, 1])
TASKS = ("Medusa, 59", "EAGLE-1, 25", "Sequoia, 59", "SpecInfer, 45", "EAGLE-2, 25", "EAGLE-2, 59")
"""What the table by task and the figure show."""


def static_trees(work: Path, temperature: int) -> dict[str, dict]:
    """Entries by label; Medusa's and Sequoia's trees are made of the acceptance measured on the other half."""
    accuracy = {"accuracy": str(work / f"accuracy_{temperature}" / "accuracy.json")}
    entries = {"EAGLE-1": {"policy": "eagle1"}}
    for size in SIZES:
        entries[f"Medusa {size}"] = {"policy": "medusa", "budget": size, **accuracy}
        entries[f"Sequoia {size}"] = {"policy": "sequoia", "budget": size, **accuracy}
    return entries | {
        f"SpecInfer {branching}": {"policy": "specinfer", "branching": branching} for branching in BRANCHING
    }


def measured(work: Path, temperature: int, cost: CostTable) -> tuple[pd.DataFrame, pd.DataFrame]:
    """τ of every tree with the dynamic one's gain over it, and τ by task."""
    static = {name: common.policy(entry) for name, entry in static_trees(work, temperature).items()}
    sizes = {name: len(one.choices) for name, one in static.items()}
    labels = {name: f"{name.split()[0]}, {size}" for name, size in sizes.items()}
    policies = {labels[name]: one for name, one in static.items()}
    for size in sorted({*sizes.values(), *SIZES}):
        entry = {"policy": "eagle2", "budget": size, "top_k": 10, "depth": 5}
        policies[f"EAGLE-2, {size}"] = common.policy(entry)
    for size in SIZES:
        policies[f"OPT-Tree, {size}"] = common.policy(
            {"policy": "opt_tree", "budget": size, "top_k": 10, "width": 10, "depth": 6}
        )
        policies[f"best first, {size}"] = common.policy({"policy": "best_first", "budget": size, "depth": 8})
        policies[f"TALON, {size}"] = common.policy({"policy": "talon", "budget": size, "depth": 8})
    passes = common.replayed(work, "judge", temperature, policies, cost)
    table = analysis.replayed(passes).assign(prompts=passes.prompt_id.nunique()).set_index("policy")
    for name, size in sizes.items():
        pair = passes[passes.policy.isin([labels[name], f"EAGLE-2, {size}"])]
        gain = common.gains(pair, labels[name]).loc[f"EAGLE-2, {size}"]
        table.loc[labels[name], ["gain", "gain_low", "gain_high"]] = gain[["gain", "gain_low", "gain_high"]]
    whole = passes.assign(category="all")
    tasks = [
        analysis.replayed(rows).assign(task=task, prompts=rows.prompt_id.nunique())
        for task, rows in pd.concat([passes, whole]).groupby("category", sort=False)
    ]
    return table.reset_index().assign(task="all"), pd.concat(tasks)


def judged(table: pd.DataFrame) -> pd.DataFrame:
    """The static trees that the verdict is of."""
    return table[table.gain.notna() & (table.nodes >= SMALLEST)]


def verdict(tables: list[pd.DataFrame]) -> str:
    return common.verdict_of_gains(judged(pd.concat(tables)))


def headline(tables: list[pd.DataFrame]) -> str:
    rows = judged(pd.concat(tables, ignore_index=True))
    least, most = (common.interval(rows.loc[place], "gain") for place in (rows.gain.idxmin(), rows.gain.idxmax()))
    return (
        f"τ over static trees × {least} at least, × {most} at most; significantly above "
        f"{(rows.gain_low > 1).sum()} of {len(rows)}"
    )


def numbers(temperature: int, table: pd.DataFrame) -> str:
    rows = judged(table)
    least, most = rows.loc[rows.gain.idxmin()], rows.loc[rows.gain.idxmax()]
    named = rows[rows.policy.isin(TASKS)].to_dict("records")
    listed = ", ".join(f"{row['policy']} × {common.interval(row, 'gain')}" for row in named)
    best = table[table.policy == "EAGLE-2, 59"].iloc[0]
    return (
        f"T = {temperature}: EAGLE-2 (τ {common.interval(best, 'tau')} at 59 nodes) over {listed}; significantly above "
        f"{(rows.gain_low > 1).sum()} of {len(rows)} static trees (least {least.policy}, × {least.gain:.2f}; most "
        f"{most.policy}, × {most.gain:.2f})"
    )


def main(work: Path, out: Path) -> None:
    cost = CostTable.load(work / "cost")
    found = {temperature: measured(work, temperature, cost) for temperature in common.TEMPERATURES}
    table = pd.concat(table.assign(temperature=temperature) for temperature, (table, _) in found.items())
    tasks = pd.concat(rows.assign(temperature=temperature) for temperature, (_, rows) in found.items())
    figure = plots.tau_by_task(
        tasks[tasks.policy.isin(TASKS)], "Tokens per pass of static and dynamic trees (with their draft nodes) by task"
    )
    line = ". ".join(numbers(temperature, table) for temperature, (table, _) in found.items())
    rows = pd.concat([table, tasks[(tasks.task != "all") & tasks.policy.isin(TASKS)]], ignore_index=True)
    rows = rows.drop(columns=["bound_share", "expected_draft", "realised"])
    tables = [one for one, _ in found.values()]
    common.write(out, CLAIM, SOURCE, verdict(tables), headline(tables), line, rows, figure, work)


if __name__ == "__main__":
    main(*common.folders(sys.argv, __file__))
