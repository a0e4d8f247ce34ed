"""examples/python/stored_regression.py: a chain, its store, and a picture of it."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import stored_regression
import torch
from harness.examples import run_example
from stored_files import files

import torch_sgmcmc as sg

pytestmark = pytest.mark.examples


def test_it_stores_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    loss, calls = stored_regression.loss, []

    def main(out: Path) -> str:
        return run_example("stored_regression", "--out", out, "--steps", 2500)

    @functools.wraps(loss)  # the same loss, as far as the run can tell
    def interrupted(*arguments: object) -> torch.Tensor:
        calls.append(arguments)
        if len(calls) == 2300:
            raise KeyboardInterrupt
        return loss(*arguments)

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    printed = main(whole)
    with monkeypatch.context() as patch:
        patch.setattr(stored_regression, "loss", interrupted)
        with pytest.raises(KeyboardInterrupt):
            main(parts)
    assert not (parts / "store.png").exists()
    printed += main(parts)  # from its checkpoint at 2,000
    store = sg.SampleStore(whole / "draws")
    assert [draw.step for draw in store] == list(range(510, 2501, 10))
    assert all(0 < draw.loss < 100 for draw in store)
    stored = files(whole / "draws")
    assert len(stored) == 201  # with the index
    assert files(parts / "draws") == stored
    assert (parts / "store.png").stat().st_size > 10_000
    assert printed.count("200 draws of chains [0], one in 10") == 2
