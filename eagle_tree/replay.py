"""Policies run on a trace: no model, no clock, the passes that decoding would make.

The code of a pass is decoding's own: `evaluate.known_pass` grows, selects and accepts with a drafter that answers from
the trace. Exact for the match rule, and for coupled drafts that were recorded as such, wherever every request is
covered; what is not is counted, never guessed. A pass takes the time that a cost table says.

A policy of fixed shape looks at no value on the host, so the same code runs at hundreds of positions in one batch
(`torch.vmap`), at every position of the texts; the passes are the ones that a walk from the first position meets. Any
other policy is followed pass by pass, and what it learns is carried from prompt to prompt in the trace's order.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from eagle_tree.accept import Coupled, Match
from eagle_tree.cost import CostTable
from eagle_tree.evaluate import UNKNOWN, follow, known_pass
from eagle_tree.policy import Policy
from eagle_tree.record import PASS_SCHEMA
from eagle_tree.trace import Remembered, Trace
from eagle_tree.tree import GrowingTree, Tree

BATCH = 256
"""Positions that are computed at once."""


@dataclass(frozen=True)
class Replayed:
    """A policy's passes.

    Attributes:
        passes: columns of the pass table; `pass_s` is the cost table's, other times and what only the target's
            forward can tell are NaN.
        uncovered: requests that the trace does not hold; the passes are those of decoding only if there were none.
        seconds: that replaying took.
    """

    passes: pd.DataFrame
    uncovered: int
    seconds: float


def check_rule(trace: Trace, rule: object) -> None:
    """Raise ValueError for an acceptance rule that a trace cannot answer: the drafts of another, or none that it holds.

    At temperature 0 coupled drafts are the most likely tokens.
    """
    name = type(rule).__name__
    if type(rule) not in (Match, Coupled):
        raise ValueError(
            f"accept: {name} needs the law q that candidates were drawn from, or draws anew at every node; a trace "
            "holds neither: replay is exact for match and coupled alone"
        )
    wanted = rule.default_draw.at(trace.settings["temperature"]).kind
    if wanted != trace.draw.kind:
        raise ValueError(
            f"accept: {name} is for drafts of draw.kind={wanted}, and the trace was recorded with "
            f"draw.kind={trace.draw.kind}: replay it with the rule for these, or record another"
        )


def check_replayable(trace: Trace, policy: Policy) -> None:
    """Raise ValueError for a policy that was made for something else than the trace."""
    policy.check_machine({"greedy": trace.greedy, "drafter": trace.settings["drafter"]})
    if policy.max_candidates() > trace.settings["drafter_vocabulary"]:
        raise ValueError(
            f"{type(policy).__name__} asks for {policy.max_candidates()} candidates a node; the drafter's vocabulary "
            f"has {trace.settings['drafter_vocabulary']}"
        )


@torch.inference_mode()
def replay(trace: Trace, policy: Policy, cost: CostTable | None = None, name: str = "") -> Replayed:
    """Run a policy on a trace.

    Args:
        cost: what a pass takes; None leaves times NaN. name: the policy's in the pass table.

    Raises:
        ValueError: a policy made for another drafter or temperature, or trees larger than the cost table knows.
    """
    check_replayable(trace, policy)
    started = time.perf_counter()
    name = name or type(policy).__name__
    run = batched if policy.fixed_shape else followed
    passes, uncovered = run(trace, policy, cost, name)
    if cost is not None and (most := int(passes.n_nodes.max()) + 1) > cost.largest_n:
        raise ValueError(f"{name} verifies {most} positions at once; the cost table ends at {cost.largest_n}")
    return Replayed(passes, uncovered, time.perf_counter() - started)


# --- pass by pass ---


def followed(trace: Trace, policy: Policy, cost: CostTable | None, name: str) -> tuple[pd.DataFrame, int]:
    """The passes of a policy that decides by what it sees, and what it asked in vain."""
    rows, uncovered = [], 0
    for index, reading in enumerate(trace.readings):
        drafter = trace.drafter(index)
        rows += follow(drafter, policy, reading, trace.settings["max_length"], name, cost)
        uncovered += int(drafter.uncovered)
    return pd.DataFrame([vars(row) for row in rows], columns=PASS_SCHEMA.names), uncovered


# --- many positions at once ---


@dataclass(frozen=True)
class Everywhere:
    """The pass that a policy of fixed shape would make at every position of a trace; arrays are `[P]`.

    Attributes:
        n_nodes, depth, accepted, expected_draft: as in the pass table; uncovered: requests asked in vain.
        widths: nodes expanded by each drafter step, alike everywhere.
    """

    n_nodes: np.ndarray
    depth: np.ndarray
    accepted: np.ndarray
    expected_draft: np.ndarray
    uncovered: np.ndarray
    widths: tuple[int, ...]


def one_pass(trace: Trace, policy: Policy, room: int, root: Tensor, tokens: Tensor) -> tuple[GrowingTree, Tree, Tensor]:
    """A pass from the memo's row of a root `[1]`, where the text goes on with `tokens [t]`, the pending one first.

    Returns:
        pool and tree, and `[5] f64`: accepted nodes, the tree's depth, expected tokens, closure, uncovered requests.
    """
    drafter = Remembered(replace(trace.memo, root=root), trace.settings)
    asked = drafter if policy.max_candidates() else None
    growing, tree, outcome = known_pass(asked, policy, tokens, room)
    return growing, tree, torch.cat([outcome, drafter.uncovered.double()[None]])


def everywhere(trace: Trace, policy: Policy) -> Everywhere:
    """A pass of a policy of fixed shape at every position: one first, whose shapes are everyone's, then in batches."""
    root, room = trace.memo.root[:, None], trace.settings["max_length"] - trace.context - 1
    growing, tree, _ = one_pass(trace, policy, trace.settings["max_length"], root[0], trace.windows(1)[0])
    tokens = trace.windows(len(growing.levels) + 1)
    outcome = torch.empty(len(root), 5, dtype=torch.float64)
    fits = torch.from_numpy(room >= tree.n_nodes)
    together = torch.vmap(lambda root, tokens: one_pass(trace, policy, tree.n_nodes, root, tokens)[2])
    enough = fits.nonzero().squeeze(-1)
    for start in range(0, len(enough), BATCH):
        place = enough[start : start + BATCH]
        outcome[place] = together(root[place], tokens[place])
    for place in (~fits).nonzero().squeeze(-1).tolist():  # near the end of the context smaller trees must do
        outcome[place] = one_pass(trace, policy, int(room[place]), root[place], tokens[place])[2]
    accepted, depth, expected, closed, uncovered = outcome.numpy().T
    if not closed.all():
        raise AssertionError(f"{type(policy).__name__} selected a node without its parent, or one twice")
    counts = (np.minimum(tree.n_nodes, room), depth.astype(int), accepted.astype(int))
    return Everywhere(*counts, expected, uncovered.astype(int), growing.widths)


def batched(trace: Trace, policy: Policy, cost: CostTable | None, name: str) -> tuple[pd.DataFrame, int]:
    """The passes of a policy of fixed shape, and what it asked in vain."""
    at = everywhere(trace, policy)
    ends = np.cumsum(trace.positions)
    place = [visited(part) for part in np.split(at.accepted, ends[:-1])]
    passes = [len(part) for part in place]
    row = np.concatenate(place) + np.repeat(trace.first, passes)
    # a pass emits as far as where the next one begins, the last one to the end of the text
    emitted = np.diff(np.append(row, ends[-1])) if len(row) else row
    seconds = math.nan if cost is None else cost.seconds(at.n_nodes[row], at.widths, trace.context[row])
    columns = {
        **UNKNOWN,
        "policy": name,
        "prompt_id": np.repeat([part.text.prompt_id for part in trace.parts], passes),
        "category": np.repeat([part.text.category for part in trace.parts], passes),
        "pass_id": np.concatenate([np.arange(count) for count in passes]),
        "context_length": trace.context[row],
        "n_nodes": at.n_nodes[row],
        "depth": at.depth[row],
        "draft_steps": len(at.widths),
        "expanded": sum(at.widths),
        "expected_draft": at.expected_draft[row],
        "accepted": at.accepted[row],
        "emitted": emitted,
        "pass_s": seconds,
    }
    return pd.DataFrame(columns)[PASS_SCHEMA.names], int(at.uncovered[row].sum())


def visited(accepted: np.ndarray) -> np.ndarray:
    """Where passes begin, from position 0 on, if a pass at p accepts `accepted[p]` tokens and emits one more."""
    place, next_place = [], (np.arange(len(accepted)) + accepted + 1).tolist()
    position = 0
    while position < len(next_place):
        place.append(position)
        position = next_place[position]
    return np.array(place, dtype=np.int64)
