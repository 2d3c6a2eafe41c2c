"""EAGLE heads: one decoder layer that drafts in the target's feature space.

One module serves both generations, with the published parameter names (checkpoints load as they are):

* EAGLE-1/2 (arXiv 2401.15077, 2406.16858): `fc` joins the token's embedding and the feature (the target's
  state after its final norm); one layer; the target's own LM head reads its output.
* EAGLE-3 (arXiv 2503.01840): `fc` fuses three tapped states (low, middle, high) to one; the layer reads the
  normed embedding and the normed state side by side; its own norm and head over a draft vocabulary.

Row j of the features is paired with token j+1, at rotary position j. Committed rows are computed from the
target's true features, so the drafter's state depends on the prefix tokens alone; a drafted row takes its
parent's output in place of the feature. Only the rows' keys and values are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from eagle_tree.cache import KVCache
from eagle_tree.drafter.base import Drafter
from eagle_tree.draw import candidates
from eagle_tree.noise import PassNoise
from eagle_tree.tree import Draft, Frontier, GrowingTree

KINDS = ("eagle", "eagle3")
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
UNBOUNDED = 1 << 30


@dataclass(frozen=True)
class EagleConfig:
    """Shape of a head.

    Attributes:
        kind: `eagle` (1 and 2) or `eagle3`.
        layer: the layer's shape and rotary embedding, as a `LlamaConfig` (its `vocab_size` is the target's).
        taps: the target's hidden states that make the feature.
        target_hidden_size: width of each tapped state.
        draft_vocab_size: EAGLE-3's own vocabulary; the target's for EAGLE-1/2.
        fc_bias: whether `fc` has a bias (EAGLE-1/2 checkpoints).
        qkv_bias: whether q, k, v have one.
    """

    kind: str
    layer: LlamaConfig
    taps: tuple[int, ...]
    target_hidden_size: int
    draft_vocab_size: int
    fc_bias: bool = False
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} is not one of {KINDS}")
        if not 1 <= self.draft_vocab_size <= self.layer.vocab_size:
            raise ValueError(f"draft_vocab_size={self.draft_vocab_size} is outside 1…{self.layer.vocab_size}")

    @property
    def has_draft_vocab(self) -> bool:
        """Whether draft and target ids differ (`d2t`, `t2d` are present)."""
        return self.kind == "eagle3" and self.draft_vocab_size < self.layer.vocab_size


class EagleAttention(nn.Module):
    """Projections and rotary embedding; who attends to whom is the caller's `attend`."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        layer = config.layer
        width = layer.hidden_size * (2 if config.kind == "eagle3" else 1)
        self.head_dim = layer.head_dim or layer.hidden_size // layer.num_attention_heads
        self.q_proj = nn.Linear(width, layer.num_attention_heads * self.head_dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, layer.num_key_value_heads * self.head_dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, layer.num_key_value_heads * self.head_dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(layer.num_attention_heads * self.head_dim, layer.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """`x [B, T, width]` to `[B, T, h]`; `attend` maps q, k, v `[B, heads, T, d]` to `[B, heads, T, d]`."""
        split = (*x.shape[:2], -1, self.head_dim)
        query = self.q_proj(x).view(split).transpose(1, 2)
        key = self.k_proj(x).view(split).transpose(1, 2)
        value = self.v_proj(x).view(split).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        return self.o_proj(attend(query, key, value).transpose(1, 2).flatten(2))


class EagleLayer(nn.Module):
    """The one decoder layer. EAGLE-3 normalises embedding and state apart; EAGLE-1/2 has no input norm."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        layer = config.layer
        self.kind = config.kind
        self.self_attn = EagleAttention(config)
        self.mlp = LlamaMLP(layer)
        self.post_attention_layernorm = LlamaRMSNorm(layer.hidden_size, layer.rms_norm_eps)
        if config.kind == "eagle3":
            self.input_layernorm = LlamaRMSNorm(layer.hidden_size, layer.rms_norm_eps)
            self.hidden_norm = LlamaRMSNorm(layer.hidden_size, layer.rms_norm_eps)

    def forward(self, embedding: Tensor | None, state: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """`state [B, T, h]` (for EAGLE-1/2 already joined with the embedding) to the next state."""
        x = state
        if self.kind == "eagle3":  # the residual is taken before hidden_norm
            x = torch.cat([self.input_layernorm(embedding), self.hidden_norm(state)], -1)
        state = state + self.self_attn(x, rotary, attend)
        return state + self.mlp(self.post_attention_layernorm(state))


class EagleHead(nn.Module):
    """The trainable head, stateless.

    Args:
        config: its shape.
    """

    def __init__(self, config: EagleConfig):
        super().__init__()
        self.config = config
        hidden = config.layer.hidden_size
        self.midlayer = EagleLayer(config)
        self.rotary = LlamaRotaryEmbedding(config.layer)
        if config.kind == "eagle3":
            self.fc = nn.Linear(len(config.taps) * config.target_hidden_size, hidden, bias=False)
            self.norm = LlamaRMSNorm(hidden, config.layer.rms_norm_eps)
            self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        else:
            self.fc = nn.Linear(hidden + config.target_hidden_size, hidden, bias=config.fc_bias)
        if config.has_draft_vocab:
            # d2t is an offset: target id = draft id + d2t[draft id]
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(config.layer.vocab_size, dtype=torch.bool))

    def _apply(self, fn, *arguments, **keywords):
        """A cast leaves the rotary frequencies in fp32, as loading a transformers model does.

        In bf16 they are off by up to 0.2 %: a radian, at a distance of some hundred positions.
        """
        super()._apply(fn, *arguments, **keywords)
        self.rotary = LlamaRotaryEmbedding(self.config.layer).to(self.fc.weight.device)
        return self

    @classmethod
    def random(cls, config: EagleConfig, seed: int = 0) -> EagleHead:
        """A head of random weights, for tests and as the drafter that knows nothing."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            head = cls(config)
        if config.has_draft_vocab:
            head.set_draft_vocab(torch.arange(config.draft_vocab_size))
        return head

    def set_draft_vocab(self, token: Tensor) -> None:
        """Draft id i stands for target id `token[i]` (ascending)."""
        self.d2t.copy_(token - torch.arange(token.shape[0]))
        self.t2d.zero_()[token] = True

    @property
    def draft_to_target(self) -> Tensor:
        """Target ids `[draft vocab]` of the draft ids."""
        index = torch.arange(self.config.draft_vocab_size, device=self.fc.weight.device)
        return index + self.d2t if self.config.has_draft_vocab else index

    def feature(self, tapped: Tensor) -> Tensor:
        """The state that a committed row starts from: the fused taps, or the feature itself."""
        return self.fc(tapped) if self.config.kind == "eagle3" else tapped

    def step(self, embedding: Tensor, state: Tensor, position: Tensor, attend: Attend) -> Tensor:
        """One step of every row.

        Args:
            embedding: `[B, T, h]` of each row's token; state: `[B, T, h]`, the feature or the parent row's
            output; position: `[B, T]`, rotary positions.

        Returns:
            the output state `[B, T, h]`, from which the next step and the logits are made.
        """
        if self.config.kind == "eagle":
            state = self.fc(torch.cat([embedding, state], -1))
        return self.midlayer(embedding, state, self.rotary(state, position), attend)

    def forward(
        self,
        embedding: Tensor,
        state: Tensor,
        position: Tensor,
        attend: Attend,
        borrowed_head: Callable[[Tensor], Tensor],
        n_read: int,
    ) -> tuple[Tensor, Tensor]:
        """`step`, and the draft logits `[B, n_read, draft vocab]` of the last `n_read` rows.

        EAGLE-1/2 borrows the target's head for them.
        """
        state = self.step(embedding, state, position, attend)
        last = state[:, -n_read:]
        return state, self.lm_head(self.norm(last)) if self.config.kind == "eagle3" else borrowed_head(last)


@dataclass
class DraftTreeState:
    """What the drafter holds of the tree that grows: one slot per expanded node, the root's first.

    Attributes:
        state: `[E, h]`, output states; ancestors: `[E, E] bool`, slot sees slot; slot: `[M]`, the slot of a
        pool node, -1 if it was never expanded.
    """

    state: Tensor
    ancestors: Tensor
    slot: Tensor


@dataclass
class Sequence:
    """The committed prefix: rows in the cache, rows still to be computed, and the last one's outputs."""

    rows: int = 0
    tokens: list[Tensor] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)
    last_state: Tensor | None = None
    last_logits: Tensor | None = None


class EagleDrafter(Drafter):
    """Drafts with an `EagleHead` on top of a target.

    Args:
        head: the trained head.
        embedding: input embeddings `[V, h]`, the checkpoint's own or the target's.
        borrowed_head: maps states to target logits; EAGLE-1/2 needs it.
    """

    def __init__(self, head: EagleHead, embedding: Tensor, borrowed_head: Callable[[Tensor], Tensor]):
        self.module = head.eval().requires_grad_(False)
        self.head = head
        self.embedding = embedding
        self.borrowed_head = borrowed_head
        self.taps = head.config.taps
        self.vocab_size = head.config.draft_vocab_size
        self.target_id = head.draft_to_target
        self.cache = KVCache(1, UNBOUNDED)
        self.sequence = Sequence()
        self.tree: DraftTreeState | None = None

    def start(self, prompt_ids: Tensor, features: Tensor | None, pending: Tensor) -> None:
        self.cache.reset()
        self.sequence = Sequence()
        self.advance(torch.cat([prompt_ids[1:], pending]), features)

    def advance(self, tokens: Tensor, features: Tensor | None) -> None:
        if features is None or features.shape[0] != tokens.shape[0]:
            got = "none" if features is None else features.shape[0]
            raise ValueError(f"an EAGLE head needs one feature row a token: {tokens.shape[0]} tokens, {got} rows")
        self.tree = None
        self.sequence.tokens.append(tokens)
        self.sequence.features.append(features)

    @torch.inference_mode()
    def expand(self, growing: GrowingTree, frontier: Frontier, noise: PassNoise | None) -> Draft:
        logits = self._expand_root(growing) if not growing.levels else self._expand_nodes(growing, frontier.node)
        return candidates(logits.float().log_softmax(-1), growing, frontier, noise, self.target_id)

    def _expand_root(self, growing: GrowingTree) -> Tensor:
        """Commit the rows that wait; the last one's output is the root's. Returns its logits `[1, draft vocab]`."""
        sequence = self.sequence
        self.cache.reset(length=sequence.rows)
        if sequence.tokens:
            tokens, features = torch.cat(sequence.tokens), torch.cat(sequence.features)
            n, before = tokens.shape[0], sequence.rows
            position = before + torch.arange(n, device=tokens.device)
            visible = torch.arange(before + n, device=tokens.device) <= position[:, None]
            feature = self.head.feature(features.to(self.head.fc.weight))
            state, sequence.last_logits = self._run(tokens, feature, position, visible, 1)
            sequence.rows, sequence.last_state = before + n, state[-1:]
            sequence.tokens, sequence.features = [], []
        ones = torch.ones(1, 1, dtype=torch.bool, device=growing.token.device)
        self.tree = DraftTreeState(sequence.last_state, ones, torch.zeros_like(growing.token))
        return sequence.last_logits

    def _expand_nodes(self, growing: GrowingTree, node: Tensor) -> Tensor:
        """One forward over the frontier; each node sees the prefix, its expanded ancestors and itself."""
        tree, rows, device = self.tree, self.sequence.rows, node.device
        count, before = node.shape[0], tree.state.shape[0]
        parent_slot = tree.slot[growing.parent[node]]
        itself = torch.eye(count, dtype=torch.bool, device=device)
        ancestors = torch.cat([tree.ancestors[parent_slot], itself], 1)
        # slot 0, the root, is a committed row; the columns behind the prefix are the slots from 1 on
        visible = torch.cat([itself.new_ones(count, rows), ancestors[:, 1:]], 1)
        position = rows - 1 + growing.depth[node]
        state, logits = self._run(growing.token[node], tree.state[parent_slot], position, visible, count)

        slot = F.pad(tree.slot, (0, growing.token.shape[0] - tree.slot.shape[0]), value=-1)
        slot[node] = before + torch.arange(count, device=device)
        older = F.pad(tree.ancestors, (0, count))
        self.tree = DraftTreeState(torch.cat([tree.state, state]), torch.cat([older, ancestors]), slot)
        return logits

    def _run(
        self, token: Tensor, state: Tensor, position: Tensor, visible: Tensor, n_read: int
    ) -> tuple[Tensor, Tensor]:
        """Forward of rows `[n]` that are appended to the cache and see `visible [n, cached + n]`."""

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = (for_queries(one, query) for one in self.cache.update(key, value, 0))
            return F.scaled_dot_product_attention(query, keys, values, attn_mask=visible)

        embedding = self.embedding[token].to(state.dtype)
        state, logits = self.head(embedding[None], state[None], position[None], attend, self.borrowed_head, n_read)
        return state[0], logits[0]


def for_queries(grouped: Tensor, query: Tensor) -> Tensor:
    """Keys or values `[B, kv heads, T, d]`, repeated to one head for each of the query's (grouped-query attention)."""
    return grouped.repeat_interleave(query.shape[1] // grouped.shape[1], 1)


def check_fits(config: EagleConfig, hidden_size: int, vocab_size: int, n_layers: int) -> None:
    """Raise ValueError unless a head of this shape can read a target of that shape."""
    if config.target_hidden_size != hidden_size:
        raise ValueError(
            f"the drafter reads features of size {config.target_hidden_size}, the target has {hidden_size}"
        )
    if config.layer.vocab_size != vocab_size:
        raise ValueError(f"the drafter's vocabulary has {config.layer.vocab_size} tokens, the target's {vocab_size}")
    for tap in config.taps:
        if not 0 <= tap <= n_layers:
            raise ValueError(f"the drafter taps layer {tap} of a target with {n_layers} layers")


def layer_like(source: PreTrainedConfig) -> LlamaConfig:
    """The shape of a head's layer that is one more layer of a target: its widths, heads, norm and rotary embedding."""
    names = ("rms_norm_eps", "rope_parameters", "hidden_act", "max_position_embeddings")
    return LlamaConfig(
        hidden_size=source.hidden_size,
        intermediate_size=source.intermediate_size,
        num_attention_heads=source.num_attention_heads,
        num_key_value_heads=getattr(source, "num_key_value_heads", None) or source.num_attention_heads,
        head_dim=getattr(source, "head_dim", None) or source.hidden_size // source.num_attention_heads,
        vocab_size=source.vocab_size,
        **{name: getattr(source, name) for name in names if getattr(source, name, None) is not None},
    )


def published_taps(kind: str, n_layers: int) -> tuple[int, ...]:
    """The taps that released checkpoints use: inputs of layers 2, n//2, n-3; after the final norm for EAGLE-1/2."""
    return (2, n_layers // 2, n_layers - 3) if kind == "eagle3" else (n_layers,)
