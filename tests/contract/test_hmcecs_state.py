"""HMC-ECS: a warm-up that is interrupted, and states of other devices and dtypes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ecs_data import F64, Data, chain, make
from short_chains import assert_same
from stored_files import through_file
from torch import Tensor

import torch_sgmcmc as sg

WARMUP: dict[str, Any] = {"anchor_every": 4, "target_variance": 0.5, "progress": False}
SHORT = {"trajectory_length": 2.0, "step_size": 0.1}


class Failing:
    """A closure that fails at one of its calls."""

    def __init__(self, data: Data, at: int) -> None:
        self.data, self.left = data, at

    def __call__(self, indices: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return self.data(indices)


def fail_at_anchors(sampler: sg.HMCECS, *calls: int) -> None:
    """Has it fail when it chooses θ* for the so manieth time; 1 is before all steps."""
    anchored, count = sampler._anchor_at, 0

    def fails(*args: Any, **more: Any) -> None:
        nonlocal count
        count += 1
        if count in calls:
            raise KeyboardInterrupt
        anchored(*args, **more)

    sampler._anchor_at = fails  # type: ignore[method-assign]


def bookkeeping(sampler: sg.HMCECS) -> dict[str, Any]:
    """All but what depends on how often the sampler was interrupted."""
    group = sampler.param_groups[0]
    return {k: v for k, v in group.items() if k not in ("params", "num_evaluations")}


def uninterrupted(variant: str) -> tuple[list[Tensor], dict[str, Any], int]:
    """A draw after a warm-up, the bookkeeping, and how often the closure was called."""
    data = Data()
    sampler = make(data, variant=variant, num_products=9, **SHORT)
    sampler.warmup(data, 10, **WARMUP)
    calls = len(data.seen)
    assert "warmup" not in sampler.state
    return chain(sampler, data, 3), bookkeeping(sampler), calls


@pytest.mark.filterwarnings("ignore:num_blocks")  # it chooses few factors
@pytest.mark.parametrize("variant", ["perturbed", "signed"])
def test_a_warmup_goes_on_where_it_was_interrupted(variant: str) -> None:
    expected, books, calls = uninterrupted(variant)
    data = Data()
    sampler = make(data, variant=variant, num_products=9, **SHORT)
    # Several times, here and there: in the first pass through the data, in steps, and
    # where θ* is chosen again.
    stops, kept = 0, 0
    while True:
        try:
            # Ever later, so that the longest of its steps can be made.
            sampler.warmup(Failing(data, calls // 12 * (stops + 1)), 10, **WARMUP)
            break
        except KeyboardInterrupt:
            stops += 1
        done = sampler.state["warmup"]["done"]
        assert sampler.param_groups[0]["step"] == done
        if stops % 2:  # in another process
            state, params = through_file([sampler.state_dict(), data.params])
            data = Data()
            for p, q in zip(data.params, params, strict=True):
                p.data.copy_(q.data)
            sampler = make(data, seed=99)
            sampler.load_state_dict(state)
            kept += len(sampler.state["warmup"]["draws"])
    assert stops >= 4
    assert kept > 0
    assert bookkeeping(sampler)["step_size"] != 0.1
    assert_same(chain(sampler, data, 3), expected)
    assert bookkeeping(sampler) == books


def test_a_warmup_interrupted_while_it_chooses_the_anchor() -> None:
    """Between two steps: neither the draws nor the step size may be lost."""
    results = []
    for interrupted in (False, True):
        data = Data()
        sampler = make(data, **SHORT)
        if interrupted:
            fail_at_anchors(sampler, 2, 4)
            for done in (4, 8):
                with pytest.raises(KeyboardInterrupt):
                    sampler.warmup(data, 10, **WARMUP)
                assert sampler.state["warmup"]["done"] == done
                assert len(sampler.state["warmup"]["draws"]) == 4
        sampler.warmup(data, 10, **WARMUP)
        results.append((chain(sampler, data, 2)[-1], bookkeeping(sampler)))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_a_warmup_interrupted_in_its_last_pass() -> None:
    """When all steps are made, and it looks where the chain is."""
    expected, books, calls = uninterrupted("perturbed")
    data = Data()
    sampler = make(data, num_products=9, **SHORT)
    with pytest.raises(KeyboardInterrupt):
        sampler.warmup(Failing(data, calls), 10, **WARMUP)
    assert sampler.state["warmup"]["done"] == 10
    sampler.warmup(data, 10, **WARMUP)
    assert_same(chain(sampler, data, 3), expected)
    assert bookkeeping(sampler) == books


def test_the_first_anchor_is_part_of_no_warmup() -> None:
    data = Data()
    sampler = make(data)
    with pytest.raises(KeyboardInterrupt):
        sampler.warmup(Failing(data, 1), 10, **WARMUP)
    assert not sampler.state


def test_a_warmup_in_progress_keeps_its_arguments() -> None:
    data = Data()
    sampler = make(data)
    with pytest.raises(KeyboardInterrupt):
        sampler.warmup(Failing(data, 15), 10, **WARMUP)
    saved = copy.deepcopy(sampler.state_dict())
    for changes, message in (
        (
            {"steps": 20},
            r"Invalid steps: 20 \(the warm-up in progress has 10; set_anch",
        ),
        ({"target_acceptance": 0.7}, "target_acceptance: 0.7 .*in progress has 0.8"),
        ({"anchor_every": 5}, r"anchor_every: 5 \(the warm-up in progress has 4"),
        ({"target_variance": None}, r"target_variance: none \(the warm-up in progr"),
    ):
        with pytest.raises(ValueError, match=message):
            sampler.warmup(data, **{"steps": 10, **WARMUP, **changes})
    assert repr(sampler.state["warmup"]) == repr(saved["state"]["warmup"])
    sampler.set_anchor(data, progress=False)
    assert "warmup" not in sampler.state
    sampler.warmup(data, 4, progress=False)
    saved["state"]["warmup"]["adaptation"] = [0.8, 0, -1, 0, 0, 0]
    with pytest.raises(ValueError, match="Invalid state of dual averaging"):
        sampler.load_state_dict(saved)


# ---- Devices and dtypes ------------------------------------------------------------


def tensors(value: Any) -> list[Tensor]:
    """All in nested lists and dicts."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [t for each in value for t in tensors(each)]
    return [value] if isinstance(value, Tensor) else []


@pytest.mark.parametrize("settings", [{}, {"variant": "signed", "num_products": 9}])
def test_a_state_moves_to_the_device_of_the_parameters(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device "meta" stands for any other: nothing is computed there."""
    for check in ("check_parameter", "check_memory"):
        monkeypatch.setattr(f"torch_sgmcmc.chain.bookkeeping.{check}", lambda *_: None)
    data = Data("tanh")
    sampler = make(data, **settings)
    with pytest.raises(KeyboardInterrupt):
        sampler.warmup(Failing(data, 40), 10, **WARMUP)
    state = sampler.state_dict()
    elsewhere = Data("tanh")
    elsewhere.weight, elsewhere.bias = (
        p.detach().to("meta").requires_grad_() for p in data.params
    )
    moved = make(elsewhere, **settings)
    moved.load_state_dict(state)
    for key in ("control_variates", "subsample", "warmup"):
        theirs, ours = tensors(state["state"][key]), tensors(moved.state[key])
        assert len(theirs) >= 3
        for there, here in zip(theirs, ours, strict=True):
            assert here.device.type == "meta"
            assert (there.device.type, there.dtype) == ("cpu", here.dtype)
            assert there.shape == here.shape
    assert moved.state["subsample"]["counts"] == state["state"]["subsample"]["counts"]


def test_a_state_of_another_dtype() -> None:
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


def test_groups_that_are_empty_so_far() -> None:
    groups: list[dict[str, list[Tensor]]] = [{"params": []}, {"params": []}]
    sampler = sg.HMCECS(groups, num_data=50, subsample_size=4)
    sampler.load_state_dict(sampler.state_dict())
    with pytest.raises(RuntimeError, match=r"^HMCECS has no parameters that require"):
        sampler.step(lambda indices: indices)


def test_a_warmup_in_progress_of_another_dtype() -> None:
    """Without its θ* there is nothing that draws could be near to."""
    data = Data("tanh")
    sampler = make(data)
    fail_at_anchors(sampler, 2)
    with pytest.raises(KeyboardInterrupt):
        sampler.warmup(data, 10, **WARMUP)
    state = copy.deepcopy(sampler.state_dict())
    assert state["state"]["warmup"]["done"] == 4
    rounded = Data("tanh", dtype=torch.float32)
    twin = make(rounded)
    twin.load_state_dict(copy.deepcopy(state))
    assert not twin.state
    twin.warmup(rounded, 12, **WARMUP)
    assert twin.param_groups[0]["step"] == 4 + 12
    for key in ("control_variates", "subsample"):
        state["state"].pop(key)
    with pytest.raises(ValueError, match="it has a warmup without control_variates"):
        make(data).load_state_dict(state)
