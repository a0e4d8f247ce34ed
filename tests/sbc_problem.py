"""Small regressions, and samplers of their posteriors, for calibration."""

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import torch_sgmcmc as sg
from torch_sgmcmc.calibration import sbc

N = 6
#: A constant and a contrast.
X = torch.tensor([[1.0, -1.0], [1.0, 1.0]] * 3, dtype=torch.float64)


def prior(n, generator):
    return torch.randn(n, 2, generator=generator, dtype=torch.float64)


def gaussian(theta, generator):
    """A linear regression, of which the posterior is Gaussian."""
    mean = theta @ X.T
    noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype)
    return X.expand(len(theta), N, 2), mean + noise


def gaussian_loss(theta, data):
    x, y = data
    return (y - (x @ theta[:, :, None]).squeeze(2)).square() / 2


def logistic(theta, generator):
    chance = (2 * theta @ X.T).sigmoid()
    return X.expand(len(theta), N, 2), torch.bernoulli(chance, generator=generator)


def logistic_loss(theta, data):
    x, y = data
    logits = 2 * (x @ theta[:, :, None]).squeeze(2)
    return binary_cross_entropy_with_logits(logits, y, reduction="none")


MODELS = {"Gaussian": (gaussian, gaussian_loss), "logistic": (logistic, logistic_loss)}
TARGET = {"num_data": N, "prior_precision": 1.0}


def hmc(params, seed, **options):
    options = {"num_steps": 3, "num_chains": len(params[0]), **TARGET, **options}
    return sg.HMC(params, 0.2, **options, seed=seed)


def sgld(params, seed):
    return sg.SGLD(params, 0.1, **TARGET, seed=seed)


def calibrate(make, model="Gaussian", **options):
    simulate, loss = MODELS[model]
    options = {"simulations": 300, "draws": 15, "warmup": 100, "seed": 0, **options}
    return sbc(prior, simulate, loss, make, **options, progress=False)
