"""fp32 on the bundled model: the text is the target's own, whatever drafts it."""

from __future__ import annotations

import math

import pytest
import torch

from eagle_tree.audit import first_difference
from eagle_tree.decode import generate
from eagle_tree.noise import Noise
from eagle_tree.policy import Autoregressive, Chain, Eagle2
from eagle_tree.warp import Sampling

POLICIES = {
    "autoregressive": Autoregressive(),
    "chain": Chain(4),
    "eagle2-8": Eagle2(8, 3, 2),
    "eagle2-24": Eagle2(24, 8, 4),
    "eagle2-59": Eagle2(59, 10, 5),
}
NUMERICAL = 1e-3
"""A first divergence counts as rounding only if the two (perturbed) logits are closer than this."""


def gap(target, prefix: list[int], tokens: tuple[int, int], sampling: Sampling, noise: Noise | None) -> float:
    """How far two tokens are apart after a prefix, by a plain forward: in (perturbed) logits, or, where top-p
    excludes one of them, in mass to the nucleus's edge."""
    with torch.inference_mode():
        logits = target.model(torch.tensor([prefix])).logits[0, -1].double()
    if sampling.greedy:
        return abs(logits[tokens[0]] - logits[tokens[1]]).item()
    scaled = logits / sampling.temperature
    perturbed = scaled + noise.gumbel(len(prefix), target.vocab_size).double()
    distance = abs(perturbed[tokens[0]] - perturbed[tokens[1]]).item()
    if sampling.top_p < 1:
        mass, order = scaled.softmax(-1).sort(descending=True)
        before = mass.cumsum(0) - mass
        for token in tokens:
            edge = abs(before[order == token].item() - sampling.top_p)
            distance = min(distance, edge)
    return distance


def assert_same(target, prompt_ids, expected, got, sampling, noise, label) -> None:
    """Equal, or first different where a rounding error decides; such places are listed."""
    at = first_difference(expected, got)
    if at is None:
        return
    assert at < min(len(expected), len(got)), f"{label}: lengths {len(expected)} and {len(got)}"
    distance = gap(target, prompt_ids + expected[:at], (expected[at], got[at]), sampling, noise)
    print(f"{label}: differs at token {at}, gap {distance:.2e}")
    assert distance < NUMERICAL, f"{label}: token {at} differs with a gap of {distance:.2e}"


def test_greedy_text_is_transformers_own(target, drafter, prompts, full):
    chosen, length = (prompts, 96) if full else (prompts[:2], 24)
    for name, ids in chosen:
        expected = target.model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=length, do_sample=False
        )[0, len(ids) :].tolist()
        for policy_name, policy in POLICIES.items():
            got = generate(target, drafter, policy, ids, length)
            assert_same(target, ids, expected, got.tokens, Sampling(), None, f"{name} {policy_name}")
            for one in got.passes:  # at T = 0 the target's law is one-hot
                assert one.row.accepted + 1 == one.row.expected_target


@pytest.mark.parametrize("sampling", [Sampling(0.8), Sampling(1.0, top_p=0.95)], ids=["T=0.8", "T=1,p=0.95"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sampled_text_is_the_same_for_every_policy(target, drafter, prompts, full, sampling, seed):
    chosen, length = (prompts[:6], 64) if full else (prompts[seed : seed + 1], 16)
    for name, ids in chosen:
        texts = {
            policy_name: generate(
                target, drafter, policy, ids, length, sampling=sampling, seed=seed, sequence=name
            ).tokens
            for policy_name, policy in POLICIES.items()
            if policy_name in ("autoregressive", "chain", "eagle2-24")
        }
        expected, noise = texts["autoregressive"], Noise(seed, name)
        for policy_name, got in texts.items():
            assert_same(target, ids, expected, got, sampling, noise, f"{name} seed {seed} {policy_name}")


def test_both_meters_are_zero_in_the_mean(target, drafter, prompts, full):
    chosen, length = (prompts, 96) if full else (prompts[:2], 24)
    rows = []
    for name, ids in chosen:
        run = generate(target, drafter, POLICIES["eagle2-24"], ids, length, temperature=1.0, sequence=name)
        rows += [one.row for one in run.passes]
    assert not full or len(rows) >= 1000
    for meter in ("acceptance_meter", "surprisal_meter"):
        values = torch.tensor([getattr(row, meter) for row in rows])
        error = values.std().item() / math.sqrt(len(rows))
        print(f"{meter}: {values.mean():+.4f} ± {error:.4f} over {len(rows)} passes")
        assert abs(values.mean().item()) < 3 * error


def test_the_shipped_head_earns_its_keep(target, drafter, prompts, full):
    chosen, length = (prompts, 96) if full else (prompts[:4], 48)
    emitted = passes = 0
    for _, ids in chosen:
        run = generate(target, drafter, POLICIES["eagle2-24"], ids, length, record_nodes=False)
        emitted += len(run.tokens) - 1
        passes += len(run.passes)
    print(f"tokens per pass at budget 24: {emitted / passes:.3f} over {passes} passes")
    assert emitted / passes >= 1.8
