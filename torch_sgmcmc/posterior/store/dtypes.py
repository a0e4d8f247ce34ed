"""What safetensors calls torch's dtypes."""

from __future__ import annotations

import torch

__all__ = ["DTYPES", "name_of"]

DTYPES: dict[str, torch.dtype] = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def name_of(dtype: torch.dtype) -> str:
    """Its name, or torch's where a draw cannot be stored in it."""
    return _NAMES.get(dtype, str(dtype))
