"""The rate-optimal policy against the best fixed trees, and the cost table against the clock.

python analyse.py entries WORK NUMBER   bench's entries of a repeat: the fastest of WORK/search, and what they meet
python analyse.py report WORK           writes results.csv and prediction.csv; those of a small run into WORK
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pandas as pd

from eagle_tree import analysis
from eagle_tree.cost import CostTable
from eagle_tree.record import read_run

BEST = 3


def summed(work: Path, pattern: str) -> pd.DataFrame:
    """`analysis.per_prompt` of all runs whose folder matches, repeats summed."""
    runs = [
        analysis.per_prompt(read_run(run, "passes"), read_run(run, "outputs")) for run in sorted(work.glob(pattern))
    ]
    return pd.concat(runs).groupby(level=["policy", "prompt_id"], sort=False).sum()


def fastest(work: Path) -> list[str]:
    """Labels of the fixed trees of most tokens per second in the search, best first."""
    sums = summed(work, "search").groupby("policy").sum().drop("autoregressive")
    return (sums.emitted / sums.seconds).nlargest(BEST).index.tolist()


def entries(work: Path, number: int) -> str:
    """Entries of bench's compare, rotated by the number of the repeat."""
    fixed = [re.sub(r"(\w+)=", r"\1: ", label.replace("(", ", ").rstrip(")")) for label in fastest(work)]
    listed = [f"{{policy: {fields}}}" for fields in fixed]
    listed += ["eagle2_published", f"{{policy: rate_optimal, cost: {work}/cost}}"]
    turn = number % len(listed)
    return ",".join(listed[turn:] + listed[:turn])


def ratios(sums: pd.DataFrame, pairs: list[tuple[str, str]]) -> pd.DataFrame:
    """Speed ratios, paired by prompt, with their 95 % intervals."""
    rows = []
    for policy, baseline in pairs:
        estimate, low, high = analysis.speedup(sums.loc[policy], sums.loc[baseline])
        rows.append({"policy": policy, "over": baseline, "ratio": estimate, "low": low, "high": high})
    return pd.DataFrame(rows)


def predictions(work: Path, policies: list[str], sums: pd.DataFrame) -> pd.DataFrame:
    """Tokens per second by cost table and recorded passes, against measured."""
    cost = CostTable.load(work / "cost")
    passes = pd.concat(read_run(run, "passes") for run in sorted(work.glob("judge_*")))
    rows = []
    for policy in policies:
        predicted = analysis.predicted_speed(passes[passes.policy == policy], cost)
        total = sums.loc[policy].sum()
        measured = total.emitted / total.seconds
        tau = total.emitted / total.passes
        rows.append({"policy": policy, "tau": tau, "measured": measured, "predicted": predicted})
        rows[-1]["error"] = predicted / measured - 1
    return pd.DataFrame(rows)


def report(work: Path) -> None:
    sums = summed(work, "judge_*")
    names = sums.index.unique("policy").tolist()
    rate = next(name for name in names if name.startswith("rate_optimal"))
    others = [*fastest(work), "eagle2_published"]
    pairs = [(rate, other) for other in [*others, "autoregressive"]] + [(other, "autoregressive") for other in others]
    random = ratios(summed(work, "random"), [("rate_optimal", "autoregressive")]).replace(
        "rate_optimal", "random drafter"
    )
    about = json.loads((work / "judge_1" / "run.json").read_text())
    machine = {name: about[name] for name in ("device", "threads", "dtype", "commit")}
    machine["torch"] = about["versions"]["torch"]
    folder = work if "small" in work.parts else Path()
    table = pd.concat([ratios(sums, pairs), random], ignore_index=True)
    predicted = predictions(work, [rate, *others], sums)
    for name, frame in (("results", table), ("prediction", predicted)):
        frame.replace(rate, "rate_optimal").assign(**machine).round(4).to_csv(folder / f"{name}.csv", index=False)
        print(frame.round(3).to_string(index=False), end="\n\n")


if __name__ == "__main__":
    if sys.argv[1] == "entries":
        print(entries(Path(sys.argv[2]), int(sys.argv[3])))
    else:
        report(Path(sys.argv[2]))
