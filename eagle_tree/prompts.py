"""Prompts: the bundled ones, and readers for the file formats that this field exchanges.

    bundled    eagle_tree/assets/prompts.jsonl, the project's own
    questions  Spec-Bench and MT-bench `question.jsonl`: {"question_id", "category", "turns": [text, …]}
    messages   JSON lines: {"messages": [{"role", "content"}, …]}, with an optional "id" and "category"
    sharegpt   one JSON list: [{"id", "conversations": [{"from": "human" | "gpt" | "system", "value"}, …]}, …]
    text       plain text, one prompt a paragraph

A mistake in a file is a ValueError that names the file, the line, the value and what is allowed there. With a
limit, reading stops at the last prompt that is wanted: what follows it is not checked.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from eagle_tree.checks import as_path, check_count

BUNDLED = Path(__file__).parent / "assets" / "prompts.jsonl"
KINDS = ("bundled", "questions", "messages", "sharegpt", "text")
ROLES = ("system", "user", "assistant")
SHAREGPT_ROLES = {"system": "system", "human": "user", "gpt": "assistant"}


@dataclass(frozen=True)
class Prompt:
    """What a user says, up to where the model's answer begins.

    Attributes:
        id: unique within a run: it keys the noise, so two prompts of one id would share their randomness.
        category: by which tables group.
        messages: `{"role", "content"}` dictionaries for the chat template; the last one is the user's.

    Raises:
        ValueError: no messages, an unknown role, an empty content, or a last message that is not the user's.
    """

    id: str
    category: str
    messages: tuple[dict[str, str], ...]

    def __post_init__(self) -> None:
        for name in ("id", "category"):
            check_text(getattr(self, name), name)
        if not self.messages:
            raise ValueError("messages=[] is empty; a prompt has at least one message")
        for number, message in enumerate(self.messages, 1):
            if message["role"] not in ROLES:
                raise ValueError(f"message {number}: role={shown(message['role'])} is not one of {', '.join(ROLES)}")
            check_text(message["content"], f"message {number}: content")
        if self.messages[-1]["role"] != "user":
            raise ValueError(
                f"the last message has role {self.messages[-1]['role']!r}; a prompt ends with a message of the user"
            )


def load_prompts(kind: str, path: str | Path | None = None, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts (all when None) of a file of the named kind.

    Raises:
        ValueError: an unknown kind, a limit below 1, a path missing or too many, anything wrong in the file.
        FileNotFoundError: there is no such file.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} of prompts is not one of {', '.join(KINDS)}")
    if kind == "bundled":
        if path is not None:
            raise ValueError(
                f"path={str(path)!r}: prompts of kind 'bundled' have no path; name another kind to read it"
            )
        return load_bundled(limit)
    if not path:
        raise ValueError(f"path={path!r}: prompts of kind {kind!r} need a file")
    loaders = {"questions": load_questions, "messages": load_messages, "sharegpt": load_sharegpt, "text": load_text}
    return loaders[kind](path, limit)


def load_bundled(limit: int | None = None) -> list[Prompt]:
    """The project's own prompts. Their categories alternate, so that a small limit still sees all of them."""
    return load_messages(BUNDLED, limit)


def load_questions(path: str | Path, limit: int | None = None, turns: int = 1) -> list[Prompt]:
    """Spec-Bench or MT-bench questions, of each its first `turns` user turns (fewer where it has fewer).

    One turn by default, because a second one refers to the model's own answer to the first, which a file cannot
    hold. With more turns the user's messages follow one another with no answer in between.

    Raises:
        ValueError, FileNotFoundError: as `load_prompts`; `turns` below 1.
    """
    check_count("turns", turns)

    def prompts() -> Iterator[tuple[str, Prompt]]:
        for _, place, row in json_lines(path):
            question_id = str(field(row, "question_id", (str, int), place))
            category = field(row, "category", (str,), place)
            texts = field(row, "turns", (list,), place)
            messages = [{"role": "user", "content": text} for text in texts[:turns]]
            yield place, placed(place, question_id, category, messages)

    return collect(path, prompts(), limit)


def load_messages(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """JSON lines of chat messages. Without an `id` a prompt is called by its line, `messages-7`.

    Raises:
        ValueError, FileNotFoundError: as `load_prompts`.
    """

    def prompts() -> Iterator[tuple[str, Prompt]]:
        for line, place, row in json_lines(path):
            row = {"id": f"messages-{line}", "category": "messages", **row}
            name = str(field(row, "id", (str, int), place))
            category = field(row, "category", (str,), place)
            messages = []
            for number, message in enumerate(field(row, "messages", (list,), place), 1):
                where = f"{place}, message {number}"
                messages.append({key: field(message, key, (str,), where) for key in ("role", "content")})
            yield place, placed(place, name, category, messages)

    return collect(path, prompts(), limit)


def load_sharegpt(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """The openings of ShareGPT conversations: everything up to the last human turn before the first answer.

    Conversations without an opening are left out with a warning that counts them: public dumps are cut into
    pieces, and many a piece begins with an answer. Without an `id` a prompt is called by its place, `sharegpt-7`.

    Raises:
        ValueError, FileNotFoundError: as `load_prompts`.
    """
    skipped = 0

    def prompts() -> Iterator[tuple[str, Prompt]]:
        nonlocal skipped
        for number, row in enumerate(json_list(path), 1):
            place = f"{path}, conversation {number}"
            row = {"id": f"sharegpt-{number}", **as_object(row, place)}
            name = str(field(row, "id", (str, int), place))
            messages = opening(field(row, "conversations", (list,), place), place)
            if messages:
                yield place, placed(place, name, "sharegpt", messages)
            else:
                skipped += 1

    found = collect(path, prompts(), limit)
    if skipped:
        warnings.warn(f"{path}: left out {skipped} conversations without a human turn before the first answer")
    return found


def load_text(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """Plain text, one prompt a paragraph: blank lines separate prompts. They are called `text-1`, `text-2`, …

    Raises:
        ValueError, FileNotFoundError: as `load_prompts`.
    """

    def prompts() -> Iterator[tuple[str, Prompt]]:
        paragraph: list[str] = []
        number = 0
        for line in [*read(path).split("\n"), ""]:
            if line.strip():
                paragraph.append(line.rstrip("\r"))
            elif paragraph:
                number += 1
                place = f"{path}, paragraph {number}"
                messages = [{"role": "user", "content": "\n".join(paragraph)}]
                paragraph = []
                yield place, placed(place, f"text-{number}", "text", messages)

    return collect(path, prompts(), limit)


def collect(path: str | Path, prompts: Iterator[tuple[str, Prompt]], limit: int | None) -> list[Prompt]:
    """The first `limit` of (place, prompt) pairs, checked for ids that occur twice and for being none at all."""
    if limit is not None:
        check_count("limit", limit)
    first_seen: dict[str, str] = {}
    found = []
    for place, item in islice(prompts, limit):
        if item.id in first_seen:
            raise ValueError(
                f"{place}: id={shown(item.id)} is taken by {first_seen[item.id]}; ids are unique within a file"
            )
        first_seen[item.id] = place
        found.append(item)
    if not found:
        raise ValueError(f"{path}: holds no prompts")
    return found


def placed(place: str, name: str, category: str, messages: list[dict[str, str]]) -> Prompt:
    """A Prompt whose error says where it stands."""
    try:
        return Prompt(name, category, tuple(messages))
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def opening(turns: list[Any], place: str) -> list[dict[str, str]]:
    """The messages of a ShareGPT conversation before its first answer; empty when no human speaks there."""
    messages: list[dict[str, str]] = []
    for number, turn in enumerate(turns, 1):
        where = f"{place}, turn {number}"
        speaker = field(turn, "from", (str,), where)
        if speaker not in SHAREGPT_ROLES:
            raise ValueError(f"{where}: from={shown(speaker)} is not one of {', '.join(SHAREGPT_ROLES)}")
        if speaker == "gpt":
            break
        messages.append({"role": SHAREGPT_ROLES[speaker], "content": field(turn, "value", (str,), where)})
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    return messages


def json_lines(path: str | Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(line number, place, object) for every line of a JSON lines file that is not blank."""
    # not splitlines(): a JSON string may hold U+2028 and its like as they are
    for number, line in enumerate(read(path).split("\n"), 1):
        if line.strip():
            place = f"{path}, line {number}"
            yield number, place, as_object(parse(line, path, number), place)


def json_list(path: str | Path) -> list[Any]:
    """The JSON list that a file consists of."""
    text = read(path)
    if not text.strip():
        raise ValueError(f"{path}: the file is empty; it must hold one JSON list of conversations")
    rows = parse(text, path, 1)
    if not isinstance(rows, list):
        raise ValueError(f"{path}, line 1: {shown(rows)} is not a JSON list of conversations")
    return rows


def parse(text: str, path: str | Path, first_line: int) -> Any:
    """The JSON value of a text that begins on the given line of a file."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        near = shown(text[max(error.pos - 20, 0) : error.pos + 20])
        raise ValueError(f"{path}, line {line}: not JSON ({error.msg} at column {error.colno}, near {near})") from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; nesting without end
        raise ValueError(f"{path}, line {first_line}: not usable JSON ({error})") from None


def read(path: str | Path) -> str:
    """The text of a UTF-8 file (a byte-order mark, which some editors write, is dropped)."""
    file = as_path("path", path)
    if file.is_dir():
        raise ValueError(f"{path}: is a folder; a file of prompts is needed")
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: there is no such file of prompts") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # the codec counts from behind a byte-order mark
        line = error.object.count(b"\n", 0, error.start) + 1
        byte = error.object[error.start]
        raise ValueError(f"{path}, line {line}: byte 0x{byte:02x} is not UTF-8; the file must be UTF-8 text") from None


def field(row: Any, key: str, types: tuple[type, ...], place: str) -> Any:
    """`row[key]`, which must be there and of one of the types."""
    as_object(row, place)
    if key not in row:
        raise ValueError(f"{place}: {key!r} is missing; found {shown(list(row))}")
    value = row[key]
    if not isinstance(value, types) or isinstance(value, bool):
        allowed = " or ".join({str: "text", int: "an integer", list: "a list"}[kind] for kind in types)
        raise ValueError(f"{place}: {key}={shown(value)} is not {allowed}")
    return value


def as_object(row: Any, place: str) -> dict[str, Any]:
    """The row, which must be a JSON object."""
    if not isinstance(row, dict):
        raise ValueError(f"{place}: {shown(row)} is not a JSON object")
    return row


def check_text(value: Any, name: str) -> None:
    """ValueError unless the value is text with something in it that a tokenizer can encode."""
    if not isinstance(value, str):
        raise ValueError(f"{name}={shown(value)} is not text")
    if not value.strip():
        raise ValueError(f"{name}={value!r} is empty; it must hold some text")
    if any("\ud800" <= character <= "\udfff" for character in value):  # JSON's "\ud83d" without its other half
        raise ValueError(f"{name}={shown(value)} holds half of a surrogate pair, which is not text")


def shown(value: Any) -> str:
    """A value in an error message: cut, because a prompt may be pages long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
