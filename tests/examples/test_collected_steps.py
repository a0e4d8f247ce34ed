"""examples/python/collected_steps.py: the draws are those that the titles say."""

from __future__ import annotations

from pathlib import Path

import collected_steps
import pytest
from harness.examples import run_example

pytestmark = pytest.mark.examples


def test_what_is_collected(tmp_path: Path, one_thread: None) -> None:
    lines = collected_steps.collect(tmp_path, 200)
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
    printed = run_example("collected_steps", "--out", tmp_path, "--steps", 200)
    assert "40 draws of burn_in=40, every=4" in printed
    assert (tmp_path / "collected.png").stat().st_size > 10_000
