"""Sphinx: ``pip install ".[docs]" && sphinx-build -W docs build/docs``."""

import runpy
from pathlib import Path
from typing import Any

import torch_sgmcmc

project = "torch_sgmcmc"
version = release = torch_sgmcmc.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
]
html_theme = "furo"
myst_heading_anchors = 3
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_custom_sections = [("State", "notes_style"), ("Target density", "notes_style")]


def _bugs(app: Any, page: str, source: list[str]) -> None:
    """Puts the table of compiled bugs where a page asks for it."""
    mark = "<!-- the bugs of tests/mutants/table.py -->"
    if mark not in source[0]:
        return
    file = Path(__file__).parents[1] / "tests" / "mutants" / "table.py"
    rows = ["| bug | in | seen by |", "| --- | --- | --- |"]
    for mutant in (m for build in runpy.run_path(str(file))["BUILDS"] for m in build):
        tests = "<br>".join(f"`{test}`" for test in mutant.tests)
        rows.append(f"| {mutant.name} | `{mutant.path}` | {tests} |")
    source[0] = source[0].replace(mark, "\n".join(rows))


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _bugs)
