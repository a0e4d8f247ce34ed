"""Imports of the package, and between its modules: allowed directions, no cycles."""

import ast
import graphlib
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import torch_sgmcmc

ROOT = Path(torch_sgmcmc.__file__).parent


def imports_of(tree, modules):
    """The modules of the package that are imported, for types alone too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found & modules


@cache
def trees():
    paths = {
        ".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path
        for path in sorted(ROOT.rglob("*.py"))
        if path.name != "__init__.py"
    }
    return {name: ast.parse(path.read_text("utf-8")) for name, path in paths.items()}


def test_there_is_no_circle():
    every = trees()
    assert len(every) > 50
    graph = {name: imports_of(tree, {*every}) for name, tree in every.items()}
    assert any(graph.values())
    graphlib.TopologicalSorter(graph).prepare()  # raises a CycleError that names them


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
