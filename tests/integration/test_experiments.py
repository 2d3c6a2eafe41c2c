"""With --full: the numbered experiments on two prompts of 6 tokens; every step runs, and says what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
NUMBERED = sorted(EXPERIMENTS.glob("[0-9][0-9]_*"))
MACHINE = ["device", "dtype", "threads", "commit", "torch"]


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """Where recordings go: the first experiment makes them, the others find them."""
    return tmp_path_factory.mktemp("work")


@pytest.mark.parametrize("folder", NUMBERED, ids=lambda folder: folder.name)
def test_a_numbered_experiment_runs_on_two_prompts(folder, work, full):
    if not full:
        pytest.skip("minutes: with --full, or make reproduce-small")
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir() if path.is_file()}
    here = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(
        [folder / "run.sh", "small"], capture_output=True, text=True, timeout=1800,
        env={**os.environ, "WORK": str(work), "PATH": here},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    out = work / "small" / folder.name
    verdict = json.loads((out / "verdict.json").read_text(encoding="utf-8"))
    assert verdict["verdict"] in ("holds", "holds partly", "does not hold")
    assert verdict["headline"] and verdict["headline"] in ran.stdout and verdict["numbers"] in ran.stdout
    table = pd.read_csv(out / "results.csv")
    assert len(table) and set(MACHINE) <= set(table) and table[MACHINE].notna().all(axis=None)
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir() if path in before} == before
