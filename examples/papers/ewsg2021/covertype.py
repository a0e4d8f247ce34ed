"""Bayesian logistic regression on Covertype: 200 chains of each method.

The experiment of table 1 and figure 2 of "Improving Sampling Accuracy of Stochastic
Gradient MCMC Methods via Non-uniform Subsampling of Gradients" (EWSG, 2021): class 2
against the rest, 80 % of the rows for training, prior N(0, 10 I), minibatches of 50,
γ = 50, one pass, and scores of the last θ of 200 independent chains on the test rows.
EWSG takes two minibatches a step, and makes half as many steps; with --halved as many,
with minibatches of 25. The data are a subset of 16 %, so one pass is shorter than the
paper's: --paper makes as many steps as one pass through all data.

    python examples/papers ewsg2021.covertype --data-root DIR
    python examples/papers ewsg2021.covertype --data-root DIR --paper  # 6.25 passes
    python examples/papers ewsg2021.covertype --data-root DIR --tune  # choose steps
    python examples/papers ewsg2021.covertype --data-root DIR --noise  # of all data
    python examples/papers ewsg2021.covertype --data-root DIR --method sghmc ewsg \
        --h 2e-4 3e-4 5e-4 1e-3 2e-3 3e-3  # all methods with each step size

Results go to --out: results.json, curves.png (with --tune search.png, with --h
steps.png), and what each method has found, from which an interrupted run continues.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from typing import Any

from reproduce.kept import kept
from reproduce.program import Parser, finish, run_alone

from .blr.data import FULL_SIZE, Split, load
from .blr.methods import METHODS, Firefly
from .blr.reference import reference
from .blr.report import curves, noise_table, search_picture, search_table, table
from .blr.run import RunConfig, run

# Times the paper's step size; of these --tune chooses.
FACTORS = (0.03, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 4.0)
# And those with which FlyMC gets far from θ = 0.
FURTHER = {"flymc": (8.0, 16.0, 32.0)}


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = Parser(__doc__, __name__)
    parser.add_data("covertype/", required=True)
    parser.add_choice("--method", METHODS)
    parser.add_argument("--h", type=float, nargs="+", help="step sizes of all methods")
    parser.add_argument("--passes", type=float, default=1.0)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument(
        "--halved",
        action="store_true",
        help="EWSG: as many steps as other methods, with smaller minibatches",
    )
    parser.add_argument("--chains", type=int, default=200)
    parser.add_argument("--strata", type=int, default=10, help="k-means clusters")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reference-steps", type=int, default=200)
    parser.add_sizes("paper")
    parser.add_argument(
        "--tune", action="store_true", help="try step sizes on a part of training"
    )
    parser.add_argument(
        "--noise",
        action="store_true",
        help="the paper's h beside that which has the noise of h on all data",
    )
    parser.add_argument("--splits", type=int, default=3, help="for --noise")
    args = parser.parse_args()
    if not all(value > 0 for value in (args.passes, *(args.h or ()))):
        parser.error(f"--passes {args.passes} and --h {args.h} must be > 0")
    parser.check_at_least(
        args, batch_size=2, chains=2, strata=1, seed=0, reference_steps=1, splits=2
    )
    return args


def configuration(
    args: argparse.Namespace, method: str, step_size: float, passes: float
) -> RunConfig:
    """The configuration of one run."""
    return RunConfig(
        method,
        step_size,
        passes,
        args.batch_size,
        args.chains,
        args.strata,
        args.seed,
        halved=args.halved,
    )


def found(
    args: argparse.Namespace, name: str, config: RunConfig, split: Split
) -> dict[str, Any]:
    """The result of a run, made once."""
    return kept(args.out, name, asdict(config), lambda: run(config, split))


def tune(args: argparse.Namespace, split: Split) -> None:
    """Prints the scores of all step sizes on rows held back from training."""
    validation = split.for_validation()
    search = []
    for name in args.method:
        method = METHODS[name]
        if method.step_size is None or method.tuned is None:
            continue  # nothing to choose
        for factor in FACTORS + FURTHER.get(name, ()):
            h = factor * method.step_size
            config = configuration(args, name, h, args.passes)
            search.append(found(args, f"search-{name}", config, validation))
    search_picture(search, args.out / "search.png")
    finish(args, {"search": search}, search_table(search))


def by_step(args: argparse.Namespace, split: Split, passes: float) -> None:
    """Prints test scores of all methods with each step size."""
    runs = [
        found(args, f"h-{name}", configuration(args, name, h, passes), split)
        for name in args.method
        for h in args.h
    ]
    search_picture(runs, args.out / "steps.png", "test log-likelihood", in_units=False)
    finish(args, {"steps": runs}, search_table(runs))


def noise(args: argparse.Namespace) -> None:
    """Prints scores with h as in the paper and with its noise, over several splits."""
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for seed in range(args.seed, args.seed + args.splits):
        args.seed = seed
        split = load(args.data_root, seed=seed)
        ratio = FULL_SIZE / (len(split.train_x) + len(split.test_x))
        for name in args.method:
            method = METHODS[name]
            if isinstance(method, Firefly):
                continue  # without minibatches
            h, friction = method.like_all_data(ratio)
            config = configuration(args, name, method.step_size, args.passes)
            like_all = replace(config, step_size=h, friction=friction)
            for which, setting in (("h", config), ("noise", like_all)):
                results = runs.setdefault(name, {}).setdefault(which, [])
                results.append(found(args, f"noise-{name}", setting, split))
    finish(args, {"noise": runs}, noise_table(runs))


def run_all(args: argparse.Namespace) -> None:
    """Runs what the command line asks for and reports."""
    split = load(args.data_root, seed=args.seed)
    rows = len(split.train_x) + len(split.test_x)
    if args.tune:
        return tune(args, split)
    if args.noise:
        return noise(args)
    whole = args.size == "paper"
    passes = args.passes * FULL_SIZE / rows if whole else args.passes
    if args.h is not None:
        return by_step(args, split, passes)
    runs: dict[str, dict[str, Any]] = {"paper": {}, "tuned": {}}
    for which, results in runs.items():
        for name in args.method:
            method = METHODS[name]
            h = method.step_size if which == "paper" else method.tuned
            if h is None:
                continue
            config = configuration(args, name, h, passes)
            results[name] = found(args, name, config, split)
    truth = reference(
        split, chains=args.chains, steps=args.reference_steps, seed=args.seed
    )
    curves(runs, truth, args.out / "curves.png")
    text = (
        f"{rows} rows of Covertype's {FULL_SIZE}, {passes:.3g} passes, "
        f"{args.chains} chains: mean ± deviation (standard error) of single chains, "
        "and scores of the mean of their predictions ± bootstrap deviation\n\n"
        f"{table(runs, truth)}"
    )
    sizes = {"rows": rows, "training rows": len(split.train_x)}
    finish(args, {"runs": runs, "reference": truth}, text, **sizes)


def main() -> None:
    """The program."""
    run_alone(run_all, parse_arguments())
