"""HMC-ECS with Gauss-Newton control variates: expansions, sums, interface, errors."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_sgmcmc as sg
from torch_sgmcmc.ecs import taylor
from torch_sgmcmc.ecs.expansions import block_ranges, expand, sum_up
from torch_sgmcmc.ecs.jacobians import jacobians

F64 = torch.float64
N, D = 40, 17
CHOICES = ("gauss-newton", "block-diagonal", [[3, 0], [1]], "diagonal")


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


def make(model: Network, control_variate: Any, **more: Any) -> sg.HMCECS:
    common = {"num_data": N, "subsample_size": 9, "num_blocks": 4, "seed": 3}
    common.update({"prior_precision": 4.0, "step_size": 0.3, "chunk_size": 25})
    common.update({"mass_matrix": "diagonal"})
    return sg.HMCECS(
        model.params,
        control_variate=control_variate,
        **{**common, **more},
    )


def brute_force(model: Network, control_variate: Any) -> tuple[Tensor, Tensor, Tensor]:
    """ℓ, its gradient, and the proxy of its Hessian, one datum after the other."""
    shapes = [p.shape for p in model.params]
    sizes = [p.numel() for p in model.params]
    theta = torch.cat([p.detach().flatten() for p in model.params])
    own = model.params
    values, gradients, matrices = [], [], []
    blocks = [[0], [1], [2], [3]] if control_variate == "block-diagonal" else []
    if control_variate == "gauss-newton":
        blocks = [[0, 1, 2, 3]]
    elif isinstance(control_variate, list):
        blocks = control_variate
    of_element = torch.repeat_interleave(torch.arange(4), torch.tensor(sizes))
    mask = torch.zeros(D, D, dtype=F64)
    for block in blocks:
        inside = torch.isin(of_element, torch.tensor(list(block))).to(F64)
        mask += torch.outer(inside, inside)
    if control_variate == "diagonal":
        mask = torch.eye(D, dtype=F64)
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
        matrices.append(mask * (j.t() @ curvature @ j))
    model.params = own
    return torch.stack(values), torch.stack(gradients), torch.stack(matrices)


def built(model: Network, control_variate: Any) -> tuple[Any, Any, Any]:
    """The sums over all data, the expansions of some, and the indices of these."""
    ranges = block_ranges(control_variate, [p.numel() for p in model.params])
    unused = torch.zeros(2, D, dtype=F64)
    sums = sum_up(
        model.closure,
        model.params,
        lambda: torch.arange(N).split(23),
        unused,
        control_variate=control_variate,
        blocks=ranges,
        with_hessian=True,
    )
    indices = torch.tensor([5, 0, 5, 17, 39, 21, 1, 2, 3, 30])
    kept = {"form": sums.form, "anchor": unused[0], "blocks": ranges}
    terms = expand(model.closure, model.params, indices, kept, unused[0])
    return sums, terms, indices


# ---- Expansions --------------------------------------------------------------------


@pytest.mark.parametrize("control_variate", CHOICES)
@pytest.mark.parametrize("kind", ["softmax", "regression", "linear"])
def test_expansions_and_sums(kind: str, control_variate: Any) -> None:
    model = Network(kind)
    v, g, h = brute_force(model, control_variate)
    sums, terms, indices = built(model, control_variate)
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
    torch.testing.assert_close(sums.diagonal(), h.sum(0).diagonal(), **exact)
    # Parts and what is joined of them.
    joined = terms.join([terms.part(7, 10), terms.part(4, 4), terms.part(0, 3)])
    again = joined.expand(delta)[0]
    torch.testing.assert_close(again, values[[7, 8, 9, 0, 1, 2]], **exact)


def test_the_proxies_differ() -> None:
    """Else the tests here could not tell them apart."""
    delta = torch.linspace(-1, 0.7, D, dtype=F64)
    totals = [
        float(built(Network(), control_variate)[0].at(delta)[0])
        for control_variate in CHOICES
    ]
    assert min(abs(a - b) for a in totals for b in totals if a is not b) > 0.05


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
    assert ends[0][1]["form"] == "blocks"
    torch.testing.assert_close(ends[0][1]["hessian"][0], ends[1][1]["hessian"])


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
    _, g, _ = brute_force(model, "diagonal")
    torch.testing.assert_close(both[0].slopes[0], g)


# ---- The sampler -------------------------------------------------------------------


@pytest.mark.parametrize("control_variate", CHOICES)
def test_gradients_are_derivatives(control_variate: Any) -> None:
    model = Network()
    sampler = make(model, control_variate, temperature=1.3)
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


@pytest.mark.parametrize("control_variate", CHOICES)
def test_a_subsample_of_everything_is_hmc(control_variate: Any) -> None:
    """Then the proxies cancel, if those of the data add up to that of the sum."""
    model = Network()
    sampler = make(model, control_variate, subsample_size=N)
    sampler.step(model.closure)
    target = sampler._target(model.closure)
    everything = torch.arange(N)

    def error(kept: dict[str, Any] | None = None) -> float:
        subsample = sampler._subsample(model.closure)
        subsample.indices = everything
        subsample.terms = sampler._expand(model.closure, everything, kept)
        theta = torch.linspace(-0.5, 0.6, D, dtype=F64)
        point = target.at(subsample, theta)
        whole = model.closure(everything).sum().detach() - 2.0 * (theta @ theta)
        return abs(float(point.log + 0.5 * point.estimate.variance - whole))

    assert error() < 1e-9
    # A known bug: sums of one proxy, terms of another.
    kept = sampler.state["control_variates"]
    other = "diagonal" if kept["form"] == "blocks" else "none"
    assert error({**kept, "form": other}) > 0.01


@pytest.mark.parametrize(
    ("control_variate", "variant"),
    [
        ("gauss-newton", "perturbed"),
        ([[3, 0], [1]], "signed"),
        ("diagonal", "perturbed"),
    ],
)
def test_resuming_is_exact(
    control_variate: Any, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Blocks leave couplings out, which lets the signed chain leave: not the point here.
    monkeypatch.setattr("torch_sgmcmc.hmcecs._CHECK_EVERY", 1e9)
    model = Network()
    sampler = make(model, control_variate, variant=variant, num_products=5)
    for _ in range(5):
        sampler.step(model.closure)
    buffer = io.BytesIO()
    torch.save(sampler.state_dict(), buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    other = Network()
    for p, q in zip(other.params, model.params, strict=True):
        p.data.copy_(q.data)
    twin = make(other, 1, variant=variant, mass_matrix="identity", seed=99)
    twin.load_state_dict(saved)
    for _ in range(6):
        sampler.step(model.closure)
        twin.step(other.closure)
    for p, q in zip(model.params, other.params, strict=True):
        assert torch.equal(p, q)


def test_no_data_in_the_subsample() -> None:
    """Of two factors with Poisson(1) minibatches each, some have none."""
    for control_variate in CHOICES:
        model = Network()
        sampler = make(
            model, control_variate, variant="signed", num_products=2,
            subsample_size=1, num_blocks=2,
        )  # fmt: skip
        sizes = set()
        for _ in range(25):
            sampler.step(model.closure)
            sizes.add(len(sampler.state["subsample"]["indices"]))
        assert 0 in sizes
        assert len(sizes) > 2


def test_float32_parameters() -> None:
    model = Network(dtype=torch.float32)
    sampler = make(model, "block-diagonal")
    for _ in range(10):
        sampler.step(model.closure)
    assert sampler.num_divergences == 0
    kept = sampler.state["control_variates"]
    assert all(matrix.dtype == F64 for matrix in kept["hessian"])


def test_the_mass() -> None:
    model = Network()
    for control_variate in CHOICES:
        _, _, h = brute_force(model, control_variate)
        sampler = make(model, control_variate, temperature=2.0)
        sampler.set_anchor(model.closure, progress=False)
        factor = sampler.state["control_variates"]["whitening"]
        precision = (4.0 - h.sum(0).diagonal()) / 2.0
        torch.testing.assert_close(factor**-2, precision)
    sampler = make(model, "gauss-newton", mass_matrix="dense")
    sampler.set_anchor(model.closure, progress=False)
    factor = sampler.state["control_variates"]["whitening"]
    _, _, h = brute_force(model, "gauss-newton")
    expected = 4.0 * torch.eye(D, dtype=F64) - h.sum(0)
    torch.testing.assert_close(torch.linalg.inv(factor @ factor.t()), expected)


# ---- Errors ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"control_variate": "diagonal", "mass_matrix": "dense"},
            ValueError,
            r"Invalid mass_matrix: 'dense' \(must be 'diagonal' or 'identity' with "
            r"control_variate='diagonal'\)",
        ),
        (
            {"control_variate": "block-diagonal", "mass_matrix": "dense"},
            ValueError,
            r"Invalid mass_matrix: 'dense' \(must be 'diagonal' or 'identity' with",
        ),
        (
            {"control_variate": [[0]], "mass_matrix": "dense"},
            ValueError,
            r"'identity' with control_variate=\[\[0\]\]\)",
        ),
        (
            {"control_variate": "sparse"},
            ValueError,
            r"Invalid control_variate: 'sparse' \(must be 'gauss-newton' or 'block-",
        ),
        (
            {"control_variate": [3]},
            TypeError,
            r"Invalid control_variate: \[3\] \(blocks must be lists of indices of para",
        ),
        ({"control_variate": [[True]]}, TypeError, r"Invalid .*: \[\[True\]\] \(block"),
        (
            {"control_variate": [[0], []]},
            ValueError,
            r"\[\[0\], \[\]\] \(blocks must be disjoint lists, none of them empty",
        ),
        ({"control_variate": [[0, 1], [1]]}, ValueError, r"\[1\]\] \(blocks must be d"),
        ({"control_variate": [[-1]]}, ValueError, r"\[\[-1\]\] \(blocks must be disj"),
        (
            {"control_variate": []},
            ValueError,
            r"Invalid control_variate: \[\] \(blocks",
        ),
        (
            {"control_variate": [[0], [4]]},
            ValueError,
            r"Invalid control_variate: a block \[4\] \(must be indices below 4, the n",
        ),
    ],
)
def test_bad_hyperparameters(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(Network(), **settings)


@pytest.mark.parametrize("control_variate", ["gauss-newton", [[1, 0]]])
def test_blocks_that_are_too_large(control_variate: Any) -> None:
    p, q = torch.zeros(16384, requires_grad=True), torch.zeros(2, requires_grad=True)
    settings: dict[str, Any] = {"num_data": 9, "subsample_size": 3, "seed": 0}
    settings["mass_matrix"] = "identity"
    sg.HMCECS([p, q], control_variate="block-diagonal", **settings)
    with pytest.raises(
        ValueError,
        match=r"Invalid control_variate: a block of 16386 elements, parameters \[.*\] "
        r"\(must be <= 16384: choose smaller blocks, or 1\)",
    ):
        sg.HMCECS([p, q], control_variate=control_variate, **settings)


def test_a_closure_that_does_not_show_its_outputs() -> None:
    model = Network()
    sampler = make(model, "diagonal")
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
        make(model, "diagonal").step(short)
    right = model.of_outputs(model.outputs(indices), indices)
    torch.testing.assert_close(model.closure(indices), right)
