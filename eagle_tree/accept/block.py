"""Block verification: a chain is accepted as a whole as far as it can be (Sun et al., arXiv 2403.10444, Alg. 2)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from eagle_tree.accept.base import IMPOSSIBLE, Accepted, Rule, drawn_from, ended_at, probabilities
from eagle_tree.accept.trials import normalised
from eagle_tree.noise import GumbelRows
from eagle_tree.tree import Tree
from eagle_tree.warp import Law


class BlockVerification(Rule):
    """The longest block x_1 … x_i of a drawn chain that is accepted, each length tried on its own.

    With w_0 = 1 and w_i = min(1, w_{i-1}·p_{i-1}(x_i) / q_{i-1}(x_i)), the block of length i is accepted with
    probability h_i = s_i / (s_i + 1 - w_i), s_i = Σ (w_i·p_i - q_i)₊, and the whole chain with w_D. In all, at least i
    tokens are accepted with probability w_i: never less than by `ChainRejection`, which multiplies min(1, p/q). The
    token that follows is drawn from norm((w_i·p_i - q_i)₊), behind the whole chain from p_D.
    """

    draws: ClassVar[tuple[str, ...]] = ("with_replacement", "without_replacement", "hybrid")  # of one child, all alike
    one_child: ClassVar[bool] = True

    def accept(self, tree: Tree, law: Law, noise: GumbelRows, position: int) -> Accepted:
        chance = noise.for_pass(position)
        length, residual, broken, fault = self.lengths(tree, law)
        end = torch.zeros_like(tree.token[:1])
        for index in range(1, tree.n_nodes + 1):
            end = torch.where(chance.below(index, 0, length[index]), index, end)
        token = chance.draw_at(end, tree.n_nodes + 1, residual[end].log())
        return ended_at(tree, end, token, broken, fault)

    def lengths(self, tree: Tree, law: Law) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of the chain's blocks of 0 … N tokens: `h [N+1]`, the law of what follows `[N+1, V]`; broken; fault.

        Raises:
            ValueError: the tree is no chain.
        """
        if (tree.n_nodes if tree.max_children is None else tree.max_children) > 1:
            raise ValueError("block verification is of chains: a node of this tree may have more than one child")
        index = torch.arange(tree.n_nodes + 1, device=tree.token.device)  # of a chain, node i stands at depth i
        p, broken = probabilities(law, index)
        log_q, fault = drawn_from(tree, index, p.shape[-1])
        q, token = log_q.exp(), tree.token[1:, None]
        q[-1] = 0  # nothing was drawn behind the last node
        drawn_with = q[:-1].gather(1, token)[:, 0]
        fault = torch.where((fault[:-1] == 0) & (drawn_with == 0), IMPOSSIBLE, fault[:-1])
        weights = [p.new_ones(())]
        for ratio in (p[:-1].gather(1, token)[:, 0] / drawn_with).unbind():
            weights.append((weights[-1] * ratio).clamp(max=1))
        weight = torch.stack(weights)[:, None]
        rest = (weight * p - q).clamp(min=0)
        rest[-1] = p[-1]
        total = rest.sum(-1)
        h = total / (total + 1 - weight[:, 0])
        h[-1] = weight[-1, 0]
        fault = fault.max() if tree.n_nodes else tree.token[0] * 0
        # where p = q and w = 1, h is 0 / 0 and does not matter: the longer block is accepted
        return h.nan_to_num(0.0), normalised(rest, p), (broken & (weight[:, 0] != 0)).any(), fault

    def reach(self, tree: Tree, node_log_prob: Tensor, law: Law | None = None) -> Tensor:
        """`[N+1] f64`: node i is accepted if a block of at least i tokens is, 1 - Π_{j >= i} (1 - h_j)."""
        h, *_ = self.lengths(tree, law)
        reach = 1 - (1 - h).flip(0).cumprod(0).flip(0)
        reach[0] = 1
        return reach
