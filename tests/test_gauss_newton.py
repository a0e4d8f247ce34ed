"""HMC-ECS with Gauss-Newton control variates: expansions, sums, interface, errors."""

from __future__ import annotations

import io
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_sgmcmc as sg
from torch_sgmcmc.core.closures import exchanged
from torch_sgmcmc.ecs import taylor
from torch_sgmcmc.ecs.expansions import expand
from torch_sgmcmc.ecs.gauss_newton import GaussNewtonTerms, gauss_newton_sums
from torch_sgmcmc.ecs.jacobians import jacobians
from torch_sgmcmc.ecs.target import place

F64 = torch.float64
N, D = 40, 17


class Network:
    """A network of 2 inputs, 3 hidden units and 2 outputs, in four tensors."""

    def __init__(self, kind: str = "softmax", dtype: torch.dtype = F64) -> None:
        g = torch.Generator().manual_seed(4)
        self.x = torch.randn(N, 2, generator=g, dtype=F64).to(dtype)
        self.y = torch.randint(2, (N,), generator=g)
        self.params = [
            (0.6 * torch.randn(shape, generator=g, dtype=F64))
            .to(dtype)
            .requires_grad_()
            for shape in ((3, 2), (3,), (2, 3), (2,))
        ]
        self.kind = kind

    def outputs(self, indices: Tensor) -> Tensor:
        w, b, v, c = self.params
        f = torch.tanh(self.x[indices] @ w.t() + b) @ v.t() + c
        return f[:, 0] if self.kind == "regression" else f

    def of_outputs(self, f: Tensor, indices: Tensor) -> Tensor:
        y = self.y[indices]
        if self.kind == "regression":
            return -0.5 * (y - f) ** 2
        if self.kind == "linear":
            return f.gather(1, y[:, None])[:, 0]
        return -nn.functional.cross_entropy(f, y, reduction="none")

    @property
    def closure(self) -> sg.LogLikelihood:
        return sg.LogLikelihood(self.outputs, self.of_outputs)


def make(model: Network, **more: Any) -> sg.HMCECS:
    common = {"num_data": N, "subsample_size": 9, "num_blocks": 4, "seed": 3}
    common.update({"prior_precision": 4.0, "step_size": 0.3, "chunk_size": 25})
    common.update({"mass_matrix": "diagonal", "control_variate": "gauss-newton"})
    return sg.HMCECS(model.params, **{**common, **more})


def brute_force(model: Network) -> tuple[Tensor, Tensor, Tensor]:
    """ℓ, its gradient, and the proxy of its Hessian, one datum after the other."""
    shapes = [p.shape for p in model.params]
    sizes = [p.numel() for p in model.params]
    theta = torch.cat([p.detach().flatten() for p in model.params])
    own = model.params
    values, gradients, matrices = [], [], []
    for i in range(N):
        index = torch.tensor([i])

        def f(t: Tensor, index: Tensor = index) -> Tensor:
            model.params = [
                part.view(s) for part, s in zip(t.split(sizes), shapes, strict=True)
            ]
            return model.outputs(index).flatten()

        def value(f: Tensor, index: Tensor = index) -> Tensor:
            shaped = f if model.kind == "regression" else f[None]
            return model.of_outputs(shaped, index)[0]

        at = f(theta)
        j = torch.autograd.functional.jacobian(f, theta)
        r = torch.autograd.functional.jacobian(value, at)
        curvature = torch.autograd.functional.hessian(value, at)
        values.append(value(at))
        gradients.append(r @ j)
        matrices.append(j.t() @ curvature @ j)
    model.params = own
    return torch.stack(values), torch.stack(gradients), torch.stack(matrices)


# ---- Expansions --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["softmax", "regression", "linear"])
def test_expansions_and_sums(kind: str) -> None:
    model = Network(kind)
    v, g, h = brute_force(model)
    chunks = torch.arange(N).split(23)
    sums = gauss_newton_sums(model.closure, model.params, chunks)
    indices = torch.tensor([5, 0, 5, 17, 39, 21, 1, 2, 3, 30])
    terms = GaussNewtonTerms.at_present(model.closure, model.params, indices)
    delta = torch.linspace(-1, 0.7, D, dtype=F64)
    values, bends = terms.expand(delta)
    exact = {"rtol": 1e-11, "atol": 1e-12}
    q = v + g @ delta + 0.5 * (h @ delta) @ delta
    torch.testing.assert_close(values, q[indices], **exact)
    weights = torch.linspace(-2, 3, len(indices), dtype=F64)
    slopes = g + h @ delta
    expected = weights @ slopes[indices]
    torch.testing.assert_close(terms.pull(weights, bends), expected, **exact)
    total, slope = sums.at(delta)
    torch.testing.assert_close(total, q.sum(), **exact)
    torch.testing.assert_close(slope, slopes.sum(0), **exact)
    torch.testing.assert_close(sums.hessian, h.sum(0), **exact)
    # Parts and what is joined of them.
    joined = terms.join([terms.part(7, 10), terms.part(4, 4), terms.part(0, 3)])
    again = joined.expand(delta)[0]
    torch.testing.assert_close(again, values[[7, 8, 9, 0, 1, 2]], **exact)


def test_jacobians_of_more_data_than_fit_into_one_pass() -> None:
    model = Network()
    indices = torch.arange(N)
    outputs, rows = jacobians(model.outputs, model.params, indices)
    torch.testing.assert_close(outputs, model.outputs(indices).detach())
    for c in range(2):
        for i in (0, 7, 8, 39):
            grads = torch.autograd.grad(model.outputs(indices)[i, c], model.params)
            torch.testing.assert_close(
                rows[i, c], torch.cat([g.flatten() for g in grads])
            )


def test_a_linear_model_has_no_other_curvature() -> None:
    """In a softmax regression the Gauss-Newton matrix is the Hessian."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(N, 3, generator=g, dtype=F64)
    y = torch.randint(3, (N,), generator=g)
    ends = []
    for control_variate in ("gauss-newton", 2):
        w = torch.zeros(3, 3, dtype=F64, requires_grad=True)
        closure = sg.LogLikelihood(
            lambda i, w=w: x[i] @ w.t(),
            lambda f, i: -nn.functional.cross_entropy(f, y[i], reduction="none"),
        )
        sampler = sg.HMCECS(
            [w], num_data=N, subsample_size=9, prior_precision=1.0, seed=0,
            control_variate=control_variate,
        )  # fmt: skip
        for _ in range(6):
            sampler.step(closure)
        ends.append((w.detach().clone(), sampler.state["control_variates"]))
    torch.testing.assert_close(ends[0][0], ends[1][0], rtol=1e-9, atol=1e-9)
    # With the memory of 3 d numbers a datum, and not d².
    assert ends[0][1]["form"] == "gauss-newton"
    torch.testing.assert_close(ends[0][1]["hessian"], ends[1][1]["hessian"])


def test_first_order_in_many_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """By data, where there are more parameters than that, as by parameters."""
    model, unused = Network(), torch.zeros(D, dtype=F64)
    indices = torch.arange(N)
    both = []
    for many in (D - 1, D):
        monkeypatch.setattr(taylor, "_MANY", many)
        both.append(
            taylor.TaylorTerms.at_present(
                model.closure, model.params, indices, taylor.LINEAR, unused
            )
        )
    for ours, theirs in zip(*(terms.fields() for terms in both), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    _, g, _ = brute_force(model)
    torch.testing.assert_close(both[0].slopes[0], g)


# ---- The sampler -------------------------------------------------------------------


def test_gradients_are_derivatives() -> None:
    model = Network()
    sampler = make(model, temperature=1.3)
    sampler.step(model.closure)
    target = sampler._target(model.closure)
    subsample = sampler._subsample(model.closure)
    theta = torch.linspace(-0.5, 0.6, D, dtype=F64)
    gradient = target.at(subsample, theta).gradient
    for i in range(D):
        step = torch.zeros(D, dtype=F64)
        step[i] = 1e-5
        up, down = (target.at(subsample, theta + s * step).log for s in (1, -1))
        assert math.isclose(
            float(up - down) / 2e-5, float(gradient[i]), rel_tol=1e-6, abs_tol=1e-5
        )


def test_a_subsample_of_everything_is_hmc() -> None:
    """Then the proxies cancel, if those of the data add up to that of the sum."""
    model = Network()
    sampler = make(model, subsample_size=N)
    sampler.step(model.closure)
    target = sampler._target(model.closure)
    everything = torch.arange(N)

    def error(form: str) -> float:
        subsample = sampler._subsample(model.closure)
        subsample.indices = everything
        probe = torch.zeros(D, dtype=F64)
        params = [torch.empty_like(p) for p in model.params]
        place(params, target.anchor)
        with exchanged(model.params, params):
            subsample.terms = expand(
                model.closure, model.params, everything, form, probe
            )
        theta = torch.linspace(-0.5, 0.6, D, dtype=F64)
        point = target.at(subsample, theta)
        whole = model.closure(everything).sum().detach() - 2.0 * (theta @ theta)
        return abs(float(point.log + 0.5 * point.estimate.variance - whole))

    assert error("gauss-newton") < 1e-9
    # A known bug: sums of one proxy, terms of another.
    assert error("none") > 0.01


@pytest.mark.parametrize("variant", ["perturbed", "signed"])
def test_resuming_is_exact(variant: str) -> None:
    model = Network()
    sampler = make(model, variant=variant, num_products=5)
    for _ in range(5):
        sampler.step(model.closure)
    buffer = io.BytesIO()
    torch.save(sampler.state_dict(), buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    other = Network()
    for p, q in zip(other.params, model.params, strict=True):
        p.data.copy_(q.data)
    twin = make(
        other, variant=variant, control_variate=1, mass_matrix="identity", seed=99
    )
    twin.load_state_dict(saved)
    for _ in range(6):
        sampler.step(model.closure)
        twin.step(other.closure)
    for p, q in zip(model.params, other.params, strict=True):
        assert torch.equal(p, q)


def test_no_data_in_the_subsample() -> None:
    """Of two factors with Poisson(1) minibatches each, some have none."""
    model = Network()
    sampler = make(
        model, variant="signed", num_products=2, subsample_size=1, num_blocks=2
    )
    sizes = set()
    for _ in range(25):
        sampler.step(model.closure)
        sizes.add(len(sampler.state["subsample"]["indices"]))
    assert 0 in sizes
    assert len(sizes) > 2


def test_float32_parameters() -> None:
    model = Network(dtype=torch.float32)
    sampler = make(model)
    for _ in range(10):
        sampler.step(model.closure)
    assert sampler.num_divergences == 0
    assert sampler.state["control_variates"]["hessian"].dtype == F64


@pytest.mark.parametrize("mass_matrix", ["diagonal", "dense"])
def test_the_mass(mass_matrix: str) -> None:
    model = Network()
    sampler = make(model, mass_matrix=mass_matrix, temperature=2.0)
    sampler.set_anchor(model.closure, progress=False)
    factor = sampler.state["control_variates"]["whitening"]
    _, _, h = brute_force(model)
    precision = (4.0 * torch.eye(D, dtype=F64) - h.sum(0)) / 2.0
    if mass_matrix == "diagonal":
        torch.testing.assert_close(factor**-2, precision.diagonal())
    else:
        torch.testing.assert_close(torch.linalg.inv(factor @ factor.t()), precision)


# ---- Errors ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "error", "wanted"),
    [
        ("block-diagonal", ValueError, "must be an int or 'gauss-newton'"),
        ([[3, 0], [1]], TypeError, "must be an int, got list"),
        ([], TypeError, "must be an int, got list"),
        (True, TypeError, "must be an int, got bool"),
        (3, ValueError, "must be in [0, 2]"),
    ],
)
def test_there_are_no_others(value: Any, error: Any, wanted: str) -> None:
    message = re.escape(f"Invalid control_variate: {value!r} ({wanted})")
    with pytest.raises(error, match=message):
        make(Network(), control_variate=value)


def test_a_closure_that_does_not_show_its_outputs() -> None:
    model = Network()
    sampler = make(model)
    closure = model.closure
    with pytest.raises(
        TypeError,
        match=r"Invalid closure: got function \(must be a LogLikelihood for Gauss-Newt"
        r"on control variates\)",
    ):
        sampler.step(lambda i: closure(i))
    assert not sampler.state
    sampler.step(closure)


def test_bad_log_likelihoods() -> None:
    model, indices = Network(), torch.tensor([3, 4])
    with pytest.raises(TypeError, match=r"Invalid outputs: None \(must be callable, g"):
        sg.LogLikelihood(None, model.of_outputs)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Invalid log_likelihood: 3 \(must be callab"):
        sg.LogLikelihood(model.outputs, 3)  # type: ignore[arg-type]
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda i: 3.0, TypeError, r"Invalid outputs: got float \(must be a tensor\)"),
        (
            lambda i: model.outputs(i).sum(),
            ValueError,
            r"Invalid outputs: shape \[\] \(must be \[2, ...\], one row for each inde",
        ),
        (lambda i: model.outputs(i)[:1], ValueError, r"shape \[1, 2\] \(must be \[2, "),
        (
            lambda i: model.outputs(i).detach(),
            RuntimeError,
            "outputs that do not depend on the parameters, or have no graph",
        ),
    ]
    for outputs, error, message in cases:
        closure = sg.LogLikelihood(outputs, model.of_outputs)
        with pytest.raises(error, match=message):
            closure(indices)
    short = sg.LogLikelihood(model.outputs, lambda f, i: f[:1, 0])
    with pytest.raises(ValueError, match=r"shape \[1\] \(must be \[.*\], one for each"):
        make(model).step(short)
    right = model.of_outputs(model.outputs(indices), indices)
    torch.testing.assert_close(model.closure(indices), right)
