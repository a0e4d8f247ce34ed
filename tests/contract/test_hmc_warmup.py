"""The warm-up of HMC: the step size it finds, and a run that is cut short.

Dual averaging itself is in ``cpp/dual_averaging_test.cpp``.
"""

import builtins
import math
from typing import Any

import pytest
import torch
from failed_steps import assert_unchanged, refused, snapshot
from hmc_chains import NO_CLOSURE, Quartic
from short_chains import assert_same, two
from stored_files import through_file
from torch import Tensor, nn

import torch_sgmcmc as sg


@pytest.mark.parametrize("target", [0.6, 0.9])
@pytest.mark.parametrize("start", [1e-3, 3.0])
def test_warmup_finds_the_step_size(start: float, target: float) -> None:
    """From far too small and far too large a size; 64 chains steady the estimate."""
    g = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.randn(64, 20, generator=g))
    sampler = sg.HMC(
        [p], start, trajectory_length=0.5, num_data=5, num_chains=64, seed=1
    )
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


def warmed(params: list[nn.Parameter]) -> sg.HMC:
    return sg.HMC(params, 0.5, num_steps=3, num_data=4, seed=7)


@pytest.mark.parametrize("stop", [1, 13, 29])
def test_warmup_resumes_bit_for_bit(stop: int) -> None:
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
    with refused(
        ValueError, "Invalid target_acceptance: 0.7 (the warm-up in progress has 0.8)"
    ):
        late.warmup(Quartic(resumed), 3, 0.7)
    late.warmup(Quartic(resumed), 30 - stop, progress=False)
    assert sampler.param_groups[0]["step_size"] == late.param_groups[0]["step_size"]
    for _ in range(3):
        sampler.step(Quartic(params))
        late.step(Quartic(resumed))
    assert_same(params, resumed)


def test_warmup_goes_on_after_an_exception() -> None:
    params, others = two(), two()
    sampler, twin = warmed(params), warmed(others)
    sampler.warmup(Quartic(params), 20, progress=False)
    quartic, calls = Quartic(others), iter(range(1000))

    def closure() -> Tensor:
        if next(calls) == 30:  # in the eighth trajectory
            raise KeyError("data")
        return quartic()

    with pytest.raises(KeyError, match="data"):
        twin.warmup(closure, 20, progress=False)
    assert twin.param_groups[0]["step"] == 7
    twin.warmup(quartic, 13, progress=False)
    assert_same(params, others)
    assert sampler.param_groups[0]["step_size"] == twin.param_groups[0]["step_size"]


def test_errors_of_warmup() -> None:
    params = two()
    sampler = warmed(params)
    before = snapshot(sampler)

    with refused(ValueError, "Invalid steps: 0 (must be >= 1)"):
        sampler.warmup(Quartic(params), 0)
    with refused(TypeError, "Invalid steps: 1.0 (must be an int, got float)"):
        sampler.warmup(Quartic(params), 1.0)  # type: ignore[arg-type]
    for target in (0.0, 1.0, -1.0, math.nan):
        message = f"Invalid target_acceptance: {target} (must be in (0, 1))"
        with refused(ValueError, message):
            sampler.warmup(Quartic(params), 5, target)
    with refused(TypeError, NO_CLOSURE):
        sampler.warmup(None, 1)  # type: ignore[arg-type]
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
def test_a_hopeless_warmup_ends() -> None:
    """A trajectory of given length is of 1024 steps at most, however small they get."""
    p = nn.Parameter(torch.ones(2))
    calls = 0

    def closure() -> float:
        nonlocal calls
        calls += 1
        p.grad = torch.zeros_like(p)
        return float(calls) ** 2  # worse each time

    sampler = sg.HMC([p], 0.5, trajectory_length=1.0, num_data=1e9, seed=0)
    sampler.warmup(closure, 8, progress=False)
    assert calls <= 8 * 1025
    assert sampler.param_groups[0]["step_size"] > 0


def test_warmup_shows_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tqdm")
    params = two()
    warmed(params).warmup(Quartic(params), 2, progress=False)
    assert capsys.readouterr().err == ""
    warmed(params).warmup(Quartic(params), 2)
    assert "warm-up: 100%" in capsys.readouterr().err
    # Without tqdm it is silent.
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("tqdm"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    warmed(params).warmup(Quartic(params), 2)
    assert capsys.readouterr().err == ""
