"""HMC-ECS: proposals, interface, errors, resuming."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from ecs_data import F64, Data, N, chain, estimate, make, target_of
from short_chains import assert_same
from stored_files import through_file

import torch_sgmcmc as sg
from torch_sgmcmc.samplers._ecs.subsample import SubsampleDraws, layout_of
from torch_sgmcmc.samplers._ecs.target import place
from torch_sgmcmc.samplers._ecs.taylor import WHOLE


@pytest.mark.parametrize("estimator", ["perturbed", "signed"])
def test_one_block_is_proposed_again(estimator):
    data = Data()
    sampler = make(data, estimator=estimator, num_factors=10)
    sampler.step(data)
    for _ in range(12):
        kept = sampler.state["subsample"]
        before, counts = kept["indices"], list(kept["counts"])
        layout, step = (
            layout_of(sampler.param_groups[0]),
            int(sampler.param_groups[0]["step"]),
        )
        draws = SubsampleDraws(layout)
        block, fresh, indices = draws.propose(step)
        begin, end = draws.begin(block), draws.begin(block + 1)
        low, high = (layout["batch_size"] * sum(counts[:i]) for i in (begin, end))
        expected = [*before[:low].tolist(), *indices.tolist(), *before[high:].tolist()]
        accepted = sampler.param_groups[0]["num_subsamples_accepted"]
        sampler.step(data)
        kept = sampler.state["subsample"]
        if sampler.param_groups[0]["num_subsamples_accepted"] == accepted:
            assert kept["indices"] is before  # the same object, for the closure
            continue
        assert kept["indices"].tolist() == expected
        assert kept["counts"] == [*counts[:begin], *fresh, *counts[end:]]
        # The expansions moved along with their data.
        again = target_of(sampler, data).expand(kept["indices"])
        for ours, theirs in zip(kept["terms"], again.fields(), strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                torch.testing.assert_close(ours, theirs)


def test_the_same_subsample_along_a_trajectory():
    data = Data()
    sampler = make(data, step_size=0.1, trajectory_length=0.5)
    sampler.set_anchor(data, progress=False)
    sampler.step(data)
    data.seen.clear()
    sampler.step(data)
    # The proposal, then five leapfrog steps, all on the subsample that is kept.
    assert len(data.seen) == 6
    kept = sampler.state["subsample"]["indices"]
    assert all(indices is kept for indices in data.seen[1:])
    assert sampler.num_evaluations == N + 8 + 8 + 8 + 12 * 8


@pytest.mark.parametrize("kind", ["logistic", "tanh"])
@pytest.mark.parametrize("estimator", ["perturbed", "signed"])
@pytest.mark.parametrize("order", [2, 1, 0])
def test_operators_equal_tensor_code(kind, estimator, order):
    data = Data(kind)
    sampler = make(data, estimator=estimator, taylor_order=order, temperature=1.7)
    sampler.set_anchor(data, progress=False)
    target = target_of(sampler, data)
    subsample, prior = sampler._subsample(target), target.prior
    theta = place(data.params, torch.tensor([0.5, -0.4, 0.3, 0.6], dtype=F64))
    point, delta = target.at(subsample, theta), theta - target.anchor.theta
    delta.requires_grad_()
    ell = data(subsample.indices)
    expansions, total = (
        expand(subsample.terms, delta),
        expand_sum(target.anchor.sums, delta),
    )
    differences = (ell.detach() - expansions.detach()) / 1.7
    found, weights = estimate(target.estimator, differences)
    gradient = torch.cat(
        [g.flatten() for g in torch.autograd.grad(ell, data.params, weights)]
    )
    (of_sums,) = torch.autograd.grad(total - weights @ expansions, delta)
    of_prior = prior.precision * (theta - prior.mean)
    gradient = gradient + of_sums - of_prior
    log = found.log + (total.detach() - prior.energy(theta)) / 1.7
    assert point.finite
    torch.testing.assert_close(point.gradient, gradient / 1.7)
    assert list(point.estimate) == pytest.approx(list(found), rel=1e-9)
    assert math.isclose(point.log, float(log), rel_tol=1e-12)


def expand(terms, delta):
    """The expansions at θ* + δ, by torch."""
    values, gradients = terms.values, terms.gradients
    if len(gradients) == 0:
        return values + 0 * delta.sum()
    values = values + gradients[0] @ delta
    if terms.scales is not None:
        values = values + terms.scales * (gradients[1] @ delta) ** 2 / 2
    if terms.hessians is not None:
        values = values + (terms.hessians @ delta) @ delta / 2
    return values


def expand_sum(sums, delta):
    total = sums.value + sums.gradient @ delta
    return total if sums.hessian is None else total + delta @ sums.hessian @ delta / 2


def test_divergences_are_rejected_and_counted():
    data = Data()
    sampler = make(data)
    sampler.step(data)
    before = [p.detach().clone() for p in data.params]

    def broken(indices):
        inside = torch.equal(data.weight, before[0])
        return data(indices) * (1.0 if inside else math.nan)

    sampler.step(broken)
    assert sampler.num_divergences == 1
    assert_same(data.params, before)
    # Nor does it go where the estimate is too uncertain.
    sampler.param_groups[0]["max_variance"] = 1e-300
    sampler.step(data)
    assert sampler.num_divergences == 2
    assert_same(data.params, before)


@pytest.mark.parametrize(
    ("closure", "error", "message"),
    [
        (lambda data, i: None, TypeError, r"returned NoneType \(must return a"),
        (lambda data, i: data(i).sum(), ValueError, r"shape \[\] \(must be \[60\]"),
        (lambda data, i: data(i).detach(), RuntimeError, "do not depend on the param"),
        (lambda data, i: data(i) * math.inf, RuntimeError, "not finite at the anchor"),
    ],
)
def test_bad_log_likelihoods(closure, error, message):
    data = Data()
    sampler = make(data)
    before = [p.detach().clone() for p in data.params]
    with pytest.raises(error, match=message):
        sampler.step(lambda i: closure(data, i))
    assert_same(data.params, before)
    sampler.step(data)


def test_errors_within_a_step():
    data = Data()
    sampler = make(data)
    sampler.step(data)
    with pytest.raises(RuntimeError, match="not finite at the start of a step"):
        with torch.no_grad():
            data.bias.fill_(math.nan)
        sampler.step(data)
    with pytest.raises(TypeError, match=r"HMCECS.step\(\) needs a closure"):
        sampler.step()


def test_bad_warmups():
    data = Data()
    sampler = make(data)
    for settings, message in (
        ({"steps": 0}, r"Invalid steps: 0 \(must be >= 1\)"),
        ({"target_acceptance": 1.0}, r"Invalid target_acceptance: 1.0 \(must be in"),
        ({"anchor_every": 0}, r"Invalid anchor_every: 0 \(must be >= 1\)"),
        ({"target_variance": -1.0}, "Invalid target_variance: -1.0"),
        ({"target_variance": math.inf}, "Invalid target_variance: inf"),
    ):
        with pytest.raises(ValueError, match=message):
            sampler.warmup(data, **{"steps": 5, **settings})
    assert "subsample" not in sampler.state
    assert not data.seen


@pytest.mark.filterwarnings("ignore:num_blocks")  # the warm-up chooses few factors
@pytest.mark.parametrize("estimator", ["perturbed", "signed"])
def test_resuming_is_exact(estimator):
    data = Data("tanh")
    settings = {"estimator": estimator, "num_factors": 9, "subsample_size": 7}
    sampler = make(data, **settings)
    sampler.warmup(data, 20, anchor_every=10, target_variance=0.5, progress=False)
    chain(sampler, data, 7)  # to the middle of the proposals that are looked up ahead
    saved = through_file(sampler.state_dict())
    other = Data("tanh")
    for p, q in zip(other.params, data.params, strict=True):
        p.data.copy_(q.data)
    twin = make(other, estimator=estimator, seed=99)
    twin.load_state_dict(saved)
    expected = chain(sampler, data, 9)
    assert_same(expected, chain(twin, other, 9))
    assert twin.sign == sampler.sign
    # Proposals that were looked up ahead have to be expanded again.
    ours, theirs = (dict(each.param_groups[0]) for each in (sampler, twin))
    for each in (ours, theirs):
        del each["params"], each["num_evaluations"]
    assert ours == theirs


def test_copies_and_seeds():
    data = Data()
    sampler = make(data)
    chain(sampler, data, 3)
    copied, pickled = copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))
    expected = chain(sampler, data, 4)
    for twin in (copied, pickled):
        other = Data()
        other.weight, other.bias = twin.param_groups[0]["params"]
        assert_same(expected, chain(twin, other, 4))
    fresh = Data()
    again = make(fresh)
    assert torch.equal(chain(again, fresh, 7)[-1], expected[-1])
    changed = Data()
    assert not torch.equal(chain(make(changed, seed=4), changed, 7)[-1], expected[-1])


def test_what_is_changed_between_steps_counts():
    """The estimate of the last step is used again only where it is the same."""
    results = []
    for forget in (False, True):
        data = Data()
        sampler = make(data)
        chain(sampler, data, 3)
        sampler.param_groups[0]["prior_precision"] = 50.0
        if forget:
            sampler._last = None
        chain(sampler, data, 1)
        with torch.no_grad():
            data.weight.add_(0.1)
        if forget:
            sampler._last = None
        results.append(chain(sampler, data, 2)[-1])
    assert torch.equal(*results)


def test_param_groups_and_priors():
    data = Data()
    groups = [
        {"params": [data.weight], "prior_precision": 2.0},
        {"params": [data.bias], "prior_precision": 5.0, "prior_mean": -1.0},
    ]
    sampler = sg.HMCECS(groups, num_data=N, subsample_size=8, num_blocks=8, seed=0)
    sampler.step(data)
    prior = target_of(sampler, data).prior
    assert prior.precision.tolist() == [2.0, 2.0, 2.0, 5.0]
    assert prior.mean.tolist() == [0.0, 0.0, 0.0, -1.0]
    with pytest.raises(ValueError, match="'num_accepted' is managed by HMCECS"):
        sampler.add_param_group({"params": [torch.zeros(1)], "num_accepted": 0})
    extra = torch.zeros(2, dtype=F64, requires_grad=True)
    sampler.add_param_group({"params": [extra]})
    sampler.step(lambda i: data(i) + extra.sum())
    assert len(sampler.state["control_variates"]["anchor"]) == 6
    with pytest.raises(ValueError, match="control variates have 6 parameters"):
        state = sampler.state_dict()
        state["param_groups"] = state["param_groups"][:2]
        del state["state"][2]
        small = sg.HMCECS(groups, num_data=N, subsample_size=8, seed=0)
        small.load_state_dict(state)
    sampler.param_groups[1]["temperature"] = 2.0
    with pytest.raises(ValueError, match=r"Invalid temperature: \[1.0, 2.0, 1.0\]"):
        sampler.step(lambda i: data(i) + extra.sum())


def test_warmup():
    data = Data()
    with torch.no_grad():
        data.weight.add_(1.5)
    sampler = make(data, step_size=None, subsample_size=20)
    assert sampler.param_groups[0]["step_size"] == 1.2 / 6
    assert math.isnan(sampler.acceptance_rate)
    sampler.warmup(data, 90, anchor_every=30, target_variance=1.0, progress=False)
    first = sampler.state["control_variates"]["anchor"]
    assert math.isnan(sampler.acceptance_rate)
    assert sampler.param_groups[0]["subsample_size"] != 20
    frozen = (sampler.param_groups[0]["step_size"], first)
    variances = []
    for _ in range(150):
        sampler.step(data)
        variances.append(sampler.estimator_variance)
    now = sampler.param_groups[0]["step_size"]
    assert (now, sampler.state["control_variates"]["anchor"]) == frozen
    assert 0.6 < sampler.acceptance_rate < 1
    assert 0.35 < np.mean(variances) < 3


def test_float32_parameters():
    data = Data(dtype=torch.float32)
    sampler = make(data)
    chain(sampler, data, 30)
    assert sampler.acceptance_rate > 0.7
    assert sampler.num_divergences == 0
    assert sampler.state["control_variates"]["form"] == WHOLE


def test_gradients_are_left_alone():
    data = Data()
    data.weight.grad = torch.full_like(data.weight, 7.0)
    make(data).step(data)
    assert data.weight.grad.tolist() == [7.0] * 3
    assert data.bias.grad is None


def test_gradients_may_be_expanded():
    """The gradient of a sum is one number in memory."""
    theta = torch.zeros(3, dtype=F64, requires_grad=True)
    y = torch.linspace(-1, 1, N, dtype=F64)
    sizes = {"num_data": N, "subsample_size": 8, "num_blocks": 8}
    sampler = sg.HMCECS([theta], **sizes, prior_precision=1.0)
    sampler.step(lambda i: -0.5 * (y[i] - theta.sum()) ** 2)
    assert sampler.num_divergences == 0


TWO_FACTORS = {"estimator": "signed", "subsample_size": 5, "num_factors": 2}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"subsample_size": 30}, r"30 data of .* \(rho = 1 - 1/30 = 0.967\)"),
        (TWO_FACTORS, r"2 factors of .* \(rho = 1 - 1/2 = 0.5\)"),
    ],
)
def test_fewer_blocks_warn(settings, words):
    data = Data()
    sampler = sg.HMCECS(data.params, num_data=N, num_blocks=100, seed=0, **settings)
    with pytest.warns(UserWarning, match="num_blocks = 100 is more than the " + words):
        sampler.step(data)
