"""Replay against decoding on the bundled model: the same accepted length in every pass, at T = 0 and T = 1."""

from __future__ import annotations

import pytest
import torch

from eagle_tree.audit import first_difference
from eagle_tree.decode import generate
from eagle_tree.evaluate import Text, read
from eagle_tree.noise import Noise
from eagle_tree.policy import (
    Autoregressive,
    BestFirst,
    Chain,
    ConfidenceStop,
    Eagle2,
    OptTree,
    Static,
    Talon,
    sequoia,
    specinfer,
)
from eagle_tree.replay import replay
from eagle_tree.trace import Part, Trace, continued, recorded, trace_settings
from eagle_tree.warp import Sampling

from .test_lossless import gap

POLICIES = {
    "chain-4": Chain(4),
    "chain-8": Chain(8),
    "static": Static([[0], [1], [2], [3], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0, 0]]),
    "specinfer": specinfer([3, 2, 2, 1, 1]),
    "sequoia-16": sequoia([0.5, 0.15, 0.08, 0.04], 16, 6),
    "eagle2-4": Eagle2(4, 3, 2),
    "eagle2-8": Eagle2(8, 4, 3),
    "eagle2-24": Eagle2(24, 8, 4),
    "eagle2-59": Eagle2(59, 10, 5),
    "opt-tree-32": OptTree(32, 0.1, 8, 8, 6),
    "best-first-16": BestFirst(16, 4, 6, 6),
    "talon-24": Talon(24, 6, 0.05, 6),
    "confidence-stop": ConfidenceStop(Eagle2(16, 4, 5), depth=5, beam=4, threshold=0.3),
}
TIE = 1e-4
"""A pass may differ only where two (perturbed) logits are closer than this."""


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=["T=0", "T=1"])
def test_a_replayed_run_is_the_live_run_pass_by_pass(target, drafter, prompts, full, sampling):
    chosen, length = (prompts[:20], 128) if full else (prompts[:1], 24)
    names = list(POLICIES) if full else ["chain-4", "eagle2-8", "talon-24"]
    policies = {name: POLICIES[name] for name in names}
    form, parts = trace_settings(target, drafter, sampling, length, 0), []
    for index, (name, ids) in enumerate(chosen):
        run = generate(target, None, Autoregressive(), ids, length, sampling=sampling, sequence=name)
        text = Text(name, "", ids, run.tokens)
        part = Part(index, text, continued(target, text, 10, sampling, 0, target.new_cache()), form)
        reading = read(target, drafter.taps, text, Sampling())
        parts.append(recorded(part, drafter, policies, reading))
    trace = Trace(form, tuple(parts))
    for label, policy in policies.items():
        result, differing, passes = replay(trace, policy), [], 0
        assert result.uncovered == 0
        for part, (name, ids) in zip(parts, chosen, strict=True):
            run = generate(target, drafter, policy, ids, length, sampling=sampling, sequence=name, record_nodes=False)
            live = [one.row.accepted for one in run.passes]
            ours = result.passes[result.passes.prompt_id == name].accepted.tolist()
            passes += len(live)
            at = first_difference(live, ours)
            if at is None:
                continue
            begun = 1 + sum(row.row.emitted for row in run.passes[:at])
            differing.append((name, at, tie(target, ids, part.text.answer_ids, begun, sampling, Noise(0, name))))
        print(f"{label}: {passes} passes, differing: {differing}")
        assert all(distance < TIE for *_, distance in differing)


def tie(target, ids, answer, begun: int, sampling: Sampling, noise: Noise) -> float:
    """How near the nearest tie of a pass is: the smallest gap between the text's token and the next best there."""
    nearest = float("inf")
    for place in range(begun, min(begun + 10, len(answer))):
        prefix = ids + answer[:place]
        logits = target.model(torch.tensor([prefix])).logits[0, -1].double().detach()
        scores = logits if sampling.greedy else logits + noise.gumbel(len(prefix), target.vocab_size).double()
        other = best_other(scores.topk(2).indices.tolist(), answer[place])
        nearest = min(nearest, gap(target, prefix, (answer[place], other), sampling, noise))
    return nearest


def best_other(best: list[int], token: int) -> int:
    """The best token that is not the given one."""
    return best[1] if best[0] == token else best[0]
