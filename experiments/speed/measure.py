"""How long the project's own parts take: one table, one row a part. The machine must be idle.

python measure.py TRACE [PROMPTS] > results.csv

TRACE: a trace of the bundled target that holds what EAGLE-2 of top-k 10 and 7 levels asks. PROMPTS (4): how many of its
prompts are decoded live, to set decoding's time beside replay's. Selection, Sequoia and replay run on one thread.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from eagle_tree.apps.common import machine
from eagle_tree.checkpoint import load_bundled
from eagle_tree.decode import generate, grow
from eagle_tree.drafter.base import Drafter
from eagle_tree.noise import PassNoise
from eagle_tree.policy import Eagle2
from eagle_tree.policy.measured import sequoia_table
from eagle_tree.replay import Replayed, replay
from eagle_tree.target import BUNDLED, Target
from eagle_tree.trace import Trace
from eagle_tree.tree import Draft, Frontier, GrowingTree

POOL = Eagle2(budget=60, top_k=10, depth=7)
"""Its pool holds 10 + 7 x 100 = 710 candidates."""
Row = dict[str, float | str]
LIVE = (Eagle2(59, 10, 5), Eagle2(24, 8, 4), Eagle2(8, 4, 2))


class RandomDrafter(Drafter):
    """Proposes random confidences at once, so that growing a pool takes no model."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def expand(self, growing: GrowingTree, frontier: Frontier, noise: PassNoise | None) -> Draft:
        shape = (frontier.node.shape[0], frontier.n_candidates)
        logits = torch.randn(shape, generator=self.generator)
        token = torch.arange(shape[1]).expand(shape)
        return Draft(token, logits.log_softmax(-1).sort(descending=True).values, logits.new_zeros(shape[0]))


def timed(part: str, unit: str, run: Callable[[], float], repeats: int) -> Row:
    """A row: median, quartiles and number of what `run` measures (itself, in `unit`)."""
    run()  # the first call is not like the others
    low, median, high = np.quantile([run() for _ in range(repeats)], (0.25, 0.5, 0.75))
    return {"part": part, "unit": unit, "median": median, "quartile_1": low, "quartile_3": high, "repeats": repeats}


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


@torch.inference_mode()
def selection() -> Row:
    """Select 60 of 710 candidates: the tree, its mask and its depths."""
    growing = grow(RandomDrafter(), POOL, torch.zeros(1, dtype=torch.int64))
    assert growing.n_nodes == 710

    def select() -> None:
        tree, _, _ = growing.select(POOL.select(growing))
        assert tree.mask.shape == (61, 61) and tree.depth.shape == (61,)

    return timed("select 60 of 710, mask and depths", "ms", lambda: 1e3 * seconds(select), 2_000)


def sequoia() -> Row:
    """The dynamic programme for 512 nodes and 16 levels, with the tree read off."""
    acceptance = [0.5 * 0.5**rank for rank in range(16)]

    def build() -> None:
        assert len(sequoia_table(acceptance, 512, 16).paths(512, 16)) == 512

    return timed("Sequoia, 512 nodes, depth 16", "s", lambda: seconds(build), 5)


def replaying(trace: Trace, policy: Eagle2) -> Replayed:
    """A replay whose every request is covered."""
    result = replay(trace, policy)
    if result.uncovered:
        raise ValueError(f"{policy} asks {result.uncovered} times for what the trace does not hold")
    return result


def passes_a_second(trace: Trace, policy: Eagle2) -> float:
    result = replaying(trace, policy)
    return len(result.passes) / result.seconds


def tokens_a_second(trace: Trace, policy: Eagle2) -> float:
    result = replaying(trace, policy)
    return result.passes.emitted.sum() / result.seconds


def decoded(trace: Trace, prompts: int, policy: Eagle2, target: Target, drafter: Drafter) -> float:
    """Tokens a second of decoding some prompts of a greedy trace, prefill included."""
    emitted, started = 0, time.perf_counter()
    for part in trace.parts[:prompts]:
        text = part.text
        run = generate(
            target, drafter, policy, text.prompt_ids, len(text.answer_ids), sequence=text.prompt_id, record_nodes=False
        )
        assert run.tokens == text.answer_ids, f"prompt {text.prompt_id}: another text than the trace's"
        emitted += len(run.tokens)
    return emitted / (time.perf_counter() - started)


def compared(trace: Trace, prompts: int, policy: Eagle2, target: Target, drafter: Drafter, threads: int) -> list[Row]:
    """Rows of replay on one thread, of decoding on all, and of how many times faster replay is."""
    name = f"EAGLE-2({policy.budget}, {policy.top_k}, {policy.depth})"
    fast = timed(f"replay, {name}", "tokens/s", lambda: tokens_a_second(trace, policy), 5)
    torch.set_num_threads(threads)
    slow = timed(f"decoding, {name}", "tokens/s", lambda: decoded(trace, prompts, policy, target, drafter), 2)
    torch.set_num_threads(1)
    ratio = {"part": f"replay over decoding, {name}", "unit": "times", "median": fast["median"] / slow["median"]}
    return [fast, {**slow, "threads": threads}, ratio]


def main(folder: str, prompts: int) -> pd.DataFrame:
    threads = torch.get_num_threads()
    target, trace = Target.from_pretrained(BUNDLED, "float32"), Trace.read(Path(folder))
    drafter, about = load_bundled(target), machine(target)
    torch.set_num_threads(1)
    rows = [selection(), sequoia()]
    rows.append(timed("replay, EAGLE-2(60, 10, 7)", "passes/s", lambda: passes_a_second(trace, POOL), 5))
    for policy in LIVE:
        rows += compared(trace, prompts, policy, target, drafter, threads)
    columns = {name: about[name] for name in ("device", "dtype", "commit")}
    return pd.DataFrame(rows).fillna({"threads": 1}).assign(**columns, torch=torch.__version__)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 4).to_csv(sys.stdout, index=False, float_format="%.4g")
