"""Medusa heads: head i proposes the children of every node of depth i, from one state of the target."""

from __future__ import annotations

import functools
import math
from itertools import pairwise

import pytest
import torch
from conftest import VOCAB, build_target
from test_decode import transfers_to_host
from torch import Tensor

from eagle_tree.decode import generate, grow
from eagle_tree.drafter.medusa import MedusaConfig, MedusaDrafter, MedusaHeads
from eagle_tree.policy import Autoregressive, Chain, Eagle2, Policy
from eagle_tree.tree import Draft, Frontier, GrowingTree

PENDING = torch.tensor([3])
PROMPT = [7, 3, 50, 11, 3, 29, 60, 1, 42, 18, 5]
HALVES = torch.tensor([1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 32])
"""The law of the hand-built heads: its entropy is 1/2 + 2/4 + 3/8 + 4/16 + 5/32 + 5/32 = 1.9375 bits."""
RANKED = [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 0, 1], [2, 0, 4, 1, 3, 5]]
"""Tokens of the hand-built heads 0, 1, 2 from the most probable (1/2) to the least (a tie, in index order)."""


def hand_built() -> MedusaDrafter:
    """Three heads over six tokens that read a state of (1, 0) and say what RANKED and HALVES say."""
    heads = MedusaHeads(MedusaConfig(2, 6, 3, own_lm_heads=True))
    for head, ranked in zip(heads.heads, RANKED):
        head[-1].weight.data.zero_()
        head[-1].weight.data[torch.tensor(ranked), 0] = HALVES.log()
    drafter = MedusaDrafter(heads, n_layers=4)
    drafter.start(torch.tensor([1, 2]), torch.tensor([[0.0, 9.0], [1.0, 0.0]]), PENDING)
    return drafter


def root() -> GrowingTree:
    return GrowingTree.from_root(PENDING)


def expand(drafter: MedusaDrafter, growing: GrowingTree, nodes: list[int], n_candidates: int) -> Draft:
    return drafter.expand(growing, Frontier(torch.tensor(nodes), n_candidates), None)


def append(drafter: MedusaDrafter, growing: GrowingTree, nodes: list[int], n_candidates: int) -> GrowingTree:
    return growing.append(Frontier(torch.tensor(nodes), n_candidates), expand(drafter, growing, nodes, n_candidates))


def random_drafter(target, own_lm_heads: bool = False, n_heads: int = 3, n_layers: int = 1) -> MedusaDrafter:
    """Heads of random weights for a target."""
    config = MedusaConfig(target.hidden_size, target.vocab_size, n_heads, n_layers, own_lm_heads)
    return MedusaDrafter(MedusaHeads.random(config).to(target.dtype), target.n_layers, target.apply_head)


tiny = functools.cache(build_target)


# --- the heads ---


def test_a_block_adds_silu_of_a_linear_map():
    """x = (1, 2), W x = (2, 0): 1 + 2·sigmoid(2) = 2.7616; the second block adds as much again."""
    heads = MedusaHeads(MedusaConfig(2, 6, 1, n_layers=2))
    for block in heads.heads[0]:
        block.linear.weight.data[0, 1] = 1.0
    gain = 2 / (1 + math.exp(-2))
    torch.testing.assert_close(heads(torch.tensor([1.0, 2.0])), torch.tensor([[1 + 2 * gain, 2.0]]))


def test_a_blocks_linear_map_has_a_bias():
    heads = MedusaHeads(MedusaConfig(2, 6, 1))
    heads.heads[0][0].linear.bias.data[1] = 2.0
    expected = torch.tensor([0.0, 2 / (1 + math.exp(-2))])
    torch.testing.assert_close(heads(torch.zeros(5, 2)), expected.expand(1, 5, 2))


@pytest.mark.parametrize("own_lm_heads", [False, True])
def test_new_heads_are_the_identity(own_lm_heads):
    heads = MedusaHeads(MedusaConfig(8, 6, 3, 2, own_lm_heads))
    hidden = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(heads(hidden), hidden.expand(3, 4, 5, 8))


def test_no_two_blocks_share_a_weight():
    """Three heads of two blocks and an LM head: 3 · (2 · 2 + 1) tensors, and a changed block moves its head alone."""
    heads = MedusaHeads(MedusaConfig(8, 6, 3, n_layers=2, own_lm_heads=True))
    assert len({parameter.data_ptr() for parameter in heads.parameters()}) == len(heads.state_dict()) == 15
    hidden = torch.ones(8)
    heads.heads[1][0].linear.bias.data.fill_(1.0)
    assert [not torch.equal(state, hidden) for state in heads(hidden)] == [False, True, False]
    once = heads(hidden)[1]
    heads.heads[1][1].linear.bias.data.fill_(1.0)
    assert (heads(hidden)[1] > once).all()


def test_own_lm_heads_can_start_as_the_targets(target):
    heads = MedusaHeads(MedusaConfig(32, VOCAB, 2, own_lm_heads=True)).double()
    heads.set_lm_heads(target.model.lm_head.weight)
    hidden = torch.randn(3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits = heads.logits(heads(hidden))
    assert torch.equal(logits, target.apply_head(hidden).expand(2, 3, VOCAB))
    assert heads.heads[0][-1].weight.data_ptr() != heads.heads[1][-1].weight.data_ptr()
    with pytest.raises(ValueError, match="borrow the target's LM head"):
        MedusaHeads(MedusaConfig(32, VOCAB, 2)).set_lm_heads(target.model.lm_head.weight)


def test_random_heads_are_reproducible_and_leave_the_global_generator_alone():
    config = MedusaConfig(8, 6, 2)
    torch.manual_seed(3)
    MedusaHeads(config)  # torch initialises linear maps from the global generator
    expected = torch.rand(2)
    torch.manual_seed(3)
    first = MedusaHeads.random(config, 7)
    assert torch.equal(torch.rand(2), expected)
    again, other = MedusaHeads.random(config, 7), MedusaHeads.random(config, 8)
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
        assert not torch.equal(tensor, other.state_dict()[name])
        assert tensor.any()


@pytest.mark.parametrize("name", ["hidden_size", "vocab_size", "n_heads", "n_layers"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3"])
def test_a_config_names_what_is_wrong(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r} must be an integer >= 1"):
        MedusaConfig(**{**dict(hidden_size=8, vocab_size=6, n_heads=2), name: value})


# --- what is proposed where ---


def test_head_0_proposes_what_follows_the_pending_token_and_head_1_what_follows_that():
    drafter = hand_built()
    first = expand(drafter, root(), [0], 2)
    assert first.token.tolist() == [[0, 1]]
    torch.testing.assert_close(first.log_conf, torch.tensor([[0.5, 0.25]]).log())
    torch.testing.assert_close(first.entropy, torch.tensor([1.9375 * math.log(2)]))
    growing = append(drafter, root(), [0], 2)
    second = expand(drafter, growing, [1, 2], 3)
    assert second.token.tolist() == [[5, 4, 3], [5, 4, 3]]
    torch.testing.assert_close(second.log_conf, torch.tensor([[0.5, 0.25, 0.125]] * 2).log())
    assert second.entropy.shape == (2,)
    assert second.log_q is None


def test_a_frontier_of_several_depths_asks_each_nodes_own_head():
    """Node 2 has depth 1, node 3 depth 2."""
    drafter = hand_built()
    growing = append(drafter, append(drafter, root(), [0], 2), [1], 2)
    assert growing.depth.tolist() == [0, 1, 1, 2, 2]
    assert expand(drafter, growing, [2, 3], 2).token.tolist() == [[5, 4], [2, 0]]


def test_all_nodes_of_a_depth_share_their_candidates():
    """Whatever path leads there; a node's path product is the product of its heads' confidences."""
    growing = grow(hand_built(), Eagle2(99, 3, 2), PENDING)
    assert growing.n_nodes == 3 + 2 * 9
    for depth, ranked in enumerate(RANKED):
        tokens = growing.token[growing.depth == depth + 1].view(-1, 3).tolist()
        assert tokens == [ranked[:3]] * len(tokens)
    assert growing.score.max() == 0  # the root's
    torch.testing.assert_close(growing.score[growing.depth == 3].max(), torch.tensor(0.5**3).log())


def test_more_candidates_may_be_asked_of_a_later_frontier():
    drafter = hand_built()
    growing = append(drafter, root(), [0], 1)
    assert expand(drafter, growing, [1], 6).token.tolist() == [RANKED[1]]
    assert expand(drafter, growing, [1], 2).token.tolist() == [RANKED[1][:2]]
    assert expand(drafter, growing, [1], 2).log_conf.shape == (1, 2)


def test_untrained_heads_repeat_the_targets_own_guess(target):
    """Zero blocks and the borrowed LM head: every head says what the target says at the last prompt token."""
    heads = MedusaHeads(MedusaConfig(32, VOCAB, 3)).double()
    drafter = MedusaDrafter(heads, target.n_layers, target.apply_head)
    prefilled = target.prefill(torch.tensor(PROMPT), target.new_cache(), drafter.taps)
    drafter.start(torch.tensor(PROMPT), prefilled.features, PENDING)
    expected = prefilled.logits[0].float().log_softmax(-1)
    order = expected.argsort(descending=True)[:4]
    growing = grow(drafter, Eagle2(99, 4, 2), PENDING)
    assert (growing.token[1:].view(-1, 4) == order).all()
    torch.testing.assert_close(growing.log_conf[1:].view(-1, 4), expected[order].expand(9, 4))


def test_a_drafter_reads_the_state_after_the_final_norm_and_proposes_target_ids(target):
    drafter = random_drafter(target)
    assert drafter.taps == (target.n_layers,)
    assert drafter.vocab_size == VOCAB
    assert drafter.target_id is None


# --- how deep ---


@pytest.mark.parametrize("n_heads", [1, 2, 3])
def test_growth_ends_where_the_heads_end(target, n_heads):
    """EAGLE-2's seven rounds would reach depth 8, a chain of seven depth 7."""
    drafter = random_drafter(target, n_heads=n_heads)
    assert drafter.max_depth == n_heads
    for policy, most in ((Eagle2(20, 3, 7), 20), (Eagle2(20, 3, 7, rerank=False), 20), (Chain(7), n_heads)):
        rows = [one.row for one in generate(target, drafter, policy, PROMPT, 8).passes]
        assert {row.draft_steps for row in rows} == {n_heads}
        assert all(1 <= row.depth <= n_heads and row.n_nodes <= most for row in rows)
    assert {row.depth for row in rows} == {n_heads}  # the chain's


def test_a_policy_that_ends_earlier_is_not_made_longer(target):
    rows = [one.row for one in generate(target, random_drafter(target, n_heads=5), Chain(2), PROMPT, 8).passes]
    assert {row.draft_steps for row in rows} == {2}


def test_asking_past_the_last_head_is_an_error():
    drafter, growing = hand_built(), root()
    for node in range(3):
        growing = append(drafter, growing, [node], 1)
    with pytest.raises(ValueError, match="3 Medusa heads propose to depth 3"):
        expand(drafter, growing, [3], 1)


# --- decoding ---


class Watched(MedusaDrafter):
    """Remembers the feature that every tree grows from, and counts forwards."""

    def __init__(self, drafter: MedusaDrafter):
        super().__init__(drafter.heads, drafter.taps[0], drafter.module.borrowed_head)
        self.seen: list[Tensor] = []
        self.forwards = 0
        self.module.register_forward_hook(self.count)

    def count(self, *_) -> None:
        self.forwards += 1

    def expand(self, growing, frontier, noise):
        if not growing.levels:
            self.seen.append(self.feature)
        return super().expand(growing, frontier, noise)


class WholeVocabulary(Policy):
    """Every token under the root: whatever the target wants is accepted, in every pass."""

    def max_candidates(self) -> int:
        return VOCAB

    def frontier(self, growing: GrowingTree, draft: Draft | None) -> Frontier | None:
        return None if growing.levels else Frontier(growing.token.new_zeros(1), VOCAB)

    def select(self, growing: GrowingTree) -> Tensor:
        return torch.arange(1, VOCAB + 1)


DRAFTING = {"chain": Chain(3), "eagle2": Eagle2(20, 4, 3), "whole vocabulary": WholeVocabulary()}


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("own_lm_heads", [False, True], ids=["borrowed", "own"])
@pytest.mark.parametrize("policy", DRAFTING.values(), ids=DRAFTING.keys())
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_the_targets_own(kind, own_lm_heads, policy, temperature):
    target = tiny(kind)
    run = generate(target, random_drafter(target, own_lm_heads), policy, PROMPT, 24, temperature, seed=2)
    plain = generate(target, None, Autoregressive(), PROMPT, 24, temperature, seed=2)
    assert run.tokens == plain.tokens
    if policy.max_candidates() == VOCAB:
        assert all(one.row.accepted == 1 for one in run.passes)


def test_every_tree_grows_from_the_state_before_its_pending_token(target):
    """What a prefill of the text before the pending token ends in: the state is a function of tokens only."""
    drafter = Watched(random_drafter(target))
    text, pending_at = list(PROMPT), []

    def follow(tokens, _):
        text.extend(tokens)
        pending_at.append(len(text) - 1)

    generate(target, drafter, WholeVocabulary(), PROMPT, 21, 0.8, callback=follow)
    assert pending_at == list(range(len(PROMPT), len(PROMPT) + 22, 2))  # leaps of two tokens
    assert len(drafter.seen) == len(pending_at) - 1  # none grows behind the last token
    for feature, end in zip(drafter.seen, pending_at):
        straight = target.prefill(torch.tensor(text[:end]), target.new_cache(), drafter.taps).features[-1]
        assert (feature - straight).abs().max().item() <= 1e-10


def test_any_way_of_reaching_a_position_drafts_the_same(target):
    """From the prompt, by one leap, token by token with trees in between: bit for bit, as one row is all there is."""
    features = target.prefill(torch.tensor(PROMPT), target.new_cache(), (target.n_layers,)).features
    tokens = torch.tensor(PROMPT)
    drafter, pools = random_drafter(target), []
    for stops in (range(1, 11), [1, 10], [10]):
        drafter.start(tokens[: stops[0]], features[: stops[0]], tokens[stops[0], None])
        for before, after in pairwise(stops):
            grow(drafter, Eagle2(9, 3, 2), tokens[before, None])
            drafter.advance(tokens[before + 1 : after + 1], features[before:after])
        pools.append(grow(drafter, Eagle2(20, 4, 3), tokens[10, None]))
    fresh = random_drafter(target)
    fresh.start(tokens[:10], features[:10], tokens[10:])
    expected = grow(fresh, Eagle2(20, 4, 3), tokens[10:])
    for pool in pools:
        assert torch.equal(pool.token, expected.token)
        assert torch.equal(pool.log_conf, expected.log_conf)


def test_another_state_brings_other_drafts():
    """A state of (-1, 0) turns the ranking of the hand-built heads round; nothing of the first position stays."""
    drafter = hand_built()
    append(drafter, root(), [0], 2)
    drafter.advance(torch.tensor([0, 5]), torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    growing = append(drafter, root(), [0], 2)
    assert growing.token[1:].tolist() == [4, 5]  # the two of 1/32, in index order
    assert expand(drafter, growing, [1], 2).token.tolist() == [[0, 1]]


def test_own_lm_heads_leave_the_targets_alone(target):
    heads = MedusaHeads.random(MedusaConfig(32, VOCAB, 2, own_lm_heads=True)).double()
    hidden = torch.ones(32, dtype=torch.float64)
    expected = heads.heads[1][1].weight @ heads.heads[1][0](hidden)
    assert torch.equal(heads.logits(heads(hidden), target.apply_head)[1], expected)


def test_all_heads_run_once_a_pass_and_their_forward_is_timed(target):
    drafter = Watched(random_drafter(target))
    run = generate(target, drafter, Eagle2(20, 4, 3), PROMPT, 12)
    assert drafter.forwards == len(run.passes)
    assert all(one.row.draft_steps == 3 and one.row.drafter_forward_s > 0 for one in run.passes)


@pytest.mark.parametrize("own_lm_heads", [False, True])
def test_drafting_costs_no_transfer_to_the_host(target, own_lm_heads):
    drafter = random_drafter(target, own_lm_heads)
    features = target.prefill(torch.tensor(PROMPT), target.new_cache(), drafter.taps).features
    with transfers_to_host() as log:
        drafter.start(torch.tensor(PROMPT), features, PENDING)
        grow(drafter, Eagle2(20, 4, 3), PENDING)
    assert log == []


@pytest.mark.parametrize("own_lm_heads", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_may_have_another_dtype_than_the_target(own_lm_heads, dtype):
    """fp32 heads in training on a bf16 target: confidences come out in fp32 and at most 0."""
    target = tiny(dtype=torch.bfloat16)
    drafter = random_drafter(target, own_lm_heads)
    drafter.heads.to(dtype)
    run = generate(target, drafter, Eagle2(20, 4, 2), PROMPT, 8)
    assert all(one.nodes["log_conf"].max() <= 0 for one in run.passes)
    assert expand(drafter, root(), [0], 4).log_conf.dtype == torch.float32


# --- bad input ---


def test_advancing_needs_one_feature_row_a_token():
    drafter = hand_built()
    for tokens, features, rows in (([1, 2], None, "none"), ([1, 2], torch.zeros(3, 2), "3")):
        with pytest.raises(ValueError, match=f"one feature row a token: 2 tokens, {rows} rows"):
            drafter.advance(torch.tensor(tokens), features)
    with pytest.raises(ValueError, match="one feature row a token: 2 tokens, none rows"):
        drafter.start(torch.tensor([1, 2]), None, PENDING)


def test_heads_without_an_lm_head_must_borrow_one():
    with pytest.raises(ValueError, match="need the target's: give borrowed_head"):
        MedusaDrafter(MedusaHeads(MedusaConfig(2, 6, 1)), n_layers=4)
