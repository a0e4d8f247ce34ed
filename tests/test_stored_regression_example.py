"""examples/python/stored_regression.py: a chain, its store, and a picture of it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

import torch_sgmcmc as sg

pytestmark = pytest.mark.examples

FOLDER = Path(__file__).parents[1] / "examples" / "python"


def test_it_stores_and_goes_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    one_thread: None,
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(
        sys, "argv", ["stored_regression.py", "--out", str(tmp_path), "--steps", "2500"]
    )
    example = importlib.import_module("stored_regression")
    example.main()
    index = tmp_path / "draws" / "chain-0" / "index"
    before = index.read_bytes()
    store = sg.SampleStore(tmp_path / "draws")
    assert [draw.step for draw in store] == list(range(510, 2501, 10))
    assert all(0 < draw.loss < 100 for draw in store)
    (tmp_path / "store.png").unlink()
    example.main()  # from its checkpoint at 2,000
    assert index.read_bytes() == before
    assert (tmp_path / "store.png").stat().st_size > 10_000
    assert capsys.readouterr().out.count("200 draws of chains [0], one in 10") == 2
