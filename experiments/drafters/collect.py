"""One row per trained head: what it was trained with, how it guesses, what trees reach with it.

python collect.py FOLDER      FOLDER holds one folder per head, with an `evaluation` in each
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pandas as pd


def row(folder: Path) -> dict[str, object]:
    """The row of one head."""
    about = json.loads((folder / "evaluation" / "evaluation.json").read_text())
    trained = json.loads((folder / "config.json").read_text())["training"]
    result = about["result"]
    prompts = len(pd.read_parquet(folder / "evaluation" / "prompts.parquet"))
    cells: dict[str, object] = {"head": folder.name.replace("_", " "), **trained, "prompts": prompts}
    cells["coverage"] = result["coverage"]
    cells |= {f"n_alpha_{depth}": value for depth, value in enumerate(result["n_alpha"])}
    cells |= {f"hit_{rank}": values[0] for rank, values in result["hit"].items()}
    cells["calibration_error"] = result["calibration_error"]
    for policy, values in result["policies"].items():
        cells |= {f"{policy} {key}": values[key] for key in ("tau", "tau_low", "tau_high")}
    machine = {key: about[key] for key in ("device", "dtype", "threads", "commit")}
    return {**cells, **machine, "torch": about["versions"]["torch"]}


def main(folder: Path) -> None:
    paths = sorted(path.parent.parent for path in folder.glob("*/evaluation/evaluation.json"))
    pd.DataFrame([row(path) for path in paths]).round(4).to_csv(sys.stdout, index=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
