"""Deletes chains of a store, for runs that begin anew."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch_sgmcmc._C as _C

__all__ = ["chains_of", "delete_chain"]


def chains_of(store: Path) -> list[int]:
    """The numbers of the chains that a folder has, without draws too."""
    return list(_C.chains_in(str(store)))


def delete_chain(store: Path, chain: int, *others: Path) -> None:
    """Deletes a chain, and before it other files of its run, if nobody writes to it.

    Raises:
        RuntimeError: another writer has the chain.
    """
    layout = _C.read_index(str(store), chain).layout
    writer = _C.ChainWriter(str(store), chain, layout)  # the only one
    for path in others:
        path.unlink(missing_ok=True)
    shutil.rmtree(_C.chain_folder(str(store), chain))
    writer.close()
