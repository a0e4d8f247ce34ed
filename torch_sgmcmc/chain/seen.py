"""What was counted of tensors that are not finite, on its way to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Pending", "Seen"]


@dataclass
class Seen:
    """What was counted, for each parameter, of one kind of tensor."""

    what: str
    params: list[Tensor]
    counts: Tensor


class Pending:
    """What was counted in a step on a GPU, on its way to the host."""

    def __init__(self, seen: list[Seen], choice: str) -> None:
        self.choice = choice
        self.seen = [
            Seen(s.what, s.params, s.counts.to("cpu", non_blocking=True)) for s in seen
        ]
        self._event = None
        device = seen[0].counts.device
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))

    @property
    def is_on_gpu(self) -> bool:
        """Whether the host waits for a GPU."""
        return self._event is not None

    def wait(self) -> list[Seen]:
        """What was found; the device has long gone on to the next step."""
        if self._event is not None:
            self._event.synchronize()
        return self.seen
