"""The rules that try children one after the other, block verification and typical acceptance, by hand.

Three tokens. At the root the target's law is (.5, .3, .2) and the drafter's (.2, .2, .6) unless a test says otherwise.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from eagle_tree import accept
from eagle_tree.accept import (
    Accepted,
    BlockVerification,
    ChainRejection,
    Coupled,
    Hybrid,
    Match,
    Rule,
    Sequential,
    Typical,
    WithoutReplacement,
    WithReplacement,
)
from eagle_tree.accept.base import IMPOSSIBLE, OUT_OF_ORDER, UNNORMALISED
from eagle_tree.noise import GumbelRows, Noise
from eagle_tree.tree import DRAWS, Drawn, Tree
from eagle_tree.warp import Law, Sampling

P, Q = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]
EVEN = [1 / 3] * 3
ALMOST = 1 - 1e-9
PLAIN = Sampling(1.0)
RULES = [getattr(accept, name)() for name in accept.__all__ if isinstance(getattr(accept, name), type)
         and issubclass(getattr(accept, name), Rule) and name != "Rule"]  # fmt: skip


class Told:
    """Noise that is told: the uniform variate of every trial, and a token to be preferred if the law allows it."""

    def __init__(self, *uniform: float, token: int = 0):
        self.uniform, self.token, self.asked = uniform, token, 0

    def for_pass(self, position: int) -> Told:
        return self

    def draw(self, level: int, scores: Tensor) -> Tensor:
        return (scores + 1e6 * torch.nn.functional.one_hot(torch.tensor([self.token]), scores.shape[-1])).argmax(-1)

    def draw_at(self, level: Tensor, levels: int, scores: Tensor) -> Tensor:
        return self.draw(0, scores)

    def below(self, level: int, index: int, threshold: Tensor) -> Tensor:
        if not threshold > 0:  # no trial: there is no child, or one was accepted before
            return torch.tensor(False)
        self.asked += 1
        return self.uniform[self.asked - 1] < threshold


def star(*tokens: int, q: list[float] | None = Q, **fields) -> Tree:
    """The root and its children, drawn from q (None: not drawn)."""
    rows = torch.tensor([0] + [-1] * len(tokens))
    drawn = None if q is None else Drawn(torch.tensor([q], dtype=torch.float64).log(), rows, **fields)
    return Tree.from_lists([0, *tokens], [-1] + [0] * len(tokens), drawn=drawn)


def chain(tokens: list[int], q: list[list[float]]) -> Tree:
    rows = torch.tensor([*range(len(q)), -1])
    return Tree.from_lists(
        [0, *tokens],
        range(-1, len(tokens)),
        drawn=Drawn(torch.tensor(q, dtype=torch.float64).log(), rows),
    )


def law(tree: Tree, *rows: list[float], sampling: Sampling = PLAIN) -> Law:
    """The given laws at the first nodes, an even one at the others."""
    rows = [*rows, *[EVEN] * (tree.n_nodes + 1 - len(rows))]
    return Law(torch.tensor(rows, dtype=torch.float64).log(), sampling)


def walk(rule: Rule, tree: Tree, noise: Told, *rows: list[float], sampling: Sampling = PLAIN) -> Accepted:
    return rule.accept(tree, law(tree, *(rows or [P]), sampling=sampling), noise, 0)


def emitted(walk: Accepted) -> list[int]:
    return walk.emitted[: walk.n_accepted + 1].tolist()


def reach(rule: Rule, tree: Tree, *rows: list[float]) -> list[float]:
    known = law(tree, *(rows or [P]))
    return rule.reach(tree, known.node_log_prob(tree), known).tolist()


# --- drawn with replacement: accept with min(1, r/q), r = norm((r - q)₊) ---


def test_target_always_accepts_what_it_likes_better_than_the_drafter():
    """Token 0: min(1, .5/.2) = 1."""
    for rule in (WithReplacement(), WithoutReplacement(), ChainRejection(), BlockVerification()):
        assert emitted(walk(rule, star(0), Told(ALMOST, token=2))) == [0, 2]
        assert reach(rule, star(0)) == [1, 1]


def test_target_never_accepts_what_it_excludes():
    """Token 2 has probability 0: whatever the variate, another token is emitted."""
    for rule in (WithReplacement(), WithoutReplacement(), ChainRejection(), BlockVerification()):
        result = walk(rule, star(2), Told(1e-9, token=2), [0.5, 0.5, 0.0])
        assert emitted(result) in ([0], [1])
        assert result.n_accepted == 0


@pytest.mark.parametrize(("uniform", "expected"), [(0.33, [2, 1]), (0.34, [1])])
def test_target_sometimes_accepts_what_the_drafter_overrates(uniform, expected):
    """Token 2: .2/.6 = 1/3."""
    for rule in (WithReplacement(), WithoutReplacement(), ChainRejection(), BlockVerification()):
        assert emitted(walk(rule, star(2), Told(uniform, token=1))) == expected
        assert reach(rule, star(2)) == pytest.approx([1, 1 / 3])


def test_after_a_rejection_the_residual_is_what_p_has_above_q():
    """(p - q)₊ = (.3, .1, 0): token 2 cannot follow, and an equal sibling cannot be accepted."""
    result = walk(WithReplacement(), star(2, 2), Told(0.5, token=2))
    assert emitted(result) == [0]
    assert reach(WithReplacement(), star(2, 2)) == pytest.approx([1, 1 / 3, 0])


def test_a_second_draw_with_replacement_meets_the_residual_over_the_same_q():
    """r = (.75, .25, 0) and q(1) = .2: accepted with certainty once token 2 was rejected."""
    assert emitted(walk(WithReplacement(), star(2, 1), Told(0.5, ALMOST))) == [1, 0]
    assert reach(WithReplacement(), star(2, 1)) == pytest.approx([1, 1 / 3, 2 / 3])


@pytest.mark.parametrize(("uniform", "expected"), [(0.49, [1, 0]), (0.51, [0])])
def test_a_second_draw_without_replacement_meets_q_without_the_first(uniform, expected):
    """q without token 2 is (.5, .5, 0), so token 1 is accepted with .25/.5; then (1, 0, 0) is left."""
    assert emitted(walk(WithoutReplacement(), star(2, 1), Told(0.5, uniform))) == expected
    assert reach(WithoutReplacement(), star(2, 1)) == pytest.approx([1, 1 / 3, 1 / 3])


def test_the_first_accepted_child_is_taken_and_later_ones_are_not_tried():
    noise = Told(0.2, 0.0)
    result = walk(WithReplacement(), star(2, 1), noise)
    assert emitted(result) == [2, 0]
    assert noise.asked == 1
    assert result.accepted.tolist() == [True, True, False]
    assert result.tried.tolist() == [False, True, True]


def test_an_accepted_child_is_followed_to_its_children():
    """0, then 1: both liked better than the drafter does; behind the leaf the bonus token."""
    tree = chain([0, 1], [Q, [0.1, 0.1, 0.8]])
    result = walk(WithReplacement(), tree, Told(ALMOST, ALMOST, token=2), P, P, P)
    assert emitted(result) == [0, 1, 2]
    assert result.path.tolist() == [0, 1, 2]


# --- most likely tokens, tried as draws from point masses ---


def test_the_sequential_rule_accepts_a_child_with_what_is_left_for_it():
    """Token 2 with .2, then token 0 with .5/.8: in all .2 and .5, as the match rule does."""
    tree = star(2, 0, q=None)
    assert emitted(walk(Sequential(), tree, Told(0.21, 0.62))) == [0, 0]
    assert emitted(walk(Sequential(), tree, Told(0.21, 0.63, token=2))) == [1]
    assert reach(Sequential(), tree) == pytest.approx([1, 0.2, 0.5])
    assert reach(Sequential(), tree) == pytest.approx(reach(Match(), tree))


# --- hybrid: token 2 is the most likely one, the draw is from (.5, .5, 0) ---

REST = [0.5, 0.5, 0.0]


@pytest.mark.parametrize(("uniform", "path"), [(0.59, [0, 1]), (0.61, [0, 2])])
def test_the_hybrids_draw_is_tried_first_and_then_the_likely_token_is_matched(uniform, path):
    """Token 1: .3/.5 = .6; rejected, (p - q_rest)₊ = (0, 0, .2) leaves token 2, which is a child."""
    result = walk(Hybrid(), star(1, 2, q=REST), Told(uniform, token=0))
    assert result.path[: result.n_accepted + 1].tolist() == path
    assert reach(Hybrid(), star(1, 2, q=REST)) == pytest.approx([1, 0.6, 0.4])


def test_the_hybrid_accepts_p_of_the_likely_tokens_and_the_overlap_of_the_rest():
    """p(S) + Σ_rest min(p, q_rest) = .2 + (.5 + .3); averaged over the draw, reach says the same."""
    mean = sum(REST[x] * sum(reach(Hybrid(), star(x, 2, q=REST))[1:]) for x in (0, 1))
    assert mean == pytest.approx(1.0)


# --- block verification ---


def test_a_block_is_accepted_where_its_first_token_alone_would_not_be():
    """Tokens 2, 2: w = min(1, 1/3·.8/.4) = 2/3 for both, where trials one by one accept both with 1/3·1."""
    tree, laws = chain([2, 2], [Q, [0.3, 0.3, 0.4]]), (P, [0.1, 0.1, 0.8], EVEN)
    assert emitted(walk(BlockVerification(), tree, Told(0.66, token=1), *laws)) == [2, 2, 1]
    assert emitted(walk(ChainRejection(), tree, Told(0.66, token=1), *laws)) == [1]
    assert reach(BlockVerification(), tree, *laws) == pytest.approx([1, 2 / 3, 2 / 3])
    assert reach(ChainRejection(), tree, *laws) == pytest.approx([1, 1 / 3, 1 / 3])


def test_a_shorter_block_is_tried_on_its_own():
    """w_1 = 1/3, then (w_1·p_1 - q_1)₊ = (.3/3 - .05, 0, 0)₊ = .05: h_1 = .05 / (.05 + 2/3)."""
    tree, laws = chain([2, 1], [Q, [0.05, 0.45, 0.5]]), (P, [0.3, 0.3, 0.4], EVEN)
    h = [0.05 / (0.05 + 2 / 3), 1 / 3 * 0.3 / 0.45]
    assert emitted(walk(BlockVerification(), tree, Told(h[0] - 0.01, h[1] + 0.01, token=1), *laws)) == [2, 0]
    assert emitted(walk(BlockVerification(), tree, Told(h[0] + 0.01, h[1] + 0.01, token=1), *laws)) == [1]
    assert emitted(walk(BlockVerification(), tree, Told(h[0] + 0.01, h[1] - 0.01, token=1), *laws)) == [2, 1, 1]
    assert reach(BlockVerification(), tree, *laws) == pytest.approx([1, 1 - (1 - h[0]) * (1 - h[1]), h[1]])


def test_block_verification_refuses_a_tree():
    with pytest.raises(ValueError, match="a node of this tree may have more than one child"):
        walk(BlockVerification(), star(0, 1), Told(0.5, 0.5))


# --- typical acceptance ---


def test_typical_acceptance_takes_the_longest_path_of_tokens_that_are_not_too_unlikely():
    """Of (.9, .06, .04) only token 0 is above ε = .09; of (.5, .3, .2) all are."""
    tree = Tree.from_lists([0, 1, 0, 2, 1], [-1, 0, 0, 2, 3])
    result = walk(Typical(), tree, Told(token=1), [0.9, 0.06, 0.04], EVEN, P, [0.9, 0.06, 0.04])
    assert result.path.tolist() == [0, 2, 3, -1]
    assert emitted(result) == [0, 2, 0]  # token 1, .06, is not drawn there either
    assert reach(Typical(), tree, [0.9, 0.06, 0.04], EVEN, P, [0.9, 0.06, 0.04]) == [1, 0, 1, 1, 0]


def test_typical_acceptances_threshold_falls_with_entropy():
    """An even law over 3 tokens: H = ln 3, α·exp(-H) = .1; with α = .9 it is .3, below 1/3; ε = .95 does not matter."""
    assert Typical(0.95, 0.3).threshold(torch.tensor([EVEN])).item() == pytest.approx(0.1)
    assert walk(Typical(0.95, 0.9), star(2, q=None), Told(), EVEN).n_accepted == 1
    assert walk(Typical(0.95, 0.99), star(2, q=None), Told(), [0.4, 0.3, 0.3]).n_accepted == 0


def test_of_equally_long_paths_the_more_likely_one_is_taken():
    assert walk(Typical(), star(2, 0, q=None), Told()).path.tolist() == [0, 2]


@pytest.mark.parametrize("value", [-0.1, 1.0, "x", True, math.nan])
def test_a_threshold_that_is_none_is_refused(value):
    with pytest.raises(ValueError, match="epsilon="):
        Typical(epsilon=value)


def test_only_typical_acceptance_is_lossy():
    assert [type(rule).__name__ for rule in RULES if not rule.lossless] == ["Typical"]


# --- temperature 0 ---


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_at_temperature_0_every_rule_accepts_the_largest_logits_token_alone(rule):
    sampling = Sampling(0.0)
    for token, expected in ((0, [0, 2]), (1, [0])):
        tree = star(token, q=EVEN if rule.reads_q else None)
        result = walk(rule, tree, Told(0.999, token=1), P, [0.1, 0.2, 0.7], sampling=sampling)
        assert emitted(result) == expected
        known = law(tree, P, [0.1, 0.2, 0.7], sampling=sampling)
        assert rule.reach(tree, known.node_log_prob(tree), known).sum() == result.n_accepted + 1


# --- what cannot be ---


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.reads_q], ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize(
    ("q", "fields", "fault"),
    [
        ([0.1, 0.1, 0.3], {}, UNNORMALISED),
        ([math.nan, 0.5, 0.5], {}, UNNORMALISED),
        ([0.0, 0.0, 0.0], {}, UNNORMALISED),
        ([0.0, 0.4, 0.6], {}, IMPOSSIBLE),
        (Q, {"in_order": torch.tensor(False)}, OUT_OF_ORDER),
        (Q, {"in_order": torch.tensor(True)}, 0),
    ],
    ids=str,
)
def test_a_draft_that_is_none_is_flagged(rule, q, fields, fault):
    assert walk(rule, star(0, q=q, **fields), Told(0.5, 0.5)).draft_fault == fault


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.reads_q], ids=lambda rule: type(rule).__name__)
def test_a_rule_that_reads_q_refuses_a_tree_without_it(rule):
    with pytest.raises(ValueError, match="this rule needs their distribution q"):
        walk(rule, star(0, q=None), Told(0.5))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("row", [[math.nan, 0.0, 0.0], [math.inf, 0.0, 0.0], [-math.inf] * 3], ids=str)
def test_broken_logits_are_flagged_by_every_rule(rule, row):
    tree = star(0, q=Q if rule.reads_q else None)
    logits = torch.tensor([row, [0.0, 0.0, 0.0]], dtype=torch.float64)
    for sampling in (Sampling(0.0), Sampling(1.0), Sampling(0.7, top_p=0.9)):
        assert rule.accept(tree, Law(logits, sampling), GumbelRows(Noise(0, 0), 3), 0).broken


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_a_tree_without_draft_nodes_emits_the_token_that_the_match_rule_would(rule):
    """One noise for the target's tokens: decoding without a drafter is the same under every lossless rule."""
    tree, noise = Tree.from_lists([0], [-1]), GumbelRows(Noise(3, "a"), 3)
    if rule.lossless:
        assert emitted(rule.accept(tree, law(tree, P), noise, 9)) == emitted(
            Match().accept(tree, law(tree, P), noise, 9)
        )


def test_every_kind_of_draft_has_a_rule_and_every_rule_a_kind():
    assert {kind for rule in RULES for kind in rule.draws} == set(DRAWS)
    assert Coupled().draws == ("coupled",)  # what looked at the noise is for it alone
    assert math.isnan(reach(Coupled(), star(0, q=None))[1])
