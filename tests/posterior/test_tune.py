"""tune: the heating that it promises, what it refuses, and that it leaves no trace.

Fixed seeds. One tensor holds many chains, so that heating is soon known well.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_sgmcmc as sg

Closure = Callable[[], Any]
Problem = tuple[sg.Sampler, Closure]
N = 100.0


def gaussian(
    cls: type[sg.Sampler],
    *,
    spread: float = 0.3,
    lr: float = 0.01,
    dims: int = 2000,
    **settings: Any,
) -> Problem:
    """Curvatures from 0.5 to 2, gradients with noise, started in equilibrium."""
    generator = torch.Generator().manual_seed(1)
    k = torch.linspace(0.5, 2.0, dims)
    p = nn.Parameter(torch.randn(dims, generator=generator) / (N * k).sqrt())
    sampler = cls([p], lr, num_data=N, seed=4, **settings)

    def closure() -> None:
        p.grad = k * p.detach() + spread * torch.randn(dims, generator=generator)

    return sampler, closure


def run(sampler: sg.Sampler, closure: Closure, steps: int) -> None:
    for _ in range(steps):
        closure()
        sampler.step()


def assert_as_promised(problem: Problem, gradients: int = 3000, **options: Any) -> Any:
    """Within a fifth of the budget, in a run that is long enough to tell.

    That is until it is known to a tenth, and at most for ten times the gradients that
    the search took, the first of which do not count.
    """
    sampler, closure = problem
    result = sg.tune(sampler, closure, gradients=gradients, progress=False, **options)
    assert result.feasible and result.limit == "heating", result
    assert result.gradients <= gradients
    result.apply(sampler)
    assert sampler.param_groups[0]["lr"] == result.lrs[0]
    budget = result.budget
    run(sampler, closure, result.gradients)
    gauges = sg.Gauges(sampler, every=3)
    for _ in range(9):
        run(sampler, closure, result.gradients)
        mean, half_width = gauges.all().kinetic
        if half_width < 0.1 * budget:
            break
    gauges.detach()
    assert half_width < 0.1 * budget, "the run is too short to tell"
    assert abs(mean - 1 - budget) < 0.2 * budget, result.summary()
    # The parts that it names add up.
    assert result.heating.mean == pytest.approx(budget)
    return result


@pytest.mark.slow
@pytest.mark.parametrize(("momentum", "lr"), [(0.9, 1.0), (0.99, 1e-5)])
def test_gaussian(momentum: float, lr: float) -> None:
    dims = 2000 if momentum == 0.9 else 20_000
    result = assert_as_promised(
        gaussian(sg.SGHMC, lr=lr, momentum=momentum, dims=dims), 2500
    )
    # lr N V / (2 T α), and the curvature's part.
    friction = 1 - momentum
    noise = result.lr * N * 0.09 / (2 * friction)
    assert result.minibatch_heating == pytest.approx(noise, rel=0.1)
    assert result.noise_estimate == pytest.approx(noise * friction, rel=0.1)
    forgets = max(1 / friction, friction / (result.lr * 1.25))
    assert result.relaxation == pytest.approx(forgets, rel=0.2)


@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_gaussian_by_sgld(spread: float) -> None:
    assert_as_promised(gaussian(sg.SGLD, spread=spread, lr=1e-4), 1500)


def test_gaussian_by_psgld() -> None:
    sampler, closure = gaussian(sg.PSGLD, lr=1e-4, gamma=False, decay=0.999)
    run(sampler, closure, 1000)
    sampler.param_groups[0]["adapt"] = False
    assert_as_promised((sampler, closure), 1500, budget=0.1)


def test_groups_keep_their_ratio() -> None:
    generator = torch.Generator().manual_seed(1)
    params = [nn.Parameter(torch.randn(2000, generator=generator) / 10) for _ in "ab"]
    groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.1, "momentum": 0}]
    sampler = sg.SGHMC(groups, 0.01, 0.9, num_data=N, seed=0)

    def closure() -> None:
        for p in params:
            noise = torch.randn(2000, generator=generator)
            p.grad = p.detach() + 0.3 * noise

    result = assert_as_promised((sampler, closure))
    assert result.lrs[1] == pytest.approx(10 * result.lrs[0])
    with pytest.raises(ValueError, match="groups have different lrs"):
        _ = result.lr


@pytest.mark.slow
def test_the_worst_tensor() -> None:
    generator = torch.Generator().manual_seed(1)
    sizes, spreads = (2000, 10), (0.1, 0.6)
    params = [nn.Parameter(torch.randn(n, generator=generator) / 10) for n in sizes]
    names = zip(("calm", "noisy"), params, strict=True)
    sampler = sg.SGHMC(list(names), 0.01, 0.9, num_data=N, seed=0)

    def closure() -> None:
        for p, spread in zip(params, spreads, strict=True):
            noise = torch.randn(p.shape, generator=generator)
            p.grad = p.detach() + spread * noise

    everyone = assert_as_promised((sampler, closure), 1500)
    assert 2.0 > everyone.tensors["noisy"] > 0.2 and 0.05 > everyone.tensors["calm"]
    worst = sg.tune(sampler, closure, over="worst", progress=False)
    worst.apply(sampler)
    run(sampler, closure, 1200)
    gauges = sg.Gauges(sampler, every=3)
    run(sampler, closure, 10_800)
    noisy = gauges.tensor("noisy")
    # Ten elements: what the noise adds is known better than their temperature.
    assert noisy.minibatch_heating.mean == pytest.approx(0.05, rel=0.2)
    assert abs(noisy.kinetic.mean - 1.05) < noisy.kinetic.half_width + 0.01


@pytest.mark.slow
def test_effective_samples_for_a_gradient() -> None:
    az = pytest.importorskip("arviz")
    tuned, closure = gaussian(sg.SGHMC, dims=200)
    best = sg.tune(tuned, closure, progress=False).lr

    def efficiency(lr: float) -> tuple[float, float]:
        sampler, closure = gaussian(sg.SGHMC, lr=lr, dims=200)
        (p,) = sampler.param_groups[0]["params"]
        gauges, draws = sg.Gauges(sampler, every=2), []
        for _ in range(3000):
            closure()
            sampler.step()
            draws.append(p.detach()[::20].square())
        series = torch.stack(draws).numpy()
        sizes = [float(az.ess(series[None, :, i])) for i in range(series.shape[1])]
        return float(np.mean(sizes)), gauges.all().kinetic.mean - 1

    grid = [efficiency(best * 2.0**i) for i in (-2, -1, -0.5, 0.5, 1)]
    within = [size for size, heating in grid if heating < 1.2 * 0.05]
    assert 3 <= len(within) < len(grid)
    assert efficiency(best)[0] > max(within) / 1.5


def regression() -> Problem:
    """Linear, condition number 100, 30 chains, minibatches of 50 of 2,000 rows."""
    generator = torch.Generator().manual_seed(2)
    rows, dims, chains, n = 2000, 40, 30, 50
    scales = torch.logspace(-1, 0, dims)
    x = torch.randn(rows, dims, generator=generator) * scales
    truth = torch.randn(dims, generator=generator)
    y = x @ truth + torch.randn(rows, generator=generator)
    precision = x.T @ x + torch.eye(dims)
    assert 60 < float(torch.linalg.cond(precision)) < 200
    mean = torch.linalg.solve(precision, x.T @ y)
    factor = torch.linalg.inv(torch.linalg.cholesky(precision))
    theta = nn.Parameter(mean + torch.randn(chains, dims, generator=generator) @ factor)
    sampler = sg.SGHMC([theta], 1e-3, 0.9, num_data=rows, prior_precision=1.0, seed=3)

    def closure() -> None:
        i = torch.randint(rows, (chains, n), generator=generator)
        batch = x[i]
        misfit = batch @ theta.detach().unsqueeze(-1) - y[i].unsqueeze(-1)
        theta.grad = (batch.mT @ misfit).squeeze(-1) / n

    return sampler, closure


@pytest.mark.slow
def test_linear_regression_of_condition_number_100() -> None:
    assert_as_promised(regression(), 3000)


# The same as of the linear regression and the network, on data of another kind.
@pytest.mark.exhaustive
def test_logistic_regression_on_covertype(data_root: Path) -> None:
    data = pytest.importorskip("blr.data")
    split = data.load(data_root)
    centre, hessian = pytest.importorskip("blr.reference").mode(split)
    generator = torch.Generator().manual_seed(2)
    chains, n, rows = 30, 50, len(split.train_x)
    factor = torch.linalg.inv(torch.linalg.cholesky(hessian))
    start = torch.randn(chains, 54, generator=generator).to(factor) @ factor + centre
    theta = nn.Parameter(start.float())
    sampler = sg.SGHMC([theta], 1e-3, 0.9, num_data=rows, prior_precision=0.1, seed=3)

    def closure() -> Tensor:
        sampler.zero_grad()
        i = torch.randint(rows, (chains, n), generator=generator)
        margin = (split.train_x[i] @ theta.unsqueeze(-1)).squeeze(-1)
        loss = -F.logsigmoid(split.train_s[i] * margin).mean(1).sum()
        loss.backward()
        return loss

    assert_as_promised((sampler, closure))


def mnist(root: Path) -> tuple[Tensor, Tensor]:
    parts = []
    for name, skip in (("images-idx3", 16), ("labels-idx1", 8)):
        file = root / "MNIST" / "raw" / f"train-{name}-ubyte"
        packed = file.with_suffix(".gz")
        if not file.exists() and not packed.exists():
            pytest.skip(f"needs {file}")
        raw = file.read_bytes() if file.exists() else gzip.open(packed).read()
        parts.append(torch.frombuffer(bytearray(raw[skip:]), dtype=torch.uint8))
    return parts[0].view(-1, 784).float() / 255, parts[1].long()


@pytest.mark.slow
@pytest.mark.parametrize("n", [100, pytest.param(500, marks=pytest.mark.exhaustive)])
def test_a_network_on_mnist(data_root: Path, n: int) -> None:
    """784-100-10, trained for a few epochs."""
    x, y = mnist(data_root)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 100), nn.Sigmoid(), nn.Linear(100, 10))
    sampler = sg.SGHMC(
        model.named_parameters(), 0.1, 0.9, num_data=len(x), prior_precision=1.0, seed=0
    )

    def closure() -> Tensor:
        sampler.zero_grad()
        i = torch.randint(len(x), (n,))
        loss = F.cross_entropy(model(x[i]), y[i])
        loss.backward()
        return loss

    # V falls as the network trains: what is found is that of burnt-in chains.
    for steps in (1000, 2000):
        run(sampler, closure, steps)
        result = sg.tune(sampler, closure, gradients=1500, progress=False)
        assert result.feasible, result.summary()
        result.apply(sampler)
    sampler.param_groups[0]["lr"] = 0.01
    result = assert_as_promised((sampler, closure), 1500)
    assert result.tensors["2.bias"] > result.tensors["0.weight"]
