"""The configuration of a run."""

from __future__ import annotations

from dataclasses import dataclass

from sghmc2014.bnn.config import RunConfig


@dataclass(frozen=True)
class EnsembleConfig(RunConfig):
    """A run of several chains, whose epoch is 1/``samples_per_pass`` of a data pass.

    With ``halved`` EWSG makes as many updates as other methods, with minibatches that
    are smaller by so much; without, fewer updates with minibatches of ``batch_size``.
    """

    model: str = "mlp"
    chains: int = 1
    samples_per_pass: int = 1
    halved: bool = False

    @property
    def name(self) -> str:
        """A file name."""
        return f"{self.model}-{super().name}"
