"""eagle-tree calibrate: measure what a pass costs on this machine, or fit what confidences are worth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import torch
from omegaconf import DictConfig, OmegaConf

from eagle_tree import calibration, plots
from eagle_tree.accept import Match, Sequential
from eagle_tree.apps import common
from eagle_tree.calibration import (
    by_outcome,
    calibrated,
    expected_calibration_error,
    fit_isotonic,
    fit_temperatures,
    judged_nodes,
)
from eagle_tree.checks import as_path, check_count, is_count
from eagle_tree.cost import CostTable, measure
from eagle_tree.decode import generate
from eagle_tree.drafter.base import Drafter
from eagle_tree.files import read_json
from eagle_tree.policy import Eagle2
from eagle_tree.record import read_run
from eagle_tree.target import Target
from eagle_tree.tree import Frontier, GrowingTree, Tree

FIXED_TOKENS = 32
FAN = 8
"""Children per node of the tree that is verified; its shape makes no difference to the time."""


def main(arguments: list[str]) -> int:
    """Entry point of the verb."""
    return common.run_verb("calibrate", calibrate, arguments)


def calibrate(config: DictConfig) -> dict[str, Any]:
    """Measure costs, or fit confidences on a recorded run, and write the result into `folder`."""
    return measure_costs(config) if config.nodes is None else fit_confidences(config)


def fit_confidences(config: DictConfig) -> dict[str, Any]:
    """Fit both families on the node table of a run; judge each on prompts that it was not fitted on."""
    run, folder = as_path("nodes", config.nodes), as_path("folder", config.folder)
    nodes = read_run(run, "nodes")
    if not (run / "run.json").is_file():
        raise FileNotFoundError(f"nodes={run} has no run.json, which says what was decoded: the run was interrupted")
    about = read_json(run / "run.json", "config")
    greedy = about["config"]["temperature"] == 0
    counts = nodes.policy.value_counts()
    policy = config.of_policy or (counts.index[0] if len(counts) else None)
    if policy not in counts.index:
        raise ValueError(f"of_policy={policy!r} drafted nothing in {run}; its node table has {', '.join(counts.index)}")
    nodes = nodes[nodes.policy == policy]
    rule = common.build(OmegaConf.create(about["config"]["accept"]))()
    if type(rule) not in (Match, Sequential):  # these accept a node with the target's probability of it
        nodes = by_outcome(nodes)
    prompts = nodes.prompt_id.unique()
    if len(prompts) < 2:
        raise ValueError(f"{run} holds {len(prompts)} prompt with nodes; two at least are needed to fit and to judge")
    halves = [nodes[nodes.prompt_id.isin(prompts[start::2])] for start in (0, 1)]
    judged = judged_nodes(nodes)
    errors = {"raw": expected_calibration_error(judged.confidence.to_numpy(), judged.label.to_numpy())}
    fitted = {}
    for name, fit in (("temperatures", fit_temperatures), ("isotonic", fit_isotonic)):
        judged = [calibrated(judged_nodes(test), fit(train, greedy)) for train, test in (halves, halves[::-1])]
        judged = pd.concat(judged)
        errors[name] = expected_calibration_error(judged.calibrated.to_numpy(), judged.label.to_numpy())
        fitted[name] = replace(fit(nodes, greedy), drafter=about.get("drafter_fingerprint"))
        calibration.save(fitted[name], folder / f"{name}.json")
    temperatures = fitted["temperatures"].temperature
    regime = "T = 0" if greedy else "T > 0"
    print(f"{len(nodes)} nodes of {policy} on {len(prompts)} prompts at {regime}; calibration error on other prompts:")
    print("\n".join(common.aligned([{name: f"{value:.4f}" for name, value in errors.items()}])))
    print(f"temperatures by depth: {', '.join(f'{value:.2f}' for value in temperatures)}")
    return {"folder": str(folder), "greedy": greedy, "calibration_error": errors, "temperatures": temperatures}


def measure_costs(config: DictConfig) -> dict[str, Any]:
    """Measure the cost table that a config describes."""
    fields, folder = OmegaConf.to_container(config, resolve=True), as_path("folder", config.folder)
    for name in ("positions", "widths", "contexts"):
        if not isinstance(fields[name], list) or not fields[name] or not all(map(is_count, fields[name])):
            raise ValueError(f"{name}={fields[name]!r} must be a list of integers >= 1")
    for name, what in (("positions", "decoding without a tree verifies"), ("widths", "the root's step expands")):
        if 1 not in fields[name]:
            raise ValueError(f"{name}={fields[name]!r} must hold 1: {what} one")
    for name in ("repeats", "candidates"):
        check_count(name, fields[name])
    target = common.build_target(config.target)
    drafter = common.build_drafter(config.drafter, target)
    longest = max(fields["contexts"]) + max(fields["positions"])
    if longest > target.max_length:
        raise ValueError(f"contexts and positions reach {longest}; the target's context is {target.max_length}")
    candidates = min(config.candidates, drafter.vocab_size)
    widths = [width for width in fields["widths"] if width <= drafter.vocab_size]
    parts = []
    for context in sorted(set(config.contexts)):
        print(f"measuring at a context of {context} tokens …", flush=True)
        token = torch.arange(context, device=target.device) % target.vocab_size
        parts.append(verify_times(target, token, fields["positions"], config.repeats))
        parts.append(draft_times(target, drafter, token, widths, candidates, config.repeats))
    fixed = fixed_times(target, drafter, min(candidates, 4))
    points = pd.concat(parts, ignore_index=True)
    about = {**common.machine(target), "target_fingerprint": target.fingerprint, "target": target.name}
    about["drafter"] = type(drafter).__name__
    table = CostTable(points, *fixed.quantile([0.5, 0.25, 0.75]).tolist(), about)
    table.save(folder)
    plots.save(plots.verify_cost(points), folder / "cost.png")
    print_table(table)
    curve = table.verify(min(config.contexts))
    relative = {str(n): float(curve[n] / curve[1]) for n in (8, 16, 32, 60) if n <= table.largest_n}
    return {"folder": str(folder), "verify_1_s": float(curve[1]), "relative": relative, "fixed_s": table.fixed}


def synchronizer(device: torch.device):
    """Waits for queued work on a GPU; does nothing on a CPU."""
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


@torch.inference_mode()
def verify_times(target: Target, token: torch.Tensor, positions: list[int], repeats: int) -> pd.DataFrame:
    """Times of one target forward over n positions behind the tokens `[context]`."""
    cache = target.new_cache()
    target.prefill(token, cache)

    def run(n: int) -> None:
        parent = [-1, *((node - 1) // FAN for node in range(1, n))]
        tree = Tree.from_lists([node % FAN for node in range(n)], parent, device=target.device)
        target.verify([tree], cache)
        cache.keep([[]])

    points = measure(run, positions, repeats, synchronizer(target.device))
    return points.assign(stage="verify", context=len(token), batch=1)


@torch.inference_mode()
def draft_times(
    target: Target, drafter: Drafter, token: torch.Tensor, widths: list[int], candidates: int, repeats: int
) -> pd.DataFrame:
    """Times of a drafter step: width 1 is the root's, two accepted tokens included; others expand its children."""
    features = target.prefill(token, target.new_cache(), drafter.taps).features if drafter.taps else None
    pending = token[-1:]
    drafter.start(token, features, pending)
    again = None if features is None else features[-2:]
    growing = GrowingTree.from_root(pending)
    root, all_children = (Frontier(pending.new_zeros(1), count) for count in (candidates, max(widths)))
    pool = growing.append(all_children, drafter.expand(growing, all_children, None))

    def run(width: int) -> None:
        if width == 1:
            drafter.advance(token[-2:], again)
        drafter.expand(growing, root, None)  # computed in the first case, remembered in the others
        if width > 1:
            node = torch.arange(1, width + 1, device=token.device)
            drafter.expand(pool, Frontier(node, candidates), None)

    points = measure(run, widths, repeats, synchronizer(target.device), tolerance=float("inf"))
    return points.assign(stage="draft", context=len(token), batch=1)


def fixed_times(target: Target, drafter: Drafter, top_k: int) -> pd.Series:
    """Seconds of a pass outside of growing and verifying, pass by pass."""
    prompt = [index % target.vocab_size for index in range(5, 37)]
    policy = Eagle2(budget=2 * top_k, top_k=top_k, depth=2)
    run = generate(target, drafter, policy, prompt, FIXED_TOKENS, record_nodes=False)
    return pd.Series([one.row.pass_s - one.row.verify_s - one.row.grow_s for one in run.passes]).clip(lower=0)


def print_table(table: CostTable) -> None:
    """The measured points for people."""
    base = table.points[(table.points.stage == "verify") & (table.points.n == 1)].set_index("context").seconds
    rows = [
        {
            "stage": row["stage"],
            "context": str(row["context"]),
            "n": str(row["n"]),
            "ms (quartiles)": f"{1e3 * row['seconds']:.2f} ({1e3 * row['low']:.2f}–{1e3 * row['high']:.2f})",
            "T(n)/T(1)": f"{row['seconds'] / base[row['context']]:.2f}",
        }
        for row in table.points.sort_values(["stage", "context", "n"], ascending=[False, True, True]).to_dict("records")
    ]
    print("\n".join(common.aligned(rows)))
    low, high = 1e3 * table.fixed_low, 1e3 * table.fixed_high
    print(f"\nfixed, a pass: {1e3 * table.fixed:.2f} ms ({low:.2f}–{high:.2f}); {table.about['device']}")
