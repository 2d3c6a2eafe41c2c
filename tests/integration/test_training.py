"""eagle-tree train as a user calls it, on a tiny target in a folder: processes, checkpoints, and what can go wrong."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eagle_tree.corpus import Sequence, write_shard
from eagle_tree.target import Target

VOCAB = 61
TWO_PROCESSES = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
TWO_PROCESSES += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
TWO_PROCESSES += ["--main_process_port", "0", "-m", "eagle_tree.apps.cli"]


def save_target(folder: Path, seed: int) -> Target:
    """A tiny random Llama with a tokenizer of its own, as a folder."""
    torch.manual_seed(seed)
    shape = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4)
    LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=2, max_position_embeddings=256)).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return Target.from_pretrained(str(folder))


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with two targets and the corpus of one of them."""
    folder = tmp_path_factory.mktemp("training")
    fingerprint = save_target(folder / "target", seed=0).fingerprint
    save_target(folder / "other target", seed=1)
    texts = [[(7 * i + 3 * i * i + 5 * k) % VOCAB for i in range(12 + 3 * (k % 4))] for k in range(24)]
    (folder / "corpus").mkdir()
    sequences = [Sequence([1, 2, 3], text, 0.0) for text in texts]
    write_shard(folder / "corpus" / "shard-00000.parquet", sequences, fingerprint)
    (folder / "empty").mkdir()
    write_shard(folder / "empty" / "shard-00000.parquet", [], fingerprint)
    (folder / "nothing").mkdir()
    return folder


def arguments(place: Path, *overrides: str, target: str = "target") -> list[str]:
    settings = ["steps=8", "sequences_per_step=4", "warmup_steps=2", "precision=float32"]
    where = [f"target.name_or_path={place / target}", f"corpus={place / 'corpus'}", "target.device=cpu"]
    where += ["target=huggingface", "target.dtype=float32", *(f"training.{setting}" for setting in settings)]
    return ["train", *where, *overrides]


@pytest.fixture()
def train(place, eagle_tree):
    """Calls the verb in this process; gives its exit status, output and errors."""

    def call(*overrides: str, target: str = "target") -> tuple[int, str, str]:
        return eagle_tree(*arguments(place, *overrides, target=target))

    return call


@pytest.mark.parametrize("overrides", [["head.draft_vocab_size=40"], ["head=eagle"]], ids=["eagle3", "eagle"])
def test_two_processes_take_the_steps_of_one(place, tmp_path, train, overrides):
    """The same global batch on one process and, under `accelerate launch`, on two: the same loss curve."""
    status, *_ = train(*overrides, f"folder={tmp_path / 'one'}")
    assert status == 0
    done = subprocess.run(
        [*TWO_PROCESSES, *arguments(place, *overrides, f"folder={tmp_path / 'two'}", f"features={tmp_path / 'kept'}")],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 1  # one process speaks
    assert json.loads(lines[0])["steps"] == 8
    one, two = (pd.read_parquet(tmp_path / name / "metrics.parquet") for name in ("one", "two"))
    assert one.loss.iloc[-1] < one.loss.iloc[0]
    pd.testing.assert_frame_equal(one, two, rtol=1e-5, atol=1e-6)
    assert not one.equals(two)  # sums in another order: were they equal to the bit, one process ran both


@pytest.mark.parametrize(
    ("overrides", "target", "complaint"),
    [
        (["head=eagle9"], "target", "Could not find 'head/eagle9'"),
        ([], "other target", "was made with target"),
        (["corpus={place}/empty"], "target", "holds no sequences"),
        (["corpus={place}/nothing"], "target", "no corpus shards"),
        (["head.initial=nowhere"], "target", "drafter folder nowhere does not exist"),
        (["training.learning_rate=1e30"], "target", "on corpus sequences"),
    ],
)
def test_what_can_go_wrong_is_named(place, tmp_path, train, overrides, target, complaint):
    """Exit status 1, a message, no traceback."""
    overrides = [override.format(place=place) for override in overrides]
    status, _, errors = train(f"folder={tmp_path}", "head.draft_vocab_size=40", *overrides, target=target)
    assert status == 1
    assert complaint in errors
    assert "Traceback" not in errors


def test_a_full_disk_is_named_and_keeps_the_last_checkpoint(tmp_path, train):
    """The process may write no file above 40 kB, which its checkpoint exceeds."""
    overrides = (f"folder={tmp_path}", "head.draft_vocab_size=40")
    assert train(*overrides)[0] == 0
    before = (tmp_path / "state.pt").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))
    try:
        status, _, errors = train(*overrides, "training.steps=12")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert status == 1
    assert "cannot write" in errors and "state.pt" in errors
    assert "Traceback" not in errors
    assert (tmp_path / "state.pt").read_bytes() == before
    assert not list(tmp_path.glob("*.tmp"))
