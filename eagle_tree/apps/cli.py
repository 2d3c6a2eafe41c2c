"""`eagle-tree <verb> [hydra overrides]`."""

from __future__ import annotations

import importlib
import sys

VERBS = {
    "bench": "compare policies on the same prompts: tokens per pass, expected and realised, speed",
    "evaluate": "judge a drafter on its own: hit rates by depth, calibration, tokens per pass",
    "audit": "does a configuration emit the text it must? Divergences classified: numerical or real",
    "certify": "is an acceptance rule lossless? Its law, computed exactly, and known mistakes that must fail",
    "generate": "stream one answer with accepted runs marked",
    "explore": "show a recorded run's draft trees, pass by pass, on one HTML page",
    "calibrate": "measure what a pass costs here; fit what confidences are worth",
    "trace": "record what a drafter says along the target's texts, for replay",
    "replay": "run policies on a trace, in a cost table's time; no model",
    "report": "gather replays and sweeps in one table; where expected tokens are lost",
    "corpus": "let a target answer prompts, to train a drafter on",
    "train": "train an EAGLE-3, EAGLE-1/2 or Medusa head for a target on its corpus",
}


def usage() -> str:
    """The list of verbs."""
    lines = [f"  {verb:10s} {role}" for verb, role in VERBS.items()]
    return "\n".join(
        ["usage: eagle-tree <verb> [overrides]", "", *lines, "", "eagle-tree <verb> --help shows its options."]
    )


def main() -> int:
    """Entry point of the console command."""
    arguments = sys.argv[1:]
    if arguments and arguments[0] in ("-h", "--help"):
        print(usage())
        return 0
    if not arguments or arguments[0] not in VERBS:
        print(usage(), file=sys.stderr)
        if arguments:
            print(f"\neagle-tree: error: unknown verb {arguments[0]!r}", file=sys.stderr)
        return 2
    return importlib.import_module(f"eagle_tree.apps.{arguments[0]}").main(arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
