"""Hamiltonian trajectories on targets of known law, and checks against it.

With a Metropolis test the target is exact whatever the step size, so steps are so
large that a good part of the trajectories is rejected; without one the leapfrog on a
Gaussian target is a linear map, and the law of its chain is exact at every step.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from scipy import integrate, linalg
from torch import Tensor

from harness import statistics
from harness.statistics import Array
from harness.targets import DoubleWell

# Makes a sampler from groups of parameters of shape [chains, width] and settings.
Build = Callable[..., Any]

CHAINS = 20_000
_HESSIAN = np.array([[1.0, 0.4, -0.3], [0.4, 0.6, 0.2], [-0.3, 0.2, 0.8]])


@dataclass(frozen=True)
class GaussianProblem:
    """Two groups of coordinates with priors of their own, N, T and M all unlike 1."""

    num_data: float = 7.0
    temperature: float = 0.6
    priors: tuple[float, float] = (9.0, 0.0)
    widths: tuple[int, int] = (2, 1)
    masses: Array = field(default_factory=lambda: np.array([12.0, 3.0, 7.0]))
    centre: Array = field(default_factory=lambda: np.array([0.5, -0.3, 1.0]))
    hessian: Array = field(default_factory=lambda: _HESSIAN)

    @property
    def precision(self) -> Array:
        """The Hessian of U at T = 1."""
        priors = np.repeat(self.priors, self.widths)
        return self.num_data * self.hessian + np.diag(priors)

    @property
    def mean(self) -> Array:
        pull = self.num_data * self.hessian @ self.centre
        return np.linalg.solve(self.precision, pull)

    @property
    def cov(self) -> Array:
        return self.temperature * np.linalg.inv(self.precision)

    def draw(self, seed: int) -> Array:
        random = np.random.default_rng(seed)
        return random.multivariate_normal(self.mean, self.cov, CHAINS)

    def leapfrog(self, step_size: float, num_steps: int) -> statistics.AffineMap:
        """Returns the matrix by which a trajectory maps (θ, r)."""
        pull = step_size / 2 * self.precision
        kept = np.ones(len(pull))
        half = statistics.kick(pull, pull @ self.mean, kept, 0 * pull)
        drift = statistics.move(step_size / self.masses)
        return half.then(drift).then(half).power(num_steps)

    def chain(self, step_size: float, num_steps: int) -> statistics.AffineMap:
        """Returns the map of θ by a trajectory with a fresh momentum."""
        d = len(self.mean)
        move = self.leapfrog(step_size, num_steps)
        carry, throw = move.a[:d, :d], move.a[:d, d:]
        heat = self.temperature * np.diag(self.masses)
        return statistics.AffineMap(carry, move.b[:d], throw @ heat @ throw.T)


class Run:
    """Chains of a problem that begin at the rows of ``start``."""

    def __init__(
        self, problem: GaussianProblem, build: Build, start: Array, **settings: Any
    ) -> None:
        self.problem = problem
        self.params = [
            torch.tensor(rows, dtype=torch.float64, requires_grad=True)
            for rows in np.split(start, [problem.widths[0]], axis=1)
        ]
        each = zip(self.params, problem.priors, strict=True)
        groups = [{"params": [p], "prior_precision": prior} for p, prior in each]
        settings |= {"num_data": problem.num_data, "temperature": problem.temperature}
        self.sampler = build(groups, num_chains=len(start), seed=11, **settings)
        masses = np.split(problem.masses, [problem.widths[0]])
        self.sampler.set_mass([torch.tensor(m) for m in masses])

    def closure(self) -> Tensor:
        delta = torch.cat(self.params, dim=1) - torch.as_tensor(self.problem.centre)
        hessian = torch.as_tensor(self.problem.hessian)
        loss = 0.5 * ((delta @ hessian) * delta).sum(dim=1)
        loss.sum().backward()
        return loss

    def advance(self, steps: int) -> "Run":
        for _ in range(steps):
            self.sampler.step(self.closure)
        return self

    @property
    def theta(self) -> Array:
        return torch.cat([p.detach() for p in self.params], dim=1).numpy()

    @property
    def momenta(self) -> Array:
        momenta = [self.sampler.state[p]["momentum"] for p in self.params]
        return torch.cat(momenta, dim=1).numpy()


# A quarter of the trajectories is rejected.
COARSE = {"step_size": 0.7, "num_steps": 3}
# Not so large that what a mass does is hidden behind what a step does.
FINE = {"step_size": 0.5, "num_steps": 3}


def check_invariance(build: Build) -> None:
    """Chains that begin with the target's law have it after some trajectories."""
    problem = GaussianProblem()
    run = Run(problem, build, problem.draw(seed=1), **COARSE).advance(4)
    law = {"mean": problem.mean, "cov": problem.cov}
    statistics.check_gaussian(run.theta, **law, label="HMC, invariance")


def check_mixing(build: Build) -> None:
    """Chains that begin far out come to the target's law, and then move in it."""
    problem = GaussianProblem()
    far = problem.mean + 3 * np.sqrt(np.diag(problem.cov))
    run = Run(problem, build, np.tile(far, (CHAINS, 1)), **COARSE).advance(120)
    first = run.theta.copy()
    law = {"mean": problem.mean, "cov": problem.cov}
    statistics.check_gaussian(first, **law, label="HMC, mixing")
    second = run.advance(60).theta
    z = [(x - problem.mean) / np.sqrt(np.diag(problem.cov)) for x in (first, second)]
    memory = (z[0] * z[1]).mean(axis=0) * CHAINS**0.5
    statistics.check_z({"memory": memory}, label="HMC, memory")


def check_dynamics(build: Build) -> None:
    """Without a Metropolis test: the exact law of the leapfrog's chain."""
    problem = GaussianProblem()
    step = problem.chain(**FINE)
    far = problem.mean + 3 * np.sqrt(np.diag(problem.cov))
    run = Run(problem, build, np.tile(far, (CHAINS, 1)), metropolis=False, **FINE)
    done = 0
    for stop in (1, 3, 40):
        run.advance(stop - done)
        done = stop
        mean, cov = step.power(stop).push(far, np.zeros_like(problem.cov))
        label = f"leapfrog, {stop} trajectories"
        statistics.check_gaussian(run.theta, mean=mean, cov=cov, label=label)


def check_kept_momenta(build: Build) -> None:
    """Kept momenta: their joint law with θ is preserved, too."""
    problem = GaussianProblem()
    settings = {"resample_momentum_every": 4, **COARSE}
    run = Run(problem, build, problem.draw(seed=2), **settings).advance(4)
    d = len(problem.mean)
    heat = problem.temperature * np.diag(problem.masses)
    joint = linalg.block_diag(problem.cov, heat)
    state = np.hstack([run.theta, run.momenta])
    mean = np.concatenate([problem.mean, np.zeros(d)])
    statistics.check_gaussian(state, mean=mean, cov=joint, label="HMC, kept momenta")


def check_double_well(build: Build) -> None:
    """Moments and histogram on U = -2θ² + θ⁴, whatever the step size."""
    theta = torch.ones((CHAINS, 1), dtype=torch.float64, requires_grad=True)
    settings = {"step_size": 0.4, "num_steps": 3, "num_data": 1, "num_chains": CHAINS}
    sampler = build([{"params": [theta]}], **settings, seed=12)

    def closure() -> Tensor:
        square = theta * theta
        loss = (square * square - 2 * square)[:, 0]
        loss.sum().backward()
        return loss

    for _ in range(80):
        sampler.step(closure)
    samples = theta.detach().numpy()[:, 0]

    def integral(low: float, high: float, power: int = 0) -> float:
        weight = lambda x: x**power * np.exp(-DoubleWell.potential(x))  # noqa: E731
        return integrate.quad(weight, low, high)[0]

    total = integral(-3, 3)  # beyond which 1e-27 of the mass lies
    powers = np.array([1, 2, 4])
    moments = np.array([integral(-3, 3, int(k)) / total for k in powers])
    statistics.check_mean(samples[:, None] ** powers, moments, label="HMC, double well")
    edges = np.linspace(-2, 2, 41)
    bins = [(-3.0, edges[0]), *pairwise(edges), (edges[-1], 3.0)]
    probabilities = np.array([integral(a, b) for a, b in bins]) / total
    counts = np.histogram(samples, np.concatenate([[-np.inf], edges, [np.inf]]))[0]
    statistics.check_counts(counts, probabilities, label="HMC, double well")
