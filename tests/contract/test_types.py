"""The types that the package shows: of the compiled module, and to a user's mypy."""

import subprocess
import sys

import pytest
import stub

import torch_sgmcmc._C as _C

PROGRAM = """
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_sgmcmc as sg
import torch_sgmcmc.calibration
import torch_sgmcmc.scoring

Batch = tuple[Tensor, Tensor]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


def posterior(model: nn.Module) -> sg.SGHMC:
    return sg.SGHMC(model.parameters(), lr=0.1, momentum=0.9, num_data=100)


x, y = torch.randn(100, 3), torch.randn(100, 1)
model, loader = nn.Linear(3, 1), [(x, y)]
sampler = sg.SGLD(model.parameters(), lr=0.1, num_data=100, prior_precision=1.0)
loss(model, loader[0]).backward()  # type: ignore[no-untyped-call]  # torch's
sampler.step()
with sg.Collector(sampler, model, "runs/sgld") as collector:
    print(collector.num_draws)
store = sg.sample(model, posterior, loader, loss, steps=100, seed=0)
print(sg.report(model, store, x, y).convergence)
prediction = sg.predict(model, store, x)
spread: Tensor = prediction.variance.sqrt()
likelihood = sg.losses.gaussian(noise="log_noise")
scores = torch_sgmcmc.scoring.regression_scores(model, "runs", x, y, likelihood)
rmse: float = scores.rmse
sbc: type[sg.calibration.Calibration] = torch_sgmcmc.calibration.Calibration
"""


def test_stub_is_of_the_compiled_module():
    if "typing.Supports" not in _C.fold_in.__doc__:
        pytest.skip("an older pybind11 writes other types")
    assert stub.STUB.read_text() == stub.stub()


@pytest.mark.full
def test_user_program(tmp_path):
    pytest.importorskip("mypy")

    def errors(program):
        (tmp_path / "program.py").write_text(program)
        command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent"]
        found = subprocess.run(
            [*command, "program.py"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        errors = [line for line in found.stdout.split("\n") if ": error:" in line]
        # 1 is of found errors; others are mypy's own.
        assert found.returncode == bool(errors), found.stdout + found.stderr
        return errors

    assert errors(PROGRAM) == []
    (wrong,) = errors(PROGRAM.replace("lr=0.1, num_data", "lr='0.1', num_data"))
    assert "[arg-type]" in wrong
    (wrong,) = errors(PROGRAM.replace("scoring.regression_scores", "scoring.scores"))
    assert "[attr-defined]" in wrong
