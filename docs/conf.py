"""Sphinx: ``pip install ".[docs]" && sphinx-build -W docs build/docs``."""

import runpy
from pathlib import Path
from typing import Any

import torch_sgmcmc

ROOT = Path(__file__).parents[1]
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


def _bugs() -> str:
    """Returns the table of bugs that are built in."""
    rows = ["| bug | in | seen by |", "| --- | --- | --- |"]
    table = runpy.run_path(str(ROOT / "tests/mutants/table.py"))
    for mutant in (m for build in table["BUILDS"] for m in build):
        tests = "<br>".join(f"`{test}`" for test in mutant.tests)
        rows.append(f"| {mutant.name} | `{mutant.path}` | {tests} |")
    return "\n".join(rows)


def _headers() -> str:
    """Returns a section for each C++ header."""
    folder = Path("csrc/include/torch_sgmcmc")
    return "\n\n".join(
        f"## {path.name}\n\n```{{literalinclude}} ../{folder / path.name}\n"
        ":language: cpp\n```"
        for path in sorted((ROOT / folder).glob("*.h"))
    )


#: Written where a page has the mark.
WRITTEN = {
    "<!-- the bugs of tests/mutants/table.py -->": _bugs,
    "<!-- the headers of csrc/include -->": _headers,
}


def _write(app: Any, page: str, source: list[str]) -> None:
    for mark, text in WRITTEN.items():
        if mark in source[0]:
            source[0] = source[0].replace(mark, text())


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _write)
