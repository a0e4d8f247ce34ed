"""Operators and whole training steps under torch.compile."""

import copy
import pickle
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from harness.inductor import NEEDS_COMPILER
from levels import at_levels
from operator_tensors import arguments_of, by_gradients, registered
from reference import same_bits
from short_chains import assert_same
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torch_sgmcmc as sg
from torch_sgmcmc._impl import ops as ops

pytestmark = pytest.mark.full

BACKENDS = ["aot_eager", pytest.param("inductor", marks=NEEDS_COMPILER)]
TARGET = {"lr": 0.1, "num_data": 5.0, "prior_precision": 1.0, "temperature": 1.0}
FRICTION = {"momentum": 0.9, "noise_estimate": 0.01, "resample_momentum_every": 2}


@pytest.fixture(autouse=True)
def forget_compiled_code() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def every_operator(p: Tensor, g: Tensor, v: Tensor, s: Tensor, step: Tensor) -> Tensor:
    """All operators, with ordinary computation before, between and after them."""
    stream = {"offsets": [3], "seed": 1, "step": 2}
    g = g * 2 + 1
    for op in by_gradients():
        tensors, numbers = arguments_of(op, [p], [g], [v], [])
        getattr(ops, op)(*tensors, **{**numbers, **TARGET}, **stream)
    roots = s.abs()
    ops.square_root_([roots])
    ops.gradient_variance_([g], [s], [v], weight=0.5)
    ops.control_variate_([g], [p], [v])
    thermostat = {"momentum": 0.9, "thermostat_rate": 0.01}
    ops.sgnht_step_([p], [g], [v], [s], [], **TARGET, **thermostat, **stream)
    mean, square = {"decay": 0.9, "eps": 0.1}, s * s
    lists = ([p], [g], [square], [s], [v + g], [])
    ops.psgld_step_(*lists, **TARGET, **mean, **stream)
    ops.psgld_frozen_step_([p], [g], [1 / (1 + square)], [], **TARGET, **stream)
    v = v + square + roots
    ops.sghmc_step_([p], [g], [v], [], [], **TARGET, **FRICTION, **stream)
    noise = torch.zeros_like(p)
    ops.gaussian_([noise], std=0.5, purpose=1, device_step=step, **stream)
    one = {"momentum": 0.9, "surrogate": 0, "num_chains": 1}
    ratio = ops.ewsg_log_ratio([p], [g], [noise], [v], **TARGET, **one) / 100
    accepted = ops.metropolis_decide(ratio, proposal=1, purpose=3, seed=1, step=2)
    ops.select_chains_([p], [g + 1], accepted)
    ops.hmc_momenta_([noise], [1 + square], temperature=0.7, **stream)
    move = {"kick": 0.1, "drift": 0.2, "num_data": 3.0, "prior_precision": 0.4}
    ops.hmc_leapfrog_([p], [g], [noise], [1 + square], [], **move)
    energy = ops.hmc_energy([p], [noise], [], prior_precision=0.4, num_chains=1)
    ops.sbps_place_([p], [noise], [v], time=0.01)
    sums = ops.sbps_reflection_sums([p], [g], [v], [square], weight_decay=0.1)
    turn = {"weight_decay": 0.1, "scale": 0.9, "gain": 1e-3}
    ops.sbps_reflect_([p], [g], [v], [square], **turn)
    ops.sbps_adapt_([p], [g], [square], weight_decay=0.1, decay=0.9)
    scales, along = torch.zeros_like(p), torch.zeros_like(p)
    by = {"eps": 0.1, "scale": 0.5}
    ops.sbps_precondition_([square], [v], [scales], [along], **by)
    p.add_(along / 1024)  # a power of 2: Inductor may fuse it with the sum
    total = ops.sbps_preconditioner_sum([square], eps=0.1)
    theta, anchor, d = p.double(), along.double(), s.double()
    fields = (torch.outer(d, theta)[None] / 1024, None, None)
    sizes = {"num_data": 9.0, "batch_size": 1, "num_factors": 0, "lower_bound": 0.0}
    weights, hessian_terms, numbers = ops.ecs_estimate(
        *(d, theta, anchor, anchor, *fields), temperature=0.7, **sizes
    )
    density, slope = ops.ecs_density(
        *(numbers, theta, weights, hessian_terms, theta, anchor, *fields),
        *(total.sum(), d, None, square.double()),
        temperature=0.7,
    )
    x, r = theta + 1, theta - 1
    place = ops.ecs_leapfrog_(x, r, slope, None, anchor, kick=1e-3, drift=0.3)
    ratio = ratio + (density.sum() + place.sum() + x.sum() + r.sum()) / 1e6
    line = ops.sbps_line_sums([p], [scales])
    line = line + ops.sbps_reflect_sums_([p], [g], [v], [noise], **turn)
    gauged = {"kind": 3, "weight_decay": 0.1, "decay": 1.0, "eps": 0.0}
    line = line + ops.gauge_sums([g], [p], [], [v], [noise], **gauged).sum()
    counts = ops.count_nonfinite([p / 0.0 * 0.0, g])
    sign = ops.step_or_nothing(counts, step=0, device_step=step)
    sign = ops.step_if_finite([p, g], step=0, device_step=sign + 2)
    line = line + counts.sum() * sign
    others = [torch.zeros_like(p)], [torch.zeros_like(p)]
    line = line + ops.sbps_precondition_sums_([square], [v], *others, [p], **by)
    ratio = ratio + energy + (sums.sum() + total + line.sum()) / 100
    return ops.sum_of_squares([p, noise]) + (p + noise).sum().double() + ratio[0]


def inputs(numel: int = 40) -> list[Tensor]:
    g = torch.Generator().manual_seed(numel)
    tensors = [torch.randn(numel, generator=g) for _ in range(4)]
    return [*tensors, torch.tensor(7)]


def test_every_operator_is_there() -> None:
    class Record(TorchDispatchMode):
        seen: ClassVar[set[str]] = set()

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.seen.add(func.name())
            return func(*args, **(kwargs or {}))

    with Record():
        every_operator(*inputs())
    # They answer the host, which a graph does not have.
    answers = {"any_nonfinite", "fused_step_", "deferred_step_", "ewsg_step_"}
    made = {f"torch_sgmcmc::{name}" for name in registered() - answers}
    assert made <= Record.seen


@pytest.mark.parametrize("backend", BACKENDS)
def test_operators_in_one_graph(backend: str) -> None:
    compiled = torch.compile(every_operator, backend=backend, fullgraph=True)
    expected, actual = inputs(), inputs()
    for _ in range(3):
        a, b = every_operator(*expected), compiled(*actual)
        assert_same(actual, expected)
        # Inductor may add the elements of the sum in another order.
        torch.testing.assert_close(b, a, rtol=1e-6, atol=0)


def test_operators_with_dynamic_shapes() -> None:
    compiled = torch.compile(
        every_operator, backend="aot_eager", fullgraph=True, dynamic=True
    )
    for numel in (5, 17, 130):
        expected, actual = inputs(numel), inputs(numel)
        a, b = every_operator(*expected), compiled(*actual)
        assert_same(actual, expected)
        assert same_bits(a, b)


KINDS: dict[str, tuple[type[sg.Sampler], dict[str, Any]]] = {
    "SGLD": (sg.SGLD, {}),
    "SGLD capturable": (sg.SGLD, {"capturable": True}),
    "SGHMC": (sg.SGHMC, {"resample_momentum_every": 3}),
    "SGHMC capturable": (sg.SGHMC, {"capturable": True}),
    "PSGLD": (sg.PSGLD, {"gamma": False, "eps": 0.1}),
    "PSGLD frozen": (sg.PSGLD, {"adapt": False, "eps": 0.1}),
    "PSGLD capturable": (sg.PSGLD, {"gamma": False, "eps": 0.1, "capturable": True}),
    "SGNHT": (sg.SGNHT, {"thermostat_rate": 0.05}),
    "SGNHT capturable": (sg.SGNHT, {"capturable": True}),
}


class Training:
    """A small network with its sampler and a training step."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(4, 3)
        cls, options = KINDS[kind]
        self.sampler = cls(
            self.net.parameters(), lr=0.1, num_data=10, seed=1, **options
        )

    def step(self, x: Tensor) -> Tensor:
        self.sampler.zero_grad()
        loss = self.net(x).square().mean()
        loss.backward()
        self.sampler.step()
        return loss


# Of capturable ones a step is one graph, below; of the others it is broken.
@pytest.mark.parametrize(
    "kind",
    at_levels(
        [k for k in KINDS if "capturable" not in k],
        default=["SGHMC"],
        otherwise="full",
    ),
)
def test_compiled_training_steps_are_the_same_chain(kind: str) -> None:
    # Twelve steps: past the point where dynamo stops to specialise on the counter.
    eager, compiled = Training(kind), Training(kind)
    step = torch.compile(compiled.step, backend="aot_eager")
    seen = []
    for i in range(12):
        x = torch.linspace(-1, 1, 4 * 5).view(5, 4) + 0.1 * i
        assert same_bits(step(x).detach(), eager.step(x).detach())
        assert_same(list(compiled.net.parameters()), list(eager.net.parameters()))
        seen.append(copy.deepcopy(compiled.net.weight.detach()))
    assert int(compiled.sampler.param_groups[0]["step"]) == 12
    assert len({tuple(w.flatten().tolist()) for w in seen}) == 12


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        *((kind, BACKENDS[0]) for kind in ("SGLD", "SGHMC", "PSGLD", "SGNHT")),
        pytest.param("PSGLD capturable", "inductor", marks=NEEDS_COMPILER),
    ],
)
def test_compiled_step_with_fresh_gradients(kind: str, backend: str) -> None:
    eager, compiled = Training(kind), Training(kind)
    step = torch.compile(compiled.sampler.step, backend=backend)
    for i in range(4):
        for training in (eager, compiled):
            for p in training.net.parameters():
                p.grad = torch.full_like(p, 0.1 * i)
        # Changes of hyperparameters, as by schedulers, must not be compiled away.
        for training in (eager, compiled):
            training.sampler.param_groups[0]["lr"] = 0.1 / (1 + i)
        eager.sampler.step()
        step()
        assert_same(list(compiled.net.parameters()), list(eager.net.parameters()))


@pytest.mark.parametrize("change", ["copied", "pickled", "not loaded", "replaced"])
def test_a_compiled_step_goes_by_what_the_sampler_has_now(change: str) -> None:
    trainings = Training("SGHMC capturable"), Training("SGHMC capturable")
    eager, compiled = [training.sampler for training in trainings]
    step = torch.compile(lambda: compiled.step(), backend="eager")

    def steps() -> list[Tensor]:
        for sampler, make in ((eager, eager.step), (compiled, step)):
            for p in sampler.param_groups[0]["params"]:
                p.grad = torch.ones_like(p)
            make()
        return [
            p.detach().clone()
            for sampler in (eager, compiled)
            for p in sampler.param_groups[0]["params"]
        ]

    steps(), steps()
    if change == "copied":
        eager, compiled = copy.deepcopy(eager), copy.deepcopy(compiled)
    elif change == "pickled":
        eager, compiled = (pickle.loads(pickle.dumps(s)) for s in (eager, compiled))
    elif change == "not loaded":
        for sampler in (eager, compiled):
            state_dict = copy.deepcopy(sampler.state_dict())
            state_dict["param_groups"][0]["lr"] = 1.0
            handle = sampler.register_load_state_dict_post_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                sampler.load_state_dict(state_dict)
            handle.remove()
            assert sampler.param_groups[0]["lr"] == 0.1
    else:
        for sampler in (eager, compiled):
            sampler.param_groups = [{**g, "lr": 0.5} for g in sampler.param_groups]
            state = {
                p: {k: 0 * v for k, v in s.items()} for p, s in sampler.state.items()
            }
            sampler.state = defaultdict(dict, state)
    for _ in range(3):
        found = steps()
        half = len(found) // 2
        assert_same(found[half:], found[:half])


@pytest.mark.parametrize("cls", [sg.SGHMC, sg.SGNHT])
@pytest.mark.parametrize("capturable", [False, True])
def test_a_compiled_step_rescales_momenta(
    cls: type[sg.Sampler], capturable: bool
) -> None:
    """Where lr changes between its calls, as a step that is not compiled."""

    def chain(compiles: bool) -> Tensor:
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(20, dtype=torch.float64))
        sampler = cls([p], 0.1, num_data=20, seed=3, capturable=capturable)
        step = torch.compile(sampler.step, backend="aot_eager")
        for k, lr in enumerate((0.1, 0.1, 0.1, 0.02, 0.02, 0.05)):
            sampler.param_groups[0]["lr"] = lr
            p.grad = p.detach().clone()
            (step if compiles and k > 0 else sampler.step)()
            assert sampler.param_groups[0]["momentum_settings"][0] == lr
        return p.detach()

    torch.testing.assert_close(chain(True), chain(False), rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", [k for k in KINDS if k.endswith("capturable")])
def test_a_counter_in_a_tensor_needs_no_recompilation(kind: str) -> None:
    training = Training(kind)
    step = torch.compile(training.step, backend="eager")
    x = torch.ones(5, 4)
    step(x)
    step(x)  # the first with a momentum
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for _ in range(5):
        step(x)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs > 0


@pytest.mark.parametrize("kind", [k for k in KINDS if k.endswith("capturable")])
def test_a_step_of_a_capturable_sampler_is_one_graph(kind: str) -> None:
    eager, compiled = Training(kind), Training(kind)
    step = torch.compile(compiled.sampler.step, backend="eager", fullgraph=True)
    for training, advance in ((eager, eager.sampler.step), (compiled, step)):
        for i in range(4):
            for p in training.net.parameters():
                p.grad = torch.full_like(p, 0.1 * i)
            advance()
    assert_same(list(compiled.net.parameters()), list(eager.net.parameters()))


@pytest.mark.parametrize("forward", [False, True], ids=["reverse", "forward"])
def test_a_compiled_step_that_calls_its_closure(forward: bool) -> None:
    nets, chains = [], []
    for compiled in (False, True):
        torch.manual_seed(0)
        net = nn.Linear(4, 3)
        x = torch.linspace(-1, 1, 4 * 5).view(5, 4)
        sampler = sg.SBPS(
            net.parameters(),
            num_data=10,
            prior_precision=2.0,
            seed=1,
            model=net if forward else None,
        )
        step = sampler.step
        if compiled:
            step = torch.compile(sampler.step, backend="aot_eager")
        for _ in range(24):
            step(lambda net=net, x=x: net(x).square().mean(dim=1))
        nets.append(list(net.parameters()))
        chains.append(sampler.state_dict()["param_groups"])
    assert_same(*nets)
    assert chains[0] == chains[1] and chains[0][0]["num_bounces"] > 0
