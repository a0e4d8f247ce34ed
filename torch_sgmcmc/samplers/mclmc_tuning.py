"""The step size and the decoherence length of MCLMC, found during burn-in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_sgmcmc.core.context import StepContext, state_dtype
from torch_sgmcmc.core.ops import running_mean_, sum_of_squares

#: Keys of a parameter's state during tuning.
MEANS = ("mean", "batch_mean")
# The most gradients that the step size remembers, and the width of its weights, of
# log(error) / 6 (Robnik et al., JMLR 2023, and their program).
_MEMORY, _WIDTH = 150, 1.5
# L of the autocorrelation: this part of the distance in which θ decorrelates.
_PART = 0.4
_BATCHES = 10
_MOST_MOMENTUM = 1 - 1e-6
# Numbers before those that the chains carry.
_COUNT = 7


class Tuning:
    """One step of the adaptation.

    The state is a list of floats: the steps made, the sums of weights and of weighted
    errors, L (0 before it is known), the sums of ‖θ‖² and of the batch means' squares,
    and the number of batches; then each chain's known part of the next energy error.

    Args:
        state: the state before the step, empty at first.
        group: the param group.
        energy: the chains' records of energy errors since the last step, [K, 4].
        dimension: the number of elements of a chain.
    """

    #: Fewest steps.
    LEAST = 4 * _BATCHES

    def __init__(
        self,
        state: Sequence[float],
        group: Mapping[str, Any],
        energy: Tensor,
        dimension: int,
    ) -> None:
        numbers = [*(state[:_COUNT] or [0.0] * _COUNT)]
        self._step, self._weight, self._sum, self._length = numbers[:4]
        self._squares, self._batch_squares, self._batches = numbers[4:]
        rows = energy.tolist()
        self._carried = [row[0] for row in rows]
        errors = [row[3] for row in rows if row[1] > 0]
        self._error = sum(errors) / len(errors) if errors else None
        self._is_made = self._carried != [*state[_COUNT:]]
        self._total, self._target = group["tune_steps"], group["energy_variance"]
        self._dimension, self._chains = dimension, len(rows)
        #: The new settings.
        self.lr, self.momentum = float(group["lr"]), group["momentum"]
        # ε² = lr times this.
        self._unit = dimension * group["temperature"] / group["num_data"]

    @staticmethod
    def check(state: Any, chains: int) -> None:
        """Raises unless the state is one of a number of chains, or empty."""
        if not isinstance(state, list) or any(type(n) is not float for n in state):
            raise TypeError("Invalid tuning in a state dict (must be a list of floats)")
        if state and (
            len(state) != _COUNT + chains or not all(map(math.isfinite, state[:_COUNT]))
        ):
            raise ValueError(
                f"Invalid tuning: {len(state)} numbers (must be none, or "
                f"{_COUNT + chains}, of which the first {_COUNT} are finite)"
            )

    @staticmethod
    def carried(state: Sequence[float]) -> list[float]:
        """Returns each chain's known part of the next energy error."""
        return [*state[_COUNT:]]

    @property
    def state(self) -> list[float]:
        """The state after the step."""
        if self._step >= self._total:
            return []
        numbers = (self._step, self._weight, self._sum, self._length)
        more = (self._squares, self._batch_squares, self._batches)
        return [*numbers, *more, *self._carried]

    def update(self, context: StepContext, params: list[list[Tensor]]) -> None:
        """Adapts the settings to the step's error and to the parameters it reached."""
        if not self._is_made:  # a device has skipped the step
            return
        self._step += 1
        self._adapt_step_size()
        quarter = self._total // 4
        since = int(self._step) - (self._total - 2 * quarter)
        if since > 0:
            is_last = since > quarter
            self._observe(
                context, params, (since - 1) % quarter + 1, quarter // _BATCHES
            )
            if since in (quarter, 2 * quarter):
                self._length = self._new_length(context, params, quarter, is_last)
        if self._length > 0:
            momentum = math.exp(-math.sqrt(self.lr * self._unit) / self._length)
            self.momentum = min(momentum, _MOST_MOMENTUM)
        if self._step >= self._total:
            for p in (p for some in params for p in some):
                for key in MEANS:
                    context.state[p].pop(key, None)

    def _adapt_step_size(self) -> None:
        """Sets ε to the weighted mean of the sizes that give the wanted error."""
        if self._error is None or not math.isfinite(self._error):
            return
        ratio = self._error / (self._dimension * self._target) + 1e-8
        weight = math.exp(-0.5 * (math.log(ratio) / (6 * _WIDTH)) ** 2)
        # Short at first: far from equilibrium errors are far too large.
        memory = min(_MEMORY, 10 + self._step / 5)
        keep = (memory - 1) / (memory + 1)
        # The error's square grows as the sixth power of ε.
        cube = (self.lr * self._unit) ** 3
        self._weight = keep * self._weight + weight
        self._sum = keep * self._sum + weight * ratio / cube
        self.lr = (self._weight / self._sum) ** (1 / 3) / self._unit

    def _observe(
        self, context: StepContext, params: list[list[Tensor]], at: int, length: int
    ) -> None:
        """Adds θ to the means of the quarter and of its batch."""
        in_batch = (at - 1) % length + 1
        if at == 1:
            self._squares = self._batch_squares = self._batches = 0.0
        for some in params:
            for p in some:
                for key in MEANS:
                    if key not in context.state[p]:
                        zeros = torch.zeros_like(p, dtype=state_dtype(p))
                        context.state[p][key] = zeros.detach()
            for key, count in zip(MEANS, (at, in_batch), strict=True):
                means = [context.state[p][key] for p in some]
                average = context.placement.without_noise(running_mean_)
                average(some, means, weight=1.0 / count)
        self._squares += _square(context, params, params)
        if in_batch == length:
            batch = [[context.state[p]["batch_mean"] for p in some] for some in params]
            self._batch_squares += _square(context, params, batch)
            self._batches += 1

    def _new_length(
        self,
        context: StepContext,
        params: list[list[Tensor]],
        steps: int,
        is_last: bool,
    ) -> float:
        """Returns L from the spread of θ, in the last quarter from autocorrelation."""
        means = [[context.state[p]["mean"] for p in some] for some in params]
        square = _square(context, params, means)
        spread = self._squares / steps - square
        if not spread > 0:
            return self._length
        if not is_last:
            return math.sqrt(spread / self._chains)
        batches = self._batches
        between = (self._batch_squares / batches - square) * batches / (batches - 1)
        # Steps for one independent draw: the variance of a mean of `length` steps is
        # this number's part 1 / length of that of θ.
        length = steps // _BATCHES
        time = max(1.0, length * between / spread)
        found = _PART * math.sqrt(self.lr * self._unit) * time
        # Of a chain that remembers longer than a batch this is a lower bound.
        return found if 2 * time < length else max(found, self._length)


def _square(
    context: StepContext, params: list[list[Tensor]], tensors: list[list[Tensor]]
) -> float:
    """Returns the sum of the squares of all elements, on all ranks."""
    total = 0.0
    for some, own in zip(params, tensors, strict=True):
        for found in _sums(context, some, own):
            total += float(found)
    return total


def _sums(context: StepContext, params: list[Tensor], own: list[Tensor]) -> Any:
    if own is params:
        return context.placement.sums(sum_of_squares, params)
    return context.placement.sums(
        lambda _, tensors: sum_of_squares(tensors), params, own
    )
