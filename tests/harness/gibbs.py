"""Checks of Gibbs updates of prior precisions (``GammaPrecision``)."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy import stats

from harness.statistics import check_gaussian, check_ks
from torch_sgmcmc import SGLD

# Makes a Gibbs update of a sampler: build(sampler, shape=a, rate=b).
Build = Callable[..., Any]


def check_conditional(
    build: Build, *, shape: float, rate: float, temperature: float, seed: int
) -> None:
    """Checks draws of λ given θ: their law, and that they are independent."""
    draws = 4000
    # Groups of 1, 7 and 300 weights, the last in two parameters.
    generator = torch.Generator().manual_seed(seed)
    weights = [
        [torch.full((1,), 0.3)],
        [torch.randn(7, generator=generator)],
        [torch.randn(size, generator=generator) for size in ((10, 20), (100,))],
    ]
    groups = [{"params": [w.requires_grad_() for w in group]} for group in weights]
    sampler = SGLD(groups, lr=0.1, num_data=10, temperature=temperature, seed=seed)
    precision = build(sampler, shape=shape, rate=rate)
    sampled = []
    for _ in range(draws):
        precision.step()
        sampled.append([g["prior_precision"] for g in sampler.param_groups])
    values = np.array(sampled)

    normal = np.empty_like(values)
    for i, group in enumerate(weights):
        d = sum(w.numel() for w in group)
        square = sum(float((w.detach().double() ** 2).sum()) for w in group)
        # p(λ | θ) ∝ (λ^{a - 1} e^{-bλ} λ^{d/2} e^{-λ‖θ‖²/2})^{1/T}
        law = stats.gamma(
            (shape - 1 + d / 2) / temperature + 1,
            scale=temperature / (rate + square / 2),
        )
        check_ks(values[:, i], law, label=f"λ of group {i}")
        # Both tails' probabilities keep their digits: no draw becomes infinite.
        normal[:, i] = np.where(
            values[:, i] < law.median(),
            stats.norm.ppf(law.cdf(values[:, i])),
            stats.norm.isf(law.sf(values[:, i])),
        )
    # Next to each other: the three groups, now and at the next update.
    rows = np.hstack([normal[:-1], normal[1:]])
    for parity in (0, 1):  # rows that share no draw are independent replicates
        check_gaussian(rows[parity::2], label="λ in normal scores")


def check_joint(
    build: Build, *, shape: float, rate: float, temperature: float, seed: int
) -> None:
    """Geweke's test: Gibbs sampling of the prior alone must reproduce the prior.

    Alternates exact draws of θ | λ ~ N(0, T I / λ) with updates of λ, many groups at
    once, from a far start. The joint density is (Gamma(λ; a, b) N(θ; 0, I / λ))^{1/T},
    whose marginal for λ is Gamma(c, rate b/T), c = (a - 1 + d/2)/T + 1 - d/2: the prior
    if T = 1. An update leaves a fraction (d/2) / (c + d/2) of the past, and the looks
    are far enough apart to count as independent.
    """
    groups, d, looks, apart = 400, 2, 5, 5
    random = np.random.default_rng(seed)
    theta = torch.empty(groups, d, dtype=torch.float64)
    rows = [
        {"params": [p.detach().requires_grad_() for p in row.split(1)]}
        for row in theta.unbind()
    ]
    settings = {"lr": 0.1, "num_data": 10, "prior_precision": 100.0, "seed": seed}
    sampler = SGLD(rows, temperature=temperature, **settings)
    precision = build(sampler, shape=shape, rate=rate)
    sampled = []
    for _ in range(looks):
        for _ in range(apart):
            current = np.array([g["prior_precision"] for g in sampler.param_groups])
            spread = np.sqrt(temperature / current)[:, None]
            theta.copy_(torch.from_numpy(spread * random.standard_normal((groups, d))))
            precision.step()
        sampled += [g["prior_precision"] for g in sampler.param_groups]
    c = (shape - 1 + d / 2) / temperature + 1 - d / 2
    assert (d / 2 / (c + d / 2)) ** apart < 1e-4
    marginal = stats.gamma(c, scale=temperature / rate)
    check_ks(np.array(sampled), marginal, label="marginal law of λ")
