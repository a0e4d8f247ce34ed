"""A frozen preconditioner of SGHMC, BAOA and MCLMC; tests/laws has its law."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from failed_steps import refused
from reference import assert_same_bits, same_bits
from torch import nn

import torch_sgmcmc as sg
from torch_sgmcmc.diagnostics.run_record import RunRecorder
from torch_sgmcmc.diagnostics.temperature_means import relaxation

EACH = pytest.mark.parametrize("cls", [sg.SGHMC, sg.BAOA, sg.MCLMC])
TARGET = {"num_data": 50.0, "temperature": 0.9}
SHAPES = ((3,), (2, 129), (40,))
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def make_params(scales=(1.0, 1.0, 1.0), dtypes=DTYPES):
    g = torch.Generator().manual_seed(3)
    values = [torch.randn(s, generator=g) for s in SHAPES]
    pairs = zip(values, scales, dtypes, strict=True)
    return [nn.Parameter((x * scale).to(dtype)) for x, scale, dtype in pairs]


def follow(sampler, params, steps, scales=(1.0, 1.0, 1.0)):
    """Makes these steps on Σ θ⁴ / 4, θ being the parameters over their scales."""
    for step in steps:
        for p, scale in zip(params, scales, strict=True):
            p.grad = (p.detach() / scale).pow(3) / scale
        for group in sampler.param_groups:
            group["lr"] = 0.02 if step < 4 else 0.01
            cold = step in (6, 7) and not isinstance(sampler, sg.MCLMC)
            group["temperature"] = 0.0 if cold else 0.9
        sampler.step()
    return [p.detach() / s for p, s in zip(params, scales, strict=True)]


@EACH
@pytest.mark.parametrize("g", [(1.0, 1.0, 1.0), (4.0, 1 / 16, 2.0**-6)])
def test_it_is_the_sampler_of_other_coordinates(cls, g):
    """Equal to the bit, as √G are powers of 2; λ and μ become λ G and μ / √G."""
    scales = [x**-0.5 for x in g]
    params, others = make_params(), make_params(scales)
    prior = {"prior_precision": 3.0, "prior_mean": 0.5}
    sampler = cls(params, 0.02, **TARGET, **prior, seed=5, preconditioner=g)
    groups = [
        {"params": [p], "prior_precision": 3.0 * x, "prior_mean": 0.5 * scale}
        for p, x, scale in zip(others, g, scales, strict=True)
    ]
    other = cls(groups, 0.02, **TARGET, seed=5)
    monitors = [sg.TemperatureMonitor(s, every=1) for s in (sampler, other)]
    for steps in (range(1), range(1, 10)):
        ours = follow(sampler, params, steps)
        theirs = follow(other, others, steps, scales)
        assert all(map(same_bits, ours, theirs))
    moved = [not torch.equal(a, b) for a, b in zip(params, make_params(), strict=True)]
    assert all(moved)
    for name, of_other in zip(monitors[0].names, monitors[1].names, strict=True):
        found, wanted = monitors[0].tensor(name), monitors[1].tensor(of_other)
        for key in ("kinetic", "configurational", "minibatch_heating"):
            ours, theirs = getattr(found, key).mean, getattr(wanted, key).mean
            nan_ok = cls is sg.MCLMC  # has no closed form
            wanted_too = pytest.approx(theirs, rel=1e-5, nan_ok=nan_ok)
            assert ours == wanted_too, (name, key)


def burn_in(params, steps=20, **settings):
    sampler = sg.PSGLD(params, 1e-3, **{**TARGET, "gamma": False, **settings}, seed=1)
    for _ in range(steps):
        for p in sampler.param_groups[0]["params"]:
            p.grad = p.detach() ** 3 if p.requires_grad else None
        sampler.step()
    return sampler


@EACH
def test_a_burn_in_gives_its_g_over_its_mean(cls):
    params = make_params()
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    before = burn_in([*params, frozen], eps=0.1, prior_precision=1.0)
    sampler = cls([*params, frozen], 0.02, **TARGET, seed=2, preconditioner=before)
    squares = [before.state[p]["square_average"].double().numpy() for p in params]
    g = [1 / (np.sqrt(v) + 0.1) for v in squares]
    mean = np.concatenate([x.ravel() for x in g]).mean()
    for p, x in zip(params, g, strict=True):
        kept = sampler.state[p]["preconditioner"]
        assert kept.dtype == before.state[p]["square_average"].dtype
        np.testing.assert_allclose(kept.numpy(), x / mean, rtol=1e-6)
    assert torch.equal(sampler.state[frozen]["preconditioner"], torch.ones(2))
    follow(before, params, range(3))  # and keeps it
    follow(sampler, params, range(3))
    np.testing.assert_allclose(kept.numpy(), g[-1] / mean, rtol=1e-6)


def test_each_chain_has_its_own_mean():
    many = nn.Parameter(torch.tensor([[1.0, 2.0, 3.0], [0.1, 0.2, 0.7]]))
    before = burn_in([many], num_chains=2)
    together = sg.SGHMC(
        [many], 0.02, **TARGET, num_chains=2, seed=2, preconditioner=before
    ).state[many]["preconditioner"]
    for k, v in enumerate(before.state[many]["square_average"]):
        one = nn.Parameter(many[k].detach().clone())
        alone = burn_in([one])
        alone.state[one]["square_average"] = v.clone()
        of_one = sg.SGHMC([one], 0.02, **TARGET, seed=2, preconditioner=alone)
        assert same_bits(together[k], of_one.state[one]["preconditioner"])


def reloaded(sampler, params):
    plain = type(sampler)(params, 0.5, **TARGET, seed=9)
    plain.load_state_dict(sampler.state_dict())
    return params, plain


WAYS = {
    "loaded": lambda s, ps: reloaded(s, copy.deepcopy(ps)),
    "copied": lambda s, ps: copy.deepcopy((ps, s)),
    "pickled": lambda s, ps: pickle.loads(pickle.dumps((ps, s))),
}


@EACH
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("first", [0, 3])
def test_a_resumed_chain_is_the_same(cls, way, first):
    params = make_params()
    g = [torch.rand(s) + 0.5 for s in SHAPES]
    sampler = cls(params, 0.02, **TARGET, seed=5, preconditioner=g)
    follow(sampler, params, range(first))
    others, other = WAYS[way](sampler, params)
    ours, theirs = (
        follow(s, ps, range(first, 10))
        for s, ps in ((sampler, params), (other, others))
    )
    assert all(map(same_bits, ours, theirs))
    assert_same_bits(sampler.state_dict(), other.state_dict())


@EACH
def test_it_is_copied_and_stays_when_a_user_clears_the_state(cls):
    params = make_params()
    g = [torch.rand(s) + 0.5 for s in SHAPES]
    sampler = cls(params, 0.02, **TARGET, seed=5, preconditioner=g)
    kept = [x.clone() for x in g]
    for x in g:
        x.zero_()
    follow(sampler, params, range(2))
    sampler.state.clear()
    follow(sampler, params, range(2, 4))
    for p, x in zip(params, kept, strict=True):
        found = sampler.state[p]["preconditioner"]
        assert same_bits(found, x.to(found.dtype))


@EACH
def test_later_groups_have_none(cls):
    params, others = make_params(), make_params()
    sampler = cls(params[:1], 0.02, **TARGET, seed=5, preconditioner=torch.ones(3))
    sampler.add_param_group({"params": params[1:]})
    plain = cls(others, 0.02, **TARGET, seed=5)
    ours, theirs = follow(sampler, params, range(3)), follow(plain, others, range(3))
    assert all(map(same_bits, ours, theirs))
    assert "preconditioner" not in sampler.state[params[1]]


GIVEN = "must be a PSGLD sampler of the same parameters, or a tensor for each of them"
RANGE = "has elements out of range (must be finite and > 0)"
STEPS = "must have made steps with gradients of the same parameters"


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        (2.0, TypeError, f": got float ({GIVEN})"),
        ("psgld", TypeError, f": got str ({GIVEN})"),
        (lambda ps: sg.SGLD(ps, 0.1, **TARGET), TypeError, f": got SGLD ({GIVEN})"),
        (lambda ps: torch.optim.SGD(ps, 0.1), TypeError, f": got SGD ({GIVEN})"),
        ([1.0], ValueError, ": 1 (must be one for each of the 3 parameters)"),
        ([1.0, 0.0, 1.0], ValueError, f": number 1 {RANGE}"),
        ([torch.inf, 1.0, 1.0], ValueError, f": number 0 {RANGE}"),
        (
            [torch.ones(4), 1.0, 1.0],
            ValueError,
            ": number 0 has shape [4] (must broadcast to [3])",
        ),
        (
            lambda ps: burn_in(ps, steps=0),
            ValueError,
            f": the PSGLD sampler lacks square_average of parameter 0 ({STEPS})",
        ),
        (
            lambda ps: burn_in(ps[:2]),
            ValueError,
            f": the PSGLD sampler lacks the parameter 2 ({STEPS})",
        ),
    ],
)
@EACH
def test_refusals(cls, given, kind, message):
    params = make_params()
    given = given(params) if callable(given) else given
    with refused(kind, f"Invalid preconditioner{message}"):
        cls(params, 0.1, **TARGET, seed=2, preconditioner=given)


@pytest.mark.parametrize(
    ("setting", "value", "wanted"),
    [("noise_estimate", "online", "a number"), ("resample_momentum_every", 3, "0")],
)
def test_what_it_excludes(setting, value, wanted):
    message = f"Invalid {setting}: {value!r} (must be {wanted} with a preconditioner)"
    params = make_params()
    g = [1.0] * 3
    with refused(ValueError, message):
        sg.SGHMC(params, 0.02, **TARGET, preconditioner=g, **{setting: value})
    sampler = sg.SGHMC(params, 0.02, **TARGET, seed=2, preconditioner=g)
    follow(sampler, params, range(2))
    before = copy.deepcopy((params, sampler.state_dict()))
    sampler.param_groups[0][setting] = value
    with refused(ValueError, message):
        sampler.step()
    sampler.param_groups[0][setting] = 0
    assert_same_bits((params, sampler.state_dict()), before)


@EACH
def test_bad_state_dicts(cls):
    params = make_params()
    sampler = cls(params, 0.02, **TARGET, seed=2, preconditioner=[2.0] * 3)
    follow(sampler, params, range(2))
    for value in (0.0, -1.0, torch.nan, torch.inf):
        saved = sampler.state_dict()
        saved["state"][1]["preconditioner"][0] = value
        message = (
            "Invalid state_dict: preconditioner of parameter 1 has elements out of "
            "range (must be finite and > 0)"
        )
        with refused(ValueError, message):
            sampler.load_state_dict(saved)


@EACH
def test_a_check_says_what_is_not_known(cls):
    model = nn.Linear(2, 1)
    x = torch.randn(16, 2)
    batches = [(x[i : i + 4], x[i : i + 4].sum(1, keepdim=True)) for i in (0, 4, 8, 12)]
    reports = []

    def loss(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    for g in (None, [2.0, 3.0]):
        prior = {"num_data": 16, "prior_precision": 1.0}
        sampler = cls(model.parameters(), 0.02, **prior, seed=2, preconditioner=g)
        reports.append(sg.check_setup(model, loss, batches, sampler, num_steps=1000))
        settings = RunRecorder(sampler).record().settings[0]
        assert math.isnan(relaxation(cls.__name__, settings)) == (g is not None)
    plain, found = reports
    assert plain.largest_lr > 0 and plain.relaxation[0] > 0
    assert cls is sg.MCLMC or plain.noise_lr > 0
    assert np.isnan([found.largest_lr, found.noise_lr, *found.relaxation]).all()
    for unknown in ("the largest stable lr", "T_kin", "the relaxation"):
        assert f"{unknown} of a {cls.__name__} with these settings" in str(found)
