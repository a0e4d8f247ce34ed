"""Runs that store nothing of worth: an error where it can be known, else a warning."""

import copy
from functools import partial

import pytest
import torch
from driver_problem import ROWS, cycles, data, loader, loss, model, run, sghmc
from torch import nn

import torch_sgmcmc as sg


def linear():
    return nn.Linear(4, 3)


LONG = partial(sg.CyclicalSchedule, steps_per_cycle=100)
PHASES = "20, {} of them in sampling phases, and .* number {} (burn_in {}, every 2"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"burn_in": 20}, "20, and .* number 22 (burn_in 20, every 2"),
        ({"every": 18}, "20, and .* number 21 (burn_in 3, every 18"),
        ({"burn_in": 19, "every": 1, "epochs": 3, "steps": None}, None),
        ({"schedule": cycles, "burn_in": 7}, PHASES.format(8, 9, 7)),
        ({"schedule": LONG}, PHASES.format(0, 5, 3)),
    ],
)
def test_what_would_store_nothing(options, words, tmp_path):
    given = {"steps": 20, **options}
    words = words or "18, and .* number 20 (burn_in 19, every 1"
    said = words.replace("(", r"\(") + r"\): nothing would be stored$"
    with pytest.raises(ValueError, match=f"^Invalid steps: {said}"):
        run(tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


def test_the_least_that_stores_something(tmp_path):
    options = {"steps": 20}
    assert len(run(tmp_path / "1", **options, burn_in=18)) == 1
    assert len(run(tmp_path / "2", **options, burn_in=6, schedule=cycles)) == 1


@pytest.mark.parametrize("exploration", [0.0, 0.3, 0.5, 0.8, 0.99])
def test_steps_of_sampling_phases(exploration):
    for length in (2, 7, 8):
        sampler = sghmc(linear().parameters(), seed=0)
        schedule = sg.CyclicalSchedule(sampler, length, exploration=exploration)
        count = 0
        for steps in range(20):
            assert schedule.count_collecting(steps) == count
            count += schedule.collecting
            sampler.step()
            schedule.step()


def test_a_model_that_is_not_sampled(tmp_path):
    network = model()
    sampler = sghmc(network.parameters(), seed=0)
    words = (
        r"the sampler has none of the ones that would be stored, .* \(was the model c"
    )
    for other in (copy.deepcopy(network), {"w": torch.zeros(2)}):
        with pytest.raises(ValueError, match=f"^Invalid parameters: {words}"):
            sg.Collector(sampler, other, tmp_path / "none")
    last = sghmc(network[4].parameters(), seed=0)
    with pytest.raises(ValueError, match=words):  # of a layer that is frozen
        sg.Collector(last, network, tmp_path / "none", parameters=["0.*"])
    assert not (tmp_path / "none").exists()
    for i, same in enumerate([network.state_dict(), dict(network.named_parameters())]):
        sg.Collector(sampler, same, tmp_path / f"{i}").close()


def test_a_model_whose_parameters_are_renamed(tmp_path):
    network = nn.Sequential(nn.Linear(2, 2))
    sampler = sghmc(network.parameters(), seed=0)
    collector = sg.Collector(sampler, network, tmp_path)
    nn.utils.parametrizations.weight_norm(network[0])
    before = [p.clone() for p in network.parameters()]
    network(torch.ones(1, 2)).sum().backward()
    with pytest.raises(
        RuntimeError, match=r"model's '0.weight' is missing or .*weight_"
    ):
        sampler.step()
    assert all(map(torch.equal, network.parameters(), before))
    collector.close()


def test_a_chain_that_never_accepts(tmp_path):
    sampler = partial(sg.HMC, step_size=50.0, num_steps=3, num_data=ROWS)
    sg.sample(
        linear, sampler, [data()[:]], loss, tmp_path, steps=12, seed=1, progress=False
    )
    issues = sg.report(None, tmp_path).issues
    assert issues[0].kind == "not moving"


def test_a_chain_that_moves_nowhere(tmp_path):
    """Twelve steps without a gradient."""
    network = linear()
    sampler = sghmc(network.parameters(), seed=0)
    with sg.Collector(sampler, network, tmp_path):
        for p in network.parameters():
            p.grad = torch.zeros_like(p)
        sampler.param_groups[0]["temperature"] = 0.0
        sampler.param_groups[0]["prior_precision"] = 0.0
        for _ in range(12):
            sampler.step()
    assert sg.report(None, tmp_path).issues[0].kind == "not moving"
    with pytest.warns(UserWarning, match="All 12 draws give the same outputs"):
        sg.predict(network, tmp_path, data()[:][0], link="identity")


def test_an_error_is_not_hidden_by_a_warning(tmp_path):
    network = linear()
    sampler = sghmc(network.parameters(), seed=0)
    with pytest.raises(KeyError), sg.Collector(sampler, network, tmp_path):
        for p in network.parameters():
            p.grad = torch.full_like(p, torch.nan)
        sampler.param_groups[0]["nonfinite"] = "skip"
        for _ in range(12):
            sampler.step()
        raise KeyError


def quartic(model, batch):
    return (model(batch[0]) ** 4).mean() + 1


def test_a_chain_that_diverges(tmp_path):
    sampler = partial(sg.SGLD, lr=5.0, num_data=ROWS)
    with pytest.raises(
        RuntimeError,
        match=r"^chain 0, step \d: the chain has diverged: its loss was [\d.]+ at "
        r"first, and .*, (nan|inf) in the end. lr 5 is too large: 0.5 may be stable, "
        r"and restart=True starts a new run$",
    ):
        sg.sample(
            linear,
            sampler,
            loader(),
            quartic,
            tmp_path,
            steps=50,
            chains=2,
            seed=1,
            progress=False,
            callbacks=lambda state: None,
        )


def test_what_is_no_divergence(tmp_path):
    """One minibatch that is not a number."""

    def once(model, batch):
        calls.append(1)
        return loss(model, batch) * (torch.nan if len(calls) == 5 else 1.0)

    calls = []
    with pytest.raises(RuntimeError, match=r"^chain 0, step 5: SGHMC got a gradient"):
        sg.sample(
            linear,
            sghmc,
            loader(),
            once,
            tmp_path,
            steps=50,
            seed=1,
            progress=False,
            check=False,
        )


def skips(which, steps):
    p = torch.zeros(2, requires_grad=True)
    sampler = sg.SGLD([p], 0.01, num_data=10, nonfinite="skip", seed=0)
    for i in range(steps):
        p.grad = torch.full_like(p, torch.nan if which(i) else 0.1)
        sampler.step()
    return sampler.num_skipped


def test_a_tenth_of_skipped_steps_warns_once(recwarn):
    assert skips(lambda i: i % 11 == 0, 1500) > 100
    assert skips(lambda i: i < 99, 1500) == 99
    assert not recwarn.list
    assert skips(lambda i: i % 10 == 0, 1500) == 150
    (one,) = recwarn.list
    assert str(one.message).startswith("SGLD has skipped 100 of its last 991 steps, as")
    recwarn.clear()
    assert skips(lambda i: i > 8, 300) == 291
    (one,) = recwarn.list
    assert "skipped 100 of its last 100 steps" in str(one.message)
