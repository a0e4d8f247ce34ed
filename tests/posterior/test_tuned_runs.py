"""sample and check_setup of samplers that tune themselves or take given tensors."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import torch_sgmcmc as sg
from torch_sgmcmc.diagnostics.run_record import read_run_record

ROWS = 20
X = torch.linspace(-1, 1, 2 * ROWS).view(ROWS, 2)
Y = X.sum(1, keepdim=True)
LOSS = sg.losses.gaussian(1.0)
MCLMC = partial(sg.MCLMC, lr=0.02, num_data=ROWS, prior_precision=1.0)


def make():
    return nn.Linear(2, 1)


def run(folder, sampler, **given):
    quiet = {"progress": False, "check": False, "seed": 0}
    options = {"steps": 200, "burn_in": 100, "every": 10} | quiet | given
    return sg.sample(make, sampler, [(X, Y)], LOSS, folder, **options)


def test_a_schedule_would_overwrite_what_is_tuned(tmp_path):
    tuned = partial(MCLMC, tune_steps=60)
    with pytest.raises(ValueError, match="Invalid schedule: tune_steps finds lr"):
        run(tmp_path, tuned, schedule=lambda s: LambdaLR(s, lambda i: 1.0))
    run(tmp_path, MCLMC, schedule=lambda s: LambdaLR(s, lambda i: 1.0))


def test_draws_of_tuning_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"Invalid burn_in: 100 .*tune_steps = 101"):
        run(tmp_path, partial(MCLMC, tune_steps=101))
    run(tmp_path, partial(MCLMC, tune_steps=100))


def test_a_collector_warns_of_draws_of_tuning():
    model = make()
    sampler = sg.MCLMC(model.parameters(), 0.02, num_data=ROWS, tune_steps=40, seed=0)
    collector = sg.Collector(sampler, model, sg.SampleStore(), burn_in=30, every=5)

    def steps(count):
        for _ in range(count):
            sampler.zero_grad()
            LOSS(model, (X, Y)).backward()
            sampler.step()

    with pytest.warns(UserWarning, match="burn_in of at least tune_steps") as found:
        steps(39)
    assert len(found) == 1
    steps(20)  # no warning, which would be an error
    collector.close()


def energy(store):
    return read_run_record(store.chain(0)[0]).energy_error


def test_the_energy_error_does_not_depend_on_checkpoints(tmp_path):
    whole = energy(run(tmp_path / "a", MCLMC, steps=400))
    for steps in (130, 250, 400, 400):
        store = run(tmp_path / "b", MCLMC, steps=steps)
    assert energy(store) == whole > 0


def test_the_energy_error_is_of_steps_after_burn_in(tmp_path):
    def far(model):
        with torch.no_grad():
            model.weight.fill_(10.0)

    near = energy(run(tmp_path / "a", MCLMC, steps=3000, burn_in=1000))
    found = energy(run(tmp_path / "b", MCLMC, steps=3000, burn_in=1000, start=far))
    assert found == pytest.approx(near, rel=0.2)


def test_what_a_start_function_does_stays():
    network = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).eval()
    network[0].weight.requires_grad_(False)
    seen = {}

    def start(model):
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.fill_(2)

    def look(state):
        seen.update({k: v.clone() for k, v in state.model.state_dict().items()})

    sampler = partial(sg.SGLD, lr=1e-20, num_data=ROWS)
    quiet = {"progress": False, "check": False, "report": False, "seed": 0}
    given = {"steps": 1, "every": 1, "start": start, "callbacks": look}
    sg.sample(network, sampler, [(X, Y)], LOSS, **given, **quiet)
    assert all(bool((tensor == 2).all()) for tensor in seen.values())
    assert float(network[1].running_mean.sum()) == 0


@pytest.mark.parametrize("name", ["preconditioner", "prior_mean"])
def test_other_given_tensors_are_another_run(name, tmp_path):
    def sampler(value):
        given = {name: [torch.full((1, 2), value), torch.ones(1)]}
        settings = {"num_data": ROWS, "prior_precision": 1.0}
        return partial(sg.SGHMC, lr=0.01, **settings, **given)

    run(tmp_path, sampler(1.0))
    run(tmp_path, sampler(1.0), steps=210)
    with pytest.raises(ValueError, match=f"Invalid sampler: group 0 has {name} of che"):
        run(tmp_path, sampler(1.5), steps=220)


def check(batches=1, **settings):
    model = make()
    loader = [*zip(X.chunk(batches), Y.chunk(batches), strict=True)]
    settings = {"num_data": ROWS, "prior_precision": 1.0} | settings
    sampler = sg.MCLMC(model.parameters(), **settings, seed=0)
    return sg.check_setup(model, LOSS, loader, sampler, num_steps=500)


def test_settings_that_tuning_replaces_are_not_judged():
    assert {issue.kind for issue in check(lr=50.0).issues} == {"unstable"}
    assert "does not sample the posterior" in check(lr=50.0).issues[0].message
    assert {issue.kind for issue in check(lr=1e-7).issues} == {"relaxation"}
    for lr in (50.0, 1e-7):
        found = check(lr=lr, tune_steps=100)
        assert not found.issues
        assert any("tune_steps sets it" in text for text in found.unknown)


def test_tuning_needs_all_data():
    kind = "dependent minibatches"
    assert kind in {issue.kind for issue in check(2, lr=0.02, tune_steps=100).issues}
    assert kind not in {issue.kind for issue in check(2, lr=0.02).issues}
    assert not check(lr=0.02, tune_steps=100).issues


def test_tuning_that_is_finished(tmp_path):
    def tuned(params, seed):
        sampler = MCLMC(params, tune_steps=60, seed=seed)
        for _ in range(60):
            for _, p in params:
                p.grad = p.detach().clone()
            sampler.step()
        return sampler

    run(tmp_path, tuned, burn_in=0, schedule=lambda s: LambdaLR(s, lambda i: 1.0))
    model = make()
    sampler = tuned([*model.named_parameters()], 0)
    loader = [*zip(X.chunk(2), Y.chunk(2), strict=True)]
    found = sg.check_setup(model, LOSS, loader, sampler)
    assert "dependent minibatches" not in {issue.kind for issue in found.issues}
