"""What each kind of drafter is trained for. A new kind is one `Objective` here and one yaml in `conf/head`.

* `Eagle3`: the *training-time test* (arXiv 2503.01840 §3.1). The head drafts `draft_steps` tokens from every position
  on its own outputs, as it will when it is used. At step s the row that started at position t stands for a chain of
  s drafted nodes behind the committed prefix 0…t: it is fed the true token t+1+s and the state of step s-1, stands
  at rotary position t+s, and sees step 0's keys up to t and its own keys of steps 1…s.
* `Eagle`: EAGLE-1/2 (arXiv 2401.15077 §3). One step on true, slightly noised features; predicts the next feature and,
  through the target's own head, the next law.
* `Medusa`: Medusa-1 with self-distillation (arXiv 2401.10774). Head i reads the state at position t and predicts the
  law after token t+1+i.

Every objective returns sums and counts by depth, never means: a mean over a batch is then a mean over its learnt
positions, whatever the padding and however many processes share the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from eagle_tree.checkpoint import load_drafter, save_head
from eagle_tree.checks import check_count
from eagle_tree.drafter.eagle import EagleConfig, EagleHead, for_queries, layer_like, published_taps
from eagle_tree.drafter.medusa import MedusaConfig, MedusaDrafter, MedusaHeads
from eagle_tree.features import Observed
from eagle_tree.losses import agreement, feature_distance, overlap, soft_cross_entropy, total_variation
from eagle_tree.target import Target


@dataclass(frozen=True)
class Batch:
    """One padded batch of texts.

    Attributes:
        token: `[B, T]`; learnt: `[B, T] bool`, whether the law *after* a position is learnt;
        feature: `[B, T, taps * H]`; hidden: `[B, T, H]`, after the final norm; log_z: `[B, T]`;
        seeds: one number a row, for its noise.
    """

    token: Tensor
    learnt: Tensor
    feature: Tensor
    hidden: Tensor
    log_z: Tensor
    seeds: tuple[int, ...] = ()

    def shift(self, name: str, start: int, rows: int) -> Tensor:
        """`rows` columns of an attribute from `start` on."""
        return getattr(self, name)[:, start : start + rows]


def make_batch(token: list[Tensor], learnt: list[Tensor], seen: list[Observed], seeds: list[int]) -> Batch:
    """Pad texts, and what the target says along them, to one batch on the target's device."""
    device = seen[0].hidden.device
    columns = {name: [getattr(one, name) for one in seen] for name in ("feature", "hidden", "log_z")}
    columns = {"token": [ids.to(device) for ids in token], "learnt": [mask.to(device) for mask in learnt], **columns}
    padded = {name: pad_sequence(column, batch_first=True) for name, column in columns.items()}
    return Batch(**padded, seeds=tuple(seeds))


@torch.no_grad()
def law_at(target: Target, hidden: Tensor, log_z: Tensor, token: Tensor | None = None) -> Tensor:
    """The target's law `[n, v]` at states `[n, H]`, of all tokens or of `token [v]` alone (not renormalised)."""
    with torch.autocast(hidden.device.type, enabled=False):  # log_z was taken in the target's own dtype
        return (target.apply_head(hidden, token).float() - log_z[:, None]).exp()


class Laws:
    """The target's laws at a batch's learnt positions, computed once and read at several depths.

    Args:
        token: `[v]`, the draft vocabulary; None for all tokens.
    """

    def __init__(self, target: Target, batch: Batch, token: Tensor | None = None):
        self.learnt = batch.learnt
        self.place = batch.learnt.flatten().cumsum(0).view_as(batch.learnt) - 1  # row of `law`, where learnt
        self.law = law_at(target, batch.hidden[batch.learnt], batch.log_z[batch.learnt], token)

    def at(self, start: int, rows: int) -> tuple[Tensor, Tensor]:
        """Which of `rows` columns from `start` on are learnt, `[B, rows] bool`, and the laws there, `[n, v]`."""
        learnt = self.learnt[:, start : start + rows]
        return learnt, self.law[self.place[:, start : start + rows][learnt]]


@dataclass(frozen=True)
class Sums:
    """Sums over a batch's learnt positions, by depth, each `[depths]`.

    Attributes:
        loss; agreed: first choices that are the law's (within the draft vocabulary); overlap: Σ min(p, q), the
        expected acceptance of one drawn token; count: positions.
    """

    loss: Tensor
    agreed: Tensor
    overlap: Tensor
    count: Tensor

    @classmethod
    def gather(cls, loss: list[Tensor], logits: list[Tensor], law: list[Tensor]) -> Sums:
        """From per-position losses `[n]`, logits `[n, v]` and laws `[n, v]` of every depth."""
        with torch.no_grad():
            agreed = [agreement(*pair).sum() for pair in zip(logits, law)]
            shared = [overlap(*pair).sum() for pair in zip(logits, law)]
        count = torch.tensor([one.shape[0] for one in loss], device=loss[0].device)
        return cls(torch.stack([one.sum() for one in loss]), torch.stack(agreed), torch.stack(shared), count)


class Objective(nn.Module):
    """A head and what it is trained for. `forward` maps a `Batch` to `Sums`.

    Attributes:
        head: what is trained; taps: the target's states that it reads.
        depth_weight: the loss is the sum of each depth's mean, weighted by these.
    """

    head: nn.Module
    taps: tuple[int, ...]
    depth_weight: tuple[float, ...]

    def forward(self, batch: Batch) -> Sums:
        raise NotImplementedError

    def coverage(self, counts: Tensor) -> float:
        """Share of tokens, of which `counts [V]` says how often each occurs, that the head can propose."""
        return 1.0

    def save(self, folder: Path, fields: dict[str, Any]) -> None:
        """Write the head in bf16, in its published layout, with further fields in `config.json`."""
        save_head(folder, self.head, torch.bfloat16, fields)


def decay(weight: float, depths: int) -> tuple[float, ...]:
    """1, weight, weight², … for so many depths."""
    if not 0 < weight <= 1:
        raise ValueError(f"step_weight={weight} is outside 0…1")
    return tuple(weight**depth for depth in range(depths))


def check_weights(**weights: float) -> None:
    """Raise ValueError unless no weight is negative and one is positive."""
    for name, value in weights.items():
        if not value >= 0:
            raise ValueError(f"{name}={value} must not be negative")
    if not sum(weights.values()) > 0:
        raise ValueError(f"{' = '.join(weights)} = 0: nothing would be learnt")


class Eagle3(Objective):
    """The training-time test.

    Args:
        head: an EAGLE-3 head.
        draft_steps: self-fed steps, the first (on true features) included; step s weighs step_weight**s.
        cross_entropy, total_variation: weights of the two loss terms.
    """

    def __init__(
        self,
        target: Target,
        head: EagleHead,
        draft_steps: int = 4,
        step_weight: float = 0.8,
        cross_entropy: float = 1.0,
        total_variation: float = 0.0,
    ):
        super().__init__()
        check_count("draft_steps", draft_steps)
        check_weights(cross_entropy=cross_entropy, total_variation=total_variation)
        self.target = target
        self.head = head
        self.taps = head.config.taps
        self.depth_weight = decay(step_weight, draft_steps)
        self.cross_entropy = cross_entropy
        self.total_variation = total_variation

    @classmethod
    def build(
        cls,
        target: Target,
        counts: Tensor,
        initial: str = "target",
        draft_vocab_size: int = 8192,
        taps: list[int] | None = None,
        **terms: Any,
    ) -> Eagle3:
        """An objective on a new head.

        Args:
            counts: `[V]`, how often the corpus's answers say each token; the most frequent make the draft vocabulary.
            initial: `target` (its last layer, norm and head rows), `random`, or the folder of a head to go on from. Of
                the corpus's frequent tokens, those that it could not propose start at the target's head rows.
            taps: None is the published choice.
        """
        if not 1 <= draft_vocab_size <= target.vocab_size:
            raise ValueError(f"draft_vocab_size={draft_vocab_size} is outside 1…{target.vocab_size}")
        taps = tuple(taps or published_taps("eagle3", target.n_layers))
        chosen = frequent_tokens(counts, draft_vocab_size).to(target.device)
        if initial in ("target", "random"):
            return cls(target, initial_eagle3(target, chosen, taps, initial == "random"), **terms)
        head = load_head(initial, target, EagleHead)
        if (head.config.kind, head.config.taps) != ("eagle3", taps):
            raise ValueError(
                f"initial={initial} is an {head.config.kind} head with taps={list(head.config.taps)}, not an eagle3 "
                f"head with {list(taps)}"
            )
        if not torch.equal(chosen, head.draft_to_target):
            head = with_draft_vocab(head, target, chosen)
        return cls(target, head, **terms)

    def forward(self, batch: Batch) -> Sums:
        draft_tokens, embedding, dtype = self.head.draft_to_target, self.target.embedding, self.head.fc.weight.dtype
        keys: list[Tensor] = []
        values: list[Tensor] = []
        losses, read, laws = [], [], []
        known = Laws(self.target, batch, draft_tokens)
        steps = len(self.depth_weight)
        rows = batch.token.shape[1] - steps  # every row has a true token and law at every step
        state = self.head.feature(batch.feature.to(dtype))[:, :rows]
        for step in range(steps):
            position = torch.arange(rows, device=state.device)[None] + step

            def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                keys.append(for_queries(key, query))
                values.append(for_queries(value, query))
                return chain_attention(query, keys, values)

            token = batch.shift("token", 1 + step, rows)
            state = self.head.step(embedding[token].to(dtype), state, position, attend)
            learnt, law = known.at(1 + step, rows)
            logits = self.head.lm_head(self.head.norm(state[learnt])).float()
            loss = logits.new_zeros(logits.shape[0])
            if self.cross_entropy:
                loss = loss + self.cross_entropy * soft_cross_entropy(logits, law)
            if self.total_variation:
                loss = loss + self.total_variation * total_variation(logits, law)
            losses.append(loss)
            read.append(logits.detach())
            laws.append(law)
        return Sums.gather(losses, read, laws)

    def coverage(self, counts: Tensor) -> float:
        return (counts[self.head.draft_to_target.cpu()].sum() / counts.sum()).item()


class Eagle(Objective):
    """EAGLE-1/2: regress the next feature, and the next law through the target's own head.

    Args:
        head: an EAGLE-1/2 head.
        feature_weight, cross_entropy: of the two loss terms; the paper's are 1 and 0.1.
        noise: features are moved by a uniform draw from ±noise, so that the head bears its own errors.
    """

    def __init__(
        self,
        target: Target,
        head: EagleHead,
        feature_weight: float = 1.0,
        cross_entropy: float = 0.1,
        noise: float = 0.1,
    ):
        super().__init__()
        check_weights(feature_weight=feature_weight, cross_entropy=cross_entropy)
        if not noise >= 0:
            raise ValueError(f"noise={noise} must not be negative")
        self.target = target
        self.head = head
        self.taps = head.config.taps
        self.depth_weight = (1.0,)
        self.feature_weight = feature_weight
        self.cross_entropy = cross_entropy
        self.noise = noise

    @classmethod
    def build(cls, target: Target, counts: Tensor, initial: str = "identity", **terms: Any) -> Eagle:
        """An objective on a new head: `identity` predicts the same feature again, `random`, or a head's folder."""
        if initial in ("identity", "random"):
            return cls(target, initial_eagle(target, initial == "random"), **terms)
        head = load_head(initial, target, EagleHead)
        if head.config.kind != "eagle":
            raise ValueError(f"initial={initial} is an {head.config.kind} head, not an EAGLE-1/2 one")
        return cls(target, head, **terms)

    def forward(self, batch: Batch) -> Sums:
        rows = batch.token.shape[1] - 1
        feature = batch.feature.to(self.head.fc.weight.dtype)
        position = torch.arange(rows, device=feature.device)[None]

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return chain_attention(query, [for_queries(key, query)], [for_queries(value, query)])

        embedding = self.target.embedding[batch.token[:, 1:]].to(feature.dtype)
        predicted = self.head.step(embedding, self.noised(feature, batch.seeds)[:, :rows], position, attend)
        learnt, hidden, log_z = (batch.shift(name, 1, rows) for name in ("learnt", "hidden", "log_z"))
        law = law_at(self.target, hidden[learnt], log_z[learnt])
        predicted, true = predicted[learnt], feature[:, 1:][learnt]
        loss = self.feature_weight * feature_distance(predicted, true)
        logits = self.target.apply_head(predicted.to(self.target.dtype)).float()
        loss = loss + self.cross_entropy * soft_cross_entropy(logits, law)
        return Sums.gather([loss], [logits.detach()], [law])

    def noised(self, feature: Tensor, seeds: tuple[int, ...]) -> Tensor:
        """Features `[B, T, H]` moved by ±noise; each text's draw depends on its own seed and length alone."""
        if not self.noise:
            return feature
        moves = []
        for seed in seeds:
            generator = torch.Generator(device=feature.device).manual_seed(seed)
            uniform = torch.rand(feature.shape[1:], generator=generator, device=feature.device)
            moves.append(self.noise * (2 * uniform - 1))
        return feature + torch.stack(moves)


class Medusa(Objective):
    """Medusa-1: every head learns the target's law at its own distance; the target stays as it is.

    Args:
        heads: residual blocks that end in the target's own head.
        step_weight: head i weighs step_weight**i.
    """

    def __init__(self, target: Target, heads: MedusaHeads, step_weight: float = 0.8):
        super().__init__()
        self.target = target
        self.head = heads
        self.taps = (target.n_layers,)
        self.depth_weight = decay(step_weight, heads.config.n_heads)

    @classmethod
    def build(
        cls,
        target: Target,
        counts: Tensor,
        initial: str = "identity",
        n_heads: int = 5,
        n_layers: int = 1,
        **terms: Any,
    ) -> Medusa:
        """An objective on new heads: `identity` starts as the target's next-token head, `random`, or a folder."""
        check_count("n_heads", n_heads)
        check_count("n_layers", n_layers)
        config = MedusaConfig(target.hidden_size, target.vocab_size, n_heads, n_layers, own_lm_heads=False)
        if initial == "identity":
            heads = MedusaHeads(config)
        elif initial == "random":
            heads = MedusaHeads.random(config)
        else:
            heads = load_head(initial, target, MedusaHeads)
            if heads.config != config:
                raise ValueError(f"initial={initial} holds {heads.config}, not {config}")
        return cls(target, heads.to(target.device).float(), **terms)

    def forward(self, batch: Batch) -> Sums:
        losses, read, laws = [], [], []
        known = Laws(self.target, batch)
        depths = len(self.depth_weight)
        rows = batch.token.shape[1] - depths
        states = self.head(batch.feature[:, :rows].to(next(self.head.parameters()).dtype))
        for depth in range(depths):
            learnt, law = known.at(1 + depth, rows)
            logits = self.target.apply_head(states[depth][learnt].to(self.target.dtype)).float()
            losses.append(soft_cross_entropy(logits, law))
            read.append(logits.detach())
            laws.append(law)
        return Sums.gather(losses, read, laws)


def chain_attention(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of step s: causal over step 0's keys, and the row's own keys of steps 1…s.

    Args:
        query: `[B, heads, T, d]`; keys, values: one such tensor a step so far.
    """
    if len(keys) == 1:
        return F.scaled_dot_product_attention(query, keys[0], values[0], is_causal=True)
    scale = query.shape[-1] ** -0.5
    length = query.shape[2]
    causal = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    block = (query @ keys[0].transpose(2, 3) * scale).masked_fill(~causal, -torch.inf)
    own = torch.stack([(query * key).sum(-1) * scale for key in keys[1:]], -1)
    weight = torch.cat([block, own], -1).softmax(-1)
    out = weight[..., :length] @ values[0]
    for index, value in enumerate(values[1:]):
        out = out + weight[..., length + index, None] * value
    return out


def frequent_tokens(counts: Tensor, size: int) -> Tensor:
    """The `size` most frequent tokens of `counts [V]`, as ascending ids; ties go to the smaller id."""
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def load_head(folder: str, target: Target, kind: type[nn.Module]) -> Any:
    """The fp32 head in a checkpoint folder, or ValueError if it is another kind of drafter's."""
    drafter = load_drafter(folder, target, torch.float32)
    head = drafter.heads if isinstance(drafter, MedusaDrafter) else drafter.head
    if not isinstance(head, kind):
        raise ValueError(f"initial={folder} holds {type(head).__name__}, not {kind.__name__}")
    return head


def with_draft_vocab(head: EagleHead, target: Target, token: Tensor) -> EagleHead:
    """The same head for the draft vocabulary `token [v]` (ascending): rows of tokens it lacked are the target's."""
    changed = EagleHead(replace(head.config, draft_vocab_size=token.shape[0])).to(token.device, head.fc.weight.dtype)
    kept = {name: tensor for name, tensor in head.state_dict().items() if name not in ("lm_head.weight", "d2t", "t2d")}
    changed.load_state_dict(kept, strict=False)
    with torch.no_grad():
        rows = target.model.get_output_embeddings().weight.to(head.lm_head.weight.dtype, copy=True)
        rows[head.draft_to_target] = head.lm_head.weight
        changed.lm_head.weight.copy_(rows[token])
    if changed.config.has_draft_vocab:
        changed.set_draft_vocab(token)
    return changed


def initial_eagle3(target: Target, draft_tokens: Tensor, taps: tuple[int, ...], random: bool = False) -> EagleHead:
    """A new EAGLE-3 head; unless `random`, it starts as the target's own last layer.

    `fc` passes the last tap through; the layer is the target's last one (which reads the state half of its
    input); norm and head rows are the target's.
    """
    config = EagleConfig("eagle3", layer_like(target.config), taps, target.hidden_size, draft_tokens.shape[0])
    head = EagleHead.random(config).float().to(target.device)
    if config.has_draft_vocab:
        head.set_draft_vocab(draft_tokens)
    if random:
        return head
    hidden = target.hidden_size
    with torch.no_grad():
        copy_last_layer(target, head)
        head.fc.weight.zero_()
        head.fc.weight[:, -hidden:] = torch.eye(hidden)
        head.midlayer.hidden_norm.weight.copy_(target.layers[-1].input_layernorm.weight)
        head.norm.weight.copy_(target.decoder.norm.weight)
        head.lm_head.weight.copy_(target.model.get_output_embeddings().weight[draft_tokens])
    return head


def initial_eagle(target: Target, random: bool = False) -> EagleHead:
    """A new EAGLE-1/2 head; unless `random`, it predicts that the feature does not change.

    `fc` passes the feature through and the layer adds nothing at first. (The target's last layer would be no start:
    it reads the residual stream, not the state after the final norm.)
    """
    layer = layer_like(target.config)
    config = EagleConfig(
        "eagle", layer, published_taps("eagle", target.n_layers), target.hidden_size, target.vocab_size, fc_bias=True
    )
    head = EagleHead.random(config).float().to(target.device)
    if not random:
        hidden = target.hidden_size
        with torch.no_grad():
            head.fc.weight[:, hidden:] = torch.eye(hidden, device=target.device)
            head.fc.weight[:, :hidden].zero_()
            head.fc.bias.zero_()
            head.midlayer.self_attn.o_proj.weight.zero_()
            head.midlayer.mlp.down_proj.weight.zero_()
    return head


def copy_last_layer(target: Target, head: EagleHead) -> None:
    """The target's last layer into an EAGLE-3 head's; q, k, v read the state half of their input, the rest is small.

    Raises:
        ValueError: the last layer has other parts than a Llama layer (initial=random serves any target).
    """
    last, attention = target.layers[-1], head.midlayer.self_attn
    try:
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(attention, name).weight
            weight.normal_(std=0.002, generator=torch.Generator(weight.device).manual_seed(0))
            weight[:, target.hidden_size :] = getattr(last.self_attn, name).weight.float()
        attention.o_proj.weight.copy_(last.self_attn.o_proj.weight)
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(head.midlayer.mlp, name).weight.copy_(getattr(last.mlp, name).weight)
        head.midlayer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
    except (AttributeError, RuntimeError) as error:
        raise ValueError(
            f"initial='target': the last layer of {target.name} is not shaped like a Llama layer ({error}); "
            "use initial=random"
        ) from error
