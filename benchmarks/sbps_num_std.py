"""Costs and gains of SBPS by num_std (k) and observation_decay (f).

    python benchmarks/sbps_num_std.py

Chains of the NumPy sampler in tests/harness, which the library's follows event by event
(tests/laws/test_sbps_law.py), on the posteriors of sbps_targets.py. Each starts at a
draw of the posterior; its first tenth, on which it goes from there to its own law, is
left out. Chains count by their trajectory times. Of U at regular times, 3.6 events
apart in the mean, it prints

* the bias of E[U], in standard deviations of U in the posterior, with the standard
  error over the chains and of the truth, which is exact for Gaussians, and else comes
  from importance sampling or, of the network, from HMC;
* the variance of U, relative to the posterior's, with the standard error over chains;
* the epochs, of N examples, for one effective sample of U: those of all chains, over
  (variance of U / variance of its mean over the chains);
* the effective samples from which on the bias is larger than the statistical error.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from harness.sbps import ReferenceSBPS
from harness.statistics import Array
from sbps_targets import TARGETS, Posterior, QuarticEnergy


@dataclass
class Run:
    """One chain: U at regular times, how long it flew, and its counts."""

    energies: Array
    time: float
    proposals: int
    bounces: int
    violations: int


def run(
    target: Posterior | QuarticEnergy, seed: int, events: int, **settings: float
) -> Run:
    chain = ReferenceSBPS(target, seed, **settings)
    for _ in range(events // 10):
        chain.step()
    begin = chain.time
    before = chain.proposals, chain.bounces, chain.violations
    times, places = [], []
    while len(times) < events - events // 10:
        places.append(np.concatenate([chain.theta, chain.direction]))
        times.append(chain.time)
        chain.step()
    knots, lines = np.array(times), np.array(places)
    d = target.dimension
    grid = np.linspace(begin, chain.time, events // 4, endpoint=False)
    piece = np.searchsorted(knots, grid, side="right") - 1
    thetas = lines[piece, :d] + (grid - knots[piece])[:, None] * lines[piece, d:]
    after = chain.proposals, chain.bounces, chain.violations
    counts = (b - a for a, b in zip(before, after, strict=True))
    return Run(target.energy(thetas), chain.time - begin, *counts)


def weighted(values: Array, weights: Array) -> tuple[float, float]:
    """A mean of values by chain, and its standard error."""
    weights = weights / weights.mean()
    mean = float((weights * values).mean())
    errors = weights * (values - mean)
    return mean, float(errors.std(ddof=1) / len(values) ** 0.5)


def measure(
    target: Posterior | QuarticEnergy, k: float, f: float, chains: int, events: int
) -> str:
    """A row of the table."""
    settings = {"num_std": k, "observation_decay": f}
    runs = [run(target, seed, events, **settings) for seed in range(chains)]
    truth = target.truth
    time = np.array([r.time for r in runs])
    centred = [(r.energies - truth.mean) / truth.sd for r in runs]
    bias, error = weighted(np.array([u.mean() for u in centred]), time)
    about = [((u - bias) ** 2).mean() for u in centred]
    variance, variance_error = weighted(np.array(about), time)
    ess = variance / error**2
    epochs = chains * (events - events // 10) * target.n / target.size
    proposals, bounces, violations = (
        sum(getattr(r, name) for r in runs)
        for name in ("proposals", "bounces", "violations")
    )
    both = (error**2 + (truth.error / truth.sd) ** 2) ** 0.5
    even = f"{1 / bias**2:.0f}" if abs(bias) > 2 * both else "not seen"
    return (
        f"| {k:g} | {f:g} | {violations / proposals:.2%} | {violations / bounces:.2%} "
        f"| {proposals / bounces:.1f} | {bias:+.3f} ± {both:.3f} "
        f"| {variance:.3f} ± {variance_error:.3f} | {epochs / ess:.2f} | {even} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chains", type=int, default=60)
    parser.add_argument("--events", type=int, default=10_000)
    parser.add_argument("--confidences", type=float, nargs="+", default=[3, 4, 5, 6, 8])
    parser.add_argument("--forgettings", type=float, nargs="+", default=[0])
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.targets:
        target = TARGETS[name].make()
        print(f"\n{TARGETS[name].title}\n")
        print(
            "| k | f | violations, of proposals | of bounces | proposals a bounce "
            "| bias of E[U] / sd | variance of U / posterior's "
            "| epochs an effective sample | samples until bias shows |"
        )
        print("|" + " --- |" * 9)
        for k, f in product(arguments.confidences, arguments.forgettings):
            row = measure(target, k, f, arguments.chains, arguments.events)
            print(row, flush=True)


if __name__ == "__main__":
    main()
