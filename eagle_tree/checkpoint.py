"""Read and write drafter heads in the published layouts, with a strict report on every key.

A folder holds `config.json` (a Llama config with a few more fields) and `model.safetensors` or
`pytorch_model.bin` (read with `weights_only=True`). The kind of head is read off the keys.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from eagle_tree.drafter.eagle import EagleConfig, EagleDrafter, EagleHead, check_fits, layer_like, published_taps
from eagle_tree.files import replacing

BUNDLED = Path(__file__).parent / "assets" / "smollm2-135m-eagle3"
LAYER_NAMES = {"eagle3": "midlayer", "eagle": "layers.0"}
"""What the one layer is called in published checkpoints."""
LAYER_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "hidden_act",
    "max_position_embeddings",
)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint folder.

    Raises:
        FileNotFoundError: no weights there. ValueError: a file that is truncated or no weights file.
    """
    safe, pickled = folder / "model.safetensors", folder / "pytorch_model.bin"
    try:
        if safe.is_file():
            return load_file(safe)
        if pickled.is_file():
            weights = torch.load(pickled, map_location="cpu", weights_only=True)
            if not isinstance(weights, dict) or not all(isinstance(tensor, Tensor) for tensor in weights.values()):
                raise TypeError("it holds something else than named tensors")
            return weights
    except (SafetensorError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise ValueError(f"the drafter's weights in {folder} are truncated or damaged: {error}") from error
    except Exception as error:  # torch.load raises pickle's own kinds for anything but tensors
        raise ValueError(f"the drafter's weights in {pickled} are not a plain tensor file: {error}") from error
    raise FileNotFoundError(f"no model.safetensors or pytorch_model.bin in {folder}")


def read_config(folder: Path) -> dict:
    """The checkpoint's `config.json`."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"no config.json in {folder}")
    try:
        fields = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds no JSON object")
    return fields


def head_config(fields: dict, weights: dict[str, Tensor], n_layers: int) -> EagleConfig:
    """The shape of a head from its config and keys; what a config leaves out has the published default."""
    kind = next((kind for kind, layer in LAYER_NAMES.items() if f"{layer}.self_attn.q_proj.weight" in weights), None)
    if kind is None:
        raise ValueError(f"neither an EAGLE-1/2 nor an EAGLE-3 head; its keys are {sorted(weights)[:6]} …")
    for name in ("fc.weight", "lm_head.weight") if kind == "eagle3" else ("fc.weight",):
        if name not in weights:
            raise ValueError(f"the drafter's checkpoint lacks {name}")
    missing = [name for name in ("hidden_size", "num_attention_heads", "vocab_size") if name not in fields]
    if missing:
        raise ValueError(f"the drafter's config.json lacks {', '.join(missing)}")
    taps = tuple(fields.get("eagle_taps") or published_taps(kind, n_layers))
    shape = {name: fields[name] for name in LAYER_FIELDS if fields.get(name) is not None}
    hidden = fields["hidden_size"]
    fc_width = weights["fc.weight"].shape[1]
    if kind == "eagle3":
        target_hidden_size, draft_vocab_size = fc_width // len(taps), weights["lm_head.weight"].shape[0]
    else:
        target_hidden_size, draft_vocab_size = fc_width - hidden, fields["vocab_size"]
    return EagleConfig(
        kind=kind,
        layer=LlamaConfig(**shape),
        taps=taps,
        target_hidden_size=target_hidden_size,
        draft_vocab_size=draft_vocab_size,
        fc_bias="fc.bias" in weights,
        qkv_bias=f"{LAYER_NAMES[kind]}.self_attn.q_proj.bias" in weights,
    )


def load_eagle(folder: str | Path, target, dtype: torch.dtype | None = None) -> EagleDrafter:
    """An `EagleDrafter` for `target` from a checkpoint folder.

    Raises:
        FileNotFoundError, ValueError: a file is missing or damaged; a key is missing, unknown or of another
            shape; the head does not fit the target's hidden size or vocabulary.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"drafter folder {folder} does not exist")
    fields, weights = read_config(folder), read_weights(folder)
    config = head_config(fields, weights, target.n_layers)
    check_fits(config, target.hidden_size, target.vocab_size, target.n_layers)
    embedding = weights.pop("embed_tokens.weight", None)
    if embedding is not None and tuple(embedding.shape) != (target.vocab_size, config.layer.hidden_size):
        raise ValueError(f"embed_tokens.weight has shape {tuple(embedding.shape)}, not the target's vocabulary")
    dtype = dtype or target.dtype
    head = EagleHead(config).to(target.device, dtype)
    load_strictly(head, weights, folder)
    embedding = target.embedding if embedding is None else embedding.to(target.device, dtype)
    if embedding.shape[1] != config.layer.hidden_size:
        raise ValueError(
            f"the drafter has hidden size {config.layer.hidden_size} and no embeddings of its own; "
            f"the target's have {embedding.shape[1]}"
        )
    return EagleDrafter(head, embedding, target.apply_head)


def load_bundled(target, dtype: torch.dtype | None = None) -> EagleDrafter:
    """The head that ships with the package, for the bundled target only.

    Raises:
        ValueError: the target is another model.
    """
    made_for = read_config(BUNDLED).get("target_fingerprint")
    if target.fingerprint != made_for:
        raise ValueError(
            f"the bundled drafter was trained for {made_for}, not for {target.name} ({target.fingerprint})"
        )
    return load_eagle(BUNDLED, target, dtype)


def random_eagle(target, seed: int = 0) -> EagleDrafter:
    """An EAGLE-3 head of random weights that fits a target: the drafter that knows nothing."""
    taps = published_taps("eagle3", target.n_layers)
    config = EagleConfig("eagle3", layer_like(target.config), taps, target.hidden_size, min(8192, target.vocab_size))
    head = EagleHead.random(config, seed).to(target.device, target.dtype)
    return EagleDrafter(head, target.embedding, target.apply_head)


def load_strictly(head: EagleHead, weights: dict[str, Tensor], source: Path) -> None:
    """Load every key, or raise ValueError that lists missing, unknown and misshapen ones."""
    own = published_weights(head)
    problems = [f"missing {name}" for name in sorted(own.keys() - weights.keys())]
    problems += [f"unknown {name}" for name in sorted(weights.keys() - own.keys())]
    problems += [
        f"{name} has shape {tuple(weights[name].shape)} instead of {tuple(own[name].shape)}"
        for name in sorted(own.keys() & weights.keys())
        if weights[name].shape != own[name].shape
    ]
    if problems:
        raise ValueError(f"the drafter in {source} does not fit its config: {'; '.join(problems[:8])}")
    for name, tensor in own.items():
        tensor.copy_(weights[name])


def published_weights(head: EagleHead) -> dict[str, Tensor]:
    """The head's own tensors under their published names."""
    layer = LAYER_NAMES[head.config.kind]
    return {name.replace("midlayer.", f"{layer}."): tensor for name, tensor in head.state_dict().items()}


def save_eagle(folder: str | Path, head: EagleHead, dtype: torch.dtype = torch.bfloat16, extra: dict | None = None):
    """Write a head in its published layout.

    Args:
        extra: further fields for `config.json` (provenance such as the target's fingerprint).
    """
    folder = Path(folder)
    config = head.config
    layer = config.layer.to_dict()
    fields = {name: layer[name] for name in LAYER_FIELDS if layer.get(name) is not None}
    fields |= {
        "architectures": ["LlamaForCausalLMEagle3" if config.kind == "eagle3" else "LlamaForCausalLMEagle"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "bias": config.fc_bias,
        "qkv_bias": config.qkv_bias,
        "eagle_taps": list(config.taps),
        **(extra or {}),
    }
    weights = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in published_weights(head).items()
    }
    with replacing(folder / "model.safetensors") as temporary:
        save_file(weights, temporary)
    with replacing(folder / "config.json") as temporary:
        temporary.write_text(json.dumps(fields, indent=2) + "\n")
