"""Cost of HMC-ECS on a simulated logistic regression with d = 29.

    python benchmarks/hmcecs.py [--num-data 200000]
    python benchmarks/hmcecs.py --numpyro [--num-data 200000 1000000] [--seeds 4]
        [--draws 5000] [--threads 1] [--trajectory-lengths 0.01 1.2 2 2.4]

With 100 blocks, m = 1300, and expansions of second order.

The first prints, in processor time on one thread, what building the control variates
costs, with the rows of the linear predictors, relative to N per-datum gradients by
torch.func and one accumulation of the Hessian by a matrix product, measured in turns.

The second compares with NumPyro's HMCECS(NUTS), which must be installed in the same
environment. Both get the same data (float64 here, NumPyro's default float32 there),
start at the mode, and run in turns, each run in a process of its own that is bound to
``--threads`` cores. Theirs is compiled before it is timed, as one scan over all draws.
For ours there is a grid of trajectory lengths. The smaller of two ratios to theirs, ESS
a second of means and of squares, says which is the best by the first seed, and is then
looked at on the others. Printed are, for each, wall and processor time of a draw;
ArviZ's ESS, bulk and of the squares (``sd``), a draw and a second of the processor,
medians over the parameters; the largest errors of means and sds; peak memory: the
highest resident size while it was built, warmed up and run, less that with libraries
and data loaded; and the ratios to theirs, seed by seed, with an interval. Means and sds
are those of the posterior of all data by importance sampling from its Laplace
approximation.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

D, M, BLOCKS, PRIOR = 29, 1300, 100, 1.0
WARMUP = 500
# The first is so short that it is always one leapfrog step.
LENGTHS = (0.01, 0.9, 1.2, 1.6, 2.0, 2.4)

Array = Any


def simulate(n: int) -> tuple[Array, Array, Array, Array]:
    """Data x with an intercept, y; the posterior's mode by Newton's method, and W.

    W Wᵀ is the inverse of the Hessian at the mode.
    """
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, D))
    x[:, 0] = 1
    theta = 0.3 * rng.standard_normal(D)
    y = (rng.random(n) < 1 / (1 + np.exp(-x @ theta))).astype(float)
    for _ in range(8):
        p = 1 / (1 + np.exp(-x @ theta))
        hessian = x.T @ (x * (p * (1 - p))[:, None]) + PRIOR * np.eye(D)
        theta = theta + np.linalg.solve(hessian, x.T @ (y - p) - PRIOR * theta)
    return x, y, theta, np.linalg.inv(np.linalg.cholesky(hessian)).T


# ---- Building the control variates -------------------------------------------------


def control_variates(n: int) -> None:
    """Prints the relative cost of building them."""
    import torch

    import torch_sgmcmc as sg

    torch.set_num_threads(1)
    x, y, mode, _ = map(torch.tensor, simulate(n))
    theta = mode.clone().requires_grad_()

    closure = sg.PredictorLogLikelihood(
        lambda indices: x[indices] @ theta,
        lambda eta, indices: y[indices] * eta - torch.nn.functional.softplus(eta),
        rows=lambda indices: x[indices],
    )

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
    ratios, built = [], []
    for _ in range(5):
        times = []
        for run in (lambda: sampler.set_anchor(closure, progress=False), parts):
            start = time.process_time()
            run()
            times.append(time.process_time() - start)
        ratios.append(times[0] / times[1])
        built.append(times[0])
    print(
        f"n = {n}: control variates built in {statistics.median(built):.2f} s, "
        f"{statistics.median(ratios):.2f} times N gradients and a Hessian"
    )


# ---- One run, in a process of its own ----------------------------------------------


class Memory:
    """The highest resident size since it was made, less that at the time, in MiB."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # forget the highest so far
        self.start = self.read("VmRSS")

    def read(self, name: str) -> float:
        """One line of the process's status, in MiB."""
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) / 1024
        raise RuntimeError(f"This system does not tell {name}")

    def highest(self) -> float:
        """Beyond what there was."""
        return self.read("VmHWM") - self.start


class Clock:
    """Wall and processor time since it was made."""

    def __init__(self) -> None:
        self.wall, self.processor = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        """Seconds of both."""
        return time.perf_counter() - self.wall, time.process_time() - self.processor


Runs = list[tuple[str, Array, tuple[float, float]]]


def ours(data: tuple[Array, ...], arguments: argparse.Namespace) -> Any:
    """The draws and their time for each trajectory length; memory."""
    import torch

    import torch_sgmcmc as sg

    torch.set_num_threads(arguments.threads)
    x, y, mode, _ = map(torch.tensor, data)
    x *= (2 * y - 1)[:, None]  # p(y | x) = σ((2 y - 1) xᵀθ)
    memory, runs = Memory(), []
    for length in arguments.trajectory_lengths:
        theta = mode.clone().requires_grad_()
        rows = sg.RowCache(x)

        closure = sg.PredictorLogLikelihood(
            lambda i, rows=rows, theta=theta: rows(i)[0] @ theta,
            lambda eta, i: torch.nn.functional.logsigmoid(eta),
            rows=lambda i, rows=rows: rows(i)[0],
        )
        sampler = sg.HMCECS(
            [theta],
            num_data=len(x),
            subsample_size=M,
            step_size=0.5,
            trajectory_length=length,
            num_blocks=BLOCKS,
            prior_precision=PRIOR,
            seed=arguments.seed,
        )
        sampler.warmup(closure, WARMUP, progress=False)
        kept = torch.empty(arguments.draws, D, dtype=torch.float64)
        clock = Clock()
        for i in range(arguments.draws):
            sampler.step(closure)
            kept[i] = theta.detach()
        runs.append((f"ours, length {length}", kept.numpy(), clock.read()))
    return runs, memory.highest()


def theirs(data: tuple[Array, ...], arguments: argparse.Namespace) -> Any:
    """The same of NumPyro."""
    # Its threads are those of the cores that the process may use.
    import jax
    import numpyro
    import numpyro.distributions as dist
    from jax import numpy as jnp
    from numpyro.infer import HMCECS, NUTS, init_to_value

    x, y, mode = (jnp.asarray(a) for a in data[:3])
    jax.block_until_ready((x, y, mode))
    memory = Memory()

    def model() -> None:
        theta = numpyro.sample("theta", dist.Normal(jnp.zeros(D), 1).to_event(1))
        with numpyro.plate("data", len(x), subsample_size=M):
            rows = numpyro.subsample(x, event_dim=1)
            labels = numpyro.subsample(y, event_dim=0)
            numpyro.sample("y", dist.Bernoulli(logits=rows @ theta), obs=labels)

    values = {"theta": mode}
    kernel = HMCECS(
        NUTS(model, init_strategy=init_to_value(values=values)),
        num_blocks=BLOCKS,
        proxy=HMCECS.taylor_proxy(values, degree=2),
    )
    state = kernel.init(jax.random.PRNGKey(arguments.seed), WARMUP, None, (), {})

    def step(state: Any, _: None) -> tuple[Any, Any]:
        state = kernel.sample(state, (), {})
        return state, state.z["theta"]

    def run(length: int, state: Any) -> Any:
        return (
            jax.jit(lambda s: jax.lax.scan(step, s, None, length=length))
            .lower(state)
            .compile()
        )

    state, _ = jax.block_until_ready(run(WARMUP, state)(state))
    compiled = run(arguments.draws, state)
    clock = Clock()
    _, kept = jax.block_until_ready(compiled(state))
    return [("NumPyro", np.asarray(kept), clock.read())], memory.highest()


def measure(arguments: argparse.Namespace) -> None:
    """One engine, in this process; writes the draws and prints the rest as JSON."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    folder = Path(arguments.folder)
    data = tuple(np.load(folder / f"{name}.npy") for name in "xymw")
    run: Callable[..., Any] = ours if arguments.engine == "ours" else theirs
    runs, memory = run(data, arguments)
    np.save(folder / "draws.npy", np.stack([draws for _, draws, _ in runs]))
    print(json.dumps({"runs": [[r[0], r[2]] for r in runs], "memory": memory}))


# ---- The comparison ----------------------------------------------------------------


def moments(data: tuple[Array, ...], count: int = 2000) -> tuple[Array, Array, float]:
    """Means and sds of the posterior of all data; the importance sample's worth.

    Of w, the weights less 1, times z and z zᵀ: with N this large they are all small,
    and so are the errors. In pairs of opposite z.
    """
    import torch

    x, y, mode, w = map(torch.tensor, data)
    g = torch.Generator().manual_seed(1)
    z = torch.randn(D, count // 2, generator=g, dtype=torch.float64)
    z = torch.cat([z, -z], 1)
    theta = mode[:, None] + w @ z
    logs = 0.5 * (z**2).sum(0) - 0.5 * PRIOR * (theta**2).sum(0)
    for xs, ys in zip(x.split(4096), y.split(4096), strict=True):
        signed = xs * (2 * ys - 1)[:, None]
        logs += torch.nn.functional.logsigmoid(signed @ theta).sum(0)
    weights = (logs - logs.max()).exp()
    weights /= weights.mean()
    worth = float(1 / (weights**2).mean())
    mean = (z * (weights - 1)).mean(1)
    second = torch.eye(D, dtype=torch.float64) + (z * (weights - 1)) @ z.t() / count
    covariance = w @ (second - mean[:, None] * mean) @ w.t()
    return (mode + w @ mean).numpy(), covariance.diagonal().sqrt().numpy(), worth


class Results:
    """Results of several seeds of one sampler."""

    def __init__(self) -> None:
        self.draws: list[Array] = []
        self.rows: list[tuple[float, ...]] = []

    def add(self, draws: Array, times: tuple[float, float], memory: float) -> None:
        """A seed's."""
        import arviz

        bulk, sd = (
            statistics.median(float(arviz.ess(c, method=how)) for c in draws.T)
            for how in ("bulk", "sd")
        )
        count, (wall, processor) = len(draws), times
        self.draws.append(draws)
        self.rows.append(
            (
                1e3 * wall / count,
                1e3 * processor / count,
                bulk / count,
                sd / count,
                bulk / processor,
                sd / processor,
                memory,
            )
        )

    def median(self, column: int) -> float:
        """Over seeds, but for the first."""
        return statistics.median(row[column] for row in self.rows[1:])

    def line(self, name: str, mean: Array, sd: Array) -> str:
        """Its row of the table."""
        draws = np.concatenate(self.draws)
        wall, processor, bulk, squares, *rates, memory = map(self.median, range(7))
        seeds = (", ".join(f"{row[k]:.0f}" for row in self.rows[1:]) for k in (4, 5))
        off = np.max(np.abs(draws.mean(0) - mean) / sd)
        wide = np.max(np.abs(draws.std(0) / sd - 1))
        return (
            f"| {name} | {wall:.2f} | {processor:.2f} | {bulk:.2f} | {squares:.2f} | "
            f"{rates[0]:.0f} ({next(seeds)}) | {rates[1]:.0f} ({next(seeds)}) | "
            f"{off:.3f} | {100 * wide:.1f} % | {memory:.0f} |"
        )


def ratios(ours: Results, theirs: Results, column: int) -> str:
    """The geometric mean of the ratio over seeds, and its 95 % t interval."""
    rows = zip(ours.rows[1:], theirs.rows[1:], strict=True)
    logs = np.log([a[column] / b[column] for a, b in rows])
    if len(logs) == 1:
        return f"{np.exp(logs[0]):.2f}"
    half = stats.t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / len(logs) ** 0.5
    low, mean, high = np.exp(logs.mean() + half * np.array([-1, 0, 1]))
    return f"{mean:.2f} ({low:.2f} to {high:.2f})"


def compare(n: int, arguments: argparse.Namespace) -> None:
    """Prints a table for one size of data."""
    found: dict[str, Results] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = simulate(n)
        for name, array in zip("xymw", data, strict=True):
            np.save(Path(folder) / f"{name}.npy", array)
        mean, sd, worth = moments(data)
        for seed in range(arguments.seeds):
            for engine in ("ours", "numpyro"):
                command = [
                    sys.executable,
                    __file__,
                    "--engine",
                    engine,
                    "--folder",
                    folder,
                    "--seed",
                    str(seed),
                    "--draws",
                    str(arguments.draws),
                    "--threads",
                    str(arguments.threads),
                    "--trajectory-lengths",
                    *map(str, arguments.trajectory_lengths),
                ]
                output = subprocess.run(
                    command, check=True, stdout=subprocess.PIPE, text=True
                ).stdout
                result = json.loads(output.splitlines()[-1])
                kept = np.load(Path(folder) / "draws.npy")
                for (name, times), draws in zip(result["runs"], kept, strict=True):
                    results = found.setdefault(name, Results())
                    results.add(draws, times, result["memory"])
    print(
        f"\nn = {n}, {arguments.threads} thread(s), {arguments.draws} draws, "
        f"{arguments.seeds - 1} seeds and one before; importance sample worth "
        f"{100 * worth:.0f} % of its draws\n\n"
        "| | ms a draw | of the processor | ESS a draw | of squares | ESS/s (seeds) | "
        "of squares | mean off by sd | sd off by | MiB |\n"
        "|---|---|---|---|---|---|---|---|---|---|"
    )
    for name, results in found.items():
        print(results.line(name, mean, sd))
    base = found.pop("NumPyro")
    print("\n| ESS/s over NumPyro's | of means | of squares |\n|---|---|---|")
    for name, results in found.items():
        print(f"| {name} | {ratios(results, base, 4)} | {ratios(results, base, 5)} |")
    first = base.rows[0]
    best = max(found, key=lambda n: min(found[n].rows[0][k] / first[k] for k in (4, 5)))
    means, squares, memory = (found[best].median(k) / base.median(k) for k in (4, 5, 6))
    print(
        f"\n{best} is best by the first seed: {min(means, squares):.2f} times "
        f"NumPyro's ESS/s ({means:.2f} of means, {squares:.2f} of squares); "
        f"{memory:.3f} of its memory",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numpyro", action="store_true", help="compare with NumPyro")
    parser.add_argument("--num-data", type=int, nargs="+", default=[200_000])
    parser.add_argument("--draws", type=int, default=5000)
    parser.add_argument("--seeds", type=int, default=4, help=">= 2; one chooses")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--trajectory-lengths", type=float, nargs="+", default=LENGTHS, help="of ours"
    )
    for hidden in ("--engine", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        measure(arguments)
        return
    if arguments.numpyro:
        try:
            import numpyro  # noqa: F401
        except ImportError:
            parser.error(
                "--numpyro needs NumPyro in this environment: pip install numpyro"
            )
        if arguments.seeds < 2:
            parser.error(f"Invalid seeds: {arguments.seeds} (must be >= 2)")
    for n in arguments.num_data:
        if arguments.numpyro:
            compare(n, arguments)
        else:
            control_variates(n)


if __name__ == "__main__":
    main()
