"""Operators and whole training steps under torch.compile."""

import copy
import pickle
from collections import defaultdict

import pytest
import torch
from harness.inductor import NEEDS_COMPILER
from levels import at_levels
from operator_tensors import arguments_of, by_gradients
from reference import same_bits
from short_chains import assert_same
from torch import nn

import torch_sgmcmc as sg
from torch_sgmcmc.core import ops as ops

pytestmark = pytest.mark.full

BACKENDS = ["aot_eager", pytest.param("inductor", marks=NEEDS_COMPILER)]
TARGET = {"lr": 0.1, "num_data": 5.0, "prior_precision": 1.0, "temperature": 1.0}
FRICTION = {"momentum": 0.9, "noise_estimate": 0.01, "resample_momentum_every": 2}


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def some_operators(p, g, v, s, step):
    """Operators of each kind, with ordinary computation before, between and after them.

    Each operator by itself is traced in test_opcheck.
    """
    stream = {"offsets": [3], "seed": 1, "step": 2}
    g = g * 2 + 1
    for op in by_gradients():
        tensors, numbers = arguments_of(op, [p], [g], [v], [])
        getattr(ops, op)(*tensors, **{**numbers, **TARGET}, **stream)
    ops.gradient_variance_([g], [s], [v], weight=0.5)
    ops.sghmc_step_([p], [g], [v], [], [], **TARGET, **FRICTION, **stream)
    noise = torch.zeros_like(p)
    ops.gaussian_([noise], std=0.5, purpose=1, device_step=step, **stream)
    one = {"momentum": 0.9, "surrogate": 0, "num_chains": 1}
    ratio = ops.ewsg_log_ratio([p], [g], [noise], [v], **TARGET, **one) / 100
    accepted = ops.metropolis_decide(ratio, proposal=1, purpose=3, seed=1, step=2)
    ops.select_chains_([p], [g + 1], accepted)
    turn = {"weight_decay": 0.1, "scale": 0.9, "gain": 1e-3}
    line = ops.sbps_reflect_sums_([p], [g], [v], [noise], **turn)
    counts = ops.count_nonfinite([p / 0.0 * 0.0, g])
    sign = ops.step_or_nothing(counts, step=0, device_step=step)
    ratio = ratio + (line.sum() + counts.sum() * sign) / 100
    return ops.sum_of_squares([p, noise]) + (p + noise).sum().double() + ratio[0]


def inputs(numel=40):
    g = torch.Generator().manual_seed(numel)
    tensors = [torch.randn(numel, generator=g) for _ in range(4)]
    return [*tensors, torch.tensor(7)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_operators_in_one_graph(backend):
    compiled = torch.compile(some_operators, backend=backend, fullgraph=True)
    expected, actual = inputs(), inputs()
    for _ in range(3):
        a, b = some_operators(*expected), compiled(*actual)
        assert_same(actual, expected)
        # Inductor may add the elements of the sum in another order.
        torch.testing.assert_close(b, a, rtol=1e-6, atol=0)


def test_operators_with_dynamic_shapes():
    compiled = torch.compile(
        some_operators, backend="aot_eager", fullgraph=True, dynamic=True
    )
    for numel in (5, 17, 130):
        expected, actual = inputs(numel), inputs(numel)
        a, b = some_operators(*expected), compiled(*actual)
        assert_same(actual, expected)
        assert same_bits(a, b)


KINDS = {
    "SGLD": (sg.SGLD, {}),
    "SGLD capturable": (sg.SGLD, {"capturable": True}),
    "SGHMC": (sg.SGHMC, {"resample_momentum_every": 3}),
    "SGHMC capturable": (sg.SGHMC, {"capturable": True}),
    "SGHMC capturable with G": (
        sg.SGHMC,
        {"capturable": True, "preconditioner": [0.5, 2.0]},
    ),
    "PSGLD": (sg.PSGLD, {"gamma": False, "eps": 0.1}),
    "PSGLD frozen": (sg.PSGLD, {"adapt": False, "eps": 0.1}),
    "PSGLD capturable": (sg.PSGLD, {"gamma": False, "eps": 0.1, "capturable": True}),
    "MCLMC": (sg.MCLMC, {}),
    "MCLMC capturable": (sg.MCLMC, {"capturable": True}),
    "SGNHT": (sg.SGNHT, {"thermostat_rate": 0.05}),
    "SGNHT capturable": (sg.SGNHT, {"capturable": True}),
}


class Training:
    """A small network with its sampler and a training step."""

    def __init__(self, kind):
        torch.manual_seed(0)
        self.net = nn.Linear(4, 3)
        cls, options = KINDS[kind]
        self.sampler = cls(
            self.net.parameters(), lr=0.1, num_data=10, seed=1, **options
        )

    def step(self, x):
        self.sampler.zero_grad()
        loss = self.net(x).square().mean()
        loss.backward()
        self.sampler.step()
        return loss


# Of capturable ones a step is one graph, below; of the others it is broken.
@pytest.mark.parametrize(
    "kind",
    at_levels(
        [k for k in KINDS if "capturable" not in k], default=["SGHMC"], otherwise="full"
    ),
)
def test_compiled_training_steps_are_the_same_chain(kind):
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
    ("kind", "options"),
    [
        *((kind, {"backend": "aot_eager"}) for kind in KINDS if "capt" not in kind),
        *((kind, {"fullgraph": True}) for kind in KINDS if "capturable" in kind),
        pytest.param("PSGLD capturable", {"backend": "inductor"}, marks=NEEDS_COMPILER),
    ],
)
def test_compiled_step_with_fresh_gradients(kind, options):
    """One graph, where the sampler is capturable."""
    eager, compiled = Training(kind), Training(kind)
    traced = torch.compile(compiled.sampler.step, **{"backend": "eager", **options})
    for i in range(4):
        # Blank state breaks the first graph.
        step = compiled.sampler.step if kind.endswith("G") and not i else traced
        for training in (eager, compiled):
            for p in training.net.parameters():
                p.grad = torch.full_like(p, 0.1 * i)
            # Changes of hyperparameters, as by schedulers, must not be compiled away.
            if "fullgraph" not in options:  # which rounds rescaled momenta otherwise
                training.sampler.param_groups[0]["lr"] = 0.1 / (1 + i)
        eager.sampler.step()
        step()
        assert_same(list(compiled.net.parameters()), list(eager.net.parameters()))
    records = [
        t.sampler.param_groups[0].get("momentum_settings") for t in (eager, compiled)
    ]
    assert records[0] == records[1] != []


def test_a_compiled_step_moves_an_unfrozen_parameter():
    training = Training("SGLD capturable")
    step = torch.compile(training.sampler.step, backend="eager")
    bias, places = training.net.bias.requires_grad_(False), []
    for i in range(6):
        bias.requires_grad_(i >= 3)
        for p in training.net.parameters():
            p.grad = torch.ones_like(p) if p.requires_grad else None
        step()
        places.append(bias.tolist())
    assert places[0] == places[2] != places[3] != places[5]


def test_a_compiled_first_step_replaces_blank_momenta():
    means = [torch.zeros(3, 4), torch.zeros(3)]
    trainings = Training("SGHMC capturable"), Training("SGHMC capturable")
    found = []
    for training, compiles in zip(trainings, (False, True), strict=True):
        params = [*training.net.parameters()]
        settings = {"capturable": True, "prior_mean": means, "seed": 1}
        sampler = sg.SGHMC(params, lr=0.1, num_data=10, **settings)
        step = (
            torch.compile(sampler.step, backend="eager") if compiles else sampler.step
        )
        for p in params:
            p.grad = torch.zeros_like(p)
        step()
        found.append(params)
    assert_same(*found)


@pytest.mark.parametrize("change", ["copied", "pickled", "not loaded", "replaced"])
def test_a_compiled_step_reads_current_settings(change):
    trainings = Training("SGHMC capturable"), Training("SGHMC capturable")
    eager, compiled = [training.sampler for training in trainings]
    step = torch.compile(lambda: compiled.step(), backend="eager")

    def steps():
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
def test_a_compiled_step_rescales_momenta(cls, capturable):
    """A compiled step equals an eager one when lr changes between calls."""

    def chain(compiles):
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
def test_a_counter_in_a_tensor_needs_no_recompilation(kind):
    training = Training(kind)
    step = torch.compile(training.step, backend="eager")
    x = torch.ones(5, 4)
    step(x)
    step(x)  # the first with a momentum
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for _ in range(5):
        step(x)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs > 0


@pytest.mark.parametrize("forward", [False, True], ids=["reverse", "forward"])
def test_a_compiled_step_that_calls_its_closure(forward):
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
