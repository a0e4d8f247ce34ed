"""Parameters that grow, shrink, are replaced or reordered, and whose noise is whose."""

import copy
from itertools import pairwise

import pytest
import torch
from every_sampler import THREE, Chain, bits
from failed_steps import refused
from torch import nn

import torch_sgmcmc as sg

each = pytest.mark.parametrize("kind", THREE)


def ranges(sampler):
    return [
        range(offset, offset + size)
        for group in sampler.param_groups
        for offset, size in zip(group["offsets"], group["sizes"], strict=True)
    ]


def are_apart(sampler):
    found = sorted(ranges(sampler), key=lambda r: r.start)
    return all(a.stop <= b.start for a, b in pairwise(found))


def forget_state(sampler, p):
    """Has its state begin anew."""
    mean = sampler.state.pop(p, {})
    assert "prior_mean" not in mean


@each
def test_a_grown_parameter_raises_before_anything_moves(kind):
    chain = Chain(kind)
    chain.run(range(2))
    p = chain.params[0]
    p.data = torch.cat([p.data, p.data])
    before = bits([chain.params, chain.sampler.state_dict()])
    name = type(chain.sampler).__name__
    for _ in range(2):
        with pytest.raises(RuntimeError) as error:
            chain.run(range(2, 3))
        text = f"{name}: parameter 0 of group 0 has {p.numel()} elements; it had "
        text += f"{p.numel() // 2} when noise offsets were assigned: call "
        assert str(error.value).startswith(f"{text}reassign_noise_offsets() after")
    assert bits([chain.params, chain.sampler.state_dict()]) == before


@each
@pytest.mark.parametrize("change", ["replaced", "appended", "removed"])
def test_so_are_other_lists(kind, change):
    chain = Chain(kind)
    chain.run(range(1))
    params = chain.sampler.param_groups[1]["params"]
    if change == "replaced":
        params[0] = nn.Parameter(torch.zeros(300, dtype=params[0].dtype))
    elif change == "appended":
        params.append(nn.Parameter(torch.zeros(3, dtype=params[0].dtype)))
    else:
        params.pop()
    with pytest.raises(RuntimeError, match=r"reassign_noise_offsets\(\) after param"):
        chain.run(range(1, 2))


def resize(sampler, p, numel):
    p.data = torch.linspace(-1, 1, numel, dtype=p.dtype)
    p.grad = None
    forget_state(sampler, p)
    sampler.reassign_noise_offsets()


@each
def test_grown_parameters_get_numbers_behind_all_others(kind):
    chain = Chain(kind)
    chain.run(range(2))
    sampler, p = chain.sampler, chain.params[0]
    used, others = set().union(*ranges(sampler)), ranges(sampler)[1:]
    end = sampler.param_groups[0]["next_offset"]
    for numel in (140, 2, 300):  # it never comes back to what it had
        resize(sampler, p, numel)
        mine, *rest = ranges(sampler)
        assert rest == others and are_apart(sampler)
        assert mine.start >= end and not used.intersection(mine)
        assert {g["next_offset"] for g in sampler.param_groups} != {end}
        used.update(mine)
        end = sampler.param_groups[0]["next_offset"]
        assert end >= mine.stop
        chain.run(range(2, 4))


@each
def test_a_sampler_built_with_the_new_sizes_resumes(kind):
    chain = Chain(kind)
    chain.run(range(2))
    resize(chain.sampler, chain.params[1], 200)
    chain.run(range(2, 4))
    saved = copy.deepcopy(chain.sampler.state_dict())
    twin = chain.twin()
    offsets = twin.sampler.param_groups[1]["offsets"]
    assert offsets != saved["param_groups"][1]["offsets"]
    twin.sampler.load_state_dict(saved)
    assert bits(twin.run(range(4, 7))) == bits(chain.run(range(4, 7)))
    assert bits(twin.sampler.state_dict()) == bits(chain.sampler.state_dict())


@each
def test_without_a_change_offsets_stay(kind):
    chain, same = Chain(kind), Chain(kind)
    for step in range(3):
        chain.run(range(step, step + 1))
        chain.sampler.reassign_noise_offsets()
    assert bits(same.run(range(3))) == bits([p.detach() for p in chain.params])
    assert bits(same.sampler.state_dict()) == bits(chain.sampler.state_dict())


def test_a_group_added_after_groups_were_reordered_is_behind_all():
    params = [nn.Parameter(torch.zeros(n)) for n in (5, 900, 7)]
    groups = [{"params": [p]} for p in params[:2]]
    sampler = sg.SGHMC(groups, lr=0.1, num_data=10, seed=0)
    sampler.param_groups.reverse()  # the first one is listed last
    sampler.add_param_group({"params": [params[2]]})
    assert are_apart(sampler)
    sampler.param_groups.pop(0)
    sampler.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert are_apart(sampler)
    assert sampler.param_groups[-1]["offsets"] == [1280]


def test_state_of_another_shape_is_refused_and_nothing_changes():
    chain = Chain("SGHMC")
    chain.run(range(2))
    p = chain.params[0]
    p.data = torch.zeros(9)
    before = copy.deepcopy(chain.sampler.param_groups[0]["offsets"])
    text = (
        "Invalid state: momentum of shape [3] for a parameter of shape [9] (put one of "
        "its shape into state[p]['momentum'], or delete it to restart it)"
    )
    with refused(ValueError, text):
        chain.sampler.reassign_noise_offsets()
    assert chain.sampler.param_groups[0]["offsets"] == before
    monitor = sg.TemperatureMonitor(chain.sampler)
    words = r"TemperatureMonitor observes .* \(detach\(\) it first"
    with pytest.raises(ValueError, match=words):
        chain.sampler.reassign_noise_offsets()
    monitor.detach()
    chain.sampler.param_groups[1]["params"].append(p)
    with pytest.raises(ValueError, match="one is listed twice"):
        chain.sampler.reassign_noise_offsets()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": [4]}, r"parameters of other sizes \(\[4\], expected \[3\]\)"),
        ({"sizes": [3, 1]}, "param group 0 has 2 parameters, expected 1"),
        ({"offsets": []}, "param group 0 has 0 offsets, expected 1"),
        ({"offsets": [64]}, "offsets: 64 in param group 0 .must be a multiple of 128"),
        ({"offsets": [-128]}, r"Invalid offsets: -128 \(must be in \[0, "),
        ({"offsets": [256]}, r"elements \[\d+, \d+\) reach beyond \d+"),
        ({"offsets": [2**40]}, r"reach beyond 512 .* before next_offset = 512"),
        ({"next_offset": 2**62}, r"Invalid next_offset: 4611686018427387904"),
        ({"next_offset": "1"}, r"Invalid next_offset: '1' \(must be an int"),
    ],
)
def test_saved_numbers_that_cannot_be(change, message):
    sampler = Chain("SGLD").sampler
    saved = copy.deepcopy(sampler.state_dict())
    before = bits(saved)
    saved["param_groups"][0].update(change)
    with pytest.raises((ValueError, TypeError), match=message):
        sampler.load_state_dict(saved)
    assert bits(sampler.state_dict()) == before


@each
def test_settings_that_are_put_back_rewind_nothing(kind):
    chain, same = Chain(kind), Chain(kind)
    counted = ("params", *chain.sampler._SPEC.progress)
    groups = chain.sampler.param_groups
    saved = [{k: v for k, v in g.items() if k not in counted} for g in groups]
    for step in range(4):
        chain.run(range(step, step + 1))
        same.run(range(step, step + 1))
        for group, values in zip(chain.sampler.param_groups, saved, strict=True):
            group.update(values)
    assert bits(chain.sampler.state_dict()) == bits(same.sampler.state_dict())
    other = Chain(kind, seed=6)
    other.run(range(2))
    theirs = chain.sampler.param_groups
    for group, their in zip(other.sampler.param_groups, theirs, strict=True):
        group.update({k: v for k, v in their.items() if k != "params"})
    with pytest.raises(RuntimeError, match="was replaced"):
        other.sampler.reassign_noise_offsets()
    assert other.sampler.seed == 6


@pytest.mark.parametrize("kind", ["SGHMC", "EWSG", "HMC"])
def test_chains_in_one_tensor(kind):
    """Chains with a seed each are numbered as one; other chains together."""
    p = nn.Parameter(torch.zeros(3, 200))
    options = {"HMC": {"step_size": 0.1, "num_steps": 2}}.get(kind, {"lr": 0.1})
    sampler = getattr(sg, kind)([p], num_data=10, num_chains=3, seed=0, **options)
    draws = iter(range(100))

    def closure():
        p.grad = torch.full_like(p, float(next(draws)))
        return p.detach().square().sum(1)

    sampler.step(closure)
    assert sampler.param_groups[0]["sizes"] == [200 if kind == "SGHMC" else 600]
    p.data = torch.zeros(3, 201)
    with pytest.raises(RuntimeError, match=r"call reassign_noise_offsets\(\)"):
        sampler.step(closure)
    forget_state(sampler, p)
    p.grad = None
    sampler.reassign_noise_offsets()
    sampler.step(closure)
    assert sampler.param_groups[0]["sizes"] == [201 if kind == "SGHMC" else 603]
