"""tune: what it refuses, that it leaves no trace, and what it says."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_sgmcmc as sg

DIMS, N = 100, 50.0


def problem(
    cls: type[sg.Sampler] = sg.SGHMC,
    lr: float | Tensor = 0.01,
    spread: float = 0.2,
    dtype: torch.dtype = torch.float32,
    steps: int = 3,
    **settings: Any,
) -> tuple[sg.Sampler, Callable[[], Any]]:
    """Curvature 1; minibatches by torch's default generator."""
    torch.manual_seed(1)
    params = [nn.Parameter((torch.randn(DIMS) / N**0.5).to(dtype)) for _ in "ab"]
    idle = nn.Parameter(torch.ones(3))
    sampler = cls(
        [{"params": params}, {"params": [idle]}], lr, num_data=N, seed=4, **settings
    )

    def closure() -> None:
        for p in params:
            p.grad = p.detach() + spread * torch.randn(DIMS).to(p)

    for _ in range(steps):
        sampler.step(closure)
    return sampler, closure


def tune(sampler: sg.Sampler, closure: Callable[[], Any], **options: Any) -> sg.Tuning:
    return sg.tune(sampler, closure, progress=False, **options)


# ---- Noise that is too much ------------------------------------------------------


@pytest.mark.parametrize(
    "build",
    [lambda: problem(sg.SGLD, spread=10.0), lambda: problem(sg.SGHMC, spread=10.0)],
    ids=["SGLD", "SGHMC"],
)
def test_no_lr_will_do(build: Callable[[], Any]) -> None:
    """Noise of variance 100 limits lr / α to 2 T h / (N V) = 2e-5."""
    sampler, closure = build()
    momentum = sampler.param_groups[0].get("momentum", 0.0)
    result = tune(sampler, closure, room=1000.0)
    assert not result.feasible and result.limit == "noise"
    speed = 2e-5
    assert result.lrs[0] == pytest.approx(speed * (1 - momentum), rel=0.15)
    # Stable up to 2 (1 + m), found by factors of 1.09 around it.
    wanted = 2 * (1 + momentum) / speed / 1000
    assert wanted / 1.5 < result.batch_factor < 1.5 * wanted
    words = result.summary()
    assert "No lr will do" in words and "ControlVariates, or EWSG" in words
    # Not more than there is.
    assert result.batch_factor > N
    assert "Take gradients of all 50 data, no fewer will do" in words
    assert ("noise_estimate" in words) == (momentum > 0)
    before = sampler.param_groups[0]["lr"]
    with pytest.raises(ValueError, match="No lr will do"):
        result.apply(sampler)
    assert sampler.param_groups[0]["lr"] == before
    # Minibatches that are larger by that factor, and a little for what it does not know
    # exactly, do; somewhat smaller ones do not.
    spread = 10.0 / result.batch_factor**0.5
    for factor, feasible in ((1.3, True), (0.7, False)):
        sampler, closure = problem(type(sampler), spread=spread / factor**0.5)
        assert tune(sampler, closure, room=1000.0).feasible == feasible


def test_larger_minibatches_are_of_the_data_there_are() -> None:
    """Whatever their factor."""
    sampler, closure = problem(spread=10.0)
    result = tune(sampler, closure, room=1000.0, batch_size=4)
    for factor, size, words in (
        (3.0, 4, "Take minibatches of 12 of the 50 data, 3 times as large, or"),
        (12.0, 4, "Take minibatches of 48 of the 50 data, 12 times"),
        (12.5, 4, "Take gradients of all 50 data, no fewer will do, or"),
        (12.5, None, "12 times as large, or of all 50 data if that is fewer, or"),
        (50.0, None, "Take gradients of all 50 data, no fewer will do, or"),
    ):
        told = dataclasses.replace(result, batch_factor=factor, batch_size=size)
        assert words in told.summary()
    assert (result.num_data, result.batch_size) == (50, 4)


@pytest.mark.parametrize("cls", [sg.SGLD, sg.SGHMC, sg.PSGLD])
def test_frozen_layers_are_left_out(cls: type[sg.Sampler]) -> None:
    """The lr is that of the network without them; they stay as they are."""

    def found(frozen: bool) -> tuple[float, ...]:
        torch.manual_seed(1)
        params = [nn.Parameter(torch.randn(DIMS) / N**0.5) for _ in "ab"]
        layer = nn.Parameter(torch.ones(7), requires_grad=False)
        groups = [{"params": [p]} for p in params]
        if frozen:
            groups = [{"params": [layer, params[0]]}, groups[1]]
        settings = {"gamma": False} if cls is sg.PSGLD else {}
        sampler = cls(groups, 1e-3, num_data=N, seed=4, **settings)

        def closure() -> None:
            for p in params:
                p.grad = p.detach() + 0.2 * torch.randn(DIMS)

        for _ in range(100):
            sampler.step(closure)
        if cls is sg.PSGLD:
            for group in sampler.param_groups:
                group["adapt"] = False
        result = tune(sampler, closure, gradients=2000)
        assert result.feasible and torch.equal(layer, torch.ones(7))
        return result.lrs

    assert found(True) == pytest.approx(found(False), rel=0.2)


def test_no_lr_is_stable() -> None:
    sampler, _ = problem(steps=0)

    def closure() -> None:
        for p in sampler.param_groups[0]["params"]:
            p.grad = torch.full_like(p, float("inf"))

    with pytest.raises(RuntimeError, match="the chain is not stable at lr = "):
        tune(sampler, closure)


def test_no_parameter_has_a_gradient() -> None:
    sampler, _ = problem(steps=0)
    with pytest.raises(RuntimeError, match="no parameter has a gradient"):
        tune(sampler, lambda: None)


# ---- No trace --------------------------------------------------------------------


def everything(sampler: sg.Sampler) -> dict[str, Any]:
    params = [p for group in sampler.param_groups for p in group["params"]]
    values = {
        "state": sampler.state_dict(),
        "params": [p.detach() for p in params],
        "grads": [p.grad for p in params],
        "generator": torch.get_rng_state(),
    }
    return copy.deepcopy(values)


def assert_same(a: Any, b: Any) -> None:
    if isinstance(a, Tensor):
        assert torch.equal(a, b) and a.dtype == b.dtype
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


KINDS: dict[str, Callable[[], Any]] = {
    "SGLD": lambda: problem(sg.SGLD),
    "SGHMC": lambda: problem(momentum=0.8),
    "SGHMC-not-begun": lambda: problem(steps=0),
    "SGHMC-bf16": lambda: problem(dtype=torch.bfloat16),
    "SGHMC-lr-in-a-tensor": lambda: problem(lr=torch.tensor(0.01)),
    "SGHMC-skip": lambda: problem(nonfinite="skip"),
    "PSGLD": lambda: adapted(),
}


def adapted() -> tuple[sg.Sampler, Callable[[], Any]]:
    sampler, closure = problem(sg.PSGLD, gamma=False)
    # The one without a gradient has adapted to nothing.
    del sampler.param_groups[1]
    for group in sampler.param_groups:
        group["adapt"] = False
    return sampler, closure


@pytest.mark.parametrize("raises", [False, True], ids=["returns", "raises"])
@pytest.mark.parametrize("name", KINDS)
def test_it_leaves_no_trace(name: str, raises: bool) -> None:
    sampler, closure = KINDS[name]()
    other, other_closure = KINDS[name]()
    calls: list[str] = []
    sampler.register_step_post_hook(lambda *_: calls.append("hook"))
    gauges = sg.Gauges(sampler, every=1)
    kept = [p.grad for group in sampler.param_groups for p in group["params"]]
    lr = sampler.param_groups[0]["lr"]
    torch.manual_seed(7)
    before = everything(sampler)
    if raises:

        def failing() -> None:
            closure()
            calls.append("closure")
            if len(calls) == 300:
                raise KeyError("no more data")

        with pytest.raises(KeyError, match="no more data"):
            tune(sampler, failing)
        assert calls == ["closure"] * 300
    else:
        assert tune(sampler, closure).feasible
        assert calls == []
    assert_same(everything(sampler), before)
    after = [p.grad for group in sampler.param_groups for p in group["params"]]
    assert all(a is b for a, b in zip(after, kept, strict=True))
    assert sampler.param_groups[0]["lr"] is lr
    assert sampler.defaults["seed"] == sampler.seed
    assert gauges.num_observed == 0
    # The chain goes on as one that was never looked at, and so do hooks and gauges.
    calls.clear()
    for each, some in ((sampler, closure), (other, other_closure)):
        torch.manual_seed(8)
        for _ in range(5):
            each.step(some)
    states = everything(sampler), everything(other)
    assert_same(*states)
    assert calls == ["hook"] * 5 and gauges.num_observed == 5


@pytest.mark.parametrize("lr", [1e-6, 0.3])
def test_momenta_of_another_lr_do_not_matter(lr: float) -> None:
    """As a scheduler leaves them: at lr = 1e-6 these are 10,000 times too hot."""
    sampler, closure = problem()
    expected = tune(sampler, closure).lr
    sampler.param_groups[0]["lr"] = lr
    sampler.param_groups[1]["lr"] = lr
    assert tune(sampler, closure).lr == pytest.approx(expected, rel=0.1)


def test_it_is_repeatable() -> None:
    results = []
    for _ in range(2):
        sampler, closure = problem()
        results.append(tune(sampler, closure))
    assert results[0] == results[1]


# ---- The result ------------------------------------------------------------------


@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)], ids=["float", "tensor"])
def test_the_result_is_applied(lr: float | Tensor) -> None:
    sampler, closure = problem(lr=lr)
    result = tune(sampler, closure)
    (p, _), group = sampler.param_groups[0]["params"], sampler.param_groups[0]
    v = sampler.state[p]["momentum"].clone()
    result.apply(sampler)
    assert float(group["lr"]) == pytest.approx(result.lr, rel=1e-6)
    assert (group["lr"] is lr) == isinstance(lr, Tensor)
    scaled = (result.lr / 0.01) ** 0.5 * v
    torch.testing.assert_close(sampler.state[p]["momentum"], scaled)
    words = result.summary()
    assert words.startswith(f"lr = {result.lr:.3g}, found with ")
    for word in ("Heating expected: 5 ± ", "The gauges saw ", "\n  0.0 [100]: +"):
        assert word in words
    single = sg.SGLD([p], 0.1, num_data=1)
    with pytest.raises(ValueError, match=r"Invalid sampler: 1 groups \(must be 2\)"):
        result.apply(single)
    assert single.param_groups[0]["lr"] == 0.1


def test_lr_is_limited_by_stability() -> None:
    """One stiff coordinate of 1,000: its heat is no twentieth of the mean."""
    torch.manual_seed(1)
    k = torch.full((1000,), 1e-4)
    k[0] = 1.0
    p = nn.Parameter(torch.randn(1000) / (N * k).sqrt())
    sampler = sg.SGHMC([p], 0.01, 0.9, num_data=N, seed=0)

    def closure() -> None:
        p.grad = k * p.detach()

    result = tune(sampler, closure)
    assert result.feasible and result.limit == "stability"
    assert 3.8 / 4 < result.lr < 3.8 / 1.3  # 2 (1 + m) is the limit
    assert "lr is limited by stability" in result.summary()
    result.apply(sampler)
    for _ in range(2000):
        closure()
        sampler.step()
    assert bool(p.isfinite().all()) and float(p[0].detach().abs()) < 2


# ---- Bad arguments ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"budget": 0}, ValueError, r"Invalid budget: 0 \(must be in \(0, 1\)\)"),
        ({"budget": 1.0}, ValueError, "Invalid budget: 1.0"),
        ({"budget": "0.1"}, TypeError, "Invalid budget: '0.1'"),
        ({"gradients": 1319}, ValueError, r"Invalid gradients: 1319 \(must be >= 1320"),
        ({"gradients": 3e3}, TypeError, "Invalid gradients: 3000.0"),
        ({"over": "each"}, ValueError, r"Invalid over: 'each' \(must be 'all' or"),
        ({"room": 1}, ValueError, "Invalid room: 1 "),
        ({"closure": None}, TypeError, r"Invalid closure: None \(must be callable\)"),
        ({"sampler": 3}, TypeError, r"Invalid sampler: a int \(must be a sampler of"),
    ],
)
def test_bad_arguments(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    sampler, closure = problem()
    before = everything(sampler)
    arguments = {"sampler": sampler, "closure": closure, **options}
    with pytest.raises(error, match=message):
        sg.tune(**arguments)
    assert_same(everything(sampler), before)


P = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: sg.HMC([P], 0.1, num_data=1, num_steps=2), "a HMC .*: warmup"),
        (lambda: sg.SGNHT([P], 0.1, num_data=1), "a SGNHT .*: its thermostats"),
        (lambda: sg.EWSG([P], 0.1, num_data=1), "a EWSG .*: it chooses"),
        (lambda: sg.SBPS([P], num_data=1), "a SBPS .*: it has no lr"),
        (lambda: sg.SGLD([P], 0.1, num_data=1, capturable=True), "it is capturable"),
        (lambda: sg.SGLD([P], 0.0, num_data=1), r"Invalid lr: 0 \(must be > 0"),
        (
            lambda: sg.SGLD([P], 0.1, num_data=1, temperature=0),
            r"Invalid temperature: 0 \(must be > 0",
        ),
        (
            lambda: sg.SGHMC([P], 0.1, num_data=1, noise_estimate="online"),
            "Invalid noise_estimate: 'online' ",
        ),
        (
            lambda: sg.SGHMC([P], 0.1, num_data=1, resample_momentum_every=2),
            "Invalid resample_momentum_every: 2 ",
        ),
        (lambda: sg.PSGLD([P], 0.1, num_data=1), "Invalid adapt: True"),
        (lambda: sg.PSGLD([P], 0.1, num_data=1, adapt=False), "has not adapted yet"),
        (
            lambda: sg.SGLD(
                [
                    {"params": [P]},
                    {"params": [nn.Parameter(torch.ones(1))], "temperature": 2},
                ],
                0.1,
                num_data=1,
            ),
            "Invalid temperature: it differs between groups",
        ),
    ],
)
def test_samplers_that_cannot_be_tuned(
    build: Callable[[], sg.Sampler], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sg.tune(build(), lambda: None)


def test_far_from_a_mode_is_said() -> None:
    """By the losses that a closure returns: at a random start, not after burn-in."""
    torch.manual_seed(0)
    x = torch.randn(500, 8)
    y = (x @ torch.randn(8, 3)).argmax(1)
    model = nn.Sequential(nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 3))
    sampler = sg.SGHMC(
        model.named_parameters(), 0.02, 0.9, num_data=500, prior_precision=1.0, seed=0
    )

    def closure() -> Tensor:
        rows = torch.randint(500, (100,))
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        return loss

    def found() -> str:
        return tune(sampler, closure, gradients=1400).summary()

    words = "this is not where the chain will be"
    assert words in found()
    for _ in range(2000):
        sampler.zero_grad()
        closure()
        sampler.step()
    assert words not in found()


def test_a_bias_that_is_hot_is_not_hidden() -> None:
    """Of 100 coordinates one, whose gradient has a thousand times the noise."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.zeros(DIMS)), nn.Parameter(torch.zeros(1))]
    sampler = sg.SGHMC(params, 0.01, 0.5, num_data=N, seed=4)

    def closure() -> None:
        for p, spread in zip(params, (0.01, 1.0), strict=True):
            p.grad = p.detach() + spread * torch.randn_like(p)

    hidden = tune(sampler, closure)
    assert "is heated by" in hidden.summary() and "over='worst'" in hidden.summary()
    assert "is heated by" not in tune(sampler, closure, over="worst").summary()
