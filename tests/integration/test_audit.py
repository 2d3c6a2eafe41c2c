"""The audit on the bundled model: a wrong engine is told from one that rounds, in single and in half precision."""

from __future__ import annotations

import copy

import pytest
import torch

from eagle_tree.audit import Divergence, Yardstick, their_text
from eagle_tree.checkpoint import load_bundled
from eagle_tree.decode import generate
from eagle_tree.noise import Noise
from eagle_tree.policy import Eagle2
from eagle_tree.target import Target
from eagle_tree.warp import Sampling

POLICY = Eagle2(8, 4, 3)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def engine(request, target, full):
    """(target, drafter) in a precision; half precision, slow where a CPU lacks it, with --full."""
    if request.param == torch.bfloat16 and not full:
        pytest.skip("bf16: with --full")
    if target.dtype != request.param:
        target = Target(copy.deepcopy(target.model).to(request.param), target.tokenizer, target.name)
    return target, load_bundled(target)


def divergences(engine, prompts, temperature: float, length: int) -> list[Divergence]:
    """Of tree decoding against transformers' `generate` with the same noise."""
    (target, drafter), sampling, found = engine, Sampling(temperature), []
    for name, ids in prompts:
        noise = Noise(0, name)
        expected = their_text(target, ids, length, sampling, noise)
        run = generate(target, drafter, POLICY, ids, length, temperature, sequence=name, record_nodes=False)
        found.append(Yardstick(target, sampling, POLICY.budget + 1).judge(ids, expected, run.tokens, noise))
    return [one for one in found if one]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_sound_engine_has_no_real_divergence(engine, prompts, full, temperature):
    chosen, length = (prompts, 128) if full else (prompts[:1], 24)
    assert [one for one in divergences(engine, chosen, temperature, length) if one.real] == []


def test_a_fault_is_real(engine, prompts, full, fault):
    """In greedy texts; with --full in sampled ones, too."""
    chosen, length, temperatures = (prompts[:8], 64, (0.0, 1.0)) if full else (prompts[:2], 24, (0.0,))
    for temperature in temperatures:
        found = divergences(engine, chosen, temperature, length)
        print(f"{fault}, T = {temperature}: {sum(one.real for one in found)} of {len(found)} divergences real")
        assert any(one.real for one in found)
