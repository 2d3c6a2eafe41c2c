"""Estimators over recorded passes and nodes, by hand."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from test_cost import points, table

from eagle_tree import analysis, curves


def passes(policy: str, prompt: str, emitted: list[int], record_s: float = 0.0, **columns) -> pd.DataFrame:
    rows = pd.DataFrame({"emitted": emitted, "pass_id": range(len(emitted)), "record_s": record_s, **columns})
    return rows.assign(policy=policy, prompt_id=prompt)


def outputs(*rows: tuple[str, str, float]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["policy", "prompt_id", "decode_s"])


def test_speed_is_tokens_over_decoding_time_without_recording():
    """Six tokens in 5 s, of which twice 1 s went to recording."""
    sums = analysis.per_prompt(passes("a", "p", [2, 4], record_s=1.0), outputs(("a", "p", 5.0)))
    assert sums.loc["a", "p"].to_dict() == {"passes": 2, "emitted": 6, "seconds": 3.0}


def test_a_speed_up_is_a_ratio_of_sums_over_the_prompts_that_both_have():
    """On p and q: 30 tokens in 4 s against 10 in 4 s. The mean of the prompts' ratios would be (2 + 6) / 2 = 4."""
    ours = pd.DataFrame({"emitted": [10, 20, 99], "seconds": [2.0, 2.0, 1.0]}, index=["p", "q", "only ours"])
    theirs = pd.DataFrame({"emitted": [5, 5], "seconds": [2.0, 2.0]}, index=["p", "q"])
    estimate, low, high = analysis.speedup(ours, theirs)
    assert estimate == 3
    assert 2 <= low <= 3 <= high <= 4


def test_a_speed_is_predicted_from_the_columns_of_the_passes():
    """
    T(1) = 1, T(4) = 4; the root's step 0.1, a step over two nodes 0.2; fixed 0.5. A pass of three nodes after two
    steps, two nodes expanded in the second: 4 + 0.1 + 0.2 + 0.5; one without a tree: 1.5. Four tokens in 6.3 s.
    """
    costs = table(points("verify", {1: 1.0, 4: 4.0}), points("draft", {1: 0.1, 2: 0.2}))
    recorded = {"n_nodes": [3, 0], "draft_steps": [2, 0], "expanded": [3, 0], "context_length": [100, 103]}
    assert analysis.predicted_speed(passes("a", "p", [3, 1], **recorded), costs) == pytest.approx(4 / 6.3)


def tree(prompt: str = "p", number: int = 0) -> pd.DataFrame:
    r"""
        root ── 1 (0.5) ── 3 (0.8) ── 4 (1.0)      the target says 1, 1/2, 0
                └ 2 (0.4)                          the target says 0; node 2 is a child of the root
    """  # fmt: skip
    rows = [
        (1, 0, 1, 0, 0.5, 0.5, 1.0),
        (2, 0, 1, 1, 0.4, 0.4, 0.0),
        (3, 1, 2, 0, 0.8, 0.4, 0.5),
        (4, 3, 3, 0, 1.0, 0.4, 0),
    ]
    names = ["node", "parent", "depth", "rank", "log_conf", "score", "target_log_prob"]
    frame = pd.DataFrame(rows, columns=names).assign(policy="a", prompt_id=prompt, pass_id=number)
    with np.errstate(divide="ignore"):
        logs = ["log_conf", "score", "target_log_prob"]
        return frame.assign(**{name: np.log(frame[name].astype(float)) for name in logs})


def test_a_nodes_place_promise_and_reach_by_hand():
    """2, 3 and 4 tie at 0.4: the shallower comes first."""
    nodes = curves.with_ancestry(pd.concat([tree(number=1), tree(number=0).iloc[::-1]]))
    for _, one in nodes.groupby("pass_id"):
        assert one.node.tolist() == [1, 2, 3, 4]
        assert one.place.tolist() == [1, 2, 3, 4]
        assert one.promised.tolist() == pytest.approx([0.5, 0.4, 0.4, 0.4])
        assert one.reach.tolist() == pytest.approx([1.0, 0.0, 0.5, 0.0])
        assert one.weakest.tolist() == pytest.approx([1.0, 1.0, 0.5, 0.5])  # an edge above, not the node's own


def test_place_is_by_score_not_by_the_order_in_the_tree():
    nodes = tree()
    nodes.loc[nodes.node == 2, ["log_conf", "score"]] = math.log(0.6)
    assert curves.with_ancestry(nodes).place.tolist() == [2, 1, 3, 4]


def test_the_worth_of_a_group_is_a_ratio_of_sums():
    """First candidates: three of the four nodes of each tree, which reach 1 + 1/2 + 0 of them."""
    nodes = curves.with_ancestry(pd.concat([tree("p"), tree("q")]))
    first, second = curves.node_worth(nodes, "rank").to_dict("records")
    assert first["rank"] == 0
    assert first["node_share"] == 0.75
    assert first["reach"] == first["reach_low"] == first["reach_high"] == pytest.approx(0.5)
    assert first["promised"] == pytest.approx((0.5 + 0.4 + 0.4) / 3)
    assert first["reach_share"] == 1
    assert second["reach"] == second["reach_share"] == 0
