"""The documents' code runs as it stands there, and the walk through a step is right."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from harness import cpp
from levels import at_levels
from torch.torch_version import TorchVersion

# None where the tests alone are, without the sources.
DOCUMENTS = sorted(
    [*cpp.CHECKOUT.glob("README.md"), *cpp.CHECKOUT.glob("docs/**/*.md")]
)
# Pages whose programs speak themselves, wait for other processes, or compile;
# test_scripts.py has the others.
LOUD = ("frameworks.md", "gallery.md", "distributed.md", "small_networks.md")
# The README's first program; tests/examples/test_quickstart.py runs all of it.
QUICK = ("steps=6000, burn_in=2000", "steps=60, burn_in=20, check=False, report=False")


def blocks(file, language):
    fence = rf"^```{language}\n(.*?)^```$"
    return re.findall(fence, file.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "file",
    at_levels(
        [file for file in DOCUMENTS if file.name in ("README.md", *LOUD)],
        default=[file for file in DOCUMENTS if file.name == "README.md"],
        full=[f for f in DOCUMENTS if f.name in LOUD[:3]],
    ),
    ids=lambda file: str(file.relative_to(cpp.CHECKOUT)),
)
def test_python(file, tmp_path, monkeypatch):
    needed = {"frameworks.md": "lightning", "gallery.md": "lightning tensorboard wandb"}
    for module in needed.get(file.name, "").split():
        pytest.importorskip(module)
    if file.name == "small_networks.md":
        if not shutil.which("g++") or TorchVersion(torch.__version__) < "2.15":
            pytest.skip("needs a C++ compiler, and torch 2.15")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = {}
    if file.name == "distributed.md":  # as torchrun does, for one process
        for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": 0}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    try:
        for block in blocks(file, "python"):
            exec(compile(block.replace(*QUICK), str(file), "exec"), names)
        if file.name == "README.md":
            assert names["posterior"].num_draws == 20
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


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
