"""Train an EAGLE-3 head on a target's own text.

The loss is EAGLE-3's *training-time test* (arXiv 2503.01840 §3.1): the head drafts `steps` tokens from every
position on its own outputs, as it will when it is used, and each step is scored by soft cross-entropy
against the target's law. At step s the row that started at position t stands for a chain of s drafted nodes
behind the committed prefix 0…t: it is fed the true token t+1+s and the state of step s-1, stands at rotary
position t+s, and sees step 0's keys up to t and its own keys of steps 1…s.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig

from eagle_tree.drafter.eagle import EagleConfig, EagleHead, published_taps
from eagle_tree.target import Target


@dataclass(frozen=True)
class TrainSettings:
    """How a head is trained.

    Attributes:
        steps: optimiser steps; the cosine schedule ends there.
        sequences_per_step: batch size in sequences. Steps count more than batch size at this scale.
        max_length: sequences are cut there, in tokens.
        draft_steps: self-fed steps of the training-time test, the first (true features) included.
        step_weight: loss weight of step s is step_weight**s.
        learning_rate, warmup_steps, weight_decay, clip: of AdamW (betas 0.9, 0.95), with cosine decay to 2 %.
        autocast: multiply in bf16 (weights stay fp32).
        seed: of the data order.
    """

    steps: int = 3000
    sequences_per_step: int = 2
    max_length: int = 384
    draft_steps: int = 4
    step_weight: float = 0.8
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    weight_decay: float = 0.0
    clip: float = 0.5
    autocast: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "sequences_per_step", "draft_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.max_length <= self.draft_steps + 2:
            raise ValueError(f"max_length={self.max_length} must exceed draft_steps + 2 = {self.draft_steps + 2}")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate={self.learning_rate} must be above 0")

    def rate(self, step: int) -> float:
        """Learning rate of an optimiser step: linear warm-up, cosine decay to 2 %."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


@dataclass(frozen=True)
class Example:
    """Token ids `[T]` and, of each, whether the target's law *after* it is learnt (answer positions)."""

    token: Tensor
    learnt: Tensor


def examples(sequences: list, max_length: int) -> list[Example]:
    """Corpus sequences as training examples: the law is learnt wherever the next token is the target's."""
    made = []
    for sequence in sequences:
        token = torch.tensor([*sequence.prompt_ids, *sequence.answer_ids])[:max_length]
        learnt = torch.arange(token.shape[0]) >= len(sequence.prompt_ids) - 1
        if int(learnt.sum()) > 8:
            made.append(Example(token, learnt))
    return made


def frequent_tokens(sequences: list, size: int, vocab_size: int) -> tuple[Tensor, float]:
    """The `size` most frequent answer tokens (ascending ids) and the share of answers they cover."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for sequence in sequences:
        counts += torch.bincount(torch.tensor(sequence.answer_ids), minlength=vocab_size)
    chosen = counts.argsort(descending=True, stable=True)[:size].sort().values
    return chosen, (counts[chosen].sum() / counts.sum()).item()


def initial_head(target: Target, draft_tokens: Tensor) -> EagleHead:
    """An EAGLE-3 head that starts as the target's own last layer.

    `fc` passes the last tap through; the layer is the target's last one (which reads the state half of its
    input); norm and head rows are the target's.
    """
    source = target.config
    layer = LlamaConfig(
        hidden_size=source.hidden_size,
        intermediate_size=source.intermediate_size,
        num_attention_heads=source.num_attention_heads,
        num_key_value_heads=source.num_key_value_heads,
        head_dim=getattr(source, "head_dim", None) or source.hidden_size // source.num_attention_heads,
        vocab_size=source.vocab_size,
        rms_norm_eps=source.rms_norm_eps,
        rope_parameters=source.rope_parameters,
        max_position_embeddings=source.max_position_embeddings,
        hidden_act=source.hidden_act,
    )
    taps = published_taps("eagle3", target.n_layers)
    head = EagleHead(EagleConfig("eagle3", layer, taps, source.hidden_size, draft_tokens.shape[0])).float()
    last, hidden = target.layers[-1], source.hidden_size
    with torch.no_grad():
        head.fc.weight.zero_()
        head.fc.weight[:, -hidden:] = torch.eye(hidden)
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(head.midlayer.self_attn, name).weight
            weight.normal_(std=0.002, generator=torch.Generator().manual_seed(0))
            weight[:, hidden:] = getattr(last.self_attn, name).weight
        head.midlayer.self_attn.o_proj.weight.copy_(last.self_attn.o_proj.weight)
        head.midlayer.mlp.load_state_dict(last.mlp.state_dict())
        head.midlayer.hidden_norm.weight.copy_(last.input_layernorm.weight)
        head.midlayer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
        head.norm.weight.copy_(target.decoder.norm.weight)
        head.lm_head.weight.copy_(target.model.get_output_embeddings().weight[draft_tokens])
        if head.config.has_draft_vocab:
            head.set_draft_vocab(draft_tokens)
    return head


@dataclass(frozen=True)
class Observed:
    """What the target says along one example, in its own dtype.

    Attributes:
        feature: `[T, taps * H]`; hidden: `[T, H]`, after the final norm; log_z: `[T] f32`, the logits' logsumexp.
    """

    feature: Tensor
    hidden: Tensor
    log_z: Tensor


@dataclass(frozen=True)
class Batch:
    """One padded batch: `token [B, T]`, `learnt [B, T]`, tapped `feature [B, T, taps*H]`, `law [B, T, draft vocab]`."""

    token: Tensor
    learnt: Tensor
    feature: Tensor
    law: Tensor


@torch.no_grad()
def observe(target: Target, chosen: list[Example], taps: tuple[int, ...]) -> list[Observed]:
    """Run the target once over some examples (right padding: a causal model needs no mask for it)."""
    token = pad_sequence([example.token for example in chosen], batch_first=True).to(target.device)
    with target.tapped((*taps, target.n_layers)) as states:
        logits = target.model(input_ids=token, use_cache=False).logits
    feature = torch.cat([states[tap] for tap in taps], -1)
    hidden, log_z = states[target.n_layers], logits.float().logsumexp(-1)
    lengths = [example.token.shape[0] for example in chosen]
    # cloned, so that what is remembered does not hold the padded batch
    return [
        Observed(feature[i, :n].clone(), hidden[i, :n].clone(), log_z[i, :n].clone()) for i, n in enumerate(lengths)
    ]


@torch.no_grad()
def make_batch(target: Target, chosen: list[Example], seen: list[Observed], draft_tokens: Tensor) -> Batch:
    """Pad a batch. The law is restricted to the draft vocabulary and not renormalised."""
    token = pad_sequence([example.token for example in chosen], batch_first=True).to(target.device)
    learnt = pad_sequence([example.learnt for example in chosen], batch_first=True).to(target.device)
    logits = target.apply_head(pad_sequence([one.hidden for one in seen], batch_first=True), draft_tokens)
    log_z = pad_sequence([one.log_z for one in seen], batch_first=True)
    feature = pad_sequence([one.feature for one in seen], batch_first=True).float()
    return Batch(token, learnt, feature, (logits.float() - log_z[..., None]).exp())


def self_fed_loss(
    head: EagleHead, embedding: Tensor, batch: Batch, settings: TrainSettings
) -> tuple[Tensor, list[float]]:
    """The training-time test's loss, and the agreement of first choices at each self-fed depth.

    Means are over learnt positions only, so padding and prompts do not count.
    """
    total = torch.zeros((), device=batch.token.device)
    agreement = []
    length = batch.token.shape[1]
    keys: list[Tensor] = []
    values: list[Tensor] = []
    rows = length - settings.draft_steps  # every row has a true token and law at every step
    state = head.feature(batch.feature)[:, :rows]
    for step in range(settings.draft_steps):
        token = batch.token[:, 1 + step : 1 + step + rows]
        position = torch.arange(rows, device=token.device)[None] + step

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            groups = query.shape[1] // key.shape[1]
            keys.append(key.repeat_interleave(groups, 1))
            values.append(value.repeat_interleave(groups, 1))
            return chain_attention(query, keys, values)

        state = head.step(embedding[token].float(), state, position, attend)
        law = batch.law[:, 1 + step : 1 + step + rows]
        learnt = batch.learnt[:, 1 + step : 1 + step + rows]
        logits = head.lm_head(head.norm(state[learnt])).float()
        law = law[learnt]
        loss = -(law * logits.log_softmax(-1)).sum(-1).mean()
        total = total + settings.step_weight**step * loss
        agreement.append((logits.detach().argmax(-1) == law.argmax(-1)).float().mean().item())
    return total, agreement


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


def batches(data: list[Example], settings: TrainSettings, start: int) -> Iterator[list[Example]]:
    """Shuffled batches from optimiser step `start` on: a pure function of (seed, step)."""
    size = settings.sequences_per_step
    per_epoch = max(1, len(data) // size)
    for step in range(start, settings.steps):
        epoch, place = divmod(step, per_epoch)
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(settings.seed * 7919 + epoch))
        yield [data[i] for i in order[place * size : (place + 1) * size].tolist()]


class Trainer:
    """The training state: head, optimiser, step. `save` and `load` hold everything, so a run resumes.

    What the target says about an example is remembered for later epochs while it fits `memory_bytes`.
    """

    def __init__(self, target: Target, head: EagleHead, settings: TrainSettings, memory_bytes: int = 6 << 30):
        self.target = target
        self.head = head.train().requires_grad_(True)
        self.settings = settings
        self.embedding = target.embedding
        self.optimizer = torch.optim.AdamW(
            head.parameters(), settings.learning_rate, betas=(0.9, 0.95), weight_decay=settings.weight_decay
        )
        self.step = 0
        self.memory_bytes = memory_bytes
        self.memory: dict[int, Observed] = {}

    def observed(self, chosen: list[Example]) -> list[Observed]:
        """The target's view of a batch, from memory where it is there."""
        new = [example for example in chosen if id(example) not in self.memory]
        # one by one: what is remembered must not depend on the padding, or a resumed run would round otherwise
        fresh = {id(example): observe(self.target, [example], self.head.config.taps)[0] for example in new}
        seen = [fresh.get(id(example)) or self.memory[id(example)] for example in chosen]
        for key, one in fresh.items():
            size = one.feature.nbytes + one.hidden.nbytes
            if self.memory_bytes >= size:
                self.memory[key] = one
                self.memory_bytes -= size
        return seen

    def train_step(self, chosen: list[Example]) -> tuple[float, list[float]]:
        """One optimiser step; returns the loss and the agreement by self-fed depth.

        Raises:
            FloatingPointError: the loss is NaN or infinite; the weights are those of the step before.
        """
        batch = make_batch(self.target, chosen, self.observed(chosen), self.head.draft_to_target)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.rate(self.step)
        with torch.autocast(self.target.device.type, torch.bfloat16, enabled=self.settings.autocast):
            loss, agreement = self_fed_loss(self.head, self.embedding, batch, self.settings)
        if not loss.isfinite():
            raise FloatingPointError(f"the loss is {loss.item()} at step {self.step}")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), self.settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.item(), agreement

    def save(self, path: Path) -> None:
        """Write the state under a temporary name, then rename it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        torch.save(
            {"head": self.head.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}, temporary
        )
        os.replace(temporary, path)

    def load(self, path: Path) -> None:
        """Go on from a saved state."""
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
