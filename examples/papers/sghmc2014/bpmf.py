"""Online Bayesian matrix factorisation: table 1 of the SGHMC paper.

Ratings of movies as u . v + a + b with Gaussian noise, 20 dimensions, minibatches of
4,000 ratings, and all five precisions drawn anew every 2,000 steps; SGD, SGD with
momentum, SGLD and SGHMC by five-fold cross validation. MovieLens' ratings are read from
the file that you have downloaded; without, ratings are drawn from the model in the
shape of ml-1M.

    python examples/papers sghmc2014.bpmf  # simulated ratings
    python examples/papers sghmc2014.bpmf --ratings ml-1m/ratings.dat
    python examples/papers sghmc2014.bpmf --paper  # 2,000,000 steps
    python examples/papers sghmc2014.bpmf --tune  # choose step sizes
    python examples/papers sghmc2014.bpmf --reference  # exact Gibbs sampling
    python examples/papers sghmc2014.bpmf --cost  # the time of a step

Results go to --out: results.json, bpmf.png and one checkpoint for each run, from which
an interrupted run continues.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from reproduce.program import Parser, finish, run_alone, write_json

from .pmf import cost, report
from .pmf.data import FOLDS, ML_1M, TINY, Ratings, load, simulate
from .pmf.gibbs import posterior
from .pmf.methods import LABELS, SEARCH, SETTINGS
from .pmf.run import RunConfig, run

# Of each size: steps, those of burn-in, those of a round, and from one averaged sample
# to the next. The paper has one a round.
SIZES = {
    "tiny": (400, 200, 50, 10),
    "short": (60_000, 20_000, 2000, 250),
    "paper": (2_000_000, 100_000, 2000, 2000),
}


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = Parser(__doc__, __name__)
    parser.add_sizes()
    parser.add_choice("--method", LABELS)
    parser.add_choice("--fold", range(FOLDS))
    parser.add_argument("--ratings", type=Path, help="ratings.dat or u.data")
    parser.add_argument("--steps", type=int, help="instead of the size's")
    parser.add_argument("--burn-in", type=int, help="likewise")
    parser.add_argument(
        "--lr-factor", type=float, help="times the step sizes (default: 1, --tiny 0.03)"
    )
    parser.add_argument("--batch-size", type=int, default=4000)
    parser.add_argument("--dimensions", type=int, default=20)
    parser.add_argument("--sweeps", type=int, default=300, help="for --reference")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--tune", action="store_true", help="on a fifth of training")
    what.add_argument("--reference", action="store_true", help="the posterior itself")
    what.add_argument("--cost", action="store_true", help="the time of a step in parts")
    args = parser.parse_args()
    steps, burn_in, args.round, args.every = SIZES[args.size]
    args.steps = steps if args.steps is None else args.steps
    args.burn_in = burn_in if args.burn_in is None else args.burn_in
    if args.lr_factor is None:  # few ratings of many rows bear long steps
        args.lr_factor = 0.03 if args.size == "tiny" else 1.0
    if not args.lr_factor > 0:
        parser.error(f"--lr-factor {args.lr_factor} must be > 0")
    parser.check_at_least(
        args, steps=1, burn_in=0, batch_size=1, dimensions=1, sweeps=2
    )
    for name in ("steps", "burn_in"):
        if getattr(args, name) % args.round:
            option = name.replace("_", "-")
            parser.error(f"--{option} must be a multiple of {args.round}, a round's")
    if args.burn_in >= args.steps:
        parser.error(f"--burn-in {args.burn_in} must be below --steps {args.steps}")
    return args


def read(args: argparse.Namespace) -> Ratings:
    """The file's ratings, or simulated ones."""
    if args.ratings is None:
        return simulate(TINY if args.size == "tiny" else ML_1M)
    try:
        return load(args.ratings)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from error


def configuration(
    args: argparse.Namespace,
    ratings: Ratings,
    method: str,
    fold: int,
    settings: dict[str, float],
) -> RunConfig:
    """The configuration of one run."""
    scaled = settings | {"lr": args.lr_factor * settings["lr"]}
    return RunConfig(
        method,
        fold,
        tuple(scaled.items()),
        args.steps // args.round,
        args.burn_in // args.round,
        args.round,
        args.every,
        args.batch_size,
        args.dimensions,
        ratings.name,
        args.tune,
    )


def tune(args: argparse.Namespace, ratings: Ratings) -> None:
    """Prints the errors of all settings on a fifth of a fold's training ratings."""
    runs = []
    for method in args.method:
        for number, settings in enumerate(SEARCH[method]):
            folder = args.out / "tune" / f"{method}{number}"
            folder.mkdir(parents=True, exist_ok=True)
            for fold in args.fold:
                config = configuration(args, ratings, method, fold, settings)
                try:
                    runs.append(run(config, ratings, folder))
                except RuntimeError as error:  # a gradient that is not finite
                    print(f"{method}, {settings}: {error}")
    print(report.search_table(runs))


def reference(args: argparse.Namespace, ratings: Ratings) -> None:
    """Draws from the posterior of each fold."""
    for fold in args.fold:
        result = posterior(
            *ratings.fold(fold),
            dimensions=args.dimensions,
            sweeps=args.sweeps,
            burn_in=args.sweeps // 3,
            seed=fold,
        )
        last = result["history"][-1]
        write_json(result, args.out / f"reference-fold{fold}.json")
        precisions = " ".join(f"{value:.3g}" for value in last["precisions"])
        print(
            f"Fold {fold}, {last['samples']} sweeps: RMSE {last['rmse']:.4f}, of the "
            f"last {last['last']:.4f}; λ of u, v, a, b, and τ: {precisions}"
        )


def run_all(args: argparse.Namespace) -> None:
    """Runs what the command line asks for and reports."""
    ratings = read(args)
    if args.cost:
        return print(cost.table(ratings, args.dimensions, args.batch_size))
    if args.tune:
        return tune(args, ratings)
    if args.reference:
        return reference(args, ratings)
    runs: dict[str, list[dict[str, Any]]] = {}
    for fold in args.fold:
        for method in args.method:
            settings = SETTINGS[method]
            config = configuration(args, ratings, method, fold, settings)
            runs.setdefault(method, []).append(run(config, ratings, args.out))
    report.curves(runs, args.out / "bpmf.png")
    text = f"{ratings.name}; {args.steps} steps, {args.burn_in} burn-in"
    text = f"{text}\n\n{report.table(runs)}"
    finish(args, {"runs": runs}, text, ratings=ratings.name)


def main() -> None:
    """The program."""
    run_alone(run_all, parse_arguments())
