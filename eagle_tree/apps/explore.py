"""eagle-tree explore RUN: a recorded run's draft trees as one HTML page."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from eagle_tree.analysis import tokens_per_pass
from eagle_tree.apps import common
from eagle_tree.apps.evaluate import policy_lines
from eagle_tree.checks import as_path, check_count
from eagle_tree.explore import collect, render, select
from eagle_tree.files import read_json, replacing
from eagle_tree.record import TABLES, read_run
from eagle_tree.target import load_tokenizer

TOKENIZERS = "run (the target's own), a folder, a hub id, a .gguf file, smollm2-135m, or null for token ids"


def main(arguments: list[str]) -> int:
    """Entry point of the verb. A first argument that is no override and no option is the run's folder."""
    run, arguments = common.leading_argument(arguments)
    return common.run_verb("explore", partial(explore, run), arguments)


def explore(run: str | None, config: DictConfig) -> dict[str, Any]:
    """Write the page of a run; returns the summary."""
    run = config.run if run is None else run
    if run is None:
        raise ValueError("run: name the folder of a recorded run: eagle-tree explore runs/bench-…")
    folder = as_path("run", run)
    policies, prompts = (names(config, option) for option in ("policies", "prompts"))
    check_count("max_passes", config.max_passes)
    page = folder / "explorer.html" if config.page is None else as_path("page", config.page)
    if page.is_dir():
        raise ValueError(f"page={config.page} is a folder; name a file in it")
    tables = read_tables(folder)
    about = read_about(folder)
    try:
        selection = select(tables, policies, prompts, config.max_passes)
        tokenizer = run_tokenizer(config.tokenizer, about)
        check_tokenizer(config.tokenizer, tokenizer, tables["outputs"])
        data = collect(tables, selection, tokenizer)
    except ValueError as error:
        raise ValueError(f"run={folder}: {error}") from None
    data["run"] = {"name": folder.resolve().name, **described(about)}
    text = render(data)
    with replacing(page) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return report(page, data, tables["passes"])


def report(page: Path, data: dict[str, Any], passes: pd.DataFrame) -> dict[str, Any]:
    """Print what the page shows, and return the JSON result."""
    prompts = [entry["id"] for entry in data["prompts"]]
    shown = passes[passes.policy.isin(data["policies"]) & passes.prompt_id.isin(prompts)]
    print("\n".join(policy_lines(tokens_per_pass(shown))))
    if data["left_out"]:
        print(f"\n{data['left_out']} prompts are left out: name them (prompts=[…]) or raise max_passes")
    if not data["run"]["whole"]:
        print("\nthe run was interrupted before its end: only its finished answers are shown")
    size = page.stat().st_size
    print(f"\nopen {page} in a browser ({size / 1e6:.2f} MB)\n")
    return {
        "page": str(page),
        "bytes": size,
        "policies": data["policies"],
        "prompts": len(prompts),
        "left_out": data["left_out"],
        "passes": len(shown),
        "whole_run": data["run"]["whole"],
    }


def names(config: DictConfig, option: str) -> list[str] | None:
    """A list option of names; numbers are names too."""
    value = config[option]
    if value is None:
        return None
    value = OmegaConf.to_container(value) if OmegaConf.is_list(value) else value
    if not isinstance(value, list):
        raise ValueError(f"{option}={value!r} must be a list of names, such as {option}=[{value}]")
    return [str(name) for name in value]


def read_tables(folder: Path) -> dict[str, pd.DataFrame]:
    """The tables of a run, one schema each."""
    if not folder.is_dir():
        raise FileNotFoundError(f"run={folder} is no folder; it must be one that `eagle-tree bench` recorded")
    try:
        return {name: read_run(folder, name) for name in TABLES}
    except FileNotFoundError as error:
        raise FileNotFoundError(f"run={folder} holds no run with finished answers: {error}") from None


def read_about(folder: Path) -> dict[str, Any] | None:
    """What `run.json` says; None for a run that was interrupted before it was written."""
    path = folder / "run.json"
    if not path.is_file():
        return None
    return read_json(path)


def run_tokenizer(name: str | None, about: dict[str, Any] | None):
    """The tokenizer of the option `tokenizer`."""
    if name is None:
        return None
    own = name == "run"
    if own:
        name = (about or {}).get("config", {}).get("target", {}).get("name_or_path")
        if name is None:
            why = "has no run.json: it was interrupted" if about is None else "names no target in its run.json"
            raise ValueError(f"tokenizer=run, but the run {why}; tokenizer must be {TOKENIZERS}")
    try:
        return load_tokenizer(str(name))
    except (ValueError, OSError) as error:
        source = f"run (its target is {name})" if own else name
        raise ValueError(f"tokenizer={source}: {error}; tokenizer must be {TOKENIZERS}") from None


def check_tokenizer(name: str, tokenizer, outputs: pd.DataFrame) -> None:
    """Raise ValueError for a tokenizer that reads the recorded answers otherwise than they were recorded."""
    for output in outputs.itertuples() if tokenizer is not None else ():
        if output.text and tokenizer.decode(output.token.tolist()) != output.text:
            raise ValueError(
                f"tokenizer={name} decodes the answer of {output.policy!r} to {output.prompt_id!r} otherwise than it "
                f"was recorded: it is not the run's; tokenizer must be {TOKENIZERS}"
            )


def described(about: dict[str, Any] | None) -> dict[str, Any]:
    """What the page says of its run."""
    if about is None:
        return {"whole": False}
    config = about.get("config", {})
    keys = ("device", "dtype", "threads", "commit")
    known = {key: about[key] for key in keys if key in about}
    if "temperature" in config:
        known["temperature"] = config["temperature"]
    return {"whole": True, "target": Path(config.get("target", {}).get("name_or_path", "")).name, **known}
