"""Bayesian networks on small tables: samplers at equal numbers of gradients.

    python benchmarks/tables.py --data-root DATA                # airfoil, five runs
    python benchmarks/tables.py --data-root DATA --tables energy concrete yacht
    python benchmarks/tables.py --csv FILE                      # the last column is y
    python benchmarks/tables.py --data-root DATA --validate     # settings

Ten networks with a mean and a scale for each row are trained by Adam. From there each
sampler runs ten chains, with all rows in each gradient or (--batch) a minibatch of its
own for each chain, and so more steps. The first half of a chain is burn-in; 100 draws
of the second half of each chain predict together. Printed are, as means over runs with
standard errors:

* RMSE, and the NLL of two predictive densities: a Gaussian with the mean and the
  variance of the draws' mixture, and the mixture itself. The target is standardised,
  except for energy, concrete and yacht;
* gradients of a chain, and processor seconds of all chains with their draws;
* T_conf, which is 1 in equilibrium, and R-hat of the means predicted by the chains
  (median and 90 % quantile over the scored rows), which is 1 if they agree.

"start" is what the ten networks predict before sampling. With --validate a fifth of the
training rows is scored in place of the test rows. docs/tables.md has the tables.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arviz_stats.base import array_stats
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.func import stack_module_state
from torch.nn import functional as F
from tqdm import tqdm

import torch_sgmcmc as sg

CHAINS = 10
DRAWS = 100  # of each chain
BURN_IN = 0.5
# Rows of a gradient, times steps, by default: about a quarter of an hour at most.
WORK, MOST_STEPS = 4e8, 100_000
BATCH = 64  # of Adam
BLOCK = 2048  # rows of which the activations of all chains fit into a cache
Params = dict[str, Tensor]


# ---- Tables --------------------------------------------------------------------------


def read(path: Path) -> np.ndarray:
    """Returns the rows of a table of numbers, with or without a header."""
    lines = path.read_text("utf-8-sig").splitlines()
    delimiter = next((mark for mark in ",;\t" if mark in lines[0]), None)
    try:
        [float(cell) for cell in lines[0].split(delimiter)]
    except ValueError:
        del lines[0]
    rows = np.loadtxt(lines, delimiter=delimiter, ndmin=2)
    if rows.shape[1] < 2 or not np.isfinite(rows).all():
        raise ValueError(
            f"Invalid table: {path} (must have two columns or more, all finite)"
        )
    return rows


@dataclass(frozen=True)
class Table:
    """Rows with the target last, hidden layers, and the rows of each training set."""

    rows: np.ndarray
    hidden: tuple[int, ...]
    splits: list[tuple[np.ndarray, np.ndarray]]
    original: bool = False  # whether scores have the target's units
    published: tuple[str, ...] = ()


def airfoil(root: Path) -> Table:
    """One split, and five runs of it."""
    rows = read(root / "uci" / "airfoil.csv")
    split = train_test_split(np.arange(len(rows)), test_size=0.2, random_state=0)
    published = (
        "bde: ten chains of MCLMC | 5 | 0.1215 | −0.913 | | 120,000 | 2,400",
        "TabPFN v2 | 5 | 0.1359 | −0.934",
        "XGBoost | 5 | 0.203 | −0.17",
        "CatBoost | 5 | 0.239 | 0.148",
        "deep ensemble of ten | 5 | 0.365 | 0.176",
    )
    return Table(rows, (16, 16, 16, 16), [tuple(split)] * 5, published=published)


def literature(root: Path, name: str, published: str) -> Table:
    """The twenty splits of Hernández-Lobato and Adams (2015)."""
    rows, splits = read(root / "uci" / name / "data.txt"), []
    generator = np.random.RandomState(1)
    for _ in range(20):
        order = generator.choice(range(len(rows)), len(rows), replace=False)
        splits.append(tuple(np.split(order, [round(0.9 * len(rows))])))
    dropout = f"MC dropout, 40 times as long (split 0) | 1 | {published}"
    return Table(rows, (50,), splits, original=True, published=(dropout,))


def table_of(path: Path) -> Table:
    """A fifth of the rows are the test rows."""
    rows = read(path)
    split = train_test_split(np.arange(len(rows)), test_size=0.2, random_state=0)
    return Table(rows, (16, 16, 16, 16), [tuple(split)])


TABLES = {
    "airfoil": airfoil,
    "energy": partial(literature, name="energy", published="0.44 | 1.17"),
    "concrete": partial(literature, name="concrete", published="5.44 | 3.05"),
    "yacht": partial(literature, name="yacht", published="0.89 | 1.31"),
}


# ---- Networks ------------------------------------------------------------------------


def network(inputs: int, hidden: tuple[int, ...]) -> nn.Sequential:
    """ReLU units, and a mean and a scale as outputs."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise((inputs, *hidden, 2)):
        layer = nn.Linear(fan_in, fan_out)
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def outputs(params: Params, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns means and scales [chains, rows] of all chains' networks.

    Features come first: x is [inputs, rows], or [chains, inputs, rows].
    """
    tensors = [*params.values()]
    h = x.expand(len(tensors[0]), *x.shape[-2:])
    for weight, bias in zip(tensors[::2], tensors[1::2], strict=True):
        if weight is not tensors[0]:
            h = h.relu()
        h = torch.baddbmm(bias[:, :, None], weight, h)
    return h[:, 0], F.softplus(h[:, 1]) + 1e-6


def log_densities(mean: Tensor, scale: Tensor, y: Tensor) -> Tensor:
    """Returns log N(y; mean, scale²)."""
    return -0.5 * ((y - mean) / scale) ** 2 - scale.log() - 0.5 * math.log(2 * math.pi)


def sums(params: Params, x: Tensor, y: Tensor) -> Tensor:
    """Returns each chain's sum of the losses of rows."""
    return -log_densities(*outputs(params, x), y).sum(1)


compiled_sums = torch.compile(sums, dynamic=False)


@dataclass(frozen=True)
class Data:
    """Standardised training rows and rows to be scored, features first."""

    x: Tensor
    y: Tensor
    scored_x: Tensor
    scored_y: Tensor
    unit: float  # of scores, in the standardised target's

    def losses(self, params: Params, rows: Tensor | None = None) -> Tensor:
        """Returns the chains' mean losses, and adds their gradients to ``p.grad``."""
        if rows is not None:  # [chains, rows]
            blocks = [(self.x[:, rows].transpose(0, 1), self.y[rows])]
        else:
            parts = -(-len(self.y) // BLOCK)
            blocks = [*zip(self.x.chunk(parts, 1), self.y.chunk(parts), strict=True)]
        count, found = sum(y.shape[-1] for _, y in blocks), []
        for x, y in blocks:
            found.append(compiled_sums(params, x, y) / count)
            found[-1].sum().backward()
        return torch.stack(found).sum(0).detach()


def data_of(table: Table, split: int, rows: int | None, validate: bool) -> Data:
    """Returns a split's data."""
    train, test = table.splits[split]
    if validate:
        train, test = train_test_split(train, test_size=0.2, random_state=1)
    train = train[:rows]
    mean, sd = table.rows[train].mean(0), table.rows[train].std(0)
    unit = float(sd[-1]) if table.original else 1.0
    sd[sd == 0] = 1
    scaled = torch.from_numpy(((table.rows - mean) / sd).astype(np.float32))
    pairs = ((scaled[i, :-1].T.contiguous(), scaled[i, -1]) for i in (train, test))
    return Data(*(part for pair in pairs for part in pair), unit=unit)


def warm_start(table: Table, data: Data, seed: int, epochs: int) -> Params:
    """Returns networks that Adam has trained on minibatches of their own."""
    torch.manual_seed(seed)
    base = [network(len(data.x), table.hidden) for _ in range(CHAINS)]
    params, _ = stack_module_state(base)
    count = len(data.y)
    steps = -(-epochs * count // BATCH)
    # The prior N(0, 1), as a part of a mean loss.
    adam = torch.optim.Adam(params.values(), lr=3e-3, weight_decay=1 / count)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    for _ in tqdm(range(steps), "Adam", leave=False):
        adam.zero_grad()
        data.losses(params, torch.randint(count, (CHAINS, BATCH)))
        adam.step()
        schedule.step()
    return params


# ---- Samplers ------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A sampler with its settings."""

    make: Callable[..., Any]
    by_layer: bool = False  # priors of prior_groups, in place of N(0, 1)
    tune: float = 0.0  # part of the gradients that MCLMC or HMC adapts itself in
    eps: float = 0.0  # of pSGLD, whose burn-in learns a preconditioner; 0: none
    lr: float | None = None  # in place of its own

    def sampler(self, table: Table, data: Data, params: Params, **given: Any) -> Any:
        """Returns a sampler of all chains."""
        groups: Any = params.items()
        prior = 1.0
        if self.by_layer:
            base = network(len(data.x), table.hidden)
            groups, prior = sg.prior_groups(base, params=params.items()), 0.0
        numbers: dict[str, Any] = {"num_data": len(data.y), "num_chains": CHAINS}
        if self.lr is not None:
            numbers["lr"] = self.lr
        return self.make(groups, prior_precision=prior, **numbers, **given)


LEAPS = 200  # of a trajectory
LEARNING = 0.1  # part of the gradients in which pSGLD learns a preconditioner
mclmc = partial(sg.MCLMC, lr=4e-4, momentum=0.999)
tuned = partial(mclmc, energy_variance=0.3)
SAMPLERS = {
    "MCLMC, tuned, priors by layer": Setting(tuned, tune=0.4, by_layer=True),
    "MCLMC, priors by layer": Setting(mclmc, by_layer=True),
    "MCLMC": Setting(mclmc),
    "BAOA": Setting(partial(sg.BAOA, lr=1e-4, momentum=0.99)),
    "SGHMC": Setting(partial(sg.SGHMC, lr=1e-4, momentum=0.99)),
    "HMC": Setting(partial(sg.HMC, step_size=1e-3, num_steps=LEAPS), tune=0.2),
    "MCLMC, preconditioned": Setting(mclmc, eps=0.1),
    "BAOA, preconditioned": Setting(partial(sg.BAOA, lr=3e-4, momentum=0.99), eps=0.02),
    "SGHMC, preconditioned": Setting(
        partial(sg.SGHMC, lr=3e-4, momentum=0.99), eps=0.1
    ),
}


class Chains:
    """Ten chains of a sampler, and what their draws predict."""

    def __init__(
        self, setting: Setting, table: Table, data: Data, start: Params, batch: int
    ) -> None:
        self.setting, self.table, self.data, self.batch = setting, table, data, batch
        self.params = {
            name: p.detach().clone().requires_grad_() for name, p in start.items()
        }
        self.gradients = 0.0  # of all rows
        self.means: list[Tensor] = []
        self.scales: list[Tensor] = []
        self.temperatures: list[Tensor] = []

    def run(self, steps: int, seed: int, name: str) -> None:
        """Computes as many gradients as steps, and keeps draws of the second half."""
        given: dict[str, Any] = {"seed": seed}
        tuned, is_hmc = round(self.setting.tune * steps), name == "HMC"
        if tuned and not is_hmc:
            given["tune_steps"] = tuned
        self.batches = sg.IndependentBatchSampler(
            len(self.data.y), self.batch or 1, seed=seed
        )
        self.progress = tqdm(total=steps, desc=name, leave=False)
        if self.setting.eps:
            learn = partial(sg.PSGLD, lr=1e-5, decay=0.999, eps=self.setting.eps)
            self.begin(
                replace(self.setting, make=learn, lr=None), gamma=False, seed=seed
            )
            while self.gradients < LEARNING * steps:
                self.sampler.step(self.closure)
            given["preconditioner"] = self.sampler
        self.begin(self.setting, **given)
        if is_hmc:
            self.sampler.warmup(self.closure, tuned // (LEAPS + 1), progress=False)
        burn_in, kept = BURN_IN * steps, 0
        while self.gradients < steps:
            self.sampler.step(self.closure)
            if self.gradients >= burn_in + (kept + 1) * (steps - burn_in) / DRAWS:
                self.keep()
                kept += 1
        self.progress.close()

    def begin(self, setting: Setting, **given: Any) -> None:
        """Makes a sampler."""
        self.sampler = setting.sampler(self.table, self.data, self.params, **given)

    def closure(self) -> Tensor:
        """Computes the losses of all rows or of minibatches, with their gradients."""
        self.sampler.zero_grad()
        rows = self.batches.draw(CHAINS) if self.batch else None
        part = self.batch / len(self.data.y) if self.batch else 1
        self.gradients += part
        self.progress.update(part)
        return self.data.losses(self.params, rows)

    def keep(self) -> None:
        """Keeps what the networks predict, and their configurational temperature."""
        with torch.no_grad():
            mean, scale = outputs(self.params, self.data.scored_x)
        self.means.append(mean)
        self.scales.append(scale)
        self.sampler.zero_grad()
        self.data.losses(self.params)
        count, size, total = len(self.data.y), 0, torch.zeros(CHAINS)
        for group in self.sampler.param_groups:
            for p in group["params"]:
                theta = p.detach()
                slope = count * p.grad + group["prior_precision"] * theta
                total += (theta * slope).flatten(1).sum(1)
                size += theta[0].numel()
        self.temperatures.append(total / size)

    def scores(self) -> dict[str, Any]:
        """Returns the scores of all draws, T_conf and R-hat."""
        means, scales = torch.stack(self.means), torch.stack(self.scales)
        temperature = torch.stack(self.temperatures).mean()
        some = means[:, :, :500].transpose(0, 1).double().numpy()
        r_hat = array_stats.rhat(some, chain_axis=0, draw_axis=1)
        group = self.sampler.param_groups[0]
        names = ("lr", "momentum", "step_size")
        settings = {name: float(group[name]) for name in names if name in group}
        if hasattr(self.sampler, "energy_error"):
            settings["energy_error"] = self.sampler.energy_error
        return scores_of(self.data, means.flatten(0, 1), scales.flatten(0, 1)) | {
            "settings": settings,
            "gradients": self.gradients,
            "T_conf": float(temperature),
            "R-hat": float(np.median(r_hat)),
            "R-hat, 90 %": float(np.quantile(r_hat, 0.9)),
        }


def scores_of(data: Data, means: Tensor, scales: Tensor) -> dict[str, float]:
    """Returns RMSE and NLLs of a mixture of Gaussians [draws, rows]."""
    y, mean = data.scored_y, means.mean(0)
    sd = (scales.square().mean(0) + means.var(0, correction=0)).sqrt()
    mixture = log_densities(means, scales, y).logsumexp(0) - math.log(len(means))
    shift = math.log(data.unit)
    return {
        "RMSE": float((y - mean).square().mean().sqrt()) * data.unit,
        "NLL": float(-log_densities(mean, sd, y).mean()) + shift,
        "mixture": float(-mixture.mean()) + shift,
    }


def results(
    table: Table, data: Data, seed: int, arguments: argparse.Namespace
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name and the scores of the start and of each sampler."""
    started = time.process_time()
    start = warm_start(table, data, seed, arguments.epochs)
    with torch.no_grad():
        found = scores_of(data, *outputs(start, data.scored_x))
    yield "start", found | {"seconds": time.process_time() - started}
    count = len(data.y)
    steps = arguments.steps or min(MOST_STEPS, round(WORK / count))
    for name in arguments.samplers:
        started = time.process_time()
        setting = SAMPLERS[name]
        by_layer = setting.by_layer or arguments.by_layer
        setting = replace(setting, by_layer=by_layer, lr=arguments.lr)
        chains = Chains(setting, table, data, start, arguments.batch)
        try:
            chains.run(steps, seed, name)
        except RuntimeError as error:  # a gradient that is not finite
            tqdm.write(f"{name} has diverged: {error}")
            yield name, dict.fromkeys(("RMSE", "NLL", "mixture"), math.nan)
            continue
        yield name, chains.scores() | {"seconds": time.process_time() - started}


# ---- Output --------------------------------------------------------------------------

COLUMNS = {
    "RMSE": ".4f",
    "NLL": ".3f",
    "mixture": ".3f",
    "gradients": ",.0f",
    "seconds": ",.0f",
    "T_conf": ".2f",
    "R-hat": ".2f",
    "R-hat, 90 %": ".2f",
}


def show(title: str, rows: list[dict[str, Any]], published: tuple[str, ...]) -> None:
    """Prints means over runs with standard errors, and published rows."""
    print(f"\n{title}\n\n| method | runs | {' | '.join(COLUMNS)} |")
    print("|" + " --- |" * (2 + len(COLUMNS)))
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == method]
        cells = [method, str(len(mine))]
        for name, form in COLUMNS.items():
            values = [row[name] for row in mine if name in row]
            cells.append(f"{statistics.fmean(values):{form}}" if values else "")
            if len(values) > 1 and name in ("RMSE", "NLL", "mixture", "T_conf"):
                error = statistics.stdev(values) / math.sqrt(len(values))
                cells[-1] += f" ± {error:{form}}"
        print(f"| {' | '.join(cells)} |")
    for line in published:
        print(f"| {line} |")


def main() -> None:
    """Runs the samplers on each split, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=["airfoil"])
    parser.add_argument("--csv", type=Path, help="a table of your own")
    parser.add_argument("--rows", type=int, help="at most, of training rows")
    parser.add_argument("--splits", type=int, help="at most; runs, where one is known")
    parser.add_argument("--steps", type=int, help="gradients of each chain")
    parser.add_argument("--epochs", type=int, default=250, help="of Adam")
    parser.add_argument(
        "--samplers", nargs="+", choices=SAMPLERS, help="all; with --csv the first"
    )
    parser.add_argument("--lr", type=float, help="in place of the samplers' own")
    parser.add_argument("--by-layer", action="store_true", help="priors, of all")
    parser.add_argument("--batch", type=int, default=0, help="rows of a minibatch")
    parser.add_argument("--validate", action="store_true", help="score training rows")
    parser.add_argument("--out", type=Path, help="a file of JSON lines to append to")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.samplers is None:
        arguments.samplers = [*SAMPLERS][: 1 if arguments.csv else None]
    whole = [n for n in arguments.samplers if SAMPLERS[n].tune and arguments.batch]
    if whole:
        parser.error(f"--batch: {', '.join(whole)} need all rows (see --samplers)")
    if arguments.csv:
        chosen = {arguments.csv.name: table_of(arguments.csv)}
    else:
        chosen = {name: TABLES[name](arguments.data_root) for name in arguments.tables}
    for title, table in chosen.items():
        rows: list[dict[str, Any]] = []
        splits = range(len(table.splits))[: arguments.splits]
        for split in tqdm(splits, title):
            data = data_of(table, split, arguments.rows, arguments.validate)
            for method, found in results(table, data, split, arguments):
                row = {"table": title, "split": split, "method": method, **found}
                rows.append(row)
                if arguments.out:
                    with arguments.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")
        show(title, rows, table.published)


if __name__ == "__main__":
    main()
