"""examples/python/mnist_predict.py: scores and a picture from a short chain."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness.examples import run_example

pytestmark = pytest.mark.examples


def test_scores_and_a_picture(data_root: Path, tmp_path: Path) -> None:
    options = ["--data-root", data_root, "--output", tmp_path / "out"]
    options += ["--epochs", "5", "--burn-in", "2"]
    printed = run_example("mnist_predict", *options)
    assert "posterior, 3 draws:\n" in printed and "last draw, 1 draws:\n" in printed
    errors = [float(e) for e in re.findall(r"error ([\d.]+)%", printed)]
    assert len(errors) == 2 and errors[0] < 12  # far from converged, but learning
    aurocs = [float(a) for a in re.findall(r"(?:entropy|part): ([\d.]+)", printed)]
    assert len(aurocs) == 3 and min(aurocs) > 0.5
    assert (tmp_path / "out" / "predictions.png").stat().st_size > 10_000
