"""The numbered experiments: their layout, and that the README says what their verdicts say."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pandas as pd
import pytest

import eagle_tree

EXPERIMENTS = Path(eagle_tree.__file__).parents[1] / "experiments"
pytestmark = pytest.mark.skipif(not EXPERIMENTS.is_dir(), reason="experiments are not part of an installed package")
NUMBERED = sorted(EXPERIMENTS.glob("[0-9][0-9]_*"))


def script(name: str):
    """A script of the experiments, as a module."""
    spec = importlib.util.spec_from_file_location(name, EXPERIMENTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


summary = script("summary") if EXPERIMENTS.is_dir() else None


def gains(*intervals: tuple[float, float], nodes: float = 59.0) -> pd.DataFrame:
    """Gains over some rivals, by their intervals."""
    return pd.DataFrame(intervals, columns=["gain_low", "gain_high"]).assign(
        gain=lambda rows: rows.mean(axis=1), nodes=nodes
    )


def test_the_readme_shows_the_verdicts_as_they_are_committed():
    readme = summary.README.read_text(encoding="utf-8")
    assert readme == summary.replaced(readme, summary.table(EXPERIMENTS))


@pytest.mark.parametrize("folder", NUMBERED, ids=lambda folder: folder.name)
def test_a_numbered_experiment_says_what_it_asks_and_how_to_run_it(folder):
    assert (folder / "run.sh").stat().st_mode & 0o100
    assert "run.sh" in (folder / "README.md").read_text(encoding="utf-8") and (folder / "analyse.py").is_file()


@pytest.mark.parametrize(
    "path", sorted(EXPERIMENTS.glob("[0-9][0-9]_*/verdict.json")), ids=lambda path: path.parent.name
)
def test_a_verdict_has_all_its_fields_and_stands_beside_its_results(path):
    verdict = json.loads(path.read_text(encoding="utf-8"))
    assert list(verdict) == ["claim", "source", "verdict", "headline", "numbers"]
    assert 0 < len(verdict["headline"]) <= 140 and "\n" not in verdict["headline"]
    assert verdict["verdict"] in ("holds", "holds partly", "does not hold")
    assert (path.parent / "results.csv").is_file() and (path.parent / "figure.png").is_file()


def test_a_chain_of_six_at_three_quarters_yields_three_and_a_half_tokens():
    assert script("11_fragile_chain/analyse").expected_tokens(0.75, 6) == pytest.approx((1 - 0.75**7) / 0.25)


def test_a_chain_that_is_accepted_by_half_at_every_token_is_geometric():
    """Of 8 passes 4 accept a token or more, 2 two or more: 6 accepted of 12 tried, 1.75 tokens a pass."""
    chain = script("11_fragile_chain/analyse")
    passes = pd.DataFrame({"prompt_id": ["p"] * 4 + ["q"] * 4, "accepted": [0, 0, 1, 2] * 2})
    table = chain.measured(passes, 2)
    assert table["at_least"].tolist() == table.geometric.tolist() == [0.5, 0.25]
    assert table.acceptance.tolist() == [0.5, 0.5] and table.rate.tolist() == [0.5, 0.5]
    assert table.tokens.tolist() == table.geometric_tokens.tolist() == [1.75, 1.75]
    assert chain.verdict([table]) == "holds"


def test_a_chain_of_passes_that_fail_at_once_or_never_is_not_geometric():
    """Of 8 passes 4 accept both tokens: 8 of 12 tried, so the law says 2.11 tokens a pass where 2 come: 5.6 % off."""
    chain = script("11_fragile_chain/analyse")
    passes = pd.DataFrame({"prompt_id": ["p"] * 4 + ["q"] * 4, "accepted": [0, 0, 2, 2] * 2})
    table = chain.measured(passes, 2)
    assert table.acceptance.tolist() == [0.5, 1.0] and table.geometric_tokens[0] == pytest.approx(1 + 2 / 3 + 4 / 9)
    assert chain.verdict([table]) == "does not hold"


@pytest.mark.parametrize("name", ["02_static_and_dynamic_trees/analyse", "03_value_and_rerank/analyse"])
@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([(1.1, 1.2), (1.02, 1.1)], "holds"),
        ([(1.1, 1.2), (0.98, 1.1)], "holds partly"),
        ([(0.99, 1.2), (0.98, 1.1)], "does not hold"),
        ([(1.1, 1.2), (0.9, 0.98)], "does not hold"),
    ],
)
def test_a_gain_over_all_holds_over_some_partly_and_a_loss_not(name, intervals, expected):
    rows = gains(*intervals)
    analyse = script(name)
    assert analyse.verdict([rows] if name.startswith("02") else rows) == expected


def ratio(policy: str, over: str, low: float, how: str = "replayed") -> dict:
    return {"policy": policy, "over": over, "ratio": low + 0.05, "ratio_low": low, "ratio_high": low + 0.1, "how": how}


BOTH = [ratio("rate_optimal", "best fixed", 0.98), ratio("rate_optimal", "eagle2_published", 1.3)]
CLOCK = [
    ratio("rate_optimal", "best fixed", 0.98, "measured"),
    ratio("random drafter", "autoregressive", 0.91, "measured"),
]


@pytest.mark.parametrize(
    ("rows", "errors", "expected"),
    [
        (BOTH, [], "holds"),
        ([BOTH[0], ratio("rate_optimal", "eagle2_published", 1.1)], [], "holds partly"),
        (
            [ratio("rate_optimal", "best fixed", 0.9), ratio("rate_optimal", "eagle2_published", 1.1)],
            [],
            "does not hold",
        ),
        (BOTH + CLOCK, [0.05, -0.06], "holds"),
        (BOTH + CLOCK, [0.05, -0.08], "holds partly"),
        ([*BOTH, ratio("rate_optimal", "best fixed", 0.9, "measured")], [], "holds partly"),
        ([*BOTH, ratio("random drafter", "autoregressive", 0.8, "measured")], [], "holds partly"),
    ],
)
def test_the_rate_optimal_tree_is_judged_by_every_part_that_was_measured(rows, errors, expected):
    tree = script("09_rate_optimal_tree/analyse")
    assert tree.verdict(tree.parts(pd.DataFrame(rows), pd.DataFrame({"error": errors}))) == expected


def test_the_search_leaves_out_trees_whose_pool_is_smaller_than_their_budget():
    search = script("09_rate_optimal_tree/search")
    trees = search.settings(small=False)
    assert len(trees) >= 200 and len(set(trees)) == len(trees)
    assert all(tree.budget <= tree.top_k + tree.depth * tree.top_k**2 for tree in trees)
    assert search.Eagle2(4, 2, 1) in trees and search.Eagle2(8, 2, 1) not in trees


def write_verdict(folder: Path, name: str, **fields: str) -> None:
    """A hand-made NAME/verdict.json in a folder."""
    (folder / name).mkdir()
    (folder / name / "verdict.json").write_text(json.dumps(fields), encoding="utf-8")


def test_the_table_has_a_row_a_verdict_in_the_order_of_numbers(tmp_path):
    for name, verdict in (("02_second", "holds"), ("01_first", "does not hold"), ("notes", "holds")):
        short = {"verdict": verdict, "headline": "τ × 1.5 (1.2–1.8) | T = 0"}
        write_verdict(tmp_path, name, claim=f"a | b {name}", source="a paper", **short, numbers="all of them")
    head, _, first, second = summary.table(tmp_path).splitlines()
    assert head == "| experiment | claim | verdict | in short |"
    assert first == (
        "| [01 first](experiments/01_first) | a \\| b 01_first | **does not hold** | τ × 1.5 (1.2–1.8) \\| T = 0 |"
    )
    assert second.startswith("| [02 second]") and "**holds**" in second


def test_a_verdict_without_a_headline_is_named(tmp_path):
    write_verdict(tmp_path, "01_first", claim="a", source="a paper", verdict="holds", headline="× 2", numbers="1.5")
    write_verdict(tmp_path, "02_second", claim="a", source="a paper", verdict="holds", numbers="1.5")
    with pytest.raises(ValueError, match=r"02_second/verdict.json has no headline: run 02_second/run.sh"):
        summary.table(tmp_path)


def test_only_what_stands_between_the_markers_is_replaced():
    text = f"before\n{summary.BEGIN}\nold\n{summary.END}\nafter\n"
    assert summary.replaced(text, "new") == f"before\n{summary.BEGIN}\n\nnew\n\n{summary.END}\nafter\n"
    with pytest.raises(ValueError, match="verdicts"):
        summary.replaced("no markers", "new")
