"""Rare situations in which a sampler must do what torch.optim would, or nothing."""

from __future__ import annotations

import pytest
import torch
from short_chains import ALIKE
from torch import nn

import torch_sgmcmc as sg

each = pytest.mark.parametrize("kind", [*ALIKE.values(), sg.SGHMC, sg.PSGLD, sg.SGNHT])


def parameter(n: int = 3) -> nn.Parameter:
    p = nn.Parameter(torch.zeros(n))
    p.grad = torch.ones(n)
    return p


def test_empty_groups_are_allowed() -> None:
    a, b = parameter(), parameter()
    groups = [{"params": []}, {"params": [a]}, {"params": []}]
    sampler = sg.SGLD(groups, 0.1, num_data=1, seed=0)
    sampler.add_param_group({"params": [b]})
    assert [g["offsets"] for g in sampler.param_groups] == [[], [0], [], [128]]
    groups = [{"params": [a]}, {"params": []}]
    sg.SGLD(groups, 0.1, num_data=1, capturable=True).step()


@each
def test_an_error_in_a_later_group_changes_nothing(kind: type[sg.Sampler]) -> None:
    a = parameter()
    b = parameter(5)
    options = {"gamma": False} if kind is sg.PSGLD else {}
    groups = [{"params": [a]}, {"params": [b]}]
    sampler = kind(groups, 0.1, num_data=1, seed=0, **options)
    b.data = torch.zeros(1).expand(5)
    b.grad = torch.ones(5)
    with pytest.raises(RuntimeError, match="cannot sample an expanded parameter"):
        sampler.step()
    assert a.tolist() == [0.0] * 3
    assert sampler.param_groups[0]["step"] == 0


def test_a_parameter_replaced_by_another_shape_changes_nothing() -> None:
    a, b = parameter(), parameter()
    sampler = sg.SGHMC([{"params": [a]}, {"params": [b]}], 0.1, num_data=1, seed=0)
    sampler.step()
    b.grad = None
    b.data = torch.zeros(5)
    b.grad = torch.ones(5)
    before = a.tolist()
    with pytest.raises(RuntimeError, match=r"parameter of 5 elements.* renumber\(\)"):
        sampler.step()
    b.data, b.grad = torch.zeros(1, 3), torch.ones(1, 3)
    with pytest.raises(RuntimeError, match=r"momentum of .*\[3\].*was the parameter"):
        sampler.step()
    assert a.tolist() == before
    assert sampler.param_groups[0]["step"] == 1


def test_state_of_another_shape_is_refused() -> None:
    one = sg.SGHMC([parameter(3)], 0.1, num_data=1, seed=0)
    one.step()
    p = nn.Parameter(torch.zeros(1, 3))
    other = sg.SGHMC([p], 0.1, num_data=1, seed=0)
    with pytest.raises(ValueError, match=r"momentum of parameter 0 has shape \[3\]"):
        other.load_state_dict(one.state_dict())
    assert not other.state


def test_noise_estimate_may_equal_the_friction() -> None:
    p = parameter()
    sg.SGHMC([p], 0.1, 0.9, num_data=1, noise_estimate=0.1).step()
    assert torch.isfinite(p).all()


def test_capturable_belongs_to_the_sampler_and_not_to_a_group() -> None:
    sampler = sg.SGLD([parameter()], 0.1, num_data=1, capturable=True)
    with pytest.raises(ValueError, match="'capturable' is managed by SGLD"):
        sampler.add_param_group({"params": [parameter()], "capturable": False})
    sampler.step()
    sampler.add_param_group({"params": [parameter()]})
    sampler.step()
    assert [int(g["step"]) for g in sampler.param_groups] == [2, 2]


def test_group_dicts_can_be_used_twice() -> None:
    groups = [{"params": [parameter()]}]
    sg.SGLD(groups, 0.1, num_data=1)
    sg.SGHMC(groups, 0.1, num_data=1)
    assert set(groups[0]) == {"params"}


def test_online_estimate_of_empty_parameters() -> None:
    p = parameter(0)
    sampler = sg.SGHMC([p], 0.1, 0.5, num_data=1, noise_estimate="online")
    for _ in range(102):  # more gradients than the estimate waits for
        sampler.step()
    assert sampler.param_groups[0]["step"] == 102
    assert sampler.state[p]["momentum"].shape == (0,)


def test_noise_estimate_must_be_a_number() -> None:
    with pytest.raises(TypeError, match="Invalid noise_estimate"):
        sg.SGHMC([parameter()], 0.1, num_data=1, noise_estimate=torch.tensor(0.0))
