"""eagle-tree train: a head for a target, from its corpus. Resumes from the last checkpoint.

Under `accelerate launch` every process runs this; the first one writes and prints.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pandas as pd
from accelerate import Accelerator
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from eagle_tree import corpus, plots
from eagle_tree.apps import common
from eagle_tree.checks import as_path, check_count
from eagle_tree.features import FeatureStore
from eagle_tree.files import replacing
from eagle_tree.train import Example, Trainer, batches, examples, token_counts


def main(arguments: list[str]) -> int:
    """Entry point of the verb."""
    return common.run_verb("train", train, arguments)


def train(config: DictConfig) -> dict[str, Any]:
    """Train to `training.steps`, then write the head into `folder`."""
    settings = common.build(config.training)()
    folder = as_path("folder", config.folder)
    check_count("save_every", config.save_every)
    held_out = common.read_prompts(config.exclude)
    accelerator = Accelerator(cpu=config.target.device == "cpu", device_placement=False)
    if accelerator.num_processes > 1:
        config.target.device = str(accelerator.device)
    target = common.build_target(config.target)
    sequences = corpus.load(as_path("corpus", config.corpus), target.fingerprint)
    words = [target.encode_words(message["content"]) for prompt in held_out for message in prompt.messages]
    shared = corpus.sharing_words(sequences, words)
    sequences = [sequence for sequence, drop in zip(sequences, shared) if not drop]
    data = examples(sequences, settings.max_length, target.eos_token_ids)
    if len(data) < settings.sequences_per_step:
        raise ValueError(f"corpus {config.corpus} has {len(data)} usable sequences, fewer than a batch")
    counts = token_counts(sequences, target.vocab_size)
    objective = common.build(config.head)(target=target, counts=counts)
    features = None if config.features is None else as_path("features", config.features)
    store = FeatureStore(target, objective.taps, features)
    trainer = Trainer(target, objective, settings, store, accelerator)
    about = {
        "target": target.fingerprint,
        "sequences": len(sequences),
        "answer_tokens": int(counts.sum()),
        "head": str(OmegaConf.to_container(config.head, resolve=True)),
    }
    state, metrics_path = folder / "state.pt", folder / "metrics.parquet"
    metrics: list[dict[str, float]] = []
    if state.is_file():
        trainer.load(state, about)
        if metrics_path.is_file():
            kept = pd.read_parquet(metrics_path)
            metrics = kept[kept.step < trainer.step].to_dict("records")
    coverage = objective.coverage(counts)
    if accelerator.is_main_process:
        print(
            f"{len(data)} sequences ({sum(shared)} left out for words they share with held-out prompts); "
            f"the head can propose {coverage:.2%} of the answers' tokens; multiplying in {trainer.precision}"
        )

    def save() -> None:
        trainer.save(state, about)
        if accelerator.is_main_process:
            with replacing(metrics_path) as temporary:
                pd.DataFrame(metrics).to_parquet(temporary)

    seconds = run(trainer, data, metrics, config.save_every, save, state)
    if not accelerator.is_main_process:
        return {}
    frame = pd.DataFrame(metrics)
    plots.save(plots.training_curve(frame), folder / "training.png")
    trained_on = {"sequences": len(sequences), "answer_tokens": int(counts.sum()), "steps": trainer.step}
    provenance = {"target_fingerprint": target.fingerprint, "target_name": target.name, "training": trained_on}
    objective.save(folder, provenance)
    last = frame.tail(max(1, len(frame) // 20)).mean()
    by_depth = {
        kind: [round(float(last[name]), 4) for name in frame if name.startswith(f"{kind}_")]
        for kind in ("agreement", "acceptance")
    }
    print(table(last, by_depth))
    return {
        "folder": str(folder),
        "steps": trainer.step,
        "loss": float(last.loss),
        **by_depth,
        "coverage": coverage,
        "seconds_per_step": seconds,
    }


def run(
    trainer: Trainer, data: list[Example], metrics: list[dict[str, float]], save_every: int, save, state: Path
) -> float | None:
    """Train to the end, saving on the way; returns seconds per step, None if there was nothing to do."""
    started, first_step = time.perf_counter(), trainer.step
    last_good = f"the last good checkpoint is {state}" if state.is_file() else "no checkpoint was saved yet"
    steps, quiet = trainer.settings.steps, not trainer.accelerator.is_main_process
    with tqdm(total=steps, initial=trainer.step, unit="step", dynamic_ncols=True, disable=quiet) as bar:
        try:
            for chosen in batches(data, trainer.settings, trainer.step):
                step = trainer.train_step(chosen)
                metrics.append(step.row(trainer.step - 1))
                bar.set_postfix_str(f"loss {step.loss:.2f}, agreement {step.agreement[0]:.2f}", refresh=False)
                bar.update()
                if trainer.step % save_every == 0:
                    save()
                    last_good = f"the last good checkpoint is {state}"
        except KeyboardInterrupt:  # perhaps within an optimiser step: what is in memory is not saved
            raise KeyboardInterrupt(f"{last_good}; the same command goes on from there") from None
        except FloatingPointError as error:
            raise FloatingPointError(f"{error}; {last_good}") from None
    if trainer.step == first_step:
        return None
    save()
    return (time.perf_counter() - started) / (trainer.step - first_step)


def table(last: pd.Series, by_depth: dict[str, list[float]]) -> str:
    """The end of training, for people."""
    lines = [f"loss {last.loss:.3f}, agreement and acceptance by depth, means of the last 5 % of steps", ""]
    depths = range(len(by_depth["agreement"]))
    lines.append("depth       " + "  ".join(f"{depth:6d}" for depth in depths))
    lines += [f"{kind:10s}  " + "  ".join(f"{value:6.3f}" for value in values) for kind, values in by_depth.items()]
    lines += ["", "agreement: first choices that are the target's; acceptance: Σ min(p, q), of a token drawn at T = 1"]
    return "\n".join(lines)
