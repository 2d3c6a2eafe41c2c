"""When to stop drafting: wrappers that end another policy's growth early.

Those that look at confidences cost a device-to-host transfer a level.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eagle_tree.checks import check_counts, check_number
from eagle_tree.policy.base import Policy
from eagle_tree.tree import Draft, Frontier, GrowingTree


@dataclass(frozen=True)
class DepthStop(Policy):
    """Ends growth after `depth` levels, whatever the policy inside would do.

    Attributes:
        policy: the policy inside, which selects.
    """

    policy: Policy
    depth: int = 5

    def __post_init__(self) -> None:
        if not isinstance(self.policy, Policy):
            raise ValueError(f"{type(self).__name__}: policy={self.policy!r} must be a Policy, the one that is stopped")
        check_counts(self, "depth")

    @property
    def fixed_shape(self) -> bool:
        return self.policy.fixed_shape

    def covering(self) -> Policy:
        return replace(self, policy=self.policy.covering())

    def max_candidates(self) -> int:
        return self.policy.max_candidates()

    def stops(self, growing: GrowingTree, draft: Draft) -> bool:
        """Whether the level that `draft` made is the last."""
        return len(growing.levels) >= self.depth

    def frontier(self, growing: GrowingTree, draft: Draft | None) -> Frontier | None:
        if draft is not None and self.stops(growing, draft):
            return None
        return self.policy.frontier(growing, draft)

    def select(self, growing: GrowingTree) -> Tensor:
        return self.policy.select(growing)

    def check_machine(self, about: dict) -> None:
        self.policy.check_machine(about)

    def observe(self, row) -> None:
        self.policy.observe(row)


@dataclass(frozen=True)
class ConfidenceStop(DepthStop):
    """Ends growth when the level's best `beam` nodes are unlikely to hold the text (DDD, arXiv 2409.00142).

    Attributes:
        threshold: least sum of their path probabilities that is worth another level; depth: levels at most.
    """

    fixed_shape = False

    depth: int = 12
    beam: int = 10
    threshold: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "beam")
        check_number(self, "threshold", most=1)

    def stops(self, growing: GrowingTree, draft: Draft) -> bool:
        if super().stops(growing, draft):
            return True
        start, end = growing.levels[-1]
        mass = growing.score[start:end].topk(min(self.beam, end - start)).values.exp().sum()
        return bool(mass < self.threshold)


@dataclass(frozen=True)
class EntropyStop(DepthStop):
    """Ends growth when the drafter is unsure (SVIP, arXiv 2411.18462): the root of its entropy exceeds a threshold.

    Entropy bounds acceptance from below. On a tree it is the mean over the nodes just expanded, weighted by their
    path probabilities; on a chain it is the one node's, as in the paper.

    Attributes:
        threshold: of √entropy, in √nats; depth: levels at most.
    """

    fixed_shape = False

    depth: int = 12
    threshold: float = 1.2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "threshold")

    def stops(self, growing: GrowingTree, draft: Draft) -> bool:
        if super().stops(growing, draft):
            return True
        start, end = growing.levels[-1]
        expanded = growing.parent[start:end].view(draft.token.shape)[:, 0]
        weight = torch.softmax(growing.score[expanded], 0)
        return bool((weight * draft.entropy).sum().sqrt() > self.threshold)
