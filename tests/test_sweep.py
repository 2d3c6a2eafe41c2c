"""Sweeps: every job is named before it runs, what is finished stays, and the table does not know of interruptions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from test_regret import by_hand
from test_trace import SETTINGS, Walking, part_of, reading_of
from tree_models import FINE, PathModel

from eagle_tree.apps import common, sweep
from eagle_tree.apps import replay as app
from eagle_tree.apps.sweep import gathered, job_name, of_the_job, planned
from eagle_tree.policy import Eagle2
from eagle_tree.trace import recorded

FORM = {**SETTINGS, "drafter_vocabulary": 4, "temperature": 0.0}
BUDGETS = ["policy.budget=1,2,4", "policy.top_k=2,3", "policy.depth=2", "compare=[]"]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder with the trace of a drafter that is a function of (position, path), along three texts nobody decoded."""
    monkeypatch.chdir(tmp_path)
    model, answers = PathModel(3, FINE, vocab=4), ([0, 1, 2, 3, 1, 0], [1, 1, 2], [3, 2, 1, 0])
    for index, answer in enumerate(answers):
        part = replace(part_of(answer, f"p{index}", index), settings=FORM)
        part = recorded(part, Walking(model), {"e": Eagle2(9, 3, 2), "n": Eagle2(9, 2, 2)}, reading_of(answer))
        by_hand(part, PathModel(5, FINE, vocab=5), range(4)).write(tmp_path / "trace")
    return tmp_path


def table(path: Path) -> pd.DataFrame:
    """A report without what names folders."""
    return pd.read_csv(path / "report.csv").drop(columns="run")


def last(out: str) -> dict:
    return json.loads(out.strip().splitlines()[-1])


def test_a_sweep_runs_every_combination_and_the_report_orders_them(folder, eagle_tree):
    status, out, errors = eagle_tree("replay", "-m", *BUDGETS, "cost=h100_8b", "sweep=all")
    assert status == 0, errors
    assert last(out) == {"verb": "replay", "sweep": "all", "jobs": 6, "finished": 6, "failed": [], "missing": []}
    plan = json.loads((folder / "all" / "sweep.json").read_text())
    assert set(plan["jobs"]) == {path.name for path in (folder / "all").glob("job-*")}
    assert {name for name in plan["jobs"].values() for name in name if "budget" in name} == {
        "policy.budget=1", "policy.budget=2", "policy.budget=4",
    }  # fmt: skip
    status, out, errors = eagle_tree("report", "all")
    assert status == 0, errors
    result, rows = last(out), table(folder / "all")
    assert (result["finished"], result["unfinished"], len(rows)) == (6, 0, 6)
    assert rows.tokens_per_second.is_monotonic_decreasing and result["tokens_per_second"] == rows.tokens_per_second[0]
    assert result["best_overrides"] == rows.overrides[0] and "policy.budget=" in rows.overrides[0]
    assert rows.gain.isna().tolist() == [True] + 5 * [False] and (rows.gain[1:] <= 1).all()
    assert "against the reference (95 %)" in out and "p (Holm)" in out
    alone = eagle_tree("replay", *rows.overrides[0].split(), "cost=h100_8b")[1]
    assert last(alone)["policies"]["eagle2"]["tau"] == pytest.approx(rows.tau[0])


def test_a_killed_sweep_resumed_gives_the_table_of_an_uninterrupted_one(folder, eagle_tree, monkeypatch):
    assert eagle_tree("replay", "-m", *BUDGETS, "sweep=whole")[0] == 0
    real, calls = app.replayed, []

    def killed(config, quiet=False):
        calls.append(config.policy.budget)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(config, quiet)

    monkeypatch.setattr(app, "replayed", killed)
    status, _, errors = eagle_tree("replay", "-m", *BUDGETS, "sweep=cut")
    assert status == 130 and "go on with resume=true sweep=cut" in errors
    jobs = gathered(Path("cut"))
    assert (len(jobs.finished), len(jobs.failed), len(jobs.missing)) == (3, 0, 3)
    status, out, _ = eagle_tree("report", "cut")
    assert status == 0 and out.count("missing: job-") == 3 and last(out)["unfinished"] == 3
    monkeypatch.setattr(app, "replayed", real)
    status, out, errors = eagle_tree("replay", "-m", *BUDGETS, "sweep=cut", "resume=true")
    assert status == 0 and last(out)["finished"] == 6, errors
    for name in ("cut", "whole"):
        assert eagle_tree("report", name)[0] == 0
    pd.testing.assert_frame_equal(table(folder / "cut"), table(folder / "whole"))


def test_a_resumed_sweep_runs_only_what_is_not_finished(folder, eagle_tree, monkeypatch):
    assert eagle_tree("replay", "-m", *BUDGETS, "sweep=s")[0] == 0
    gone = sorted(Path("s").glob("job-*"))[2]
    (gone / "run.json").unlink()
    real, calls = app.replayed, []
    monkeypatch.setattr(app, "replayed", lambda *a, **k: calls.append(a) or real(*a, **k))
    assert eagle_tree("replay", "-m", *BUDGETS, "sweep=s", "resume=true")[0] == 0
    assert len(calls) == 1 and (gone / "run.json").is_file()


def test_a_failed_job_is_named_and_the_others_finish(folder, eagle_tree):
    status, out, _ = eagle_tree("replay", "-m", "policy.top_k=2,99", "policy.depth=2", "compare=[]", "sweep=s")
    assert status == 1
    assert (last(out)["finished"], len(last(out)["failed"]), last(out)["missing"]) == (1, 1, [])
    assert "failed:  job-" in out and "policy.top_k=99" in out and "asks for 99 candidates a node" in out
    status, out, _ = eagle_tree("report", "s")
    assert status == 0 and "asks for 99 candidates a node" in out and last(out)["unfinished"] == 1


def test_two_sweeps_of_the_same_second_do_not_mix(folder, eagle_tree, monkeypatch):
    monkeypatch.setattr(sweep.time, "strftime", lambda form: "20300101-000000")
    folders = [last(eagle_tree("replay", "-m", "policy.budget=1,2", "compare=[]")[1])["sweep"] for _ in range(2)]
    assert folders[0] != folders[1] and all("20300101-000000" in name for name in folders)
    assert all(len(gathered(Path(name)).finished) == 2 for name in folders)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["sweep=s"], "s already holds a sweep; name another folder, or go on with resume=true"),
        (["sweep=s", "resume=true", "policy.depth=1,2"], "the sweep in s has other jobs"),
        (["sweep=nowhere", "resume=true"], "there is no sweep in nowhere"),
        (["sweep=t", "polisy.depth=1,2"], "polisy"),
        (["sweep=s", "resume=yes"], "resume=yes must be true or false"),
        (["sweep=t", "cost=null"], "cost=null must be one of"),
    ],
)
def test_mistakes_of_a_sweep_are_named(folder, eagle_tree, arguments, named):
    assert eagle_tree("replay", "-m", "policy.budget=1,2", "compare=[]", "sweep=s")[0] == 0
    status, _, errors = eagle_tree("replay", "-m", "policy.budget=1,2", "compare=[]", *arguments)
    assert status == 1 and named in errors


@pytest.mark.parametrize("damage", ["{", "[]"])
def test_a_damaged_job_is_named_and_replayed_again(folder, eagle_tree, damage):
    sweep = ["replay", "-m", "policy.budget=1,2", "compare=[]", "sweep=s"]
    assert eagle_tree(*sweep)[0] == 0
    eagle_tree("report", "s")
    whole = table(folder / "s")
    run = sorted((folder / "s").glob("job-*/run.json"))[0]
    run.write_text(damage)
    status, _, errors = eagle_tree("report", "s")
    assert status == 1 and str(run.relative_to(folder)) in errors and "Traceback" not in errors
    assert eagle_tree(*sweep, "resume=True")[0] == 0
    assert eagle_tree("report", "s")[0] == 0
    pd.testing.assert_frame_equal(table(folder / "s"), whole)


def test_a_damaged_plan_is_named(folder, eagle_tree):
    sweep = ["replay", "-m", "policy.budget=1,2", "compare=[]", "sweep=s"]
    assert eagle_tree(*sweep)[0] == 0
    (folder / "s" / "sweep.json").write_text("{")
    for arguments in ([*sweep, "resume=true"], ["report", "s"]):
        status, _, errors = eagle_tree(*arguments)
        assert status == 1 and "s/sweep.json is truncated or damaged" in errors


def test_a_job_is_named_by_what_it_does():
    assert job_name(["policy.budget=1", "policy.depth=2"]) == job_name(["policy.depth=2", "sweep=a", "policy.budget=1"])
    assert job_name(["policy.budget=1"]) != job_name(["policy.budget=2"])
    assert of_the_job(["a=1", "resume=true", "+b=2", "hydra/launcher=joblib", "hydra.sweep.dir=x"]) == ["a=1", "+b=2"]


def test_a_search_has_no_plan():
    """A sweeper that decides as it goes: jobs are what is found."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="the search extra is not installed")
    assert planned("replay", ["experiment=search_eagle2", "hydra/sweeper=optuna"]) is None


EXPERIMENTS = sorted(path.stem for path in (common.conf_dir() / "experiment").glob("sweep_*.yaml"))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_ready_sweep_is_planned(name):
    jobs = planned("replay", [f"experiment={name}"])
    assert len(jobs) == {"sweep_eagle2": 252, "sweep_machines": 10, "sweep_policies": 10}[name]


def test_a_ready_sweep_runs(folder, eagle_tree):
    """Of several machines, with fewer budgets; the trace lacks what a width of ten asks, and says so."""
    status, out, errors = eagle_tree(
        "replay", "-m", "experiment=sweep_machines", "policy.top_k=3", "policy.depth=2", "sweep=s"
    )
    assert status == 0 and last(out)["jobs"] == 10, errors
    for run in gathered(Path("s")).finished.values():
        assert list(run["result"]["policies"]) == ["autoregressive", "chain", "eagle2"]


def test_a_ready_sweep_says_what_replay_would_say_otherwise(folder, eagle_tree):
    """`compare: []` of the experiment, not replay's own list."""
    assert eagle_tree("replay", "experiment=sweep_eagle2", "policy.top_k=3", "policy.depth=2", "run=r")[0] == 0
    assert list(json.loads(Path("r/run.json").read_text())["result"]["policies"]) == ["autoregressive", "eagle2"]


# --- reports ---


def test_a_report_of_single_replays_compares_their_policies(folder, eagle_tree):
    small = ["compare=[{policy:eagle2,budget:2,top_k:3,depth:2}]", "policy.top_k=3", "policy.depth=2", "regret=true"]
    assert eagle_tree("replay", *small, "run=one", "cost=h100_8b")[0] == 0
    status, out, errors = eagle_tree("report", "one", "reference=autoregressive")
    assert status == 0, errors
    rows = table(folder / "one").set_index("label")
    assert set(rows.index) == {"autoregressive", "eagle2", "eagle2(budget=2,top_k=3,depth=2)"}
    assert rows.loc["eagle2"].gain == pytest.approx(rows.loc["eagle2"].speedup)
    regret = last(out)["regret"]
    assert set(regret) == {"eagle2", "eagle2(budget=2,top_k=3,depth=2)"}
    for row in regret.values():
        assert row["policy"] + row["ordering"] + row["pool"] + row["vocabulary"] + row["no_drafter"] == pytest.approx(
            row["whole"]
        )
    assert (folder / "one" / "regret.png").read_bytes().startswith(b"\x89PNG")
    assert "accepted whole" in out
    assert eagle_tree("replay", *small[:-1], "run=two", "cost=h100_8b")[0] == 0
    assert last(eagle_tree("report", "one", "two")[1])["finished"] == 2


def test_a_report_tells_runs_of_one_name_apart(folder, eagle_tree):
    for name, depth in (("a/one", 1), ("b/one", 2)):
        arguments = ["policy.top_k=3", f"policy.depth={depth}", "compare=[]", f"run={name}"]
        assert eagle_tree("replay", *arguments)[0] == 0
    assert last(eagle_tree("report", "a/one", "b/one", "./a/one")[1])["finished"] == 2
    rows = table(folder / "a" / "one")
    assert sorted(rows.label) == [f"{run}/one:{policy}" for run in "ab" for policy in ("autoregressive", "eagle2")]
    for name in ("s", "t"):
        assert eagle_tree("replay", "-m", "policy.budget=1,2", "compare=[]", f"sweep={name}")[0] == 0
    assert last(eagle_tree("report", "s", "t")[1])["finished"] == 4
    assert table(folder / "s").label.is_unique


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "runs: no folder is given"),
        (["nowhere"], "nowhere holds neither a sweep nor a finished replay"),
        (["one", "reference=x"], "reference='x' is not among the policies"),
        (["one", "rows=0"], "rows=0 must be an integer >= 1"),
        (["one", "other"], "other replays trace"),
        (["bench"], "bench is no replay"),
        (["cut"], "cut/run.json is truncated or damaged"),
        (["list"], "list/run.json holds no object"),
    ],
)
def test_mistakes_of_a_report_are_named(folder, eagle_tree, arguments, named):
    assert eagle_tree("replay", "policy.top_k=3", "policy.depth=2", "compare=[]", "run=one")[0] == 0
    about = json.loads(Path("one/run.json").read_text())
    about["result"]["trace"] = "another"
    for name, content in (("other", about), ("bench", {"config": {}})):
        Path(name).mkdir()
        Path(name, "run.json").write_text(json.dumps(content))
    for name, text in (("cut", "{"), ("list", "[]")):
        Path(name).mkdir()
        Path(name, "run.json").write_text(text)
    status, _, errors = eagle_tree("report", *arguments)
    assert status == 1 and named in errors and "Traceback" not in errors


@pytest.mark.slow
def test_jobs_run_in_processes_of_their_own(folder):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="the sweep extra is not installed")
    command = [sys.executable, "-m", "eagle_tree.apps.cli", "replay", "-m", "policy.budget=1,2", "compare=[]"]
    options = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "sweep=s"]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert last(done.stdout)["finished"] == 2
