"""Runs verbs of eagle-tree in one process, so that the target is loaded once.

python verbs.py < STEPS     a step a line: a file that says it is done, the verb and its overrides, quoted for a shell
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path


def main(steps: list[list[str]]) -> int:
    """Run the steps in their order, up to the first that fails; returns its exit status."""
    from functools import cache  # the imports take seconds: not where nothing is left to do

    from eagle_tree.apps import cli
    from eagle_tree.target import Target

    Target.from_pretrained = cache(Target.from_pretrained)  # it keeps nothing from one verb to the next
    for done, *words in steps:
        sys.argv = ["eagle-tree", *words]
        if status := cli.main():
            return status
        Path(done).touch()
    return 0


if __name__ == "__main__":
    listed = [shlex.split(line) for line in sys.stdin]
    sys.exit(main(listed) if listed else 0)
