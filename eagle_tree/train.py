"""The training loop: one for every kind of head, for one process or many.

Under `accelerate launch` each process takes its share of every batch. Losses are sums over positions divided by
counts over *all* processes, so the gradient, and with it the loss curve, is that of one process with the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from eagle_tree.checks import check_counts
from eagle_tree.features import FeatureStore
from eagle_tree.files import write_state
from eagle_tree.objective import Objective, Sums, make_batch
from eagle_tree.target import Target, bfloat16_is_faster

PRECISIONS = ("auto", "float32", "bfloat16")
FEWEST_LEARNT = 8


@dataclass(frozen=True)
class TrainSettings:
    """How a head is trained.

    Attributes:
        steps: optimiser steps; the cosine schedule ends there.
        sequences_per_step: batch size in sequences, over all processes.
        max_length: sequences are cut there, in tokens.
        learning_rate, warmup_steps, weight_decay, clip: of AdamW (betas 0.9, 0.95), with cosine decay to 2 %.
        learnt_share: share of the learnt positions that one step draws: over a large vocabulary, laws and logits are
            the dearest part, and neighbouring positions have much in common.
        precision: multiply in float32 or bfloat16 (weights stay fp32); auto times both.
        seed: of the data order and of feature noise.
    """

    steps: int = 3000
    sequences_per_step: int = 2
    max_length: int = 384
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    weight_decay: float = 0.0
    clip: float = 0.5
    learnt_share: float = 1.0
    precision: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        check_counts(self, "steps", "sequences_per_step", "max_length")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate={self.learning_rate} must be above 0")
        if not 0 < self.learnt_share <= 1:
            raise ValueError(f"learnt_share={self.learnt_share} is outside 0…1 (0 excluded)")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision={self.precision!r} is not one of {', '.join(PRECISIONS)}")

    def rate(self, step: int) -> float:
        """Learning rate of an optimiser step: linear warm-up, cosine decay to 2 %."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


@dataclass(frozen=True)
class Example:
    """A text to learn from.

    Attributes:
        token: `[T]`; learnt: `[T] bool`, whether the target's law *after* a position is learnt; index: which sequence
        of the corpus it is.
    """

    token: Tensor
    learnt: Tensor
    index: int = 0


def examples(sequences: list, max_length: int, ending: frozenset[int] = frozenset()) -> list[Example]:
    """Corpus sequences as examples: the law is learnt wherever the next token is the target's.

    That is from the prompt's last token on, up to but not after a token of `ending`. Sequences with hardly any
    answer within `max_length` are left out.
    """
    made = []
    for index, sequence in enumerate(sequences):
        token = torch.tensor([*sequence.prompt_ids, *sequence.answer_ids])[:max_length]
        learnt = torch.arange(token.shape[0]) >= len(sequence.prompt_ids) - 1
        if int(token[-1]) in ending:
            learnt[-1] = False
        if int(learnt.sum()) > FEWEST_LEARNT:
            made.append(Example(token, learnt, index))
    return made


def drawn(learnt: Tensor, share: float, seed: int) -> Tensor:
    """Of the positions `learnt [T]`, each kept with probability `share`: a function of the text and its seed alone."""
    if share == 1:
        return learnt
    return learnt & (torch.rand(learnt.shape, generator=torch.Generator().manual_seed(seed)) < share)


def token_counts(sequences: list, vocab_size: int) -> Tensor:
    """How often the answers of a corpus say each token, `[V] i64`."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for sequence in sequences:
        counts += torch.bincount(torch.tensor(sequence.answer_ids), minlength=vocab_size)
    return counts


def batches(data: list[Example], settings: TrainSettings, start: int) -> Iterator[list[Example]]:
    """Shuffled batches from optimiser step `start` on: a pure function of (seed, step).

    Within stretches of 16 batches the shuffled texts are sorted by length, so that batches hold little padding.
    """
    size = settings.sequences_per_step
    per_epoch = max(1, len(data) // size)
    lengths = torch.tensor([example.token.shape[0] for example in data])
    order, epoch_of_order = None, -1
    for step in range(start, settings.steps):
        epoch, place = divmod(step, per_epoch)
        if epoch != epoch_of_order:
            generator = torch.Generator().manual_seed(settings.seed * 7919 + epoch)
            shuffled = torch.randperm(len(data), generator=generator)[: per_epoch * size]
            alike = torch.cat([part[lengths[part].argsort(stable=True)] for part in shuffled.split(16 * size)])
            order = alike.view(per_epoch, -1)[torch.randperm(per_epoch, generator=generator)]
            epoch_of_order = epoch
        yield [data[i] for i in order[place].tolist()]


@dataclass(frozen=True)
class Step:
    """What one optimiser step did, over all processes.

    Attributes:
        loss: agreement, acceptance: by depth; the share of first choices that are the law's, and Σ min(p, q).
    """

    loss: float
    agreement: list[float]
    acceptance: list[float]

    def row(self, step: int) -> dict[str, float]:
        """An entry of the metrics table."""
        columns = {"agreement": self.agreement, "acceptance": self.acceptance}
        by_depth = {f"{name}_{depth}": value for name, values in columns.items() for depth, value in enumerate(values)}
        return {"step": step, "loss": self.loss, **by_depth}


class Trainer:
    """The training state: objective, optimiser, step. `save` and `load` hold everything, so a run resumes.

    Args:
        objective: the head and its loss; store: what the target says along a text.
        accelerator: the processes that share the work; None for this one alone.
    """

    def __init__(
        self,
        target: Target,
        objective: Objective,
        settings: TrainSettings,
        store: FeatureStore | None = None,
        accelerator: Accelerator | None = None,
    ):
        self.target = target
        self.head = objective.head.train().requires_grad_(True)
        self.settings = settings
        self.store = store or FeatureStore(target, objective.taps)
        self.accelerator = accelerator or Accelerator(cpu=target.device.type == "cpu", device_placement=False)
        if settings.sequences_per_step < self.accelerator.num_processes:
            raise ValueError(
                f"sequences_per_step={settings.sequences_per_step} is less than the {self.accelerator.num_processes} "
                "processes that share a step"
            )
        self.depth_weight = torch.tensor(objective.depth_weight, device=target.device)
        shortest = len(objective.depth_weight) + FEWEST_LEARNT
        if settings.max_length <= shortest:
            raise ValueError(f"max_length={settings.max_length} must exceed the objective's depths + 8 = {shortest}")
        self.objective = self.accelerator.prepare_model(objective, device_placement=False)
        self.optimizer = torch.optim.AdamW(
            self.head.parameters(),
            settings.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=settings.weight_decay,
            fused=True,  # a quarter of the time on a CPU
        )
        self.precision = settings.precision
        if self.precision == "auto":
            self.precision = "bfloat16" if bfloat16_is_faster(target.device) else "float32"
        self.step = 0

    def train_step(self, chosen: list[Example]) -> Step:
        """One optimiser step on a batch of all processes, of which this one takes its share.

        Raises:
            FloatingPointError: the loss is NaN or infinite; names the batch. The weights are those of the step before.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.rate(self.step)
        share = slice(self.accelerator.process_index, None, self.accelerator.num_processes)
        seeds = [(self.settings.seed * 1_000_003 + self.step) * 4096 + place for place in range(len(chosen))]
        mine = chosen[share]
        batch = make_batch(
            [example.token for example in mine],
            [drawn(example.learnt, self.settings.learnt_share, seed) for example, seed in zip(mine, seeds[share])],
            [self.store.read(example.token) for example in mine],
            seeds[share],
        )
        with torch.autocast(self.target.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
            sums: Sums = self.objective(batch)
        table = torch.stack([sums.loss.detach(), sums.agreed, sums.overlap, sums.count]).double()
        table = self.accelerator.reduce(table, "sum")  # over the processes
        count = table[3].clamp(min=1)
        loss = (self.depth_weight * table[0] / count).sum().item()
        if not math.isfinite(loss):
            indices = ", ".join(str(example.index) for example in chosen)
            raise FloatingPointError(f"the loss is {loss} at step {self.step}, on corpus sequences {indices}")
        # gradients are averaged over the processes: times their number, they add up
        mean = (self.depth_weight * sums.loss / count.to(sums.loss.dtype)).sum() * self.accelerator.num_processes
        self.accelerator.backward(mean)
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), self.settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return Step(loss, (table[1] / count).tolist(), (table[2] / count).tolist())

    def save(self, path: Path, about: dict[str, Any] | None = None) -> None:
        """Write the state; one process does. `about` is kept beside it, for `load` to compare."""
        state = {
            "head": self.head.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "precision": self.precision,
            "about": self.about(about),
        }
        if self.accelerator.is_main_process:
            write_state(path, state)
        self.accelerator.wait_for_everyone()

    def load(self, path: Path, about: dict[str, Any] | None = None) -> None:
        """Go on from a saved state.

        Raises:
            ValueError: it was saved under other settings (`steps` apart, so that a run can be prolonged) or another
                `about`; the file is damaged.
        """
        try:
            state = torch.load(path, map_location=self.target.device, weights_only=True)
            then, now = state["about"], self.about(about)
        except Exception as error:  # torch and pickle raise their own kinds
            raise ValueError(f"{path} is not a training state of this version: {error}") from error
        different = [f"{name}: {then.get(name)} then, {now[name]} now" for name in now if then.get(name) != now[name]]
        if different:
            raise ValueError(f"{path} was trained otherwise ({'; '.join(different)}); name another folder")
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.precision = state["step"], state["precision"]

    def about(self, more: dict[str, Any] | None) -> dict[str, Any]:
        """What a resumed run must share with the run that it resumes."""
        settings = {name: value for name, value in asdict(self.settings).items() if name not in ("steps", "precision")}
        return {**settings, **(more or {})}
