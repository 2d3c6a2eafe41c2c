"""Rules side by side on one node: the closed forms, and what a real drafter brings along."""

from __future__ import annotations

import pytest
import torch
from conftest import VOCAB, build_drafter
from test_decode import PROMPT

from eagle_tree.accept import Coupled, Hybrid, Match
from eagle_tree.compare import RULES, Position, accepted, compare, most_accepting, positions
from eagle_tree.decode import generate
from eagle_tree.noise import GumbelRows, Noise
from eagle_tree.policy import Autoregressive
from eagle_tree.tree import Draw, Drawn, Tree
from eagle_tree.warp import Law, Sampling

PLAIN = Sampling(1.0)


def random_position(size: int = 200) -> Position:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(size, generator=generator)
    log_q = (logits + torch.randn(size, generator=generator)).log_softmax(-1)
    return Position(logits, log_q, None, 7)


def rows(seed: int = 0, size: int = 200) -> GumbelRows:
    return GumbelRows(Noise(seed, "a"), size)


def test_the_most_likely_tokens_are_matched_with_their_probability():
    position = random_position()
    p = position.logits.double().softmax(-1)
    value = accepted(RULES["match"], position, 4, PLAIN, Draw("top_k"), rows())
    assert value == pytest.approx(p[position.log_q.topk(4).indices].sum().item(), abs=1e-6)


def test_the_hybrids_acceptance_is_its_closed_form_on_a_large_vocabulary():
    """p(S) + Σ_rest min(p, q_rest), to 1e-9, from `reach` of every tree that the draw can make."""
    position, k = random_position(), 4
    p, q = position.logits.double().softmax(-1), position.log_q.double().exp()
    likely = q.topk(k - 1).indices
    rest = q.index_fill(0, likely, 0.0)
    rest = rest / rest.sum()
    mean = 0.0
    for x in rest.nonzero().flatten().tolist():
        drawn = Drawn(rest.log()[None], torch.tensor([0] + [-1] * k))
        tree = Tree.from_lists([0, x, *likely.tolist()], [-1] + [0] * k, drawn=drawn)
        law = Law(position.logits.double().expand(k + 1, -1), PLAIN)
        mean += rest[x].item() * Hybrid().reach(tree, law.node_log_prob(tree), law)[1:].sum().item()
    expected = p[likely].sum() + torch.minimum(p, rest).index_fill(0, likely, 0.0).sum()
    assert mean == pytest.approx(expected.item(), abs=1e-9)


def test_a_drafter_that_is_the_target_is_always_accepted_but_by_match():
    position = random_position()
    same = Position(position.logits, position.logits.log_softmax(-1), None, 7)
    for name, rule in RULES.items():
        value = accepted(rule, same, 1, PLAIN, rule.default_draw.at(1.0), rows())
        if name == "match":
            assert value < 0.9
        else:
            assert value == pytest.approx(1, abs=1e-5)


def test_every_position_of_an_answer_is_compared(target):
    """An untrained head: all rules accept little, and every number is a share."""
    answer = generate(target, None, Autoregressive(), PROMPT, 5, 1.0).tokens
    drafter = build_drafter(target, draft_vocab=20)
    found = list(positions(target, drafter, PROMPT, answer))
    assert [one.index for one in found] == [len(PROMPT) + 1 + step for step in range(4)]
    assert all(one.log_q.shape == (20,) and one.logits.shape == (VOCAB,) for one in found)
    table = compare(iter(found), (0.7, 1.0), (1, 2), "a", repeats=2)
    assert len(table) == 4 * 2 * len(RULES) * 2
    assert table.accepted.between(0, 1 + 1e-9).all()
    assert (table.groupby("position").entropy.nunique() == 2).all()


def test_temperature_0_is_refused(target):
    with pytest.raises(ValueError, match="must be above 0: at 0 all rules accept the same"):
        compare(iter([]), (0.0,), (1,), "a")


@pytest.fixture()
def measured(tmp_path) -> str:
    """Coupled drafts accept more than the most likely tokens at T = 1, less at T = 0.5; only with 4 children."""
    rows = ["temperature,entropy_third,rule,k,accepted"]
    rows += ["0.5,all,match,4,0.6", "0.5,all,coupled,4,0.5", "1.0,all,match,4,0.4", "1.0,all,coupled,4,0.5"]
    rows += ["1.0,3,coupled,4,0.1", "1.0,all,match,1,0.3", "1.0,all,coupled,1,0.2"]
    (tmp_path / "rules.csv").write_text("\n".join(rows))
    return str(tmp_path / "rules.csv")


@pytest.mark.parametrize(
    ("temperature", "children", "rule"),
    [(0.0, 4, Match), (0.3, 4, Match), (0.7, 4, Match), (0.8, 4, Coupled), (2.0, 8, Coupled), (1.0, 1, Match)],
)
def test_the_rule_is_chosen_by_temperature_and_children(measured, temperature, children, rule):
    assert type(most_accepting(temperature, measured, children)) is rule


def test_the_bundled_table_couples_drafts_where_the_text_is_sampled():
    """Of four children at T = 1 coupled ones were accepted 0.55 times, the most likely ones 0.48 times."""
    assert type(most_accepting(0.0)) is Match
    assert type(most_accepting(1.0)) is Coupled


def test_a_rule_that_cannot_be_chosen_is_named(measured, tmp_path):
    with pytest.raises(ValueError, match="'best' is not one of match, coupled"):
        most_accepting(1.0, measured, among=["best"])
    with pytest.raises(ValueError, match="lacks the rule 'hybrid'; it has coupled, match"):
        most_accepting(1.0, measured, among=["match", "hybrid"])
    with pytest.raises(FileNotFoundError, match="no table of rules there"):
        most_accepting(1.0, str(tmp_path / "none.csv"))
