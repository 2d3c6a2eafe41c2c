"""The notebooks run on the tables in the repository, and what is committed is what they are."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import jupytext
import nbformat
import pytest
from omegaconf import OmegaConf

import eagle_tree
from eagle_tree.apps.common import build_policy
from eagle_tree.decode import generate
from eagle_tree.policy import Autoregressive

NOTEBOOKS = Path(eagle_tree.__file__).parents[1] / "notebooks"
LARGEST_NOTEBOOK, LARGEST_DATA = 200_000, 2_000_000
pytestmark = pytest.mark.skipif(not NOTEBOOKS.is_dir(), reason="notebooks are not part of an installed package")
SOURCES = sorted(NOTEBOOKS.glob("[0-9][0-9]_*.py"))
notebook = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def build() -> ModuleType:
    """notebooks/build.py."""
    spec = importlib.util.spec_from_file_location("build_notebooks", NOTEBOOKS / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def committed(source: Path) -> nbformat.NotebookNode:
    return nbformat.read(source.with_suffix(".ipynb"), as_version=4)


def cells(notebook: nbformat.NotebookNode) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def kinds(notebook: nbformat.NotebookNode) -> list[list[list[str]]]:
    """Of every cell's outputs the stream's name, or the kinds of data."""
    outputs = ([*cell.get("outputs", [])] for cell in notebook.cells)
    return [[[one.name] if "name" in one else sorted(one.get("data", {})) for one in cell] for cell in outputs]


def test_there_are_notebooks():
    assert len(SOURCES) == 4


@notebook
def test_it_runs_and_shows_what_the_committed_one_shows(source: Path, build: ModuleType):
    assert kinds(build.executed(source)) == kinds(committed(source))


@notebook
def test_the_committed_notebook_has_the_cells_of_its_source(source: Path):
    assert cells(committed(source)) == cells(jupytext.read(source)), f"run python notebooks/build.py {source.stem}"


@notebook
def test_the_committed_notebook_is_small_and_free_of_its_machine(source: Path, build: ModuleType):
    path = source.with_suffix(".ipynb")
    text, read = path.read_text(), committed(source)
    assert path.stat().st_size < LARGEST_NOTEBOOK
    assert read.metadata == build.METADATA
    assert not any(cell.metadata for cell in read.cells)
    assert "stderr" not in str(kinds(read))  # warnings and progress bars
    assert not any(output.output_type == "error" for cell in read.cells for output in cell.get("outputs", []))
    assert not re.search(r"/(home|root|tmp|Users|usr|opt|work)/|site-packages|\\u001b|\.cache", text)


def test_the_tables_are_small():
    assert sum(path.stat().st_size for path in (NOTEBOOKS / "data").rglob("*") if path.is_file()) < LARGEST_DATA


def test_the_policy_to_write_installs_and_changes_no_token(target, drafter, tmp_path, monkeypatch):
    text = jupytext.read(NOTEBOOKS / "04_your_own_policy.py")
    prose = "\n".join(cell.source for cell in text.cells if cell.cell_type == "markdown")
    module, yaml = (re.search(rf"```{language}\n(.*?)```", prose, re.DOTALL)[1] for language in ("python", "yaml"))
    code = (cell.source for cell in text.cells if cell.cell_type == "code")
    (written,) = (source for source in code if "class LikelyEnough(Policy)" in source)
    (tmp_path / "my_policies.py").write_text(module.partition("@dataclass")[0] + written)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_policies", raising=False)
    policy = build_policy(OmegaConf.create(yaml))
    assert policy == importlib.import_module("my_policies").LikelyEnough()
    run = generate(target, drafter, policy, [3, 5, 7], 12)
    assert run.tokens == generate(target, None, Autoregressive(), [3, 5, 7], 12).tokens
    assert any(one.row.n_nodes for one in run.passes)
