"""eagle-tree corpus: the target answers prompts; a drafter is trained on its words. Resumes."""

from __future__ import annotations

import time
from typing import Any

from omegaconf import DictConfig
from tqdm import tqdm

from eagle_tree import corpus
from eagle_tree.apps import common
from eagle_tree.checks import as_path


def main(arguments: list[str]) -> int:
    """Entry point of the verb."""
    return common.run_verb("corpus", build, arguments)


def build(config: DictConfig) -> dict[str, Any]:
    """Grow the corpus in `folder` to `sampling.answer_tokens`."""
    settings = common.build(config.sampling)()
    folder = as_path("folder", config.folder)
    prompts = common.read_prompts(config.data)
    target = common.build_target(config.target)
    prompts = [target.encode_chat(list(prompt.messages)) for prompt in prompts]
    for ids in prompts:
        if len(ids) + settings.max_answer_tokens > target.max_length:
            raise ValueError(f"a prompt of {len(ids)} tokens leaves no room for {settings.max_answer_tokens} more")
    started = time.perf_counter()
    with tqdm(total=settings.answer_tokens, unit="tok", dynamic_ncols=True) as bar:
        try:
            result = corpus.build(folder, target, prompts, settings, bar.update)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"finished shards are kept in {folder}; the same command goes on") from None
    sequences, tokens, new = result
    seconds = time.perf_counter() - started
    print(f"{sequences} sequences, {tokens} answer tokens in {folder} ({new / seconds:.0f} new tokens/s)")
    return {"folder": str(folder), "sequences": sequences, "answer_tokens": tokens, "tokens_per_second": new / seconds}
