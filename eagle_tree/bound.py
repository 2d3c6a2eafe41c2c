"""The fastest way through known texts: what no policy on a trace can beat (DESIGN §4).

A pass at position t takes some time and emits some tokens, and then there is the rest: the least time to the end is a
shortest path over positions, V(t) = min over trees [time + V(t + emitted)]. Of all trees that accept a tokens, none is
cheaper than the chain that spells them: a forward takes no less time over more positions, and a drafter step no less
over more nodes. So the minimum is over a alone, as far as the trace's candidates spell the text. It knows the text, as
no policy does: a bound, not a rival.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch

from eagle_tree.cost import CostTable
from eagle_tree.trace import Trace, levels


def spelled_ahead(trace: Trace) -> np.ndarray:
    """`[P]`, how many of the tokens that follow each position the trace's candidates spell, one below the other."""
    memo = trace.memo
    row, count = memo.root, torch.zeros(len(memo.root), dtype=torch.int64)
    deepest = max(levels(part.expansions) for part in trace.parts)
    text = trace.windows(deepest + 1)
    for level in range(deepest):
        right = memo.token[row] == text[:, level + 1, None]
        found = right.any(-1)
        if not found.any():
            break
        count = count + found
        nowhere = len(memo.entropy) - 1  # the row of what was never asked
        row = torch.where(found, memo.child[row].gather(-1, right.int().argmax(-1, keepdim=True)).squeeze(-1), nowhere)
        row = row.long()
    return count.numpy()


def shortest(seconds: np.ndarray) -> np.ndarray:
    """`[P + 1]`, the least seconds from every position to the end of a text.

    Args:
        seconds: `[P, A]`, of a pass at each position that emits 1, 2, … A tokens; inf where none does. What would be
            emitted beyond the end is not needed: the entries there are not read.
    """
    positions, most = seconds.shape
    least = np.zeros(positions + 1)
    for place in range(positions - 1, -1, -1):
        reach = min(most, positions - place)
        least[place] = (seconds[place, :reach] + least[place + 1 : place + 1 + reach]).min()
    return least


def fastest(trace: Trace, cost: CostTable) -> pd.DataFrame:
    """The bound, one row a prompt: prompt_id, emitted (tokens behind prefill's own) and the least seconds for them."""
    ahead = spelled_ahead(trace)
    accepted = np.arange(ahead.max() + 1)
    context = trace.context[:, None]
    seconds = np.concatenate([cost.seconds(count, (1,) * count, context) for count in accepted], 1)
    seconds[accepted > ahead[:, None]] = np.inf
    rows = [
        {"prompt_id": part.text.prompt_id, "emitted": count, "seconds": shortest(seconds[first : first + count])[0]}
        for part, first, count in zip(trace.parts, trace.first, trace.positions, strict=True)
        if count
    ]
    return pd.DataFrame(rows)
