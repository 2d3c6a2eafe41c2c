"""The bench's JSON line (standard input) as a table with its provenance (standard output)."""

import json
import sys
from pathlib import Path

import pandas as pd

report = json.loads(sys.stdin.read())
about = json.loads((Path(report["run"]) / "run.json").read_text())
frame = pd.DataFrame.from_dict(report["policies"], orient="index").rename_axis("policy").reset_index()
for name in ("device", "threads", "dtype", "commit"):
    frame[name] = about[name]
frame["torch"] = about["versions"]["torch"]
frame.round(4).to_csv(sys.stdout, index=False)
