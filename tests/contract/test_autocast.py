"""A context of torch.autocast around a whole loop, which keeps casts of parameters."""

from functools import partial

import pytest
import torch
from torch import nn

import torch_sgmcmc as sg
from torch_sgmcmc.data import closure_of

SETTINGS = {
    **{kind: {"lr": 0.05} for kind in ("SGLD", "SGHMC", "BAOA", "MCLMC", "SGNHT")},
    "SGLRW": {"lr": 0.05},
    "PSGLD": {"lr": 0.05, "gamma": False},
    "EWSG": {"lr": 0.05, "index_chain_length": 2},
    "HMC": {"step_size": 0.1, "num_steps": 3},
    "SBPS": {"replacement": True},
    "HMCECS": {"subsample_size": 10, "num_blocks": 5, "step_size": 0.1},
}
N = 40
X = torch.randn(N, 4, generator=torch.Generator().manual_seed(1))
Y = X @ torch.ones(4) + 0.1


class Linear(nn.Linear):
    clears = False

    def forward(self, x):
        if self.clears:
            torch.clear_autocast_cache()
        return super().forward(x)


def errors(model, indices=slice(None)):
    return 0.5 * (model(X[indices])[:, 0] - Y[indices]).square()


def both(run):
    """Ends with the cache as it is, and with one that each evaluation clears."""
    ends = []
    for clears in (False, True):
        torch.manual_seed(0)
        model = Linear(4, 1)
        model.clears = clears
        with torch.autocast("cpu", torch.bfloat16):
            found = run(model)
        ends.append([*found, *(p.detach() for p in model.parameters())])
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize("kind", SETTINGS)
def test_steps(kind):
    def run(model):
        cls = getattr(sg, kind)
        sampler = cls(model.parameters(), num_data=N, seed=1, **SETTINGS[kind])
        outputs = []
        for _ in range(5):
            if kind == "HMCECS":
                sampler.step(lambda indices: -errors(model, indices))
            elif kind == "SBPS":
                sampler.step(lambda: errors(model))
            else:
                sampler.step(closure_of(sampler, lambda: errors(model).mean()))
            outputs.append(model(X).detach())  # after a rejection, too
        return outputs

    both(run)


@pytest.mark.parametrize("cls", [sg.ControlVariates, partial(sg.SVRG, refresh_every=9)])
def test_control_variates(cls):
    def run(model):
        sampler = sg.SGLD(model.parameters(), lr=0.05, num_data=N, seed=1)
        given = (sampler, lambda rows: errors(model, rows).mean())
        if cls is sg.ControlVariates:
            estimator = cls(*given, batch_size=len, progress=False)
            estimator.set_anchor([torch.arange(N)])
        else:
            estimator = cls(*given, [torch.arange(N)], batch_size=len, progress=False)
        found = []
        for i in range(3):
            sampler.zero_grad()
            found.append(estimator.backward(torch.arange(i, i + 10)))
            sampler.step()
        return found

    both(run)


def test_predictions_and_learning_coefficients():
    def run(model):
        predictive = sg.Predictive(model, X, link="identity")
        for _ in range(3):
            predictive.update()
            with torch.no_grad():
                model.weight.add_(1.0)
        found = sg.local_learning_coefficient(
            model.parameters(),
            lambda rows: errors(model, rows).mean(),
            partial(sg.SGLD, lr=0.01),
            num_data=N,
            localization=1.0,
            burn_in=2,
            draws=10,
            chains=2,
            seed=1,
            progress=False,
        )
        return [predictive.result().variance, found.traces]

    with pytest.warns(UserWarning):  # of few draws
        both(run)


def test_a_whole_run():
    def run(model):
        store = sg.sample(
            model,
            partial(sg.SGHMC, lr=0.01, num_data=N, prior_precision=1.0),
            [torch.arange(0, 20), torch.arange(20, 40)],
            lambda model, rows: errors(model, rows).mean(),
            steps=6,
            chains=2,
            start=["reset", "prior"],
            optimizer=partial(torch.optim.SGD, lr=0.1),
            optimizer_epochs=3,
            seed=1,
            check=False,
            report=False,
            progress=False,
        )
        return [draw[name] for draw in store for name in ("weight", "bias")]

    both(run)


def test_a_check():
    def run(model):
        sampler = sg.SGLD(model.parameters(), lr=0.01, num_data=N, seed=1)
        batches = [torch.arange(0, 20), torch.arange(20, 40)]
        found = sg.check_setup(
            model, lambda m, rows: errors(m, rows).mean(), batches, sampler
        )
        return [torch.tensor([found.curvature, found.largest_lr])]

    both(run)
