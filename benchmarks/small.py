"""Small networks: µs of a step of a chain, eager, compiled, and in JAX.

    python benchmarks/small.py [--network tanh] [--chains 1 10 100] [--rounds 15]

SGHMC in fp32, all of 100 points at each step, on one core. Candidates take turns:

* ``eager``: ``zero_grad()``, ``backward()``, ``step()`` in a loop; ``SGD`` with
  torch's, with momentum;
* ``ours K``: ``compile_steps`` of K chains, in blocks of ``--steps``;
* ``JAX K``, if it is installed: eq. 15 of Chen et al. 2014 by hand in ``lax.scan`` of
  as many steps, several chains by ``vmap``. By hand, since BlackJAX's kernel with one
  integration step moves by a momentum that it has just drawn: XLA removes its gradient.

``--network mnist`` compares compiled blocks with an eager loop, for 784-100-10 and
minibatches of 100; ``--sampler MCLMC`` its blocks with its eager loop.

After the times each sampler (not SGD, nor ``mnist``) runs on with a larger lr, and its
mean loss in equilibrium is printed, which all must share: a chain that ignores its
gradient is seen.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle, pairwise
from typing import Any, Protocol

import torch
from chains import rate
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state
from torch.nn import functional as F

import torch_sgmcmc as sg

POINTS, LR, MOMENTUM, PRIOR = 100, 1e-4, 0.9, 1.0
LAW_LR, LAW_STEPS = 5e-3, 20_000
SIZES = {
    "tanh": [1, 50, 1],
    "relu": [1, 50, 1],
    "two": [1, 32, 32, 1],
    "mnist": [784, 100, 10],
}


class Candidate(Protocol):
    """A way of making steps."""

    def step(self) -> int:
        """Makes some steps; returns the number of steps times chains."""

    def set_lr(self, lr: float) -> None:
        """Sets the step size."""

    def loss(self) -> float:
        """Returns the mean loss of the present chains."""


def data(network: str) -> tuple[Tensor, Tensor]:
    """Inputs and targets."""
    if network == "mnist":
        return torch.rand(60_000, 784), torch.randint(10, (60_000,))
    x = torch.linspace(-3, 3, POINTS)[:, None]
    return x, x.sin()


def make_network(network: str) -> nn.Sequential:
    """A network of the kind."""
    activation = nn.Tanh if network in ("tanh", "two") else nn.ReLU
    layers: list[nn.Module] = []
    for a, b in pairwise(SIZES[network]):
        layers += [nn.Linear(a, b), activation()]
    return nn.Sequential(*layers[:-1])


class _Ours:
    """An eager loop (no blocks), or blocks of compiled steps."""

    def __init__(self, network: str, chains: int, steps: int, cls: Any = sg.SGHMC):
        self.network, self.chains, self.steps = network, chains, steps
        self.x, self.y = data(network)
        if network == "mnist":  # more than the cache holds, gathered before the clock
            rows = torch.randint(len(self.x), (8, steps or 20, 100))
            self.minibatches = cycle([(self.x[some], self.y[some]) for some in rows])
        nets = [make_network(network) for _ in range(chains)]
        self.model = copy.deepcopy(nets[0])
        self.params = dict(self.model.named_parameters())
        if chains > 1:
            self.params, _ = stack_module_state(nets)
        settings: dict[str, Any] = {"lr": LR, "momentum": MOMENTUM}
        if issubclass(cls, sg.Sampler):
            settings |= {"num_data": len(self.x), "prior_precision": PRIOR}
            settings |= {"num_chains": chains if chains > 1 else None}
            settings["seed"] = 1000 * steps + chains
        self.sampler = cls(self.params.values(), **settings)
        self.block = None
        if steps:
            self.block = sg.compile_steps(
                self.sampler, self.one, self.params, steps=steps
            )

    def one(self, params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        output = functional_call(self.model, params, (x,))
        if self.network == "mnist":
            return F.cross_entropy(output, y)
        return F.mse_loss(output, y)

    def step(self) -> int:
        count = self.steps or 20
        if self.network == "mnist":
            batches = next(self.minibatches)
        else:
            batches = [t.expand(count, *t.shape) for t in (self.x, self.y)]
        if self.block is not None:
            self.block(*batches)
        else:
            for x, y in zip(*batches, strict=True):
                self.sampler.zero_grad()
                if self.network == "mnist":
                    F.cross_entropy(self.model(x), y).backward()
                else:
                    F.mse_loss(self.model(x), y).backward()
                self.sampler.step()
        return count * self.chains

    def set_lr(self, lr: float) -> None:
        self.sampler.param_groups[0]["lr"] = lr

    @torch.no_grad()
    def loss(self) -> float:
        if self.chains == 1:
            return float(self.one(self.params, self.x, self.y))
        over_chains = torch.func.vmap(self.one, (0, None, None))
        return float(over_chains(self.params, self.x, self.y).mean())


class _Jax:
    """Eq. 15 in JAX, momentum and then position, scanned over the steps."""

    def __init__(self, network: str, chains: int, steps: int) -> None:
        import jax
        import jax.numpy as jnp

        self.jax, self.chains, self.steps, self.lr = jax, chains, steps, LR
        sizes = SIZES[network]
        bend = jax.nn.relu if network == "relu" else jnp.tanh
        x, y = (jnp.asarray(part.numpy()) for part in data(network))

        def error(w: dict[str, Any]) -> Any:
            h = x
            for i in range(len(sizes) - 1):
                h = (bend(h) if i else h) @ w[f"w{i}"] + w[f"b{i}"]
            return jnp.mean((h - y) ** 2)

        def energy(w: dict[str, Any]) -> Any:
            squares = sum(jnp.sum(p**2) for p in jax.tree.leaves(w))
            return error(w) + squares * PRIOR / (2 * POINTS)

        def scanned(key: Any, state: Any, lr: float) -> Any:
            noise = (2 * (1 - MOMENTUM) * lr / POINTS) ** 0.5

            def body(state: Any, key: Any) -> Any:
                w, v = state
                g, keys = jax.grad(energy)(w), jax.random.split(key, len(w))
                v = {
                    name: MOMENTUM * v[name]
                    - lr * g[name]
                    + noise * jax.random.normal(each, w[name].shape)
                    for each, name in zip(keys, w, strict=True)
                }
                return ({name: w[name] + v[name] for name in w}, v), None

            return jax.lax.scan(body, state, jax.random.split(key, steps))[0]

        self.error = jax.jit(jax.vmap(error) if chains > 1 else error)
        self.run = jax.jit(jax.vmap(scanned, (0, 0, None)) if chains > 1 else scanned)
        lead = (chains,) if chains > 1 else ()
        w = {}
        for i, (a, b) in enumerate(pairwise(sizes)):
            shape = (*lead, a, b)
            w[f"w{i}"] = jax.random.normal(jax.random.key(i), shape) / a**0.5
            w[f"b{i}"] = jnp.zeros((*lead, b))
        self.state = w, {name: jnp.zeros_like(p) for name, p in w.items()}
        self.key = jax.random.key(1)

    def step(self) -> int:
        self.key, now = self.jax.random.split(self.key)
        keys = self.jax.random.split(now, self.chains) if self.chains > 1 else now
        self.state = self.jax.block_until_ready(self.run(keys, self.state, self.lr))
        return self.chains * self.steps

    def set_lr(self, lr: float) -> None:
        # The momentum is the move of a step.
        w, v = self.state
        self.state = w, {name: p * (lr / self.lr) ** 0.5 for name, p in v.items()}
        self.lr = lr

    def loss(self) -> float:
        return float(self.error(self.state[0]).mean())


def equilibrium(candidate: Candidate) -> tuple[float, float]:
    """Returns the mean loss in equilibrium, and its standard error from 10 batches."""
    candidate.set_lr(LAW_LR)
    found: list[float] = []
    made = 0
    while made < LAW_STEPS:
        made += candidate.step() // getattr(candidate, "chains", 1)
        if made > LAW_STEPS // 4:
            found.append(candidate.loss())
    size = len(found) // 10
    means = [statistics.mean(found[i * size : (i + 1) * size]) for i in range(10)]
    return statistics.mean(means), statistics.stdev(means) / 10**0.5


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", choices=SIZES, default="tanh")
    parser.add_argument("--sampler", choices=("SGHMC", "MCLMC"), default="SGHMC")
    parser.add_argument("--chains", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--steps", type=int, default=100, help="of a block")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.3)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    torch.set_num_threads(1)
    torch.manual_seed(0)

    network, steps = arguments.network, arguments.steps
    cls, is_sghmc = getattr(sg, arguments.sampler), arguments.sampler == "SGHMC"
    makes: dict[str, Callable[[], Candidate]] = {
        "eager": partial(_Ours, network, 1, 0, cls)
    }
    if is_sghmc:
        makes["SGD"] = partial(_Ours, network, 1, 0, torch.optim.SGD)
    with_jax = is_sghmc and importlib.util.find_spec("jax") and network != "mnist"
    for chains in arguments.chains if network != "mnist" else [1]:
        makes[f"ours {chains}"] = partial(_Ours, network, chains, steps, cls)
        if with_jax:
            makes[f"JAX {chains}"] = partial(_Jax, network, chains, steps)
    candidates = {}
    for name, make in makes.items():
        started = time.perf_counter()
        candidates[name] = make()
        for _ in range(3):
            candidates[name].step()
        print(f"{name}: {time.perf_counter() - started:.1f} s to the third block")
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(arguments.rounds):
        for name, candidate in candidates.items():
            times[name].append(1e6 / rate(candidate.step, arguments.seconds))
    for name, found in times.items():
        text = f"{name:8}  {statistics.median(found):7.2f} µs"
        own = name.split()[-1]
        for other in ("eager", f"JAX {own}"):
            if other in times and other != name:
                ratios = [b / a for a, b in zip(found, times[other], strict=True)]
                low, middle, high = statistics.quantiles(ratios, n=4)
                text += f", {middle:5.2f} times as fast as {other}"
                text += f" ({low:.2f} to {high:.2f})"
        print(text, flush=True)
    if network == "mnist":
        return
    losses = {
        name: equilibrium(candidate)
        for name, candidate in candidates.items()
        if name != "SGD"
    }
    for name, (mean, error) in losses.items():
        print(f"{name:8}  mean loss in equilibrium {mean:.4f} ± {error:.4f}")
    first, _ = losses["eager"]
    if any(abs(mean / first - 1) > 0.2 for mean, _ in losses.values()):
        raise AssertionError("the chains do not sample the same posterior")


if __name__ == "__main__":
    main()
