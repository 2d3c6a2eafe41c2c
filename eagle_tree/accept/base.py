"""The seam of acceptance rules, and the walk that most of them share.

A rule is a pure function of a tree, the target's law at its nodes and the pass's noise. It is *lossless* if the
emitted text has the target's law whatever was drafted, provided that the children were drawn as the rule supposes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from eagle_tree.noise import GumbelRows, PassNoise
from eagle_tree.tree import SAMPLED, Draw, Tree
from eagle_tree.warp import Law

UNNORMALISED, IMPOSSIBLE, OUT_OF_ORDER = 1, 2, 3
DRAFT_FAULTS = {
    UNNORMALISED: "the drafter's probabilities do not sum to 1",
    IMPOSSIBLE: "the drafter gives no probability to a token that it drew",
    OUT_OF_ORDER: "the policy kept a later draw without one before it",
}
NORMALISED = 1e-3
"""How far from 1 the sum of a draft's q may be (single precision over a large vocabulary gives some 1e-5)."""


@dataclass(frozen=True)
class Accepted:
    """The walk over one tree. Tensors stay on the device; D is the tree's `max_depth`.

    Attributes:
        path: `[D+1] i64`, accepted node indices from the root, -1 behind the end.
        emitted: `[D+1] i64`, tokens of the path's children, then the one that follows the path, -1 behind the end.
        n_accepted: `[] i64`, accepted draft nodes a (the root and the bonus token not counted).
        tried: `[N+1] bool`, the node's parent was accepted.
        accepted: `[N+1] bool`, True at the root.
        broken: `[] bool`, a law that was looked at had no finite largest score (NaN or infinite logits).
        draft_fault: `[] i64`, 0, or what was wrong with the draft where it was looked at: a key of `DRAFT_FAULTS`.
    """

    path: Tensor
    emitted: Tensor
    n_accepted: Tensor
    tried: Tensor
    accepted: Tensor
    broken: Tensor
    draft_fault: Tensor


@dataclass(frozen=True)
class Step:
    """What happens at one node.

    Attributes:
        child: `[1] i64`, the child that is accepted; 0 for none.
        token: `[1] i64`, the token that is emitted: the child's, or one that ends the walk.
        broken: `[] bool`; draft_fault: `[] i64`, as in `Accepted`.
    """

    child: Tensor
    token: Tensor
    broken: Tensor
    draft_fault: Tensor


class Rule:
    """The seam. A subclass overrides `step` and `edges`, or, if it looks at more than one node at a time, `accept` and
    `reach`.

    Attributes:
        lossless: whether the emitted text has the target's law. A lossy rule's is another.
        draws: the kinds of draft (`tree.DRAWS`) that it is right for; the first is the one it is made for.
        one_child: whether it verifies chains only.
    """

    lossless: ClassVar[bool] = True
    draws: ClassVar[tuple[str, ...]]
    one_child: ClassVar[bool] = False

    @property
    def default_draw(self) -> Draw:
        """The kind of draft that the rule is made for."""
        return Draw(self.draws[0])

    @property
    def reads_q(self) -> bool:
        """Whether it supposes that children were drawn from the q that travels with the tree."""
        return set(self.draws) <= set(SAMPLED)

    def accept(self, tree: Tree, law: Law, noise: GumbelRows, position: int) -> Accepted:
        """Walk the tree from its root.

        Args:
            tree: the verified tree.
            law: the target's law at its nodes.
            noise: the sequence's noise.
            position: absolute position of the first token that this pass emits (the root's plus 1).
        """
        chance = noise.for_pass(position)
        index = torch.arange(tree.token.shape[0], device=tree.token.device)
        node = index[:1]
        alive = torch.ones_like(node, dtype=torch.bool)
        accepted = index == 0
        broken, fault = torch.zeros_like(alive[0]), torch.zeros_like(index[0])
        path, emitted = [], []
        # Levels that the walk has left are computed and masked: stopping early would need a look at the device.
        for level in range(tree.max_depth + 1):
            step = self.step(tree, law, node, alive, chance, level)
            broken = broken | (step.broken & alive[0])
            fault = torch.where(alive[0] & (fault == 0), step.draft_fault, fault)
            path.append(torch.where(alive, node, -1))
            emitted.append(torch.where(alive, step.token, -1))
            alive = alive & (step.child > 0)
            accepted = accepted | ((index == step.child) & alive)
            node = torch.where(alive, step.child, index[:1])
        return arrived(tree, torch.cat(path), torch.cat(emitted), accepted, broken, fault)

    def step(self, tree: Tree, law: Law, node: Tensor, alive: Tensor, chance: PassNoise, level: int) -> Step:
        """Accept a child of `node [1]`, which stands at that level, or draw the token that ends the walk.

        Where `alive [1]` is False the walk has ended before, and what is returned is not looked at.
        """
        raise NotImplementedError

    def reach(self, tree: Tree, node_log_prob: Tensor, law: Law | None = None) -> Tensor:
        """`[N+1] f64`, P(v is accepted | this tree), over all that the rule draws; 1 at the root.

        Args:
            node_log_prob: `[N+1]`, the target's log-probability of each node's token after its parent's path.
            law: the target's law at the nodes; rules with residuals look at all of it.
        """
        edge = self.edges(tree, node_log_prob, law)
        parent = tree.parent.clamp(min=0)
        reach = torch.ones_like(edge)
        for _ in range(tree.max_depth):
            reach = reach[parent] * edge
        return reach

    def edges(self, tree: Tree, node_log_prob: Tensor, law: Law | None) -> Tensor:
        """`[N+1] f64`, P(v is accepted | its parent is, and this tree); 1 at the root."""
        raise NotImplementedError


def arrived(
    tree: Tree, path: Tensor, emitted: Tensor, accepted: Tensor, broken: Tensor, draft_fault: Tensor
) -> Accepted:
    """The result of a walk: `path, emitted [D+1]`, `accepted [N+1]`."""
    tried = accepted[tree.parent.clamp(min=0)]
    tried[0] = False
    return Accepted(path, emitted, accepted.sum() - 1, tried, accepted, broken, draft_fault)


def ended_at(tree: Tree, end: Tensor, token: Tensor, broken: Tensor, draft_fault: Tensor) -> Accepted:
    """The result of a walk to the node `end [1]`, followed by `token [1]`."""
    path = tree.paths[end[0]]
    follows = torch.nn.functional.pad(path[1:], (0, 1), value=-1)
    emitted = torch.where(follows >= 0, tree.token[follows.clamp(min=0)], -1)
    emitted = emitted.scatter(0, tree.depth[end], token)
    return arrived(tree, path, emitted, tree.mask[end[0]].clone(), broken, draft_fault)


def probabilities(law: Law, node: Tensor) -> tuple[Tensor, Tensor]:
    """The target's law `[m, V] f64` at nodes `[m]`, one-hot at temperature 0, and whether each is broken, `[m]`."""
    scores = law.scores(node).double()
    best, token = scores.max(-1)
    p = one_hot(token, scores.shape[-1]) if law.sampling.greedy else scores.softmax(-1)
    return p, ~best.isfinite()


def one_hot(token: Tensor, vocab_size: int) -> Tensor:
    """`[m, V] f64` of tokens `[m]`."""
    return torch.nn.functional.one_hot(token, vocab_size).double()


def drawn_from(tree: Tree, node: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """What the children of nodes `[m]` were drawn from: log q `[m, V] f64`, normalised, and the draft's fault `[m]`.

    Raises:
        ValueError: the tree has draft nodes, but says nothing about their distribution.
    """
    if tree.drawn is None:
        if tree.n_nodes:
            raise ValueError("the tree's nodes were not drawn by chance: this rule needs their distribution q")
        return torch.full((node.shape[0], vocab_size), -torch.inf, dtype=torch.float64, device=node.device), node * 0
    log_q = tree.drawn.at(node, vocab_size)
    total = log_q.logsumexp(-1, keepdim=True)
    sound = total.squeeze(-1).exp().sub(1).abs() <= NORMALISED  # False for NaN
    fault = torch.where((tree.drawn.row[node] >= 0) & ~sound, UNNORMALISED, 0)
    if tree.drawn.in_order is not None:
        fault = torch.where(tree.drawn.in_order, fault, OUT_OF_ORDER)
    return torch.where(total > -torch.inf, log_q - total, log_q), fault


def surprisal(law: Law, path: Tensor, emitted: Tensor) -> Tensor:
    """The surprisal meter of a pass: sum over its emitted tokens y of -log p(y) - H(p), of mean zero.

    Args:
        path: `[D+1]` node indices, -1 behind the end; emitted: `[D+1]`, the token drawn at each.
    """
    log_probs = law.log_probs(path.clamp(min=0)).double()
    entropy = -(log_probs.exp() * log_probs.clamp(min=-1e30)).sum(-1)
    drawn = log_probs.gather(-1, emitted.clamp(min=0)[:, None]).squeeze(-1)
    return torch.where(path >= 0, -drawn - entropy, 0.0).sum()
