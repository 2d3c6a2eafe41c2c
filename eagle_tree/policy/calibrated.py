"""Any policy on calibrated confidences."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from eagle_tree import calibration as calibrations
from eagle_tree.policy.base import Policy
from eagle_tree.tree import Draft, Frontier, GrowingTree


@dataclass
class Calibrated(Policy):
    """Lets the policy inside see acceptance probabilities in place of confidences. Every level is mapped once.

    Attributes:
        policy: the policy inside. calibration: of single edges; path products follow.
        seen: this pass's pool as the policy inside saw it last.
    """

    policy: Policy
    calibration: calibrations.Calibration
    seen: GrowingTree | None = field(init=False, default=None, repr=False, compare=False)

    @classmethod
    def from_file(cls, policy: Policy, path: str) -> Calibrated:
        """With the calibration in a file."""
        return cls(policy, calibrations.load(path))

    @property
    def fixed_shape(self) -> bool:
        return self.policy.fixed_shape

    def covering(self) -> Policy:
        return replace(self, policy=self.policy.covering())

    def max_candidates(self) -> int:
        return self.policy.max_candidates()

    def calibrated(self, growing: GrowingTree, before: GrowingTree | None = None) -> GrowingTree:
        """The same pool with calibrated confidences and scores; `before`, with fewer levels, is calibrated already."""
        before = before or GrowingTree.from_root(growing.token[:1])
        new = growing.levels[len(before.levels) :]
        if not new:
            return before
        log_conf, score, rank = before.log_conf, before.score, growing.rank
        for start, end in new:
            level = slice(start, end)
            edge = self.calibration.edge(growing.log_conf[level], growing.depth[level], rank[level]).clamp(max=0)
            log_conf = torch.cat([log_conf, edge])
            score = torch.cat([score, score[growing.parent[level]] + edge])
        return replace(growing, log_conf=log_conf, score=score)

    def frontier(self, growing: GrowingTree, draft: Draft | None) -> Frontier | None:
        self.seen = self.calibrated(growing, None if draft is None else self.seen)  # no draft: a pass begins
        return self.policy.frontier(self.seen, draft)

    def select(self, growing: GrowingTree) -> Tensor:
        seen, self.seen = self.calibrated(growing, self.seen), None
        return self.policy.select(seen)

    def check_machine(self, about: dict) -> None:
        """Also raises ValueError if the calibration was fitted for the other event, T = 0 or T > 0, or if `drafter`, a
        fingerprint, is not of the drafter whose confidences it is of."""
        if "greedy" in about and about["greedy"] != self.calibration.greedy:
            fitted, now = ("T = 0", "T > 0") if self.calibration.greedy else ("T > 0", "T = 0")
            raise ValueError(f"the calibration was fitted at {fitted}; at {now} acceptance is another event")
        drafter = self.calibration.drafter
        if None not in (drafter, about.get("drafter")) and about["drafter"] != drafter:
            raise ValueError(
                f"the calibration is of drafter {drafter}; here it is {about['drafter']}: fit one on a run of this "
                "drafter with `eagle-tree calibrate nodes=RUN`"
            )
        self.policy.check_machine(about)

    def observe(self, row) -> None:
        self.policy.observe(row)
