"""Training text for a drafter: a target answers prompts, many rows at a time.

A drafter learns to imitate one target, so it is trained on that target's own words (self-distillation).
Prompts come from the *empty user turn* (the chat template is opened where a user would speak and the
target itself continues: it writes the question, then answers it) or from prompt files.

`sample` keeps a batch of rows busy on one preallocated cache. A row that finishes is replaced at once;
the new row's prompt is fed through the same one-token steps, and the prefix it shares with the old
row's tokens (the template's head) stays cached.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from eagle_tree.checks import check_counts
from eagle_tree.files import write_table
from eagle_tree.target import Target

SCHEMA = pa.schema(
    [("prompt_ids", pa.list_(pa.int32())), ("answer_ids", pa.list_(pa.int32())), ("temperature", pa.float32())]
)
SHARD_SEQUENCES = 128


@dataclass(frozen=True)
class Settings:
    """How a corpus is sampled.

    Attributes:
        answer_tokens: stop once the corpus holds this many answer tokens.
        rows: sequences sampled side by side.
        max_prompt_tokens: a user turn that the target does not end by then is thrown away.
        max_answer_tokens: answers are cut there.
        prompt_temperature: of the empty user turn.
        answer_temperature: of the sampled part of the answers.
        greedy_share: the share of answers decoded at temperature 0.
        seed: of the sampler; a resumed run draws on from (seed, shards done).
    """

    answer_tokens: int = 300_000
    rows: int = 96
    max_prompt_tokens: int = 128
    max_answer_tokens: int = 256
    prompt_temperature: float = 0.9
    answer_temperature: float = 0.9
    greedy_share: float = 0.6
    seed: int = 0

    def __post_init__(self) -> None:
        check_counts(self, "answer_tokens", "rows", "max_prompt_tokens", "max_answer_tokens")
        for name in ("prompt_temperature", "answer_temperature"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0 (greedy_share asks for greedy answers)")
        if not 0 <= self.greedy_share <= 1:
            raise ValueError(f"greedy_share={self.greedy_share} is outside 0…1")


@dataclass
class Row:
    """One sequence in flight: `ids[:fed]` went through the model; the rest is forced, then sampled."""

    ids: list[int]
    fed: int
    prompt_length: int | None  # None while the user turn is being sampled
    answer_temperature: float
    opening: int = field(default=0)  # length of the template before the sampled user turn


@dataclass(frozen=True)
class Sequence:
    """One finished sequence."""

    prompt_ids: list[int]
    answer_ids: list[int]
    temperature: float


def chat_turns(target: Target) -> tuple[list[int], list[int], int]:
    """Token ids before and after the user's words in the target's own chat template, and the id that ends a turn.

    Found by rendering a marker, so that any model's template serves. Raises ValueError without a template.
    """
    marker = "EAGLETREEMARKER"
    if target.tokenizer is None or target.tokenizer.chat_template is None:
        raise ValueError("the empty user turn needs a tokenizer with a chat template; give prompt files instead")
    text = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": marker}], tokenize=False, add_generation_prompt=True
    )
    before, after = text.split(marker)
    after_ids = target.tokenizer.encode(after, add_special_tokens=False)
    return target.tokenizer.encode(before, add_special_tokens=False), after_ids, after_ids[0]


def draw(logits: Tensor, temperature: Tensor, generator: torch.Generator) -> Tensor:
    """One token per row: `logits [B, V]`, `temperature [B]` (0 is greedy); by inversion of the distribution."""
    token = logits.argmax(-1)
    sampled = (temperature > 0).nonzero().squeeze(-1)
    if sampled.numel():
        scaled = logits[sampled].float() / temperature[sampled, None]
        cumulative = torch.softmax(scaled, -1).cumsum(-1)
        uniform = torch.rand(sampled.shape[0], 1, generator=generator, device=logits.device)
        inverse = torch.searchsorted(cumulative, uniform * cumulative[:, -1:]).squeeze(-1)
        token[sampled] = inverse.clamp(max=logits.shape[-1] - 1)
    return token


def sample(
    target: Target, prompts: list[list[int]], settings: Settings, seen: set[bytes], first_seed: int
) -> Iterator[Sequence]:
    """Yield finished sequences for ever; with `prompts` given, each is answered once and the iterator ends.

    Args:
        prompts: token ids; empty means that the target writes its own prompts.
        seen: digests of prompts already in the corpus; new ones are added, repeated ones are skipped.
        first_seed: seed of the generator.
    """
    generator = torch.Generator(device=target.device).manual_seed(first_seed)
    opening, closing, end_of_turn = chat_turns(target) if not prompts else ([], [], -1)
    waiting = list({digest(ids): list(ids) for ids in prompts if digest(ids) not in seen}.values())
    longest = max([settings.max_prompt_tokens + len(opening) + len(closing), *map(len, waiting)])
    cache = target.new_cache(settings.rows, min(target.max_length, longest + settings.max_answer_tokens))
    coins = torch.Generator().manual_seed(first_seed)

    def new_row() -> Row | None:
        greedy = torch.rand((), generator=coins).item() < settings.greedy_share
        temperature = 0.0 if greedy else settings.answer_temperature
        if not prompts:
            return Row(list(opening), 0, None, temperature, len(opening))
        if not waiting:
            return None
        ids = waiting.pop(0)
        return Row(ids, 0, len(ids), temperature)

    rows: list[Row | None] = [new_row() for _ in range(settings.rows)]
    while any(rows):
        token = [row.ids[row.fed] if row else 0 for row in rows]
        temperature = [
            0.0 if row is None else row.answer_temperature if row.prompt_length else settings.prompt_temperature
            for row in rows
        ]
        logits = target.step(torch.tensor(token, device=target.device), cache)
        drawn = draw(logits, torch.tensor(temperature, device=target.device), generator).tolist()
        for index, row in enumerate(rows):
            if row is None:
                cache.reset([index])
                continue
            row.fed += 1
            if row.fed < len(row.ids):
                continue
            row.ids.append(drawn[index])
            finished, done = advance_row(row, settings, closing, end_of_turn, target.eos_token_ids, seen)
            if finished is not None:
                yield finished
            if done:
                old, rows[index] = row.ids, new_row()
                shared = shared_prefix(old, rows[index].ids) if rows[index] else 0
                shared = min(shared, row.fed)
                cache.reset([index], shared)
                if rows[index]:
                    rows[index].fed = shared


def advance_row(
    row: Row, settings: Settings, closing: list[int], end_of_turn: int, eos: frozenset[int], seen: set[bytes]
) -> tuple[Sequence | None, bool]:
    """Account for the token just appended: the finished sequence if there is one, and whether the row is free."""
    last = row.ids[-1]
    if row.prompt_length is None:
        if last != end_of_turn:
            return None, last in eos or len(row.ids) - row.opening > settings.max_prompt_tokens
        row.ids[-1:] = closing
        row.prompt_length = len(row.ids)
        key = digest(row.ids)
        repeated = key in seen
        seen.add(key)
        return None, repeated
    answer = row.ids[row.prompt_length :]
    if last in eos or len(answer) >= settings.max_answer_tokens:
        prompt = row.ids[: row.prompt_length]
        seen.add(digest(prompt))
        return Sequence(prompt, answer, row.answer_temperature), True
    return None, False


def shared_prefix(old: list[int], new: list[int]) -> int:
    """Number of leading tokens of `new` whose entries the row already caches (never all of `new`)."""
    count = 0
    for a, b in zip(old, new[:-1]):
        if a != b:
            break
        count += 1
    return count


def digest(ids: list[int]) -> bytes:
    """A short digest of a prompt, for de-duplication."""
    return hashlib.blake2b(json.dumps(list(ids)).encode(), digest_size=12).digest()


def sharing_words(sequences: list[Sequence], held_out: list[list[int]], run: int = 10) -> list[bool]:
    """Whether each sequence's prompt shares `run` tokens in a row with a held-out prompt.

    Args:
        held_out: token ids of the words of prompts that a drafter will be judged on, without the chat template. Of a
            prompt with fewer than `run` tokens, all must be shared.
    """
    runs: dict[int, set[tuple[int, ...]]] = {}
    for words in filter(None, held_out):
        length = min(run, len(words))
        starts = range(len(words) - length + 1)
        runs.setdefault(length, set()).update(tuple(words[start : start + length]) for start in starts)

    def shares(ids: list[int]) -> bool:
        return any(
            tuple(ids[start : start + length]) in known
            for length, known in runs.items()
            for start in range(len(ids) - length + 1)
        )

    return [shares(sequence.prompt_ids) for sequence in sequences]


def build(
    folder: Path,
    target: Target,
    prompts: list[list[int]],
    settings: Settings,
    progress: Callable[[int], None] = lambda tokens: None,
) -> tuple[int, int, int]:
    """Grow the corpus in `folder` until it holds `settings.answer_tokens`.

    Returns sequences, answer tokens, and how many of the tokens are new.

    A run that was killed goes on from its finished shards. Raises ValueError when the folder holds the
    corpus of another target.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards = shard_paths(folder)
    done = load(folder, target.fingerprint) if shards else []
    seen = {digest(sequence.prompt_ids) for sequence in done}
    tokens, sequences = sum(len(s.answer_ids) for s in done), len(done)
    before = tokens
    progress(tokens)
    waiting: list[Sequence] = []
    samples = sample(target, prompts, settings, seen, settings.seed * 1_000_003 + len(shards))
    while tokens < settings.answer_tokens:
        sequence = next(samples, None)
        if sequence is not None:
            waiting.append(sequence)
            tokens += len(sequence.answer_ids)
            sequences += 1
            progress(len(sequence.answer_ids))
        if waiting and (sequence is None or len(waiting) >= SHARD_SEQUENCES or tokens >= settings.answer_tokens):
            write_shard(folder / f"shard-{len(shards):05d}.parquet", waiting, target.fingerprint)
            shards, waiting = shard_paths(folder), []
        if sequence is None:
            break
    return sequences, tokens, tokens - before


def shard_paths(folder: Path) -> list[Path]:
    return sorted(Path(folder).glob("shard-*.parquet"))


def write_shard(path: Path, sequences: list[Sequence], fingerprint: str) -> None:
    """Write one Parquet shard."""
    table = pa.Table.from_pydict(
        {name: [getattr(s, name) for s in sequences] for name in ("prompt_ids", "answer_ids", "temperature")},
        schema=SCHEMA.with_metadata({"target_fingerprint": fingerprint}),
    )
    write_table(table, path)


def load(folder: Path, fingerprint: str | None = None) -> list[Sequence]:
    """Read every shard of a corpus.

    Raises:
        FileNotFoundError: no shard in `folder`.
        ValueError: a shard without sequences, or made with another target than `fingerprint` names.
    """
    paths = shard_paths(folder)
    if not paths:
        raise FileNotFoundError(f"no corpus shards (shard-*.parquet) in {folder}; make them with `eagle-tree corpus`")
    sequences = []
    for path in paths:
        table = pq.read_table(path)
        made_with = (table.schema.metadata or {}).get(b"target_fingerprint", b"").decode()
        if fingerprint is not None and made_with != fingerprint:
            raise ValueError(f"{path} was made with target {made_with or 'unknown'}, not {fingerprint}")
        if table.num_rows == 0:
            raise ValueError(f"{path} holds no sequences")
        sequences += [Sequence(**row) for row in table.to_pylist()]
    return sequences
