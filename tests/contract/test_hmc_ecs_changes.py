"""HMC-ECS when sizes change, when the closure fails, and where it may not go."""

import math

import pytest
import torch
from ecs_data import Data, N, chain, make
from short_chains import kept_state


def sizes(sampler):
    """Returns the sizes of the state: numbers of cells and of data."""
    kept = sampler.state["subsample"]
    assert len(kept["terms"][0]) == len(kept["indices"])
    return len(kept["counts"]), len(kept["indices"])


@pytest.mark.parametrize("anchored", [True, False])
@pytest.mark.parametrize(
    ("estimator", "changes"),
    [
        ("perturbed", {"subsample_size": 20}),
        ("perturbed", {"subsample_size": 5}),
        ("perturbed", {"num_blocks": 2}),
        ("signed", {"num_factors": 30}),
        ("signed", {"num_factors": 6}),
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
    sampler = make(data, subsample_size=40)
    sampler.warmup(data, 30, target_variance=1e6, progress=False)
    assert sampler.param_groups[0]["subsample_size"] == 30
    sampler = make(data, subsample_size=20)
    sampler.warmup(data, 30, target_variance=1e6, progress=False)
    assert sampler.param_groups[0]["subsample_size"] == 20


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
