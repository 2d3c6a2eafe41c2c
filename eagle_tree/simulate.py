"""Texts decoded in small worlds with the production noise, and their law by chi-square.

An exact certificate puts in what the noise would yield; here the noise itself is judged: that draws and trials have
their laws, that no pass meets another's, and that known mistakes in its keys are seen. Seeds are fixed, so that a test
cannot fail by chance; what it can see is stated as its power.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from scipy.stats import chi2, ncx2
from torch import Tensor

from eagle_tree.accept import BlockVerification, ChainRejection, Match, Rule
from eagle_tree.certify import Path, World, continued, grown
from eagle_tree.noise import GumbelRows, Noise, PassNoise
from eagle_tree.tree import Draft, Frontier, GrowingTree
from eagle_tree.warp import Law, Sampling

FALSE_ALARM = 1e-4
"""Probability with which sound noise under a fresh seed would exceed the limit."""


def text(rule: Rule, kind: str, world: World, shape: Sequence[int], rows: GumbelRows, length: int) -> Path:
    """The first tokens of a text, pass by pass: every node of level i has `shape[i]` drawn children."""

    def last_level(growing: GrowingTree, draft: Draft | None) -> Frontier | None:
        level = len(growing.levels)
        start, end = growing.levels[-1] if level else (0, 1)
        return Frontier(torch.arange(start, end), shape[level]) if level < len(shape) else None

    done: Path = ()
    while len(done) < length:
        position = len(done)
        growing, texts = grown(world, done, kind, last_level, rows.for_pass(position))
        tree = growing.select(torch.arange(1, growing.n_nodes + 1))[0]
        law = Law(torch.stack([world.logits(path) for path in texts]), world.sampling, tree)
        walk = rule.accept(tree, law, rows, position)
        done += tuple(walk.emitted[: int(walk.n_accepted) + 1].tolist())
    return done[:length]


@dataclass(frozen=True)
class ChiSquare:
    """A test of the law of texts.

    Attributes:
        statistic, limit, freedom: of chi-square; count: texts.
    """

    statistic: float
    limit: float
    freedom: int
    count: int

    @property
    def passes(self) -> bool:
        return self.statistic < self.limit

    def power(self, distance: float) -> float:
        """The least probability to catch a law that far off in total variation (Σ d²/p >= (Σ |d|)² = 4 distance²)."""
        return float(ncx2.sf(self.limit, self.freedom, 4 * self.count * distance**2))


def chi_square(
    rule: Rule,
    kind: str,
    world: World,
    shape: Sequence[int],
    rows: type[GumbelRows] = GumbelRows,
    count: int = 1000,
    length: int = 2,
) -> ChiSquare:
    """Decode the texts of many sequences, and compare how often each came with the target's law."""
    drawn = Counter(
        text(rule, kind, world, shape, rows(Noise(world.seed, sequence), world.vocab_size), length)
        for sequence in range(count)
    )
    law = dict(continued(world, (), length))
    if set(drawn) - set(law):  # a text that the target excludes
        return ChiSquare(float("inf"), 0.0, 1, count)
    statistic = sum((drawn[path] - count * share) ** 2 / (count * share) for path, share in law.items())
    freedom = max(1, len(law) - 1)
    return ChiSquare(statistic, float(chi2.isf(FALSE_ALARM, freedom)), freedom, count)


# Mistakes in the keys of the noise


class OnePosition(GumbelRows):
    """The same Gumbel vector at every position: noise drawn once for a prompt."""

    def row(self, position: int) -> Tensor:
        return super().row(0)


class TrialsOfTheFirstPass(GumbelRows):
    """Every pass tries its children with the uniform variates of the first one."""

    def for_pass(self, position: int) -> PassNoise:
        noise = PassNoise(self, position)
        noise.below = PassNoise(self, 0).below
        return noise


class ByPosition(GumbelRows):
    """Drafts and trials are keyed by position, so that a pass meets what the last one turned down."""

    def for_pass(self, position: int) -> PassNoise:
        class Positions(PassNoise):
            def draft_uniform(self, level: int, size: int) -> Tensor:
                return self.rows.noise.uniform(position + level, size, "draft")

            def below(self, level: int, index: int, threshold: Tensor) -> Tensor:
                return self.rows.noise.uniform(position + level, index + 1, "acceptance")[index] < threshold

        return Positions(self, position)


@dataclass(frozen=True)
class TwoTokens(World):
    """A world of two tokens whose laws are given.

    Attributes:
        laws: probability of token 1 after a text, of the target and of the drafter.
    """

    laws: Callable[[Path], tuple[float, float]] = lambda text: (0.4, 0.8)

    def logits(self, text: Path) -> Tensor:
        p = self.laws(text)[0]
        return torch.tensor([1 - p, p], dtype=torch.float64).log()

    def q(self, text: Path) -> Tensor:
        q = self.laws(text)[1]
        return torch.tensor([1 - q, q], dtype=torch.float64)


def turned_down_by_the_second(text: Path) -> tuple[float, float]:
    """Token 1 is overrated at first, and redeemed only if a 0 follows it: its block falls by what comes second."""
    return {(): (0.5, 0.95), (1,): (0.05, 0.5)}.get(text, (0.5, 0.5))


@dataclass(frozen=True)
class NoiseMutant:
    """A mistake in the noise, and a world in which it shows.

    Attributes:
        distance: total variation of the first two tokens to the target's law, by hand.
    """

    mistake: str
    rule: Rule
    kind: str
    shape: Sequence[int]
    rows: type[GumbelRows]
    world: World
    distance: float

    def chi_square(self, count: int = 1000) -> ChiSquare:
        """Of the mutant; it must not pass."""
        return chi_square(self.rule, self.kind, self.world, self.shape, self.rows, count)


FLAT = TwoTokens(2, 0, Sampling(1.0))
TURNED_DOWN = TwoTokens(2, 0, Sampling(1.0), laws=turned_down_by_the_second)
NOISE_MUTANTS = (
    # both tokens are equal: 0.6 and 0.4 where 0.36 and 0.16 are due
    NoiseMutant("noise not keyed by position", Match(), "top_k", (), OnePosition, FLAT, 0.48),
    # a rejected 1 (0.4) is never followed by one, of which 0.4 are due
    NoiseMutant(
        "trials not keyed by pass", ChainRejection(), "with_replacement", (1,), TrialsOfTheFirstPass, FLAT, 0.16
    ),
    # a block that fell with a 1 at the second place (0.45) is followed by a 1 there, of which half are due
    NoiseMutant(
        "block verification meets the last pass's draws",
        BlockVerification(),
        "with_replacement",
        (1, 1),
        ByPosition,
        TURNED_DOWN,
        0.225,
    ),
)
