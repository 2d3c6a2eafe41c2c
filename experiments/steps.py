"""Runs verbs of eagle-tree and Python scripts in one process: what they import, and the target, is loaded once.

python steps.py < STEPS     a step a line, quoted for a shell: a file that says it is done ("" for none), a verb or
                            `python SCRIPT`, and its arguments
"""

from __future__ import annotations

import inspect
import runpy
import shlex
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any


def once(load: Callable[..., Any]) -> Callable[..., Any]:
    """`load`, called once for the same arguments: by place, by name or by default, as verbs and scripts give them."""
    signature, cached = inspect.signature(load), cache(load)

    def loaded(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return cached(*bound.args, **bound.kwargs)

    return loaded


def main(steps: list[list[str]]) -> int:
    """Run the steps in their order, up to the first that fails; returns its exit status."""
    from eagle_tree.apps import cli  # these imports take seconds: not where nothing is left to do
    from eagle_tree.target import Target

    Target.from_pretrained = once(Target.from_pretrained)  # a target keeps nothing from one step to the next
    for done, *words in steps:
        if words[0] == "python":
            sys.argv = words[1:]
            runpy.run_path(words[1], run_name="__main__")
        else:
            sys.argv = ["eagle-tree", *words]
            if status := cli.main():
                return status
        if done:
            Path(done).touch()
    return 0


if __name__ == "__main__":
    listed = [shlex.split(line) for line in sys.stdin]
    sys.exit(main(listed) if listed else 0)
