"""Any policy on calibrated confidences."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from eagle_tree import calibration as calibrations
from eagle_tree.policy.base import Policy
from eagle_tree.tree import Draft, Frontier, GrowingTree


@dataclass(frozen=True)
class Calibrated(Policy):
    """Lets the policy inside see acceptance probabilities in place of confidences.

    Attributes:
        policy: the policy inside. calibration: of single edges; path products follow.
    """

    policy: Policy
    calibration: calibrations.Calibration

    @classmethod
    def from_file(cls, policy: Policy, path: str) -> Calibrated:
        """With the calibration in a file."""
        return cls(policy, calibrations.load(path))

    @property
    def level_wise(self) -> bool:
        return self.policy.level_wise

    @property
    def fixed_shape(self) -> bool:
        return self.policy.fixed_shape

    def covering(self) -> Policy:
        return replace(self, policy=self.policy.covering())

    def max_candidates(self) -> int:
        return self.policy.max_candidates()

    def calibrated(self, growing: GrowingTree) -> GrowingTree:
        """The same pool with calibrated confidences and scores."""
        edge = self.calibration.edge(growing.log_conf, growing.depth, growing.rank).clamp(max=0)
        return replace(growing, log_conf=edge, score=growing.path_sums(edge))

    def frontier(self, growing: GrowingTree, draft: Draft | None) -> Frontier | None:
        return self.policy.frontier(self.calibrated(growing), draft)

    def select(self, growing: GrowingTree) -> Tensor:
        return self.policy.select(self.calibrated(growing))

    def check_machine(self, about: dict) -> None:
        """Also raises ValueError if the calibration was fitted for the other event, T = 0 or T > 0, or if `drafter`, a
        fingerprint, is not of the drafter whose confidences it is of."""
        if "greedy" in about and about["greedy"] != self.calibration.greedy:
            fitted, now = ("T = 0", "T > 0") if self.calibration.greedy else ("T > 0", "T = 0")
            raise ValueError(f"the calibration was fitted at {fitted}; at {now} acceptance is another event")
        drafter = self.calibration.drafter
        if None not in (drafter, about.get("drafter")) and about["drafter"] != drafter:
            raise ValueError(f"the calibration is of drafter {drafter}; here it is {about['drafter']}")
        self.policy.check_machine(about)

    def observe(self, row) -> None:
        self.policy.observe(row)
