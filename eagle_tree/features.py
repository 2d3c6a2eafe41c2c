"""What the target says along a text: the features a drafter reads and the laws it learns.

`FeatureStore` asks the target once per text and keeps the answer on disk for later epochs (and later heads); the
system's page cache keeps what fits in memory.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
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
        folder: where to keep them, one file a text; None asks the target every time. Targets, dtypes and taps have
            subfolders of their own, so a folder can serve several.
    """

    def __init__(self, target: Target, taps: tuple[int, ...], folder: Path | None = None):
        self.target = target
        self.taps = taps
        self.folder = None
        if folder is not None:
            dtype = str(target.dtype).removeprefix("torch.")
            self.folder = Path(folder) / "-".join([target.fingerprint, dtype, *map(str, taps)])

    def read(self, token: Tensor) -> Observed:
        """What the target says along `token [T]`.

        Raises:
            OSError: the folder cannot be written (a full disk), by name.
        """
        if self.folder is None:
            return observe(self.target, token, self.taps)
        name = hashlib.blake2b(token.cpu().numpy().tobytes(), digest_size=12).hexdigest()
        path = self.folder / f"{name}.safetensors"
        if path.is_file():
            try:
                kept = load_file(path, device=str(self.target.device))
                return Observed(kept.get("feature", kept["hidden"]), kept["hidden"], kept["log_z"])
            except (SafetensorError, KeyError):  # damaged, by a crashed disk say: what it held can be had again
                path.unlink(missing_ok=True)  # another process may have been here
        seen = observe(self.target, token, self.taps)
        tensors = {field.name: getattr(seen, field.name).contiguous() for field in fields(seen)}
        if self.taps == (self.target.n_layers,):  # then the feature is the hidden state
            del tensors["feature"]
        write_tensors(path, tensors)
        return seen
