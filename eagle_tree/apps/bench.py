"""eagle-tree bench: policies side by side on the same prompts.

Every prompt is decoded by every policy in turn, so that drift of the machine meets all of them alike. The
emitted text must not depend on the policy; where it does (rounding in half precision), the table says so.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pandas as pd
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from tqdm import tqdm

from eagle_tree import analysis, plots
from eagle_tree.accept import Rule
from eagle_tree.apps import common
from eagle_tree.checks import check_flag
from eagle_tree.decode import Generation, generate
from eagle_tree.drafter.base import Drafter
from eagle_tree.policy import Policy
from eagle_tree.prompts import Prompt
from eagle_tree.record import RunWriter, read_run
from eagle_tree.target import Target
from eagle_tree.warp import Sampling

WARM_UP_TOKENS = 8


def main(arguments: list[str]) -> int:
    """Entry point of the verb."""
    return common.run_verb("bench", bench, arguments)


def chosen_policies(config: DictConfig, cost: DictConfig | None = None) -> dict[str, Policy]:
    """Policies by label: those of `compare`, then the chosen one; `cost` as in `build_policy`."""
    policies = common.listed_policies(config, "compare", cost)
    chosen = HydraConfig.get().runtime.choices["policy"]
    policies.pop(chosen, None)  # the chosen one comes last, as its overrides say
    return {**policies, chosen: common.build_policy(config.policy, cost)}


def bench(config: DictConfig) -> dict[str, Any]:
    """Run the benchmark that a config describes."""
    policies = chosen_policies(config)
    sampling = Sampling(config.temperature, config.top_k, config.top_p)
    common.check_length_and_seed(config)
    rule, draw = common.build_rule(config)
    folder = common.new_run_folder(config, "bench", "run.json", "parts")
    check_flag("record_nodes", config.record_nodes)
    prompts = common.read_prompts(config.data)
    if not prompts:
        raise ValueError("data: no prompts to decode")
    target = common.build_target(config.target)
    drafter = common.build_drafter(config.drafter, target)
    common.check_made_for(policies.values(), target, drafter, sampling)
    prompts = [(prompt, target.encode_chat(list(prompt.messages))) for prompt in prompts]
    requests = [(prompt.id, ids) for prompt, ids in prompts]
    common.check_requests(target, drafter, policies.values(), requests, config.max_new_tokens, sampling, rule, draw)

    started = time.perf_counter()
    writer = RunWriter(folder)
    cache = target.new_cache()
    settings = {"sampling": sampling, "rule": rule, "draw": draw, "seed": config.seed, "cache": cache}
    for policy in policies.values():  # the first forwards of every shape pay for set-up
        generate(target, drafter, policy, prompts[0][1], WARM_UP_TOKENS, **settings)
    settings |= {"record_nodes": config.record_nodes}
    try:
        with tqdm(total=len(prompts) * len(policies), unit="answer", dynamic_ncols=True) as bar:
            for prompt, ids in prompts:
                for name, policy in policies.items():
                    bar.set_postfix_str(f"{prompt.id} {name}", refresh=False)
                    run = decode(target, drafter, policy, name, prompt, ids, config.max_new_tokens, settings)
                    writer.write_prompt(
                        [one.row for one in run.passes],
                        [one.nodes for one in run.passes],
                        output(target, name, prompt, run),
                    )
                    bar.update()
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{writer.n_prompts} finished answers are kept in {folder}") from None
    except ArithmeticError as error:
        raise ArithmeticError(f"{error}; {writer.n_prompts} finished answers are kept in {folder}") from error
    about = {**common.provenance(target, config), "drafter_fingerprint": drafter.fingerprint}
    writer.close({**about, "wall_s": time.perf_counter() - started})
    return report(folder, sampling, rule)


def decode(
    target: Target,
    drafter: Drafter,
    policy: Policy,
    name: str,
    prompt: Prompt,
    ids: list[int],
    max_new_tokens: int,
    settings: dict[str, Any],
) -> Generation:
    """Decode one prompt with one policy."""
    return generate(
        target,
        drafter,
        policy,
        ids,
        max_new_tokens,
        sequence=prompt.id,
        policy_name=name,
        category=prompt.category,
        **settings,
    )


def output(target: Target, name: str, prompt: Prompt, run: Generation) -> dict[str, Any]:
    """The entry of an answer in the output table."""
    return {
        "policy": name,
        "prompt_id": prompt.id,
        "category": prompt.category,
        "token": run.tokens,
        "text": target.tokenizer.decode(run.tokens) if target.tokenizer else "",
        "prefill_s": run.prefill_s,
        "decode_s": run.decode_s,
    }


def report(folder: Path, sampling: Sampling, rule: Rule) -> dict[str, Any]:
    """Print the table, draw the figure, and return the JSON result."""
    passes, outputs = read_run(folder, "passes"), read_run(folder, "outputs")
    if passes.empty:
        raise ValueError(f"no passes were recorded in {folder}: every answer ended with its first token")
    summary = analysis.summarise(passes, outputs)
    plots.save(plots.expected_against_realised(passes), folder / "expected_realised.png")
    print(common.lossy_note(rule) + table(summary, sampling))
    different = differing_answers(outputs)
    print(
        f"\nanswers that differ between policies: {len(different)} of {outputs.prompt_id.nunique()}"
        + (f" ({', '.join(different[:6])}{' …' if len(different) > 6 else ''})" if different else "")
    )
    print(f"prefill, apart: {outputs.prefill_s.sum():.1f} s; recorded in {folder}\n")
    keys = ("tau", "tau_low", "tau_high", "expected_draft", "expected_target", "tokens_per_second", "speedup")
    keys += ("speedup_low", "speedup_high", "overhead_share", "record_share", "passes")
    keys += ("acceptance_meter", "acceptance_meter_error", "surprisal_meter", "surprisal_meter_error")
    policies = common.by_policy(summary, keys)
    about = {"accept": type(rule).__name__, "lossless": rule.lossless}
    return {"run": str(folder), **about, "policies": policies, "differing_answers": len(different)}


def differing_answers(outputs: pd.DataFrame) -> list[str]:
    """Prompts whose token sequences are not the same for all policies."""
    same = outputs.groupby("prompt_id", sort=False).token.apply(lambda rows: len({tuple(row) for row in rows}) == 1)
    return [str(name) for name in same.index[~same]]


def unless_unknown(value: float, form: str, *more: float) -> str:
    """A number for people; a dash where it is NaN (coupled drafts have no expectation under the target)."""
    return "–" if math.isnan(value) else form.format(value, *more)


def table(summary: pd.DataFrame, sampling: Sampling) -> str:
    """The summary for people."""
    rows = []
    for row in summary.to_dict("records"):
        cells = {
            "policy": row["policy"],
            "passes": str(row["passes"]),
            "τ (95 %)": common.interval(row, "tau"),
            "exp. draft": f"{row['expected_draft']:.2f}",
            "exp. target": unless_unknown(row["expected_target"], "{:.2f}"),
            "realised": f"{row['realised']:.2f}",
            "accepted": f"{row['accepted_share']:.1%}" if row["realised"] > 1 or row["expected_draft"] > 1 else "–",
            "tokens/s": f"{row['tokens_per_second']:.1f}",
            "speed-up (95 %)": common.interval(row, "speedup"),
            "target": f"{row['target_share']:.0%}",
            "drafter": f"{row['drafter_share']:.0%}",
            "own": f"{row['overhead_share']:.1%}",
            "(record)": f"{row['record_share']:.1%}",
        }
        if not sampling.greedy:
            for name, label in (("acceptance_meter", "acceptance meter"), ("surprisal_meter", "surprisal meter")):
                cells[label] = unless_unknown(row[name], "{:+.3f} ± {:.3f}", row[f"{name}_error"])
        rows.append(cells)
    lines = common.aligned(rows)
    lines += [
        "",
        "τ: tokens per target pass, bonus included, prefill excluded. exp.: expected tokens per pass by the",
        "drafter's and by the target's probabilities, against realised. target, drafter, own: shares of the",
        "pass; (record): the target's node probabilities and meters, beside the pass, not in tokens/s.",
    ]
    return "\n".join(lines)
