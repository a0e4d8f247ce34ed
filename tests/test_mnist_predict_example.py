"""examples/python/mnist_predict.py: scores and a picture from a short chain."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.examples

FOLDER = Path(__file__).parents[1] / "examples" / "python"


def test_scores_and_a_picture(
    data_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for package in ("matplotlib", "torchmetrics", "torchvision"):
        pytest.importorskip(package)
    monkeypatch.syspath_prepend(str(FOLDER))
    options = ["--data-root", str(data_root), "--output", str(tmp_path / "out")]
    options += ["--epochs", "5", "--burn-in", "2"]
    monkeypatch.setattr(sys, "argv", ["mnist_predict.py", *options])
    importlib.import_module("mnist_predict").main()
    printed = capsys.readouterr().out
    assert "posterior, 3 draws:\n" in printed and "last draw, 1 draws:\n" in printed
    errors = [float(e) for e in re.findall(r"error ([\d.]+)%", printed)]
    assert len(errors) == 2 and errors[0] < 12  # far from converged, but learning
    aurocs = [float(a) for a in re.findall(r"(?:entropy|part): ([\d.]+)", printed)]
    assert len(aurocs) == 3 and min(aurocs) > 0.5
    assert (tmp_path / "out" / "predictions.png").stat().st_size > 10_000
