"""A chain's steps in blocks of one compiled call."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from torch_sgmcmc.compiled import compiled_steps
from torch_sgmcmc.posterior.driver.closures import one_gradient_a_step
from torch_sgmcmc.sampler import Sampler

__all__ = ["Blocks", "length_of_blocks"]

#: Steps of a block at most.
LONGEST = 20


def length_of_blocks(burn_in: int, every: int, *ends: int) -> int:
    """The longest that have a draw at their end or none, and end where a chain does."""
    common = math.gcd(burn_in, every, *ends)
    return max(n for n in range(1, LONGEST + 1) if common % n == 0)


class _Loss(nn.Module):
    """The loss as a module, of which functional_call takes the parameters."""

    def __init__(
        self, model: nn.Module, loss: Callable[[nn.Module, Any], Tensor]
    ) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch: Any) -> Tensor:
        return self.loss(self.model, batch)


class Blocks:
    """Makes several steps at a time, of a capturable sampler without schedules."""

    def __init__(
        self,
        model: nn.Module,
        sampler: Sampler,
        loss: Callable[[nn.Module, Any], Tensor],
        schedules: list[Any],
        steps: int,
    ) -> None:
        if not one_gradient_a_step(sampler):
            raise ValueError(
                f"Invalid compile: {type(sampler).__name__} (must be a sampler whose "
                "steps take one gradient)"
            )
        if any(group["nonfinite"] == "skip" for group in sampler.param_groups):
            raise ValueError(
                "Invalid compile: with nonfinite='skip', skipped steps would move "
                "draws into the middle of a block (must be 'raise', or compile=False)"
            )
        if schedules:
            raise ValueError(
                f"Invalid compile: with a {type(schedules[0]).__name__}, which changes "
                "at each step what is compiled in (must be without a schedule)"
            )
        self.steps = steps
        named = dict(model.named_parameters())
        sampled = {id(p) for group in sampler.param_groups for p in group["params"]}
        params = {f"model.{k}": p for k, p in named.items() if id(p) in sampled}
        whole = _Loss(model, loss)
        # Known of the first minibatch: a graph is made for one kind of them.
        self._put_together: Callable[[list[Tensor]], Any] | None = None

        def of_minibatch(params: dict[str, Tensor], *parts: Tensor) -> Tensor:
            batch = self._put_together(list(parts))  # type: ignore[misc]
            return functional_call(whole, params, (batch,))

        self.block = compiled_steps(sampler, of_minibatch, params, steps=steps)

    def stacked(self, batches: list[Any]) -> list[Tensor]:
        """Minibatches as the block takes them: what each has, in rows."""
        if self._put_together is None:
            self._put_together = _parts_of(batches[0])[1]
        columns = zip(*(_parts_of(batch)[0] for batch in batches), strict=True)
        rows = [list(column) for column in columns]
        for tensors in rows:
            sizes = {tuple(t.shape) for t in tensors}
            if len(sizes) > 1:
                raise ValueError(
                    f"Invalid loader: minibatches of shapes {sorted(sizes)} in one "
                    "compiled block (must be of one: drop_last=True)"
                )
        return [torch.stack(tensors) for tensors in rows]


def _parts_of(batch: Any) -> tuple[list[Tensor], Callable[[list[Tensor]], Any]]:
    """A minibatch's tensors, and what puts them together again."""
    if isinstance(batch, Tensor):
        return [batch], lambda parts: parts[0]
    if isinstance(batch, dict) and all(isinstance(t, Tensor) for t in batch.values()):
        keys = list(batch)
        return [*batch.values()], lambda parts: dict(zip(keys, parts, strict=True))
    if isinstance(batch, tuple | list) and all(isinstance(t, Tensor) for t in batch):
        return [*batch], list if isinstance(batch, list) else tuple
    raise TypeError(
        f"Invalid loader: a minibatch is a {type(batch).__name__} (must be, for "
        "compiled blocks, a Tensor, or a tuple, list or dict of Tensors)"
    )
