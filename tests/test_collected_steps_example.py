"""examples/python/collected_steps.py: the draws are those that the titles say."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.examples

FOLDER = Path(__file__).parents[1] / "examples" / "python"


def test_what_is_collected(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    one_thread: None,
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(FOLDER))
    example = importlib.import_module("collected_steps")
    lines = example.collect(tmp_path, 200)
    burn_in, capped, cyclical, decaying = (
        [draw.step for draw in store] for _, _, store in lines
    )
    assert burn_in == list(range(44, 201, 4))
    assert capped == list(range(16, 201, 16))  # doubled four times
    # Of cycles of 60 steps the last 24.
    assert cyclical and all((step - 1) % 60 >= 36 for step in cyclical)
    assert decaying == list(range(4, 201, 4))
    for _, sizes, store in lines:
        assert len(sizes) == 200
        for draw in store:
            assert draw.lr == pytest.approx(sizes[draw.step - 1])
    assert all(draw.weight == pytest.approx(draw.lr) for draw in lines[-1][2])
    options = ["--out", str(tmp_path), "--steps", "200"]
    monkeypatch.setattr(sys, "argv", ["collected_steps.py", *options])
    example.main()
    assert "40 draws of burn_in=40, every=4" in capsys.readouterr().out
    assert (tmp_path / "collected.png").stat().st_size > 10_000
