"""HMC-ECS: no state inside a warm-up; states of other devices and dtypes."""

import copy

import pytest
import torch
from ecs_data import F64, Data, chain, make
from short_chains import assert_same, kept_state
from stored_files import through_file
from torch import Tensor

import torch_sgmcmc as sg

WARMUP = {"anchor_every": 4, "target_variance": 0.5, "progress": False}
SHORT = {"trajectory_length": 2.0, "step_size": 0.1}


class Failing:
    """A closure that fails at one of its calls."""

    def __init__(self, data, at):
        self.data, self.left = data, at

    def __call__(self, indices):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return self.data(indices)


SAVING = (
    "HMCECS cannot be saved inside a warm-up. Finish the warm-up (after an exception, "
    "call warmup() again), then save. Or give it up by set_anchor()"
)


def refuses_to_be_saved(sampler):
    for save in (sampler.state_dict, lambda: copy.deepcopy(sampler)):
        with pytest.raises(RuntimeError) as error:
            save()
        assert str(error.value) == SAVING


@pytest.mark.filterwarnings("ignore:num_blocks")  # it chooses few factors
@pytest.mark.parametrize("estimator", ["perturbed", "signed"])
def test_a_warmup_is_finished_before_it_is_saved(estimator):
    data = Data()
    sampler = make(data, estimator=estimator, num_factors=9, **SHORT)

    def closure(indices):
        if int(sampler.param_groups[0]["step"]) > 0:
            refuses_to_be_saved(sampler)
        return data(indices)

    sampler.warmup(closure, 10, **WARMUP)
    assert sampler.param_groups[0]["step"] == 10
    saved = through_file(sampler.state_dict())
    assert set(saved["state"]) >= {"control_variates", "subsample"}
    other = Data()
    for p, q in zip(other.params, data.params, strict=True):
        p.data.copy_(q.data)
    twin = make(other, seed=99)
    twin.load_state_dict(saved)
    assert_same(chain(sampler, data, 6), chain(twin, other, 6))


@pytest.mark.parametrize("way_out", ["warmup", "set_anchor", "load_state_dict"])
def test_a_warmup_after_an_exception(way_out):
    data = Data()
    sampler = make(data, **SHORT)
    blank = sampler.state_dict()
    with pytest.raises(KeyboardInterrupt):
        sampler.warmup(Failing(data, 60), 10, **WARMUP)
    done = int(sampler.param_groups[0]["step"])
    assert 0 < done < 10
    refuses_to_be_saved(sampler)
    sampler.step(data)  # which does not finish it
    refuses_to_be_saved(sampler)
    if way_out == "warmup":
        sampler.warmup(data, 10, **WARMUP)
        assert sampler.param_groups[0]["step"] == done + 1 + 10
        assert sampler.param_groups[0]["num_trajectories"] == 0
    elif way_out == "set_anchor":
        sampler.set_anchor(data, progress=False)
    else:
        sampler.load_state_dict(blank)
    sampler.state_dict()
    sampler.step(data)


def test_the_first_anchor_is_part_of_no_warmup():
    data = Data()
    sampler = make(data)
    with pytest.raises(KeyboardInterrupt):
        sampler.warmup(Failing(data, 1), 10, **WARMUP)
    assert not kept_state(sampler)
    sampler.state_dict()


# ---- Devices and dtypes ------------------------------------------------------------


def tensors(value):
    """All in nested lists and dicts."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [t for each in value for t in tensors(each)]
    return [value] if isinstance(value, Tensor) else []


@pytest.mark.parametrize("settings", [{}, {"estimator": "signed", "num_factors": 9}])
def test_a_state_moves_to_the_device_of_the_parameters(settings, monkeypatch):
    """The device "meta" stands for any other: nothing is computed there."""
    for check in ("check_parameter", "check_memory"):
        monkeypatch.setattr(f"torch_sgmcmc._impl.bookkeeping.{check}", lambda *_: None)
    data = Data("tanh")
    sampler = make(data, **settings)
    chain(sampler, data, 2)
    state = sampler.state_dict()
    elsewhere = Data("tanh")
    elsewhere.weight, elsewhere.bias = (
        p.detach().to("meta").requires_grad_() for p in data.params
    )
    moved = make(elsewhere, **settings)
    moved.load_state_dict(state)
    for key in ("control_variates", "subsample"):
        theirs, ours = tensors(state["state"][key]), tensors(moved.state[key])
        assert len(theirs) >= 3
        for there, here in zip(theirs, ours, strict=True):
            assert here.device.type == "meta"
            assert (there.device.type, there.dtype) == ("cpu", here.dtype)
            assert there.shape == here.shape
    assert moved.state["subsample"]["counts"] == state["state"]["subsample"]["counts"]


def test_a_state_of_another_dtype():
    """θ* must not be rounded: expansions made anew would not be those summed up."""
    data = Data("tanh")
    sampler = make(data)
    chain(sampler, data, 9)
    kept = sampler.state["control_variates"]
    rounded = Data("tanh", dtype=torch.float32)
    for p, q in zip(rounded.params, data.params, strict=True):
        p.data.copy_(q.data)
    twin = make(rounded)
    twin.load_state_dict(copy.deepcopy(sampler.state_dict()))
    assert twin.param_groups[0]["step"] == 9
    assert not {"control_variates", "subsample"} & set(twin.state)
    chain(twin, rounded, 1)
    anew = twin.state["control_variates"]
    assert not torch.equal(anew["anchor"], kept["anchor"])
    assert torch.equal(anew["anchor"].float().double(), anew["anchor"])
    assert all(t.dtype == F64 for t in tensors(anew))
    # A wider dtype holds it.
    wider = make(Data("tanh"))
    wider.load_state_dict(copy.deepcopy(twin.state_dict()))
    assert torch.equal(wider.state["control_variates"]["anchor"], anew["anchor"])


def test_groups_that_are_empty_so_far():
    groups = [{"params": []}, {"params": []}]
    sampler = sg.HMCECS(groups, num_data=50, subsample_size=4)
    sampler.load_state_dict(sampler.state_dict())
    with pytest.raises(RuntimeError, match=r"^HMCECS has no parameters that require"):
        sampler.step(lambda indices: indices)


def test_a_subsample_needs_control_variates():
    data = Data("tanh")
    sampler = make(data)
    chain(sampler, data, 1)
    state = sampler.state_dict()
    state["state"] = {"subsample": state["state"]["subsample"]}
    with pytest.raises(ValueError, match="it has a subsample without control_variates"):
        sampler.load_state_dict(state)
