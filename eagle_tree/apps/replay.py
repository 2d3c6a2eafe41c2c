"""eagle-tree replay: policies on a recorded trace, in the time of a cost table; no model is loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict
from tqdm import tqdm

from eagle_tree import __version__, analysis
from eagle_tree.apps import common, sweep
from eagle_tree.apps.bench import chosen_policies
from eagle_tree.bound import fastest
from eagle_tree.checks import as_path, check_flag
from eagle_tree.cost import CostTable
from eagle_tree.files import write_json, write_table
from eagle_tree.policy import Autoregressive
from eagle_tree.record import PASS_SCHEMA
from eagle_tree.regret import learns, regrets
from eagle_tree.replay import Replayed, check_replayable, check_rule, replay
from eagle_tree.trace import Trace, stamp

BASELINE = "autoregressive"


def main(arguments: list[str]) -> int:
    """Entry point of the verb; a multirun is a sweep."""
    if sweep.is_sweep(arguments):
        return sweep.run("replay", job, arguments)
    return common.run_verb("replay", alone, arguments)


def alone(config: DictConfig) -> dict[str, Any]:
    """Replay the policies that a config describes."""
    for name, unset in (("resume", False), ("sweep", None)):
        if config[name] != unset:
            raise ValueError(f"{name}={config[name]} is of a sweep, which -m asks for: eagle-tree replay -m …")
    folder = common.new_run_folder(config, "replay", "run.json")
    outcome = replayed(config)
    summary, result = write(outcome, folder, config)
    print("\n".join(lines(summary, outcome.cost, outcome.trace)))
    passes = len(outcome.passes)
    print(f"{passes} passes, {result['passes_per_second']:.0f} a second; recorded in {folder}\n")
    return result


def job(config: DictConfig, folder: Path) -> float:
    """A job of a sweep: the same, without a table. Returns tokens per second, or τ without a cost table."""
    outcome = replayed(config, quiet=True)
    summary, _ = write(outcome, folder, config)
    return objective(summary, outcome.cost)


def objective(summary: pd.DataFrame, cost: CostTable | None) -> float:
    """What a search maximises: tokens per second of the policy chosen by `policy`, τ without a cost table."""
    return float(summary.set_index("policy").loc[chosen(), "tau" if cost is None else "tokens_per_second"])


def chosen() -> str:
    """The name of the policy that `policy` chooses."""
    return HydraConfig.get().runtime.choices["policy"]


@lru_cache(maxsize=2)
def loaded(folder: str, stamp: str) -> Trace:
    """The trace in a folder; a process that replays many configurations reads it once, unless its files change."""
    return Trace.read(folder)


@lru_cache(maxsize=2)
def standards(folder: str, stamp: str, cost: str) -> tuple[CostTable | None, Replayed, pd.DataFrame | None]:
    """What every policy is compared with, once a process: the cost table, the baseline and the bound.

    Args:
        cost: the table's config as JSON, or null.
    """
    fields, trace = json.loads(cost), loaded(folder, stamp)
    table = None if fields is None else common.build(OmegaConf.create(fields))()
    baseline = replay(trace, Autoregressive(), table, BASELINE)
    return table, baseline, None if table is None else fastest(trace, table)


def known(config: DictConfig) -> tuple[str, str, str]:
    """The arguments of `standards`."""
    cost = config.get("cost")
    fields = None if cost is None else OmegaConf.to_container(cost, resolve=True, throw_on_missing=True)
    folder = as_path("trace", config.trace)
    return str(folder), stamp(folder), json.dumps(fields)


@dataclass(frozen=True)
class Outcome:
    """What was replayed: passes by policy, the baseline first; and where their tokens are lost, if that was asked."""

    trace: Trace
    cost: CostTable | None
    bound: pd.DataFrame | None
    results: dict[str, Replayed]
    losses: pd.DataFrame | None

    @property
    def passes(self) -> pd.DataFrame:
        """The passes of all policies."""
        return pd.concat([result.passes for result in self.results.values()], ignore_index=True)


def replayed(config: DictConfig, quiet: bool = False) -> Outcome:
    """Replay all policies of a config."""
    check_flag("regret", config.regret)
    policies = chosen_policies(config, config.get("cost"))
    policies.pop(BASELINE, None)
    trace = loaded(*known(config)[:2])
    with open_dict(config):  # a rule may be chosen by it (accept=measured)
        config.temperature = trace.settings["temperature"]
    check_rule(trace, common.build(config.accept)())
    for name, policy in policies.items():
        try:
            check_replayable(trace, policy)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    cost, baseline, bound = standards(*known(config))
    # a policy that learns has no tree of its own at a single position
    still = {name: policy for name, policy in policies.items() if config.regret and not learns(policy)}
    losses = pd.concat([regrets(trace, policy, name) for name, policy in still.items()]) if still else None
    bar = tqdm(policies.items(), "policies", unit="policy", dynamic_ncols=True, disable=quiet)
    results = {BASELINE: baseline, **{name: replay(trace, policy, cost, name) for name, policy in bar}}
    return Outcome(trace, cost, bound, results, losses)


def write(outcome: Outcome, folder: Path, config: DictConfig) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Write the run's tables; returns the summary and the JSON result."""
    cost, bound, passes, results = outcome.cost, outcome.bound, outcome.passes, outcome.results
    summary = analysis.replayed(passes, bound)
    summary["uncovered"] = [results[name].uncovered for name in summary.policy]
    busy = sum(result.seconds for result in results.values())
    tables = {"prompts": pa.Table.from_pandas(analysis.prompt_sums(passes).reset_index(), preserve_index=False)}
    if not sweep.is_job():
        tables["passes"] = pa.Table.from_pandas(passes, PASS_SCHEMA, preserve_index=False)
    if outcome.losses is not None:
        tables["regret"] = pa.Table.from_pandas(outcome.losses, preserve_index=False)
    for name, table in tables.items():
        write_table(table, folder / f"{name}.parquet")
    keys = ("tau", "tau_low", "tau_high", "tokens_per_second", "speedup", "speedup_low", "speedup_high")
    keys += ("bound_share", "uncovered", "passes", "nodes")
    result = {
        "run": str(folder),
        "trace": outcome.trace.fingerprint,
        "cost": None if cost is None else cost.about.get("device"),
        "policies": common.by_policy(summary, keys),
        "bound_tokens_per_second": None if bound is None else bound.emitted.sum() / bound.seconds.sum(),
        "passes_per_second": len(passes) / busy,
    }
    about = {
        "commit": common.commit(),
        "versions": {"eagle_tree": __version__, "torch": torch.__version__},
        "device": common.cpu_name(),
        "threads": torch.get_num_threads(),
        "trace_settings": outcome.trace.settings,
        "cost": None if cost is None else cost.about,
        "config": OmegaConf.to_container(config, resolve=True),
        "chosen": chosen(),
        "overrides": sweep.of_the_job(list(HydraConfig.get().overrides.task)),
        "objective": objective(summary, cost),
        "result": result,
    }
    write_json(folder / "run.json", about, default=str)  # last: a folder with it is whole
    return summary, result


def lines(summary: pd.DataFrame, cost: CostTable | None, trace: Trace) -> list[str]:
    """The summary for people."""
    rows = []
    for row in summary.to_dict("records"):
        cells = common.policy_cells(row)
        if cost is not None:
            cells["tokens/s"] = f"{row['tokens_per_second']:.1f}"
            cells["speed-up (95 %)"] = common.interval(row, "speedup")
            cells["of the bound"] = f"{row['bound_share']:.1%}"
        rows.append({**cells, "uncovered": str(row["uncovered"])})
    notes = [
        f"trace of {len(trace.parts)} prompts, {len(trace.context)} positions, T = {trace.settings['temperature']}, "
        f"{trace.draw.kind} drafts."
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
