"""Recorded runs gathered into frames: what is kept, what is warned of, what is refused."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from eagle_tree import analysis
from eagle_tree.curves import with_ancestry
from eagle_tree.record import NODE_COLUMNS, PASS_SCHEMA, PassRow, RunWriter

NUMBERS = {name: 0 for name in PASS_SCHEMA.names if name not in ("policy", "prompt_id", "category")}


def one_pass(policy: str, prompt: str, number: int) -> PassRow:
    return PassRow(policy=policy, prompt_id=prompt, category="c", **{**NUMBERS, "pass_id": number, "emitted": 1})


def output(policy: str, prompt: str) -> dict:
    return {"policy": policy, "prompt_id": prompt, "category": "c", "token": [1], "text": "", "decode_s": 1.0}


def recorded(folder: Path, prompts: str = "pq", passes: int = 2, close: bool = True, **about) -> Path:
    """A run of a policy `a`: `passes` passes a prompt, one node each."""
    writer = RunWriter(folder)
    node = {name: np.ones(1, kind) for name, kind in NODE_COLUMNS.items()}
    for prompt in prompts:
        rows = [one_pass("a", prompt, number) for number in range(passes)]
        writer.write_prompt(rows, [node] * passes, output("a", prompt))
    if close:
        about = {"commit": "c0", "device": "cpu", "versions": {"torch": "2"}, "config": {"temperature": 0.5}, **about}
        writer.close(about)
    return folder


def test_a_run_and_a_folder_of_runs_load_alike(tmp_path):
    recorded(tmp_path / "sets" / "one")
    recorded(tmp_path / "two", prompts="p", passes=3)
    alone, many = analysis.load(tmp_path / "sets" / "one"), analysis.load(tmp_path)
    assert (len(alone.passes), len(alone.nodes), alone.runs.run.tolist()) == (4, 4, ["one"])
    assert many.runs.set_index("run").passes.to_dict() == {"sets/one": 4, "two": 3}
    assert many.passes.groupby("run").size().to_dict() == {"sets/one": 4, "two": 3}
    assert many.nodes.groupby("run").size().to_dict() == {"sets/one": 4, "two": 3}
    assert many.passes.columns.tolist() == ["run", *PASS_SCHEMA.names]
    row = many.runs.iloc[0]
    assert (row.verb, row.whole, row.temperature, row.commit, row.torch) == ("bench", True, 0.5, "c0", "2")
    assert (row.policies, row.prompts, row["dtype"]) == (1, 2, None)


def test_replays_and_evaluations_have_passes_and_no_nodes(tmp_path):
    for name, mark in (("replayed", "run.json"), ("evaluated", "evaluation.json")):
        folder = tmp_path / name
        recorded(folder)
        for table in ("nodes", "outputs"):
            (folder / f"{table}.parquet").unlink()
        about = json.loads((folder / "run.json").read_text())
        (folder / "run.json").unlink()
        traced = {"trace_settings": {"temperature": 1.0, "dtype": "float32"}} if name == "replayed" else {}
        (folder / mark).write_text(json.dumps({**about, **traced}))
    loaded = analysis.load(tmp_path)
    assert loaded.runs.set_index("run").verb.to_dict() == {"evaluated": "evaluate", "replayed": "replay"}
    assert loaded.runs.set_index("run").temperature.to_dict() == {"evaluated": 0.5, "replayed": 1.0}
    assert len(loaded.passes) == 8 and loaded.nodes.empty
    assert loaded.nodes.columns.tolist()[:2] == ["run", "policy"]


def test_an_interrupted_run_gives_its_finished_prompts_with_a_warning(tmp_path):
    folder = recorded(tmp_path / "cut", close=False)
    (folder / "parts" / "outputs-000001.parquet").unlink()  # the second prompt was being written
    with pytest.warns(UserWarning, match="cut was interrupted"):
        loaded = analysis.load(tmp_path)
    assert loaded.passes.prompt_id.unique().tolist() == ["p"]
    assert loaded.runs.whole.tolist() == [False] and loaded.runs.commit.tolist() == [None]


def test_a_run_without_passes_is_warned_of_and_none_at_all_refused(tmp_path):
    recorded(tmp_path / "empty", passes=0)
    with pytest.warns(UserWarning, match="empty holds no passes"), pytest.raises(ValueError, match="holds a pass"):
        analysis.load(tmp_path)
    recorded(tmp_path / "full")
    with pytest.warns(UserWarning, match="empty holds no passes"):
        loaded = analysis.load(tmp_path)
    assert loaded.runs.set_index("run").passes.to_dict() == {"empty": 0, "full": 4}
    assert loaded.passes.run.unique().tolist() == ["full"]


def test_mixed_commits_are_named_and_equal_ones_are_not(tmp_path):
    recorded(tmp_path / "one")
    recorded(tmp_path / "two")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        analysis.load(tmp_path)
    shutil.rmtree(tmp_path / "two")
    recorded(tmp_path / "two", commit="c1")
    with pytest.warns(UserWarning, match="differ in commit c0, c1$"):
        analysis.load(tmp_path)


def test_a_table_of_another_schema_is_refused_by_name(tmp_path):
    folder = recorded(tmp_path / "old")
    path = folder / "passes.parquet"
    pq.write_table(pq.read_table(path).drop(["accepted"]), path)
    with pytest.raises(ValueError, match=r"old.passes.parquet was recorded under another schema: accepted is missing"):
        analysis.load(tmp_path)


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no recorded run"):
        analysis.load(tmp_path)


def test_trees_of_several_runs_are_kept_apart(tmp_path):
    """The same policy, prompt and pass in two runs: places 1 in both, not 1 and 2 of one tree."""
    table = pd.DataFrame({"node": [1], "parent": [0], "depth": [1], "rank": [0], "log_conf": [-1.0], "score": [-1.0]})
    table = table.assign(policy="a", prompt_id="p", pass_id=0, target_log_prob=0.0)
    both = pd.concat([table.assign(run="one"), table.assign(run="two")], ignore_index=True)
    assert with_ancestry(both).place.tolist() == [1, 1]
