"""Bias and violations of SBPS against the num_std k and the minibatch size n.

    python benchmarks/sbps_bias.py

The posterior of the mean of N = 1000 Gaussian data in 4 dimensions, flat prior,
minibatches without replacement. The trajectories are those of the NumPy sampler in
tests/harness, which the library's sampler follows event by event
(tests/laws/test_sbps_law.py). Prints a Markdown table: violations by proposals and by
bounces, proposals by bounce, and the variance of the time averages relative to the
posterior's, with its standard error over trajectories.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from harness.sbps import GaussianData, ReferenceSBPS


def measure(k: float, n: int, chains: int, events: int) -> str:
    """A row of the table."""
    data = np.random.default_rng(1).standard_normal((1000, 4))
    target = GaussianData(data, np.eye(4), n=n)
    ratios = []
    proposals = bounces = violations = 0
    for seed in range(chains):
        chain = ReferenceSBPS(target, seed, num_std=k)
        for _ in range(events):
            chain.step()
        mean = target.centre
        cross = np.outer(chain.first, mean)
        second = chain.second / chain.time - (cross + cross.T) / chain.time
        second += np.outer(mean, mean)
        ratios.append(np.trace(second) / np.trace(target.covariance))
        proposals += chain.proposals
        bounces += chain.bounces
        violations += chain.violations
    error = np.std(ratios, ddof=1) / chains**0.5
    return (
        f"| {k:g} | {n} | {violations / proposals:.2%} | {violations / bounces:.2%} "
        f"| {proposals / bounces:.1f} | {np.mean(ratios):.3f} ± {error:.3f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chains", type=int, default=12)
    parser.add_argument("--events", type=int, default=4000)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 100, 500])
    parser.add_argument("--num-stds", type=float, nargs="+", default=list(range(1, 9)))
    arguments = parser.parse_args()
    print("| k | n | of proposals | of bounces | proposals/bounce | variance |")
    print("| --- | --- | --- | --- | --- | --- |")
    for n in arguments.sizes:
        for k in arguments.confidences:
            print(measure(k, n, arguments.chains, arguments.events), flush=True)


if __name__ == "__main__":
    main()
