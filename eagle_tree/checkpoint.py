"""Read and write drafter heads in the published layouts, with a strict report on every key.

A folder holds `config.json` and one file of weights (`WEIGHT_FILES`; pickled ones are read with
`weights_only=True`). The kind of drafter is read off the keys, and so is whatever a config is known to state
wrongly. A config that names the target it was trained for (`target_fingerprint`, as `eagle-tree train` writes it)
is held to it; published ones name none.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig

from eagle_tree.checks import as_path
from eagle_tree.drafter.base import Drafter
from eagle_tree.drafter.eagle import EagleConfig, EagleDrafter, EagleHead, check_fits, layer_like, published_taps
from eagle_tree.drafter.medusa import MedusaConfig, MedusaDrafter, MedusaHeads
from eagle_tree.files import write_json, write_tensors

BUNDLED = {kind: Path(__file__).parent / "assets" / f"smollm2-135m-{kind}" for kind in ("eagle3", "eagle2", "medusa")}
"""The heads that ship with the package, by kind."""
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin", "medusa_lm_head.safetensors", "medusa_lm_head.pt")
"""Where weights are looked for, in this order."""
LAYER_NAMES = {"eagle3": "midlayer", "eagle": "layers.0"}
"""What the one layer of an EAGLE head is called in published checkpoints."""
MEDUSA_BLOCK = re.compile(r"([0-9]+)\.([0-9]+)\.linear\.(weight|bias)")
MEDUSA_LM_HEAD = re.compile(r"([0-9]+)\.([0-9]+)\.weight")
KINDS = ("eagle", "eagle3", "medusa")
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
    path = next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), None)
    if path is None:
        raise FileNotFoundError(f"no weights in {folder}: none of {', '.join(WEIGHT_FILES)}")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        weights = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(weights, dict) or not all(isinstance(tensor, Tensor) for tensor in weights.values()):
            raise TypeError("it holds something else than named tensors")
        return weights
    except (SafetensorError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise ValueError(f"the drafter's weights in {folder} are truncated or damaged: {error}") from error
    except Exception as error:  # torch.load raises pickle's own kinds for anything but tensors
        raise ValueError(f"the drafter's weights in {path} are not a plain tensor file: {error}") from error


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


def kind_of(weights: dict[str, Tensor], expected: tuple[str, ...] = KINDS) -> str:
    """The kind of drafter that these keys make.

    Raises:
        ValueError: none of `expected`; the message names some keys.
    """
    found = next((kind for kind, layer in LAYER_NAMES.items() if f"{layer}.self_attn.q_proj.weight" in weights), None)
    if found is None and any(MEDUSA_BLOCK.fullmatch(name) for name in weights):
        found = "medusa"
    if found not in expected:
        raise ValueError(
            f"the drafter's kind is {found or 'unknown'}, not one of {', '.join(expected)}; "
            f"its keys are {sorted(weights)[:6]} …"
        )
    return found


def check_provenance(fields: dict, target, source: Path) -> None:
    """Raise ValueError if a config says that its drafter was trained for another target."""
    made_for = fields.get("target_fingerprint")
    if made_for is not None and made_for != (fingerprint := target.fingerprint):
        name = fields.get("target_name")
        raise ValueError(
            f"the drafter in {source} was trained for {f'{name} ({made_for})' if name else made_for}, "
            f"not for {target.name} ({fingerprint})"
        )


def load_drafter(folder: str | Path, target, dtype: torch.dtype | None = None) -> EagleDrafter | MedusaDrafter:
    """The drafter for `target` in a checkpoint folder, whatever its kind.

    Args:
        dtype: of its weights; None: the target's.

    Raises:
        FileNotFoundError: folder, config or weights are missing.
        ValueError: a file is damaged; the keys are of no known kind; a key is missing, unknown or of another
            shape; it does not fit the target's hidden size or vocabulary, or was trained for another target.
    """
    return load_kind(KINDS, folder, target, dtype)


def load_eagle(folder: str | Path, target, dtype: torch.dtype | None = None) -> EagleDrafter:
    """As `load_drafter`, of an EAGLE-1/2 or EAGLE-3 head only."""
    return load_kind(("eagle", "eagle3"), folder, target, dtype)


def load_medusa(folder: str | Path, target, dtype: torch.dtype | None = None) -> MedusaDrafter:
    """As `load_drafter`, of Medusa heads only."""
    return load_kind(("medusa",), folder, target, dtype)


def load_kind(kinds: tuple[str, ...], folder: str | Path, target, dtype: torch.dtype | None) -> Drafter:
    """As `load_drafter`, of some kinds only."""
    folder = as_path("folder", folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"drafter folder {folder} does not exist")
    fields, weights = read_config(folder), read_weights(folder)
    kind = kind_of(weights, kinds)
    check_provenance(fields, target, folder)
    if kind == "medusa":
        return build_medusa(weights, target, dtype or target.dtype, folder)
    return build_eagle(fields, weights, target, dtype or target.dtype, folder)


def head_config(fields: dict, weights: dict[str, Tensor], n_layers: int) -> EagleConfig:
    """The shape of an EAGLE head from its config and keys; what a config leaves out has the published default."""
    kind = kind_of(weights, ("eagle", "eagle3"))
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


def build_eagle(fields: dict, weights: dict[str, Tensor], target, dtype: torch.dtype, source: Path) -> EagleDrafter:
    """An EAGLE head from what its folder `source` holds."""
    config = head_config(fields, weights, target.n_layers)
    check_fits(config, target.hidden_size, target.vocab_size, target.n_layers)
    embedding = weights.pop("embed_tokens.weight", None)
    if embedding is not None and tuple(embedding.shape) != (target.vocab_size, config.layer.hidden_size):
        raise ValueError(f"embed_tokens.weight has shape {tuple(embedding.shape)}, not the target's vocabulary")
    head = EagleHead(config).to(target.device, dtype)
    load_strictly(head, weights, source)
    embedding = target.embedding if embedding is None else embedding.to(target.device, dtype)
    if embedding.shape[1] != config.layer.hidden_size:
        raise ValueError(
            f"the drafter has hidden size {config.layer.hidden_size} and no embeddings of its own; "
            f"the target's have {embedding.shape[1]}"
        )
    return EagleDrafter(head, embedding, target.apply_head)


def medusa_config(weights: dict[str, Tensor], target) -> MedusaConfig:
    """The shape of Medusa heads, counted on their keys (published configs often state another number of heads).

    Raises:
        ValueError: they read another hidden size, or write another vocabulary, than the target's.
    """
    blocks = {name: match.groups() for name in weights if (match := MEDUSA_BLOCK.fullmatch(name))}
    lm_heads = [name for name in weights if MEDUSA_LM_HEAD.fullmatch(name)]
    # sizes that disagree among themselves are left to the report on each key
    hidden = {weights[name].shape[-1] for name in blocks if weights[name].dim()}
    if len(hidden) == 1 and hidden != {target.hidden_size}:
        raise ValueError(f"the drafter reads features of size {hidden.pop()}, the target has {target.hidden_size}")
    vocabulary = {weights[name].shape[0] for name in lm_heads if weights[name].dim()}
    if len(vocabulary) == 1 and vocabulary != {target.vocab_size}:
        raise ValueError(f"the drafter's vocabulary has {vocabulary.pop()} tokens, the target's {target.vocab_size}")
    return MedusaConfig(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        n_heads=len({head for head, _, _ in blocks.values()}),
        n_layers=len({layer for _, layer, _ in blocks.values()}),
        own_lm_heads=bool(lm_heads),
    )


def build_medusa(weights: dict[str, Tensor], target, dtype: torch.dtype, source: Path) -> MedusaDrafter:
    """Medusa heads from what their folder `source` holds."""
    heads = MedusaHeads(medusa_config(weights, target)).to(target.device, dtype)
    load_strictly(heads, weights, source)
    return MedusaDrafter(heads, target.n_layers, target.apply_head)


def load_bundled(target, kind: str = "eagle3", dtype: torch.dtype | None = None) -> Drafter:
    """A drafter that ships with the package, for the bundled target only (its config names that one).

    Args:
        kind: eagle3, eagle2 or medusa.

    Raises:
        ValueError: another kind; the target is another model.
    """
    if kind not in BUNDLED:
        raise ValueError(f"kind={kind!r} is not one of the bundled drafters: {', '.join(BUNDLED)}")
    return load_drafter(BUNDLED[kind], target, dtype)


def random_eagle(target, seed: int = 0) -> EagleDrafter:
    """An EAGLE-3 head of random weights that fits a target: the drafter that knows nothing."""
    taps = published_taps("eagle3", target.n_layers)
    config = EagleConfig("eagle3", layer_like(target.config), taps, target.hidden_size, min(8192, target.vocab_size))
    head = EagleHead.random(config, seed).to(target.device, target.dtype)
    return EagleDrafter(head, target.embedding, target.apply_head)


def load_strictly(head: nn.Module, weights: dict[str, Tensor], source: Path) -> None:
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
        raise ValueError(f"the keys of the drafter in {source} do not fit its kind: {'; '.join(problems[:8])}")
    for name, tensor in own.items():
        tensor.copy_(weights[name])


def published_weights(head: EagleHead | MedusaHeads) -> dict[str, Tensor]:
    """The drafter's own tensors under their published names."""
    if isinstance(head, MedusaHeads):
        return head.heads.state_dict()
    layer = LAYER_NAMES[head.config.kind]
    return {name.replace("midlayer.", f"{layer}."): tensor for name, tensor in head.state_dict().items()}


def save_eagle(folder: str | Path, head: EagleHead, dtype: torch.dtype = torch.bfloat16, extra: dict | None = None):
    """Write a head in its published layout.

    Args:
        dtype: of the weights on disk.
        extra: further fields for `config.json` (provenance: `target_fingerprint`, `target_name`).
    """
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
    }
    write_checkpoint(Path(folder), head, dtype, fields | (extra or {}))


def save_medusa(folder: str | Path, heads: MedusaHeads, dtype: torch.dtype = torch.bfloat16, extra: dict | None = None):
    """Write Medusa heads in their published layout; without LM head keys where they borrow the target's.

    Args:
        dtype: of the weights on disk.
        extra: further fields for `config.json` (provenance: `target_fingerprint`, `target_name`); the name also
            stands for the published `base_model_name_or_path`.
    """
    extra = extra or {}
    fields = {
        "medusa_num_heads": heads.config.n_heads,
        "medusa_num_layers": heads.config.n_layers,
        "base_model_name_or_path": extra.get("target_name"),
        "hidden_size": heads.config.hidden_size,
        "vocab_size": heads.config.vocab_size,
    }
    write_checkpoint(Path(folder), heads, dtype, fields | extra)


def write_checkpoint(folder: Path, head: EagleHead | MedusaHeads, dtype: torch.dtype, fields: dict) -> None:
    """Write weights (floating ones as `dtype`) and `config.json`, each whole or not at all."""
    weights = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in published_weights(head).items()
    }
    write_tensors(folder / "model.safetensors", weights)
    write_json(folder / "config.json", fields)


def save_head(folder: str | Path, head: EagleHead | MedusaHeads, dtype: torch.dtype, extra: dict | None = None) -> None:
    """Write a head of any kind in its published layout; see `save_eagle` and `save_medusa`."""
    save = save_medusa if isinstance(head, MedusaHeads) else save_eagle
    save(folder, head, dtype, extra)
