"""Data drawn by weights, and what a datum is then worth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.chain.checks import wrong_shape

__all__ = ["SAMPLING", "Sampling"]

# What keeps it in the state.
SAMPLING = "sampling"


@dataclass(frozen=True, eq=False)
class Sampling:
    """The probabilities π of all data, proportional to weights."""

    weights: Tensor  # [N], in float64
    law: _C.SamplingWeights
    importance: Tensor  # [N], 1 / (N π)

    @classmethod
    def of(cls, weights: Tensor) -> Sampling:
        """That of checked weights.

        Raises:
            ValueError: one of them is out of range.
        """
        on_host = weights.cpu().contiguous()
        law = _C.SamplingWeights(on_host.data_ptr(), len(on_host))
        return cls(weights, law, weights.reciprocal() * law.mean)

    @classmethod
    def given(cls, weights: Tensor, num_data: int, device: torch.device) -> Sampling:
        """That of a copy of what a user gives.

        Raises:
            TypeError: they are not a tensor of real numbers.
            ValueError: there are not as many as data, or one of them is out of range.
        """
        if not isinstance(weights, Tensor) or weights.is_complex():
            got = weights.dtype if isinstance(weights, Tensor) else type(weights)
            name = getattr(got, "__name__", got)
            raise TypeError(
                f"Invalid sampling_weights: got {name} (must be a tensor of real "
                "numbers, or None)"
            )
        if weights.shape != (num_data,):
            wanted = f"[{num_data}], one for each datum"
            raise wrong_shape("sampling_weights", weights, wanted)
        kept = weights.detach().to(device=device, dtype=torch.float64, copy=True)
        return cls.of(kept.contiguous())

    def save(self) -> dict[str, Any]:
        """For the sampler's state."""
        return {"weights": self.weights}
