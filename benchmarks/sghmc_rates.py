"""What SGHMC's masses and its matrix cost.

    python benchmarks/sghmc_rates.py [--threads 1] [--rounds 15]

Steps of one tensor of 10^6 elements, gradients in place, fp32, with masses, with
frictions too, and with variances of the gradients, relative to the plain step, in
turns; the step with a matrix over d coordinates, and the factor of its noise, which is
made where the matrix or a hyperparameter has changed.
"""

from __future__ import annotations

import argparse
import platform

import torch
from step import measure, parameters

import torch_sgmcmc as sg
import torch_sgmcmc._C as _C

COMMON = {"num_data": 50_000, "prior_precision": 1.0}
CPU = torch.device("cpu")


def chain(numel: int, **settings: object) -> tuple[sg.SGHMC, torch.Tensor]:
    """A sampler of one tensor of its own, and numbers around 1."""
    params = parameters([torch.Size([numel])], CPU)
    return sg.SGHMC(params, 0.1, 0.9, **COMMON, **settings), 0.5 + torch.rand(numel)


def report_masses(rounds: int) -> None:
    """Steps of 10^6 elements."""
    samplers = {
        name: chain(10**6, noise_estimate=estimate)
        for name, estimate in (
            ("plain", 0.0),
            ("masses", 0.0),
            ("masses, frictions", 0.0),
            ("variances", "given"),
            ("masses, variances", "given"),
        )
    }
    for name, (sampler, numbers) in samplers.items():
        if "masses" in name:
            sampler.set_mass([numbers], [numbers] if "frictions" in name else None)
        if "variances" in name:
            sampler.set_gradient_variance([1e-6 * numbers])
    times = measure({n: s.step for n, (s, _) in samplers.items()}, CPU, rounds, 0.05)
    print("\nSteps of one tensor of 10^6 elements:")
    for name, seconds in times.items():
        ratio = seconds / times["plain"]
        print(f"  {name:18s}{seconds * 1e6:10.1f} µs  {ratio:.2f} x plain")


def report_matrix(rounds: int) -> None:
    """Steps beside a matrix, with and without a new factor."""
    print("\nSteps with a matrix over d coordinates:")
    for d in (30, 300, 1000):
        plain, _ = chain(d)
        sampler, _ = chain(d, noise_estimate="given")
        rows = torch.randn(2 * d, d).double() * 1e-3
        sampler.set_gradient_covariance(rows.T @ rows / len(rows))
        group = sampler.param_groups[0]

        def anew(sampler: sg.SGHMC = sampler, group: dict = group) -> None:
            group["lr"] = 0.1 if group["lr"] != 0.1 else 0.09
            sampler.step()

        steps = {"plain": plain.step, "matrix": sampler.step, "factor anew": anew}
        times = measure(steps, CPU, rounds, 0.05)
        shown = ", ".join(f"{n} {s * 1e6:,.0f} µs" for n, s in times.items())
        print(f"  d = {d}: {shown}")


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(
        f"torch {torch.__version__}, torch_sgmcmc {sg.__version__}, Python "
        f"{platform.python_version()}, CPU loops: {_C.isa()}, {args.threads} thread(s)"
    )
    report_masses(args.rounds)
    report_matrix(args.rounds)


if __name__ == "__main__":
    main()
