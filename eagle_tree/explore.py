"""The tree explorer: a recorded run as one HTML file that needs nothing else.

`select` chooses what to show of a run, `collect` makes the page's data, `render` puts it into the template. Only what
cannot be derived is written: of a node its parent, token, confidence and target probability; the page works out depths,
ranks, scores, the mask and what was rejected. Tokens are numbers into one table of texts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

STEP = 1e-4
"""Log probabilities are written as whole steps of so many nats, sign dropped."""

LONGEST_TEXT = 200
"""Characters of a token's text that are written."""

BYTES_OF_A_CHARACTER = 4
"""A character of UTF-8 ends within so many tokens."""

STAGES = ("grow", "select", "verify", "accept", "compact")
TEMPLATE = Path(__file__).parent / "assets" / "explorer.html"
PLACE = '<script id="data" type="application/json">null</script>'
"""Where the template takes its data."""


class Vocabulary:
    """The texts of tokens, each written once; without a tokenizer they have none and are shown as numbers.

    Attributes:
        tokens: the token ids met so far, in the order of the page's table.
    """

    def __init__(self, tokenizer=None):
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.place: dict[int, int] = {}
        # Behind another token, since SentencePiece drops the space in front of a first one.
        self.anchor = [] if tokenizer is None else tokenizer.encode("a", add_special_tokens=False)[-1:]

    def index(self, token: int) -> int:
        """A token's place in the table."""
        place = self.place.setdefault(token, len(self.tokens))
        if place == len(self.tokens):
            self.tokens.append(token)
        return place

    def text(self, tokens: list[int]) -> str:
        """The text of tokens in the middle of a text."""
        return self.decode([*self.anchor, *tokens])[len(self.decode(self.anchor)) :]

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def table(self) -> dict[str, list]:
        """Ids and texts of the page's tokens."""
        texts = [] if self.tokenizer is None else [shortened(self.text([token])) for token in self.tokens]
        return {"id": self.tokens, "text": texts}

    def joint_texts(self, tokens: Sequence[int]) -> dict[int, str]:
        """Where a character spans tokens: its text at the token that ends it, none at those before."""
        texts: dict[int, str] = {}
        waiting: list[int] = []
        if self.tokenizer is None:
            return texts
        for index, token in enumerate(tokens):
            waiting.append(token)
            text = self.text(waiting)
            last = index == len(tokens) - 1 or len(waiting) == BYTES_OF_A_CHARACTER
            if text.endswith("\ufffd") and not last:
                texts[index] = ""
                continue
            if len(waiting) > 1:
                texts[index] = shortened(text)
            waiting = []
        return texts


def shortened(text: str) -> str:
    """A text, cut if it is longer than anyone reads."""
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}… ({len(text)} characters)"


@dataclass(frozen=True)
class Selection:
    """What a page shows of a run: policies, prompts, and how many prompts are left out."""

    policies: list[str]
    prompts: list[str]
    left_out: int


def select(
    tables: dict[str, pd.DataFrame],
    policies: Sequence[str] | None = None,
    prompts: Sequence[str] | None = None,
    max_passes: int = 2000,
) -> Selection:
    """Choose what a page shows.

    Args:
        tables: passes and nodes of a run.
        policies: those to show; the page opens with the first two. None: all, the largest trees first.
        prompts: those to show, in this order. None: as many as have at most `max_passes` passes together, in the
            run's order and at least one.

    Raises:
        ValueError: no passes or no nodes were recorded, an unknown policy or prompt.
    """
    passes = tables["passes"]
    if passes.empty:
        raise ValueError("the run has no passes: every answer ended with its first token")
    if tables["nodes"].empty and passes.n_nodes.any():
        raise ValueError("the run has no nodes (recorded with record_nodes=false): there is no tree to show")
    by_size = passes.groupby("policy", sort=False).n_nodes.mean().sort_values(ascending=False, kind="stable").index
    policies = chosen("policies", policies, list(by_size))
    passes = passes[passes.policy.isin(policies)]
    known = list(passes.prompt_id.unique())
    if prompts is None:
        together = passes.prompt_id.value_counts().reindex(known).cumsum()
        prompts = known[: max(1, int((together <= max_passes).sum()))]
    else:
        prompts = chosen("prompts", prompts, known)
    return Selection(policies, prompts, len(known) - len(prompts))


def collect(tables: dict[str, pd.DataFrame], selection: Selection, tokenizer=None) -> dict[str, Any]:
    """The page's data from passes, nodes and outputs of a run.

    Args:
        tokenizer: of the run's target; None shows tokens as numbers.

    Raises:
        ValueError: the tables are of different runs.
    """
    vocabulary = Vocabulary(tokenizer)
    keys = ["prompt_id", "policy"]
    passes, nodes = (dict(list(tables[name].groupby(keys))) for name in ("passes", "nodes"))
    outputs = {key: group.iloc[0] for key, group in tables["outputs"].groupby(keys)}
    entries = []
    for prompt in selection.prompts:
        entry = {"id": prompt, "category": "", "answers": [None] * len(selection.policies)}
        for place, policy in enumerate(selection.policies):
            if (key := (prompt, policy)) in outputs:
                of_key = passes.get(key, tables["passes"][:0]), nodes.get(key, tables["nodes"][:0])
                entry["category"] = outputs[key].category
                entry["answers"][place] = answer(*of_key, outputs[key], vocabulary)
        entries.append(entry)
    return {
        "policies": selection.policies,
        "prompts": entries,
        "left_out": selection.left_out,
        "step": STEP,
        "stages": STAGES,
        "tokens": vocabulary.table(),
    }


def chosen(option: str, names: Sequence[str] | None, known: list[str]) -> list[str]:
    """The named ones, each once, all if none are named; an unknown name is an error of the option."""
    names = known if names is None else list(dict.fromkeys(names))
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        what = f"{unknown[0]!r} is not in the run" if unknown else "the list is empty"
        raise ValueError(f"{option}: {what}; it has {', '.join(known)}")
    return names


def answer(passes: pd.DataFrame, nodes: pd.DataFrame, output: pd.Series, vocabulary: Vocabulary) -> dict[str, Any]:
    """One policy's answer to a prompt: its tokens and its passes.

    Raises:
        ValueError: passes, nodes and tokens do not belong together.
    """
    tokens = [int(token) for token in output.token]
    passes = passes.sort_values("pass_id")
    nodes = nodes.sort_values(["pass_id", "node"])
    root = passes.context_length - passes.context_length.min()
    ends = root + passes.emitted
    fits = len(tokens) == passes.emitted.sum() + 1 and len(nodes) == passes.n_nodes.sum()
    if not fits or (ends.iloc[:-1].to_numpy() != root.iloc[1:].to_numpy()).any():
        raise ValueError(
            f"passes, nodes and output of policy {output.policy!r} on prompt {output.prompt_id!r} do not belong "
            "together: the tables are of different runs"
        )
    of_pass = {column: nodes[column].to_numpy() for column in ("parent", "token", "accepted", "log_conf")}
    of_pass["target"] = nodes.target_log_prob.to_numpy()
    bounds = np.cumsum([0, *passes.n_nodes])
    entries = [
        pass_entry(row, start, {name: column[low:high] for name, column in of_pass.items()}, vocabulary)
        for row, start, low, high in zip(passes.itertuples(), root, bounds[:-1], bounds[1:])
    ]
    return {
        "token": [vocabulary.index(token) for token in tokens],
        "text": vocabulary.joint_texts(tokens),
        "passes": entries,
    }


def pass_entry(row, root: int, nodes: dict[str, np.ndarray], vocabulary: Vocabulary) -> dict[str, Any]:
    """One pass.

    Fields:
        root: index of the pending token in the answer; emitted, expected (by drafter and target), steps of the
        drafter, ms by stage; parent, token, conf, target: of the draft nodes 1…N, the latter two as steps of -log
        (null: impossible); path: the accepted nodes.
    """
    return {
        "root": int(root),
        "emitted": row.emitted,
        "expected": [rounded(row.expected_draft), rounded(row.expected_target)],
        "steps": row.draft_steps,
        "ms": [round(1e3 * getattr(row, f"{stage}_s"), 2) for stage in STAGES],
        "parent": nodes["parent"].tolist(),
        "token": [vocabulary.index(token) for token in nodes["token"].tolist()],
        "conf": steps(nodes["log_conf"]),
        "target": steps(nodes["target"]),
        "path": (np.flatnonzero(nodes["accepted"]) + 1).tolist(),
    }


def rounded(value: float) -> float | None:
    """Four decimals; None for what was not measured."""
    return round(value, 4) if np.isfinite(value) else None


def steps(log_prob: np.ndarray) -> list[int | None]:
    """Log probabilities as whole steps of -log; None where the probability is 0."""
    return [round(-value / STEP) if np.isfinite(value) else None for value in log_prob.astype(float).tolist()]


def render(data: dict[str, Any]) -> str:
    """The page. Its data cannot end the element that holds it: no `<` is written, and nothing beyond ASCII."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    template = TEMPLATE.read_text(encoding="utf-8")
    assert template.count(PLACE) == 1, f"{TEMPLATE.name} has no single place for its data"
    return template.replace(PLACE, PLACE.replace("null", text))
