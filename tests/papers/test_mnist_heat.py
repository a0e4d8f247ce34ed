"""sghmc2014.mnist_heat: two short runs, made once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness.examples import run_example

pytestmark = pytest.mark.examples


def test_a_table_of_runs_that_are_made_once(data_root: Path, tmp_path: Path) -> None:
    options = ["--data-root", data_root, "--out", tmp_path, "--seeds", 1]
    options += ["--epochs", 4, "--start", 1, "--observe", 2]
    options += ["--settings", "page", "cool"]
    printed = run_example("sghmc2014.mnist_heat", *options)
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
    assert run_example("sghmc2014.mnist_heat", *options).splitlines()[-4:] == table
    assert (tmp_path / "page-0-4-1-2-500.json").stat().st_mtime_ns == before
