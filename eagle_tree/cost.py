"""What a pass costs on one machine: measured, stored, interpolated.

Verifying n positions costs about as much as one while the machine waits for its memory, then more, in stairs (tile
sizes, cache sizes). A `CostTable` holds the measured times; the rate-optimal policy and replay read it.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy.optimize import isotonic_regression

from eagle_tree.checks import as_path
from eagle_tree.files import replacing, write_json

POINT_COLUMNS = ["stage", "n", "context", "batch", "seconds", "low", "high", "repeats"]
"""One measured point: stage `verify` (n positions) or `draft` (n frontier nodes), median seconds and quartiles."""
MACHINE = ("device", "dtype", "threads")
"""What a table is valid for."""


@dataclass(frozen=True)
class CostTable:
    """Seconds of a pass's parts.

    Attributes:
        points: `POINT_COLUMNS`; fixed: seconds of a pass outside of both forwards, with `fixed_low`, `fixed_high`.
        about: what it was measured on: device, dtype, threads, versions, commit, target and drafter.
    """

    points: pd.DataFrame
    fixed: float
    fixed_low: float
    fixed_high: float
    about: dict[str, Any]

    def __post_init__(self) -> None:
        missing = [name for name in POINT_COLUMNS if name not in self.points]
        if missing:
            raise ValueError(f"a cost table lacks {', '.join(missing)}")
        if not len(self.stage("verify", 1)):
            raise ValueError("a cost table needs measured verify times of batch 1")
        if not (self.points.seconds > 0).all() or not self.fixed >= 0:
            raise ValueError("a cost table holds times that are not positive")

    def stage(self, name: str, batch: int) -> pd.DataFrame:
        """The measured points of a stage."""
        return self.points[(self.points.stage == name) & (self.points.batch == batch)]

    @cached_property
    def largest_n(self) -> int:
        """The most positions that were measured."""
        return int(self.stage("verify", 1).n.max())

    def verify(self, context: int, batch: int = 1) -> np.ndarray:
        """`[largest_n + 1]` seconds of one forward over n positions behind `context` cached ones; entry 0 is unused.

        Non-decreasing in n (isotonic regression takes the noise out), linear between measured points.
        """
        return self.curve("verify", batch, context)

    def draft(self, width: float, context: int) -> float:
        """Seconds of one drafter step over a frontier of `width` nodes; the widest measured one serves wider ones."""
        return float(self.at("draft", width, context))

    def pass_seconds(
        self, n_nodes: ArrayLike, draft_steps: ArrayLike, expanded: ArrayLike, context: ArrayLike
    ) -> np.ndarray:
        """Seconds of passes, from the columns of `PassRow`: one forward, the drafter's steps, and what is fixed.

        The first of `draft_steps` is the root's; the others share the rest of the `expanded` nodes evenly.
        """
        draft_steps, others = np.asarray(draft_steps), np.maximum(np.asarray(draft_steps) - 1, 0)
        width = (np.asarray(expanded) - 1) / np.maximum(others, 1)
        draft = (draft_steps > 0) * self.at("draft", 1, context) + others * self.at("draft", width, context)
        return self.at("verify", np.asarray(n_nodes) + 1, context) + draft + self.fixed

    def seconds(self, n_nodes: ArrayLike, widths: Sequence[int], context: ArrayLike) -> np.ndarray:
        """Seconds of passes: `n_nodes` draft nodes verified behind `context` tokens, after one drafter step per width.

        Args:
            n_nodes, context: numbers, or arrays that broadcast to one entry a pass; widths: of all of them alike.
        """
        draft = sum(count * self.at("draft", width, context) for width, count in Counter(widths).items())
        return self.at("verify", np.asarray(n_nodes) + 1, context) + draft + self.fixed

    def at(self, stage: str, n: ArrayLike, context: ArrayLike) -> np.ndarray:
        """Seconds of one step of a stage at n, whole or not, and a context, entry by entry; 0 if it was not measured.

        Linear between whole n and between measured contexts, held beyond those and the largest measured n.
        """
        contexts, curves = self.curves(stage, 1)
        if not len(contexts):
            return np.zeros(np.broadcast_shapes(np.shape(n), np.shape(context)))
        n = np.clip(n, 0, curves.shape[1] - 1)
        place = np.interp(context, contexts, np.arange(len(contexts)))
        whole, below = np.floor(n).astype(int), np.floor(place).astype(int)
        next_n, above = np.minimum(whole + 1, curves.shape[1] - 1), np.minimum(below + 1, len(contexts) - 1)
        low = curves[below, whole] + (n - whole) * (curves[below, next_n] - curves[below, whole])
        high = curves[above, whole] + (n - whole) * (curves[above, next_n] - curves[above, whole])
        return low + (place - below) * (high - low)

    def curve(self, stage: str, batch: int, context: int) -> np.ndarray:
        """Seconds by n at a context, interpolated between the measured contexts and held beyond them."""
        contexts, curves = self.curves(stage, batch)
        if not len(contexts):
            return np.empty(0)
        place = float(np.interp(context, contexts, np.arange(len(contexts))))
        below = int(place)
        above = min(below + 1, len(contexts) - 1)
        return curves[below] + (place - below) * (curves[above] - curves[below])

    def curves(self, stage: str, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """Measured contexts `[C]`, ascending, and the curve of each, `[C, largest n + 1]`; computed once."""
        if (stage, batch) not in self._curves:
            points = self.stage(stage, batch)
            contexts = np.array(sorted(points.context.unique()))
            if not len(contexts):
                if stage == "verify":
                    measured = sorted(self.points[self.points.stage == stage].batch.unique().tolist())
                    raise ValueError(f"batch={batch} was not measured; measured are {measured}")
                self._curves[stage, batch] = contexts, np.empty((0, 0))
            else:
                every_n = np.arange(int(points.n.max()) + 1)
                rows = []
                for context in contexts:
                    row = points[points.context == context].sort_values("n")
                    rows.append(np.interp(every_n, row.n, isotonic_regression(row.seconds.to_numpy()).x))
                self._curves[stage, batch] = contexts, np.array(rows)
        return self._curves[stage, batch]

    @cached_property
    def _curves(self) -> dict:
        return {}

    def check_machine(self, about: dict[str, Any]) -> None:
        """Raise ValueError if the table was measured on another device, in another dtype or on other threads."""
        different = [
            f"{name} {self.about.get(name)!r} there, {about[name]!r} here"
            for name in MACHINE
            if name in about and self.about.get(name) != about[name]
        ]
        if different:
            raise ValueError(
                f"the cost table was measured elsewhere: {'; '.join(different)}. Measure here with "
                "`eagle-tree calibrate`, or say other_machine=true"
            )

    def save(self, folder: str | Path) -> None:
        """Write `cost.parquet` and `cost.json`."""
        folder = Path(folder)
        fields = {"fixed": self.fixed, "fixed_low": self.fixed_low, "fixed_high": self.fixed_high, **self.about}
        with replacing(folder / "cost.parquet") as temporary:
            self.points[POINT_COLUMNS].to_parquet(temporary, index=False)
        write_json(folder / "cost.json", fields, default=str)

    @classmethod
    def load(cls, folder: str | Path) -> CostTable:
        """Read a table.

        Raises:
            FileNotFoundError: there is none. ValueError: a damaged one.
        """
        folder = as_path("folder", folder)
        points, fields = folder / "cost.parquet", folder / "cost.json"
        if not points.is_file() or not fields.is_file():
            raise FileNotFoundError(f"no cost table in {folder}: measure one, `eagle-tree calibrate folder={folder}`")
        try:
            about = json.loads(fields.read_text())
            fixed = [float(about.pop(name)) for name in ("fixed", "fixed_low", "fixed_high")]
            return cls(pd.read_parquet(points), *fixed, about)
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise ValueError(f"the cost table in {folder} is damaged: {error}") from error


def measure(
    run: Callable[[int], object],
    grid: Sequence[int],
    repeats: int,
    synchronize: Callable[[], object] = lambda: None,
    tolerance: float = 0.1,
) -> pd.DataFrame:
    """Time `run(n)` over a grid that is refined where the time jumps.

    Every round runs all n in an order of its own, so that drift of the machine meets all alike. Between neighbours
    whose medians differ by more than `tolerance` the middle is added, until the stairs are found to a position.

    Returns:
        columns n, seconds (median), low, high (quartiles), repeats.
    """
    seconds: dict[int, list[float]] = {}
    order = np.random.default_rng(0)
    new = sorted(set(grid))
    while new:
        for n in new:
            run(n)  # the first run of a shape pays for set-up
        for _ in range(repeats):
            for n in order.permutation(new).tolist():
                synchronize()
                started = time.perf_counter()
                run(n)
                synchronize()
                seconds.setdefault(n, []).append(time.perf_counter() - started)
        new = between_jumps({n: float(np.median(times)) for n, times in seconds.items()}, tolerance)
    rows = [
        {"n": n, "seconds": middle, "low": low, "high": high, "repeats": len(times)}
        for n, times in sorted(seconds.items())
        for low, middle, high in [np.quantile(times, [0.25, 0.5, 0.75])]
    ]
    return pd.DataFrame(rows)


def between_jumps(medians: dict[int, float], tolerance: float) -> list[int]:
    """The middles between neighbouring n whose times differ by more than `tolerance`, relative to the smaller one."""
    known = sorted(medians)
    return [
        (low + high) // 2
        for low, high in pairwise(known)
        if high - low > 1 and medians[high] > (1 + tolerance) * medians[low]
    ]
