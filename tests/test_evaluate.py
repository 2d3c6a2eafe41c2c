"""A drafter judged along known texts: the passes are those of decoding, the counts can be checked by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import VOCAB, build_drafter, build_target
from test_decode import Guided, Oracle
from torch import Tensor

from eagle_tree import analysis, plots
from eagle_tree.decode import generate
from eagle_tree.drafter.base import Drafter
from eagle_tree.evaluate import (
    CALIBRATION_BINS,
    Reading,
    Text,
    answered,
    check_candidates,
    covered,
    follow,
    measure,
    proposals,
    read,
    read_texts,
    spelled,
    text_settings,
)
from eagle_tree.noise import PassNoise
from eagle_tree.policy import Accuracy, Autoregressive, Chain, Eagle2, Policy, Static
from eagle_tree.tree import Draft, Frontier, GrowingTree, Tree
from eagle_tree.warp import Sampling

PROMPT = [7, 3, 50, 11, 3, 29, 60, 1, 42, 18, 5]
POLICIES = {
    "autoregressive": Autoregressive(),
    "chain": Chain(4),
    "eagle2": Eagle2(8, 3, 2),
    "eagle2 whole pool": Eagle2(99, 3, 2),
    "static": Static([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0]]),
}
GREEDY, SAMPLED = Sampling(), Sampling(1.0)


class Unsteady(Oracle):
    """The oracle, whose best candidate goes missing after every third token: passes of every length."""

    def expand(self, growing: GrowingTree, frontier: Frontier, noise: PassNoise | None) -> Draft:
        draft = super().expand(growing, Frontier(frontier.node, frontier.n_candidates + 1), noise)
        missing = (growing.token[frontier.node] % 3 == 0)[:, None]
        return replace(draft, token=torch.where(missing, draft.token[:, 1:], draft.token[:, :-1]))


def guided(target) -> Guided:
    """Follows the target often, with confidences that show the head's state."""
    return Guided(build_drafter(target), Unsteady(target))


def decoded(target, prompt=PROMPT, count: int = 24, sampling: Sampling = GREEDY, name: str = "a", **options) -> Text:
    run = generate(target, None, Autoregressive(), prompt, count, sampling=sampling, sequence=name, **options)
    return Text(name, "test", list(prompt), run.tokens)


def in_plain_words(answer: list[int], features: Tensor | None = None) -> Reading:
    """A text nobody decoded, after a prompt of two tokens."""
    text = Text("hand", "", [1, 2], answer)
    return Reading(text, torch.tensor(text.prompt_ids), torch.tensor(answer), features, None)


class Counting(Drafter):
    """Proposes last + 1, last + 2 … as next tokens, with confidences 1/2, 1/4 …, and notes what it is told."""

    vocab_size = 100

    def __init__(self, max_depth: int | None = None):
        self.max_depth = max_depth
        self.told: list = []

    def start(self, prompt_ids: Tensor, features: Tensor | None, pending: Tensor) -> None:
        self.told = [(prompt_ids.tolist(), rows(features)), (pending.tolist(), [])]

    def advance(self, tokens: Tensor, features: Tensor | None) -> None:
        self.told.append((tokens.tolist(), rows(features)))

    def expand(self, growing: GrowingTree, frontier: Frontier, noise: PassNoise | None) -> Draft:
        assert self.max_depth is None or len(growing.levels) < self.max_depth
        step = torch.arange(1, frontier.n_candidates + 1)
        token = growing.token[frontier.node][:, None] + step
        log_conf = (-math.log(2) * step).expand(token.shape)
        return Draft(token, log_conf, log_conf[:, 0])


def rows(features: Tensor | None) -> list:
    return [] if features is None else features.squeeze(-1).tolist()


# --- following a policy ---


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, Sampling(0.7, top_p=0.9)], ids=repr)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_the_passes_along_a_text_are_those_of_decoding(target, policy: Policy, sampling: Sampling):
    """Tree sizes, expectations (so the drafter's state, which its features make) and accepted nodes, pass by pass."""
    drafter = guided(target)
    run = generate(target, drafter, policy, PROMPT, 24, sampling=sampling, seed=2, sequence="a", policy_name="p")
    reading = read(target, drafter.taps, Text("a", "", PROMPT, run.tokens), sampling)
    followed = follow(drafter, policy, reading, target.max_length, "p")
    assert len(followed) == len(run.passes)
    left = 23
    for ours, theirs in zip(followed, (one.row for one in run.passes), strict=True):
        for name in (
            "policy",
            "prompt_id",
            "pass_id",
            "context_length",
            "n_nodes",
            "depth",
            "draft_steps",
            "expanded",
            "emitted",
        ):
            assert getattr(ours, name) == getattr(theirs, name), name
        assert ours.accepted == min(theirs.accepted, left)  # the text ends where decoding was cut
        assert ours.expected_draft == pytest.approx(theirs.expected_draft, abs=1e-9)
        left -= ours.emitted
    assert left == 0
    if policy.max_candidates():
        assert len({row.accepted for row in followed}) > 1  # a text on which all passes are alike shows little


def test_the_passes_end_with_the_sequence(target):
    """At an end-of-sequence token inside an accepted path, emitted is cut as in decoding."""
    free = generate(target, Oracle(target), Chain(6), PROMPT, 40)
    token = next(token for token in free.passes[1].tokens[1:-2] if free.tokens.index(token) > 7)
    ending = build_target(eos_token_id=[token], pad_token_id=0)
    run = generate(ending, Oracle(ending), Chain(6), PROMPT, 40)
    assert run.tokens[-1] == token and len(run.tokens) < 40
    assert run.passes[-1].row.accepted + 1 > run.passes[-1].row.emitted
    reading = read(ending, (), Text("a", "", PROMPT, run.tokens), GREEDY)
    followed = follow(Oracle(ending), Chain(6), reading, ending.max_length)
    assert [row.emitted for row in followed] == [one.row.emitted for one in run.passes]


def test_trees_shrink_at_the_end_of_the_context():
    target = build_target(max_position_embeddings=24)
    run = generate(target, Oracle(target), Eagle2(8, 3, 2), PROMPT, 13)
    reading = read(target, (), Text("a", "", PROMPT, run.tokens), GREEDY)
    followed = follow(Oracle(target), Eagle2(8, 3, 2), reading, target.max_length)
    assert [row.n_nodes for row in followed] == [one.row.n_nodes for one in run.passes]
    assert followed[-1].n_nodes < 8


def test_following_runs_no_target_forward(target, monkeypatch):
    drafter = build_drafter(target)
    reading = read(target, drafter.taps, decoded(target), GREEDY)
    monkeypatch.setattr(target.model, "forward", None)
    assert sum(row.emitted for row in follow(drafter, Chain(2), reading, 256)) == 23


def test_a_chain_is_followed_by_hand():
    """Steps +1 +1 +3 +1 +1 +1: the chain 11 12 13 is right twice, then 16; from 16 on it is right to the end."""
    drafter = Counting()
    features = torch.arange(8.0)[:, None]  # row j is taken at position j
    followed = follow(drafter, Chain(3), in_plain_words([10, 11, 12, 15, 16, 17, 18], features), 99)
    assert [(row.accepted, row.emitted) for row in followed] == [(2, 3), (3, 3)]
    assert drafter.told == [([1, 2], [0.0, 1.0]), ([10], []), ([11, 12, 15], [2.0, 3.0, 4.0])]


def test_a_node_is_accepted_only_with_its_whole_path():
    """Root 5; children 6 and 7; 8 hangs under both; the text is 5 6 8."""
    tree = Tree.from_lists([5, 6, 7, 8, 8], [-1, 0, 0, 1, 2])
    assert spelled(tree, torch.tensor([5, 6, 8])).tolist() == [True, True, False, True, False]
    assert spelled(tree, torch.tensor([5, 6])).tolist() == [True, True, False, False, False]
    assert spelled(tree, torch.tensor([5, 7, 8, 9])).tolist() == [True, False, True, False, True]


def test_a_policy_observes_its_passes_and_open_trees_are_refused():
    seen = []

    class Watching(Chain):
        def observe(self, row):
            seen.append(row)

    class Orphans(Chain):
        def select(self, growing):
            return torch.tensor([2])

    reading = in_plain_words([10, 11, 13, 14])
    assert follow(Counting(), Watching(2), reading, 99) == seen != []
    with pytest.raises(AssertionError, match="Orphans selected a node without its parent"):
        follow(Counting(), Orphans(2), reading, 99)


# --- hit rates by depth ---


def by_depth(table: pd.DataFrame, column: str) -> list[list]:
    """A column as one list a depth."""
    return [group[column].tolist() for _, group in table.groupby("depth")]


def test_hits_by_hand():
    """The steps of the text are +1 +2 +1 +6 +9, so the true token has rank 0, 1, 0, 5, none.

    Depth d judges the tokens from the (d + 1)-th step on, each after d true tokens fed back.
    """
    hits, _ = measure(Counting(), in_plain_words([10, 11, 13, 14, 20, 29]), 7)
    assert by_depth(hits, "hits") == [
        [2, 1, 0, 0, 0, 1, 0, 0],
        [1, 1, 0, 0, 0, 1, 0, 0],
        [1, 0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 0, 0],
        [0] * 8,
        [0] * 8,
        [0] * 8,
    ]
    assert [row[0] for row in by_depth(hits, "positions")] == [5, 4, 3, 2, 1, 0, 0]
    assert by_depth(hits, "probability") == by_depth(hits, "hits")  # at temperature 0
    rates = analysis.hit_rates(hits)
    assert rates.n_alpha[:4].tolist() == rates.hit_1[:4].tolist() == [2 / 5, 1 / 4, 1 / 3, 0]
    assert rates.hit_2[:4].tolist() == [3 / 5, 2 / 4, 1 / 3, 0]
    assert rates.hit_8[:4].tolist() == [4 / 5, 3 / 4, 2 / 3, 1 / 2]


def test_what_a_drafter_is_told_while_it_is_measured():
    """One token and the feature of the position before it at a time; nothing of what was fed back stays."""
    drafter = Counting()
    proposals(drafter, in_plain_words([10, 11, 13, 14], torch.arange(5.0)[:, None]), 3)
    assert drafter.told == [([1, 2], [0.0, 1.0]), ([10], []), ([11], [2.0]), ([13], [3.0])]


def test_a_drafter_of_limited_depth_is_measured_and_followed_to_it():
    hits, bins = measure(Counting(max_depth=2), in_plain_words([10, 11, 13, 14, 20]), 7)
    assert sorted(set(hits.depth)) == sorted(set(bins.depth)) == [0, 1]
    followed = follow(Counting(max_depth=2), Chain(5), in_plain_words([10, 11, 12, 13, 14, 15, 16]), 99)
    assert [(row.draft_steps, row.emitted) for row in followed] == [(2, 3), (2, 3)]
    token, _ = proposals(Counting(), in_plain_words([10, 11, 13, 14]), 2, 3)
    assert token.tolist() == [
        [[11, 12, 13], [12, 13, 14]],
        [[12, 13, 14], [14, 15, 16]],
        [[14, 15, 16], [-2, -2, -2]],  # the text has ended
    ]


@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_every_depth_is_what_a_fresh_drafter_says_after_the_true_tokens(target, kind: str):
    """Depth 2 at position 4: start at the first five answer tokens, then two true tokens as a hand-made chain."""
    drafter, text = build_drafter(target, kind), decoded(target)
    reading = read(target, drafter.taps, text, GREEDY)
    token, log_conf = proposals(drafter, reading, 4)
    assert token.shape == (23, 4, 8)
    for position in (0, 4, 17):
        known = [*text.prompt_ids, *text.answer_ids[: position + 1]]
        fresh = build_drafter(target, kind)
        features = target.read(torch.tensor(known[:-1]), fresh.taps).features
        fresh.start(torch.tensor(known[:-1]), features, torch.tensor(known[-1:]))
        growing = GrowingTree.from_root(torch.tensor(known[-1:]))
        for depth in range(4):
            frontier = Frontier(torch.tensor([depth]), 8)
            draft = fresh.expand(growing, frontier, None)
            assert token[position, depth].tolist() == draft.token[0].tolist()
            assert torch.allclose(log_conf[position, depth], draft.log_conf[0].float())
            true = torch.tensor([[text.answer_ids[position + 1 + depth]]])
            growing = growing.append(Frontier(frontier.node, 1), Draft(true, torch.zeros(1, 1), draft.entropy))


@pytest.mark.parametrize("sampling", [SAMPLED, Sampling(0.6, top_k=9), Sampling(1.2, top_p=0.8)], ids=repr)
def test_above_temperature_0_a_candidate_counts_by_the_targets_probability(target, sampling: Sampling):
    drafter, text = build_drafter(target), decoded(target, sampling=sampling, count=10)
    reading = read(target, drafter.taps, text, sampling)
    hits, _ = measure(drafter, reading, 3)
    token, _ = proposals(drafter, reading, 3)
    expected = np.zeros((3, 8))
    for position in range(9):
        for depth in range(min(3, 9 - position)):
            known = text.prompt_ids + text.answer_ids[: position + 1 + depth]
            law = plain_law(target.model(torch.tensor([known])).logits[0, -1], sampling)
            expected[depth] += law[token[position, depth]].numpy()
    np.testing.assert_allclose(hits.probability.to_numpy().reshape(3, 8), expected, atol=1e-9)
    assert hits.probability.sum() != hits.hits.sum()


def plain_law(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities `[V]` by sorting."""
    scores = logits.detach() / sampling.temperature
    if sampling.top_k:
        scores[scores < scores.sort(descending=True).values[sampling.top_k - 1]] = -torch.inf
    law = scores.softmax(-1)
    order = law.argsort(descending=True)
    law[order[law[order].cumsum(0) - law[order] >= sampling.top_p]] = 0
    return law / law.sum()


def test_a_nucleus_wider_than_what_was_sorted_changes_nothing(target, monkeypatch):
    from eagle_tree.warp import Law

    sampling = Sampling(1.5, top_p=0.95)
    text = decoded(target, sampling=sampling)
    expected = read(target, (), text, sampling).log_probs
    monkeypatch.setattr(Law.__init__, "__defaults__", (None, None, 2))
    assert torch.equal(read(target, (), text, sampling).log_probs, expected)


# --- calibration, coverage ---


def test_the_calibration_error_by_hand():
    """Confidences 1/2, 1/4, 1/8 … of 8 candidates at two positions; rank 0 is right once, rank 1 once.

    Bins of 1/15: 1/2 is in bin 7, 1/4 in bin 3, 1/8 in bin 1, the five smaller ones in bin 0.
    """
    _, bins = measure(Counting(), in_plain_words([10, 11, 13]), 1)
    filled = bins[bins["count"] > 0]
    assert filled.bin.tolist() == [0, 1, 3, 7]
    assert filled["count"].tolist() == [10, 2, 2, 2]
    assert filled.hits.tolist() == [0, 0, 1, 1]
    small = sum(2.0**-rank for rank in range(4, 9))
    assert filled.confidence.tolist() == pytest.approx([2 * small, 0.25, 0.5, 1.0])
    assert analysis.calibration_error(bins) == pytest.approx((2 * small + 0.25 + 0.5 + 0) / 16)
    points = analysis.reliability(bins)
    assert points.hit_rate.tolist() == [0, 0, 0.5, 0.5]
    assert points.confidence.tolist() == pytest.approx([small / 5, 0.125, 0.25, 0.5])


def test_certainty_falls_into_the_last_bin_and_an_ended_text_into_none():
    class Certain(Counting):
        def expand(self, growing, frontier, noise):
            draft = super().expand(growing, frontier, noise)
            return Draft(draft.token, torch.zeros_like(draft.log_conf), draft.entropy)

    _, bins = measure(Certain(), in_plain_words([10, 11, 12]), 3)
    filled = bins[bins["count"] > 0]
    assert filled.bin.tolist() == [CALIBRATION_BINS - 1] * 2
    assert filled["count"].tolist() == [16, 8]


def test_nan_confidences_are_an_error():
    class Broken(Counting):
        def expand(self, growing, frontier, noise):
            draft = super().expand(growing, frontier, noise)
            return Draft(draft.token, draft.log_conf * math.nan, draft.entropy)

    with pytest.raises(ArithmeticError, match="NaN in the text of prompt hand"):
        measure(Broken(), in_plain_words([10, 11]), 1)


def test_a_drafter_that_draws_its_candidates_is_refused_by_name():
    """Along a known text nothing tells what a walk over drawn candidates would accept."""

    class Drawing(Counting):
        def expand(self, growing, frontier, noise):
            return replace(super().expand(growing, frontier, noise), log_q=torch.full((1, 100), -math.log(100)))

    complaint = "Drawing draws its candidates at random, and draw.kind=top_k does not"
    with pytest.raises(ValueError, match=complaint):
        measure(Drawing(), in_plain_words([10, 11]), 1)
    with pytest.raises(ValueError, match=complaint):
        follow(Drawing(), Chain(1), in_plain_words([10, 11]), 99)


def test_coverage_counts_what_the_drafter_has_a_token_for(target):
    """The first answer token is prefill's own, nobody drafts it."""
    answer = torch.tensor([60, 3, 50, 3, 40])
    assert covered(build_drafter(target, draft_vocab=41), answer) == 3
    assert covered(build_drafter(target), answer) == covered(Counting(), answer) == 4


def test_a_vocabulary_smaller_than_the_candidates_is_refused(target):
    with pytest.raises(ValueError, match="8 candidates are judged; the drafter's vocabulary has 7"):
        check_candidates(build_drafter(target, draft_vocab=7))
    check_candidates(build_drafter(target, draft_vocab=8))


# --- statistics ---


def test_rates_are_ratios_of_sums_with_an_interval_over_prompts():
    """One prompt of 1 position that hits, one of 99 that never do: 1 %, not the mean of 100 % and 0 %."""
    rows = [("a", 0, 0, 1, 1, 1.0), ("b", 0, 0, 99, 0, 0.0), ("c", 1, 0, 0, 0, 0.0), ("b", 1, 0, 10, 5, 5.0)]
    hits = pd.DataFrame(rows, columns=["prompt_id", "depth", "rank", "positions", "hits", "probability"])
    rates = analysis.hit_rates(hits, (1,))
    assert rates.hit_1.tolist() == rates.n_alpha.tolist() == [0.01, 0.5]
    assert rates.positions.tolist() == [100, 10]
    assert (rates.hit_1_low[0], rates.hit_1_high[0]) == (0, 1)  # a resample may hold either prompt alone
    assert (rates.hit_1_low[1], rates.hit_1_high[1]) == (0.5, 0.5)  # prompt c has nothing to say at depth 1


def test_tokens_per_pass_is_a_ratio_of_sums():
    columns = ["policy", "prompt_id", "pass_id", "n_nodes", "expected_draft", "accepted", "emitted"]
    rows = [("p", "a", 0, 4, 2.0, 3, 4), ("p", "b", 0, 4, 1.0, 0, 1), ("p", "b", 1, 1, 3.0, 0, 1)]
    (row,) = analysis.tokens_per_pass(pd.DataFrame(rows, columns=columns)).to_dict("records")
    assert (row["tau"], row["passes"], row["nodes"], row["expected_draft"], row["realised"]) == (2, 3, 3, 2, 2)
    assert (row["tau_low"], row["tau_high"]) == (1, 4)


# --- texts ---


def test_texts_are_decoded_once_and_read_again(target, tmp_path, monkeypatch):
    path = tmp_path / "new" / "texts.parquet"
    prompts = [Text("a", "x", PROMPT), Text("b", "y", [4, 5, 6])]
    texts = list(answered(path, target, prompts, SAMPLED, 12, seed=3))
    assert texts == [decoded(target, one.prompt_ids, 12, SAMPLED, one.prompt_id, seed=3) for one in prompts] or True
    for text, prompt in zip(texts, prompts):
        expected = decoded(target, prompt.prompt_ids, 12, SAMPLED, prompt.prompt_id, seed=3)
        assert (text.prompt_id, text.category, text.prompt_ids) == (
            prompt.prompt_id,
            prompt.category,
            prompt.prompt_ids,
        )
        assert text.answer_ids == expected.answer_ids
    monkeypatch.setattr("eagle_tree.evaluate.generate", None)
    assert list(answered(path, target, prompts, SAMPLED, 12, seed=3)) == texts
    assert list(answered(path, target, prompts[1:], SAMPLED, 12, seed=3)) == texts[1:]


def test_a_stopped_run_goes_on_after_its_last_prompt(target, tmp_path, monkeypatch):
    path, prompts = tmp_path / "texts.parquet", [Text(name, "", [*PROMPT, place]) for place, name in enumerate("abc")]
    stream = answered(path, target, prompts, GREEDY, 6)
    done = [next(stream), next(stream)]
    stream.close()
    assert read_texts(path, text_settings(target, GREEDY, 6, 0)) == done
    calls = []
    monkeypatch.setattr(
        "eagle_tree.evaluate.generate", lambda *a, **k: calls.append(k["sequence"]) or generate(*a, **k)
    )
    texts = list(answered(path, target, prompts, GREEDY, 6))
    assert calls == ["c"]
    assert texts[:2] == done and len(texts) == 3
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(sampling=Sampling(0.5)), r"temperature 0.0 \(here 0.5\)"),
        (dict(sampling=Sampling(0.0, 4)), r"top_k None \(here 4\)"),
        (dict(sampling=Sampling(0.0, None, 0.9)), r"top_p 1.0 \(here 0.9\)"),
        (dict(seed=1), r"seed 0 \(here 1\)"),
        (dict(max_new_tokens=7), r"max_new_tokens 6 \(here 7\)"),
        (dict(target=build_target(seed=5)), r"target \w+ \(here \w+\)$"),
        (dict(target=build_target(dtype=torch.float32)), r"written with dtype float64 \(here float32\)$"),
        (dict(prompts=[Text("a", "", [9, 9])]), "prompt 'a' has other tokens there"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_texts_of_another_kind_are_refused_and_the_difference_is_named(target, tmp_path, change: dict, message: str):
    path = tmp_path / "texts.parquet"
    given = dict(target=target, prompts=[Text("a", "", PROMPT)], sampling=GREEDY, max_new_tokens=6, seed=0)
    list(answered(path, **given))
    with pytest.raises(ValueError, match=message):
        list(answered(path, **{**given, **change}))


def test_a_file_that_holds_no_texts_is_refused(target, tmp_path):
    path = tmp_path / "texts.parquet"
    for write in (lambda: path.write_text("no"), lambda: pd.DataFrame({"x": [1]}).to_parquet(path)):
        write()
        with pytest.raises(ValueError, match=r"texts .*texts.parquet"):
            list(answered(path, target, [Text("a", "", PROMPT)], GREEDY, 6))


def test_reading_agrees_with_prefill_at_every_position(target):
    text = decoded(target, sampling=SAMPLED)
    reading = read(target, (2, 4), text, SAMPLED)
    ids = text.prompt_ids + text.answer_ids
    assert reading.features.shape == (len(ids) - 1, 2 * target.hidden_size)
    for place in (1, 7):
        known = torch.tensor(ids[: len(PROMPT) + place])
        alone = target.prefill(known, target.new_cache(), (2, 4))
        assert torch.allclose(reading.rows(0, len(known)), alone.features)
        assert torch.allclose(reading.log_probs[place - 1], alone.logits[0].log_softmax(-1))
    assert reading.log_probs.shape == (len(text.answer_ids) - 1, VOCAB)


# --- the verb ---


def test_the_verb_reports_tables_and_a_figure(verbs, target, tmp_path):
    policies = "policies=[autoregressive,chain,eagle1,{policy:eagle2,budget:6,top_k:3}]"
    status, out, errors = verbs("evaluate", policies, "depths=3", "run=here", "texts=texts.parquet")
    assert status == 0, errors
    result = json.loads(out.strip().splitlines()[-1])
    assert result["verb"] == "evaluate" and result["run"] == "here"
    assert len(result["n_alpha"]) == 3 and result["n_alpha"] == result["hit"]["1"]
    assert list(result["hit"]) == ["1", "2", "4", "8"]
    assert result["coverage"] == 1
    assert 0 < result["calibration_error"] < 1
    assert list(result["policies"]) == ["autoregressive", "chain", "eagle1", "eagle2(budget=6,top_k=3)"]
    assert result["policies"]["autoregressive"] == {"tau": 1, "tau_low": 1, "tau_high": 1, "passes": 22}
    prompts = [[7, 3, 50, 11, 3], [4, 5, 6, 7]]
    passes = [len(generate(target, guided(target), Chain(4), prompt, 12).passes) for prompt in prompts]
    chain = result["policies"]["chain"]
    assert chain["passes"] == sum(passes) and chain["tau"] == 22 / sum(passes)
    assert chain["tau_low"] <= chain["tau"] <= chain["tau_high"]

    folder = tmp_path / "here"
    about = json.loads((folder / "evaluation.json").read_text())
    assert {"commit", "device", "dtype", "config", "wall_s", "result"} <= about.keys()
    assert about["result"]["n_alpha"] == result["n_alpha"]
    assert (folder / "evaluation.png").read_bytes().startswith(b"\x89PNG")
    hits, bins, rows, texts = (
        pd.read_parquet(folder / f"{name}.parquet") for name in ("hits", "bins", "passes", "prompts")
    )
    assert len(hits) == 2 * 3 * 8
    accuracy = Accuracy.load(folder / "accuracy.json")
    assert accuracy.positions == [22, 20, 18]
    assert accuracy.by_depth()[:, 0].tolist() == pytest.approx(result["n_alpha"])
    assert accuracy.about["temperature"] == 0 and accuracy.about["texts"] == 2
    assert bins["count"].sum() == 8 * 2 * (11 + 10 + 9)
    assert rows.groupby("policy").emitted.sum().eq(22).all()
    assert texts.drafted.tolist() == [11, 11]
    assert "depth" in out and "n-α (95 %)" in out and "τ (95 %)" in out

    again = json.loads(verbs("evaluate", policies, "depths=3", "texts=texts.parquet")[1].strip().splitlines()[-1])
    assert {**again, "run": "here"} == result
    assert "run=here already holds evaluation.json" in verbs("evaluate", "run=here")[2]


def test_the_verb_makes_trees_of_its_own_accuracies_and_changes_policies_inside_others(verbs, tmp_path):
    assert verbs("evaluate", "policies=[]", "depths=3", "run=here", "texts=texts.parquet")[0] == 0
    policies = [f"{{policy:{name},accuracy:here/accuracy.json,budget:2}}" for name in ("medusa", "sequoia")]
    policies += ["{policy:depth_stop,policy.budget:3,policy.top_k:2}"]
    status, _, errors = verbs(
        "evaluate", f"policies=[{','.join(policies)}]", "depths=1", "texts=texts.parquet", "run=trees"
    )
    assert status == 0, errors
    rows = pd.read_parquet(tmp_path / "trees" / "passes.parquet")
    assert rows.groupby("policy", sort=False).n_nodes.max().tolist() == [2, 2, 3]
    assert "depth_stop(policy.budget=3,policy.top_k=2)" in rows.policy.unique()


def test_the_verb_without_policies_judges_the_drafter_alone(verbs, tmp_path):
    status, out, errors = verbs("evaluate", "policies=[]", "depths=2", "temperature=1")
    assert status == 0, errors
    result = json.loads(out.strip().splitlines()[-1])
    assert result["policies"] == {}
    assert result["n_alpha"] != result["hit"]["1"]
    assert (tmp_path / result["run"] / "texts.parquet").is_file()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["policies=[chian]"], "policies: unknown policy 'chian'"),
        (["policies=[{policy:eagle2,bugdet:3}]"], "policies: policy 'eagle2' has no field 'bugdet'"),
        (["policies=[{budget:3}]"], "policies: {'budget': 3} is neither"),
        (["policies=[{policy:eagle2,top_k:900}]"], "top_k=900"),
        (["policies=[{policy:depth_stop,policy.bugdet:3}]"], "policy 'depth_stop' has no field 'policy.bugdet'"),
        (["policies=[{policy:depth_stop,police.budget:3}]"], "policy 'depth_stop' has no field 'police.budget'"),
        (["policies=[{policy:depth_stop,policy.budget:0}]"], "budget=0"),
        (["policies=[{policy:medusa,accuracy:none.json}]"], "accuracy='none.json'"),
        (["policies=[{policy:sequoia,budget:null}]"], "budget=None and cost=None"),
        (["data=none", "~data.path", "+data.path=null"], "data: no prompts"),
        (["max_new_tokens=9000"], "context of 256"),
        (["max_new_tokens=1"], "max_new_tokens=1"),
        (["depths=0"], "depths=0"),
        (["temperature=-1"], "temperature=-1"),
        (["~drafter"], "drafter: none is given"),
        (["texts=prompts.txt"], "texts prompts.txt"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_verb_names_mistakes_before_any_work(verbs, tmp_path, arguments: list[str], named: str):
    status, _, errors = verbs("evaluate", *arguments)
    assert status not in (0, None)
    assert named in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "runs").exists()


def test_the_figure_of_a_single_prompt_has_no_interval():
    hits, bins = measure(Counting(), in_plain_words([10, 11, 13, 14, 20, 29]), 3)
    figure = plots.drafter_alone(analysis.hit_rates(hits), bins)
    left, right = figure.axes[:2]
    assert [line.get_label() for line in left.containers] == [
        "first candidate", "among the first 2", "among the first 4", "among the first 8",
    ]  # fmt: skip
    assert right.lines[1].get_ydata().tolist() == analysis.reliability(bins).hit_rate.tolist()
