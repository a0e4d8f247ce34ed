"""Panels j, k and l: how the error of time averages scales with T and h.

Theorem 4 bounds the mean squared error of φ_K = (1/K) Σ φ(θ_k) by C₁ / T + C₂ h / T
+ C₃ h², T = K h; here φ(θ) = ‖θ - mean‖², the variance. Chains start from the target's
law. Each EWSG chain has a twin: a linear chain (Note [EWSG to first order]) with the
same start, the same noise and, but for rejected proposals, the same minibatches. The
exact errors of the twins are known: they serve as control variates.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from reproduce.kept import kept_arrays
from torch import Tensor
from tqdm import tqdm

import torch_sgmcmc as sg

from .chains import Chains, Method
from .exact import continuous_mse, linear_errors
from .target import Gaussian

Array = NDArray[np.float64]

FRICTION = 10.0
#: What of the start's law is left in φ after this time is below 1e-4.
_BURN_IN = 2.0
_FIXED_TIME = 2.0
_BOOTSTRAPS = 1000
_REPORTS = 128  # updates of the progress bar


@dataclass(frozen=True)
class Pairs:
    """Errors of time averages, one row for each chain.

    Args:
        step: h.
        times: checkpoints T.
        ewsg: φ_K - d / n at each checkpoint, [chains, checkpoints].
        twin: the same of the twins.
        late: mean of φ after burn-in, less d / n: of EWSG and of the twin, [chains, 2].
        acceptance: EWSG's acceptance rate.
    """

    step: float
    times: list[float]
    ewsg: Array
    twin: Array
    late: Array
    acceptance: float


def run_pairs(
    target: Gaussian,
    step: float,
    times: list[float],
    *,
    chains: int,
    seed: int,
    folder: Path,
) -> Pairs:
    """Runs EWSG chains and their twins, or reads what an earlier call has kept."""
    settings = [target.data.tolist(), step, times, chains, seed]
    name = f"pairs-h{step:g}-seed{seed}"
    found = kept_arrays(
        folder, name, settings, lambda: _run(target, step, times, chains, seed)
    )
    acceptance = float(found.pop("acceptance"))
    return Pairs(step, times, **found, acceptance=acceptance)


class _Twin:
    """SGHMC with a minibatch of one and a mean gradient linear in θ and v."""

    def __init__(self, ewsg: Chains, seed: int) -> None:
        target, h = ewsg.target, ewsg.method.step
        self.ewsg, self.mean = ewsg, target.mean
        self.parameter = ewsg.theta.clone().requires_grad_()
        self.sampler = sg.SGHMC(
            [self.parameter],
            target.num_data * h * h,
            1 - FRICTION * h,
            num_data=target.num_data,
            seed=seed,
        )
        momentum = ewsg.sampler.state[ewsg.parameter]["momentum"]
        self.sampler.state[self.parameter]["momentum"] = momentum.clone()
        sigma = target.gradient_covariance
        self.friction = sigma / (2 * target.num_data)
        self.stiffness = h / (2 * FRICTION) * sigma

    @property
    def theta(self) -> Tensor:
        return self.parameter.detach()

    def step(self) -> None:
        """Makes one step with the minibatches that EWSG proposed last."""
        momentum = self.sampler.state[self.parameter]["momentum"]
        grad = self.theta - self.ewsg.target.data[self.ewsg.index]
        grad += momentum @ self.friction + (self.theta - self.mean) @ self.stiffness
        self.parameter.grad = grad
        self.sampler.step()


def _run(
    target: Gaussian, step: float, times: list[float], chains: int, seed: int
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2**32 + seed)
    start = target.sample(chains, generator)
    ewsg = Chains(target, Method("ewsg", step, FRICTION), start, seed)
    momentum = step * torch.randn(start.shape, generator=generator, dtype=start.dtype)
    ewsg.sampler.state[ewsg.parameter]["momentum"] = momentum
    pair = (ewsg, _Twin(ewsg, seed))
    sums = [torch.zeros(chains, dtype=torch.float64) for _ in pair]
    marks = {round(time / step) for time in times}
    burn_in, total = round(_BURN_IN / step), max(marks)
    early: list[Tensor] = []
    kept: list[list[Tensor]] = [[], []]
    expected = target.dim / target.num_data
    with tqdm(total=total, desc=f"h = {step:g}", unit="step") as bar:
        for k in range(1, total + 1):
            for run, phi in zip(pair, sums, strict=True):
                run.step()
                phi += (run.theta - target.mean).square().sum(dim=1)
            if k == burn_in:
                early = [phi.clone() for phi in sums]
            if k in marks:
                for phi, errors in zip(sums, kept, strict=True):
                    errors.append(phi / k - expected)
            if k % max(1, total // _REPORTS) == 0:
                bar.update(k - bar.n)
        bar.update(total - bar.n)
    late = [
        (b - a) / (total - burn_in) - expected for a, b in zip(early, sums, strict=True)
    ]
    return {
        "ewsg": torch.stack(kept[0], dim=1),
        "twin": torch.stack(kept[1], dim=1),
        "late": torch.stack(late, dim=1),
        "acceptance": ewsg.sampler.acceptance_rate,
    }


def error_orders(
    target: Gaussian, runs: list[Pairs], *, seed: int = 0
) -> dict[str, Any]:
    """Mean squared errors, their slopes, and 95 % intervals by bootstrap over chains.

    Args:
        target: the target.
        runs: one for each h.
        seed: of the bootstrap.

    Returns:
        For each panel the points and fitted slopes, as numbers and lists.
    """
    runs = sorted(runs, key=lambda run: run.step)
    estimates = [_Estimate(target, run, seed + i) for i, run in enumerate(runs)]
    return {
        "friction": FRICTION,
        "test_function": "squared distance from the mean",
        "error_steps": [
            {
                "step": e.step,
                "chains": len(e.run.ewsg),
                "acceptance": e.run.acceptance,
                # Of the twins' errors at each time and late bias, from exact values.
                "twin_z": e.twin_z.tolist(),
                # By how much the control variate narrows intervals.
                "noise_reduction": e.less_noise.tolist(),
            }
            for e in estimates
        ],
        "j": _against_time(target, estimates),
        "k": _at_fixed_time(target, estimates),
        "l": _bias(target, estimates),
    }


class _Estimate:
    """The numbers of one h, the first row from all chains, others from resamples."""

    def __init__(self, target: Gaussian, run: Pairs, seed: int) -> None:
        self.run, self.step, self.times = run, run.step, run.times
        self.exact = {
            kind: linear_errors(target, run.step, FRICTION, run.times, kind)
            for kind in ("full gradient", "SGHMC", "linearised")
        }
        errors, bias = self.exact["linearised"]
        known = np.array([*(errors[time] for time in self.times), bias])
        wanted = np.column_stack([run.ewsg**2, run.late[:, 0]])
        twin = np.column_stack([run.twin**2, run.late[:, 1]]) - known
        # Least squares: what of the twin's deviation EWSG shares.
        share = ((wanted - wanted.mean(axis=0)) * twin).mean(axis=0) / twin.var(axis=0)
        columns = wanted - share * twin
        rng = np.random.default_rng(seed)
        count = len(columns)
        table = np.empty((1 + _BOOTSTRAPS, columns.shape[1]))
        table[0] = columns.mean(axis=0)
        for row in table[1:]:
            row[:] = rng.multinomial(count, np.full(count, 1 / count)) @ columns / count
        self.mse, self.bias = table[:, :-1], table[:, -1]
        self.plain = [float(x) for x in (run.ewsg**2).mean(axis=0)]
        self.twin_z = twin.mean(axis=0) / (twin.std(axis=0, ddof=1) / count**0.5)
        self.less_noise = wanted.std(axis=0) / columns.std(axis=0)


def _interval(values: Array) -> list[float]:
    return [float(q) for q in np.quantile(values[1:], [0.025, 0.975], axis=0)]


def _numbers(values: Array) -> dict[str, Any]:
    """The estimate and its 95 % interval."""
    return {"value": float(values[0]), "interval": _interval(values)}


def _slopes(x: Array, y: Array) -> Array:
    """Least-squares slopes of log |y| against log x, one for each row of y."""
    log_x = np.log(x) - np.log(x).mean()
    return np.log(np.abs(y)) @ log_x / (log_x @ log_x)


def _against_time(target: Gaussian, estimates: list[_Estimate]) -> list[dict[str, Any]]:
    """Panel j: MSE against T for every h."""
    panels = []
    for e in estimates:
        fit = [i for i, time in enumerate(e.times) if time >= 2 * _FIXED_TIME]
        times = np.array(e.times)
        panel = {
            "step": e.step,
            "times": e.times,
            "mse": [_numbers(column) for column in e.mse.T],
            "mse_without_twins": e.plain,
            "squared_bias": _numbers(e.bias**2),
            "continuous": [continuous_mse(target, FRICTION, t) for t in e.times],
            "full_gradient": list(e.exact["full gradient"][0].values()),
            "sghmc": list(e.exact["SGHMC"][0].values()),
        }
        if len(fit) > 1:
            whole = e.mse[:, fit]
            panel["fitted_times"] = [e.times[i] for i in fit]
            panel["slope"] = _numbers(_slopes(times[fit], whole))
            less = whole - e.bias[:, None] ** 2
            if np.all(less > 0):
                panel["slope_less_bias"] = _numbers(_slopes(times[fit], less))
            limit = np.array([panel["continuous"][i] for i in fit])
            panel["slope_continuous"] = float(_slopes(times[fit], limit[None])[0])
        panels.append(panel)
    return panels


def _local(steps: Array, y: Array) -> list[dict[str, Any]]:
    """Slopes between neighbouring step sizes."""
    return [
        {
            "steps": [float(s) for s in steps[i : i + 2]],
            **_numbers(_slopes(steps[i : i + 2], y[:, i : i + 2])),
        }
        for i in range(len(steps) - 1)
    ]


def _fits(steps: Array, y: Array, small: int) -> dict[str, Any]:
    """The slope over the smallest steps, over all, and between neighbours."""
    return {
        "fitted_steps": [float(s) for s in steps[:small]],
        "slope": _numbers(_slopes(steps[:small], y[:, :small])),
        "slope_all_steps": _numbers(_slopes(steps, y)),
        "local_slopes": _local(steps, y),
    }


_SMALL = 3


def _at_fixed_time(target: Gaussian, estimates: list[_Estimate]) -> dict[str, Any]:
    """Panel k: MSE at T fixed, less its limit as h -> 0, against h."""
    steps = np.array([e.step for e in estimates])
    limit = continuous_mse(target, FRICTION, _FIXED_TIME)
    excess = np.column_stack([e.mse[:, e.times.index(_FIXED_TIME)] for e in estimates])
    excess = excess - limit
    exact = {
        kind: np.array([e.exact[kind][0][_FIXED_TIME] for e in estimates]) - limit
        for kind in ("full gradient", "SGHMC", "linearised")
    }
    return {
        "time": _FIXED_TIME,
        "limit": limit,
        "steps": steps.tolist(),
        "excess": [_numbers(column) for column in excess.T],
        **_fits(steps, excess, _SMALL),
        "sghmc_excess": exact["SGHMC"].tolist(),
        "sghmc": _fits(steps, np.tile(exact["SGHMC"], (2, 1)), _SMALL),
        "full_gradient_excess": exact["full gradient"].tolist(),
        "first_order_excess": exact["linearised"].tolist(),
    }


def _bias(target: Gaussian, estimates: list[_Estimate]) -> dict[str, Any]:
    """Panel l: the squared bias of the stationary law against h."""
    steps = np.array([e.step for e in estimates])
    bias = np.column_stack([e.bias for e in estimates])
    sghmc = np.array([e.exact["SGHMC"][1] for e in estimates])
    trace = float(target.gradient_covariance.trace())
    coefficient = -trace / (2 * FRICTION * target.num_data)
    return {
        "steps": steps.tolist(),
        "bias": [_numbers(column) for column in bias.T],
        **_fits(steps, bias**2, _SMALL),
        "sghmc_bias": sghmc.tolist(),
        "full_gradient_bias": [e.exact["full gradient"][1] for e in estimates],
        "sghmc": _fits(steps, np.tile(sghmc**2, (2, 1)), _SMALL),
        "first_order_coefficient": coefficient,
        "measured_over_first_order": [
            _numbers(column / (coefficient * h))
            for h, column in zip(steps, bias.T, strict=True)
        ],
    }
