"""The verbs, as a user calls them: exit status, the last JSON line, files, and errors before any work."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from eagle_tree.apps import common
from eagle_tree.apps.common import build_target
from eagle_tree.cost import CostTable
from eagle_tree.record import read_run

SMALL = ["data.limit=2", "max_new_tokens=12", "policy.budget=8", "policy.top_k=3", "policy.depth=2"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "eagle_tree.apps.cli", *arguments]


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(command(*arguments), cwd=tmp_path, capture_output=True, text=True, timeout=300)


@pytest.fixture()
def call(tmp_path, monkeypatch, eagle_tree, target):
    """Exit status, output and errors of a call in this process, on the model that is loaded already."""
    monkeypatch.chdir(tmp_path)
    here = {"name_or_path": "smollm2-135m", "dtype": "float32", "device": "cpu", "attn_implementation": "sdpa"}
    monkeypatch.setattr(common, "build_target", lambda config: target if config == here else build_target(config))

    def call(verb: str, *arguments: str) -> tuple[int | None, str, str]:
        exact = [] if any(word.startswith("target.dtype") for word in arguments) else ["target.dtype=float32"]
        return eagle_tree(verb, *arguments, *exact)

    return call


def result(status: int | None, output: str, errors: str) -> dict:
    """The JSON line of a call that succeeded."""
    assert status == 0, errors
    return json.loads(output.strip().splitlines()[-1])


def test_bench_compares_policies_and_writes_its_tables(tmp_path, call):
    done = call("bench", *SMALL, "temperature=1", "policy.total_token=9")
    report = result(*done)
    assert report["verb"] == "bench"
    assert list(report["policies"]) == ["autoregressive", "chain", "eagle2"]
    keys = {"tau", "tau_low", "tau_high", "expected_draft", "expected_target"}
    keys |= {"tokens_per_second", "speedup", "overhead_share"}
    for policy in report["policies"].values():
        assert keys <= policy.keys()
    assert report["policies"]["autoregressive"]["tau"] == 1
    assert report["policies"]["autoregressive"]["speedup"] == 1
    assert report["policies"]["eagle2"]["tau"] >= 1
    assert "acceptance meter" in done[1]

    folder = tmp_path / report["run"]
    about = json.loads((folder / "run.json").read_text())
    assert {"commit", "versions", "device", "threads", "dtype", "config", "wall_s"} <= about.keys()
    assert (folder / "expected_realised.png").read_bytes().startswith(b"\x89PNG")
    passes, nodes, outputs = (pd.read_parquet(folder / f"{name}.parquet") for name in ("passes", "nodes", "outputs"))
    assert len(outputs) == 6
    assert (outputs.token.map(len) <= 12).all()
    assert passes[passes.policy == "eagle2"].n_nodes.eq(8).all()  # total_token counts the root
    assert len(nodes) == passes.n_nodes.sum()
    assert passes.emitted.sum() + len(outputs) == outputs.token.map(len).sum()
    assert not list(tmp_path.glob("*.log"))


def test_an_interrupted_bench_keeps_its_finished_answers_and_says_so(tmp_path):
    process = subprocess.Popen(
        command("bench", "max_new_tokens=16", "run=here", "target.dtype=float32"),
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 240
        while not list(tmp_path.glob("here/parts/outputs-000001.parquet")):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()  # nothing, if it has ended
    assert process.returncode == 130
    assert "interrupted" in errors and "finished answers are kept in here" in errors
    assert not (tmp_path / "here" / "run.json").exists()
    assert len(read_run(tmp_path / "here", "outputs")) >= 2


def test_generate_streams_text_with_accepted_runs_marked(tmp_path):
    done = run(tmp_path, "generate", "Count from one to ten.", "max_new_tokens=24", "color=never")
    report = result(done.returncode, done.stdout, done.stderr)
    assert report["tokens"] <= 24
    shown = done.stdout.split("\n\n")[0]
    assert "⟦" in shown
    assert shown.replace("⟦", "").replace("⟧", "") == report["text"].split("\n\n")[0]


def test_a_drafter_is_trained_by_the_readme_commands_and_used(tmp_path, call):
    small = ["data=bundled", "data.limit=4", "sampling.rows=4", "sampling.max_answer_tokens=32"]
    made = result(*call("corpus", "sampling.answer_tokens=100", *small))
    assert made["answer_tokens"] >= 100
    again = result(*call("corpus", "sampling.answer_tokens=100", *small))
    assert again["answer_tokens"] == made["answer_tokens"]  # nothing left to do
    settings = ["head.draft_vocab_size=512", "training.max_length=96", "features=features", "training.steps=3"]
    trained = result(*call("train", "corpus=corpus", "folder=drafter", *settings))
    assert trained["steps"] == 3
    assert len(trained["agreement"]) == 4
    assert (tmp_path / "drafter" / "training.png").stat().st_size > 1000
    drafter = ["drafter=checkpoint", "drafter.folder=drafter", "data.limit=1"]
    judged = result(*call("evaluate", *drafter, "max_new_tokens=8", "depths=2", "policies=[chain]"))
    assert len(judged["n_alpha"]) == 2
    report = result(*call("bench", *SMALL, *drafter, "compare=[]"))
    assert report["policies"]["eagle2"]["tau"] >= 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["bench", "policy.budget=0"], "budget=0"),
        (["bench", "policy.depth=-1"], "depth=-1"),
        (["bench", "policy.top_k=9000"], "top_k=9000"),
        (["bench", "temperature=-1"], "temperature=-1"),
        (["bench", "top_p=0"], "top_p=0"),
        (["bench", "top_p=1.5"], "top_p=1.5"),
        (["bench", "max_new_tokens=0"], "max_new_tokens=0"),
        (["bench", "max_new_tokens=9000"], "context of 8192"),
        (["bench", "data=questions", "data.path=missing.jsonl"], "missing.jsonl"),
        (["bench", "policy.bugdet=3"], "bugdet"),
        (["bench", "compare=[autoregresive]"], "autoregresive"),
        (["bench", "target.dtype=float12"], "float12"),
        (["bench", "target.attn_implementation=flash_attention_2"], "flash_attention_2"),
        (["bench", "target.name_or_path=nowhere/model.gguf"], "nowhere/model.gguf"),
        (["bench", "drafter=eagle", "drafter.folder=nowhere"], "nowhere"),
        (["generate", ""], "prompt is empty"),
        (["corpus", "sampling.rows=0"], "rows=0"),
        (["train", "corpus=nowhere"], "nowhere"),
        (["train", "training.steps=0"], "steps=0"),
        (["dance"], "dance"),
    ],
)
def test_a_mistake_is_named_before_any_work(tmp_path, call, arguments, named):
    status, _, errors = call(*arguments)
    assert status not in (0, None)
    assert named in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "policy=rate_optimal", "policy.budget=4"],
        ["generate", "Why is the sky blue?", "policy=rate_optimal", "policy.budget=4"],
        ["evaluate", "policies=[{policy: rate_optimal, budget: 4}]"],
    ],
)
def test_a_cost_table_of_another_machine_is_refused(tmp_path, call, arguments):
    rows = [{"stage": "verify", "n": n, "context": 9, "batch": 1, "repeats": 3} for n in (1, 5)]
    points = pd.DataFrame(rows).assign(seconds=1.0, low=1.0, high=1.0)
    CostTable(points, 0.0, 0.0, 0.0, {"device": "an abacus", "dtype": "float32", "threads": 10}).save(tmp_path / "cost")
    status, _, errors = call(*arguments)
    assert status not in (0, None)
    assert "device 'an abacus' there" in errors and "Traceback" not in errors
    assert not (tmp_path / "runs").exists()


def test_a_malformed_prompt_line_is_named_by_its_number(tmp_path, call):
    (tmp_path / "bad.jsonl").write_text('{"question_id": 1, "category": "x", "turns": ["hi"]}\n{"turns": \n')
    status, _, errors = call("bench", "data=questions", f"data.path={tmp_path}/bad.jsonl")
    assert status not in (0, None)
    assert "line 2" in errors
