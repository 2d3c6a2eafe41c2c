"""The sweep's table and its figures.

python collect.py WORK      writes results.csv, tau.png and speed.png, named after T if it is not 0; those of a small
                            run into WORK
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pandas as pd

from eagle_tree import analysis, plots
from eagle_tree.cost import CostTable
from eagle_tree.record import read_run


def family(label: str) -> str:
    """The policy without its size: `eagle2(budget=8,top_k=4,depth=2)` is `eagle2 top_k=4`."""
    name = label.split("(")[0]
    kinds = [kind for kind in ("temperatures", "isotonic", "budget=None") if kind in label]
    kinds += [f"top_k={width}" for width in (4, 10) if name == "eagle2" and f"top_k={width}," in label]
    return " ".join([name, *kinds]).replace("budget=None", "sized by cost")


def results(work: Path) -> pd.DataFrame:
    """One row a policy and size: followed τ, predicted and measured tokens per second."""
    cost = CostTable.load(work / "cost")
    followed = pd.concat(
        pd.read_parquet(path) for path in sorted(work.glob("*/passes.parquet")) if is_sweep(path.parent)
    )
    table = analysis.tokens_per_pass(followed)
    predicted = {name: analysis.predicted_speed(group, cost) for name, group in followed.groupby("policy")}
    timed = analysis.summarise(read_run(work / "timed", "passes"), read_run(work / "timed", "outputs"))
    names = ["tokens_per_second", "speedup"]
    columns = ["policy", *(f"{name}{end}" for name in names for end in ("", "_low", "_high"))]
    prompts = followed.groupby("policy").prompt_id.nunique()
    table = table.assign(predicted=table.policy.map(predicted), prompts=table.policy.map(prompts)).merge(
        timed[columns], "outer", "policy"
    )
    table = table.assign(family=table.policy.map(family)).sort_values(["family", "nodes"])
    return table.assign(policy=table.policy.str.replace(r"=[^,()]*/(\w+)(\.json)?", r"=\1", regex=True))  # folders


def is_sweep(folder: Path) -> bool:
    """Whether a run followed policies along texts."""
    return (folder / "evaluation.json").is_file()


def main(work: Path) -> None:
    folder = work if "small" in work.parts else Path()
    about = json.loads((work / "timed" / "run.json").read_text())
    table = results(work)
    baseline = table.tokens_per_second[table.policy == "autoregressive"].item()
    for name in ("device", "threads", "dtype", "commit"):
        table[name] = about[name]
    temperature = about["config"]["temperature"]
    end = f"_temperature_{temperature:g}" if temperature else ""
    table.assign(torch=about["versions"]["torch"]).round(4).to_csv(folder / f"results{end}.csv", index=False)
    drawn, machine = table[table.nodes > 0], f"{about['device']}, {about['dtype']}"
    by_family = drawn.assign(policy=drawn.family, temperature=temperature)
    plots.save(plots.tau_by_size(by_family), folder / f"tau{end}.png")
    decoded = drawn.assign(prompts=read_run(work / "timed", "outputs").prompt_id.nunique())
    speed = plots.speed_by_size(decoded, baseline, f"Tokens per second by size ({machine})")
    plots.save(speed, folder / f"speed{end}.png")
    print(
        table[["policy", "nodes", "tau", "predicted", "tokens_per_second", "speedup"]].round(2).to_string(index=False)
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
