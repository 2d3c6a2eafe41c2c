"""What the prompt loaders read, and how they refuse what they cannot."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from eagle_tree.prompts import (
    Prompt,
    load_bundled,
    load_messages,
    load_prompts,
    load_questions,
    load_sharegpt,
    load_text,
)

CATEGORIES = {"chat", "code", "maths", "summary", "translation", "extraction"}
QUESTION = {"question_id": 81, "category": "writing", "turns": ["Write a haiku.", "Now a limerick."]}
MESSAGES = {"id": "a", "category": "chat", "messages": [{"role": "user", "content": "Hello"}]}
CONVERSATION = {"id": "x_0", "conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def lines(*rows: object) -> str:
    """JSON lines; text stands for itself."""
    return "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n"


@pytest.fixture
def write(tmp_path: Path):
    """Write a file of prompts, return its path."""

    def write(content: str | bytes) -> Path:
        path = tmp_path / "prompts.data"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


# The bundled prompts


def test_bundled_prompts_are_spread_evenly_over_six_categories():
    count = Counter(prompt.category for prompt in load_bundled())
    assert set(count) == CATEGORIES
    assert sum(count.values()) >= 24
    assert len(set(count.values())) == 1


def test_six_bundled_prompts_see_all_categories():
    assert {prompt.category for prompt in load_bundled(limit=6)} == CATEGORIES


def test_some_bundled_prompts_have_more_than_one_turn():
    turns = [[message["role"] for message in prompt.messages] for prompt in load_bundled()]
    assert sum(roles == ["user", "assistant", "user"] for roles in turns) >= 2


# What is read


def test_a_question_is_its_first_turn(write):
    assert load_questions(write(lines(QUESTION))) == [Prompt("81", "writing", (user("Write a haiku."),))]


def test_more_turns_of_a_question_follow_one_another_without_answers(write):
    (prompt,) = load_questions(write(lines(QUESTION)), turns=3)
    assert prompt.messages == (user("Write a haiku."), user("Now a limerick."))


def test_messages_keep_every_role_and_drop_what_is_no_message_text(write):
    turns = [
        {"role": "system", "content": "Be brief."},
        user("Hi"),
        {"role": "assistant", "content": "Hi!"},
        user("Bye"),
    ]
    (prompt,) = load_messages(write(lines({"id": 7, "messages": [{**turn, "weight": 0} for turn in turns]})))
    assert prompt == Prompt("7", "messages", tuple(turns))


def test_messages_without_an_id_are_called_by_their_line(write):
    row = {"messages": [user("Hello")]}
    assert [prompt.id for prompt in load_messages(write(lines(row, "", row)))] == ["messages-1", "messages-3"]


def test_a_sharegpt_prompt_is_the_conversation_up_to_the_last_human_turn_before_the_first_answer(write):
    turns = [
        ("system", "Be brief."),
        ("human", "Hi."),
        ("human", "Are you there?"),
        ("gpt", "Yes."),
        ("human", "Good."),
    ]
    row = {"id": "x_0", "conversations": [{"from": speaker, "value": text} for speaker, text in turns]}
    (prompt,) = load_sharegpt(write(json.dumps([row])))
    assert prompt == Prompt(
        "x_0", "sharegpt", ({"role": "system", "content": "Be brief."}, user("Hi."), user("Are you there?"))
    )


def test_sharegpt_conversations_that_begin_with_an_answer_are_left_out_and_counted(write):
    headless = {
        "id": "x_1",
        "conversations": [{"from": "gpt", "value": "… as I said."}, {"from": "human", "value": "Go on."}],
    }
    silent = {
        "id": "x_2",
        "conversations": [{"from": "system", "value": "Be brief."}, {"from": "gpt", "value": "Yes."}],
    }
    with pytest.warns(UserWarning, match="left out 2 conversations"):
        (prompt,) = load_sharegpt(write(json.dumps([headless, silent, CONVERSATION])))
    assert prompt.id == "x_0"


def test_a_text_prompt_is_a_paragraph(write):
    path = write("First line,\r\nsecond line.\r\n\r\n \t\r\nAnother.\n\n\n")
    assert load_text(path) == [
        Prompt("text-1", "text", (user("First line,\nsecond line."),)),
        Prompt("text-2", "text", (user("Another."),)),
    ]


def test_a_byte_order_mark_and_unicode_line_separators_are_no_obstacle(write):
    line = json.dumps({"messages": [user("one\u2028two\u0085three")]}, ensure_ascii=False)
    assert (
        load_messages(write(b"\xef\xbb\xbf" + line.encode() + b"\r\n"))[0].messages[0]["content"]
        == "one\u2028two\u0085three"
    )


KINDS = {
    "questions": lines(*({**QUESTION, "question_id": n} for n in range(3))),
    "messages": lines(*({**MESSAGES, "id": n} for n in range(3))),
    "sharegpt": json.dumps([{**CONVERSATION, "id": f"{n}"} for n in range(3)]),
    "text": "0\n\n1\n\n2",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_limit_takes_the_first_prompts(write, kind):
    path = write(KINDS[kind])
    everything = load_prompts(kind, path)
    assert len(everything) == 3
    assert load_prompts(kind, path, limit=2) == everything[:2]
    assert load_prompts(kind, str(path), limit=9) == everything


def test_what_follows_the_limit_is_not_checked(write):
    assert len(load_messages(write(lines(MESSAGES, "{")), limit=1)) == 1


# What is refused: (kind, content of the file, what the message says, and where)

BAD = {
    "a malformed question": ("questions", lines(QUESTION, "", '{"question_id": 82, '), ["line 3", "not JSON"]),
    "a malformed message": ("messages", lines(MESSAGES, "hello"), ["line 2", "not JSON", "hello"]),
    "a malformed list": ("sharegpt", '[\n{"id": "a",\n"conversations" []}]', ["line 3", "not JSON"]),
    "endless nesting": ("messages", "[" * 200_000, ["line 1", "not usable JSON"]),
    "a number of 5000 digits": ("messages", "9" * 5000, ["line 1", "not usable JSON"]),
    "a line that is no object": ("messages", lines(MESSAGES, "[1, 2]"), ["line 2", "[1, 2]", "not a JSON object"]),
    "a file that is no list": ("sharegpt", json.dumps(CONVERSATION), ["line 1", "not a JSON list"]),
    "a conversation that is no object": ("sharegpt", '["a"]', ["conversation 1", "'a'", "not a JSON object"]),
    "a question without id": (
        "questions",
        lines({"category": "qa", "turns": ["a"]}),
        ["line 1", "'question_id' is missing"],
    ),
    "a question without category": (
        "questions",
        lines({"question_id": 1, "turns": ["a"]}),
        ["line 1", "'category' is missing"],
    ),
    "a question without turns": (
        "questions",
        lines({"question_id": 1, "category": "qa"}),
        ["line 1", "'turns' is missing"],
    ),
    "a row without messages": (
        "messages",
        lines(MESSAGES, {"text": "a"}),
        ["line 2", "'messages' is missing", "'text'"],
    ),
    "a message without role": (
        "messages",
        lines({"messages": [{"content": "a"}]}),
        ["line 1, message 1", "'role' is missing"],
    ),
    "a message without content": (
        "messages",
        lines({"messages": [{"role": "user"}]}),
        ["line 1, message 1", "'content'"],
    ),
    "a conversation without turns": ("sharegpt", '[{"id": "a"}]', ["conversation 1", "'conversations' is missing"]),
    "a turn without speaker": (
        "sharegpt",
        '[{"conversations": [{"value": "a"}]}]',
        ["conversation 1, turn 1", "'from'"],
    ),
    "a turn without value": ("sharegpt", '[{"conversations": [{"from": "human"}]}]', ["turn 1", "'value' is missing"]),
    "an id of the wrong type": ("messages", lines({**MESSAGES, "id": 1.5}), ["line 1", "id=1.5", "text or an integer"]),
    "an id that is true": ("questions", lines({**QUESTION, "question_id": True}), ["line 1", "question_id=True"]),
    "a category of the wrong type": ("messages", lines({**MESSAGES, "category": 3}), ["line 1", "category=3", "text"]),
    "turns of the wrong type": ("questions", lines({**QUESTION, "turns": "a"}), ["line 1", "turns='a'", "a list"]),
    "a turn of the wrong type": ("questions", lines({**QUESTION, "turns": [5]}), ["line 1", "message 1", "5", "text"]),
    "messages of the wrong type": ("messages", lines({"messages": {}}), ["line 1", "messages={}", "a list"]),
    "a content of the wrong type": (
        "messages",
        lines({"messages": [{"role": "user", "content": []}]}),
        ["line 1", "content=[]"],
    ),
    "a value of the wrong type": (
        "sharegpt",
        '[{"conversations": [{"from": "human", "value": 1}]}]',
        ["turn 1", "value=1"],
    ),
    "a message that is no object": ("messages", lines({"messages": ["a"]}), ["line 1, message 1", "'a'"]),
    "no turns": ("questions", lines({**QUESTION, "turns": []}), ["line 1", "at least one message"]),
    "no messages": ("messages", lines({"messages": []}), ["line 1", "at least one message"]),
    "an empty turn": ("questions", lines({**QUESTION, "turns": [""]}), ["line 1", "content=''", "empty"]),
    "a blank content": ("messages", lines({"messages": [user(" \n")]}), ["line 1", "message 1", "empty"]),
    "a blank human turn": (
        "sharegpt",
        '[{"conversations": [{"from": "human", "value": " "}]}]',
        ["conversation 1", "empty"],
    ),
    "an empty id": ("messages", lines({**MESSAGES, "id": ""}), ["line 1", "id=''", "empty"]),
    "half a surrogate pair": ("messages", lines({"messages": [user("\ud83d")]}), ["line 1", "surrogate"]),
    "an unknown role": (
        "messages",
        lines({"messages": [{"role": "human", "content": "a"}]}),
        ["line 1", "'human'", "system, user, assistant"],
    ),
    "a role that is pages long": (
        "messages",
        lines({"messages": [{"role": "a" * 10_000, "content": "a"}]}),
        ["line 1", "role='aaa", "..."],
    ),
    "an unknown speaker": (
        "sharegpt",
        '[{"conversations": [{"from": "robot", "value": "a"}]}]',
        ["conversation 1, turn 1", "'robot'", "system, human, gpt"],
    ),
    "an answer at the end": (
        "messages",
        lines({"messages": [user("a"), {"role": "assistant", "content": "b"}]}),
        ["line 1", "'assistant'", "ends with"],
    ),
    "one question id twice": ("questions", lines(QUESTION, QUESTION), ["line 2", "'81'", "line 1"]),
    "one message id twice": ("messages", lines(MESSAGES, "", MESSAGES), ["line 3", "'a'", "line 1"]),
    "a number and a text as the same id": (
        "messages",
        lines({**MESSAGES, "id": 1}, {**MESSAGES, "id": "1"}),
        ["line 2", "'1'"],
    ),
    "one conversation id twice": (
        "sharegpt",
        json.dumps([CONVERSATION] * 2),
        ["conversation 2", "'x_0'", "conversation 1"],
    ),
    "an empty file of questions": ("questions", "", ["no prompts"]),
    "a file of blank lines": ("messages", "\n \n", ["no prompts"]),
    "an empty sharegpt file": ("sharegpt", " \n", ["empty"]),
    "an empty list": ("sharegpt", "[]", ["no prompts"]),
    "an empty text": ("text", "\n \n", ["no prompts"]),
    "Latin-1": ("text", "one\ntwo\ncaf\xe9\n".encode("latin-1"), ["line 3", "0xe9", "UTF-8"]),
    "Latin-1 behind a byte-order mark": ("messages", b"\xef\xbb\xbf\n\xe9", ["line 2", "0xe9", "UTF-8"]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused_with_its_name_the_place_and_the_reason(write, case):
    kind, content, expected = BAD[case]
    path = write(content)
    with pytest.raises(ValueError) as error:
        load_prompts(kind, path)
    for part in (str(path), *expected):
        assert part in str(error.value)
    assert len(str(error.value)) < 400 + len(str(path))


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_file_is_named(tmp_path, kind):
    with pytest.raises(FileNotFoundError, match="absent"):
        load_prompts(kind, tmp_path / "absent")


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_refused(tmp_path, kind):
    with pytest.raises(ValueError, match="is a folder") as error:
        load_prompts(kind, tmp_path)
    assert str(tmp_path) in str(error.value)


def test_an_unknown_kind_names_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match=r"'csv'.*bundled, questions, messages, sharegpt, text"):
        load_prompts("csv", tmp_path / "any")


@pytest.mark.parametrize("path", [None, ""])
def test_every_kind_but_the_bundled_one_needs_a_path(path):
    with pytest.raises(ValueError, match="'questions' need a file"):
        load_prompts("questions", path)


def test_the_bundled_kind_takes_no_path(tmp_path):
    with pytest.raises(ValueError, match="'bundled' have no path"):
        load_prompts("bundled", tmp_path / "mine.jsonl")


@pytest.mark.parametrize("kind", ["bundled", *KINDS])
@pytest.mark.parametrize("limit", [0, -1, 1.5, True])
def test_a_limit_is_an_integer_of_at_least_one(write, kind, limit):
    path = None if kind == "bundled" else write(KINDS[kind])
    with pytest.raises(ValueError, match=f"limit={limit} must be an integer >= 1"):
        load_prompts(kind, path, limit)


def test_turns_are_at_least_one(write):
    with pytest.raises(ValueError, match=r"turns=0 must be an integer >= 1"):
        load_questions(write(lines(QUESTION)), turns=0)
