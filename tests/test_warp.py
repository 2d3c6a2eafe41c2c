"""The target's law at a tree's nodes against transformers' own processors and warpers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from eagle_tree.tree import Tree
from eagle_tree.warp import Law, Sampling

VOCAB = 257
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12}
NO_PREFIX = torch.zeros(1, 0, dtype=torch.int64)


def random_logits(scale: float, rows: int = 6, dtype=torch.float64, seed: int = 0) -> Tensor:
    """`[rows, VOCAB]`: flat rows for a small scale, peaked ones for a large scale."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, VOCAB, generator=generator, dtype=torch.float64) * scale).to(dtype)


def library_warpers(sampling: Sampling) -> LogitsProcessorList:
    """What `generate` would run, in its order."""
    chain = LogitsProcessorList(sampling.processors)
    chain.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k is not None:
        chain.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        chain.append(TopPLogitsWarper(sampling.top_p))
    chain.extend(sampling.warpers)
    return chain


def assert_same_law(log_probs: Tensor, expected: Tensor) -> None:
    """The same tokens excluded, the others equally probable."""
    assert torch.equal(log_probs.isinf(), expected.isinf())
    assert torch.allclose(log_probs, expected, rtol=0, atol=TOLERANCE[log_probs.dtype])


def all_rows(logits: Tensor) -> Tensor:
    return torch.arange(logits.shape[0])


def settled(law: Law, node: Tensor) -> tuple[Law, Tensor]:
    """The law at nodes, widened until every nucleus is covered, as decoding does it."""
    for _ in range(12):
        log_probs = law.log_probs(node)
        if not law.uncovered:
            return law, log_probs
        law = law.widened()
    raise AssertionError("widening does not end")


# Temperature, top-k, top-p


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("scale", [0.1, 1, 5, 20], ids=["flat", "normal", "peaked", "very peaked"])
@pytest.mark.parametrize("top_k", [None, 1, 7, 100, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.999, 0.9, 0.5, 0.01])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_native_warping_equals_the_librarys(dtype, scale, top_k, top_p, temperature):
    logits = random_logits(scale, dtype=dtype)
    sampling = Sampling(temperature, top_k, top_p)
    law = Law(logits, sampling)
    log_probs = law.log_probs(all_rows(logits))
    assert log_probs.dtype == dtype
    assert_same_law(log_probs, library_warpers(sampling)(NO_PREFIX, logits).log_softmax(-1))
    assert not law.uncovered


@settings(max_examples=100, deadline=None)
@given(
    temperature=st.floats(0.05, 5),
    top_k=st.one_of(st.none(), st.integers(1, 300)),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),  # nearer to 1, rounding decides where the nucleus ends
    scale=st.sampled_from([0.1, 1, 4, 15]),
    seed=st.integers(0, 1000),
    width=st.sampled_from([1, 3, 20, 1000]),
)
def test_any_sampling_equals_the_librarys_whatever_is_sorted_first(temperature, top_k, top_p, scale, seed, width):
    logits = random_logits(scale, seed=seed)
    sampling = Sampling(temperature, top_k, top_p)
    _, log_probs = settled(Law(logits, sampling, nucleus_width=width), all_rows(logits))
    assert_same_law(log_probs, library_warpers(sampling)(NO_PREFIX, logits).log_softmax(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_warped_in_fp32_as_by_generate(dtype: torch.dtype):
    logits = random_logits(3, dtype=dtype)
    sampling = Sampling(0.7, 50, 0.9)
    log_probs = Law(logits, sampling).log_probs(all_rows(logits))
    assert log_probs.dtype == torch.float32
    kept = log_probs.isfinite()
    expected = library_warpers(sampling)(NO_PREFIX, logits.float()).log_softmax(-1)
    assert torch.equal(kept.sum(-1), expected.isfinite().sum(-1))  # which of two equal logits at the edge is open
    assert torch.allclose(log_probs.sort().values, expected.sort().values, rtol=0, atol=2e-5)


def test_nodes_are_warped_in_the_order_asked_for():
    logits = random_logits(2)
    law = Law(logits, Sampling(0.7, top_p=0.9))
    node = torch.tensor([4, 0, 4])
    assert torch.equal(law.log_probs(node), law.log_probs(all_rows(logits))[node])


def test_top_k_keeps_every_token_that_ties_with_the_kth():
    law = Law(torch.tensor([[3.0, 1.0, 1.0, 0.0]]), Sampling(1.0, top_k=2))
    assert law.log_probs(torch.tensor([0])).isfinite().tolist() == [[True, True, True, False]]


def logits_of(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


ROOT = torch.tensor([0])


@pytest.mark.parametrize("top_p, kept", [(0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3), (0.91, 4), (1.0, 4)])
def test_the_nucleus_is_the_smallest_set_that_reaches_top_p(top_p: float, kept: int):
    law = Law(logits_of([0.1, 0.3, 0.2, 0.4]), Sampling(1.0, top_p=top_p))
    expected = torch.tensor([0.1, 0.3, 0.2, 0.4], dtype=torch.float64)
    expected[expected < sorted(expected)[-kept]] = 0
    assert law.log_probs(ROOT)[0].exp().tolist() == pytest.approx((expected / expected.sum()).tolist())


# The order matters


def test_temperature_goes_before_top_p():
    """At T = 2, (.81, .09, .09, .01) becomes (.5625, .1875, .1875, .0625): three tokens reach 0.8, not one."""
    law = Law(logits_of([0.81, 0.09, 0.09, 0.01]), Sampling(2.0, top_p=0.8))
    assert law.log_probs(ROOT)[0].exp().tolist() == pytest.approx([0.6, 0.2, 0.2, 0])
    other_order = TopPLogitsWarper(0.8)(NO_PREFIX, logits_of([0.81, 0.09, 0.09, 0.01]))
    assert TemperatureLogitsWarper(2.0)(NO_PREFIX, other_order).softmax(-1)[0].tolist() == pytest.approx([1, 0, 0, 0])


def test_top_k_goes_before_top_p():
    """Of (.4, .3, .2, .1) the best two become (.57, .43): the nucleus of 0.5 is then one token, not two."""
    law = Law(logits_of([0.4, 0.3, 0.2, 0.1]), Sampling(1.0, top_k=2, top_p=0.5))
    assert law.log_probs(ROOT)[0].exp().tolist() == pytest.approx([1, 0, 0, 0])
    other_order = TopPLogitsWarper(0.5)(NO_PREFIX, logits_of([0.4, 0.3, 0.2, 0.1]))
    kept = TopKLogitsWarper(2)(NO_PREFIX, other_order).softmax(-1)[0].tolist()
    assert kept == pytest.approx([4 / 7, 3 / 7, 0, 0])


def test_min_p_goes_after_top_p():
    """Top-p leaves (.4, .3), and both pass min-p's 0.6 * .4; min-p first would leave (.57, .43), and top-p one."""
    sampling = Sampling(1.0, top_p=0.5, warpers=[MinPLogitsWarper(0.6)])
    law = Law(logits_of([0.4, 0.3, 0.2, 0.1]), sampling, Tree.from_lists([0], [-1]), ROOT[:0])
    assert law.log_probs(ROOT)[0].exp().tolist() == pytest.approx([4 / 7, 3 / 7, 0, 0])


# Partial sorting


@pytest.mark.parametrize("width, uncovered", [(1, True), (2, True), (3, False), (4, False)])
def test_a_nucleus_wider_than_what_was_sorted_is_flagged(width: int, uncovered: bool):
    law = Law(logits_of([0.1, 0.3, 0.2, 0.4]), Sampling(1.0, top_p=0.8), nucleus_width=width)  # needs .4 + .3 + .2
    log_probs = law.log_probs(ROOT)
    assert bool(law.uncovered) == uncovered
    if not uncovered:
        assert log_probs[0].exp().tolist() == pytest.approx([0, 3 / 9, 2 / 9, 4 / 9])


@pytest.mark.parametrize("width", [1, 2, 3])
def test_widening_gives_the_right_law(width: int):
    logits = logits_of([0.1, 0.3, 0.2, 0.4])
    law, log_probs = settled(Law(logits, Sampling(1.0, top_p=0.8), nucleus_width=width), ROOT)
    assert not law.uncovered
    assert log_probs[0].exp().tolist() == pytest.approx([0, 3 / 9, 2 / 9, 4 / 9])


def test_one_wide_nucleus_among_narrow_ones_flags_the_law_until_the_end():
    narrow, wide = [0.97, 0.01, 0.01, 0.01], [0.25, 0.26, 0.25, 0.24]
    law = Law(logits_of(narrow, wide), Sampling(1.0, top_p=0.9), nucleus_width=2)
    law.log_probs(torch.tensor([0]))
    assert not law.uncovered
    law.log_probs(torch.tensor([1]))
    law.log_probs(torch.tensor([0]))
    assert law.uncovered


@settings(max_examples=60, deadline=None)
@given(
    top_p=st.floats(0.05, 0.99), width=st.integers(1, 60), scale=st.sampled_from([0.1, 2, 6]), seed=st.integers(0, 99)
)
def test_the_flag_is_raised_iff_some_nucleus_is_wider_than_what_was_sorted(top_p, width, scale, seed):
    logits = random_logits(scale, seed=seed)
    nucleus = library_warpers(Sampling(1.0, top_p=top_p))(NO_PREFIX, logits).isfinite().sum(-1)
    law = Law(logits, Sampling(1.0, top_p=top_p), nucleus_width=width)
    law.log_probs(all_rows(logits))
    assert bool(law.uncovered) == bool((nucleus > width).any())


def test_without_top_p_nothing_is_uncovered():
    law = Law(random_logits(0.1), Sampling(1.0), nucleus_width=1)
    law.log_probs(torch.arange(6))
    assert not law.uncovered


# Temperature 0


def test_temperature_0_puts_all_mass_on_the_largest_logit():
    law = Law(torch.tensor([[1.0, 3.0, 2.0], [5.0, 5.0, 0.0]]), Sampling(0.0, top_k=2, top_p=0.5))
    assert law.log_probs(torch.tensor([0, 1])).exp().tolist() == [[0, 1, 0], [1, 0, 0]]  # the first of equal ones
    assert law.sampling.greedy and not Sampling(0.1).greedy


# Node probabilities and processors

#      0                tokens: root 5; 1 and 2 carry 7 and 5; 3 and 4 below 1 carry 5 and 9; 5 below 2 carries 7;
#     / \               6 below 4 carries 5
#    1   2
#   / \   \
#  3   4   5
#      |
#      6
TREE = Tree.from_lists([5, 7, 5, 5, 9, 7, 5], [-1, 0, 0, 1, 1, 2, 4])
PREFIX = torch.tensor([7, 5, 7, 8, 5])
NODE_PATHS = [[5], [5, 7], [5, 5], [5, 7, 5], [5, 7, 9], [5, 5, 7], [5, 7, 9, 5]]


@pytest.mark.parametrize(
    "sampling", [Sampling(1.0), Sampling(0.6, 40, 0.95), Sampling(1.3, top_p=0.7)], ids=["plain", "nucleus", "hot"]
)
def test_node_log_prob_is_the_law_of_the_parent_at_the_nodes_token(sampling: Sampling):
    logits = random_logits(2, rows=7)
    expected = library_warpers(sampling)(NO_PREFIX, logits).log_softmax(-1)
    found = Law(logits, sampling).node_log_prob(TREE)
    token, parent = TREE.token.tolist(), TREE.parent.tolist()
    assert found[0] == 0
    assert found.tolist()[1:] == pytest.approx([expected[parent[v], token[v]].item() for v in range(1, 7)], abs=1e-12)


def test_node_log_prob_at_temperature_0_is_0_for_the_first_choice_and_minus_infinity_for_others():
    logits = torch.zeros(7, VOCAB)
    for node, choice in enumerate([7, 9, 1, 1, 5, 1, 1]):
        logits[node, choice] = 1
    found = Law(logits, Sampling(0.0)).node_log_prob(TREE)
    yes, no = 0.0, -math.inf
    assert found.tolist() == [yes, yes, no, no, yes, no, yes]


class Recorder(LogitsProcessor):
    """Changes nothing and lists the prefixes it was shown."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen += input_ids.tolist()
        return scores


def test_a_processor_sees_every_nodes_own_prefix_once():
    recorder = Recorder()
    Law(random_logits(1, rows=7), Sampling(1.0, processors=[recorder]), TREE, PREFIX)
    assert sorted(recorder.seen) == sorted(PREFIX.tolist() + path for path in NODE_PATHS)


def test_a_warper_sees_the_prefixes_of_the_nodes_asked_for():
    recorder = Recorder()
    law = Law(random_logits(1, rows=7), Sampling(1.0, warpers=[recorder]), TREE, PREFIX)
    law.log_probs(torch.tensor([6, 2, 3]))
    assert sorted(recorder.seen) == sorted(PREFIX.tolist() + NODE_PATHS[node] for node in (6, 2, 3))


PROCESSORS = {
    "repetition penalty": [RepetitionPenaltyLogitsProcessor(1.5)],
    "no repeated pairs": [NoRepeatNGramLogitsProcessor(2)],
    "both": [RepetitionPenaltyLogitsProcessor(1.5), NoRepeatNGramLogitsProcessor(2)],
}


@pytest.mark.parametrize("nucleus_width", [2, 1000])
@pytest.mark.parametrize("warpers", [[], [MinPLogitsWarper(0.2)]], ids=["no warper", "min-p"])
@pytest.mark.parametrize("processors", PROCESSORS.values(), ids=PROCESSORS)
def test_processors_give_every_node_what_generate_would_give_it(processors, warpers, nucleus_width: int):
    logits = random_logits(2, rows=7, dtype=torch.float32)
    logits[:, 5:10] += 5  # the tokens of prefix and tree are likely: a penalty is felt
    sampling = Sampling(0.8, 60, 0.9, processors, warpers)
    law, log_probs = settled(Law(logits, sampling, TREE, PREFIX, nucleus_width), all_rows(logits))
    chain = library_warpers(sampling)
    prefixes = [torch.tensor([PREFIX.tolist() + path]) for path in NODE_PATHS]
    expected = torch.cat([chain(prefix, logits[v : v + 1]) for v, prefix in enumerate(prefixes)]).log_softmax(-1)
    assert_same_law(log_probs, expected)
    some = torch.tensor([6, 2, 3])
    assert_same_law(law.log_probs(some), expected[some])


def test_pairs_that_a_path_completed_are_banned_below_it_only():
    """The text up to node 6 is 7 5 7 8 5, 5 7 9 5: the prefix and the node's path."""
    law = Law(torch.zeros(7, VOCAB), Sampling(1.0, processors=[NoRepeatNGramLogitsProcessor(2)]), TREE, PREFIX)
    banned = [sorted(row.isinf().nonzero().flatten().tolist()) for row in law.log_probs(torch.arange(7))]
    assert banned[1] == [5, 8]  # after 7 5 7 8 5, 5 7: a 7 was followed by 5 and by 8
    assert banned[4] == []  # after …, 5 7 9: no 9 came before
    assert banned[6] == [5, 7]  # a 5 was followed by 7 (twice) and by 5


def test_processors_come_before_the_choice_at_temperature_0():
    logits = torch.zeros(7, VOCAB)
    logits[:, 7], logits[:, 3] = 3.0, 2.0
    law = Law(logits, Sampling(0.0, processors=[RepetitionPenaltyLogitsProcessor(2.0)]), TREE, PREFIX)
    assert law.log_probs(torch.arange(7)).argmax(-1).tolist() == [3] * 7  # 7 stands in every prefix: 3 / 2 < 2
    assert law.node_log_prob(Tree.from_lists([5, 3, 7], [-1, 0, 0])).tolist() == [0, 0, -math.inf]


@pytest.mark.parametrize("missing", [{"tree": None}, {"prefix": None}], ids=["tree", "prefix"])
def test_processors_without_a_prefix_to_read_are_refused(missing: dict):
    with pytest.raises(ValueError, match="give the law its tree and prefix"):
        Law(random_logits(1, 7), Sampling(processors=[Recorder()]), **{"tree": TREE, "prefix": PREFIX, **missing})


# Parameters


@pytest.mark.parametrize(
    "name, value",
    [("temperature", value) for value in (-0.1, -1, math.nan, math.inf, "1", None, True)]
    + [("top_p", value) for value in (0, 0.0, -0.5, 1.1, 2, math.nan, "0.9", None, True)]
    + [("top_k", value) for value in (0, -1, 1.0, 2.5, "5", True, False)],
)
def test_sampling_parameters_out_of_range_are_refused_by_name(name: str, value: object):
    with pytest.raises(ValueError, match=f"{name}={value!r} must be"):
        Sampling(**{name: value})


def test_the_ends_of_the_ranges_are_allowed():
    Sampling(0, None, 1), Sampling(0.0, 1, 1.0), Sampling(5, 10**6, 1e-9)
