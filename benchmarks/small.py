"""A small network: steps of chains a second, eager, compiled, and in JAX.

    python benchmarks/small.py [--chains 1 10 100] [--steps 20] [--rounds 15] [--relu]

SGHMC of a network 1-50-1 (tanh, or ReLU), fp32, all of 100 points at each step.
Printed are steps of chains a second in the median of rounds in which all take turns,
and the ratio to the eager loop of the same round with its quartiles:

* ``eager``: ``zero_grad()``, ``backward()``, ``step()`` in a loop; ``allow`` with
  ``nonfinite="ignore"``; ``SGD`` torch's, with momentum;
* ``K = 1``, ...: ``compile_steps`` of so many chains, in blocks of ``--steps``, and
  with ``nonfinite="ignore"``;
* ``JAX``, if it is installed: the same update by hand, by ``lax.scan`` over blocks of
  100, for several chains by ``vmap``;
* ``MNIST``: a network 784-100-10, minibatches of 100 of as many random images, an eager
  loop and blocks; ratios are to that loop.

The process is bound to one core.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
from collections.abc import Callable
from functools import partial

from chains import rate

POINTS, HIDDEN = 100, 50
LR, MOMENTUM, PRIOR = 1e-4, 0.9, 1.0
SCANNED = 100
ACTIVATION = "tanh"

Step = Callable[[], int]


def network() -> object:
    """A network of the kind."""
    from torch import nn

    kind = nn.ReLU if ACTIVATION == "relu" else nn.Tanh
    return nn.Sequential(nn.Linear(1, HIDDEN), kind(), nn.Linear(HIDDEN, 1))


def data() -> tuple:
    """Inputs and targets."""
    import torch

    x = torch.linspace(-3, 3, POINTS)[:, None]
    return x, x.sin()


def eager(optimizer: str) -> Step:
    """A training loop; returns how many steps it made."""
    import torch
    from torch.nn import functional as F

    import torch_sgmcmc as sg

    x, y = data()
    model = network()
    seed = optimizer == "ignore"  # one for each, or they have one noise
    settings = {"num_data": POINTS, "prior_precision": PRIOR, "seed": int(seed)}
    make = {
        "eager": partial(sg.SGHMC, lr=LR, momentum=MOMENTUM, **settings),
        "ignore": partial(
            sg.SGHMC, lr=LR, momentum=MOMENTUM, nonfinite="ignore", **settings
        ),
        "SGD": partial(torch.optim.SGD, lr=LR, momentum=MOMENTUM),
    }[optimizer]
    sampler = make(model.parameters())

    def step() -> int:
        for _ in range(20):
            sampler.zero_grad()
            F.mse_loss(model(x), y).backward()
            sampler.step()
        return 20

    return step


def compiled(chains: int, steps: int, nonfinite: str) -> Step:
    """Blocks of ``compile_steps``."""
    import copy

    from torch.func import functional_call, stack_module_state, vmap
    from torch.nn import functional as F

    import torch_sgmcmc as sg

    x, y = data()
    models = [network() for _ in range(chains)]
    stacked, _ = stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    params = stacked if chains > 1 else dict(models[0].named_parameters())

    def one(params: dict, x: object, y: object) -> object:
        return F.mse_loss(functional_call(base, params, (x,)), y)

    def loss(params: dict, x: object, y: object) -> object:
        if chains == 1:
            return one(params, x, y)
        return vmap(one, (0, None, None))(params, x, y).sum()

    sampler = sg.SGHMC(
        *(params.values(), LR, MOMENTUM),
        num_data=POINTS,
        prior_precision=PRIOR,
        num_chains=None if chains == 1 else chains,
        seed=chains,
        nonfinite=nonfinite,
        capturable=True,
    )
    block = sg.compile_steps(sampler, loss, params, steps=steps)
    batches = [t.expand(steps, *t.shape) for t in (x, y)]

    def step() -> int:
        block(*batches)
        return chains * steps

    return step


def mnist(steps: int) -> Step:
    """A classifier's training loop, or blocks of it."""
    import torch
    from torch import nn
    from torch.func import functional_call
    from torch.nn import functional as F

    import torch_sgmcmc as sg

    count = 60_000
    images, labels = torch.rand(count, 784), torch.randint(10, (count,))
    model = nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
    params = dict(model.named_parameters())
    sampler = sg.SGHMC(
        *(params.values(), 1e-3, 0.9),
        num_data=count,
        prior_precision=1.0,
        seed=steps,
        capturable=steps > 0,
    )

    def loss(params: dict, x: object, y: object) -> object:
        return F.cross_entropy(functional_call(model, params, (x,)), y)

    def step() -> int:
        for rows in torch.randint(count, (20, 100)):
            sampler.zero_grad()
            F.cross_entropy(model(images[rows]), labels[rows]).backward()
            sampler.step()
        return 20

    if steps == 0:
        return step
    block = sg.compile_steps(sampler, loss, params, steps=steps)

    def compiled_step() -> int:
        rows = torch.randint(count, (steps, 100))
        block(images[rows], labels[rows])
        return steps

    return compiled_step


def jax_loop(chains: int) -> Step:
    """Equation 15 of the SGHMC paper in JAX: momentum, then position, scanned.

    By hand, as BlackJAX's kernel with one integration step moves by a momentum that it
    has just drawn, so that its gradient has no effect and XLA removes it. Raises if
    what is compiled here does not depend on the data.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    x, y = (jnp.asarray(np.asarray(part)) for part in data())
    noise = (2 * (1 - MOMENTUM) * LR / POINTS) ** 0.5

    def loss(w: dict, x: jax.Array, y: jax.Array) -> jax.Array:
        bend = jax.nn.relu if ACTIVATION == "relu" else jnp.tanh
        out = bend(x @ w["a"] + w["b"]) @ w["c"] + w["d"]
        prior = sum(jnp.sum(p**2) for p in jax.tree.leaves(w)) * PRIOR / (2 * POINTS)
        return jnp.mean((out - y) ** 2) + prior

    def scanned(key: jax.Array, state: tuple, x: jax.Array, y: jax.Array) -> tuple:
        def body(state: tuple, key: jax.Array) -> tuple[tuple, None]:
            w, v = state
            g, keys = jax.grad(loss)(w, x, y), jax.random.split(key, len(w))
            v = {
                name: MOMENTUM * v[name]
                - LR * g[name]
                + noise * jax.random.normal(each, w[name].shape)
                for each, name in zip(keys, w, strict=True)
            }
            return ({name: w[name] + v[name] for name in w}, v), None

        return jax.lax.scan(body, state, jax.random.split(key, SCANNED))[0]

    many = jax.vmap(scanned, (0, 0, None, None)) if chains > 1 else scanned
    run = jax.jit(many)
    shapes = {"a": (1, HIDDEN), "b": (HIDDEN,), "c": (HIDDEN, 1), "d": (1,)}
    lead = (chains,) if chains > 1 else ()
    w = {
        name: 0.3 * jax.random.normal(jax.random.key(i), (*lead, *shape))
        for i, (name, shape) in enumerate(shapes.items())
    }
    state = w, {name: jnp.zeros_like(p) for name, p in w.items()}
    key = jax.random.key(1)
    first = jax.random.split(key, chains) if chains > 1 else key
    with_data, without = (run(first, state, x, targets) for targets in (y, 0 * y))
    if bool(jnp.array_equal(with_data[0]["a"], without[0]["a"])):
        raise AssertionError("the compiled chain does not depend on the data")

    def step() -> int:
        nonlocal state, key
        key, now = jax.random.split(key)
        keys = jax.random.split(now, chains) if chains > 1 else now
        state = jax.block_until_ready(run(keys, state, x, y))
        return chains * SCANNED

    return step


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chains", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--steps", type=int, default=20, help="of a compiled block")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--relu", action="store_true", help="in place of tanh")
    arguments = parser.parse_args()
    if arguments.relu:
        global ACTIVATION
        ACTIVATION = "relu"
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])

    import torch

    torch.set_num_threads(1)
    makes: dict[str, Callable[[], Step]] = {
        name: partial(eager, name) for name in ("eager", "ignore", "SGD")
    }
    for chains in arguments.chains:
        for nonfinite in ("raise", "ignore"):
            name = f"K = {chains}" + (", allow" if nonfinite == "ignore" else "")
            makes[name] = partial(compiled, chains, arguments.steps, nonfinite)
        if importlib.util.find_spec("jax") is not None:
            makes[f"JAX, K = {chains}"] = partial(jax_loop, chains)
    makes["MNIST"] = partial(mnist, 0)
    makes["MNIST, compiled"] = partial(mnist, arguments.steps)
    steps = {name: make() for name, make in makes.items()}
    for step in steps.values():
        for _ in range(3):
            step()
    rates: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(arguments.rounds):
        for name, step in steps.items():
            rates[name].append(rate(step, arguments.seconds))
    for name, seen in rates.items():
        base = "MNIST" if name.startswith("MNIST") else "eager"
        ratios = [a / b for a, b in zip(seen, rates[base], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"{name:18}  {statistics.median(seen):9.0f} a second, {middle:6.2f} times "
            f"its eager loop ({low:.2f} to {high:.2f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
