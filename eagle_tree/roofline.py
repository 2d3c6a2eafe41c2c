"""What a pass would cost on a GPU that is not at hand: an analytic cost table, modelled and marked as such.

A forward reads every weight and the cached keys and values once, and multiplies; whichever takes longer is the time
(Williams et al., 2009). With W weights of b bytes, L layers of width H and a key/value width G (2-byte entries), n
positions behind c cached ones take

    T(n, c) = max((b·W + 4·L·G·(c + n)) / bandwidth, (2·W·n + 4·L·H·n·(c + n)) / operations).

No kernel reaches a roofline, launches take time and nothing is charged for what lies outside of both forwards: the
table is an upper bound of speed, meant for comparing policies, not for predicting tokens per second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
import pandas as pd

from eagle_tree.checks import is_number
from eagle_tree.cost import CostTable

FORMULA = "max((b W + 4 L G (c + n)) / bandwidth, (2 W n + 4 L H n (c + n)) / operations)"
POSITIONS = np.arange(1, 513)
WIDTHS = np.arange(1, 129)
CONTEXTS = (0, 1024, 4096, 16384)
"""Every n is a point of the table, and between these contexts times are linear unless the larger term changes."""


@dataclass(frozen=True)
class Shape:
    """What a model's forward reads and multiplies.

    Attributes:
        parameters: W, of matrix products (input embeddings are looked up); weight_bytes: b.
        layers: L; hidden: H, the width of the queries; kv_width: G, key/value heads times their size.

    Raises:
        ValueError: a number that is not positive.
    """

    parameters: float
    layers: int
    hidden: int
    kv_width: int
    weight_bytes: float

    def __post_init__(self) -> None:
        for one in fields(self):
            check_positive(one.name, getattr(self, one.name))

    def seconds(self, n: np.ndarray, context: int, bandwidth: float, operations: float) -> np.ndarray:
        """Seconds of a forward over n positions behind so many cached ones."""
        read = self.weight_bytes * self.parameters + 4 * self.layers * self.kv_width * (context + n)
        multiplied = 2 * self.parameters * n + 4 * self.layers * self.hidden * n * (context + n)
        return np.maximum(read / bandwidth, multiplied / operations)


def check_positive(name: str, value: object) -> None:
    """Raise ValueError unless the value, so named, is a positive number."""
    if not is_number(value) or value <= 0:
        raise ValueError(f"roofline: {name}={value!r} must be a positive number")


def roofline(
    device: str, bandwidth: float, operations: float, target: Mapping[str, float], drafter: Mapping[str, float]
) -> CostTable:
    """The modelled cost table of a target and its drafter on a device.

    Args:
        device: its name; bandwidth: bytes a second; operations: multiplications and additions a second.
        target, drafter: the fields of `Shape`.
    """
    check_positive("bandwidth", bandwidth)
    check_positive("operations", operations)
    for name, shape in (("target", target), ("drafter", drafter)):
        if not isinstance(shape, Mapping):
            raise ValueError(
                f"roofline: {name}={shape!r} must be the fields {', '.join(one.name for one in fields(Shape))}"
            )
    shapes = {"verify": (Shape(**target), POSITIONS), "draft": (Shape(**drafter), WIDTHS)}
    parts = []
    for stage, (shape, n) in shapes.items():
        for context in CONTEXTS:
            seconds = shape.seconds(n, context, bandwidth, operations)
            times = {"seconds": seconds, "low": seconds, "high": seconds}
            parts.append(pd.DataFrame({"stage": stage, "n": n, "context": context, "batch": 1, **times, "repeats": 0}))
    about = {
        "device": f"{device} (modelled)", "dtype": "bfloat16", "threads": None, "modelled": True, "formula": FORMULA,
        "bandwidth": bandwidth, "operations": operations, "target": dict(target), "drafter": dict(drafter),
    }  # fmt: skip
    return CostTable(pd.concat(parts, ignore_index=True), 0.0, 0.0, 0.0, about)
