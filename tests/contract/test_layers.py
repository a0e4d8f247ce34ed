"""Each folder of the package imports only those below it."""

import ast
import inspect
from pathlib import Path

import torch_sgmcmc as sg

PACKAGE = Path(inspect.getfile(sg)).parent
LAYERS = (
    {"_C", "io"},
    {"core"},
    {"samplers", "losses", "priors", "schedules", "data", "control_variates"},
    {"draws"},
    {"diagnostics", "scoring"},
    {"run", "calibration"},
)
LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}


def imports():
    """Yields a file, its part of the package, and the part that it imports."""
    for path in PACKAGE.rglob("*.py"):
        if path.parent == PACKAGE and path.name in ("__init__.py", "__main__.py"):
            continue  # the public names, and a program
        file = path.relative_to(PACKAGE)
        for node in ast.walk(ast.parse(path.read_text())):
            modules = []
            if isinstance(node, ast.ImportFrom):
                assert not node.level, f"{file}: a relative import"
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            for parts in (module.split(".") for module in modules):
                if parts[0] == "torch_sgmcmc":
                    yield str(file), file.parts[0].removesuffix(".py"), parts[1]


def test_imports_lead_down():
    found = [*imports()]
    assert {own for _, own, _ in found} == {*LEVELS} - {"_C", "io"}
    wrong = [
        f"{file} imports {other}"
        for file, own, other in found
        if own != other and LEVELS[other] >= LEVELS[own]
    ]
    assert not wrong
