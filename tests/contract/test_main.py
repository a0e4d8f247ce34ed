"""The environment report, and modules that an import of the package leaves out."""

import platform
import re
import subprocess
import sys

import torch

import torch_sgmcmc as sg

# Each takes a tenth of a second or more, and few programs need one.
HEAVY = {"arviz", "arviz_stats", "lightning", "matplotlib", "pandas", "scipy", "tqdm"}
HEAVY |= {"torch._dynamo", "torch._inductor", "torch.distributed.tensor"}
PROGRAM = """
import sys, torch
before = {*sys.modules}
import torch_sgmcmc
print(*({*sys.modules} - before))
"""


def run(folder, *command):
    """Returns the output of Python, in a folder where no checkout is imported."""
    options = {"capture_output": True, "text": True, "check": True}
    return subprocess.run([sys.executable, *command], cwd=folder, **options).stdout


def test_the_report_fits_a_screen(tmp_path):
    lines = run(tmp_path, "-m", "torch_sgmcmc").splitlines()
    assert len(lines) <= 24
    found = {line[:16].strip(): line[17:] for line in lines}
    assert found["torch_sgmcmc"] == sg.__version__
    assert found["torch"].startswith(torch.__version__)
    assert found["Python"] == platform.python_version()
    assert found["instruction set"] == sg._C.isa()
    assert re.search(r"(GCC|[Cc]lang) \d", found["compiler"])
    assert found["packages"].count(", ") == 3


def test_an_import_is_light(tmp_path):
    """It takes at most 0.15 s after torch's; nothing here measures that."""
    imported = {*run(tmp_path, "-c", PROGRAM).split()}
    assert "torch_sgmcmc" in imported and not imported & HEAVY
