"""The warm-up of HMC: dual averaging, and what becomes of a run that is cut short."""

import builtins
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from failed_steps import assert_unchanged, snapshot
from hmc_chains import NO_CLOSURE, Quartic, fails
from short_chains import assert_same, two
from torch import Tensor, nn

import torch_sgmcmc as sg
import torch_sgmcmc._C as _C


def dual_averaging(step_size: float, target: float, accepted: list[float]) -> Any:
    """Hoffman and Gelman 2014, algorithm 5, as printed there."""
    mu, h, log_bar = math.log(10 * step_size), 0.0, 0.0
    sizes = []
    for t, a in enumerate(accepted, 1):
        h = (1 - 1 / (t + 10)) * h + (target - a) / (t + 10)
        log_size = mu - math.sqrt(t) / 0.05 * h
        log_bar = t**-0.75 * log_size + (1 - t**-0.75) * log_bar
        sizes.append(math.exp(log_size))
    return sizes, math.exp(log_bar)


def test_dual_averaging() -> None:
    accepted = [0.1, 0.9, 1.0, 0.0, 0.75] * 8
    adaptation = _C.DualAveraging(0.3, target=0.8)
    sizes = [adaptation.update(a) for a in accepted]
    expected, average = dual_averaging(0.3, 0.8, accepted)
    assert sizes == pytest.approx(expected, rel=1e-12)
    assert adaptation.averaged == pytest.approx(average, rel=1e-12)
    assert adaptation.step_size == sizes[-1]
    assert (adaptation.count, adaptation.target) == (40, 0.8)
    # Saved in the middle it goes on exactly.
    first, second = _C.DualAveraging(0.3, 0.8), None
    for i, a in enumerate(accepted):
        if i == 17:
            second = first = _C.DualAveraging(list(first.state))
        assert first.update(a) == sizes[i]
    assert second is not None and second.state == adaptation.state


def test_dual_averaging_never_overflows() -> None:
    adaptation = _C.DualAveraging(1.0, 0.5)
    for _ in range(1000):
        assert adaptation.update(0.0) > 0
    for _ in range(100_000):
        assert math.isfinite(adaptation.update(1.0))


def test_errors_of_dual_averaging() -> None:
    for size, shown in ((0.0, "0.000000"), (-1.0, "-1.000000"), (math.inf, "inf")):
        message = f"Invalid step_size: {shown} (must be finite and > 0)"
        fails(lambda size=size: _C.DualAveraging(size, 0.8), ValueError, message)
    for target in (0.0, 1.0):
        message = f"Invalid target: {target:.6f} (must be in (0, 1))"
        fails(lambda target=target: _C.DualAveraging(1.0, target), ValueError, message)
    good = list(_C.DualAveraging(1.0, 0.8).state)
    message = "Invalid state of dual averaging (must be finite, with a whole count)"
    for place, value in ((1, math.nan), (2, -1.0), (2, 0.5), (5, math.inf)):
        state = [*good[:place], value, *good[place + 1 :]]
        fails(lambda state=state: _C.DualAveraging(state), ValueError, message)
    for value, shown in ((-0.1, "-0.100000"), (1.1, "1.100000"), (math.nan, "nan")):
        message = f"Invalid acceptance: {shown} (must be in [0, 1])"
        fails(
            lambda value=value: _C.DualAveraging(1.0, 0.8).update(value),
            ValueError,
            message,
        )


def test_mean_acceptance() -> None:
    assert _C.mean_acceptance([]) == 0.0
    assert _C.mean_acceptance([0.0, 5.0]) == 1.0
    bad = [math.nan, math.inf, -math.inf]
    assert _C.mean_acceptance([-1.0, *bad]) == math.exp(-1) / 4


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
    file = io.BytesIO()
    torch.save([others, early.state_dict()], file)
    file.seek(0)
    values, state = torch.load(file, weights_only=True)
    resumed = [nn.Parameter(v.detach()) for v in values]
    late = sg.HMC(resumed, 9.0, trajectory_length=1.0, num_data=1)
    late.load_state_dict(state)
    fails(
        lambda: late.warmup(Quartic(resumed), 3, 0.7),
        ValueError,
        "Invalid target_acceptance: 0.7 (the warm-up in progress has 0.8)",
    )
    late.warmup(Quartic(resumed), 30 - stop, progress=False)
    for a, b in ((sampler, late),):
        assert a.param_groups[0]["step_size"] == b.param_groups[0]["step_size"]
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

    def call(*args: Any) -> Callable[[], Any]:
        return lambda: sampler.warmup(Quartic(params), *args)

    fails(call(0), ValueError, "Invalid steps: 0 (must be >= 1)")
    fails(call(1.0), TypeError, "Invalid steps: 1.0 (must be an int, got float)")
    for target in (0.0, 1.0, -1.0, math.nan):
        message = f"Invalid target_acceptance: {target} (must be in (0, 1))"
        fails(call(5, target), ValueError, message)
    fails(lambda: sampler.warmup(None, 1), TypeError, NO_CLOSURE)  # type: ignore[arg-type]
    assert_unchanged(sampler, before)
    sampler.param_groups[0]["metropolis"] = False
    message = "Invalid metropolis: False (warmup() adapts to the acceptance rate)"
    fails(call(5), ValueError, message)
    state = sampler.state_dict()
    state["param_groups"][0]["dual_averaging"] = [0.8, 0, -1, 0, 0, 0]
    message = "Invalid state of dual averaging (must be finite, with a whole count)"
    fails(lambda: warmed(two()).load_state_dict(state), ValueError, message)


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
