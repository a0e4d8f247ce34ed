"""The same seed gives the same chain, bit for bit, however computed or resumed."""

import copy
import pickle
import subprocess
import sys
from itertools import cycle, pairwise, product
from pathlib import Path

import pytest
import short_chains as short
import torch
from fingerprint import operators
from reference import assert_same_bits, same_bits
from stored_files import through_file
from torch import nn

import torch_sgmcmc as sg

each = pytest.mark.parametrize("kind", [*short.THREE, "EWSG"])


@pytest.mark.parametrize(
    "sizes",
    [[300_001], [50, 5000, 1, 0, 333, 4096] * 12, [70_000, 3, 90_001]],
    ids=["one big", "many small", "uneven"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_number_of_threads_gives_the_same_bits(sizes, dtype, set_threads):
    set_threads(1)
    expected = operators(dtype, sizes)
    for threads in (2, 3):
        set_threads(threads)
        short.assert_same(operators(dtype, sizes), expected)


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_two_threads_are_at_work():
    # A fresh process that runs nothing but the operator: the threads that are there
    # afterwards, and not before, are the operator's. Their processor time, where the
    # kernel tells it, shows that they took part.
    program = """
import os, torch
from torch_sgmcmc.core.ops import gaussian_
def threads():
    return {int(t) for t in os.listdir("/proc/self/task")}
def has_worked(thread):
    file = f"/proc/self/task/{thread}/schedstat"
    return not os.path.exists(file) or int(open(file).read().split()[0]) > 0
for count in (1, 3):
    torch.set_num_threads(count)
    out = torch.empty(1 << 22)
    before = threads()
    gaussian_([out], std=1.0, offsets=[0], seed=0, step=0, purpose=0)
    new = threads() - before
    print(count, len(new), all(map(has_worked, new)))
"""
    process = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parent,  # where the checkout does not hide what is installed
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.stdout.split("\n")[:2] == ["1 0 True", "3 2 True"], process.stderr


@each
def test_any_split_into_groups_gives_the_same_chain(kind):
    expected = short.make_params()
    short.advance(short.make(kind, expected), expected, range(8))
    for cuts in ([1], [3], [2, 4], [1, 2, 3, 4, 5]):
        params = short.make_params()
        edges = [0, *cuts, len(params)]
        groups = [{"params": params[a:b]} for a, b in pairwise(edges)]
        short.advance(short.make(kind, groups), params, range(8))
        short.assert_same(params, expected)


def drop(params):
    for p in params:
        p.grad = None


@each
def test_missing_gradients_shift_nobody_elses_noise(kind):
    expected = short.make_params()
    short.advance(short.make(kind, expected), expected, range(8))
    params = short.make_params()
    sampler = short.make(kind, params)
    start = params[2].detach().clone()
    if short.needs_closure(sampler):
        # A gradient that is missing is missing in the weights: the decisions differ.
        expected = short.make_params()
        twin = short.make(kind, expected[:2] + expected[3:])
        for group in twin.param_groups:
            known = [o for each in sampler.param_groups for o in each["offsets"]]
            del known[2]
            group["offsets"][:] = known
        for step in range(8):
            short.take_step(twin, expected, step)
    for step in range(8):
        short.take_step(sampler, params, step, lambda: drop(params[2:3]))
    assert same_bits(params[2], start)
    assert sampler.state.get(params[2], {}).keys() <= {"step", "prior_mean"}
    short.assert_same(params[:2] + params[3:], expected[:2] + expected[3:])


def test_a_gradient_that_comes_and_goes():
    # While its gradient is missing, nothing of a parameter moves; its noise later
    # is that of the later steps.
    params, others = short.make_params(), short.make_params()
    a, b = short.make("SGHMC", params), short.make("SGHMC", others)
    for step in range(6):
        short.set_grads(params, step)
        short.set_grads(others, step)
        if step in (1, 2):
            params[0].grad = None
            kept = params[0].detach().clone(), a.state[params[0]]["momentum"].clone()
        a.step()
        b.step()
        if step in (1, 2):
            assert same_bits(params[0], kept[0])
            assert same_bits(a.state[params[0]]["momentum"], kept[1])
    assert not torch.equal(params[0], others[0])
    short.assert_same(params[1:], others[1:])


@pytest.mark.parametrize("kind", [*short.THREE, "EWSG", "SGNHT"])
def test_frozen_parameters(kind):
    net, twin = (nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2)) for _ in range(2))
    twin.load_state_dict(net.state_dict())
    x = torch.linspace(-1, 1, 15).view(3, 5)
    net[0].requires_grad_(False)
    before = [p.detach().clone() for p in net[0].parameters()]
    for model in (net, twin):
        sampler = short.make(kind, model.parameters())

        def closure(model=model):
            model.zero_grad()
            loss = torch.rand(()) * model(x).square().mean()
            loss.backward(create_graph=kind == "PSGLD")
            # As zero_grad(set_to_none=False) leaves it, or none.
            net[0].weight.grad = torch.zeros_like(net[0].weight)
            if model is twin:
                drop(list(twin[0].parameters()))
            return loss

        torch.manual_seed(0)
        for _ in range(4):
            if short.needs_closure(sampler):
                sampler.step(closure)
            else:
                closure()
                sampler.step()
    short.assert_same(list(net[0].parameters()), before)
    short.assert_same(list(net.parameters()), list(twin.parameters()))


@pytest.mark.parametrize("kind", [*short.THREE, "EWSG", short.WITH_MEANS])
def test_a_group_added_later_has_the_noise_of_an_original_group(kind):
    # Compared with a sampler that had the group from the start, without gradients.
    early, late = short.make_params(), short.make_params()
    a = short.make(kind, [{"params": early[:2]}, {"params": early[2:]}])
    b = short.make(kind, [{"params": late[:2]}])
    for step in range(8):
        if step == 4:
            groups = [{"params": late[2:]}]
            b.add_param_group(
                *(short.with_means(groups) if kind == short.WITH_MEANS else groups)
            )
        absent = early[2:] if step < 4 else []
        short.take_step(a, early, step, lambda absent=absent: drop(absent))
        short.take_step(b, late, step)
    short.assert_same(late, early)
    assert [int(g["step"]) for g in b.param_groups] == [8, 8]


@each
def test_seed_none_follows_manual_seed(kind):
    chains = []
    for _ in range(2):
        torch.manual_seed(17)
        params = short.make_params()
        sampler = short.make(kind, params, seed=None)
        chains.append((sampler.seed, short.advance(sampler, params, range(3))))
    (seed, first), (same_seed, second) = chains
    assert seed == same_seed
    short.assert_same(first, second)
    # The seed that was drawn is shown, and gives the same chain.
    third = short.make_params()
    short.advance(short.make(kind, third, seed=seed), third, range(3))
    short.assert_same(first, third)
    # A second sampler draws another one.
    assert short.make(kind, short.make_params(), seed=None).seed != seed


@each
def test_steps_use_no_global_random_state(kind):
    params = short.make_params()
    sampler = short.make(kind, params)
    before = torch.get_rng_state()
    short.take_step(sampler, params, 0)
    assert torch.equal(torch.get_rng_state(), before)
    others = short.make_params()
    torch.manual_seed(12345)
    short.advance(short.make(kind, others), others, range(1))
    short.assert_same(others, params)


def test_different_seeds_give_different_chains():
    chains = []
    for seed in (0, 1, -1, 2**40):
        params = short.make_params()
        chains.append(
            short.advance(short.make("SGLD", params, seed=seed), params, range(1))
        )
    for i, a in enumerate(chains):
        for b in chains[:i]:
            assert not any(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def in_groups(params):
    return [{"params": params[:2]}, {"params": params[2:]}]


def through_state_dict(params, sampler):
    state = copy.deepcopy(sampler.state_dict())
    new = [nn.Parameter(p.detach().clone()) for p in params]
    other = short.twin_of(sampler, in_groups(new))
    other.load_state_dict(state)
    return new, other


def through_torch_save(params, sampler):
    loaded = through_file({"params": params, "sampler": sampler.state_dict()})
    new = [nn.Parameter(p.detach()) for p in loaded["params"]]
    other = short.twin_of(sampler, in_groups(new))
    other.load_state_dict(loaded["sampler"])
    return new, other


def in_many_dtypes():
    """Each parameter in a dtype of its own, as far as there are any."""
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
    return [
        nn.Parameter(p.detach().to(dtype))
        for p, dtype in zip(short.make_params(), cycle(dtypes), strict=False)
    ]


# A file is the way that asks for most, and what it keeps is each sampler's own. The
# other ways are the base class's.
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *((kind, through_torch_save) for kind in short.KINDS),
        *product(
            short.THREE,
            (
                through_state_dict,
                lambda *chain: copy.deepcopy(chain),
                lambda *chain: pickle.loads(pickle.dumps(chain)),
            ),
        ),
    ],
)
def test_a_resumed_chain_continues_bit_for_bit(kind, way):
    first = 102 if kind == "SGHMC online" else 4  # the estimate in use
    params = in_many_dtypes()
    sampler = short.make(kind, in_groups(params))
    sampler.param_groups[1]["prior_precision"] = 0.5
    short.advance(sampler, params, range(first))
    resumed, other = way(params, sampler)
    assert type(other) is type(sampler)
    assert other.seed == sampler.seed
    for p, q in zip(params, resumed, strict=True):
        assert p is not q
        assert_same_bits(dict(sampler.state[p]), dict(other.state[q]))
    short.advance(sampler, params, range(first, first + 4))
    short.advance(other, resumed, range(first, first + 4))
    short.assert_same(resumed, params)
    assert [int(g["step"]) for g in other.param_groups] == [first + 4] * 2


@pytest.mark.parametrize("kind", ["SGHMC", "EWSG", "HMC"])
def test_gamma_precision_resumes_bit_for_bit(kind):
    def half(params, sampler, gibbs):
        drawn = []
        for step in range(3):
            short.advance(sampler, params, range(step, step + 1))
            drawn.append(gibbs.step())
        return drawn

    params = short.make_params()
    groups = [{"params": params[:3]}, {"params": params[3:]}]
    sampler = short.make(kind, groups)
    gibbs = sg.GammaPrecision(sampler, shape=2.0, rate=0.5)
    half(params, sampler, gibbs)
    saved = [params, sampler.state_dict(), gibbs.state_dict()]
    values, sampler_state, gibbs_state = through_file(saved)
    expected = half(params, sampler, gibbs)
    resumed = [nn.Parameter(v.detach()) for v in values]
    other = short.make(kind, [{"params": resumed[:3]}, {"params": resumed[3:]}], seed=0)
    other_gibbs = sg.GammaPrecision(other)
    other.load_state_dict(sampler_state)
    other_gibbs.load_state_dict(gibbs_state)
    assert half(resumed, other, other_gibbs) == expected
    short.assert_same(resumed, params)
    assert [g["prior_precision"] for g in other.param_groups] == expected[-1]
    # Every draw differs from every other one.
    assert len({x for pair in expected for x in pair}) == 6
