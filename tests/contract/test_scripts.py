"""Programs as users write them, at module level: they end without a word.

With dill, which keeps modules' globals alive in another order at exit, with warnings
as errors, in Python's development mode, in a thread, and from the command line.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import cpp
from test_documents import DOCUMENTS, LOUD, QUICK, blocks

pytestmark = pytest.mark.full

pytest.importorskip("dill")  # torch imports it where it is there
pytest.importorskip("opt_einsum")

FORKS = Path(__file__).with_name("forked_scripts.py")
PAGES = [f for f in DOCUMENTS if blocks(f, "python") and f.name not in LOUD]
if not PAGES:
    pytest.skip("needs the documents beside the tests", allow_module_level=True)

# What other programs have left, which a page reads, put after its first block, that
# makes the model.
LEFT = {
    "mnist.md": """
with sg.SampleWriter("runs/sghmc2014.mnist/sghmc-seed0", model.state_dict()) as writer:
    writer.append(model.state_dict(), step=1)
""",
    "cpp.md": """
torch.save({"model": model.state_dict(), "sampler": sampler.state_dict()}, "chain.pt")
""",
}
# What a page runs for its numbers' sake, and what is enough to hear it.
SHORTER = {
    "README.md": dict([QUICK]),
    "coming_from.md": {
        "draws=500, burn_in=200": "draws=100, burn_in=40",
        "warmup(closure, 500,": "warmup(closure, 100,",
        "range(500)": "range(50)",
    },
    "convergence.md": {"range(6000)": "range(1500)", "range(100)": "range(30)"},
    "llc.md": {"burn_in=200, draws=500": "burn_in=40, draws=100"},
    "sbc.md": {"simulations=1000": "simulations=100"},
}
FOUR_LINES = """
import torch
from torch_sgmcmc import SGHMC
p = torch.nn.Parameter(torch.zeros(3))
s = SGHMC([p], lr=.1, num_data=10)
p.grad = torch.ones(3)
s.step()
"""
WITH_ALL = """
import torch, torch_sgmcmc as sg
p, q = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3))
net = {"p": p}
s, t = sg.SGHMC([p], lr=.1, num_data=10), sg.SBPS([q], num_data=10, sample_interval=.1)
monitor = sg.TemperatureMonitor(s, every=1)
precision = sg.GammaPrecision(s)
schedule = sg.PolynomialDecay(s, b=100)
collector = sg.Collector(s, net, "draws")
trajectory = sg.TimeAverage(t)
for _ in range(5):
    p.grad = torch.ones(3)
    s.step()
    t.step(lambda: (q**2).sum() * torch.linspace(.4, .6, 8))
"""
LOUD_SCRIPTS = {"loud": 'import warnings; warnings.warn("old")'}
PREDICTED = """
assert posterior.num_draws == 20
torch.testing.assert_close(posterior.mean.sum(1), torch.ones(200))
assert posterior.epistemic.shape == (200,) and monitor.num_observed == 5
"""


def run(*command, cwd):
    """A program that has to end well and in silence."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, "TQDM_DISABLE": "1", "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def run_forked(options, scripts, folder):
    """The same of many, by what they are called: `thread:` runs one in a thread."""
    names = []
    for name, text in scripts.items():
        file = folder / f"{name.removeprefix('thread:')}.py"
        file.write_text(text)
        prefix = "thread:" if name.startswith("thread:") else ""
        names.append(f"{prefix}{file}")
    run(*options, str(FORKS), *names, cwd=folder)
    found = {
        name: (Path(f"{file}.rc").read_text(), Path(f"{file}.err").read_text())
        for name, file in zip(scripts, (n.split(":")[-1] for n in names), strict=True)
    }
    loud = {name: found.pop(name) for name in scripts if name in LOUD_SCRIPTS}
    assert found == dict.fromkeys(found, ("0", ""))
    assert all(code != "0" and said for code, said in loud.values())


def test_four_lines_are_silent(tmp_path):
    """And so is the import of torch, which other scripts find done."""
    script = tmp_path / "script.py"
    script.write_text(FOUR_LINES)
    run("-W", "error", str(script), cwd=tmp_path)


def script_of(page):
    """A page as it stands, but for SHORTER."""
    parts = blocks(page, "python")
    parts.insert(1, LEFT.get(page.name, ""))
    if page.name == "README.md":
        parts.append(PREDICTED)
    script = "\n".join(parts)
    for long, short in SHORTER.get(page.name, {}).items():
        assert long in script
        script = script.replace(long, short)
    return script


def test_pages_are_silent(tmp_path):
    readme = script_of(cpp.CHECKOUT / "README.md")
    scripts = {f"{page.parent.name}-{page.stem}": script_of(page) for page in PAGES}
    assert len(scripts) > 10
    scripts |= {"thread:threaded": readme, **LOUD_SCRIPTS}
    run_forked([], scripts, tmp_path)
    both = {"all": WITH_ALL, "thread:all-threaded": WITH_ALL, "README": readme}
    run_forked(["-X", "dev"], both, tmp_path)


def test_a_script_s_output_is_captured(tmp_path):
    """A script of LOUD_SCRIPTS beside the others."""
    with pytest.raises(AssertionError):
        run("-c", "import sys; print('x', file=sys.stderr)", cwd=tmp_path)
