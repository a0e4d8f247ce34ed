"""The quickstart: one text in the program, the README and the notebook.

python tests/examples/test_quickstart.py    # writes the notebook
"""

import ast
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "examples/python/quickstart.py"
NOTEBOOK = PROGRAM.with_suffix(".ipynb")
NUMBER = r"-?\d+(?:\.\d+)?"


def cells():
    """Returns the program's parts."""
    _, *parts = re.split(r"^# %%\n", PROGRAM.read_text(), flags=re.MULTILINE)
    return [re.sub(r"# fmt: \w+\n", "", part).strip("\n") for part in parts]


def notebook():
    """Returns the notebook of the program, without outputs."""
    title = ast.get_docstring(ast.parse(PROGRAM.read_text())).partition("\n")[0]
    code = {"cell_type": "code", "execution_count": None, "outputs": []}
    found = [{"cell_type": "markdown", "source": [title]}]
    found += [code | {"source": part.splitlines(keepends=True)} for part in cells()]
    return {
        "cells": [{"id": str(i), "metadata": {}} | c for i, c in enumerate(found)],
        "metadata": {"kernelspec": {"display_name": "Python 3", "name": "python3"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def readme(language):
    text = (ROOT / "README.md").read_text()
    return re.search(rf"^```{language}\n(.*?)\n```$", text, re.M | re.S)[1]


def test_the_texts_are_one():
    assert readme("python") == cells()[0]
    assert len(cells()[0].splitlines()) <= 15
    assert json.loads(NOTEBOOK.read_text()) == notebook()


def test_the_notebook_prints_what_the_readme_says(tmp_path):
    nbformat, nbclient = map(pytest.importorskip, ("nbformat", "nbclient"))
    done = nbclient.NotebookClient(
        nbformat.read(NOTEBOOK, as_version=4),
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    printed = "".join(
        part.text for part in done.cells[1].outputs if part.get("name") == "stdout"
    )
    # The same words; which tensor is the hottest differs between machines.
    texts = [" ".join(t.split()) for t in (printed, readme("text"))]
    texts = [re.sub(r"\d\.(weight|bias)|chain \d\.$", "", text) for text in texts]
    words, expected = (re.sub(NUMBER, "#", text) for text in texts)
    assert words == expected
    values = [[float(n) for n in re.findall(NUMBER, text)] for text in texts]
    for found, said in zip(*values, strict=True):
        assert abs(found - said) <= 0.3 + 0.5 * abs(said)
    picture = (tmp_path / "runs/quickstart.png").read_bytes()
    assert picture.startswith(b"\x89PNG")


if __name__ == "__main__":
    NOTEBOOK.write_text(json.dumps(notebook(), indent=1) + "\n")
