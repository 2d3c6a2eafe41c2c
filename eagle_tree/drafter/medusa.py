"""Medusa heads: several tokens ahead from one state of the target (Cai et al., arXiv 2401.10774, §3.1).

Head i (from 0) reads the target's state after its final norm, at the position *before* the pending token, and
guesses the token i + 2 positions ahead of it: the LM head itself guesses the pending one, head 0 the one behind.
So head i proposes the children of every node of depth i, the same ones whatever path leads there, and the
drafter's state is one row of features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eagle_tree.checks import check_counts
from eagle_tree.drafter.base import Drafter
from eagle_tree.draw import candidates
from eagle_tree.noise import PassNoise
from eagle_tree.tree import Draft, Frontier, GrowingTree, stable_topk


@dataclass(frozen=True)
class MedusaConfig:
    """Shape of a set of heads.

    Attributes:
        hidden_size, vocab_size: the target's.
        n_heads: tokens they look ahead, behind the pending one.
        n_layers: residual blocks of each head.
        own_lm_heads: whether each head ends in an LM head of its own (the published layout); if not, all of
            them borrow the target's.
    """

    hidden_size: int
    vocab_size: int
    n_heads: int
    n_layers: int = 1
    own_lm_heads: bool = False

    def __post_init__(self) -> None:
        check_counts(self, "hidden_size", "vocab_size", "n_heads", "n_layers")


class ResidualBlock(nn.Module):
    """`x + silu(linear(x))`; zero at first, which makes it the identity."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., h]` to `[..., h]`."""
        return x + F.silu(self.linear(x))


class MedusaHeads(nn.Module):
    """The trainable heads, stateless. New ones pass the target's state through unchanged (§3.1).

    Own LM heads start at random; `set_lm_heads` makes them the target's, as the paper does.

    Args:
        config: their shape.
    """

    def __init__(self, config: MedusaConfig):
        super().__init__()
        self.config = config
        self.heads = nn.ModuleList()
        for _ in range(config.n_heads):
            # every block is an object of its own: `[block] * n` would train one in place of n
            head = nn.Sequential(*(ResidualBlock(config.hidden_size) for _ in range(config.n_layers)))
            if config.own_lm_heads:
                head.append(nn.Linear(config.hidden_size, config.vocab_size, bias=False))
            self.heads.append(head)

    @classmethod
    def random(cls, config: MedusaConfig, seed: int = 0) -> MedusaHeads:
        """Heads of random weights, blocks included, for tests and as the drafter that knows nothing."""
        heads = cls(config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in heads.parameters():
                parameter.normal_(std=config.hidden_size**-0.5, generator=generator)
        return heads

    @torch.no_grad()
    def set_lm_heads(self, weight: Tensor) -> None:
        """Start every own LM head as a copy of `weight [V, h]`, the target's.

        Raises:
            ValueError: the heads have none of their own.
        """
        if not self.config.own_lm_heads:
            raise ValueError("these heads borrow the target's LM head: they have none to set")
        for head in self.heads:
            head[-1].weight.copy_(weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """States `[n_heads, ..., h]` behind each head's blocks, of the target's states `hidden [..., h]`."""
        return torch.stack([head[: self.config.n_layers](hidden) for head in self.heads])

    def logits(self, state: Tensor, borrowed_head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Logits `[n_heads, ..., V]` of the states that `forward` returns.

        Args:
            borrowed_head: maps states to the target's logits; heads without an LM head need it.
        """
        if not self.config.own_lm_heads:
            return borrowed_head(state)
        return torch.stack([head[-1](own) for head, own in zip(self.heads, state, strict=True)])


class MedusaLogits(nn.Module):
    """Heads together with the LM head they borrow, so that the drafter's timed forward holds all its work."""

    def __init__(self, heads: MedusaHeads, borrowed_head: Callable[[Tensor], Tensor] | None):
        super().__init__()
        self.heads = heads
        self.borrowed_head = borrowed_head

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits `[n_heads, ..., V]` of the target's states `[..., h]`, whatever dtype the heads have."""
        state = self.heads(hidden.to(next(self.heads.parameters()).dtype))
        # the target's LM head wants the target's dtype, which is that of its states
        return self.heads.logits(
            state if self.heads.config.own_lm_heads else state.to(hidden.dtype), self.borrowed_head
        )


@dataclass(frozen=True)
class Proposals:
    """What all heads say at one position, best candidate first: `token, log_conf [n_heads, K]`, `entropy [n_heads]`."""

    token: Tensor
    log_conf: Tensor
    entropy: Tensor


class MedusaDrafter(Drafter):
    """Drafts with `MedusaHeads` on top of a target.

    All heads run once a pass, at its first `expand`; later ones look up a node's head by its depth.

    Args:
        heads: the trained heads.
        n_layers: the target's layers; the tap of that number is the state after its final norm.
        borrowed_head: maps states to target logits; heads without an LM head of their own need it.

    Raises:
        ValueError: heads without an LM head and none to borrow.
    """

    def __init__(self, heads: MedusaHeads, n_layers: int, borrowed_head: Callable[[Tensor], Tensor] | None = None):
        if borrowed_head is None and not heads.config.own_lm_heads:
            raise ValueError("Medusa heads without an LM head of their own need the target's: give borrowed_head")
        self.heads = heads
        self.module = MedusaLogits(heads, borrowed_head).eval().requires_grad_(False)
        self.taps = (n_layers,)
        self.vocab_size = heads.config.vocab_size
        self.max_depth = heads.config.n_heads
        self.feature: Tensor | None = None
        self.log_q: Tensor | None = None
        self.proposals: Proposals | None = None

    def start(self, prompt_ids: Tensor, features: Tensor | None, pending: Tensor) -> None:
        self.advance(torch.cat([prompt_ids[1:], pending]), features)

    def advance(self, tokens: Tensor, features: Tensor | None) -> None:
        if features is None or features.shape[0] != tokens.shape[0]:
            got = "none" if features is None else features.shape[0]
            raise ValueError(f"Medusa heads need one feature row a token: {tokens.shape[0]} tokens, {got} rows")
        self.feature = features[-1]
        self.log_q = self.proposals = None

    @torch.inference_mode()
    def expand(self, growing: GrowingTree, frontier: Frontier, noise: PassNoise | None) -> Draft:
        if len(growing.levels) >= self.max_depth and bool((growing.depth[frontier.node] >= self.max_depth).any()):
            raise ValueError(f"{self.max_depth} Medusa heads propose to depth {self.max_depth}: growth must end there")
        if self.log_q is None:
            self.log_q = self.module(self.feature).float().log_softmax(-1)
        if frontier.draw.kind != "top_k":
            return candidates(self.log_q[growing.depth[frontier.node]], growing, frontier, noise)
        if self.proposals is None or self.proposals.token.shape[1] < frontier.n_candidates:
            self.proposals = propose(self.log_q, frontier.n_candidates)
        said, count, depth = self.proposals, frontier.n_candidates, growing.depth[frontier.node]
        return Draft(said.token[depth, :count], said.log_conf[depth, :count], said.entropy[depth])


def propose(log_q: Tensor, n_candidates: int) -> Proposals:
    """The best candidates of every head from its log-probabilities `[n_heads, V]`; the best k begin the best k + 1."""
    log_conf, token = stable_topk(log_q, n_candidates)
    return Proposals(token, log_conf, -(log_q.exp() * log_q).nan_to_num(0.0).sum(-1))
