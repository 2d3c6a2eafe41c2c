"""Mistakes that were made in the field, each as a rule that differs from the right one in that alone.

A certificate that does not fail on every one of them proves nothing. The law that each emits is computed exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eagle_tree.accept import (
    Accepted,
    BlockVerification,
    ChainRejection,
    Match,
    Rule,
    WithoutReplacement,
    WithReplacement,
)
from eagle_tree.accept.base import Step
from eagle_tree.accept.trials import normalised
from eagle_tree.certify import Certificate, Drafted, World, certificate
from eagle_tree.noise import GumbelRows, PassNoise
from eagle_tree.tree import Tree
from eagle_tree.warp import Law, Sampling


class UnwarpedBonus(Match):
    """Behind a leaf, the bonus token is drawn from the logits as they are."""

    def step(self, tree: Tree, law: Law, node: Tensor, alive: Tensor, chance: PassNoise, level: int) -> Step:
        step = super().step(tree, law, node, alive, chance, level)
        bonus = chance.draw(level, Law(law.logits, Sampling(1.0)).scores(node))
        return replace(step, token=torch.where((tree.parent == node).any(), step.token, bonus))


class NotRenormalised(WithReplacement):
    """The residual is not normalised before the next sibling meets it."""

    def left(self, residual: Tensor, q: Tensor, token: Tensor) -> Tensor:
        left = (residual - q).clamp(min=0)
        return torch.where(left.sum(-1, keepdim=True) > 0, left, residual)


class RemovedFromQOnly(WithoutReplacement):
    """A rejected sibling is taken out of q; the residual stays what it was."""

    def left(self, residual: Tensor, q: Tensor, token: Tensor) -> Tensor:
        return residual


class SubtractedAtTheToken(WithReplacement):
    """q is subtracted at the rejected token alone."""

    def left(self, residual: Tensor, q: Tensor, token: Tensor) -> Tensor:
        return normalised(residual.scatter_add(1, token, -q.gather(1, token)).clamp(min=0), residual)


class HalfPrecision(WithReplacement):
    """The residual is computed in half precision, where small differences are clipped to 0."""

    def left(self, residual: Tensor, q: Tensor, token: Tensor) -> Tensor:
        return normalised((residual.bfloat16() - q.bfloat16()).clamp(min=0).double(), residual)


class FromTargetAfterRejection(ChainRejection):
    """What follows a rejection is drawn from the target's law, the rejected token included."""

    def left(self, residual: Tensor, q: Tensor, token: Tensor) -> Tensor:
        return residual


class WrongNode(Match):
    """Every node is given the law of the next one in the tree."""

    def accept(self, tree: Tree, law: Law, noise: GumbelRows, position: int) -> Accepted:
        return super().accept(tree, Law(law.logits.roll(-1, 0), law.sampling), noise, position)


class AnyParent(Match):
    """A node that carries the token is descended to, whoever its parent is."""

    def step(self, tree: Tree, law: Law, node: Tensor, alive: Tensor, chance: PassNoise, level: int) -> Step:
        step = super().step(tree, law, node, alive, chance, level)
        child = ((tree.token == step.token) & (tree.depth == level + 1)).long().argmax(keepdim=True)
        return replace(step, child=child)


class TopPFirst(Match):
    """The nucleus is that of the law at temperature 1; then comes the temperature."""

    def accept(self, tree: Tree, law: Law, noise: GumbelRows, position: int) -> Accepted:
        index = torch.arange(tree.n_nodes + 1)
        nucleus = Law(law.logits, Sampling(1.0, top_p=law.sampling.top_p)).scores(index)
        return super().accept(tree, Law(nucleus, Sampling(law.sampling.temperature)), noise, position)


@dataclass(frozen=True)
class OneUniform:
    """Noise whose level has one uniform variate."""

    chance: PassNoise

    def draw(self, level: int, scores: Tensor) -> Tensor:
        return self.chance.draw(level, scores)

    def below(self, level: int, index: int, threshold: Tensor) -> Tensor:
        return self.chance.below(level, 0, threshold)


class ReusedUniform(WithReplacement):
    """All siblings are tried with one uniform variate."""

    def step(self, tree: Tree, law: Law, node: Tensor, alive: Tensor, chance: PassNoise, level: int) -> Step:
        return super().step(tree, law, node, alive, OneUniform(chance), level)


class LikelyByRatio(WithReplacement):
    """min(1, p/q) on tokens that were not drawn."""


class EqualLaws(WithReplacement):
    """Distinct draws, each tried against q as it was before the first."""


class BlockBonusFromTarget(BlockVerification):
    """What follows a block is drawn from the target's law, in place of the residual."""

    def lengths(self, tree: Tree, law: Law) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        chance, _, broken, fault = super().lengths(tree, law)
        return chance, law.log_probs(torch.arange(tree.n_nodes + 1)).exp(), broken, fault


def best_of_drawn(drafted: Drafted) -> Drafted:
    """Keeps the child of the root that the drafter likes best: pruning drawn children by their score."""
    tree = drafted.tree
    best = 1 + int(tree.drawn.log_q[0][tree.token[1:]].argmax())
    drawn = replace(tree.drawn, row=tree.drawn.row[[0, best]])
    return Drafted(
        drafted.probability,
        Tree.from_lists([int(tree.token[0]), int(tree.token[best])], [-1, 0], drawn=drawn),
        [drafted.texts[0], drafted.texts[best]],
    )


@dataclass(frozen=True)
class Mutant:
    """A mistake, and a world in which it shows.

    Attributes:
        mistake: in words; rule: that makes it, on drafts of `kind` with `shape` children by level.
        sampling: of the target; keep: a policy that prunes.
    """

    mistake: str
    rule: Rule
    kind: str
    shape: Sequence[int]
    sampling: Sampling = Sampling(1.0)  # noqa: RUF009
    keep: Callable[[Drafted], Drafted] | None = None
    vocab_size: int = 4

    def certificate(self, seed: int = 5) -> Certificate:
        """What the enumeration finds; it must not hold."""
        world = World(self.vocab_size, seed, self.sampling, closeness=0.2)
        return certificate(self.rule, self.kind, world, self.shape, keep=self.keep)


MUTANTS = (
    Mutant("min(1, p/q) on the most likely tokens", LikelyByRatio(), "top_k", (2,)),
    Mutant("bonus token from unwarped logits", UnwarpedBonus(), "top_k", (2, 1), Sampling(0.5)),
    Mutant("residual not renormalised", NotRenormalised(), "with_replacement", (2,)),
    Mutant("rejected sibling taken out of q only", RemovedFromQOnly(), "without_replacement", (2,)),
    Mutant("q subtracted at the rejected token only", SubtractedAtTheToken(), "with_replacement", (2,)),
    Mutant("distribution of another node", WrongNode(), "top_k", (2, 1)),
    Mutant("child of another parent followed", AnyParent(), "top_k", (2, 2)),
    Mutant("top-p before temperature", TopPFirst(), "top_k", (2,), Sampling(1.6, top_p=0.7)),
    Mutant("residual clipped in half precision", HalfPrecision(), "with_replacement", (2,)),
    Mutant("one uniform for two siblings", ReusedUniform(), "with_replacement", (2,)),
    Mutant("distinct draws tried as independent ones", EqualLaws(), "without_replacement", (2,)),
    Mutant("best of the drawn children kept", WithReplacement(), "with_replacement", (2,), keep=best_of_drawn),
    Mutant("after a rejection, the target's own law", FromTargetAfterRejection(), "with_replacement", (1,)),
    Mutant("behind a block, the target's own law", BlockBonusFromTarget(), "with_replacement", (1, 1)),
)
