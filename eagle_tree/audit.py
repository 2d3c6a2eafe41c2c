"""Numerical or real? The first divergence of two runs that must emit the same text, classified.

In exact arithmetic a configuration emits the text of autoregressive decoding, and that of transformers' `generate`
with the same noise (DESIGN §4). In floating point a near-tie may fall either way. Whether it was one is judged by a
yardstick that contains nothing of what is judged: plain causal forwards of the model over the same prefix, by
transformers' own cache and masks: one token at a time; in blocks of as many rows as a tree has; all at once; and in
single precision. How far they disagree is the noise of the arithmetic; a divergence is *numerical* if the two tokens
are no farther apart than that, and *real* if they are.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    LogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from eagle_tree.noise import Noise
from eagle_tree.target import Target
from eagle_tree.warp import Sampling

LIKELY = 20
"""Tokens of each position whose logits are compared: the noise is the largest difference among them."""
SIDES = 2
"""A gap may shrink by the noise of either of its tokens."""


@dataclass(frozen=True)
class Divergence:
    """The first place where a text differs from the one that it must be.

    Attributes:
        index: of the token in the answer; expected, got: token ids, -1 where a text has ended.
        margin: how far the two are apart in single precision, in (perturbed) logits over temperature; infinite where
            top-k or top-p excludes one of them.
        noise: how far plain forwards move such a margin.
        edge: distance in mass to the nucleus's edge, the nearer of the two tokens'; edge_noise: how far plain forwards
            move it. NaN without a nucleus.
        real: whether arithmetic does not explain it.
    """

    index: int
    expected: int
    got: int
    margin: float
    noise: float
    edge: float
    edge_noise: float
    real: bool


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """Index of the first token that differs, the shorter text's end included; None if the texts are equal."""
    for index, (one, other) in enumerate(zip(expected, got, strict=False)):
        if one != other:
            return index
    return None if len(expected) == len(got) else min(len(expected), len(got))


class AddNoise(LogitsProcessor):
    """Adds the Gumbel vector of the next position: greedy choice then draws from the law, with this project's noise."""

    def __init__(self, noise: Noise):
        self.noise = noise

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + self.noise.gumbel(input_ids.shape[1], scores.shape[-1])


@torch.inference_mode()
def their_text(
    target: Target, prompt_ids: Sequence[int], max_new_tokens: int, sampling: Sampling, noise: Noise
) -> list[int]:
    """The answer of transformers' `generate`, with its own cache and its own warpers."""
    processors: list[LogitsProcessor] = []
    if not sampling.greedy:
        processors.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_k is not None:
            processors.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            processors.append(TopPLogitsWarper(float(sampling.top_p)))
        processors.append(AddNoise(noise))
    prompt = torch.tensor([list(prompt_ids)], device=target.device)
    text = target.model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        logits_processor=processors,
        pad_token_id=0,
    )
    return text[0, prompt.shape[1] :].tolist()


class Yardstick:
    """Measures, by plain forwards, how far two tokens are apart and how far arithmetic alone can move them.

    Args:
        target: the model that ran; a copy in single precision is made when it is first needed.
        sampling: of the runs. rows: of a tree's forward.
    """

    def __init__(self, target: Target, sampling: Sampling, rows: int):
        self.target = target
        self.sampling = sampling
        self.rows = rows
        self.precise = target.model if target.dtype in (torch.float32, torch.float64) else None

    def logits(self, model: torch.nn.Module, ids: Tensor, start: int, rows: int) -> Tensor:
        """`[n - start + 1, V] f64` of the text `ids [n]` behind positions start - 1 … n - 1.

        The first `start` tokens are read at once, the others in blocks of `rows`, the last of which is full.
        """
        first = (len(ids) - start) % rows
        ends = [start, *([start + first] if first else []), *range(start + first + rows, len(ids) + 1, rows)]
        cache, found, done = DynamicCache(config=model.config), [], 0
        for end in ends:
            keywords = {self.target.cache_keyword: cache, "use_cache": True}
            logits = model(input_ids=ids[None, done:end], **keywords).logits[0]
            found.append(logits[-1:] if end == start else logits)
            done = end
        return torch.cat(found).double()

    @torch.inference_mode()
    def judge(
        self, prompt_ids: Sequence[int], expected: Sequence[int], got: Sequence[int], noise: Noise
    ) -> Divergence | None:
        """The first divergence of two answers to one prompt; None if they are equal.

        Args:
            noise: that both were drawn with.
        """
        index = first_difference(expected, got)
        if index is None:
            return None
        if index >= min(len(expected), len(got)):  # one ended, and neither by a token: arithmetic ends no text
            ended = [text[index] if index < len(text) else -1 for text in (expected, got)]
            return Divergence(index, *ended, math.inf, 0.0, math.nan, math.nan, True)
        pair = torch.tensor([expected[index], got[index]], device=self.target.device)
        ids = torch.tensor([*prompt_ids, *expected[:index]], device=self.target.device)
        start = max(1, min(len(prompt_ids), len(ids) - self.rows))
        if self.precise is None:
            self.precise = copy.deepcopy(self.target.model).float()
        exact = self.logits(self.precise, ids, start, len(ids))
        variants = [
            self.logits(self.target.model, ids, start, 1),
            self.logits(self.target.model, ids, start, self.rows),
            self.logits(self.target.model, ids, len(ids), 1),  # all at once; the last position alone
        ]
        temperature = self.sampling.temperature or 1.0
        spread = max(self.spread(variant, exact[-len(variant) :], pair) for variant in variants) / temperature
        scores = exact[-1] / temperature
        if not self.sampling.greedy:
            scores = scores + noise.gumbel(len(ids), len(scores))
        place = self.place(exact[-1], pair)
        moved = max(float((self.place(variant[-1], pair).before - place.before).abs().max()) for variant in variants)
        margin = float(scores[pair].diff().abs()) if bool(place.allowed.all()) else math.inf
        edge = float((place.before - self.sampling.top_p).abs().min())
        explained = min(margin, place.rank_distance / temperature) <= SIDES * spread
        if self.sampling.top_p < 1:
            explained = explained or edge <= SIDES * moved
        else:
            edge = moved = math.nan
        return Divergence(index, *pair.tolist(), margin, spread, edge, moved, not explained)

    def spread(self, logits: Tensor, exact: Tensor, pair: Tensor) -> float:
        """The largest difference of two forwards `[m, V]`, among the likely tokens of every position and the pair.

        A shift of all logits of a position changes nothing, so each position's mean difference is taken out.
        """
        likely = exact.topk(min(LIKELY, exact.shape[-1])).indices
        difference = (logits - exact).gather(1, likely)
        centre = difference.mean(1, keepdim=True)
        own = (logits - exact)[-1, pair] - centre[-1]
        return float(torch.cat([(difference - centre).abs().flatten(), own.abs()]).max())

    def place(self, logits: Tensor, pair: Tensor) -> Place:
        """Where the pair stands with regard to top-k and top-p, of logits `[V]`."""
        sampling = self.sampling
        if sampling.greedy:
            zeros = torch.zeros(2, dtype=torch.float64, device=logits.device)
            return Place(zeros == 0, zeros, math.inf)
        scores, rank_distance = logits / sampling.temperature, math.inf
        allowed = torch.ones_like(scores, dtype=torch.bool)
        if sampling.top_k is not None and sampling.top_k < len(scores):
            last, first_out = logits.topk(sampling.top_k + 1).values[-2:]
            allowed = logits >= last
            rank_distance = float(torch.where(allowed, logits - first_out, last - logits)[pair].min())
        mass, order = scores.masked_fill(~allowed, -torch.inf).softmax(0).sort(descending=True)
        before = torch.zeros_like(mass).scatter(0, order, mass.cumsum(0) - mass)
        return Place(allowed[pair] & (before[pair] < sampling.top_p), before[pair], rank_distance)


@dataclass(frozen=True)
class Place:
    """A pair of tokens and what top-k and top-p leave.

    Attributes:
        allowed: `[2] bool`; before: `[2] f64`, mass of the tokens that are more likely; rank_distance: by how much a
            logit would have to change for top-k to judge one of them otherwise.
    """

    allowed: Tensor
    before: Tensor
    rank_distance: float
