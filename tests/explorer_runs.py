"""Recorded runs made up for the tests of the explorer: tables of any size, and a tokenizer of any texts."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pandas as pd

from eagle_tree.record import NODE_COLUMNS, NODE_SCHEMA, PassRow, RunWriter

HOSTILE = [
    "</script><script>window.broken = 1</script>",
    "<img src=x onerror='window.broken = 1'>",
    "<!--",
    "]]>",
    "\"quotes' `ticks` \\ back & amp &lt;",
    "\u202eright to left\u202c",
    "\u200f\u2067mark\u2069",
    "\n\r\n\t\0\x1b[31m\x7f\x85",
    "long " * 2000,
    "\u0301" * 10_000,
    "\u05e9\u05dc\u05d5\u05dd",
    "\u4f60\u597d",
    "\ud83d",  # half a character
    "\u2028\u2029\ufeff\u00ad\u200b",
    "",
    "${window.broken = 1}{{window.broken = 1}}",
    " " * 300,
]
"""Texts that a model's vocabulary may hold and a page must survive."""


class Texts:
    """A tokenizer whose token i reads as the i-th text."""

    def __init__(self, texts: list[str]):
        self.texts = texts

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [0]

    def decode(self, tokens: list[int], **options: bool) -> str:
        return "".join(self.texts[token] for token in tokens)


def pass_row(**known) -> PassRow:
    """A pass whose seconds are all 0.25 and whose meters are 0."""
    seconds = {field.name: 0.25 for field in fields(PassRow) if field.name.endswith("_s")}
    return PassRow(category="maths", acceptance_meter=0.0, surprisal_meter=0.0, **seconds, **known)


def record(parent, token, confidence, target, path) -> dict[str, np.ndarray]:
    """Node columns of a tree from lists over its draft nodes 1…N; `path` are the accepted ones."""
    parent, node = np.array(parent, dtype=int), np.arange(1, len(parent) + 1)
    depth, score = [0], [0.0]
    with np.errstate(divide="ignore"):
        log_conf, target = np.log(np.array(confidence, dtype=float)), np.log(np.array(target, dtype=float))
    for v in node:
        depth.append(depth[parent[v - 1]] + 1)
        score.append(score[parent[v - 1]] + log_conf[v - 1])
    columns = {name: np.zeros(len(node)) for name in NODE_COLUMNS}
    columns |= {"node": node, "parent": parent, "depth": np.array(depth[1:]), "token": np.array(token, dtype=int)}
    columns |= {"log_conf": log_conf, "score": np.array(score[1:]), "target_log_prob": target}
    columns["rank"] = np.array([(parent[: v - 1] == parent[v - 1]).sum() for v in node])
    columns["accepted"] = np.isin(node, path)
    columns["tried"] = columns["parent_accepted"] = np.isin(parent, [0, *path])
    columns["selected"] = np.ones(len(node))
    return columns


def expected(columns: dict[str, np.ndarray]) -> tuple[float, float]:
    """Expected tokens of a pass by its node columns: of the drafter, and of the target under the rule `match`."""
    reach = [1.0]
    for parent, log_prob in zip(columns["parent"].astype(int), columns["target_log_prob"]):
        reach.append(reach[parent] * np.exp(log_prob))
    return 1 + np.exp(columns["score"].astype(float)).sum(), sum(reach)


class Run:
    """Collects answers, then gives their tables or writes them as a run."""

    def __init__(self):
        self.answers = []

    def answer(self, policy: str, prompt_id: str, tokens: list[int], trees: list[dict], context: int = 20) -> Run:
        """An answer whose passes verified the given trees; each emits its path and one more token, up to the end."""
        rows, root = [], 0
        for pass_id, columns in enumerate(trees):
            accepted = int(columns["accepted"].sum())
            emitted = min(accepted + 1, len(tokens) - 1 - root)
            of_drafter, of_target = expected(columns)
            rows.append(
                pass_row(
                    policy=policy,
                    prompt_id=prompt_id,
                    pass_id=pass_id,
                    context_length=context + root,
                    n_nodes=len(columns["node"]),
                    depth=int(columns["depth"].max(initial=0)),
                    draft_steps=2,
                    expanded=3,
                    expected_draft=of_drafter,
                    expected_target=of_target,
                    accepted=accepted,
                    emitted=emitted,
                )
            )
            root += emitted
        output = {"policy": policy, "prompt_id": prompt_id, "category": "maths", "token": tokens, "text": ""}
        self.answers.append((rows, trees, {**output, "prefill_s": 0.5, "decode_s": 1.0}))
        return self

    def tables(self) -> dict[str, pd.DataFrame]:
        """The run as `read_run` gives it."""
        passes = [row for rows, _, _ in self.answers for row in rows]
        nodes = [
            pd.DataFrame({"policy": row.policy, "prompt_id": row.prompt_id, "pass_id": row.pass_id, **columns})
            for rows, trees, _ in self.answers
            for row, columns in zip(rows, trees)
        ]
        outputs = pd.DataFrame([output for _, _, output in self.answers])
        columns = [field.name for field in fields(PassRow)]
        return {
            "passes": pd.DataFrame([vars(row) for row in passes], columns=columns),
            "nodes": pd.concat(nodes)[NODE_SCHEMA.names] if nodes else pd.DataFrame(columns=NODE_SCHEMA.names),
            "outputs": outputs.assign(token=outputs.token.map(np.array)),
        }

    def write(self, folder, about: dict | None) -> None:
        """A run's folder; without `about` the run was interrupted before its end."""
        writer = RunWriter(folder)
        for rows, trees, output in self.answers:
            writer.write_prompt(rows, trees, output)
        if about is not None:
            writer.close(about)


NOTHING = record([], [], [], [], [])
"""A pass that drafted nothing."""


def random_answer(rng: np.random.Generator, passes: int, nodes: int, tokens: int) -> tuple[list[int], list[dict]]:
    """Output tokens and trees of so many passes, `nodes` draft nodes each, over a vocabulary of `tokens`."""
    output, trees = [int(rng.integers(tokens))], []
    for _ in range(passes):
        parent = [int(rng.integers(max(0, v - 12), v)) if v > 10 else 0 for v in range(1, nodes + 1)]
        path, end = [], 0
        while rng.random() < 0.7 and end in parent:
            end = parent.index(end) + 1
            path.append(end)
        token = rng.integers(tokens, size=nodes)
        trees.append(record(parent, token, rng.random(nodes), rng.random(nodes), path))
        output += [int(token[v - 1]) for v in path] + [int(rng.integers(tokens))]
    return output, trees
