"""A sampler in place of SGD: what it gives at equal numbers of gradients.

    python benchmarks/swap.py --data-root DATA --screen     # settings, on one seed
    python benchmarks/swap.py --data-root DATA --tasks cnn mlp transformer mnist digits
    python benchmarks/swap.py --data-root DATA --tasks mlp --methods "posterior*"
    python benchmarks/swap.py --table                       # of what has been run

A training script (augmentation, batch norm, dropout, cosine lr, weight decay) is run
with SGD, as an ensemble of five, with SWAG, with MC dropout, and with SGHMC in place of
SGD. Every method computes as many gradients as five runs of SGD; "SGD" is one run.
Results are appended to --out as JSON lines, and runs that are there are not repeated.
Screening has half of the epochs, and scores 5,000 images that are neither trained on
nor tested on. docs/swap.md has the tables.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import partial
from itertools import chain, islice, product, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import pyplot
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torchmetrics.functional.classification import (
    binary_auroc,
    multiclass_accuracy,
    multiclass_calibration_error,
)
from torchvision import datasets
from tqdm import tqdm

import torch_sgmcmc as sg

LOSS = sg.losses.categorical()
MOMENTUM, DECAY, BATCH = 0.9, 5e-4, 100
RUNS = 5  # of SGD, which each method may cost
DRAWS = 20  # networks that predict together
METRICS = ("error", "nll", "ece", "auroc")


# ---- Networks ------------------------------------------------------------------------


def cnn(dropout: float, width: int = 16, group_norm: bool = False) -> nn.Module:
    """Convolutions with batch norm, 106,000 parameters."""

    def norm(channels: int) -> nn.Module:
        return nn.GroupNorm(4, channels) if group_norm else nn.BatchNorm2d(channels)

    return nn.Sequential(
        nn.Conv2d(1, width, 5, stride=2, padding=2, bias=False),
        norm(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False),
        norm(2 * width),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(98 * width, 64),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(64, 10),
    )


def mlp(dropout: float, inputs: int = 784, classes: int = 10) -> nn.Module:
    """Two hidden layers."""
    hidden = [nn.Linear(inputs, 200), nn.ReLU(), nn.Dropout(dropout)]
    hidden += [nn.Linear(200, 200), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(200, classes))


def pooled_cnn(dropout: float) -> nn.Module:
    """Convolutions and pooling without a norm, 29,000 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 96),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(96, 10),
    )


def small_cnn(dropout: float) -> nn.Module:
    """Two convolutions of images of half the size without a norm, 27,000 parameters."""
    return nn.Sequential(
        nn.AvgPool2d(2),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(784, 32),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(32, 10),
    )


class Transformer(nn.Module):
    """Two pre-norm layers over 16 patches of 7 x 7 pixels, 19,000 parameters."""

    def __init__(self, dropout: float, width: int = 32) -> None:
        super().__init__()
        layer = partial(nn.TransformerEncoderLayer, width, 4, 2 * width, dropout)
        self.embedding = nn.Linear(49, width)
        self.position = nn.Parameter(0.02 * torch.randn(16, width))
        self.layers = nn.Sequential(
            *(layer(batch_first=True, norm_first=True) for _ in range(2))
        )
        self.output = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits."""
        patches = self.embedding(F.unfold(x, 7, stride=7).mT) + self.position
        return self.output(self.layers(patches).mean(1))


# ---- Data ----------------------------------------------------------------------------


def unchanged(x: Tensor) -> Tensor:
    """No augmentation."""
    return x


def flipped_and_shifted(x: Tensor) -> Tensor:
    """Images of which half are flipped, shifted by up to two pixels."""
    x = torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(3), x)
    padded, (n, _, height, width) = F.pad(x, (2, 2, 2, 2)), x.shape
    i, j = torch.randint(5, (2, n, 1))
    rows, columns = i + torch.arange(height), j + torch.arange(width)
    each = torch.arange(n)[:, None, None]
    return padded[each, 0, rows[:, :, None], columns[:, None, :]][:, None]


def images(
    name: str, other: str, count: int, root: Path, screen: bool
) -> tuple[Tensor, ...]:
    """Returns training data, data to be scored, and images of another data set."""
    kinds = (getattr(datasets, name), getattr(datasets, other))
    train, test = (kinds[0](root, train=part) for part in (True, False))
    x, y = train.data[:, None].float() / 255, train.targets
    found = x[count : count + 5000], y[count : count + 5000]
    if not screen:
        found = test.data[:, None].float() / 255, test.targets
    outside = kinds[1](root, train=screen).data[:5000, None].float() / 255
    return x[:count], y[:count], *found, outside


def digits(root: Path, screen: bool) -> tuple[Tensor, ...]:
    """Returns 1,000 of scikit-learn's 8 x 8 digits, the others, and these reversed."""
    x, y = (torch.from_numpy(a) for a in load_digits(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order].float().view(-1, 1, 8, 8) / 16, y[order]
    return x[:1000], y[:1000], x[1000:], y[1000:], x[1000:].flip(2)


def covertype(root: Path, screen: bool) -> tuple[Tensor, ...]:
    """Returns 10,000 rows, others, and those with each column shuffled by itself."""
    path, count = root / "covertype" / "covtype_subset.data.gz", 10_000
    table = np.loadtxt(path, delimiter=",", dtype=np.float32, max_rows=count + 10_000)
    rows = torch.from_numpy(np.random.default_rng(0).permutation(table))
    x, y = rows[:, :54], rows[:, 54].long() - 1
    mean, sd = x[:count, :10].mean(0), x[:count, :10].std(0)
    x[:, :10] = (x[:, :10] - mean) / sd
    scored = slice(count, count + 5000) if screen else slice(count + 5000, None)
    generator = torch.Generator().manual_seed(0)
    orders = torch.rand(5000, 54, generator=generator).argsort(0)
    return x[:count], y[:count], x[scored], y[scored], x[scored].gather(0, orders)


@dataclass(frozen=True)
class Task:
    """A training script: a network, data, and settings that suit SGD."""

    network: Callable[..., nn.Module]
    data: Callable[[Path, bool], tuple[Tensor, ...]]
    augment: Callable[[Tensor], Tensor]
    dropout: float
    lr: float
    epochs: int  # of one run of SGD


fashion = partial(images, "FashionMNIST", "MNIST", 9000)
mnist = partial(images, "MNIST", "FashionMNIST", 2000)
fashion_2000 = partial(images, "FashionMNIST", "MNIST", 2000)
small, tabular = partial(mlp, inputs=64), partial(mlp, inputs=54, classes=7)
TASKS = {
    "cnn": Task(cnn, fashion, flipped_and_shifted, 0.2, 0.1, 20),
    "mlp": Task(mlp, fashion, unchanged, 0.2, 0.05, 20),
    "small": Task(small_cnn, fashion, unchanged, 0.2, 0.05, 20),
    "small-augmented": Task(small_cnn, fashion, flipped_and_shifted, 0.2, 0.05, 20),
    "transformer": Task(Transformer, fashion, flipped_and_shifted, 0.1, 0.05, 10),
    "mnist": Task(pooled_cnn, mnist, unchanged, 0.2, 0.05, 40),
    "fashion-2000": Task(pooled_cnn, fashion_2000, unchanged, 0.2, 0.05, 40),
    "digits": Task(small, digits, unchanged, 0.2, 0.05, 100),
    "covertype": Task(tabular, covertype, unchanged, 0.2, 0.05, 60),
}


class Minibatches:
    """Shuffled minibatches, augmented, by torch's default generator."""

    def __init__(self, x: Tensor, y: Tensor, augment: Callable[[Tensor], Tensor]):
        self.x, self.y, self.augment = x, y, augment

    def __len__(self) -> int:
        return len(self.x) // BATCH

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in torch.randperm(len(self.x)).split(BATCH)[: len(self)]:
            yield self.augment(self.x[rows]), self.y[rows]


# ---- Methods -------------------------------------------------------------------------


@dataclass
class Run:
    """A task, its data and a seed, with what methods share."""

    task: Task
    root: Path
    seed: int
    screen: bool
    trained: dict[object, nn.Module] = field(default_factory=dict)

    def __post_init__(self) -> None:
        x, y, self.x, self.y, self.outside = self.task.data(self.root, self.screen)
        self.loader = Minibatches(x, y, self.task.augment)
        self.steps = self.task.epochs * len(self.loader)
        torch.manual_seed(0)
        self.refresh = [x for x, _ in islice(self.loader, 30)]

    def sgd(
        self,
        steps: int,
        index: int = 0,
        *,
        dropout: bool = True,
        floor: float = 0.0,
        after: Callable[[int, nn.Module], None] | None = None,
        more: int = 0,
    ) -> nn.Module:
        """Trains a network, by a cosine from lr to floor * lr, and more steps there."""
        key = (steps, index, dropout)
        if after is None and key in self.trained:
            return copy.deepcopy(self.trained[key])
        torch.manual_seed(sg.fold_in(self.seed, index))
        model = self.task.network(self.task.dropout if dropout else 0.0)
        options = {"momentum": MOMENTUM, "weight_decay": DECAY}
        optimizer = torch.optim.SGD(model.parameters(), self.task.lr, **options)

        def factor(step: int) -> float:
            cosine = (1 + math.cos(math.pi * min(1, step / steps))) / 2
            return floor + (1 - floor) * cosine

        schedule = LambdaLR(optimizer, factor)
        batches = islice(chain.from_iterable(repeat(self.loader)), steps + more)
        for step, batch in enumerate(batches, start=1):
            optimizer.zero_grad()
            LOSS(model, batch).backward()
            optimizer.step()
            schedule.step()
            if after is not None:
                after(step, model)
        if after is None:
            self.trained[key] = copy.deepcopy(model)
        return model

    def scores(
        self, draws: Iterable[Any], model: nn.Module | None = None
    ) -> dict[str, float]:
        """Returns scores of what draws predict together.

        With a model that draws are put into, batch norm's statistics are computed
        again for each of them; else they are those of training.
        """
        options = {}
        if any(isinstance(m, nn.BatchNorm2d) for m in (model or nn.Module()).modules()):
            options["refresh_batch_norm"] = self.refresh
        model = model or self.task.network(0.0)
        return self.scores_of(lambda x: sg.predict(model, draws, x, **options).mean)

    def scores_of(self, predict: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Returns scores of probabilities; outside inputs are told by the entropy."""
        p = predict(self.x).clamp(1e-12, 1)
        entropy = torch.special.entr(torch.cat([p, predict(self.outside)])).sum(1)
        is_outside = (torch.arange(len(entropy)) >= len(p)).long()
        accuracy = multiclass_accuracy(p, self.y, p.shape[1], average="micro")
        return {
            "error": 100 * (1 - float(accuracy)),
            "nll": float(F.nll_loss(p.log(), self.y)),
            "ece": float(multiclass_calibration_error(p, self.y, p.shape[1])),
            "auroc": float(binary_auroc(entropy / math.log(p.shape[1]), is_outside)),
        }


def sgd(run: Run, runs: int = 1, *, dropout: bool = True) -> dict[str, float]:
    """The script as it is, for as many steps as some runs."""
    return run.scores([run.sgd(runs * run.steps, dropout=dropout)])


def ensemble(run: Run, *, dropout: bool = True) -> dict[str, float]:
    """Five networks."""
    members = range(1, 1 + RUNS)
    return run.scores([run.sgd(run.steps, i, dropout=dropout) for i in members])


def mc_dropout(run: Run) -> dict[str, float]:
    """SGD for all steps, and dropout in predictions too."""
    model = run.sgd(RUNS * run.steps).eval()
    for module in model.modules():
        module.training = isinstance(module, nn.Dropout)

    @torch.no_grad()
    def average(x: Tensor) -> Tensor:
        return torch.stack([model(x).softmax(1) for _ in range(DRAWS)]).mean(0)

    return run.scores_of(average)


def swag(run: Run) -> dict[str, float]:
    """SGD for 3/5, then at lr / 5: mean, variances and 20 deviations, once an epoch."""
    first, points = RUNS * run.steps * 3 // 5, []

    def keep(step: int, model: nn.Module) -> None:
        if step > first and (step - first) % len(run.loader) == 0:
            points.append(nn.utils.parameters_to_vector(model.parameters()).detach())

    model = run.sgd(first, floor=0.2, after=keep, more=RUNS * run.steps - first)
    mean, sd = torch.stack(points).mean(0), torch.stack(points).std(0)
    deviations = torch.stack(points[-20:]) - mean
    draws = []
    for _ in range(DRAWS):
        noise = torch.randn(len(deviations)) @ deviations
        noise = noise / math.sqrt(2 * (len(deviations) - 1))
        theta = mean + noise + sd * torch.randn(len(sd)) / math.sqrt(2)
        nn.utils.vector_to_parameters(theta, model.parameters())
        draws.append({n: p.detach().clone() for n, p in model.named_parameters()})
    return run.scores(draws, model)


@dataclass(frozen=True)
class SGHMC:
    """SGHMC in place of SGD."""

    temperature: float
    precision: float | None = None  # of the prior; None is SGD's, N * weight decay
    schedule: str = "cosine"  # or "constant", "cyclical"
    exploration: float = 0.5  # part of a cycle at T = 0
    cycles: int = RUNS
    start: float = 0.0  # part of the gradients that SGD computes first, by a cosine
    peak: float = 1.0  # the sampler's lr over SGD's
    chains: int = 1
    burn_in: float = 0.5  # part of the steps at T > 0 that is not stored
    dropout: bool = False
    options: tuple[tuple[str, object], ...] = ()  # of the network
    lr: float | None = None  # in place of the script's
    by_layer: bool = False  # priors of prior_groups, in place of precision
    begin: str = "model"  # or "prior"

    def __call__(self, run: Run) -> dict[str, Any]:
        """Samples, and returns scores, T_conf and T_kin of weights (of chain 0)."""
        task, data = run.task, len(run.loader.x)
        steps, dropout = RUNS * run.steps // self.chains, self.dropout * task.dropout
        model = partial(task.network, dropout, **dict(self.options))
        if self.start > 0:
            before = round(self.start * steps)
            first = run.sgd(before, dropout=self.dropout)
            model, steps = (lambda: first), steps - before
        sampler = partial(
            sg.SGHMC,
            lr=self.lr or self.peak * task.lr,
            momentum=MOMENTUM,
            num_data=data,
            prior_precision=DECAY * data if self.precision is None else self.precision,
            temperature=self.temperature,
        )
        counted, schedule = steps, None
        if self.schedule == "cosine":
            schedule = partial(CosineAnnealingLR, T_max=steps)
        elif self.schedule == "cyclical":
            options = {"exploration": self.exploration}
            options["steps_per_cycle"] = steps // self.cycles
            schedule = partial(sg.CyclicalSchedule, **options)
            counted = round(steps * (1 - self.exploration))
        burn_in = round(self.burn_in * counted)
        inputs, groups = run.loader.augment(run.loader.x[:500]), ()
        if self.by_layer:
            groups = sg.prior_groups(model(), inputs)
        temperatures: dict[str, str] = {}

        def look(state: sg.ChainState) -> None:
            if state.step == steps and state.monitor is not None:
                for name in state.monitor.names:
                    t = state.monitor.tensor(name)
                    if name.endswith("weight") and name not in temperatures:
                        pair = t.configurational.mean, t.kinetic.mean
                        temperatures[name] = "{:.2f}/{:.2f}".format(*pair)

        store = sg.sample(
            model,
            sampler,
            run.loader,
            LOSS,
            steps=steps,
            burn_in=burn_in,
            every=max(1, (counted - burn_in) * self.chains // DRAWS),
            chains=self.chains,
            start=self.begin,
            seed=run.seed,
            schedule=schedule,
            groups=groups,
            callbacks=look,
            check=False,
            progress=False,
        )
        scores = run.scores(store, model()) | {"draws": len(store)}
        return scores | {"T_conf / T_kin": ", ".join(temperatures.values())}


BASELINES = {
    "SGD": sgd,
    "SGD, 5 times as long": partial(sgd, runs=RUNS),
    "SGD, 5 times as long, no dropout": partial(sgd, runs=RUNS, dropout=False),
    "ensemble of five": ensemble,
    "ensemble of five, no dropout": partial(ensemble, dropout=False),
    "SWAG": swag,
    "MC dropout": mc_dropout,
}
cyclical = partial(SGHMC, schedule="cyclical", burn_in=0.0)
constant = partial(SGHMC, schedule="constant")
STARTS = "model", "prior"
last_cycles = partial(cyclical, 0.03, burn_in=0.4)
SCREENED = {
    "T 1, cosine, dropout (naive)": SGHMC(1.0, burn_in=0.75, dropout=True),
    "T 1, constant, group norm": constant(1.0, options=(("group_norm", True),)),
    "T 1, constant, λ 1": constant(1.0, 1.0),
    "T 0.1, cyclical, λ 1": cyclical(0.1, 1.0),
    "T 0.1, constant, from SGD": constant(0.1, start=0.2, burn_in=0.2),
    "T 0.1, cyclical, from SGD": cyclical(0.1, start=0.2, cycles=4),
    "T 0.03, cosine, 2 chains": SGHMC(0.03, chains=2, burn_in=0.75),
    "T 0.03, cosine, 5 chains": SGHMC(0.03, chains=5, burn_in=0.75),
    "T 0.03, last 2 of 3 cycles": last_cycles(cycles=3, burn_in=0.34),
    "T 0.03, last 3 of 5 cycles": last_cycles(),
    "T 0.03, last 3 of 5 cycles, exploration 0.8": last_cycles(exploration=0.8),
    "T 0.1, last 3 of 5 cycles": cyclical(0.1, burn_in=0.4),
}
for t in (1, 0.3, 0.1, 0.03):
    SCREENED |= {
        f"T {t}, constant": constant(t),
        f"T {t}, cosine": SGHMC(t, burn_in=0.75),
        f"T {t}, cyclical": cyclical(t),
    }
for t, peak in product((0.1, 0.03), (0.1, 0.3, 0.5)):
    late = {"start": 0.5, "peak": peak}
    name = f"lr x {peak}, after SGD for half"
    SCREENED[f"T {t}, constant {name}"] = constant(t, burn_in=0.1, **late)
    SCREENED[f"T {t}, cyclical {name}"] = cyclical(t, **late)
CHOSEN = {
    "five chains": SGHMC(0.03, chains=RUNS, burn_in=0.75, dropout=True),
    "five chains, no dropout": SGHMC(0.03, chains=RUNS, burn_in=0.75),
    "cycles": last_cycles(dropout=True),
    "cycles, no dropout": last_cycles(),
    "cycles, from SGD": cyclical(0.03, start=0.5, peak=0.5, dropout=True),
}
POSTERIORS = {
    f"posterior: T {t}, λ {p or 'by layer'}, from {begin}": constant(
        t, p, lr=0.03, by_layer=p is None, begin=begin
    )
    for t, p, begin in product((1, 0.3, 0.1, 0.03), (5, 20, 80, None), STARTS)
}
CHOSEN |= {
    f"{name}, from prior": replace(CHOSEN[name], begin="prior")
    for name in (
        "five chains",
        "cycles",
        "five chains, no dropout",
        "cycles, no dropout",
    )
}
METHODS = BASELINES | SCREENED | CHOSEN | POSTERIORS


# ---- Output --------------------------------------------------------------------------


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Returns what tells a run from others."""
    names = ("task", "method", "seed", "screen", "epochs", "width")
    return tuple(row[name] for name in names)


def table(rows: list[dict[str, Any]]) -> str:
    """Returns means over seeds with standard errors, a table for each task."""
    lines, settings = [], ("task", "screen", "epochs", "width")
    for group in dict.fromkeys(tuple(row[name] for name in settings) for row in rows):
        mine = [row for row in rows if tuple(row[name] for name in settings) == group]
        title = f"{group[0]}, {group[2]} epochs{', validation' if group[1] else ''}"
        heads = "method | seeds | error, % | NLL | ECE | AUROC"
        lines += [f"\n{title}\n", f"| {heads} |", "|" + " --- |" * 6]
        for method in dict.fromkeys(row["method"] for row in mine):
            some = [row for row in mine if row["method"] == method]
            cells = [method, str(len(some))]
            for name in METRICS:
                values, form = (
                    [row[name] for row in some],
                    "2" if name == "error" else "4",
                )
                cells.append(f"{statistics.fmean(values):.{form}f}")
                if len(values) > 1:
                    error = statistics.stdev(values) / math.sqrt(len(values))
                    cells[-1] += f" ± {error:.{form}f}"
            if "T_conf / T_kin" in some[0]:
                cells.append(f"T_conf/T_kin {some[0]['T_conf / T_kin']}")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Writes a picture of each method: error and NLL, ECE and AUROC."""
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    pairs = ("error (%)", "NLL"), ("ECE", "AUROC of digits")
    for axes, names, labels in zip(
        panels, (METRICS[:2], METRICS[2:]), pairs, strict=True
    ):
        for method in dict.fromkeys(row["method"] for row in rows):
            mine = [row for row in rows if row["method"] == method]
            mark = "s" if method in BASELINES else "o"
            points = ([row[name] for row in mine] for name in names)
            axes.plot(*points, mark, label=method)
        axes.set(xlabel=labels[0], ylabel=labels[1])
    panels[1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=100)


def main() -> None:
    """Runs what has not been run, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path("runs/swap/results.jsonl"))
    parser.add_argument("--screen", action="store_true", help="settings, half as long")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["cnn"])
    parser.add_argument("--methods", nargs="+", help="names, with * and ?")
    parser.add_argument("--seeds", nargs="+", type=int, help="0, without --screen to 2")
    parser.add_argument("--epochs", type=int, help="of one run of SGD")
    parser.add_argument("--width", type=int, default=16, help="of the CNN")
    parser.add_argument("--table", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.touch()
    torch.set_num_threads(1)
    names = [*BASELINES, *(SCREENED if arguments.screen else CHOSEN)]
    if arguments.methods:
        names = [n for n in METHODS if any(fnmatch(n, p) for p in arguments.methods)]
    TASKS["cnn"] = replace(TASKS["cnn"], network=partial(cnn, width=arguments.width))
    for name, task in TASKS.items():
        epochs = arguments.epochs or task.epochs // (2 if arguments.screen else 1)
        TASKS[name] = replace(task, epochs=epochs)
    rows = [json.loads(line) for line in arguments.out.read_text().splitlines()]
    done, run, screen = set(map(key_of, rows)), None, arguments.screen
    seeds = arguments.seeds or ([0] if screen else [0, 1, 2])
    todo = [
        {"task": task, "method": name, "seed": seed, "screen": screen}
        | {"epochs": TASKS[task].epochs, "width": arguments.width}
        for task, seed, name in product(arguments.tasks, seeds, names)
    ]
    todo = [row for row in todo if not arguments.table and key_of(row) not in done]
    progress = tqdm(todo, disable=arguments.table)
    for row in progress:
        task, seed = TASKS[row["task"]], row["seed"]
        progress.set_description(f"{row['task']}, {row['method']}, seed {seed}")
        if run is None or (run.task, run.seed) != (task, seed):
            run = Run(task, arguments.data_root, seed, screen)
        started = time.perf_counter()
        row |= METHODS[row["method"]](run)
        row |= {"seconds": time.perf_counter() - started, "torch": torch.__version__}
        rows.append(row)
        with arguments.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
    print(table(rows))
    if rows := [row for row in rows if row["task"] == "cnn" and not row["screen"]]:
        draw(rows, arguments.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
