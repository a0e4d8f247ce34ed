"""The examples' programs, run in this process: their imports take seconds.

pyproject.toml puts their folders on pytest's path.
"""

import importlib
import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from matplotlib.figure import Figure

FOLDER = Path(__file__).parents[2] / "examples" / "python"
#: Run with an experiment's name, such as sghmc2014.figures.
PAPERS = FOLDER.parent / "papers"


def run_example(name: str, *options: object) -> str:
    """Returns the output of a program called with these options.

    Its pictures are drawn where axes stand by themselves: to lay them out is to draw
    all twice, and their looks are for people.
    """
    threads = torch.get_num_threads()
    printed = io.StringIO()
    argv = [name, *map(str, options)]
    as_it_is = patch.object(Figure, "get_layout_engine", lambda figure: None)
    with patch.object(sys, "argv", argv), redirect_stdout(printed), as_it_is:
        try:
            importlib.import_module(name).main()
        finally:
            torch.set_num_threads(threads)
    return printed.getvalue()


def run_experiment(
    name: str, out: Path, *options: object
) -> tuple[str, dict[str, Any]]:
    """Returns the output of an experiment of examples/papers, and its results.json."""
    printed = run_example(name, "--threads", 1, "--out", out, *options)
    for picture in out.glob("*.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")
    return printed, json.loads((out / "results.json").read_text())
