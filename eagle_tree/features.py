"""What the target says along a text: the features a drafter reads and the laws it learns.

`FeatureStore` asks the target once per text and keeps the answer on disk for later epochs (and later heads); the
system's page cache keeps what fits in memory.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eagle_tree.files import write_tensors
from eagle_tree.target import Target


@dataclass(frozen=True)
class Observed:
    """What the target says along one text of T tokens, in its own dtype.

    Attributes:
        feature: `[T, taps * H]`; hidden: `[T, H]`, after the final norm; log_z: `[T] f32`, the logits' logsumexp.
    """

    feature: Tensor
    hidden: Tensor
    log_z: Tensor


@torch.no_grad()
def observe(target: Target, token: Tensor, taps: tuple[int, ...]) -> Observed:
    """Run the target once over `token [T]`."""
    with target.tapped((*taps, target.n_layers)) as states:
        logits = target.model(input_ids=token.to(target.device)[None], use_cache=False).logits[0]
    hidden = states[target.n_layers][0]
    feature = torch.cat([states[tap][0] for tap in taps], -1)
    return Observed(feature, hidden, logits.float().logsumexp(-1))


class FeatureStore:
    """`observe`, remembered on disk.

    Texts are observed one by one, never padded beside each other, so that what is stored does not depend on
    which batch asked first and a resumed run computes with the same bits.

    Args:
        folder: where to keep them, one file a text with one tensor a tap, so that heads which read other taps share
            what they can; None asks the target every time. Targets and dtypes have subfolders of their own.
    """

    def __init__(self, target: Target, taps: tuple[int, ...], folder: Path | None = None):
        self.target = target
        self.taps = taps
        self.folder = None
        if folder is not None:
            dtype = str(target.dtype).removeprefix("torch.")
            self.folder = Path(folder) / f"{target.fingerprint}-{dtype}"

    def read(self, token: Tensor) -> Observed:
        """What the target says along `token [T]`.

        Raises:
            OSError: the folder cannot be written (a full disk), by name.
        """
        if self.folder is None:
            return observe(self.target, token, self.taps)
        name = hashlib.blake2b(token.cpu().numpy().tobytes(), digest_size=12).hexdigest()
        path = self.folder / f"{name}.safetensors"
        wanted = {tap: f"tap_{tap}" for tap in (*self.taps, self.target.n_layers)}
        kept = read_kept(path, {*wanted.values(), "log_z"}, str(self.target.device))
        if kept is not None:
            feature = torch.cat([kept[wanted[tap]] for tap in self.taps], -1)
            return Observed(feature, kept[wanted[self.target.n_layers]], kept["log_z"])
        seen = observe(self.target, token, self.taps)
        parts = [part.contiguous() for part in seen.feature.split(self.target.hidden_size, -1)]
        tensors = dict(zip((wanted[tap] for tap in self.taps), parts))
        tensors |= {wanted[self.target.n_layers]: seen.hidden.contiguous(), "log_z": seen.log_z}
        write_tensors(path, (read_kept(path, None, "cpu") or {}) | tensors)
        return seen


def read_kept(path: Path, names: set[str] | None, device: str) -> dict[str, Tensor] | None:
    """The named tensors of a file, or all of them; None if it is not there, damaged, or lacks one."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt", device=device) as file:
            there = set(file.keys())
            if names is not None and not names <= there:
                return None
            return {name: file.get_tensor(name) for name in (there if names is None else names)}
    except SafetensorError:  # damaged, by a crashed disk say: what it held can be had again
        path.unlink(missing_ok=True)  # another process may have been here
        return None
