"""The best tree that a policy could have kept, had it known the target's own probabilities."""

from __future__ import annotations

from torch import Tensor

from eagle_tree.tree import GrowingTree, top_nodes


def target_score(growing: GrowingTree, log_prob: Tensor) -> Tensor:
    """`[M+1] f64`, log of the target's probability that a node is reached under the match rule.

    Args:
        log_prob: `[M+1]`, the target's log-probability of each pool node's token after its parent's path (DESIGN §4).
    """
    return growing.path_sums(log_prob.double())


def hindsight(growing: GrowingTree, log_prob: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """The p-oracle: the closed subtree of `budget` pool nodes with the most expected tokens under the target.

    Reach is a product along the path, so the best nodes by reach are closed and no other subtree has a larger sum: it
    bounds the expected tokens of every policy that selects from this pool.

    Returns:
        pool indices `[N]`, and the expected tokens `[] f64`, bonus included.
    """
    score = target_score(growing, log_prob)
    node = top_nodes(growing, score, budget)
    return node, 1 + score[node].exp().sum()
