"""docs/architecture.md: the life of a step names places that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/architecture.md"


def places():
    """The files, lines and texts that the page's first table names."""
    rows = re.findall(r"^\| `([\w/.]+):(\d+)` `([^`]+)` \|", PAGE.read_text(), re.M)
    return [(path, int(line), text) for path, line, text in rows]


def test_the_walk_is_short():
    assert len(places()) > 10
    assert len({path for path, _, _ in places()}) <= 12


@pytest.mark.parametrize(("path", "line", "text"), places())
def test_each_line_number_is_right(path, line, text):
    lines = (ROOT / path).read_text().splitlines()
    found = [i for i, each in enumerate(lines, start=1) if text in each]
    assert line in found, f"docs/architecture.md: {path}:{line} {text} is at {found}"
