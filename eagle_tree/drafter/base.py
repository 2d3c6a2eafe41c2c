"""The drafter's seam: what `decode` asks of anything that proposes tokens."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from eagle_tree.noise import PassNoise
from eagle_tree.tree import Draft, Frontier, GrowingTree


class Drafter:
    """Proposes candidates for the nodes of a growing tree.

    A drafter keeps the state of one sequence. That state must be a function of the sequence's tokens
    alone (however they were reached), so that every policy meets the same drafts.

    Attributes:
        taps: hidden states of the target that it reads (see `Target.tapped`); empty for none.
        vocab_size: tokens it can propose; no node can have more candidates.
        module: the network whose forward is timed as the drafter's; None for drafters without one.
        max_depth: depth of the deepest draft node it can propose (the root's children have depth 1); growth
            ends after as many frontiers. None: no limit.
        target_id: `[vocab_size] i64`, target ids of its own vocabulary; None: it proposes target ids as they are.
    """

    taps: tuple[int, ...] = ()
    vocab_size: int
    module: nn.Module | None = None
    max_depth: int | None = None
    target_id: Tensor | None = None

    @property
    def fingerprint(self) -> str:
        """A digest of kind, limits, vocabulary and a sample of the weights (as bf16: the load dtype is no matter)."""
        digest = hashlib.blake2b(digest_size=8)
        digest.update(f"{type(self).__name__} {self.vocab_size} {self.taps} {self.max_depth}".encode())
        weights = {} if self.module is None else dict(self.module.state_dict())
        if self.target_id is not None:
            weights["target_id"] = self.target_id
        for name, tensor in sorted(weights.items()):
            sample = tensor.detach().flatten()[:: max(1, tensor.numel() // 512)].to(torch.bfloat16)
            digest.update(name.encode() + sample.float().cpu().numpy().tobytes())
        return digest.hexdigest()

    def start(self, prompt_ids: Tensor, features: Tensor | None, pending: Tensor) -> None:
        """Begin a sequence, forgetting the last one.

        Args:
            prompt_ids: `[n]`; features: `[n, taps * H]`, the target's at those positions; pending: `[1]`,
            the token that follows.
        """
        raise NotImplementedError

    def expand(self, growing: GrowingTree, frontier: Frontier, noise: PassNoise | None) -> Draft:
        """Candidates for every frontier node, in one batched forward.

        `frontier.draw` says how they are taken from the drafter's distribution: hand it to `draw.candidates`, which
        draws with the pass's `noise` where that is asked for (None where nothing is drawn).
        """
        raise NotImplementedError

    def advance(self, tokens: Tensor, features: Tensor | None) -> None:
        """Follow a pass: `tokens [m]`, the accepted ones and the new pending token last.

        `features [m, taps * H]` row j was taken at the position *before* token j. The work may be deferred
        to the next `expand`, since a policy may skip drafting for a while.
        """
        raise NotImplementedError
