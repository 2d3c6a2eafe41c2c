"""eagle-tree trace: record what a drafter says along the target's own texts.

Every prompt is one file, whole or absent, so the same command goes on where it stopped, and a longer list of policies
adds what it lacks: one forward of the target over each text, then the drafter alone.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from tqdm import tqdm

from eagle_tree.appraise import appraised, sample
from eagle_tree.apps import common
from eagle_tree.apps.bench import chosen_policies
from eagle_tree.checks import as_path, check_count, check_flag
from eagle_tree.drafter.base import Drafter
from eagle_tree.evaluate import Text, answered, read
from eagle_tree.noise import GumbelRows, Noise
from eagle_tree.policy import Policy
from eagle_tree.target import Target
from eagle_tree.trace import (
    Part,
    check_judged,
    check_same,
    check_settled,
    continued,
    draw_of,
    holds_trace,
    lacking,
    levels,
    read_parts,
    recorded,
    size_on_disk,
    trace_settings,
)
from eagle_tree.warp import Sampling


def main(arguments: list[str]) -> int:
    """Entry point of the verb."""
    return common.run_verb("trace", trace, arguments)


def trace(config: DictConfig) -> dict[str, Any]:
    """Record or extend the trace that a config describes."""
    policies = chosen_policies(config)
    if not any(policy.max_candidates() for policy in policies.values()):
        raise ValueError(f"policy: {', '.join(policies)} never draft: there is nothing to record")
    if not isinstance(config.trace, DictConfig):
        raise ValueError(f"trace={config.trace!r} must be the fields target_prob, positions and budget")
    for name in ("positions", "budget"):
        check_count(f"trace.{name}", config.trace[name])
    check_flag("trace.target_prob", config.trace.target_prob)
    if config.get("drafter") is None:
        raise ValueError("drafter: none is given, and a drafter is what is recorded")
    where = "folder" if config.extend is None else "extend"
    folder = as_path(where, config[where])
    texts_path = folder / "texts.parquet" if config.texts is None else as_path("texts", config.texts)
    parts = read_parts(folder) if config.extend is not None or holds_trace(folder) else []
    prompts = common.read_prompts(config.data) if config.extend is None else []
    if not prompts and not parts:
        raise ValueError("data: no prompts to record on")
    if config.extend is None:
        check_places(parts, [one.id for one in prompts], folder)
    options = parts[0].settings if config.extend is not None else config
    sampling = Sampling(options["temperature"], options["top_k"], options["top_p"])
    draw = draw_of(options) if config.extend is not None else common.build_draw(config.draw)
    check_settled(draw.at(sampling.temperature))
    if config.extend is None:
        common.check_length_and_seed(config)
    if config.trace.target_prob:
        check_judged(draw.at(sampling.temperature))
    seed, max_new_tokens = options["seed"], options["max_new_tokens"]
    for policy in policies.values():  # before a model is loaded
        policy.check_machine({"greedy": sampling.greedy})

    target = common.build_target(config.target)
    drafter = common.build_drafter(config.drafter, target)
    for policy in policies.values():
        policy.check_machine({"drafter": drafter.fingerprint})
    texts = [Text(one.id, one.category, target.encode_chat(list(one.messages))) for one in prompts]
    requests = [(text.prompt_id, text.prompt_ids) for text in texts or (part.text for part in parts)]
    common.check_requests(target, drafter, policies.values(), requests, max_new_tokens, sampling)
    settings = trace_settings(target, drafter, sampling, max_new_tokens, seed, draw)
    for part in parts[:1]:
        check_same(part.settings, settings, str(folder), "what is asked for now")

    known = {part.text.prompt_id: part for part in parts}
    wanted = parts
    if config.extend is None:
        stream = answered(texts_path, target, texts, sampling, max_new_tokens, seed)
        wanted = (known_or_new(known, Part(index, text, [], settings)) for index, text in enumerate(stream))
    total = len(texts) or len(parts)
    positions = math.ceil(config.trace.positions / total) if config.trace.target_prob else 0
    try:
        done = []
        for part in tqdm(wanted, "prompts", total, unit="prompt", dynamic_ncols=True):
            new = record(target, drafter, policies, part, sampling, positions, config.trace.budget)
            if new is not known.get(part.text.prompt_id):
                new.write(folder)
            done.append(new)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"the finished prompts are kept in {folder}; the same command goes on") from None
    before = (known.get(part.text.prompt_id) for part in done)
    return report(folder, done, sum(part.expansions.num_rows for part in before if part))


def check_places(parts: list[Part], prompt_ids: list[str], folder: Path) -> None:
    """Raise ValueError unless the recorded prompts are some of these, each at its place: replay meets them in order."""
    place = {prompt_id: index for index, prompt_id in enumerate(prompt_ids)}
    for part in parts:
        if (now := place.get(part.text.prompt_id)) != part.index:
            where = "does not hold" if now is None else f"has as prompt {now}"
            raise ValueError(
                f"data: {folder} recorded {part.text.prompt_id!r} as prompt {part.index}, which data {where}; "
                f"name another folder, or extend={folder} to record more of its own prompts"
            )


def known_or_new(known: dict[str, Part], new: Part) -> Part:
    """The part that is on disk for a prompt, or the new one."""
    part = known.get(new.text.prompt_id, new)
    if part.text != new.text:
        raise ValueError(f"trace: prompt {new.text.prompt_id!r} has another text there; name another folder")
    return part


def record(
    target: Target,
    drafter: Drafter,
    policies: dict[str, Policy],
    part: Part,
    sampling: Sampling,
    positions: int,
    budget: int,
) -> Part:
    """The part with all that the policies ask; the same object if nothing was lacking.

    Args:
        positions: how many the target appraises, if not more were before; budget: nodes of its best trees there.
    """
    seed, text = part.settings["seed"], part.text
    if lacking(part, policies):
        reading = read(target, drafter.taps, text, Sampling())  # of the forward, the features alone are needed
        noise = GumbelRows(Noise(seed, text.prompt_id, target.device), target.vocab_size)
        part = recorded(part, drafter, policies, reading, noise)
        if len(part.ahead_ids) < (wanted := levels(part.expansions) + 1):
            part = replace(part, ahead_ids=continued(target, text, wanted, sampling, seed, target.new_cache()))
    if positions > len(part.sampled) < len(text.answer_ids) - 1 or (positions and budget > part.tree_budget):
        chosen = sample(part, max(positions, len(part.sampled)))
        part = replace(part, sampled=chosen, tree_budget=max(budget, part.tree_budget), appraisal=None)
    if part.sampled and part.appraisal is None:
        part = appraised(part, target, sampling, part.sampled, part.tree_budget, drafter.target_id)
    return part


def report(folder: Path, parts: list[Part], before: int) -> dict[str, Any]:
    """Print the table, and return the JSON result."""
    positions = sum(len(part.text.answer_ids) - 1 for part in parts)
    if not positions:
        raise ValueError(f"trace: nothing was recorded in {folder}: every answer ended with its first token")
    expansions = sum(part.expansions.num_rows for part in parts)
    size = size_on_disk(folder)
    names = sorted({name for part in parts for name in part.requests.values()})
    appraised = sum(len(part.sampled) for part in parts)
    result = {
        "folder": str(folder),
        "prompts": len(parts),
        "positions": positions,
        "expansions": expansions,
        "added": expansions - before,
        "bytes": size,
        "bytes_per_position": size / positions,
        "appraised_positions": appraised,
        "policies": names,
    }
    row = {
        "prompts": str(len(parts)),
        "positions": str(positions),
        "expansions": str(expansions),
        "added now": str(expansions - before),
        "a position": f"{expansions / positions:.1f}",
        "bytes a position": f"{size / positions:.0f}",
        "appraised": str(appraised),
    }
    print("\n".join(common.aligned([row])))
    print(f"\nall requests of: {', '.join(names)}\nrecorded in {folder}\n")
    return result
