"""Counts what would move data from a device to the host, were the tensors on a device."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

READING = ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__")
SYNCHRONISING = {
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.equal.default,
    torch.ops.aten._unique2.default,
    torch.ops.aten.repeat_interleave.Tensor,
}


class Synchronising(TorchDispatchMode):
    """Logs every operator whose result has a size that the host has to wait for, wherever it is called from."""

    def __init__(self, log: list[str]):
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        indices = args[1] if func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default) else []
        by_mask = any(index is not None and index.dtype == torch.bool for index in indices)
        if func in SYNCHRONISING or by_mask:
            self.log.append(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def transfers_to_host():
    """A list that fills with what would move data from a device to the host, were the tensors on a device."""
    log: list[str] = []
    on_host: list[Tensor] = []  # what `cpu` returned may be read freely

    def logged(name: str):
        real = getattr(Tensor, name)

        def call(self, *arguments):
            if not any(self is known for known in on_host):
                log.append(name)
            result = real(self, *arguments)
            if name == "cpu":
                on_host.append(result)
            return result

        return mock.patch.object(Tensor, name, call)

    with ExitStack() as stack:
        for name in ("cpu", *READING):
            stack.enter_context(logged(name))
        stack.enter_context(Synchronising(log))
        yield log
