"""Five samplers on MNIST at equal numbers of gradients: figure 3 of the EWSG paper.

A 784-100-10 network or one with two convolutions, all 60,000 training images, the prior
N(0, 1) on all weights, independent minibatches of 100; EWSG (two minibatches an update,
and so half as many updates; with --halved as many, with minibatches of 50), SGHMC,
CP-SGHMC (stratified minibatches), SGLD and pSGLD, and with the paper's settings SGHMC
with those of EWSG. Test error and log-likelihood of the mean prediction against passes
over the data.

    python examples/papers ewsg2021.mnist                    # 10 passes, 2 seeds
    python examples/papers ewsg2021.mnist --settings paper   # the paper's step sizes
    python examples/papers ewsg2021.mnist --model cnn --passes 1 --burn-in 0.5 \
        --samples-per-pass 4
    python examples/papers ewsg2021.mnist --paper            # 200 passes, 100 chains
    python examples/papers ewsg2021.mnist --tune             # choose step sizes

Predictions are averaged over --chains independent chains, and after --burn-in passes
over the samples of each chain. Results go to --out: results.json, learning.png and one
checkpoint for each run, from which an interrupted run continues.
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from pathlib import Path
from typing import Any

from reproduce.program import Parser, finish, run_alone
from sghmc2014.bnn.experiment import run_in_turn, tune
from sghmc2014.bnn.options import add_options, load
from sghmc2014.bnn.report import environment, results

from .ensemble.methods import (
    CONTROL,
    FINALISTS,
    INDEX_CHAIN_LENGTH,
    LABELS,
    PAPER,
    SEARCH,
    TUNED,
)
from .ensemble.models import MODELS
from .ensemble.report import differences, learning_curves, table
from .ensemble.run import EnsembleConfig, run


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = Parser(__doc__, __name__)
    add_options(parser, LABELS, batch_size=100)
    parser.set_defaults(method=None)
    parser.add_argument("--model", choices=list(MODELS), default="mlp")
    parser.add_argument(
        "--settings",
        choices=["tuned", "paper"],
        default="tuned",
        help="step sizes and friction: chosen on the validation set, or the paper's",
    )
    parser.add_argument(
        "--h", type=float, help="step size for the sum, instead of the settings'"
    )
    parser.add_argument("--gamma", type=float, help="friction, likewise")
    parser.add_argument(
        "--halved",
        action="store_true",
        help="EWSG: as many updates as other methods, with smaller minibatches",
    )
    parser.add_argument(
        "--passes", type=int, help="over the data (default: 10, with --paper 200)"
    )
    parser.add_argument(
        "--burn-in",
        type=float,
        help="passes before a chain's samples are averaged, during which pSGLD adapts; "
        "as many as --passes: only chains are (default: 5, with --paper 200)",
    )
    parser.add_argument(
        "--samples-per-pass",
        type=int,
        default=1,
        help="that are averaged and scored (default: 1)",
    )
    parser.add_argument(
        "--chains",
        type=int,
        help="independent chains that predict together (default: 1, with --paper 100)",
    )
    args = parser.parse_args()
    if args.method is None:
        is_paper = args.settings == "paper"
        args.method = [m for m in LABELS if is_paper or m != CONTROL]
    parser.fill_in(
        args,
        {
            "passes": (10, 200),
            "burn_in": (5.0, 200.0),
            "chains": (1, 100),
            "seeds": (2, 3),
        },
    )
    parser.check_at_least(
        args, passes=1, samples_per_pass=1, chains=1, seeds=1, batch_size=1
    )
    if not 0 <= args.burn_in <= args.passes:
        parser.error(
            f"--burn-in {args.burn_in:g} must be in [0, --passes {args.passes}]"
        )
    samples = args.burn_in * args.samples_per_pass
    if not math.isclose(samples, round(samples), abs_tol=1e-9):
        parser.error(
            f"--burn-in {args.burn_in:g} must be a multiple of 1 / "
            f"{args.samples_per_pass}, after which a sample is taken"
        )
    if args.burn_in == 0 and "psgld" in args.method:
        parser.error(
            "--burn-in 0 leaves pSGLD no time to adapt: have one, or choose other "
            "methods with --method"
        )
    if args.halved and args.batch_size % (INDEX_CHAIN_LENGTH + 1):
        parser.error(
            f"--batch-size {args.batch_size} must be a multiple of "
            f"{INDEX_CHAIN_LENGTH + 1}, the minibatches that EWSG takes for an update"
        )
    return args


def make_config(
    args: argparse.Namespace,
    dataset: str,
    method: str,
    seed: int,
    settings: dict[str, float],
    validate: bool = False,
) -> EnsembleConfig:
    """The configuration of one run."""
    for name in settings:
        if getattr(args, name) is not None:
            settings = settings | {name: getattr(args, name)}
    return EnsembleConfig(
        method,
        seed,
        tuple(settings.items()),
        args.passes * args.samples_per_pass,
        round(args.burn_in * args.samples_per_pass),
        args.batch_size,
        dataset,
        validate,
        args.model,
        args.chains,
        args.samples_per_pass,
        args.halved,
    )


def run_all(args: argparse.Namespace) -> None:
    """Runs what the command line asks for and reports."""
    images = load(args)
    papers = PAPER[args.model]

    def go(config: EnsembleConfig, folder: Path) -> dict[str, Any]:
        return run(config, images, folder)

    configure = partial(make_config, args, images.name)
    if args.tune:
        search = {m: [papers[m], *SEARCH[args.model][m]] for m in args.method}
        return tune(args, search, configure, go, FINALISTS)
    settings = papers if args.settings == "paper" else TUNED[args.model]
    runs = run_in_turn(args, settings, configure, go)
    learning_curves(runs, args.out / "learning.png")
    text = (
        f"{images.name}, {args.model}, {args.settings} settings, {args.passes} "
        f"passes, {args.burn_in:g} burn-in, {args.chains} chains, "
        f"{args.samples_per_pass} samples a pass\n\n"
        f"{table(runs)}\n\n{differences(runs)}"
    )
    finish(args, {"runs": results(runs)}, text, **environment(images))


def main() -> None:
    """The program."""
    run_alone(run_all, parse_arguments())
