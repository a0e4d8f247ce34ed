"""The table of bugs: each has its place in the sources, and tests at its level."""

import importlib.util
import shlex
from pathlib import Path

import pytest
from _pytest.mark import deselect_by_keyword

import torch_sgmcmc as sg

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[1]
if not (CHECKOUT / "csrc").exists():
    pytest.skip("needs the sources beside the tests", allow_module_level=True)


@pytest.fixture(scope="module")
def table():
    spec = importlib.util.spec_from_file_location("table_of_bugs", HERE / "table.py")
    assert spec is not None and spec.loader is not None
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    return table


def test_each_bug_has_its_place(table):
    bugs = [bug for build in table.BUILDS for bug in build]
    assert len(bugs) >= 20
    for bug in bugs:
        assert (CHECKOUT / bug.path).read_text().count(bug.old) == 1, bug.name


def test_levels_see_enough_bugs(table):
    bugs = [bug for build in table.BUILDS for bug in build]
    assert sum(bug.is_default for bug in bugs) >= 12
    levels = {table.level_of(arguments) for bug in bugs for arguments in bug.tests}
    assert levels == {"default", "full"}


def test_each_sampler_has_a_bug_of_the_default_level(table):
    bugs = [bug for build in table.BUILDS for bug in build if bug.is_default]
    named = {bug.name.split(":")[0].replace("-", "") for bug in bugs}
    classes = [getattr(sg, name) for name in sg.__all__]
    kinds = {c for c in classes if isinstance(c, type) and issubclass(c, sg.Sampler)}
    assert {kind.__name__ for kind in kinds - {sg.Sampler}} <= named


class Counts:
    """A plugin of pytest that counts the tests of files and -k, and collects once."""

    def __init__(self, places):
        self.numbers = dict.fromkeys(places, 0)

    @pytest.hookimpl(trylast=True)  # tests of other levels have been deselected
    def pytest_collection_modifyitems(self, config, items):
        for file, keyword in self.numbers:
            config.option.keyword = keyword
            left = [item for item in items if item.path == CHECKOUT / file]
            deselect_by_keyword(left, config)
            self.numbers[file, keyword] = len(left)
        config.option.keyword = ""


def test_all_arguments_name_tests_of_their_level(table, monkeypatch):
    monkeypatch.chdir(CHECKOUT)
    each = {a for build in table.BUILDS for bug in build for a in bug.tests}
    for level in ("default", "full"):
        places = set()
        for arguments in each:
            if table.level_of(arguments) == level:
                words = shlex.split(arguments.removeprefix(f"--level={level} "))
                assert len(words) == 1 or words[1] == "-k"
                places.add((words[0], words[2] if words[1:] else ""))
        counts = Counts(places)
        options = ["--collect-only", "-q", "-n", "0", "-p", "no:cacheprovider"]
        files = {file for file, _ in places}
        assert pytest.main([*options, f"--level={level}", *files], [counts]) == 0
        missing = [place for place, number in counts.numbers.items() if number == 0]
        assert not missing
