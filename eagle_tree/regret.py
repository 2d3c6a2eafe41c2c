"""Where a policy's expected tokens are lost, at positions that the target appraised (`appraise`).

At equal positions, equal numbers of nodes N and no more levels than the trace holds there, in expected tokens under
the target's own law p, the bonus token included:

    policy ≤ best subtree of its pool ≤ best tree over the draft vocabulary ≤ best tree over all tokens ≤ 1 + min(N, D).

The differences are what is lost by *ordering* (the drafter's confidences put other nodes first), by the *pool* (what
it did not propose or the beam did not expand), by the draft *vocabulary*, and what *no drafter* could give: the
target's own uncertainty. They add up to the gap between the policy's tree and one that is accepted whole.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from eagle_tree.analysis import ratio
from eagle_tree.decode import grow
from eagle_tree.noise import PassNoise
from eagle_tree.policy import Policy, hindsight
from eagle_tree.policy.hindsight import target_score
from eagle_tree.replay import check_replayable
from eagle_tree.trace import Remembered, Trace, check_judged, digest
from eagle_tree.tree import Draft, Frontier, GrowingTree

BOUNDS = ("policy", "pool_best", "drafted_best", "best", "whole")
"""Expected tokens of ever better trees."""
PARTS = {"ordering": "pool_best", "pool": "drafted_best", "vocabulary": "best", "no_drafter": "whole"}
"""A part of the gap, and the bound that it rises to from the one before."""


class Judged(Remembered):
    """Answers from the memo, and keeps what the target thinks of every node of the pool that grows.

    Attributes:
        log_prob: `[M]`, the target's log probability of each pool node's token after its parent's path; 0 at the root.
    """

    log_prob = torch.zeros(1)

    def expand(self, growing: GrowingTree, frontier: Frontier, noise: PassNoise | None) -> Draft:
        if not growing.levels:
            self.row, self.log_prob = self.root(), torch.zeros(1)
        row, count = self.row[frontier.node], frontier.n_candidates
        draft = super().expand(growing, frontier, noise)
        self.log_prob = torch.cat([self.log_prob, self.memo.target_log_prob[row, :count].flatten()])
        return draft


def learns(policy: Policy) -> bool:
    """Whether a policy's requests depend on the passes before, so that others cover them."""
    return digest(policy.covering()) != digest(policy)


@torch.inference_mode()
def regrets(trace: Trace, policy: Policy, name: str) -> pd.DataFrame:
    """One row a sampled position: policy (its name), prompt_id, position, nodes, `BOUNDS` and `PARTS`.

    Raises:
        ValueError: a trace of coupled drafts or without a sample, a policy that learns (its tree at a position depends
            on the passes before), requests that the trace does not hold, or trees larger than the trace's best ones.
    """
    check_replayable(trace, policy)
    check_judged(trace.draw)
    if learns(policy):
        raise ValueError(f"{name} learns from pass to pass: it has no tree of its own at a sampled position")
    if trace.memo.target_log_prob is None:
        raise ValueError(
            "the trace holds no probabilities of the target's: add them with `eagle-tree trace extend=… "
            "trace.target_prob=true`"
        )
    rows, expansions = [], 0
    for part, first in zip(trace.parts, trace.first, strict=True):
        if part.sampled and part.appraisal is None:
            raise ValueError(
                f"prompt {part.text.prompt_id} was extended after the target's probabilities were taken; run "
                "`eagle-tree trace` with trace.target_prob=true again"
            )
        for position in part.sampled:
            root = trace.memo.root[first + position]
            known = part.appraisal.slice(int(root) - expansions, 1).to_pylist()[0]
            drafter = Judged(replace(trace.memo, root=root[None]), trace.settings)
            pending = torch.tensor(part.text.answer_ids[position : position + 1])
            row = {"name": name, "prompt_id": part.text.prompt_id, "position": position}
            rows.append(row | regret(drafter, policy, name, pending, known, part.tree_budget))
        expansions += part.expansions.num_rows
    return pd.DataFrame(rows)


def regret(
    drafter: Judged, policy: Policy, name: str, pending: Tensor, known: dict[str, Any], largest: int
) -> dict[str, float]:
    """Nodes, bounds and parts at one position.

    Args:
        pending: `[1]`, the root's token; known: the appraisal of its row; largest: nodes of the best trees.
    """
    growing = grow(drafter if policy.max_candidates() else None, policy, pending)
    node = policy.select(growing)
    count = len(node)
    if drafter.uncovered:
        raise ValueError(f"{name} asks for what the trace does not hold: add it with `eagle-tree trace extend=…`")
    if count > largest:
        raise ValueError(f"{name} has trees of {count} nodes; the trace's best trees end at {largest}")
    log_prob = drafter.log_prob
    values = [
        1 + float(target_score(growing, log_prob)[node].exp().sum()),
        float(hindsight(growing, log_prob, count)[1]) if count else 1.0,
        1 + sum(known["best_drafted"][:count]),
        1 + sum(known["best"][:count]),
        1.0 + min(count, known["levels"]),
    ]
    # a better tree is never worth less; forwards of other shapes may round its probabilities down
    bounds = dict(zip(BOUNDS, np.maximum.accumulate(values).tolist(), strict=True))
    parts = dict(zip(PARTS, np.diff(list(bounds.values())).tolist(), strict=True))
    return {"nodes": count, **bounds, **parts}


def decomposed(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a policy, in the order of their first appearance: means over positions (sums over sums) of `BOUNDS` and
    `PARTS`, each with its 95 % interval over prompts; `gap`, the sum of the parts; positions and nodes."""
    result = []
    for name, group in rows.groupby("name", sort=False):
        sums = group.groupby("prompt_id", sort=False)[[*BOUNDS, *PARTS, "nodes"]].sum()
        sums["positions"] = group.groupby("prompt_id", sort=False).size()
        row = {"name": name, "positions": len(group), "nodes": sums.nodes.sum() / len(group)}
        for column in (*BOUNDS, *PARTS):
            row |= dict(zip((column, f"{column}_low", f"{column}_high"), ratio(sums, column, "positions"), strict=True))
        row["gap"] = row["whole"] - row["policy"]
        result.append(row)
    return pd.DataFrame(result)
