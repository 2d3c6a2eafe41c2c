"""What a policy loses, and to what: against enumerations, on traces made by hand and on a tiny target."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from conftest import VOCAB, build_drafter, build_target
from hypothesis import given, settings
from hypothesis import strategies as st
from test_evaluate import PROMPT, SAMPLED
from test_policy_rate import costs
from test_trace import SETTINGS, Walking, part_of, reading_of
from tree_models import FINE, PathModel, closed_subtrees, every_policy, models

from eagle_tree.appraise import Pool, appraised, sample, with_ancestors
from eagle_tree.decode import generate, grow
from eagle_tree.evaluate import Text, read
from eagle_tree.policy import Autoregressive, Chain, Eagle2, RateOptimal
from eagle_tree.regret import BOUNDS, PARTS, decomposed, regrets
from eagle_tree.trace import APPRAISAL_SCHEMA, Part, Trace, levels, recorded, trace_settings
from eagle_tree.warp import Sampling

BUDGET = 60


def best(law: PathModel, root: int, tokens: range, depth: int) -> list[float]:
    """Products of a law along all paths over some tokens, at most so deep, the largest first."""
    found, level = [], [((root,), 1.0)]
    for _ in range(depth):
        level = [((*path, token), reach * math.exp(law.log_probs(path)[token]))
                 for path, reach in level for token in tokens]  # fmt: skip
        found += [reach for _, reach in level]
    return sorted(found, reverse=True)[:BUDGET]


def by_hand(part: Part, law: PathModel, drafted: range) -> Part:
    """The part appraised at every position by a law that is a function of (position, path)."""
    columns = {name: [None] * part.expansions.num_rows for name in APPRAISAL_SCHEMA.names}
    positions = tuple(range(len(part.text.answer_ids) - 1))
    for position in positions:
        pool = Pool.at(part, position)
        paths = {0: (100 + position,)}
        for node in range(1, pool.tree.n_nodes + 1):
            paths[node] = (*paths[int(pool.tree.parent[node])], int(pool.tree.token[node]))
        start = 1
        for row, size in zip(pool.row, pool.size):
            nodes = range(start, start + size)
            columns["target_log_prob"][row] = [float(law.log_probs(paths[one][:-1])[paths[one][-1]]) for one in nodes]
            columns["target_entropy"][row] = [0.0] * size
            start += size
        root, depth = pool.row[0], pool.tree.max_depth
        columns["levels"][root], columns["root_entropy"][root] = depth, 0.0
        columns["best"][root] = best(law, 100 + position, range(law.vocab), depth)
        columns["best_drafted"][root] = best(law, 100 + position, drafted, depth)
    table = pa.table({name: pa.array(rows, APPRAISAL_SCHEMA.field(name).type) for name, rows in columns.items()})
    return replace(part, sampled=positions, tree_budget=BUDGET, appraisal=table)


def asked(model: PathModel, policy, answer: list[int]) -> Part:
    """What the policy asks along a text."""
    return recorded(part_of(answer), Walking(model), {"p": policy}, reading_of(answer))


def judged(model: PathModel, law: PathModel, policy, answer: list[int]) -> Trace:
    """A trace of it that the law has appraised."""
    return Trace(SETTINGS, (by_hand(asked(model, policy, answer), law, range(model.vocab)),))


@settings(max_examples=25, deadline=None)
@given(models, st.integers(0, 99), every_policy)
def test_parts_are_never_negative_and_add_up_to_the_gap(model, seed: int, policy):
    policy = Eagle2(6, 2, 2) if policy.max_candidates() == 0 else policy
    model, law = replace(model, vocab=4), PathModel(seed, FINE, vocab=5)
    if policy.max_candidates() > 4:
        policy = Eagle2(9, 4, 1)
    if levels(asked(model, policy, [0, 1, 2]).expansions) > 4:
        return  # enumerating five tokens five deep takes long and shows nothing new
    trace = judged(model, law, policy, [0, 1, 2])
    for row in regrets(trace, policy, "p").to_dict("records"):
        assert all(row[name] >= 0 for name in PARTS)
        assert sum(row[name] for name in PARTS) == pytest.approx(row["whole"] - row["policy"], abs=1e-9)
        assert [row[name] for name in BOUNDS] == sorted(row[name] for name in BOUNDS)


@pytest.mark.parametrize("seed", range(4))
def test_bounds_against_enumeration(seed: int):
    """Three nodes of a pool of two and four; the target's law over five tokens, of which the drafter has four."""
    policy, law = Eagle2(3, 2, 1), PathModel(seed + 50, FINE, vocab=5)
    trace = judged(PathModel(seed, FINE, vocab=4), law, policy, [0, 1, 2])
    rows = regrets(trace, policy, "p")
    for position, row in enumerate(rows.to_dict("records")):
        pool = Pool.at(trace.parts[0], position).tree
        paths = {0: (100 + position,)}
        for node in range(1, 7):
            paths[node] = (*paths[int(pool.parent[node])], int(pool.token[node]))
        reach = {0: 1.0}
        for node in range(1, 7):
            above = int(pool.parent[node])
            reach[node] = reach[above] * math.exp(law.log_probs(paths[above])[paths[node][-1]])
        worth = {kept: 1 + sum(reach[node] for node in kept) for kept in closed_subtrees(pool.parent.tolist())}
        drafter = Walking(PathModel(seed, FINE, vocab=4))
        drafter.position = position
        growing = grow(drafter, policy, torch.tensor([[0, 1, 2][position]]))
        assert row["policy"] == pytest.approx(worth[tuple(sorted(policy.select(growing).tolist()))], abs=1e-6)
        assert row["pool_best"] == pytest.approx(
            max(value for kept, value in worth.items() if len(kept) == 3), abs=1e-6
        )
        assert row["drafted_best"] == pytest.approx(1 + sum(best(law, 100 + position, range(4), 2)[:3]), abs=1e-6)
        assert row["best"] == pytest.approx(1 + sum(best(law, 100 + position, range(5), 2)[:3]), abs=1e-6)
        assert row["whole"] == 3  # three nodes of two levels: two can be accepted, and the bonus token


def test_a_policy_that_drafts_as_the_target_would_loses_nothing_to_ordering():
    """Same law over the same tokens, everything expanded: what is lost is the target's own uncertainty."""
    law = PathModel(8, FINE, vocab=4)
    policy = Eagle2(5, 4, 1)
    rows = regrets(judged(law, law, policy, [0, 1, 2, 3]), policy, "p")
    np.testing.assert_allclose(rows[["ordering", "pool", "vocabulary"]], 0, atol=1e-6)
    assert (rows.no_drafter > 0.1).all()


def test_means_are_sums_over_sums():
    """Prompt a loses 1 at each of three positions, b 5 at its only one: 2, not 3."""
    rows = pd.DataFrame(
        [{"name": "p", "prompt_id": "a", "nodes": 2}] * 3 + [{"name": "p", "prompt_id": "b", "nodes": 6}]
    )
    for name in (*BOUNDS, *PARTS):
        rows[name] = [1.0, 1.0, 1.0, 5.0]
    (row,) = decomposed(rows).to_dict("records")
    assert (row["ordering"], row["positions"], row["nodes"], row["gap"]) == (2.0, 4, 3.0, 0.0)
    assert (row["ordering_low"], row["ordering_high"]) == (1.0, 5.0)


def test_what_cannot_be_decomposed_is_named():
    policy, model = Eagle2(3, 2, 1), PathModel(3, FINE, vocab=4)
    plain = Trace(SETTINGS, (recorded(part_of([0, 1]), Walking(model), {"p": policy}, reading_of([0, 1])),))
    with pytest.raises(ValueError, match=r"holds no probabilities of the target's: .* trace.target_prob=true"):
        regrets(plain, policy, "p")
    trace = judged(model, PathModel(9, FINE, vocab=5), policy, [0, 1])
    with pytest.raises(ValueError, match="mine learns from pass to pass"):
        regrets(trace, RateOptimal(costs([1.0] * 9), 3, 2, 2), "mine")
    with pytest.raises(ValueError, match="mine asks for what the trace does not hold"):
        regrets(trace, Eagle2(3, 4, 1), "mine")
    small = Trace(SETTINGS, (replace(trace.parts[0], tree_budget=2),))
    with pytest.raises(ValueError, match="mine has trees of 3 nodes; the trace's best trees end at 2"):
        regrets(small, policy, "mine")
    wider = recorded(trace.parts[0], Walking(model), {"c": Chain(3)}, reading_of([0, 1]))
    assert wider.sampled and wider.appraisal is None  # expansions came after it
    both = Trace(SETTINGS, (wider, replace(trace.parts[0], index=1)))
    with pytest.raises(ValueError, match="prompt a was extended after the target's probabilities were taken"):
        regrets(both, policy, "p")


def test_the_empty_tree_is_worth_its_bonus_token():
    trace = judged(PathModel(3, FINE, vocab=4), PathModel(9, FINE, vocab=5), Eagle2(3, 2, 1), [0, 1])
    (row,) = regrets(trace, Autoregressive(), "a").to_dict("records")
    assert [row[name] for name in BOUNDS] == [1] * 5


# --- the target's own opinion ---


@pytest.fixture(scope="module", params=[Sampling(), SAMPLED, Sampling(0.8, top_k=9)], ids=["T=0", "T=1", "top-k"])
def opinion(request):
    """A tiny target's trace, appraised at three positions, and the part as it is read back."""
    target, sampling = build_target(), request.param
    drafter = build_drafter(target, draft_vocab=41)
    run = generate(target, None, Autoregressive(), PROMPT, 8, sampling=sampling, seed=1, sequence="a")
    part = Part(0, Text("a", "", PROMPT, run.tokens), [], trace_settings(target, drafter, sampling, 8, 1))
    reading = read(target, drafter.taps, part.text, sampling)
    part = recorded(part, drafter, {"p": Eagle2(9, 5, 2)}, reading)
    return target, drafter, sampling, appraised(part, target, sampling, (0, 3, 5), 7, drafter.target_id)


def law_after(target, sampling: Sampling, paths: list[list[int]]) -> torch.Tensor:
    """Laws `[n, V]` after whole texts of one length, one plain forward."""
    logits = target.model(torch.tensor(paths)).logits[:, -1].detach()
    if sampling.greedy:
        return torch.nn.functional.one_hot(logits.argmax(-1), VOCAB).double()
    scores = logits / sampling.temperature
    if sampling.top_k:
        scores[scores < scores.topk(sampling.top_k).values[:, -1:]] = -torch.inf
    return scores.softmax(-1)


def test_probabilities_and_entropies_are_those_of_plain_forwards(opinion):
    target, _, sampling, part = opinion
    appraisal = part.appraisal.to_pylist()
    for position in range(7):
        pool, known = Pool.at(part, position), part.text.prompt_ids + part.text.answer_ids[:position]
        if position not in (0, 3, 5):
            assert all(value is None for row in pool.row for value in appraisal[row].values())
            continue
        paths = {0: [part.text.answer_ids[position]]}
        for node in range(1, pool.tree.n_nodes + 1):
            paths[node] = [*paths[int(pool.tree.parent[node])], int(pool.tree.token[node])]
        start = 1
        for row, above, size in zip(pool.row, pool.node, pool.size):
            nodes = list(range(start, start + size))
            law = law_after(target, sampling, [known + paths[int(above)]])[0]
            expected = law[[paths[node][-1] for node in nodes]]
            np.testing.assert_allclose(np.exp(appraisal[row]["target_log_prob"]), expected, atol=1e-6)
            behind = law_after(target, sampling, [known + paths[node] for node in nodes])
            np.testing.assert_allclose(appraisal[row]["target_entropy"], torch.special.entr(behind).sum(-1), atol=1e-5)
            start += size
        own = torch.special.entr(law_after(target, sampling, [known + paths[0]])).sum()
        assert appraisal[pool.row[0]]["root_entropy"] == pytest.approx(float(own), abs=1e-5)
        assert appraisal[pool.row[0]]["levels"] == 3


def test_the_best_trees_are_those_of_all_paths(opinion):
    """Of all paths of three tokens at most, over all tokens and over those the drafter has: the seven likeliest."""
    target, drafter, sampling, part = opinion
    for position in (0, 5):
        known = part.text.prompt_ids + part.text.answer_ids[: position + 1]
        here = part.appraisal.to_pylist()[Pool.at(part, position).row[0]]
        for name, tokens in (("best", list(range(VOCAB))), ("best_drafted", drafter.target_id.tolist())):
            found, level = [], [(known, 1.0)]
            for _ in range(3):
                laws = law_after(target, sampling, [path for path, _ in level])
                level = [([*path, token], reach * float(law[token]))
                         for (path, reach), law in zip(level, laws) for token in tokens]  # fmt: skip
                found += [reach for _, reach in level]
                level = sorted(level, key=lambda one: -one[1])[:7]  # no other can lead to one of the seven best
            np.testing.assert_allclose(here[name], sorted(found, reverse=True)[:7], atol=1e-6)


def test_a_pool_is_verified_in_chunks_that_change_nothing(opinion, monkeypatch):
    """Chunks of five nodes: most hold leaves alone, and the last one a single node."""
    target, drafter, sampling, part = opinion
    monkeypatch.setattr("eagle_tree.appraise.CHUNK", 5)
    again = appraised(replace(part, appraisal=None), target, sampling, part.sampled, 7, drafter.target_id)
    for ours, theirs in zip(again.appraisal.to_pylist(), part.appraisal.to_pylist(), strict=True):
        for name in APPRAISAL_SCHEMA.names:
            assert ours[name] == (theirs[name] if theirs[name] is None else pytest.approx(theirs[name], abs=1e-6))


def test_an_appraised_part_is_written_and_read_back(opinion, tmp_path):
    part = opinion[3]
    again = Part.read(part.write(tmp_path))
    assert again == part and again.appraisal.equals(part.appraisal)
    memo = Trace(part.settings, (again,)).memo
    asked = ~memo.target_log_prob.isnan().all(-1)
    rows = [row for position in (0, 3, 5) for row in Pool.at(part, position).row]
    assert asked.nonzero().squeeze(-1).tolist() == sorted(rows)


def test_a_sample_is_a_function_of_seed_and_prompt():
    part = part_of(list(range(5)) * 8)
    assert sample(part, 10) == sample(part, 10) and len(set(sample(part, 10))) == 10
    assert sample(part, 99) == tuple(range(39))
    assert sample(part, 10) != sample(part_of(list(range(5)) * 8, "b"), 10)
    assert sample(part, 10) != sample(part_of(list(range(5)) * 8, seed=1), 10)


def test_ancestors_come_with_their_nodes():
    parent = torch.tensor([-1, 0, 0, 1, 3, 2])
    assert with_ancestors(parent, torch.tensor([4])).tolist() == [0, 1, 3, 4]
    assert with_ancestors(parent, torch.tensor([0])).tolist() == [0]
    assert with_ancestors(parent, torch.tensor([2, 3])).tolist() == [0, 1, 2, 3]
