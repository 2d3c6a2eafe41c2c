"""Checks of what a user sets: every refusal names the argument, its value, and what is allowed."""

from __future__ import annotations

import math
from numbers import Real
from pathlib import Path


def is_number(value: object) -> bool:
    """Whether a value is a finite number; True and False are none, although Python counts them as integers."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def is_count(value: object, least: int = 1) -> bool:
    """Whether a value is an integer of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_count(name: str, value: object, least: int = 1) -> None:
    """Raise ValueError unless the value, so named, is an integer of at least `least`."""
    if not is_count(value, least):
        raise ValueError(f"{name}={value!r} must be an integer >= {least}")


def as_path(name: str, value: object) -> Path:
    """The path that a value, so named, is. Raises ValueError unless it is text that is not empty."""
    if not isinstance(value, str | Path) or value == "":
        raise ValueError(f"{name}={value!r} must be the path of a file or folder, as text (a number in quotes)")
    return Path(value)


def check_flag(name: str, value: object) -> None:
    """Raise ValueError unless the value, so named, is true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be true or false")


def check_counts(owner: object, *names: str) -> None:
    """Raise ValueError unless the named attributes are integers >= 1."""
    for name in names:
        check_count(f"{type(owner).__name__}: {name}", getattr(owner, name))


def check_number(owner: object, name: str, most: float | None = None) -> None:
    """Raise ValueError unless the named attribute is a finite number, at least 0 and at most `most`."""
    value = getattr(owner, name)
    if not is_number(value) or value < 0 or (most is not None and value > most):
        allowed = ">= 0" if most is None else f"in 0…{most}"
        raise ValueError(f"{type(owner).__name__}: {name}={value!r} must be a number {allowed}")
