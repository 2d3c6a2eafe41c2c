"""What the acceptance rules accept: of one node's children on the same distributions, and of whole trees.

python measure.py WORK FOLDER [small]     writes nodes.parquet, trees.parquet and about.json into FOLDER

WORK holds the recordings, of which the judge half's texts are read. A table that is there is not measured again.
"""

from __future__ import annotations

import os
import sys
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

TEMPERATURES, WIDTHS = (0.5, 0.7, 1.0, 1.3), (1, 2, 4, 8)
POSITIONS, TREE_PROMPTS, TREE_TOKENS = 24, 10, 40
TREE_TEMPERATURES = (0.5, 1.0)
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


def single_nodes(target: Target, drafter: Drafter, found: pd.DataFrame, count: int) -> pd.DataFrame:
    """`compare` along the first `count` positions of every text."""
    rows = []
    for text in tqdm(found.itertuples(), "single nodes", len(found), unit="text", dynamic_ncols=True):
        along = positions(target, drafter, text.prompt_ids.tolist(), text.answer_ids[: count + 1].tolist())
        rows.append(compare(along, TEMPERATURES, WIDTHS, text.prompt_id).assign(text=text.text))
    return pd.concat(rows, ignore_index=True)


def whole_trees(target: Target, drafter: Drafter, prompts: pd.DataFrame, tokens: int) -> pd.DataFrame:
    """Passes of every arm and temperature, on the same prompts and seeds."""
    rows, cache = [], target.new_cache()
    work = [(temperature, prompt) for temperature in TREE_TEMPERATURES for prompt in prompts.itertuples()]
    for temperature, prompt in tqdm(work, "whole trees", unit="prompt", dynamic_ncols=True):
        for name, (policy, rule) in ARMS.items():
            run = generate(
                target, drafter, policy, prompt.prompt_ids.tolist(), tokens, temperature, rule=rule,
                sequence=prompt.prompt_id, policy_name=name, cache=cache,
            )  # fmt: skip
            rows += [{**vars(one.row), "temperature": temperature} for one in run.passes]
    return pd.DataFrame(rows)


def main(work: Path, folder: Path, small: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [name for name in ("nodes", "trees") if not (folder / f"{name}.parquet").is_file()]
    if not wanted:
        return
    target = Target.from_pretrained(BUNDLED, os.environ.get("DTYPE", "float32"))
    drafter, found = load_bundled(target), texts(work)
    write_json(folder / "about.json", machine(target))
    for name in wanted:
        if name == "nodes":
            table = single_nodes(target, drafter, found, 2 if small else POSITIONS)
        else:
            prompts = found.drop_duplicates("prompt_id").head(1 if small else TREE_PROMPTS)
            table = whole_trees(target, drafter, prompts, 6 if small else TREE_TOKENS)
        with replacing(folder / f"{name}.parquet") as temporary:
            table.to_parquet(temporary, index=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), "small" in sys.argv[3:])
