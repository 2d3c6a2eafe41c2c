"""Every acceptance rule on the bundled model, fp32: live meters, and the text of coupled drafts."""

from __future__ import annotations

import math

import pytest
import torch

from eagle_tree.accept import (
    BlockVerification,
    ChainRejection,
    Coupled,
    Hybrid,
    Sequential,
    WithoutReplacement,
    WithReplacement,
)
from eagle_tree.decode import generate
from eagle_tree.noise import Noise
from eagle_tree.policy import Autoregressive, Chain, Eagle2, specinfer
from eagle_tree.warp import Sampling

from .test_lossless import assert_same

TREE = specinfer([3, 2, 1])
PAIRS = [
    (Sequential(), Eagle2(8, 4, 2)),
    (Coupled(), Eagle2(8, 4, 2)),
    (WithReplacement(), TREE),
    (WithoutReplacement(), TREE),
    (Hybrid(), TREE),
    (ChainRejection(), Chain(4)),
    (BlockVerification(), Chain(4)),
]


@pytest.mark.parametrize(("rule", "policy"), PAIRS, ids=[type(rule).__name__ for rule, _ in PAIRS])
def test_both_meters_are_zero_in_the_mean_for_every_lossless_rule(target, drafter, prompts, full, rule, policy):
    """At T = 1; over 1,000 passes and more with --full. Coupled drafts silence the acceptance meter."""
    chosen, length, errors = (prompts, 96, 3) if full else (prompts[:2], 16, 4)
    rows = []
    for name, ids in chosen:
        run = generate(target, drafter, policy, ids, length, temperature=1.0, sequence=name, rule=rule)
        rows += [one.row for one in run.passes]
    assert not full or len(rows) >= 1000
    for meter in ("surprisal_meter", *([] if isinstance(rule, Coupled) else ["acceptance_meter"])):
        values = torch.tensor([getattr(row, meter) for row in rows])
        error = values.std().item() / math.sqrt(len(rows))
        print(f"{type(rule).__name__} {meter}: {values.mean():+.4f} ± {error:.4f} over {len(rows)} passes")
        assert abs(values.mean().item()) < errors * error


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_coupled_trees_emit_the_text_of_autoregressive_decoding(target, drafter, prompts, full, seed):
    chosen, length = (prompts, 64) if full else (prompts[seed : seed + 1], 16)
    sampling = Sampling(1.0)
    for name, ids in chosen:
        alone, coupled = (
            generate(
                target, drafter, policy, ids, length, sampling=sampling, seed=seed, sequence=name, rule=Coupled()
            ).tokens
            for policy in (Autoregressive(), Eagle2(8, 4, 2))
        )
        assert_same(target, ids, alone, coupled, sampling, Noise(seed, name), f"{name} seed {seed}")
