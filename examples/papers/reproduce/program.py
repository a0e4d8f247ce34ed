"""What the examples' programs share: command lines, and results.json."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import torch_sgmcmc as sg
from reproduce import checkpoint

__all__ = ["Parser", "alone", "versions", "write_json"]


class Parser(argparse.ArgumentParser):
    """A command line with ``--threads`` and ``--out``.

    Args:
        doc: the program's.
        name: of the folder under runs/ that is the default of --out.
    """

    def __init__(self, doc: str | None, name: str) -> None:
        super().__init__(
            description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        self.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
        self.add_argument("--out", type=Path, default=Path("runs") / name)

    def add_sizes(self) -> None:
        """Adds ``--paper`` and ``--tiny``: the ``size``, which is "short" without."""
        group = self.add_mutually_exclusive_group()
        for size, words in (
            ("paper", "what the results page shows"),
            ("tiny", "seconds, to try it out"),
        ):
            group.add_argument(
                f"--{size}", dest="size", action="store_const", const=size, help=words
            )
        self.set_defaults(size="short")

    def fill_in(
        self, args: argparse.Namespace, sizes: Mapping[str, tuple[int, int]]
    ) -> None:
        """Sets what was not given: by name, its default and that with ``--paper``."""
        for name, (short, full) in sizes.items():
            if getattr(args, name) is None:
                setattr(args, name, full if args.paper else short)

    def check_at_least(self, args: argparse.Namespace, **lows: int) -> None:
        """Refuses what is given and too small."""
        for name, low in {"threads": 1, **lows}.items():
            value = getattr(args, name)
            if value is not None and value < low:
                self.error(f"--{name.replace('_', '-')} must be at least {low}")


def alone(
    run_all: Callable[[argparse.Namespace], None], args: argparse.Namespace
) -> None:
    """Runs with so many threads, and keeps other runs out of the folder meanwhile."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    with checkpoint.owned(args.out):
        run_all(args)


def versions() -> dict[str, Any]:
    """Versions of what numbers depend on, and the number of threads."""
    return {
        "torch": torch.__version__,
        "torch_sgmcmc": sg.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }


def write_json(document: Any, path: Path) -> None:
    """Writes figures, all of them or nothing: programs go on from such files, too."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(path)
