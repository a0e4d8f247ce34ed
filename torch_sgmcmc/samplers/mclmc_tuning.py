"""The step size and the decoherence length of MCLMC, found during burn-in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from torch_sgmcmc.core.context import StepContext, blank
from torch_sgmcmc.core.ops import running_mean_, sum_of_squares
from torch_sgmcmc.core.state import PRECONDITIONER, root

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
_COUNT = 9


class Tuning:
    """One step of the adaptation.

    The state is a list of floats: the sums of weights and of weighted errors, L (0
    before it is known), and of the present quarter its number, its observed steps and
    elements, the sums of squared distances of θ, and of the batch means, from their
    means, and the number of batches; then each chain's known part of the next energy
    error.

    Args:
        step: the number of the step, from 1.
        group: the param group, with the state before the step.
        energy: the chains' records of energy errors since the last step, [K, 4].
        dimension: the number of elements of a chain in this step.
    """

    #: Fewest steps.
    LEAST = 4 * _BATCHES

    def __init__(
        self, step: int, group: Mapping[str, Any], energy: Tensor, dimension: int
    ) -> None:
        state: Sequence[float] = group["tuning"]
        numbers = [*(state[:_COUNT] or [0.0] * _COUNT)]
        self._weight, self._sum, self._length, *quarter = numbers
        self._quarter, self._count, self._elements, *sums = quarter
        self._squares, self._batch_squares, self._batches = sums
        rows = energy.tolist()
        self._carried = [row[0] for row in rows]
        errors = [row[3] for row in rows if row[1] > 0]
        self._error = sum(errors) / len(errors) if errors else None
        is_new = bool(errors) or self._carried != [*state[_COUNT:]]
        self._is_made = is_new and all(map(math.isfinite, self._carried))
        if not self._is_made:
            self._carried = [*state[_COUNT:]] or self._carried
        self._step, self._total = step, group["tune_steps"]
        self._target = group["energy_variance"]
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

    @staticmethod
    def without_errors(state: Sequence[float]) -> list[float]:
        """Returns a state that knows no part of the next energy error."""
        return [*state[:_COUNT], *[math.nan] * (len(state) - _COUNT)]

    @property
    def state(self) -> list[float]:
        """The state after the step; empty when tuning ends."""
        if self._step >= self._total:
            return []
        numbers = (self._weight, self._sum, self._length, self._quarter, self._count)
        more = (self._elements, self._squares, self._batch_squares, self._batches)
        return [*map(float, (*numbers, *more)), *self._carried]

    def update(self, context: StepContext, params: list[list[Tensor]]) -> None:
        """Adapts the settings to the step's error and to the parameters it reached."""
        if self._is_made:  # else a device has skipped the step
            self._adapt_step_size()
            length = self._total // 4
            since = self._step - (self._total - 2 * length)
            quarter = max(0, -(-since // length))
            if quarter != self._quarter:
                self._end_quarter()
                self._quarter, self._count = quarter, 0
            if quarter > 0:
                self._observe(context, params)
        if self._step >= self._total:
            self._end_quarter()
        if self._length > 0:
            momentum = math.exp(-math.sqrt(self.lr * self._unit) / self._length)
            self.momentum = min(momentum, _MOST_MOMENTUM)

    def _adapt_step_size(self) -> None:
        """Sets ε to the weighted mean of the sizes that give the wanted error."""
        if self._error is None:
            return
        # At most twice the size: an error may be small by chance.
        ratio = max(self._error / (self._dimension * self._target), 2.0**-6)
        weight = math.exp(-0.5 * (math.log(ratio) / (6 * _WIDTH)) ** 2)
        # Short at first: far from equilibrium errors are far too large.
        memory = min(_MEMORY, 10 + self._step / 5)
        keep = (memory - 1) / (memory + 1)
        # The error's square grows as the sixth power of ε.
        cube = (self.lr * self._unit) ** 3
        self._weight = keep * self._weight + weight
        self._sum = keep * self._sum + weight * ratio / cube
        self.lr = (self._weight / self._sum) ** (1 / 3) / self._unit

    def _observe(self, context: StepContext, params: list[list[Tensor]]) -> None:
        """Adds θ to the means of the quarter and of its batch.

        The quarter begins again if parameters have come or gone, or lack their means,
        as after torch.distributed.checkpoint.
        """
        length = self._total // 4 // _BATCHES
        states = [context.state[p] for some in params for p in some]
        has_all = all(key in state for state in states for key in MEANS)
        if self._count == 0 or self._elements != self._dimension or not has_all:
            self._count, self._elements = 0, self._dimension
            self._squares = self._batch_squares = self._batches = 0.0
            for some in params:
                for p in some:
                    context.state[p].update(blank(p, *MEANS))
        self._count += 1
        in_batch = (self._count - 1) % length + 1
        average = context.placement.without_noise(running_mean_)
        positions = [_positions(context, some) for some in params]
        if self._count > 1:
            square = _square(context, params, positions)
            self._squares += (self._count - 1) / self._count * square
        for some, own in zip(params, positions, strict=True):
            for key, count in zip(MEANS, (self._count, in_batch), strict=True):
                means = [context.state[p][key] for p in some]
                average(own, means, weight=1.0 / count)
        if in_batch == length:
            self._batches += 1
            if (count := self._batches) > 1:
                batch = [[context.state[p][MEANS[1]] for p in some] for some in params]
                square = _square(context, params, batch)
                self._batch_squares += count / (count - 1) * square

    def _end_quarter(self) -> None:
        """Sets L from the spread of θ, in the last quarter from autocorrelation."""
        batches = self._batches
        if self._quarter == 0 or batches < 2 or self._elements != self._dimension:
            return
        spread = self._squares / self._count
        if not spread > 0:
            return
        if self._quarter == 1:
            self._length = math.sqrt(spread / self._chains)
            return
        between = self._batch_squares / (batches - 1)
        # Steps for one independent draw: the variance of a mean of `length` steps is
        # this number's part 1 / length of that of θ.
        length = self._total // 4 // _BATCHES
        time = max(1.0, length * between / spread)
        found = _PART * math.sqrt(self.lr * self._unit) * time
        # Of a chain that remembers longer than a batch this is a lower bound.
        self._length = found if 2 * time < length else max(found, self._length)


def _positions(context: StepContext, params: list[Tensor]) -> list[Tensor]:
    """Returns θ, or θ / √A with a preconditioner A, from the masters."""
    states = [context.state[p] for p in params]
    own = [state.get("master", p) for state, p in zip(states, params, strict=True)]
    return [
        x / root(context, state[PRECONDITIONER]) if PRECONDITIONER in state else x
        for x, state in zip(own, states, strict=True)
    ]


def _square(
    context: StepContext, params: list[list[Tensor]], tensors: list[list[Tensor]]
) -> float:
    """Returns the squared distance of all tensors from the means, on all ranks."""
    total = 0.0
    for some, own in zip(params, tensors, strict=True):
        means = [context.state[p][MEANS[0]] for p in some]
        distances = [x.detach() - y for x, y in zip(own, means, strict=True)]
        # Of whole parameters, or of the shards of these.
        for found in context.placement.sums(
            lambda _, tensors: sum_of_squares(tensors), some, distances
        ):
            total += float(found)
    return total
