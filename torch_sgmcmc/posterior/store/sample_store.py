"""A folder of draws."""

from __future__ import annotations

import os
import tempfile
import warnings
from typing import Any

import torch_sgmcmc._C as _C
from torch_sgmcmc.posterior.store.draws import Draws, Folder, Layout, Owner, Record

__all__ = ["SampleStore", "folder_of"]

_MEMORY = "/dev/shm"


def folder_of(store: str | os.PathLike[str] | SampleStore) -> str:
    """The folder of a store, wherever the program goes later."""
    path = store.path if isinstance(store, SampleStore) else store
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"Invalid store: {type(store).__name__} (must be a path or a SampleStore)"
        )
    return os.path.abspath(path)


class SampleStore(Draws):
    """Draws of a model's parameters on disk, of one or several chains.

    Each draw is a file in the format of safetensors; of each chain an index of lines of
    text says what belongs to a draw: step, lr, T, weight, loss. C++ writes and reads
    the same bytes. A store can be opened while :class:`Collector` or
    :class:`SampleWriter` write to it, and has the draws that it had when it was opened
    or last refreshed. Nothing is read but what is asked for::

        store = sg.SampleStore("draws")
        len(store), store.chains, store.names
        for draw in store:                      # a Mapping from names to tensors
            draw["fc.weight"], draw.step, draw.weight
        store.chain(1)[-10:]["fc.weight"]       # the last ten of chain 1, one tensor

    Args:
        path: the folder. It need not exist yet: then there are no draws. None is one in
            memory (``/dev/shm``, where there is that), which is gone with this object
            and what was taken of it: for toys, without checkpoints that outlive it.

    Raises:
        RuntimeError: an index cannot be read, or its first lines are damaged. Where
            others are, a UserWarning names them, and the rest is there.
        ValueError: its chains are of different models, or it is a file.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        if path is None:
            memory = _MEMORY if os.access(_MEMORY, os.W_OK) else None
            path = tempfile.mkdtemp(prefix="sgmcmc-", dir=memory)
            self._owner: Owner | None = Owner(path)
        else:
            self._owner = None
        self.path = folder_of(path)
        if os.path.isfile(self.path):
            raise ValueError(f"Invalid path: {self.path} is a file (must be a folder)")
        super().__init__(())
        self.refresh()

    def __repr__(self) -> str:
        return f"SampleStore({self.path!r}): {len(self)} draws of chains {self.chains}"

    def refresh(self) -> SampleStore:
        """Takes in what has been written and dropped since, and returns itself."""
        draws: list[tuple[Any, ...]] = []
        layout = None
        for chain in _C.chains_in(self.path):
            index = _C.read_index(self.path, chain)
            layout = layout or Layout(index.layout)
            difference = layout.host.difference(index.layout)
            if difference:
                raise ValueError(
                    f"Invalid store: chain {chain} of {self.path} is of another model "
                    f"than the first: {difference}"
                )
            folder = Folder(_C.chain_folder(self.path, chain))
            folder.owner = self._owner
            if index.damaged:
                warnings.warn(
                    f"lines {index.damaged} of {folder}/index are damaged; what they "
                    "say is left out",
                    stacklevel=2,
                )
            draws += [(folder, chain, Record.of(r), layout) for r in index.draws]
        self._draws = tuple(draws)
        return self
