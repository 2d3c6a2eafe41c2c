"""What is recorded of every pass and node, and the writer that loses nothing finished.

Two tables, in Parquet: one row a pass, one row a node. While a run goes on, each finished prompt is a part
file of its own; `close` merges the parts into
`passes.parquet` and `nodes.parquet`, one row group a prompt, and `run.json` is written last: a folder with
a `run.json` is whole.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from eagle_tree.files import replacing, write_json, write_table


@dataclass
class PassRow:
    """One target pass after prefill.

    Attributes:
        policy, prompt_id, category, pass_id: which pass.
        context_length: tokens before this pass's root, n; the root stands at position n.
        n_nodes: N of the verified tree; depth: its deepest node.
        draft_steps: drafter forwards; expanded: tree nodes they ran over, the root included.
        expected_draft: 1 + sum of exp(score) over the tree; expected_target: 1 + sum of reach.
        accepted: draft tokens the walk accepted, before truncation; emitted: tokens after truncation at the
            end of the sequence or at `max_new_tokens`, the bonus token included.
        acceptance_meter: accepted + 1 - expected_target; surprisal_meter: sum of -log p(y) - H(p) over the
            walk's tokens. Both of mean zero when decoding is lossless (DESIGN §4).
        *_s: seconds: the stages grow, select, verify, accept, compact; `record_s` for node probabilities;
            `target_forward_s` within verify and `drafter_forward_s` within grow; `pass_s` in all.
    """

    policy: str
    prompt_id: str
    category: str
    pass_id: int
    context_length: int
    n_nodes: int
    depth: int
    draft_steps: int
    expanded: int
    expected_draft: float
    expected_target: float
    accepted: int
    emitted: int
    acceptance_meter: float
    surprisal_meter: float
    grow_s: float
    select_s: float
    verify_s: float
    accept_s: float
    compact_s: float
    record_s: float
    target_forward_s: float
    drafter_forward_s: float
    pass_s: float


NODE_COLUMNS = {
    "node": "int32",
    "parent": "int32",
    "depth": "int16",
    "rank": "int16",
    "token": "int32",
    "log_conf": "float32",
    "score": "float32",
    "selected": "bool",
    "tried": "bool",
    "accepted": "bool",
    "parent_accepted": "bool",
    "target_log_prob": "float32",
}
"""Columns of the node table, behind policy, prompt_id and pass_id: `node` indexes the verified tree (0 is the
root, which has no row). `tried` is "its parent was accepted" (the calibration event, DESIGN §4)."""

ARROW = {"str": pa.string(), "int": pa.int64(), "float": pa.float64()}
PASS_SCHEMA = pa.schema([(field.name, ARROW[field.type]) for field in fields(PassRow)])
NODE_SCHEMA = pa.schema(
    [("policy", pa.string()), ("prompt_id", pa.string()), ("pass_id", pa.int32())]
    + [(name, pa.from_numpy_dtype(np.dtype(kind))) for name, kind in NODE_COLUMNS.items()]
)
OUTPUT_SCHEMA = pa.schema(
    [
        ("policy", pa.string()),
        ("prompt_id", pa.string()),
        ("category", pa.string()),
        ("token", pa.list_(pa.int32())),
        ("text", pa.string()),
        ("prefill_s", pa.float64()),
        ("decode_s", pa.float64()),
    ]
)
TABLES = {"passes": PASS_SCHEMA, "nodes": NODE_SCHEMA, "outputs": OUTPUT_SCHEMA}


class RunWriter:
    """Writes the tables of one run into a folder.

    Raises:
        FileExistsError: the folder already holds a run.
    """

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        if (self.folder / "run.json").exists() or (self.folder / "parts").exists():
            raise FileExistsError(f"{self.folder} already holds a run; name another folder")
        self.parts = self.folder / "parts"
        self.parts.mkdir(parents=True)
        self.n_prompts = 0

    def write_prompt(self, passes: Sequence[PassRow], nodes: Sequence[dict[str, np.ndarray]], output: dict) -> None:
        """Record a finished prompt: its passes, the node columns of each pass, and its text."""
        tables = {  # the output last: its part says that the others are whole
            "passes": pa.Table.from_pylist([asdict(row) for row in passes], schema=PASS_SCHEMA),
            "nodes": node_table(passes, nodes),
            "outputs": pa.Table.from_pylist([output], schema=OUTPUT_SCHEMA),
        }
        for name, table in tables.items():
            write_table(table, self.parts / f"{name}-{self.n_prompts:06d}.parquet")
        self.n_prompts += 1

    def close(self, about: dict) -> None:
        """Merge the parts, then write `run.json`."""
        for name, schema in TABLES.items():
            with (
                replacing(self.folder / f"{name}.parquet") as temporary,
                pq.ParquetWriter(temporary, schema, compression="zstd") as writer,
            ):
                for part in finished_parts(self.parts, name):
                    writer.write_table(pq.read_table(part, schema=schema))
        write_json(self.folder / "run.json", about, default=str)
        shutil.rmtree(self.parts)


def node_table(passes: Sequence[PassRow], nodes: Sequence[dict[str, np.ndarray]]) -> pa.Table:
    """The node rows of some passes as one table."""
    counts = [len(columns["node"]) for columns in nodes]
    if not sum(counts):
        return NODE_SCHEMA.empty_table()
    data = {
        "policy": np.repeat([row.policy for row in passes], counts),
        "prompt_id": np.repeat([row.prompt_id for row in passes], counts),
        "pass_id": np.repeat([row.pass_id for row in passes], counts),
    }
    for name, kind in NODE_COLUMNS.items():
        data[name] = np.concatenate([columns[name] for columns in nodes]).astype(kind)
    return pa.Table.from_pydict(data, schema=NODE_SCHEMA)


def finished_parts(parts: Path, table: str) -> list[Path]:
    """A table's parts, of the prompts that were recorded whole."""
    return [path.with_name(path.name.replace("outputs", table)) for path in sorted(parts.glob("outputs-*.parquet"))]


def read_run(folder: str | Path, table: str) -> pd.DataFrame:
    """A table of a run as a data frame; an interrupted run gives its finished prompts.

    Columns that this version does not know are left out.

    Raises:
        ValueError: unknown table, or a file of another schema. FileNotFoundError: no run in the folder.
    """
    if table not in TABLES:
        raise ValueError(f"table={table!r} is not one of {', '.join(TABLES)}")
    folder = Path(folder)
    whole = folder / f"{table}.parquet"
    paths = [whole] if whole.is_file() else finished_parts(folder / "parts", table)
    if not paths:
        raise FileNotFoundError(f"no recorded {table} in {folder}")
    return pa.concat_tables([read_table(path, TABLES[table]) for path in paths]).to_pandas()


def read_table(path: Path, schema: pa.Schema) -> pa.Table:
    """The columns of a schema from a file, as its types.

    Raises:
        ValueError: the file is no Parquet file, or lacks a column, or has one whose values are of another kind.
    """
    try:
        found = pq.read_table(path)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is no Parquet file: {error}") from None
    columns, faults = [], []
    for field in schema:
        if field.name not in found.column_names:
            faults.append(f"{field.name} is missing")
            continue
        column = found.column(field.name)
        try:
            columns.append(column.cast(field.type))
        except pa.ArrowException:
            faults.append(f"{field.name} is {column.type}, not {field.type}")
    if faults:
        raise ValueError(f"{path} was recorded under another schema: {'; '.join(faults)}")
    return pa.Table.from_arrays(columns, schema=schema)
