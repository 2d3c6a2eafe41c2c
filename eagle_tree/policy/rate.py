"""The rate-optimal tree: the most tokens per second on this machine, pass by pass (DESIGN §4)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from eagle_tree.checks import check_counts, check_flag
from eagle_tree.cost import CostTable
from eagle_tree.policy.base import Policy
from eagle_tree.policy.dynamic import Eagle2
from eagle_tree.policy.stops import DepthStop
from eagle_tree.tree import Draft, Frontier, GrowingTree, stable_topk, top_nodes

FIRST_SILENCE = 8
LONGEST_SILENCE = 512
MEMORY = 64
"""Passes over which averages forget."""


@dataclass
class Average:
    """Σ numerator / Σ denominator, old terms fading over `MEMORY`; begins at `prior` with the weight of some terms."""

    numerator: float
    denominator: float

    @classmethod
    def prior(cls, value: float, weight: float) -> Average:
        return cls(value * weight, weight)

    def add(self, numerator: float, denominator: float) -> None:
        keep = 1 - 1 / MEMORY
        self.numerator = keep * self.numerator + numerator
        self.denominator = keep * self.denominator + denominator

    @property
    def value(self) -> float:
        return self.numerator / self.denominator


@dataclass(frozen=True)
class Judged:
    """A pool and the best tree in it.

    Attributes:
        node: the pool's best nodes in order; size: how many of them are kept; value: what that tree is worth in tokens.
        promised: what its confidences say it yields.
        frontier: the last level's best nodes, in pool order; mass: the sum of their path probabilities.
    """

    pool: GrowingTree
    node: Tensor
    frontier: Tensor
    size: int
    value: float
    promised: float
    mass: float


@dataclass
class RateOptimal(Policy):
    """Chooses depth and size of every tree to maximise long-run tokens per second.

    If passes are exchangeable, renewal reward says: long-run tokens per second ρ = E[tokens] / E[seconds] is largest
    when every pass maximises E[tokens] - ρ*·seconds, with ρ* the optimum itself (Dinkelbach). So

    * *size*: with scores s₁ ≥ s₂ ≥ … of the pool, n* = argmax over all n of Σ_{i≤n} s_i - ρ*·T(n+1), T measured; T has
      stairs, so every n is tried;
    * *depth*: another level is drafted while what it will add is worth a drafter step, ρ*·t_d. What it adds is the
      frontier's mass times a learnt share: what levels of that depth added to the best value before, per mass;
    * *ρ\\**: tokens over modelled seconds of the passes so far, old ones fading;
    * *back-off*: where not even the root's candidates are worth a step, the pass has no tree and costs no drafter. The
      drafter is asked again after a silence that doubles with every probe that did not pay.

    Optimal when: passes are exchangeable (where one ends does not change what follows); the drafter's path products,
    times one learnt factor (accepted over promised), are the acceptance probabilities; times are those of the table.
    Learns from `observe` alone, and takes times from the table, never from a clock: replayed, it decides the same.
    One device-to-host transfer a level.

    Attributes:
        cost: the machine's table; budget: the largest tree.
        top_k: nodes expanded per level and candidates of each; depth: levels at most.
        other_machine: use a table that was measured elsewhere.
    """

    cost: CostTable
    budget: int = 59
    top_k: int = 10
    depth: int = 8
    other_machine: bool = False
    rate: Average = field(init=False)
    honesty: Average = field(init=False)
    added: list[Average] = field(init=False)
    silence: int = field(init=False, default=0)
    next_silence: int = field(init=False, default=FIRST_SILENCE)
    context: int = field(init=False, default=0)
    judged: Judged | None = field(init=False, default=None)
    paid: Average = field(init=False)
    promised: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        check_counts(self, "budget", "top_k", "depth")
        check_flag("RateOptimal: other_machine", self.other_machine)
        if self.budget + 1 > self.cost.largest_n:
            raise ValueError(
                f"RateOptimal: budget={self.budget} needs verify times up to {self.budget + 1} positions; the cost "
                f"table ends at {self.cost.largest_n}"
            )
        alone = self.alone(0)
        self.rate = Average.prior(1 / alone, alone)  # one pass of autoregressive decoding
        self.paid = Average.prior(1.2 / alone, 8 * alone)  # a drafter is given some passes to show what it is worth
        self.honesty = Average.prior(1.0, 2.0)
        self.added = [Average.prior(0.7, 1.0) for _ in range(self.depth)]

    @classmethod
    def from_folder(cls, cost: str | CostTable, **fields) -> RateOptimal:
        """With the cost table in a folder, or a table."""
        return cls(cost if isinstance(cost, CostTable) else CostTable.load(cost), **fields)

    def covering(self) -> Policy:
        """Every level that may be drafted, whatever a level turns out to be worth: EAGLE-2's growth."""
        return DepthStop(Eagle2(self.budget, self.top_k, self.depth), self.depth)

    def check_machine(self, about: dict) -> None:
        if not self.other_machine:
            self.cost.check_machine(about)

    def max_candidates(self) -> int:
        return self.top_k

    def alone(self, context: int) -> float:
        """Seconds of a pass of autoregressive decoding."""
        return float(self.cost.pass_seconds(0, 0, 0, context))

    @property
    def best_rate(self) -> float:
        """ρ*, tokens per second: what was reached of late, and never less than autoregressive decoding reaches."""
        return max(self.rate.value, 1 / self.alone(self.context))

    def price(self, device: torch.device) -> Tensor:
        """`[budget + 1] f64`: tokens that verifying n draft nodes must earn, ρ*·(T(n+1) - T(1))."""
        seconds = torch.from_numpy(self.cost.verify(self.context)[1 : self.budget + 2])
        return (self.best_rate * (seconds - seconds[0])).to(device)

    def judge(self, growing: GrowingTree) -> Judged:
        """The best tree of a pool with at least one level; `select` finds what the last `frontier` worked out."""
        if self.judged is not None and self.judged.pool is growing:
            return self.judged
        node = top_nodes(growing, growing.score, self.budget)
        promised = growing.score[node].double().exp().cumsum(0)
        promised = torch.cat([promised.new_zeros(1), promised])
        worth = self.honesty.value * promised - self.price(node.device)[: node.shape[0] + 1]
        value, size = worth.max(0)
        start, end = growing.levels[-1]
        frontier = start + stable_topk(growing.score[start:end], min(self.top_k, end - start))[1].sort().values
        mass = growing.score[frontier].double().exp().sum()
        size, *numbers = torch.stack([size.double(), value, promised[size], mass]).tolist()  # the level's transfer
        return Judged(growing, node, frontier, int(size), *numbers)

    def frontier(self, growing: GrowingTree, draft: Draft | None) -> Frontier | None:
        level = len(growing.levels)
        if level == 0:
            self.judged = None
            return Frontier(growing.token.new_zeros(1), self.top_k) if self.silence <= 0 else None
        value, mass = (0.0, 1.0) if self.judged is None else (self.judged.value, self.judged.mass)
        self.judged = self.judge(growing)
        self.added[level - 1].add(self.judged.value - value, mass)
        step = self.best_rate * self.cost.draft(self.top_k, self.context)
        if level == self.depth or self.added[level].value * self.judged.mass <= step:
            return None
        return Frontier(self.judged.frontier, self.top_k)

    def select(self, growing: GrowingTree) -> Tensor:
        if not growing.levels:
            return growing.token.new_empty(0)
        judged = self.judge(growing)
        self.promised = judged.promised
        return judged.node[: judged.size]

    def observe(self, row) -> None:
        """Learn from a finished pass."""
        self.context = row.context_length + row.emitted
        seconds = self.cost.pass_seconds(row.n_nodes, row.draft_steps, row.expanded, row.context_length)
        self.rate.add(row.accepted + 1, seconds)
        if row.draft_steps == 0:
            self.silence -= 1
            return
        if row.n_nodes:
            self.honesty.add(row.accepted, self.promised)
        self.paid.add(row.accepted + 1, seconds)
        alone = self.alone(row.context_length)
        if (row.accepted + 1) * alone >= seconds:  # this pass paid
            self.next_silence = FIRST_SILENCE
        if self.paid.value * alone < 1:
            self.silence, self.next_silence = self.next_silence, min(2 * self.next_silence, LONGEST_SILENCE)
