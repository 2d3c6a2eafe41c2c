"""What every verb shares: configuration to objects, provenance, the last line."""

from __future__ import annotations

import json
import math
import os
import platform
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import transformers
from hydra import main as hydra_main
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from eagle_tree import __version__
from eagle_tree.accept import Rule
from eagle_tree.checks import as_path, check_count, is_count
from eagle_tree.decode import check_request
from eagle_tree.drafter.base import Drafter
from eagle_tree.policy import Policy
from eagle_tree.prompts import Prompt, load_prompts
from eagle_tree.target import Target
from eagle_tree.tree import TOP_K, Draw
from eagle_tree.warp import Sampling


def conf_dir() -> Path:
    """The folder of the hydra configuration: `eagle_tree/conf` in a wheel, `conf` of the checkout otherwise.

    An editable install runs from the checkout. The packaged folder is asked first: beside an installed package,
    the checkout's place would be a folder `conf` in site-packages, which may be anybody's.

    Raises:
        FileNotFoundError: neither folder is there, so the installation is incomplete.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "bench.yaml").is_file():
            return folder
    raise FileNotFoundError(f"no configuration in {package / 'conf'} or {package.parent / 'conf'}; install again")


def run_verb(verb: str, task: Callable[[DictConfig], dict[str, Any]], arguments: list[str]) -> int:
    """Compose `conf/<verb>.yaml` with the overrides, run the task, print its result as one JSON line.

    Errors that a user can cause are shown without a traceback.

    Returns:
        the exit status: 0 only if the task did its job, and a result that says `passed` says it is true; 130 after
        Ctrl-C. Errors go to standard error.
    """
    status = 1

    def wrapped(config: DictConfig) -> None:
        nonlocal status
        try:
            result = task(config)
        except KeyboardInterrupt as interrupt:
            print(f"eagle-tree {verb}: interrupted; {interrupt}", file=sys.stderr)
            status = 130
        except (
            ValueError,
            OSError,
            ArithmeticError,
            OmegaConfBaseException,
            InstantiationException,
        ) as error:
            print(f"eagle-tree {verb}: error: {error}", file=sys.stderr)
        else:
            if os.environ.get("RANK", "0") == "0":  # of processes that share the work, one speaks
                print(json.dumps({"verb": verb, **result}, default=str), flush=True)
            status = 0 if result.get("passed", True) else 1

    try:
        check_choices(arguments)
    except ValueError as error:
        print(f"eagle-tree {verb}: error: {error}", file=sys.stderr)
        return status
    sys.argv = [f"eagle-tree {verb}", *arguments]
    hydra_main(version_base="1.3", config_path=str(conf_dir()), config_name=verb)(wrapped)()
    return status


def check_choices(arguments: list[str]) -> None:
    """Raise ValueError for a group of the configuration that is set to nothing: hydra has no message for it."""
    for argument in arguments:
        name, _, value = argument.partition("=")
        folder = conf_dir() / name
        if value in ("null", "") and is_override(argument) and folder.is_dir():
            known = ", ".join(sorted(file.stem for file in folder.glob("*.yaml")))
            raise ValueError(f"{argument} must be one of {known}")


def leading_argument(arguments: list[str]) -> tuple[str | None, list[str]]:
    """A verb's first argument, if it is no override and no option, and the others."""
    if arguments and not arguments[0].startswith("-") and not is_override(arguments[0]):
        return arguments[0], arguments[1:]
    return None, arguments


def is_override(argument: str) -> bool:
    """Whether an argument reads `name=value` with a dotted name."""
    name, equals, _ = argument.partition("=")
    return bool(equals) and all(part.isidentifier() for part in name.lstrip("+~").split("."))


def build(config: DictConfig) -> Callable[..., Any]:
    """The object that a config node with `_target_` describes, still to be called with what is not configuration."""
    return instantiate(config, _convert_="all", _partial_=True)


def build_target(config: DictConfig) -> Target:
    """The target of a config."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return Target.from_pretrained(**OmegaConf.to_container(config, resolve=True))


def build_drafter(config: DictConfig, target: Target) -> Drafter:
    """The drafter of a config, for a target."""
    return build(config)(target=target)


def build_policy(config: DictConfig, cost: DictConfig | None = None) -> Policy:
    """The policy of a config. EAGLE's `total_token` counts the root: it becomes `budget` here, once.

    Args:
        cost: the config of a cost table that a policy decides by, in place of its own, whatever machine it is of.
    """
    fields = OmegaConf.to_container(config, resolve=True)
    if cost is not None:
        fields = timed_by(fields, OmegaConf.to_container(cost, resolve=True))
    total_token = fields.pop("total_token", None)
    if total_token is not None:
        if not is_count(total_token, 2):
            raise ValueError(f"total_token={total_token!r} must be an integer >= 2 (it counts the root)")
        fields["budget"] = total_token - 1
    try:
        return build(OmegaConf.create(fields))()
    except TypeError as error:
        raise ValueError(f"policy: {error}") from None


def timed_by(fields: Any, cost: dict[str, Any]) -> Any:
    """Policy fields in which every `cost` that decides, inner policies' included, is the given one.

    A tree of given size (`policy=sequoia`, without a cost) is not decided by any.
    """
    if not isinstance(fields, dict):
        return fields
    decides = {"cost", "other_machine"} <= fields.keys() and (fields["cost"] is not None or fields["budget"] is None)
    other = {"cost": cost, "other_machine": True} if decides else {}
    return {**{name: timed_by(value, cost) for name, value in fields.items()}, **other}


def build_rule(config: DictConfig) -> tuple[Rule, Draw]:
    """The acceptance rule of a config, and how candidates are drawn for it."""
    rule = build(config.accept)()
    return rule, build_draw(config.draw, rule.default_draw)


def build_draw(config: DictConfig, default: Draw = TOP_K) -> Draw:
    """How candidates are drawn; of the default's kind where the config names none."""
    if not isinstance(config, DictConfig):
        raise ValueError(f"draw={config!r} must be the fields kind, temperature and error_scale")
    fields = OmegaConf.to_container(config, resolve=True)
    return Draw(**{**fields, "kind": fields["kind"] or default.kind})


def lossy_note(rule: Rule) -> str:
    """What must stand beside every result of a lossy rule; empty for others."""
    return "" if rule.lossless else f"LOSSY: accept={type(rule).__name__} emits another law than the target's.\n"


def named_policy(name: str, option: str) -> DictConfig:
    """The config of a policy by its name in `conf/policy`; an unknown one is an error of the named option."""
    path = conf_dir() / "policy" / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in path.parent.glob("*.yaml")))
        raise ValueError(f"{option}: unknown policy {name!r}; known are {known}")
    return OmegaConf.load(path)


def listed_policies(config: DictConfig, option: str, cost: DictConfig | None = None) -> dict[str, Policy]:
    """Policies by label, of a list option such as bench's `compare`.

    An entry is the name of a yaml in conf/policy, or a mapping of `policy` (such a name) and fields
    that differ from the yaml's: `compare=[autoregressive,{policy:eagle2,budget:8}]`. A dot leads into the policy
    inside another: `{policy:calibrated,policy.budget:24}`.
    """
    if not OmegaConf.is_list(config[option]):
        raise ValueError(f"{option}={config[option]!r} must be a list of policies, such as {option}=[chain]")
    entries = OmegaConf.to_container(config[option], resolve=True)
    return dict(listed_policy(entry, option, cost) for entry in entries)


def listed_policy(entry: str | dict[str, Any], option: str, cost: DictConfig | None = None) -> tuple[str, Policy]:
    """Label and policy of one entry."""
    if isinstance(entry, str):
        return entry, build_policy(named_policy(entry, option), cost)
    if not isinstance(entry, dict) or "policy" not in entry:
        raise ValueError(f"{option}: {entry!r} is neither a policy's name nor {{policy: NAME, field: value}}")
    changes = {field: value for field, value in entry.items() if field != "policy"}
    config = named_policy(entry["policy"], option)
    for field, value in changes.items():
        outer, _, name = field.rpartition(".")
        fields = OmegaConf.select(config, outer) if outer else config
        if not isinstance(fields, DictConfig) or name not in fields:
            raise ValueError(f"{option}: policy {entry['policy']!r} has no field {field!r}")
        fields[name] = value
    label = ",".join(f"{field}={value}" for field, value in changes.items())
    return f"{entry['policy']}({label})", build_policy(config, cost)


def read_prompts(config: DictConfig) -> list[Prompt]:
    """The prompts of a data config; none if its kind is null. Called before a model is loaded: files have mistakes."""
    fields = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    return load_prompts(**fields) if fields["kind"] is not None else []


def check_length_and_seed(config: DictConfig, least: int = 1) -> None:
    """Raise ValueError for a number of tokens or a seed that is none; called before a model is loaded."""
    check_count("max_new_tokens", config.max_new_tokens, least)
    check_count("seed", config.seed, least=0)


def check_requests(
    target: Target,
    drafter: Drafter,
    policies: Iterable[Policy],
    prompts: Iterable[tuple[str, list[int]]],
    max_new_tokens: int,
    sampling: Sampling,
    rule: Rule | None = None,
    draw: Draw | None = None,
) -> None:
    """Raise ValueError, before any work, for what cannot be decoded; `prompts` are ids and tokens."""
    policies = list(policies)
    for prompt_id, ids in prompts:
        for policy in policies:
            try:
                check_request(target, drafter, policy, ids, max_new_tokens, sampling, rule, draw)
            except ValueError as error:
                raise ValueError(f"prompt {prompt_id}: {error}") from None


def check_made_for(policies: Iterable[Policy], target: Target, drafter: Drafter, sampling: Sampling) -> None:
    """Raise ValueError for a policy whose cost table or calibration was measured on something else."""
    here = {**machine(target), "greedy": sampling.greedy, "drafter": drafter.fingerprint}
    for policy in policies:
        policy.check_machine(here)


def new_run_folder(config: DictConfig, verb: str, *left: str) -> Path:
    """Where a run writes: `run` if given, else a name that two runs of the same second do not share.

    Args:
        left: what a run of the verb leaves in its folder, whole or stopped.

    Raises:
        FileExistsError: a run was there before.
    """
    if config.run is None:
        return as_path("output", config.output) / f"{verb}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    folder = as_path("run", config.run)
    for name in left:
        if (folder / name).exists():
            raise FileExistsError(f"run={folder} already holds {name}, of an earlier run; name another folder")
    return folder


def finite(value: float) -> float | None:
    """A number that JSON can hold."""
    return value if math.isfinite(value) else None


def by_policy(summary: pd.DataFrame, keys: Iterable[str]) -> dict[str, dict[str, float | None]]:
    """Some columns of a summary with one row a policy, as JSON."""
    return {row["policy"]: {key: finite(row[key]) for key in keys} for row in summary.to_dict("records")}


def policy_cells(row: dict[str, Any]) -> dict[str, str]:
    """What every table of followed or replayed policies says of one, for people."""
    return {
        "policy": row["policy"],
        "passes": str(row["passes"]),
        "τ (95 %)": interval(row, "tau"),
        "nodes": f"{row['nodes']:.1f}",
        "exp. draft": f"{row['expected_draft']:.2f}",
        "realised": f"{row['realised']:.2f}",
    }


def interval(row: Mapping[str, float], name: str, digits: int = 2) -> str:
    """A value and its 95 % interval for people, from the columns `name`, `name_low` and `name_high`."""
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    if math.isnan(row[name]):
        return "n/a"
    return f"{row[name]:.{digits}f} " + ("(n/a)" if math.isnan(low) else f"({low:.{digits}f}–{high:.{digits}f})")


def aligned(rows: list[dict[str, str]]) -> list[str]:
    """The lines of a table for people; each row maps column names to cells."""
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    lines = ["  ".join(name.ljust(width) for name, width in widths.items()).rstrip()]
    lines.append("  ".join("─" * width for width in widths.values()))
    return lines + ["  ".join(row[name].ljust(width) for name, width in widths.items()).rstrip() for row in rows]


def machine(target: Target) -> dict[str, Any]:
    """What a time was taken on: device, dtype, threads, versions, commit."""
    return {
        "commit": commit(),
        "versions": {
            "eagle_tree": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "device": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else cpu_name(),
        "threads": torch.get_num_threads(),
        "dtype": str(target.dtype).removeprefix("torch."),
    }


def provenance(target: Target, config: DictConfig) -> dict[str, Any]:
    """What a measurement was taken on: machine, target, and the whole configuration."""
    configuration = OmegaConf.to_container(config, resolve=True)
    return {**machine(target), "target_fingerprint": target.fingerprint, "config": configuration}


def commit() -> str:
    """The checkout's commit, marked if files differ from it; "unknown" outside a checkout."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return "unknown"

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True).stdout.strip()

    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("-dirty" if git("status", "--porcelain") else "")


def cpu_name() -> str:
    """The processor's model and the number of cores this process may use."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores"
