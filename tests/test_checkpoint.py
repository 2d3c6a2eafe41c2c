"""Checkpoints: the published layouts byte for byte, and every fault of a folder named."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from conftest import SHAPE, VOCAB, build_target
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from eagle_tree.apps import common
from eagle_tree.checkpoint import (
    load_bundled,
    load_drafter,
    load_eagle,
    load_medusa,
    random_eagle,
    save_eagle,
    save_medusa,
)
from eagle_tree.drafter.eagle import EagleConfig, EagleDrafter, EagleHead, published_taps
from eagle_tree.drafter.medusa import MedusaConfig, MedusaDrafter, MedusaHeads
from eagle_tree.tree import Frontier, GrowingTree

TEXT = torch.tensor([7, 3, 50, 11, 3, 29, 60, 1])
ATTENTION = {f"self_attn.{name}_proj.weight" for name in "qkvo"}
MLP = {f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
EAGLE_1_2 = {"fc.weight", *(f"layers.0.{name}" for name in ATTENTION | MLP | {"post_attention_layernorm.weight"})}
NORMS = {"hidden_norm.weight", "input_layernorm.weight", "post_attention_layernorm.weight"}
EAGLE_3 = {"fc.weight", "norm.weight", "lm_head.weight", *(f"midlayer.{name}" for name in ATTENTION | MLP | NORMS)}
"""The keys of published checkpoints (FIELD notes, section 2), without embeddings, biases and maps."""


def make_head(kind: str, draft_vocab: int = VOCAB, seed: int = 3, **config) -> EagleHead:
    """A head in fp64, random in every parameter, biases and norms included."""
    layer = LlamaConfig(**{**SHAPE, "num_hidden_layers": 1})
    head = EagleHead(EagleConfig(kind, layer, published_taps(kind, 4), 32, draft_vocab, **config)).double()
    generator = torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    if head.config.has_draft_vocab:
        head.set_draft_vocab(torch.arange(draft_vocab) * 2 + 1)
    return head


def first_draft(drafter, target):
    """Candidates at the root of a prompt: enough of the head to tell two heads apart."""
    features = target.prefill(TEXT, target.new_cache(), drafter.taps).features
    drafter.start(TEXT, features, torch.tensor([9]))
    return drafter.expand(GrowingTree.from_root(torch.tensor([9])), Frontier(torch.tensor([0]), 5), None)


VARIANTS = {
    "eagle": make_head("eagle"),
    "eagle with fc bias": make_head("eagle", fc_bias=True),
    "eagle with all biases": make_head("eagle", fc_bias=True, qkv_bias=True),
    "eagle3": make_head("eagle3"),
    "eagle3 with qkv biases": make_head("eagle3", qkv_bias=True),
    "eagle3 with a draft vocabulary": make_head("eagle3", 20),
}
QKV_BIAS = {f"self_attn.{name}_proj.bias" for name in "qkv"}
KEYS = {
    "eagle": EAGLE_1_2,
    "eagle with fc bias": EAGLE_1_2 | {"fc.bias"},
    "eagle with all biases": EAGLE_1_2 | {"fc.bias"} | {f"layers.0.{name}" for name in QKV_BIAS},
    "eagle3": EAGLE_3,
    "eagle3 with qkv biases": EAGLE_3 | {f"midlayer.{name}" for name in QKV_BIAS},
    "eagle3 with a draft vocabulary": EAGLE_3 | {"d2t", "t2d"},
}


# --- round trips ---


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_keys_on_disk_are_the_published_ones(tmp_path, variant):
    save_eagle(tmp_path, VARIANTS[variant])
    assert set(load_file(tmp_path / "model.safetensors")) == KEYS[variant]
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors", "config.json"}


def test_shapes_on_disk_are_the_published_ones(tmp_path):
    """EAGLE-1/2 joins embedding and feature in `fc`; EAGLE-3 fuses three features there and doubles q, k, v."""
    save_eagle(tmp_path / "1", VARIANTS["eagle with fc bias"])
    save_eagle(tmp_path / "3", VARIANTS["eagle3 with a draft vocabulary"])
    one, three = (load_file(tmp_path / name / "model.safetensors") for name in "13")
    assert one["fc.weight"].shape == (32, 2 * 32)
    assert one["layers.0.self_attn.q_proj.weight"].shape == (32, 32)
    assert three["fc.weight"].shape == (32, 3 * 32)
    assert three["midlayer.self_attn.q_proj.weight"].shape == (32, 2 * 32)
    assert three["lm_head.weight"].shape == (20, 32)
    assert three["d2t"].dtype == torch.int64
    assert three["t2d"].dtype == torch.bool
    assert three["d2t"][:4].tolist() == [1, 2, 3, 4]  # offsets: draft ids 0 1 2 3 are the tokens 1 3 5 7
    assert three["t2d"].nonzero().flatten().tolist() == list(range(1, 41, 2))
    assert one["fc.weight"].dtype == three["fc.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_saved_head_comes_back_and_drafts_the_same(tmp_path, target, variant):
    head = VARIANTS[variant]
    save_eagle(tmp_path, head, dtype=torch.float64)
    loaded = load_eagle(tmp_path, target)
    assert loaded.head.config.kind == head.config.kind
    assert loaded.taps == head.config.taps
    for name, tensor in head.state_dict().items():
        assert torch.equal(loaded.head.state_dict()[name], tensor), name
    saved = EagleDrafter(head, target.embedding, target.apply_head)
    ours, theirs = first_draft(loaded, target), first_draft(saved, target)
    assert torch.equal(ours.token, theirs.token)
    assert torch.equal(ours.log_conf, theirs.log_conf)


def test_everything_of_the_layer_that_the_forward_depends_on_survives(tmp_path, target):
    """Rotary base and scaling, norm epsilon and activation: lost ones would change the drafts silently."""
    rope = dict(rope_type="linear", rope_theta=5000.0, factor=4.0)
    layer = LlamaConfig(**{**SHAPE, "rms_norm_eps": 3e-3, "rope_parameters": rope, "hidden_act": "gelu"})
    head = EagleHead(EagleConfig("eagle3", layer, (1, 2, 3), 32, VOCAB)).double()
    save_eagle(tmp_path, head, dtype=torch.float64)
    loaded = load_eagle(tmp_path, target)
    assert loaded.taps == (1, 2, 3)
    assert loaded.head.config.layer.rope_parameters == layer.rope_parameters
    assert loaded.head.config.layer.rms_norm_eps == 3e-3
    assert torch.equal(loaded.head.rotary.inv_freq, head.rotary.inv_freq)
    state, position = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(0)).double(), torch.arange(3)[None]
    both = [each.step(state, state, position, lambda q, k, v: q) for each in (head.eval(), loaded.head)]
    assert torch.equal(*both)


def test_the_config_on_disk_states_kind_and_provenance(tmp_path):
    save_eagle(tmp_path, VARIANTS["eagle3 with a draft vocabulary"], extra={"target_fingerprint": "abc"})
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["architectures"] == ["LlamaForCausalLMEagle3"]
    assert fields["draft_vocab_size"] == 20
    assert fields["num_hidden_layers"] == 1
    assert fields["target_fingerprint"] == "abc"


def test_what_a_published_config_leaves_out_has_its_published_default(tmp_path, target):
    """No taps, no key/value heads, `rope_theta` in the old place: as released checkpoints are."""
    head = EagleHead(
        EagleConfig("eagle", LlamaConfig(**{**SHAPE, "num_key_value_heads": 4, "rope_theta": 5000.0}), (4,), 32, VOCAB)
    )
    save_eagle(tmp_path, head)
    bare = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": VOCAB}
    (tmp_path / "config.json").write_text(json.dumps({**bare, "rope_theta": 5000.0, "bias": False}))
    loaded = load_eagle(tmp_path, target)
    assert loaded.taps == (target.n_layers,)
    assert loaded.head.config.layer.num_key_value_heads == 4
    assert loaded.head.config.layer.rope_parameters["rope_theta"] == 5000.0
    assert torch.equal(loaded.head.rotary.inv_freq, head.rotary.inv_freq)


def test_embeddings_in_the_checkpoint_are_used_in_place_of_the_targets(tmp_path, target):
    save_eagle(tmp_path, VARIANTS["eagle"], dtype=torch.float64)
    assert torch.equal(load_eagle(tmp_path, target).embedding, target.embedding)
    own = torch.ones(VOCAB, 32, dtype=torch.float64)
    edit(tmp_path, lambda weights: weights.update({"embed_tokens.weight": own}))
    assert torch.equal(load_eagle(tmp_path, target).embedding, own)


@pytest.mark.parametrize("variant", ["eagle", "eagle3 with a draft vocabulary"])
def test_pytorch_model_bin_is_read_too(tmp_path, target, variant):
    save_eagle(tmp_path, VARIANTS[variant], dtype=torch.float64)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    expected = load_eagle(tmp_path, target).head.state_dict()
    (tmp_path / "model.safetensors").unlink()
    loaded = load_eagle(tmp_path, target).head.state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in loaded)


def test_the_head_is_loaded_in_the_targets_dtype_or_the_one_asked_for(tmp_path, target):
    save_eagle(tmp_path, VARIANTS["eagle3"])
    assert load_eagle(tmp_path, target).head.fc.weight.dtype == torch.float64
    assert load_eagle(tmp_path, target, torch.float32).head.fc.weight.dtype == torch.float32


def test_a_random_head_fits_its_target(target):
    drafter = random_eagle(target, seed=4)
    assert drafter.vocab_size == VOCAB
    assert first_draft(drafter, target).token.shape == (1, 5)


# --- faults, each named before any work ---


@pytest.fixture()
def folder(tmp_path):
    save_eagle(tmp_path, VARIANTS["eagle3 with a draft vocabulary"])
    return tmp_path


def edit(folder, change) -> None:
    """Change the tensors on disk."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def refused(folder, target, complaint: str, error: type[Exception] = ValueError) -> None:
    with pytest.raises(error, match=complaint):
        load_eagle(folder, target)


def test_a_missing_folder(tmp_path, target):
    refused(tmp_path / "nowhere", target, "drafter folder .*nowhere does not exist", FileNotFoundError)


def test_a_missing_config(folder, target):
    (folder / "config.json").unlink()
    refused(folder, target, f"no config.json in {re.escape(str(folder))}", FileNotFoundError)


@pytest.mark.parametrize("content", [b"{not json", b"", b"\xff\xfe\x00"])
def test_a_malformed_config(folder, target, content):
    (folder / "config.json").write_bytes(content)
    refused(folder, target, "config.json is not JSON")


@pytest.mark.parametrize("content", ["[]", "3", '"text"', "null"])
def test_a_config_that_is_no_object(folder, target, content):
    (folder / "config.json").write_text(content)
    refused(folder, target, "config.json")


@pytest.mark.parametrize("name", ["hidden_size", "num_attention_heads", "vocab_size"])
def test_a_config_without_a_needed_field(folder, target, name):
    fields = json.loads((folder / "config.json").read_text())
    del fields[name]
    (folder / "config.json").write_text(json.dumps(fields))
    refused(folder, target, f"config.json lacks {name}")


def test_missing_weights(folder, target):
    (folder / "model.safetensors").unlink()
    complaint = f"no weights in {re.escape(str(folder))}: none of model.safetensors, .*, medusa_lm_head.pt"
    refused(folder, target, complaint, FileNotFoundError)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.99])
def test_truncated_safetensors(folder, target, share):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    refused(folder, target, f"weights in {re.escape(str(folder))} are truncated or damaged")


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_truncated_bin(folder, target, share):
    path = folder / "pytorch_model.bin"
    torch.save(load_file(folder / "model.safetensors"), path)
    (folder / "model.safetensors").unlink()
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    refused(folder, target, f"weights in {re.escape(str(folder))}")


class Intruder:
    """An object whose unpickling runs code."""

    opened = False

    def __setstate__(self, state):
        Intruder.opened = True


def test_a_pickled_object_is_refused_and_not_opened(folder, target):
    intruder = Intruder()
    intruder.harmless = 1  # without any state nothing would be set
    torch.save({"fc.weight": intruder}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    refused(folder, target, "pytorch_model.bin are not a plain tensor file")
    assert not Intruder.opened


def test_a_file_that_holds_something_else_than_named_tensors(folder, target):
    (folder / "model.safetensors").unlink()
    for content in ([torch.zeros(2)], torch.zeros(2), {"fc.weight": 3}):
        torch.save(content, folder / "pytorch_model.bin")
        refused(folder, target, "pytorch_model.bin")


@pytest.mark.parametrize("name", sorted(KEYS["eagle3 with a draft vocabulary"]))
def test_each_missing_key_is_named(folder, target, name):
    edit(folder, lambda weights: weights.pop(name))
    if name == "midlayer.self_attn.q_proj.weight":  # the key that tells an EAGLE-3 head
        refused(folder, target, "the drafter's kind is unknown, not one of eagle, eagle3")
    else:
        refused(folder, target, f"(missing|lacks) {re.escape(name)}")


@pytest.mark.parametrize("name", sorted(EAGLE_1_2))
def test_each_missing_key_of_an_eagle_1_2_head_is_named(tmp_path, target, name):
    save_eagle(tmp_path, VARIANTS["eagle"])
    edit(tmp_path, lambda weights: weights.pop(name))
    if name == "layers.0.self_attn.q_proj.weight":
        refused(tmp_path, target, "the drafter's kind is unknown, not one of eagle, eagle3")
    else:  # by its published name
        refused(tmp_path, target, f"(missing|lacks) {re.escape(name)}")


def test_an_unknown_key_is_named(folder, target):
    edit(folder, lambda weights: weights.update({"layers.1.mlp.up_proj.weight": torch.zeros(2)}))
    refused(folder, target, r"unknown layers\.1\.mlp\.up_proj\.weight")


def test_a_key_of_the_other_layout_is_unknown(folder, target):
    """It must not pass for the key that it would become: which of the two would win?"""
    edit(folder, lambda weights: weights.update({"layers.0.mlp.up_proj.weight": torch.zeros(48, 32)}))
    refused(folder, target, r"unknown layers\.0\.mlp\.up_proj\.weight")


def test_a_wrong_shape_is_named_with_both_shapes(folder, target):
    edit(folder, lambda weights: weights.update({"norm.weight": torch.zeros(31)}))
    refused(folder, target, r"norm\.weight has shape \(31,\) instead of \(32,\)")


def test_another_head_than_eagle_is_not_guessed(folder, target):
    save_file({"0.0.linear.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    refused(folder, target, r"kind is medusa, not one of eagle, eagle3; its keys are \['0\.0\.linear\.weight'\]")


def test_a_target_of_another_hidden_size(folder):
    refused(folder, build_target(hidden_size=48), "features of size 32, the target has 48")


def test_a_target_of_another_vocabulary(folder):
    refused(folder, build_target(vocab_size=60), "vocabulary has 61 tokens, the target's 60")


def test_embeddings_of_another_vocabulary(folder, target):
    edit(folder, lambda weights: weights.update({"embed_tokens.weight": torch.zeros(60, 32)}))
    refused(folder, target, r"embed_tokens\.weight has shape \(60, 32\), not the target's vocabulary")


def test_a_narrower_head_needs_embeddings_of_its_own(tmp_path, target):
    """A head of hidden size 16 reads the target's features of 32, but not the target's embeddings."""
    layer = LlamaConfig(**{**SHAPE, "hidden_size": 16})
    head = EagleHead(EagleConfig("eagle3", layer, published_taps("eagle3", 4), 32, VOCAB))
    save_eagle(tmp_path, head)
    refused(tmp_path, target, "hidden size 16 and no embeddings of its own; the target's have 32")
    edit(tmp_path, lambda weights: weights.update({"embed_tokens.weight": torch.zeros(VOCAB, 16).bfloat16()}))
    assert first_draft(load_eagle(tmp_path, target), target).token.shape == (1, 5)


@pytest.mark.parametrize("taps", [(1, 2, 5), (-1, 2, 3)])
def test_taps_beyond_the_target(tmp_path, target, taps):
    head = VARIANTS["eagle3"]
    head.config, config = replace(head.config, taps=taps), head.config
    save_eagle(tmp_path, head)
    head.config = config
    refused(tmp_path, target, rf"taps layer ({taps[0]}|{taps[2]}) of a target with 4 layers")


@pytest.fixture()
def interrupted(monkeypatch):
    """Writing weights fails halfway."""

    def failing(path, weights):
        path.write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", failing)


def test_an_interrupted_save_leaves_the_old_head(folder, target, interrupted):
    """The write goes to a temporary name: a failure halfway does not damage what was there."""
    before = load_eagle(folder, target).head.state_dict()
    with pytest.raises(KeyboardInterrupt):
        save_eagle(folder, make_head("eagle3", 20, seed=9))
    after = load_eagle(folder, target).head.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


# --- Medusa ---

MEDUSA = {
    "borrowed": MedusaConfig(32, VOCAB, 3),
    "borrowed, two blocks": MedusaConfig(32, VOCAB, 2, n_layers=2),
    "own": MedusaConfig(32, VOCAB, 3, own_lm_heads=True),
    "own, two blocks": MedusaConfig(32, VOCAB, 2, n_layers=2, own_lm_heads=True),
}
"""Heads that borrow the target's LM head, or end in their own (the published layout)."""
MEDUSA_KEYS = {
    "borrowed": {f"{i}.0.linear.{part}" for i in range(3) for part in ("weight", "bias")},
    "own": {f"{i}.{rest}" for i in range(3) for rest in ("0.linear.weight", "0.linear.bias", "1.weight")},
    "own, two blocks": {
        f"{i}.{rest}"
        for i in range(2)
        for rest in ("0.linear.weight", "0.linear.bias", "1.linear.weight", "1.linear.bias", "2.weight")
    },
}
every_medusa = pytest.mark.parametrize("variant", MEDUSA)


def medusa_heads(variant: str = "own") -> MedusaHeads:
    return MedusaHeads.random(MEDUSA[variant], seed=3).double()


@pytest.fixture()
def medusa_folder(tmp_path):
    save_medusa(tmp_path, medusa_heads())
    return tmp_path


def medusa_refused(folder, target, complaint: str) -> None:
    for load in (load_medusa, load_drafter):
        with pytest.raises(ValueError, match=complaint):
            load(folder, target)


@pytest.mark.parametrize("variant", MEDUSA_KEYS)
def test_the_keys_of_medusa_heads_are_the_published_ones(tmp_path, variant):
    save_medusa(tmp_path, medusa_heads(variant))
    weights = load_file(tmp_path / "model.safetensors")
    assert set(weights) == MEDUSA_KEYS[variant]
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert weights["0.0.linear.weight"].shape == (32, 32)
    assert weights["0.0.linear.bias"].shape == (32,)
    assert "own" not in variant or weights[f"1.{MEDUSA[variant].n_layers}.weight"].shape == (VOCAB, 32)
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors", "config.json"}


def test_the_config_of_medusa_heads_states_counts_and_provenance(tmp_path):
    save_medusa(tmp_path, medusa_heads(), extra={"target_fingerprint": "abc", "target_name": "vicuna"})
    fields = json.loads((tmp_path / "config.json").read_text())
    assert (fields["medusa_num_heads"], fields["medusa_num_layers"]) == (3, 1)
    assert fields["base_model_name_or_path"] == fields["target_name"] == "vicuna"
    assert fields["target_fingerprint"] == "abc"


@every_medusa
def test_saved_medusa_heads_come_back_and_draft_the_same(tmp_path, target, variant):
    heads = medusa_heads(variant)
    save_medusa(tmp_path, heads, dtype=torch.float64)
    loaded = load_medusa(tmp_path, target)
    assert loaded.heads.config == heads.config
    assert loaded.taps == (4,)
    for name, tensor in heads.state_dict().items():
        assert torch.equal(loaded.heads.state_dict()[name], tensor), name
    ours, theirs = first_draft(loaded, target), first_draft(MedusaDrafter(heads, 4, target.apply_head), target)
    assert torch.equal(ours.token, theirs.token)
    assert torch.equal(ours.log_conf, theirs.log_conf)


@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "medusa_lm_head.safetensors", "pytorch_model.bin"])
@every_medusa
def test_the_published_file_names_are_read(tmp_path, target, variant, name):
    save_medusa(tmp_path, medusa_heads(variant), dtype=torch.float64)
    expected = load_medusa(tmp_path, target).heads.state_dict()
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    (save_file if name.endswith("safetensors") else torch.save)(weights, tmp_path / name)
    loaded = load_medusa(tmp_path, target).heads.state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in loaded)


@pytest.mark.parametrize("stated", [{}, {"medusa_num_heads": 5, "medusa_num_layers": 4}, {"medusa_num_heads": 2}])
@every_medusa
def test_the_keys_are_counted_whatever_the_config_states(tmp_path, target, variant, stated):
    """Published configs say 2 or 5 heads where there are 3, and name no hidden size."""
    save_medusa(tmp_path, medusa_heads(variant))
    (tmp_path / "config.json").write_text(json.dumps({"base_model_name_or_path": "vicuna", **stated}))
    drafter = load_medusa(tmp_path, target)
    assert drafter.heads.config == MEDUSA[variant]
    assert drafter.max_depth == MEDUSA[variant].n_heads


def test_medusa_heads_are_loaded_in_the_targets_dtype_or_the_one_asked_for(medusa_folder, target):
    for dtype in (torch.float64, torch.float32):
        drafter = load_medusa(medusa_folder, target, None if dtype == target.dtype else dtype)
        assert {parameter.dtype for parameter in drafter.heads.parameters()} == {dtype}


@pytest.mark.parametrize("name", sorted(MEDUSA_KEYS["own, two blocks"]))
def test_each_missing_key_of_medusa_heads_is_named(tmp_path, target, name):
    save_medusa(tmp_path, medusa_heads("own, two blocks"))
    edit(tmp_path, lambda weights: weights.pop(name))
    medusa_refused(tmp_path, target, rf"do not fit its kind: missing {re.escape(name)}$")


@pytest.mark.parametrize("name", ["fc.weight", "0.linear.weight", "1.0.linear.scale", "2.5.weight"])
def test_an_unknown_key_of_medusa_heads_is_named(medusa_folder, target, name):
    edit(medusa_folder, lambda weights: weights.update({name: torch.zeros(VOCAB, 32)}))
    medusa_refused(medusa_folder, target, f"unknown {re.escape(name)}$")


def test_a_gap_in_the_heads_is_named_and_not_filled(medusa_folder, target):
    """Heads 0, 2 and 7: three heads, of which the middle one would be missing."""

    def move(weights) -> None:
        for name in MEDUSA_KEYS["own"]:
            if name.startswith("1."):
                weights[f"7{name[1:]}"] = weights.pop(name)

    edit(medusa_folder, move)
    medusa_refused(medusa_folder, target, r"missing 1\.0\.linear\.bias; .*unknown 7\.0\.linear\.bias")


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [("1.0.linear.weight", (32, 31), (32, 32)), ("0.0.linear.bias", (), (32,)), ("2.1.weight", (60, 32), (VOCAB, 32))],
)
def test_a_wrong_shape_in_medusa_heads_is_named_with_both_shapes(medusa_folder, target, name, shape, wanted):
    edit(medusa_folder, lambda weights: weights.update({name: torch.zeros(shape)}))
    medusa_refused(medusa_folder, target, re.escape(f"{name} has shape {shape} instead of {wanted}"))


def test_medusa_heads_for_a_target_of_another_shape(medusa_folder):
    medusa_refused(medusa_folder, build_target(hidden_size=48), "features of size 32, the target has 48")
    medusa_refused(medusa_folder, build_target(vocab_size=60), "vocabulary has 61 tokens, the target's 60")


def test_an_interrupted_save_leaves_the_old_medusa_heads(medusa_folder, target, interrupted):
    before = load_medusa(medusa_folder, target).heads.state_dict()
    with pytest.raises(KeyboardInterrupt):
        save_medusa(medusa_folder, MedusaHeads(MEDUSA["own"]))
    after = load_medusa(medusa_folder, target).heads.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert {path.name for path in medusa_folder.iterdir()} == {"model.safetensors", "config.json"}


# --- any kind ---


def save_any(folder, kind: str, **extra) -> None:
    if kind == "medusa":
        save_medusa(folder, medusa_heads(), extra=extra)
    else:
        save_eagle(folder, VARIANTS[kind], extra=extra)


every_kind = pytest.mark.parametrize("kind", ["eagle", "eagle3", "medusa"])


@every_kind
def test_the_kind_is_told_by_the_keys(tmp_path, target, kind):
    """A config that claims another kind changes nothing."""
    save_any(tmp_path, kind, architectures=["LlamaForCausalLMEagle3"])
    drafter = load_drafter(tmp_path, target)
    assert ("medusa" if isinstance(drafter, MedusaDrafter) else drafter.head.config.kind) == kind
    assert first_draft(drafter, target).token.shape == (1, 5)


@pytest.mark.parametrize("load", [load_drafter, load_eagle, load_medusa])
def test_an_unknown_kind_is_refused_with_its_keys_and_the_kinds_that_are_known(folder, target, load):
    save_file({"blocks.0.weight": torch.zeros(2), "head": torch.zeros(2)}, folder / "model.safetensors")
    known = {load_drafter: "eagle, eagle3, medusa", load_eagle: "eagle, eagle3", load_medusa: "medusa"}[load]
    with pytest.raises(ValueError, match=rf"unknown, not one of {known}; its keys are \['blocks\.0\.weight', 'head'\]"):
        load(folder, target)


def test_a_loader_of_one_kind_refuses_the_others(folder, target):
    with pytest.raises(ValueError, match="kind is eagle3, not one of medusa"):
        load_medusa(folder, target)
    save_medusa(folder, medusa_heads())
    refused(folder, target, "kind is medusa, not one of eagle, eagle3")


@pytest.mark.parametrize("load", [load_drafter, load_medusa])
def test_every_loader_names_a_missing_folder(tmp_path, target, load):
    with pytest.raises(FileNotFoundError, match=r"drafter folder .*nowhere does not exist"):
        load(tmp_path / "nowhere", target)


@every_kind
def test_a_drafter_made_for_another_target_is_refused(tmp_path, target, kind):
    """Same shape, other weights: it would load, and draft badly. Both targets are named."""
    other = build_target(seed=1)
    save_any(tmp_path, kind, target_fingerprint=other.fingerprint, target_name="elder")
    complaint = rf"trained for elder \({other.fingerprint}\), not for tiny-llama \({target.fingerprint}\)"
    for load in (load_drafter, load_medusa if kind == "medusa" else load_eagle):
        with pytest.raises(ValueError, match=complaint):
            load(tmp_path, target)
        assert load(tmp_path, other).vocab_size == VOCAB


@every_kind
def test_a_published_drafter_names_no_target_and_loads(tmp_path, target, kind):
    save_any(tmp_path, kind)
    assert "target_fingerprint" not in json.loads((tmp_path / "config.json").read_text())
    assert load_drafter(tmp_path, target).vocab_size == VOCAB


@pytest.mark.parametrize(
    ("name", "kind"), [("checkpoint", "eagle"), ("checkpoint", "medusa"), ("eagle", "eagle3"), ("medusa", "medusa")]
)
def test_the_configuration_of_a_drafter_builds_it(tmp_path, target, name, kind):
    save_any(tmp_path, kind)
    fields = yaml.safe_load((common.conf_dir() / "drafter" / f"{name}.yaml").read_text())
    assert fields["folder"] == "???"
    drafter = common.build_drafter(OmegaConf.create({**fields, "folder": str(tmp_path)}), target)
    assert isinstance(drafter, MedusaDrafter if kind == "medusa" else EagleDrafter)


@pytest.mark.parametrize("kind", ["eagle3", "eagle2", "medusa"])
def test_a_bundled_drafter_is_refused_by_another_target(target, kind):
    with pytest.raises(ValueError, match=r"was trained for smollm2-135m .* not for tiny-llama"):
        load_bundled(target, kind)


def test_an_unknown_bundled_drafter_is_named(target):
    with pytest.raises(ValueError, match="kind='eagle4' is not one of the bundled drafters: eagle3, eagle2, medusa"):
        load_bundled(target, "eagle4")
