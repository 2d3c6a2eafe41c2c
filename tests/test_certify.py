"""Exact certificates: the enumeration by hand, every rule in a short form, and what must not pass."""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest
import torch

from eagle_tree.accept import Match, Sequential, WithReplacement
from eagle_tree.accept.trials import normalised
from eagle_tree.certify import (
    SAMPLINGS,
    Certificate,
    Chooser,
    World,
    certificate,
    continued,
    drafts,
    options,
    outcomes,
)
from eagle_tree.mutants import MUTANTS
from eagle_tree.noise import Noise
from eagle_tree.simulate import NOISE_MUTANTS, ChiSquare, chi_square, text
from eagle_tree.tree import Drawn, Tree
from eagle_tree.warp import Law, Sampling

P, Q = [0.5, 0.3, 0.2], torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)


def star(*tokens: int) -> Tree:
    rows = torch.tensor([0] + [-1] * len(tokens))
    return Tree.from_lists([0, *tokens], [-1] + [0] * len(tokens), drawn=Drawn(Q.log()[None], rows))


def all_outcomes(rule, tree: Tree) -> dict[tuple[int, ...], float]:
    law = Law(torch.tensor([P] * (tree.n_nodes + 1), dtype=torch.float64).log(), Sampling(1.0))
    found: dict[tuple[int, ...], float] = {}
    for one in outcomes(lambda noise: rule.accept(tree, law, noise, 0), lambda node: node > 0):
        found[one.emitted] = found.get(one.emitted, 0.0) + one.probability
    return found


# --- the enumeration, by hand ---


def test_every_way_a_pass_can_go_is_found_with_its_probability():
    """Token 2 is accepted with .2/.6 = 1/3, then any bonus token; if not, (.3, .1, 0) / .4 follows."""
    expected = {(2, 0): 1 / 6, (2, 1): 1 / 10, (2, 2): 1 / 15, (0,): 1 / 2, (1,): 1 / 6}
    assert all_outcomes(WithReplacement(), star(2)) == pytest.approx(expected)


def test_two_trials_fork_twice():
    """Token 2 with 1/3; else token 1, of which .25 is left: min(1, .25/.2) = 1."""
    found = all_outcomes(WithReplacement(), star(2, 1))
    by_first = {x: sum(share for text, share in found.items() if text[0] == x) for x in range(3)}
    assert by_first == pytest.approx({0: 0, 1: 2 / 3, 2: 1 / 3})
    assert all(len(text) == 2 for text in found)


def test_the_match_rule_forks_at_the_draw_alone():
    assert all_outcomes(Match(), Tree.from_lists([0, 2], [-1, 0])) == pytest.approx(
        {(0,): 0.5, (1,): 0.3, (2, 0): 0.1, (2, 1): 0.06, (2, 2): 0.04}
    )


def test_one_variate_compared_twice_is_one_variate():
    """Below 1/2 and then not below 1/4: a quarter of the line."""
    chooser = Chooser({}, {(0, 0): (0.25, 0.5)})
    assert chooser.below(0, 0, torch.tensor(0.5)) and not chooser.below(0, 0, torch.tensor(0.25))
    assert chooser.thresholds == []
    assert not Chooser({}, {}).below(0, 0, torch.tensor(math.nan))


@pytest.mark.parametrize("kind", ["top_k", "with_replacement", "without_replacement", "hybrid"])
def test_all_drafts_together_have_probability_1(kind):
    assert sum(share for share, _, _ in options(kind, Q, 2)) == pytest.approx(1)
    assert sum(one.probability for one in drafts(World(3, 0, Sampling(1.0)), kind, (2, 1))) == pytest.approx(1)


def test_draws_without_replacement_are_weighted_by_what_is_left():
    """(2, 0): .6 · .2/.4; (0, 2): .2 · .6/.8."""
    found = {drawn: share for share, drawn, _ in options("without_replacement", Q, 2)}
    assert found[(2, 0)] == pytest.approx(0.3) and found[(0, 2)] == pytest.approx(0.15)


def test_the_yardsticks_law_is_the_one_that_is_decoded_with():
    """Computed token by token there, and by `warp.py` in decoding."""
    for sampling in SAMPLINGS:
        for seed in range(5):
            world = World(6, seed, sampling)
            decoded = Law(world.logits(())[None], sampling).log_probs(torch.tensor([0]))[0].exp()
            torch.testing.assert_close(world.p(()), decoded, rtol=0, atol=1e-12)


def test_continuations_multiply_the_targets_probabilities():
    world = World(3, 0, Sampling(1.0))
    law = dict(continued(world, (), 2))
    assert law[(2, 1)] == pytest.approx(float(world.p(())[2] * world.p((2,))[1]))
    assert sum(law.values()) == pytest.approx(1)


# --- what must not pass ---


def test_a_certificate_without_a_number_does_not_hold():
    sound = Certificate(0.0, 0.0, 0.0, 1.0, 1.0, 1)
    assert sound.holds
    assert not Certificate(math.nan, 0.0, 0.0, 1.0, 1.0, 1).holds
    assert not Certificate(0.0, 0.0, 0.0, 1.0, 1.1, 1).holds
    assert not Certificate(0.0, 0.0, 1e-9, 1.0, math.nan, 1).holds


def test_a_reach_that_is_not_how_often_a_node_is_accepted_does_not_hold():
    class Forgetful(Sequential):
        def edges(self, tree, node_log_prob, law):
            return torch.ones_like(super().edges(tree, node_log_prob, law))

    found = certificate(Forgetful(), "top_k", World(3, 0, Sampling(1.0)), (2,))
    assert found.total_variation < 1e-10
    assert found.reach_error > 0.1 and not found.holds


def test_there_are_mutants_for_every_mistake_of_the_field():
    assert len(MUTANTS) + len(NOISE_MUTANTS) >= 10
    assert len({mutant.mistake for mutant in (*MUTANTS, *NOISE_MUTANTS)}) == len(MUTANTS) + len(NOISE_MUTANTS)


def test_the_world_of_every_noise_mutant_is_decoded_rightly_by_the_right_noise():
    for mutant in NOISE_MUTANTS:
        assert chi_square(mutant.rule, mutant.kind, mutant.world, mutant.shape, count=200).passes


def test_noise_mutants_are_as_far_off_as_the_power_is_stated_for():
    """By count: half the sum of what the texts differ from the target's law."""
    for mutant in NOISE_MUTANTS:
        law = dict(continued(mutant.world, (), 2))
        drawn = Counter(
            text(mutant.rule, mutant.kind, mutant.world, mutant.shape, mutant.rows(Noise(1, sequence), 2), 2)
            for sequence in range(400)
        )
        distance = sum(abs(drawn[one] / 400 - share) for one, share in law.items()) / 2
        assert distance == pytest.approx(mutant.distance, abs=0.07)  # some three standard errors


def test_the_power_of_a_test_grows_with_texts_and_distance():
    """1000 texts, 8 degrees of freedom: 0.1 in total variation is at least 40 in the statistic."""
    test = ChiSquare(5.0, 31.8, 8, 1000)
    assert 0.8 < test.power(0.1) < test.power(0.15)
    assert ChiSquare(5.0, 31.8, 8, 100).power(0.1) < 0.05


# --- the verb, in its short form ---


def result(status: int, out: str) -> dict:
    return json.loads(out.strip().splitlines()[-1])


def test_every_lossless_rule_is_certified_and_every_mistake_caught(eagle_tree):
    status, out, errors = eagle_tree("certify", "quick=true", "noise_texts=300")
    assert status == 0, out + errors
    found = result(status, out)
    assert found["passed"]
    assert found["caught"] == len(found["mutants"]) == len(MUTANTS) + len(NOISE_MUTANTS)
    lossy = [row["accept"] for row in found["rules"] if not row["lossless"]]
    assert lossy == ["typical"] and "LOSSY, as stated" in out
    assert all(row["holds"] for row in found["rules"] if row["lossless"])
    certified = {row["accept"] for row in found["rules"] if row["lossless"]}
    assert {"match", "coupled", "sequential", "with_replacement", "without_replacement"} < certified
    assert {"hybrid", "rejection", "block"} < certified


def test_a_rule_that_is_wrong_fails_the_verb(eagle_tree, monkeypatch):
    wrong = lambda rule, residual, q, token: normalised(residual + q, residual)  # noqa: E731
    monkeypatch.setattr(WithReplacement, "left", wrong)
    status, out, _ = eagle_tree(
        "certify", "quick=true", "noise_texts=0", "mutants=false", "rules=[with_replacement]"
    )  # fmt: skip
    assert status == 1
    assert "FAILED" in out
    assert not result(status, out)["passed"]


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("rules=[best]", "rules=['best'] must be a list of names in conf/accept: block, coupled"),
        ("rules=[]", "rules=[] must be a list of names"),
        ("quick=2", "quick=2 must be true or false"),
        ("noise_texts=-1", "noise_texts=-1 must be an integer >= 0"),
        ("noise_texts=many", "noise_texts='many' must be an integer >= 0"),
    ],
)
def test_a_mistake_is_named_before_any_work(eagle_tree, override, complaint):
    status, _, errors = eagle_tree("certify", override)
    assert status == 1
    assert complaint in errors and "Traceback" not in errors
