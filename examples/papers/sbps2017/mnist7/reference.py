"""A long Metropolis-Hastings run: HMC with all data and a Metropolis test.

Its coordinates z are w = centre + L z. First L Lᵀ is the inverse Hessian of U at its
minimum; then the covariance that a pilot run shows, since the posterior is far from
Gaussian. A change of coordinates changes no target.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import arviz as az
import numpy as np
import torch
from reproduce.kept import kept
from sklearn.covariance import LedoitWolf
from torch import Tensor, nn
from tqdm import tqdm

import torch_sgmcmc as sg

from .data import SmallImages
from .model import Softmax, most_probable, potential


@dataclass
class Reference:
    """The reference's results for the posterior.

    Args:
        mean: [d].
        directions: [d, d], orthonormal, in columns: the principal directions that the
            pilot run has shown, widest first. (Along those of the run itself its own
            variances would be too large or too small.)
        deviations: [d], the run's standard deviations along them.
        predictions: [test images, classes], mean class probabilities.
        quality: chains, draws, acceptance rate, largest R-hat and least effective
            sample size over the directions' coordinates and their squares.
    """

    mean: Tensor
    directions: Tensor
    deviations: Tensor
    predictions: Tensor
    quality: dict[str, float]

    def standardised(self, weights: Tensor) -> Tensor:
        """Coordinates in which the reference has mean 0 and variance 1; [..., d]."""
        return (weights.double() - self.mean) @ self.directions / self.deviations


def make_reference(
    images: SmallImages, chains: int, draws: int, folder: Path
) -> Reference:
    """Runs the chains, once.

    Args:
        images: the data.
        chains: how many, at once.
        draws: of each chain, after warm-up; of the pilot run half as many.
        folder: of the file that keeps the result.
    """
    settings = [images.name, chains, draws]
    make = partial(_make, images, chains, draws)
    return Reference(**kept(folder, "reference", settings, make))


def _make(images: SmallImages, chains: int, draws: int) -> dict[str, Any]:
    x, y = images.train_x.double(), images.train_y
    centre = most_probable(x, y)
    hessian = torch.func.hessian(lambda w: potential(w[None], x, y)[0])(centre)
    scale = torch.linalg.cholesky(torch.linalg.inv(hessian))
    pilot, _ = _sample(x, y, centre, scale, chains, draws // 2, 0)
    pilot = pilot.flatten(0, 1)
    # Shrunk, in coordinates in which it is about 1: positive with any number of draws.
    shape = torch.linalg.solve_triangular(scale, (pilot - centre).T, upper=False).T
    shape = torch.from_numpy(LedoitWolf().fit(shape.numpy()).covariance_)
    scale = scale @ torch.linalg.cholesky(shape)
    samples, acceptance = _sample(x, y, pilot.mean(0), scale, chains, draws, 1)
    _, directions = torch.linalg.eigh(scale @ scale.T)
    return vars(_summary(samples, directions.flip(1), acceptance, images))


def _sample(
    x: Tensor,
    y: Tensor,
    centre: Tensor,
    scale: Tensor,
    chains: int,
    draws: int,
    seed: int,
) -> tuple[Tensor, float]:
    """Samples [chains, draws, d] and the acceptance rate."""
    generator = torch.Generator().manual_seed(seed)
    z = nn.Parameter(
        torch.randn(chains, len(centre), generator=generator, dtype=torch.float64)
    )
    sampler = sg.HMC(
        [z], 0.1, trajectory_length=1.5, num_data=1, num_chains=chains, seed=seed
    )

    def closure() -> Tensor:
        losses = potential(centre + z @ scale.T, x, y)
        losses.sum().backward()
        return losses

    sampler.warmup(closure, max(draws // 5, 50))
    samples = []
    for _ in tqdm(range(draws), desc=f"reference {seed + 1} of 2", unit="draw"):
        sampler.step(closure)
        samples.append(centre + z.detach() @ scale.T)
    return torch.stack(samples, 1), sampler.acceptance_rate


def _summary(
    samples: Tensor, directions: Tensor, acceptance: float, images: SmallImages
) -> Reference:
    flat = samples.flatten(0, 1)
    reference = Reference(
        flat.mean(0),
        directions,
        (flat @ directions).std(0),
        mean_prediction(flat, images.test_x),
        {"acceptance_rate": acceptance},
    )
    z = reference.standardised(samples).numpy()
    reference.quality.update(_quality(np.concatenate([z, z**2], 2)))
    return reference


def _quality(values: Any) -> dict[str, float]:
    data = az.convert_to_dataset(values)
    return {
        "chains": values.shape[0],
        "draws": values.shape[1],
        "largest_rhat": float(az.rhat(data)["x"].max()),
        "least_ess": float(az.ess(data)["x"].min()),
    }


def mean_prediction(weights: Tensor, x: Tensor) -> Tensor:
    """Mean class probabilities over rows of weights."""
    model = Softmax(x.shape[1]).to(weights.dtype)
    draws = ({"weight": w.view_as(model.weight)} for w in weights)
    return sg.predict(model, draws, x.to(weights.dtype)).mean
