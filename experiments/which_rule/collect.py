"""Expected accepted children of one node, by rule, k, temperature and entropy of the target's law.

python collect.py TEXTS [TOKENS]      on the bundled target and drafter, TOKENS (32) of each of TEXTS answers
"""

from __future__ import annotations

import sys

import numpy as np
import pandas as pd

from eagle_tree.checkpoint import load_bundled
from eagle_tree.compare import compare, positions
from eagle_tree.decode import generate
from eagle_tree.policy import Autoregressive
from eagle_tree.prompts import load_prompts
from eagle_tree.target import BUNDLED, Target

TEMPERATURES, WIDTHS = (0.5, 0.7, 1.0, 1.3), (1, 2, 4, 8)
RESAMPLES = 1000


def interval(values: pd.Series, sequence: pd.Series) -> tuple[float, float]:
    """95 % of means over texts that were drawn with replacement."""
    sums = values.groupby(sequence).agg(["sum", "count"]).to_numpy()
    drawn = np.random.default_rng(0).integers(0, len(sums), (RESAMPLES, len(sums)))
    means = sums[drawn, 0].sum(1) / sums[drawn, 1].sum(1)
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))


def main(texts: int, tokens: int) -> None:
    target = Target.from_pretrained(BUNDLED, "bfloat16")
    drafter = load_bundled(target)
    found = []
    for index, prompt in enumerate(load_prompts("bundled", None, texts)):
        ids = target.encode_chat(list(prompt.messages))
        # half of the answers greedy, half at temperature 1
        run = generate(target, None, Autoregressive(), ids, tokens, index % 2, sequence=prompt.id, record_nodes=False)
        found.append(compare(positions(target, drafter, ids, run.tokens), TEMPERATURES, WIDTHS, prompt.id))
    rows = pd.concat(found, ignore_index=True)
    third = rows.groupby("temperature").entropy.rank(pct=True).mul(3).apply(np.ceil).astype(int)
    rows["entropy_third"] = third
    table = []
    for by in (["temperature", "rule", "k"], ["temperature", "entropy_third", "rule", "k"]):
        for key, group in rows.groupby(by):
            low, high = interval(group.accepted, group.sequence)
            cells = {"entropy_third": "all", **dict(zip(by, key, strict=True))}
            table.append({**cells, "accepted": group.accepted.mean(), "low": low, "high": high, "nodes": len(group)})
    columns = ["temperature", "entropy_third", "rule", "k", "accepted", "low", "high", "nodes"]
    pd.DataFrame(table)[columns].round(4).to_csv(sys.stdout, index=False)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 32)
