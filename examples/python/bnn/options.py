"""Options that the MNIST examples share."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

import torch

from .data import Images, load_digits, load_images

__all__ = ["add_options", "check_options", "load"]


def add_options(
    parser: argparse.ArgumentParser,
    methods: Iterable[str],
    batch_size: int | None,
    name: str,
    default: Iterable[str] | None = None,
) -> None:
    """Adds what to run, on which data, where.

    Args:
        parser: the example's own.
        methods: the choices of --method.
        batch_size: the default; None is 500, and 100 of the digits.
        name: of the folder under runs/ that is the default of --out.
        default: the methods if none are named; None is all.
    """
    default = None if default is None else list(default)
    parser.add_argument(
        "--method",
        nargs="+",
        choices=list(methods),
        default=default or list(methods),
        help=f"one or several methods (default: {' '.join(default or ['all'])})",
    )
    parser.add_argument(
        "--seeds", type=int, help="number of seeds (default: 2, with --paper 3)"
    )
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--batch-size",
        type=int,
        default=batch_size,
        help=f"default: {batch_size or '500, of the digits 100'}",
    )
    parser.add_argument(
        "--data-root", type=Path, help="folder that holds MNIST/raw (default: download)"
    )
    parser.add_argument(
        "--digits", action="store_true", help="scikit-learn's 8x8 digits, not MNIST"
    )
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--out", type=Path, default=Path("runs") / name)
    parser.add_argument("--paper", action="store_true", help="the paper's full length")
    parser.add_argument(
        "--tune", action="store_true", help="search step sizes on the validation set"
    )


def check_options(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    sizes: dict[str, tuple[int, int]],
    at_least_one: Iterable[str],
) -> None:
    """Fills in what depends on --paper, and refuses what cannot be.

    Args:
        parser: reports errors.
        args: what was parsed.
        sizes: by option, its default and that with --paper.
        at_least_one: options that must be positive.
    """
    for name, (short, full) in sizes.items():
        if getattr(args, name) is None:
            setattr(args, name, full if args.paper else short)
    for name in at_least_one:
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")


def load(args: argparse.Namespace) -> Images:
    """The images that the command line asks for, on its device."""
    images = load_digits() if args.digits else load_images(args.data_root)
    return images.to(args.device)
