"""Stage times of a pass, on CPU and CUDA, without a synchronisation of their own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class Clock:
    """Adds up the seconds spent in named stages.

    On CUDA work is queued, so host time says nothing: pairs of events are recorded and read by `take`,
    which the caller calls once the pass's own transfer has waited for the device.
    """

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.spans: list[tuple[str, object, object]] = []

    def now(self) -> object:
        """A point in time: seconds on CPU, a recorded event on CUDA."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what happens inside."""
        start = self.now()
        try:
            yield
        finally:
            self.spans.append((name, start, self.now()))

    @contextmanager
    def forwards(self, module: nn.Module | None, name: str) -> Iterator[None]:
        """Time every forward of a module while inside; the hooks are removed on leaving."""
        if module is None:
            yield
            return
        starts: list[object] = []
        before = module.register_forward_pre_hook(lambda *_: starts.append(self.now()))
        after = module.register_forward_hook(lambda *_: self.spans.append((name, starts.pop(), self.now())))
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def take(self) -> dict[str, float]:
        """Seconds by stage since the last call."""
        if self.cuda:
            torch.cuda.synchronize()
        total: dict[str, float] = {}
        for name, start, end in self.spans:
            seconds = start.elapsed_time(end) / 1e3 if self.cuda else end - start
            total[name] = total.get(name, 0.0) + seconds
        self.spans.clear()
        return total
