"""The rate-optimal tree against the best fixed one, by replay and by the clock; the cost table against the clock.

python analyse.py WORK [OUT]      also writes OUT/prediction.csv where there are live runs

The parts of the claim: at every temperature the rate-optimal policy is as fast as the best fixed tree of the search
(lower bound of the interval of the speed ratio at least 0.97) and faster than EAGLE-2's published default (at least
1.2), each by replay and by the clock; with a drafter of random weights it keeps 0.95 of autoregressive decoding
(estimate); the cost table predicts tokens per second within 7 % of every configuration. Verdict: it *holds* if all
parts that were measured do, *holds partly* if some do, else it *does not hold*.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import common
from search import fastest

from eagle_tree import analysis, plots
from eagle_tree.apps.common import listed_policy
from eagle_tree.bound import fastest as shortest_path
from eagle_tree.cost import CostTable
from eagle_tree.policy import Policy
from eagle_tree.record import read_run

CLAIM = "Choosing every tree by tokens per second is as fast as the best fixed tree, and faster than EAGLE-2's default"
SOURCE = "this project; renewal reward (Dinkelbach), after Sequoia, arXiv 2402.12374, and CAST, arXiv 2510.26577"
RATE, DEFAULT, BEST = "rate_optimal", "eagle2_published", "best fixed"
AS_FAST, FASTER, KEPT, PREDICTED = 0.97, 1.2, 0.95, 0.07


def policies(work: Path, temperature: int) -> dict[str, Policy]:
    """What is replayed on the judge half."""
    (best,) = fastest(work, temperature, 1)
    rate = {"policy": RATE, "cost": str(work / "cost")}
    return {BEST: common.policy(best), DEFAULT: common.policy(DEFAULT), RATE: common.policy(rate)}


def ratios(sums: pd.DataFrame, pairs: list[tuple[str, str]]) -> pd.DataFrame:
    """Speed ratios, paired by prompt, with their 95 % intervals."""
    rows = []
    for policy, over in pairs:
        row = {"policy": policy, "over": over, "prompts": len(sums.loc[policy])}
        values = analysis.speedup(sums.loc[policy], sums.loc[over])
        rows.append({**row, **dict(zip(("ratio", "ratio_low", "ratio_high"), values, strict=True))})
    return pd.DataFrame(rows)


def pairs(names: list[str]) -> list[tuple[str, str]]:
    """The rate-optimal policy over all others, and the others over autoregressive decoding."""
    others = [name for name in names if name not in (RATE, "autoregressive")]
    return [(RATE, name) for name in [*others, "autoregressive"]] + [(name, "autoregressive") for name in others]


def replayed(work: Path, temperature: int, cost: CostTable) -> pd.DataFrame:
    """Speed ratios in the cost table's time, and the shares of the bound."""
    passes = common.replayed(work, "judge", temperature, policies(work, temperature), cost)
    table = ratios(analysis.prompt_sums(passes), pairs([BEST, DEFAULT]))
    bound = shortest_path(common.trace(work, "judge", temperature), cost)
    share = analysis.replayed(passes, bound).set_index("policy").bound_share
    return table.assign(bound_share=table.policy.map(share))


def clocked(work: Path, pattern: str, names: dict[str, str]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Passes, and `analysis.per_prompt` with repeats summed, of the live runs whose folder matches; names replaced."""
    runs = [(read_run(run, "passes"), read_run(run, "outputs")) for run in sorted((work / "live").glob(pattern))]
    runs = [tuple(table.assign(policy=table.policy.replace(names)) for table in run) for run in runs]
    sums = pd.concat([analysis.per_prompt(*run) for run in runs]).groupby(["policy", "prompt_id"], sort=False).sum()
    return pd.concat([passes for passes, _ in runs], ignore_index=True), sums


def predictions(passes: pd.DataFrame, sums: pd.DataFrame, cost: CostTable) -> pd.DataFrame:
    """Tokens per second by the cost table and the recorded passes, against measured."""
    rows = []
    for policy, group in passes[passes.policy != "autoregressive"].groupby("policy", sort=False):
        total, predicted = sums.loc[policy].sum(), analysis.predicted_speed(group, cost)
        row = {"policy": policy, "tau": total.emitted / total.passes, "measured": total.emitted / total.seconds}
        rows.append({**row, "predicted": predicted, "error": predicted / row["measured"] - 1})
    return pd.DataFrame(rows)


def live(work: Path, cost: CostTable) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Speed ratios by the clock, and predictions of all configurations; no rows where nothing was decoded."""
    rows, predicted = [], []
    for temperature in common.TEMPERATURES:
        if not list((work / "live").glob(f"judge_{temperature}_*/run.json")):
            continue
        label = listed_policy(fastest(work, temperature, 1)[0], "policies")[0]
        rate = f"{RATE}(cost={work}/cost)"
        passes, sums = clocked(work, f"judge_{temperature}_*", {label: BEST, rate: RATE})
        names = list(dict.fromkeys(passes.policy))
        rows.append(ratios(sums, pairs(names)).assign(temperature=temperature))
        predicted.append(predictions(passes, sums, cost).assign(temperature=temperature))
    if (work / "live" / "random" / "run.json").exists():
        sums = clocked(work, "random", {RATE: "random drafter"})[1]
        rows.append(ratios(sums, [("random drafter", "autoregressive")]).assign(temperature=0))
    joined = [pd.concat(tables, ignore_index=True) if tables else pd.DataFrame() for tables in (rows, predicted)]
    return joined[0], joined[1]


def parts(table: pd.DataFrame, predicted: pd.DataFrame) -> dict[str, bool]:
    """Which parts of the claim hold, of those that were measured."""
    found = {}
    for how, rows in table.groupby("how", sort=False):
        for over, least in ((BEST, AS_FAST), (DEFAULT, FASTER)):
            mine = rows[(rows.policy == RATE) & (rows.over == over)]
            if len(mine):
                found[f"over {over}, {how}"] = bool((mine.ratio_low >= least).all())
    random = table[table.policy == "random drafter"]
    if len(random):
        found["random drafter"] = bool((random.ratio >= KEPT).all())
    if len(predicted):
        found["prediction"] = bool((predicted.error.abs() <= PREDICTED).all())
    return found


def verdict(found: dict[str, bool]) -> str:
    if all(found.values()):
        return common.HOLDS
    return common.HOLDS_PARTLY if any(found.values()) else common.DOES_NOT_HOLD


def headline(table: pd.DataFrame, predicted: pd.DataFrame) -> str:
    """The least gain over the best fixed tree, by replay and by the clock, and the farthest prediction."""
    least = [
        f"× {common.interval(rows.loc[rows.ratio_low.idxmin()], 'ratio')} {how}"
        for how, rows in table[(table.policy == RATE) & (table.over == BEST)].groupby("how", sort=False)
    ]
    line = f"least over the best fixed tree {', '.join(least)}"
    if len(predicted):
        line += f"; farthest prediction {predicted.error.abs().max():.1%} off ({PREDICTED:.0%} allowed)"
    return line


def numbers(table: pd.DataFrame, predicted: pd.DataFrame) -> str:
    told = []
    for (temperature, how), rows in table[table.policy == RATE].groupby(["temperature", "how"], sort=False):
        named = rows.set_index("over")
        listed = ", ".join(f"{over} × {common.interval(named.loc[over], 'ratio')}" for over in (BEST, DEFAULT))
        share = rows.bound_share.iloc[0]
        bound = "" if pd.isna(share) else f"; {share:.0%} of the bound"
        told.append(f"T = {temperature}, {how}: rate-optimal over {listed}{bound}")
    for row in table[table.policy == "random drafter"].to_dict("records"):
        told.append(f"random drafter over autoregressive × {common.interval(row, 'ratio')}")
    if len(predicted):
        told.append(f"predicted tokens/s within {predicted.error.abs().max():.1%} of {len(predicted)} configurations")
    if set(table.how) == {"replayed"}:
        told.append("the clock was not asked")
    return ". ".join(told)


def main(work: Path, out: Path) -> None:
    cost = CostTable.load(work / "cost")
    replays = [replayed(work, temperature, cost).assign(temperature=temperature) for temperature in common.TEMPERATURES]
    measured, predicted = live(work, cost)
    replays = [rows.assign(how="replayed") for rows in replays]
    table = pd.concat([*replays, *([measured.assign(how="measured")] if len(measured) else [])], ignore_index=True)
    runs = sorted((work / "live").glob("judge_*/run.json"))
    about = common.machine(json.loads(runs[0].read_text())) if runs else work
    drawn = table[(table.policy == RATE) | (table.policy == "random drafter")]
    label = drawn.policy + " over " + drawn.over + ", T = " + drawn.temperature.astype(str)
    figure = plots.speed_ratios(drawn.assign(label=label, group=drawn.how), "The rate-optimal tree against fixed ones")
    if len(predicted):
        out.mkdir(parents=True, exist_ok=True)
        predicted.assign(**(about if runs else {})).round(4).to_csv(out / "prediction.csv", index=False)
    told = headline(table, predicted), numbers(table, predicted)
    common.write(out, CLAIM, SOURCE, verdict(parts(table, predicted)), *told, table, figure, about)


if __name__ == "__main__":
    main(*common.folders(sys.argv, __file__))
