"""Halve the default prompts: one half to fit and choose on, the other to judge on. Every category is in both.

python split_prompts.py FOLDER      writes fit.jsonl and judge.jsonl, for data=messages data.path=…
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from eagle_tree.prompts import load_bundled


def main(folder: Path) -> None:
    prompts = load_bundled()
    by_category = sorted(prompts, key=lambda prompt: prompt.category)
    judged = {prompt.id for prompt in by_category[1::2]}
    folder.mkdir(parents=True, exist_ok=True)
    for name, wanted in (("fit", False), ("judge", True)):
        half = [prompt for prompt in prompts if (prompt.id in judged) == wanted]
        lines = [json.dumps(asdict(prompt), ensure_ascii=False) + "\n" for prompt in half]
        (folder / f"{name}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
