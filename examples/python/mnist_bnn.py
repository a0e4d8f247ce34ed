"""The posterior of a network on MNIST, and what it predicts.

The experiment of figure 4 of Chen, Fox and Guestrin (2014): a 784-100-10 network with
sigmoid units, 50,000 training images, minibatches of 500; SGD, SGD with momentum, SGLD
and SGHMC. The samplers draw each layer's prior precision from its Gamma full
conditional after every epoch and predict with the mean softmax output over one
sample an epoch after burn-in.

    python examples/python/mnist_bnn.py                     # all, 60 epochs, 2 seeds
    python examples/python/mnist_bnn.py --method sghmc --epochs 200
    python examples/python/mnist_bnn.py --paper             # 800 epochs, 3 seeds
    python examples/python/mnist_bnn.py --tune              # choose step sizes

Results go to --out: results.json, figure4.png, uncertainty.png and one checkpoint
for each run, from which an interrupted run continues.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from bnn.data import Images, load_digits, load_images
from bnn.methods import METHODS, SEARCH
from bnn.report import environment, figure_4, table, uncertainty, write_json
from bnn.run import RunConfig, run


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--method",
        nargs="+",
        choices=list(METHODS),
        default=list(METHODS),
        help="one or several methods (default: all)",
    )
    parser.add_argument("--epochs", type=int, help="default: 60, with --paper 800")
    parser.add_argument("--burn-in", type=int, help="default: 10, with --paper 50")
    parser.add_argument(
        "--seeds", type=int, help="number of seeds (default: 2, with --paper 3)"
    )
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=500)
    parser.add_argument("--lr", type=float, help="step size, instead of the tuned one")
    parser.add_argument(
        "--data-root", type=Path, help="folder that holds MNIST/raw (default: download)"
    )
    parser.add_argument(
        "--digits", action="store_true", help="scikit-learn's 8x8 digits, not MNIST"
    )
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--out", type=Path, default=Path("runs/mnist_bnn"))
    parser.add_argument("--paper", action="store_true", help="the paper's full length")
    parser.add_argument(
        "--tune", action="store_true", help="search step sizes on the validation set"
    )
    args = parser.parse_args()
    for name, short, full in (
        ("epochs", 60, 800),
        ("burn_in", 10, 50),
        ("seeds", 2, 3),
    ):
        if getattr(args, name) is None:
            setattr(args, name, full if args.paper else short)
    if not 0 <= args.burn_in < args.epochs:
        parser.error(f"--burn-in {args.burn_in} must be in [0, --epochs {args.epochs})")
    for name in ("seeds", "batch_size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return args


def load(args: argparse.Namespace) -> Images:
    """The images that the command line asks for, on its device."""
    images = load_digits() if args.digits else load_images(args.data_root)
    return images.to(args.device)


def tune(args: argparse.Namespace) -> None:
    """Prints the validation scores of every setting in the search."""
    images = load(args)
    print("| method | settings | validation error | NLL |\n| --- | --- | --- | --- |")
    for method in args.method:
        for i, settings in enumerate(SEARCH[method]):
            config = make_config(args, images.name, method, 0, settings, validate=True)
            folder = args.out / "tune" / f"{method}{i}"
            folder.mkdir(parents=True, exist_ok=True)
            last = run(config, images, folder)["history"][-1]
            words = ", ".join(f"{k} {v:g}" for k, v in settings.items())
            print(f"| {method} | {words} | {last['error']:.2%} | {last['nll']:.4f} |")


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


def main() -> None:
    """Runs what the command line asks for and reports."""
    args = parse_arguments()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    if args.tune:
        return tune(args)
    images = load(args)
    args.out.mkdir(parents=True, exist_ok=True)
    runs = {
        method: [
            run(
                make_config(args, images.name, method, seed, METHODS[method]),
                images,
                args.out,
            )
            for seed in range(args.first_seed, args.first_seed + args.seeds)
        ]
        for method in args.method
    }
    write_json(runs, environment(images), args.out / "results.json")
    figure_4(runs, args.out / "figure4.png")
    uncertainty(runs, images, args.out / "uncertainty.png")
    print(f"\n{images.name}, {args.epochs} epochs, {args.burn_in} burn-in\n")
    print(table(runs))
    print(f"\nPictures and results.json are in {args.out}")


if __name__ == "__main__":
    main()
