"""Blocks of compiled steps are the chain of single ones, up to rounding."""

import copy
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from harness.inductor import (
    NEEDS_COMPILER,
    graphs_alone,  # noqa: F401
)
from reference import same_bits
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

import torch_sgmcmc as sg
from torch_sgmcmc.core.ops import (
    OP_SPECS,
    chain_product,
    chain_turn,
    gaussian_,
    mclmc_sums,
    mclmc_turn,
    noise_steps_,
)

pytestmark = pytest.mark.full

STEPS = 3
SIZES = {"a": (5,), "b": (2, 3)}


def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """A loss whose gradient depends on θ, with a product of matrices."""
    first, second = params.values()
    product = torch.mm(first[None, :2], second)  # 1 x 3
    return ((first - x) ** 2).sum() / 2 + second.cos().sum() + product.tanh().sum()


class Chain:
    """A chain of two tensors in fp64, and minibatches for it."""

    def __init__(self, cls: type[sg.Sampler], **settings: Any) -> None:
        torch.manual_seed(0)
        lead = (settings["num_chains"],) if "num_chains" in settings else ()
        self.params = {
            name: nn.Parameter(torch.randn(*lead, *size, dtype=torch.float64))
            for name, size in SIZES.items()
        }
        options = {"lr": 0.05, "num_data": 20, "seed": 3, **settings}
        groups = options.pop("groups", [{}, {}])
        self.sampler = cls(
            [
                {"params": [p], **own}
                for p, own in zip(self.params.values(), groups, strict=True)
            ],
            **options,
        )
        self.batches = torch.randn(6 * STEPS, 5, dtype=torch.float64)

    def block(self, steps: int = STEPS) -> Callable[..., Tensor]:
        return sg.compile_steps(self.sampler, loss, self.params, steps=steps)

    def eager(self, rows: range) -> None:
        gradient = grad(loss)
        if self.sampler.param_groups[0]["num_chains"] is not None:
            gradient = vmap(gradient, (0, None))
        for i in rows:
            now = {name: p.detach() for name, p in self.params.items()}
            for name, value in gradient(now, self.batches[i]).items():
                self.params[name].grad = value
            self.sampler.step()
        self.sampler.zero_grad()

    def values(self) -> list[Tensor]:
        state = [
            value
            for own in self.sampler.state.values()
            for key, value in sorted(own.items())
            if key != "sensitivity"
        ]
        return [p.detach().clone() for p in self.params.values()] + copy.deepcopy(state)


def assert_equal(one: Chain, other: Chain) -> None:
    for a, b in zip(one.values(), other.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


#: Marks a test that needs no compiler.
graphs_without_code = pytest.mark.usefixtures("graphs_alone")


PRIOR = {"prior_precision": 2.0, "temperature": 0.7}
MEANS = [{"prior_mean": torch.full((5,), 0.3)}, {"prior_mean": torch.ones(2, 3)}]
G = [torch.linspace(0.3, 3, 5), torch.linspace(2, 0.5, 6).view(2, 3)]
CASES = [
    (sg.SGLD, {}),
    (sg.SGLD, {"groups": [{"lr": 0.02}, {"prior_precision": 0.0, "num_data": 30}]}),
    (sg.SGHMC, {"noise_estimate": 0.02}),
    (sg.SGHMC, {"groups": MEANS}),
    (sg.SGHMC, {"resample_momentum_every": 2}),
    (sg.SGHMC, {"resample_momentum_every": 7}),
    (sg.SGHMC, {"prior_mean": 0.4, "capturable": True}),
    (sg.BAOA, {"momentum": 0.7, "noise_estimate": 0.05}),
    (sg.SGLRW, {}),
    (sg.SGNHT, {"thermostat_rate": 0.02, "lr": 0.01}),
    (sg.PSGLD, {"gamma": False}),
    (sg.PSGLD, {"adapt": False, "eps": 0.5}),
    (sg.MCLMC, {"momentum": 0.7}),
    (sg.MCLMC, {"groups": MEANS}),
    (sg.MCLMC, {"momentum": 0.0, "groups": [{}, {"prior_precision": 0.5}]}),
    (sg.SGHMC, {"preconditioner": G, "noise_estimate": 0.02}),
    (sg.BAOA, {"preconditioner": G, "groups": MEANS}),
    (sg.MCLMC, {"preconditioner": G, "momentum": 0.7}),
]


@graphs_without_code
@pytest.mark.parametrize("num_chains", [None, 2, 9, 35])
@pytest.mark.parametrize(("cls", "settings"), CASES)
def test_a_block_is_its_steps(
    cls: type[sg.Sampler], settings: dict[str, Any], num_chains: int | None
) -> None:
    """Each update in tensor arithmetic is the operator's, on the same noise.

    Chains are computed one by one, in one tile, and in tiles that overlap.
    Before the third block lr changes, before the fourth lr, T and N.
    """
    if num_chains is not None:
        if settings.get("groups") is MEANS:
            groups = [
                {"prior_mean": own["prior_mean"].expand(num_chains, *size).clone()}
                for own, size in zip(MEANS, SIZES.values(), strict=True)
            ]
            settings = {**settings, "groups": groups}
        settings = {**settings, "num_chains": num_chains}
    compiled, eager = (Chain(cls, **{**PRIOR, **settings}) for _ in range(2))
    block = compiled.block()
    for k in range(5):
        for chain in (compiled, eager):
            for group in chain.sampler.param_groups:
                if k == 2:
                    group["lr"] /= 3
                if k == 3:
                    group.update(lr=group["lr"] * 2, temperature=1.3, num_data=25.0)
        rows = range(k * STEPS, (k + 1) * STEPS)
        losses = block(compiled.batches[rows.start : rows.stop])
        eager.eager(rows)
        assert losses.shape == (STEPS, *([] if num_chains is None else [num_chains]))
        assert_equal(compiled, eager)
        if cls is sg.MCLMC:
            errors = [chain.sampler.energy_error for chain in (compiled, eager)]
            assert errors[0] == pytest.approx(errors[1], rel=1e-9)
    assert int(compiled.sampler.param_groups[0]["step"]) == 5 * STEPS
    assert all(p.grad is None for p in compiled.params.values())


@pytest.mark.parametrize("num_chains", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_of_several_steps_is_that_of_each(
    dtype: torch.dtype, num_chains: int
) -> None:
    sizes = [(3, 700), (3, 2, 5), (3,)]
    numel = [torch.Size(size).numel() for size in sizes]
    rows = torch.empty(4, sum(numel), dtype=dtype)
    parts = [
        part.view(4, *size)
        for part, size in zip(rows.split(numel, 1), sizes, strict=True)
    ]
    offsets = [0, 4096, 8192]
    noise_steps_(parts, offsets, uniform=0, seed=5, step=7, num_chains=num_chains)
    for i in range(4):
        single = [torch.empty(size, dtype=dtype) for size in sizes]
        more = {"num_chains": num_chains} if num_chains else {}
        gaussian_(
            single, std=1.0, offsets=offsets, seed=5, step=7 + i, purpose=0, **more
        )
        assert all(
            same_bits(part[i], one) for part, one in zip(parts, single, strict=True)
        )


def test_noise_of_unequal_rows_is_refused() -> None:
    """A first tensor with one row for all steps is not written at another's stride."""
    rows = torch.zeros(3, 16)
    noise = [torch.zeros(8).expand(3, 8), rows[:, 8:]]
    with pytest.raises(RuntimeError, match="noise must be parts of one tensor"):
        noise_steps_(noise, [0, 4096], uniform=0, seed=5, step=7, num_chains=0)
    assert not any(bool(tensor.any()) for tensor in noise)


@pytest.mark.parametrize("chains", [1, 7, 10, 16])
@pytest.mark.parametrize(
    ("rows", "inner", "columns"), [(13, 5, 3), (8, 1, 1), (1, 7, 2), (4, 9, 70)]
)
def test_chain_product(rows: int, inner: int, columns: int, chains: int) -> None:
    """Also of transposed matrices."""
    a = torch.randn(rows, inner, chains)
    b = torch.randn(columns, inner, chains).transpose(0, 1)
    expected = torch.einsum("ilc,ljc->ijc", a, b)
    torch.testing.assert_close(chain_product(a, b), expected)
    packed = a.transpose(0, 1).contiguous().transpose(0, 1)
    assert same_bits(chain_product(packed, b), chain_product(a, b))
    with pytest.raises(RuntimeError, match="chain_product: a and b must be"):
        chain_product(a, b.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chain_turn(dtype: torch.dtype) -> None:
    """Is the step's turn of tensors without weight decay."""
    g, z, u = torch.randn(3, 2, 7, dtype=dtype)  # two chains of seven elements
    sums = mclmc_sums(
        [g], [u], [u], [z], [], num_data=1.0, prior_precision=0.0, num_chains=2
    )
    energy = torch.arange(8.0, dtype=torch.float64).view(2, 4)
    settings = {"step_size": 0.1, "momentum": 0.9, "scale": 2.0}
    expected = mclmc_turn(sums, energy, dimension=7, **settings)
    numbers = torch.tensor([*settings.values()], dtype=torch.float64)
    last = [tensor.T.contiguous() for tensor in (g, z, u)]
    for one, other in zip(chain_turn(*last, energy, numbers), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=0)
    for bad in ([g.T, *last[1:]], [last[0][:6], *last[1:]], [t.int() for t in last]):
        with pytest.raises(RuntimeError, match="chain_turn: grad, refreshment and d"):
            chain_turn(*bad, energy, numbers)
    with pytest.raises(RuntimeError, match="chain_turn: numbers must be 3 contiguous"):
        chain_turn(*last, energy, numbers.float())
    with pytest.raises(RuntimeError, match="chain_turn: numbers must be step_size >="):
        chain_turn(*last, energy, -numbers)
    with pytest.raises(RuntimeError, match="chain_turn: sums and energy must be"):
        chain_turn(*last, energy[:1], numbers)
    with pytest.raises(RuntimeError, match="chain_turn: grad must have at least 2"):
        chain_turn(*(tensor[:1] for tensor in last), energy, numbers)


@graphs_without_code
@pytest.mark.parametrize("num_chains", [None, 9])
@pytest.mark.parametrize("steps", [1, 21, 45])
def test_blocks_of_any_length(steps: int, num_chains: int | None) -> None:
    """Blocks of one step, and longer than a graph; a checkpoint between two."""
    more = {} if num_chains is None else {"num_chains": num_chains}
    compiled, eager, again = (Chain(sg.SGHMC, **more) for _ in range(3))
    batches = torch.randn(3 * steps, 5, generator=torch.Generator().manual_seed(1))
    eager.batches = batches = batches.double()
    block = compiled.block(steps)
    block(batches[:steps])
    block(batches[steps : 2 * steps])
    for p, value in zip(again.params.values(), compiled.params.values(), strict=True):
        p.data.copy_(value.detach())
    again.sampler.load_state_dict(copy.deepcopy(compiled.sampler.state_dict()))
    again.block(steps)(batches[2 * steps :])
    eager.eager(range(3 * steps))
    assert_equal(again, eager)


@graphs_without_code
def test_chains_draw_their_own_numbers_of_the_loss() -> None:
    """Dropout of data, of activations, and plain numbers."""
    draws = {
        "dropout of data": lambda p, x: F.dropout(x, 0.5).sum(),
        "dropout of activations": lambda p, x: F.dropout(x + 0 * p, 0.5).sum(),
        "numbers": lambda p, x: torch.randn(3).sum(),
        "like data": lambda p, x: torch.rand_like(x).sum(),
        "like parameters": lambda p, x: torch.randn_like(p).sum(),
    }
    for what, draw in draws.items():
        p = nn.Parameter(torch.ones(20, 30))
        sampler = sg.SGLD([p], 0.01, num_data=20, seed=0, num_chains=20)

        def loss(params: Any, x: Tensor, draw: Any = draw) -> Tensor:
            return (params["a"] * 0).sum() + draw(params["a"], x)

        block = sg.compile_steps(sampler, loss, {"a": p}, steps=4)
        block(torch.randn(4, 30))
        losses = block(torch.randn(4, 30))
        assert all(len(row.unique()) > 10 for row in losses), what


def compare(
    loss: Any, make: Any, x: Tensor, cls: Any = sg.SGLD, **settings: Any
) -> None:
    """Compares two blocks with the same steps one by one, of chains one by one."""
    ends = []
    for is_compiled in (False, True):
        params = {name: nn.Parameter(p) for name, p in make().items()}
        given = {"num_data": 9, "seed": 0, **settings}
        sampler = cls(params.values(), 1e-3, **given)
        block = sg.compile_steps(sampler, loss, params, steps=len(x))
        number = given.get("num_chains")
        for _ in range(2):
            if is_compiled:
                block(x)
                continue
            for row in x:
                each = [params]
                if number is not None:
                    each = [{k: p[i] for k, p in params.items()} for i in range(number)]
                sum(loss(own, row) for own in each).backward()
                sampler.step()
                sampler.zero_grad()
        ends.append([p.detach() for p in params.values()])
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@graphs_without_code
def test_losses_of_constants_and_single_numbers() -> None:
    """A product of data alone, and sums of one number, for several chains."""
    features = torch.randn(5, 200, dtype=torch.float64)

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        output = (x @ features).tanh() @ params["a"]
        return output.square().mean().sum().sum() + (params["b"] - 1).square().amax()

    def make() -> dict[str, Tensor]:
        like = {"dtype": torch.float64}
        return {"a": torch.ones(8, 200, **like), "b": torch.zeros(8, **like)}

    compare(loss, make, torch.randn(2, 60, 5, dtype=torch.float64), num_chains=8)


@graphs_without_code
def test_empty_groups_and_parameters() -> None:
    p, empty = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(0, 2))
    groups = [{"params": []}, {"params": [p, empty]}, {"params": []}]
    sampler = sg.SGLD(groups, 0.1, num_data=20, seed=3)

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return (params["p"] * x).sum() + params["e"].sum()

    block = sg.compile_steps(sampler, loss, {"p": p, "e": empty}, steps=2)
    before = p.detach().clone()
    for _ in range(2):
        block(torch.ones(2, 3))
    assert int(sampler.param_groups[0]["step"]) == 4
    assert not same_bits(p.detach(), before)


@graphs_without_code
def test_changed_parameters_are_refused() -> None:
    chain = Chain(sg.SGLD)
    block = chain.block()
    block(chain.batches[:STEPS])
    chain.params["b"].requires_grad_(False)
    with pytest.raises(ValueError, match="has requires_grad=False"):
        block(chain.batches[:STEPS])
    chain.params["b"].requires_grad_(True)
    chain.sampler.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(ValueError, match="other parameters than when it was compiled"):
        block(chain.batches[:STEPS])


@NEEDS_COMPILER
def test_other_dtypes_and_strides_are_compiled_again() -> None:
    """A graph reads memory of the dtype and the strides that it was compiled for."""
    compiled, eager = Chain(sg.SGHMC), Chain(sg.SGHMC)
    block = compiled.block()

    def compare() -> None:
        for _ in range(2):
            block(compiled.batches[:STEPS])
            eager.eager(range(STEPS))
        for a, b in zip(compiled.values(), eager.values(), strict=True):
            torch.testing.assert_close(a, b)

    compare()
    for chain in (compiled, eager):
        for p in chain.params.values():
            p.data = p.data.float()
        chain.sampler.load_state_dict(copy.deepcopy(chain.sampler.state_dict()))
        chain.batches = chain.batches.float()
    compare()
    for chain in (compiled, eager):
        chain.params["b"].data = chain.params["b"].data.T.contiguous().T
    compare()


@NEEDS_COMPILER
def test_joint_updates_are_compiled_right() -> None:
    """Inductor's code of several steps, each of which reads all directions."""
    model = nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 1)).double()

    def make() -> dict[str, Tensor]:
        return dict(copy.deepcopy(model).named_parameters())

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, params, (x,)).square().mean()

    x = torch.linspace(-3, 3, 20, dtype=torch.float64)[:, None].expand(5, 20, 1)
    compare(loss, make, x, cls=sg.MCLMC)


@graphs_without_code
@pytest.mark.parametrize("num_chains", [None, 9])
def test_noise_has_the_order_of_a_step(num_chains: int | None) -> None:
    """Tensors are dense in another order, or not dense."""
    more = {} if num_chains is None else {"num_chains": num_chains}
    compiled, eager = Chain(sg.SGHMC, **more), Chain(sg.SGHMC, **more)
    block = compiled.block()
    for change in (
        lambda p: p.transpose(-1, -2).contiguous().transpose(-1, -2),
        lambda p: p.repeat_interleave(2, -1)[..., ::2],
        lambda p: p.movedim(0, -1).contiguous().movedim(-1, 0),
    ):
        for chain in (compiled, eager):
            chain.params["b"].data = change(chain.params["b"].data)
        for _ in range(2):
            block(compiled.batches[:STEPS])
            eager.eager(range(STEPS))
        assert_equal(compiled, eager)


@graphs_without_code
def test_state_of_another_dtype_is_an_error_as_in_a_step() -> None:
    chain = Chain(sg.SGHMC)
    block = chain.block()
    block(chain.batches[:STEPS])
    for state in chain.sampler.state.values():
        state["momentum"] = state["momentum"].float()
    with pytest.raises(RuntimeError, match=r"must be of torch\.float64"):
        block(chain.batches[:STEPS])


class Counting(sg.SGLD):
    """A sampler that does more than its class in each step."""

    def step(self, closure: Any = None) -> Any:
        """Makes a step."""
        return super().step(closure)


class Renamed(sg.SGLD):
    """A sampler that does what its class does."""


def test_a_step_of_a_subclass_is_not_left_out() -> None:
    Chain(Renamed).block()
    with pytest.raises(ValueError, match=r"Counting overrides step\(\)"):
        Chain(Counting).block()


def test_rules_know_all_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that an operator gets and its rule does not know is refused."""
    chain = Chain(sg.SGLD)
    chain.block()
    spec = OP_SPECS["sgld_step_"]
    more = {**spec, "numbers": [*spec["numbers"], {"name": "curvature"}]}
    monkeypatch.setitem(OP_SPECS, "sgld_step_", more)
    with pytest.raises(ValueError, match="SGLD cannot be compiled"):
        chain.block()


SLICES = {
    "after": lambda o: o[:, 1:],
    "last": lambda o: o[..., -2:],
    "every": lambda o: o[:, ::2],
    "beyond": lambda o: o[:, -9:99],
    "of rows": lambda o: o[1:] - o[:-1],
    "one": lambda o: o[:, -1] * o[0, 0],
    "parts": lambda o: torch.cat([*o.split([1, 2], 1), *o.chunk(2, -1)], -1),
    "put in": lambda o: torch.slice_scatter(o, o[:1].cos(), 0, -2, -1),
}


@graphs_without_code
@pytest.mark.parametrize("of", SLICES)
def test_slices_of_chains(of: str) -> None:
    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return SLICES[of](params["a"] * x).sin().sum()

    start = torch.linspace(0, 1, 72, dtype=torch.float64).view(8, 3, 3)
    x = torch.linspace(1, 2, 6, dtype=torch.float64).view(2, 3, 1)
    compare(loss, lambda: {"a": start.clone()}, x, num_chains=8)


@graphs_without_code
def test_a_bad_setting_changes_nothing() -> None:
    chain = Chain(sg.SGHMC)
    block = chain.block(1)
    block(chain.batches[:1])
    group, before = chain.sampler.param_groups[0], chain.values()
    for changes in ({"lr": float("nan")}, {"lr": -0.1}, {"num_data": 0.0}):
        kept = {key: group[key] for key in changes}
        group.update(changes)
        with pytest.raises(ValueError, match="Invalid"):
            block(chain.batches[:1])
        group.update(kept)
    assert all(map(same_bits, chain.values(), before))


@graphs_without_code
def test_a_monitor_observes_single_steps() -> None:
    compiled, eager = chains = [Chain(sg.SGHMC) for _ in range(2)]
    monitors = [sg.TemperatureMonitor(chain.sampler, every=7) for chain in chains]
    empty = monitors[0].state_dict()["series"]
    block = compiled.block()
    for k in range(6):
        block(compiled.batches[k * STEPS : (k + 1) * STEPS])
        eager.eager(range(k * STEPS, (k + 1) * STEPS))
    assert_equal(compiled, eager)
    series = [monitor.state_dict()["series"] for monitor in monitors]
    assert series[0] != empty
    monitors[0].detach()
    sg.TemperatureMonitor(compiled.sampler, every=STEPS)
    with pytest.raises(ValueError, match="observes every 3 steps, and so one of each"):
        block(compiled.batches[:STEPS])
    torch.testing.assert_close(*series, rtol=1e-9, atol=1e-12)


@graphs_without_code
@pytest.mark.parametrize("num_chains", [None, 9])
def test_tuning_ends_within_a_block(num_chains: int | None) -> None:
    more = {} if num_chains is None else {"num_chains": num_chains}
    chains = [Chain(sg.MCLMC, tune_steps=50, **more) for _ in range(2)]
    compiled, eager = chains
    for chain in chains:
        chain.batches = torch.ones(84, 5, dtype=torch.float64)
    block = compiled.block(28)
    for k in range(3):
        block(compiled.batches[:28])
        eager.eager(range(k * 28, (k + 1) * 28))
        assert_equal(compiled, eager)
        one, other = (chain.sampler.param_groups[0] for chain in chains)
        for key in ("lr", "momentum"):
            assert one[key] == pytest.approx(other[key], rel=1e-12)
        errors = [chain.sampler.energy_error for chain in chains]
        assert errors[0] == pytest.approx(errors[1], rel=1e-9, nan_ok=True)
    assert one["tuning"] == []
    assert errors[0] > 0


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lr": ({"lr": 1e-3}, {"lr": 0.05}),
    "T": ({"temperature": 0.0}, {"temperature": 1.0}),
    "noise": ({"noise_estimate": 0.0}, {"noise_estimate": 0.02}),
}


@graphs_without_code
@pytest.mark.parametrize("change", CHANGES)
def test_a_single_step_between_blocks_is_noticed(change: str) -> None:
    """Its settings are set back before the next block."""
    options = {"noise_estimate": 0.02} if change == "noise" else {}
    compiled, eager = (Chain(sg.SGHMC, **options) for _ in range(2))
    block = compiled.block()
    # One after the other: a sampler that takes turns with its twin checks all anew.
    for chain in (compiled, eager):
        for k, setting in enumerate([{}, {}, *CHANGES[change], {}]):
            for group in chain.sampler.param_groups:
                group.update(setting)
            rows = range(k * STEPS, (k + 1) * STEPS)
            if chain is eager or k == 2:
                chain.eager(rows)
            else:
                block(chain.batches[rows.start : rows.stop])
    assert_equal(compiled, eager)


@graphs_without_code
def test_a_resting_group_stays() -> None:
    compiled, eager = Chain(sg.SGHMC), Chain(sg.SGHMC)
    for chain in (compiled, eager):
        chain.sampler.param_groups[1]["lr"] = 0.0
    block = compiled.block()
    for k in range(3):
        if k == 2:
            for chain in (compiled, eager):
                chain.sampler.param_groups[1]["lr"] = 0.03
        rows = range(k * STEPS, (k + 1) * STEPS)
        block(compiled.batches[rows.start : rows.stop])
        eager.eager(rows)
        assert_equal(compiled, eager)


@graphs_without_code
def test_a_parameter_under_two_names_has_the_sum_of_their_gradients() -> None:

    def tied(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return (params["a"] * x).sum() + 2 * (params["tied"] * x).sum()

    x = torch.randn(STEPS, 5)
    ends = []
    for is_compiled in (False, True):
        p = nn.Parameter(torch.ones(5))
        sampler = sg.SGLD([p], 0.1, num_data=20, seed=3)
        block = sg.compile_steps(sampler, tied, {"a": p, "tied": p}, steps=STEPS)
        for _ in range(2):
            if is_compiled:
                block(x)
                continue
            for row in x:
                p.grad = 3 * row
                sampler.step()
        ends.append(p.detach().clone())
    torch.testing.assert_close(ends[1], ends[0])


@graphs_without_code
@pytest.mark.parametrize("cls", [sg.SGLD, sg.SGLRW, sg.SGHMC, sg.PSGLD, sg.MCLMC])
@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite(
    policy: str, cls: type[sg.Sampler], bad: float
) -> None:
    """The block ends, or goes on, as single steps do."""
    more = {"gamma": False} if cls is sg.PSGLD else {}
    chain, eager = (Chain(cls, nonfinite=policy, **more) for _ in range(2))
    for each in (chain, eager):
        each.batches[STEPS + 1, 2] = bad
    block = chain.block()
    block(chain.batches[:STEPS])
    eager.eager(range(STEPS))
    for advance in (
        lambda: block(chain.batches[STEPS : 2 * STEPS]),
        lambda: eager.eager(range(STEPS, 2 * STEPS)),
    ):
        if policy == "raise":
            with pytest.raises(RuntimeError, match="not finite"):
                advance()
        else:
            advance()
    assert chain.sampler.num_skipped == eager.sampler.num_skipped
    assert_equal(chain, eager)
    chain.block()(chain.batches[:STEPS])
    eager.eager(range(STEPS))
    assert_equal(chain, eager)


def network(hidden: tuple[int, ...], kind: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    sizes = (2, *hidden, 3)
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), kind()]
    return nn.Sequential(*layers[:-1])


def by_classes(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y)


def by_squares(output: Tensor, y: Tensor) -> Tensor:
    return (output - y[:, None]).square().mean()


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("cls", "steps", "num_chains", "hidden", "of"),
    [
        (sg.SGHMC, 2, None, (6,), by_squares),
        (sg.SGHMC, 2, 9, (6,), by_classes),
        pytest.param(sg.MCLMC, 20, None, (6,), by_squares, marks=pytest.mark.nightly),
        pytest.param(sg.MCLMC, 20, 9, (6,), by_squares, marks=pytest.mark.nightly),
        *(
            pytest.param(sg.SGHMC, 2, *rest, marks=pytest.mark.nightly)
            for rest in (
                (None, (30, 80), by_classes),
                (21, (6, 5), by_squares),
                (9, (30, 80), by_classes),
            )
        ),
    ],
)
def test_networks(
    cls: Any, steps: int, num_chains: int | None, hidden: tuple[int, ...], of: Any
) -> None:
    """Inductor's code is the graph's, in fp32, with products fused and not."""
    torch.manual_seed(0)
    nets = [network(hidden) for _ in range(num_chains or 1)]
    base = copy.deepcopy(nets[0]).to("meta")
    x, y = torch.randn(3 * steps, 40, 2), torch.randint(3, (3 * steps, 40))

    def one(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return of(functional_call(base, params, (x,)), y)

    def make() -> tuple[dict[str, Tensor], sg.Sampler]:
        params = dict(copy.deepcopy(nets[0]).named_parameters())
        if num_chains is not None:
            params, _ = stack_module_state(nets)
        common = {"num_data": 40, "prior_precision": 1.0, "seed": 1}
        return params, cls(params.values(), 0.01, 0.9, num_chains=num_chains, **common)

    params, sampler = make()
    block = sg.compile_steps(sampler, one, params, steps=steps)
    plain, eager = make()
    whole = one if num_chains is None else vmap(one, (0, None, None))
    for k in range(3):
        rows = slice(k * steps, (k + 1) * steps)
        own = x[rows]
        if k == 2:  # the same values in other strides
            own = own.transpose(0, 1).contiguous().transpose(0, 1)
        losses = block(own, y[rows])
        for i in range(rows.start, rows.stop):
            eager.zero_grad()
            value = whole(plain, x[i], y[i])
            value.sum().backward()
            eager.step()
        torch.testing.assert_close(losses[-1], value.detach(), rtol=1e-4, atol=1e-5)
        for name, p in params.items():
            torch.testing.assert_close(p, plain[name], rtol=1e-4, atol=1e-5)


class Attention(nn.Module):
    """Attention of a sequence to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.mixes = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.mixes(x, x, x)[0]


class DotProducts(nn.Module):
    """Attention by torch's fused operator."""

    def __init__(self) -> None:
        super().__init__()
        self.mixes = nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*self.mixes(x)[None].chunk(3, -1))


class Distances(nn.Module):
    """Distances to some centres."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(x, self.centres)


LAYERS = {
    "dot products": DotProducts,
    "distances": Distances,
    "convolution": lambda: nn.Sequential(nn.Conv1d(4, 2, 2), nn.MaxPool1d(2)),
    "normalised": lambda: nn.Sequential(nn.LayerNorm(4), nn.GELU(), nn.GroupNorm(2, 4)),
    "attention": Attention,
    "recurrent": lambda: nn.GRU(4, 3, batch_first=True),
    "embedding": lambda: nn.Embedding(5, 2),
}


@graphs_without_code
@pytest.mark.parametrize("num_chains", [None, 2, 8])
@pytest.mark.parametrize("kind", LAYERS)
def test_layers(kind: str, num_chains: int | None) -> None:
    """Operations that are no products are evaluated for the chains together."""
    torch.manual_seed(0)
    nets = [LAYERS[kind]().double() for _ in range(num_chains or 1)]
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    if kind == "embedding":
        x = torch.randint(5, (2, 3, 4))

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        output = functional_call(nets[0], params, (x,))
        return (output[0] if isinstance(output, tuple) else output).sin().mean()

    def make() -> dict[str, Tensor]:
        if num_chains is not None:
            return stack_module_state(nets)[0]
        return dict(copy.deepcopy(nets[0]).named_parameters())

    compare(loss, make, x, num_chains=num_chains)


def block_of(names: str = "ab", cls: Any = sg.SGLD, **settings: Any) -> Any:
    def make(*batches: Any) -> Any:
        chain = Chain(cls, **settings)
        params = {name: chain.params[name] for name in names}
        return sg.compile_steps(chain.sampler, loss, params)(*batches)

    return make


def with_batch_norm() -> None:
    model = nn.BatchNorm1d(2)
    params = dict(model.named_parameters())
    sampler = sg.SGLD(params.values(), 0.1, num_data=2, seed=0)

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, params, (x,)).square().sum()

    sg.compile_steps(sampler, loss, params, steps=1)(torch.ones(1, 3, 2))


def with_loss(loss: Any) -> Callable[[], Any]:
    def make() -> None:
        p = nn.Parameter(torch.ones(2))
        sampler = sg.SGLD([p], 0.1, num_data=2, seed=0)
        sg.compile_steps(sampler, loss, {"a": p}, steps=1)(torch.ones(1, 2))

    return make


def in_half_precision() -> None:
    p = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    sg.compile_steps(sg.SGLD([p], 0.1, num_data=2, seed=0), loss, {"a": p})


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (block_of(cls=sg.PSGLD), ValueError, "PSGLD cannot be compiled with these"),
        (block_of(cls=sg.SGHMC, noise_estimate="online"), ValueError, "'online'"),
        (with_batch_norm, ValueError, "Invalid loss: it changes a tensor in place"),
        (with_loss(lambda p, x: p["a"] * x), ValueError, r"returned \[2\] \(must be a"),
        (
            with_loss(lambda p, x: (p["a"] * x.sum().item()).sum()),
            ValueError,
            "it reads the value of a tensor",
        ),
        (with_loss(None), TypeError, "Invalid loss or params: got NoneType and dict"),
        (in_half_precision, ValueError, "has torch.bfloat16 .*must be torch.float32"),
        (
            lambda: sg.compile_steps(torch.optim.SGD([torch.ones(1)]), loss, {}),
            TypeError,
            r"Invalid sampler: got SGD",
        ),
        (block_of("a"), ValueError, r"params: 1 that differ from the sampler's 2"),
        (
            lambda: sg.compile_steps(
                Chain(sg.SGLD).sampler, loss, Chain(sg.SGLD).params, steps=0
            ),
            ValueError,
            r"Invalid steps: 0",
        ),
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
    chain = Chain(sg.SGLD)
    block = chain.block()
    hook = chain.sampler.register_step_post_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"Invalid sampler: it has hooks"):
        block(chain.batches[:STEPS])
    hook.remove()
    of_all = register_optimizer_step_post_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"Invalid sampler: it has hooks"):
        block(chain.batches[:STEPS])
    assert int(chain.sampler.param_groups[0]["step"]) == 0
    of_all.remove()
    block(chain.batches[:STEPS])
    assert int(chain.sampler.param_groups[0]["step"]) == STEPS


@NEEDS_COMPILER
def test_a_failed_block_dates_no_estimate():
    p = nn.Parameter(torch.ones(3))
    settings = {"num_data": 10, "noise_estimate": 0.05, "seed": 1}
    sampler = sg.SGHMC([p], 0.1, 0.5, **settings)
    loss = lambda params, x: (params["p"] * x).sum()  # noqa: E731
    block = sg.compile_steps(sampler, loss, {"p": p}, steps=2)
    for _ in range(2):  # the first one makes the state
        block(torch.ones(2, 3))
    group = sampler.param_groups[0]
    group["noise_estimate"] = 0.02
    with pytest.raises(RuntimeError, match="not finite"):
        block(torch.full((2, 3), torch.nan))
    group["lr"] = 0.03
    block(torch.ones(2, 3))
    assert group["noise_estimate_settings"] == [0.02, 0.03, 1.0, 10.0]
