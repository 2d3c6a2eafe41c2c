"""What the analyses of the numbered experiments share: recordings in, results.csv, figure.png and verdict.json out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from eagle_tree import analysis, plots
from eagle_tree.apps.common import interval as interval
from eagle_tree.apps.common import listed_policy
from eagle_tree.cost import CostTable
from eagle_tree.policy import Autoregressive, Policy
from eagle_tree.record import read_run
from eagle_tree.replay import replay
from eagle_tree.trace import Trace

HOLDS, HOLDS_PARTLY, DOES_NOT_HOLD = "holds", "holds partly", "does not hold"
TEMPERATURES = (0, 1)
PUBLISHED = {"policy": "eagle2", "budget": 59, "top_k": 10, "depth": 5}
"""EAGLE-2 as its evaluation scripts run it: total 60, top-k 10, depth 5."""


def folders(arguments: list[str], file: str) -> tuple[Path, Path]:
    """WORK and OUT of `analyse.py WORK [OUT]`; OUT is the script's own folder if it is not given."""
    return Path(arguments[1]).resolve(), Path(arguments[2]) if len(arguments) > 2 else Path(file).parent


# --- recordings ---


def nodes(work: Path, temperature: int, *halves: str) -> pd.DataFrame:
    """Node tables of `HALF/nodes_T`, the half in column `run`; of both halves if none is named."""
    parts = [
        read_run(work / half / f"nodes_{temperature}", "nodes").assign(run=half) for half in halves or ("fit", "judge")
    ]
    return pd.concat(parts, ignore_index=True)


def published(nodes: pd.DataFrame) -> pd.DataFrame:
    """The nodes of EAGLE-2's published tree."""
    return nodes[nodes.policy == "eagle2_published"]


@cache
def trace(work: Path, half: str, temperature: int, kind: str = "trace") -> Trace:
    """The trace of a half of the prompts, or that of `coupled` drafts; read once a process."""
    return Trace.read(work / half / f"{kind}_{temperature}")


def policy(entry: str | Mapping[str, Any]) -> Policy:
    """A policy by its entry in bench's compare: a name of conf/policy, or one with fields."""
    return listed_policy(entry if isinstance(entry, str) else dict(entry), "policies")[1]


def replayed(
    work: Path,
    half: str,
    temperature: int,
    policies: Mapping[str, Policy],
    cost: CostTable | None = None,
    kind: str = "trace",
) -> pd.DataFrame:
    """The passes of policies, by label, on a half's trace; with a cost table, autoregressive decoding's first.

    Raises:
        ValueError: a policy asks for what the trace does not hold: its passes are not those of decoding.
    """
    baseline = {} if cost is None else {"autoregressive": Autoregressive()}
    parts = []
    for name, one in {**baseline, **policies}.items():
        result = replay(trace(work, half, temperature, kind), one, cost, name)
        if result.uncovered:
            raise ValueError(
                f"{name} asks {result.uncovered} times for what {half}/{kind}_{temperature} does not hold: "
                "declare it in recordings.sh and record again"
            )
        parts.append(result.passes)
    return pd.concat(parts, ignore_index=True)


def tokens_per_pass(passes: pd.DataFrame) -> pd.DataFrame:
    """`analysis.tokens_per_pass` with the number of prompts."""
    return analysis.tokens_per_pass(passes).assign(prompts=passes.prompt_id.nunique())


def gains(passes: pd.DataFrame, reference: str, numerator: str = "emitted") -> pd.DataFrame:
    """Policies over one of them in tokens (or accepted ones) a pass: `analysis.compared`, indexed by policy."""
    sums = analysis.counted(passes)
    sums = sums.assign(accepted=passes.groupby(["policy", "prompt_id"], sort=False).accepted.sum())
    return analysis.compared(sums, numerator, "passes", reference).set_index("policy")


# --- results ---


def machine(about: Mapping[str, Any]) -> dict[str, Any]:
    """What a run was taken on, as columns, from its run.json."""
    return {
        **{name: about[name] for name in ("device", "dtype", "threads", "commit")},
        "torch": about["versions"]["torch"],
    }


def recorded_on(work: Path) -> dict[str, Any]:
    """What the recordings were taken on, as columns."""
    return machine(json.loads((work / "judge" / "nodes_0" / "run.json").read_text()))


def verdict_of_gains(rows: pd.DataFrame) -> str:
    """Of gains with intervals: *holds* if all are significantly above 1; *does not hold* if one is significantly below,
    or none above; else *holds partly*."""
    below, above = rows.gain_high < 1, rows.gain_low > 1
    if above.all():
        return HOLDS
    return DOES_NOT_HOLD if below.any() or not above.any() else HOLDS_PARTLY


def at_each(found: Mapping[int, str]) -> str:
    """One text a temperature, as a list: "… at T = 0, … at T = 1"."""
    return ", ".join(f"{text} at T = {temperature}" for temperature, text in found.items())


def write(
    out: Path,
    claim: str,
    source: str,
    verdict: str,
    headline: str,
    numbers: str,
    table: pd.DataFrame,
    figure: Figure,
    about: Path | Mapping[str, Any],
) -> None:
    """Write and print an experiment's results.

    Args:
        headline: the figures that decide the verdict in one short fragment, for the README's table.
        numbers: one line with the figures and intervals that the verdict rests on.
        about: columns that say what the numbers were taken on, or WORK: what the recordings were.
    """
    table = table.assign(**(recorded_on(about) if isinstance(about, Path) else about))
    out.mkdir(parents=True, exist_ok=True)
    table.round(4).to_csv(out / "results.csv", index=False)
    plots.save(figure, out / "figure.png")
    fields = {"claim": claim, "source": source, "verdict": verdict, "headline": headline, "numbers": numbers}
    (out / "verdict.json").write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(table.drop(columns=["device", "commit", "torch"], errors="ignore").round(3).to_string(index=False))
    print(f"\n{claim}: {verdict} ({headline}). {numbers}\n")
