"""The rate-optimal tree: the most tokens per second on this machine, pass by pass (DESIGN §4)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from eagle_tree.cost import CostTable
from eagle_tree.policy.base import Policy, check_at_least_one
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
    One device-to-host transfer a level, and one for n*.

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
    last_value: float = field(init=False, default=0.0)
    last_mass: float = field(init=False, default=0.0)
    paid: Average = field(init=False)
    promised: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        check_at_least_one(self, "budget", "top_k", "depth")
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
        return self.cost.pass_seconds(0, 0, 1, context)

    @property
    def best_rate(self) -> float:
        """ρ*, tokens per second: what was reached of late, and never less than autoregressive decoding reaches."""
        return max(self.rate.value, 1 / self.alone(self.context))

    def price(self, device: torch.device) -> Tensor:
        """`[budget + 1] f64`: tokens that verifying n draft nodes must earn, ρ*·(T(n+1) - T(1))."""
        seconds = torch.from_numpy(self.cost.verify(self.context)[1 : self.budget + 2])
        return (self.best_rate * (seconds - seconds[0])).to(device)

    def best_value(self, growing: GrowingTree) -> tuple[Tensor, Tensor, Tensor]:
        """The pool's best nodes in order, the best size, and what the tree of that size is worth in tokens."""
        node = top_nodes(growing, growing.score, self.budget)
        earned = self.honesty.value * growing.score[node].double().exp().cumsum(0)
        worth = torch.cat([earned.new_zeros(1), earned]) - self.price(node.device)[: node.shape[0] + 1]
        value, size = worth.max(0)
        return node, size, value

    def frontier(self, growing: GrowingTree, draft: Draft | None) -> Frontier | None:
        level = len(growing.levels)
        if level == 0:
            self.last_value, self.last_mass = 0.0, 1.0
            if self.silence > 0:
                return None
            return Frontier(growing.token.new_zeros(1), self.top_k)
        start, end = growing.levels[-1]
        best = start + stable_topk(growing.score[start:end], min(self.top_k, end - start))[1].sort().values
        mass = growing.score[best].double().exp().sum()
        value, mass = torch.stack([self.best_value(growing)[2], mass]).tolist()  # the level's transfer
        self.added[level - 1].add(value - self.last_value, self.last_mass)
        self.last_value, self.last_mass = value, mass
        step = self.best_rate * self.cost.draft(self.top_k, self.context)
        if level == self.depth or self.added[level].value * mass <= step:
            return None
        return Frontier(best, self.top_k)

    def select(self, growing: GrowingTree) -> Tensor:
        if not growing.levels:
            return growing.token.new_empty(0)
        node, size, _ = self.best_value(growing)
        promised = growing.score[node].double().exp().cumsum(0)
        size, self.promised = torch.stack([size, promised[(size - 1).clamp(min=0)]]).tolist()  # n*'s transfer
        return node[: int(size)]

    def observe(self, row) -> None:
        """Learn from a finished pass."""
        self.context = row.context_length + row.emitted
        seconds = self.cost.pass_seconds(row.n_nodes, row.draft_steps, self.top_k, row.context_length)
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
