"""The precision of ratings, from its full conditional.

Those of the four priors are drawn by :class:`torch_sgmcmc.GammaPrecision`, which has
them as ``prior_precision`` of U's, V's, a's and b's param groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from .model import Factors


class NoisePrecision:
    """τ ~ Gamma(1, rate 1), and given errors e ~ Gamma(1 + N/2, rate 1 + Σ e²/2).

    Args:
        model: what predicts.
        users: of all N training ratings.
        items: of these.
        y: of these, in the model's unit.
        seed: key of the draws.
    """

    def __init__(
        self, model: Factors, users: Tensor, items: Tensor, y: Tensor, seed: int
    ) -> None:
        self._model, self._data, self._seed = model, (users, items, y), seed
        #: τ, before the first draw the prior's mean.
        self.value = 1.0
        self._num_updates = 0

    def step(self) -> float:
        """Draws τ."""
        users, items, y = self._data
        errors = (self._model.predict(users, items) - y).double()
        rate = 1 + float(errors.square().sum()) / 2
        # No generator's state goes into checkpoints, only the number of draws.
        draws = np.random.default_rng([self._seed, self._num_updates])
        self.value = float(draws.gamma(1 + len(y) / 2)) / rate
        self._num_updates += 1
        return self.value

    def state_dict(self) -> dict[str, Any]:
        """τ, and how often it was drawn."""
        return {"value": self.value, "num_updates": self._num_updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the result of :meth:`state_dict`."""
        self.value, self._num_updates = state["value"], state["num_updates"]
