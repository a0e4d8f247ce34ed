"""Is the posterior on MNIST under-confident, or is it heat?

The chain of ``sghmc2014.mnist --paper`` (SGHMC, 784-100-10, a prior precision a layer,
drawn after every epoch) at the page's settings and at settings at which every layer
runs within 5 % of T = 1. All runs of a seed go on from the same network, to which the
page's settings have led; their last epochs are what the monitor observe and what the
predictions are the mean over.

    python examples/papers sghmc2014.mnist_heat --data-root DATA

Each run is kept in ``--out``, and is not made again.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from reproduce.kept import kept
from reproduce.program import Parser, finish, run_alone
from reproduce.report import markdown
from torch import nn
from torch.nn import functional as F
from tqdm import trange

import torch_sgmcmc as sg

from .bnn.data import Images, load_images, minibatches
from .bnn.methods import build_model
from .bnn.metrics import evaluate

TENSORS = ("first weights", "first biases", "output weights", "output biases")
# The page's settings.
PAPER: dict[str, Any] = {"lr": (0.1,) * 4, "momentum": (0.99,) * 4}
#: For each tensor, in the order of TENSORS.
SETTINGS: dict[str, dict[str, Any]] = {
    "page": PAPER,
    "cool": {"lr": (0.05, 0.05, 0.05, 0.02), "momentum": (0.99, 0.9, 0.9, 0.9)},
    "estimate": {
        "lr": (0.03, 0.04, 0.012, 0.012),
        "momentum": (0.99,) * 4,
        "noise_estimate": "online",
    },
}


def build(
    model: nn.Module, num_data: int, seed: int, settings: dict[str, Any]
) -> tuple[sg.SGHMC, sg.GammaPrecision]:
    """The sampler, a group for each tensor, and the hyperprior, one for each layer."""
    groups = [
        {"params": [p], "lr": lr, "momentum": momentum}
        for p, lr, momentum in zip(
            model.parameters(), settings["lr"], settings["momentum"], strict=True
        )
    ]
    sampler = sg.SGHMC(
        groups,
        lr=0.1,
        num_data=num_data,
        prior_precision=1.0,
        noise_estimate=settings.get("noise_estimate", 0.0),
        seed=seed,
    )
    layers = [
        {"params": list(layer.parameters())}
        for layer in model.children()
        if isinstance(layer, nn.Linear)
    ]
    # It never steps: a precision is drawn for each of its groups.
    carrier = sg.SGLD(layers, lr=0.0, num_data=num_data, seed=seed + 1000)
    return sampler, sg.GammaPrecision(carrier)


def set_precisions(sampler: sg.SGHMC, precisions: list[float]) -> None:
    """Gives both tensors of a layer the layer's precision."""
    for i, group in enumerate(sampler.param_groups):
        group["prior_precision"] = precisions[i // 2]


def train_epoch(
    model: nn.Module,
    sampler: sg.SGHMC,
    hyperprior: sg.GammaPrecision,
    batches: list[tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """One pass; then the precisions are drawn."""
    for x, y in batches:
        sampler.zero_grad()
        F.cross_entropy(model(x), y).backward()
        sampler.step()
    set_precisions(sampler, hyperprior.step())


def start_of(images: Images, seed: int, epochs: int, batch_size: int) -> dict[str, Any]:
    """Network and precisions after so many epochs at the page's settings."""
    model = build_model(images.train_x.shape[1], seed, images.train_x.device)
    sampler, hyperprior = build(model, len(images.train_y), seed, PAPER)
    for epoch in trange(1, epochs + 1, desc=f"start, seed {seed}", unit="epoch"):
        batches = minibatches(images.train_x, images.train_y, batch_size, seed, epoch)
        train_epoch(model, sampler, hyperprior, batches)
    precisions = [g["prior_precision"] for g in sampler.param_groups[::2]]
    return {"model": model.state_dict(), "precisions": precisions}


def run(
    images: Images, args: argparse.Namespace, name: str, seed: int
) -> dict[str, Any]:
    """One chain: what it predicts and at which temperatures."""
    num_data, batch_size = len(images.train_y), args.batch_size
    epochs, start, observe = args.epochs, args.start, args.observe
    begin = (seed, start, batch_size)
    saved = kept(args.out, f"start-{seed}", begin, partial(start_of, images, *begin))
    model = build_model(images.train_x.shape[1], seed, images.train_x.device)
    model.load_state_dict(saved["model"])
    sampler, hyperprior = build(model, num_data, seed + 500, SETTINGS[name])
    set_precisions(sampler, saved["precisions"])
    monitor, predictive = None, sg.Predictive(model, images.test_x)
    precisions: list[list[float]] = []
    title = f"{name}, seed {seed}"
    for epoch in trange(start + 1, epochs + 1, desc=title, unit="epoch"):
        if epoch == epochs - observe + 1:
            monitor = sg.TemperatureMonitor(sampler, every=10, names=TENSORS)
        batches = minibatches(images.train_x, images.train_y, batch_size, seed, epoch)
        train_epoch(model, sampler, hyperprior, batches)
        if epoch > epochs - observe:
            predictive.update()
            precisions.append([g["prior_precision"] for g in sampler.param_groups[::2]])
    assert monitor is not None
    print(monitor.summary())
    mean = predictive.result().mean
    alone = sg.predict(model, [model], images.test_x).mean
    scores = evaluate(mean, images.test_y)
    scores["confidence"] = mean.max(1).values.double().mean().item()
    return {
        "settings": name,
        "seed": seed,
        "epochs": epochs,
        "start": start,
        "observe": observe,
        "batch_size": batch_size,
        **scores,
        "single": evaluate(alone, images.test_y),
        "precisions": torch.tensor(precisions).mean(0).tolist(),
        "temperatures": {
            tensor: {
                "kinetic": list(monitor.tensor(tensor).kinetic),
                "configurational": list(monitor.tensor(tensor).configurational),
            }
            for tensor in TENSORS
        },
    }


def table(runs: list[dict[str, Any]]) -> str:
    """Scores and temperatures, a line a run."""
    rows = []
    for r in runs:
        heat = [r["temperatures"][t]["kinetic"] for t in TENSORS]
        gap = r["confidence"] - (1 - r["error"])
        scores = [f"{r['error']:.2%}", f"{r['nll']:.4f}", f"{r['ece']:.4f}"]
        temperatures = [f"{mean:.3f} ± {half:.2g}" for mean, half in heat]
        row = [r["settings"], r["seed"], *temperatures, *scores]
        rows.append([*row, f"{gap:+.4f}"])
    head = ["settings", "seed", *(f"T_kin, {t}" for t in TENSORS), "test error"]
    return markdown([*head, "NLL", "ECE", "confidence − accuracy"], rows)


def run_all(args: argparse.Namespace) -> None:
    """Makes the runs that are missing, and prints the table."""
    images, runs = load_images(args.data_root), []
    size = (args.epochs, args.start, args.observe, args.batch_size)
    for seed in range(args.seeds):
        for name in args.only:
            make = partial(run, images, args, name, seed)
            runs.append(kept(args.out, f"{name}-{seed}", size, make))
    finish(args, {"runs": runs}, table(runs))


def main() -> None:
    """The program."""
    parser = Parser(__doc__, __name__)
    parser.add_data("MNIST/raw", required=True)
    parser.add_choice("--only", SETTINGS)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=400)
    parser.add_argument("--start", type=int, default=250, help="epochs as the page's")
    parser.add_argument("--observe", type=int, default=100, help="epochs at the end")
    parser.add_argument("--batch-size", type=int, default=500)
    args = parser.parse_args()
    if not 0 < args.observe <= args.epochs - args.start:
        parser.error("--observe must be in [1, --epochs - --start]")
    run_alone(run_all, args)
