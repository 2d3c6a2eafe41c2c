"""The match rule: what a walk accepts and emits, its expected tokens, and the two meters of losslessness."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle_tree.accept import Accepted, Match, surprisal
from eagle_tree.noise import GumbelRows, Noise
from eagle_tree.tree import Tree
from eagle_tree.warp import Law, Sampling

VOCAB = 5
GREEDY = Sampling(0.0)

#      0: 4             node: token; the tokens 0…4
#     /    \
#   1: 0   2: 1
#   /  \      \
# 3: 2 4: 3   5: 2
#  |
# 6: 1
TREE = Tree.from_lists([4, 0, 1, 2, 3, 2, 1], [-1, 0, 0, 1, 1, 2, 3])


def preferring(*choices: int) -> Tensor:
    """Logits `[rows, VOCAB]` whose largest is each row's choice."""
    logits = torch.tensor([0.1, 0.0, -0.3, 0.2, -0.1]).repeat(len(choices), 1)
    logits[torch.arange(len(choices)), torch.tensor(choices)] = 2.0
    return logits


def noise_rows(sequence: int | str = 0, vocab_size: int = VOCAB) -> GumbelRows:
    return GumbelRows(Noise(0, sequence), vocab_size)


def greedily(*choices: int, tree: Tree = TREE) -> Accepted:
    """The walk at temperature 0 of a target with one choice a node."""
    return Match().accept(tree, Law(preferring(*choices), GREEDY), noise_rows(), 0)


# Temperature 0, by hand


def test_target_never_accepts():
    """It wants token 2 after the root; the children offer 0 and 1."""
    walk = greedily(2, 0, 0, 0, 0, 0, 0)
    assert walk.emitted.tolist() == [2, -1, -1, -1]
    assert walk.path.tolist() == [0, -1, -1, -1]
    assert walk.n_accepted == 0
    assert walk.accepted.tolist() == [True] + [False] * 6
    assert walk.tried.tolist() == [False, True, True, False, False, False, False]
    assert not walk.broken


def test_target_always_accepts():
    """It follows 0, 2, 1 to the leaf and draws the bonus token 3 there."""
    walk = greedily(0, 2, 4, 1, 4, 4, 3)
    assert walk.emitted.tolist() == [0, 2, 1, 3]
    assert walk.path.tolist() == [0, 1, 3, 6]
    assert walk.n_accepted == 3
    assert walk.accepted.tolist() == [True, True, False, True, False, False, True]
    assert walk.tried.tolist() == [False, True, True, True, True, False, True]


def test_target_sometimes_accepts():
    """It follows 0 and 2, then wants 0 where the child offers 1."""
    walk = greedily(0, 2, 4, 0, 4, 4, 3)
    assert walk.emitted.tolist() == [0, 2, 0, -1]
    assert walk.path.tolist() == [0, 1, 3, -1]
    assert walk.n_accepted == 2
    assert walk.accepted.tolist() == [True, True, False, True, False, False, False]
    assert walk.tried.tolist() == [False, True, True, True, True, False, True]


def test_a_second_sibling_is_accepted_like_a_first():
    walk = greedily(0, 3, 4, 4, 1, 4, 4)
    assert walk.emitted.tolist() == [0, 3, 1, -1]
    assert walk.path.tolist() == [0, 1, 4, -1]
    assert walk.n_accepted == 2


def test_a_short_branch_ends_with_its_bonus_token():
    walk = greedily(1, 4, 2, 4, 4, 0, 4)
    assert walk.emitted.tolist() == [1, 2, 0, -1]
    assert walk.path.tolist() == [0, 2, 5, -1]
    assert walk.tried.tolist() == [False, True, True, False, False, True, False]


def test_the_same_token_below_another_parent_is_no_match():
    """After 0 the target wants 1: node 2 carries it, but stands below the root."""
    walk = greedily(0, 1, 2, 4, 4, 4, 4)
    assert walk.emitted.tolist() == [0, 1, -1, -1]
    assert walk.path.tolist() == [0, 1, -1, -1]


def test_a_tree_without_draft_nodes_emits_one_token():
    walk = greedily(3, tree=Tree.from_lists([4], [-1]))
    assert walk.emitted.tolist() == [3] and walk.path.tolist() == [0]
    assert walk.n_accepted == 0
    assert walk.tried.tolist() == [False]


# Any temperature: one draw a level


@st.composite
def trees(draw, max_nodes: int = 9) -> Tree:
    """Random trees over the vocabulary; siblings carry distinct tokens."""
    token, parent = [0], [-1]
    for node in range(1, draw(st.integers(0, max_nodes)) + 1):
        up = draw(st.integers(0, node - 1))
        taken = {token[child] for child in range(1, node) if parent[child] == up}
        free = [choice for choice in range(VOCAB) if choice not in taken]
        if free:
            token.append(draw(st.sampled_from(free)))
            parent.append(up)
        else:
            break
    tree = Tree.from_lists(token, parent)
    return replace(tree, max_depth=tree.max_depth + draw(st.integers(0, 2)))


def random_logits(rows: int, seed: int, scale: float = 1.5) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def plain_walk(tree: Tree, choices: list[list[int]]) -> tuple[list[int], list[int]]:
    """Path and emitted tokens, where `choices[node][level]` is the target's draw at a node."""
    token, parent = tree.token.tolist(), tree.parent.tolist()
    path, emitted = [0], [choices[0][0]]
    while children := [v for v in range(len(token)) if parent[v] == path[-1] and token[v] == emitted[-1]]:
        path += children
        emitted.append(choices[path[-1]][len(path) - 1])
    return path, emitted


def padded(values: list[int], size: int) -> list[int]:
    return values + [-1] * (size - len(values))


SAMPLINGS = [GREEDY, Sampling(1.0), Sampling(0.6), Sampling(1.4, top_k=3), Sampling(1.0, top_p=0.8)]


@settings(max_examples=100, deadline=None)
@given(trees(), st.sampled_from(SAMPLINGS), st.integers(0, 1000), st.integers(0, 500))
def test_every_level_emits_the_largest_of_log_p_plus_its_positions_noise(tree, sampling, seed, position):
    law = Law(random_logits(tree.n_nodes + 1, seed), sampling)
    walk = Match().accept(tree, law, noise_rows(seed), position)
    log_p = law.log_probs(torch.arange(tree.n_nodes + 1))
    levels = range(tree.max_depth + 1)
    gumbel = torch.stack([Noise(0, seed).gumbel(position + level, VOCAB, "target") for level in levels])
    choices = (log_p[:, None] + gumbel).argmax(-1).tolist() if not sampling.greedy else None
    if choices is None:
        choices = [[best] * len(levels) for best in law.logits.argmax(-1).tolist()]
    path, emitted = plain_walk(tree, choices)
    assert walk.path.tolist() == padded(path, len(levels))
    assert walk.emitted.tolist() == padded(emitted, len(levels))
    assert walk.n_accepted == len(path) - 1
    assert walk.accepted.nonzero().flatten().tolist() == sorted(path)
    assert walk.tried.tolist() == [up in path for up in tree.parent.tolist()]
    assert not walk.broken


@settings(max_examples=60, deadline=None)
@given(trees(), trees(), st.integers(0, 1000))
def test_the_text_does_not_depend_on_the_tree(one: Tree, other: Tree, seed: int):
    """Two trees draft for the same text; where both emit a token, it is the same."""
    texts = []
    for tree in (one, other):
        path_tokens = [tuple(tree.token[path[path >= 0]].tolist()) for path in tree.paths]
        rows = [random_logits(1, hash((seed, *path)) % 10**6)[0] for path in path_tokens]
        walk = Match().accept(tree, Law(torch.stack(rows), Sampling(1.0)), noise_rows(), 7)
        texts.append(walk.emitted[: walk.n_accepted + 1].tolist())
    assert all(a == b for a, b in zip(*texts))


def test_noise_is_taken_from_the_position_that_the_token_will_have():
    noise = noise_rows()
    Match().accept(TREE, Law(random_logits(7, 0), Sampling(1.0)), noise, 100)
    assert sorted(noise.rows) == [100, 101, 102, 103]


# Reach and expected tokens

LAW_OF_NODE = torch.tensor(  # a binary tree of draws by hand: node 1 offers 0, node 2 offers 1, 3 and 4 stand below 1
    [[0.5, 0.3, 0.2], [0.1, 0.7, 0.2], [0.2, 0.2, 0.6], [0.6, 0.3, 0.1], [0.3, 0.4, 0.3]], dtype=torch.float64
)
SMALL = Tree.from_lists([2, 0, 1, 1, 2], [-1, 0, 0, 1, 1])


def test_reach_multiplies_the_targets_probabilities_along_the_path():
    law = Law(LAW_OF_NODE.log(), Sampling(1.0))
    reach = Match().reach(SMALL, law.node_log_prob(SMALL))
    assert reach.tolist() == pytest.approx([1, 0.5, 0.3, 0.5 * 0.7, 0.5 * 0.2])
    assert reach.sum().item() == pytest.approx(1 + 0.5 + 0.3 + 0.35 + 0.1)


def test_reach_is_of_the_warped_law():
    """Of (.5, .3, .2) a top-k of 2 leaves (.625, .375, 0); of (.1, .7, .2) it leaves (0, 7/9, 2/9)."""
    law = Law(LAW_OF_NODE.log(), Sampling(1.0, top_k=2))
    reach = Match().reach(SMALL, law.node_log_prob(SMALL))
    assert reach.tolist() == pytest.approx([1, 0.625, 0.375, 0.625 * 7 / 9, 0.625 * 2 / 9])


@settings(max_examples=60, deadline=None)
@given(trees(max_nodes=7), st.integers(0, 1000), st.sampled_from(SAMPLINGS[1:]))
def test_reach_sums_to_the_mean_length_over_all_draws(tree: Tree, seed: int, sampling: Sampling):
    """Every combination of draws along the walk, with its probability: no noise, no sampling error."""
    law = Law(random_logits(tree.n_nodes + 1, seed), sampling)
    p = law.log_probs(torch.arange(tree.n_nodes + 1)).exp()
    token, parent = tree.token.tolist(), tree.parent.tolist()

    def mean_emitted(node: int) -> float:
        """Tokens emitted from a node on: one drawn there, and more if it is a child's."""
        children = [v for v in range(len(token)) if parent[v] == node]
        return 1 + sum(p[node, token[v]].item() * mean_emitted(v) for v in children)

    reach = Match().reach(tree, law.node_log_prob(tree))
    assert reach.sum().item() == pytest.approx(mean_emitted(0), abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(trees(), st.integers(0, 1000))
def test_at_temperature_0_accepted_plus_1_is_the_expectation_in_every_pass(tree: Tree, seed: int):
    law = Law(random_logits(tree.n_nodes + 1, seed), GREEDY)
    walk = Match().accept(tree, law, noise_rows(), 0)
    reach = Match().reach(tree, law.node_log_prob(tree))
    assert walk.n_accepted + 1 == reach.sum()
    assert reach.tolist() == walk.accepted.double().tolist()


# The surprisal meter by hand

QUARTERS = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.25, 0.25, 0.25, 0.25]], dtype=torch.float64).log()


@pytest.mark.parametrize("token, expected", [(0, -0.5), (1, 0.5), (2, 0.5)])
def test_surprisal_is_what_a_token_told_beyond_the_entropy(token: int, expected: float):
    """In bits: H(.5, .25, .25) = 1.5, and -log p is 1 or 2; the excluded token adds nothing."""
    law = Law(QUARTERS, Sampling(1.0))
    meter = surprisal(law, torch.tensor([0]), torch.tensor([token]))
    assert meter.item() / math.log(2) == pytest.approx(expected)


def test_surprisal_sums_over_the_path_and_ignores_what_lies_behind_its_end():
    law = Law(QUARTERS, Sampling(1.0))
    meter = surprisal(law, torch.tensor([0, 1, -1]), torch.tensor([1, 3, -1]))
    assert meter.item() / math.log(2) == pytest.approx(0.5 + 0)


# Monte Carlo. Fixed seeds: these cannot fail by chance. z is a mean in its standard errors.

WARPED = Sampling(0.5)
PASSES = 3000
WIDE = Tree.from_lists([0, 0, 1, 0, 1, 0, 2, 1, 0], [-1, 0, 0, 1, 1, 2, 2, 3, 5])


def fixed_law(sampling: Sampling) -> Law:
    """A law at the nodes of `WIDE` that leans towards their tokens."""
    logits = random_logits(9, seed=3, scale=1.0)
    logits[WIDE.parent[1:], WIDE.token[1:]] += 1.5
    return Law(logits, sampling)


def unwarped(law: Law) -> Law:
    return Law(law.logits, Sampling(1.0))


def with_last_token_from(law: Law, walk: Accepted, noise: GumbelRows, position: int) -> Accepted:
    """The same walk, its last token drawn from another law."""
    end = walk.n_accepted
    token = noise.for_pass(position).draw(int(end), law.scores(walk.path[end][None]))
    emitted = walk.emitted.clone()
    emitted[end] = token
    return replace(walk, emitted=emitted)


class UnwarpedChildren(Match):
    """A fault: children are tested against the law before temperature, top-k and top-p."""

    def accept(self, tree: Tree, law: Law, noise: GumbelRows, position: int) -> Accepted:
        walk = super().accept(tree, unwarped(law), noise, position)
        return with_last_token_from(law, walk, noise, position)


class UnwarpedBonus(Match):
    """A fault of the field: after no rejection, the bonus token is drawn from the unwarped logits."""

    def accept(self, tree: Tree, law: Law, noise: GumbelRows, position: int) -> Accepted:
        walk = super().accept(tree, law, noise, position)
        leaf = walk.path[walk.n_accepted]
        if (tree.parent == leaf).any():
            return walk
        return with_last_token_from(unwarped(law), walk, noise, position)


def passes(rule: Match, sampling: Sampling = WARPED, count: int = PASSES) -> tuple[Tensor, Tensor, Tensor]:
    """Acceptance meter, surprisal meter and first emitted token `[count]` of one tree under fresh noise."""
    law = fixed_law(sampling)
    expected = rule.reach(WIDE, law.node_log_prob(WIDE)).sum()
    walks = [rule.accept(WIDE, law, noise_rows(sequence), 0) for sequence in range(count)]
    acceptance = torch.stack([walk.n_accepted for walk in walks]) + 1 - expected
    surprise = torch.stack([surprisal(law, walk.path, walk.emitted) for walk in walks])
    return acceptance, surprise, torch.stack([walk.emitted[0] for walk in walks])


def z(meter: Tensor) -> float:
    return (meter.mean() / meter.std() * math.sqrt(len(meter))).item()


@pytest.fixture(scope="module")
def lossless() -> tuple[Tensor, Tensor, Tensor]:
    return passes(Match())


def test_the_mean_of_accepted_plus_1_is_1_plus_the_sum_of_reach(lossless):
    assert abs(z(lossless[0])) < 3
    assert lossless[0].std() > 0.5  # there was something to be wrong about


def test_the_surprisal_of_emitted_tokens_has_mean_zero(lossless):
    assert abs(z(lossless[1])) < 3


def test_the_first_emitted_token_has_the_targets_law(lossless):
    p = fixed_law(WARPED).log_probs(torch.tensor([0]))[0].exp()
    count = torch.bincount(lossless[2], minlength=VOCAB)
    chi_square = ((count - PASSES * p) ** 2 / (PASSES * p)).sum().item()
    assert chi_square < 23.5  # exceeded with probability 1e-4 at 4 degrees of freedom


@pytest.mark.parametrize("sampling", [Sampling(1.0, top_p=0.7), Sampling(1.3, top_k=2)], ids=["top-p", "top-k"])
def test_both_meters_are_zero_where_tokens_are_excluded(sampling: Sampling):
    acceptance, surprise, _ = passes(Match(), sampling, 1000)
    assert abs(z(acceptance)) < 3 and abs(z(surprise)) < 3


def test_children_tested_against_unwarped_logits_break_the_acceptance_meter():
    acceptance, _, _ = passes(UnwarpedChildren())
    assert abs(z(acceptance)) > 5


def test_a_bonus_from_unwarped_logits_breaks_the_surprisal_meter_and_the_other_is_blind_to_it(lossless):
    acceptance, surprise, _ = passes(UnwarpedBonus())
    assert abs(z(surprise)) > 5
    assert torch.equal(acceptance, lossless[0])


# Broken logits

BAD_ROWS = {
    "one NaN": [0.0, math.nan, 0.0, 0.0, 0.0],
    "all NaN": [math.nan] * VOCAB,
    "infinite": [0.0, 0.0, math.inf, 0.0, 0.0],
    "nothing possible": [-math.inf] * VOCAB,
}
ALL_SAMPLINGS = [*SAMPLINGS, Sampling(0.7, top_k=3, top_p=0.9)]


def broken(bad_node: int, row: list[float], sampling: Sampling) -> Accepted:
    """A walk that would accept 1, 3 and 6, with one node's logits broken."""
    logits = preferring(0, 2, 4, 1, 4, 4, 3) + 20 * preferring(0, 2, 4, 1, 4, 4, 3)
    logits[bad_node] = torch.tensor(row)
    return Match().accept(TREE, Law(logits, sampling), noise_rows(), 0)


@pytest.mark.parametrize("sampling", ALL_SAMPLINGS, ids=str)
@pytest.mark.parametrize("row", BAD_ROWS.values(), ids=BAD_ROWS)
@pytest.mark.parametrize("node", [0, 3, 6], ids=["at the root", "on the path", "at the leaf"])
def test_broken_logits_on_the_path_are_flagged(node: int, row: list[float], sampling: Sampling):
    assert broken(node, row, sampling).broken


@pytest.mark.parametrize("sampling", ALL_SAMPLINGS, ids=str)
@pytest.mark.parametrize("row", BAD_ROWS.values(), ids=BAD_ROWS)
@pytest.mark.parametrize("node", [2, 4, 5])
def test_broken_logits_off_the_path_do_no_harm(node: int, row: list[float], sampling: Sampling):
    walk = broken(node, row, sampling)
    assert not walk.broken
    assert walk.emitted.tolist() == [0, 2, 1, 3]


def test_excluded_tokens_are_not_broken_logits():
    logits = preferring(0, 2, 4, 1, 4, 4, 3)
    logits[:, 4] = -math.inf
    for sampling in ALL_SAMPLINGS:
        assert not Match().accept(TREE, Law(logits, sampling), noise_rows(), 0).broken


def test_a_walk_that_ended_does_not_look_at_the_root_again():
    """Levels behind the end are computed at the root; were its noise to make it break there, it must not count."""
    logits = preferring(2, 0, 0, 0, 0, 0, 0)

    class Spoiled(GumbelRows):
        def row(self, position: int) -> Tensor:
            return super().row(position) + (math.nan if position > 0 else 0)

    law = Law(20 * logits, Sampling(1.0))
    walk = Match().accept(TREE, law, Spoiled(Noise(0, 0), VOCAB), 0)
    assert walk.emitted.tolist() == [2, -1, -1, -1]
    assert not walk.broken
