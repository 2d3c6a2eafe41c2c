"""eagle-tree replay: policies on a recorded trace, in the time of a cost table; no model is loaded."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import torch
from omegaconf import DictConfig
from tqdm import tqdm

from eagle_tree import __version__, analysis
from eagle_tree.apps import common
from eagle_tree.apps.bench import chosen_policies
from eagle_tree.bound import fastest
from eagle_tree.cost import CostTable
from eagle_tree.files import write_json, write_table
from eagle_tree.policy import Autoregressive, Policy
from eagle_tree.record import PASS_SCHEMA
from eagle_tree.replay import Replayed, check_replayable, check_rule, replay
from eagle_tree.trace import Trace, stamp

BASELINE = "autoregressive"


def main(arguments: list[str]) -> int:
    """Entry point of the verb."""
    return common.run_verb("replay", run, arguments)


@lru_cache(maxsize=2)
def loaded(folder: str, stamp: str) -> Trace:
    """The trace in a folder; a process that replays many configurations reads it once, unless its files change."""
    return Trace.read(folder)


def run(config: DictConfig) -> dict[str, Any]:
    """Replay the policies that a config describes."""
    check_rule(common.build(config.accept)())
    cost = None if config.get("cost") is None else common.build(config.cost)()
    policies = {BASELINE: Autoregressive(), **chosen_policies(config, config.get("cost"))}
    folder = common.new_run_folder(config, "replay")
    if (folder / "run.json").exists():
        raise FileExistsError(f"{folder} already holds a run; name another folder")
    trace = loaded(str(config.trace), stamp(config.trace))
    for name, policy in policies.items():
        try:
            check_replayable(trace, policy)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return report(trace, cost, replay_all(trace, policies, cost), folder, config)


def replay_all(trace: Trace, policies: dict[str, Policy], cost: CostTable | None) -> dict[str, Replayed]:
    """Every policy's passes, by its name."""
    bar = tqdm(policies.items(), "policies", unit="policy", dynamic_ncols=True)
    return {name: replay(trace, policy, cost, name) for name, policy in bar}


def report(
    trace: Trace, cost: CostTable | None, results: dict[str, Replayed], folder: Path, config: DictConfig
) -> dict[str, Any]:
    """Write the run's tables, print the summary, and return the JSON result."""
    passes = pd.concat([result.passes for result in results.values()], ignore_index=True)
    bound = None if cost is None else fastest(trace, cost)
    summary = analysis.replayed(passes, bound)
    summary["uncovered"] = [results[name].uncovered for name in summary.policy]
    busy = sum(result.seconds for result in results.values())
    write_table(pa.Table.from_pandas(passes, PASS_SCHEMA, preserve_index=False), folder / "passes.parquet")
    keys = ("tau", "tau_low", "tau_high", "tokens_per_second", "speedup", "speedup_low", "speedup_high")
    keys += ("bound_share", "uncovered", "passes", "nodes")
    result = {
        "run": str(folder),
        "trace": trace.fingerprint,
        "cost": None if cost is None else cost.about.get("device"),
        "policies": {
            row["policy"]: {key: common.finite(row[key]) for key in keys} for row in summary.to_dict("records")
        },
        "bound_tokens_per_second": None if bound is None else bound.emitted.sum() / bound.seconds.sum(),
        "passes_per_second": len(passes) / busy,
    }
    about = {
        "commit": common.commit(),
        "versions": {"eagle_tree": __version__, "torch": torch.__version__},
        "device": common.cpu_name(),
        "threads": torch.get_num_threads(),
        "trace_settings": trace.settings,
        "cost": None if cost is None else cost.about,
        "config": common.OmegaConf.to_container(config, resolve=True),
        "result": result,
    }
    write_json(folder / "run.json", about, default=str)  # last: a folder with it is whole
    print("\n".join(lines(summary, cost, trace)))
    print(f"{len(passes)} passes, {len(passes) / busy:.0f} a second; recorded in {folder}\n")
    return result


def lines(summary: pd.DataFrame, cost: CostTable | None, trace: Trace) -> list[str]:
    """The summary for people."""
    rows = []
    for row in summary.to_dict("records"):
        cells = {
            "policy": row["policy"],
            "passes": str(row["passes"]),
            "τ (95 %)": common.interval(row, "tau"),
            "nodes": f"{row['nodes']:.1f}",
            "exp. draft": f"{row['expected_draft']:.2f}",
            "realised": f"{row['realised']:.2f}",
        }
        if cost is not None:
            cells["tokens/s"] = f"{row['tokens_per_second']:.1f}"
            cells["speed-up (95 %)"] = common.interval(row, "speedup")
            cells["of the bound"] = f"{row['bound_share']:.1%}"
        rows.append({**cells, "uncovered": str(row["uncovered"])})
    notes = [
        f"trace of {len(trace.parts)} prompts, {len(trace.context)} positions, T = {trace.settings['temperature']}."
    ]
    if cost is not None:
        modelled = "modelled, not measured" if cost.about.get("modelled") else "as measured"
        notes.append(
            f"times of {cost.about.get('device')}, {modelled}; bound: the shortest path through the known text."
        )
    if summary.uncovered.any():
        notes.append(
            "uncovered: requests that the trace does not hold, answered by no candidates. Those policies' numbers are "
            "not those of decoding: record what they ask with `eagle-tree trace extend=…`."
        )
    return [*common.aligned(rows), "", *notes]
