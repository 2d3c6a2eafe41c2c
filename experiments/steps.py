"""Runs verbs of eagle-tree and Python scripts in one process: what they import, and the target, is loaded once.

python steps.py < STEPS     a step a line, quoted for a shell: a file that says it is done ("" for none), a verb or
                            `python SCRIPT`, and its arguments
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path


def main(steps: list[list[str]]) -> int:
    """Run the steps in their order, up to the first that fails; returns its exit status."""
    import runpy  # the imports take seconds: not where nothing is left to do
    from functools import cache

    from eagle_tree.apps import cli
    from eagle_tree.target import Target

    Target.from_pretrained = cache(Target.from_pretrained)  # it keeps nothing from one step to the next
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
