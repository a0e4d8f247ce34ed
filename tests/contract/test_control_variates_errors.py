"""Errors of control variates, which change nothing."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from control_variate_problems import Problem, assert_same
from failed_steps import refused
from torch import nn

import torch_sgmcmc as sg

FUNCTION = "int (must be a function)"
EVERY = "refresh_every: 0 (must be >= 1)"


@contextmanager
def fails(problem, kind, text):
    """Expects this error; parameters and gradients are as before."""
    for i, p in enumerate(problem.params):
        p.grad = torch.full_like(p, i)
    addresses = [p.data_ptr() for p in problem.params]
    values, grads = problem.values(), problem.grads()
    with refused(kind, text):
        yield
    assert_same(problem.values(), values)
    assert_same(problem.grads(), grads)
    assert [p.data_ptr() for p in problem.params] == addresses


def test_constructor_errors():
    problem = Problem()
    sampler, loss = problem.sampler, problem.loss_fn
    sgd = torch.optim.SGD(problem.params, 0.1)
    sg.ControlVariates(sgd, loss)  # an optimizer is fine: there is no schedule
    make = sg.ControlVariates
    ours, svrg = partial(make, sampler, loss), partial(sg.SVRG, loss_fn=loss, loader=[])
    no_optimizer = (
        "sampler: of type list (must be a sampler or another torch optimizer)"
    )
    no_sampler = "sampler: got SGD (must be a torch_sgmcmc sampler)"
    for call, kind, text in (
        (partial(make, problem.params, loss), TypeError, no_optimizer),
        (partial(make, sampler, 3), TypeError, f"loss_fn: {FUNCTION}"),
        (partial(ours, batch_size=3), TypeError, f"batch_size: {FUNCTION}"),
        (partial(ours, progress=1), TypeError, "progress: 1 (must be a bool)"),
        (partial(svrg, sgd, refresh_every=1), TypeError, no_sampler),
        (partial(svrg, sampler, refresh_every=0), ValueError, EVERY),
    ):
        with fails(problem, kind, f"Invalid {text}"):
            call()


def test_there_must_be_an_anchor():
    problem = Problem()
    estimator = sg.ControlVariates(problem.sampler, problem.loss_fn)
    text = "ControlVariates has no anchor yet: call set_anchor() first"
    with fails(problem, RuntimeError, text):
        estimator.backward(problem.batch([0]))


def test_there_must_be_data():
    problem = Problem()
    text = "Invalid loader: it has no data"
    estimator = problem.estimator()
    anchor = estimator.state_dict()
    with fails(problem, ValueError, text):
        estimator.set_anchor([])
    assert_same(estimator.state_dict()["anchor"], anchor["anchor"])
    # A generator that was used up.
    used = (problem.sampler, problem.loss_fn, iter(problem.loader()))
    svrg = sg.SVRG(*used, refresh_every=1)
    svrg.set_anchor()
    with fails(problem, ValueError, text):
        svrg.set_anchor()


def test_the_parameters_must_be_those_of_the_anchor():
    text = (
        "ControlVariates has an anchor for other parameters than the sampler's (others "
        "require gradients, or a shape, dtype or device has changed): call "
        "set_anchor() again"
    )

    def shape(problem):
        problem.params[1].data = torch.zeros(5, dtype=torch.float64)

    def dtype(problem):
        problem.params[1].data = problem.params[1].data.float()

    def added(problem):
        problem.sampler.add_param_group({"params": [nn.Parameter(torch.ones(1))]})

    def frozen(problem):
        problem.params[2].requires_grad_(False)

    def swapped(problem):
        other = nn.Parameter(torch.ones_like(problem.params[2]))
        problem.sampler.param_groups[0]["params"].append(other)
        problem.params[2].requires_grad_(False)

    for change in (shape, dtype, added, frozen, swapped):
        problem = Problem()
        estimator = problem.estimator()
        change(problem)
        with fails(problem, RuntimeError, text):
            estimator.backward(problem.batch([0]))


@pytest.mark.parametrize("at_anchor", [True, False])
def test_an_exception_changes_nothing(at_anchor):
    problem = Problem()
    estimator = problem.estimator()
    problem.move()
    good, calls = estimator.loss_fn, []

    def loss_fn(batch):
        calls.append(1)
        if len(calls) == (1 if at_anchor else 2):
            raise KeyError("no such datum")
        return good(batch)

    estimator.loss_fn = loss_fn
    with fails(problem, KeyError, "'no such datum'"):
        estimator.backward(problem.batch([0]))
    calls.clear()
    with fails(problem, KeyError, "'no such datum'"):
        estimator.set_anchor(problem.loader())


def test_the_loss_must_be_one_number_with_a_graph():
    problem = Problem()
    estimator = problem.estimator()
    right = problem.loss_fn

    def calls_backward(batch):
        loss = right(batch)
        loss.backward()
        return loss

    three_by_four = problem.params[0]
    functions = {
        "has made gradients: it must return the loss and leave backward() to the "
        "estimator": calls_backward,
        "returned a loss without a graph: it must compute it from the sampler's "
        "parameters, with gradients enabled": lambda b: right(b).detach(),
        "returned float, expected the loss as a tensor": lambda b: right(b).item(),
        "returned a tensor of shape [3, 4], expected one number":
         lambda b: three_by_four * right(b),
    }  # fmt: skip
    for text, loss_fn in functions.items():
        estimator.loss_fn = loss_fn
        with fails(problem, RuntimeError, f"loss_fn {text}"):
            estimator.backward(problem.batch([0]))
        with fails(problem, RuntimeError, f"loss_fn {text}"):
            estimator.set_anchor(problem.loader())


def test_weights_and_batch_sizes():
    problem = Problem()
    estimator = problem.estimator()
    for weight in (-0.5, float("nan")):
        text = f"Invalid weight: {weight} (must be finite and >= 0)"
        with fails(problem, ValueError, text):
            estimator.backward(problem.batch([0]), weight=weight)
    for size in (0, 2.0, True):
        estimator.batch_size = lambda batch, s=size: s
        text = f"batch_size returned {size!r} for a batch (must be an int >= 1)"
        with fails(problem, RuntimeError, text):
            estimator.set_anchor(problem.loader())
    unknown = sg.ControlVariates(problem.sampler, problem.loss_fn)
    text = "the number of data in a batch of type str is unknown: give batch_size, a"
    with fails(problem, RuntimeError, f"{text} function that returns it"):
        unknown.set_anchor(["text"])


def test_a_gradient_that_is_not_finite():
    problem = Problem()
    estimator = problem.estimator()
    anchor = estimator.state_dict()
    problem.x[4] = torch.nan
    text = "the full gradient is not finite at the present parameters"
    with fails(problem, RuntimeError, text):
        estimator.set_anchor(problem.loader())
    assert_same(estimator.state_dict()["full_grads"], anchor["full_grads"])


def test_gradients_that_are_not_dense():
    table = nn.Embedding(5, 2, sparse=True)
    sampler = sg.SGLD(table.parameters(), 0.1, num_data=5)
    estimator = sg.ControlVariates(sampler, lambda batch: table(batch).square().mean())
    embeddings = "(for nn.Embedding, use sparse=False)"
    text = f"ControlVariates does not support sparse gradients {embeddings}"
    with refused(RuntimeError, text):
        estimator.set_anchor([torch.arange(5)])


def test_gradients_in_the_memory_of_the_anchors():
    problem = Problem()
    estimator = problem.estimator()
    buffers = [torch.zeros_like(p) for p in problem.params]

    def into(buffer, p):
        assert p.grad is not None
        p.grad = buffer.copy_(p.grad)

    for p, buffer in zip(problem.params, buffers, strict=True):
        p.register_post_accumulate_grad_hook(partial(into, buffer))
    text = (
        "ControlVariates got the gradients at θ in the memory of the gradients at the "
        "anchor, still in use: gradients must not be reused (for "
        "DistributedDataParallel, set gradient_as_bucket_view=False)"
    )
    with fails(problem, RuntimeError, text):
        estimator.backward(problem.batch([0]))


def test_state_dicts_of_other_parameters():
    problem = Problem()
    estimator = problem.svrg()
    estimator.set_anchor()
    good = estimator.state_dict()
    no_tensor = "state_dict: anchor of parameter 0 is a NoneType (must be a Tensor)"
    shape = "state_dict: full_grads of parameter 0 has shape [1], expected [3, 4]"
    for key, value, text in (
        ("anchor", good["anchor"][:2], "state_dict: anchor has 2 tensors, expected 3"),
        ("anchor", [None, *good["anchor"][1:]], no_tensor),
        ("full_grads", [torch.zeros(1), *good["full_grads"][1:]], shape),
        ("anchor_step", -1, "anchor_step: -1 (must be >= 0)"),
        ("refresh_every", 0, EVERY),
    ):
        with fails(problem, ValueError, f"Invalid {text}"):
            estimator.load_state_dict({**good, key: value})
        assert_same(estimator.state_dict()["anchor"], good["anchor"])
        assert estimator.refresh_every == 3
