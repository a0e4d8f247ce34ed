"""EWSG as a class: its closure, decisions, settings, and what it shares with SGHMC."""

import copy
import math
from itertools import chain, repeat

import pytest
import short_chains as short
import torch
from ewsg_chains import GOOD, Draws
from failed_steps import step_fails
from reference import same_bits
from torch import nn

import torch_sgmcmc as sg


@pytest.mark.parametrize("length", [0, 1, 4])
def test_the_closure_draws_all_minibatches(length):
    params = short.two()
    sampler = sg.EWSG(params, **GOOD, index_chain_length=length)
    closure = Draws(params)
    used = set()
    for step in range(30):
        with torch.no_grad():
            loss = sampler.step(closure)
        drawn = closure.grads[step * (length + 1) :]
        assert len(drawn) == length + 1
        # Gradients are cleared before each call, and those in use are of one draw.
        assert closure.found[step * (length + 1) :] == [[None, None]] * (length + 1)
        (index,) = (i for i, grads in enumerate(drawn) if grads[0] is params[0].grad)
        assert drawn[index][1] is params[1].grad
        used.add(index)
        # The first loss, a fair one.
        assert loss is closure.losses[step * (length + 1)]
    assert used == set(range(length + 1))


def test_gradients_are_not_changed():
    params = short.two()
    sampler = sg.EWSG(params, **GOOD, index_chain_length=3)
    seen = []
    closure = Draws(params)

    def watching():
        loss = closure()
        seen.extend((p.grad, p.grad.clone()) for p in params)
        return loss

    for _ in range(10):
        sampler.step(watching)
    assert all(same_bits(grad, kept) for grad, kept in seen)


def test_a_closure_may_clear_gradients_itself_and_accumulate():
    chains = []
    for parts in (1, 4):
        params = short.two()
        sampler = sg.EWSG(params, **GOOD)
        g = torch.Generator().manual_seed(0)

        def closure(params=params, sampler=sampler, g=g, parts=parts):
            if parts > 1:
                sampler.zero_grad(set_to_none=False)
            scale = 2.0 ** torch.randint(3, (), generator=g)
            for _ in range(parts):  # powers of two add without rounding
                (scale / parts * params[0].sum()).backward()
                (scale / parts * params[1].sum()).backward()

        for _ in range(5):
            sampler.step(closure)
        chains.append(params)
    short.assert_same(*chains)


SAME = (
    "EWSG got the gradient of the minibatch before from 100 calls of the closure "
    "running, which must draw a fresh minibatch at each call (in Lightning, set "
    "self.automatic_optimization = False, and in training_step call "
    "self.optimizers().step(closure) with a closure that draws a minibatch and calls "
    "self.manual_backward(loss)). If each minibatch is all data, there is nothing to "
    "choose from: use SGHMC, or index_chain_length=0"
)


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("num_chains", [None, 3])
def test_minibatches_that_are_always_the_same(length, num_chains):
    params = [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3))]
    sampler = sg.EWSG(params, **GOOD, index_chain_length=length, num_chains=num_chains)

    def step(minibatch):
        def closure():  # as of `for x, y in loader: sampler.step(...)`
            loss = sum((minibatch * p).square().sum() for p in params)
            loss.backward()
            return loss

        return closure

    for i in range(99 // length):
        sampler.step(step(1 + i % 5))
    for _ in range(2):  # and it stays so
        step_fails(sampler, step(2), RuntimeError, SAME)
    for group in sampler.param_groups:
        group["index_chain_length"] = 0
    sampler.step(step(2))


def test_minibatches_that_are_often_the_same():
    p = nn.Parameter(torch.ones(4))

    def steps(gradients):
        sampler = sg.EWSG([p], **GOOD)
        for _ in range(300):
            sampler.step(
                lambda: setattr(p, "grad", torch.full_like(p, next(gradients)))
            )

    # One other gradient before the hundredth clears all doubts.
    steps(chain([1.0] * 197, [2.0], repeat(1.0)))
    # Gradients of zero are those of a loss without data.
    steps(repeat(0.0))


def test_minibatches_of_one_of_two_data():
    # Every second proposal is the minibatch before. The chain that loads the state
    # of another is not held to what that one saw.
    g = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.ones(4))

    def closure():
        datum = torch.tensor([-1.0, 1.0])[torch.randint(2, (), generator=g)]
        loss = (p - datum).square().sum() / 2
        loss.backward()
        return loss

    for seed in range(5):
        sampler = sg.EWSG([p], **{**GOOD, "num_data": 2, "seed": seed})
        for _ in range(100):
            sampler.step(closure)


def test_gradients_written_over():
    message = (
        "EWSG got the gradients of a minibatch in the memory of the previous "
        "minibatch's, which it still needs: the closure must not reuse gradients (for "
        "DistributedDataParallel, set gradient_as_bucket_view=False)"
    )
    p = nn.Parameter(torch.ones(3))
    buffer = torch.zeros(3)

    def closure():
        buffer.normal_()
        p.grad = buffer.view(3)

    step_fails(sg.EWSG([p], **GOOD), closure, RuntimeError, message)
    # One draw does not need the memory of another, and empty ones have none.
    sg.EWSG([p], **GOOD, index_chain_length=0).step(closure)
    empty = nn.Parameter(torch.ones(0))
    sg.EWSG([empty], **GOOD).step(lambda: setattr(empty, "grad", torch.ones(0)))


def test_acceptance_rate():
    params = short.two()
    sampler = sg.EWSG(params, **GOOD, index_chain_length=0)
    assert math.isnan(sampler.acceptance_rate)
    sampler.step(Draws(params))
    assert math.isnan(sampler.acceptance_rate)
    sampler = sg.EWSG(params, **GOOD, index_chain_length=3)
    closure = Draws(params)
    for _ in range(10):
        sampler.step(closure)
    rate = sampler.acceptance_rate
    assert isinstance(rate, float)
    assert sampler.param_groups[0]["num_proposals"] == 30
    assert rate == sampler.param_groups[0]["num_accepted"] / 30 > 0
    other = sg.EWSG(short.two(), **GOOD)
    other.load_state_dict(copy.deepcopy(sampler.state_dict()))
    assert other.acceptance_rate == rate
    # Equal minibatches are always accepted.
    for p in params:
        p.data.zero_()
    sampler = sg.EWSG(params, **GOOD)
    for _ in range(5):
        sampler.step(lambda: [setattr(p, "grad", torch.ones_like(p)) for p in params])
    assert sampler.acceptance_rate == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_proposals_ewsg_equals_sghmc(dtype):
    params, others = short.make_params(dtype), short.make_params(dtype)
    target = {**short.TARGET, "momentum": 0.8, "seed": 3}
    sampler = sg.EWSG(params, **target, index_chain_length=0)
    sghmc = sg.SGHMC(others, **target)
    for step in range(5):
        short.take_step(sampler, params, step)
        short.take_step(sghmc, others, step)
    short.assert_same(params, others)
    for p, q in zip(params, others, strict=True):
        assert same_bits(sampler.state[p]["momentum"], sghmc.state[q]["momentum"])


def test_the_overdamped_variant_is_sgld_with_weights():
    params, others = short.make_params(), short.make_params()
    sampler = sg.EWSG(params, **short.TARGET, momentum=0, index_chain_length=2, seed=3)
    sgld = sg.SGLD(others, **short.TARGET, seed=3)
    for step in range(20):
        short.take_step(sampler, params, step)
        for p, q in zip(params, others, strict=True):
            q.grad = p.grad
        sgld.step()
    short.assert_same(params, others)
    assert short.kept_state(sampler) == {}
    assert 0 < sampler.acceptance_rate < 1


def test_a_schedule_switches_momentum_off():
    params = short.two()
    sampler = sg.EWSG(params, **GOOD)
    closure = Draws(params)
    sampler.step(closure)
    assert set(sampler.state) == set(params)
    sampler.param_groups[0]["momentum"] = 0.0
    sampler.step(closure)
    assert short.kept_state(sampler) == {}
    sampler.param_groups[0]["momentum"] = 0.5
    sampler.step(closure)
    assert set(sampler.state) == set(params)


def test_with_exact_gradients_ewsg_equals_sghmc():
    # All minibatches weigh the same: to the last bit, so that all are accepted.
    params, others = short.make_params(), short.make_params()
    sampler = sg.EWSG(params, **short.TARGET, index_chain_length=3, seed=3)
    sghmc = sg.SGHMC(others, **short.TARGET, seed=3)
    for step in range(5):
        sampler.step(lambda step=step: short.set_grads(params, step))
        short.take_step(sghmc, others, step)
    short.assert_same(params, others)
    assert sampler.acceptance_rate == 1.0


def test_settings_that_differ_between_groups():
    params = short.two()
    sampler = sg.EWSG([{"params": [p]} for p in params], **GOOD)
    for name, values in (("index_chain_length", [3, 1]), ("num_chains", [1, None])):
        sampler.param_groups[0][name] = values[0]
        equal = f"{values} in the param groups (must be equal: there is one decision"
        message = f"Invalid {name}: {equal} for all)"

        step_fails(sampler, Draws(params), ValueError, message)
        sampler.param_groups[0][name] = values[1]
    # For all groups it may change, and a new group follows.
    for group in sampler.param_groups:
        group["index_chain_length"] = 2
    added = nn.Parameter(torch.ones(4))
    sampler.add_param_group({"params": [added]})
    closure = Draws([*params, added])
    sampler.step(closure)
    assert len(closure.losses) == 3


def test_a_learning_rate_of_zero_is_no_special_case():
    params = short.two()
    sampler = sg.EWSG(params, **{**GOOD, "lr": 0.0})
    before = [p.detach().clone() for p in params]
    sampler.step(Draws(params))
    short.assert_same(params, before)


def batched(chains):
    g = torch.Generator().manual_seed(2)
    shapes = [(chains,), (chains, 3), (chains, 2, 130)]
    return [nn.Parameter(torch.randn(s, generator=g)) for s in shapes]


def test_one_chain_with_a_leading_dimension_is_one_chain():
    params, others = batched(1), batched(1)
    for ps, chains in ((params, 1), (others, None)):
        sampler = sg.EWSG(ps, **short.TARGET, num_chains=chains, seed=4)
        closure = Draws(ps)
        for _ in range(10):
            sampler.step(closure)
    short.assert_same(params, others)


def test_many_chains_resume_bit_for_bit():
    params = batched(20)
    sampler = sg.EWSG(params, **short.TARGET, num_chains=20, seed=4)
    short.advance(sampler, params, range(5))
    others = [nn.Parameter(p.detach().clone()) for p in params]
    twin = sg.EWSG(others, lr=1.0, num_data=1, num_chains=20)
    twin.load_state_dict(copy.deepcopy(sampler.state_dict()))
    for s, ps in ((sampler, params), (twin, others)):
        short.advance(s, ps, range(5, 10))
    short.assert_same(params, others)
    assert twin.acceptance_rate == sampler.acceptance_rate > 0


def test_chains_in_several_groups():
    expected = batched(20)
    whole = sg.EWSG(expected, **short.TARGET, num_chains=20, seed=4)
    short.advance(whole, expected, range(9))
    params = batched(20)
    groups = [{"params": params[:1]}, {"params": params[1:]}]
    sampler = sg.EWSG(groups, **short.TARGET, num_chains=20, seed=4)
    short.advance(sampler, params, range(9))
    short.assert_same(params, expected)
