"""The posterior of a network on MNIST, and what it predicts.

The experiment of figure 4 of Chen, Fox and Guestrin (2014): a 784-100-10 network with
sigmoid units, 50,000 training images, minibatches of 500; SGD, SGD with momentum, SGLD
and SGHMC. The samplers draw each layer's prior precision from its Gamma full
conditional after every epoch and predict with the mean softmax output over one
sample an epoch after burn-in.

    python examples/papers sghmc2014.mnist                     # all, 60 epochs, 2 seeds
    python examples/papers sghmc2014.mnist --method sghmc --epochs 200
    python examples/papers sghmc2014.mnist --paper             # 800 epochs, 5 seeds
    python examples/papers sghmc2014.mnist --tune              # choose step sizes
    python examples/papers sghmc2014.mnist --method sghmc psbps --precision 1

The bouncy particle samplers, sbps and psbps, run if they are named. They start where
some epochs of SGD with momentum end, and keep the prior precision at 1.

The network and its settings are in bnn/methods.py, the data in bnn/data.py, the loop in
bnn/loop.py, and what it trains in bnn/run.py and bnn/bouncy.py.

Results go to --out: results.json, figure4.png, uncertainty.png, learning.png; for each
run a checkpoint, from which it continues if it was interrupted, and a folder of draws,
from which ``torch_sgmcmc.predict`` predicts whatever else is wanted.
"""

from __future__ import annotations

import argparse
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

from reproduce.program import Parser, finish, run_alone

from .bnn.curves import learning_curves
from .bnn.experiment import run_in_turn, tune
from .bnn.methods import FIGURE_4, METHODS, SEARCH
from .bnn.options import add_options, load
from .bnn.pairs import pairs_table
from .bnn.report import (
    COLORS,
    LABELS,
    environment,
    figure_4,
    results,
    table,
    uncertainty,
)
from .bnn.run import RunConfig, run

# Sizes of a run, short and with --paper. The 1,200 digits need smaller minibatches and
# more epochs for as many updates.
MNIST = {
    "epochs": (60, 800),
    "burn_in": (10, 50),
    "batch_size": (500, 500),
    "seeds": (2, 5),
}
DIGITS = MNIST | {"epochs": (200, 800), "burn_in": (50, 50), "batch_size": (100, 100)}


def parse_arguments(*more: str) -> argparse.Namespace:
    """The command line, with more options behind."""
    parser = Parser(__doc__, __name__)
    add_options(parser, METHODS, batch_size=None, default=FIGURE_4)
    parser.add_argument(
        "--epochs", type=int, help="default: 60, of the digits 200, with --paper 800"
    )
    parser.add_argument(
        "--burn-in", type=int, help="default: 10, of the digits 50, with --paper 50"
    )
    parser.add_argument("--lr", type=float, help="step size, instead of the tuned one")
    parser.add_argument(
        "--precision",
        type=float,
        help="fixed prior precision (default: the samplers but SBPS draw it; 1)",
    )
    parser.add_argument(
        "--draw-precision",
        action="store_true",
        help="sbps and psbps draw the prior precision as the other samplers do",
    )
    parser.add_argument(
        "--start-epochs",
        type=int,
        help="epochs of SGD with momentum before sbps and psbps start (default: 5)",
    )
    args = parser.parse_args([*sys.argv[1:], *more])
    parser.fill_in(args, DIGITS if args.digits else MNIST)
    parser.check_at_least(args, seeds=1, batch_size=1)
    bouncy = [method for method in args.method if "start_epochs" in METHODS[method]]
    if args.lr is not None and bouncy:
        parser.error(f"--lr is not for {', '.join(bouncy)}: they have no step size")
    if args.precision is not None and not 0 <= args.precision < math.inf:
        parser.error(f"--precision {args.precision:g} must be finite and >= 0")
    if args.precision is not None and args.draw_precision:
        parser.error("--precision and --draw-precision exclude each other")
    if args.start_epochs is not None and not 0 <= args.start_epochs <= args.burn_in:
        parser.error(
            f"--start-epochs {args.start_epochs} must be in [0, --burn-in "
            f"{args.burn_in}]"
        )
    if not 0 <= args.burn_in < args.epochs:
        parser.error(f"--burn-in {args.burn_in} must be in [0, --epochs {args.epochs})")
    return args


def make_config(
    args: argparse.Namespace,
    dataset: str,
    method: str,
    seed: int,
    settings: dict[str, float],
    validate: bool = False,
) -> RunConfig:
    """The configuration of one run."""
    if args.lr is not None:
        settings = settings | {"lr": args.lr}
    if args.precision is not None:
        settings = settings | {"precision": args.precision}
    if "start_epochs" in settings:
        if args.start_epochs is not None:
            settings = settings | {"start_epochs": args.start_epochs}
        if args.draw_precision:
            settings = {k: v for k, v in settings.items() if k != "precision"}
    return RunConfig(
        method,
        seed,
        tuple(settings.items()),
        args.epochs,
        args.burn_in,
        args.batch_size,
        dataset,
        validate,
    )


def run_all(args: argparse.Namespace) -> None:
    """Runs what the command line asks for and reports."""
    images = load(args)
    if images.name != "MNIST" and not args.digits:  # it could not be downloaded
        args = parse_arguments("--digits")

    def go(config: RunConfig, folder: Path) -> dict[str, Any]:
        return run(config, images, folder)

    configure = partial(make_config, args, images.name)
    if args.tune:
        return tune(args, SEARCH, configure, go)
    runs = run_in_turn(args, METHODS, configure, go)
    figure_4(runs, args.out / "figure4.png")
    uncertainty(runs, images, args.out / "uncertainty.png")
    learning_curves(
        runs,
        args.out / "learning.png",
        LABELS,
        COLORS,
        title=images.name,
        abscissa="epochs (evaluations / N)",
    )
    text = f"{images.name}, {args.epochs} epochs, {args.burn_in} burn-in"
    text = f"{text}\n\n{table(runs)}"
    if len(runs) > 1:
        text += f"\n\n{pairs_table(runs, images.test_y)}"
    finish(args, {"runs": results(runs)}, text, **environment(images))


def main() -> None:
    """The program."""
    run_alone(run_all, parse_arguments())
