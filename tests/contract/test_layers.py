"""Imports of the package, and between its modules: downwards, without cycles."""

import ast
import graphlib
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import torch_sgmcmc

ROOT = Path(torch_sgmcmc.__file__).parent
#: The parts of the package, each of which imports only those below it.
LAYERS = (
    {"_C", "io"},
    {"core"},
    {"samplers", "losses", "priors", "schedules", "data", "control_variates"},
    {"draws"},
    {"diagnostics", "scoring"},
    {"run", "calibration"},
)
LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}


def imports_of(tree):
    """The modules that are imported, and what from them, for types alone too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "a relative import"
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@cache
def trees():
    paths = {
        ".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path
        for path in sorted(ROOT.rglob("*.py"))
        if path != ROOT / "__init__.py"  # the public names
    }
    return {name: ast.parse(path.read_text("utf-8")) for name, path in paths.items()}


def test_there_is_no_circle():
    every = trees()
    assert len(every) > 50
    graph = {name: imports_of(tree) & {*every} for name, tree in every.items()}
    assert any(graph.values())
    graphlib.TopologicalSorter(graph).prepare()  # raises a CycleError that names them


def test_imports_lead_down():
    found = {
        (name, name.split(".")[1], other.split(".")[1])
        for name, tree in trees().items()
        for other in imports_of(tree)
        if name != "torch_sgmcmc.__main__" and other.startswith("torch_sgmcmc.")
    }
    assert {own for _, own, _ in found} == {*LEVELS} - {"_C", "io"}
    wrong = [
        f"{name} imports {other}"
        for name, own, other in found
        if own != other and LEVELS[other] >= LEVELS[own]
    ]
    assert not wrong


def test_private_members_stay_private():
    touched = [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and ast.unparse(node.value).rpartition(".")[2] in ("sampler", "_sampler")
    ]
    # Other folders see a sampler's parts through functions of core.
    doors = {place.partition(":")[0].rpartition(".")[0] for place in touched}
    assert doors == {"torch_sgmcmc.core"}, touched


def test_a_source_folder_that_hides_the_package(tmp_path):
    without = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT, tmp_path / "torch_sgmcmc", ignore=without)
    command = [sys.executable, "-m", "torch_sgmcmc"]
    found = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert found.returncode == 1
    assert f"{tmp_path}/torch_sgmcmc, which has no compiled parts" in found.stderr
    assert "run Python from another folder" in found.stderr
