"""How candidates are taken from the drafter's distribution: by hand, by count under fixed seeds, and coupled ones."""

from __future__ import annotations

import math
from collections import Counter
from itertools import permutations, product

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from eagle_tree.accept import Coupled
from eagle_tree.draw import candidates
from eagle_tree.noise import GumbelRows, Noise, PassNoise
from eagle_tree.policy import Eagle2
from eagle_tree.tree import DRAWS, Draft, Draw, Frontier, GrowingTree
from eagle_tree.warp import Law, Sampling

Q = torch.tensor([[0.2, 0.2, 0.6]])
ROOT = torch.tensor([0])


class Fixed:
    """Noise of a pass that is given."""

    def __init__(self, uniform=(), draft=(), target=()):
        self.uniform, self.draft, self.target = uniform, draft, target

    def draft_uniform(self, level: int, size: int) -> Tensor:
        return torch.tensor(self.uniform[:size], dtype=torch.float64)

    def draft_gumbel(self, level: int, size: int) -> Tensor:
        return torch.tensor(self.draft)

    def target_gumbel(self, levels: int) -> Tensor:
        return torch.tensor([self.target] * levels)


def draft(draw: Draw, k: int, noise, q: Tensor = Q, target_id: Tensor | None = None) -> Draft:
    growing = GrowingTree.from_root(ROOT)
    return candidates(q.log(), growing, Frontier(ROOT.repeat(q.shape[0]), k, draw), noise, target_id)


def pass_noise(sequence: int | str = 0, vocab_size: int = 3, position: int = 5) -> PassNoise:
    return GumbelRows(Noise(0, sequence), vocab_size).for_pass(position)


# --- by hand ---


def test_the_most_likely_tokens_are_drawn_without_noise():
    drafted = draft(Draw("top_k", temperature=0.1), 2, None)
    assert drafted.token.tolist() == [[2, 0]]
    assert drafted.log_conf.exp().tolist()[0] == pytest.approx([0.6, 0.2])  # at temperature 1, whatever the draw says
    assert drafted.log_q is None


def test_draws_with_replacement_invert_the_distribution_function():
    """(.2, .4, 1): .1 lies in the first step, .4 and .95 in the last."""
    drafted = draft(Draw("with_replacement"), 3, Fixed(uniform=(0.1, 0.401, 0.95)))
    assert drafted.token.tolist() == [[0, 2, 2]]
    assert drafted.log_conf.exp().tolist()[0] == pytest.approx([0.2, 0.6, 0.6])
    assert drafted.log_q.exp().tolist()[0] == pytest.approx([0.2, 0.2, 0.6])


def test_a_token_without_probability_is_never_drawn():
    q = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])
    ends = (2.0**-33, 0.5, 1 - 2.0**-33)
    assert draft(Draw("with_replacement"), 3, Fixed(uniform=ends), q).token.tolist() == [[1, 3, 3]]


@pytest.mark.parametrize("kind", DRAWS[1:])
def test_a_draw_without_the_noise_that_it_needs_is_named(kind: str):
    with pytest.raises(ValueError, match=f"draw.kind={kind} draws with the noise of a pass, and none is given"):
        draft(Draw(kind), 1, None)


def test_draws_without_replacement_are_the_largest_of_log_q_plus_noise():
    """log q = (-1.6, -1.6, -.5), noise (3, 1, 0): 1.4, -.6, -.5."""
    drafted = draft(Draw("without_replacement"), 3, Fixed(draft=(3.0, 1.0, 0.0)))
    assert drafted.token.tolist() == [[0, 2, 1]]


def test_a_hybrid_draft_is_one_draw_outside_of_the_most_likely_tokens_and_these():
    """Token 2 is the most likely; outside of it q is (.5, .5, 0), which is what the draw is recorded with."""
    drafted = draft(Draw("hybrid"), 2, Fixed(draft=(0.0, 0.1, 9.0)))
    assert drafted.token.tolist() == [[1, 2]]
    assert drafted.log_q.exp().tolist()[0] == pytest.approx([0.5, 0.5, 0.0])
    assert drafted.log_conf.exp().tolist()[0] == pytest.approx([0.2, 0.6])


def test_coupled_candidates_are_ranked_with_the_targets_noise_and_scored_by_the_softmax():
    """log q + g = (1.39, -.61, -.51); the confidence is exp(x/s) over the sum."""
    noise = Fixed(target=(3.0, 1.0, 0.0))
    for scale in (1.0, 0.5):
        drafted = draft(Draw("coupled", error_scale=scale), 2, noise)
        weight = [math.exp((math.log(q) + g) / scale) for q, g in zip([0.2, 0.2, 0.6], [3, 1, 0])]
        assert drafted.token.tolist() == [[0, 2]]
        assert drafted.log_conf.exp().tolist()[0] == pytest.approx([weight[0] / sum(weight), weight[2] / sum(weight)])


def test_the_drafters_distribution_is_taken_at_the_draws_temperature():
    """At temperature 1/2 (.2, .2, .6) becomes (.04, .04, .36) / .44."""
    for kind in ("with_replacement", "without_replacement"):
        drafted = draft(Draw(kind, temperature=0.5), 1, pass_noise())
        assert drafted.log_q.exp().tolist()[0] == pytest.approx([1 / 11, 1 / 11, 9 / 11])
    coupled = draft(Draw("coupled", temperature=0.5), 1, Fixed(target=(0.0, 0.0, 0.0)))
    assert coupled.log_conf.exp().item() == pytest.approx(9 / 11)


@pytest.mark.parametrize("kind", ["top_k", "with_replacement", "without_replacement", "hybrid", "coupled"])
def test_tokens_are_the_targets_ids(kind):
    """A drafter of three tokens that stand for 7, 4 and 9 of ten; a coupled one meets the noise of these."""
    target_id, own = torch.tensor([7, 4, 9]), (3.0, 1.0, 0.0)
    target = torch.arange(10.0)
    target[target_id] = torch.tensor(own)
    noise = [Fixed((0.1, 0.401, 0.95), own, gumbel) for gumbel in (target.tolist(), own)]
    here, there = draft(Draw(kind), 3, noise[0], target_id=target_id), draft(Draw(kind), 3, noise[1])
    assert here.token.tolist() == target_id[there.token].tolist()
    assert torch.equal(here.log_conf, there.log_conf)
    if here.log_q is not None:
        assert here.target_id is target_id


# --- by count: what the recorded law says is how often it is drawn ---

COUNT = 1000


def limit(freedom: int) -> float:
    """What chi-square exceeds with probability 1e-4."""
    return chi2.isf(1e-4, freedom)


@pytest.mark.parametrize(
    ("kind", "law"),
    [
        ("with_replacement", {(x, y): Q[0, x] * Q[0, y] for x, y in product(range(3), repeat=2)}),
        ("without_replacement", {(x, y): Q[0, x] * Q[0, y] / (1 - Q[0, x]) for x, y in permutations(range(3), 2)}),
        ("hybrid", {(0, 2): 0.5, (1, 2): 0.5}),
    ],
)  # fmt: skip
def test_draws_have_their_law(kind, law):
    drawn = Counter(tuple(draft(Draw(kind), 2, pass_noise(i)).token[0].tolist()) for i in range(COUNT))
    assert set(drawn) <= set(law)
    statistic = sum((drawn[pair] - COUNT * float(share)) ** 2 / (COUNT * float(share)) for pair, share in law.items())
    assert statistic < limit(len(law) - 1)


@pytest.mark.parametrize("kind", ["with_replacement", "without_replacement", "hybrid"])
def test_another_pass_or_level_draws_anew_and_the_same_one_the_same(kind):
    q = torch.full((1, 1000), 1e-3)
    tokens = [draft(Draw(kind), 3, pass_noise(vocab_size=1000, position=n), q).token.tolist() for n in (5, 5, 6)]
    assert tokens[0] == tokens[1] != tokens[2]
    assert tokens[0] != draft(Draw(kind), 3, pass_noise("b", 1000), q).token.tolist()


# --- coupled ---


def test_a_drafter_that_equals_the_target_is_always_right_when_coupled():
    """q = p: the largest of log q + g is the token that the target draws."""
    for sequence in range(50):
        rows = GumbelRows(Noise(1, sequence), 3)
        drafted = draft(Draw("coupled"), 1, rows.for_pass(5))
        assert drafted.token[0] == (Q.log() + rows.row(5)).argmax()


def test_levels_are_coupled_to_the_positions_of_their_tokens():
    """Nodes of depth 0 and 1 in one frontier: their children stand at positions 5 and 6."""
    rows = GumbelRows(Noise(1, 0), 3)
    growing = GrowingTree.from_root(ROOT)
    first = candidates(Q.log(), growing, Frontier(ROOT, 3, Draw("coupled")), rows.for_pass(5))
    growing = growing.append(Frontier(ROOT, 3), first)
    both = candidates(
        Q.log().repeat(2, 1), growing, Frontier(torch.tensor([0, 1]), 3, Draw("coupled")), rows.for_pass(5)
    )
    assert both.token[:, 0].tolist() == [(Q.log() + rows.row(position)).argmax().item() for position in (5, 6)]


def test_coupling_agrees_as_often_as_its_closed_form_says():
    """P(argmax(log q + g) = argmax(log p + g)) = Σ_x 1 / Σ_y max(q_y/q_x, p_y/p_x) (Daliri et al.).

    Here 1/5 + 3/17 + 1/5; the drafter's most likely token is the target's in 0.2 of cases.
    """
    p, q = torch.tensor([0.5, 0.3, 0.2]), Q[0]
    expected = sum(1 / torch.maximum(q / q[x], p / p[x]).sum().item() for x in range(3))
    hits = 0
    for sequence in range(COUNT):
        rows = GumbelRows(Noise(2, sequence), 3)
        hits += int(draft(Draw("coupled"), 1, rows.for_pass(5)).token[0, 0] == (p.log() + rows.row(5)).argmax())
    error = math.sqrt(expected * (1 - expected) / COUNT)
    assert abs(hits / COUNT - expected) < 3.5 * error
    assert expected == pytest.approx(2 / 5 + 3 / 17)


@pytest.mark.parametrize("scale", [0.5, 1.5])
def test_confidences_are_acceptance_rates_if_the_drafter_errs_as_supposed(scale):
    """log p = log q + s·ε with Gumbel ε: the mean confidence of the candidates is how often they are the target's."""
    generator = torch.Generator().manual_seed(0)
    promised, kept = [], []
    for sequence in range(COUNT):
        rows = GumbelRows(Noise(3, sequence), 3)
        error = -torch.log(-torch.log(torch.rand(3, generator=generator)))
        truth = (Q[0].log() + scale * error + rows.row(5)).argmax()
        drafted = draft(Draw("coupled", error_scale=scale), 2, rows.for_pass(5))
        promised.append(drafted.log_conf[0].exp())
        kept.append((drafted.token[0] == truth).float())
    promised, kept = torch.stack(promised), torch.stack(kept)
    error = (kept - promised).std(0) / math.sqrt(COUNT)
    assert ((kept - promised).mean(0).abs() < 3.5 * error).all()


def test_a_pruned_coupled_tree_emits_the_targets_own_draws():
    """Whatever the pruned tree holds, every token of the walk is argmax(log p + g) of its position."""
    generator = torch.Generator().manual_seed(1)
    lengths = Counter()
    for sequence in range(100):
        rows = GumbelRows(Noise(4, sequence), 4)
        policy, growing, drafted = Eagle2(3, 3, 1), GrowingTree.from_root(ROOT), None
        while (frontier := policy.frontier(growing, drafted)) is not None:
            log_q = torch.randn(frontier.node.shape[0], 4, generator=generator).log_softmax(-1)
            frontier = Frontier(frontier.node, frontier.n_candidates, Draw("coupled"))
            drafted = candidates(log_q, growing, frontier, rows.for_pass(9))
            growing = growing.append(frontier, drafted)
        tree = growing.select(policy.select(growing))[0]
        law = Law(torch.randn(tree.n_nodes + 1, 4, generator=generator), Sampling(0.8))
        walk = Coupled().accept(tree, law, rows, 9)
        for level, node in enumerate(walk.path[: walk.n_accepted + 1].tolist()):
            assert walk.emitted[level] == (law.log_probs(torch.tensor([node]))[0] + rows.row(9 + level)).argmax()
        lengths[int(walk.n_accepted)] += 1
    assert len(lengths) == 3  # nothing, one and two drafted tokens accepted


# --- what a draw may be ---


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        (dict(kind="topk"), "kind='topk' is not one of top_k, with_replacement"),
        (dict(temperature=0), "temperature=0 must be a number above 0"),
        (dict(temperature=-1.0), "temperature=-1.0 must be a number above 0"),
        (dict(temperature=math.nan), "temperature=nan must be a number above 0"),
        (dict(error_scale=0.0), "error_scale=0.0 must be a number above 0"),
        (dict(error_scale=None), "error_scale=None must be a number above 0"),
        (dict(error_scale=True), "error_scale=True must be a number above 0"),
        (dict(error_scale=math.inf), "error_scale=inf must be a number above 0"),
        (dict(error_scale="1"), "error_scale='1' must be a number above 0"),
    ],
)
def test_a_draw_that_is_none_is_refused(fields, complaint):
    with pytest.raises(ValueError, match=complaint):
        Draw(**fields)


def test_a_draw_follows_the_sampling_temperature_unless_it_has_its_own():
    assert Draw("coupled").at(0.7) == Draw("coupled", 0.7)
    assert Draw("coupled", 1.0).at(0.7) == Draw("coupled", 1.0)
    assert Draw("coupled").at(0.0) == Draw("top_k")
    assert Draw("hybrid", 1.0).at(0.0) == Draw("hybrid", 1.0)
    with pytest.raises(ValueError, match="draw=hybrid at temperature=0 has no distribution to draw from"):
        Draw("hybrid").at(0.0)
