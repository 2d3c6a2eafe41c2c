"""Acceptance rules: pure functions of a tree, the target's law and keyed noise.

The rule here is *match* (DESIGN §4): EAGLE-2's candidates are the drafter's top-k, no randomness, so each
child's proposal is a point mass, and trying siblings one after the other against the residual accepts
child x with total probability exactly p(x). The whole rule is then: draw y from p once; if y is a child,
descend to it, otherwise y is the emitted token. No lossless rule accepts more on a tree that does not look
at the noise, since no rule can emit a prefix more often than the target does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_tree.noise import GumbelRows
from eagle_tree.tree import Tree
from eagle_tree.warp import Law


@dataclass(frozen=True)
class Accepted:
    """The walk over one tree. Tensors stay on the device; D is the tree's `max_depth`.

    Attributes:
        path: `[D+1] i64`, accepted node indices from the root, -1 behind the end.
        emitted: `[D+1] i64`, tokens drawn along the path, -1 behind the end; the last is the bonus token.
        n_accepted: `[] i64`, accepted draft nodes a (the root and the bonus token not counted).
        tried: `[N+1] bool`, the node's parent was accepted.
        accepted: `[N+1] bool`, True at the root.
        broken: `[] bool`, a law on the path had no finite largest score (NaN or infinite logits).
    """

    path: Tensor
    emitted: Tensor
    n_accepted: Tensor
    tried: Tensor
    accepted: Tensor
    broken: Tensor


def draw(law: Law, node: Tensor, gumbel: Tensor | None) -> tuple[Tensor, Tensor]:
    """One token `[1]` from the law at `node [1]` by the Gumbel-max trick, and whether the law is broken."""
    scores = law.scores(node)
    if not law.sampling.greedy:
        scores = scores + gumbel
    best, token = scores.max(-1)
    return token, ~best.isfinite().all()


class Match:
    """Draw y from the target's law; descend if y is a child, emit it if not (Chen & Leviathan with point masses).

    The token at absolute position t is `argmax(log p_t + g_t)`: it depends on neither drafter, tree nor
    policy. Lossless at every temperature.
    """

    def accept(self, tree: Tree, law: Law, noise: GumbelRows, position: int) -> Accepted:
        """Walk the tree from its root.

        Args:
            tree: the verified tree.
            law: the target's law at its nodes.
            noise: the sequence's Gumbel rows.
            position: absolute position of the first token that this pass emits (the root's plus 1).
        """
        root = torch.zeros(1, dtype=torch.int64, device=tree.token.device)
        node, alive = root, torch.ones_like(root, dtype=torch.bool)
        accepted = torch.zeros_like(tree.token, dtype=torch.bool)
        accepted[0] = True
        broken = torch.zeros((), dtype=torch.bool, device=root.device)
        path, emitted = [], []
        # Levels that the walk has left are computed and masked: stopping early would need a look at the device.
        for level in range(tree.max_depth + 1):
            gumbel = None if law.sampling.greedy else noise.row(position + level)
            token, bad = draw(law, node, gumbel)
            broken = broken | (bad & alive.all())
            path.append(torch.where(alive, node, -1))
            emitted.append(torch.where(alive, token, -1))
            child = (tree.parent == node) & (tree.token == token) & alive
            accepted = accepted | child
            alive = child.any(keepdim=True)
            node = torch.where(alive, child.long().argmax(keepdim=True), root)
        tried = accepted[tree.parent.clamp(min=0)]
        tried[0] = False
        return Accepted(torch.cat(path), torch.cat(emitted), accepted.sum() - 1, tried, accepted, broken)

    def reach(self, tree: Tree, node_log_prob: Tensor) -> Tensor:
        """`[N+1] f64`, P(v is accepted | this tree) = product of p along v's path; 1 at the root."""
        edge = node_log_prob.double().exp()
        parent = tree.parent.clamp(min=0)
        reach = torch.ones_like(edge)
        for _ in range(tree.max_depth):
            reach = reach[parent] * edge
        return reach


def surprisal(law: Law, path: Tensor, emitted: Tensor) -> Tensor:
    """The surprisal meter of a pass: sum over its emitted tokens y of -log p(y) - H(p), of mean zero.

    Args:
        path: `[D+1]` node indices, -1 behind the end; emitted: `[D+1]`, the token drawn at each.
    """
    log_probs = law.log_probs(path.clamp(min=0)).double()
    entropy = -(log_probs.exp() * log_probs.clamp(min=-1e30)).sum(-1)
    drawn = log_probs.gather(-1, emitted.clamp(min=0)[:, None]).squeeze(-1)
    return torch.where(path >= 0, -drawn - entropy, 0.0).sum()
