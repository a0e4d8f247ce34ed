"""examples/python/stored_regression.py: a chain, its store, and a picture of it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

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
    example = importlib.import_module("stored_regression")
    loss, calls = example.loss, []

    def main(out: Path) -> None:
        options = ["--out", str(out), "--steps", "2500"]
        monkeypatch.setattr(sys, "argv", ["stored_regression.py", *options])
        example.main()

    def interrupted(*arguments: object) -> torch.Tensor:
        calls.append(arguments)
        if len(calls) == 2300:
            raise KeyboardInterrupt
        return loss(*arguments)

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    main(whole)
    with monkeypatch.context() as patch:
        patch.setattr(example, "loss", interrupted)
        with pytest.raises(KeyboardInterrupt):
            main(parts)
    assert not (parts / "store.png").exists()
    main(parts)  # from its checkpoint at 2,000
    store = sg.SampleStore(whole / "draws")
    assert [draw.step for draw in store] == list(range(510, 2501, 10))
    assert all(0 < draw.loss < 100 for draw in store)
    files = sorted((whole / "draws" / "chain-0").iterdir())
    assert len(files) == 202  # with the index and the lock
    for file in files:
        assert (parts / "draws" / "chain-0" / file.name).read_bytes() == (
            file.read_bytes()
        )
    assert (parts / "store.png").stat().st_size > 10_000
    assert capsys.readouterr().out.count("200 draws of chains [0], one in 10") == 2
