"""Figure 1 of the EWSG paper: a Gaussian posterior.

n = 20 data, minibatches of one, 30 data passes, 10,000 chains: the KL to the target
of EWSG, SGHMC, SGLD, pSGLD, SVRG-LD and EWSG with SVRG's gradients at equal numbers of
gradients, the KL at equal autocorrelation time, the surrogates of the new momentum, the
length of the index chain, also for more data (panels f to i); and how the error of time
averages scales with T and with h.

    python examples/papers ewsg2021.figure1                  # a few minutes
    python examples/papers ewsg2021.figure1 --paper          # more seeds, smaller steps
    python examples/papers ewsg2021.figure1 --only lengths   # panels f to i
    python examples/papers ewsg2021.figure1 --only kl --euler  # θ moves as in eq. 3

Panels a to e are "kl", j to l "errors". Results go to --out: results.json, kl.png,
errors.png, lengths.png, and what each panel has found, from which an interrupted run
continues.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from reproduce.kept import kept
from reproduce.program import Parser, run_alone, run_parts

from .gaussian import report
from .gaussian.autocorrelation import accuracy_at_autocorrelation
from .gaussian.chains import METHODS
from .gaussian.errors import error_orders, run_pairs
from .gaussian.learning import learning_curves, other_data, stationary_kl
from .gaussian.lengths import by_step, lengths_elsewhere, lengths_of
from .gaussian.report_lengths import lengths_picture, lengths_table
from .gaussian.target import Gaussian, floor

Part = tuple[str, dict[str, Any]]

DATA_SEED = 0
SURROGATES = ("momentum", "zero", "one", "full_momentum")
LENGTHS = (0, 1, 2, 3, 4, 6, 9, 19)
LENGTHS_ELSEWHERE = (2, 4, 9)  # for other data
DATA_SIZES = (20, 50, 100)  # of panels f to i
LONGER = (0, 1, 2, 4, 9, 14, 19, 29, 49)
STEPS_BY_KIND = (0.005, 0.01, 0.02, 0.03, 0.05)  # with M = 1, of both index chains
STEPS = (0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08)  # of panel b

#: Option: its default, and its value with --paper.
SIZES = {
    "seeds": (5, 20),
    "other_data": (10, 30),
    "length_seeds": (3, 10),
    "error_chains": (2500, 10_000),
    "smallest_step": (12, 13),
    "longest_time": (5, 6),
}


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = Parser(__doc__, __name__)
    parser.add_choice("--only", PARTS)
    parser.add_argument("--chains", type=int, default=10_000, help="but of errors")
    parser.add_argument("--passes", type=float, default=30.0, help="over the data")
    parser.add_argument(
        "--euler",
        action="store_true",
        help="panels a to e with the paper's integrator, which moves by old momenta",
    )
    for name, words in (
        ("seeds", "number of seeds of panels a, c, d, e"),
        ("other_data", "number of other draws of the data"),
        ("length_seeds", "number of seeds of panels f to h"),
        ("error_chains", "chains of panels j to l (fewer where h < 2^-9)"),
        ("smallest_step", "of panels j to l: E for h = 2^-E, at least 9"),
        ("longest_time", "of panel j: E for T = 2^E, at least 3"),
    ):
        short, full = SIZES[name]
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=int,
            help=f"{words} (default: {short}, with --paper {full})",
        )
    parser.add_sizes("paper")
    args = parser.parse_args()
    parser.fill_in(args, SIZES)
    parser.check_at_least(
        args,
        seeds=1,
        other_data=1,
        length_seeds=1,
        error_chains=100,
        smallest_step=9,
        longest_time=3,
    )
    if args.chains < 20 or args.chains % 20:
        parser.error("--chains must be a multiple of 20")
    if args.passes < 2:
        parser.error("--passes must be at least 2")
    return args


def panels(
    args: argparse.Namespace,
    settings: dict[str, Any],
    compute: dict[str, Callable[[], dict[str, Any]]],
) -> dict[str, Any]:
    """The results of each panel, new or from an interrupted run."""
    found = {
        name: kept(args.out, f"panel-{name}", settings, make)
        for name, make in compute.items()
    }
    return {"settings": settings, **found}


def kl(args: argparse.Namespace) -> Part:
    """Panels a to e, and the same for other data."""
    methods = {
        name: replace(method, euler=args.euler and method.underdamped)
        for name, method in METHODS.items()
    }
    target, ewsg = Gaussian.draw(DATA_SEED), methods["EWSG"]
    surrogates = {name: replace(ewsg, surrogate=name) for name in SURROGATES}
    lengths = {str(length): replace(ewsg, length=length) for length in LENGTHS}
    common = {"chains": args.chains, "seeds": range(args.seeds)}
    budget = {**common, "passes": args.passes}
    others = {
        **methods,
        **{f"EWSG, x: {name}": surrogates[name] for name in SURROGATES[1:]},
        **{f"EWSG, M = {length}": lengths[str(length)] for length in LENGTHS_ELSEWHERE},
    }
    elsewhere = range(1000, 1000 + args.other_data)
    by_steps = {
        **{name: methods[name] for name in ("EWSG", "SGHMC")},
        "EWSG, x = 0": replace(ewsg, surrogate="zero"),
    }
    settings = {
        "chains": args.chains,
        "passes": args.passes,
        "seeds": args.seeds,
        "euler": args.euler,
        "other_data": args.other_data,
        "data": target.data.tolist(),
        "num_data": target.num_data,
        "dim": target.dim,
        "gradient_covariance": target.gradient_covariance.tolist(),
        "kl_floor": list(floor(args.chains, target.dim)),
    }
    results = panels(
        args,
        settings,
        {
            "a": lambda: learning_curves(target, methods, **budget),
            "b": lambda: accuracy_at_autocorrelation(
                target,
                by_steps,
                list(STEPS),
                chains=args.chains,
                burn_in=6.0,
                time=12.0,
                seed=0,
            ),
            "c": lambda: learning_curves(target, surrogates, **budget),
            "d": lambda: learning_curves(target, lengths, **budget),
            "e": lambda: {
                name: stationary_kl(target, method, time=12.0, **common)
                for name, method in lengths.items()
            },
            "other_data": lambda: other_data(
                others, chains=args.chains, passes=args.passes, seeds=elsewhere
            ),
        },
    )
    report.kl_picture(results, args.out / "kl.png")
    return report.kl_tables(results), results


def errors(args: argparse.Namespace) -> Part:
    """Panels j, k, l."""
    target, runs = Gaussian.draw(DATA_SEED), []
    for exponent in range(4, args.smallest_step + 1):
        long = exponent in (4, 9)
        times = [2.0**e for e in range((args.longest_time if long else 3) + 1)]
        # Control variates work the better, the smaller h is.
        fewer = min(2 ** max(exponent - 9, 0), 8)
        runs.append(
            run_pairs(
                target,
                2.0**-exponent,
                times,
                chains=args.error_chains // fewer,
                seed=exponent,
                folder=args.out,
            )
        )
    results = {"num_data": target.num_data, "dim": target.dim}
    results |= error_orders(target, runs)
    report.errors_picture(results, args.out / "errors.png")
    return report.errors_tables(results), results


def lengths(args: argparse.Namespace) -> Part:
    """Panels f to i."""
    few = {"chains": args.chains // 4, "passes": args.passes}
    seeds = range(args.length_seeds)
    settings = {
        "chains": args.chains,
        "passes": args.passes,
        "seeds": args.length_seeds,
        "other_data": args.other_data,
        "other_chains": few["chains"],
        "sizes": list(DATA_SIZES),
        "lengths": list(LONGER),
        "steps": list(STEPS_BY_KIND),
    }
    results = panels(
        args,
        settings,
        {
            "fgh": lambda: lengths_of(
                DATA_SIZES,
                LONGER,
                data_seed=DATA_SEED,
                chains=args.chains,
                passes=args.passes,
                seeds=seeds,
            ),
            "steps": lambda: by_step(
                Gaussian.draw(DATA_SEED),
                STEPS_BY_KIND,
                chains=args.chains,
                time=12.0,
                seeds=seeds,
            ),
            "i": lambda: lengths_elsewhere(
                DATA_SIZES, LONGER, seeds=range(1000, 1000 + args.other_data), **few
            ),
        },
    )
    lengths_picture(results, args.out / "lengths.png")
    return lengths_table(results), results


PARTS = {"kl": kl, "errors": errors, "lengths": lengths}


def main() -> None:
    """The program."""
    run_alone(lambda args: run_parts(args, PARTS), parse_arguments())
