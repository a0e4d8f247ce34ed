"""One chain: a network, its sampler and its minibatches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from reproduce.checkpoint import Parts
from torch import Tensor
from torch.nn import functional as F

import torch_sgmcmc as sg

from ..strata import StratifiedBatches
from .config import EnsembleConfig
from .methods import build_sampler, minibatch_size, minibatches_of
from .models import build_model


class NetworkChain:
    """A chain that takes the same number of gradients a pass whatever the method.

    Args:
        config: the run.
        seed: of the initial weights, the noise and the minibatches.
        x: N training images in rows.
        y: their labels.
        strata: the stratum of each image for stratified minibatches, or None for
            uniform ones.
        store: where draws go.
        number: of the chain, there.
        updates: from one draw to the next.
    """

    def __init__(
        self,
        config: EnsembleConfig,
        seed: int,
        x: Tensor,
        y: Tensor,
        strata: Tensor | None,
        store: Path,
        number: int,
        updates: int,
    ) -> None:
        self._config, self._seed, self._updates = config, seed, updates
        self._x, self._y, self._strata = x, y, strata
        #: Gradients of single examples taken so far.
        self.gradients = 0
        self.model = build_model(config.model, x.shape[1], seed).to(x.device)
        self.sampler = build_sampler(
            config.method, dict(config.settings), self.model, len(y), seed
        )
        self._batches = self._make_batches(seed)
        self.collector = sg.Collector(
            self.sampler,
            self.model,
            store,
            chain=number,
            burn_in=config.burn_in * updates,
            every=updates,
        )
        self._parts = Parts(
            model=self.model, sampler=self.sampler, batches=self._batches
        )

    def _make_batches(
        self, seed: int
    ) -> sg.IndependentBatchSampler | StratifiedBatches:
        config = self._config
        size = minibatch_size(config.method, config.batch_size, config.halved)
        if self._strata is None:
            return sg.IndependentBatchSampler(len(self._y), size, seed=seed)
        return StratifiedBatches(self._strata, size, seed)

    def train(self) -> None:
        """Makes the updates to the next draw."""
        self.model.train()
        draws = minibatches_of(self._config.method)
        minibatches = iter(self._batches.draw(draws * self._updates))

        def closure() -> Tensor:
            self.sampler.zero_grad()
            rows = next(minibatches)
            self.gradients += len(rows)
            loss = self._loss(rows)
            loss.backward()
            return loss

        for _ in range(self._updates):
            self.sampler.step(closure)

    def _loss(self, rows: Tensor) -> Tensor:
        return F.cross_entropy(self.model(self._x[rows]), self._y[rows])

    def minibatch_gradients(self, count: int) -> Tensor:
        """Gradients of the mean loss at the current sample, [count, parameters].

        Of minibatches that no update uses, so that nothing about the chain changes.
        """
        parameters = list(self.model.parameters())
        batches = self._make_batches(self._seed + 2**32)
        rows = [
            torch.autograd.grad(self._loss(rows), parameters)
            for rows in batches.draw(count)
        ]
        return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])

    def state_dict(self) -> dict[str, Any]:
        """The state from which the chain resumes bitwise."""
        return {**self._parts.state_dict(), "gradients": self.gradients}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a checkpoint."""
        self._parts.load_state_dict(state)
        self.gradients = state["gradients"]
