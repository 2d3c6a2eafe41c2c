"""What EAGLE-2's two ideas are worth: expanding and keeping nodes by the path's value, and reranking all levels.

python analyse.py WORK [OUT]

The published tree (total 60, top-k 10, depth 5) with each idea taken away (`Eagle2` says how). Verdict, of both
temperatures: it *holds* if the full method is significantly above each of the three ablations; it *does not hold* if an
ablation is significantly above it, or the full method is above none; else it *holds partly*.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common

from eagle_tree import plots

CLAIM = "Value (path products) and rerank each raise the tokens per pass"
SOURCE = "EAGLE-2, arXiv 2406.16858, Table 3"
FULL = "full"
VARIANTS = {
    "without value and rerank": {"value": False, "rerank": False},
    "without value": {"value": False},
    "without rerank": {"rerank": False},
    FULL: {},
}
PAPER = {"without value and rerank": 3.92, "without value": 4.39, "without rerank": 4.86, FULL: 4.98}
"""τ of Vicuna-7B on MT-bench at T = 0."""
SIZES = (16, 32, 59)


def measured(work: Path, temperature: int, size: int) -> pd.DataFrame:
    """τ of every variant at a size, and the full method's gain over it."""
    policies = {
        name: common.policy({**common.PUBLISHED, "budget": size, **changes}) for name, changes in VARIANTS.items()
    }
    passes = common.replayed(work, "judge", temperature, policies)
    table = common.tokens_per_pass(passes).set_index("policy")
    for name in VARIANTS:
        if name != FULL:
            gain = common.gains(passes[passes.policy.isin([name, FULL])], name).loc[FULL]
            table.loc[name, ["gain", "gain_low", "gain_high"]] = gain[["gain", "gain_low", "gain_high"]]
    table = table.reset_index().rename(columns={"policy": "variant"})
    paper = table.variant.map(PAPER) if (temperature, size) == (0, max(SIZES)) else float("nan")
    return table.assign(temperature=temperature, budget=size, paper_tau=paper)


def verdict(table: pd.DataFrame) -> str:
    return common.verdict_of_gains(table[table.gain.notna()])


def headline(table: pd.DataFrame) -> str:
    gains = {}
    for temperature, rows in table.groupby("temperature"):
        of = rows.set_index("variant")
        listed = [f"× {common.interval(of.loc[f'without {idea}'], 'gain')}" for idea in ("value", "rerank")]
        gains[temperature] = " and ".join(listed)
    return f"τ by value and by rerank {common.at_each(gains)}"


def numbers(table: pd.DataFrame) -> str:
    parts = []
    for temperature, rows in table.groupby("temperature"):
        full = rows[rows.variant == FULL].iloc[0]
        listed = ", ".join(
            f"{row['variant']} × {common.interval(row, 'gain', 3)}"
            for row in rows[rows.gain.notna()].to_dict("records")
        )
        parts.append(f"T = {temperature}: τ {common.interval(full, 'tau')}, over the tree {listed}")
    return ". ".join(parts)


def main(work: Path, out: Path) -> None:
    parts = [measured(work, temperature, size) for temperature in common.TEMPERATURES for size in SIZES]
    table = pd.concat(parts, ignore_index=True)
    published = table[table.budget == max(SIZES)]
    figure = plots.tau_by_variant(published, "EAGLE-2 and its ablations (total 60, top-k 10, depth 5)")
    told = headline(published), numbers(published)
    common.write(out, CLAIM, SOURCE, verdict(published), *told, table, figure, work)


if __name__ == "__main__":
    main(*common.folders(sys.argv, __file__))
