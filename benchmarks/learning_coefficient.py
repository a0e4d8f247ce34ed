"""The learning coefficient of a linear regression, λ = 4, beside devinterp's.

    python benchmarks/learning_coefficient.py [--runs 3] [--threads 1]

Needs devinterp 2.0.1 in the same environment. Eight weights, n = 10,000, minibatches of
100, γ = 1, four chains of 500 steps of burn-in and 2,000 draws, SGLD with the same step
on both sides. Prints λ̂ of each run, and the median of the seconds of processor time.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import torch_sgmcmc as sg

N, D, BATCH, BURN_IN, DRAWS, LR = 10_000, 8, 100, 500, 2000, 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")
    from datasets import Dataset
    from devinterp.slt.llc import llc

    torch.manual_seed(0)
    x = torch.randn(N, D)
    y = x @ torch.ones(D) + torch.randn(N)
    model = nn.Linear(D, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(x, y[:, None]).solution.T)
    n_beta = N / math.log(N)
    # It takes tokens: here the number of a datum, twice.
    data = Dataset.from_dict({"input_ids": [[i, i] for i in range(N)]})
    data = data.with_format("torch")

    def each(model: nn.Module, indices: Tensor) -> Tensor:
        return (y[indices] - model(x[indices])[:, 0]).square() / 2

    def theirs(seed: int, batches: int) -> float:
        found = llc(
            model,
            data,
            {},
            lr=2 * LR / n_beta,
            n_beta=n_beta,
            localization=1.0,
            num_draws=DRAWS,
            num_burnin_steps=BURN_IN,
            batch_size=BATCH,
            num_init_loss_batches=batches,
            init_seed=100 * seed,
            loss_fn=lambda model, ids: each(model, ids[:, 0])[:, None],
            device="cpu",
        )
        return float(found["llc_mean"])

    def ours(seed: int, sampler: Callable[..., sg.Sampler]) -> float:
        return sg.local_learning_coefficient(
            model.parameters(),
            lambda indices: each(model, indices).mean(),
            sampler,
            num_data=N,
            localization=1.0,
            burn_in=BURN_IN,
            draws=DRAWS,
            batch_size=BATCH,
            seed=seed,
            progress=False,
        ).value

    rows = {
        "devinterp, L(w*) of 32 minibatches": partial(theirs, batches=32),
        "devinterp, of as many as steps": partial(theirs, batches=BURN_IN + DRAWS),
        "SGLD": partial(ours, sampler=partial(sg.SGLD, lr=LR)),
        "SGNHT": partial(ours, sampler=partial(sg.SGNHT, lr=LR, thermostat_rate=1e-2)),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in rows}
    for seed in range(arguments.runs):
        for name, run in rows.items():
            start = time.process_time()
            value = run(seed)
            found[name].append((value, time.process_time() - start))
    print("| | λ̂ of each run | seconds |\n| --- | --- | --- |")
    for name, pairs in found.items():
        values = ", ".join(f"{value:.2f}" for value, _ in pairs)
        seconds = statistics.median(seconds for _, seconds in pairs)
        print(f"| {name} | {values} | {seconds:.1f} |")


if __name__ == "__main__":
    main()
