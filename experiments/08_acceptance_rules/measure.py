"""What the acceptance rules accept: of one node's children on the same distributions, and of whole trees.

python measure.py WORK FOLDER [small]     writes nodes.parquet, trees.parquet and about.json into FOLDER

WORK holds the recordings, of which the judge half's texts are read. A table that is there is not measured again.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from eagle_tree.accept import (
    BlockVerification,
    ChainRejection,
    Coupled,
    Hybrid,
    Match,
    WithoutReplacement,
    WithReplacement,
)
from eagle_tree.apps.common import machine
from eagle_tree.checkpoint import load_bundled
from eagle_tree.compare import compare, positions
from eagle_tree.decode import generate
from eagle_tree.drafter.base import Drafter
from eagle_tree.files import replacing, write_json
from eagle_tree.policy import Chain, Eagle2, specinfer
from eagle_tree.target import BUNDLED, Target


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
        positions: of every text, every third of its first ones; repeats: drafts at each, of what is drawn.
        temperatures, widths: children of a node. prompts, tokens, tree_temperatures: of whole trees.
    """

    positions: int = 24
    repeats: int = 2
    temperatures: tuple[float, ...] = (0.5, 1.0, 1.3)
    widths: tuple[int, ...] = (1, 4, 8)
    prompts: int = 8
    tokens: int = 32
    tree_temperatures: tuple[float, ...] = (0.5, 1.0)


FULL = Size()
SMALL = Size(positions=1, repeats=1, temperatures=(1.0,), widths=(1, 4), prompts=1, tokens=4, tree_temperatures=(1.0,))
APART = 3
"""Neighbouring positions say much the same: every third is looked at."""
TREE, CHAIN = specinfer([3, 2, 1, 1]), Chain(4)
EAGLE2 = Eagle2(budget=21, top_k=4, depth=3)  # as many nodes, 3 + 6 + 6 + 6, and as many levels
ARMS = {
    "chain, match": (CHAIN, Match()),
    "chain, rejection": (CHAIN, ChainRejection()),
    "chain, block": (CHAIN, BlockVerification()),
    "chain, coupled": (CHAIN, Coupled()),
    "tree, match": (TREE, Match()),
    "tree, with replacement": (TREE, WithReplacement()),
    "tree, without replacement": (TREE, WithoutReplacement()),
    "tree, hybrid": (TREE, Hybrid()),
    "tree, coupled": (TREE, Coupled()),
    "EAGLE-2's tree, match": (EAGLE2, Match()),
    "EAGLE-2's tree, coupled": (EAGLE2, Coupled()),
}
"""Trees of one shape and chains under each rule; drawn children may not be pruned, so EAGLE-2's tree has two only."""


def texts(work: Path) -> pd.DataFrame:
    """The judge half's texts, greedy and at temperature 1."""
    parts = [pd.read_parquet(work / "judge" / f"trace_{name}" / "texts.parquet").assign(text=name) for name in "01"]
    return pd.concat(parts, ignore_index=True)


def single_nodes(target: Target, drafter: Drafter, found: pd.DataFrame, size: Size) -> pd.DataFrame:
    """`compare` at some positions of every text."""
    rows = []
    for text in tqdm(found.itertuples(), "single nodes", len(found), unit="text", dynamic_ncols=True):
        answer = text.answer_ids[: size.positions + 1].tolist()
        along = islice(positions(target, drafter, text.prompt_ids.tolist(), answer), 0, None, APART)
        table = compare(along, size.temperatures, size.widths, text.prompt_id, size.repeats)
        rows.append(table.assign(text=text.text))
    return pd.concat(rows, ignore_index=True)


def whole_trees(target: Target, drafter: Drafter, found: pd.DataFrame, size: Size) -> pd.DataFrame:
    """Passes of every arm and temperature, on the same prompts and seeds."""
    rows, cache = [], target.new_cache()
    prompts = found.drop_duplicates("prompt_id").head(size.prompts)
    work = [(temperature, prompt) for temperature in size.tree_temperatures for prompt in prompts.itertuples()]
    for temperature, prompt in tqdm(work, "whole trees", unit="prompt", dynamic_ncols=True):
        for name, (policy, rule) in ARMS.items():
            run = generate(
                target, drafter, policy, prompt.prompt_ids.tolist(), size.tokens, temperature, rule=rule,
                sequence=prompt.prompt_id, policy_name=name, cache=cache,
            )  # fmt: skip
            rows += [{**vars(one.row), "temperature": temperature} for one in run.passes]
    return pd.DataFrame(rows)


TABLES = {"nodes": single_nodes, "trees": whole_trees}


def main(work: Path, folder: Path, size: Size) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {name: measure for name, measure in TABLES.items() if not (folder / f"{name}.parquet").is_file()}
    if not wanted:
        return
    target = Target.from_pretrained(BUNDLED, os.environ.get("DTYPE", "float32"))
    drafter, found = load_bundled(target), texts(work)
    write_json(folder / "about.json", machine(target))
    for name, measure in wanted.items():
        table = measure(target, drafter, found, size)
        with replacing(folder / f"{name}.parquet") as temporary:
            table.to_parquet(temporary, index=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), SMALL if "small" in sys.argv[3:] else FULL)
