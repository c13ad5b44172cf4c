"""The notebooks of docs/ run on the CPU, cell by cell, and print what they show.

Who has changed one runs `python tests/python/project/test_notebooks.py`, which renews what its
cells print.
"""

import contextlib
import io
import json
import re
import sys
from pathlib import Path

import pytest

NOTEBOOKS = sorted(Path(__file__).resolve().parents[3].glob("docs/notebooks/*.ipynb"))


def run(notebook):
    """Runs the code of a notebook in one namespace, and keeps in each cell what it printed."""
    names = {"__name__": "__main__"}
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
            text = printed.getvalue().splitlines(keepends=True)
            stream = {"name": "stdout", "output_type": "stream", "text": text}
            cell["outputs"] = [stream] if text else []
    return notebook


def without_numbers(notebook):
    """Returns the first lines that cells printed, without numbers: others depend on the machine."""
    texts = ("".join(o["text"]) for cell in notebook["cells"] for o in cell.get("outputs", []))
    return [re.sub(r"[\d.]+|\{.*\}", "#", text.partition("\n")[0]) for text in texts]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_prints_what_it_shows(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = json.loads(path.read_text())
    assert without_numbers(run(json.loads(path.read_text()))) == without_numbers(shown)


def test_there_is_one():
    assert NOTEBOOKS


if __name__ == "__main__":
    for file in map(Path, sys.argv[1:] or NOTEBOOKS):
        file.write_text(json.dumps(run(json.loads(file.read_text())), indent=1) + "\n")
