"""HMC-ECS when sizes, devices or dtypes change, and when the closure fails."""

import copy
import math

import pytest
import torch
from ecs_data import F64, Data, N, chain, make
from short_chains import kept_state
from torch import Tensor

import torch_sgmcmc as sg


def sizes(sampler):
    """Returns the sizes of the state: numbers of cells and of data."""
    kept = sampler.state["subsample"]
    assert len(kept["terms"][0]) == len(kept["indices"])
    return len(kept["counts"]), len(kept["indices"])


@pytest.mark.parametrize("anchored", [True, False])
@pytest.mark.parametrize(
    ("estimator", "changes"),
    [
        *(("perturbed", {"subsample_size": size}) for size in (20, 5)),
        *(("signed", {"num_factors": count}) for count in (30, 6)),
        ("perturbed", {"num_blocks": 2}),
        ("signed", {"subsample_size": 12}),
        ("signed", {"num_data": 50}),
    ],
)
def test_a_changed_size_draws_the_subsample_again(estimator, changes, anchored):
    data = Data()
    sampler = make(data, estimator=estimator, num_factors=15)
    chain(sampler, data, 5)
    group = sampler.param_groups[0]
    group.update(changes)
    if anchored:
        sampler.set_anchor(data, progress=False)
    for _ in range(3):
        sampler.step(data)
        cells, indices = sizes(sampler)
        counts = sampler.state["subsample"]["counts"]
        if estimator == "signed":
            assert cells == group["num_factors"]
            assert indices == group["subsample_size"] * sum(counts)
        else:
            assert cells == indices == group["subsample_size"]
        assert int(sampler.state["subsample"]["indices"].max()) < group["num_data"]
    assert sampler.state["control_variates"]["num_data"] == group["num_data"]


def test_the_sums_follow_the_number_of_data():
    """They stand for all data, without a word from the user."""
    data = Data("gaussian")  # expansions of second order are exact
    sampler = make(data)
    sampler.step(data)
    sampler.param_groups[0]["num_data"] = 40
    loss = sampler.step(data)
    expected = -data(torch.arange(40)).mean().detach()
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("of_the_sums", [True, False])
def test_a_failed_anchor_changes_nothing(of_the_sums):
    data = Data()
    sampler = make(data)
    sampler.step(data)
    before = dict(sampler.state)
    with torch.no_grad():
        data.weight.add_(0.5)

    def fails(indices):
        if (len(indices) == N) == of_the_sums:
            raise KeyboardInterrupt
        return data(indices)

    with pytest.raises(KeyboardInterrupt):
        sampler.set_anchor(fails, progress=False)
    assert all(sampler.state[key] is before[key] for key in before)


@pytest.mark.parametrize("call", ["step", "set_anchor"])
def test_a_failure_after_freezing_changes_nothing(call):
    """Each of the first calls of the closure fails in turn."""
    data = Data()
    sampler = make(data)
    chain(sampler, data, 3)
    data.bias.requires_grad_(False)
    before, estimate = dict(sampler.state), sampler.estimator_variance
    for at in (1, 2, 3, 4, 5):
        with pytest.raises(KeyboardInterrupt):
            getattr(sampler, call)(Failing(data, at))
        assert {**sampler.state} == before, at
        if call == "set_anchor":
            break  # it has one call
    data.bias.requires_grad_()
    sampler.state_dict()  # can be saved again
    chain(sampler, data, 1)
    assert sampler.state["control_variates"] is before["control_variates"]
    assert sampler.estimator_variance != estimate
    data.bias.requires_grad_(False)
    chain(sampler, data, 1)
    assert len(sampler.state["control_variates"]["anchor"]) == data.weight.numel()


def test_the_last_anchor_can_be_taken_back_up():
    """The subsample's data stay if sizes stay, and are expanded again."""
    data = Data()
    sampler = make(data)
    sampler.step(data)
    indices = sampler.state["subsample"]["indices"]
    with torch.no_grad():
        data.weight.add_(0.5)
    sampler.set_anchor(data, progress=False)
    kept = sampler.state["subsample"]
    assert kept["indices"] is indices
    torch.testing.assert_close(kept["terms"][0], data(indices).detach())


def test_no_subsample_of_one():
    """Its correction would be 0, and the estimate's variance unknown."""
    data = Data()
    with pytest.raises(ValueError, match=r"subsample_size: 1 \(must be >= 2\)"):
        make(data, subsample_size=1)
    make(data, subsample_size=1, estimator="signed")
    for size, chosen in ((40, 30), (20, 20)):
        sampler = make(data, subsample_size=size)
        sampler.warmup(data, 30, target_variance=1e6, progress=False)
        assert sampler.param_groups[0]["subsample_size"] == chosen


def test_a_subsample_that_is_too_uncertain_is_refused():
    """Refused for u as for θ, or the chain could leave its domain."""
    data = Data("tanh")
    sampler = make(data, subsample_size=5, taylor_order=1)
    variances = []
    for _ in range(40):
        sampler.step(data)
        variances.append(sampler.estimator_variance)
    bound = sorted(variances)[20]
    while sampler.estimator_variance > bound:
        sampler.step(data)
    sampler.param_groups[0]["max_variance"] = bound
    for _ in range(60):
        sampler.step(data)
        assert sampler.estimator_variance <= bound
    assert 0 < sampler.subsample_acceptance_rate < 1


def test_a_trajectory_out_of_bounds_stops_there():
    data = Data()
    sampler = make(data, step_size=0.1)
    sampler.step(data)
    before = data.weight.detach().clone()
    seen = []

    def strict(indices):
        if not bool(data.weight.isfinite().all()):
            raise ValueError("as a distribution of torch says it")
        moved = not torch.equal(data.weight, before)
        seen.append(moved)
        return data(indices) * (math.inf if moved else 1.0)

    sampler.step(strict)
    assert sampler.num_divergences == 1
    assert sum(seen) == 1
    assert torch.equal(data.weight, before)


@pytest.mark.parametrize("call", ["set_anchor", "warmup"])
def test_a_closure_is_needed(call):
    arguments = {"warmup": (None, 3), "set_anchor": (None,)}
    with pytest.raises(TypeError, match="needs a closure"):
        getattr(make(Data()), call)(*arguments[call])


def test_a_warmup_too_short_to_choose_sizes():
    data = Data()
    sampler = make(data)
    with pytest.raises(ValueError, match=r"Invalid steps: 1 .* makes after 0"):
        sampler.warmup(data, 1, target_variance=1.0)
    with pytest.raises(ValueError, match=r"Invalid steps: 20 .* makes after 20"):
        sampler.warmup(data, 20, anchor_every=1, target_variance=1.0)
    assert not kept_state(sampler)


def test_the_number_of_products_moves_the_lower_bound():
    """a is the mean less λ, whatever λ has become."""
    data = Data()
    sampler = make(data, estimator="signed", num_factors=20)
    sampler.warmup(data, 20, progress=False)
    sampler.param_groups[0]["num_factors"] = 200
    sampler.step(data)
    # Each factor is near 1, so that the variance of log|L̂| is small.
    assert sampler.estimator_variance < 1


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
    "HMCECS cannot be saved now: a warm-up has not ended, or other parameters are "
    "sampled than at the last step (run warmup() again, make a step, or call "
    "set_anchor())"
)


def refuses_to_be_saved(sampler):
    for save in (sampler.state_dict, lambda: copy.deepcopy(sampler)):
        with pytest.raises(RuntimeError) as error:
            save()
        assert str(error.value) == SAVING


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


def tensors(value):
    """All in nested lists and dicts."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [t for each in value for t in tensors(each)]
    return [value] if isinstance(value, Tensor) else []


@pytest.mark.parametrize("settings", [{}, {"estimator": "signed", "num_factors": 9}])
def test_indices_move_to_the_device_of_the_parameters(settings, monkeypatch):
    """The rest is on the host; the device "meta" stands for any other."""
    for check in ("check_parameter", "check_memory"):
        monkeypatch.setattr(f"torch_sgmcmc.core.parameters.{check}", lambda *_: None)
    data = Data("tanh")
    sampler = make(data, **settings)
    chain(sampler, data, 2)
    state = sampler.state_dict()
    elsewhere = Data("tanh")
    away = [p.detach().to("meta").requires_grad_() for p in data.params]
    elsewhere.weight, elsewhere.bias = away
    moved = make(elsewhere, **settings)
    moved.load_state_dict(state)
    for key in ("control_variates", "subsample"):
        theirs, ours = tensors(state["state"][key]), tensors(moved.state[key])
        assert len(theirs) >= 3
        for there, here in zip(theirs, ours, strict=True):
            device = "meta" if here.dtype == torch.int64 else "cpu"
            assert here.device.type == device
            assert (there.dtype, there.shape) == (here.dtype, here.shape)
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


def test_the_anchor_is_of_the_parameters_that_are_sampled():
    """Two of equal size take turns."""
    x = torch.linspace(-1, 1, 40, dtype=F64)
    one, two = (torch.nn.Parameter(torch.full((1,), v, dtype=F64)) for v in (1.0, 3.0))
    two.requires_grad_(False)

    def closure(indices):
        return -((x[indices] * one + two - 2) ** 2) / 2

    sampler = sg.HMCECS([one, two], num_data=40, subsample_size=8, num_blocks=2, seed=0)
    sampler.step(closure)
    one.requires_grad_(False)
    two.requires_grad_(True)
    with pytest.raises(RuntimeError, match="other parameters are sampled"):
        sampler.state_dict()
    with pytest.raises(RuntimeError, match="other parameters are sampled"):
        copy.deepcopy(sampler)
    sampler.step(closure)
    assert sampler.state["control_variates"]["anchor"].item() == 3.0
    sampler.load_state_dict(sampler.state_dict())
