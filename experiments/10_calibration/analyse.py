"""What do calibrated confidences change: the calibration error, tokens per pass, tokens per second?

python analyse.py WORK [OUT]

Fitted on one half of the prompts, judged on the other; gains are paired by prompt, tokens per second are the cost
table's. Verdict: *holds* if at every temperature a fit lowers the calibration error significantly and a policy gains
tokens per second significantly by it, while none loses; *holds partly* if the error falls at one temperature at least;
else it *does not hold*.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common

from eagle_tree import analysis, calibration, curves, plots
from eagle_tree.cost import CostTable
from eagle_tree.policy import Policy

CLAIM = "Calibrated confidences choose better trees"
SOURCE = "DSpark, arXiv 2607.05147 (one temperature a depth: error of 3–8 % to about 1 %)"
DRAFTED, KINDS = "as drafted", ("temperatures", "isotonic")
SIZES = (8, 24, 59)
NAMED = ("eagle2 59", "rate_optimal")
"""Policies whose gains stand in the verdict's line; all are in results.csv."""


def fits(work: Path, temperature: int) -> dict[str, Path]:
    """The files of both families, fitted on the first half."""
    return {kind: work / f"calibration_{temperature}" / f"{kind}.json" for kind in KINDS}


def errors(work: Path, temperature: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The calibration error as drafted and by each fit, on the second half; and the points of the diagram."""
    judged = calibration.judged_nodes(common.published(common.nodes(work, temperature, "judge")))
    bins = {DRAFTED: curves.confidence_bins(judged)}
    for kind, path in fits(work, temperature).items():
        bins[kind] = curves.confidence_bins(calibration.calibrated(judged, calibration.load(path)), "calibrated")
    rows, points = [], []
    for kind, of in bins.items():
        error = dict(zip(("error", "error_low", "error_high"), curves.binned_error(of)))
        change = dict(zip(("change", "change_low", "change_high"), curves.error_change(bins[DRAFTED], of)))
        row = {
            "temperature": temperature,
            "kind": kind,
            "judged_nodes": len(judged),
            "prompts": judged.prompt_id.nunique(),
        }
        rows.append({**row, **error, **change})
        points.append(analysis.reliability(of).assign(kind=kind, error=error["error"], panel=f"T = {temperature}"))
    return pd.DataFrame(rows), pd.concat(points)


def policies(work: Path, temperature: int) -> dict[tuple[str, str], Policy]:
    """EAGLE-2 at some sizes and the rate-optimal tree, as drafted and on each fit; no deeper than the trace."""
    rate = {"policy": "rate_optimal", "cost": str(work / "cost"), "depth": 7}
    entries = {(f"eagle2 {size}", DRAFTED): {**common.PUBLISHED, "budget": size} for size in SIZES}
    entries["rate_optimal", DRAFTED] = rate
    for kind, path in fits(work, temperature).items():
        for (name, drafted), entry in list(entries.items()):
            if drafted == DRAFTED:
                inner = {f"policy.{field}": value for field, value in entry.items() if field != "policy"}
                outer = "rate_optimal_calibrated" if entry is rate else "calibrated"
                entries[name, kind] = {"policy": outer, "path": str(path), **inner}
    return {key: common.policy(entry) for key, entry in entries.items()}


def gains(work: Path, temperature: int) -> pd.DataFrame:
    """Every policy on each fit, and against the same one as drafted: τ, tokens per second, and both gains."""
    found = {f"{name}, {kind}": policy for (name, kind), policy in policies(work, temperature).items()}
    passes = common.replayed(work, "judge", temperature, found, CostTable.load(work / "cost"))
    table, sums = analysis.replayed(passes), analysis.prompt_sums(passes)
    table = table[table.policy != "autoregressive"].set_index("policy").drop(columns="bound_share")
    for name in sorted({label.split(", ")[0] for label in found}):
        labels = [label for label in found if label.startswith(f"{name}, ")]
        for gain, denominator in (("tau_gain", "passes"), ("speed_gain", "seconds")):
            of = analysis.compared(sums.loc[labels], "emitted", denominator, f"{name}, {DRAFTED}").set_index("policy")
            for end in ("", "_low", "_high"):
                table.loc[of.index, f"{gain}{end}"] = of[f"gain{end}"]
    names = pd.DataFrame([label.split(", ") for label in table.index], columns=["policy", "kind"])
    return pd.concat([names, table.reset_index(drop=True)], axis=1).assign(temperature=temperature)


def verdict(errors: dict[int, pd.DataFrame], gains: dict[int, pd.DataFrame]) -> str:
    lower = [(table.change_high < 0).any() for table in errors.values()]
    faster = [(table.speed_gain_low > 1).any() and not (table.speed_gain_high < 1).any() for table in gains.values()]
    if all(lower) and all(faster):
        return common.HOLDS
    return common.HOLDS_PARTLY if any(lower) else common.DOES_NOT_HOLD


def headline(errors: dict[int, pd.DataFrame], gains: dict[int, pd.DataFrame]) -> str:
    table, speeds = pd.concat(errors.values(), ignore_index=True), pd.concat(gains.values())
    fits, speeds = table[table.kind != DRAFTED], speeds[speeds.kind != DRAFTED]
    best = fits.loc[fits.change.idxmin()]
    before = table.error[(table.kind == DRAFTED) & (table.temperature == best.temperature)].item()
    at = f"{best.kind}, T = {best.temperature}: {before:.3f} to {common.interval(best, 'error', 3)}"
    return (
        f"calibration error significantly lower by {(fits.change_high < 0).sum()} of {len(fits)} fits ({at}), tokens/s "
        f"higher by {(speeds.speed_gain_low > 1).sum()} of {len(speeds)}"
    )


def numbers(errors: dict[int, pd.DataFrame], gains: dict[int, pd.DataFrame]) -> str:
    parts = []
    for temperature, table in errors.items():
        of = ", ".join(f"{row['kind']} {common.interval(row, 'error', digits=3)}" for row in table.to_dict("records"))
        speed = gains[temperature]
        speed = speed[speed.policy.isin(NAMED) & (speed.kind != DRAFTED)]
        listed = [
            f"{row['policy']} on {row['kind']}: τ × {common.interval(row, 'tau_gain', digits=3)}, "
            f"tokens/s × {common.interval(row, 'speed_gain', digits=3)}"
            for row in speed.to_dict("records")
        ]
        parts.append(f"T = {temperature}: calibration error {of}; {'; '.join(listed)}")
    return ". ".join(parts)


def main(work: Path, out: Path) -> None:
    found = {temperature: errors(work, temperature) for temperature in common.TEMPERATURES}
    errors_of = {temperature: rows for temperature, (rows, _) in found.items()}
    gains_of = {temperature: gains(work, temperature) for temperature in common.TEMPERATURES}
    parts = [rows.assign(of="calibration error") for rows in errors_of.values()]
    parts += [rows.assign(of="policy") for rows in gains_of.values()]
    title = "Before and after calibration, on prompts that nothing was fitted on"
    figure = plots.reliability_diagram(pd.concat(points for _, points in found.values()), title)
    table = pd.concat(parts).set_index(["of", "temperature"]).reset_index()
    told = headline(errors_of, gains_of), numbers(errors_of, gains_of)
    common.write(out, CLAIM, SOURCE, verdict(errors_of, gains_of), *told, table, figure, work)


if __name__ == "__main__":
    main(*common.folders(sys.argv, __file__))
