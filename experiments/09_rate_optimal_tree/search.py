"""The fixed EAGLE-2 trees of most tokens per second here: replayed on the fit half, in the time of the cost table.

python search.py WORK [small]             writes WORK/search_T.csv, best first, unless it is newer than the costs
python search.py WORK entries T NUMBER    bench's entries of a live repeat: the fastest, and what they meet
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import pandas as pd
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common

from eagle_tree.cost import CostTable
from eagle_tree.policy import Eagle2
from eagle_tree.replay import replay

BUDGETS, WIDTHS, DEPTHS = (4, 6, 8, 12, 16, 24, 32, 48, 59), (2, 3, 4, 6, 8, 10), (1, 2, 3, 4, 5, 7)
LIVE = {0: 3, 1: 1}
"""How many of the fastest are decoded, by temperature."""


def settings(small: bool) -> list[Eagle2]:
    """All trees whose pool is not smaller than their budget."""
    grid = product((4, 16, 59), (2, 10), (1, 5)) if small else product(BUDGETS, WIDTHS, DEPTHS)
    return [Eagle2(*sizes) for sizes in grid if sizes[0] <= sizes[1] + sizes[2] * sizes[1] ** 2]


def search(work: Path, temperature: int, small: bool) -> pd.DataFrame:
    """One row a setting: budget, top_k, depth, tau, tokens_per_second; the fastest first."""
    trace, cost = common.trace(work, "fit", temperature), CostTable.load(work / "cost")
    rows = []
    for one in tqdm(settings(small), f"T = {temperature}", unit="tree"):
        result = replay(trace, one, cost)
        if result.uncovered:
            raise ValueError(f"{one} asks for what fit/trace_{temperature} does not hold")
        sums = result.passes[["emitted", "pass_s"]].sum()
        row = {"budget": one.budget, "top_k": one.top_k, "depth": one.depth}
        rows.append({**row, "tau": sums.emitted / len(result.passes), "tokens_per_second": sums.emitted / sums.pass_s})
    return pd.DataFrame(rows).sort_values("tokens_per_second", ascending=False, ignore_index=True)


def fastest(work: Path, temperature: int, count: int) -> list[dict[str, int | str]]:
    """Entries of the fastest trees of the search, as bench's compare takes them."""
    rows = pd.read_csv(work / f"search_{temperature}.csv").head(count)
    return [{"policy": "eagle2", **row} for row in rows[["budget", "top_k", "depth"]].to_dict("records")]


def entries(work: Path, temperature: int, number: int) -> str:
    """Bench's compare of a live repeat, rotated by its number."""
    listed = [str(entry).replace("'", "") for entry in fastest(work, temperature, LIVE[temperature])]
    listed += ["eagle2_published", f"{{policy: rate_optimal, cost: {work}/cost}}"]
    turn = number % len(listed)
    return ",".join(listed[turn:] + listed[:turn])


def main(work: Path, small: bool) -> None:
    for temperature in common.TEMPERATURES:
        path = work / f"search_{temperature}.csv"
        if not path.exists() or path.stat().st_mtime < (work / "cost" / "cost.json").stat().st_mtime:
            search(work, temperature, small).to_csv(path, index=False)


if __name__ == "__main__":
    folder = Path(sys.argv[1]).resolve()
    if sys.argv[2:3] == ["entries"]:
        print(entries(folder, int(sys.argv[3]), int(sys.argv[4])))
    else:
        main(folder, "small" in sys.argv[2:])
