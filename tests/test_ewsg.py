"""EWSG as a class: its closure, decisions, many chains, and what it shares with SGHMC.

Its law is the subject of ``test_ewsg_law.py``, its operators of ``test_operators.py``.
"""

import copy
import math
from typing import Any

import pytest
import torch
from failed_steps import assert_unchanged, snapshot, step_fails
from reference import ewsg_log_weights, same_bits
from short_chains import (
    TARGET,
    advance,
    assert_same,
    make,
    make_params,
    set_grads,
    take_step,
)
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim import optimizer as torch_optimizer

import torch_sgmcmc as sg
from torch_sgmcmc import _C

GOOD: dict[str, Any] = {"lr": 0.1, "num_data": 10, "seed": 0}
NO_CLOSURE = """\
EWSG.step() needs a closure, since it draws several minibatches a step:

    def closure():
        x, y = draw_minibatch()  # a fresh one at each call, uniform
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    sampler.step(closure)"""


class Draws:
    """A closure that makes noisy gradients and keeps what it did."""

    def __init__(self, params: list[nn.Parameter], noise: float = 0.5) -> None:
        self.params, self.noise = params, noise
        self.generator = torch.Generator().manual_seed(0)
        self.grads: list[list[Tensor]] = []
        self.found: list[list[Tensor | None]] = []
        self.losses: list[Tensor] = []

    def __call__(self) -> Tensor:
        self.found.append([p.grad for p in self.params])
        assert torch.is_grad_enabled()
        terms = [
            (0.5 * p.square() + self.noise * self.normal(p) * p).sum()
            for p in self.params
        ]
        loss = torch.stack([t.double() for t in terms]).sum()
        loss.backward()
        self.grads.append([p.grad for p in self.params])  # type: ignore[misc]
        self.losses.append(loss)
        return loss

    def normal(self, p: Tensor) -> Tensor:
        return torch.randn(p.shape, generator=self.generator, dtype=p.dtype)


def two() -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(9)
    return [
        nn.Parameter(torch.randn(7, generator=g)),
        nn.Parameter(torch.randn(3, 2, generator=g, dtype=torch.float64)),
    ]


# ---- The closure -----------------------------------------------------------------


def test_a_step_without_closure_says_how_to_write_one() -> None:
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    sampler = sg.EWSG([p], **GOOD)
    with pytest.raises(TypeError) as error:
        sampler.step()
    assert str(error.value) == NO_CLOSURE
    assert p.tolist() == [1.0] * 3 and sampler.state == {}
    assert p.grad is not None


@pytest.mark.parametrize("length", [0, 1, 4])
def test_the_closure_draws_all_minibatches(length: int) -> None:
    params = two()
    sampler = sg.EWSG(params, **GOOD, index_chain_length=length)
    closure = Draws(params)
    used = set()
    for step in range(30):
        with torch.no_grad():
            loss = sampler.step(closure)
        drawn = closure.grads[step * (length + 1) :]
        assert len(drawn) == length + 1
        # Gradients are cleared before each call, and those in use are of one draw.
        assert closure.found[step * (length + 1) :] == [[None, None]] * (length + 1)
        (index,) = (i for i, grads in enumerate(drawn) if grads[0] is params[0].grad)
        assert drawn[index][1] is params[1].grad
        used.add(index)
        # The first loss, a fair one.
        assert loss is closure.losses[step * (length + 1)]
    assert used == set(range(length + 1))


def test_gradients_are_not_changed() -> None:
    params = two()
    sampler = sg.EWSG(params, **GOOD, index_chain_length=3)
    seen: list[tuple[Tensor, Tensor]] = []
    closure = Draws(params)

    def watching() -> Tensor:
        loss = closure()
        seen.extend((p.grad, p.grad.clone()) for p in params)
        return loss

    for _ in range(10):
        sampler.step(watching)
    assert all(same_bits(grad, kept) for grad, kept in seen)


def test_a_closure_may_clear_gradients_itself_and_accumulate() -> None:
    chains = []
    for parts in (1, 4):
        params = two()
        sampler = sg.EWSG(params, **GOOD)
        g = torch.Generator().manual_seed(0)

        def closure(
            params: Any = params, sampler: Any = sampler, g: Any = g, parts: int = parts
        ) -> None:
            if parts > 1:
                sampler.zero_grad(set_to_none=False)
            scale = 2.0 ** torch.randint(3, (), generator=g)
            for _ in range(parts):  # powers of two add without rounding
                (scale / parts * params[0].sum()).backward()
                (scale / parts * params[1].sum()).backward()

        for _ in range(5):
            sampler.step(closure)
        chains.append(params)
    assert_same(*chains)


def test_a_closure_without_gradients() -> None:
    message = "EWSG got no gradients from the closure (does it call backward()?)"
    p = nn.Parameter(torch.ones(3))
    sampler = sg.EWSG([p], **GOOD)
    step_fails(sampler, lambda: p.sum(), RuntimeError, message)
    # Old gradients do not count.
    sampler.step(Draws([p]))
    step_fails(sampler, lambda: p.sum(), RuntimeError, message)


def test_minibatches_with_gradients_of_other_parameters() -> None:
    message = (
        "EWSG got gradients of other parameters from the closure than at its first "
        "call in this step: minibatches could not be compared"
    )
    for patterns in (([0, 1], [0]), ([0], [0, 1]), ([0], [1]), ([0], [])):
        for groups in (False, True):
            params = two()
            turns = iter(patterns)

            def closure(params: Any = params, turns: Any = turns) -> None:
                for i in next(turns):
                    params[i].grad = torch.ones_like(params[i])

            split = [{"params": [p]} for p in params]
            sampler = sg.EWSG(split if groups else params, **GOOD)
            step_fails(sampler, closure, RuntimeError, message)


def test_gradients_written_over() -> None:
    message = (
        "EWSG got the gradients of a minibatch in the memory of those of the minibatch "
        "before, which it still needs: the closure must not reuse gradients (for "
        "DistributedDataParallel, set gradient_as_bucket_view=False)"
    )
    p = nn.Parameter(torch.ones(3))
    buffer = torch.zeros(3)

    def closure() -> None:
        buffer.normal_()
        p.grad = buffer.view(3)

    step_fails(sg.EWSG([p], **GOOD), closure, RuntimeError, message)
    # One draw does not need the memory of another, and empty ones have none.
    sg.EWSG([p], **GOOD, index_chain_length=0).step(closure)
    empty = nn.Parameter(torch.ones(0))
    sg.EWSG([empty], **GOOD).step(lambda: setattr(empty, "grad", torch.ones(0)))


@pytest.mark.parametrize("call", [0, 1, 2])
def test_an_exception_in_the_closure_changes_nothing(call: int) -> None:
    params, others = two(), two()
    sampler = sg.EWSG(params, **GOOD, index_chain_length=2)
    twin = sg.EWSG(others, **GOOD, index_chain_length=2)
    for _ in range(2):  # without and with a momentum
        draws, calls = Draws(params), iter(range(9))

        def closure(draws: Any = draws, calls: Any = calls) -> None:
            draws()
            if next(calls) == call:
                raise KeyError("data")

        before = snapshot(sampler)
        with pytest.raises(KeyError, match="data"):
            sampler.step(closure)
        assert_unchanged(sampler, before)
        sampler.step(Draws(params))
        twin.step(Draws(others))
        assert_same(params, others)
        assert sampler.acceptance_rate == twin.acceptance_rate


def test_grad_scaler_is_refused() -> None:
    message = (
        "EWSG cannot be used with GradScaler, which scales the gradients of the "
        "closure: use torch.autocast with bfloat16, which needs no scaler"
    )
    p = nn.Parameter(torch.ones(3))
    sampler = sg.EWSG([p], **GOOD)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    draws = Draws([p])

    def closure() -> None:
        p.grad = None
        scaler.scale(draws()).detach()

    for arguments in ((), (closure,)):
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        scaler.scale(torch.ones(()))
        with pytest.raises(RuntimeError) as error:
            scaler.step(sampler, *arguments)
        assert str(error.value) == message
        assert p.tolist() == [1.0] * 3
    sampler.step(draws)  # no trace of it
    # One that is switched off does nothing.
    torch.amp.GradScaler("cpu", enabled=False).step(sampler, draws)
    assert sampler.param_groups[0]["step"] == 2


# ---- Decisions -------------------------------------------------------------------


@pytest.mark.parametrize("surrogate", ["momentum", "zero", "one", "full_momentum"])
@pytest.mark.parametrize("momentum", [0.8, 0.0])
def test_every_decision(momentum: float, surrogate: str) -> None:
    """Against W in plain PyTorch, over two groups and four dtypes."""
    g = torch.Generator().manual_seed(1)
    params = [
        nn.Parameter(torch.randn(n, generator=g).to(d))
        for n, d in (
            (40, torch.float32),
            (3, torch.float64),
            (5, torch.bfloat16),
            (9, torch.float16),
        )
    ]
    second = {
        "lr": 0.05,
        "num_data": 30.0,
        "prior_precision": 0.0,
        "temperature": 1.3,
        "momentum": momentum and 0.6,
    }
    first = {**TARGET, "momentum": momentum}
    sampler = sg.EWSG(
        [{"params": params[:2]}, {"params": params[2:], **second}],
        **first,
        index_chain_length=3,
        surrogate=surrogate,
        seed=-5,
    )
    closure = Draws(params, noise=0.3)
    sampler.step(closure)  # makes the momenta
    accepted = 0
    for step in range(1, 60):
        closure.grads.clear()
        momenta = [sampler.state[p]["momentum"].clone() for p in params if momentum]
        old = [p.detach().clone() for p in params]
        sampler.step(closure)

        def weight(
            grads: list[Tensor], old: Any = old, momenta: Any = momenta
        ) -> float:
            return sum(
                float(
                    ewsg_log_weights(
                        old[part], grads[part], momenta[part], surrogate=surrogate, **c
                    )
                )
                for part, c in ((slice(0, 2), first), (slice(2, 4), second))
            )

        current = closure.grads[0]
        for m, proposed in enumerate(closure.grads[1:]):
            rise = weight(proposed) - weight(current)
            if _C.index_chain_accepts(rise, seed=-5, step=step, proposal=m):
                current = proposed
                accepted += 1
        for p, grad in zip(params, current, strict=True):
            assert p.grad is grad
    assert 20 < accepted < 150
    assert 0 < sampler.acceptance_rate < 1


def test_acceptance_rate() -> None:
    params = two()
    sampler = sg.EWSG(params, **GOOD, index_chain_length=0)
    assert math.isnan(sampler.acceptance_rate)
    sampler.step(Draws(params))
    assert math.isnan(sampler.acceptance_rate)

    sampler = sg.EWSG(params, **GOOD, index_chain_length=3)
    closure = Draws(params)
    for _ in range(10):
        sampler.step(closure)
    rate = sampler.acceptance_rate
    assert isinstance(rate, float)
    assert sampler.param_groups[0]["num_proposals"] == 30
    assert rate == sampler.param_groups[0]["num_accepted"] / 30 > 0
    other = sg.EWSG(two(), **GOOD)
    other.load_state_dict(copy.deepcopy(sampler.state_dict()))
    assert other.acceptance_rate == rate
    # Equal minibatches are always accepted.
    for p in params:
        p.data.zero_()
    sampler = sg.EWSG(params, **GOOD)
    for _ in range(5):
        sampler.step(lambda: [setattr(p, "grad", torch.ones_like(p)) for p in params])
    assert sampler.acceptance_rate == 1.0


def test_the_decision_is_the_same_for_any_split_into_groups() -> None:
    rates = []
    for split in (6, 3, 1):
        params = make_params()
        groups = [{"params": params[:split]}, {"params": params[split:]}]
        sampler = make("EWSG", groups)
        advance(sampler, params, range(30))
        rates.append(sampler.acceptance_rate)
    assert rates[0] == rates[1] == rates[2]
    assert 0.1 < rates[0] < 0.95


# ---- SGHMC and SGLD as special cases ---------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_proposals_it_is_sghmc(dtype: torch.dtype) -> None:
    params, others = make_params(dtype), make_params(dtype)
    sampler = sg.EWSG(params, **TARGET, momentum=0.8, index_chain_length=0, seed=3)
    sghmc = sg.SGHMC(others, **TARGET, momentum=0.8, seed=3)
    for step in range(5):
        take_step(sampler, params, step)
        take_step(sghmc, others, step)
    assert_same(params, others)
    for p, q in zip(params, others, strict=True):
        assert same_bits(sampler.state[p]["momentum"], sghmc.state[q]["momentum"])


def test_the_overdamped_variant_is_sgld_with_weights() -> None:
    params, others = make_params(), make_params()
    sampler = sg.EWSG(params, **TARGET, momentum=0, index_chain_length=2, seed=3)
    sgld = sg.SGLD(others, **TARGET, seed=3)
    for step in range(20):
        take_step(sampler, params, step)
        for p, q in zip(params, others, strict=True):
            q.grad = p.grad
        sgld.step()
    assert_same(params, others)
    assert sampler.state == {}
    assert 0 < sampler.acceptance_rate < 1


def test_a_momentum_that_a_schedule_switches_off_is_forgotten() -> None:
    params = two()
    sampler = sg.EWSG(params, **GOOD)
    closure = Draws(params)
    sampler.step(closure)
    assert set(sampler.state) == set(params)
    sampler.param_groups[0]["momentum"] = 0.0
    sampler.step(closure)
    assert sampler.state == {}
    sampler.param_groups[0]["momentum"] = 0.5
    sampler.step(closure)
    assert set(sampler.state) == set(params)


def test_exact_gradients_make_it_sghmc() -> None:
    # All minibatches weigh the same: to the last bit, so that all are accepted.
    params, others = make_params(), make_params()
    sampler = sg.EWSG(params, **TARGET, index_chain_length=3, seed=3)
    sghmc = sg.SGHMC(others, **TARGET, seed=3)
    for step in range(5):
        sampler.step(lambda step=step: set_grads(params, step))
        take_step(sghmc, others, step)
    assert_same(params, others)
    assert sampler.acceptance_rate == 1.0


# ---- Many chains at once ---------------------------------------------------------


def batched(chains: int) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(2)
    shapes = [(chains,), (chains, 3), (chains, 2, 130)]
    return [nn.Parameter(torch.randn(s, generator=g)) for s in shapes]


@pytest.mark.parametrize("chains", [1, 2, 50])
def test_weights_and_decisions_for_each_chain(chains: int) -> None:
    params = batched(chains)
    sampler = sg.EWSG(
        params, **TARGET, momentum=0.8, num_chains=chains, index_chain_length=2, seed=4
    )
    closure = Draws(params, noise=0.1)
    original = []

    def keeping() -> Tensor:
        loss = closure()
        original.append([p.grad.clone() for p in params])
        return loss

    sampler.step(keeping)
    accepted = 0.0
    for step in range(1, 20):
        original.clear()
        old = [p.detach().clone() for p in params]
        momenta = [sampler.state[p]["momentum"].clone() for p in params]
        before = float(sampler.param_groups[0]["num_accepted"])
        sampler.step(keeping)

        def weight(
            grads: list[Tensor], old: Any = old, momenta: Any = momenta
        ) -> Tensor:
            return ewsg_log_weights(
                old, grads, momenta, **TARGET, momentum=0.8, num_chains=chains
            )

        current = original[0]
        count = 0
        for m, proposed in enumerate(original[1:]):
            rise = weight(proposed) - weight(current)
            yes = torch.ops.torch_sgmcmc.metropolis_decide(
                rise,
                proposal=m,
                purpose=_C.PURPOSE_INDEX_CHAIN,
                seed=4,
                step=step,
            )
            count += int(yes.sum())
            current = [
                torch.where(yes.view(-1, *[1] * (a.dim() - 1)), b, a)
                for a, b in zip(current, proposed, strict=True)
            ]
        assert_same([p.grad for p in params], current)
        assert float(sampler.param_groups[0]["num_accepted"]) - before == count
        accepted += count
    assert sampler.param_groups[0]["num_proposals"] == 20 * 2 * chains
    assert 0.1 < accepted / (19 * 2 * chains) < 0.9


def test_one_chain_with_a_leading_dimension_is_one_chain() -> None:
    params, others = batched(1), batched(1)
    for ps, chains in ((params, 1), (others, None)):
        sampler = sg.EWSG(ps, **TARGET, num_chains=chains, seed=4)
        closure = Draws(ps)
        for _ in range(10):
            sampler.step(closure)
    assert_same(params, others)


def test_many_chains_resume_bit_for_bit() -> None:
    params = batched(20)
    sampler = sg.EWSG(params, **TARGET, num_chains=20, seed=4)
    advance(sampler, params, range(5))
    others = [nn.Parameter(p.detach().clone()) for p in params]
    twin = sg.EWSG(others, lr=1.0, num_data=1, num_chains=20)
    twin.load_state_dict(copy.deepcopy(sampler.state_dict()))
    for s, ps in ((sampler, params), (twin, others)):
        advance(s, ps, range(5, 10))
    assert_same(params, others)
    assert twin.acceptance_rate == sampler.acceptance_rate > 0


def test_chains_in_several_groups() -> None:
    expected = batched(20)
    advance(sg.EWSG(expected, **TARGET, num_chains=20, seed=4), expected, range(9))
    params = batched(20)
    groups = [{"params": params[:1]}, {"params": params[1:]}]
    sampler = sg.EWSG(groups, **TARGET, num_chains=20, seed=4)
    advance(sampler, params, range(9))
    assert_same(params, expected)


def test_parameters_without_the_chains_dimension() -> None:
    for shape in ((), (3,), (3, 5)):
        message = (
            f"Invalid parameter: shape {list(shape)} (must have a leading dimension of "
            "num_chains = 5)"
        )
        p = nn.Parameter(torch.zeros(shape))
        with pytest.raises(ValueError) as error:
            sg.EWSG([p], **GOOD, num_chains=5)
        assert str(error.value) == message
        sampler = sg.EWSG([nn.Parameter(torch.zeros(5, 2))], **GOOD, num_chains=5)
        with pytest.raises(ValueError) as error:
            sampler.add_param_group({"params": [p]})
        assert str(error.value) == message
        assert len(sampler.param_groups) == 1
    # A state dict of five chains for parameters that are none.
    other = sg.EWSG([nn.Parameter(torch.zeros(2, 5))], **GOOD)
    with pytest.raises(ValueError) as error:
        other.load_state_dict(sampler.state_dict())
    assert str(error.value) == (
        "Invalid parameter: shape [2, 5] (must have a leading dimension of num_chains "
        "= 5)"
    )


# ---- What belongs to the sampler and not to a group ------------------------------


def test_settings_of_the_sampler() -> None:
    for name, value, kind, message in (
        ("index_chain_length", -1, ValueError, "-1 (must be >= 0)"),
        ("index_chain_length", 1.0, TypeError, "1.0 (must be an int, got float)"),
        ("num_chains", 0, ValueError, "0 (must be >= 1)"),
        ("num_chains", "2", TypeError, "'2' (must be an int, got str)"),
    ):
        with pytest.raises(kind) as error:
            sg.EWSG(two(), **{**GOOD, name: value})
        assert str(error.value) == f"Invalid {name}: {message}"
        with pytest.raises(ValueError) as managed:
            sg.EWSG([{"params": two(), name: 1}], **GOOD)
        assert str(managed.value) == (
            f"Invalid param group: {name!r} is managed by EWSG and cannot be set for a "
            "group"
        )


def test_settings_that_differ_between_groups() -> None:
    params = two()
    sampler = sg.EWSG([{"params": [p]} for p in params], **GOOD)
    for name, values in (("index_chain_length", [3, 1]), ("num_chains", [1, None])):
        sampler.param_groups[0][name] = values[0]
        message = (
            f"Invalid {name}: {values} in the param groups (must be equal: there is "
            "one decision for all)"
        )
        step_fails(sampler, Draws(params), ValueError, message)
        sampler.param_groups[0][name] = values[1]
    # For all groups it may change, and a new group follows.
    for group in sampler.param_groups:
        group["index_chain_length"] = 2
    added = nn.Parameter(torch.ones(4))
    sampler.add_param_group({"params": [added]})
    closure = Draws([*params, added])
    sampler.step(closure)
    assert len(closure.losses) == 3


# ---- torch's optimizer interface -------------------------------------------------


def test_defaults() -> None:
    sampler = sg.EWSG([nn.Parameter(torch.ones(3))], 0.1, num_data=2, seed=-3)
    assert isinstance(sampler, torch.optim.Optimizer)
    assert sampler.param_groups[0] | {"params": None} == {
        "params": None,
        "lr": 0.1,
        "momentum": 0.9,
        "num_data": 2,
        "prior_precision": 0.0,
        "temperature": 1.0,
        "surrogate": "momentum",
        "index_chain_length": 1,
        "num_chains": None,
        "num_proposals": 0,
        "num_accepted": 0,
        "capturable": False,
        "seed": -3,
        "step": 0,
        "offsets": [0],
    }
    assert sampler.target_summary().startswith("EWSG samples p(θ)")


def test_hooks_run_once_a_step() -> None:
    params = two()
    sampler = sg.EWSG(params, **GOOD, index_chain_length=3)
    calls: list[str] = []
    handle = torch_optimizer.register_optimizer_step_post_hook(
        lambda *_: calls.append("global")
    )
    try:
        sampler.register_step_pre_hook(lambda *_: calls.append("pre"))
        sampler.register_step_post_hook(lambda *_: calls.append("post"))
        sampler.step(Draws(params))
    finally:
        handle.remove()
    assert calls == ["pre", "post", "global"]


def test_profiler_shows_the_step() -> None:
    params = two()
    sampler = sg.EWSG(params, **GOOD)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        sampler.step(Draws(params))
    names = {event.key for event in profile.key_averages()}
    assert "Optimizer.step#EWSG.step" in names
    assert "torch_sgmcmc::ewsg_log_ratio" in names


def test_schedulers_enter_weights_and_update() -> None:
    params, others = make_params(), make_params()
    sampler, by_hand = make("EWSG", params), make("EWSG", others)
    scheduler = lr_scheduler.OneCycleLR(
        sampler, max_lr=0.2, total_steps=10, base_momentum=0.7, max_momentum=0.95
    )
    warmup = set()
    for step in range(8):
        for key in ("lr", "momentum"):
            by_hand.param_groups[0][key] = sampler.param_groups[0][key]
            warmup.add(sampler.param_groups[0][key])
        take_step(sampler, params, step)
        take_step(by_hand, others, step)
        scheduler.step()
    assert_same(params, others)
    assert len(warmup) == 16


def test_a_learning_rate_of_zero_is_no_special_case() -> None:
    params = two()
    sampler = sg.EWSG(params, **{**GOOD, "lr": 0.0})
    before = [p.detach().clone() for p in params]
    sampler.step(Draws(params))
    assert_same(params, before)


def test_step_under_torch_compile() -> None:
    params, others = two(), two()
    eager, compiled = sg.EWSG(params, **GOOD), sg.EWSG(others, **GOOD)
    first, second = Draws(params), Draws(others)
    torch._dynamo.reset()
    step = torch.compile(lambda: compiled.step(second), backend="aot_eager")
    for _ in range(3):
        eager.step(first)
        step()
        assert_same(others, params)
    torch._dynamo.reset()


def test_autocast_in_the_closure() -> None:
    torch.manual_seed(0)
    net = nn.Linear(6, 4)
    sampler = sg.EWSG(net.parameters(), **GOOD)

    def closure() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = net(torch.randn(3, 6)).square().mean()
        loss.backward()
        return loss

    before = [p.detach().clone() for p in net.parameters()]
    for _ in range(3):
        sampler.step(closure)
    for p, b in zip(net.parameters(), before, strict=True):
        assert p.grad is not None and p.grad.dtype == torch.float32
        assert torch.isfinite(p).all() and not torch.equal(p, b)


def test_gamma_precision_works_with_it() -> None:
    params = make_params()
    sampler = make("EWSG", params)
    precision = sg.GammaPrecision(sampler)
    advance(sampler, params, range(2))
    (drawn,) = precision.step()
    assert sampler.param_groups[0]["prior_precision"] == drawn > 0
    advance(sampler, params, range(2, 4))
