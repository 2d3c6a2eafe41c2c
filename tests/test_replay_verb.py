"""The verbs `trace` and `replay` on a tiny target: what is recorded once is replayed, and mistakes are named."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from conftest import build_drafter
from test_evaluate import guided

from eagle_tree.accept import Coupled
from eagle_tree.apps import common
from eagle_tree.decode import generate
from eagle_tree.evaluate import read
from eagle_tree.policy import Chain, Eagle2
from eagle_tree.trace import Trace, read_parts

SMALL = "{policy:eagle2,budget:6,top_k:3}"


def result_of(called: tuple[int, str, str]) -> dict:
    """The JSON line of a verb that did its job."""
    status, out, errors = called
    assert status == 0, errors
    return json.loads(out.strip().splitlines()[-1])


def test_a_trace_is_recorded_extended_and_replayed_without_a_model(verbs, target, tmp_path, monkeypatch):
    first = result_of(verbs("trace", f"compare=[{SMALL}]", "policy=chain"))
    assert first["verb"] == "trace" and first["folder"] == "trace"
    assert (first["prompts"], first["positions"]) == (2, 22)
    assert first["policies"] == ["chain", "eagle2(budget=6,top_k=3)"]
    assert first["bytes_per_position"] == first["bytes"] / 22
    assert {len(part.ahead_ids) for part in read_parts("trace")} == {4 + 1}  # one more than the chain is deep
    again = result_of(verbs("trace", f"compare=[{SMALL}]", "policy=chain"))
    assert again == {**first, "added": 0}

    monkeypatch.setattr(common, "read_prompts", lambda config: pytest.fail("an extended trace has its own prompts"))
    reads = []
    monkeypatch.setattr("eagle_tree.apps.trace.read", lambda *a, **k: reads.append(a[2].prompt_id) or read(*a, **k))
    monkeypatch.setattr("eagle_tree.evaluate.generate", None)
    wider = result_of(verbs("trace", "extend=trace", "policy=eagle2", "policy.top_k=4", "policy.depth=3", "compare=[]"))
    assert wider["added"] > 0 and wider["expansions"] == first["expansions"] + wider["added"]
    assert reads == ["text-1", "text-2"]  # one forward over each text

    monkeypatch.setattr(common, "build_target", lambda config: pytest.fail("replay loads no model"))
    monkeypatch.setattr(common, "build_drafter", lambda config, target: pytest.fail("nor a drafter"))
    replayed = result_of(verbs("replay", f"compare=[{SMALL}]", "policy=chain", "cost=h100_8b", "run=here"))
    assert list(replayed["policies"]) == ["autoregressive", "eagle2(budget=6,top_k=3)", "chain"]
    assert replayed["passes_per_second"] > 0 and replayed["run"] == "here"
    for name, policy in (("chain", Chain(4)), ("eagle2(budget=6,top_k=3)", Eagle2(6, 3, 2))):
        passes = [
            len(generate(target, guided(target), policy, ids, 12).passes) for ids in ([7, 3, 50, 11, 3], [4, 5, 6, 7])
        ]
        ours = replayed["policies"][name]
        assert ours["uncovered"] == 0 and ours["passes"] == sum(passes) and ours["tau"] == 22 / sum(passes)
        assert ours["tokens_per_second"] > 0 and 0 < ours["bound_share"] <= 1
    assert replayed["policies"]["autoregressive"]["speedup"] == 1

    about = json.loads((tmp_path / "here" / "run.json").read_text())
    assert about["result"] == {key: value for key, value in replayed.items() if key != "verb"}
    assert about["cost"]["modelled"] and about["trace_settings"] == Trace.read("trace").settings
    table = pd.read_parquet(tmp_path / "here" / "passes.parquet")
    assert table.groupby("policy").emitted.sum().eq(22).all()
    assert "run=here already holds run.json" in verbs("replay", "policy=chain", "compare=[]", "run=here")[2]


def test_coupled_drafts_are_recorded_and_replayed_by_the_rule_for_them(verbs, target, monkeypatch):
    monkeypatch.setattr(common, "build_drafter", lambda config, target: build_drafter(target))
    result_of(verbs("trace", "policy=chain", "compare=[]", "temperature=1", "draw.kind=coupled"))
    result_of(verbs("trace", "extend=trace", "policy=eagle2", "policy.budget=6", "policy.top_k=3", "compare=[]"))
    replayed = result_of(verbs("replay", "accept=coupled", "policy=chain", f"compare=[{SMALL}]"))
    accepted = 0
    for name, policy in (("chain", Chain(4)), ("eagle2(budget=6,top_k=3)", Eagle2(6, 3, 2))):
        runs = [
            generate(target, build_drafter(target), policy, ids, 12, 1.0, sequence=f"text-{place}", rule=Coupled())
            for place, ids in ((1, [7, 3, 50, 11, 3]), (2, [4, 5, 6, 7]))
        ]
        passes = [one for run in runs for one in run.passes]
        accepted += sum(one.row.accepted for one in passes)
        ours = replayed["policies"][name]
        assert ours["uncovered"] == 0 and ours["passes"] == len(passes) and ours["tau"] == 22 / len(passes)
    assert accepted > 0
    status, _, errors = verbs("replay", "policy=chain", "compare=[]")
    assert status == 1 and "accept: Match is for drafts of draw.kind=top_k, and the trace was recorded with" in errors
    status, _, errors = verbs("replay", "accept=coupled", "policy=chain", "compare=[]", "regret=true")
    assert status == 1 and "trace.target_prob and regret are for draw.kind=top_k" in errors
    status, _, errors = verbs("trace", "policy=chain", "compare=[]", "temperature=1")
    assert status == 1 and "was recorded with draw {'kind': 'coupled', 'temperature': 1" in errors


def test_the_target_is_asked_again_when_a_trace_grows(verbs, tmp_path):
    """Five positions of two prompts are three of each; what another policy adds is appraised with them."""
    asked = ["trace.target_prob=true", "trace.positions=5", "trace.budget=9"]
    assert result_of(verbs("trace", "compare=[]", "policy=chain"))["appraised_positions"] == 0
    _, _, errors = verbs("replay", "policy=chain", "compare=[]", "regret=true")
    assert "the trace holds no probabilities of the target's" in errors
    assert result_of(verbs("trace", "compare=[]", "policy=chain", *asked))["appraised_positions"] == 6
    before = {part.text.prompt_id: part for part in read_parts("trace")}
    assert result_of(verbs("trace", "extend=trace", f"compare=[{SMALL}]", "policy=chain"))["appraised_positions"] == 6
    for part in read_parts("trace"):
        assert part.sampled == before[part.text.prompt_id].sampled and part.tree_budget == 9
        assert part.appraisal is not None and part.expansions.num_rows > before[part.text.prompt_id].expansions.num_rows
    result_of(verbs("replay", "policy=chain", f"compare=[{SMALL}]", "regret=true", "run=here"))
    losses = pd.read_parquet(tmp_path / "here" / "regret.parquet")
    assert losses.name.value_counts().to_dict() == {"chain": 6, "eagle2(budget=6,top_k=3)": 6}
    assert (losses[["ordering", "pool", "vocabulary", "no_drafter"]] >= 0).all().all()


def test_what_the_table_says_of_a_replay(verbs):
    """Uncovered requests stand beside the policy, with what to do; without a cost table there are no times."""
    result_of(verbs("trace", "compare=[]", "policy=chain"))
    status, out, _ = verbs("replay", "policy=eagle2", "compare=[]")
    assert status == 0
    header, _, _, eagle2 = (line.split() for line in out.splitlines()[:4])
    assert header[-1] == "uncovered" and eagle2[0] == "eagle2" and int(eagle2[-1]) > 0
    assert "not those of decoding" in out and "trace extend=" in out and "tokens/s" not in out
    status, out, _ = verbs("replay", "policy=chain", "compare=[]", "cost=h100_70b")
    assert "H100 SXM (modelled), modelled, not measured" in out and "tokens/s" in out and "not those of" not in out


def test_the_rate_optimal_policy_decides_by_the_table_that_times_it(verbs):
    result_of(verbs("trace", "compare=[]", "policy=eagle2_published"))
    rate = ["policy=rate_optimal", "policy.depth=4", "compare=[eagle2]"]
    result = result_of(verbs("replay", *rate, "cost=h100_70b"))
    assert result["policies"]["rate_optimal"]["uncovered"] == 0
    assert "no cost table in cost: measure one" in verbs("replay", *rate)[2]


def test_the_measured_rule_is_chosen_at_the_temperature_of_the_trace(verbs, tmp_path):
    rules = "temperature,rule,k,accepted\n1,match,4,0.4\n1,coupled,4,0.6\n"
    (tmp_path / "rules.csv").write_text(rules)
    for folder, drawn in (("trace", []), ("drawn", ["draw.kind=coupled", "temperature=1"])):
        result_of(verbs("trace", "compare=[]", "policy=chain", f"folder={folder}", *drawn))
        chosen = ["accept=measured", "accept.table=rules.csv", f"run={folder}-m"]
        measured = result_of(verbs("replay", "policy=chain", f"trace={folder}", *chosen))
        rule = "coupled" if drawn else "match"
        named = result_of(verbs("replay", "policy=chain", f"trace={folder}", f"accept={rule}"))
        assert measured["policies"] == named["policies"]
    assert json.loads((tmp_path / "drawn-m" / "run.json").read_text())["config"]["accept"]["temperature"] == 1


def test_a_tree_is_sized_by_the_table_that_times_it_if_its_size_is_not_given(verbs):
    result_of(verbs("trace", "compare=[]", "policy=chain"))
    tree = ["policy=sequoia", "policy.depth=2", "compare=[]", "cost=h100_8b"]
    given = result_of(verbs("replay", *tree, "policy.budget=3"))["policies"]["sequoia"]
    chosen = result_of(verbs("replay", *tree, "policy.budget=null"))["policies"]["sequoia"]
    assert given["nodes"] == 3 and chosen["nodes"] > 3
    status, _, errors = verbs("replay", *tree, "policy.budget=3", "policy.cost=cost")
    assert status == 1 and "sequoia: budget=3 and cost=a table: give the one" in errors


def test_a_stopped_recording_goes_on(verbs, target, monkeypatch):
    from eagle_tree.apps import trace as app

    record, calls = app.record, []

    def stopping(*arguments, **keywords):
        calls.append(arguments[3].text.prompt_id)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return record(*arguments, **keywords)

    monkeypatch.setattr(app, "record", stopping)
    status, _, errors = verbs("trace", "compare=[]", "policy=chain")
    assert status == 130 and "the finished prompts are kept in trace; the same command goes on" in errors
    assert [part.text.prompt_id for part in read_parts("trace")] == ["text-1"]
    assert result_of(verbs("trace", "compare=[]", "policy=chain"))["prompts"] == 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["policy=autoregressive", "compare=[]"], "policy: autoregressive never draft: there is nothing to record"),
        (["policy=eagle2", "compare=[chian]"], "compare: unknown policy 'chian'"),
        (["trace.positions=0"], "trace.positions=0 must be an integer >= 1"),
        (["trace.target_prob=3"], "trace.target_prob=3 must be true or false"),
        (
            ["draw.kind=coupled", "temperature=1", "trace.target_prob=true"],
            "trace.target_prob and regret are for draw.kind=top_k",
        ),
        (["draw.kind=hybrid", "temperature=1"], "candidates of draw.kind=hybrid are drawn anew by every pass"),
        (["draw.error_scale=0"], "draw: error_scale=0 must be a number above 0"),
        (["extend=nowhere"], "nowhere holds none"),
        (["~drafter"], "drafter: none is given"),
        (["policy.top_k=900"], "top_k=900"),
    ],
)
def test_mistakes_of_trace_are_named_before_any_work(verbs, tmp_path, arguments, named):
    status, _, errors = verbs("trace", *arguments)
    assert status not in (0, None) and named in errors and "Traceback" not in errors
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["trace=nowhere"], "nowhere holds none; record one with `eagle-tree trace folder=nowhere`"),
        (["policy=chain", "compare=[chian]"], "compare: unknown policy 'chian'"),
        (["policy.top_k=99"], "eagle2: Eagle2 asks for 99 candidates a node; the drafter's vocabulary has 61"),
        (["cost=measured"], "no cost table in cost"),
        (["accept=hybrid"], "accept: Hybrid needs the law q that candidates were drawn from"),
        (["cost=h100_8b", "cost.bandwidth=0"], "bandwidth=0 must be a positive number"),
        (["cost=h100_8b", "cost.target=null"], "target=None must be the fields parameters"),
        (["cost=h100_8b", "cost.target.layers=-3"], "layers=-3 must be a positive number"),
    ],
)
def test_mistakes_of_replay_are_named(verbs, tmp_path, arguments, named):
    result_of(verbs("trace", "compare=[]", "policy=chain"))
    status, _, errors = verbs("replay", *arguments)
    assert status not in (0, None) and named in errors and "Traceback" not in errors
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (["temperature=1"], "was recorded with temperature 0.0 (not 1"),
        (["seed=3"], "was recorded with seed 0 (not 3)"),
        (["max_new_tokens=13"], "was recorded with max_new_tokens 12 (not 13)"),
    ],
)
def test_another_setting_does_not_go_into_the_same_trace(verbs, changes, named):
    result_of(verbs("trace", "compare=[]", "policy=chain"))
    status, _, errors = verbs("trace", "compare=[]", "policy=eagle2", *changes)
    assert status == 1 and named in errors


def test_another_drafter_or_text_does_not_go_into_the_same_trace(verbs, target, tmp_path, monkeypatch):
    result_of(verbs("trace", "compare=[]", "policy=chain"))
    monkeypatch.setattr(common, "build_drafter", lambda config, target: build_drafter(target))
    assert "was recorded with drafter" in verbs("trace", "extend=trace", "policy=eagle2")[2]
    monkeypatch.setattr(common, "build_drafter", lambda config, target: guided(target))
    (tmp_path / "prompts.txt").write_text("7 3 50 11 4\n\n4 5 6 7\n")
    (tmp_path / "trace" / "texts.parquet").unlink()
    assert "prompt 'text-1' has another text there" in verbs("trace", "policy=eagle2")[2]


def test_other_prompts_do_not_go_into_the_same_trace(verbs, tmp_path):
    def prompts(*ids: int) -> None:
        rows = [{"id": f"p{one}", "messages": [{"role": "user", "content": f"7 3 {one} 11"}]} for one in ids]
        (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    arguments = ["data=messages", "data.path=p.jsonl", "compare=[]", "policy=chain"]
    prompts(4, 5)
    result_of(verbs("trace", *arguments))
    prompts(4)
    assert "recorded 'p5' as prompt 1, which data does not hold" in verbs("trace", *arguments)[2]
    prompts(6, 4, 5)
    assert "recorded 'p4' as prompt 0, which data has as prompt 1" in verbs("trace", *arguments)[2]
    prompts(4, 5, 6)
    assert result_of(verbs("trace", *arguments))["prompts"] == 3
    assert [part.index for part in read_parts("trace")] == [0, 1, 2]
