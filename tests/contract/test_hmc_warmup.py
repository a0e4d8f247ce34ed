"""The warm-up of HMC: the step size it finds, and a run that is cut short."""

import builtins
import math

import pytest
import torch
from failed_steps import assert_unchanged, refused, snapshot
from hmc_chains import NO_CLOSURE, Quartic
from short_chains import assert_same, two
from stored_files import through_file
from torch import nn

import torch_sgmcmc as sg
import torch_sgmcmc._C as _C
from torch_sgmcmc.samplers import hmc_dynamics as dynamics


@pytest.mark.parametrize("target", [0.6, 0.9])
@pytest.mark.parametrize("start", [1e-3, 3.0])
def test_warmup_finds_the_step_size(start, target):
    """Warm-up from far too small and too large sizes; 64 chains steady the estimate."""
    g = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.randn(64, 20, generator=g))
    settings = {"trajectory_length": 0.5, "num_data": 5, "num_chains": 64, "seed": 1}
    sampler = sg.HMC([p], start, **settings)
    closure = Quartic([p], chains=True)
    sampler.warmup(closure, 150, target, progress=False)
    group = sampler.param_groups[0]
    assert group["dual_averaging"] == [] and group["step"] == 150
    assert group["num_trajectories"] == 0 and math.isnan(sampler.acceptance_rate)
    size = group["step_size"]
    for _ in range(50):
        sampler.step(closure)
    assert sampler.param_groups[0]["step_size"] == size
    # 3200 decisions: a standard error of 0.009 at most; what the number of steps,
    # which is whole, leaves is more.
    assert abs(sampler.acceptance_rate - target) < 0.07


def warmed(params):
    return sg.HMC(params, 0.5, num_steps=3, num_data=4, seed=7)


@pytest.mark.parametrize("stop", [1, 13, 29])
def test_warmup_resumes_bit_for_bit(stop):
    params = two()
    sampler = warmed(params)
    sampler.warmup(Quartic(params), 30, progress=False)

    others = two()
    early = warmed(others)
    early.warmup(Quartic(others), stop, finish=False, progress=False)
    assert early.param_groups[0]["step_size"] != 0.5
    values, state = through_file([others, early.state_dict()])
    resumed = [nn.Parameter(v.detach()) for v in values]
    late = sg.HMC(resumed, 9.0, trajectory_length=1.0, num_data=1)
    late.load_state_dict(state)
    message = "Invalid target_acceptance: 0.7 (the warm-up in progress has 0.8)"
    with refused(ValueError, message):
        late.warmup(Quartic(resumed), 3, 0.7)
    late.warmup(Quartic(resumed), 30 - stop, progress=False)
    assert sampler.param_groups[0]["step_size"] == late.param_groups[0]["step_size"]
    for _ in range(3):
        sampler.step(Quartic(params))
        late.step(Quartic(resumed))
    assert_same(params, resumed)


def test_warmup_resumes_after_an_exception():
    params, others = two(), two()
    sampler, twin = warmed(params), warmed(others)
    sampler.warmup(Quartic(params), 20, progress=False)
    quartic, calls = Quartic(others), iter(range(1000))

    def closure():
        if next(calls) == 30:  # in the eighth trajectory
            raise KeyError("data")
        return quartic()

    with pytest.raises(KeyError, match="data"):
        twin.warmup(closure, 20, progress=False)
    assert twin.param_groups[0]["step"] == 7
    twin.warmup(quartic, 13, progress=False)
    assert_same(params, others)
    assert sampler.param_groups[0]["step_size"] == twin.param_groups[0]["step_size"]


def test_errors_of_warmup():
    params = two()
    sampler = warmed(params)
    before = snapshot(sampler)

    with refused(ValueError, "Invalid steps: 0 (must be >= 1)"):
        sampler.warmup(Quartic(params), 0)
    with refused(TypeError, "Invalid steps: 1.0 (must be an int, got float)"):
        sampler.warmup(Quartic(params), 1.0)
    for target in (0.0, 1.0, -1.0, math.nan):
        message = f"Invalid target_acceptance: {target} (must be in (0, 1))"
        with refused(ValueError, message):
            sampler.warmup(Quartic(params), 5, target)
    with refused(TypeError, NO_CLOSURE):
        sampler.warmup(None, 1)
    assert_unchanged(sampler, before)
    sampler.param_groups[0]["metropolis"] = False
    message = "Invalid metropolis: False (warmup() adapts to the acceptance rate)"
    with refused(ValueError, message):
        sampler.warmup(Quartic(params), 5)
    state = sampler.state_dict()
    state["param_groups"][0]["dual_averaging"] = [0.8, 0, -1, 0, 0, 0]
    message = "Invalid state of dual averaging (must be finite, with a whole count)"
    with refused(ValueError, message):
        warmed(two()).load_state_dict(state)


@pytest.mark.filterwarnings("ignore:HMC got another loss")
def test_a_hopeless_warmup_ends():
    """A trajectory of given length is of 1024 steps at most, however small they get."""
    p = nn.Parameter(torch.ones(2))
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        p.grad = torch.zeros_like(p)
        return float(calls) ** 2  # worse each time

    sampler = sg.HMC([p], 0.5, trajectory_length=1.0, num_data=1e9, seed=0)
    sampler.warmup(closure, 8, progress=False)
    assert calls <= 8 * 1025
    assert sampler.param_groups[0]["step_size"] > 0


def test_warmup_shows_progress(capsys, monkeypatch):
    pytest.importorskip("tqdm")
    params = two()
    warmed(params).warmup(Quartic(params), 2, progress=False)
    assert capsys.readouterr().err == ""
    warmed(params).warmup(Quartic(params), 2)
    assert "warm-up: 100%" in capsys.readouterr().err
    # Without tqdm it is silent.
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("tqdm"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    warmed(params).warmup(Quartic(params), 2)
    assert capsys.readouterr().err == ""


def test_dual_averaging_follows_the_paper():
    accepted = (0.1, 0.9, 1.0, 0.0, 0.75, 0.3)
    mu, error, log_average = math.log(10 * 0.3), 0.0, 0.0
    adaptation = dynamics.DualAveraging(0.3, 0.8)
    assert math.isclose(adaptation.step_size, 0.3, rel_tol=1e-15)
    for t in range(1, 61):
        a = accepted[t % len(accepted)]
        error = (1 - 1 / (t + 10)) * error + (0.8 - a) / (t + 10)
        log = mu - math.sqrt(t) / 0.05 * error
        share = t**-0.75
        log_average = share * log + (1 - share) * log_average
        adaptation.update(a)
        assert math.isclose(adaptation.step_size, math.exp(log), rel_tol=1e-12)
        assert math.isclose(adaptation.averaged, math.exp(log_average), rel_tol=1e-12)
        assert adaptation.state[2] == t


def test_dual_averaging_stays_finite():
    adaptation = dynamics.DualAveraging(1, 0.5)
    for acceptance, times in ((0, 1000), (1, 100_000)):
        for _ in range(times):
            adaptation.update(acceptance)
            assert 0 < adaptation.step_size < math.inf


@pytest.mark.parametrize(
    "state",
    [
        *([0.8, x, n, 0, 0, y] for x, n, y in ((math.nan, 0, 0), (0, -1, 0))),
        *([0.8, 0, n, 0, 0, y] for n, y in ((0.5, 0), (0, math.inf))),
        *([0.5] * size for size in (1, 5, 7)),
        [0.8, 0, 0, 0, 0, "1"],
        0.5,
    ],
)
def test_what_is_no_state_of_dual_averaging(state):
    message = "Invalid state of dual averaging (must be finite, with a whole count)"
    with refused(ValueError, message):
        dynamics.DualAveraging.load(state)


@pytest.mark.parametrize("target", [0.0, 1.0])
def test_a_target_of_dual_averaging_out_of_range(target):
    with refused(ValueError, f"Invalid target: {target} (must be in (0, 1))"):
        dynamics.DualAveraging.load([target, 0, 0, 0, 0, 0])


def test_nonfinite_trajectories_count_as_rejected():
    assert dynamics.mean_acceptance([]) == 0
    assert dynamics.mean_acceptance([0, 5]) == 1
    rejected = (math.nan, math.inf, -math.inf)
    assert dynamics.mean_acceptance([-1, *rejected]) == math.exp(-1) / 4


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ((7, None, 0.1), 7),
        ((7, None, 0.1, 5), 5),
        ((7, None, 0.1, dynamics.MOST_WARMUP_STEPS), 7),
        ((None, 1.0, 0.25), 4),
        ((None, 1.24, 0.5), 2),
        ((None, 1.25, 0.5), 3),
        ((None, 0.01, 0.5), 1),
        ((None, 1.0, 1e-3), 1000),
        ((None, 1.0, 1e-4, dynamics.MOST_WARMUP_STEPS), 1024),
        ((None, 1e30, 1e-300), 2**53),
        ((None, 1e300, 1e-300), 2**53),
        *(((None, x, 1e-300, 1024), 1024) for x in (1e30, 1e300)),
    ],
)
def test_the_number_of_leapfrog_steps(arguments, steps):
    """The number of steps: the given one, or the nearest to the length, bounded."""
    assert dynamics.leapfrog_steps(*arguments) == steps


def test_ratios_are_no_number_before_there_is_any():
    assert _C.ratio(1, 4) == 0.25 and _C.ratio(0, 4) == 0
    assert math.isnan(_C.ratio(0, 0))


def test_changed_losses_are_counted():
    """Changed is what is beyond rounding, and matters."""

    def after(before, known, first):
        return dynamics.changes_running(before, known, [first, *known[1:]], 2, 100)

    assert [after(0, [5, 7], x) for x in (5, 6)] == [0, 1]
    assert [after(2, [5, 7], x) for x in (4, 5)] == [3, 0]
    # Of small losses 0.1 T / N = 0.002, and of large ones a thousandth.
    assert [after(1, [0.5], x) for x in (0.5019, 0.5021)] == [0, 2]
    assert after(1, [-0.5], -0.5021) == 2
    assert [after(1, [-1000], x) for x in (-1000.9, -1001.1)] == [0, 2]
    # Any chain's is enough; other chains are not to be compared.
    assert dynamics.changes_running(0, [1, 1, 1], [1, 1, 2], 1, 1) == 1
    assert dynamics.changes_running(2, [1], [5, 6], 1, 1) == 0
    assert dynamics.changes_running(2, [5, 6], [1], 1, 1) == 0
    assert dynamics.MOST_CHANGES == 3
    assert "start of 3 consecutive trajectories" in dynamics.changed_target()
