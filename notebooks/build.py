"""Execute the notebooks: each NAME.py, in percent format, into NAME.ipynb beside it.

    python notebooks/build.py                          all of them
    python notebooks/build.py 03_choosing_a_tree       one

The .py is the source, to be read, changed and reviewed; the .ipynb is the same cells with what they printed and drew on
the tables in data/. With jupytext in Jupyter, opening either saves both (jupytext.toml pairs them).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
QUIET = {"PYTHONWARNINGS": "ignore:IProgress not found"}  # tqdm's, which would draw bars; nothing here draws any
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def sources() -> list[Path]:
    """The notebooks' .py files, in the order of their numbers."""
    return sorted(HERE.glob("[0-9][0-9]_*.py"))


def executed(source: Path, timeout: int = 300) -> nbformat.NotebookNode:
    """A .py file's cells with their outputs; nothing of the machine or of the day is left in the metadata.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed. CellTimeoutError: it took longer than `timeout` seconds.
    """
    notebook = jupytext.read(source)
    notebook.metadata = nbformat.from_dict(METADATA)
    resources = {"metadata": {"path": str(source.parent)}}
    NotebookClient(notebook, timeout=timeout, resources=resources, record_timing=False).execute(
        env={**os.environ, **QUIET}
    )
    notebook.metadata = nbformat.from_dict(METADATA)
    for number, cell in enumerate(notebook.cells, 1):
        cell.id, cell.metadata = f"cell-{number}", nbformat.from_dict({})
    return notebook


if __name__ == "__main__":
    for source in [HERE / f"{name}.py" for name in sys.argv[1:]] or sources():
        nbformat.write(executed(source), source.with_suffix(".ipynb"))
        print(source.with_suffix(".ipynb").name)
