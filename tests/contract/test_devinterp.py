"""Samplers in devinterp's own chains, and its settings in ours.

Needs ``pip install devinterp`` (2.0.1), which no extra has: it brings datasets, pyarrow
and zarr.
"""

import math

import pytest
import torch
from torch import nn

import torch_sgmcmc as sg

pytestmark = pytest.mark.full

chains = pytest.importorskip("devinterp.slt.sampler")
SGMCMC = pytest.importorskip("devinterp.optim").SGMCMC

N, DIMENSION, LOCALIZATION = 2000, 10, 1.0
N_BETA = N / math.log(N)
TARGET = {
    "num_data": N,
    "temperature": N / N_BETA,
    "prior_precision": LOCALIZATION * N / N_BETA,
}


def ours(make, **settings):
    """The script of docs/coming_from.md."""

    def sampler(groups):
        params = [group["params"] for group in groups]
        means = [p.detach().clone() for p in params]  # w*
        return make(params, prior_mean=means, **TARGET, **settings)

    return sampler


class Problem:
    """Ten weights of a linear regression at their least squares: λ = 5."""

    def __init__(self):
        g = torch.Generator().manual_seed(2)
        self.x = torch.randn(N, DIMENSION, generator=g)
        self.y = self.x @ torch.ones(DIMENSION) + torch.randn(N, generator=g)
        self.model = nn.Linear(DIMENSION, 1, bias=False)
        best = torch.linalg.lstsq(self.x, self.y[:, None]).solution
        with torch.no_grad():
            self.model.weight.copy_(best.T)

    def loss(self, model, indices):
        return (self.y[indices] - model(self.x[indices])[..., 0]).square() / 2

    def traces(self, method, draws, **settings):
        """nβ (L(w) − L(w*)) of four chains, by ``sample_single_chain``, of all data."""
        everything = torch.arange(N)
        initial = float(self.loss(self.model, everything).mean().detach())
        rows = []
        for chain in range(4):
            row = []
            chains.sample_single_chain(
                self.model,
                [{"input_ids": everything}],  # one batch: the data are all of it
                lambda model, batch: (self.loss(model, batch["input_ids"]), {}),
                {"weight": None},
                num_draws=draws,
                batch_size=1,
                sampling_method=method,
                sampling_method_kwargs=settings,
                chain=chain,
                seed=chain,
                micro_callback=lambda loss, seen=row, **_: seen.append(
                    float(loss.mean())
                ),
            )
            rows.append(row)
        return N_BETA * (torch.tensor(rows, dtype=torch.float64) - initial)


KINDS = {
    "SGLD": ours(sg.SGLD, lr=0.05),
    "SGHMC": ours(sg.SGHMC, lr=0.02),
    "SGNHT": ours(sg.SGNHT, lr=0.02),
    "PSGLD": ours(sg.PSGLD, lr=0.005, eps=0.1, gamma=False),
}


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_its_chains_take_ours(kind):
    traces = Problem().traces(KINDS[kind], draws=1200)
    means = traces[:, 200:].mean(1)
    half_width = 3.182 * float(means.std()) / 2  # Student's, of four chains
    assert abs(float(means.mean()) - DIMENSION / 2) < half_width + 0.15
    assert half_width < 1


@pytest.mark.parametrize("kind", ["SGLD", "PSGLD"])
def test_settings_that_mean_the_same(kind):
    """Its ε is 2 lr / nβ, with the same γ: without noise, the same path to w*."""
    lr = 0.05

    def away(sampler):
        (param,) = sampler.param_groups[0]["params"]
        with torch.no_grad():
            param.add_(1.0)
        return sampler

    def there(groups):
        make, settings = SGMCMC.sgld, {"nbeta": N_BETA, "localization": LOCALIZATION}
        if kind == "PSGLD":  # it starts V at 0: with a memory the first steps differ
            make, settings = SGMCMC.rmsprop_sgld, settings | {"alpha": 0.0}
        return away(make(groups, lr=2 * lr / N_BETA, noise_level=0.0, **settings))

    def here(groups):
        make, options = sg.SGLD, {}
        if kind == "PSGLD":
            make, options = sg.PSGLD, {"eps": 0.1, "gamma": False, "decay": 0.0}
        sampler = ours(make, lr=lr, **options)(groups)
        sampler.param_groups[0]["temperature"] = 0.0
        return away(sampler)

    with pytest.warns(UserWarning, match="noise_level"):
        expected = Problem().traces(there, draws=20)[0]
    found = Problem().traces(here, draws=20)[0]
    assert expected[0] > 2 * expected[-1]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0.01)
