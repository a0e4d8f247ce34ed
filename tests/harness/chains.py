"""Runs many chains of a sampler at once and checks them against their exact law."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from scipy import stats

from harness import statistics, targets
from harness.methods import Coordinates, Law, Method
from harness.preconditioned import memoryless_law
from harness.statistics import Array, StatisticalError

# What burn-in may leave of the start; standard errors are above 1e-3 everywhere.
_FORGOTTEN = 1e-5

_DEFAULTS = {
    "num_data": 1.0,
    "prior_precision": 0.0,
    "prior_mean": 0.0,
    "temperature": 1.0,
    "noise_estimate": 0.0,
    "resample_momentum_every": 0,
}


@dataclass(frozen=True)
class Group:
    """A param group: parameters of so many coordinates, and settings of its own.

    A ``prior_mean`` with a number for each coordinate is given as tensors.
    """

    widths: tuple[int, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """A sampler, a target and settings, to be run as independent chains.

    ``settings`` are added to the method's; ``groups`` spread the coordinates (default:
    one group, halves in two parameters); ``seed`` is of gradient noise as well.
    """

    method: Method
    target: Any  # of harness.targets
    settings: Mapping[str, Any]
    groups: tuple[Group, ...] = ()
    chains: int = 20_000
    seed: int = 0
    dtype: torch.dtype = torch.float32

    @property
    def all_settings(self) -> dict[str, Any]:
        return {**self.method.settings, **self.settings}

    @property
    def all_groups(self) -> tuple[Group, ...]:
        if self.groups:
            return self.groups
        d = self.target.dimension
        return (Group((d // 2, d - d // 2) if d > 1 else (1,)),)

    @property
    def coordinates(self) -> Coordinates:
        """Every number that the sampler was given, for each coordinate."""
        shared = {**_DEFAULTS, **self.all_settings}
        groups = [(sum(g.widths), g.settings) for g in self.all_groups]

        def column(name: str, value: Any) -> Array:
            parts = [np.full(n, given.get(name, value)) for n, given in groups]
            return np.concatenate(parts).astype(float)

        return {k: column(k, v) for k, v in shared.items() if not isinstance(v, str)}

    @property
    def law(self) -> Law:
        return self.method.law(self.target, self.coordinates)

    def label(self, what: str) -> str:
        return f"{self.method.name} {self.all_settings}, {what}"


class Chains:
    """The chains of an experiment, all at the point ``start`` before the first step."""

    def __init__(self, experiment: Experiment, start: Array) -> None:
        self.target = experiment.target
        self.chooses = experiment.method.chooses
        self.seed = experiment.seed
        # Another kind of generator than the samplers', so that gradient noise never
        # coincides with injected noise.
        self.generator = torch.Generator().manual_seed(experiment.seed)
        self.params: list[torch.Tensor] = []
        groups: list[dict[str, Any]] = []
        rest = torch.as_tensor(start, dtype=experiment.dtype)
        for group in experiment.all_groups:
            members = []
            for width in group.widths:
                row, rest = rest[:width], rest[width:]
                members.append(row.repeat(experiment.chains, 1).requires_grad_())
            self.params += members
            settings = dict(group.settings)
            if isinstance(settings.get("prior_mean"), tuple):
                row = torch.tensor(settings["prior_mean"], dtype=experiment.dtype)
                parts = row.repeat(experiment.chains, 1).split(group.widths, dim=1)
                settings["prior_mean"] = parts
            groups.append({"params": members, **settings})
        assert len(rest) == 0, "the groups do not cover the target's coordinates"
        settings = experiment.all_settings
        self.sampler = experiment.method.build(groups, seed=self.seed, **settings)
        if self.chooses:  # among equal gradients too, which EWSG refuses to users
            self.sampler._num_equal = None

    def scatter(self, deviation: float) -> None:
        """Draws the present positions anew, from N(0, deviation²)."""
        draw = np.random.default_rng(self.seed)  # the references have torch's
        for p in self.params:
            p.detach().copy_(torch.from_numpy(draw.normal(0, deviation, p.shape)))

    def draw(self, mean: Array, cov: Array) -> None:
        """Draws the present positions anew, from N(mean, cov)."""
        random = np.random.default_rng(self.seed)  # the references have torch's
        drawn = random.multivariate_normal(mean, cov, len(self.params[0]))
        parts = torch.from_numpy(drawn).split([p.shape[1] for p in self.params], 1)
        for p, part in zip(self.params, parts, strict=True):
            p.detach().copy_(part)

    def closure(self) -> None:
        self.sampler.zero_grad()
        loss = self.target.loss(torch.cat(self.params, dim=1), self.generator)
        with warnings.catch_warnings():
            # Of a leak, if gradients were kept.
            warnings.filterwarnings("ignore", "Using backward.. with create_graph")
            loss.backward(create_graph=self.needs_graph)

    def advance(self, steps: int) -> None:
        for _ in range(steps):
            if self.chooses:
                self.sampler.step(self.closure)
            else:
                self.closure()
                self.sampler.step()
        self.sampler.zero_grad()

    @property
    def needs_graph(self) -> bool:
        """Returns whether the sampler uses second derivatives."""
        groups = self.sampler.param_groups
        return any(g.get("gamma", False) and g["adapt"] for g in groups)

    def state(self, names: Sequence[str] = (), *, theta: bool = True) -> Array:
        """[chains, coordinates of θ and of the sampler's state tensors ``names``]."""
        tensors = [p.detach() for p in self.params] if theta else []
        for name in names:
            tensors += [self.sampler.state[p][name] for p in self.params]
        state = torch.cat(tensors, dim=1).double().numpy()
        if not np.all(np.isfinite(state)):
            raise StatisticalError("the chains have diverged")
        return state


def assert_caught(check: Callable[[Experiment], None], experiment: Experiment) -> None:
    """Asserts that a check raises :class:`StatisticalError`.

    Few chains show most bugs: all are run only where a tenth of them pass.
    """
    few = replace(experiment, chains=experiment.chains // 10)
    try:
        check(few)
        check(experiment)
    except StatisticalError:
        return
    raise AssertionError(f"{experiment.label('no bug')} was seen")


def check_stationary(experiment: Experiment, *, lag: int = 5) -> None:
    """Checks the stationary law of a chain on a Gaussian target.

    Begins with θ in that law, which a wrong chain leaves, and burns in until only
    :data:`_FORGOTTEN` of the rest of the state is left; from afar starts
    :func:`check_transient`. Looks at the state twice, ``lag`` cycles apart. The first
    look must follow the stationary law, and what happened in between, whitened, must be
    a standard normal independent of it: a law has its dynamics tested too.
    """
    law = experiment.law
    mean, cov = law.cycle.stationary()
    d = experiment.target.dimension
    chains = Chains(experiment, mean[:d])
    chains.draw(mean[:d], cov[:d, :d])
    burn_in = _burn_in(law, d)
    assert burn_in * law.steps < 2000, "this experiment would take too long"

    chains.advance(burn_in * law.steps)
    first = chains.state(law.state)
    between = law.cycle.power(lag)
    chains.advance(lag * law.steps)
    second = chains.state(law.state)
    one, other = first - mean, second - first @ between.a.T - between.b
    both = [statistics.whiten(one, cov), statistics.whiten(other, between.q)]
    statistics.check_gaussian(np.hstack(both), label=experiment.label("stationary law"))


def _burn_in(law: Law, d: int) -> int:
    """Cycles from θ in its stationary law and the rest of the state as it begins.

    At least three times as many as a mean needs to fall by e: what is wrong has shown
    by then.
    """
    mean, cov = law.cycle.stationary()
    start = law.start.copy()
    start[:d, :d] += cov[:d, :d]
    deviation = np.sqrt(np.diag(cov))
    stretch = math.ceil(-1 / math.log(law.cycle.radius()))
    count = 3 * stretch
    while True:
        _, now = law.cycle.power(count).push(mean, start)
        if np.all(np.abs(now - cov) < _FORGOTTEN * np.outer(deviation, deviation)):
            return count
        count += stretch


def check_transient(experiment: Experiment, stops: Sequence[int] = (2, 4, 12)) -> None:
    """Checks the law of a chain on a Gaussian target soon after a fixed start."""
    law = experiment.law
    mean, cov = law.cycle.stationary()
    d = experiment.target.dimension
    start = mean[:d] + 3 * np.sqrt(np.diag(cov)[:d])
    expected = np.concatenate([start, np.zeros(len(mean) - d)])
    spread = law.start
    chains = Chains(experiment, start)
    done = 0
    for stop in stops:
        chains.advance((stop - done) * law.steps)
        expected, spread = law.cycle.power(stop - done).push(expected, spread)
        done, found = stop, chains.state(law.state)
        label = experiment.label(f"law after {stop} cycles")
        statistics.check_gaussian(found, mean=expected, cov=spread, label=label)


def check_double_well(experiment: Experiment) -> None:
    """Checks mean, second and fourth moment and histogram on U = -2θ² + θ⁴.

    The expected law is that of the discretised chain, computed by quadrature.
    """
    c = experiment.coordinates
    carry, injected = experiment.method.inertia(c)
    lr = float(c["lr"][0])
    noise = lr**2 * experiment.target.gradient_noise
    law = targets.double_well_law(lr, carry, injected + noise)
    chains = Chains(experiment, np.ones(1))
    chains.advance(law.burn_in(_FORGOTTEN))
    found, edges = chains.state()[:, 0], np.linspace(-2, 2, 81)
    law.check(found, (1, 2, 4), edges, label=experiment.label("double well"))


def check_thermostats(experiment: Experiment) -> None:
    """Checks that SGNHT's thermostats absorb gradient noise, on a Gaussian target.

    They start where there is no such noise. Then the mean of two consecutive momenta
    has the variance lr T / N, whatever lr, noise and κ (what a thermostat sees has the
    mean 0 in a stationary chain); θ and v follow ``sgnht_law``, and the thermostats
    have the variance κ (1 + α / 2), both up to O(κ), far below a standard error.
    """
    c, law = experiment.coordinates, experiment.law
    mean, cov = law.cycle.stationary()
    d = experiment.target.dimension
    noise = np.diag(experiment.target.noise)
    account = c["lr"] * c["num_data"] * noise / (2 * c["temperature"])
    friction = 1 - c["momentum"] + account
    chains = Chains(experiment, mean[:d] + 3 * np.sqrt(np.diag(cov)[:d]))
    # What is left of a thermostat's start is exp(-κ t / α).
    chains.advance(math.ceil(8 * max(friction / c["thermostat_rate"])))
    before = chains.state(["momentum"], theta=False)
    chains.advance(1)
    state = chains.state(["momentum"])
    thermostats = chains.state(["thermostat"], theta=False)
    label = experiment.label("thermostats")
    heat = c["lr"] * c["temperature"] / c["num_data"]
    statistics.check_mean((before + state[:, d:]) ** 2 / 4 / heat, 1.0, label=label)
    statistics.check_gaussian(state, mean=mean, cov=cov, label=label)
    spread = thermostats.var(axis=0) / (c["thermostat_rate"] * (1 + friction / 2))
    error = math.sqrt(2 / len(thermostats))
    statistics.check_z({"spread of the thermostats": (spread - 1) / error}, label=label)


def check_start(experiment: Experiment) -> None:
    """Checks the first step of pSGLD with Γ, started in a Gaussian in one dimension.

    With V = ḡ² + (T/N) h, and Γ the derivative of its G, the drift lr G ḡ is at most
    lr, Γ moves by at most 2 / √27 of lr, and G is at most that of ḡ = 0. By Stein's
    identity drift and noise leave E[θ²] alone up to the mean square of the drift.
    """
    c = experiment.coordinates
    lr, heat = float(c["lr"][0]), float((c["temperature"] / c["num_data"])[0])
    square = heat * float(experiment.target.hessian[0, 0])
    drift = lr * (1 + 2 / math.sqrt(27))
    chains = Chains(experiment, np.zeros(1))
    chains.scatter(heat / math.sqrt(square))
    before = chains.state()
    chains.advance(1)
    after = chains.state()
    reach = stats.norm.isf(statistics.FALSE_ALARM / 2 / len(after))
    reach = drift + reach * math.sqrt(2 * lr * heat / math.sqrt(square))
    label, most = experiment.label("start"), np.abs(after - before).max()
    if not most < reach:
        raise StatisticalError(f"{label}: moved by {most:.3g}")
    change = after**2 - before**2
    mean = change.mean()
    beyond = max(-mean, mean - drift**2, 0.0)
    error = change.std() / math.sqrt(len(change))
    statistics.check_z({"growth of the variance": beyond / error}, label=label)


def check_memoryless(experiment: Experiment) -> None:
    """Checks pSGLD without memory against its law by quadrature, in one dimension."""
    c, target = experiment.coordinates, experiment.target
    names = ("lr", "num_data", "prior_precision", "temperature", "eps")
    law = memoryless_law(
        curvature=float(target.hessian[0, 0]),
        centre=float(target.centre[0]),
        gamma=bool(c["gamma"][0]),
        **{name: float(c[name][0]) for name in names},
    )
    chains = Chains(experiment, target.centre)
    chains.advance(law.burn_in(_FORGOTTEN))
    deviation = math.sqrt(law.moment(2) - law.moment(1) ** 2)
    edges = law.moment(1) + deviation * np.linspace(-4, 4, 61)
    label = experiment.label("memoryless")
    law.check(chains.state()[:, 0], (1, 2, 4), edges, label=label)


def check_extrapolated(experiment: Experiment, moments: Array, *, time: float) -> None:
    """Checks E[θ] and E[θ²] for vanishing lr: Richardson's 2 f(lr / 2) - f(lr).

    For a chain whose law at a given lr is not known. What is left is O(lr²). ``time``
    is lr times the number of steps that burn in.
    """
    lr = experiment.all_settings["lr"]
    means, variances = [], []
    for part in (1, 2):
        settings = {**experiment.settings, "lr": lr / part}
        seed = experiment.seed + part
        chains = Chains(replace(experiment, settings=settings, seed=seed), np.zeros(1))
        chains.advance(math.ceil(time * part / lr))
        values = chains.state() ** np.array([1, 2])
        means.append(values.mean(axis=0))
        variances.append(values.var(axis=0) / len(values))
    error = np.sqrt(4 * variances[1] + variances[0])
    z = (2 * means[1] - means[0] - moments) / error
    statistics.check_z({"moments": z}, label=experiment.label("small steps"))
