"""Options that the MNIST examples share."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import torch
from reproduce.program import Parser

from .data import Images, load_digits, load_images


def add_options(
    parser: Parser,
    methods: Iterable[str],
    batch_size: int | None,
    default: Iterable[str] | None = None,
) -> None:
    """Adds what to run, on which data, where.

    Args:
        parser: the experiment's own.
        methods: the choices of --method.
        batch_size: the default; None is 500, and 100 of the digits.
        default: the methods if none are named; None is all.
    """
    methods = list(methods)
    parser.add_choice(
        "--method",
        methods,
        default=list(default or methods),
        help=f"one or several methods (default: {' '.join(default or ['all'])})",
    )
    parser.add_argument(
        "--seeds", type=int, help="number of seeds (default: 2; more with --paper)"
    )
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--batch-size",
        type=int,
        default=batch_size,
        help=f"default: {batch_size or '500, of the digits 100'}",
    )
    parser.add_data("MNIST/raw (default: download)")
    parser.add_argument(
        "--digits", action="store_true", help="scikit-learn's 8x8 digits, not MNIST"
    )
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_sizes("paper")
    parser.add_argument(
        "--tune", action="store_true", help="search step sizes on the validation set"
    )


def load(args: argparse.Namespace) -> Images:
    """The images that the command line asks for, on its device."""
    images = load_digits() if args.digits else load_images(args.data_root)
    return images.to(args.device)
