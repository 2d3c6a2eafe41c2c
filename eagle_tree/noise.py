"""Counter-based noise: Gumbel and uniform variates keyed by (seed, sequence, position, stream).

A variate is a pure function of its key and of the token's index, so every way of reaching a position
(any drafter, tree or policy, or none) meets the same noise there, on every device: the hash is exact
integer arithmetic. `argmax(log p + g)` then draws from p (the Gumbel-max trick), and the emitted text
depends on target, prompt, temperature and seed alone.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

STREAMS = ("target", "draft", "acceptance", "residual")
WORD = 0xFFFFFFFF


def mix(x: Tensor) -> Tensor:
    """A bijective 32-bit mixer ("lowbias32", C. Wellons) on int64 tensors that hold 32-bit words, in place."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x &= WORD
    x ^= x >> 15
    x *= 0x846CA68B
    x &= WORD
    x ^= x >> 16
    return x


def key_words(seed: int, sequence: int | str, position: int, stream: str) -> tuple[int, int, int]:
    """Three 32-bit words of a cryptographic digest of the key, computed on the host once per position."""
    if stream not in STREAMS:
        raise ValueError(f"stream={stream!r} is not one of {STREAMS}")
    digest = hashlib.blake2b(f"{seed}|{sequence}|{position}|{stream}".encode(), digest_size=12).digest()
    return tuple(int.from_bytes(digest[i : i + 4], "little") for i in (0, 4, 8))


@dataclass(frozen=True)
class Noise:
    """The noise of one sequence.

    Attributes:
        seed: the run's.
        sequence: the prompt's id, so that prompts of a run do not share noise.
        device: where variates are wanted.
    """

    seed: int
    sequence: int | str
    device: torch.device | str = "cpu"

    def uniform(self, position: int, size: int, stream: str) -> Tensor:
        """`[size] f64` variates in (0, 1), from 32 bits each: (word + 1/2) / 2**32."""
        first, second, third = key_words(self.seed, self.sequence, position, stream)
        word = torch.arange(size, device=self.device)
        word ^= first
        mix(word)
        word ^= second
        mix(word)
        word += third
        word &= WORD
        return (mix(word).double() + 0.5) / 2.0**32

    def gumbel(self, position: int, size: int, stream: str = "target") -> Tensor:
        """`[size] f32` standard Gumbel variates g = -log(-log1p(-u)).

        Computed in fp64: in fp32 u rounds to 1, and g to minus infinity, once in some 700 positions at V = 49k.
        """
        return -torch.log(-torch.log1p(-self.uniform(position, size, stream))).float()


class GumbelRows:
    """A sequence's Gumbel vectors by position, each computed once and kept until its position is passed.

    A pass looks D+1 positions ahead but consumes only as many as it emits; the next pass finds the rest.
    """

    def __init__(self, noise: Noise, vocab_size: int, stream: str = "target"):
        self.noise = noise
        self.vocab_size = vocab_size
        self.stream = stream
        self.rows: dict[int, Tensor] = {}

    def row(self, position: int) -> Tensor:
        """`[V] f32`, the vector of an absolute position."""
        if position not in self.rows:
            self.rows[position] = self.noise.gumbel(position, self.vocab_size, self.stream)
        return self.rows[position]

    def for_pass(self, position: int) -> PassNoise:
        """The noise of the pass that emits its first token at an absolute position."""
        return PassNoise(self, position)

    def forget_before(self, position: int) -> None:
        """Drop the vectors of positions that are decided."""
        self.rows = {key: row for key, row in self.rows.items() if key >= position}


class PassNoise:
    """The randomness of one pass: all that drafting and acceptance draw with.

    Levels count from the root, 0. The target stream is keyed by absolute position, so what is drawn there depends on
    neither tree nor pass. Drafts and trials are keyed by the pass and the level: no pass meets the noise of another.
    (With positions as keys, block verification would be biased: it looks at tokens beyond those that it accepts, and
    the next pass would draw its own with the noise that made it turn them down.)
    """

    def __init__(self, rows: GumbelRows, position: int):
        self.rows = rows
        self.position = position
        noise = rows.noise
        self.own = Noise(noise.seed, f"{noise.sequence}|pass {position}", noise.device)

    def draw(self, level: int, scores: Tensor) -> Tensor:
        """A token `[1]` from the law whose log-probabilities, up to a constant, are `scores [1, V]`."""
        return (scores + self.rows.row(self.position + level)).argmax(-1)

    def draw_at(self, level: Tensor, levels: int, scores: Tensor) -> Tensor:
        """The same where the level `[1]`, one of 0 … levels - 1, is known to the device alone."""
        return (scores + self.target_gumbel(levels)[level]).argmax(-1)

    def below(self, level: int, index: int, threshold: Tensor) -> Tensor:
        """Whether the level's uniform variate of that index lies below a threshold `[]`; never below NaN."""
        return self.own.uniform(level, index + 1, "acceptance")[index] < threshold

    def target_gumbel(self, levels: int) -> Tensor:
        """`[levels, V] f32`, the Gumbel vectors that the target draws its tokens with at each level."""
        return torch.stack([self.rows.row(self.position + level) for level in range(levels)])

    def draft_gumbel(self, level: int, size: int) -> Tensor:
        """`[size] f32` Gumbel variates for the candidates of a level."""
        return self.own.gumbel(level, size, "draft")

    def draft_uniform(self, level: int, size: int) -> Tensor:
        """`[size] f64` uniform variates for the candidates of a level."""
        return self.own.uniform(level, size, "draft")
