"""The numbered experiments: their layout, and that the README says what their verdicts say."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

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
    assert list(verdict) == ["claim", "source", "verdict", "numbers"]
    assert verdict["verdict"] in ("holds", "holds partly", "does not hold")
    assert (path.parent / "results.csv").is_file() and (path.parent / "figure.png").is_file()


def test_the_table_has_a_row_a_verdict_in_the_order_of_numbers(tmp_path):
    for name, verdict in (("02_second", "holds"), ("01_first", "does not hold"), ("notes", "holds")):
        fields = {"claim": f"a | b {name}", "source": "a paper", "verdict": verdict, "numbers": "1.5 (1.2–1.8)"}
        (tmp_path / name).mkdir()
        (tmp_path / name / "verdict.json").write_text(json.dumps(fields), encoding="utf-8")
    first, second = summary.table(tmp_path).splitlines()[2:]
    assert first == (
        "| [01 first](experiments/01_first) | a \\| b 01_first | a paper | **does not hold** | 1.5 (1.2–1.8) |"
    )
    assert second.startswith("| [02 second]") and "**holds**" in second


def test_only_what_stands_between_the_markers_is_replaced():
    text = f"before\n{summary.BEGIN}\nold\n{summary.END}\nafter\n"
    assert summary.replaced(text, "new") == f"before\n{summary.BEGIN}\n\nnew\n\n{summary.END}\nafter\n"
    with pytest.raises(ValueError, match="verdicts"):
        summary.replaced("no markers", "new")
