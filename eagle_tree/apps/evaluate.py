"""eagle-tree evaluate: a drafter judged on its own, along the target's own texts.

The target answers every prompt once (or its answers are read from `texts`), and reads each answer once. Then
only the drafter runs: hit rates by depth of self-feeding, the calibration of its confidences, and the tokens
per pass that policies would reach with it. `accuracy.json` is what `policy=medusa` and `policy=sequoia` read.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from omegaconf import DictConfig
from tqdm import tqdm

from eagle_tree import analysis, plots
from eagle_tree.apps import common
from eagle_tree.checks import as_path, check_count
from eagle_tree.drafter.base import Drafter
from eagle_tree.evaluate import Text, answered, check_candidates, covered, follow, measure, read
from eagle_tree.files import write_json, write_table
from eagle_tree.policy import Accuracy, Autoregressive, Policy
from eagle_tree.record import PASS_SCHEMA
from eagle_tree.target import Target
from eagle_tree.warp import Sampling

RANKS = (1, 2, 4, 8)


def main(arguments: list[str]) -> int:
    """Entry point of the verb."""
    return common.run_verb("evaluate", evaluate, arguments)


def evaluate(config: DictConfig) -> dict[str, Any]:
    """Evaluate the drafter that a config describes."""
    policies = common.listed_policies(config, "policies")
    sampling = Sampling(config.temperature, config.top_k, config.top_p)
    check_count("depths", config.depths)
    common.check_length_and_seed(config, least=2)  # the first is prefill's own
    if config.get("drafter") is None:
        raise ValueError("drafter: none is given, and a drafter is what is judged")
    folder = common.new_run_folder(config, "evaluate", "evaluation.json")
    texts_path = folder / "texts.parquet" if config.texts is None else as_path("texts", config.texts)
    prompts = common.read_prompts(config.data)
    if not prompts:
        raise ValueError("data: no prompts to evaluate on")
    target = common.build_target(config.target)
    drafter = common.build_drafter(config.drafter, target)
    common.check_made_for(policies.values(), target, drafter, sampling)
    prompts = [Text(one.id, one.category, target.encode_chat(list(one.messages))) for one in prompts]
    check_candidates(drafter)
    everyone = [Autoregressive(), *policies.values()]
    requests = [(prompt.prompt_id, prompt.prompt_ids) for prompt in prompts]
    common.check_requests(target, drafter, everyone, requests, config.max_new_tokens, sampling)

    started = time.perf_counter()
    try:
        stream = answered(texts_path, target, prompts, sampling, config.max_new_tokens, config.seed)
        texts = list(tqdm(stream, "the target's texts", len(prompts), unit="text", dynamic_ncols=True))
        tables = judge(target, drafter, policies, texts, sampling, config.depths)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"the finished texts are kept in {texts_path}: give them as texts=FILE") from None
    if not tables["prompts"].drafted.sum():
        raise ValueError(f"nothing to judge in {texts_path}: every answer ended with its first token")
    for name, table in tables.items():
        schema = PASS_SCHEMA if name == "passes" else None
        write_table(pa.Table.from_pandas(table, schema, preserve_index=False), folder / f"{name}.parquet")
    result = report(tables, folder)
    about = {**common.provenance(target, config), "wall_s": time.perf_counter() - started, "result": result}
    accuracy_of(tables["hits"], config, about).save(folder / "accuracy.json")
    write_json(folder / "evaluation.json", about, default=str)
    return {key: value for key, value in result.items() if key not in ("depths", "calibration_error_by_depth")}


def judge(
    target: Target,
    drafter: Drafter,
    policies: dict[str, Policy],
    texts: list[Text],
    sampling: Sampling,
    depths: int,
) -> dict[str, pd.DataFrame]:
    """Every count: tables `hits` (prompt, depth, rank), `bins` (prompt, depth, confidence), `passes`, `prompts`."""
    hits, bins, passes, prompts = [], [], [], []
    with tqdm(total=len(texts) * (1 + len(policies)), unit="walk", dynamic_ncols=True) as bar:
        for text in texts:
            reading = read(target, drafter.taps, text, sampling)
            drafted = len(text.answer_ids) - 1
            sizes = {"prompt_tokens": len(text.prompt_ids), "answer_tokens": len(text.answer_ids), "drafted": drafted}
            known = {"prompt_id": text.prompt_id, "category": text.category}
            prompts.append({**known, **sizes, "covered": covered(drafter, reading.answer)})
            bar.set_postfix_str(f"{text.prompt_id} depths", refresh=False)
            of_depth, of_bin = measure(drafter, reading, depths)
            hits.append(of_depth)
            bins.append(of_bin)
            bar.update()
            for name, policy in policies.items():
                bar.set_postfix_str(f"{text.prompt_id} {name}", refresh=False)
                passes += follow(drafter, policy, reading, target.max_length, name)
                bar.update()
    tables = {"hits": pd.concat(hits, ignore_index=True), "bins": pd.concat(bins, ignore_index=True)}
    columns = PASS_SCHEMA.names
    return {**tables, "passes": pd.DataFrame(passes, columns=columns), "prompts": pd.DataFrame(prompts)}


def accuracy_of(hits: pd.DataFrame, config: DictConfig, about: dict[str, Any]) -> Accuracy:
    """Acceptance by depth and rank, summed over prompts; depths that no text reached are left out."""
    sums = hits.groupby(["depth", "rank"])[["positions", "probability"]].sum()
    positions = sums.positions.unstack()[0]
    accepted = sums.probability.unstack()[positions > 0]
    measured = {"temperature": config.temperature, "texts": hits.prompt_id.nunique()}
    measured |= {key: about[key] for key in ("target_fingerprint", "dtype", "commit")}
    return Accuracy(positions[positions > 0].tolist(), accepted.to_numpy().tolist(), measured)


def report(tables: dict[str, pd.DataFrame], folder: Path) -> dict[str, Any]:
    """Print the tables, draw the figure, and return the result."""
    bins, prompts = tables["bins"], tables["prompts"]
    rates = analysis.hit_rates(tables["hits"], RANKS)
    rates["calibration_error"] = [analysis.calibration_error(bins[bins.depth == depth]) for depth in rates.depth]
    rates = rates[rates.positions > 0]
    summary = analysis.tokens_per_pass(tables["passes"])
    coverage = int(prompts.covered.sum()) / int(prompts.drafted.sum())
    calibration_error = analysis.calibration_error(bins)
    plots.save(plots.drafter_alone(rates, bins), folder / "evaluation.png")
    print("\n".join(depth_lines(rates, coverage, calibration_error)))
    if len(summary):
        print("\n" + "\n".join(policy_lines(summary)))
    print(f"\n{len(prompts)} texts, {prompts.answer_tokens.sum()} tokens; counts in {folder}\n")
    keys = ("tau", "tau_low", "tau_high", "passes")
    policies = common.by_policy(summary, keys)
    depths = [{key: common.finite(value) for key, value in row.items()} for row in rates.to_dict("records")]
    return {
        "run": str(folder),
        "n_alpha": rates.n_alpha.tolist(),
        "hit": {str(rank): rates[f"hit_{rank}"].tolist() for rank in RANKS},
        "coverage": coverage,
        "calibration_error": calibration_error,
        "calibration_error_by_depth": rates.calibration_error.tolist(),
        "policies": policies,
        "depths": depths,
    }


def depth_lines(rates: pd.DataFrame, coverage: float, calibration_error: float) -> list[str]:
    """The table of depths for people."""
    rows = []
    for row in rates.to_dict("records"):
        cells = {"depth": str(row["depth"]), "positions": str(row["positions"])}
        cells["n-α (95 %)"] = common.interval(row, "n_alpha")
        cells |= {f"hit {rank} (95 %)": common.interval(row, f"hit_{rank}") for rank in RANKS}
        rows.append({**cells, "calibration error": f"{row['calibration_error']:.3f}"})
    return [
        *common.aligned(rows),
        "",
        f"coverage {coverage:.1%}: tokens that the drafter can propose. Calibration error: {calibration_error:.3f}.",
        "depth: own outputs fed back, along the true text. n-α: the target's probability of the first candidate (at",
        "T = 0: its agreement with the text). hit k: the text's token is among the first k.",
    ]


def policy_lines(summary: pd.DataFrame) -> list[str]:
    """The table of policies for people."""
    rows = [common.policy_cells(row) for row in summary.to_dict("records")]
    return [*common.aligned(rows), "", "τ: tokens per target pass, bonus included, prefill excluded."]
