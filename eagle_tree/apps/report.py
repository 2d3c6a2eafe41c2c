"""eagle-tree report runs/…: finished replays and sweeps in one table; where expected tokens are lost."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from eagle_tree import analysis, plots
from eagle_tree.apps import common, sweep
from eagle_tree.checks import as_path, check_count
from eagle_tree.files import read_json, replacing
from eagle_tree.regret import PARTS, decomposed

COLUMNS = ["label", "policy", "overrides", "prompts", "passes", "nodes", "tau", "tau_low", "tau_high"]
COLUMNS += ["tokens_per_second", "speedup", "speedup_low", "speedup_high", "bound_share", "uncovered", "run"]


def main(arguments: list[str]) -> int:
    """Entry point of the verb. First arguments that are no overrides and no options are folders."""
    folders = []
    while arguments and not arguments[0].startswith("-") and not common.is_override(arguments[0]):
        folders.append(arguments.pop(0))
    return common.run_verb("report", partial(report, folders), arguments)


def report(folders: list[str], config: DictConfig) -> dict[str, Any]:
    """Gather, compare and print."""
    if not folders and not OmegaConf.is_list(config.runs):
        raise ValueError(f"runs={config.runs!r} must be a list of folders, such as runs=[{config.runs}]")
    folders = [as_path("runs", folder) for folder in (folders or config.runs)]
    folders = list({folder.resolve(): folder for folder in folders}.values())  # one that is named twice is one
    if not folders:
        raise ValueError("runs: no folder is given; call: eagle-tree report runs/sweep-…")
    check_count("rows", config.rows)
    complaints: list[str] = []
    runs = [run for folder in folders for run in runs_of(folder, complaints)]
    check_comparable(runs)
    names = Counter(run.name for run, _ in runs)
    parts = [
        entries(run, about, str(run) if names[run.name] > 1 else run.name, many=len(folders) > 1) for run, about in runs
    ]
    table, sums = [row for rows, _ in parts for row in rows], [of_prompt for _, of_prompt in parts]
    losses = [pd.read_parquet(run / "regret.parquet") for run, _ in runs if (run / "regret.parquet").is_file()]
    print("\n".join(complaints))
    if not table:
        raise ValueError(f"runs: no job is finished in {', '.join(map(str, folders))}")
    frame = pd.DataFrame(table, columns=COLUMNS)
    timed = frame.tokens_per_second.notna().all()
    measure = "tokens_per_second" if timed else "tau"
    frame = frame.sort_values(measure, ascending=False, kind="stable", ignore_index=True)
    reference = frame.label[0] if config.reference is None else config.reference
    gains = analysis.compared(pd.concat(sums), "emitted", "seconds" if timed else "passes", reference)
    frame = frame.merge(gains.drop(columns="prompts").rename(columns={"policy": "label"}), on="label", how="left")
    with replacing(folders[0] / "report.csv") as temporary:
        frame.to_csv(temporary, index=False)
    print("\n".join(lines(frame.head(config.rows), reference, timed)))
    result = {
        "runs": [str(folder) for folder in folders],
        "finished": len(sums),
        "unfinished": len(complaints),
        "best": frame.label[0],
        "best_overrides": frame.overrides[0],
        measure: common.finite(frame[measure][0]),
        "report": str(folders[0] / "report.csv"),
    }
    if losses:
        result["regret"] = waterfall(pd.concat(losses), folders[0])
    return result


def runs_of(folder: Path, complaints: list[str]) -> list[tuple[Path, dict[str, Any]]]:
    """Folder and `run.json` of every finished replay in a folder; what is not finished is complained of."""
    if (folder / "sweep.json").is_file():
        jobs = sweep.gathered(folder)
        complaints += jobs.complaints()
        return [(folder / name, about) for name, about in jobs.finished.items()]
    if not (folder / "run.json").is_file():
        raise FileNotFoundError(f"runs: {folder} holds neither a sweep nor a finished replay")
    return [(folder, read_json(folder / "run.json"))]


def check_comparable(runs: list[tuple[Path, dict[str, Any]]]) -> None:
    """Raise ValueError for a run that is no replay, or replays of different traces: nothing pairs their prompts."""
    for run, about in runs:
        if "policies" not in (about.get("result") or {}) or "chosen" not in about:
            raise ValueError(f"runs: {run} is no replay")
        if about["result"]["trace"] != (first := runs[0][1]["result"]["trace"]):
            raise ValueError(f"runs: {run} replays trace {about['result']['trace']}, {runs[0][0]} trace {first}")


def entries(run: Path, about: dict[str, Any], title: str, many: bool) -> tuple[list[dict[str, Any]], pd.DataFrame]:
    """Rows of the table, and sums by label and prompt: of a sweep's job its chosen policy, of a replay all.

    Args:
        title: what no other run is called. many: whether labels must tell replays apart.
    """
    policies, sums = about["result"]["policies"], pd.read_parquet(run / "prompts.parquet")
    is_job = (run.parent / "sweep.json").is_file()
    names = [about["chosen"]] if is_job else list(policies)
    label = {name: title if is_job else f"{title}:{name}" if many else name for name in names}
    overrides = " ".join(about["overrides"]) if is_job else ""
    known = {"overrides": overrides, "prompts": sums.prompt_id.nunique(), "run": str(run)}
    rows = [{**policies[name], **known, "label": label[name], "policy": name} for name in names]
    sums = sums[sums.policy.isin(names)].assign(policy=lambda table: table.policy.map(label))
    return rows, sums.set_index(["policy", "prompt_id"])


def lines(frame: pd.DataFrame, reference: str, timed: bool) -> list[str]:
    """The table for people."""
    rows = []
    for row in frame.to_dict("records"):
        cells = {"label": row["label"], "policy": row["policy"], "overrides": row["overrides"]}
        cells |= {"τ (95 %)": common.interval(row, "tau"), "nodes": f"{row['nodes']:.1f}"}
        if timed:
            cells["tokens/s"] = f"{row['tokens_per_second']:.1f}"
            cells["speed-up (95 %)"] = common.interval(row, "speedup")
            cells["of the bound"] = f"{row['bound_share']:.1%}"
        same = row["label"] == reference
        cells["against the reference (95 %)"] = "–" if same else common.interval(row, "gain")
        cells["p (Holm)"] = "–" if same else f"{row['p_holm']:.3f}"
        rows.append({**cells, "uncovered": str(row["uncovered"])})
    return [
        *common.aligned(rows),
        "",
        f"reference: {reference}; paired by prompt, Holm's correction for all comparisons.",
    ]


def waterfall(rows: pd.DataFrame, folder: Path) -> dict[str, dict[str, float]]:
    """Print and draw where expected tokens are lost; returns the parts by policy."""
    table = decomposed(rows)
    plots.save(plots.waterfall(table), folder / "regret.png")
    cells = [
        {
            "policy": row["name"],
            "positions": str(row["positions"]),
            "expected (95 %)": common.interval(row, "policy"),
            **{name: common.interval(row, name) for name in PARTS},
            "accepted whole": f"{row['whole']:.2f}",
        }
        for row in table.to_dict("records")
    ]
    print("\n" + "\n".join(common.aligned(cells)))
    print("tokens per pass under the target: of the policy's tree, and what is lost to each cause\n")
    return {row["name"]: {key: row[key] for key in ("policy", *PARTS, "whole")} for row in table.to_dict("records")}
