"""Helpers of tests of compiled graphs."""

import os
import shutil

import pytest

from torch_sgmcmc.run import compile

#: Inductor builds what it makes.
NEEDS_COMPILER = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="needs a C++ compiler"
)


@pytest.fixture
def graphs_alone(monkeypatch):
    """Blocks are traced to graphs, of which nothing is built: it takes a while."""
    monkeypatch.setattr(compile, "compile_graph", lambda graph, *_: graph)
