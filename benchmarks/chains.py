"""Many small networks in one process: num_chains, a loop each, and BlackJAX.

    python benchmarks/chains.py [--chains 1 10 100] [--threads 1] [--rounds 15]

SGHMC of networks 784-16-10 (tanh), fp32, a minibatch of 64 of its own for every chain
and step, drawn by an index from data of MNIST's size. Printed are training steps of
chains a second, the median of rounds in which all take turns, with the median ratio to
``num_chains`` of the same round:

* ``num_chains``: the networks stacked by torch.func, one sampler;
* ``a loop``: K networks, each with a sampler and a step of its own;
* ``BlackJAX``, if it is installed: ``jit(vmap(sghmc.step))`` with its default of ten
  integration steps, all with one minibatch, so that it gathers a tenth of the data.

The process is bound to as many cores as there are threads.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import statistics
import time
from collections.abc import Callable

N, INPUTS, HIDDEN, CLASSES, BATCH = 60_000, 784, 16, 10, 64
LR, MOMENTUM, PRIOR = 1e-3, 0.9, 1.0
INTEGRATION_STEPS = 10


def together(chains: int) -> Callable[[], int]:
    """One step of all chains; returns how many steps of chains were made."""
    import torch
    from torch.func import functional_call, stack_module_state, vmap
    from torch.nn import functional as F

    import torch_sgmcmc as sg

    x, y = data()
    models = [network() for _ in range(chains)]
    params, buffers = stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")

    def loss(params: dict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(base, (params, buffers), (x,)), y)

    losses = vmap(loss)
    sampler = sg.SGHMC(
        params.values(),
        LR,
        MOMENTUM,
        num_data=N,
        prior_precision=PRIOR,
        num_chains=chains,
    )

    def step() -> int:
        drawn = torch.randint(N, (chains, BATCH))
        sampler.zero_grad()
        losses(params, x[drawn], y[drawn]).sum().backward()
        sampler.step()
        return chains

    return step


def apart(chains: int) -> Callable[[], int]:
    """A loop over networks and samplers."""
    import torch
    from torch.nn import functional as F

    import torch_sgmcmc as sg

    x, y = data()
    models = [network() for _ in range(chains)]
    samplers = [
        sg.SGHMC(model.parameters(), LR, MOMENTUM, num_data=N, prior_precision=PRIOR)
        for model in models
    ]

    def step() -> int:
        for model, sampler in zip(models, samplers, strict=True):
            drawn = torch.randint(N, (BATCH,))
            sampler.zero_grad()
            F.cross_entropy(model(x[drawn]), y[drawn]).backward()
            sampler.step()
        return chains

    return step


def blackjax(chains: int) -> Callable[[], int]:
    """BlackJAX's own step, mapped over chains and compiled."""
    import blackjax
    import jax
    import jax.numpy as jnp
    import numpy as np

    x, y = (jnp.asarray(np.asarray(part)) for part in data())

    def log_prior(w: dict) -> jax.Array:
        return -0.5 * PRIOR * sum(jnp.sum(p**2) for p in jax.tree.leaves(w))

    def log_likelihood(w: dict, datum: tuple) -> jax.Array:
        inputs, label = datum
        logits = jnp.tanh(inputs @ w["a"] + w["b"]) @ w["c"] + w["d"]
        return jax.nn.log_softmax(logits)[label]

    gradient = blackjax.sgmcmc.gradients.grad_estimator(log_prior, log_likelihood, N)
    sampler = blackjax.sghmc(gradient, INTEGRATION_STEPS, 1 - MOMENTUM)

    def one(key: jax.Array, w: dict) -> dict:
        drawn = jax.random.randint(key, (BATCH,), 0, N)
        return sampler.step(key, w, (x[drawn], y[drawn]), LR / N)

    step_all = jax.jit(jax.vmap(one))
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"a": (INPUTS, HIDDEN), "b": (HIDDEN,)}
    shapes |= {"c": (HIDDEN, CLASSES), "d": (CLASSES,)}
    state = {
        name: 0.03 * jax.random.normal(key, (chains, *shape))
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    key = jax.random.key(1)

    def step() -> int:
        nonlocal state, key
        key, now = jax.random.split(key)
        state = jax.block_until_ready(step_all(jax.random.split(now, chains), state))
        return chains * INTEGRATION_STEPS

    return step


def data() -> tuple:
    """Inputs and labels, which are not looked at."""
    import torch

    generator = torch.Generator().manual_seed(0)
    x = torch.rand(N, INPUTS, generator=generator)
    return x, torch.randint(CLASSES, (N,), generator=generator)


def network() -> object:
    """A network of the kind."""
    from torch import nn

    return nn.Sequential(
        nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES)
    )


def rate(step: Callable[[], int], seconds: float) -> float:
    """Steps of chains a second."""
    made, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        made += step()
    return made / (time.perf_counter() - started)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chains", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.5)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])

    import torch

    torch.set_num_threads(arguments.threads)
    candidates = {"num_chains": together, "a loop": apart}
    if importlib.util.find_spec("blackjax") is not None:
        candidates["BlackJAX"] = blackjax
    for chains in arguments.chains:
        steps = {name: make(chains) for name, make in candidates.items()}
        for step in steps.values():
            step()
        rates: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(arguments.rounds):
            for name, step in steps.items():
                rates[name].append(rate(step, arguments.seconds))
        for name, seen in rates.items():
            ratios = [a / b for a, b in zip(rates["num_chains"], seen, strict=True)]
            print(
                f"K = {chains:4}  {name:10}  {statistics.median(seen):9.0f} a second  "
                f"num_chains is {statistics.median(ratios):.2f} times as fast",
                flush=True,
            )


if __name__ == "__main__":
    main()
