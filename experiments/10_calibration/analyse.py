"""What do calibrated confidences change: the calibration error, tokens per pass, tokens per second?

python analyse.py WORK [OUT]

Fitted on one half of the prompts, judged on the other; gains are paired by prompt, tokens per second are the cost table's.
Verdict: *holds* if at every temperature a fit lowers the calibration error significantly, and a policy gains tokens per
second significantly by it while none loses; *holds partly* if the error falls at one temperature at least; else it *does
not hold*.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common

from eagle_tree import analysis, calibration, curves, plots

CLAIM = "Calibrated confidences choose better trees"
SOURCE = "DSpark, arXiv 2607.05147 (one temperature a depth: error of 3–8 % to about 1 %)"
KINDS = ("temperatures", "isotonic")


def errors(work: Path, temperature: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The calibration error as drafted and by each fit, on the judged half; and the points of the diagram."""
    judged = calibration.judged_nodes(common.published(common.nodes(work, temperature, "judge")))
    drafted = curves.confidence_bins(judged)
    rows, points = [], []
    for kind in ("as drafted", *KINDS):
        bins = drafted
        if kind in KINDS:
            fitted = calibration.load(work / f"calibration_{temperature}" / f"{kind}.json")
            bins = curves.confidence_bins(calibration.calibrated(judged, fitted), "calibrated")
        error = dict(zip(("error", "error_low", "error_high"), curves.binned_error(bins)))
        change = dict(zip(("change", "change_low", "change_high"), curves.error_change(drafted, bins)))
        row = {"temperature": temperature, "kind": kind, "nodes": len(judged), "prompts": judged.prompt_id.nunique()}
        rows.append({**row, **error, **change})
        points.append(analysis.reliability(bins).assign(kind=kind, error=error["error"], panel=f"T = {temperature}"))
    return pd.DataFrame(rows), pd.concat(points)


def size(label: str) -> str:
    """What a policy's label says beside its calibration: `eagle2 59` or `rate_optimal`."""
    if label.startswith("rate_optimal"):
        return "rate_optimal"
    return f"eagle2 {label.split('budget=')[1].split(',')[0].rstrip(')')}"


def gains(work: Path, temperature: int) -> pd.DataFrame:
    """Every calibrated policy against the same one as drafted: τ, tokens per second, and both gains."""
    folder = work / "10_calibration" / f"replay_{temperature}"
    passes = analysis.load(folder).passes
    uncovered = {
        name: row["uncovered"]
        for name, row in json.loads((folder / "run.json").read_text())["result"]["policies"].items()
    }
    table = analysis.replayed(passes).set_index("policy")
    sums = analysis.prompt_sums(passes)
    rows = []
    for label in table.index.drop("autoregressive"):
        kind = next((kind for kind in KINDS if kind in label), "as drafted")
        row = {"temperature": temperature, "policy": size(label), "kind": kind, "uncovered": uncovered[label]}
        rows.append(row | table.loc[label].to_dict() | {"label": label})
    found = pd.DataFrame(rows)
    for policy, group in found.groupby("policy"):
        reference = group[group.kind == "as drafted"].label.item()
        for name, denominator in (("tau_gain", "passes"), ("speed_gain", "seconds")):
            of = analysis.compared(sums.loc[group.label.tolist()], "emitted", denominator, reference).set_index(
                "policy"
            )
            for label in group.label.drop(group.index[group.label == reference]):
                at = found.index[found.label == label]
                found.loc[at, [name, f"{name}_low", f"{name}_high"]] = of.loc[
                    label, ["gain", "gain_low", "gain_high"]
                ].tolist()
    return found.drop(columns="label")


def verdict(errors: dict[int, pd.DataFrame], gains: dict[int, pd.DataFrame]) -> str:
    lower = {name: bool((table.change_high < 0).any()) for name, table in errors.items()}
    faster = {
        name: bool((table.speed_gain_low > 1).any() and not (table.speed_gain_high < 1).any())
        for name, table in gains.items()
    }
    if all(lower.values()) and all(faster.values()):
        return common.HOLDS
    return common.HOLDS_PARTLY if any(lower.values()) else common.DOES_NOT_HOLD


def numbers(errors: dict[int, pd.DataFrame], gains: dict[int, pd.DataFrame]) -> str:
    parts = []
    for temperature, table in errors.items():
        of = ", ".join(f"{row['kind']} {common.interval(row, 'error', digits=3)}" for row in table.to_dict("records"))
        speed = [
            f"{row['policy']} {row['kind']} τ × {common.interval(row, 'tau_gain', digits=3)}, tokens/s × {common.interval(row, 'speed_gain', digits=3)}"
            for row in gains[temperature].to_dict("records")
            if row["kind"] != "as drafted" and row["policy"] in ("eagle2 59", "rate_optimal")
        ]
        parts.append(f"T = {temperature}: calibration error {of}; {'; '.join(speed)}")
    return ". ".join(parts)


def main(work: Path, out: Path) -> None:
    temperatures = (0, 1)
    found = {temperature: errors(work, temperature) for temperature in temperatures}
    tables, faster = (
        {name: rows for name, (rows, _) in found.items()},
        {name: gains(work, name) for name in temperatures},
    )
    table = pd.concat(
        [
            *(rows.assign(of="error") for rows in tables.values()),
            *(rows.assign(of="policy") for rows in faster.values()),
        ]
    )
    figure = plots.reliability_diagram(
        pd.concat(points for _, points in found.values()),
        "Before and after calibration, on prompts that nothing was fitted on",
    )
    common.write(out, CLAIM, SOURCE, verdict(tables, faster), numbers(tables, faster), table, figure, work)


if __name__ == "__main__":
    main(*common.folders(sys.argv, __file__))
