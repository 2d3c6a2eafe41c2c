"""Gathers the verdicts of the numbered experiments into one table.

python summary.py [FOLDER]      of the experiments here into the README, between its markers; of FOLDER: prints it
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
BEGIN, END = "<!-- verdicts -->", "<!-- end of verdicts -->"


def cell(text: str) -> str:
    """Text in one cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


def table(folder: Path) -> str:
    """A Markdown table of all `NN_name/verdict.json` in a folder, in the order of their numbers.

    Raises:
        ValueError: a verdict lacks a field of the table.
    """
    lines = ["| experiment | claim | verdict | in short |", "|---|---|---|---|"]
    for path in sorted(folder.glob("[0-9][0-9]_*/verdict.json")):
        verdict, name = json.loads(path.read_text(encoding="utf-8")), path.parent.name
        if missing := [field for field in ("claim", "verdict", "headline") if not verdict.get(field)]:
            raise ValueError(f"{name}/verdict.json has no {', '.join(missing)}: run {name}/run.sh to write it anew")
        link = f"[{name.replace('_', ' ')}](experiments/{name})"
        claim, headline = cell(verdict["claim"]), cell(verdict["headline"])
        lines.append(f"| {link} | {claim} | **{verdict['verdict']}** | {headline} |")
    return "\n".join(lines)


def replaced(text: str, between: str) -> str:
    """The text with another table between the markers.

    Raises:
        ValueError: a marker is missing.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the README has no {BEGIN} … {END}")
    return f"{before}{BEGIN}\n\n{between}\n\n{END}{after}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(table(Path(sys.argv[1])))
    else:
        README.write_text(replaced(README.read_text(encoding="utf-8"), table(HERE)), encoding="utf-8")
