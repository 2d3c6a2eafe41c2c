"""Tiny random models, in fp64 unless a test says otherwise: exact enough to compare to 1e-10."""

from __future__ import annotations

import sys

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from eagle_tree.apps import cli, common
from eagle_tree.cache import KVLayer
from eagle_tree.drafter.eagle import EagleConfig, EagleDrafter, EagleHead, published_taps
from eagle_tree.target import Target
from eagle_tree.tree import Tree

VOCAB = 61
SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    eos_token_id=None,
    bos_token_id=None,
    pad_token_id=None,
)


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="integration: every default prompt at full length (an hour)")


def build_target(kind: str = "llama", attention: str = "sdpa", dtype=torch.float64, seed: int = 0, **changes) -> Target:
    """A tiny random target: `llama`, `mistral` (a window of 5 in all layers) or `qwen3` (a window in half of them)."""
    shape = {**SHAPE, **changes, "attn_implementation": attention}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if kind == "llama":
            model = LlamaForCausalLM(LlamaConfig(**shape))
        elif kind == "mistral":
            model = MistralForCausalLM(MistralConfig(sliding_window=5, **shape))
        else:
            windows = dict(use_sliding_window=True, sliding_window=5, max_window_layers=2)
            model = Qwen3ForCausalLM(Qwen3Config(**windows, **shape))
        for parameter in model.parameters():  # the default initialisation is too flat to tell nodes apart
            if parameter.dim() > 1:
                parameter.data.normal_(std=0.3)
    return Target(model.to(dtype), name=f"tiny-{kind}")


def build_drafter(target: Target, kind: str = "eagle3", draft_vocab: int | None = None, seed: int = 1) -> EagleDrafter:
    """A head of random weights that fits a target."""
    layer = LlamaConfig(**{**SHAPE, "num_hidden_layers": 1, "vocab_size": target.vocab_size})
    taps = published_taps(kind, target.n_layers)
    config = EagleConfig(kind, layer, taps, target.hidden_size, draft_vocab or target.vocab_size)
    head = EagleHead.random(config, seed).to(target.dtype)
    return EagleDrafter(head, target.embedding, target.apply_head)


@pytest.fixture(scope="session")
def target() -> Target:
    return build_target()


@pytest.fixture(scope="session")
def drafter(target: Target) -> EagleDrafter:
    return build_drafter(target)


@pytest.fixture()
def eagle_tree(monkeypatch, capfd):
    """Calls the command line in this process; gives exit status, output and errors."""

    def call(*arguments: str) -> tuple[int | None, str, str]:
        monkeypatch.setattr(sys, "argv", ["eagle-tree", *arguments])
        try:
            status = cli.main()
        except SystemExit as leave:  # hydra leaves by itself when the configuration is wrong
            status = leave.code
        return status, *capfd.readouterr()

    return call


def without_its_parent(within, *arguments, real):
    """The first draft node of every tree does not see the root."""
    if within.shape[-1] > 1:
        within = within.clone()
        within[:, 1, 0] = False
    return real(within, *arguments)


@pytest.fixture(params=["mask", "position", "compaction"])
def fault(request, monkeypatch):
    """An engine that is wrong by one: a row of the tree mask, a position, a compaction."""
    if request.param == "mask":
        real = Target.attention_masks
        monkeypatch.setattr(
            Target,
            "attention_masks",
            lambda self, within, *rest: without_its_parent(within, *rest, real=real.__get__(self)),
        )
    elif request.param == "position":
        monkeypatch.setattr(Tree, "position_offset", property(lambda tree: tree.depth + (tree.depth > 0).long()))
    else:
        real = KVLayer.keep
        monkeypatch.setattr(KVLayer, "keep", lambda self, row, path, start: real(self, row, path, start - 1))
    return request.param


@pytest.fixture()
def verbs(target, tmp_path, monkeypatch, eagle_tree):
    """Calls a verb on the tiny target and a head that follows it, in an empty folder; returns what `eagle_tree` does.

    Prompts are numbers; verbs that read prompts get two of them, and 12 tokens to emit, unless told otherwise.
    """
    from test_evaluate import guided

    (tmp_path / "prompts.txt").write_text("7 3 50 11 3\n\n4 5 6 7\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(common, "build_target", lambda config: target)
    monkeypatch.setattr(common, "build_drafter", lambda config, target: guided(target))
    numbers = lambda messages: [int(word) for word in messages[-1]["content"].split()]  # noqa: E731
    monkeypatch.setattr(target, "encode_chat", numbers, raising=False)
    prompts = ["data=text", "data.path=prompts.txt", "max_new_tokens=12"]

    def call(verb: str, *arguments: str) -> tuple[int | None, str, str]:
        return eagle_tree(verb, *(prompts if verb in ("trace", "evaluate", "bench", "audit") else []), *arguments)

    return call
