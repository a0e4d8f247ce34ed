"""Sphinx: ``pip install ".[docs]" && sphinx-build -W docs build/docs``."""

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
