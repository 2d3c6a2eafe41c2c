"""The bundled model and its drafter. `--full` runs the whole sizes that the small tests sample."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle_tree.checkpoint import load_bundled
from eagle_tree.prompts import load_bundled as bundled_prompts
from eagle_tree.target import Target


def pytest_collection_modifyitems(items):
    for item in items:  # the hook sees the unit tests too
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.integration)


@pytest.fixture(scope="session")
def full(request) -> bool:
    return request.config.getoption("--full")


@pytest.fixture(scope="session")
def target() -> Target:
    return Target.from_pretrained("smollm2-135m", "float32")


@pytest.fixture(scope="session")
def drafter(target):
    return load_bundled(target)


@pytest.fixture(scope="session")
def prompts(target):
    """(id, token ids) of the default prompts; their categories alternate."""
    return [(prompt.id, target.encode_chat(list(prompt.messages))) for prompt in bundled_prompts()]
