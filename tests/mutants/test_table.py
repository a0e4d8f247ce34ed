"""That the bugs of the table can be built in: sources change, and runs are nightly."""

import importlib.util
from pathlib import Path

HERE = Path(__file__).parent


def test_each_bug_has_its_place() -> None:
    spec = importlib.util.spec_from_file_location("table_of_bugs", HERE / "table.py")
    assert spec is not None and spec.loader is not None
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    bugs = [bug for build in table.BUILDS for bug in build]
    assert len(bugs) >= 20
    csrc = HERE.parents[1] / "csrc"
    for bug in bugs:
        assert (csrc / bug.file).read_text().count(bug.old) == 1, bug.name
