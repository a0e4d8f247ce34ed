"""CUDA gives the chain of the CPU: the operators, whole samplers, CUDA graphs.

Without a GPU the CPU takes its place, which checks the tests themselves, in all that
needs no CUDA graph; on a machine with one this fails if the library was built without
CUDA kernels. TORCH_SGMCMC_TEST_DEVICE, cpu or cuda, chooses otherwise.
"""

import copy
import os
from collections.abc import Callable
from itertools import cycle, product
from typing import Any

import pytest
import torch
from failed_steps import refused
from operator_tensors import TARGET, arguments_of, by_gradients, masters_of
from reference import DTYPES, SIZES, arithmetic, same_bits
from short_chains import ANY_DRAWS, assert_same, make, make_params, set_grads, take_step
from torch import nn

import torch_sgmcmc as sg
from torch_sgmcmc.core import ops as ops

pytestmark = pytest.mark.full

HAS_GPU = torch.cuda.is_available()
DEVICE = os.environ.get("TORCH_SGMCMC_TEST_DEVICE", "cuda" if HAS_GPU else "cpu")
needs_graphs = pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")

FRICTION = {"momentum": 0.8, "noise_estimate": 0.01}
STREAM = {"seed": -(2**40) + 77, "step": 2**33 + 4}
OFFSETS = [0, 1, 2, 3, 126, 2**34 - 130, 2**45 + 3]
Run = Callable[..., Any]


def test_the_library_has_cuda_kernels():
    assert ops.HAS_CUDA or DEVICE == "cpu"


def sghmc(p, g, v, s, m, offsets, every):
    numbers = {**TARGET, **FRICTION, "resample_momentum_every": every}
    ops.sghmc_step_(p, g, v, s, m, **numbers, offsets=offsets, **STREAM)


def psgld(p, g, v, w, h, m, offsets):
    mean = {"decay": 0.9, "eps": 1e-3}
    lists = (p, g, v, w, h, m)
    ops.psgld_step_(*lists, **TARGET, **mean, offsets=offsets, **STREAM)


def leapfrog(p, g, v, mass, m, drift):
    move = {"kick": 0.1, "num_data": 7.0, "prior_precision": 1.9}
    lists = (p, g, v, [t + 0.5 for t in mass], m)
    ops.hmc_leapfrog_(*lists, drift=drift, **move)


def run_of(op):
    def run(p, g, v, s, m, o):
        tensors, numbers = arguments_of(op, p, g, v, m)
        getattr(ops, op)(*tensors, **{**numbers, **TARGET}, offsets=o, **STREAM)

    return run


RUNS = {
    **{op: run_of(op) for op in by_gradients()},
    "square_root_": lambda p, g, v, s, m, o: ops.square_root_(s),
    "sgld_step_ about a number": lambda p, g, v, s, m, o:
     ops.sgld_step_(p, g, m, **TARGET, prior_mean=0.7, offsets=o, **STREAM),
    "sgld_step_ about means": lambda p, g, v, s, m, o:
     ops.sgld_step_(p, g, m, **TARGET, prior_means=v, offsets=o, **STREAM),
    "sgld_step_ without noise": lambda p, g, v, s, m, o:
     ops.sgld_step_(p, g, m, **{**TARGET, "temperature": 0.0}, offsets=o, **STREAM),
    "sghmc_step_": lambda p, g, v, s, m, o: sghmc(p, g, v, [], m, o, 0),
    "sghmc_step_ with variances": lambda p, g, v, s, m, o: sghmc(p, g, v, s, m, o, 0),
    "sghmc_step_ that resamples": lambda p, g, v, s, m, o: sghmc(p, g, v, [], m, o, 2),
    "sghmc_step_ that does not": lambda p, g, v, s, m, o: sghmc(p, g, v, [], m, o, 3),
    "psgld_step_": lambda p, g, v, s, m, o: psgld(p, g, s, [], [], m, o),
    "psgld_frozen_step_": lambda p, g, v, s, m, o:
     ops.psgld_frozen_step_(p, g, s, m, **TARGET, offsets=o, **STREAM),
    "psgld_step_ with gamma": lambda p, g, v, s, m, o:
     psgld(p, g, s, v, [t * 0.5 for t in g], m, o),
    "sgnht_step_": lambda p, g, v, s, m, o:
     ops.sgnht_step_(p, g, v, s, m,
     **{**TARGET, "momentum": 0.8, "thermostat_rate": 0.03}, offsets=o, **STREAM),
    "hmc_momenta_": lambda p, g, v, s, m, o:
     ops.hmc_momenta_(v, s, temperature=0.7, offsets=o, **STREAM),
    "hmc_leapfrog_": lambda p, g, v, s, m, o: leapfrog(p, g, v, [], m, 0.1),
    "hmc_leapfrog_ with masses": lambda p, g, v, s, m, o: leapfrog(p, g, v, s, m, 0.1),
    "hmc_leapfrog_ without a drift": lambda p, g, v, s, m, o:
     leapfrog(p, g, v, s, m, 0.0),
    "gradient_variance_": lambda p, g, v, s, m, o:
     ops.gradient_variance_(g, s, v, weight=0.3),
    "control_variate_": lambda p, g, v, s, m, o: ops.control_variate_(p, g, v),
    "gaussian_": lambda p, g, v, s, m, o:
     ops.gaussian_(p, std=0.7, purpose=1, offsets=o, **STREAM),
    "gaussian_ for state": lambda p, g, v, s, m, o:
     ops.gaussian_(v, std=0.7, purpose=1, offsets=o, **STREAM),
}  # fmt: skip


def misaligned(t, by):
    """The same values at an address that is `by` elements past an aligned one."""
    buffer = torch.zeros(t.numel() + by, dtype=t.dtype, device=DEVICE)
    view = buffer[by:].view(t.shape)
    return view.copy_(t)


def inputs(shapes, dtypes):
    """Parameters, gradients, momenta, (small) variances and masters on the CPU."""
    g = torch.Generator().manual_seed(0)

    def normal(size, state):
        return [
            (size * torch.randn(s, generator=g)).to(arithmetic(d) if state else d)
            for s, d in zip(shapes, dtypes, strict=True)
        ]

    p, grads = normal(1, False), normal(1, False)
    v, s = normal(0.3, True), normal(0.1, True)
    return [p, grads, v, [t.square() for t in s], masters_of(p)]


def compare(run, cpu, offsets, by):
    other = [
        [misaligned(t, (by + i) % 4 if by else 0) for i, t in enumerate(ts)]
        for ts in cpu
    ]
    run(*cpu, offsets)
    run(*other, offsets)
    for a, b in zip(cpu, other, strict=True):
        assert_same([t.cpu() for t in b], a)


@pytest.mark.parametrize("run", RUNS)
def test_operators_equal_the_cpu_bit_for_bit(run):
    is_cpu = DEVICE == "cpu"
    some = OFFSETS[4:6] if is_cpu else OFFSETS  # on the CPU test_layouts.py has all
    each = [*product(range(len(SIZES)), some, DTYPES)]
    shapes = [(SIZES[i],) for i, _, _ in each]
    offsets = [o + 64 * i for i, o, _ in each]
    for by in (1,) if is_cpu else (0, 1):  # not with itself
        cpu = inputs(shapes, [dtype for _, _, dtype in each])
        compare(RUNS[run], cpu, offsets, by)


@pytest.mark.parametrize("run", RUNS)
def test_many_tensors_of_mixed_dtypes(run):
    # More than fit in one launch (48), dtypes interleaved, some tensors empty.
    shapes = [(i % 7 * 101 + i % 3,) for i in range(333)]
    dtypes = [DTYPES[i % 4] for i in range(333)]
    compare(RUNS[run], inputs(shapes, dtypes), [1000 * i for i in range(333)], 1)


@pytest.mark.skipif(DEVICE == "cpu", reason="compares another device with the CPU")
@pytest.mark.parametrize("run", RUNS)
def test_large_tensors(run):
    # Many blocks of threads, and a tail.
    shapes = [(3_000_001,), (5,), (1_048_576,)]
    dtypes = [torch.float32, torch.float32, torch.bfloat16]
    compare(RUNS[run], inputs(shapes, dtypes), [0, 3_000_064, 2**34 - 1000], 0)


@pytest.mark.parametrize("run", RUNS)
def test_layouts(run):
    shape = (4, 5, 6, 7)
    layouts = [
        lambda t: t.to(memory_format=torch.channels_last),
        lambda t: t.transpose(0, 3).contiguous().transpose(0, 3),
        lambda t: t.repeat_interleave(2, dim=3)[..., ::2],
        lambda t: t.clone(),
    ]
    cpu = inputs([shape] * 4, [DTYPES[1], *DTYPES[1:]])
    for j, tensors in enumerate(cpu):  # every argument in another layout
        for i in range(len(tensors)):
            tensors[i] = layouts[(i + j) % 4](tensors[i])
    other = [
        [layouts[(i + j) % 4](t.to(DEVICE, copy=True)) for i, t in enumerate(ts)]
        for j, ts in enumerate(cpu)
    ]
    offsets = [0, 1000, 2001, 3002]
    RUNS[run](*cpu, offsets)
    RUNS[run](*other, offsets)
    for a, b in zip(cpu, other, strict=True):
        assert_same([t.cpu() for t in b], a)


@pytest.mark.parametrize("dtype", DTYPES)
def test_surrounding_memory_is_untouched(dtype):
    for numel in (1, 3, 4, 127, 1025, 4097):
        for lead in range(6):
            span = slice(lead, lead + numel)
            p, g = (
                torch.full((numel + 40,), torch.nan, dtype=dtype, device=DEVICE)
                for _ in range(2)
            )
            v, m = (
                torch.full_like(p, torch.nan, dtype=kind)
                for kind in (arithmetic(dtype), torch.float32)
            )
            for t in (p, g, v, m):
                t[span] = 0.5
            masters = [m[span]] if dtype.itemsize == 2 else []
            sghmc([p[span]], [g[span]], [v[span]], [], masters, [lead], 0)
            ops.gaussian_([g[span]], std=1.0, purpose=0, offsets=[lead], **STREAM)
            for t in (p, g, v, m):
                outside = torch.cat([t[:lead], t[lead + numel :]])
                assert same_bits(outside, torch.full_like(outside, torch.nan))
                assert bool(torch.isfinite(t[span]).all())


def test_counts_equal_the_cpu():
    cpu = [torch.ones(i % 7 * 1500 + i % 3).to(DTYPES[i % 4]) for i in range(200)]
    for i, t in enumerate(cpu):
        if t.numel() > 0 and i % 3 == 0:
            t[-1] = torch.nan
            t[i % t.numel()] = -torch.inf
    other = [misaligned(t, i % 4) for i, t in enumerate(cpu)]
    counts = ops.count_nonfinite(other)
    assert torch.equal(counts.cpu(), ops.count_nonfinite(cpu)) and counts.any()
    for given, step in ((counts, -1), (torch.zeros_like(counts), 12)):
        more = torch.tensor(7, device=DEVICE)
        assert int(ops.step_or_nothing(given, step=5, device_step=more)) == step
        assert int(ops.step_or_nothing(given, step=12)) == step
    for some, step in ((other, -1), (other[1:2], 12)):
        assert int(ops.step_if_finite(some, step=5, device_step=more)) == step


@pytest.mark.parametrize("choice", ["raise", "skip"])
@pytest.mark.parametrize(
    "kind", ["SGLD", "SGHMC", "SGHMC online", "PSGLD", "SGNHT", "SGNHT capturable"]
)
def test_gradients_that_are_not_finite(kind, choice):
    params = [nn.Parameter(p.detach().to(DEVICE)) for p in make_params()]
    others = [nn.Parameter(p.detach().to(DEVICE)) for p in make_params()]
    sampler, unbroken = make(kind, params, nonfinite=choice), make(kind, others)

    def poison():
        index = torch.tensor([256], device=DEVICE)
        params[2].grad = params[2].grad.index_fill(0, index, torch.nan)

    skipped = 0
    for step in range(6):
        if step in (0, 3, 4):
            try:
                take_step(sampler, params, 77, poison)
                sampler.step(lambda: pytest.fail("this belongs to the last step"))
            except RuntimeError as error:  # at once, or at the next step
                assert "1 NaN and 0 infinite of 257 elements" in str(error)
            except pytest.fail.Exception:  # left out and counted
                skipped += 1
        take_step(sampler, params, step)
        take_step(unbroken, others, step)
        assert_same(params, others)
    assert sampler.num_skipped == skipped
    assert choice == "raise" or skipped == 3


@pytest.mark.parametrize("kind", range(7))
def test_temperature_sums_equal_the_cpu_bit_for_bit(kind):
    generator = torch.Generator().manual_seed(kind)
    tensors = [
        [torch.rand(n, generator=generator) for n in (5, 0, 70_001)] for _ in range(5)
    ]
    used = [*tensors[:3], tensors[3] if 2 <= kind < 6 else []]
    used.append(tensors[4] if kind in (1, 3, 5) else [])
    numbers = {"kind": kind, "weight_decay": 0.3, "decay": 0.9, "eps": 0.1}
    on_cpu = ops.temperature_sums(*used, **numbers)
    on_device = ops.temperature_sums(
        *[[t.to(DEVICE) for t in u] for u in used], **numbers
    )
    assert same_bits(on_device.cpu(), on_cpu)


def test_sum_of_squares_equals_the_cpu_bit_for_bit():
    shapes = [*((n,) for n in SIZES), (2_000_003,), (0,), (65_536 * 16 + 1,), ()]
    for dtype in DTYPES:
        cpu = inputs(shapes, [dtype] * len(shapes))[0]
        for by in (0, 1):
            other = [misaligned(t, by) for t in cpu]
            assert same_bits(ops.sum_of_squares(other).cpu(), ops.sum_of_squares(cpu))
    empty = torch.empty(0, device=DEVICE)
    assert float(ops.sum_of_squares([empty])) == 0.0


def test_device_step():
    cpu, other = torch.empty(1000), torch.empty(1000, device=DEVICE)
    arguments = {"std": 1.0, "offsets": [5], "seed": 1, "purpose": 1}
    ops.gaussian_([cpu], **arguments, step=2**33 + 2)
    counter = torch.tensor(2**33, device=DEVICE)
    ops.gaussian_([other], **arguments, step=2, device_step=counter)
    assert same_bits(other.cpu(), cpu)


@pytest.mark.parametrize("kind", ANY_DRAWS)
def test_samplers_make_the_same_chain(kind):
    params = [
        nn.Parameter(p.detach().to(dtype))
        for p, dtype in zip(make_params(), cycle(DTYPES), strict=False)
    ]
    others = [nn.Parameter(p.detach().to(DEVICE, copy=True)) for p in params]
    sampler = make(kind, params)
    twin = make(kind, others)
    for step in range(103 if kind == "SGHMC online" else 5):
        take_step(sampler, params, step)
        take_step(twin, others, step)
        assert_same([q.cpu() for q in others], params)
        assert_same([q.grad.cpu() for q in others], [p.grad for p in params])


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_chains_of_ewsg_equal_the_cpu(dtype):
    chains = 300
    shapes = [(chains,), (chains, 3), (chains, 2, 50)]
    runs = []
    for device in ("cpu", DEVICE):
        params = [
            nn.Parameter(torch.ones(s, dtype=dtype, device=device)) for s in shapes
        ]
        sampler = sg.EWSG(
            params, **TARGET, num_chains=chains, index_chain_length=3, seed=3
        )
        g = torch.Generator().manual_seed(0)

        def closure(params=params, g=g):
            for p in params:
                noise = torch.randn(p.shape, generator=g)
                p.grad = (p.detach().cpu().float() + noise).to(p)

        for _ in range(5):
            sampler.step(closure)
        runs.append([*(p.cpu() for p in params), *(p.grad.cpu() for p in params)])
        assert 0.1 < sampler.acceptance_rate < 0.9
    assert_same(*runs)


def test_weights_equal_the_cpu_bit_for_bit():
    for chains, shapes in (
        (1, [*((n,) for n in SIZES), (2_000_003,), (0,), ()]),
        (3, [(3, n) for n in (1, 15, 16, 17, 4096, 4097, 100_000)]),
        (20_000, [(20_000,), (20_000, 2)]),
    ):
        for dtype in DTYPES:
            p, g, v, *_ = cpu = inputs(shapes, [dtype] * len(shapes))
            q, h, w, *_ = ([misaligned(t, 1) for t in ts] for ts in cpu)
            for surrogate in range(4):
                hyper = {"momentum": 0.8, "surrogate": surrogate, "num_chains": chains}
                ratio = ops.ewsg_log_ratio(p, g, p, v, **TARGET, **hyper)
                other = ops.ewsg_log_ratio(q, h, q, w, **TARGET, **hyper)
                assert same_bits(other.cpu(), ratio)
            for masses, prior in (([], 0.0), (v, 1.9)):
                hyper = {"prior_precision": prior, "num_chains": chains}
                energy = ops.hmc_energy(p, v, masses, **hyper)
                other_masses = w if masses else []
                other = ops.hmc_energy(q, w, other_masses, **hyper)
                assert same_bits(other.cpu(), energy)
            stream = {"proposal": 1, "purpose": 3, "seed": 2, "step": 3}
            ratio = ratio / ratio.abs().max()
            yes = ops.metropolis_decide(ratio, **stream)
            accepted = ops.metropolis_decide(ratio.to(DEVICE), **stream)
            assert torch.equal(accepted.cpu(), yes)
            ops.select_chains_(p, g, yes)
            ops.select_chains_(q, h, accepted)
            assert_same([t.cpu() for t in q], p)


def test_gamma_precision_equals_the_cpu():
    params = make_params()
    others = [nn.Parameter(p.detach().to(DEVICE, copy=True)) for p in params]
    drawn = [sg.GammaPrecision(make("SGLD", ps)).step() for ps in (params, others)]
    assert drawn[0] == drawn[1]


def test_a_chain_moves_between_devices():
    params = make_params()
    sampler = make("SGHMC", params)
    set_grads(params, 0)
    sampler.step()
    others = [nn.Parameter(p.detach().to(DEVICE, copy=True)) for p in params]
    twin = make("SGHMC", others, seed=9)
    twin.load_state_dict(copy.deepcopy(sampler.state_dict()))
    for step in (1, 2):
        set_grads(params, step)
        set_grads(others, step)
        for q in others:
            assert twin.state[q]["momentum"].device == q.device
        sampler.step()
        twin.step()
    assert_same([q.cpu() for q in others], params)


def on_gpu(kind):
    params = [nn.Parameter(p.detach().cuda()) for p in make_params()]
    for p in params:
        p.grad = torch.ones_like(p)
    options = {"SGHMC": {"resample_momentum_every": 3}, "PSGLD": {"gamma": False}}
    sampler = getattr(sg, kind)(
        params, lr=0.1, num_data=50, seed=5, capturable=True, **options.get(kind, {})
    )
    return params, sampler


@needs_graphs
@pytest.mark.parametrize("kind", ["SGLD", "SGHMC", "PSGLD", "SGNHT"])
def test_a_captured_step_replays_the_chain(kind):
    params, sampler = on_gpu(kind)
    expected, eager = on_gpu(kind)
    sampler.step()  # makes the state
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        for p in params:
            p.grad.copy_(p.detach())  # gradients of the graph's own making
        sampler.step()
    eager.step()
    for _ in range(8):
        graph.replay()
        for p in expected:
            p.grad = p.detach().clone()
        eager.step()
        torch.cuda.synchronize()
        assert_same(params, expected)
    assert int(sampler.param_groups[0]["step"]) == 9
    # And on without the graph.
    for p, q in zip(params, expected, strict=True):
        p.grad = q.grad = torch.ones_like(p)
    sampler.step()
    eager.step()
    assert_same(params, expected)


@needs_graphs
@pytest.mark.parametrize("kind", ["SGLD", "SGHMC", "SGNHT"])
def test_capture_is_refused_without_capturable(kind):
    params = [nn.Parameter(p.detach().cuda()) for p in make_params()]
    sampler = make(kind, params)
    for p in params:
        p.grad = torch.ones_like(p)
    sampler.step()
    before = [p.detach().clone() for p in params]
    with pytest.raises(RuntimeError) as error, torch.cuda.graph(torch.cuda.CUDAGraph()):
        sampler.step()
    assert str(error.value) == (
        f"{kind} cannot be captured in a CUDA graph: construct it with capturable=True"
    )
    torch.cuda.synchronize()
    assert_same(params, before)
    assert sampler.param_groups[0]["step"] == 1


@needs_graphs
@pytest.mark.parametrize(
    ("kind", "missing"),
    [("SGHMC", "momentum"), ("PSGLD", "square_average"), ("SGNHT", "momentum")],
)
def test_capture_is_refused_before_the_first_step(kind, missing):
    _, sampler = on_gpu(kind)
    with pytest.raises(RuntimeError) as error, torch.cuda.graph(torch.cuda.CUDAGraph()):
        sampler.step()
    assert str(error.value) == (
        f"{kind} must make one step before it is captured in a CUDA graph: a parameter "
        f"has no {missing} yet"
    )
    sampler.step()
    assert int(sampler.param_groups[0]["step"]) == 1


@needs_graphs
def test_an_operator_refuses_to_freeze_its_noise_into_a_graph():
    p, g = torch.ones(3, device="cuda"), torch.ones(3, device="cuda")
    ops.sgld_step_([p], [g], [], **TARGET, offsets=[0], **STREAM)
    before = p.clone()
    with pytest.raises(RuntimeError) as error, torch.cuda.graph(torch.cuda.CUDAGraph()):
        ops.sgld_step_([p], [g], [], **TARGET, offsets=[0], **STREAM)
    assert str(error.value).splitlines()[0] == (
        "torch_sgmcmc::sgld_step_: noise cannot be captured in a CUDA graph with a "
        "step counter on the host: give device_step (samplers: construct with "
        "capturable=True)"
    )
    torch.cuda.synchronize()
    assert torch.equal(p, before)


@needs_graphs
def test_tensors_of_several_devices_in_one_call():
    p, g = torch.ones(3, device="cuda"), torch.ones(3)
    with pytest.raises(RuntimeError) as error:
        ops.sgld_step_([p], [g], [], **TARGET, offsets=[0], **STREAM)
    assert str(error.value).splitlines()[0] == (
        "torch_sgmcmc::sgld_step_: grads[0] is on another device than the first "
        "tensor of params; call the operator once for each device"
    )
    with pytest.raises(RuntimeError) as error:
        stream = {**STREAM, "offsets": [0], "device_step": torch.tensor(1)}
        ops.sgld_step_([p], [p], [], **TARGET, **stream)
    assert str(error.value).splitlines()[0] == (
        "torch_sgmcmc::sgld_step_: device_step is on another device than the parameters"
    )
    assert p.tolist() == [1.0] * 3


@needs_graphs
@pytest.mark.parametrize("kind", ["SGLD", "SGHMC", "PSGLD", "SGNHT"])
def test_a_sampler_of_parameters_on_two_devices(kind):
    expected, mixed = make_params(), make_params()
    mixed = [
        nn.Parameter(p.detach().to("cuda" if i % 2 else "cpu"))
        for i, p in enumerate(mixed)
    ]
    sampler, twin = make(kind, expected), make(kind, mixed)
    for step in range(3):
        set_grads(expected, step)
        set_grads(mixed, step)
        sampler.step()
        twin.step()
    assert_same([q.cpu() for q in mixed], expected)


@needs_graphs
def test_a_library_without_kernels_raises(monkeypatch):
    monkeypatch.setattr("torch_sgmcmc.core.parameters.HAS_CUDA", False)
    params, sampler = on_gpu("SGLD")
    before = [p.detach().clone() for p in params]
    with refused(
        RuntimeError,
        "SGLD got parameters on a CUDA device, but torch_sgmcmc was built without "
        "CUDA kernels: reinstall it with TORCH_SGMCMC_CUDA=1",
    ):
        sampler.step()
    assert_same(params, before)
