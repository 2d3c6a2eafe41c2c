"""From a drafter's confidence to the probability that its node is accepted.

The event (DESIGN §4): a node is accepted, given that its parent was. A run's node table holds what is needed:
confidence, depth, rank, and the target's probability of the node, which under the match rule is that event's
probability whatever was drawn (at T = 0 it is 0 or 1, so that fits at T = 0 and T > 0 are of different events: keep
them apart). Under other rules it is not: `by_outcome`.

Two families, both increasing in the confidence, so that siblings keep their order:

* `Temperatures`: one per depth, fitted left to right on the path products (sequential temperature scaling; DSpark,
  arXiv 2607.05147);
* `Isotonic`: a free non-decreasing curve by depth and rank.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy.optimize import isotonic_regression, minimize_scalar
from torch import Tensor

from eagle_tree.checks import as_path, is_number
from eagle_tree.files import replacing

NODE_KEYS = ["policy", "prompt_id", "pass_id"]
"""What names a tree within a run; tables of several runs (`analysis.load`) have `run` before it."""
BINS = 15
"""Equal-width bins of confidence in a calibration error."""
SURE = 1 - 1e-6
"""The largest confidence: of a larger one the odds say nothing."""
LEAST = 1e-6
GRID = 64
"""Cells of confidence on which an isotonic curve is stored."""
SLOPE = 1e-4
"""Slope that flat pieces of an isotonic curve get, so that no two confidences tie."""
FEWEST = 200
"""Nodes that a curve of its own needs; a rank with fewer shares its depth's."""


@dataclass(frozen=True)
class Temperatures:
    """σ(logit(confidence) / temperature of the depth).

    Attributes:
        temperature: of depth 1, 2, …; deeper nodes use the last.
        greedy: fitted at T = 0; drafter: fingerprint of the one whose confidences it is of, None if it is not known.
    """

    temperature: tuple[float, ...]
    greedy: bool
    drafter: str | None = None

    def __post_init__(self) -> None:
        if not self.temperature or not all(is_number(one) and one > 0 for one in self.temperature):
            raise ValueError(f"temperature={self.temperature!r} must be numbers above 0, one a depth")

    def edge(self, log_conf: Tensor, depth: Tensor, rank: Tensor) -> Tensor:
        """Calibrated log confidences `[M] f32` of edges, all `[M]`; depth counts from 1."""
        temperature = self._table.to(log_conf.device)[(depth - 1).clamp(0, len(self.temperature) - 1)]
        confidence = log_conf.double().exp().clamp(max=SURE)
        odds = log_conf.double().clamp(max=np.log(SURE)) - torch.log1p(-confidence)
        return torch.nn.functional.logsigmoid(odds / temperature).float()

    @cached_property
    def _table(self) -> Tensor:
        return torch.tensor(self.temperature)


@dataclass(frozen=True)
class Isotonic:
    """A non-decreasing curve by depth and rank.

    Attributes:
        curve: `[D, R, GRID + 1]`, acceptance at confidences 0, 1/GRID … 1; deeper nodes and later ranks use the last.
        greedy, drafter: as in `Temperatures`.
    """

    curve: tuple[tuple[tuple[float, ...], ...], ...]
    greedy: bool
    drafter: str | None = None

    def __post_init__(self) -> None:
        curve = np.array(self.curve, dtype=float)  # raises ValueError for rows of several lengths
        if curve.ndim != 3 or not curve.size or curve.shape[2] != GRID + 1:
            raise ValueError(f"curve of shape {curve.shape} must be one of {GRID + 1} points a depth and rank")
        if not ((curve >= 0) & (curve <= 1)).all() or not (curve[..., 1:] > 0).all():
            raise ValueError("curve must hold probabilities, above 0 but for confidence 0")

    def edge(self, log_conf: Tensor, depth: Tensor, rank: Tensor) -> Tensor:
        """As `Temperatures.edge`; linear between the grid's points."""
        curve = self._table.to(log_conf.device)
        rows = curve[(depth - 1).clamp(0, curve.shape[0] - 1), rank.clamp(0, curve.shape[1] - 1)]
        place = log_conf.double().exp() * GRID
        below = place.floor().long().clamp(0, GRID - 1)
        low, high = (rows.gather(1, (below + side)[:, None]).squeeze(1) for side in (0, 1))
        value = low + (place - below) * (high - low)
        return torch.where(log_conf > -torch.inf, value.log(), -torch.inf).float()

    @cached_property
    def _table(self) -> Tensor:
        return torch.tensor(self.curve, dtype=torch.float64)


Calibration = Temperatures | Isotonic


def judged_nodes(nodes: pd.DataFrame) -> pd.DataFrame:
    """The rows of a node table that the event is about, with `confidence` and `label`, the target's probability.

    Raises:
        ValueError: the table holds no such node.
    """
    judged = nodes[nodes.parent_accepted.astype(bool) & nodes.target_log_prob.notna()]
    if judged.empty:
        raise ValueError("the node table holds no node whose parent was accepted: record a run with record_nodes=true")
    return judged.assign(confidence=np.exp(judged.log_conf), label=np.exp(judged.target_log_prob))


def by_outcome(nodes: pd.DataFrame) -> pd.DataFrame:
    """A node table with what happened, 0 or 1, in place of the target's probabilities.

    For rules under which these are not the event's: of coupled drafts the noise decides that chose them, and drawn
    children are accepted with probabilities that depend on q.
    """
    happened = np.where(nodes.accepted.astype(bool), 0.0, -np.inf)
    return nodes.assign(target_log_prob=np.where(nodes.target_log_prob.isna(), np.nan, happened))


def calibrated(judged: pd.DataFrame, calibration: Calibration) -> pd.DataFrame:
    """`judged_nodes` with their `calibrated` confidence."""
    columns = (torch.from_numpy(judged[name].to_numpy(copy=True)) for name in ("log_conf", "depth", "rank"))
    log_conf, depth, rank = columns
    edge = calibration.edge(log_conf.float(), depth.long(), rank.long())
    return judged.assign(calibrated=edge.double().exp().numpy())


def fit_temperatures(nodes: pd.DataFrame, greedy: bool) -> Temperatures:
    """Fit one temperature per depth, left to right: each makes the path products of its depth likeliest.

    Args:
        nodes: a run's node table; greedy: whether it was decoded at T = 0.
    """
    judged_nodes(nodes)  # raises on a table without any
    nodes = nodes.sort_values([*node_keys(nodes), "node"]).reset_index(drop=True)
    parent = parent_rows(nodes)
    confidence = np.exp(nodes.log_conf.to_numpy()).clip(LEAST, SURE)
    odds = np.log(confidence) - np.log1p(-confidence)
    reach, product = path_sums(nodes.target_log_prob.to_numpy(), parent), np.zeros(len(nodes))
    depth, temperatures = nodes.depth.to_numpy(), []
    for level in range(1, int(depth.max()) + 1):
        rows = np.flatnonzero(depth == level)
        above = np.where(parent[rows] >= 0, product[parent[rows]], 0.0)
        temperatures.append(best_temperature(odds[rows], above, np.exp(reach[rows])) if len(rows) else 1.0)
        product[rows] = above + log_sigmoid(odds[rows] / temperatures[-1])
    return Temperatures(tuple(temperatures), greedy)


def log_sigmoid(odds: np.ndarray) -> np.ndarray:
    """log σ(odds), `[M]`."""
    return -np.logaddexp(0.0, -odds)


def best_temperature(odds: np.ndarray, above: np.ndarray, label: np.ndarray) -> float:
    """The temperature in 0.1…10 that makes `label [M]` likeliest under path products.

    Args:
        odds: of the edges' confidences; above: log products of their parents' paths.
    """

    def loss(log_temperature: float) -> float:
        score = (above + log_sigmoid(odds / np.exp(log_temperature))).clip(max=np.log(SURE))
        return -(label * score + (1 - label) * np.log1p(-np.exp(score))).mean()

    return float(np.exp(minimize_scalar(loss, bounds=(np.log(0.1), np.log(10)), method="bounded").x))


def node_keys(nodes: pd.DataFrame) -> list[str]:
    """The columns that name a tree of a node table."""
    return ["run", *NODE_KEYS] if "run" in nodes else NODE_KEYS


def parent_rows(nodes: pd.DataFrame) -> np.ndarray:
    """For every row its parent's row, -1 for children of a root; rows are sorted by pass and node, parents first."""
    group = nodes.groupby(node_keys(nodes), sort=False).ngroup().to_numpy().astype(np.int64)
    width = int(nodes.node.max()) + 1
    place = pd.Series(np.arange(len(nodes)), index=group * width + nodes.node.to_numpy())
    return place.reindex(group * width + nodes.parent.to_numpy(), fill_value=-1).to_numpy()


def path_sums(edge: np.ndarray, parent: np.ndarray) -> np.ndarray:
    """Sums along the paths from the root, of edges `[M]` whose parents `[M]` come first (-1: the root)."""
    total, above = edge.astype(float).copy(), parent.copy()
    while (above >= 0).any():
        inside = above >= 0
        total[inside] += edge[above[inside]]
        above[inside] = parent[above[inside]]
    return total


def fit_isotonic(nodes: pd.DataFrame, greedy: bool) -> Isotonic:
    """Fit a curve per depth and rank; where there are too few nodes, the depth's, or all nodes', serves."""
    judged = judged_nodes(nodes)
    everywhere = isotonic_curve(judged)
    curves = []
    for depth in range(1, int(judged.depth.max()) + 1):
        at_depth = judged[judged.depth == depth]
        shared = isotonic_curve(at_depth) if len(at_depth) >= FEWEST else everywhere
        ranks = [at_depth[at_depth["rank"] == rank] for rank in range(int(judged["rank"].max()) + 1)]
        curves.append(tuple(isotonic_curve(part) if len(part) >= FEWEST else shared for part in ranks))
    return Isotonic(tuple(curves), greedy)


def isotonic_curve(judged: pd.DataFrame) -> tuple[float, ...]:
    """Acceptance on the grid: the isotonic fit, made strictly increasing, within (0, 1)."""
    judged = judged.sort_values("confidence")
    fitted = isotonic_regression(judged.label.to_numpy(dtype=float)).x
    grid = np.linspace(0, 1, GRID + 1)
    value = np.interp(grid, judged.confidence, fitted)
    return tuple((LEAST + (1 - 2 * SLOPE) * value + SLOPE * grid).tolist())


def confidence_bin(confidence: np.ndarray, bins: int = BINS) -> np.ndarray:
    """Which of so many equal-width bins each confidence falls into; certainty into the last."""
    return np.minimum((confidence * bins).astype(int), bins - 1)


def error_of_bins(confidence: np.ndarray, label: np.ndarray, count: int) -> float:
    """Expected calibration error (Naeini et al. 2015) from the sums of confidences and of labels in each bin."""
    return float(np.abs(confidence - label).sum() / count)


def expected_calibration_error(confidence: np.ndarray, label: np.ndarray, bins: int = BINS) -> float:
    """Mean distance of confidence and acceptance over equal-width bins, weighted by count."""
    place = confidence_bin(confidence, bins)
    return error_of_bins(np.bincount(place, confidence, bins), np.bincount(place, label, bins), len(confidence))


def save(calibration: Calibration, path: str | Path) -> None:
    """Write a calibration as JSON."""
    values = {one.name: getattr(calibration, one.name) for one in fields(calibration)}
    with replacing(path) as temporary:
        temporary.write_text(json.dumps({"kind": type(calibration).__name__, **values}) + "\n")


def load(path: str | Path) -> Calibration:
    """Read a calibration.

    Raises:
        FileNotFoundError: there is none. ValueError: the file is none.
    """
    path = as_path("path", path)
    if not path.is_file():
        raise FileNotFoundError(f"no calibration in {path}; fit one with `eagle-tree calibrate nodes=RUN`")
    try:
        values = json.loads(path.read_text())
        kind = {"Temperatures": Temperatures, "Isotonic": Isotonic}[values.pop("kind")]
        return kind(**{name: tuples(value) for name, value in values.items()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} holds no calibration: {error}") from error


def tuples(value):
    """Nested lists as nested tuples."""
    return tuple(tuples(item) for item in value) if isinstance(value, list) else value
