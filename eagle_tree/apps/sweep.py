"""Sweeps: one verb over many configurations by hydra's multirun, each job in a folder of its own.

A sweep is a folder with `sweep.json`, which names every job before the first one runs, and one folder a job. A job's
folder is named by what it overrides, so the same job is found again; it holds `run.json` once it is finished and
`error.txt` if it failed. `resume=true sweep=FOLDER` runs what is not finished. Any launcher will do: what a job has to
say is on disk.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra import main as hydra_main
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from eagle_tree.apps import common
from eagle_tree.files import read_json, write_json

MULTIRUN = {"-m", "--multirun"}
OF_THE_SWEEP = {"sweep", "resume", "output", "run"}
"""Options that say where a sweep is, not what a job does."""


def is_sweep(arguments: list[str]) -> bool:
    """Whether a command line asks for a multirun."""
    return bool(MULTIRUN & set(arguments))


def is_job() -> bool:
    """Whether this is a job of a sweep."""
    return HydraConfig.get().mode == RunMode.MULTIRUN


def job_name(overrides: list[str]) -> str:
    """Names a job by what it overrides."""
    return "job-" + hashlib.blake2b("\n".join(sorted(of_the_job(overrides))).encode(), digest_size=6).hexdigest()


def of_the_job(overrides: list[str]) -> list[str]:
    """The overrides that say what a job does."""
    keys = [override.lstrip("+~").partition("=")[0] for override in overrides]
    others = [key in OF_THE_SWEEP or key.startswith(("hydra.", "hydra/")) for key in keys]
    return [override for override, other in zip(overrides, others, strict=True) if not other]


def planned(verb: str, overrides: list[str]) -> dict[str, list[str]] | None:
    """Every job's name and overrides; None under a sweeper that decides as it goes.

    Raises:
        ValueError: overrides that hydra cannot read.
    """
    try:
        parser = OverridesParser.create()
        plain = [one.input_line for one in parser.parse_overrides(overrides) if not one.is_sweep_override()]
        with initialize_config_dir(str(common.conf_dir()), version_base="1.3"):
            sweeper = compose(verb, plain, return_hydra_config=True).hydra.sweeper
        if not sweeper._target_.endswith("BasicSweeper"):
            return None
        swept = [f"{name}={value}" for name, value in (sweeper.get("params") or {}).items()]
        (jobs,) = BasicSweeper.split_arguments(parser.parse_overrides([*swept, *overrides]), None)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(str(error)) from None
    return {job_name(job): of_the_job(job) for job in jobs}


def option(overrides: list[str], name: str) -> str | None:
    """The last value that overrides give an option."""
    values = [one.partition("=")[2] for one in overrides if one.startswith(f"{name}=")]
    return values[-1] if values else None


def prepare(verb: str, overrides: list[str]) -> Path:
    """The folder of a new sweep, with its plan, or of the one to go on with.

    Raises:
        FileNotFoundError: no sweep to resume. FileExistsError: a sweep that is not to be resumed.
        ValueError: other jobs than those of the sweep to resume, or a damaged plan.
    """
    common.check_choices(overrides)
    given, resumed = option(overrides, "sweep"), (option(overrides, "resume") or "false").lower()
    if resumed not in ("true", "false"):
        raise ValueError(f"resume={resumed} must be true or false")
    resume = resumed == "true"
    output = option(overrides, "output") or "runs"
    name = f"sweep-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"  # two of the same second differ
    folder = Path(output) / name if given is None else Path(given)
    plan = folder / "sweep.json"
    if resume and not plan.is_file():
        raise FileNotFoundError(f"resume: there is no sweep in {folder}; name one with sweep=FOLDER")
    if not resume and plan.exists():
        raise FileExistsError(f"{folder} already holds a sweep; name another folder, or go on with resume=true")
    jobs = planned(verb, overrides)
    if resume and read_json(plan, "jobs")["jobs"] != jobs:
        raise ValueError(f"resume: the sweep in {folder} has other jobs; repeat its overrides as they were")
    if not resume:
        write_json(plan, {"verb": verb, "overrides": of_the_job(overrides), "jobs": jobs})
    return folder


def run(verb: str, task: Callable[[DictConfig, Path], float], arguments: list[str]) -> int:
    """Run a sweep and say how it went, in a table and a JSON line.

    Args:
        task: does a job in its folder, and writes `run.json` last; returns what a search maximises.

    Returns:
        the exit status: 0 only if every job is finished.
    """
    overrides = [one for one in arguments if not one.startswith("-")]
    try:
        folder = prepare(verb, overrides)
    except (ValueError, OSError) as error:
        print(f"eagle-tree {verb}: error: {error}", file=sys.stderr)
        return 1

    def job(config: DictConfig) -> float:
        return run_job(task, config)

    given = [one for one in arguments if not one.startswith("sweep=")]
    sys.argv = [f"eagle-tree {verb}", *given, f"sweep='{folder}'", f"hydra.sweep.dir='{folder}'"]
    try:
        hydra_main(version_base="1.3", config_path=str(common.conf_dir()), config_name=verb)(job)()
    except KeyboardInterrupt:
        print(f"eagle-tree {verb}: interrupted; go on with resume=true sweep={folder}", file=sys.stderr)
        return 130
    try:
        jobs = gathered(folder)
    except (ValueError, OSError) as error:
        print(f"eagle-tree {verb}: error: {error}", file=sys.stderr)
        return 1
    counts = {"sweep": str(folder), "jobs": len(jobs.planned), "finished": len(jobs.finished)}
    print("\n".join(common.aligned([{name: str(value) for name, value in counts.items()}])))
    print("\n".join(jobs.complaints()))
    result = {**counts, "failed": sorted(jobs.failed), "missing": jobs.missing}
    print(json.dumps({"verb": verb, **result}), flush=True)
    return int(bool(jobs.failed or jobs.missing) or not jobs.finished)


def run_job(task: Callable[[DictConfig, Path], float], config: DictConfig) -> float:
    """One job, in its folder: finished before, finished now, or failed with the reason on disk."""
    folder = Path(config.sweep) / job_name(list(HydraConfig.get().overrides.task))
    if (folder / "run.json").is_file():
        try:
            return read_json(folder / "run.json", "objective")["objective"]
        except ValueError:  # damaged: it is replayed again
            pass
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # jobs share the cores
    try:
        objective = task(config, folder)
        (folder / "error.txt").unlink(missing_ok=True)
        return objective
    except Exception as error:  # whatever it was, the other jobs go on, and the sweep names this one
        folder.mkdir(parents=True, exist_ok=True)
        known = isinstance(error, ValueError | OSError | ArithmeticError | OmegaConfBaseException)
        (folder / "error.txt").write_text(f"{error}\n" if known else traceback.format_exc())
        return float("-inf")
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class Jobs:
    """How a sweep stands.

    Attributes:
        planned: names to overrides; finished: names to the contents of `run.json`; failed: names to reasons.
        missing: names of those that were not begun or were stopped.
    """

    planned: dict[str, list[str]]
    finished: dict[str, dict[str, Any]]
    failed: dict[str, str]
    missing: list[str]

    def complaints(self) -> list[str]:
        """A line for every job that is not finished."""
        lines = [f"failed:  {name} {' '.join(self.planned.get(name, []))}: {why}" for name, why in self.failed.items()]
        return lines + [f"missing: {name} {' '.join(self.planned[name])}" for name in self.missing]


def gathered(folder: Path) -> Jobs:
    """How the sweep in a folder stands.

    Raises:
        ValueError: a damaged plan or run.
    """
    plan = read_json(folder / "sweep.json", "jobs")["jobs"]
    runs = {path.parent.name: read_json(path, "result") for path in sorted(folder.glob("job-*/run.json"))}
    errors = {path.parent.name: path.read_text().strip() for path in sorted(folder.glob("job-*/error.txt"))}
    failed = {name: why.splitlines()[-1] if why else "" for name, why in errors.items() if name not in runs}
    plan = {name: [] for name in [*runs, *failed]} if plan is None else plan  # a search decides as it goes
    return Jobs(plan, runs, failed, [name for name in plan if name not in runs and name not in failed])
