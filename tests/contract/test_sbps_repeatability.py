"""One chain of SBPS, however it is computed: saved, in groups, by threads, in types."""

import copy
import pickle
from itertools import pairwise, product

import pytest
import torch
from reference import same_bits
from sbps_chains import Draws, make, run, two, uneven
from short_chains import assert_same, make_params
from stored_files import through_file
from torch import nn

KINDS = {
    "SBPS": {"refresh_rate": 2.0},
    "pSBPS": {"preconditioned": True, "decay": 0.8, "eps": 0.1},
    "always": {
        "preconditioned": True,
        "adapt_every_step": True,
        "decay": 0.8,
        "eps": 0.1,
    },
    "given": {"preconditioned": True, "given": uneven},
    "local": {"refresh_rate": 2.0, "observation_decay": 0.5, "num_std": 2.0},
}
each_kind = pytest.mark.parametrize("kind", KINDS)
# Each dtype, each kind, and two of them with and without masters.
each_kind_and_dtype = pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *product(("SBPS", "pSBPS"), (torch.float32, torch.bfloat16)),
        ("always", torch.float64),
        ("given", torch.float32),
        ("local", torch.float16),
    ],
)


@each_kind_and_dtype
def test_a_restored_chain_continues_bit_for_bit(kind, dtype):
    params = make_params(dtype)
    closure = Draws(params)
    sampler = make(params, sample_interval=0.05, **KINDS[kind])
    run(sampler, closure, 75)
    assert sampler.diagnostics.bounces > 3
    restarts = ("saved", "pickled", "copied")
    for restart in restarts if dtype is torch.float32 else restarts[:1]:
        if restart == "saved":
            others = [nn.Parameter(p.detach().clone()) for p in params]
            twin = make(others, seed=0)
            twin.load_state_dict(through_file(sampler.state_dict()))
        elif restart == "pickled":
            twin = pickle.loads(pickle.dumps(sampler))
            others = twin.param_groups[0]["params"]
        else:
            twin = copy.deepcopy(sampler)
            others = twin.param_groups[0]["params"]
        same = Draws(others)
        same.generator.set_state(closure.generator.get_state())
        run(sampler, closure, 15)
        run(twin, same, 15)
        assert_same(params, others)
        assert twin.diagnostics == sampler.diagnostics
        assert twin.param_groups[0]["clock"] == sampler.param_groups[0]["clock"]


@each_kind
def test_any_split_into_groups_gives_the_same_chain(kind):
    expected = make_params()
    run(make(expected, **KINDS[kind]), Draws(expected), 40)
    for cuts in ([2, 4], [1, 2, 3, 4, 5]):
        params = make_params()
        edges = [0, *cuts, len(params)]
        groups = [{"params": params[a:b]} for a, b in pairwise(edges)]
        run(make(groups, **KINDS[kind]), Draws(params), 40)
        assert_same(params, expected)


@each_kind
def test_any_number_of_threads_gives_the_same_chain(kind, set_threads):
    chains = []
    for threads in (1, 3):
        g = torch.Generator().manual_seed(1)
        p = nn.Parameter(torch.randn(90_000, generator=g))
        noise = torch.Generator().manual_seed(2)

        def closure(p=p, noise=noise):
            # Of few elements, whose sums do not depend on threads.
            scale = torch.randn(10, generator=noise)
            return scale * p[:50].sum() + 0.5 * p[50:90].square().sum()

        set_threads(threads)
        sampler = make([p], num_data=1e4, **KINDS[kind])
        for _ in range(60):
            sampler.step(closure)
        assert sampler.diagnostics.bounces > 0
        chains.append(p)
    assert same_bits(*chains)


@each_kind_and_dtype
def test_positions_are_rounded_points_of_a_line(kind, dtype):
    """A restart in a narrow type: the origin has more digits."""
    params = make_params(dtype)
    sampler = make(params, **KINDS[kind])
    run(sampler, Draws(params), 100)
    group = sampler.param_groups[0]
    assert sampler.diagnostics.bounces > 5
    for p in params:
        state = sampler.state[p]
        assert state["origin"].dtype == state["velocity"].dtype
        u = state.get("direction", state["velocity"]).double()
        exact = state["origin"].double() + group["line_time"] * u
        finfo = torch.finfo(dtype)
        work = torch.finfo(u.dtype if dtype == torch.float64 else torch.float32).eps
        terms = state["origin"].double().abs() + (group["line_time"] * u).abs()
        bound = finfo.eps * exact.abs() + 2 * work * terms + finfo.smallest_normal
        assert ((p.double() - exact).abs() <= bound).all()


def test_layouts_of_parameters_do_not_matter():
    g = torch.Generator().manual_seed(1)
    start = torch.randn(4, 3, 5, 5, generator=g)
    chains = []
    for layout in (torch.contiguous_format, torch.channels_last):
        p = nn.Parameter(start.clone().to(memory_format=layout))
        sampler = make([p])
        # The noise is numbered as the parameter lies in memory: the same velocity.
        sampler.step(Draws([p]))
        chains.append(sampler)
    a, b = (next(iter(s.state.values()))["velocity"] for s in chains)
    assert torch.equal(a.flatten(), b.permute(0, 2, 3, 1).flatten())
    for s in chains:
        run(s, Draws(s._all_params()), 30)
        (p,) = s._all_params()
        assert p.is_contiguous() != p.is_contiguous(memory_format=torch.channels_last)
        assert torch.isfinite(p).all()


def test_the_losses_come_back():
    params = two()
    kept = []
    draws = Draws(params)

    def closure():
        kept.append(draws())
        return kept[-1]

    losses = make(params).step(closure)
    assert torch.equal(losses, kept[0]) and not losses.requires_grad
