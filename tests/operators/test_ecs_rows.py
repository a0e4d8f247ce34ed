"""HMC-ECS with the rows of a linear predictor, as the user says them."""

import re

import pytest
import torch
from ecs_data import F64, Data, N, Regression, chain, make
from short_chains import kept_state
from torch import Tensor
from torch.nn import functional as F

import torch_sgmcmc as sg
from torch_sgmcmc.samplers._ecs.taylor import LINEAR, PREDICTOR, TaylorSums, TaylorTerms

PROBES = torch.tensor([[0.7, -1.1, 0.4, 0.9], [-0.2, 0.5, 1.3, -0.6]], dtype=F64)

#: Log-likelihoods as functions of predictors and labels.
MODELS = {
    "logistic": lambda eta, y: y * eta - F.softplus(eta),
    "gaussian": lambda eta, y: -0.5 * (y - eta) ** 2,
    "linear": lambda eta, y: y * eta,
    "poisson": lambda eta, y: y * eta - eta.exp(),
}


def closure_of(data, model):
    return sg.PredictorLogLikelihood(
        lambda i: data.predictor(data.x[i]),
        lambda eta, i: model(eta, data.y[i]),
        rows=data.rows,
    )


@pytest.mark.parametrize("name", MODELS)
def test_expansions_and_sums(name):
    data, model = Regression(), MODELS[name]
    closure, params = closure_of(data, model), data.params
    x, eta = data.rows(torch.arange(N)), data.predictor(data.x).detach()
    eta.requires_grad_()
    v = model(eta, data.y)
    (first,) = torch.autograd.grad(v.sum(), eta, create_graph=True)
    second = torch.zeros_like(eta)
    if first.requires_grad:
        (second,) = torch.autograd.grad(first.sum(), eta)
    v, first = v.detach(), first.detach()

    chunks = torch.arange(N).split(25)
    sums = TaylorSums.at_current_params(closure, params, chunks, PREDICTOR, PROBES[0])
    torch.testing.assert_close(sums.value, v.sum())
    torch.testing.assert_close(sums.gradient, first @ x)
    torch.testing.assert_close(sums.hessian, x.t() @ (second[:, None] * x))

    indices = torch.tensor([5, 0, 5, 17, 59])
    for form in (PREDICTOR, LINEAR):
        terms = TaylorTerms.at_current_params(closure, params, indices, form, PROBES[0])
        torch.testing.assert_close(terms.values, v[indices])
        slopes = (first[:, None] * x)[indices]
        torch.testing.assert_close(terms.gradients[0], slopes)
        if form == PREDICTOR:
            assert torch.equal(terms.gradients[1], x[indices])
            torch.testing.assert_close(terms.scales, second[indices])


@pytest.mark.parametrize("settings", [{}, {"taylor_order": 1}])
def test_the_same_chain_as_without_them(settings):
    """The expansions are the same up to rounding."""
    ends = []
    for told in (True, False):
        data = Regression()
        closure = data.closure if told else data
        sampler = make(data, **settings)
        for _ in range(8):
            sampler.step(closure)
        ends.append([p.detach().clone() for p in data.params])
        form = sampler.state["control_variates"]["form"]
        assert form == ("linear" if settings else "predictor" if told else "whole")
    for ours, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_the_model_is_not_differentiated():
    """But for the data by which the rows are tested, and along trajectories."""
    data, graphs = Regression(), []

    def outputs(indices):
        eta = data.predictor(data.x[indices])
        graphs.append(eta.requires_grad)
        return eta

    closure = sg.PredictorLogLikelihood(outputs, data.of_predictors, rows=data.rows)
    make(data, chunk_size=25).set_anchor(closure, progress=False)
    assert graphs == [True, False, False, False]


@pytest.mark.parametrize("order", [2, 1])
@pytest.mark.parametrize(
    "wrong",
    [
        lambda data, i: F.pad(data.x[i], (1, 0), value=1.0),  # the bias first
        lambda data, i: F.pad(data.x[i], (0, 1)),
        lambda data, i: 2 * data.rows(i),
        lambda data, i: data.rows(i.flip(0)),
        lambda data, i: data.rows(i) / 0.0,
    ],
)
def test_rows_that_are_no_derivatives(wrong, order):
    data = Regression()
    closure = sg.PredictorLogLikelihood(
        lambda i: data.predictor(data.x[i]),
        data.of_predictors,
        rows=lambda i: wrong(data, i),
    )
    sampler = make(data, taylor_order=order, mass_matrix="identity")
    with pytest.raises(
        ValueError,
        match=r"Invalid rows: they are not the derivatives of the outputs by the param",
    ):
        sampler.set_anchor(closure, progress=False)
    assert not kept_state(sampler)
    sampler.step(data.closure)


def outputs(change):
    """Changed outputs of the model."""
    return {"outputs": lambda data, i: change(data.predictor(data.x[i]))}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"rows": lambda i: 3.0}, TypeError,
         "Invalid rows: of type float (must be a tensor)"),
        ({"rows": lambda i: torch.zeros(len(i), 3)}, ValueError,
         "Invalid rows: shape [60, 3] (must be [60, 4], one row for each ind"),
        (outputs(lambda eta: 3.0), TypeError,
         "Invalid outputs: of type float (must be a tensor)"),
        *((outputs(part), ValueError,
         f"Invalid outputs: shape [{shape}] (must be [60, ...], one r")
         for part, shape in ((torch.sum, ""), (lambda eta: eta[:1], "1"))),
        (outputs(torch.detach), RuntimeError,
         "outputs that do not depend on the parameters, or have no graph"),
        (outputs(lambda eta: eta[:, None]), ValueError,
         "Invalid outputs: shape [60, 1] (must be [60], one linear predictor"),
        ({"log_likelihood": lambda eta, i: eta.sum()}, ValueError,
         "Invalid log-likelihoods: shape [] (must be [60], one for each ind"),
    ],
)  # fmt: skip
def test_bad_parts(changes, error, message):
    data = Regression()
    outputs = changes.pop("outputs", lambda data, i: data.predictor(data.x[i]))
    parts = {"log_likelihood": data.of_predictors, "rows": data.rows, **changes}
    closure = sg.PredictorLogLikelihood(lambda i: outputs(data, i), **parts)
    sampler = make(data)
    with pytest.raises(error, match=re.escape(message)):
        sampler.step(closure)
    assert not kept_state(sampler)
    for name in ("outputs", "log_likelihood", "rows"):
        parts = {"outputs": data.predictor, "log_likelihood": data.of_predictors}
        bad = {**parts, name: 3}
        with pytest.raises(TypeError, match=f"Invalid {name}: int"):
            sg.PredictorLogLikelihood(**bad)


def test_another_closure_needs_another_anchor():
    data = Regression()
    sampler = make(data)
    sampler.step(data.closure)
    sampler.param_groups[0]["subsample_size"] = 9
    with pytest.raises(
        RuntimeError, match=r"need a PredictorLogLikelihood with rows: give step\(\)"
    ):
        sampler.step(data)
    sampler.set_anchor(data, progress=False)
    sampler.step(data)


def test_float32():
    data = Regression(dtype=torch.float32)
    sampler = make(data)
    for _ in range(30):
        sampler.step(data.closure)
    assert sampler.acceptance_rate > 0.7
    assert sampler.state["control_variates"]["form"] == "predictor"


def test_a_closure_that_computes_all_data():
    """A module whose computed size differs from the returned one."""
    data = Data()

    def all_of_them(indices):
        eta = data.x.mv(data.weight) + data.bias
        return (data.y * eta - F.softplus(eta))[indices]

    theirs = Data()
    other = make(theirs)
    sampler = sg.HMCECS(
        data.params, num_data=N, subsample_size=8, num_blocks=4, seed=3,
        prior_precision=1.0, step_size=0.4,
    )  # fmt: skip
    expected = chain(other, theirs, 9)
    for _ in range(9):
        sampler.step(all_of_them)
    now = torch.cat([p.detach().reshape(-1) for p in data.params])
    torch.testing.assert_close(now, expected[-1], rtol=1e-9, atol=1e-9)


G = torch.Generator().manual_seed(0)
X = torch.randn(50, 3, 2, generator=G)
Y = torch.arange(50)


class Counting:
    """The data, with a count of what is looked up."""

    def __init__(self, monkeypatch):
        self.count = 0
        whole = Tensor.index_select

        def index_select(t, dim, indices):
            self.count += len(indices)
            return whole(t, dim, indices)

        monkeypatch.setattr(Tensor, "index_select", index_select)


def test_equal_indexing(monkeypatch):
    counting, rows = Counting(monkeypatch), sg.RowCache(X, Y)
    indices = torch.randint(50, (40,), generator=G)
    kept = ((range(0), 80), (range(4, 9), 10), (range(0, 40, 8), 10))
    for change, looked_up in (*kept, (range(30), 80), (range(39, 40), 2)):
        where = torch.tensor(list(change), dtype=torch.int64)
        before, held = rows._rows, [t.clone() for t in rows._rows]
        indices = indices.index_copy(0, where, (indices[where] + 7) % 50)
        counting.count = 0
        xs, ys = rows(indices)
        assert torch.equal(xs, X[indices]) and torch.equal(ys, Y[indices])
        assert counting.count == looked_up
        # What was handed out is as it was.
        assert all(map(torch.equal, before, held))
        again = rows(indices)
        assert again[0] is xs and counting.count == looked_up


def test_other_lengths_and_changed_indices():
    rows = sg.RowCache(X)
    for size in (10, 12, 0, 0, 3):
        indices = torch.randint(50, (size,), generator=G)
        assert torch.equal(rows(indices)[0], X[indices])
    indices.add_(1).remainder_(50)  # the same object
    assert torch.equal(rows(indices)[0], X[indices])


@pytest.mark.parametrize(
    ("tensors", "shapes"),
    [((), "[]"), ((X, Y[:9]), "[[50, 3, 2], [9]]"), ((torch.ones(()),), "[[]]")],
)
def test_errors(tensors, shapes):
    text = f"Invalid tensors: shapes {shapes} (must be one or more, of equal length)"
    with pytest.raises(ValueError, match=re.escape(text)):
        sg.RowCache(*tensors)
