"""Recording: parts while a run goes on, whole tables at its end, `run.json` last."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from eagle_tree import files, record
from eagle_tree.record import NODE_COLUMNS, TABLES, PassRow, RunWriter, read_run

ROW = PassRow(
    policy="eagle2",
    prompt_id="q1",
    category="maths",
    pass_id=0,
    context_length=11,
    n_nodes=2,
    depth=1,
    draft_steps=1,
    expanded=1,
    expected_draft=1.7,
    expected_target=1.25,
    accepted=1,
    emitted=2,
    acceptance_meter=0.75,
    surprisal_meter=float("nan"),
    **{name: 0.5 for name in (field.name for field in fields(PassRow)) if name.endswith("_s")},
)


NODE_TYPES = {
    "policy": "string",
    "prompt_id": "string",
    "pass_id": "int32",
    "node": "int32",
    "parent": "int32",
    "depth": "int16",
    "rank": "int16",
    "token": "int32",
    "log_conf": "float",
    "score": "float",
    "selected": "bool",
    "tried": "bool",
    "accepted": "bool",
    "parent_accepted": "bool",
    "target_log_prob": "float",
}
"""The node table's columns, which readers of recorded runs rely on."""


def nodes(*token: int) -> dict[str, np.ndarray]:
    """Node columns of a pass as decoding hands them over: fp64, one entry a draft node, all children of the root."""
    columns = {name: np.zeros(len(token)) for name in NODE_COLUMNS}
    columns |= {"node": np.arange(1.0, len(token) + 1), "token": np.array(token, dtype=float)}
    columns |= {"log_conf": np.full(len(token), -0.25), "accepted": np.arange(len(token)) == 0.0}
    return columns


def output(prompt_id: str, policy: str = "eagle2") -> dict:
    return {
        "policy": policy,
        "prompt_id": prompt_id,
        "category": "maths",
        "token": [5, 6, 7],
        "text": "five six seven",
        "prefill_s": 0.25,
        "decode_s": 1.5,
    }


def write(writer: RunWriter, prompt_id: str, passes: int = 2) -> None:
    """A prompt of some passes, two nodes each, whose tokens tell prompt and pass."""
    rows = [replace(ROW, prompt_id=prompt_id, pass_id=i) for i in range(passes)]
    writer.write_prompt(rows, [nodes(10 * i + 1, 10 * i + 2) for i in range(passes)], output(prompt_id))


def names(folder) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_closed_run_is_three_tables_and_a_json_file(tmp_path):
    writer = RunWriter(tmp_path / "run")
    for prompt_id in ("b", "a", "c"):
        write(writer, prompt_id)
    writer.close({"verb": "bench", "threads": 1})
    assert names(tmp_path / "run") == {"passes.parquet", "nodes.parquet", "outputs.parquet", "run.json"}
    assert json.loads((tmp_path / "run" / "run.json").read_text()) == {"verb": "bench", "threads": 1}


def test_prompts_stay_in_the_order_they_were_written_also_beyond_ten(tmp_path):
    writer = RunWriter(tmp_path / "run")
    order = [f"q{i}" for i in range(12)]
    for prompt_id in order:
        write(writer, prompt_id, passes=1)
    writer.close({})
    assert read_run(tmp_path / "run", "passes").prompt_id.tolist() == order
    assert read_run(tmp_path / "run", "outputs").prompt_id.tolist() == order


def test_each_prompt_is_a_row_group(tmp_path):
    """Readers may take a run prompt by prompt."""
    writer = RunWriter(tmp_path / "run")
    write(writer, "a", passes=2)
    write(writer, "b", passes=3)
    writer.close({})
    file = pq.ParquetFile(tmp_path / "run" / "passes.parquet")
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [2, 3]


def test_what_is_read_is_what_was_written(tmp_path):
    writer = RunWriter(tmp_path / "run")
    write(writer, "q1")
    writer.close({})
    passes, table, texts = (read_run(tmp_path / "run", name) for name in ("passes", "nodes", "outputs"))
    expected = pd.DataFrame([replace(ROW, pass_id=0), replace(ROW, pass_id=1)])
    pd.testing.assert_frame_equal(passes, expected, check_dtype=False)
    assert table.pass_id.tolist() == [0, 0, 1, 1]
    assert table.node.tolist() == [1, 2, 1, 2]
    assert table.token.tolist() == [1, 2, 11, 12]
    assert table.accepted.tolist() == [True, False, True, False]
    assert set(table.policy) == {"eagle2"}
    assert set(table.prompt_id) == {"q1"}
    assert texts.token[0].tolist() == [5, 6, 7]
    assert texts.text[0] == "five six seven"


def test_schemas(tmp_path):
    """Every field of a pass row is a column of its type, every node column has the one listed above, and no more."""
    writer = RunWriter(tmp_path / "run")
    write(writer, "q1")
    writer.close({})
    kinds = {"str": "string", "int": "int64", "float": "double"}
    expected = {"passes": {field.name: kinds[field.type] for field in fields(PassRow)}, "nodes": NODE_TYPES}
    for name, columns in expected.items():
        schema = pq.read_schema(tmp_path / "run" / f"{name}.parquet")
        assert {field.name: str(field.type) for field in schema} == columns
    for table in TABLES:
        assert pq.read_schema(tmp_path / "run" / f"{table}.parquet").equals(TABLES[table])


def test_an_interrupted_run_gives_its_finished_prompts(tmp_path):
    """No `close`, no `run.json`; what was written is there."""
    writer = RunWriter(tmp_path / "run")
    write(writer, "a")
    write(writer, "b", passes=3)
    assert "run.json" not in names(tmp_path / "run")
    assert read_run(tmp_path / "run", "passes").prompt_id.tolist() == ["a", "a", "b", "b", "b"]
    assert len(read_run(tmp_path / "run", "nodes")) == 10
    assert read_run(tmp_path / "run", "outputs").prompt_id.tolist() == ["a", "b"]


def test_an_interrupted_and_a_closed_run_read_alike(tmp_path):
    frames = {}
    for name in ("interrupted", "closed"):
        writer = RunWriter(tmp_path / name)
        write(writer, "a")
        write(writer, "b")
        if name == "closed":
            writer.close({})
        frames[name] = {table: read_run(tmp_path / name, table) for table in TABLES}
    for table in TABLES:
        pd.testing.assert_frame_equal(frames["interrupted"][table], frames["closed"][table])


@pytest.mark.parametrize("failing", ["passes", "nodes", "outputs"])
def test_a_failure_while_closing_leaves_no_run_json_and_loses_nothing(tmp_path, monkeypatch, failing):
    writer = RunWriter(tmp_path / "run")
    write(writer, "a")
    write(writer, "b")
    replace_file = files.os.replace

    def full_disk(source, destination):
        if destination.name == f"{failing}.parquet":
            raise OSError("no space left")
        replace_file(source, destination)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "replace", full_disk)
        with pytest.raises(OSError, match="no space left"):
            writer.close({})
    assert "run.json" not in names(tmp_path / "run")
    for table, column in (("passes", 4), ("nodes", 8), ("outputs", 2)):
        assert len(read_run(tmp_path / "run", table)) == column
    writer.close({})  # the parts are still there: closing again succeeds
    assert "run.json" in names(tmp_path / "run")


@pytest.mark.parametrize("part", [1, 2, 3])
def test_a_failure_while_writing_a_prompt_leaves_the_others(tmp_path, monkeypatch, part):
    """A part gets its name once it is whole, whichever of the three is being written."""
    writer = RunWriter(tmp_path / "run")
    write(writer, "a")
    real, calls = record.pq.write_table, []

    def interrupted(table, path, **options):
        calls.append(path)
        if len(calls) == part:
            path.write_bytes(b"half a file")
            raise KeyboardInterrupt
        real(table, path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(record.pq, "write_table", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write(writer, "b")
    for table in TABLES:
        assert set(read_run(tmp_path / "run", table).prompt_id) == {"a"}


def test_a_prompt_interrupted_between_its_tables_is_not_finished(tmp_path, monkeypatch):
    """Ctrl-C after one of the three parts: no table may show the prompt, neither now nor after closing."""
    writer = RunWriter(tmp_path / "run")
    write(writer, "a")
    real, calls = record.write_table, []

    def interrupted(table, path):
        calls.append(path)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(table, path)

    with monkeypatch.context() as patch:
        patch.setattr(record, "write_table", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write(writer, "b")
    assert all(set(read_run(tmp_path / "run", table).prompt_id) == {"a"} for table in TABLES)
    writer.close({})
    assert all(set(read_run(tmp_path / "run", table).prompt_id) == {"a"} for table in TABLES)


def test_a_prompt_without_passes_or_without_nodes_is_recorded(tmp_path):
    """A text that ends with prefill's token has no pass; autoregressive passes have no nodes."""
    writer = RunWriter(tmp_path / "run")
    writer.write_prompt([], [], output("a"))
    writer.write_prompt([replace(ROW, prompt_id="b", n_nodes=0)], [nodes()], output("b"))
    writer.close({})
    assert read_run(tmp_path / "run", "outputs").prompt_id.tolist() == ["a", "b"]
    assert read_run(tmp_path / "run", "passes").prompt_id.tolist() == ["b"]
    assert len(read_run(tmp_path / "run", "nodes")) == 0


def test_node_counts_may_differ_from_pass_to_pass(tmp_path):
    writer = RunWriter(tmp_path / "run")
    rows = [replace(ROW, pass_id=i) for i in range(3)]
    writer.write_prompt(rows, [nodes(1, 2, 3), nodes(), nodes(4)], output("q1"))
    table = read_run(tmp_path / "run", "nodes")
    assert list(zip(table.pass_id, table.token)) == [(0, 1), (0, 2), (0, 3), (2, 4)]


@pytest.mark.parametrize("closed", [False, True])
def test_a_folder_that_holds_a_run_is_refused(tmp_path, closed):
    writer = RunWriter(tmp_path / "run")
    write(writer, "a")
    if closed:
        writer.close({})
    before = {name: read_run(tmp_path / "run", name) for name in TABLES}
    with pytest.raises(FileExistsError, match="run already holds a run; name another folder"):
        RunWriter(tmp_path / "run")
    for name in TABLES:
        pd.testing.assert_frame_equal(read_run(tmp_path / "run", name), before[name])


def test_an_existing_folder_without_a_run_is_used(tmp_path):
    (tmp_path / "bench.log").write_text("hydra was here")
    write(RunWriter(tmp_path), "a")
    assert read_run(tmp_path, "passes").prompt_id.tolist() == ["a", "a"]


def test_reading_names_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match="table='tokens' is not one of passes, nodes, outputs"):
        read_run(tmp_path, "tokens")
    with pytest.raises(FileNotFoundError, match=r"no recorded passes in .*nowhere"):
        read_run(tmp_path / "nowhere", "passes")
    RunWriter(tmp_path / "run")
    with pytest.raises(FileNotFoundError, match=r"no recorded nodes in .*run"):  # before its first prompt
        read_run(tmp_path / "run", "nodes")


def test_a_table_of_another_schema_is_named_by_its_columns(tmp_path):
    writer = RunWriter(tmp_path / "run")
    write(writer, "q1")
    writer.close({})
    path = tmp_path / "run" / "nodes.parquet"
    table = read_run(tmp_path / "run", "nodes")
    table.drop(columns="score").assign(token="a word").to_parquet(path)
    faults = "score is missing; token is .*string, not int32|token is .*string, not int32; score is missing"
    with pytest.raises(ValueError, match=f"nodes.parquet was recorded under another schema: ({faults})"):
        read_run(tmp_path / "run", "nodes")
    path.write_bytes(b"half a file")
    with pytest.raises(ValueError, match=r"nodes.parquet is no Parquet file"):
        read_run(tmp_path / "run", "nodes")


def test_columns_that_are_not_ours_are_left_out_and_other_widths_are_ours(tmp_path):
    """Another program may have written the table."""
    writer = RunWriter(tmp_path / "run")
    write(writer, "q1")
    writer.close({})
    table = read_run(tmp_path / "run", "nodes")
    table.assign(note="mine", token=table.token.astype("int64")).to_parquet(tmp_path / "run" / "nodes.parquet")
    pd.testing.assert_frame_equal(read_run(tmp_path / "run", "nodes"), table)


def test_parts_of_different_schemas_are_not_mixed(tmp_path):
    """An interrupted run that an older version began: its parts have other columns."""
    writer = RunWriter(tmp_path / "run")
    write(writer, "a")
    write(writer, "b")
    part = tmp_path / "run" / "parts" / "passes-000000.parquet"
    pd.read_parquet(part).drop(columns="draft_steps").to_parquet(part)
    with pytest.raises(ValueError, match=r"passes-000000.parquet .* another schema: draft_steps is missing"):
        read_run(tmp_path / "run", "passes")
