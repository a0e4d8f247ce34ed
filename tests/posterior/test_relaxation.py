"""The time in which a chain forgets its start: closed forms, the check, the report."""

import json
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from test_setup_check import SGHMC, N, classes, loader_of, mean, mlp, setup
from torch import nn

import torch_sgmcmc as sg
from torch_sgmcmc.diagnostics import run_issues
from torch_sgmcmc.diagnostics.run_issues import check_relaxation
from torch_sgmcmc.diagnostics.temperature_means import relaxation

# lr, momentum and prior precision of num_data = 100, by sampler.
SETTINGS = {
    "SGHMC": [(0.1, 0.9, 1.0), (0.5, 0.5, 3.0), (0.2, 0.2, 10.0)],
    "BAOA": [(0.1, 0.9, 1.0), (0.5, 0.5, 3.0), (0.2, 0.2, 10.0)],
    "SGLD": [(0.1, 0.0, 2.0), (0.5, 0.0, 1.0), (1.0, 0.0, 5.0)],
    "SGNHT": [(0.1, 0.9, 1.0), (0.5, 0.5, 3.0), (0.2, 0.2, 10.0)],
    "SGLRW": [(0.1, 0.0, 2.0), (0.5, 0.0, 1.0)],
}
CASES = [(kind, *each) for kind, some in SETTINGS.items() for each in some]


def decaying(kind, lr, momentum, precision, *, d=1, start=1.0, **options):
    """A chain without data, whose start decays, and its closed form."""
    p = nn.Parameter(torch.full((d,), start, dtype=torch.float64))
    options |= {"num_data": 100, "prior_precision": precision, "seed": 0}
    options |= {} if kind in ("SGLD", "SGLRW") else {"momentum": momentum}
    sampler = getattr(sg, kind)([p], lr, **options)
    loader = loader_of(classes())
    model = nn.ParameterList([p])
    loss = lambda model, batch: 0.0 * (model[0].sum() + batch[0].sum())  # noqa: E731
    found = sg.check_setup(model, loss, loader, sampler)
    return p, sampler, found.relaxation[0]


def move(p, sampler, steps):
    for _ in range(steps):
        p.grad = torch.zeros_like(p)
        sampler.step()


@pytest.mark.parametrize(
    ("kind", "lr", "momentum", "precision"),
    [case for case in CASES if case[0] not in ("SGNHT", "SGLRW")],
)
def test_decay_without_noise(kind, lr, momentum, precision):
    given = kind, lr, momentum, precision
    p, sampler, tau = decaying(*given, temperature=0.0)
    move(p, sampler, round(12 * tau))  # the faster root is gone
    before, steps = p.item(), max(1, round(tau))
    move(p, sampler, steps)
    assert -steps / math.log(p.item() / before) == pytest.approx(tau, rel=1e-6)


@pytest.mark.parametrize(("kind", "lr", "momentum", "precision"), CASES)
def test_decay_in_noise(kind, lr, momentum, precision):
    """The mean of many coordinates, from standard deviations away.

    SGNHT's thermostats take a larger deviation for heat.
    """
    d, away = (200_000, 0.4) if kind == "SGNHT" else (40_000, 3.0)
    spread = precision**-0.5
    given = kind, lr, momentum, precision
    p, sampler, tau = decaying(*given, d=d, start=away * spread)
    # The first momenta are of the law, and not of a start that moves inward.
    move(p, sampler, round(tau / 4))
    before, steps = float(p.mean()), round(tau)
    move(p, sampler, steps)
    assert float(p.std()) == pytest.approx(spread, rel=0.4)
    # Standard errors of 0.5 % and of 2 % of the last mean.
    assert -steps / math.log(float(p.mean()) / before) == pytest.approx(tau, rel=0.1)


def test_closed_forms_by_settings():
    group = {"lr": 0.03, "momentum": 0.9, "prior_precision": 1.0, "num_data": 60_000}
    assert relaxation("SGHMC", group) == pytest.approx(200_000, rel=1e-3)
    assert relaxation("SGHMC", {**group, "prior_precision": 50.0}) == pytest.approx(
        4000, rel=0.01
    )
    assert relaxation("EWSG", group) == relaxation("SGHMC", group)
    # Complex roots: an envelope.
    assert relaxation("SGHMC", group, 10.0) == pytest.approx(-2 / math.log(0.9))
    assert relaxation("SGHMC", {**group, "prior_precision": 0.0}) == math.inf
    assert relaxation("SGHMC", {**group, "lr": 0.0}) == math.inf
    unknown = [("PSGLD", group), ("HMC", group), ("unknown", group)]
    unknown += [("SGHMC", {**group, "resample_momentum_every": 3})]
    unknown += [("SGHMC", {**group, "lr": 1e9})]
    unknown += [("BAOA", {k: v for k, v in group.items() if k != "momentum"})]
    for kind, settings in unknown:
        assert math.isnan(relaxation(kind, settings)), kind


def by_layer(named, seed, precisions=(1.0, 100.0)):
    named = [*named]
    groups = [
        {
            "params": [pair for pair in named if pair[0][0] == layer],
            "prior_precision": x,
        }
        for layer, x in zip("02", precisions, strict=True)
    ]
    return SGHMC(groups, seed=seed)


@pytest.mark.parametrize(
    ("steps", "start"), [(None, None), (70_000, None), (1000, None), (1000, "prior")]
)
def test_a_run_that_is_shorter_than_its_memory_is_named(steps, start):
    options = {"num_steps": steps, "start": start}
    found = sg.check_setup(*setup(sampler=by_layer), **options)
    tau = N * 0.1 / 0.003
    assert found.relaxation == pytest.approx((tau, tau / 100), rel=0.06)
    assert found.steps_per_pass == 12
    words = f"{found.relaxation[0]:,.0f} steps, 1.67e+03 passes (group 0)"
    assert words in str(found)
    assert (f"the run has {steps:,} steps" in str(found)) if steps else True
    if steps != 1000 or start:
        assert not found.issues
        return
    (issue,) = found.issues
    assert issue.kind == "relaxation" and "group 0 forgets" in issue.message
    assert "prior_precision to 60 or more" in issue.message  # 3 τ / 1000


def test_relaxation_with_data_is_of_the_flattest_tensor():
    """Curvatures 4 and 0.5 of two tensors, both with noise."""
    torch.manual_seed(0)
    y = torch.randn(N, 2, dtype=torch.float64)
    params = [nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(2)]
    model = nn.ParameterList(params)

    def loss(model, batch):
        away = torch.cat([*model.parameters()]) - batch[0]
        return (away.square() @ torch.tensor([2.0, 0.25]).double()).mean()

    data = torch.utils.data.TensorDataset(y)
    sampler = sg.SGHMC(params, 0.01, 0.5, num_data=N, prior_precision=6.0, seed=0)
    found = sg.check_setup(model, loss, loader_of(data), sampler)
    group = sampler.param_groups[0]
    assert found.relaxation == (relaxation("SGHMC", group),)
    expected = relaxation("SGHMC", group, 0.5)
    assert found.relaxation_with_data == pytest.approx((expected,), rel=1e-6)
    assert f"the flattest tensor with data in {expected:,.0f}." in str(found)


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("PSGLD", {"lr": 1e-3}, "the relaxation of a PSGLD with these settings"),
        ("SGHMC", {"lr": 1e-3, "prior_precision": 0.0}, "no prior in the sampler"),
        ("SGHMC", {"lr": 1e-3, "resample_momentum_every": 5}, "of a SGHMC with these"),
    ],
)
def test_what_has_no_closed_form_is_not_known(kind, options, reason):
    options = {"prior_precision": 1.0, "num_data": N, **options}
    sampler = partial(getattr(sg, kind), **options)
    found = sg.check_setup(*setup(sampler=sampler), num_steps=10)
    assert not found.issues and reason in str(found), found
    assert "forget the start" not in str(found)


def sampled(folder, **options):
    options = {"steps": 60, "every": 2, "seed": 0, "progress": False, **options}
    return sg.sample(mlp, SGHMC, loader_of(classes()), mean, folder, **options)


def test_a_report_says_what_has_not_left_its_start(tmp_path):
    with pytest.warns(UserWarning, match="group 0 forgets its start"):
        store = sampled(tmp_path, chains=2)
    record = json.loads((tmp_path / "chain-0" / "run.json").read_text())
    assert record["start"] == "model" and record["steps_per_pass"] == 12
    assert record["settings"][0]["momentum"] == 0.9
    text = (tmp_path / "report.md").read_text()
    # The second chain begins at a draw from the prior.
    words = "0.weight, 0.bias, 2.weight and 1 more of chain 0 did not leave the start"
    assert words in text and "19,990 steps, 1.67e+03 passes" in text
    runs = sg.report(None, store).runs
    older = {i: replace(ran, start=None) for i, ran in runs.items()}
    series = run_issues.read(run_issues.by_chain(store), None, None)[0]
    issues, unknown = check_relaxation(series, older)
    assert not issues and "whether 0.weight, 0.bias" in unknown[0]
    oldest = {0: replace(runs[0], settings=({"lr": 0.003, "prior_precision": 1.0},))}
    assert check_relaxation(series, oldest)[1] == [
        "how long the start is remembered (of these settings)"
    ]


def test_a_record_of_cpp_is_read(tmp_path):
    """tests/cpp/store_test.cpp has such a file; it has no temperatures."""
    with pytest.warns(UserWarning, match="group 0 forgets its start"):
        sampled(tmp_path)
    path = tmp_path / "chain-0" / "run.json"
    kept = ("names", "num_skipped", "sampler", "seed", "settings", "start", "steps")
    kept += ("steps_per_pass", "temperature")
    record = json.loads(path.read_text())
    path.write_text(json.dumps({key: record[key] for key in kept}))
    found = sg.report(None, tmp_path)
    assert "relaxation" in {issue.kind for issue in found.issues}
    assert not found.runs[0].tensors and found.runs[0].steps == 60


def test_a_report_takes_the_mean_lr_of_a_schedule(tmp_path):
    """A cosine ends at 0, where nothing would relax."""
    strong = partial(SGHMC, lr=0.1, prior_precision=200.0)
    cosine = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=400)
    options = {"steps": 400, "progress": False, "check": False, "schedule": cosine}
    sg.sample(mlp, strong, loader_of(classes()), mean, tmp_path, **options)
    found = sg.report(None, tmp_path)
    assert found.runs[0].settings[0]["lr"] < 1e-4
    assert "relaxation" not in {issue.kind for issue in found.issues}
