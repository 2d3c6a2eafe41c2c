"""eagle-tree generate "prompt": stream an answer; runs of accepted draft tokens are marked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from omegaconf import DictConfig

from eagle_tree.apps import common
from eagle_tree.decode import Pass, check_request, generate
from eagle_tree.target import Target
from eagle_tree.warp import Sampling

GREEN, RESET = "\x1b[32m", "\x1b[0m"


def main(arguments: list[str]) -> int:
    """Entry point of the verb. A first argument that is no override and no option is the prompt."""
    prompt, arguments = common.leading_argument(arguments)
    return common.run_verb("generate", partial(answer, prompt), arguments)


def answer(prompt: str | None, config: DictConfig) -> dict[str, Any]:
    """Generate and stream; returns the summary."""
    prompt = config.prompt if prompt is None else prompt
    if prompt is None or not str(prompt).strip():
        raise ValueError('the prompt is empty; call: eagle-tree generate "your prompt"')
    if config.color not in ("auto", "always", "never"):
        raise ValueError(f"color={config.color!r} is not one of auto, always, never")
    sampling = Sampling(config.temperature, config.top_k, config.top_p)
    common.check_length_and_seed(config)
    policy = common.build_policy(config.policy)
    rule, draw = common.build_rule(config)
    target = common.build_target(config.target)
    drafter = common.build_drafter(config.drafter, target)
    common.check_made_for([policy], target, drafter, sampling)
    messages = [{"role": "system", "content": config.system}] if config.system else []
    ids = target.encode_chat([*messages, {"role": "user", "content": str(prompt)}])
    check_request(target, drafter, policy, ids, config.max_new_tokens, sampling, rule, draw)
    color = config.color == "always" or (config.color == "auto" and sys.stdout.isatty())
    stream = Stream(target, (GREEN, RESET) if color else ("⟦", "⟧"), partial(print, end="", flush=True))
    run = generate(
        target,
        drafter,
        policy,
        ids,
        config.max_new_tokens,
        seed=config.seed,
        callback=stream,
        sampling=sampling,
        rule=rule,
        draw=draw,
        record_nodes=False,
    )
    stream.finish()
    rate = (len(run.tokens) - 1) / run.decode_s if run.passes else float("nan")
    accepted = sum(one.row.accepted for one in run.passes)
    print(
        f"\n\n{common.lossy_note(rule)}{len(run.tokens)} tokens in {len(run.passes)} passes after prefill "
        f"({run.tokens_per_pass:.2f} tokens per pass, {accepted} draft tokens accepted), {rate:.1f} tokens/s"
    )
    summary = {"tokens": len(run.tokens), "passes": len(run.passes), "accepted": accepted, "lossless": rule.lossless}
    tau, rate = (run.tokens_per_pass, rate) if run.passes else (None, None)
    return {**summary, "tau": tau, "tokens_per_second": rate, "text": stream.text}


class Stream:
    """A `generate` callback that writes text as it comes, accepted runs between two marks.

    Half a character (a token may end inside one) waits for the rest.
    """

    def __init__(self, target: Target, marks: tuple[str, str], write: Callable[[str], Any]):
        self.target = target
        self.marks = marks
        self.write = write
        self.tokens: list[int] = []
        self.text = ""

    def __call__(self, tokens: list[int], one: Pass | None) -> None:
        accepted = 0 if one is None else min(one.row.accepted, len(tokens))
        if piece := self.push(tokens[:accepted]):
            self.write(f"{self.marks[0]}{piece}{self.marks[1]}")
        if piece := self.push(tokens[accepted:]):
            self.write(piece)

    def push(self, tokens: list[int], last: bool = False) -> str:
        """The text that these tokens add."""
        self.tokens += tokens
        text = self.target.tokenizer.decode(self.tokens, skip_special_tokens=True)
        if text.endswith("\ufffd") and not last:
            return ""
        piece, self.text = text[len(self.text) :], text
        return piece

    def finish(self) -> None:
        """Write what still waits."""
        if piece := self.push([], last=True):
            self.write(piece)
