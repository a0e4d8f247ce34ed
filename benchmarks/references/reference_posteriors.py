"""Samplers against reference posteriors: means and sds beside those of long NUTS runs.

    cd benchmarks/references
    python reference_posteriors.py                                   # the stored five
    python reference_posteriors.py --file my_posterior.py
    python reference_posteriors.py --posteriordb DIR --posterior NAME ...

The stored five are in tests/laws/reference_posteriors.json. DIR is a checkout of
posteriordb, or a bare repository; log_densities.py here has the models, and tells
how a file defines a posterior of your own. A table has for each sampler

* mean: the largest error of a mean, in sds of the reference;
* sd: the largest error of an sd, in percent of the reference's;
* z: the largest of these errors in units of their Monte Carlo error and the
  reference's together, as a normal score;
* R-hat, the largest; effective draws of the slowest mean for 1,000 gradients of all
  data (of all chains, without warm-up; rows of a minibatch count as their part);
* T_conf, which is 1 in equilibrium.

One rule sets all samplers, in coordinates w with θ = c + B w. The mode and the
curvature there begin; three warm-ups of HMC improve c and B, from the mean and the
covariance of all chains. B is triangular with ones on its diagonal, and what remains
is a scale for each coordinate: HMC's mass, the preconditioner of BAOA and SBPS.
Let ε be HMC's step size, in units of these scales, after a warm-up.

| sampler | settings |
| --- | --- |
| HMC | 32 chains, trajectories of length 1.5, acceptance 0.8 |
| BAOA | 32 chains, all data, steps of ε / 2, a friction of 1 for each time |
| SGNHT | 32 chains, all data, steps of ε / 5, the same friction, scaled coordinates |
| SBPS | 4 chains, minibatches of 3/4 of the rows, refreshments at the rate 0.5 |
| HMC-ECS | 4 chains, subsamples of 1/4 of the rows (at least 30), its own warm-up |

Chains begin around one mode: none shows another one.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arviz_stats.base import array_stats
from log_densities import Posterior, of_file, of_posteriordb, of_record, stored
from scipy import stats
from torch import Tensor

import torch_sgmcmc as sg

CHAINS, SINGLE = 32, 4  # at once, and one by one
LENGTH = 1.5  # of trajectories

# ---- Coordinates ---------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A posterior in coordinates w: θ = center + mix w, with a scale for each of w.

    Args:
        posterior: the density of θ.
        center: c.
        mix: B.
        scales: about the standard deviations of w.
        starts: w of some chains.
        step: HMC's step size, for w / scales.
    """

    posterior: Posterior
    center: Tensor
    mix: Tensor
    scales: Tensor
    starts: Tensor
    step: float = 1.0

    @classmethod
    def of(
        cls, posterior: Posterior, thetas: Tensor, mean: Tensor, covariance: Tensor
    ) -> Target:
        """Returns coordinates in which a law is uncorrelated around 0."""
        root = torch.linalg.cholesky(covariance)
        scales = root.diagonal().clone()
        starts = torch.linalg.solve(root / scales, (thetas - mean).T).T.contiguous()
        return cls(posterior, mean, root / scales, scales, starts)

    def whitened(self) -> Target:
        """Returns coordinates with scales of 1."""
        ones = torch.ones_like(self.scales)
        mix, starts = self.mix * self.scales, self.starts / self.scales
        return replace(self, mix=mix, starts=starts, scales=ones)

    def thetas(self, w: Tensor) -> Tensor:
        """Returns θ of w, [..., d]."""
        return self.center + w @ self.mix.T

    def losses(self, w: Tensor, rows: Tensor | None = None) -> Tensor:
        """Returns losses [chains, rows]."""
        return self.posterior.losses(self.thetas(w), rows)

    def energy(self, w: Tensor) -> Tensor:
        """Returns U [chains]."""
        return self.losses(w).sum(1)


def find_mode(posterior: Posterior) -> tuple[Tensor, Tensor]:
    """Returns the mode and a covariance, by Newton steps with |eigenvalues|."""

    def energy(theta: Tensor) -> Tensor:
        return posterior.losses(theta[None]).sum()

    theta = torch.zeros(posterior.dimension, dtype=torch.float64)
    for _ in range(200):
        slope = torch.autograd.functional.jacobian(energy, theta)
        hessian = torch.autograd.functional.hessian(energy, theta)
        values, vectors = torch.linalg.eigh(hessian)
        values = values.abs().clamp_min(1e-10 * float(values.abs().max()))
        inverse = vectors / values @ vectors.T
        move, value = inverse @ slope, float(energy(theta))
        shorter = (theta - 0.5**halving * move for halving in range(40))
        new = next((t for t in shorter if float(energy(t)) < value), None)
        if new is None or float(slope @ move) < 1e-8:
            break
        theta = new
    return theta, inverse


def prepare(posterior: Posterior, seed: int = 0) -> Target:
    """Returns coordinates, starts and a step size from warm-ups of HMC."""
    mode, covariance = find_mode(posterior)
    g = torch.Generator().manual_seed(seed)
    noise = torch.randn(CHAINS, len(mode), generator=g, dtype=torch.float64)
    thetas = mode + 0.3 * noise @ torch.linalg.cholesky(covariance).T
    target = Target.of(posterior, thetas, mode, covariance)
    for stage, length in enumerate((30, 30, 60)):
        run = hmc(target, length, seed=sg.fold_in(seed, stage), warmup=30)
        draws = run.thetas.flatten(0, 1)
        covariance = draws.T.cov().reshape(covariance.shape)
        target = Target.of(posterior, run.thetas[:, -1], draws.mean(0), covariance)
    step = hmc(target, 1, seed=sg.fold_in(seed, 9), warmup=60).step
    return replace(target, step=step)


# ---- Samplers ------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """Draws θ [chains, draws, d], the gradients of all data that all chains took, ε."""

    thetas: Tensor
    gradients: float
    step: float = math.nan


class Chains:
    """All chains as one parameter, and the closure of all data."""

    def __init__(self, target: Target) -> None:
        self.target, self.draws = target, []
        self.w = target.starts.clone().requires_grad_()
        self.sizes = {"num_data": target.posterior.num_data, "num_chains": len(self.w)}

    def closure(self) -> Tensor:
        """Returns the chains' mean losses, with gradients."""
        self.w.grad = None
        loss = self.target.energy(self.w) / self.sizes["num_data"]
        loss.sum().backward()
        return loss.detach()

    def keep(self) -> None:
        """Keeps θ of all chains."""
        self.draws.append(self.target.thetas(self.w.detach()))

    def run(self, sampler: sg.Sampler, length: int, thin: int) -> Run:
        """Makes a step for each gradient; the first tenth is burn-in."""
        for i in range(-length // 10, length):
            self.closure()
            sampler.step()
            if i >= 0 and i % thin == 0:
                self.keep()
        return Run(torch.stack(self.draws, 1), length * len(self.w))


def hmc(
    target: Target, length: int, *, seed: int, warmup: int = 0, **given: Any
) -> Run:
    chains = Chains(target)
    settings = {"trajectory_length": LENGTH, "seed": seed, **chains.sizes, **given}
    sampler = sg.HMC([chains.w], target.step, **settings)
    sampler.set_mass([target.scales**-2])
    if warmup:
        sampler.warmup(chains.closure, warmup, progress=False)
    for _ in range(length):
        sampler.step(chains.closure)
        chains.keep()
    step = sampler.param_groups[0]["step_size"]
    cost = (max(1, round(LENGTH / step)) + 1) * length * len(chains.w)
    return Run(torch.stack(chains.draws, 1), cost, step)


def baoa(target: Target, length: int, *, seed: int, **given: Any) -> Run:
    chains, h = Chains(target), target.step / 2
    settings = {"momentum": math.exp(-h), "seed": seed, **chains.sizes, **given}
    lr = h**2 * settings["num_data"]
    sampler = sg.BAOA([chains.w], lr, preconditioner=[target.scales**2], **settings)
    return chains.run(sampler, length, thin=2)


def sgnht(target: Target, length: int, *, seed: int, **given: Any) -> Run:
    """The spread of the friction is a tenth of it."""
    chains, h = Chains(target.whitened()), target.step / 5
    settings = {"momentum": math.exp(-h), "seed": seed, **chains.sizes, **given}
    lr, rate = h**2 * settings["num_data"], ((1 - settings["momentum"]) / 10) ** 2
    sampler = sg.SGNHT([chains.w], lr, thermostat_rate=rate, **settings)
    return chains.run(sampler, length, thin=5)


def one_by_one(chain: Callable[[int], tuple[list[Tensor], float]]) -> Run:
    """Runs single chains, of w [d], up to the shortest."""
    runs, costs = zip(*map(chain, range(SINGLE)), strict=True)
    shortest = min(map(len, runs))
    return Run(torch.stack([torch.stack(run[:shortest]) for run in runs]), sum(costs))


def sbps(target: Target, length: int, *, seed: int, **given: Any) -> Run:
    """Without rows, a minibatch is two halves of U."""
    posterior = target.posterior
    num_data = posterior.num_data if posterior.rows else 2
    size = max(2, 3 * num_data // 4)
    settings = {"refresh_rate": 0.5, "sample_interval": 1.0, "num_data": num_data}
    settings |= {"preconditioned": True, **given}

    def chain(index: int) -> tuple[list[Tensor], float]:
        key, draws = sg.fold_in(seed, index), []
        rows = sg.IndependentBatchSampler(num_data, size, seed=key)
        w = target.starts[index].clone().requires_grad_()
        sampler = sg.SBPS([w], seed=key, **settings)
        sampler.set_preconditioner([target.scales])

        def closure() -> Tensor:
            if posterior.rows:
                return target.losses(w[None], rows.draw(1)[0])[0]
            return target.energy(w[None]).expand(2) / 2

        sampler.register_sample_hook(lambda *_: draws.append(target.thetas(w.detach())))
        for i in range(-length // 10, length):
            if i == 0:
                draws.clear()
            sampler.step(closure)
        return draws, length * size / num_data

    return one_by_one(chain)


def hmcecs(target: Target, length: int, *, seed: int, **given: Any) -> Run:
    target = target.whitened()
    num_data = target.posterior.num_data
    size = min(num_data, max(30, num_data // 4))
    settings = {"subsample_size": size, "num_blocks": min(10, size), **given}

    def chain(index: int) -> tuple[list[Tensor], float]:
        w, draws = target.starts[index].clone().requires_grad_(), []
        key = sg.fold_in(seed, index)
        sampler = sg.HMCECS([w], num_data=num_data, seed=key, **settings)

        def closure(rows: Tensor) -> Tensor:
            return -target.losses(w[None], rows)[0]

        sampler.warmup(closure, 100, anchor_every=50, progress=False)
        begin = sampler.num_evaluations
        for _ in range(length):
            sampler.step(closure)
            draws.append(target.thetas(w.detach()))
        return draws, (sampler.num_evaluations - begin) / num_data

    return one_by_one(chain)


@dataclass(frozen=True)
class Method:
    """A sampler, its number of steps, and whether it needs rows."""

    run: Callable[..., Run]
    length: int
    by_rows: bool = False


METHODS = {
    "HMC": Method(hmc, 500),
    "BAOA": Method(baoa, 2000),
    "SGNHT": Method(sgnht, 4000),
    "SBPS": Method(sbps, 4000),
    "HMC-ECS": Method(hmcecs, 1000, by_rows=True),
}

# ---- Comparison ----------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """Errors of means (in sds) and of sds (as fractions), scores and diagnostics."""

    mean: np.ndarray
    sd: np.ndarray
    scores: dict[str, np.ndarray]
    r_hat: float
    efficiency: float
    t_conf: float


def score(off: Any, values: np.ndarray, slope: Any, error: np.ndarray) -> np.ndarray:
    """Returns normal scores of errors that the mean of values / slope has.

    Student's law with as many degrees of freedom as there are effective draws: few of
    them tell their own error badly.
    """
    effective = array_stats.ess(values, method="mean")
    own = array_stats.mcse(values, method="mean") / slope
    tail = stats.t.sf(np.abs(off) / np.hypot(own, error), np.maximum(effective - 1, 1))
    return np.minimum(stats.norm.isf(tail), 99.0)


def compare(target: Target, run: Run) -> Comparison:
    """Compares a run with the reference."""
    posterior, thetas = target.posterior, run.thetas.flatten(0, 1)
    named, shape = posterior.compared(thetas), run.thetas.shape[:2]
    values = np.stack([named[name].reshape(shape) for name in posterior.reference])
    rows = [(*row, 0.0, 0.0)[:4] for row in posterior.reference.values()]
    mean, sd, *errors = np.array(rows).T
    found = values.mean((1, 2)), values.std((1, 2))
    squares = (values - values.mean((1, 2), keepdims=True)) ** 2
    scores = {
        "mean": score(found[0] - mean, values, 1.0, errors[0]),
        "sd": score(found[1] - sd, squares, 2 * found[1], errors[1]),
    }
    off = found[0] - mean, found[1] - sd
    thetas.requires_grad_()
    posterior.losses(thetas).sum().backward()
    virial = (thetas.detach() - target.center) * thetas.grad
    return Comparison(
        off[0] / sd,
        off[1] / sd,
        scores,
        float(np.max(array_stats.rhat(values))),
        1000 * float(array_stats.ess(values, method="mean").min()) / run.gradients,
        float(virial.mean()),
    )


COLUMNS = "posterior | sampler | mean | sd | z | R-hat | effective | T_conf | s"


def show(name: str, posterior: Posterior, options: argparse.Namespace) -> None:
    """Runs the samplers on a posterior, and prints their rows."""
    target = prepare(posterior, options.seed)
    for title in options.samplers:
        method, start = METHODS[title], time.process_time()
        if method.by_rows and not posterior.rows:
            continue
        length = max(10, round(options.scale * method.length))
        try:
            found = compare(target, method.run(target, length, seed=options.seed))
        except RuntimeError as error:  # such as a gradient that is not finite
            print(f"| {name} | {title} | failed: {error} |", flush=True)
            continue
        z = max(float(np.abs(scores).max()) for scores in found.scores.values())
        mean, sd = (float(np.abs(error).max()) for error in (found.mean, found.sd))
        print(
            f"| {name} | {title} | {mean:.3f} | {100 * sd:.1f} % | {z:.1f} "
            f"| {found.r_hat:.3f} | {found.efficiency:.1f} | {found.t_conf:.2f} "
            f"| {time.process_time() - start:.0f} |",
            flush=True,
        )


def main() -> None:
    """Prints a row for each posterior and sampler."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--posterior", nargs="+", default=[], help="names")
    parser.add_argument("--posteriordb", type=Path, help="a checkout or a repository")
    parser.add_argument("--draws", type=Path, help="reference draws of the posterior")
    parser.add_argument("--file", nargs="+", type=Path, default=[])
    parser.add_argument("--samplers", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--scale", type=float, default=1.0, help="of the runs' lengths")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = {path.stem: of_file(path) for path in options.file}
    if options.posteriordb:
        for name in options.posterior:
            record = of_posteriordb(options.posteriordb, name, options.draws)
            chosen[name] = of_record(record)
    elif not chosen:
        chosen = stored(options.posterior)
    print(f"torch {torch.__version__}\n\n| {COLUMNS} |")
    print("|" + " --- |" * (COLUMNS.count("|") + 1))
    for name, posterior in chosen.items():
        show(name, posterior, options)


if __name__ == "__main__":
    main()
