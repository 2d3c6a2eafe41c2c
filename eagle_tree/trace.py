"""Recorded drafter expansions: what a drafter says along the target's own texts, asked once and kept.

The text depends on neither drafter, tree nor policy (DESIGN §4), and a drafter's state depends on the text alone. So
whatever any policy asks of a drafter is named by (position, path): the position of the root in the text, and the
tokens below it. That holds of coupled drafts, too: the noise that they look at is keyed by position, and the text's
own. A trace is a memo of such expansions. A policy's beam decides which it needs, and beams do not nest:
a trace holds the *union* of what some policies request at every position, and is extended by what a new one lacks.

On disk a trace is a folder with one Parquet file a prompt, each whole or absent: a row an expansion, parents first.
A row names its node by its parent's row and its rank among that one's candidates, which is the path. What the text
and the expansions depend on stands in every file; files that differ in it are not read together.

Symbols: n prompt tokens, m answer tokens, P = m - 1 positions that are drafted for, E expansions, K candidates.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from eagle_tree.cache import KVCache
from eagle_tree.decode import check_drawn, generate, grow
from eagle_tree.drafter.base import Drafter
from eagle_tree.evaluate import Reading, Text, text_settings
from eagle_tree.files import replacing
from eagle_tree.noise import GumbelRows, PassNoise
from eagle_tree.policy import Autoregressive, Policy
from eagle_tree.target import Target
from eagle_tree.tree import TOP_K, Draft, Draw, Frontier, GrowingTree
from eagle_tree.warp import Sampling

EXPANSION_SCHEMA = pa.schema(
    [
        ("position", pa.int32()),
        ("parent", pa.int32()),
        ("rank", pa.int16()),
        ("entropy", pa.float32()),
        ("token", pa.list_(pa.int32())),
        ("log_conf", pa.list_(pa.float32())),
    ]
)
"""One row an expansion: `position` of its root in the answer, `parent` row (-1: the node is the root), `rank` of the
node among its parent's candidates; the candidates, best first, and the entropy of the drafter's law, in nats."""
APPRAISAL_SCHEMA = pa.schema(
    [
        ("target_log_prob", pa.list_(pa.float32())),
        ("target_entropy", pa.list_(pa.float32())),
        ("levels", pa.int16()),
        ("root_entropy", pa.float32()),
        ("best", pa.list_(pa.float32())),
        ("best_drafted", pa.list_(pa.float32())),
    ]
)
"""What the target thinks (`appraise`), beside the expansions of a sample of positions; null elsewhere. Of every
candidate its log probability after its path, and the entropy of the law behind it, in nats. In rows of roots: levels
of candidates, the root's entropy, and P(accepted) of the nodes of the best trees of as many levels, over the whole and
over the draft vocabulary, the most probable first."""
ABOUT_KEY = b"eagle_tree_trace"
PART = "prompt-{}.parquet"
ABSENT = -2
"""The token of a candidate that is not there; texts are padded with -1, so it never spells one."""


# --- what is on disk ---


@dataclass(frozen=True)
class Part:
    """One prompt of a trace.

    Attributes:
        index: the prompt's place among the prompts; policies that learn meet them in this order.
        text: prompt and answer; ahead_ids: how the target goes on behind the answer, so that the last passes accept
            what they would in decoding.
        settings: what text and expansions depend on, from `trace_settings`.
        requests: digest to name of the policies all of whose requests are in.
        expansions: `EXPANSION_SCHEMA`.
        sampled: positions that the target appraises, with best trees of `tree_budget` nodes.
        appraisal: `APPRAISAL_SCHEMA`, row by row beside the expansions; None if there is none, or expansions came
            after it.
    """

    index: int
    text: Text
    ahead_ids: list[int]
    settings: dict[str, Any]
    requests: dict[str, str] = field(default_factory=dict)
    expansions: pa.Table = field(default_factory=EXPANSION_SCHEMA.empty_table)
    sampled: tuple[int, ...] = ()
    tree_budget: int = 0
    appraisal: pa.Table | None = None

    def write(self, folder: Path) -> Path:
        """Write the part into a trace's folder; the file is whole or as it was."""
        tables = ("expansions", "appraisal")
        about = {name: value for name, value in vars(self).items() if name not in ("text", *tables)}
        about["text"] = asdict(self.text)
        table = self.expansions
        for name in APPRAISAL_SCHEMA.names if self.appraisal is not None else ():
            table = table.append_column(APPRAISAL_SCHEMA.field(name), self.appraisal[name])
        table = table.replace_schema_metadata({ABOUT_KEY: json.dumps(about)})
        path = part_path(folder, self.text.prompt_id)
        with replacing(path) as temporary:
            # the bytes of confidences compress stream by stream; everything else repeats itself
            pq.write_table(
                table,
                temporary,
                compression="zstd",
                use_dictionary=["position", "rank", "token.list.element"],
                use_byte_stream_split=["entropy", "log_conf.list.element"],
                write_page_checksum=True,
            )
        return path

    @classmethod
    def read(cls, path: Path) -> Part:
        """Read a part.

        Raises:
            ValueError: a file that is truncated, damaged or holds something else.
        """
        try:
            table = pq.read_table(path, page_checksum_verification=True)
            about = json.loads((table.schema.metadata or {})[ABOUT_KEY])
            text, sampled = Text(**about.pop("text")), tuple(about.pop("sampled"))
            expansions = table.select(EXPANSION_SCHEMA.names).cast(EXPANSION_SCHEMA)
            appraised = "best" in table.column_names
            appraisal = table.select(APPRAISAL_SCHEMA.names).cast(APPRAISAL_SCHEMA) if appraised else None
            return cls(text=text, expansions=expansions, sampled=sampled, appraisal=appraisal, **about)
        except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"trace: {path} is truncated or damaged ({error}); delete it, and `eagle-tree trace` records it again"
            ) from None


def part_path(folder: Path, prompt_id: str) -> Path:
    """Where a prompt's part is: ids may hold what file names may not."""
    return Path(folder) / PART.format(hashlib.blake2b(prompt_id.encode(), digest_size=8).hexdigest())


def trace_settings(
    target: Target, drafter: Drafter, sampling: Sampling, max_new_tokens: int, seed: int, draw: Draw = TOP_K
) -> dict[str, Any]:
    """What a trace depends on, beside its prompts and policies.

    The most likely candidates depend on nothing else; of coupled ones the draw stands there, too.

    Raises:
        ValueError: candidates that are drawn by chance: another pass would draw others.
    """
    draw = draw.at(sampling.temperature)
    check_settled(draw)
    return {
        **text_settings(target, sampling, max_new_tokens, seed),
        "max_length": target.max_length,
        "drafter": drafter.fingerprint,
        "drafter_vocabulary": drafter.vocab_size,
        "drafter_depth": drafter.max_depth,
        **({"draw": asdict(draw)} if draw.kind == "coupled" else {}),
    }


def draw_of(settings: dict[str, Any]) -> Draw:
    """How the candidates of a trace with these settings were taken."""
    return Draw(**settings["draw"]) if "draw" in settings else TOP_K


def check_settled(draw: Draw) -> None:
    """Raise ValueError for candidates that are drawn by chance: another pass would draw others."""
    if draw.sampled:
        raise ValueError(
            f"trace: candidates of draw.kind={draw.kind} are drawn anew by every pass; a trace holds what depends on "
            "position and path alone: draw.kind=top_k or coupled"
        )


def check_judged(draw: Draw) -> None:
    """Raise ValueError for candidates of which the target's probabilities do not say how often they are accepted."""
    if draw.kind == "coupled":
        raise ValueError(
            "trace: coupled candidates are accepted or not by the noise that they were chosen with, not with the "
            "target's probabilities: trace.target_prob and regret are for draw.kind=top_k"
        )


def check_same(settings: dict[str, Any], expected: dict[str, Any], where: str, other: str) -> None:
    """Raise ValueError if settings differ from what is expected, each difference named."""
    different = [
        f"{key} {settings.get(key)} (not {expected.get(key)})"
        for key in sorted(settings.keys() | expected.keys())
        if settings.get(key) != expected.get(key)
    ]
    if different:
        raise ValueError(f"trace: {where} was recorded with {', '.join(different)}, unlike {other}")


def holds_trace(folder: str | Path) -> bool:
    """Whether a folder holds parts of a trace."""
    return any(Path(folder).glob(PART.format("*")))


def stamp(folder: str | Path) -> str:
    """Changes when a trace's place does, or a file of it: names, sizes and times."""
    folder = Path(folder).resolve()
    files = [(path.name, path.stat()) for path in sorted(folder.glob(PART.format("*")))]
    return json.dumps([str(folder), [[name, state.st_size, state.st_mtime_ns] for name, state in files]])


def read_parts(folder: str | Path) -> list[Part]:
    """Every part of a trace, in the prompts' order.

    Raises:
        FileNotFoundError: no trace there. ValueError: a damaged part, or parts whose settings differ.
    """
    folder = Path(folder)
    paths = sorted(folder.glob(PART.format("*")))
    if not paths:
        raise FileNotFoundError(f"trace: {folder} holds none; record one with `eagle-tree trace folder={folder}`")
    parts = [Part.read(path) for path in paths]
    for path, part in zip(paths, parts, strict=True):
        check_same(part.settings, parts[0].settings, str(path), str(paths[0]))
    return sorted(parts, key=lambda part: (part.index, part.text.prompt_id))


# --- recording ---


def continued(target: Target, text: Text, count: int, sampling: Sampling, seed: int, cache: KVCache) -> list[int]:
    """The target's next `count` tokens behind a text, whatever ended it; fewer at the end of the context."""
    ids = [*text.prompt_ids, *text.answer_ids]
    ahead: list[int] = []
    count = min(count, target.max_length - len(ids))
    while len(ahead) < count:  # an end-of-sequence token ends a run, not what follows it
        run = generate(
            target, None, Autoregressive(), ids + ahead, count - len(ahead), sampling=sampling, seed=seed,
            sequence=text.prompt_id, record_nodes=False, cache=cache,
        )  # fmt: skip
        ahead += run.tokens
    return ahead


class Recorder(Drafter):
    """Answers from a memo, and asks a drafter for what the memo lacks.

    What was answered once is answered again, so all policies see the same confidences, whatever batch an expansion
    was computed in. The drafter is asked only where something is missing; what the memo answered before, in this
    tree, it catches up with.

    Args:
        drafter: the one that is recorded. known: expansions recorded before.
    """

    def __init__(self, drafter: Drafter, known: pa.Table | None = None):
        self.drafter = drafter
        self.taps, self.vocab_size, self.max_depth = drafter.taps, drafter.vocab_size, drafter.max_depth
        known = EXPANSION_SCHEMA.empty_table() if known is None else known
        self.node: list[tuple[int, int, int]] = list(
            zip(*(known[name].to_pylist() for name in ("position", "parent", "rank")), strict=True)
        )
        self.entropy: list[float] = known["entropy"].to_pylist()
        self.token = [np.array(row, np.int32) for row in known["token"].to_pylist()]
        self.log_conf = [np.array(row, np.float32) for row in known["log_conf"].to_pylist()]
        self.row = {node: row for row, node in enumerate(self.node)}
        self.position = 0
        self.row_of: dict[int, int] = {}  # of the pool nodes expanded so far
        self.waiting: list[tuple[GrowingTree, Frontier]] = []  # requests that the drafter has not seen

    def start(self, prompt_ids: Tensor, features: Tensor | None, pending: Tensor) -> None:
        self.position = 0
        self.drafter.start(prompt_ids, features, pending)

    def advance(self, tokens: Tensor, features: Tensor | None) -> None:
        self.position += len(tokens)
        self.drafter.advance(tokens, features)

    def expand(self, growing: GrowingTree, frontier: Frontier, noise: PassNoise | None) -> Draft:
        if not growing.levels:
            self.row_of, self.waiting = {}, []
        self.waiting.append((growing, frontier))
        pool_node = frontier.node.tolist()
        above, rank = growing.parent[frontier.node].tolist(), growing.rank[frontier.node].tolist()
        nodes = [
            (self.position, self.row_of[parent] if parent >= 0 else -1, place if parent >= 0 else 0)
            for parent, place in zip(above, rank, strict=True)
        ]
        count = frontier.n_candidates
        lacking = [node not in self.row or len(self.token[self.row[node]]) < count for node in nodes]
        if any(lacking):
            for tree, asked in self.waiting:
                draft = self.drafter.expand(tree, asked, noise)
            check_drawn(self.drafter, draft, frontier.draw)
            self.waiting = []
            self._keep(nodes, lacking, draft)
        rows = [self.row[node] for node in nodes]
        self.row_of |= dict(zip(pool_node, rows, strict=True))
        device = growing.token.device
        token = torch.from_numpy(np.stack([self.token[row][:count] for row in rows])).to(device).long()
        log_conf = torch.from_numpy(np.stack([self.log_conf[row][:count] for row in rows])).to(device)
        return Draft(token, log_conf, torch.tensor([self.entropy[row] for row in rows], device=device))

    def _keep(self, nodes: list[tuple[int, int, int]], lacking: list[bool], draft: Draft) -> None:
        """Take in what was lacking. Candidates that were known stay as they are, and new ones come behind them."""
        token, log_conf = draft.token.cpu().numpy().astype(np.int32), draft.log_conf.float().cpu().numpy()
        if np.isnan(log_conf).any():
            raise ArithmeticError(f"the drafter's confidences are NaN at answer position {self.position}")
        entropy = draft.entropy.float().tolist()
        for place in np.flatnonzero(lacking):
            node = nodes[place]
            row = self.row.setdefault(node, len(self.node))
            if row == len(self.node):
                self.node.append(node)
                self.entropy.append(entropy[place])
                self.token.append(token[place])
                self.log_conf.append(log_conf[place])
            else:
                new = ~np.isin(token[place], self.token[row])
                self.token[row] = np.append(self.token[row], token[place][new])[: token.shape[1]]
                self.log_conf[row] = np.append(self.log_conf[row], log_conf[place][new])[: token.shape[1]]

    def table(self) -> pa.Table:
        """All expansions, `EXPANSION_SCHEMA`."""
        if not self.node:
            return EXPANSION_SCHEMA.empty_table()
        position, parent, rank = zip(*self.node, strict=True)
        ends = np.cumsum([0, *map(len, self.token)]).astype(np.int32)
        columns = [
            pa.array(position, pa.int32()),
            pa.array(parent, pa.int32()),
            pa.array(rank, pa.int16()),
            pa.array(self.entropy, pa.float32()),
            pa.ListArray.from_arrays(ends, np.concatenate(self.token)),
            pa.ListArray.from_arrays(ends, np.concatenate(self.log_conf)),
        ]
        return pa.Table.from_arrays(columns, schema=EXPANSION_SCHEMA)


def digest(policy: Policy) -> str:
    """Names a policy by its fields: two with the same digest ask the same."""
    return hashlib.blake2b(repr(policy).encode(), digest_size=8).hexdigest()


def lacking(part: Part, policies: dict[str, Policy]) -> dict[str, tuple[str, Policy]]:
    """Of policies by name, digest to name and covering policy of those whose requests are not all in a part."""
    covering = {name: policy.covering() for name, policy in policies.items() if policy.max_candidates()}
    named = {digest(policy): (name, policy) for name, policy in covering.items()}
    return {key: value for key, value in named.items() if key not in part.requests}


@torch.inference_mode()
def recorded(
    part: Part, drafter: Drafter, policies: dict[str, Policy], reading: Reading, noise: GumbelRows | None = None
) -> Part:
    """The part with all that policies, by name, request at every position of its text.

    Args:
        reading: of the part's text, with the features that the drafter reads.
        noise: that the text was drawn with; coupled candidates alone look at it.
    """
    missing, draw = lacking(part, policies), draw_of(part.settings)
    recorder = Recorder(drafter, part.expansions)
    answer, n = reading.answer, len(reading.prompt)
    recorder.start(reading.prompt, reading.rows(0, n), answer[:1])
    for position in range(len(answer) - 1):
        pending = answer[position : position + 1]
        if position:
            recorder.advance(pending, reading.rows(n + position - 1, n + position))
        chance = None if noise is None else noise.for_pass(n + position + 1)
        for _, policy in missing.values():
            grow(recorder, policy, pending, chance, draw)
        if noise is not None:
            noise.forget_before(n + position + 2)
    requests = {**part.requests, **{key: name for key, (name, _) in missing.items()}}
    table = recorder.table()
    appraisal = part.appraisal if table.equals(part.expansions) else None
    return replace(part, requests=requests, expansions=table, appraisal=appraisal)


def levels(expansions: pa.Table) -> int:
    """How deep the candidates of expansions lie: of roots, one level."""
    parent = expansions["parent"].to_numpy()
    depth, above = np.ones(len(parent), np.int64), parent.copy()
    while (inside := above >= 0).any():
        depth[inside] += 1
        above[inside] = parent[above[inside]]
    return int(depth.max(initial=0))


# --- reading ---


@dataclass(frozen=True)
class Memo:
    """Expansions of many positions, as tensors to look up in.

    Row E answers what was never asked: no candidates (token ABSENT, log confidence -inf), its children row E again.

    Attributes:
        root: `[P] i64`, the row of every position's root.
        token: `[E+1, K] i32`; log_conf: `[E+1, K] f32`, padded like row E.
        child: `[E+1, K] i32`, the row of each candidate.
        entropy: `[E+1] f32`; n_candidates: `[E+1] i64`.
        target_log_prob: `[E+1, K] f32`, NaN where the target was not asked; None if it never was.
    """

    root: Tensor
    token: Tensor
    log_conf: Tensor
    child: Tensor
    entropy: Tensor
    n_candidates: Tensor
    target_log_prob: Tensor | None = None

    @classmethod
    def of(cls, parts: Sequence[Part]) -> Memo:
        """The memo of some prompts' expansions, side by side."""
        tables, positions = [part.expansions for part in parts], [len(part.text.answer_ids) - 1 for part in parts]
        sizes = [table.num_rows for table in tables]
        row_start, position_start = (np.cumsum([0, *counts])[:-1] for counts in (sizes, positions))
        table = pa.concat_tables(tables).combine_chunks()
        count = table.num_rows
        column = {name: table[name].to_numpy() for name in ("position", "parent", "rank", "entropy")}
        position = column["position"] + np.repeat(position_start, sizes)
        parent = np.where(column["parent"] >= 0, column["parent"] + np.repeat(row_start, sizes), -1)
        candidates = np.append(table["token"].combine_chunks().value_lengths().to_numpy(), 0)
        filled = np.arange(candidates.max()) < candidates[:, None]
        token, log_conf = np.full(filled.shape, ABSENT, np.int32), np.full(filled.shape, -np.inf, np.float32)
        token[filled] = table["token"].combine_chunks().flatten().to_numpy()
        log_conf[filled] = table["log_conf"].combine_chunks().flatten().to_numpy()
        child, inside = np.full(filled.shape, count, np.int32), parent >= 0
        child[parent[inside], column["rank"][inside]] = np.flatnonzero(inside)
        root = np.full(sum(positions), count)
        root[position[~inside]] = np.flatnonzero(~inside)
        entropy = np.append(column["entropy"], np.float32(0))
        arrays = [root, token, log_conf, child, entropy, candidates.astype(np.int64)]
        if any(part.appraisal is not None for part in parts):
            lists = [appraised_column(part, "target_log_prob") for part in parts]
            asked = np.append(np.concatenate([column.is_valid().to_numpy(False) for column in lists]), False)
            log_prob = np.full(filled.shape, np.nan, np.float32)
            log_prob[filled & asked[:, None]] = np.concatenate([column.flatten().to_numpy() for column in lists])
            arrays.append(log_prob)
        return cls(*map(torch.from_numpy, arrays))


def appraised_column(part: Part, name: str) -> pa.Array:
    """A column of a part's appraisal, all null if there is none."""
    if part.appraisal is None:
        return pa.nulls(part.expansions.num_rows, APPRAISAL_SCHEMA.field(name).type)
    return part.appraisal[name].combine_chunks()


class Remembered(Drafter):
    """A drafter that answers from a memo, for one position at a time.

    A request that the memo does not hold is counted in `uncovered` and answered by no candidates, never by a guess.

    Args:
        memo: of the trace. settings: of the trace. first: the memo's position where the text begins.
    """

    def __init__(self, memo: Memo, settings: dict[str, Any], first: int = 0):
        self.memo = memo
        self.vocab_size, self.max_depth = settings["drafter_vocabulary"], settings["drafter_depth"]
        self.first = self.position = first
        self.uncovered = torch.zeros((), dtype=torch.int64)
        self.row = memo.root[:0]

    def start(self, prompt_ids: Tensor, features: Tensor | None, pending: Tensor) -> None:
        self.position = self.first

    def advance(self, tokens: Tensor, features: Tensor | None) -> None:
        self.position += len(tokens)

    def root(self) -> Tensor:
        """`[1]`, the memo's row of the root."""
        return self.memo.root[self.position : self.position + 1]

    def expand(self, growing: GrowingTree, frontier: Frontier, noise: PassNoise | None) -> Draft:
        memo, count = self.memo, frontier.n_candidates
        if not growing.levels:
            self.row = self.root()
        row = self.row[frontier.node]
        token, log_conf, child = memo.token[row], memo.log_conf[row], memo.child[row]
        if (missing := count - token.shape[1]) > 0:  # more than anybody asked
            token, log_conf, child = (
                torch.nn.functional.pad(values, (0, missing), value=value)
                for values, value in ((token, ABSENT), (log_conf, -torch.inf), (child, len(memo.entropy) - 1))
            )
        self.uncovered = self.uncovered + (memo.n_candidates[row] < count).sum()
        self.row = torch.cat([self.row, child[:, :count].long().flatten()])
        return Draft(token[:, :count].long(), log_conf[:, :count], memo.entropy[row])


@dataclass(frozen=True)
class Trace:
    """A trace that was read.

    Attributes:
        settings: what it depends on; parts: its prompts.
    """

    settings: dict[str, Any]
    parts: tuple[Part, ...]

    @classmethod
    def read(cls, folder: str | Path) -> Trace:
        """Read a trace.

        Raises:
            FileNotFoundError: no trace there. ValueError: a damaged part, parts whose settings differ, a trace
                without a single position.
        """
        parts = read_parts(folder)
        if not any(len(part.text.answer_ids) > 1 for part in parts):
            raise ValueError(f"trace: {folder} is empty: every answer ended with its first token")
        return cls(parts[0].settings, tuple(parts))

    @cached_property
    def positions(self) -> list[int]:
        """P of every prompt."""
        return [len(part.text.answer_ids) - 1 for part in self.parts]

    @cached_property
    def first(self) -> list[int]:
        """Where each prompt's positions begin in the memo."""
        return np.cumsum([0, *self.positions])[:-1].tolist()

    @cached_property
    def memo(self) -> Memo:
        """The expansions of all prompts."""
        return Memo.of(self.parts)

    @cached_property
    def readings(self) -> list[Reading]:
        """The texts, without features: no drafter needs them here."""
        return [
            Reading(
                part.text,
                torch.tensor(part.text.prompt_ids),
                torch.tensor(part.text.answer_ids),
                None,
                None,
                torch.tensor(part.ahead_ids, dtype=torch.int64),
            )
            for part in self.parts
        ]

    @cached_property
    def context(self) -> np.ndarray:
        """`[P]`, where the root of every position stands: tokens before it."""
        starts = [len(part.text.prompt_ids) for part in self.parts]
        return np.concatenate([start + np.arange(count) for start, count in zip(starts, self.positions)])

    def windows(self, width: int) -> Tensor:
        """`[P, width]`, the known text from every position on, -1 behind its end."""
        known = (torch.nn.functional.pad(reading.known, (0, width), value=-1) for reading in self.readings)
        return torch.cat([text.unfold(0, width, 1)[:count] for text, count in zip(known, self.positions)])

    @property
    def draw(self) -> Draw:
        """How the candidates were taken."""
        return draw_of(self.settings)

    @property
    def greedy(self) -> bool:
        """Whether the texts were decoded at temperature 0."""
        return self.settings["temperature"] == 0

    @cached_property
    def fingerprint(self) -> str:
        """A digest of settings, texts and expansions' numbers."""
        whole = [self.settings, [[asdict(part.text), part.expansions.num_rows] for part in self.parts]]
        return hashlib.blake2b(json.dumps(whole).encode(), digest_size=8).hexdigest()

    def drafter(self, prompt: int) -> Remembered:
        """The drafter of a prompt, by its place among the parts."""
        return Remembered(self.memo, self.settings, self.first[prompt])


def size_on_disk(folder: str | Path) -> int:
    """Bytes of a trace's files."""
    return sum(path.stat().st_size for path in Path(folder).glob(PART.format("*")))
