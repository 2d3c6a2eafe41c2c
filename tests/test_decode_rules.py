"""Decoding with every acceptance rule and every kind of draft on a tiny target: text, meters, transfers, refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from unittest import mock

import pytest
import torch
from conftest import VOCAB, build_drafter
from test_decode import PROMPT, Oracle
from transfers import transfers_to_host

from eagle_tree.accept import (
    BlockVerification,
    ChainRejection,
    Coupled,
    Hybrid,
    Match,
    Sequential,
    Typical,
    WithoutReplacement,
    WithReplacement,
)
from eagle_tree.decode import BrokenDraft, generate
from eagle_tree.drafter.medusa import MedusaConfig, MedusaDrafter, MedusaHeads
from eagle_tree.draw import candidates
from eagle_tree.policy import (
    Autoregressive,
    BestFirst,
    Chain,
    ConfidenceStop,
    Eagle2,
    EntropyStop,
    OptTree,
    Static,
    Talon,
    specinfer,
)
from eagle_tree.policy.anticipation import looks_ahead
from eagle_tree.tree import Draft, Draw, Frontier
from eagle_tree.warp import Sampling

TREE = specinfer([3, 2, 1])
SAMPLED_RULES = [
    (WithReplacement(), TREE),
    (WithoutReplacement(), TREE),
    (Hybrid(), TREE),
    (ChainRejection(), Chain(4)),
    (BlockVerification(), Chain(4)),
]
every_sampled_rule = pytest.mark.parametrize(
    ("rule", "policy"), SAMPLED_RULES, ids=[type(rule).__name__ for rule, _ in SAMPLED_RULES]
)


class Close(Oracle):
    """Draws from the target's own law, flattened: a good drafter whose q is not p."""

    def expand(self, growing, frontier, noise) -> Draft:
        flat = (0.7 * self.log_q(growing, frontier)).log_softmax(-1)
        return candidates(flat, growing, frontier, noise)


@pytest.fixture(scope="module")
def close(target):
    return Close(target)


def medusa(target) -> MedusaDrafter:
    heads = MedusaHeads.random(MedusaConfig(target.hidden_size, VOCAB, 3, own_lm_heads=True)).to(target.dtype)
    return MedusaDrafter(heads, target.n_layers)


# --- drafts that are drawn ---


@every_sampled_rule
def test_a_pass_over_drawn_children_costs_one_transfer_to_the_host(target, rule, policy):
    for drafter in (build_drafter(target), build_drafter(target, draft_vocab=20), medusa(target)):
        assert_one_transfer_a_pass(target, drafter, policy, rule)


@pytest.mark.parametrize("rule", [Coupled(), Sequential(), Typical()], ids=lambda rule: type(rule).__name__)
def test_other_rules_cost_one_transfer_as_well(target, rule):
    assert_one_transfer_a_pass(target, build_drafter(target), Eagle2(8, 3, 2), rule)


def assert_one_transfer_a_pass(target, drafter, policy, rule) -> None:
    marks: list[int] = []
    with transfers_to_host() as log:
        generate(target, drafter, policy, PROMPT, 6, 1.0, rule=rule, callback=lambda *_: marks.append(len(log)))
    assert len(marks) > 1
    assert all(log[start:end] == ["cpu"] for start, end in pairwise(marks))


@every_sampled_rule
def test_both_meters_are_zero_in_the_mean_for_drawn_children(target, close, rule, policy):
    """Some 60 passes at T = 1 of a drafter that is often right."""
    rows = []
    for sequence in range(3):
        result = generate(target, close, policy, PROMPT, 40, 1.0, rule=rule, sequence=sequence)
        rows += [one.row for one in result.passes]
        for one in result.passes:
            assert one.row.expected_target == pytest.approx(1 + expected_accepted(one), abs=1e-6)
    assert sum(row.accepted for row in rows) > 20
    for meter in ("acceptance_meter", "surprisal_meter"):
        values = torch.tensor([getattr(row, meter) for row in rows])
        assert abs(values.mean()) < 3 * values.std() / math.sqrt(len(rows))


def expected_accepted(one) -> float:
    return one.row.accepted - one.row.acceptance_meter


@every_sampled_rule
def test_the_same_seed_gives_the_same_text_and_another_seed_another(target, close, rule, policy):
    texts = [
        generate(target, close, policy, PROMPT, 12, 1.0, rule=rule, seed=seed, record_nodes=record).tokens
        for seed, record in ((0, True), (0, False), (1, False))
    ]
    assert texts[0] == texts[1] != texts[2]


@every_sampled_rule
def test_at_temperature_0_a_drawn_draft_gives_the_greedy_text(target, close, rule, policy):
    """The drafter needs a temperature of its own; then whatever is drawn, the text is the target's."""
    greedy = generate(target, None, Autoregressive(), PROMPT, 12).tokens
    result = generate(target, close, policy, PROMPT, 12, rule=rule, draw=Draw(rule.default_draw.kind, 1.0))
    assert result.tokens == greedy
    assert all(one.row.acceptance_meter == 0 for one in result.passes)


def test_the_match_rule_takes_drawn_children_as_they_are(target, close):
    """Its text does not depend on the tree, equal siblings and pruning included."""
    expected = generate(target, None, Autoregressive(), PROMPT, 16, 1.0).tokens
    for kind in ("with_replacement", "without_replacement", "hybrid"):
        result = generate(target, close, Eagle2(6, 3, 2), PROMPT, 16, 1.0, rule=Match(), draw=Draw(kind))
        assert result.tokens == expected


# --- coupled drafts ---


@pytest.mark.parametrize("sampling", [Sampling(0.6), Sampling(1.0), Sampling(1.2, top_p=0.9)], ids=repr)
@pytest.mark.parametrize("policy", [Chain(3), Eagle2(8, 3, 2), BestFirst(6, 2, 3), TREE], ids=repr)
def test_coupled_trees_emit_the_text_of_autoregressive_decoding(target, close, sampling, policy):
    for seed in range(2):
        expected = generate(target, None, Autoregressive(), PROMPT, 14, sampling=sampling, seed=seed).tokens
        drafters = [build_drafter(target, draft_vocab=20), medusa(target)]
        drafters += [] if isinstance(policy, BestFirst) else [close]  # the test's own expands one depth at a time
        for drafter in drafters:
            result = generate(target, drafter, policy, PROMPT, 14, sampling=sampling, seed=seed, rule=Coupled())
            assert result.tokens == expected


def test_coupled_drafts_of_a_good_drafter_are_accepted_more_often(target, close):
    """At T = 1.5 the law is wide: the drafter's most likely tokens are often wrong, its coupled ones hardly ever."""

    def tau(rule) -> float:
        runs = [generate(target, close, Eagle2(6, 3, 2), PROMPT, 40, 1.5, rule=rule, seed=seed) for seed in range(3)]
        return sum(len(run.tokens) - 1 for run in runs) / sum(len(run.passes) for run in runs)

    assert tau(Coupled()) > 1.3 * tau(Match())


def test_the_acceptance_meter_is_silent_for_coupled_drafts_and_the_surprisal_meter_is_not(target, close):
    result = generate(target, close, Eagle2(6, 3, 2), PROMPT, 20, 1.0, rule=Coupled())
    assert all(math.isnan(one.row.expected_target) for one in result.passes)
    assert all(math.isfinite(one.row.surprisal_meter) for one in result.passes)
    greedy = generate(target, close, Eagle2(6, 3, 2), PROMPT, 20, rule=Coupled())
    assert all(one.row.acceptance_meter == 0 for one in greedy.passes)


# --- pairs that are refused ---


@pytest.mark.parametrize(
    ("rule", "draw", "policy", "complaint"),
    [
        (WithReplacement(), Draw("top_k"), TREE, r"min\(1, p/q\) emits them too often \(Leviathan et al., arXiv 2211"),
        (WithReplacement(), Draw("without_replacement"), TREE, "without those before it .Sequoia, arXiv 2402.12374"),
        (WithoutReplacement(), Draw("with_replacement"), TREE, "the same law q each, and may be equal .SpecInfer"),
        (WithoutReplacement(), Draw("coupled"), TREE, r"only accept=coupled draws it so \(Daliri et al., arXiv 2408"),
        (Sequential(), Draw("hybrid"), TREE, "in a hybrid draft one token is drawn, .*Hu et al., arXiv 2502.18779"),
        (Match(), Draw("coupled"), TREE, "only accept=coupled"),
        (Coupled(), Draw("top_k"), TREE, "accept=Coupled cannot verify draw.kind=top_k"),
        (ChainRejection(), None, TREE, "one child a node .*; Static asks for 3 candidates a node"),
        (BlockVerification(), None, Eagle2(4, 2, 1), "Sun et al., arXiv 2403.10444.; Eagle2 asks for 2 candidates"),
        (Hybrid(), None, Eagle2(4, 3, 1), "Eagle2 keeps a node or not by .*SpecInfer, arXiv 2305.09781"),
    ],
)  # fmt: skip
def test_a_pair_that_would_be_wrong_is_refused_with_its_reason_and_its_paper(target, rule, draw, policy, complaint):
    work = AssertionError("the target was run")
    with mock.patch.object(target.model, "forward", side_effect=work), pytest.raises(ValueError, match=complaint):
        generate(target, build_drafter(target), policy, PROMPT, 4, 1.0, rule=rule, draw=draw)


def test_a_drawn_draft_at_temperature_0_is_refused(target):
    with pytest.raises(ValueError, match="draw=with_replacement at temperature=0 has no distribution to draw from"):
        generate(target, build_drafter(target), TREE, PROMPT, 4, 0.0, rule=WithReplacement())


def test_a_drafter_that_does_not_draw_is_named(target, close):
    with pytest.raises(ValueError, match="Oracle does not draw its candidates, as"):
        generate(target, Oracle(target), TREE, PROMPT, 4, 1.0, rule=WithReplacement())


# --- policies that look ahead ---


@pytest.mark.parametrize(
    "policy",
    [
        Chain(3),
        TREE,
        Autoregressive(),
        ConfidenceStop(specinfer([2, 1, 1]), 3, 2),
        EntropyStop(Chain(5), threshold=0.5),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_trees_of_fixed_shape_do_not_look_ahead_and_may_stop_at_what_they_have_seen(policy):
    assert looks_ahead(policy) is None


@pytest.mark.parametrize(
    "policy",
    [
        Eagle2(4, 3, 2),
        Eagle2(4, 3, 2, value=False),
        Eagle2(6, 3, 2, rerank=False),
        OptTree(4, 0.0, 3, depth=3),
        BestFirst(4, 2, 3),
        Talon(6, 3, 0.3, 3),
    ],
    ids=repr,
)
def test_policies_that_keep_the_best_nodes_look_ahead(policy):
    assert "its own drawn token" in looks_ahead(policy) or "tokens drawn after it" in looks_ahead(policy)


class FirstOfTwo(Chain):
    """Draws two children of the root and keeps the second only if the first one's confidence is low: no look ahead."""

    def __init__(self, own: bool):
        super().__init__(1)
        object.__setattr__(self, "own", own)

    def max_candidates(self):
        return 2

    def frontier(self, growing, draft):
        return None if growing.levels else Frontier(growing.token.new_zeros(1), 2)

    def select(self, growing):
        judged = growing.log_conf[2 if self.own else 1]
        return torch.tensor([1, 2]) if judged < -0.7 else torch.tensor([1])


def test_a_later_sibling_may_depend_on_an_earlier_one_but_not_on_itself():
    assert looks_ahead(FirstOfTwo(own=False)) is None
    assert looks_ahead(FirstOfTwo(own=True)) == "keeps a node or not by its own drawn token"


def test_the_checker_teaches_a_learning_policy_nothing():
    class Counting(Chain):
        def __init__(self):
            super().__init__(2)
            object.__setattr__(self, "passes", [])

        def select(self, growing):
            self.passes.append(growing)
            return super().select(growing)

    policy = Counting()
    assert looks_ahead(policy) is None
    assert policy.passes == []


# --- broken drafts ---


class Spoiled(Close):
    """Says something else about what it drew."""

    def __init__(self, target, spoil):
        super().__init__(target)
        self.spoil = spoil

    def expand(self, growing, frontier, noise):
        drafted = super().expand(growing, frontier, noise)
        return replace(drafted, log_q=self.spoil(drafted.log_q.clone(), drafted.token))


@every_sampled_rule
@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda log_q, token: log_q - 0.1, "the drafter's probabilities do not sum to 1"),
        (lambda log_q, token: log_q * math.nan, "the drafter's probabilities do not sum to 1"),
        (lambda log_q, token: log_q.scatter(1, token[:, :1], -math.inf).log_softmax(-1), "no probability to a token"),
    ],
    ids=["unnormalised", "NaN", "q of zero at a drawn token"],
)
def test_a_drafter_whose_q_is_none_is_named_and_nothing_is_emitted(target, rule, policy, spoil, complaint):
    delivered = []
    with pytest.raises(BrokenDraft, match=f"position {len(PROMPT) + 1}: .*{complaint}"):
        generate(
            target, Spoiled(target, spoil), policy, PROMPT, 8, 1.0, rule=rule,
            callback=lambda tokens, one: delivered.append(one),
        )  # fmt: skip
    assert delivered == [None]  # prefill's own token alone


def test_a_policy_that_keeps_a_later_draw_without_an_earlier_one_is_named(target, close):
    with pytest.raises(BrokenDraft, match="the policy kept a later draw without one before it"):
        generate(target, close, Static([(1,)]), PROMPT, 8, 1.0, rule=WithoutReplacement())
