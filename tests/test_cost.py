"""The cost table: what was measured, what lies between, and whose it is."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import build_drafter, build_target

from eagle_tree import cost
from eagle_tree.apps.calibrate import draft_times
from eagle_tree.cost import CostTable, between_jumps, measure

HERE = {"device": "a processor", "dtype": "float32", "threads": 2}


def points(stage: str, seconds: dict[int, float], context: int = 100, batch: int = 1) -> pd.DataFrame:
    rows = [{"n": n, "seconds": time, "low": time, "high": time, "repeats": 3} for n, time in seconds.items()]
    return pd.DataFrame(rows).assign(stage=stage, context=context, batch=batch)


def table(*parts: pd.DataFrame, fixed: float = 0.5) -> CostTable:
    return CostTable(pd.concat(parts, ignore_index=True), fixed, fixed, fixed, HERE)


def test_times_between_measured_points_lie_on_a_line():
    """T(1) = 1, T(3) = 2, T(5) = 6: T(2) = 1.5, T(4) = 4."""
    times = table(points("verify", {1: 1.0, 3: 2.0, 5: 6.0})).verify(100)
    assert times[1:].tolist() == pytest.approx([1.0, 1.5, 2.0, 4.0, 6.0])


def test_noise_does_not_make_a_larger_forward_cheaper():
    """3 then 2 is read as 2.5 twice: isotonic regression."""
    assert table(points("verify", {1: 1.0, 2: 3.0, 3: 2.0})).verify(100)[1:].tolist() == [1.0, 2.5, 2.5]


def test_times_between_contexts_lie_on_a_line_and_are_held_beyond():
    short, long = points("verify", {1: 1.0, 2: 2.0}, context=100), points("verify", {1: 3.0, 2: 6.0}, context=300)
    both = table(short, long)
    assert both.verify(200)[1:].tolist() == pytest.approx([2.0, 4.0])
    assert both.verify(0)[1:].tolist() == [1.0, 2.0]
    assert both.verify(9999)[1:].tolist() == [3.0, 6.0]


def test_a_pass_is_its_forward_its_drafter_steps_and_what_is_fixed():
    """Three nodes: T(4) = 4. Three steps: the root's, 0.1, and two over four nodes each, 0.3. Fixed: 0.5.

    Five nodes in two steps are two and a half each: half the way from 0.1 to 0.3.
    """
    costs = table(points("verify", {1: 1.0, 4: 4.0}), points("draft", {1: 0.1, 4: 0.3}))
    assert costs.pass_seconds(n_nodes=3, draft_steps=3, expanded=9, context=100) == pytest.approx(4 + 0.1 + 0.6 + 0.5)
    assert costs.pass_seconds(n_nodes=3, draft_steps=3, expanded=6, context=100) == pytest.approx(4 + 0.1 + 0.4 + 0.5)
    assert costs.pass_seconds(n_nodes=3, draft_steps=1, expanded=1, context=100) == pytest.approx(4 + 0.1 + 0.5)
    assert costs.pass_seconds(n_nodes=0, draft_steps=0, expanded=0, context=100) == pytest.approx(1.5)
    assert costs.draft(9, 100) == pytest.approx(0.3)  # wider than measured


def test_a_table_is_written_and_read_back(tmp_path):
    costs = table(points("verify", {1: 1.0, 4: 4.0}), points("draft", {1: 0.1}))
    costs.save(tmp_path / "new")
    again = CostTable.load(tmp_path / "new")
    assert again.about == HERE
    assert again.fixed == 0.5
    np.testing.assert_array_equal(again.verify(100), costs.verify(100))


@pytest.mark.parametrize(("name", "value"), [("device", "another"), ("dtype", "bfloat16"), ("threads", 4)])
def test_a_table_is_refused_on_another_machine(name, value):
    costs = table(points("verify", {1: 1.0}))
    costs.check_machine({**HERE, "commit": "another"})
    with pytest.raises(ValueError, match=f"{name} {HERE[name]!r} there, {value!r} here.*eagle-tree calibrate"):
        costs.check_machine({**HERE, name: value})


def test_missing_and_damaged_tables_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="eagle-tree calibrate"):
        CostTable.load(tmp_path)
    table(points("verify", {1: 1.0})).save(tmp_path)
    (tmp_path / "cost.json").write_text(json.dumps(HERE))
    with pytest.raises(ValueError, match="is damaged: 'fixed'"):
        CostTable.load(tmp_path)
    with pytest.raises(ValueError, match="needs measured verify times"):
        table(points("draft", {1: 1.0}))
    with pytest.raises(ValueError, match="not positive"):
        table(points("verify", {1: 0.0}))
    with pytest.raises(ValueError, match=r"batch=2 was not measured; measured are \[1\]"):
        table(points("verify", {1: 1.0})).verify(100, batch=2)


def test_the_grid_is_refined_until_the_stairs_are_found(monkeypatch):
    """A machine that takes 1 s up to 11 positions and 2 s above: the step is bracketed to one position.

    Time is a counter that each run moves on.
    """
    now = [0.0]
    monkeypatch.setattr(cost.time, "perf_counter", lambda: now[0])

    def run(n: int) -> None:
        now[0] += 1.0 if n <= 11 else 2.0

    measured = measure(run, [1, 8, 16, 32], repeats=3)
    assert measured.n.tolist() == [1, 8, 10, 11, 12, 16, 32]
    assert measured.seconds.tolist() == [1, 1, 1, 1, 2, 2, 2]
    assert (measured.repeats == 3).all()


def test_only_jumps_between_distant_neighbours_are_refined():
    medians = {1: 1.0, 2: 5.0, 4: 5.2, 8: 9.0}
    assert between_jumps(medians, tolerance=0.1) == [6]  # 1 and 2 are neighbours; 2 to 4 is within a tenth


def test_drafter_steps_are_timed_on_frontiers_wider_than_a_node_has_candidates():
    """OPT-Tree expands whole levels, so the widest frontier asked for is measured, with 3 candidates a node too."""
    target = build_target()
    token = torch.arange(6)
    with torch.inference_mode():
        times = draft_times(target, build_drafter(target), token, [1, 2, 8], candidates=3, repeats=1)
    assert times.n.tolist() == [1, 2, 8]
