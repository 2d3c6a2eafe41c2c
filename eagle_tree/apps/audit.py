"""eagle-tree audit: does a configuration emit the text it must? Every divergence classified, numerical or real."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
from omegaconf import DictConfig
from tqdm import tqdm

from eagle_tree.accept import Match
from eagle_tree.apps import common
from eagle_tree.audit import Yardstick, their_text
from eagle_tree.decode import generate
from eagle_tree.files import write_json, write_table
from eagle_tree.noise import Noise
from eagle_tree.policy import Autoregressive
from eagle_tree.target import Target
from eagle_tree.warp import Sampling

OWN, LIBRARY = "own autoregressive decoding", "transformers' generate"
SCHEMA = pa.schema(
    [("prompt_id", pa.string()), ("against", pa.string())]
    + [(name, pa.int64()) for name in ("index", "expected", "got")]
    + [(name, pa.float64()) for name in ("margin", "noise", "edge", "edge_noise")]
    + [("real", pa.bool_())]
)


def main(arguments: list[str]) -> int:
    """Entry point of the verb."""
    return common.run_verb("audit", audit, arguments)


def audit(config: DictConfig) -> dict[str, Any]:
    """Decode every prompt three ways and judge where they part; `passed` is False after any real divergence."""
    sampling = Sampling(config.temperature, config.top_k, config.top_p)
    common.check_length_and_seed(config)
    policy = common.build_policy(config.policy)
    rule, draw = common.build_rule(config)
    if not rule.lossless or not (isinstance(rule, Match) or sampling.greedy):
        why = "is lossy" if not rule.lossless else "draws another text of the same law at temperatures above 0"
        raise ValueError(
            f"accept={type(rule).__name__} {why}: there is no text to compare with; see eagle-tree certify"
        )
    folder = common.new_run_folder(config, "audit", "audit.json")
    prompts = common.read_prompts(config.data)
    if not prompts:
        raise ValueError("data: no prompts to decode")
    target = common.build_target(config.target)
    drafter = common.build_drafter(config.drafter, target)
    common.check_made_for([policy], target, drafter, sampling)
    prompts = [(prompt.id, target.encode_chat(list(prompt.messages))) for prompt in prompts]
    common.check_requests(target, drafter, [policy], prompts, config.max_new_tokens, sampling, rule, draw)

    cache, found, tokens = target.new_cache(), [], 0
    settings = {"sampling": sampling, "seed": config.seed, "cache": cache, "record_nodes": False}
    for prompt_id, ids in tqdm(prompts, unit="prompt", dynamic_ncols=True):
        noise = Noise(config.seed, prompt_id, target.device)
        alone = generate(target, None, Autoregressive(), ids, config.max_new_tokens, sequence=prompt_id, **settings)
        run = generate(
            target, drafter, policy, ids, config.max_new_tokens, sequence=prompt_id, rule=rule, draw=draw, **settings
        )
        theirs = their_text(target, ids, config.max_new_tokens, sampling, noise)
        rows = max((one.row.n_nodes for one in run.passes), default=0) + 1
        yardstick = Yardstick(target, sampling, rows)
        tokens += len(alone.tokens)
        for against, expected, got in ((OWN, alone.tokens, run.tokens), (LIBRARY, theirs, alone.tokens)):
            divergence = yardstick.judge(ids, expected, got, noise)
            if divergence:
                found.append({"prompt_id": prompt_id, "against": against, **asdict(divergence)})
    return report(folder, found, len(prompts), tokens, target, config)


def report(
    folder: Path, found: list[dict[str, Any]], prompts: int, tokens: int, target: Target, config: DictConfig
) -> dict[str, Any]:
    """Print the table, write it, and return the JSON result."""
    write_table(pa.Table.from_pylist(found, SCHEMA), folder / "divergences.parquet")
    counts = {
        name: {
            "prompts": prompts,
            "equal": prompts - sum(row["against"] == name for row in found),
            "numerical": sum(row["against"] == name and not row["real"] for row in found),
            "real": sum(row["against"] == name and row["real"] for row in found),
        }
        for name in (OWN, LIBRARY)
    }
    if found:
        print("\n".join(common.aligned([cells(row, target) for row in found])) + "\n")
    print("\n".join(common.aligned([{"compared with": name, **texts(row)} for name, row in counts.items()])))
    real = sum(row["real"] for row in found)
    print(
        "\nmargin: how far the two tokens are apart in single precision; noise: how far plain forwards, without a tree,"
        f"\nmove it. {f'{real} REAL' if real else 'nothing real'} in {tokens} tokens; recorded in {folder}\n"
    )
    result = {"passed": not real, "run": str(folder), "tokens": tokens, "counts": counts}
    write_json(folder / "audit.json", {**common.provenance(target, config), **result}, default=str)
    return result


def texts(row: dict[str, int]) -> dict[str, str]:
    """Counts as cells."""
    return {name: str(value) for name, value in row.items()}


def cells(row: dict[str, Any], target: Target) -> dict[str, str]:
    """A divergence for people."""

    def shown(token: int) -> str:
        if token < 0:
            return "(ended)"
        return repr(target.tokenizer.decode([token])) if target.tokenizer else str(token)

    def number(value: float) -> str:
        return "–" if math.isnan(value) else "excluded" if math.isinf(value) else f"{value:.1e}"

    return {
        "prompt": row["prompt_id"],
        "compared with": row["against"],
        "token": str(row["index"]),
        "expected": shown(row["expected"]),
        "got": shown(row["got"]),
        "margin": number(row["margin"]),
        "noise": number(row["noise"]),
        "edge": number(row["edge"]),
        "edge noise": number(row["edge_noise"]),
        "verdict": "REAL" if row["real"] else "numerical",
    }
