"""The pass: whatever is drafted, the emitted text is the target's own, and what is recorded adds up."""

from __future__ import annotations

import functools
import math
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import VOCAB, build_drafter, build_target
from torch import Tensor
from transfers import transfers_to_host
from transformers import RepetitionPenaltyLogitsProcessor

from eagle_tree.cache import KVCache
from eagle_tree.decode import BrokenLogits, generate, grow, truncate
from eagle_tree.drafter.base import Drafter
from eagle_tree.noise import PassNoise
from eagle_tree.policy import Autoregressive, Chain, Eagle2, Policy
from eagle_tree.record import NODE_COLUMNS
from eagle_tree.target import Target
from eagle_tree.tree import Draft, Frontier, GrowingTree, stable_topk
from eagle_tree.warp import Law, Sampling

PROMPT = [7, 3, 50, 11, 3, 29, 60, 1, 42, 18, 5]
OTHER_PROMPT = [20, 21, 22, 9]
POLICIES = {
    "autoregressive": Autoregressive(),
    "chain 1": Chain(1),
    "chain 5": Chain(5),
    "eagle2 1": Eagle2(1, 1, 1),
    "eagle2 8": Eagle2(8, 3, 2),
    "eagle2 24": Eagle2(24, 4, 3),
    "eagle2 whole pool": Eagle2(99, 3, 2),
    "without value": Eagle2(10, 3, 3, value=False),
    "without rerank": Eagle2(10, 3, 3, rerank=False),
    "without both": Eagle2(10, 3, 3, value=False, rerank=False),
}
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
tiny = functools.cache(build_target)


class Oracle(Drafter):
    """Drafts the target's own most likely tokens, by plain forwards: at temperature 0 whole paths are accepted."""

    def __init__(self, target: Target):
        self.target = target
        self.vocab_size = target.vocab_size
        self.text: list[int] = []

    def start(self, prompt_ids: Tensor, features: Tensor | None, pending: Tensor) -> None:
        self.text = [*prompt_ids.tolist(), *pending.tolist()]

    def advance(self, tokens: Tensor, features: Tensor | None) -> None:
        self.text += tokens.tolist()

    def log_q(self, growing: GrowingTree, frontier: Frontier) -> Tensor:
        """`[F, V]`, the target's own law, at temperature 1."""
        texts = []
        for node in frontier.node.tolist():
            path: list[int] = []
            while node > 0:
                path.insert(0, growing.token[node].item())
                node = growing.parent[node].item()
            texts.append(self.text + path)
        logits = self.target.model.forward(input_ids=torch.tensor(texts), use_cache=False).logits[:, -1]
        return logits.float().log_softmax(-1)

    def expand(self, growing: GrowingTree, frontier: Frontier, noise: PassNoise | None) -> Draft:
        log_q = self.log_q(growing, frontier)
        log_conf, token = stable_topk(log_q, frontier.n_candidates)
        return Draft(token, log_conf, -(log_q.exp() * log_q).sum(-1))


class Guided(Drafter):
    """An EAGLE head's confidences on the oracle's tokens: paths are accepted, and the head's state shows."""

    def __init__(self, head: Drafter, oracle: Oracle):
        self.head, self.oracle = head, oracle
        self.taps, self.vocab_size, self.module = head.taps, head.vocab_size, head.module

    def start(self, prompt_ids: Tensor, features: Tensor, pending: Tensor) -> None:
        self.head.start(prompt_ids, features, pending)
        self.oracle.start(prompt_ids, None, pending)

    def advance(self, tokens: Tensor, features: Tensor) -> None:
        self.head.advance(tokens, features)
        self.oracle.advance(tokens, None)

    def expand(self, growing: GrowingTree, frontier: Frontier, noise: PassNoise | None) -> Draft:
        own = self.head.expand(growing, frontier, noise)
        return replace(own, token=self.oracle.expand(growing, frontier, noise).token)


def make_drafter(target: Target, kind: str) -> Drafter:
    """The oracle, or an EAGLE head of random weights that is nearly always wrong."""
    return Oracle(target) if kind == "oracle" else build_drafter(target, kind)


@functools.cache
def theirs(kind: str, attention: str, prompt: tuple[int, ...], count: int) -> list[int]:
    """Greedy text of transformers' own `generate`."""
    return their_generate(tiny(kind, attention), prompt, count)


def their_generate(target: Target, prompt, count: int, **options) -> list[int]:
    out = target.model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=count,
        **options,
    )
    return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def oracle(target):
    return Oracle(target)


# --- lossless at temperature 0 ---


@pytest.mark.parametrize(
    ("kind", "attention", "drafting"),
    [
        ("llama", "sdpa", "oracle"),
        ("llama", "sdpa", "eagle"),
        ("llama", "eager", "eagle3"),
        ("mistral", "sdpa", "oracle"),
        ("mistral", "eager", "oracle"),
        ("qwen3", "sdpa", "oracle"),
        ("qwen3", "eager", "eagle3"),
    ],
)
@every_policy
def test_greedy_text_is_that_of_transformers(kind, attention, drafting, policy):
    """Full and sliding windows, long accepted paths (the oracle) and hardly any (random heads)."""
    target = tiny(kind, attention)
    result = generate(target, make_drafter(target, drafting), policy, PROMPT, 16)
    assert result.tokens == theirs(kind, attention, tuple(PROMPT), 20)[:16]


@pytest.mark.parametrize(("policy", "passes"), [(Chain(4), 4), (Eagle2(14, 2, 3), 4), (Autoregressive(), 20)])
def test_an_oracle_is_accepted_whole(target, oracle, policy, passes):
    """20 tokens behind prefill's own: 4 drafted and the bonus token a pass, or one a pass."""
    result = generate(target, oracle, policy, PROMPT, 21)
    assert [p.row.emitted for p in result.passes] == [20 // passes] * passes
    assert result.tokens_per_pass == 20 / passes


@every_policy
def test_at_temperature_0_the_expectation_is_what_happens(target, oracle, policy):
    """The target's law is one-hot, so accepted + 1 = expected_target in every pass, also where little is accepted."""
    for drafter in (oracle, build_drafter(target)):
        for one in generate(target, drafter, policy, PROMPT, 20).passes:
            assert one.row.accepted + 1 == one.row.expected_target
            assert one.row.acceptance_meter == 0
            assert one.row.surprisal_meter == 0


# --- lossless at temperatures above 0 ---


@pytest.mark.parametrize("sampling", [Sampling(0.8), Sampling(1.0, top_p=0.9), Sampling(1.3, top_k=7)], ids=repr)
def test_all_policies_sample_the_same_text(target, sampling):
    """Three seeds; the text depends on the seed and on nothing that drafts."""
    texts = set()
    for seed in range(3):
        expected = generate(target, None, Autoregressive(), PROMPT, 14, sampling=sampling, seed=seed).tokens
        texts.add(tuple(expected))
        for name, policy in POLICIES.items():
            for drafting in ["oracle", "eagle3"] if seed == 0 else ["oracle"]:
                drafter = make_drafter(target, drafting)
                result = generate(target, drafter, policy, PROMPT, 14, sampling=sampling, seed=seed)
                assert result.tokens == expected, (seed, name, drafting)
    assert len(texts) == 3


@pytest.mark.parametrize("width", [2, 9, 22])
def test_a_nucleus_wider_than_what_was_sorted_changes_nothing(target, oracle, monkeypatch, width):
    """Top-p sorts the 1024 largest tokens at first; here so few that it widens: for the walk, at 22 for the record."""
    arguments = (target, oracle, Eagle2(8, 3, 2), PROMPT, 14, 1.0, 0.9)
    expected = generate(*arguments)
    widened = mock.Mock(side_effect=Law.widened, name="widened")
    monkeypatch.setattr(Law, "widened", lambda law: widened(law))
    monkeypatch.setattr(Law.__init__, "__defaults__", (None, None, width))
    result = generate(*arguments)
    assert widened.call_count > 0
    assert result.tokens == expected.tokens
    for ours, theirs in zip(result.passes, expected.passes, strict=True):
        assert ours.row.expected_target == pytest.approx(theirs.row.expected_target, abs=1e-9)
        assert ours.row.surprisal_meter == pytest.approx(theirs.row.surprisal_meter, abs=1e-9)
        np.testing.assert_allclose(ours.nodes["target_log_prob"], theirs.nodes["target_log_prob"], atol=1e-9)


def test_arguments_and_a_sampling_object_say_the_same(target):
    """Each of the three matters to this text, so none is lost on the way."""
    given = dict(temperature=1.5, top_k=6, top_p=0.8)

    def text(**arguments) -> list[int]:
        return generate(target, None, Autoregressive(), PROMPT, 24, seed=3, **arguments).tokens

    assert text(**given) == text(sampling=Sampling(**given))
    for name, other in (("temperature", 0.7), ("top_k", None), ("top_p", 1.0)):
        assert text(**given) != text(**{**given, name: other})


@every_policy
def test_processors_read_the_whole_text_before_each_node(target, oracle, policy):
    """A repetition penalty looks at every token so far: the text is that of transformers with the same penalty."""
    sampling = Sampling(processors=[RepetitionPenaltyLogitsProcessor(1.6)])
    result = generate(target, oracle, policy, PROMPT, 16, sampling=sampling)
    assert result.tokens == their_generate(target, PROMPT, 16, repetition_penalty=1.6)
    assert result.tokens != theirs("llama", "sdpa", tuple(PROMPT), 20)[:16]


def test_sequences_have_noise_of_their_own(target):
    """Two prompts of a run do not share their draws, even where their texts are equal; a sequence repeats itself."""
    texts = [
        generate(target, None, Autoregressive(), PROMPT, 16, temperature=1.0, sequence=name).tokens
        for name in ("a", "b", "a", 0, 1)
    ]
    assert texts[0] == texts[2]
    assert len({tuple(text) for text in texts}) == 4


# --- where a text ends ---


@pytest.mark.parametrize("count", range(1, 13))
@pytest.mark.parametrize(
    "policy", [Autoregressive(), Chain(5), Eagle2(24, 4, 3)], ids=["autoregressive", "chain", "eagle2"]
)
def test_max_new_tokens_is_exact(target, oracle, policy, count):
    """The oracle's passes emit several tokens each, so most counts end inside an accepted path."""
    result = generate(target, oracle, policy, PROMPT, count)
    assert result.tokens == theirs("llama", "sdpa", tuple(PROMPT), 20)[:count]
    assert sum(one.row.emitted for one in result.passes) == count - 1


def inside_an_accepted_path(result) -> tuple[int, int]:
    """A token that first occurs in the middle of some pass's accepted path, and its place in the text."""
    place = 1
    for one in result.passes:
        for token in one.tokens[1:-2]:
            where = result.tokens.index(token)
            if place < where < place + len(one.tokens) - 1:
                return token, where
        place += len(one.tokens)
    raise AssertionError("no such token: use another prompt")


@pytest.mark.parametrize("policy", [Chain(6), Eagle2(24, 4, 5)], ids=["chain", "eagle2"])
def test_nothing_follows_a_stop_token_inside_an_accepted_path(target, oracle, policy):
    free = generate(target, oracle, policy, PROMPT, 40)
    token, where = inside_an_accepted_path(free)
    result = generate(target, oracle, policy, PROMPT, 40, stop=(token, 60))
    assert result.tokens == free.tokens[: where + 1]
    last = result.passes[-1]
    assert last.tokens[-1] == token
    assert last.row.emitted == len(last.tokens) < last.row.accepted + 1  # the walk went further, the text did not
    assert sum(one.row.emitted for one in result.passes) + 1 == len(result.tokens)


@pytest.mark.parametrize(
    "policy", [Autoregressive(), Chain(6), Eagle2(24, 4, 5)], ids=["autoregressive", "chain", "eagle2"]
)
def test_nothing_follows_the_models_own_end_of_sequence(target, oracle, policy):
    token, where = inside_an_accepted_path(generate(target, oracle, Chain(6), PROMPT, 40))
    ending = build_target(eos_token_id=[token, 60], pad_token_id=0)  # the same weights
    result = generate(ending, Oracle(ending), policy, PROMPT, 40)
    assert len(result.tokens) == where + 1
    assert result.tokens == their_generate(ending, PROMPT, 40)


def test_a_text_may_end_with_prefills_own_token(target, oracle):
    first = generate(target, oracle, Chain(3), PROMPT, 1).tokens[0]
    result = generate(target, oracle, Chain(3), PROMPT, 40, stop=[first])
    assert result.tokens == [first]
    assert result.passes == []
    assert math.isnan(result.tokens_per_pass)


def test_truncate():
    assert truncate([4, 5, 6], 9, frozenset()) == [4, 5, 6]
    assert truncate([4, 5, 6], 2, frozenset()) == [4, 5]
    assert truncate([4, 5, 6], 9, frozenset([5])) == [4, 5]
    assert truncate([4, 5, 6], 1, frozenset([5])) == [4]


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@every_policy
def test_text_is_right_up_to_the_last_position_of_the_context(kind, policy):
    """Prompt and answer fill a context of 24: the last trees are cut to the room that is left."""
    target = small_context(kind)
    expected = their_generate(target, PROMPT, 13)
    result = generate(target, Oracle(target), policy, PROMPT, 13)
    assert result.tokens == expected
    assert len(PROMPT) + len(result.tokens) == target.max_length
    for one in result.passes:
        assert one.row.context_length + 1 + one.row.n_nodes <= target.max_length
    long_prompt = PROMPT + expected[:-1]  # 23 tokens: room for one
    assert generate(target, Oracle(target), policy, long_prompt, 1).tokens == expected[-1:]


@functools.cache
def small_context(kind: str) -> Target:
    return build_target(kind, max_position_embeddings=24)


# --- what a pass records ---


def runs(target, oracle):
    """Four recorded runs of different kinds."""
    return [
        generate(target, oracle, Eagle2(24, 4, 3), PROMPT, 24),
        generate(target, oracle, Eagle2(24, 4, 3), PROMPT, 24, temperature=1.0, seed=5),
        generate(target, oracle, Chain(4), PROMPT, 24, temperature=0.7, seed=6),
        generate(target, build_drafter(target), Eagle2(10, 3, 3, value=False), PROMPT, 24, temperature=1.0, top_p=0.8),
    ]


def test_pass_rows_add_up(target, oracle):
    for result in runs(target, oracle):
        assert sum(one.row.emitted for one in result.passes) + 1 == len(result.tokens) == 24
        assert result.tokens_per_pass == 23 / len(result.passes)
        before = len(PROMPT)
        for index, one in enumerate(result.passes):
            row = one.row
            assert row.pass_id == index
            assert row.context_length == before  # the root is the token after these
            assert row.emitted == len(one.tokens) <= row.accepted + 1
            assert row.accepted <= row.depth <= row.n_nodes
            assert row.acceptance_meter == row.accepted + 1 - row.expected_target
            before += row.emitted
        whole = result.passes[:-1]  # only the last pass may be cut short
        assert all(one.row.emitted == one.row.accepted + 1 for one in whole)


def test_tree_sizes_and_draft_steps_are_the_policys(target, oracle):
    """Eagle2(24, 4, 3): 24 of a pool of 4 + 3·16, grown in 4 drafter steps over 1 + 3·4 nodes, at most 4 deep."""
    for one in generate(target, oracle, Eagle2(24, 4, 3), PROMPT, 20).passes:
        assert (one.row.n_nodes, one.row.draft_steps, one.row.expanded) == (24, 4, 13)
        assert one.row.depth <= 4
    for one in generate(target, oracle, Chain(5), PROMPT, 20).passes:
        assert (one.row.n_nodes, one.row.draft_steps, one.row.expanded, one.row.depth) == (5, 5, 5, 5)
    for one in generate(target, None, Autoregressive(), PROMPT, 20).passes:
        assert (one.row.n_nodes, one.row.draft_steps, one.row.depth, one.row.accepted) == (0, 0, 0, 0)
        assert one.row.expected_draft == one.row.expected_target == 1


def test_node_columns_agree_with_the_tree(target, oracle):
    """Parents, depths, ranks, scores and the calibration event, recomputed node by node in plain Python."""
    for result in runs(target, oracle):
        for one in result.passes:
            nodes, row = one.nodes, one.row
            assert list(nodes) == list(NODE_COLUMNS)
            assert nodes["node"].tolist() == list(range(1, row.n_nodes + 1))
            depth, score, reached, reach, siblings = {0: 0}, {0: 0.0}, {0: True}, {0: 1.0}, {}
            path_tokens = {0: []}
            for i, node in enumerate(nodes["node"].astype(int).tolist()):
                parent = int(nodes["parent"][i])
                assert parent < node
                depth[node] = depth[parent] + 1
                score[node] = np.float32(np.float32(score[parent]) + np.float32(nodes["log_conf"][i]))
                reached[node] = bool(nodes["accepted"][i])
                reach[node] = reach[parent] * math.exp(nodes["target_log_prob"][i])
                path_tokens[node] = [*path_tokens[parent], int(nodes["token"][i])]
                assert nodes["depth"][i] == depth[node]
                assert nodes["score"][i] == score[node]
                assert nodes["rank"][i] == siblings.get(parent, 0)
                siblings[parent] = siblings.get(parent, 0) + 1
                assert nodes["tried"][i] == nodes["parent_accepted"][i] == reached[parent]
                assert not reached[node] or reached[parent]
                assert nodes["selected"][i] == 1
            assert row.depth == max(depth.values())
            assert row.accepted == sum(reached.values()) - 1
            deepest = max((node for node in reached if reached[node]), key=depth.get)
            assert one.tokens[: row.accepted] == path_tokens[deepest][: row.emitted]
            assert row.expected_draft == pytest.approx(sum(math.exp(s) for s in score.values()), abs=1e-6)
            assert row.expected_target == pytest.approx(sum(reach.values()), abs=1e-6)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("policy", [Chain(3), Eagle2(8, 3, 2)], ids=["chain", "eagle2"])
def test_every_pass_drafts_as_if_the_sequence_began_there(target, oracle, kind, policy):
    """The features handed on by each pass are the true ones: a drafter started at its position drafts the same tree."""
    guided = Guided(build_drafter(target, kind), oracle)
    result = generate(target, guided, policy, PROMPT, 20)
    assert max(one.row.accepted for one in result.passes) > 1
    text = torch.tensor(PROMPT + result.tokens)
    for one in result.passes:
        n = one.row.context_length
        anew = Guided(build_drafter(target, kind), Oracle(target))
        anew.start(text[:n], target.prefill(text[:n], target.new_cache(), anew.taps).features, text[n : n + 1])
        growing = grow(anew, policy, text[n : n + 1])
        tree = growing.select(policy.select(growing))[0].head(one.row.n_nodes)
        assert one.nodes["token"].tolist() == tree.token[1:].tolist()
        np.testing.assert_allclose(one.nodes["log_conf"], tree.log_conf[1:].numpy(), atol=1e-6)


def test_recorded_probabilities_are_the_targets(target, oracle):
    """target_log_prob against a plain forward over each node's path, at T = 0.7."""
    result = generate(target, oracle, Eagle2(8, 3, 2), PROMPT, 6, temperature=0.7, seed=2)
    text = PROMPT + result.tokens
    for one in result.passes:
        paths = {0: text[: one.row.context_length + 1]}
        for i in range(one.row.n_nodes):
            parent = paths[int(one.nodes["parent"][i])]
            paths[i + 1] = [*parent, int(one.nodes["token"][i])]
            with torch.inference_mode():
                law = (target.model(input_ids=torch.tensor([parent]), use_cache=False).logits[0, -1] / 0.7).softmax(-1)
            assert math.exp(one.nodes["target_log_prob"][i]) == pytest.approx(law[paths[i + 1][-1]].item(), abs=1e-9)


def test_without_recording_the_text_is_the_same_and_the_meters_are_empty(target, oracle):
    for temperature in (0.0, 1.0):
        arguments = (target, oracle, Eagle2(24, 4, 3), PROMPT, 16, temperature)
        bare = generate(*arguments, record_nodes=False)
        assert bare.tokens == generate(*arguments).tokens
        for one in bare.passes:
            assert math.isnan(one.row.expected_target)
            assert math.isnan(one.row.surprisal_meter)
            assert all(len(column) == 0 for column in one.nodes.values())


def test_names_stand_in_the_rows(target):
    drafter = build_drafter(target)
    rows = [
        generate(target, drafter, Chain(2), PROMPT, 4, **names).passes[0].row
        for names in ({}, dict(policy_name="short", sequence="q7", category="maths"))
    ]
    assert [(row.policy, row.prompt_id, row.category) for row in rows] == [("Chain", "0", ""), ("short", "q7", "maths")]


def test_stage_times_are_parts_of_the_pass(target):
    for one in generate(target, build_drafter(target), Eagle2(8, 3, 2), PROMPT, 10).passes:
        row = one.row
        stages = row.grow_s + row.select_s + row.verify_s + row.accept_s + row.compact_s + row.record_s
        assert 0 < stages <= row.pass_s
        assert 0 < row.target_forward_s <= row.verify_s
        assert 0 < row.drafter_forward_s <= row.grow_s


def test_no_hook_is_left_behind(target):
    drafter = build_drafter(target)
    generate(target, drafter, Chain(2), PROMPT, 4)
    for module in (*target.model.modules(), *drafter.module.modules()):
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


# --- one device-to-host transfer a pass ---


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(1.0), Sampling(0.7, top_p=0.9), Sampling(1.0, top_k=9)], ids=repr
)
@every_policy
def test_a_pass_costs_one_transfer_to_the_host(target, policy, sampling):
    """From one callback to the next; prefill, which sets the sequence up, is not a pass."""
    drafter = build_drafter(target)
    marks: list[int] = []
    with transfers_to_host() as log:
        generate(target, drafter, policy, PROMPT, 8, sampling=sampling, callback=lambda *_: marks.append(len(log)))
    passes = [log[start:end] for start, end in pairwise(marks)]
    assert passes
    assert all(moved == ["cpu"] for moved in passes), passes


def test_the_transfer_counter_counts():
    """Each way of looking at a device is seen once."""
    ways = [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: int(x[0]),
        lambda x: float(x[0]),
        lambda x: [1, 2, 3][x[0]],
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: x.cpu().numpy(),
        lambda x: x.nonzero(),
        lambda x: x[x > 1],
        lambda x: torch.equal(x, x),
        lambda x: "yes" if x[0] else "no",
    ]
    for way in ways:
        with transfers_to_host() as log, torch.inference_mode():
            way(torch.tensor([1, 2]))
        assert len(log) == 1


# --- state ---


@pytest.mark.parametrize("capacity", [None, 64])
def test_a_cache_reused_from_prompt_to_prompt_changes_nothing(target, capacity):
    drafter, cache = build_drafter(target), target.new_cache(fixed_capacity=capacity)
    for prompt in (PROMPT, OTHER_PROMPT, [9], PROMPT):
        reused = generate(target, drafter, Eagle2(8, 3, 2), prompt, 16, 0.9, cache=cache)
        fresh = generate(target, build_drafter(target), Eagle2(8, 3, 2), prompt, 16, 0.9)
        assert reused.tokens == fresh.tokens
        for ours, other in zip(reused.passes, fresh.passes, strict=True):
            assert ours.row.accepted == other.row.accepted
            assert ours.nodes["token"].tolist() == other.nodes["token"].tolist()


def test_a_policy_that_never_drafts_leaves_the_drafter_alone(target):
    drafter = mock.Mock(spec=Drafter, vocab_size=VOCAB)
    generate(target, drafter, Autoregressive(), PROMPT, 4)
    assert drafter.mock_calls == []


def test_the_policy_observes_every_pass(target, oracle):
    seen = []

    class Watching(Eagle2):
        def observe(self, row):
            seen.append(row)

    result = generate(target, oracle, Watching(8, 3, 2), PROMPT, 16)
    assert seen == [one.row for one in result.passes]


def test_callbacks_come_in_order(target, oracle):
    """First prefill's token without a pass, then every pass's tokens as they are emitted."""
    calls = []
    result = generate(target, oracle, Chain(4), PROMPT, 14, callback=lambda tokens, one: calls.append((tokens, one)))
    assert calls[0] == (result.tokens[:1], None)
    assert [one for _, one in calls[1:]] == result.passes
    assert all(tokens == one.tokens for tokens, one in calls[1:])
    assert [token for tokens, _ in calls for token in tokens] == result.tokens


# --- bad requests: an error before any work ---


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (dict(prompt_ids=[]), "prompt_ids is empty"),
        (dict(prompt_ids=[1] * 256), "the prompt has 256 tokens; the target's context of 256 leaves no room"),
        (dict(prompt_ids=[1] * 300), "the prompt has 300 tokens; the target's context of 256 leaves no room"),
        (dict(prompt_ids=[1] * 250, max_new_tokens=7), "max_new_tokens=7 after a prompt of 250 tokens exceeds"),
        (dict(prompt_ids=[3, VOCAB]), "prompt_ids must be in 0…60"),
        (dict(prompt_ids=[3, -1]), "prompt_ids must be in 0…60"),
        (dict(max_new_tokens=0), "max_new_tokens=0 must be an integer >= 1"),
        (dict(max_new_tokens=2.5), "max_new_tokens=2.5 must be an integer >= 1"),
        (dict(top_k=VOCAB + 1), "top_k=62 exceeds the vocabulary of 61"),
        (dict(top_k=0), "top_k=0 must be an integer >= 1"),
        (dict(policy=Eagle2(9, 30, 1)), "Eagle2 asks for top_k=30 candidates a node; the drafter's vocabulary has 20"),
        (dict(drafter=None), "Chain drafts, but drafter is None"),
        (dict(cache=KVCache(4, 5)), "cache holds 5 positions"),
        (dict(temperature=-1.0), "temperature=-1.0 must be a number >= 0"),
        (dict(temperature=math.nan), "temperature=nan must be a number >= 0"),
        (dict(temperature="1"), "temperature='1' must be a number >= 0"),
        (dict(top_p=0.0), r"top_p=0.0 must be in \(0, 1\]"),
        (dict(top_p=1.5), r"top_p=1.5 must be in \(0, 1\]"),
    ],
)
def test_a_bad_request_is_named_before_any_work(target, changes, complaint):
    drafter = build_drafter(target, draft_vocab=20)
    request = dict(drafter=drafter, policy=Chain(2), prompt_ids=PROMPT, max_new_tokens=4)
    generate(target, **request)
    work = AssertionError("the target was run")
    with mock.patch.object(target.model, "forward", side_effect=work), pytest.raises(ValueError, match=complaint):
        generate(target, **{**request, **changes})


class Selecting(Policy):
    """Grows a chain of three and selects the given pool nodes."""

    def __init__(self, *node: int):
        self.node = node

    def max_candidates(self) -> int:
        return 1

    def frontier(self, growing, draft):
        return Chain(3).frontier(growing, draft)

    def select(self, growing):
        return torch.tensor(self.node)


@pytest.mark.parametrize("node", [(2,), (1, 3), (1, 1, 2)], ids=str)
def test_a_policy_that_selects_an_orphan_or_a_node_twice_is_caught(target, oracle, node):
    assert generate(target, oracle, Selecting(1, 2), PROMPT, 8).tokens == theirs("llama", "sdpa", tuple(PROMPT), 20)[:8]
    with pytest.raises(AssertionError, match="Selecting selected a node without its parent, or one twice"):
        generate(target, oracle, Selecting(*node), PROMPT, 8)


# --- a target that breaks ---


@contextmanager
def broken_after(target: Target, calls: int, value: float):
    """The target's logits turn NaN or infinite after some forwards."""
    done = []

    def spoil(module, arguments, output):
        done.append(1)
        if len(done) > calls:
            output.logits[..., 3] = value

    handle = target.model.register_forward_hook(spoil)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(0.7, top_p=0.9), Sampling(1.0, 5)], ids=repr)
@pytest.mark.parametrize(
    "policy", [Autoregressive(), Chain(3), Eagle2(8, 3, 2)], ids=["autoregressive", "chain", "eagle2"]
)
def test_broken_logits_are_named_and_what_came_before_was_delivered(target, policy, sampling, value):
    """Prefill and three passes are sound; the fourth pass is not."""
    drafter = build_drafter(target)
    sound = generate(target, drafter, policy, PROMPT, 16, sampling=sampling)
    delivered = []
    position = len(PROMPT) + 1 + sum(one.row.emitted for one in sound.passes[:3])
    with (
        broken_after(target, 4, value),
        pytest.raises(BrokenLogits, match=f"logits at position {position} are not finite"),
    ):
        generate(target, drafter, policy, PROMPT, 16, sampling=sampling, callback=lambda new, _: delivered.append(new))
    assert delivered == [sound.tokens[:1], *(one.tokens for one in sound.passes[:3])]


def test_broken_logits_of_the_prompt_are_named(target):
    with broken_after(target, 0, math.nan), pytest.raises(BrokenLogits, match="after the prompt of 11 tokens"):
        generate(target, None, Autoregressive(), PROMPT, 4)
