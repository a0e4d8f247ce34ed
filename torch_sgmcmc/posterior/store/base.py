"""What of a model is neither sampled nor stored: draws of a part belong to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.chain.files import write_text

__all__ = ["base_path", "differences", "write_base"]


def base_path(store: Path, chain: int) -> Path:
    """The file that has the sums of a chain's."""
    return store / f"base-{chain}"


def write_base(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes the tensors' sums; no file is for none."""
    if not tensors:
        path.unlink(missing_ok=True)
        return
    write_text(path, json.dumps({n: _sum_of(t) for n, t in tensors.items()}))


def differences(path: Path, tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors that are others than when the sums were written."""
    if not path.exists():
        return []
    return [
        name
        for name, value in json.loads(path.read_text()).items()
        if name not in tensors or _sum_of(tensors[name]) != value
    ]


def _sum_of(tensor: Tensor) -> int:
    flat = tensor.detach().cpu().contiguous()
    return int(_C.crc32(flat.data_ptr(), flat.numel() * flat.element_size()))
