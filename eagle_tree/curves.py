"""Estimators over drafted nodes: how often they are accepted, by what is known before, and what they are worth.

Acceptance is of a node given that its parent was accepted (DESIGN §4), by the target's probability of the node, which
is that event's probability under the match rule whatever was drawn; at T = 0 it is 0 or 1. Intervals are from a
bootstrap over prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pandas as pd

from eagle_tree.analysis import INTERVAL, RESAMPLES, ratio, resampled_sums
from eagle_tree.calibration import BINS, confidence_bin, error_of_bins, judged_nodes, node_keys, parent_rows, path_sums

ROOT = ""
"""The position of the root, whose children are at 0, 1, …"""
ROUNDING = 1e-9
"""Sums of squares that differ by less are equal."""


# --- acceptance, given that the parent was accepted ---


def acceptance(nodes: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """How often nodes of each group are accepted, in the groups' order.

    Args:
        nodes: a node table; by: columns that name the groups, such as depth and rank.

    Columns:
        by; nodes and prompts that were counted; confidence: their mean; acceptance, acceptance_low, acceptance_high.

    Raises:
        ValueError: no node's parent was accepted.
    """
    rows = []
    for key, group in judged_nodes(nodes).groupby(list(by), observed=True):
        sums = group.assign(count=1).groupby("prompt_id", sort=False)[["label", "count"]].sum()
        rate, low, high = ratio(sums, "label", "count")
        row = {"nodes": len(group), "prompts": len(sums), "confidence": group.confidence.mean()}
        row |= {"acceptance": rate, "acceptance_low": low, "acceptance_high": high}
        rows.append({**dict(zip(by, key, strict=True)), **row})
    return pd.DataFrame(rows)


def acceptance_by_place(nodes: pd.DataFrame) -> pd.DataFrame:
    """`acceptance` by depth, by rank, and by both; `by` says which, and what a group is not told apart by is -1."""
    parts = [acceptance(nodes, by).assign(by=" × ".join(by)) for by in (["depth"], ["rank"], ["depth", "rank"])]
    table = pd.concat(parts, ignore_index=True)
    return table.assign(**{name: table[name].fillna(-1).astype(int) for name in ("depth", "rank")})


def with_position(nodes: pd.DataFrame) -> pd.DataFrame:
    """A node table with `position`, the ranks on the way from the root: 0.0.1 is the second child of the first child of
    the first; and `above`, its parent's."""
    nodes = nodes.sort_values([*node_keys(nodes), "node"]).reset_index(drop=True)
    parent, position = parent_rows(nodes), np.full(len(nodes), ROOT, dtype=object)
    above, depth, rank = position.copy(), nodes.depth.to_numpy(), nodes["rank"].astype(str).to_numpy()
    for level in range(1, int(depth.max(initial=0)) + 1):  # parents stand one level higher
        rows = np.flatnonzero(depth == level)
        above[rows] = np.where(parent[rows] >= 0, position[parent[rows]], ROOT)
        position[rows] = [
            f"{path}.{last}" if path else last for path, last in zip(above[rows], rank[rows], strict=True)
        ]
    return nodes.assign(position=position, above=above)


def by_position(nodes: pd.DataFrame, positions: Sequence[str]) -> pd.DataFrame:
    """Acceptance at positions of the tree, and how far contexts differ there; from `with_position`.

    Columns:
        position; those of `acceptance`; coverage: the share of passes which have the node, of those that accepted its
        parent (below 1 the tree was chosen by confidence, and easier contexts are over-represented);
        spread: standard deviation of the acceptance between prompts, sampling noise taken out (one-way random
        effects); spread_p: of the permutation test that they do not differ; NaN of one prompt, or of equal labels.
    """
    judged, keys = judged_nodes(nodes), node_keys(nodes)
    accepted = nodes[nodes.accepted.astype(bool)]
    table = acceptance(judged[judged.position.isin(positions)], ["position"]).set_index("position")
    for position in table.index:
        here = judged[judged.position == position]
        above = here.above.iloc[0]
        reached = len(nodes[keys].drop_duplicates()) if above == ROOT else (accepted.position == above).sum()
        table.loc[position, "coverage"] = len(here) / reached
        groups = [group.to_numpy(float) for _, group in here.groupby("prompt_id").label]
        table.loc[position, ["spread", "spread_p"]] = between(groups)
    return table.loc[[position for position in positions if position in table.index]].reset_index()


def between(groups: Sequence[np.ndarray]) -> tuple[float, float]:
    """Standard deviation of the means of groups, noise within taken out, and how often values that are dealt to the
    groups at random (`RESAMPLES` times) differ as much."""
    values, size = np.concatenate(groups), np.array([len(group) for group in groups])
    count, total = len(groups), len(values)
    if count < 2 or total <= count or np.ptp(values) == 0:
        return float("nan"), float("nan")
    generator, start = np.random.default_rng(0), np.cumsum(size) - size
    dealt = generator.permuted(np.tile(values, (RESAMPLES, 1)), axis=1)
    squares = [((np.add.reduceat(rows, start, axis=1) ** 2) / size).sum(1) for rows in (values[None], dealt)]
    among = (squares[0][0] - total * values.mean() ** 2) / (count - 1)
    within = ((values**2).sum() - squares[0][0]) / (total - count)
    typical = (total - (size**2).sum() / total) / (count - 1)
    p = (1 + (squares[1] >= squares[0] - ROUNDING).sum()) / (1 + RESAMPLES)
    return float(np.sqrt(max(0.0, among - within) / typical)), float(p)


# --- confidence against acceptance ---


def confidence_bins(judged: pd.DataFrame, column: str = "confidence", bins: int = BINS) -> pd.DataFrame:
    """Sums of `calibration.judged_nodes` by prompt and equal-width bin of a column of confidences, as
    `evaluate.measure` has them: count, confidence, hits (sums of the target's probabilities)."""
    parts = judged.assign(bin=confidence_bin(judged[column].to_numpy(float), bins), confidence=judged[column], count=1)
    sums = parts.groupby(["prompt_id", "bin"], sort=True)[["count", "confidence", "label"]].sum()
    return sums.rename(columns={"label": "hits"}).reset_index()


def binned_error(bins: pd.DataFrame) -> tuple[float, float, float]:
    """Expected calibration error of `confidence_bins` with its 95 % interval; NaN from a single prompt.

    Noise alone gives bins a distance, so the resamples lie above the estimate where it is small.
    """
    total, resamples = errors(bins)
    return total, *limits(resamples)


def error_change(before: pd.DataFrame, after: pd.DataFrame) -> tuple[float, float, float]:
    """Expected calibration error after minus before, of the same nodes, with its 95 % interval, paired by prompt.

    Raises:
        ValueError: other prompts, or other numbers of nodes.
    """
    counts = [bins.groupby("prompt_id")["count"].sum() for bins in (before, after)]
    if not counts[0].equals(counts[1]):
        raise ValueError("before and after are not of the same nodes")
    (first, drawn_first), (second, drawn_second) = errors(before), errors(after)
    return second - first, *limits(drawn_second - drawn_first)


def errors(bins: pd.DataFrame) -> tuple[float, np.ndarray]:
    """Expected calibration error of all prompts, and of every resample of them."""
    index = pd.MultiIndex.from_product([sorted(bins.prompt_id.unique()), range(int(bins.bin.max()) + 1)])
    sums = bins.groupby(["prompt_id", "bin"])[["count", "confidence", "hits"]].sum().reindex(index, fill_value=0)
    per_prompt = sums.to_numpy(float).reshape(len(index.levels[0]), -1)

    def of(flat: np.ndarray) -> float:
        count, confidence, hits = flat.reshape(-1, 3).T
        return error_of_bins(confidence, hits, count.sum())

    resamples = resampled_sums(per_prompt) if len(per_prompt) > 1 else np.empty((0, per_prompt.shape[1]))
    return of(per_prompt.sum(0)), np.array([of(row) for row in resamples])


def limits(resamples: np.ndarray) -> tuple[float, float]:
    """The 95 % interval of resampled values; NaN without any."""
    return tuple(np.percentile(resamples, INTERVAL)) if len(resamples) else (float("nan"), float("nan"))


# --- what a node adds to a pass ---


def with_ancestry(nodes: pd.DataFrame) -> pd.DataFrame:
    """A node table with what a node's place in its tree says.

    Columns added:
        place: 1 for the best node of its pass by (score, depth, index), and so on;
        weakest: the least confidence of an edge above its own, 1 for children of the root;
        promised: what the drafter's confidences say is the probability that the node is accepted, exp(score);
        reach: what the target says (0 or 1 at T = 0).
    """
    nodes = nodes.sort_values([*node_keys(nodes), "node"]).reset_index(drop=True)
    parent = parent_rows(nodes)
    log_conf, weakest, above = nodes.log_conf.to_numpy(), np.zeros(len(nodes)), parent
    while (inside := above >= 0).any():
        weakest[inside] = np.minimum(weakest[inside], log_conf[above[inside]])
        above = np.where(inside, parent[above], -1)
    best_first = nodes.sort_values(["score", "depth", "node"], ascending=[False, True, True])
    return nodes.assign(
        place=best_first.groupby(node_keys(nodes), sort=False).cumcount() + 1,
        weakest=np.exp(weakest),
        promised=np.exp(nodes.score),
        reach=np.exp(path_sums(nodes.target_log_prob.to_numpy(), parent)),
    )


def node_worth(nodes: pd.DataFrame, by: str) -> pd.DataFrame:
    """What a draft node of each group is worth, in expected tokens, from `with_ancestry`; in the groups' order.

    Columns:
        by: the group; node_share: its share of all nodes; promised: mean by the drafter's confidences;
        reach, reach_low, reach_high: mean by the target; reach_share: its share of all accepted nodes.
    """
    rows = []
    for group, members in nodes.groupby(by, observed=True):
        prompts = members.groupby("prompt_id", sort=False).agg(nodes=("node", "size"), reach=("reach", "sum"))
        reach, low, high = ratio(prompts, "reach", "nodes")
        row = {by: group, "node_share": len(members) / len(nodes), "promised": members.promised.mean()}
        row |= {"reach": reach, "reach_low": low, "reach_high": high}
        rows.append({**row, "reach_share": members.reach.sum() / nodes.reach.sum()})
    return pd.DataFrame(rows)


def marginal_value(nodes: pd.DataFrame) -> pd.DataFrame:
    """What the N-th best node of a tree adds, `node_worth` by place, and what the N best yield together.

    Columns:
        place: N; those of `node_worth`; passes that have an N-th node; prompts; together: expected tokens of the tree
        of the N best nodes, the bonus included (of passes that have so many: it takes trees of one size).
    """
    nodes = with_ancestry(nodes)
    table = node_worth(nodes, "place")
    of_place = nodes.groupby("place")
    table["passes"], table["prompts"] = of_place.size().to_numpy(), of_place.prompt_id.nunique().to_numpy()
    return table.assign(together=1 + table.reach.cumsum())


DEEP, SHAKY = 3, 0.3
"""From this depth on a node is deep; below this confidence an edge is shaky."""


def folklore(nodes: pd.DataFrame) -> pd.DataFrame:
    """What later nodes, later siblings, and deep nodes under shaky ancestors are worth: `node_worth` by `question` and
    `group`."""
    nodes = with_ancestry(nodes)
    last = nodes.place.max()
    edges = [*(edge for edge in (0, 1, 2, 3, 4, 8, 16, 32) if edge < last), last]
    names = [f"{low + 1}–{high}" if high > low + 1 else str(high) for low, high in pairwise(edges)]
    deep = nodes.depth >= DEEP
    under = (nodes.weakest < SHAKY).map({True: "under a shaky ancestor", False: "under sure ancestors"})
    questions = {
        "place in the tree": pd.cut(nodes.place, edges, labels=names),
        "rank among siblings": nodes["rank"].clip(upper=3).map({0: "0", 1: "1", 2: "2", 3: "3 or later"}),
        "depth": nodes.depth,
        "depth and ancestors": deep.map({True: f"depth {DEEP} on, ", False: f"above depth {DEEP}, "}) + under,
    }
    parts = [
        node_worth(nodes.assign(group=group), "group").assign(question=question)
        for question, group in questions.items()
    ]
    return pd.concat(parts).set_index(["question", "group"]).reset_index()
