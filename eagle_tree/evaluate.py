"""A drafter judged on its own, along texts that the target wrote.

The text that a target emits depends on neither drafter nor policy (DESIGN §4), so it is decoded once, and any
number of drafters is judged on it. One teacher-forced forward a text gives the features; after that no target runs:

* `measure`: at every position of the answer, how well the drafter guesses the next tokens when it is fed the true
  ones with `depth` of its own outputs in place of features: the n-α of EAGLE-1 (arXiv 2401.15077), hit rates of
  its first candidates, and how far its confidences can be believed;
* `follow`: the passes that `decode.generate` would make with a policy, since at a known text the accepted path is
  the path that spells the text.

Everything is counted, per prompt; `analysis` makes ratios of the sums.

Symbols: n prompt tokens, m answer tokens, P = m - 1 positions that are drafted for (the first token is
prefill's own), D depths, K candidates a node.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from torch.nn import functional as F

from eagle_tree.calibration import BINS as CALIBRATION_BINS
from eagle_tree.calibration import confidence_bin
from eagle_tree.cost import CostTable
from eagle_tree.decode import check_drawn, generate, grow
from eagle_tree.drafter.base import Drafter
from eagle_tree.files import write_table
from eagle_tree.policy import Autoregressive, Policy
from eagle_tree.record import PassRow
from eagle_tree.target import Target
from eagle_tree.tree import TOP_K, Draft, Frontier, GrowingTree, Tree
from eagle_tree.warp import Law, Sampling

CANDIDATES = 8
"""Candidates asked of every node."""
TEXT_SCHEMA = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("category", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("answer_ids", pa.list_(pa.int32())),
    ]
)
SETTINGS_KEY = b"eagle_tree_texts"
UNKNOWN = {one.name: math.nan for one in fields(PassRow) if one.type == "float" and one.name != "expected_draft"}
"""Columns of a pass that only the target's forward or a clock can tell."""


@dataclass(frozen=True)
class Text:
    """A prompt and the target's own continuation.

    Attributes:
        prompt_id, category: which prompt; the id keys the noise at temperatures above 0.
        prompt_ids: `[n]` tokens; answer_ids: `[m]`, the end-of-sequence token included if it came; empty for a
            prompt that is not answered yet.
    """

    prompt_id: str
    category: str
    prompt_ids: list[int]
    answer_ids: list[int] = field(default_factory=list)


def text_settings(target: Target, sampling: Sampling, max_new_tokens: int, seed: int) -> dict[str, object]:
    """What a text depends on, beside its prompt.

    Raises:
        ValueError: processors or warpers, which no file can name.
    """
    if sampling.processors or sampling.warpers:
        raise ValueError("texts are kept by their settings, and logits processors cannot be named: use none")
    return {
        "target": target.fingerprint,
        "dtype": str(target.dtype).removeprefix("torch."),
        "max_new_tokens": max_new_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "seed": seed,
    }


def answered(
    path: str | Path,
    target: Target,
    prompts: Sequence[Text],
    sampling: Sampling,
    max_new_tokens: int,
    seed: int = 0,
) -> Iterator[Text]:
    """The text of every prompt, in order: from the file at `path`, or decoded now and added to it.

    The file is whole after every prompt, so a run that was stopped goes on where it was.

    Raises:
        ValueError: before any decoding, if the file holds texts of another target, dtype or setting, or of other
            prompts under the same ids; what differs is named.
    """
    settings = text_settings(target, sampling, max_new_tokens, seed)
    known = {text.prompt_id: text for text in read_texts(path, settings)} if Path(path).exists() else {}
    for prompt in prompts:
        if prompt.prompt_id in known and known[prompt.prompt_id].prompt_ids != list(prompt.prompt_ids):
            raise ValueError(f"texts {path}: prompt {prompt.prompt_id!r} has other tokens there")
    cache = target.new_cache()
    for prompt in prompts:
        if prompt.prompt_id not in known:
            run = generate(
                target, None, Autoregressive(), prompt.prompt_ids, max_new_tokens, sampling=sampling, seed=seed,
                sequence=prompt.prompt_id, record_nodes=False, cache=cache,
            )  # fmt: skip
            known[prompt.prompt_id] = replace(prompt, answer_ids=run.tokens)
            write_texts(path, list(known.values()), settings)
        yield known[prompt.prompt_id]


def write_texts(path: str | Path, texts: Sequence[Text], settings: dict[str, object]) -> None:
    """Write texts to a Parquet file that names what they depend on."""
    schema = TEXT_SCHEMA.with_metadata({SETTINGS_KEY: json.dumps(settings)})
    write_table(pa.Table.from_pylist([asdict(text) for text in texts], schema), path)


def read_texts(path: str | Path, settings: dict[str, object]) -> list[Text]:
    """Read texts.

    Raises:
        ValueError: the file holds no texts, or texts with other settings; each that differs is named.
    """
    try:
        table = pq.read_table(path)
    except pa.ArrowInvalid as error:
        raise ValueError(f"texts {path}: {error}") from None
    written = (table.schema.metadata or {}).get(SETTINGS_KEY)
    if written is None:
        raise ValueError(f"texts {path}: the file holds no texts of `eagle-tree evaluate`")
    theirs = json.loads(written)
    different = [
        f"{key} {theirs.get(key)} (here {value})" for key, value in settings.items() if theirs.get(key) != value
    ]
    if different:
        raise ValueError(f"texts {path} were written with {', '.join(different)}")
    return [Text(**row) for row in table.to_pylist()]


@dataclass(frozen=True)
class Reading:
    """A text as the target reads it, teacher-forced.

    Attributes:
        text: the text; prompt: `[n] i64`; answer: `[m] i64`.
        features: `[n + m - 1, taps * H]` at the positions of all tokens but the last; None without taps.
        log_probs: `[P, V]`, the target's log law of answer token p + 1; None at temperature 0, where it is the
            text itself.
        ahead: `[t]`, how the target goes on behind the answer: no pass emits it, but a path may spell it.
    """

    text: Text
    prompt: Tensor
    answer: Tensor
    features: Tensor | None
    log_probs: Tensor | None
    ahead: Tensor | None = None

    @property
    def known(self) -> Tensor:
        """`[m + t]`, the answer and what is known behind it."""
        return self.answer if self.ahead is None else torch.cat([self.answer, self.ahead])

    def rows(self, start: int, end: int) -> Tensor | None:
        """Features of the positions `start … end - 1`, None without taps."""
        return None if self.features is None else self.features[start:end]


@torch.inference_mode()
def read(target: Target, taps: Sequence[int], text: Text, sampling: Sampling) -> Reading:
    """One forward over a text `[n + m]`, m >= 1."""
    ids = torch.tensor([*text.prompt_ids, *text.answer_ids], device=target.device)
    n, positions = len(text.prompt_ids), len(text.answer_ids) - 1
    seen = target.read(ids[:-1], taps, n_logits=max(1, positions))
    log_probs = None if sampling.greedy or not positions else log_laws(seen.logits, sampling)
    return Reading(text, ids[:n], ids[n:], seen.features, log_probs)


def log_laws(logits: Tensor, sampling: Sampling) -> Tensor:
    """The normalised log law `[n, V]` of every row of logits `[n, V]`; one-hot at temperature 0."""
    law, rows = Law(logits, sampling), torch.arange(logits.shape[0], device=logits.device)
    log_probs = law.log_probs(rows)
    while law.uncovered:  # a nucleus wider than what was sorted
        law = law.widened()
        log_probs = law.log_probs(rows)
    return log_probs


@torch.inference_mode()
def follow(
    drafter: Drafter | None,
    policy: Policy,
    reading: Reading,
    max_length: int,
    policy_name: str = "",
    cost: CostTable | None = None,
) -> list[PassRow]:
    """The passes of `decode.generate` along a known text, without the target.

    The match rule accepts the path that spells the text, whatever the temperature (DESIGN §4). Times and what
    only the target's forward can tell are NaN; `accepted` of the last pass ends with what is known of the text.

    Args:
        drafter: None only with a policy that never drafts.
        max_length: the target's context: near its end a smaller tree must do.
        cost: what a pass takes, which stands in `pass_s` then: policies observe that, never a clock.
    """
    drafter = drafter if policy.max_candidates() else None
    text, n, m, known = reading.text, len(reading.prompt), len(reading.answer), reading.known
    if drafter:
        drafter.start(reading.prompt, reading.rows(0, n), reading.answer[:1])
    rows: list[PassRow] = []
    done = 1  # answer tokens so far; the last is pending
    while done < m:
        position = n + done - 1  # the root's
        growing, tree, outcome = known_pass(drafter, policy, known[done - 1 :], max_length - position - 1)
        accepted, depth, expected, closed = outcome.tolist()  # the pass's one device-to-host transfer
        if not closed:
            raise AssertionError(f"{type(policy).__name__} selected a node without its parent, or one twice")
        emitted = min(int(accepted) + 1, m - done)
        seconds = math.nan if cost is None else float(cost.seconds(tree.n_nodes, growing.widths, position))
        rows.append(
            PassRow(
                policy=policy_name or type(policy).__name__,
                prompt_id=text.prompt_id,
                category=text.category,
                pass_id=len(rows),
                context_length=position,
                n_nodes=tree.n_nodes,
                depth=int(depth),
                draft_steps=len(growing.levels),
                expanded=growing.expanded,
                expected_draft=expected,
                accepted=int(accepted),
                emitted=emitted,
                **{**UNKNOWN, "pass_s": seconds},
            )
        )
        policy.observe(rows[-1])
        if drafter and done + emitted < m:
            drafter.advance(reading.answer[done : done + emitted], reading.rows(position, position + emitted))
        done += emitted
    return rows


def known_pass(drafter: Drafter | None, policy: Policy, tokens: Tensor, room: int) -> tuple[GrowingTree, Tree, Tensor]:
    """One pass at a place where the text is known: grow, select, accept.

    Args:
        tokens: `[t]`, the pending token and those that follow it; room: the most draft nodes that fit the context.

    Returns:
        the pool, the draft tree, and `[4] f64` on the device: accepted nodes, the tree's depth, expected tokens,
        closure.
    """
    growing = grow(drafter, policy, tokens[:1])
    tree, _, closed = growing.select(policy.select(growing))
    tree = tree.head(room)
    accepted = tree.depth.masked_fill(~spelled(tree, tokens), 0).max()
    outcome = (accepted, tree.depth.max(), tree.expected_draft, closed)
    return growing, tree, torch.stack([scalar.double() for scalar in outcome])


def spelled(tree: Tree, tokens: Tensor) -> Tensor:
    """`[N+1] bool`: the node's whole path spells the text `tokens [t]`, whose first is the root's."""
    expected = F.pad(tokens[: tree.max_depth + 1], (0, max(0, tree.max_depth + 1 - len(tokens))), value=-1)
    right, parent = tree.token == expected[tree.depth], tree.parent.clamp(min=0)
    on_text = right
    for _ in range(tree.max_depth):  # after i rounds i + 1 generations are right
        on_text = right & on_text[parent]
    return on_text


@torch.inference_mode()
def proposals(drafter: Drafter, reading: Reading, depths: int, n_candidates: int = CANDIDATES) -> tuple[Tensor, Tensor]:
    """What the drafter proposes for every answer token, from every depth of self-feeding along the true text.

    At position p the drafter knows the text up to answer token p. Depth 0 proposes token p + 1 from true features
    alone; depth d proposes token p + 1 + d after d true tokens whose features are its own outputs (EAGLE-1's n-α
    with n = d). Only the drafter's seam is used.

    Returns:
        `token [P, D, K] i64`, best first, and `log_conf [P, D, K] f32`; -2 and 0 where the text has ended.
        D is at most the drafter's `max_depth`.
    """
    answer, n, positions = reading.answer, len(reading.prompt), len(reading.answer) - 1
    depths = depths if drafter.max_depth is None else min(depths, drafter.max_depth)
    token = answer.new_full((positions, depths, n_candidates), -2)
    log_conf = torch.zeros(token.shape, device=answer.device)
    drafter.start(reading.prompt, reading.rows(0, n), answer[:1])
    for position in range(positions):
        if position:
            drafter.advance(answer[position : position + 1], reading.rows(n + position - 1, n + position))
        growing = GrowingTree.from_root(answer[position : position + 1])
        for depth in range(min(depths, positions - position)):
            node = answer.new_full((1,), growing.n_nodes)
            draft = drafter.expand(growing, Frontier(node, n_candidates), None)
            check_drawn(drafter, draft, TOP_K)
            token[position, depth], log_conf[position, depth] = draft.token[0], draft.log_conf[0].float().clamp(max=0)
            growing = growing.append(Frontier(node, 1), only(draft, answer[position + depth + 1]))
    return token, log_conf


def only(draft: Draft, token: Tensor) -> Draft:
    """The draft of one node, `token [1, K]`, cut to one token `[]`; confidence 0 if it was no candidate."""
    log_conf = draft.log_conf.float().masked_fill(draft.token != token, -torch.inf)
    return Draft(token.view(1, 1), log_conf.max(-1, keepdim=True).values, draft.entropy)


def measure(
    drafter: Drafter, reading: Reading, depths: int, n_candidates: int = CANDIDATES
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Counts of one text.

    Returns:
        `hits`, one row a (depth, rank): `positions` looked at, `hits` where the candidate of that rank was the
        text's next token, and `probability`, the sum of the target's probability of it (the hits at
        temperature 0): what it is accepted with.
        `bins`, one row a (depth, confidence bin): `count` of candidates, sum of their `confidence`, `hits`.

    Raises:
        ArithmeticError: a confidence is NaN.
    """
    token, log_conf = proposals(drafter, reading, depths, n_candidates)
    positions, depths, _ = token.shape
    truth = windows(reading.answer[1:], depths, -1)
    hit = token == truth[..., None]
    probability = hit.double()
    if reading.log_probs is not None:
        row = windows(torch.arange(positions, device=token.device), depths, 0)
        probability = reading.log_probs[row[..., None], token.clamp(min=0)].double().exp()
        probability = torch.where(token >= 0, probability, 0.0)
    exists, hit = (truth >= 0).cpu().numpy(), hit.cpu().numpy()
    confidence = log_conf.double().exp().cpu().numpy()
    if np.isnan(confidence).any():
        raise ArithmeticError(f"the drafter's confidences are NaN in the text of prompt {reading.text.prompt_id}")
    return (
        hit_counts(reading.text.prompt_id, exists, hit, probability.cpu().numpy()),
        bin_counts(reading.text.prompt_id, exists, hit, confidence),
    )


def windows(values: Tensor, width: int, fill: int) -> Tensor:
    """`[P, width]`: row p holds `values[p : p + width]`, filled up behind the end."""
    return F.pad(values, (0, width - 1), value=fill).unfold(0, width, 1)


def hit_counts(prompt_id: str, exists: np.ndarray, hit: np.ndarray, probability: np.ndarray) -> pd.DataFrame:
    """Sums over positions, by depth and rank: `exists [P, D]`, `hit` and `probability [P, D, K]`."""
    _, depths, ranks = hit.shape
    return pd.DataFrame(
        {
            "prompt_id": prompt_id,
            "depth": np.repeat(np.arange(depths), ranks),
            "rank": np.tile(np.arange(ranks), depths),
            "positions": np.repeat(exists.sum(0), ranks),
            "hits": hit.sum(0).ravel(),
            "probability": probability.sum(0).ravel(),
        }
    )


def bin_counts(prompt_id: str, exists: np.ndarray, hit: np.ndarray, confidence: np.ndarray) -> pd.DataFrame:
    """Sums over candidates, by depth and confidence bin: `exists [P, D]`, `hit` and `confidence [P, D, K]`."""
    depths = hit.shape[1]
    place = confidence_bin(confidence)
    place += CALIBRATION_BINS * np.arange(depths)[:, None]
    place = place[exists]  # [candidates that were proposed, K]

    def sums(weight: np.ndarray) -> np.ndarray:
        return np.bincount(place.ravel(), weight[exists].ravel(), depths * CALIBRATION_BINS)

    return pd.DataFrame(
        {
            "prompt_id": prompt_id,
            "depth": np.repeat(np.arange(depths), CALIBRATION_BINS),
            "bin": np.tile(np.arange(CALIBRATION_BINS), depths),
            "count": sums(np.ones_like(confidence)).astype(int),
            "confidence": sums(confidence),
            "hits": sums(hit.astype(float)).astype(int),
        }
    )


def covered(drafter: Drafter, answer: Tensor) -> int:
    """How many of the answer tokens `[m]` behind the first, prefill's own, are in the drafter's vocabulary."""
    if drafter.target_id is None:
        return len(answer) - 1
    return int(torch.isin(answer[1:], drafter.target_id).sum())


def check_candidates(drafter: Drafter, n_candidates: int = CANDIDATES) -> None:
    """Raise ValueError if the drafter cannot propose that many."""
    if drafter.vocab_size < n_candidates:
        raise ValueError(f"{n_candidates} candidates are judged; the drafter's vocabulary has {drafter.vocab_size}")
