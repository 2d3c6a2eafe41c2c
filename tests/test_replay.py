"""Replay: the passes of decoding from a trace alone, in the time of a table, whichever way they are computed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import build_target
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cost import points, table
from test_evaluate import PROMPT, SAMPLED, Unsteady, guided
from test_policy_rate import costs
from test_trace import NESTLESS, SETTINGS, Table, Walking, part_of, reading_of, text_of
from tree_models import FINE, PathModel, every_policy, models

from eagle_tree.accept import Coupled, Hybrid, Match, Sequential
from eagle_tree.calibration import Isotonic, Temperatures
from eagle_tree.decode import generate, grow
from eagle_tree.draw import candidates
from eagle_tree.evaluate import Text, follow, read
from eagle_tree.noise import GumbelRows, Noise
from eagle_tree.policy import (
    Autoregressive,
    BestFirst,
    Calibrated,
    Chain,
    ConfidenceStop,
    DepthStop,
    Eagle2,
    EntropyStop,
    OptTree,
    Policy,
    RateOptimal,
    Static,
    Talon,
    sequoia,
    specinfer,
)
from eagle_tree.replay import batched, check_rule, followed, replay, visited
from eagle_tree.trace import Part, Trace, continued, recorded, trace_settings
from eagle_tree.tree import TOP_K, Draw
from eagle_tree.warp import Sampling

COLUMNS = ["prompt_id", "pass_id", "context_length", "n_nodes", "depth", "draft_steps", "accepted", "emitted"]


def traced(model: PathModel, policies: list[Policy], answers: list[list[int]], ahead: int = 0, **changes) -> Trace:
    """A trace of a drafter that is a function of (position, path), along texts nobody decoded."""
    parts = []
    for index, answer in enumerate(answers):
        known, behind = answer[: len(answer) - ahead], answer[len(answer) - ahead :]
        part = replace(part_of(known, f"p{index}", index, **changes), ahead_ids=behind)
        drafter = Walking(model)
        parts.append(recorded(part, drafter, dict(enumerate(policies)), reading_of(known)))
    return Trace({**SETTINGS, **changes}, tuple(parts))


# --- the passes of decoding ---


class Ragged(Unsteady):
    """The oracle for frontiers whose nodes lie at several depths."""

    def log_q(self, growing, frontier):
        depth = growing.depth[frontier.node]
        groups = [(depth == level).nonzero().squeeze(-1) for level in depth.unique()]
        rows = [super(Ragged, self).log_q(growing, replace(frontier, node=frontier.node[group])) for group in groups]
        return torch.cat(rows)[torch.cat(groups).argsort()]


class Flat(Ragged):
    """Its law, flattened, and candidates taken as the draw says."""

    def expand(self, growing, frontier, noise):
        flat = (0.5 * self.log_q(growing, frontier)).log_softmax(-1)
        return candidates(flat, growing, frontier, noise)


def ragged(target, rule):
    drafter = guided(target)
    drafter.oracle = Flat(target) if isinstance(rule, Coupled) else Ragged(target)
    return drafter


LIVE = {
    "autoregressive": Autoregressive(),
    "chain": Chain(4),
    "static": Static([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0]]),
    "specinfer": specinfer([3, 2, 1]),
    "sequoia": sequoia([0.5, 0.2, 0.1], 9, 4),
    "eagle2 small": Eagle2(4, 2, 1),
    "eagle2 middle": Eagle2(8, 3, 2),
    "eagle2 whole pool": Eagle2(99, 3, 2),
    "eagle2 without value": Eagle2(8, 3, 2, value=False),
    "eagle2 without rerank": Eagle2(8, 3, 2, rerank=False),
    "opt tree": OptTree(10, 0.1, 4, 5, 5),
    "best first": BestFirst(10, 3, 4, 4),
    "talon": Talon(10, 4, 0.3, 5),
    "depth stop": DepthStop(Eagle2(8, 3, 4), 2),
    "confidence stop": ConfidenceStop(Eagle2(12, 3, 5), depth=5, beam=3, threshold=0.4),
    "entropy stop": EntropyStop(Eagle2(12, 3, 5), depth=5, threshold=1.8),
    "calibrated": Calibrated(Eagle2(8, 3, 2), Temperatures((2.0, 0.5), greedy=True)),
    "calibrated isotonic": Calibrated(Eagle2(8, 3, 2), Isotonic((((0.0, *64 * (0.5,)), (0.0, *64 * (0.2,))),), True)),
    "rate optimal": RateOptimal(costs([1.0, 1.05, 1.1, 1.3, 1.5, 1.6, 1.9, 2.2, 2.5], 0.05), 8, 3, 4),
}
PROMPTS = [PROMPT, [20, 21, 22, 9]]


@pytest.fixture(
    scope="module",
    params=[(Sampling(), Match()), (SAMPLED, Match()), (SAMPLED, Coupled())],
    ids=["T=0", "T=1", "T=1 coupled"],
)
def live(request):
    """A tiny target, texts it decoded, and their trace by all policies of `LIVE`, of the drafts that a rule is for."""
    target, (sampling, rule) = build_target(), request.param
    drafter, parts = ragged(target, rule), []
    policies = dict(LIVE)
    for name in ("calibrated", "calibrated isotonic"):
        fitted = replace(LIVE[name].calibration, greedy=sampling.greedy)
        policies[name] = replace(LIVE[name], calibration=fitted)
    form = trace_settings(target, drafter, sampling, 18, 2, rule.default_draw)
    for index, prompt in enumerate(PROMPTS):
        options = dict(sampling=sampling, seed=2, sequence=f"p{index}")
        text = Text(f"p{index}", "c", prompt, generate(target, None, Autoregressive(), prompt, 18, **options).tokens)
        part = Part(index, text, continued(target, text, 6, sampling, 2, target.new_cache()), form)
        reading = read(target, drafter.taps, text, sampling)
        noise = GumbelRows(Noise(2, f"p{index}"), target.vocab_size)
        parts.append(recorded(part, drafter, policies, reading, noise))
    return target, drafter, sampling, rule, policies, Trace(form, tuple(parts))


@pytest.mark.parametrize("name", LIVE)
def test_a_replayed_run_is_the_live_run_pass_by_pass(live, name: str):
    """Tree sizes, expectations, accepted and emitted tokens of every pass, the last one's included; nothing lacks."""
    target, drafter, sampling, rule, policies, trace = live
    check_rule(trace, rule)
    fresh = replace(policies[name]) if name == "rate optimal" else policies[name]  # it learns: each run its own
    result = replay(trace, replace(fresh) if name == "rate optimal" else fresh)
    rows = []
    for index, prompt in enumerate(PROMPTS):
        options = dict(sampling=sampling, seed=2, sequence=f"p{index}", record_nodes=False, rule=rule)
        rows += [one.row for one in generate(target, drafter, fresh, prompt, 18, **options).passes]
    theirs = pd.DataFrame([vars(row) for row in rows])
    assert result.uncovered == 0
    pd.testing.assert_frame_equal(result.passes[COLUMNS], theirs[COLUMNS], check_dtype=False)
    np.testing.assert_allclose(result.passes.expected_draft, theirs.expected_draft, rtol=1e-6)
    if name not in ("autoregressive", "rate optimal"):
        assert result.passes.accepted.nunique() > 1  # passes that are all alike show little


@settings(max_examples=60, deadline=None)
@given(models, every_policy, st.lists(st.lists(st.integers(0, 5), min_size=4, max_size=12), min_size=1, max_size=3))
def test_replay_is_following_the_real_drafter(model, policy: Policy, answers):
    trace = traced(model, [policy], answers, ahead=2)
    rows = []
    for index, answer in enumerate(answers):
        reading = reading_of(answer[:-2], f"p{index}", answer[-2:])
        rows += follow(Walking(model), policy, reading, 99, "x")
    result = replay(trace, policy, name="x")
    expected = pd.DataFrame([vars(row) for row in rows])
    pd.testing.assert_frame_equal(result.passes, expected[result.passes.columns], check_dtype=False)
    assert result.uncovered == 0


@settings(max_examples=60, deadline=None)
@given(models, every_policy, st.lists(st.lists(st.integers(0, 5), min_size=2, max_size=12), min_size=1, max_size=3),
       st.integers(14, 20))  # fmt: skip
def test_positions_computed_together_are_those_computed_one_by_one(model, policy, answers, max_length: int):
    """Near the end of the context too, where trees must shrink; and uncovered requests are counted alike."""
    if not policy.fixed_shape:
        return
    trace = traced(model, [Chain(2)], answers, max_length=max_length)
    together, alone = (run(trace, policy, costs([1.0, 2.0, 4.0]), "x") for run in (batched, followed))
    pd.testing.assert_frame_equal(together[0], alone[0], check_dtype=False)
    assert together[1] == alone[1]


def test_which_policies_are_computed_together():
    fixed = {name for name, policy in LIVE.items() if policy.fixed_shape}
    adaptive = {"opt tree", "best first", "talon", "confidence stop", "entropy stop", "rate optimal"}
    assert fixed == LIVE.keys() - adaptive

    @dataclass(frozen=True)
    class Watching(Eagle2):
        def observe(self, row):
            pass

    assert not Watching().fixed_shape and not DepthStop(Watching()).fixed_shape


def test_a_policy_that_learns_is_shown_every_pass_in_the_traces_order():
    seen = []

    class Watching(Chain):
        def observe(self, row):
            seen.append((row.prompt_id, row.pass_id, row.pass_s))

    trace = traced(PathModel(1, FINE), [Chain(2)], [[0, 1, 2], [3, 4]])
    replay(trace, Watching(2), costs([1.0, 1.0, 2.0], 0.25, 0.5))
    assert [one[:2] for one in seen] == [("p0", place) for place in range(len(seen) - 1)] + [("p1", 0)]
    assert {one[2] for one in seen} == {2.0 + 2 * 0.25 + 0.5}  # three positions, two steps, what is fixed


def test_where_passes_begin():
    """Accepted 0, 2, 9: positions 0, 1, and then beyond the end."""
    assert visited(np.array([0, 2, 9, 0])).tolist() == [0, 1]
    assert visited(np.array([0, 0, 0])).tolist() == [0, 1, 2]
    assert visited(np.array([], dtype=int)).tolist() == []


def test_the_last_pass_accepts_what_lies_behind_the_end():
    """The chain would spell four tokens; the text ends after one, and three more are known."""
    model = PathModel(2, FINE)
    drafter = Walking(model)
    drafter.start(None, None, None)
    chain = grow(drafter, Chain(4), torch.tensor([0])).token.tolist()
    for ahead, accepted in ((0, 1), (2, 3), (3, 4)):
        part = replace(part_of(chain[:2]), ahead_ids=chain[2 : 2 + ahead])
        trace = Trace(SETTINGS, (recorded(part, Walking(model), {"chain": Chain(4)}, reading_of(chain[:2])),))
        (row,) = replay(trace, Chain(4)).passes.to_dict("records")
        assert (row["accepted"], row["emitted"]) == (accepted, 1)


# --- what is not covered ---


def test_uncovered_requests_are_counted_and_answered_by_nothing():
    """A trace of the wide beam lacks the narrow one's second step, at both positions (see NESTLESS)."""
    answer = [0, 0, 0]
    part = recorded(part_of(answer), Table(NESTLESS), {"wide": Eagle2(6, 2, 2)}, reading_of(answer))
    trace = Trace(SETTINGS, (part,))
    assert replay(trace, Chain(2)).uncovered == 0
    lacking = replay(trace, Chain(3))
    assert lacking.uncovered == 1 and lacking.passes.accepted.tolist() == [2]
    assert replay(trace, Eagle2(6, 3, 1)).uncovered > 0  # a third candidate was never asked


def test_more_candidates_than_were_ever_asked_are_uncovered():
    trace = traced(PathModel(1, FINE), [Eagle2(2, 2, 1)], [[0, 1, 2]])
    assert replay(trace, Eagle2(6, 5, 1)).uncovered >= 2
    assert replay(trace, BestFirst(6, 2, 5, 2)).uncovered >= 2


# --- time ---


def test_a_pass_takes_what_the_table_says():
    """Two prompts of two tokens: contexts 2 and 3. T(1) = 1 at context 2, 3 at context 4; a step of one node 0.1,
    of two nodes 0.2; 0.5 fixed. EAGLE-2 with two nodes wide, one round: four nodes verified after two steps."""
    verify = [points("verify", {1: one, 5: one + 4}, context) for context, one in ((2, 1.0), (4, 3.0))]
    cost = table(*verify, points("draft", {1: 0.1, 2: 0.2}))
    trace = traced(PathModel(4, FINE), [Eagle2(4, 2, 1)], [[0, 1, 2], [3, 4]])
    plain = replay(trace, Autoregressive(), cost).passes
    assert plain.pass_s.tolist() == pytest.approx([1.5, 2.5, 1.5])
    passes = replay(trace, Eagle2(4, 2, 1), cost).passes
    assert passes.pass_s.tolist()[0] == pytest.approx(1 + 4 + 0.1 + 0.2 + 0.5)
    assert replay(trace, Autoregressive()).passes.pass_s.isna().all()


def test_trees_larger_than_the_table_knows_are_refused():
    trace = traced(PathModel(4, FINE), [Eagle2(4, 2, 1)], [[0, 1, 2]])
    with pytest.raises(ValueError, match="mine verifies 5 positions at once; the cost table ends at 3"):
        replay(trace, Eagle2(4, 2, 1), costs([1.0, 1.0, 1.0]), "mine")


# --- what cannot be replayed ---


def test_what_was_made_for_something_else_is_refused():
    trace = traced(PathModel(4, FINE), [Chain(2)], [[0, 1, 2]])
    warm = Calibrated(Chain(2), Temperatures((1.0,), greedy=False))
    with pytest.raises(ValueError, match="fitted at T > 0; at T = 0"):
        replay(trace, warm)
    other = Calibrated(Chain(2), Temperatures((1.0,), greedy=True, drafter="e"))
    with pytest.raises(ValueError, match="the calibration is of drafter e; here it is d"):
        replay(trace, other)
    replay(trace, Calibrated(Chain(2), Temperatures((1.0,), greedy=True, drafter="d")))
    with pytest.raises(ValueError, match="asks for 7 candidates a node; the drafter's vocabulary has 6"):
        replay(trace, Eagle2(9, 7, 1))


def test_a_rule_replays_the_drafts_that_it_is_for():
    greedy, top_k = (Trace({**SETTINGS, "temperature": temperature}, ()) for temperature in (0.0, 1.0))
    coupled = Trace({**top_k.settings, "draw": {"kind": "coupled", "temperature": 1.0, "error_scale": 2.0}}, ())
    assert top_k.draw == greedy.draw == TOP_K and coupled.draw == Draw("coupled", 1.0, 2.0)
    check_rule(top_k, Match())
    check_rule(coupled, Coupled())
    check_rule(greedy, Coupled())  # at temperature 0 its drafts are the most likely tokens
    named = r"accept: {} is for drafts of draw.kind={}, and the trace was recorded with draw.kind={}:"
    with pytest.raises(ValueError, match=named.format("Coupled", "coupled", "top_k")):
        check_rule(top_k, Coupled())
    with pytest.raises(ValueError, match=named.format("Match", "top_k", "coupled")):
        check_rule(coupled, Match())
    for rule in (Sequential(), Hybrid()):
        with pytest.raises(ValueError, match=f"accept: {type(rule).__name__} needs the law q"):
            check_rule(coupled, rule)


def test_a_selection_that_is_not_closed_is_caught():
    class Orphans(Chain):
        fixed_shape = True

        def select(self, growing):
            return torch.tensor([2])

    trace = traced(PathModel(4, FINE), [Chain(2)], [[0, 1, 2]])
    with pytest.raises(AssertionError, match="Orphans selected a node without its parent"):
        replay(trace, Orphans(2))


def test_a_prompt_without_positions_has_no_passes():
    trace = traced(PathModel(4, FINE), [Chain(2)], [[0, 1, 2], [5]])
    for policy in (Chain(2), Talon(2, 1)):
        assert set(replay(trace, policy).passes.prompt_id) == {"p0"}
    assert text_of([5]).answer_ids == [5] and math.isnan(replay(trace, Chain(1)).passes.verify_s[0])
