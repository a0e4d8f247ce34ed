"""Subsampling methods side by side, on three regressions with about 10⁵ rows.

    python benchmarks/subsampling.py --data-root DATA
    python benchmarks/subsampling.py --csv FILE --family poisson  # y is the last column

A logistic regression on Covertype, and a logistic and a Poisson regression on simulated
rows with heavy tails. Four chains of each method start at the mode and evaluate as many
gradients of single rows (--budget, in gradients of all rows). The first fifth is
burn-in. The posterior is by HMC with all data in the Laplace approximation's
coordinates. Printed are, for each method and size of minibatches:

* ESS: effective sample size in one gradient of all rows, of the median and of the worst
  coordinate;
* errors of means (root mean square, in posterior standard deviations) and of standard
  deviations (mean), with the jackknife's standard error over chains.

Results are appended to --out as JSON lines, and results that are there are not
repeated. docs/fidelity.md has the tables.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arviz_stats.base import array_stats
from tables import read
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

import torch_sgmcmc as sg

CHAINS = 4
BURN_IN, DRAWS = 0.2, 2000  # draws of each chain, at most
HEAT = 0.05  # of T, by minibatches: noise_lr of check_setup
STABLE = 0.25  # of the largest stable lr
MOMENTUM = 0.9
BURN_IN_EXACT, EXACT_DRAWS = 20, 500  # of each of eight chains


# ---- Problems ------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Problem:
    """A generalised linear model with the prior N(0, 1), whose first column is 1."""

    name: str
    x: Tensor  # [rows, d]
    y: Tensor
    family: str = "logistic"

    def losses(self, eta: Tensor, y: Tensor) -> Tensor:
        """Returns the negative log-likelihood of each linear predictor."""
        normalizer = eta.exp() if self.family == "poisson" else F.softplus(eta)
        return normalizer - y * eta

    def each(self, theta: Tensor, rows: Tensor) -> Tensor:
        """Returns losses [chains, n] of each chain's rows [chains, n]."""
        eta = (self.x[rows] @ theta[:, :, None])[:, :, 0]
        return self.losses(eta, self.y[rows])

    def means(self, theta: Tensor) -> Tensor:
        """Returns each chain's mean loss of all rows."""
        x, y = self.x.to(theta.dtype), self.y.to(theta.dtype)
        return self.losses(theta @ x.T, y).mean(1)

    def slopes(self, theta: Tensor) -> Tensor:
        """Returns the derivatives of losses by linear predictors, [chains, rows]."""
        eta = theta @ self.x.T.to(theta.dtype)
        return (eta.exp() if self.family == "poisson" else eta.sigmoid()) - self.y

    @cached_property
    def laplace(self) -> tuple[Tensor, Tensor]:
        """The mode and the Hessian of U there, by Newton's method."""
        x, theta = self.x.double(), torch.zeros(self.x.shape[1], dtype=torch.float64)
        for _ in range(50):
            slope = self.slopes(theta[None])[0]
            mean = slope + self.y
            weight = mean if self.family == "poisson" else mean * (1 - mean)
            hessian = (x * weight[:, None]).T @ x + torch.eye(len(theta)).double()
            step = torch.linalg.solve(hessian, x.T @ slope + theta)
            theta = theta - step * min(1.0, 1 / float(step.abs().max()))
        return theta, hessian

    @cached_property
    def draws(self) -> Tensor:
        """Draws from the Laplace approximation, [16, d]."""
        mode, hessian = self.laplace
        scale = torch.linalg.cholesky(torch.linalg.inv(hessian))
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(16, len(mode), generator=generator, dtype=torch.float64)
        return mode + noise @ scale.T

    def gradient_variance(self, controlled: bool) -> float:
        """Returns the variance of one row's gradient, a mean over coordinates."""
        slope = self.slopes(self.draws)
        if controlled:
            slope = slope - self.slopes(self.laplace[0][None])
        x = self.x.double()
        second, first = slope.square() @ x.square(), slope @ x
        count = len(self.y)
        return float((second / count - (first / count).square()).mean())

    def exact(self) -> tuple[Tensor, Tensor, float]:
        """Returns means and sds of the posterior, and the worst R-hat."""
        mode, hessian = self.laplace
        scale = torch.linalg.cholesky(torch.linalg.inv(hessian))
        z = torch.zeros(8, len(mode), dtype=torch.float64, requires_grad=True)
        count, kept = len(self.y), []
        settings = {"num_data": count, "num_chains": len(z), "seed": 0}
        sampler = sg.HMC([z], step_size=0.3, num_steps=5, **settings)

        def closure() -> Tensor:
            theta = mode + z @ scale.T
            prior = theta.square().sum(1) / (2 * count)
            losses = self.means(theta) + prior
            losses.sum().backward()
            return losses.detach()

        for _ in tqdm(range(BURN_IN_EXACT + EXACT_DRAWS), f"{self.name}, exact"):
            sampler.step(closure)
            kept.append((mode + z.detach() @ scale.T).clone())
        draws = torch.stack(kept[BURN_IN_EXACT:], 1)
        axes: dict[str, Any] = {"chain_axis": 0, "draw_axis": 1}
        r_hat = array_stats.rhat(draws.numpy(), **axes)
        return draws.mean((0, 1)), draws.flatten(0, 1).std(0), float(r_hat.max())


def covertype(root: Path) -> Problem:
    """Class 2 against the rest: numeric columns, and indicators of 5 % of the rows."""
    path = root / "covertype" / "covtype_subset.data.gz"
    rows = np.loadtxt(path, delimiter=",", dtype=np.float32)
    # Hillshade at 3 pm is nearly a function of those at 9 am and noon, and the four
    # areas add up to 1.
    kept = (rows[:, :54] != 0).mean(0) >= 0.05
    kept[8] = kept[13] = False
    return of_columns("covertype", rows[:, :54][:, kept], rows[:, 54] == 2)


def of_columns(
    name: str, x: np.ndarray, y: np.ndarray, family: str = "logistic"
) -> Problem:
    """Returns a problem of standardised columns with an intercept."""
    scaled = torch.from_numpy(((x - x.mean(0)) / x.std(0)).astype(np.float32))
    target = torch.from_numpy(y.astype(np.float32))
    return Problem(name, F.pad(scaled, (1, 0), value=1.0), target, family)


def simulated(root: Path, family: str) -> Problem:
    """Rows of Student's t with 4 degrees of freedom, correlated by 0.5."""
    generator, (count, d) = np.random.default_rng(0), (100_000, 20)
    x = generator.standard_normal((count, d)) + generator.standard_normal((count, 1))
    x = x / np.sqrt(generator.chisquare(4, (count, 1)) / 2)
    size = 0.1 if family == "logistic" else 0.03
    eta = -1 + x @ (size * generator.standard_normal(d))
    if family == "poisson":
        y = generator.poisson(np.exp(np.minimum(eta, 5)))
    else:
        y = generator.random(count) < 1 / (1 + np.exp(-eta))
    return of_columns(f"simulated {family}", x, y, family)


PROBLEMS = {
    "covertype": covertype,
    "logistic": partial(simulated, family="logistic"),
    "poisson": partial(simulated, family="poisson"),
}


# ---- Methods -------------------------------------------------------------------------


@dataclass
class Run:
    """Chains of a method from the mode, with a budget of gradients of single rows."""

    problem: Problem
    size: int  # of a minibatch
    budget: float
    seed: int = 1

    def __post_init__(self) -> None:
        mode = self.problem.laplace[0].float()
        self.theta = mode.expand(CHAINS, -1).clone().requires_grad_()
        count = len(self.problem.y)
        self.common = {"num_data": count, "prior_precision": 1.0, "seed": self.seed}
        self.total, self.kept = self.budget * count, []

    def minibatches(self, size: int, chains: int = CHAINS) -> Callable[[], Tensor]:
        """Returns a function that draws rows for each chain."""
        count = self.common["num_data"]
        sampler = sg.IndependentBatchSampler(count, size, seed=self.seed)
        return lambda: sampler.draw(chains)

    def lr(self, momentum: float, size: int, controlled: bool) -> float:
        """Returns the lr that keeps both limits of ``check_setup``."""
        count, (_, hessian) = len(self.problem.y), self.problem.laplace
        variance = self.problem.gradient_variance(controlled) / size
        noise = HEAT * 2 * (1 - momentum) / (count * variance * (1 - size / count))
        curvature = float(torch.linalg.eigvalsh(hessian)[-1]) / count
        return min(noise, STABLE * 2 * (1 + momentum) / curvature)

    def look(self, spent: float) -> None:
        """Keeps a draw when its time has come."""
        share = (spent / self.total - BURN_IN) / (1 - BURN_IN)
        if share * DRAWS >= len(self.kept) + 1 - 1e-6:
            self.keep()

    def keep(self) -> None:
        """Keeps a draw."""
        self.kept.append(self.theta.detach().clone())

    def finished(self) -> Tensor:
        """Returns draws [chains, draws, d]."""
        return torch.stack(self.kept, 1)


def gradients(
    kind: Any, run: Run, *, controlled: bool = False, evaluations: int = 1
) -> Tensor:
    """Runs a sampler that takes gradients of minibatches."""
    momentum = 0.0 if kind is sg.SGLD else MOMENTUM
    problem, size = run.problem, run.size // evaluations
    given: dict[str, Any] = {} if kind is sg.SGLD else {"momentum": momentum}
    if kind is sg.EWSG:
        given["num_chains"] = CHAINS
    given["lr"] = run.lr(momentum, size, controlled)
    sampler = kind([run.theta], **given, **run.common)
    draw, spent = run.minibatches(size), 0

    def loss(rows: Tensor) -> Tensor:
        return problem.each(run.theta, rows).mean(1).sum()

    def closure() -> Tensor:
        sampler.zero_grad()
        found = loss(draw())
        found.backward()
        return found

    if controlled:
        estimator = sg.ControlVariates(sampler, loss, progress=False)
        estimator.set_anchor([torch.arange(len(problem.y)).expand(CHAINS, -1)])
        spent = len(problem.y)
    with tqdm(total=run.total, desc=kind.__name__, leave=False) as progress:
        while spent < run.total:
            if evaluations > 1:
                sampler.step(closure)
            elif controlled:
                sampler.zero_grad()
                estimator.backward(draw())
                sampler.step()
            else:
                closure()
                sampler.step()
            spent += (2 if controlled else evaluations) * size
            progress.update(spent - progress.n)
            run.look(spent)
    return run.finished()


def one_by_one(make: Callable[[Run, int], Tensor], run: Run) -> Tensor:
    """Runs chains one after the other; they may have different numbers of draws."""
    found = []
    for chain in range(CHAINS):
        own = Run(run.problem, run.size, run.budget, sg.fold_in(run.seed, chain))
        own.theta = own.theta.detach()[:1].clone().requires_grad_()
        found.append(make(own, chain))
    shortest = min(draws.shape[1] for draws in found)
    return torch.cat([draws[:, :shortest] for draws in found])


def hmcecs(run: Run, chain: int) -> Tensor:
    """Runs a chain of perturbed HMC-ECS with its anchor at the mode."""
    theta = run.problem.laplace[0].clone().requires_grad_()
    rows = sg.RowCache(run.problem.x.double(), run.problem.y.double())
    closure = sg.PredictorLogLikelihood(
        lambda indices: rows(indices)[0] @ theta,
        lambda eta, indices: -run.problem.losses(eta, rows(indices)[1]),
        rows=lambda indices: rows(indices)[0],
    )
    given = {"subsample_size": run.size, "step_size": 0.3}
    sampler = sg.HMCECS([theta], **given, **run.common)
    sampler.set_anchor(closure, progress=False)
    with tqdm(total=run.total, desc=f"HMC-ECS {chain}", leave=False) as progress:
        while sampler.num_evaluations < run.total:
            sampler.step(closure)
            run.theta = theta[None]
            progress.update(sampler.num_evaluations - progress.n)
            run.look(sampler.num_evaluations)
    return run.finished()


def sbps(run: Run, chain: int, *, preconditioned: bool = False) -> Tensor:
    """Runs a chain of SBPS; samples are at equal times of the path."""
    draw = run.minibatches(run.size, 1)
    sampler = sg.SBPS([run.theta], preconditioned=preconditioned, **run.common)
    sampled = False
    with tqdm(total=run.total, desc=f"SBPS {chain}", leave=False) as progress:
        while (spent := sum(sampler.evaluations)) < run.total:
            if spent >= BURN_IN * run.total and not sampled:
                sampled, (group,) = True, sampler.param_groups
                part = DRAWS * BURN_IN / (1 - BURN_IN)
                group["sample_interval"] = group["trajectory_time"] / part
                group["adapt"] = False
                sampler.register_sample_hook(lambda *_: run.keep())
            sampler.step(lambda: run.problem.each(run.theta, draw())[0])
            progress.update(spent - progress.n)
    return run.finished()


METHODS: dict[str, Callable[[Run], Tensor]] = {
    "SGLD": partial(gradients, sg.SGLD),
    "SGHMC": partial(gradients, sg.SGHMC),
    "BAOA": partial(gradients, sg.BAOA),
    "SGNHT": partial(gradients, sg.SGNHT),
    "EWSG": partial(gradients, sg.EWSG, evaluations=2),
    "SGLD, control variates": partial(gradients, sg.SGLD, controlled=True),
    "SGHMC, control variates": partial(gradients, sg.SGHMC, controlled=True),
    "SBPS": partial(one_by_one, sbps),
    "pSBPS": partial(one_by_one, partial(sbps, preconditioned=True)),
    "HMC-ECS, perturbed": partial(one_by_one, hmcecs),
}


# ---- Tables --------------------------------------------------------------------------


def scores(draws: Tensor, mean: Tensor, sd: Tensor, budget: float) -> dict[str, Any]:
    """Returns errors of moments with jackknife standard errors, and ESS."""
    draws, chains = draws.double(), len(draws)

    def moments(which: list[int]) -> tuple[float, float]:
        some = draws[which].flatten(0, 1)
        off = ((some.mean(0) - mean) / sd).square().mean().sqrt()
        return float(off), float((some.std(0) / sd - 1).mean())

    off, scale = moments([*range(chains)])
    without = [moments([i for i in range(chains) if i != j]) for j in range(chains)]
    errors = np.sqrt((chains - 1) * np.var(without, 0))
    axes: dict[str, Any] = {"chain_axis": 0, "draw_axis": 1}
    size = array_stats.ess(draws.numpy(), **axes) / (chains * budget)
    return {
        "means": [off, errors[0]],
        "sds": [scale, errors[1]],
        "ess": [float(np.median(size)), float(size.min())],
        "draws": draws.shape[1],
    }


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Prints the rows of a problem."""
    print(f"\n{title}\n")
    print("| method | n | ESS, median | ESS, worst | means (sd) | sds, % | s |")
    print("|" + " --- |" * 7)
    for row in rows:
        if "error" in row:
            print(f"| {row['method']} | {row['size']:,} | {row['error']} |")
            continue
        (off, off_error), (sd, sd_error) = row["means"], row["sds"]
        line = f"| {row['method']} | {row['size']:,} | {row['ess'][0]:.2g} | "
        line += f"{row['ess'][1]:.2g} | {off:.2f} ± {off_error:.2f} | "
        line += f"{100 * sd:+.1f} ± {100 * sd_error:.1f} | {row['seconds']:.0f} |"
        print(line.replace("-", "−"))


def main() -> None:
    """Runs what is missing, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=[*PROBLEMS])
    parser.add_argument("--csv", type=Path, help="a table of your own")
    parser.add_argument("--family", choices=("logistic", "poisson"), default="logistic")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--sizes", nargs="+", type=int, default=[100, 1000])
    parser.add_argument("--budget", type=float, default=30, help="gradients a chain")
    parser.add_argument("--out", type=Path, default=Path("runs/subsampling.jsonl"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.touch()
    done = [json.loads(line) for line in arguments.out.read_text().splitlines()]

    def kept(key: dict[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        for row in done:
            if key.items() <= row.items():
                return row
        began = time.process_time()
        row = {**key, **make()}
        row["seconds"] = time.process_time() - began
        with arguments.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        return row

    makers = {name: partial(PROBLEMS[name], arguments.data_root) for name in PROBLEMS}
    chosen = [makers[name] for name in arguments.problems]
    if arguments.csv:
        table = read(arguments.csv)
        columns = arguments.csv.stem, table[:, :-1], table[:, -1], arguments.family
        chosen = [partial(of_columns, *columns)]
    for maker in chosen:
        problem = maker()

        def exact(problem: Problem = problem) -> dict[str, Any]:
            mean, sd, r_hat = problem.exact()
            return {"mean": mean.tolist(), "sd": sd.tolist(), "R-hat": r_hat}

        truth = kept({"problem": problem.name, "exact": True}, exact)
        moments = [torch.tensor(truth[k], dtype=torch.float64) for k in ("mean", "sd")]
        rows = []
        for name in arguments.methods:
            for size in arguments.sizes:
                key = {"problem": problem.name, "method": name, "size": size}
                key["budget"] = arguments.budget

                def make(
                    problem: Problem = problem,
                    moments: list[Tensor] = moments,
                    name: str = name,
                    size: int = size,
                ) -> dict[str, Any]:
                    try:
                        found = METHODS[name](Run(problem, size, arguments.budget))
                    except (RuntimeError, ValueError) as error:
                        return {"error": str(error).splitlines()[0]}
                    return scores(found, *moments, arguments.budget)

                rows.append(kept(key, make))
        count, d = problem.x.shape
        title = f"{problem.name}: N = {count:,}, d = {d}, R-hat {truth['R-hat']:.3f}"
        show(title, rows)


if __name__ == "__main__":
    main()
