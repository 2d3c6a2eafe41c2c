"""A preallocated key/value cache: append in place, then keep one path of what was appended.

`KVCache` is a transformers `Cache`, so an unmodified model writes to it and `model.generate` can use
it. It differs from transformers' own caches in what a draft tree needs:

* entries are written into a buffer, never concatenated (a concatenation copies the whole prefix at
  every layer of every pass);
* after a tree was verified, `keep(paths)` moves the accepted path's entries to the front of the block
  that was appended last and forgets the rest;
* every row of a batch has its own length, so rows finish and restart independently;
* it never grows past `max_length`, the model's context: an append that would is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

FIRST_CAPACITY = 256


class CacheOverflow(ValueError):
    """An append would not fit the model's context (or the fixed capacity)."""


class KVLayer(CacheLayerMixin):
    """The buffers of one attention layer: `keys, values [batch, heads, capacity, head_dim]`.

    Rows are valid up to `lengths[row]`; what lies beyond is stale but finite, and is masked.
    """

    is_sliding = False  # a sliding window is the mask's business: all entries are kept
    is_croppable = True

    def __init__(self, batch_size: int, max_length: int, fixed_capacity: int | None):
        super().__init__()
        self.batch_size = batch_size
        self.max_length = max_length
        self.fixed_capacity = fixed_capacity
        # transformers leaves out the mask of a single query unless this is set: it would see the unused slots
        self.is_compileable = fixed_capacity is not None
        self.capacity = 0
        self.lengths = [0] * batch_size
        self.appended = 0  # size of the block written last, per row

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate on the first append, when the heads, dtype and device are known."""
        batch_size = key_states.shape[0]
        if batch_size != self.batch_size:
            raise ValueError(f"batch of {batch_size} rows given to a cache made for batch_size={self.batch_size}")
        self.keys = key_states.new_zeros((*key_states.shape[:2], 0, key_states.shape[3]))
        self.values = value_states.new_zeros((*value_states.shape[:2], 0, value_states.shape[3]))
        self.is_initialized = True
        self._reserve(self.fixed_capacity or min(self.max_length, FIRST_CAPACITY))

    def _reserve(self, capacity: int) -> None:
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros((*old.shape[:2], capacity, old.shape[3]))
            new[:, :, : self.capacity] = old
            setattr(self, name, new)
        self.capacity = capacity

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append `[batch, heads, n, head_dim]` to every row; return what attention reads.

        Growing mode returns views up to the longest row; fixed mode returns the whole buffers, whose
        shape and address never change (CUDA graphs).
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        n = key_states.shape[2]
        end = max(self.lengths) + n
        limit = self.fixed_capacity or self.max_length
        if end > limit:
            raise CacheOverflow(f"{max(self.lengths)} cached + {n} new positions exceed the limit of {limit}")
        if end > self.capacity:
            self._reserve(min(self.max_length, max(2 * self.capacity, end)))

        start = self.lengths[0]
        if all(length == start for length in self.lengths):
            self.keys[:, :, start : start + n] = key_states
            self.values[:, :, start : start + n] = value_states
        else:
            first = torch.tensor(self.lengths, device=self.keys.device)
            row = torch.arange(self.batch_size, device=self.keys.device)[:, None]
            column = first[:, None] + torch.arange(n, device=self.keys.device)
            self.keys[row, :, column] = key_states.transpose(1, 2)
            self.values[row, :, column] = value_states.transpose(1, 2)
        self.lengths = [length + n for length in self.lengths]
        self.appended = n
        visible = self.capacity if self.fixed_capacity else end
        return self.keys[:, :, :visible], self.values[:, :, :visible]

    def keep(self, row: int, path: Tensor, start: int) -> None:
        """Move entries `start + path` of a row to `start …`; the caller sets the length."""
        for buffer in (self.keys, self.values):
            kept = buffer[row].index_select(1, path + start)
            buffer[row, :, start : start + path.shape[0]] = kept

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.fixed_capacity or max(self.lengths) + query_length, 0

    def get_seq_length(self) -> int:
        return max(self.lengths)

    def get_max_length(self) -> int:
        return self.fixed_capacity or self.max_length

    def reset(self) -> None:
        self.lengths = [0] * self.batch_size
        self.appended = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last entries of every row; transformers passes their number negated."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove={tokens_to_remove} must be at most 0: -n removes n entries")
        self.lengths = [max(0, length + tokens_to_remove) for length in self.lengths]
        self.appended = max(0, self.appended + tokens_to_remove)


class KVCache(Cache):
    """A preallocated cache of `n_layers` layers and `batch_size` rows.

    Args:
        n_layers: attention layers of the model.
        max_length: the model's context, in tokens; appends past it raise `CacheOverflow`.
        batch_size: rows.
        fixed_capacity: allocate this many positions once and always attend over all of them (the mask
            hides the rest); None grows by doubling.
    """

    def __init__(self, n_layers: int, max_length: int, batch_size: int = 1, fixed_capacity: int | None = None):
        if max_length < 1 or batch_size < 1:
            raise ValueError(f"max_length={max_length} and batch_size={batch_size} must be at least 1")
        if fixed_capacity is not None and not 1 <= fixed_capacity <= max_length:
            raise ValueError(f"fixed_capacity={fixed_capacity} is outside 1…{max_length}, the model's context")
        layers = [KVLayer(batch_size, max_length, fixed_capacity) for _ in range(n_layers)]
        super().__init__(layers=layers)

    @property
    def lengths(self) -> list[int]:
        """Valid entries of each row."""
        return list(self.layers[0].lengths)

    @property
    def max_length(self) -> int:
        """The most positions a row may hold."""
        return self.layers[0].get_max_length()

    def room(self) -> int:
        """Positions that the longest row can still take."""
        return self.max_length - max(self.layers[0].lengths)

    @torch.inference_mode()  # the buffers belong to the mode that the forward ran in
    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Of the block appended last, keep each row's `path` (ascending block indices), in its order.

        The kept entries move to the front of the block, in place; the rest is forgotten. A path that is
        already the front of the block (a chain accepted from its root) costs nothing but the new length.
        """
        block = self.layers[0].appended
        if len(paths) != len(self.layers[0].lengths):
            raise ValueError(f"{len(paths)} paths given for {len(self.layers[0].lengths)} rows")
        for path in paths:
            if any(not 0 <= node < block for node in path) or any(b <= a for a, b in pairwise(path)):
                raise ValueError(f"path {list(path)} must ascend within the last block of {block} entries")
        for row, path in enumerate(paths):
            start = self.layers[0].lengths[row] - block
            moves = list(path) != list(range(len(path)))
            index = torch.tensor(path, device=self.layers[0].keys.device) if moves else None
            for layer in self.layers:
                if index is not None:
                    layer.keep(row, index.to(layer.keys.device), start)
                layer.lengths[row] = start + len(path)
        for layer in self.layers:
            layer.appended = 0

    def reset(self, rows: Sequence[int] | None = None, length: int = 0) -> None:
        """Shorten all rows, or the given ones, to their first `length` entries; buffers stay allocated."""
        for layer in self.layers:
            for row in range(layer.batch_size) if rows is None else rows:
                layer.lengths[row] = min(length, layer.lengths[row])
            layer.appended = 0
