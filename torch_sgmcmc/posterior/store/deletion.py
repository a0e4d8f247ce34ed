"""Deletes all chains of a store, for runs that begin anew."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path

import torch_sgmcmc._C as _C
from torch_sgmcmc.chain.files import sync_folder

__all__ = ["check_whole", "delete_all"]

# Is there as long as a deletion is not finished.
_MARK = "deleting"


def check_whole(store: Path) -> None:
    """Raises a ValueError if a deletion was interrupted, of which chains are left."""
    if (store / _MARK).exists():
        raise ValueError(
            f"Invalid store: {store} has what is left of a run whose deletion was "
            "interrupted (restart=True deletes the rest and begins anew)"
        )


def delete_all(store: Path) -> None:
    """Deletes all chains, and their checkpoints, if nobody writes to any of them.

    Raises:
        RuntimeError: another writer has a chain. Nothing has been deleted.
    """
    if not store.exists():
        return
    with ExitStack() as locks:
        for chain in _C.chains_in(str(store)):
            layout = _C.read_index(str(store), chain).layout
            locks.callback(_C.ChainWriter(str(store), chain, layout).close)
        mark = store / _MARK
        mark.touch()
        sync_folder(store)
        for pattern in ("checkpoint-*.pt", "base-*", "ran-*.json", "report.*"):
            for path in store.glob(pattern):
                path.unlink()
        for folder in store.glob("chain-*"):  # those without an index, too
            (folder / "index").unlink(missing_ok=True)  # readers find it first
            shutil.rmtree(folder)
        sync_folder(store)
        mark.unlink()
