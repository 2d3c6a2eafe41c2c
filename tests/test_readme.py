"""The README's promises that a machine can check."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import yaml

import eagle_tree
from eagle_tree.apps.cli import VERBS
from eagle_tree.apps.common import conf_dir
from eagle_tree.decode import generate
from eagle_tree.policy import Autoregressive

README = Path(eagle_tree.__file__).parents[1] / "README.md"
pytestmark = pytest.mark.skipif(not README.is_file(), reason="README.md is not part of an installed package")


def block(language: str, containing: str) -> str:
    """The fenced block of a language that contains some text."""
    blocks = re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)
    return next(text for text in blocks if containing in text)


def test_the_policy_to_copy_runs_and_changes_no_token(target, drafter, tmp_path, monkeypatch):
    (tmp_path / "my_policies.py").write_text(block("python", "class Star"))
    monkeypatch.syspath_prepend(tmp_path)
    star = importlib.import_module("my_policies").Star(width=4)
    run = generate(target, drafter, star, [3, 5, 7], 12)
    assert run.tokens == generate(target, None, Autoregressive(), [3, 5, 7], 12).tokens
    assert {one.row.n_nodes for one in run.passes} == {4}
    assert yaml.safe_load(block("yaml", "Star"))["_target_"] == "my_policies.Star"


def test_the_map_names_every_module():
    text = README.read_text()
    for path in Path(eagle_tree.__file__).parent.glob("*.py"):
        assert path.name in text or path.name == "__init__.py", f"{path.name} is missing from the README's map"


def test_every_verb_has_its_configuration():
    for verb in VERBS:
        assert (conf_dir() / f"{verb}.yaml").is_file()
