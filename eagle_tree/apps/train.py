"""eagle-tree train: an EAGLE-3 head for a target, from its corpus. Resumes from the last checkpoint."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from omegaconf import DictConfig
from tqdm import tqdm

from eagle_tree import corpus, plots
from eagle_tree.apps import common
from eagle_tree.checkpoint import save_eagle
from eagle_tree.train import Trainer, batches, examples, frequent_tokens, initial_head


def main(arguments: list[str]) -> int:
    """Entry point of the verb."""
    return common.run_verb("train", train, arguments)


def train(config: DictConfig) -> dict[str, Any]:
    """Train to `training.steps`, then write the head into `folder`."""
    settings = common.build(config.training)()
    folder = Path(config.folder)
    if config.save_every < 1:
        raise ValueError(f"save_every={config.save_every} must be at least 1")
    target = common.build_target(config.target)
    if not 1 <= config.draft_vocab_size <= target.vocab_size:
        raise ValueError(f"draft_vocab_size={config.draft_vocab_size} is outside 1…{target.vocab_size}")
    sequences = corpus.load(Path(config.corpus), target.fingerprint)
    data = examples(sequences, settings.max_length)
    if len(data) < settings.sequences_per_step:
        raise ValueError(f"corpus {config.corpus} has {len(data)} usable sequences, fewer than a batch")
    draft_tokens, coverage = frequent_tokens(sequences, config.draft_vocab_size, target.vocab_size)
    trainer = Trainer(target, initial_head(target, draft_tokens.to(target.device)), settings)
    state, metrics_path = folder / "state.pt", folder / "metrics.parquet"
    metrics: list[dict[str, float]] = []
    if state.is_file():
        trainer.load(state)
        if metrics_path.is_file():
            kept = pd.read_parquet(metrics_path)
            metrics = kept[kept.step < trainer.step].to_dict("records")
    print(f"{len(data)} sequences; the draft vocabulary of {config.draft_vocab_size} covers {coverage:.2%} of answers")

    def save() -> None:
        trainer.save(state)
        temporary = metrics_path.with_suffix(".tmp")
        pd.DataFrame(metrics).to_parquet(temporary)
        temporary.replace(metrics_path)

    started, first_step = time.perf_counter(), trainer.step
    with tqdm(total=settings.steps, initial=trainer.step, unit="step", dynamic_ncols=True) as bar:
        try:
            for chosen in batches(data, settings, trainer.step):
                loss, agreement = trainer.train_step(chosen)
                depths = {f"agreement_{depth}": value for depth, value in enumerate(agreement)}
                metrics.append({"step": trainer.step - 1, "loss": loss, **depths})
                bar.set_postfix_str(f"loss {loss:.2f}", refresh=False)
                bar.update()
                if trainer.step % config.save_every == 0:
                    save()
        except KeyboardInterrupt:  # perhaps within an optimiser step: what is in memory is not saved
            raise KeyboardInterrupt(f"the same command goes on from the last checkpoint in {state}") from None
        except FloatingPointError as error:
            raise FloatingPointError(f"{error}; the last good checkpoint is {state}") from None
    save()
    frame = pd.DataFrame(metrics)
    plots.save(plots.training_curve(frame), folder / "training.png")
    fields = {"target_fingerprint": target.fingerprint, "target_name": target.name}
    save_eagle(folder, trainer.head, torch.bfloat16, fields)
    last = frame.tail(max(1, len(frame) // 20)).mean()
    agreement = [round(float(last[name]), 4) for name in frame if name.startswith("agreement_")]
    seconds = time.perf_counter() - started
    print(f"agreement with the target's first choice by self-fed depth, last 5 % of steps: {agreement}")
    done = trainer.step - first_step
    return {
        "folder": str(folder),
        "steps": trainer.step,
        "loss": float(last.loss),
        "agreement": agreement,
        "coverage": coverage,
        "seconds_per_step": seconds / done if done else None,
    }
