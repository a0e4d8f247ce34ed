"""One run: independent chains of one method, which predict together."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from reproduce.checkpoint import Parts
from sghmc2014.bnn.data import Images
from sghmc2014.bnn.loop import Chain, run_chain
from torch import Tensor

from ..strata import cluster
from .chain import NetworkChain
from .config import EnsembleConfig
from .diagnostics import diagnose
from .methods import minibatch_size, minibatches_of

# The paper's number, after Fu and Zhang (2017).
_CLUSTERS = 10


def run(config: EnsembleConfig, images: Images, folder: Path) -> dict[str, Any]:
    """Runs to the last epoch, see :func:`run_chain`.

    The prediction is the mean over the chains and, after burn-in, over all their
    samples since burn-in.

    Returns:
        The state, with ``diagnostics`` of the first chain where it has ended.
    """
    x, y = images.train_x, images.train_y
    inputs, labels = {"labelled": images.validation_x}, images.validation_y
    if not config.validate:  # all 60,000, as in the paper
        x, y = torch.cat([x, images.validation_x]), torch.cat([y, images.validation_y])
        inputs, labels = {"labelled": images.test_x}, images.test_y
    begin = partial(_Ensemble, config, x, y)
    ensemble, state = run_chain(config, begin, inputs, labels, folder)
    return state | {"diagnostics": diagnose(ensemble.chains[0])}


class _Ensemble(Chain):
    def __init__(
        self, config: EnsembleConfig, x: Tensor, y: Tensor, store: Path
    ) -> None:
        self._config = config
        strata = None
        if config.method == "cp_sghmc":
            strata = cluster(x, _CLUSTERS, seed=0)
        # Chains of all seeds have starts, noise and minibatches of their own.
        first = config.seed * config.chains
        seeds = range(first, first + config.chains)
        size = minibatch_size(config.method, config.batch_size, config.halved)
        an_update = size * minibatches_of(config.method)
        updates = len(y) // (an_update * config.samples_per_pass)
        self.chains = [
            NetworkChain(config, seed, x, y, strata, store, number, updates)
            for number, seed in enumerate(seeds)
        ]
        self.collectors = [chain.collector for chain in self.chains]
        self.model = self.chains[0].model
        by_seed = {str(s): c for s, c in zip(seeds, self.chains, strict=True)}
        self.parts = Parts(chains=Parts(by_seed))

    def train(self, epoch: int) -> None:
        for chain in self.chains:
            if self._config.method == "psgld" and epoch > self._config.burn_in:
                # The preconditioner stays as burn-in has made it: no Γ is needed.
                for group in chain.sampler.param_groups:
                    group["adapt"] = False
            chain.train()

    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = {"gradients": sum(c.gradients for c in self.chains)}
        if self._config.method == "ewsg":
            rates = [c.sampler.acceptance_rate for c in self.chains]
            report["acceptance_rate"] = sum(rates) / len(rates)
        return report

    def parameters(self) -> list[Tensor]:
        return [p for c in self.chains for p in c.model.parameters()]
