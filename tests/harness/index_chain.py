"""The law of EWSG's chains over finitely many minibatches, and checks against it.

A minibatch of one datum with gradients gᵢ(θ): what a step does is then a mixture of
Gaussians whose weights, the law of the index after M steps of the index chain, are
known in closed form; so the transition has an exact law, and in one dimension the
stationary law follows by quadrature.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from harness.statistics import Array, Mixture, check_counts, check_mean


def index_moves(log_weights: Array, length: int) -> Array:
    """Law of the index after ``length`` steps from each index: [..., from, to]."""
    count = log_weights.shape[-1]
    rise = log_weights[..., None, :] - log_weights[..., :, None]
    move = np.exp(np.minimum(rise, 0)) / count  # [from, to]
    stay = 1 - move.sum(axis=-1)
    one = move + stay[..., None] * np.eye(count)
    return np.linalg.matrix_power(one, length)


def index_law(log_weights: Array, length: int) -> Array:
    """Law of the index after ``length`` steps: uniform start, uniform proposals."""
    return index_moves(log_weights, length).mean(axis=-2)


@dataclass(frozen=True)
class Problem:
    """The mean of data [N, d] under a Gaussian prior; minibatches of one datum.

    The loss of datum i is (θ - xᵢ)² / 2 summed over coordinates. Each coordinate is
    a parameter of its own, and the last is in a second group if ``other``, its
    settings, is given. ``build(groups, seed=..., **settings)`` makes the sampler of as
    many chains as the parameters' leading dimension says.
    """

    data: Array
    build: Callable[..., Optimizer]
    settings: dict[str, Any]
    other: dict[str, Any] = field(default_factory=dict)
    chains: int = 100_000
    seed: int = 0

    def each(self, name: str) -> Array:
        """A hyperparameter's value for each coordinate."""
        defaults = {"prior_precision": 0.0, "temperature": 1.0}
        value = {**defaults, **self.settings}[name]
        values = np.full(self.data.shape[1], float(value))
        values[-1] = self.other.get(name, value)
        return values

    @property
    def noise_variance(self) -> Array:
        """ν² = 2 α lr T / N of each coordinate."""
        heat = self.each("lr") * self.each("temperature") / self.each("num_data")
        return 2 * (1 - self.each("momentum")) * heat

    def gradients(self, theta: Array) -> Array:
        """g = ∇ℓᵢ + (λ / N) θ for θ [..., d]: [..., N, d]."""
        decay = self.each("prior_precision") / self.each("num_data")
        return theta[..., None, :] - self.data + (decay * theta)[..., None, :]

    def log_weights(self, theta: Array, v: Array) -> Array:
        """METHODS, section 5: ‖u + lr g‖² / (2 ν²), summed over coordinates."""
        alpha = 1 - self.each("momentum")
        u = {
            "momentum": alpha * v,
            "zero": 0 * v,
            "one": 0 * v + np.sqrt(self.noise_variance),
            "full_momentum": -(1 - alpha) * v,
        }[self.settings.get("surrogate", "momentum")]
        pull = self.each("lr") * self.gradients(theta) + u[..., None, :]
        return (pull**2 / (2 * self.noise_variance)).sum(axis=-1)

    def probabilities(self, theta: Array, v: Array) -> Array:
        length = self.settings["index_chain_length"]
        return index_law(self.log_weights(theta, v), length)

    def moves(self, theta: Array, v: Array) -> Array:
        length = self.settings["index_chain_length"]
        return index_moves(self.log_weights(theta, v), length)

    @property
    def persistent(self) -> bool:
        """True if the index chain continues from step to step."""
        return self.settings.get("persistent_index_chain", False)

    def means(self, theta: Array, v: Array) -> Array:
        """E[v'] for each minibatch: [..., N, d]."""
        carried = self.each("momentum") * v
        return carried[..., None, :] - self.each("lr") * self.gradients(theta)


class Run:
    """The chains of a problem, all at θ with momentum v."""

    def __init__(self, problem: Problem, theta: Array, v: Array | None = None) -> None:
        self.problem = problem
        self.generator = torch.Generator().manual_seed(problem.seed)
        like = {"dtype": torch.float64, "requires_grad": True}
        shape = (problem.chains, 1)
        self.params = [torch.full(shape, float(x), **like) for x in theta]
        groups: list[dict[str, Any]] = [{"params": self.params}]
        if problem.other:
            last = {"params": self.params[-1:], **problem.other}
            groups = [{"params": self.params[:-1]}, last]
        self.sampler = problem.build(groups, seed=problem.seed, **problem.settings)
        for p, start in zip(self.params, v if v is not None else (), strict=False):
            momentum = torch.full_like(p, float(start)).detach()
            self.sampler.state[p]["momentum"] = momentum
        self.data = torch.as_tensor(problem.data)
        self.drawn = torch.empty(0, dtype=torch.int64)  # by their numbers

    def indices(self) -> torch.Tensor:
        """The datum of each chain's minibatch."""
        chains = self.problem.chains
        fresh = torch.randint(len(self.data), (chains,), generator=self.generator)
        if not self.problem.persistent:
            return fresh
        numbers = self.sampler.minibatches
        if int(numbers.max()) >= len(self.drawn):
            self.drawn = torch.cat([self.drawn, fresh])
        return self.drawn[numbers]

    def closure(self) -> torch.Tensor:
        for p in self.params:
            p.grad = None
        data = self.data[self.indices()]
        loss = 0.5 * (torch.cat(self.params, dim=1) - data).square().sum()
        loss.backward()
        return loss

    def advance(self, steps: int) -> None:
        for _ in range(steps):
            self.sampler.step(self.closure)

    @property
    def theta(self) -> Array:
        return torch.cat(self.params, dim=1).detach().numpy().copy()


def check_transition(problem: Problem, theta: Array, v: Array) -> None:
    """Checks the law of v' after one step from (θ, v), a mixture of Gaussians.

    All moments up to the second, third ones and |v'|⁴: the components lie a few ν
    apart, so that moments see their weights, coordinate by coordinate and jointly.
    """
    run = Run(problem, theta, v)
    run.advance(1)
    law = problem.probabilities(theta, v)
    nu = np.sqrt(problem.noise_variance)
    means = problem.means(theta, v) / nu
    centre = law @ means
    moved = (run.theta - theta) / nu - centre
    samples = _features(moved)
    # Exactly, with Gauss-Hermite nodes around each component.
    nodes, weights = np.polynomial.hermite_e.hermegauss(6)
    weights = weights / weights.sum()
    d = problem.data.shape[1]
    grid = np.stack(np.meshgrid(*[nodes] * d, indexing="ij"), axis=-1).reshape(-1, d)
    product = np.stack(np.meshgrid(*[weights] * d, indexing="ij"), axis=-1)
    joint = np.prod(product, axis=-1).ravel()
    features = (_features(grid + mean - centre) for mean in means)
    expected = sum(p * (joint @ each) for p, each in zip(law, features, strict=True))
    check_mean(samples, expected, label=f"transition {problem.settings}")


def _features(x: Array) -> Array:
    d = x.shape[1]
    second = [x[:, i] * x[:, j] for i in range(d) for j in range(i + 1)]
    third = [x[:, i] * x[:, i] * x[:, j] for i in range(d) for j in range(d)]
    fourth = (x * x).sum(axis=1) ** 2
    return np.column_stack([x, *second, *third, fourth])


def stationary_law(problem: Problem, *, reach: float) -> Mixture:
    """The stationary law in one dimension, by quadrature in the pair (θ, θ').

    The Gaussian kernels are integrated exactly (see ``harness.targets``), the
    weights' kinks where two minibatches weigh the same to second order in the grid.
    With a persistent index chain the minibatch is a third part of the state.
    """
    nu = float(np.sqrt(problem.noise_variance[0]))
    centre = float(problem.data.mean())
    half = int(np.ceil(reach / nu * 3))  # three points a deviation
    grid = centre + np.linspace(-reach, reach, 2 * half + 1)
    before, now = np.meshgrid(grid, grid, indexing="ij")
    theta, v = now[..., None], (now - before)[..., None]
    centres = theta + problem.means(theta, v)[..., 0]  # [before, now, minibatch]
    cell = (grid[1] - grid[0]) / (nu * np.sqrt(2 * np.pi))
    pair = np.exp(-((now - centre) ** 2) - (now - before) ** 2 / (2 * nu**2))
    pair /= pair.sum()
    change = 1.0
    if problem.persistent:
        moves = problem.moves(theta, v)
        count = len(problem.data)
        parts = cell * np.exp(-0.5 * ((grid - centres[..., None]) / nu) ** 2)
        parts = np.ascontiguousarray(np.moveaxis(parts, 0, 2))  # [now, i, before, to]
        state = np.repeat(pair[..., None] / count, count, axis=2)
        while change > 1e-10:
            used = np.einsum("abi,abij->abj", state, moves)
            after = (used.transpose(1, 2, 0)[:, :, None] @ parts)[:, :, 0]
            after = after.transpose(0, 2, 1) / after.sum()
            change = float(np.abs(after - state).sum())
            state = after
        used = np.einsum("abi,abij->abj", state, moves)
        return Mixture(centres.ravel(), nu, used.ravel())
    law = problem.probabilities(theta, v)
    kernel = np.zeros((*now.shape, len(grid)))
    for i in range(len(problem.data)):
        z = (grid - centres[..., i, None]) / nu
        kernel += law[..., i, None] * np.exp(-0.5 * z * z)
    kernel *= cell
    while change > 1e-10:
        after = np.einsum("abc,ab->bc", kernel, pair)
        after /= after.sum()
        change = float(np.abs(after - pair).sum())
        pair = after
    return Mixture(centres.ravel(), nu, (pair[..., None] * law).ravel())


def check_posterior(problem: Problem, *, reach: float, steps: int) -> None:
    """Checks the law of θ after ``steps`` steps against the stationary law."""
    law = stationary_law(problem, reach=reach)
    run = Run(problem, np.array([problem.data.mean()]))
    run.advance(steps)
    about = law.moment(1)
    edges = about + law.moment(2, about) ** 0.5 * np.linspace(-3, 3, 25)
    label = f"posterior {problem.settings}"
    law.check(run.theta[:, 0], range(1, 5), edges, label=label, about=about)


def check_consecutive(
    build: Callable[..., Optimizer], length: int, *, persistent: bool = False
) -> None:
    """Checks which minibatches consecutive steps use: by the weights, independently
    or from where the last step's index chain has ended.

    lr = 1e-12 and N = 1e12 hold θ still, so that all steps have the same weights;
    ``p.grad`` tells which minibatch the update used. Two parameters, in two groups,
    must agree on it.
    """
    chains = 60_000
    data = torch.tensor([-0.6, 0.2, 0.5, 1.1], dtype=torch.float64)
    like = {"dtype": torch.float64, "requires_grad": True}
    a, b = (torch.zeros(chains, 1, **like) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    count = 3 * (length + 1) * chains
    drawn = torch.randint(len(data), (count, 1), generator=generator)

    def closure() -> None:
        index = drawn[sampler.minibatches]
        a.grad, b.grad = data[index].clone(), 2 * data[index]

    settings = {"lr": 1e-12, "momentum": 0.5, "num_data": 1e12, "surrogate": "zero"}
    settings |= {"index_chain_length": length, "persistent_index_chain": persistent}
    sampler = build([{"params": [a]}, {"params": [b]}], **settings, seed=2)
    log_weights = data.numpy() ** 2 * (1 + 4) / (4 * 0.5)
    moves = index_moves(log_weights, length)
    law = moves.mean(axis=0)
    steps = []
    for _ in range(3):
        sampler.step(closure)
        used = torch.searchsorted(data, a.grad.flatten())
        assert torch.equal(b.grad.flatten(), 2 * data[used])
        steps.append(used.numpy())
    for one, two in ((0, 1), (0, 2)):
        counts = np.bincount(4 * steps[one] + steps[two], minlength=16)
        later = np.linalg.matrix_power(moves, two - one) if persistent else law
        pairs = (law[:, None] * later).ravel()
        check_counts(counts, pairs, label=f"indices of two steps, M = {length}")


def with_settings(problem: Problem, **settings: Any) -> Problem:
    """The same problem with other settings."""
    return replace(problem, settings={**problem.settings, **settings})
