"""Recorded runs gathered into data frames."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from eagle_tree.record import TABLES, read_run

MUST_AGREE = ("commit", "device", "dtype", "threads", "torch")
"""What runs should have in common before their numbers stand in one table."""


@dataclass(frozen=True)
class Runs:
    """Recorded runs, tidy: one row a pass, a draft node, a run. `run` names the folder in all three.

    Attributes:
        passes: columns of `record.PassRow`; nodes: of the node table, no rows where none was recorded.
        runs: verb (bench, replay or evaluate), whole (False: interrupted, with its finished prompts), policies,
            prompts, passes, temperature, `MUST_AGREE` (None where the run does not say).
    """

    passes: pd.DataFrame
    nodes: pd.DataFrame
    runs: pd.DataFrame


def load(root: str | Path) -> Runs:
    """Gather the runs in a folder: one run's own folder, or any that holds some, however deep.

    A run without passes, an interrupted one, and runs that differ in `MUST_AGREE` are warned of, and stay.

    Raises:
        FileNotFoundError: no run there. ValueError: no run has a pass, or a table is of another schema.
    """
    root = Path(root)
    marks = ("run.json", "evaluation.json", "passes.parquet", "outputs-*.parquet")
    files = [path for mark in marks for path in root.rglob(mark)]
    folders = sorted({path.parent.parent if path.parent.name == "parts" else path.parent for path in files})
    if not folders:
        raise FileNotFoundError(f"no recorded run in {root}")
    passes, nodes, runs = [], [], []
    for folder in folders:
        name = folder.name if folder == root else str(folder.relative_to(root))
        about, recorded = about_run(folder), recorded_table(folder, "passes")
        runs.append({"run": name, **about, **counts(recorded)})
        if not about["whole"]:
            warnings.warn(f"{name} was interrupted: it has the passes of its finished prompts only")
        if not len(recorded):
            warnings.warn(f"{name} holds no passes")
            continue
        passes.append(recorded.assign(run=name))
        nodes.append(recorded_table(folder, "nodes").assign(run=name))
    if not passes:
        raise ValueError(f"no run in {root} holds a pass")
    frame = pd.DataFrame(runs)
    different = [name for name in MUST_AGREE if frame[name].dropna().nunique() > 1]
    if different:
        values = "; ".join(f"{name} {', '.join(map(str, frame[name].dropna().unique()))}" for name in different)
        warnings.warn(f"the runs in {root} differ in {values}")
    return Runs(*(run_first(parts) for parts in (passes, nodes)), frame)


def run_first(parts: list[pd.DataFrame]) -> pd.DataFrame:
    """Tables one below the other, the column `run` in front; empty ones only give their columns."""
    table = pd.concat([part for part in parts if len(part)] or parts[:1], ignore_index=True)
    return table[["run", *table.columns.drop("run")]]


def recorded_table(folder: Path, table: str) -> pd.DataFrame:
    """A table of a run; without rows if the run's verb writes none."""
    try:
        return read_run(folder, table)
    except FileNotFoundError:
        return TABLES[table].empty_table().to_pandas()


def counts(passes: pd.DataFrame) -> dict[str, int]:
    """Policies, prompts and passes of a pass table."""
    return {
        "policies": passes.policy.nunique(),
        "prompts": passes.prompt_id.nunique(),
        "passes": len(passes),
    }


def about_run(folder: Path) -> dict[str, Any]:
    """A run's own row of `Runs.runs`, but its name and counts."""
    path = next((folder / name for name in ("run.json", "evaluation.json") if (folder / name).is_file()), None)
    about = json.loads(path.read_text()) if path else {}
    traced = about.get("trace_settings") or {}
    verb = "evaluate" if path and path.name == "evaluation.json" else "replay" if traced else "bench"
    return {
        "verb": verb,
        "whole": path is not None,
        "temperature": {**about.get("config", {}), **traced}.get("temperature"),
        "commit": about.get("commit"),
        "device": about.get("device"),
        "dtype": about.get("dtype", traced.get("dtype")),
        "threads": about.get("threads"),
        "torch": about.get("versions", {}).get("torch"),
    }
