"""HMC-ECS against NumPyro's HMCECS, on a simulated logistic regression.

    python benchmarks/hmcecs.py --numpyro PYTHON [--num-data 200000] [--seeds 3]

PYTHON is an interpreter with NumPyro. Both samplers get the same data (d = 29, float64
here, NumPyro's default float32 there), 100 blocks, m = 1300, expansions of second
order around the mode, one thread, and run in turns, each in a process of its own.
Times are processor times of the draws alone, after warm-up and compilation; ESS is
ArviZ's, the median over the parameters. Printed: for each the time of a draw, ESS a
second, the largest difference of posterior means in sd, and peak memory. With
``--control-variates`` instead: what building them costs relative to N per-datum
gradients by torch.func and one accumulation of the Hessian by a matrix product.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from functools import lru_cache
from typing import Any

import numpy as np

D, M, BLOCKS, PRIOR = 29, 1300, 100, 1.0


def simulate(n: int) -> tuple[Any, Any, Any]:
    """Data x with an intercept, y, and the posterior's mode by Newton's method."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, D))
    x[:, 0] = 1
    theta = 0.3 * rng.standard_normal(D)
    y = (rng.random(n) < 1 / (1 + np.exp(-x @ theta))).astype(float)
    for _ in range(8):
        p = 1 / (1 + np.exp(-x @ theta))
        hessian = x.T @ (x * (p * (1 - p))[:, None]) + PRIOR * np.eye(D)
        theta = theta + np.linalg.solve(hessian, x.T @ (y - p) - PRIOR * theta)
    return x, y, theta


def ours(n: int, seed: int, draws: int, length: float) -> tuple[Any, float]:
    """The draws and their processor time."""
    import torch

    import torch_sgmcmc as sg

    torch.set_num_threads(1)
    x, y, mode = map(torch.tensor, simulate(n))
    theta = mode.clone().requires_grad_()

    @lru_cache(maxsize=2)
    def rows(indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[indices], y[indices]

    def closure(indices: torch.Tensor) -> torch.Tensor:
        xs, ys = rows(indices)
        eta = xs @ theta
        return ys * eta - torch.nn.functional.softplus(eta)

    sampler = sg.HMCECS(
        [theta],
        num_data=n,
        subsample_size=M,
        trajectory_length=length,
        num_blocks=BLOCKS,
        prior_precision=PRIOR,
        seed=seed,
    )
    sampler.warmup(closure, 300, progress=False)
    kept = torch.empty(draws, D, dtype=torch.float64)
    start = time.process_time()
    for i in range(draws):
        sampler.step(closure)
        kept[i] = theta.detach()
    return kept.numpy(), time.process_time() - start


def theirs(n: int, seed: int, draws: int, length: float) -> tuple[Any, float]:
    """The same of NumPyro (``length`` has no meaning: NUTS chooses it)."""
    import jax
    import numpyro
    import numpyro.distributions as dist
    from jax import numpy as jnp
    from numpyro.infer import HMCECS, MCMC, NUTS

    x, y, mode = simulate(n)
    x, y = jnp.asarray(x), jnp.asarray(y)

    def model() -> None:
        theta = numpyro.sample("theta", dist.Normal(jnp.zeros(D), 1).to_event(1))
        with numpyro.plate("data", n, subsample_size=M):
            rows = numpyro.subsample(x, event_dim=1)
            labels = numpyro.subsample(y, event_dim=0)
            numpyro.sample("y", dist.Bernoulli(logits=rows @ theta), obs=labels)

    proxy = HMCECS.taylor_proxy({"theta": jnp.asarray(mode)}, degree=2)
    start = numpyro.infer.init_to_value(values={"theta": jnp.asarray(mode)})
    kernel = HMCECS(NUTS(model, init_strategy=start), num_blocks=BLOCKS, proxy=proxy)
    mcmc = MCMC(kernel, num_warmup=300, num_samples=draws, progress_bar=False)
    mcmc.warmup(jax.random.key(seed))
    # Once for the compilation of the sampling loop, and once for the time.
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(jax.random.key(seed + 1))
    jax.block_until_ready(mcmc.get_samples())
    mcmc.post_warmup_state = mcmc.last_state
    begin = time.process_time()
    mcmc.run(jax.random.key(seed + 2))
    kept = np.asarray(jax.block_until_ready(mcmc.get_samples()["theta"]))
    return kept, time.process_time() - begin


def control_variates(n: int) -> None:
    """Prints the relative cost of building them, and that of their parts."""
    import torch

    import torch_sgmcmc as sg

    torch.set_num_threads(1)
    x, y, mode = map(torch.tensor, simulate(n))
    theta = mode.clone().requires_grad_()

    def closure(indices: torch.Tensor) -> torch.Tensor:
        eta = x[indices] @ theta
        return y[indices] * eta - torch.nn.functional.softplus(eta)

    def one(t: torch.Tensor, row: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        eta = row @ t
        return label * eta - torch.nn.functional.softplus(eta)

    gradients = torch.func.vmap(torch.func.grad(one), (None, 0, 0))

    def parts() -> None:
        hessian = torch.zeros(D, D, dtype=torch.float64)
        with torch.no_grad():
            for i in torch.arange(n).split(8192):
                rows, p = x[i], torch.sigmoid(x[i] @ theta)
                gradients(theta.detach(), rows, y[i])
                hessian -= (rows.t() * (p * (1 - p))) @ rows

    sampler = sg.HMCECS([theta], num_data=n, subsample_size=M, seed=0)
    built, reference = [], []
    for _ in range(5):
        for run, times in (
            (lambda: sampler.set_anchor(closure, progress=False), built),
            (parts, reference),
        ):
            start = time.process_time()
            run()
            times.append(time.process_time() - start)
    ratio = statistics.median(built) / statistics.median(reference)
    print(
        f"n = {n}: built in {statistics.median(built):.2f} s, N gradients and a "
        f"Hessian {statistics.median(reference):.2f} s, ratio {ratio:.2f}"
    )


def measure(engine: str, arguments: argparse.Namespace, seed: int) -> None:
    """One run, in this process; prints JSON."""
    run = ours if engine == "ours" else theirs
    draws, seconds = run(
        arguments.num_data, seed, arguments.draws, arguments.trajectory_length
    )
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    result = {"seconds": seconds, "memory": memory, "draws": draws.tolist()}
    print(json.dumps(result))


def compare(arguments: argparse.Namespace) -> None:
    import arviz

    interpreters = {"ours": sys.executable, "numpyro": arguments.numpyro}
    means: dict[str, list[Any]] = {name: [] for name in interpreters}
    found: dict[str, list[tuple[float, float, float]]] = {n: [] for n in interpreters}
    spread = np.ones(D)
    for seed in range(arguments.seeds):
        for engine, python in interpreters.items():
            command = [
                *(python, __file__, "--engine", engine, "--seed", str(seed)),
                *("--num-data", str(arguments.num_data)),
                *("--draws", str(arguments.draws)),
                *("--trajectory-length", str(arguments.trajectory_length)),
            ]
            output = subprocess.run(command, check=True, capture_output=True, text=True)
            result = json.loads(output.stdout.splitlines()[-1])
            draws = np.array(result["draws"])
            ess = np.median([arviz.ess(c, method="mean") for c in draws.T])
            time_of_one = 1e3 * result["seconds"] / len(draws)
            found[engine].append(
                (time_of_one, ess / result["seconds"], result["memory"])
            )
            means[engine].append(draws.mean(axis=0))
            if engine == "ours":
                spread = draws.std(axis=0)
    for engine, values in found.items():
        ms, rate, memory = (statistics.median(v) for v in zip(*values, strict=True))
        rates = ", ".join(f"{v[1]:.0f}" for v in values)
        print(
            f"{engine}: {ms:.2f} ms a draw, {rate:.0f} ESS/s ({rates}), peak "
            f"{memory:.0f} MiB"
        )
    averages = [np.mean(m, axis=0) for m in means.values()]
    off = np.max(np.abs(averages[0] - averages[1]) / spread)
    print(f"means differ by at most {off:.3f} sd")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numpyro", help="an interpreter that has NumPyro")
    parser.add_argument("--num-data", type=int, default=200_000)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--trajectory-length", type=float, default=2.0)
    parser.add_argument("--control-variates", action="store_true")
    parser.add_argument("--engine", choices=("ours", "numpyro"), help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        measure(arguments.engine, arguments, arguments.seed)
    elif arguments.control_variates:
        control_variates(arguments.num_data)
    elif arguments.numpyro:
        compare(arguments)
    else:
        parser.error("give --numpyro PYTHON or --control-variates")


if __name__ == "__main__":
    main()
