"""Heat and curvature that a look before a run foretells."""

import copy
import math
from functools import partial

import pytest
import torch
from test_check import (
    BATCH,
    RIGHT,
    SGHMC,
    SMALL_NOISE,
    N,
    classes,
    loader_of,
    setup,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_sgmcmc as sg
from torch_sgmcmc.judge.before.losses import look


@pytest.mark.parametrize(
    ("kind", "limit", "part"),
    [(sg.SGHMC, 2 * 1.9, 1.0), (sg.BAOA, 4.0, 0.95)],
    ids=["SGHMC", "BAOA"],
)
def test_curvature_and_heat_are_those_of_a_quadratic(kind, limit, part):
    # Loss h/2 (θ - y)²: the curvature is h and λ/N, noise h² Var(y) / batch.
    torch.manual_seed(0)
    y = torch.randn(N, 1, dtype=torch.float64)
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    loader = DataLoader(
        TensorDataset(y),
        batch_sampler=sg.IndependentBatchSampler(N, BATCH, replacement=True, seed=0),
    )
    sampler = kind(
        model.parameters(), lr=0.01, momentum=0.9, num_data=N, prior_precision=60.0
    )
    found = sg.check(
        model, lambda m, b: 2 * (m.weight - b[0]).square().mean(), loader, sampler
    )
    assert found.curvature == pytest.approx(4.1, rel=1e-6)
    assert found.largest_lr == pytest.approx(limit / 4.1, rel=1e-6)
    (heat,) = found.heating.values()
    # Eight pairs know it to a factor of exp(± 2 √(2/8)).
    exact = part * 0.01 * N * 16 * float(y.var()) / BATCH / (2 * 0.1)
    assert exact / 2.7 < heat < exact * 2.7


def test_heat_falls_with_squared_residuals():
    """What a start's heat is divided by, where features do not change."""
    torch.manual_seed(0)
    x = torch.randn(N, 50)
    y = x.sum(1, keepdim=True) + 0.1 * torch.randn(N, 1)
    model, loss = nn.Linear(50, 1), sg.losses.gaussian(noise=0.1)
    sampler = SGHMC(model.named_parameters(), lr=1e-5, seed=0)
    loader = loader_of(TensorDataset(x, y))
    nn.init.zeros_(model.bias)
    found = []
    for weight in (0.0, 1.0):
        nn.init.constant_(model.weight, weight)
        found.append(sg.check(model, loss, loader, sampler))
    start, end = found
    assert start.residuals == pytest.approx(float(y.square().mean()) / 0.01, rel=0.2)
    assert end.residuals == pytest.approx(1, rel=0.2)
    assert "Squared residuals are" in str(start)
    assert "Squared residuals are" not in str(end)
    # Eight pairs of 50 coordinates know each to 7 %.
    foretold = start.heating["weight"] / start.residuals
    assert foretold == pytest.approx(end.heating["weight"], rel=0.3)


def test_heat_of_large_residuals_is_forgiven_before_the_first_step_alone():
    model, loss, loader, sampler = setup(
        **SMALL_NOISE, sampler=partial(SGHMC, lr=3e-5, momentum=0.99)
    )
    assert not sg.check(model, loss, loader, sampler).problems
    start = copy.deepcopy(model.state_dict())
    loss(model, next(iter(loader))).backward()
    sampler.step()
    model.load_state_dict(start)
    (problem,) = sg.check(model, loss, loader, sampler).problems
    assert problem.kind == "hot"


@pytest.mark.parametrize(
    "options",
    [{}, RIGHT["logits and labels"], RIGHT["label smoothing"]],
    ids=["classes", "logits", "smoothed"],
)
def test_residuals_are_those_of_a_gaussian(options):
    assert math.isnan(sg.check(*setup(**options)).residuals)


def test_stability_is_that_of_each_group_s_lr():
    """Two curvatures, 1 and 100, and lrs that are beyond or within what they allow."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    model = nn.ParameterList(params)
    x = torch.zeros(N, 1)
    loader = loader_of(TensorDataset(x, x))

    def quadratic(model, batch):
        return (model[0] ** 2 + 100 * model[1] ** 2).sum() / 2 + 0 * batch[0].sum()

    for lrs, is_stable in (((3.0, 0.03), True), ((3.0, 0.05), False)):
        groups = [{"params": [p], "lr": lr} for p, lr in zip(params, lrs, strict=True)]
        sampler = sg.SGHMC(groups, 0.1, 0.9, num_data=N, seed=0)
        kinds = {p.kind for p in sg.check(model, quadratic, loader, sampler).problems}
        assert ("unstable" not in kinds) == is_stable


def test_heat_of_one_noise_by_other_samplers():
    """The same minibatches: friction differs, and what an estimate takes off."""
    model, loss, _, _ = setup()
    data = classes()

    def heats(kind, **settings):
        loader = DataLoader(
            data, batch_sampler=sg.IndependentBatchSampler(N, BATCH, seed=0)
        )
        sampler = kind(model.named_parameters(), num_data=N, **settings)
        return torch.tensor([*sg.check(model, loss, loader, sampler).heating.values()])

    plain = heats(sg.SGHMC, lr=0.01, momentum=0.9)
    torch.testing.assert_close(heats(sg.SGLD, lr=0.1), plain)
    torch.testing.assert_close(heats(sg.BAOA, lr=0.01, momentum=0.9), 0.95 * plain)
    taken = heats(sg.SGHMC, lr=0.01, momentum=0.9, noise_estimate=0.02)
    torch.testing.assert_close(taken, plain - 0.2)
    taken = heats(sg.BAOA, lr=0.01, momentum=0.9, noise_estimate=0.02)
    torch.testing.assert_close(taken, 0.95 * (plain - 0.2))


def test_targets_are_where_outputs_are():
    """A loader's are on the CPU, where the model's are on a GPU."""
    outputs = torch.zeros(4, 3, device="meta")
    x, y = torch.zeros(4, 2), torch.zeros(4, dtype=torch.long)
    seen = look(torch.zeros(()), [outputs], (x, y))
    assert seen.targets.device == outputs.device and y.device.type == "cpu"
