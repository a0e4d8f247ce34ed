"""Blocks of compiled steps are the chain of single ones."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from harness.inductor import (
    IS_OLD,
    NEEDS_COMPILER,
    RUNS_BLOCKS,
    graphs_alone,  # noqa: F401
)
from reference import same_bits
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional as F

import torch_sgmcmc as sg

pytestmark = pytest.mark.full

STEPS = 3


def quadratic(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """A loss with the same gradient in every program, bitwise: θ − x."""
    return sum(((p - x[: len(p)]) ** 2 / 2).sum() for p in params.values())


class Chain:
    """A chain of two tensors, and minibatches for it."""

    def __init__(self, cls: type[sg.Sampler], **settings: Any) -> None:
        torch.manual_seed(0)
        self.params = {name: nn.Parameter(torch.randn(n)) for name, n in SIZES.items()}
        options = {"lr": 0.05, "num_data": 20, "seed": 3, **settings}
        self.sampler = cls(self.params.values(), **options)
        self.batches = torch.randn(4 * STEPS, max(SIZES.values()))

    def eager(self, rows: range) -> None:
        for i in rows:
            for name, p in self.params.items():
                p.grad = p.detach() - self.batches[i][: SIZES[name]]
            self.sampler.step()

    def values(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.params.values()]


SIZES = {"a": 5, "b": 7}


def graphs_without_code(test: Any) -> Any:
    """Marks a test that needs torch's graphs of blocks, and no compiler."""
    return RUNS_BLOCKS(pytest.mark.usefixtures("graphs_alone")(test))


@pytest.fixture(autouse=True)
def forget_compiled_code() -> None:
    torch._dynamo.reset()


@RUNS_BLOCKS
@NEEDS_COMPILER
def test_a_block_is_its_steps() -> None:
    """Also after a checkpoint, and between blocks that are not compiled."""
    eager = Chain(sg.SGHMC)
    chain = Chain(sg.SGHMC, capturable=True)
    block = sg.compile_steps(chain.sampler, quadratic, chain.params, steps=STEPS)
    for k in range(2):
        rows = range(k * STEPS, (k + 1) * STEPS)
        losses = block(chain.batches[rows.start : rows.stop])
        assert losses.shape == (STEPS,)
        eager.eager(rows)
        assert all(map(same_bits, chain.values(), eager.values()))
    assert int(chain.sampler.param_groups[0]["step"]) == 2 * STEPS
    saved = copy.deepcopy(chain.sampler.state_dict())
    again = Chain(sg.SGHMC, capturable=True)
    for p, value in zip(again.params.values(), chain.values(), strict=True):
        p.data.copy_(value)
    again.sampler.load_state_dict(saved)
    block = sg.compile_steps(again.sampler, quadratic, again.params, steps=STEPS)
    block(chain.batches[2 * STEPS : 3 * STEPS])
    eager.eager(range(2 * STEPS, 3 * STEPS))
    assert all(map(same_bits, again.values(), eager.values()))


@graphs_without_code
@pytest.mark.parametrize("cls", [sg.SGHMC, sg.BAOA, sg.SGNHT])
def test_momenta_are_rescaled_between_blocks(cls: type[sg.Sampler]) -> None:
    """The chain is that of single steps of a capturable sampler, and about the other.

    A pass of its own rounds momenta once more than the update does.
    """
    chain, single, plain = (
        Chain(cls, capturable=capturable) for capturable in (True, True, False)
    )
    block = sg.compile_steps(chain.sampler, quadratic, chain.params, steps=STEPS)
    for k, lr in enumerate((0.05, 0.05, 0.01, 0.04)):
        for each in (chain, single, plain):
            each.sampler.param_groups[0]["lr"] = lr
        rows = range(k * STEPS, (k + 1) * STEPS)
        block(chain.batches[rows.start : rows.stop])
        single.eager(rows)
        plain.eager(rows)
        assert all(map(same_bits, chain.values(), single.values()))
        assert chain.sampler.param_groups[0]["momentum_settings"][0] == lr
    for a, b in zip(chain.values(), plain.values(), strict=True):
        torch.testing.assert_close(a, b)


@graphs_without_code
def test_a_bad_setting_leaves_momenta() -> None:
    chain = Chain(sg.SGHMC, capturable=True)
    block = sg.compile_steps(chain.sampler, quadratic, chain.params, steps=1)
    block(chain.batches[:1])
    state = [v["momentum"].clone() for v in chain.sampler.state.values()]
    for changes in ({"lr": float("nan")}, {"lr": -0.1}, {"num_data": 0.0}):
        group = chain.sampler.param_groups[0]
        before = {key: group[key] for key in (*changes, "momentum_settings")}
        group.update(changes)
        with pytest.raises(ValueError, match="Invalid"):
            block(chain.batches[:1])
        group.update({key: before[key] for key in changes})
        assert group["momentum_settings"] == before["momentum_settings"]
    for value, kept in zip(chain.sampler.state.values(), state, strict=True):
        assert same_bits(value["momentum"], kept)


@graphs_without_code
def test_a_noise_estimate_follows_between_blocks() -> None:
    chain, single = (
        Chain(sg.SGHMC, capturable=True, noise_estimate=0.01) for _ in range(2)
    )
    block = sg.compile_steps(chain.sampler, quadratic, chain.params, steps=STEPS)
    for k, lr in enumerate((0.05, 0.05, 0.01)):
        for each in (chain, single):
            each.sampler.param_groups[0]["lr"] = lr
        rows = range(k * STEPS, (k + 1) * STEPS)
        block(chain.batches[rows.start : rows.stop])
        single.eager(rows)
        assert all(map(same_bits, chain.values(), single.values()))


@graphs_without_code
def test_a_parameter_under_two_names_has_the_sum_of_their_gradients() -> None:

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return (params["a"] * x).sum() + 2 * (params["tied"] * x).sum()

    x = torch.randn(STEPS, 5)
    ends = []
    for compiled in (False, True):
        p = nn.Parameter(torch.ones(5))
        sampler = sg.SGLD([p], 0.1, num_data=20, seed=3, capturable=True)
        block = sg.compile_steps(sampler, loss, {"a": p, "tied": p}, steps=STEPS)
        for _ in range(2):
            if compiled:
                block(x)
                continue
            for row in x:
                p.grad = 3 * row
                sampler.step()
        ends.append(p.detach().clone())
    torch.testing.assert_close(ends[1], ends[0])


@graphs_without_code
def test_any_number_of_settings() -> None:
    """torch.compile makes 8 graphs of a function, and then fails."""
    block_of, single = (Chain(sg.SGHMC, capturable=True) for _ in range(2))
    block = sg.compile_steps(block_of.sampler, quadratic, block_of.params, steps=STEPS)
    for i in range(12):
        for chain in (block_of, single):
            chain.sampler.param_groups[0]["lr"] = 0.05 / (i + 1)
        rows = range(STEPS * (i % 4), STEPS * (i % 4 + 1))
        block(block_of.batches[rows.start : rows.stop])
        single.eager(rows)
    for a, b in zip(block_of.values(), single.values(), strict=True):
        assert same_bits(a, b)


@graphs_without_code
def test_each_sampler_has_graphs_of_its_own() -> None:
    """A process may have many: torch keeps 8 of a function, and would then refuse."""
    for seed in range(10):
        chain, eager = (Chain(sg.SGLD, seed=seed, capturable=c) for c in (True, False))
        block = sg.compile_steps(chain.sampler, quadratic, chain.params, steps=1)
        for k in range(2):
            block(chain.batches[k : k + 1])
        eager.eager(range(2))
        assert all(map(same_bits, chain.values(), eager.values()))
        assert all(p.grad is None for p in chain.params.values())


@pytest.mark.nightly
@RUNS_BLOCKS
@NEEDS_COMPILER
def test_networks_of_several_chains() -> None:
    """Chains by vmap equal eager ones up to rounding of inductor's gradients."""
    torch.manual_seed(0)
    steps = 2
    nets = [nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)) for _ in "ab"]
    base = copy.deepcopy(nets[0]).to("meta")
    x, y = torch.randn(2 * steps, 8, 2), torch.randn(2 * steps, 8, 1)

    def one(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(functional_call(base, params, (x,)), y)

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return vmap(one, (0, None, None))(params, x, y).sum()

    def make(**settings: Any) -> tuple[dict[str, Tensor], sg.SGHMC]:
        params, _ = stack_module_state(nets)
        common = {"num_data": 40, "num_chains": 2, "prior_precision": 1.0, "seed": 1}
        return params, sg.SGHMC(params.values(), 0.01, 0.9, **common, **settings)

    params, sampler = make(capturable=True)
    block = sg.compile_steps(sampler, loss, params, steps=steps)
    plain, eager = make()
    for k in range(2):
        rows = slice(k * steps, (k + 1) * steps)
        losses = block(x[rows], y[rows])
        for i in range(rows.start, rows.stop):
            eager.zero_grad()
            value = loss(plain, x[i], y[i])
            value.backward()
            eager.step()
        torch.testing.assert_close(losses[-1], value.detach())
        for name, p in params.items():
            torch.testing.assert_close(p, plain[name], rtol=1e-4, atol=1e-5)


@graphs_without_code
def test_gradients_that_are_not_finite() -> None:
    """Their steps are left out of a block, and heard at its end."""
    chain, eager = Chain(sg.SGLD, capturable=True), Chain(sg.SGLD)
    for each in (chain, eager):
        each.batches[STEPS + 1, 2] = float("nan")
    block = sg.compile_steps(chain.sampler, quadratic, chain.params, steps=STEPS)
    block(chain.batches[:STEPS])
    with pytest.raises(RuntimeError, match=r"^1 of 3 steps of SGLD were skipped"):
        block(chain.batches[STEPS : 2 * STEPS])
    assert chain.sampler.num_skipped == 1
    eager.eager(range(STEPS + 1))
    eager.eager(range(STEPS + 2, 2 * STEPS))
    assert all(map(same_bits, chain.values(), eager.values()))


def block_of(names: str = "ab", steps: int = 20, **settings: Any) -> Callable[..., Any]:
    def make(*batches: Any) -> Any:
        chain = Chain(sg.SGLD, **{"capturable": True, **settings})
        params = {name: chain.params[name] for name in names}
        block = sg.compile_steps(chain.sampler, quadratic, params, steps=steps)
        return block(*batches)

    return make


@RUNS_BLOCKS
@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (block_of(capturable=False), ValueError, r"SGLD with capturable=False"),
        (
            lambda: sg.compile_steps(torch.optim.SGD([torch.ones(1)]), quadratic, {}),
            TypeError,
            r"Invalid sampler: got SGD",
        ),
        (block_of("a"), ValueError, r"params: 1 that differ from the sampler's 2"),
        (block_of(steps=0), ValueError, r"Invalid steps: 0"),
        (
            partial(block_of(), torch.ones(9, 7)),
            ValueError,
            r"Invalid batches\[0\]: shape \[9, 7\] .*each of the 20 steps",
        ),
        (partial(block_of(), [1.0] * 20), ValueError, r"Invalid batches\[0\]: list"),
    ],
)
def test_refusals(make: Callable[[], Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        make()


@graphs_without_code
def test_hooks_are_refused() -> None:
    """Hooks are refused, since a block would not call them."""
    chain = Chain(sg.SGLD, capturable=True)
    block = sg.compile_steps(chain.sampler, quadratic, chain.params, steps=STEPS)
    hook = chain.sampler.register_step_post_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"Invalid sampler: it has hooks"):
        block(chain.batches[:STEPS])
    assert int(chain.sampler.param_groups[0]["step"]) == 0
    hook.remove()
    block(chain.batches[:STEPS])
    assert int(chain.sampler.param_groups[0]["step"]) == STEPS


@pytest.mark.skipif(not IS_OLD, reason="of an older torch")
def test_an_older_torch_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"compile_steps needs torch 2\.15 or newer"):
        block_of()()
