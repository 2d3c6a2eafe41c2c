"""Does a tree beat a chain of as many verified positions, and by how much the published tree a chain of as many steps?

python analyse.py WORK [OUT]

Trees are the best N nodes of one pool (top-k 10, 8 levels); the chain is N deep. Verdict, of both temperatures: it
*holds* if the tree's tokens per pass are significantly above the chain's at every N from 4 on, and EAGLE-2's published
tree accepts at least 1.5 times as many draft tokens as a chain of its 6 drafter steps (estimate); *holds partly* if one
of the two is so; else it *does not hold*.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common

from eagle_tree import plots

CLAIM = "A tree yields more tokens a pass than a chain of as many nodes; EAGLE-2 accepts 1.5–2 times a chain's tokens"
SOURCE = "EAGLE-1, arXiv 2401.15077 (chain and tree); EAGLE-2, arXiv 2406.16858"
SIZES, MATCHED_FROM = (2, 4, 8, 16), 4
STEPS = 6
ACCEPTED_RATIO = 1.5


def measured(work: Path, temperature: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """τ by policy and size, with gains over the chain of the same size; accepted tokens, published tree over chain."""
    trees = {f"tree, N = {size}": {"policy": "eagle2", "budget": size, "top_k": 10, "depth": 7} for size in SIZES}
    chains = {f"chain, N = {size}": {"policy": "chain", "depth": size} for size in SIZES}
    ends = {"published tree": common.PUBLISHED, "chain of its steps": {"policy": "chain", "depth": STEPS}}
    policies = {name: common.policy(entry) for name, entry in (chains | trees | ends).items()}
    passes = common.replayed(work, "judge", temperature, policies)
    table = common.tokens_per_pass(passes).set_index("policy")
    for size in SIZES:
        tree, chain = f"tree, N = {size}", f"chain, N = {size}"
        gain = common.gains(passes[passes.policy.isin([tree, chain])], chain).loc[tree]
        table.loc[tree, gain.index.drop(["prompts", "p_holm"])] = gain.drop(["prompts", "p_holm"])
    pair = passes[passes.policy.isin(ends)]
    accepted = common.gains(pair, "chain of its steps", "accepted")
    tokens = common.gains(pair, "chain of its steps")
    return table.reset_index(), pd.concat({"accepted": accepted, "emitted": tokens}, names=["counted"]).reset_index()


def verdict(tables: list[pd.DataFrame], published: list[pd.DataFrame]) -> str:
    matched = [table[table.gain.notna() & (table.nodes >= MATCHED_FROM)] for table in tables]
    better = all((rows.gain_low > 1).all() for rows in matched)
    far = all(rows.gain[rows.counted == "accepted"].item() >= ACCEPTED_RATIO for rows in published)
    return common.HOLDS if better and far else common.HOLDS_PARTLY if better or far else common.DOES_NOT_HOLD


def headline(tables: dict[int, pd.DataFrame], published: dict[int, pd.DataFrame]) -> str:
    name = f"tree, N = {max(SIZES)}"
    gains = {
        temperature: f"× {common.interval(table[table.policy == name].iloc[0], 'gain')}"
        for temperature, table in tables.items()
    }
    accepted = [f"× {rows.gain[rows.counted == 'accepted'].item():.2f}" for rows in published.values()]
    return (
        f"τ of a tree over a chain of {max(SIZES)} nodes {common.at_each(gains)}; EAGLE-2 accepts {', '.join(accepted)}"
    )


def numbers(temperature: int, table: pd.DataFrame, published: pd.DataFrame) -> str:
    rows = table[table.gain.notna()].to_dict("records")
    gains = ", ".join(f"N = {row['nodes']:g}: × {common.interval(row, 'gain')}" for row in rows)
    accepted, emitted = (
        common.interval(published[published.counted == name].iloc[0], "gain") for name in ("accepted", "emitted")
    )
    return (
        f"T = {temperature}: τ of tree over chain at {gains}; published tree over a {STEPS}-token chain: accepted × "
        f"{accepted}, τ × {emitted}"
    )


def main(work: Path, out: Path) -> None:
    found = {temperature: measured(work, temperature) for temperature in common.TEMPERATURES}
    tables, published = ({temperature: both[i] for temperature, both in found.items()} for i in (0, 1))
    table = pd.concat(table.assign(temperature=temperature) for temperature, (table, _) in found.items())
    drawn = table[table.policy.str.contains("N =")]
    drawn = drawn.assign(
        policy=drawn.policy.str.split(",").str[0].map({"tree": "tree (best N of one pool)", "chain": "chain"})
    )
    figure = plots.tau_by_size(drawn, "Tree against chain at equal numbers of verified nodes")
    more = pd.concat(rows.assign(temperature=temperature) for temperature, (_, rows) in found.items())
    more = more.assign(policy=more.policy + " over chain of its steps, " + more.counted).drop(
        columns=["counted", "p_holm"]
    )
    line = ". ".join(numbers(temperature, *both) for temperature, both in found.items())
    rows = pd.concat([table, more], ignore_index=True)
    judged = verdict(list(tables.values()), list(published.values()))
    common.write(out, CLAIM, SOURCE, judged, headline(tables, published), line, rows, figure, work)


if __name__ == "__main__":
    main(*common.folders(sys.argv, __file__))
