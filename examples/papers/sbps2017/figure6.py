"""SBPS on small images of four digits: figure 6 of the SBPS paper.

Softmax regression on MNIST at 7x7 pixels, d = 192, N = 8340, minibatches of 500, the
prior exp(−0.001 ‖w‖²), from w = 0: SBPS and SGLD with several step sizes, at equal
numbers of evaluations, against a long Metropolis-Hastings run: Hamiltonian Monte Carlo
with all data and a Metropolis test.

    python examples/papers sbps2017.figure6                  # 1500 epochs, 2 seeds
    python examples/papers sbps2017.figure6 --paper          # 10,000 epochs, 3 seeds
    python examples/papers sbps2017.figure6 --paper --refresh-rate 0 0.003
    python examples/papers sbps2017.figure6 --paper --lr --num_std 3 5
    python examples/papers sbps2017.figure6 --paper --summed --refresh-rate 0.05
    python examples/papers sbps2017.figure6 --digits         # no data needed

Results go to --out: results.json, figure6.png, the reference and a checkpoint for each
run, from which an interrupted run continues.
"""

from __future__ import annotations

import argparse

from reproduce.program import Parser, finish, run_alone

from .mnist7.chains import ChainConfig, run_chain
from .mnist7.data import load_digits4, load_mnist7
from .mnist7.reference import make_reference
from .mnist7.report import Run, figure_6, name_of, score, squares_table, table


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = Parser(__doc__, __name__)
    add = parser.add_argument
    add("--epochs", type=int, help="of N evaluations (default: 1500, --paper 10000)")
    add("--burn-in", type=int, help="epochs (default: a half of --epochs)")
    add("--seeds", type=int, help="number of seeds (default: 2, --paper 3)")
    add("--lr", type=float, nargs="*", default=[0.01, 0.1, 1.0], help="SGLD's lr")
    add("--refresh-rate", type=float, nargs="*", default=[0.0], help="of SBPS")
    add("--num_std", type=float, nargs="*", default=[3.0], help="k of SBPS")
    add("--summed", action="store_true", help="pixels are sums of blocks, not means")
    add("--batch-size", type=int, default=500)
    add("--draws", type=int, help="of the reference's 4 chains (default: 250, 1000)")
    parser.add_data("MNIST/raw (default: download)")
    add("--digits", action="store_true", help="scikit-learn's digits at 4x4, not MNIST")
    parser.add_sizes("paper")
    args = parser.parse_args()
    sizes = {"epochs": (1500, 10_000), "seeds": (2, 3), "draws": (250, 1000)}
    parser.fill_in(args, sizes)
    parser.check_at_least(args, epochs=1, seeds=1, draws=1, batch_size=2)
    if args.burn_in is None:
        args.burn_in = args.epochs // 2
    if not 0 <= args.burn_in < args.epochs:
        parser.error(f"--burn-in {args.burn_in} must be in [0, --epochs {args.epochs})")
    return args


def run_all(args: argparse.Namespace) -> None:
    """Runs what the command line asks for and reports."""
    if args.digits:
        images = load_digits4(summed=args.summed)
    else:
        images = load_mnist7(args.data_root, summed=args.summed)
    reference = make_reference(images, 4, args.draws, args.out)
    methods = [("sgld", lr, 3.0) for lr in args.lr] + [
        ("sbps", rate, k) for k in args.num_std for rate in args.refresh_rate
    ]
    runs: dict[str, list[Run]] = {}
    first_results = {}
    for method, setting, k in methods:
        for seed in range(args.seeds):
            config = ChainConfig(
                method,
                setting,
                seed,
                args.epochs,
                args.batch_size,
                images.name,
                k,
                # The same places, whatever a unit of w is.
                0.5 / images.added,
            )
            result = run_chain(config, images, args.out)
            run = score(config, result, reference, images, args.burn_in)
            runs.setdefault(name_of(run), []).append(run)
            first_results.setdefault(name_of(run), result)
    figure_6(
        first_results,
        reference,
        len(images.train_y),
        args.burn_in,
        args.out / "figure6.png",
    )
    quality = ", ".join(f"{k} {v:.4g}" for k, v in reference.quality.items())
    text = (
        f"{images.name}, N {len(images.train_y)}, d {len(reference.mean)}, "
        f"{args.epochs} epochs, {args.burn_in} burn-in; reference: {quality}\n\n"
        f"{table(runs)}\n\nMean squares by tenths of the runs, 1 in equilibrium\n\n"
        f"{squares_table(runs)}"
    )
    document = {
        "reference": reference.quality | {"deviations": reference.deviations.tolist()},
        "runs": [run for some in runs.values() for run in some],
    }
    finish(args, document, text)


def main() -> None:
    """The program."""
    run_alone(run_all, parse_arguments())
