"""Which acceptance rule, with its kind of draft, accepts most?

python analyse.py WORK [OUT]

Verdict: two comparisons at every temperature and k of 2 and more, on the same distributions, paired by prompt: drafts
without replacement against drafts with, and hybrid ones against those without. *Holds* if none is significantly below 1
and more than half are significantly above; *holds partly* if some are above; else it *does not hold*.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common

from eagle_tree import plots
from eagle_tree.analysis import compared, ratio

CLAIM = (
    "Drafts without replacement are accepted more than drafts with, and the most likely tokens with one draw more still"
)
SOURCE = "Hu et al., arXiv 2502.18779"
PAIRS = (("without replacement", "with replacement"), ("hybrid", "without replacement"))
SIZES = {
    "EAGLE-2, 8 nodes": {"policy": "eagle2", "budget": 8, "top_k": 4, "depth": 3},
    "EAGLE-2, 24 nodes": {"policy": "eagle2", "budget": 24, "top_k": 8, "depth": 4},
    "EAGLE-2, 59 nodes": common.PUBLISHED,
}
TEMPERATURE, CHILDREN = 1, 4
"""What the verdict's lines name; all are in results.csv."""
THIRDS = {1: "lowest", 2: "middle", 3: "highest"}


def of_nodes(nodes: pd.DataFrame) -> pd.DataFrame:
    """Accepted children of a node by temperature, rule and k: of all positions, and by the target's entropy there."""
    nodes = nodes.assign(nodes=1)
    third = nodes.groupby("temperature").entropy.rank(pct=True).mul(3).apply(lambda place: -int(-place // 1))
    parts = []
    for entropy, part in [("all", nodes), *((name, nodes[third == place]) for place, name in THIRDS.items())]:
        for key, group in part.groupby(["temperature", "rule", "k"], sort=False):
            sums = group.groupby("sequence")[["accepted", "nodes"]].sum()
            values = dict(zip(("accepted", "accepted_low", "accepted_high"), ratio(sums, "accepted", "nodes")))
            row = dict(zip(("temperature", "rule", "k"), key)) | {"entropy_third": entropy, **values}
            parts.append({**row, "positions": len(group), "prompts": len(sums)})
    return pd.DataFrame(parts)


def of_trees(passes: pd.DataFrame) -> pd.DataFrame:
    """Tokens a pass of every arm: expected over what a rule draws, given the drafts; realised for coupled drafts, whose
    tree looks at the noise that decides."""
    passes = passes.assign(passes=1, realised=passes.accepted + 1)
    passes["expected"] = passes.expected_target.fillna(passes.realised)
    rows = []
    for (temperature, arm), group in passes.groupby(["temperature", "policy"], sort=False):
        sums = group.groupby("prompt_id")[["expected", "realised", "emitted", "passes", "n_nodes"]].sum()
        row = {"temperature": temperature, "arm": arm, "passes": len(group), "prompts": len(sums)}
        row |= {"kind": "expected" if group.expected_target.notna().all() else "realised"}
        for name, column in (("tokens", "expected"), ("realised", "realised"), ("tau", "emitted")):
            row |= dict(zip((name, f"{name}_low", f"{name}_high"), ratio(sums, column, "passes")))
        rows.append(row)
    return pd.DataFrame(rows)


def pairs(nodes: pd.DataFrame) -> pd.DataFrame:
    """Accepted children of one kind of draft over another's, by temperature and k, with paired intervals."""
    rows = []
    for (temperature, k), group in nodes[nodes.k > 1].assign(nodes=1).groupby(["temperature", "k"]):
        sums = group.groupby(["rule", "sequence"])[["accepted", "nodes"]].sum().rename_axis(["policy", "prompt_id"])
        for rule, other in PAIRS:
            row = compared(sums.loc[[rule, other]], "accepted", "nodes", other).iloc[0]
            rows.append(
                {
                    "temperature": temperature,
                    "k": k,
                    "rule": rule,
                    "over": other,
                    **row[["gain", "gain_low", "gain_high"]],
                }
            )
    return pd.DataFrame(rows)


def coupled_trees(work: Path) -> pd.DataFrame:
    """τ of EAGLE-2's trees of coupled drafts at T = 1, and its gain over trees of the most likely tokens, replayed."""
    rows = []
    for name, entry in SIZES.items():
        parts = [
            common.replayed(work, "judge", TEMPERATURE, {rule: common.policy(entry)}, kind=kind)
            for rule, kind in (("match", "trace"), ("coupled", "coupled"))
        ]
        passes = pd.concat(parts, ignore_index=True)
        table = common.tokens_per_pass(passes).set_index("policy")[["tau", "tau_low", "tau_high", "passes", "prompts"]]
        gain = common.gains(passes, "match").loc["coupled", ["gain", "gain_low", "gain_high"]]
        rows += [
            {"arm": f"{name}, match", **table.loc["match"]},
            {"arm": f"{name}, coupled", "over": "match", **table.loc["coupled"], **gain},
        ]
    return pd.DataFrame(rows).assign(temperature=TEMPERATURE)


def verdict(found: pd.DataFrame) -> str:
    above, below = found.gain_low > 1, found.gain_high < 1
    if above.mean() > 0.5 and not below.any():
        return common.HOLDS
    return common.HOLDS_PARTLY if above.any() else common.DOES_NOT_HOLD


def shown(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the temperature and k that the verdict's lines name."""
    return rows[(rows.temperature == TEMPERATURE) & (rows.k == CHILDREN)]


def headline(found: pd.DataFrame) -> str:
    gains = [
        f"{row['rule']} over {row['over']} × {common.interval(row, 'gain')}" for row in shown(found).to_dict("records")
    ]
    above, below = (found.gain_low > 1).sum(), (found.gain_high < 1).sum()
    return (
        f"accepted of {CHILDREN} at T = {TEMPERATURE}: {', '.join(gains).replace(' replacement', '')}; {above} of "
        f"{len(found)} significantly above, {below} below"
    )


def numbers(found: pd.DataFrame, nodes: pd.DataFrame, trees: pd.DataFrame, coupled: pd.DataFrame) -> str:
    counted = [
        f"{rule} over {other}: of {len(group)}, {(group.gain_low > 1).sum()} significantly above, "
        f"{(group.gain_high < 1).sum()} below"
        for (rule, other), group in found.groupby(["rule", "over"], sort=False)
    ]
    at = shown(nodes[nodes.entropy_third == "all"])
    accepted = [f"{row['rule']} {common.interval(row, 'accepted')}" for row in at.to_dict("records")]
    whole = trees[(trees.temperature == TEMPERATURE) & trees.arm.str.startswith("tree")]
    tokens = [
        f"{row['arm'].removeprefix('tree, ')} {common.interval(row, 'tokens')}" for row in whole.to_dict("records")
    ]
    gains = [
        f"{row['arm'].removesuffix(', coupled')} × {common.interval(row, 'gain')}"
        for row in coupled[coupled.gain.notna()].to_dict("records")
    ]
    return (
        f"{'; '.join(counted)}. At T = {TEMPERATURE}, of {CHILDREN} children accepted: {', '.join(accepted)}; tokens a "
        f"pass of trees of 21 nodes: {', '.join(tokens)}; τ of coupled over match, replayed: {', '.join(gains)}"
    )


def main(work: Path, out: Path) -> None:
    folder = work / "08_acceptance_rules"
    drawn, passes = (pd.read_parquet(folder / f"{name}.parquet") for name in ("nodes", "trees"))
    nodes, trees, found, coupled = of_nodes(drawn), of_trees(passes), pairs(drawn), coupled_trees(work)
    parts = {"nodes": nodes, "trees": trees, "pairs": found, "coupled": coupled}
    table = pd.concat(part.rename(columns={"arm": "rule"}).assign(of=name) for name, part in parts.items())
    about = common.machine(json.loads((folder / "about.json").read_text()))
    figure = plots.acceptance_rules(nodes[nodes.entropy_third == "all"], trees)
    told = headline(found), numbers(found, nodes, trees, coupled)
    common.write(out, CLAIM, SOURCE, verdict(found), *told, table, figure, about)


if __name__ == "__main__":
    main(*common.folders(sys.argv, __file__))
