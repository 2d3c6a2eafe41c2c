"""Rules that try a node's children one after the other, each against what the earlier ones left of p.

Child i, drawn from q_i, is accepted with probability min(1, r_i(x_i) / q_i(x_i)), where r_1 = p; if it is rejected, the
next meets the residual r_{i+1} = norm((r_i - q_i)₊). What is left when all are rejected is the law of the token that
ends the walk. The rules differ in q_i. All is computed in double precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from eagle_tree.accept.base import IMPOSSIBLE, Rule, Step, drawn_from, one_hot, probabilities
from eagle_tree.accept.match import child_with
from eagle_tree.noise import PassNoise
from eagle_tree.tree import Tree
from eagle_tree.warp import Law


@dataclass(frozen=True)
class Trials:
    """The children of nodes `[m]`, as they would be tried.

    Attributes:
        chance: `[m, K] f64`, P(child i is accepted | those before it were rejected), 0 where there is no child.
        residual: `[m, V] f64`, the law of what follows if all of them are rejected.
        fault: `[m] i64`, of the draft.
    """

    chance: Tensor
    residual: Tensor
    fault: Tensor


class TrialRule(Rule):
    """The seam: a subclass says what each child was drawn from."""

    most_trials: ClassVar[int | None] = None  # children that are tried; None: all

    def first_proposal(self, tree: Tree, node: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
        """Log q `[m, V]` of each node's first child, and the draft's fault `[m]`."""
        return drawn_from(tree, node, vocab_size)

    def next_proposal(self, log_q: Tensor, token: Tensor) -> Tensor:
        """Log q `[m, V]` of the next child, when the last one, `token [m, 1]` drawn from `log_q`, was rejected."""
        return log_q

    def proposed(self, log_q: Tensor, token: Tensor) -> Tensor:
        """q `[m, V]` of the child that carries `token [m, 1]`."""
        return log_q.exp()

    def left(self, residual: Tensor, q: Tensor, token: Tensor) -> Tensor:
        """What a rejected child leaves of the residual `[m, V]`."""
        return normalised((residual - q).clamp(min=0), residual)

    def trials(self, tree: Tree, p: Tensor, node: Tensor) -> Trials:
        """Every trial at nodes `[m]`, of laws `p [m, V]`."""
        log_q, fault = self.first_proposal(tree, node, p.shape[-1])
        chances, residual = [], p
        for child in tree.children[node][:, : self.most_trials].unbind(1):
            exists, token = child > 0, tree.token[child][:, None]
            q = self.proposed(log_q, token)
            drawn_with = q.gather(1, token)[:, 0]
            fault = torch.where(exists & (fault == 0) & (drawn_with == 0), IMPOSSIBLE, fault)
            chance = (residual.gather(1, token)[:, 0] / drawn_with).clamp(max=1)
            chances.append(torch.where(exists, chance, 0.0))
            residual = torch.where(exists[:, None], self.left(residual, q, token), residual)
            log_q = torch.where(exists[:, None], self.next_proposal(log_q, token), log_q)
        chance = torch.stack(chances, 1) if chances else p.new_zeros(node.shape[0], 0)
        return Trials(chance, residual, fault)

    def step(self, tree: Tree, law: Law, node: Tensor, alive: Tensor, chance: PassNoise, level: int) -> Step:
        p, broken = probabilities(law, node)
        trials = self.trials(tree, p, node)
        child = torch.zeros_like(node)
        for index in range(trials.chance.shape[1]):
            still_open = alive & (child == 0)  # the first accepted one is taken
            taken = chance.below(level, index, torch.where(still_open, trials.chance[:, index], 0.0)[0])
            child = torch.where(taken, tree.children[node][:, index], child)
        token = torch.where(child > 0, tree.token[child], chance.draw(level, trials.residual.log()))
        return Step(child, token, broken[0], trials.fault[0])

    def edges(self, tree: Tree, node_log_prob: Tensor, law: Law) -> Tensor:
        node = torch.arange(tree.token.shape[0], device=tree.token.device)
        p, _ = probabilities(law, node)
        chance = self.trials(tree, p, node).chance
        rejected = torch.cat([torch.ones_like(chance[:, :1]), 1 - chance], 1).cumprod(1)[:, :-1]
        return to_children(tree, rejected * chance)


class Sequential(TrialRule):
    """EAGLE-2's loop (arXiv 2406.16858, released code): a most likely token is a draw from a point mass, q = 1 there.

    Child x is accepted with probability r(x); if it is rejected, x is taken out of r. In all, x is accepted with
    probability p(x): the law is that of `Match`, with more draws.
    """

    draws: ClassVar[tuple[str, ...]] = ("top_k",)

    def first_proposal(self, tree: Tree, node: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(node.shape[0], vocab_size, dtype=torch.float64, device=node.device), torch.zeros_like(node)

    def proposed(self, log_q: Tensor, token: Tensor) -> Tensor:
        return one_hot(token[:, 0], log_q.shape[-1])


class WithReplacement(TrialRule):
    """Children drawn from q independently, possibly equal ones (SpecInfer, arXiv 2305.09781, Alg. 2; MCSD, 2401.06706).

    Every q_i is q.
    """

    draws: ClassVar[tuple[str, ...]] = ("with_replacement",)


class WithoutReplacement(TrialRule):
    """Children drawn from q one after the other, all distinct (Sequoia, arXiv 2402.12374; RSD, 2402.14160).

    q_{i+1} is q_i without x_i, renormalised. The whole q_i is subtracted from r_i before.
    """

    draws: ClassVar[tuple[str, ...]] = ("without_replacement",)

    def next_proposal(self, log_q: Tensor, token: Tensor) -> Tensor:
        return log_q.scatter(1, token, -torch.inf).log_softmax(-1)


class ChainRejection(WithReplacement):
    """Rejection sampling along a chain (Leviathan et al., arXiv 2211.17192, Alg. 1; Chen et al., 2302.01318, Alg. 2).

    One child x a node, accepted with probability min(1, p(x) / q(x)): Σ min(p, q) on the average.
    """

    draws: ClassVar[tuple[str, ...]] = ("with_replacement", "without_replacement", "hybrid")  # of one child, all alike
    one_child: ClassVar[bool] = True


class Hybrid(TrialRule):
    """The k - 1 most likely tokens S and one draw x from q outside of S (Hu et al., arXiv 2502.18779).

    x is tried first; if it is rejected, y is drawn from the residual, and descended to if it is in S. In all, a child
    is accepted with probability p(S) + Σ_{v not in S} min(p(v), q_rest(v)).
    """

    draws: ClassVar[tuple[str, ...]] = ("hybrid",)
    most_trials: ClassVar[int | None] = 1

    def step(self, tree: Tree, law: Law, node: Tensor, alive: Tensor, chance: PassNoise, level: int) -> Step:
        step = super().step(tree, law, node, alive, chance, level)
        child = torch.where(step.child > 0, step.child, child_with(tree, node, step.token))
        return Step(child, step.token, step.broken, step.draft_fault)

    def edges(self, tree: Tree, node_log_prob: Tensor, law: Law) -> Tensor:
        node = torch.arange(tree.token.shape[0], device=tree.token.device)
        p, _ = probabilities(law, node)
        trials = self.trials(tree, p, node)
        follows = trials.residual.gather(1, tree.token[tree.children[:, 1:]])  # only a child's place is read
        return to_children(tree, torch.cat([trials.chance, (1 - trials.chance) * follows], 1))


def to_children(tree: Tree, chance: Tensor) -> Tensor:
    """`[N+1]` of `chance [N+1, K]`, a value for every node's children: each child's own; 1 at the root."""
    edge = torch.ones(tree.token.shape[0], dtype=torch.float64, device=tree.token.device)
    edge[1:] = chance[tree.parent[1:], tree.rank[1:]]
    return edge


def normalised(weight: Tensor, otherwise: Tensor) -> Tensor:
    """Rows `[m, V]` that sum to 1; where nothing is left, which no rejection can come to, the row of `otherwise`."""
    total = weight.sum(-1, keepdim=True)
    return torch.where(total > 0, weight / total, otherwise)
