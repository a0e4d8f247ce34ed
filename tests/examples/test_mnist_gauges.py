"""examples/python/mnist_gauges.py: a table and a picture from a short chain."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.examples import run_example

pytestmark = pytest.mark.examples


def test_a_table_and_a_picture(data_root: Path, tmp_path: Path) -> None:
    options = ["--data-root", data_root, "--output", tmp_path / "out"]
    options += ["--epochs", "5", "--burn-in", "1", "--batch-size", "600"]
    printed = run_example("mnist_gauges", *options)
    assert printed.startswith("Temperatures over 40 observed steps")
    # A network that has hardly begun.
    assert "- 0.weight is not in equilibrium" in printed
    for name in ("0.weight", "0.bias", "2.weight", "2.bias"):
        assert f"\n  {name} " in printed
    assert (tmp_path / "out" / "gauges.png").stat().st_size > 10_000
