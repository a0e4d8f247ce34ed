"""Helpers of tests of compiled graphs."""

import os
import shutil

import pytest
import torch
from torch.torch_version import TorchVersion

#: Inductor builds what it makes.
NEEDS_COMPILER = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="needs a C++ compiler"
)
#: Whether blocks of compiled steps are refused.
IS_OLD = TorchVersion(torch.__version__) < "2.15"
RUNS_BLOCKS = pytest.mark.skipif(IS_OLD, reason="needs torch 2.15")


@pytest.fixture
def graphs_alone(monkeypatch):
    """Blocks are traced to graphs, of which nothing is built: it takes minutes."""
    whole = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda block, *, options, **more: whole(block, backend="aot_eager", **more),
    )
