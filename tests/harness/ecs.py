"""HMC-ECS in one dimension, where its law is known exactly.

The model is so small that all subsamples can be enumerated: what the sampler must leave
as it is, the joint law of θ and u, is then a table. Chains can start with it, and are
compared with it: the moments of θ, the signs, the sizes of the estimates, and how often
a right sampler accepts.

Note [What shows a bug of HMC-ECS]
The leapfrog is reversible and keeps volumes whatever forces it is given, and is so on
average with forces of a fresh u at each kick. A Metropolis test with the right energies
then keeps the right law, so that no moment ever shows a wrong force. It costs
acceptance: with the right force the energy's error falls like ε², with another one not
at all. Hence :func:`check_rates`, which knows the acceptance rate of a right sampler,
and the small steps in ``test_hmc_ecs_law.py``. All else moves the law of θ,
that of u or the signs, which :func:`check_moments` sees.

A constant factor of the estimate, as the block-Poisson estimator's exp(a + λ), is no
part of any of this: to leave it out is no bug.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from scipy import stats
from scipy.special import expit
from torch import Tensor

import torch_sgmcmc as sg
from harness.statistics import Array, check_z
from torch_sgmcmc.samplers._ecs.subsample import Subsample, layout_of

Indices = NDArray[np.int64]

# Minibatches in a factor of the signed estimator are at most this many: more are drawn
# once in 10^6 times.
MOST = 8


class State(NamedTuple):
    """The state of many chains; signed ones have λ factors, at most :data:`MOST`.

    ``u`` is [chains, m], or [chains, λ, MOST, m] of which each factor uses as many
    minibatches as ``counts`` [chains, λ] says.
    """

    theta: Array
    u: Indices
    counts: Indices


class Observed(NamedTuple):
    """Observations of independent replicates, step by step: [replicates, steps]."""

    theta: Array
    sign: Array
    size: Array  # σ̂², or how many minibatches there are
    accepted: Array  # the trajectory
    renewed: Array  # u


@dataclass(frozen=True)
class Logistic:
    """y = 1 with probability σ(x θ), θ ~ N(0, 1 / prior), expanded to order 1 or 0."""

    x: Array = field(default_factory=lambda: np.array([1.5, -1.0, 0.5, 2.0, -2.5, 1.0]))
    y: Array = field(default_factory=lambda: np.array([1.0, 1, 0, 1, 0, 0]))
    prior: float = 1.0
    anchor: float = 1.2
    m: int = 2
    order: int = 1

    @property
    def n(self) -> int:
        return len(self.x)

    def log_likelihood(self, theta: Array, u: NDArray[np.int64]) -> Array:
        eta = self.x[u] * theta
        return self.y[u] * eta - np.logaddexp(0, eta)

    def slope(self, theta: Array, u: NDArray[np.int64]) -> Array:
        return self.x[u] * (self.y[u] - expit(self.x[u] * theta))

    def differences(self, theta: Array, u: NDArray[np.int64]) -> Array:
        """d for θ [..., 1] and u [..., k]."""
        at = np.float64(self.anchor)
        base, slope = self.log_likelihood(at, u), self.order * self.slope(at, u)
        return self.log_likelihood(theta, u) - base - slope * (theta - at)

    def smooth(self, theta: Array) -> Array:
        """Σ qₖ + log prior, for θ of any shape."""
        all_data, at = np.arange(self.n), np.float64(self.anchor)
        slope = self.order * self.slope(at, all_data).sum()
        value = self.log_likelihood(at, all_data).sum() + slope * (theta - at)
        return value - 0.5 * self.prior * theta**2

    def log_posterior(self, theta: Array) -> Array:
        """Up to a constant, for θ of shape [g]."""
        logs = self.log_likelihood(theta[:, None], np.arange(self.n)).sum(axis=1)
        return logs - 0.5 * self.prior * theta**2

    def grid(self) -> Array:
        return np.linspace(-7, 7, 1401)

    def law(self) -> Array:
        """Probabilities of the grid's points under the posterior."""
        logs = self.log_posterior(self.grid())
        weights = np.exp(logs - logs.max())
        return weights / weights.sum()

    def closure(self, p: Tensor) -> object:
        """The experiment for the sampler under test."""
        x, y = torch.tensor(self.x), torch.tensor(self.y)

        def closure(indices: Tensor) -> Tensor:
            eta = x[indices] * p
            return y[indices] * eta - torch.nn.functional.softplus(eta)

        return closure


@dataclass(frozen=True)
class Experiment:
    """A model and the settings of a sampler; signed if ``num_factors`` is not 0."""

    model: Logistic
    step_size: float
    num_steps: int
    num_blocks: int
    num_factors: int = 0
    lower_bound: float = 0.0

    # ---- Estimates -------------------------------------------------------------

    def log_density(self, state: State) -> tuple[Array, Array, Array]:
        """log |L̂| + log prior, the sign, and the size as in :class:`Observed`."""
        smooth = self.model.smooth(state.theta)
        n, m = self.model.n, self.model.m
        if self.num_factors == 0:
            d = self.model.differences(state.theta[..., None], state.u)
            variance = n**2 / m * d.var(axis=-1)
            log = n * d.mean(axis=-1) - variance / 2
            return smooth + log, np.ones_like(log), variance
        factors = self._factors(state.theta[:, None, None], state.u)
        used = np.arange(MOST) < state.counts[..., None]
        product = np.where(used, factors, 1.0).prod(axis=(1, 2))
        log = smooth + self.lower_bound + np.log(np.abs(product))
        return log, np.sign(product), state.counts.sum(axis=1).astype(float)

    def _factors(self, theta: Array, u: Indices) -> Array:
        """(d̂ - a) / λ of minibatches."""
        d = self.model.differences(theta[..., None], u)
        return (self.model.n * d.mean(axis=-1) - self.lower_bound) / self.num_factors

    def propose(self, rng: Generator, state: State) -> State:
        """One block of u drawn anew."""
        cells = state.counts.shape[1]
        blocks = np.arange(cells) * self.num_blocks // cells
        chosen = blocks == rng.integers(self.num_blocks, size=(len(state.theta), 1))
        fresh = self.fresh(rng, state.theta)
        wide = chosen.reshape(*chosen.shape, *(1,) * (state.u.ndim - 2))
        u = np.where(wide, fresh.u, state.u)
        return State(state.theta, u, np.where(chosen, fresh.counts, state.counts))

    def fresh(self, rng: Generator, theta: Array) -> State:
        """A whole u, with replacement, as it is proposed."""
        chains, m = len(theta), self.model.m
        if self.num_factors == 0:
            u = rng.integers(self.model.n, size=(chains, m))
            return State(theta, u, np.ones((chains, m), dtype=int))
        counts = rng.poisson(1.0, (chains, self.num_factors))
        u = rng.integers(self.model.n, size=(chains, self.num_factors, MOST, m))
        return State(theta, u, np.minimum(counts, MOST))

    # ---- The exact law ---------------------------------------------------------

    @cached_property
    def _subsamples(self) -> Indices:
        """All minibatches there are: [n^m, m]."""
        return np.array(list(product(range(self.model.n), repeat=self.model.m)))

    @cached_property
    def _table(self) -> Array:
        """Perturbed: the probabilities of (θ, u), [grid, n^m]."""
        grid = self.model.grid()
        theta = np.broadcast_to(grid[:, None], (len(grid), len(self._subsamples)))
        logs, _, _ = self.log_density(State(theta, self._subsamples, self._subsamples))
        weights = np.exp(logs - logs.max())
        return weights / weights.sum()

    @cached_property
    def _signed_table(self) -> Array:
        """(d̂ - a) / λ, [grid, n^m]."""
        return self._factors(self.model.grid()[:, None], self._subsamples)

    @cached_property
    def law(self) -> Array:
        """Probabilities of the grid's points, whatever u is.

        Signed, of |L̂|: with f = (d̂ - a) / λ of one minibatch and X ~ Poisson(1),
        E Π |f| is exp(E|f| - 1), and so E|L̂| = exp(Σ q + a + λ E|f|).
        """
        if self.num_factors == 0:
            return self._table.sum(axis=1)
        weights = np.exp(self._signed_logs(np.abs(self._signed_table)))
        return weights / weights.sum()

    def _signed_logs(self, factors: Array) -> Array:
        """log E Π f with these f, at the grid's points, less the highest of |f|."""
        smooth = self.model.smooth(self.model.grid())
        size = np.abs(self._signed_table).mean(axis=1)
        highest = smooth + self.num_factors * size
        return smooth + self.num_factors * factors.mean(axis=1) - highest.max()

    @cached_property
    def mean_sign(self) -> float:
        """The moments of a draw. Without the absolute values, E L̂ is L."""
        if self.num_factors == 0:
            return 1.0
        signed = np.exp(self._signed_logs(self._signed_table))
        total = np.exp(self._signed_logs(np.abs(self._signed_table)))
        return float(signed.sum() / total.sum())

    @cached_property
    def mean_size(self) -> float:
        """Given θ, X is Poisson(E|f|)."""
        if self.num_factors == 0:
            theta = np.broadcast_to(self.model.grid()[:, None], self._table.shape)
            state = State(theta, self._subsamples, self._subsamples)
            return float((self._table * self.log_density(state)[2]).sum())
        rates = self.num_factors * np.abs(self._signed_table).mean(axis=1)
        return float(self.law @ rates)

    def draw(self, rng: Generator, chains: int) -> State:
        """Independent draws of (θ, u)."""
        grid = self.model.grid()
        if self.num_factors == 0:
            flat = self._table.ravel()
            chosen = rng.choice(len(flat), size=chains, p=flat)
            row, column = np.divmod(chosen, self._table.shape[1])
            counts = np.ones((chains, self.model.m), dtype=int)
            return State(grid[row], self._subsamples[column], counts)
        row = rng.choice(len(grid), size=chains, p=self.law)
        factors = np.abs(self._signed_table) / len(self._subsamples)
        rates = factors.sum(axis=1)[row, None]
        counts = rng.poisson(rates, (chains, self.num_factors))
        # A minibatch of probability p has now p |f| / Σ p |f|: all rows' sums at once.
        steps = factors.cumsum(axis=1) / factors.sum(axis=1, keepdims=True)
        steps += np.arange(len(grid))[:, None]
        shape = (chains, self.num_factors, MOST)
        at = np.searchsorted(steps.ravel(), row[:, None, None] + rng.random(shape))
        u = self._subsamples[at - row[:, None, None] * factors.shape[1]]
        return State(grid[row], u, np.minimum(counts, MOST))

    # ---- How often a right sampler accepts -------------------------------------

    @cached_property
    def rates(self) -> Array:
        """Acceptance rates of the trajectory and of u, with the errors of the means.

        [2, 2]: means over draws of the exact law; forces are differences of the log
        density.
        """
        rng = np.random.default_rng(99)
        state = self.draw(rng, 100_000 if self.num_factors == 0 else 25_000)
        proposal = self.propose(rng, state)
        rise = self.log_density(proposal)[0] - self.log_density(state)[0]
        chances = np.stack([self._chance(rng, state), np.exp(np.minimum(rise, 0))])
        errors = chances.std(axis=1) / len(rise) ** 0.5
        return np.stack([chances.mean(axis=1), errors])

    def _chance(self, rng: Generator, state: State) -> Array:
        """The probability that a trajectory from here is accepted."""
        eps, r = self.step_size, rng.standard_normal(len(state.theta))
        start = self.log_density(state)[0] - r**2 / 2
        r = r + eps / 2 * self._force(state)
        for i in range(self.num_steps):
            state = state._replace(theta=state.theta + eps * r)
            r = r + (eps if i < self.num_steps - 1 else eps / 2) * self._force(state)
        end = self.log_density(state)[0] - r**2 / 2
        return np.exp(np.minimum(end - start, 0))

    def _force(self, state: State) -> Array:
        h = 1e-6
        moved = (state._replace(theta=state.theta + move) for move in (h, -h))
        up, down = (self.log_density(each)[0] for each in moved)
        return (up - down) / (2 * h)


# Expansions so poor that every term matters.
PERTURBED = Experiment(Logistic(anchor=1.2), step_size=0.6, num_steps=3, num_blocks=2)
# A third of the signs differ from the rest. A strong prior, without which |L̂| is large
# far away, where L is not, and chains stay there for long.
_SIZES = {"num_blocks": 3, "num_factors": 3, "lower_bound": -2.0}
SIGNED = Experiment(Logistic(anchor=1.0, prior=16.0), 0.3, num_steps=2, **_SIZES)
# Of order 0.
CONSTANT = replace(PERTURBED, model=Logistic(anchor=0.2, prior=2.0, order=0, m=3))


def check_moments(experiment: Experiment, seen: Observed, *, label: str) -> None:
    """Checks θ and θ², with signs as the posterior's and without, signs and sizes."""
    grid = experiment.model.grid()
    powers = np.stack([seen.theta, seen.theta**2])

    def off(law: Array) -> Array:
        return powers - np.array([law @ grid, law @ grid**2])[:, None, None]

    rows = [*off(experiment.law), seen.size - experiment.mean_size]
    if experiment.num_factors > 0:
        rows += [*(seen.sign * off(experiment.model.law()))]
        rows += [seen.sign - experiment.mean_sign]
    _check(np.stack(rows), np.zeros(len(rows)), label)


def check_rates(experiment: Experiment, seen: Observed, *, label: str) -> None:
    """Checks how many trajectories and how many proposals for u are accepted."""
    expected, errors = experiment.rates
    rows = np.stack([seen.accepted, seen.renewed])
    _check(rows - expected[:, None, None], errors, label)


def _check(rows: Array, errors: Array, label: str) -> None:
    """Checks that rows [statistics, replicates, steps] have the mean 0.

    A step's mean is known to 1 / √replicates of its spread over replicates: with few
    of them the quotient has Student's law, and is translated into a normal score.
    """
    means = rows.mean(axis=2)
    count = means.shape[1]
    spread = np.hypot(means.std(axis=1, ddof=1) / count**0.5, errors)
    with np.errstate(divide="ignore"):  # all the same, and wrong
        quotients = np.abs(means.mean(axis=1) / spread)
    z = stats.norm.isf(stats.t.sf(quotients, count - 1))
    check_z({"mean": np.minimum(z, 99.0)}, label=label)


def run_sampler(
    experiment: Experiment, *, replicates: int, steps: int, seed: int = 11
) -> Observed:
    """One sampler, put back into a draw of the exact law every ``steps`` steps.

    Its randomness depends on how many steps it has made, so that replicates are
    independent.
    """
    model, signed = experiment.model, experiment.num_factors > 0
    p = torch.tensor([model.anchor], dtype=torch.float64, requires_grad=True)
    sampler = sg.HMCECS(
        [p],
        num_data=model.n,
        subsample_size=model.m,
        estimator="signed" if signed else "perturbed",
        num_factors=max(1, experiment.num_factors),
        num_blocks=experiment.num_blocks,
        taylor_order=model.order,
        mass_matrix="identity",
        prior_precision=model.prior,
        step_size=experiment.step_size,
        trajectory_length=experiment.step_size * experiment.num_steps,
        seed=seed,
    )
    closure = model.closure(p)
    sampler.set_anchor(closure, progress=False)
    if signed:  # as a warm-up leaves it: a is λ less than the mean of d̂ there
        mean = experiment.lower_bound + experiment.num_factors
        sampler._set(mean_difference=mean)
    starts = experiment.draw(np.random.default_rng(seed), replicates)
    kept: list[tuple[float, ...]] = []
    for i in range(replicates):
        _put(sampler, closure, p, State(*(part[i] for part in starts)), signed)
        for _ in range(steps):
            before = _counters(sampler)
            sampler.step(closure)
            size = sampler.estimator_variance
            if signed:
                size = len(sampler.state["subsample"]["indices"]) / model.m
            passed = (b - a for a, b in zip(before, _counters(sampler), strict=True))
            kept.append((p.item(), sampler.sign, size, *passed))
    columns = np.array(kept).reshape(replicates, steps, 5)
    theta, sign, size, accepted, renewed = np.moveaxis(columns, 2, 0)
    return Observed(theta, sign, size, accepted > 0, renewed > 0)


def _counters(sampler: sg.HMCECS) -> tuple[int, int]:
    group = sampler.param_groups[0]
    return group["num_accepted"], group["num_subsamples_accepted"]


def _put(
    sampler: sg.HMCECS, closure: Any, p: Tensor, state: State, signed: bool
) -> None:
    """Gives the sampler θ and u of one chain."""
    u = state.u
    if signed:
        used = zip(u, state.counts, strict=True)
        u = np.concatenate([cell[:number] for cell, number in used])
    indices = torch.from_numpy(u.reshape(-1).copy())
    terms = sampler._target(sampler._data(closure)).expand(indices)
    kept = Subsample(state.counts.tolist(), indices, terms)
    sampler.state["subsample"] = kept.save(layout_of(sampler.param_groups[0]))
    with torch.no_grad():
        p.fill_(float(state.theta))
