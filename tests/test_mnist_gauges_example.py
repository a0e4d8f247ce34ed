"""examples/python/mnist_gauges.py: a table and a picture from a short chain."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.examples

FOLDER = Path(__file__).parents[1] / "examples" / "python"


def test_a_table_and_a_picture(
    data_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(FOLDER))
    options = ["--data-root", str(data_root), "--output", str(tmp_path / "out")]
    options += ["--epochs", "5", "--burn-in", "1", "--batch-size", "600"]
    monkeypatch.setattr(sys, "argv", ["mnist_gauges.py", *options])
    importlib.import_module("mnist_gauges").main()
    printed = capsys.readouterr().out
    assert printed.startswith("Temperatures over 40 observed steps")
    # A network that has hardly begun.
    assert "- 0.weight is not in equilibrium" in printed
    for name in ("0.weight", "0.bias", "2.weight", "2.bias"):
        assert f"\n  {name} " in printed
    assert (tmp_path / "out" / "gauges.png").stat().st_size > 10_000
