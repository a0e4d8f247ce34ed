"""Many independent chains of one method, scored along the way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

import torch_sgmcmc as sg

from ..strata import StratifiedBatches, cluster
from .data import Split
from .methods import FRICTION, METHODS, Firefly, Method
from .model import (
    RESAMPLES,
    SCORES_A_PASS,
    minibatch_loss,
    mixture_scores,
    scores,
    summary,
)
from .run_flymc import run_flymc


@dataclass(frozen=True)
class RunConfig:
    """Everything that a run's result depends on, but for the data.

    Args:
        method: a key of ``METHODS``.
        step_size: h.
        passes: passes through the training data: their number of gradients, or of
            likelihoods, is what every method may spend.
        batch_size: n, of methods that take one minibatch a step.
        chains: number of independent chains.
        num_strata: k-means clusters, for the method that has any.
        seed: of chains, minibatches and clusters.
        friction: γ, of methods with momentum.
        halved: whether a method that takes several minibatches a step has smaller ones,
            and not fewer steps.
    """

    method: str
    step_size: float
    passes: float
    batch_size: int
    chains: int
    num_strata: int
    seed: int
    friction: float = FRICTION
    halved: bool = False

    @property
    def minibatch_size(self) -> int:
        """The number of examples of one gradient."""
        method = METHODS[self.method]
        assert isinstance(method, Method)
        return self.batch_size // (method.gradients if self.halved else 1)

    @property
    def gradients(self) -> int:
        """The number of gradients of a step."""
        method = METHODS[self.method]
        assert isinstance(method, Method)
        return self.minibatch_size * method.gradients


def run(config: RunConfig, split: Split) -> dict[str, Any]:
    """Runs the chains and returns their scores."""
    method = METHODS[config.method]
    if isinstance(method, Firefly):
        result = run_flymc(
            method,
            split,
            step_size=config.step_size,
            passes=config.passes,
            chains=config.chains,
            seed=config.seed,
        )
        return {"config": asdict(config), **result}
    num_data = len(split.train_x)
    theta = nn.Parameter(torch.zeros(config.chains, split.train_x.shape[1]))
    sampler = method.build(
        theta, num_data, config.step_size, config.seed, config.friction
    )
    minibatches = _minibatches(config, split)

    def closure() -> Tensor:
        sampler.zero_grad()
        loss = minibatch_loss(theta, *next(minibatches))
        loss.backward()
        return loss

    steps = max(1, round(config.passes * num_data / config.gradients))
    every = num_data / config.gradients / SCORES_A_PASS
    scored = {round(every * k) for k in range(1, int(steps / every) + 1)} | {steps}
    curve = [summary(0.0, theta, split)]
    seconds = 0.0
    for step in tqdm(range(1, steps + 1), desc=method.label, leave=False):
        start = time.perf_counter()
        sampler.step(closure)
        seconds += time.perf_counter() - start
        if step in scored:
            passes = step * config.gradients / num_data
            curve.append(summary(passes, theta, split))
    rates = {}
    if isinstance(sampler, sg.EWSG):
        rates["acceptance_rate"] = sampler.acceptance_rate
    return {
        "config": asdict(config),
        "settings": _settings(sampler),
        "steps": steps,
        "seconds": seconds,
        "curve": curve,
        "final": scores(theta.detach(), split),
        "mixture": mixture_scores(theta.detach(), split, RESAMPLES),
        **rates,
    }


def _minibatches(config: RunConfig, split: Split) -> Iterator[tuple[Tensor, Tensor]]:
    """A minibatch for each chain: x [K, n, d] and s [K, n]."""
    method = METHODS[config.method]
    assert isinstance(method, Method)
    size = config.minibatch_size
    batches: sg.IndependentBatchSampler | StratifiedBatches
    if method.stratified:
        strata = cluster(split.train_x, config.num_strata, config.seed)
        batches = StratifiedBatches(strata, size, config.seed)
    else:
        batches = sg.IndependentBatchSampler(len(split.train_x), size, seed=config.seed)
    while True:
        index = batches.draw(config.chains)
        yield split.train_x[index], split.train_s[index]


def _settings(sampler: sg.Sampler) -> dict[str, float]:
    group = sampler.param_groups[0]
    names = ("lr", "momentum", "num_data", "prior_precision", "decay", "eps")
    return {name: group[name] for name in names if name in group}
