"""examples/python/mnist_heat.py: two short runs, made once."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.examples

FOLDER = Path(__file__).parents[1] / "examples" / "python"


def test_a_table_of_runs_that_are_made_once(
    data_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("torchmetrics")
    monkeypatch.syspath_prepend(str(FOLDER))
    options = ["--data-root", str(data_root), "--out", str(tmp_path), "--seeds", "1"]
    options += [
        "--epochs",
        "4",
        "--start",
        "1",
        "--observe",
        "2",
        "--settings",
        "page",
        "cool",
    ]
    monkeypatch.setattr(sys, "argv", ["mnist_heat.py", *options])
    main = importlib.import_module("mnist_heat").main
    main()
    printed = capsys.readouterr().out
    page, cool = (
        json.loads((tmp_path / f"{name}-0-4-1-2-500.json").read_text())
        for name in ("page", "cool")
    )
    heat = [r["temperatures"]["output weights"]["kinetic"] for r in (page, cool)]
    assert heat[0][0] - heat[0][1] > 1.5 > heat[1][0] + heat[1][1]
    assert page["error"] < 0.15
    # Of the whole layer's parameters, in one draw: the first layer's are tiny so far.
    assert page["precisions"][0] > 5 * page["precisions"][1]
    table = [line for line in printed.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in table[2:]] == ["| page", "| cool"]
    before = (tmp_path / "page-0-4-1-2-500.json").stat().st_mtime_ns
    main()
    assert capsys.readouterr().out.splitlines()[-4:] == table
    assert (tmp_path / "page-0-4-1-2-500.json").stat().st_mtime_ns == before
