"""What was counted of tensors that are not finite, on its way to the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
    """What was found in a step on a GPU; whether anything was comes to the host.

    Args:
        seen: what was counted.
        gate: the step that operators were given, negative if anything was found.
        choice: what is to be done then.
    """

    def __init__(self, seen: list[Seen], gate: Tensor, choice: str) -> None:
        self.choice = choice
        #: Records of groups as they were before the step.
        self.undo: list[tuple[dict[str, Any], Any]] = []
        self._seen = seen
        self._gate = gate.to("cpu", non_blocking=True)
        self._event = None
        if gate.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(gate.device))

    @property
    def is_on_gpu(self) -> bool:
        """Whether the host waits for a GPU."""
        return self._event is not None

    def wait(self) -> list[Seen]:
        """What was counted, if anything; the device has long gone on."""
        if self._event is not None:
            self._event.synchronize()
        if int(self._gate) >= 0:
            return []
        return [Seen(s.what, s.params, s.counts.cpu()) for s in self._seen]
