"""Draws of two stores, compared; what a file gives back of a value."""

import io

import torch

from torch_sgmcmc import SampleStore
from torch_sgmcmc.draws.store_files import COLUMNS


def through_file(value, *, weights_only=True):
    """Loads, by torch.load, what torch.save has written."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def contents(folder):
    """Returns what a store has, to compare with another: draws bitwise, other files.

    Which draws share a file depends on when the writer was told to flush. Locks and
    checkpoints are left out.
    """
    draws = [
        (columns(draw), {name: as_bytes(draw[name]) for name in draw})
        for draw in SampleStore(folder)
    ]
    others = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix not in (".pt", ".safetensors", ".jsonl")
        and path.name != "lock"
    }  # fmt: skip
    return {"draws": draws, **others}


def columns(draw):
    """Returns what a store keeps beside a draw's tensors, as text: NaN equals NaN."""
    numbers = {name: getattr(draw, name) for name in COLUMNS}
    return f"{draw.chain} {numbers} {draw.prior_precision}"


def as_bytes(tensor):
    """Returns a tensor's dtype, shape and bytes."""
    data = bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())
    return f"{tensor.dtype} {list(tensor.shape)} ".encode() + data
