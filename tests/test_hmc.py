"""HMC as a class: its closure, decisions, many chains, masses and warm-up.

Its law is the subject of ``test_hmc_law.py``, its operators of ``test_operators.py``.
"""

import builtins
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from failed_steps import assert_unchanged, snapshot, step_fails
from reference import same_bits
from short_chains import assert_same, make, make_params, take_step
from torch import Tensor, nn

import torch_sgmcmc as sg
from torch_sgmcmc import _C
from torch_sgmcmc import _library as ops

GOOD: dict[str, Any] = {"step_size": 0.1, "num_steps": 3, "num_data": 10, "seed": 0}
NO_CLOSURE = """\
HMC.step() needs a closure, since it computes several gradients a step:

    def closure():
        loss = F.cross_entropy(model(x), y)  # of all data
        loss.backward()
        return loss

    sampler.step(closure)"""


def two() -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(9)
    return [
        nn.Parameter(torch.randn(7, generator=g)),
        nn.Parameter(torch.randn(3, 2, generator=g, dtype=torch.float64)),
    ]


class Quartic:
    """A closure with an anharmonic loss, that counts its calls."""

    def __init__(self, params: list[nn.Parameter], chains: bool = False) -> None:
        self.params, self.chains = params, chains
        self.losses: list[Tensor] = []

    def __call__(self) -> Tensor:
        assert torch.is_grad_enabled()
        assert all(p.grad is None for p in self.params)
        terms = [0.1 * p.double() ** 4 + 0.3 * p.double() ** 2 for p in self.params]
        if self.chains:
            loss = torch.stack([t.flatten(1).sum(1) for t in terms]).sum(0)
        else:
            loss = torch.stack([t.sum() for t in terms]).sum()
        loss.sum().backward()
        self.losses.append(loss)
        return loss


def fails(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as error:
        call()
    assert type(error.value) is kind
    assert str(error.value) == message


# ---- Hyperparameters -------------------------------------------------------------


def bad(name: str, wanted: str, *values: Any) -> list[Any]:
    return [(name, v, ValueError, f"Invalid {name}: {v} ({wanted})") for v in values]


def bad_type(name: str, wanted: str, *values: Any) -> list[Any]:
    return [
        (
            name,
            v,
            TypeError,
            f"Invalid {name}: {v!r} (must be {wanted}, got {type(v).__name__})",
        )
        for v in values
    ]


ONE_OF_TWO = "Invalid num_steps and trajectory_length: {} and {} (give exactly one of "
BAD = [
    *bad("step_size", "must be finite and > 0", 0, 0.0, -0.1, math.nan, math.inf),
    *bad("num_data", "must be finite and > 0", 0, -1, math.inf),
    *bad("prior_precision", "must be finite and >= 0", -1, math.nan),
    *bad("temperature", "must be finite and > 0", 0, 0.0),
    *bad("temperature", "must be finite and >= 0", -1.0, math.nan),
    *bad("num_steps", "must be >= 1", 0, -1),
    *bad("resample_momentum_every", "must be >= 0", -1),
    *bad("num_chains", "must be >= 1", 0),
    *bad_type("step_size", "a number", None, "0.1", True),
    *bad_type("num_steps", "an int", 1.0, True),
    *bad_type("resample_momentum_every", "an int", None, False, 1.5),
    *bad_type("num_chains", "an int", 2.0),
    *(
        ("metropolis", v, TypeError, f"Invalid metropolis: {v!r} (must be a bool)")
        for v in (None, 1, "yes")
    ),
    ("num_steps", None, ValueError, ONE_OF_TWO.format(None, None) + "them)"),
    ("trajectory_length", 1.0, ValueError, ONE_OF_TWO.format(3, 1.0) + "them)"),
]


@pytest.mark.parametrize(("name", "value", "error", "text"), BAD)
def test_bad_hyperparameters(
    name: str, value: Any, error: type[Exception], text: str
) -> None:
    fails(lambda: sg.HMC(two(), **{**GOOD, name: value}), error, text)
    params = two()
    sampler = sg.HMC(params, **GOOD)
    sampler.step(Quartic(params))
    sampler.param_groups[0][name] = value
    step_fails(sampler, Quartic(params), error, text)
    state = sampler.state_dict()
    fails(lambda: sg.HMC(two(), **GOOD).load_state_dict(state), error, text)
    fails(lambda: sampler.warmup(Quartic(params), 1), error, text)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_bad_trajectory_length(value: float) -> None:
    settings = {**GOOD, "num_steps": None, "trajectory_length": value}
    message = f"Invalid trajectory_length: {value} (must be finite and > 0)"
    fails(lambda: sg.HMC(two(), **settings), ValueError, message)


@pytest.mark.parametrize(
    "name",
    [
        *("step_size", "num_steps", "trajectory_length", "num_data", "temperature"),
        *("metropolis", "resample_momentum_every", "num_chains", "num_trajectories"),
        *("num_accepted", "num_divergences", "dual_averaging", "seed", "step"),
    ],
)
def test_groups_share_all_but_the_prior(name: str) -> None:
    message = (
        f"Invalid param group: {name!r} is managed by HMC and cannot be set for a group"
    )
    groups = [{"params": two()}, {"params": two(), name: 1}]
    fails(lambda: sg.HMC(groups, **GOOD), ValueError, message)


def test_groups_must_stay_equal() -> None:
    params, others = two(), two()
    sampler = sg.HMC([{"params": params}], **GOOD)
    sampler.param_groups[0]["step_size"] = 0.07
    sampler.step(Quartic(params))
    # A group that is added takes what the sampler has come to.
    sampler.add_param_group({"params": others, "prior_precision": 2.0})
    assert sampler.param_groups[1]["step_size"] == 0.07
    assert sampler.param_groups[1]["num_trajectories"] == 1
    sampler.step(Quartic(params + others))
    sampler.param_groups[1]["step_size"] = 0.08
    step_fails(
        sampler,
        Quartic(params + others),
        ValueError,
        "Invalid step_size: [0.07, 0.08] in the param groups (must be equal: there is "
        "one trajectory for all)",
    )


# ---- The closure -----------------------------------------------------------------


def test_a_step_without_closure_says_how_to_write_one() -> None:
    step_fails(sg.HMC(two(), **GOOD), None, TypeError, NO_CLOSURE)


@pytest.mark.parametrize(
    ("settings", "calls"),
    [
        ({"num_steps": 1}, 2),
        ({"num_steps": 5}, 6),
        ({"num_steps": None, "trajectory_length": 0.349}, 4),
        ({"num_steps": None, "trajectory_length": 0.351}, 5),
        ({"num_steps": None, "trajectory_length": 0.001}, 2),
    ],
)
def test_the_number_of_gradients(settings: dict[str, Any], calls: int) -> None:
    params = two()
    closure = Quartic(params)
    with torch.no_grad():
        loss = sg.HMC(params, **{**GOOD, **settings}).step(closure)
    assert len(closure.losses) == calls
    assert loss is closure.losses[0]
    # The gradients that are left are those at the trajectory's end.
    end = closure.losses[-1]
    grads = torch.autograd.grad(sum_of(params), params)
    assert end is not loss
    assert all(p.grad is not None for p in params)
    assert [g.shape for g in grads] == [p.grad.shape for p in params]


def sum_of(params: list[nn.Parameter]) -> Tensor:
    return sum((p.sum() for p in params), torch.zeros(()))


def test_losses_of_wrong_kinds() -> None:
    params = two()
    sampler = sg.HMC(params, **GOOD)

    def returning(value: Any) -> Callable[[], Any]:
        def closure() -> Any:
            for p in params:
                p.grad = torch.ones_like(p)
            return value

        return closure

    step_fails(
        sampler,
        returning(None),
        TypeError,
        "HMC got no loss from the closure, which must return it for the Metropolis "
        "test (metropolis=False makes none)",
    )
    for shape in ([1], [3], [2, 2]):
        step_fails(
            sampler,
            returning(torch.zeros(shape)),
            ValueError,
            f"Invalid loss: shape {shape} (must be a scalar)",
        )
    for value in (math.nan, math.inf, torch.tensor(math.nan)):
        step_fails(
            sampler,
            returning(value),
            RuntimeError,
            "HMC got a loss or parameters that are not finite at the start of a "
            "trajectory",
        )
    sampler.step(returning(1.0))  # a number will do
    sampler.step(returning(torch.tensor(1.0, dtype=torch.bfloat16)))
    # Without a test the loss is not looked at.
    plain = sg.HMC(params, **GOOD, metropolis=False)
    assert plain.step(returning(None)) is None
    assert plain.step(returning("loss")) == "loss"


def test_losses_of_chains_of_wrong_shapes() -> None:
    p = nn.Parameter(torch.ones(4, 2))
    sampler = sg.HMC([p], **GOOD, num_chains=4)

    def closure(shape: tuple[int, ...]) -> Tensor:
        p.grad = torch.ones_like(p)
        return torch.zeros(shape)

    for shape in ((), (3,), (4, 1)):
        step_fails(
            sampler,
            lambda shape=shape: closure(shape),
            ValueError,
            f"Invalid loss: shape {list(shape)} (must be [4], the mean loss of each "
            "chain; call backward() on its sum)",
        )
    sampler.step(lambda: closure((4,)))
    message = (
        "Invalid parameter: shape {} (must have a leading dimension of num_chains = 4)"
    )
    for wrong in (torch.ones(3, 4), torch.ones(())):
        fails(
            lambda wrong=wrong: sg.HMC([nn.Parameter(wrong)], **GOOD, num_chains=4),
            ValueError,
            message.format(list(wrong.shape)),
        )
    other = sg.HMC([nn.Parameter(torch.ones(5, 2))], **GOOD)
    fails(
        lambda: other.load_state_dict(sampler.state_dict()),
        ValueError,
        "Invalid parameter: shape [5, 2] (must have a leading dimension of num_chains "
        "= 4)",
    )


def test_a_closure_without_gradients() -> None:
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)  # an old gradient does not count
    sampler = sg.HMC([p], **GOOD)
    message = "HMC got no gradients from the closure (does it call backward()?)"
    step_fails(sampler, lambda: p.sum(), RuntimeError, message)


def test_gradients_of_other_parameters_later() -> None:
    params = two()
    for patterns in (([0, 1], [0]), ([0], [0, 1]), ([0], [1]), ([0], [])):
        for every in (0, 1):
            sampler = sg.HMC(params, **GOOD, resample_momentum_every=every)
            turns = iter(patterns)

            def closure(turns: Any = turns) -> float:
                for i in next(turns):
                    params[i].grad = torch.ones_like(params[i])
                return 0.0

            step_fails(
                sampler,
                closure,
                RuntimeError,
                "HMC got gradients of other parameters from the closure than at its "
                "first call in this step",
            )


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("call", [0, 1, 3])
def test_an_exception_in_the_closure_changes_nothing(call: int, every: int) -> None:
    params, others = two(), two()
    settings = {**GOOD, "resample_momentum_every": every}
    sampler, twin = sg.HMC(params, **settings), sg.HMC(others, **settings)
    for _ in range(2):  # without and with a momentum
        quartic, calls = Quartic(params), iter(range(9))

        def closure(quartic: Any = quartic, calls: Any = calls) -> Tensor:
            loss = quartic()
            if next(calls) == call:
                raise KeyError("data")
            return loss

        before = snapshot(sampler)
        with pytest.raises(KeyError, match="data"):
            sampler.step(closure)
        assert_unchanged(sampler, before)
        sampler.step(Quartic(params))
        twin.step(Quartic(others))
        assert_same(params, others)


def test_grad_scaler_is_refused() -> None:
    p = nn.Parameter(torch.ones(3))
    sampler = sg.HMC([p], **GOOD)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scaler.scale(torch.ones(()))
    message = (
        "HMC cannot be used with GradScaler, which scales the gradients of the "
        "closure: use torch.autocast with bfloat16, which needs no scaler"
    )
    fails(lambda: scaler.step(sampler, Quartic([p])), RuntimeError, message)
    sampler.step(Quartic([p]))  # no trace of it


# ---- Decisions -------------------------------------------------------------------


def by_hand(
    params: list[nn.Parameter],
    closure: Quartic,
    momenta: list[Tensor],
    masses: list[Tensor],
    priors: list[float],
    chains: int,
    temperature: float,
) -> Tensor:
    """One trajectory of the settings of ``test_every_decision``, by the operators.

    Moves the parameters to its end and returns the log ratios of the decision.
    """
    move = {"num_data": 10.0}

    def gradients() -> Tensor:
        for p in params:
            p.grad = None
        return closure().detach()

    def leapfrog(kick: float, drift: float) -> None:
        for i, p in enumerate(params):
            with torch.no_grad():
                ops.hmc_leapfrog_(
                    *([p], [p.grad], [momenta[i]], [masses[i]]),
                    **{"kick": kick, "drift": drift, "prior_precision": priors[i]},
                    **move,
                )

    def energy(loss: Tensor) -> Tensor:
        total = 10.0 * loss
        for p, r, m, prior in zip(params, momenta, masses, priors, strict=True):
            q = p.detach().double().flatten(1)
            kinetic = (r.double().square() / m.double()).flatten(1).sum(1)
            total = total + 0.5 * (prior * q.square().sum(1) + kinetic)
        return total

    start = energy(gradients())
    for i in range(3):
        leapfrog(0.15 if i else 0.075, 0.15)
        loss = gradients()
    leapfrog(0.075, 0.0)
    assert start.shape == (chains,)
    return (start - energy(loss)) / temperature


@pytest.mark.parametrize("every", [0, 1, 4])
def test_every_decision(every: int) -> None:
    """Against the trajectory made by hand: two groups, masses, both momenta's fates."""
    chains, temperature = 6, 0.8
    g = torch.Generator().manual_seed(1)
    params = [
        nn.Parameter(torch.randn(chains, 4, generator=g)),
        nn.Parameter(torch.randn(chains, 2, 3, generator=g, dtype=torch.float64)),
    ]
    priors = [2.0, 0.5]
    masses = [(0.5 + torch.rand(p.shape, generator=g)).to(p.dtype) for p in params]
    sampler = sg.HMC(
        [
            {"params": [p], "prior_precision": prior}
            for p, prior in zip(params, priors, strict=True)
        ],
        step_size=0.15,
        num_steps=3,
        num_data=10.0,
        temperature=temperature,
        resample_momentum_every=every,
        num_chains=chains,
        seed=-5,
    )
    sampler.set_mass(masses)
    offsets = [o for group in sampler.param_groups for o in group["offsets"]]
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    momenta: list[Tensor] = []
    accepted, seen = 0, set()
    for step in range(40):
        if not momenta or (every and step % every == 0):
            momenta = [torch.empty_like(m) for m in masses]
            ops.hmc_momenta_(
                momenta,
                masses,
                temperature=temperature,
                offsets=offsets,
                seed=-5,
                step=step,
            )
        start = [t.detach().clone() for t in twins]
        turned = [-r for r in momenta]
        ratios = by_hand(
            twins, Quartic(twins, True), momenta, masses, priors, chains, temperature
        )
        yes = ops.metropolis_decide(
            ratios, proposal=0, purpose=_C.PURPOSE_METROPOLIS, seed=-5, step=step
        )
        with torch.no_grad():
            for t, old, r, back in zip(twins, start, momenta, turned, strict=True):
                rows = yes.view(-1, *[1] * (t.dim() - 1))
                t.copy_(torch.where(rows, t, old))
                r.copy_(torch.where(rows, r, back))
        sampler.step(Quartic(params, True))
        seen |= set(yes.tolist())
        accepted += int(yes.sum())
        assert_same(params, twins)
        for p, r in zip(params, momenta, strict=True):
            if every == 1:
                assert "momentum" not in sampler.state[p]
            else:
                assert same_bits(sampler.state[p]["momentum"], r)
    assert seen == {True, False}
    assert sampler.acceptance_rate == accepted / (40 * chains)
    assert sampler.num_divergences == 0


def test_a_rejected_trajectory_leaves_every_bit() -> None:
    special = torch.tensor([0.0, -0.0, 1e-45, 1.0, -2.5])
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        p = nn.Parameter(special.to(dtype))
        before = p.detach().clone()
        sampler = sg.HMC([p], 1.0, num_steps=2, num_data=1, seed=0)
        losses = iter([0.0, 0.0, 1e9] * 5)

        def closure(p: Any = p, losses: Any = losses) -> float:
            p.grad = torch.ones_like(p)
            return next(losses)

        for _ in range(5):
            sampler.step(closure)
            assert same_bits(p, before)
        assert sampler.acceptance_rate == 0.0
        assert sampler.num_divergences == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_divergences_are_rejected_and_counted(value: float) -> None:
    p = nn.Parameter(torch.ones(3, 2))
    before = p.detach().clone()
    sampler = sg.HMC([p], 0.1, num_steps=1, num_data=1, num_chains=3, seed=0)
    assert math.isnan(sampler.acceptance_rate)
    ends = iter([[0.0] * 3, [0.0, value, value]] * 2)

    def closure() -> Tensor:
        p.grad = torch.zeros_like(p)
        return torch.tensor(next(ends))

    sampler.step(closure)
    assert sampler.num_divergences == 2
    assert sampler.acceptance_rate == 1 / 3
    assert same_bits(p[1:], before[1:])
    assert not torch.equal(p[0], before[0])
    sampler.step(closure)
    assert sampler.num_divergences == 4


def test_a_trajectory_that_runs_away() -> None:
    p = nn.Parameter(torch.full((5,), 2.0))
    before = p.detach().clone()
    sampler = sg.HMC([p], 50.0, num_steps=30, num_data=1, seed=0)
    sampler.step(Quartic([p]))
    assert same_bits(p, before)
    assert sampler.num_divergences == 1
    assert sampler.acceptance_rate == 0.0


def test_chains_do_not_depend_on_each_other() -> None:
    g = torch.Generator().manual_seed(1)
    start = torch.randn(7, 5, generator=g)
    many, one = nn.Parameter(start.clone()), nn.Parameter(start[:1].clone())
    for p in (many, one):
        sampler = sg.HMC([p], 0.3, num_steps=3, num_data=3, num_chains=len(p), seed=2)
        for _ in range(20):
            sampler.step(Quartic([p], chains=True))
        assert 0 < sampler.acceptance_rate < 1
    # The first chain has the same noise in both.
    assert same_bits(many[0], one[0])


def test_the_decision_is_the_same_for_any_split_into_groups() -> None:
    rates = []
    for split in (6, 3, 1):
        params = make_params()
        groups = [{"params": params[:split]}, {"params": params[split:]}]
        sampler = make("HMC", groups)
        for step in range(20):
            take_step(sampler, params, step)
        rates.append(sampler.acceptance_rate)
    assert rates[0] == rates[1] == rates[2]
    assert 0.1 < rates[0] < 0.95


def test_momenta_that_a_schedule_no_longer_keeps() -> None:
    params = two()
    sampler = sg.HMC(params, **GOOD, resample_momentum_every=0)
    sampler.step(Quartic(params))
    assert {*sampler.state} == {*params}
    sampler.param_groups[0]["resample_momentum_every"] = 1
    sampler.step(Quartic(params))
    assert sampler.state == {}


def test_the_prior_may_change_between_steps() -> None:
    params = two()
    sampler = sg.HMC(params, **GOOD, prior_precision=1.0)
    gibbs = sg.GammaPrecision(sampler)
    for _ in range(3):
        sampler.step(Quartic(params))
        gibbs.step()
    assert sampler.target_summary().startswith("HMC samples p(θ)")


# ---- Mass ------------------------------------------------------------------------


def test_masses() -> None:
    params = two()
    sampler = sg.HMC(params, **GOOD, resample_momentum_every=0)
    sampler.step(Quartic(params))
    sampler.set_mass([2.0, torch.tensor([0.5, 3.0])])
    assert sampler.state[params[0]]["mass"].tolist() == [2.0] * 7
    assert sampler.state[params[1]]["mass"].tolist() == [[0.5, 3.0]] * 3
    assert [sampler.state[p]["mass"].dtype for p in params] == [p.dtype for p in params]
    assert not any("momentum" in sampler.state[p] for p in params)
    sampler.step(Quartic(params))
    # Masses of one have no effect, and none at all have the same.
    chains = []
    for masses in (None, [1, 1.0]):
        others = two()
        other = sg.HMC(others, **GOOD)
        other.set_mass([3.0, 3.0])
        other.set_mass(masses)
        other.step(Quartic(others))
        chains.append(others)
    assert_same(*chains)
    # Half precision has masses in float32, and a group added later those of one.
    half = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    sampler = sg.HMC([half], **GOOD)
    sampler.set_mass([1.001])
    assert sampler.state[half]["mass"].dtype == torch.float32
    late = nn.Parameter(torch.ones(3))
    sampler.add_param_group({"params": [late]})
    sampler.step(Quartic([half, late]))
    sampler.set_mass(None)
    assert sampler.state == {}


def test_bad_masses() -> None:
    params = two()
    sampler = sg.HMC(params, **GOOD)
    sampler.set_mass([2.0, 3.0])
    before = snapshot(sampler)
    for masses, message in (
        ([1.0], "1 (must be one for each of the 2 parameters)"),
        (
            [1.0, torch.ones(3)],
            "number 1 has shape [3] (must broadcast to [3, 2])",
        ),
        *(
            (
                [torch.tensor([value] + [1.0] * 6), 1.0],
                "number 0 has elements out of range (must be finite and > 0)",
            )
            for value in (0.0, -1.0, math.nan, math.inf)
        ),
    ):
        fails(
            lambda masses=masses: sampler.set_mass(masses),
            ValueError,
            f"Invalid masses: {message}",
        )
        assert_unchanged(sampler, before)


# ---- Warm-up ---------------------------------------------------------------------


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
