"""Frozen parameters are not sampled; gradients missing in some steps warn."""

import math

import pytest
import torch
from every_sampler import THREE, Chain, bits
from torch import nn

import torch_sgmcmc as sg

each = pytest.mark.parametrize("kind", [*THREE, "SBPS", "HMCECS"])


@each
def test_a_frozen_parameter_does_not_move(kind):
    chain = Chain(kind)
    chain.run(range(2))
    frozen = chain.params[0]
    frozen.requires_grad_(False)
    # As zero_grad(set_to_none=False) leaves it.
    frozen.grad = torch.zeros_like(frozen)
    before = frozen.detach().clone()
    others = [p.detach().clone() for p in chain.params[1:]]
    chain.run(range(2, 12))
    assert torch.equal(frozen, before)
    moved = [torch.equal(p, q) for p, q in zip(chain.params[1:], others, strict=True)]
    assert not all(moved)


def test_precisions_of_frozen_layers():
    # λ ~ Gamma(501, 1 + 500): about 1.0; with the frozen 10⁵ zeros about 100.
    p = nn.Parameter(torch.randn(1000, generator=torch.Generator().manual_seed(0)))
    frozen = nn.Parameter(torch.zeros(100_000), requires_grad=False)
    sampler = sg.SGLD([frozen, p], lr=0.1, num_data=10, prior_precision=1.0, seed=0)
    (drawn,) = sg.GammaPrecision(sampler).step()
    expected = 501 / (1 + float(p.detach().square().sum()) / 2)
    assert abs(drawn / expected - 1) < 6 / math.sqrt(501)
    assert "Group 0, 1,000 parameters" in sampler.target_summary()


def test_temperatures_of_frozen_layers():
    def read(frozen):
        p = nn.Parameter(torch.ones(50))
        other = nn.Parameter(torch.full((70,), 9.0), requires_grad=False)
        params = [p, other] if frozen else [p]
        sampler = sg.SGHMC(params, lr=0.1, num_data=10, seed=0)
        monitor = sg.TemperatureMonitor(sampler, every=1)
        for _ in range(60):
            p.grad, other.grad = p.detach().clone(), torch.zeros(70)
            sampler.step()
        return monitor.all(), monitor.group(0)

    assert repr(read(True)) == repr(read(False))


def heads(**options):
    named = [("a", nn.Parameter(torch.zeros(2))), ("b", nn.Parameter(torch.zeros(3)))]
    sampler = sg.SGHMC(named, lr=0.1, num_data=10, seed=0, **options)
    return [p for _, p in named], sampler


def turns(params, sampler, which):
    """A step for each letter, in which the parameters it names have a gradient."""
    for letter in which:
        for p, name in zip(params, "ab", strict=True):
            has_one = letter in (name, "+")
            p.grad = torch.ones_like(p) if has_one else None
        sampler.step()


@pytest.mark.parametrize(
    ("steps", "who", "how_often"),
    [
        ("aba", "parameter 'a'", "in 1 of 3 steps"),
        ("++b+b", "parameter 'a'", "in 1 of 4 steps"),
        ("a" + 20 * "b", "parameter 'a'", "in 20 of 21 steps"),
        ("bbb+a+", "parameter 'b'", "in 1 of 6 steps"),
        ("+.+", "parameter 'a' (and 1 more)", "in 1 of 3 steps"),
    ],
)
@pytest.mark.filterwarnings("ignore:SGHMC has counted a step in which no")
def test_gradients_in_some_steps_warn_once(steps, who, how_often):
    params, sampler = heads()
    with pytest.warns(UserWarning, match="got no gradient") as record:
        turns(params, sampler, steps)
        turns(params, sampler, "abab" + 30 * "a" + "b")
    (found,) = [r for r in record if "got no gradient" in str(r.message)]
    text = str(found.message)
    start = (
        f"SGHMC got no gradient (None) for {who} {how_often}, and skipped it in them"
    )
    assert text.startswith(f"{start}. That samples another target")
    assert "zero_grad(set_to_none=False)" in text
    assert found.filename == __file__


@pytest.mark.parametrize("steps", ["+++", "aaaa", "aaa+++", "+" + 19 * "a"])
@pytest.mark.usefixtures("no_warnings")
def test_harmless_missing_gradients_do_not_warn(steps):
    turns(*heads(), steps)


@pytest.mark.usefixtures("no_warnings")
def test_unfrozen_layers_do_not_warn():
    params, sampler = heads()
    for on in (False, True, False, True):
        params[1].requires_grad_(on)
        for _ in range(25):
            params[0].grad = torch.ones(2)
            params[1].grad = torch.ones(3) if on else None
            sampler.step()


@pytest.mark.parametrize("kind", ["SGLD", "SGHMC", "PSGLD", "SGNHT"])
def test_a_missing_backward_warns_once(kind):
    p = nn.Parameter(torch.ones(3))
    sampler = getattr(sg, kind)([p], lr=0.1, num_data=10, seed=0)
    with pytest.warns(UserWarning) as record:
        for _ in range(3):
            sampler.step()
    assert [str(r.message) for r in record] == [
        f"{kind} has counted a step in which no parameter had a gradient (of those "
        "that require one): nothing has moved. Was backward() forgotten, or "
        "zero_grad() called after it?"
    ]
    assert record[0].filename == __file__
    assert torch.equal(p, torch.ones(3)) and sampler.param_groups[0]["step"] == 3


def test_so_is_a_frozen_model():
    p = nn.Parameter(torch.ones(3), requires_grad=False)
    p.grad = torch.zeros(3)
    with pytest.warns(UserWarning, match="no parameter had a gradient"):
        sg.SGLD([p], lr=0.1, num_data=10).step()


@pytest.mark.usefixtures("no_warnings")
def test_a_saved_chain_resumes_without_warning():
    chain = Chain("SGHMC")
    chain.run(range(2))
    twin = chain.twin()
    twin.sampler.load_state_dict(chain.sampler.state_dict())
    went_on = twin.run(range(2, 5))
    assert bits(went_on) == bits(Chain("SGHMC").run(range(5)))
