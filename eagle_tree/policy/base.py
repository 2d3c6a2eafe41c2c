"""The seam of tree policies: which nodes to expand, which to keep.

A policy answers two questions about the growing candidate pool and never touches a model:

* `frontier(growing, draft)`: which nodes to expand next, with how many candidates each; None ends growth;
* `select(growing)`: the pool indices that become the draft tree, closed under parents.

`observe(row)` tells those that learn online how a pass went. `budget` counts draft nodes without the
root; EAGLE's `total_token` and SGLang's `num_draft_tokens` count it: total_token = budget + 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from eagle_tree.tree import Draft, Frontier, GrowingTree


class Policy:
    """The seam. A subclass overrides `frontier` and `select`; `observe` where it learns.

    Attributes:
        fixed_shape: whether the sizes of all frontiers and of the tree are known beforehand: the policy looks at no
            value on the host and learns nothing. Replay runs such a policy at many positions in one batch. A subclass
            with a `frontier`, `select` or `observe` of its own says it anew.
    """

    fixed_shape = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if {"frontier", "select", "observe"} & vars(cls).keys() and "fixed_shape" not in vars(cls):
            cls.fixed_shape = False

    def max_candidates(self) -> int:
        """The most candidates it asks of one node: at most the drafter's vocabulary; 0 means that it never drafts."""
        return 0

    def frontier(self, growing: GrowingTree, draft: Draft | None) -> Frontier | None:
        """The next nodes to expand, or None. `draft` answered the previous frontier (None at the start)."""
        raise NotImplementedError

    def select(self, growing: GrowingTree) -> Tensor:
        """Pool indices `[N] i64` to keep (the root excluded), closed under parents."""
        raise NotImplementedError

    def covering(self) -> Policy:
        """A policy whose requests to the drafter include all that this one may make, whatever it has learned by then:
        what a trace records for it. Itself, unless it learns."""
        return self

    def check_machine(self, about: dict) -> None:
        """Raise ValueError if the policy was made for another machine: `about` names device, dtype and threads."""

    def observe(self, row) -> None:
        """See the finished pass (a `PassRow`)."""


@dataclass(frozen=True)
class Autoregressive(Policy):
    """The empty tree: one target forward, one token. The baseline of every speed-up, on the same engine."""

    fixed_shape = True

    def frontier(self, growing: GrowingTree, draft: Draft | None) -> None:
        return None

    def select(self, growing: GrowingTree) -> Tensor:
        return growing.token.new_empty(0)
