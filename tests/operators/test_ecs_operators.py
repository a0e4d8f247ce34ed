"""The operators of HMC-ECS against plain formulas and their derivatives by autograd."""

import math
import re
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from torch_sgmcmc.core import ops as ops
from torch_sgmcmc.samplers._ecs import subsample, target
from torch_sgmcmc.samplers._ecs.taylor import Anchor, Prior, TaylorSums

F64 = torch.float64
FORMS = ("constant", "linear", "predictor", "whole")
PERTURBED = {"num_data": 700.0, "batch_size": 1, "num_factors": 0, "lower_bound": 0.0}
SIGNED = {"num_data": 20.0, "batch_size": 3, "num_factors": 4, "lower_bound": -4.5}
T = 1.7


def randn(*shape):
    return torch.randn(shape, dtype=F64)


class Case:
    """Random arguments of the operators, for M data and d parameters."""

    def __init__(self, form, m, d):
        torch.manual_seed(m + d)
        self.theta, self.anchor, self.prior = randn(d), randn(d), randn(d).exp()
        self.values, self.expansions = randn(m), randn(m)
        kinds = {"constant": 0, "predictor": 2}.get(form, 1)
        self.gradients = randn(kinds, m, d) / d**0.5
        self.scales = randn(m) if form == "predictor" else None
        root = randn(m, d, d) / d if form == "whole" else None
        self.hessians = None if root is None else root + root.mT
        self.sum_value, self.sum_gradient = randn(), randn(d)
        root = randn(d, d)
        second = form in ("predictor", "whole")
        self.sum_hessian = root + root.t() if second else None
        self.fields = (self.gradients, self.scales, self.hessians)

    def differences(self, theta):
        delta = theta - self.anchor
        q = self.expansions + (self.gradients[:1] @ delta).sum(dim=0)
        if self.scales is not None:
            q = q + self.scales * (self.gradients[1] @ delta) ** 2 / 2
        if self.hessians is not None:
            q = q + torch.einsum("i,mij,j->m", delta, self.hessians, delta) / 2
        return (self.values - q) / T

    def log_prior_and_sums(self, theta):
        delta = theta - self.anchor
        total = self.sum_value + self.sum_gradient @ delta
        if self.sum_hessian is not None:
            total = total + delta @ self.sum_hessian @ delta / 2
        return (total - (self.prior * theta**2).sum() / 2) / T

    def estimate(self, sizes, temperature=T):
        first = (self.values, self.theta, self.anchor, self.expansions)
        return ops.ecs_estimate(*first, *self.fields, temperature=temperature, **sizes)

    def density(self, estimated, weighted, temperature=T):
        weights, hessian_terms, numbers = estimated
        sums = (self.sum_value, self.sum_gradient, self.sum_hessian)
        first = (numbers, weighted, weights, hessian_terms, self.theta, self.anchor)
        lists = (*first, *self.fields, *sums, self.prior)
        return ops.ecs_density(*lists, temperature=temperature)


def plain(d, sizes):
    """Log, variance, mean, sign and the lowest of the estimate."""
    n, m = sizes["num_data"], sizes["batch_size"]
    if sizes["num_factors"] == 0:
        variance = n**2 / len(d) * d.var(correction=0)
        mean = n * d.mean()
        return mean - variance / 2, variance, mean, 1.0, mean
    factors = n * d.view(-1, m).mean(1)
    x = (factors - sizes["lower_bound"]) / sizes["num_factors"]
    log = x.abs().log().sum() + sizes["lower_bound"] + sizes["num_factors"]
    zero = torch.zeros((), dtype=F64)
    mean, lowest = (factors.mean(), factors.min()) if len(d) else (zero, zero)
    sign = float(x.detach().sign().prod())
    return log, (x.abs().log() ** 2).sum(), mean, sign, lowest


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("d", [1, 7, 8, 9, 29, 263])
@pytest.mark.parametrize("sizes", [PERTURBED, SIGNED], ids=["perturbed", "signed"])
def test_equal_plain_formulas(form, d, sizes):
    case = Case(form, 21, d)
    theta = case.theta.clone().requires_grad_()
    differences = case.differences(theta)
    log, variance, mean, sign, lowest = plain(differences, sizes)
    sign = torch.tensor(sign, dtype=F64)
    expected = torch.stack([log, variance, mean, sign, lowest])
    weights, _, numbers = estimated = case.estimate(sizes)
    torch.testing.assert_close(numbers, expected.detach())
    (by_difference,) = torch.autograd.grad(log, differences, retain_graph=True)
    torch.testing.assert_close(weights, by_difference)
    total = log + case.log_prior_and_sums(theta)
    (slope,) = torch.autograd.grad(total, theta)
    # Values that do not depend on θ, and then ones that do.
    for weighted in (torch.zeros(d, dtype=F64), randn(d)):
        density, gradient = case.density(estimated, weighted)
        torch.testing.assert_close(gradient, slope + weighted / T)
        torch.testing.assert_close(density[0], total.detach())
        assert density[1] == 1


@pytest.mark.parametrize("form", FORMS)
def test_no_data(form):
    case = Case(form, 0, 5)
    weights, _, numbers = estimated = case.estimate(SIGNED)
    assert len(weights) == 0
    assert numbers.tolist() == [-0.5, 0.0, 0.0, 1.0, 0.0]
    density, gradient = case.density(estimated, torch.zeros(5, dtype=F64))
    theta = case.theta.clone().requires_grad_()
    total = case.log_prior_and_sums(theta)
    torch.testing.assert_close(density[0], total.detach() - 0.5)
    torch.testing.assert_close(gradient, *torch.autograd.grad(total, theta))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_is_marked(number):
    case = Case("predictor", 21, 9)
    estimated = case.estimate(PERTURBED)
    weighted = torch.zeros(9, dtype=F64)
    weighted[7] = number
    density, _ = case.density(estimated, weighted)
    assert density[0].isfinite() and density[1] == 0
    estimated[2][0] = number
    density, gradient = case.density(estimated, torch.zeros(9, dtype=F64))
    assert gradient.isfinite().all() and density[1] == 0


@pytest.mark.parametrize("kind", ["dense", "diagonal", "identity"])
@pytest.mark.parametrize("d", [1, 7, 8, 29])
def test_leapfrog(kind, d):
    x, r, gradient, origin = randn(4, d)
    w = {"dense": randn(d, d), "diagonal": randn(d), "identity": None}[kind]
    matrix = torch.eye(d, dtype=F64) if w is None else w if w.dim() == 2 else w.diag()
    pushed = r + 0.3 * matrix.t() @ gradient
    moved = x + 0.6 * pushed
    theta = ops.ecs_leapfrog_(x, r, gradient, w, origin, kick=0.3, drift=0.6)
    torch.testing.assert_close(r, pushed)
    torch.testing.assert_close(x, moved)
    torch.testing.assert_close(theta, origin + matrix @ moved)


@pytest.mark.parametrize("form", ["predictor", "linear"])
def test_threads_do_not_matter(form, set_threads):
    results = []
    for count in (1, 3):
        set_threads(count)
        case = Case(form, 901, 531)
        estimated = case.estimate(PERTURBED)
        x, r = case.theta.clone(), case.prior.clone()
        w = case.gradients[0, :531].contiguous()
        gradient = case.sum_gradient
        theta = ops.ecs_leapfrog_(x, r, gradient, w, x, kick=0.1, drift=0.1)
        density = case.density(estimated, case.prior)
        results.append([*estimated, *density, x, r, theta])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


WRONG = {
    "shape": lambda t: torch.cat([t.reshape(-1), t.reshape(-1)]),
    "dtype": lambda t: t.float(),
    "layout": lambda t: torch.stack([t, t], -1)[..., 0],
}


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_arrays(fault):
    case = Case("predictor", 6, 3)
    estimated = case.estimate(PERTURBED)

    def refused(op, name, shape, call):
        text = f"{op}: {name} must be contiguous float64 of shape {shape} on the CPU"
        with pytest.raises(RuntimeError, match=re.escape(text)):
            call()

    def spoilt(name, form="predictor"):
        other = Case(form, 6, 3)
        setattr(other, name, WRONG[fault](getattr(other, name)))
        other.fields = (other.gradients, other.scales, other.hessians)
        return other

    of_estimate = {"anchor": "[3]", "gradients": "[2, 6, 3]", "scales": "[6]"}
    of_sums = {"sum_gradient": "[3]", "sum_hessian": "[3, 3]", "prior": "[3]"}
    for name, shape in {**of_estimate, "expansions": "[6]"}.items():
        call = partial(spoilt(name).estimate, PERTURBED)
        refused("ecs_estimate", name, shape, call)
    call = partial(spoilt("hessians", "whole").estimate, PERTURBED)
    refused("ecs_estimate", "hessians", "[6, 3, 3]", call)
    for name, shape in (of_estimate | of_sums).items():
        call = partial(spoilt(name).density, estimated, case.theta)
        refused("ecs_density", name, shape, call)
    for i, (name, shape) in enumerate((("hessian_terms", "[6]"), ("estimate", "[5]"))):
        parts = list(estimated)
        parts[i + 1] = WRONG[fault](parts[i + 1])
        call = partial(case.density, tuple(parts), case.prior)
        refused("ecs_density", name, shape, call)
    wrong = WRONG[fault](case.prior)
    refused("ecs_density", "gradient", "[3]", lambda: case.density(estimated, wrong))
    for i, name in enumerate(("momentum", "gradient", "whitening", "origin"), 1):
        given = [case.theta.clone() for _ in range(5)]
        given[i] = WRONG[fault](given[i])
        call = partial(ops.ecs_leapfrog_, *given, kick=0.1, drift=0.1)
        refused("ecs_leapfrog_", name, "[3]", call)
        assert torch.equal(given[0], case.theta)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "Invalid temperature: 0 (must be finite and > 0)"),
        ({"num_data": 0.0}, "Invalid num_data: 0 (must be finite and > 0)"),
        ({"batch_size": 0}, "Invalid batch_size: 0 (must divide 6, the number of"),
        ({"batch_size": 4}, "Invalid batch_size: 4 (must divide 6, the number of"),
        ({"num_factors": -1}, "Invalid num_factors: -1 (must be >= 1, or 0 with"),
    ],
)
def test_wrong_numbers_of_an_estimate(change, message):
    sizes = {**PERTURBED, **change}
    temperature = sizes.pop("temperature", T)
    with pytest.raises(RuntimeError, match=re.escape(f"ecs_estimate: {message}")):
        Case("linear", 6, 3).estimate(sizes, temperature)


def test_other_wrong_numbers():
    empty, case = Case("linear", 0, 3), Case("linear", 6, 3)
    with pytest.raises(RuntimeError, match=r"Invalid num_factors: 0 \(must be >= 1"):
        empty.estimate(PERTURBED)
    with pytest.raises(RuntimeError, match="ecs_density: Invalid temperature: -1"):
        case.density(case.estimate(PERTURBED), case.prior, -1.0)
    for name in ("kick", "drift"):
        steps = {"kick": 0.1, "drift": 0.1, name: -0.5}
        x = case.theta.clone()
        with pytest.raises(RuntimeError, match=f"ecs_leapfrog_: Invalid {name}: -0.5"):
            ops.ecs_leapfrog_(x, x.clone(), x, None, x, **steps)
        assert torch.equal(x, case.theta)


@pytest.mark.parametrize(
    ("steps", "every", "anchors", "sizing"),
    [
        (1000, 200, [200, 400, 600, 800], 900),
        (899, 200, [200, 400, 600], 749),
        (900, 200, [200, 400, 600, 800], 850),
        (10, 4, [4, 8], 9),
        (9, 4, [4], 6),
        (5, 1, [1, 2, 3, 4, 5], 5),
        (30, 200, [], 15),
    ],
)
def test_what_a_warm_up_does_when(steps, every, anchors, sizing):
    """θ* not so late that less than half as many steps are left."""
    last_anchor, chosen = subsample.schedule(steps, every)
    assert [i for i in range(1, last_anchor + 1) if i % every == 0] == anchors
    assert chosen == sizing


def group(**settings):
    sizes = {"subsample_size": 100, "num_data": 100_000}
    return {"estimator": "signed", **sizes, **settings}


def estimates(variances, means=(0.0, 0.0), lowest=(0.0, 0.0)):
    rows = zip(variances, means, lowest, strict=False)
    return [subsample.Estimate(0.0, v, mean, 1.0, low) for v, mean, low in rows]


@pytest.mark.parametrize(
    ("variances", "size", "num_data", "chosen"),
    [
        ([1.5, 2.5], 100, 100_000, 400),  # proportional to the variance
        ([2.001], 100, 100_000, 401),
        # Enough to estimate a variance from, unless there were fewer.
        ([0.01], 100, 100_000, 30),
        ([0.01], 12, 100_000, 12),
        # Not more than there are data.
        ([2.0], 100, 250, 250),
        ([2.0], 100, 1, 2),
        ([math.inf], 100, 250, 250),
    ],
)
def test_the_size_of_perturbed_subsamples(variances, size, num_data, chosen):
    settings = group(estimator="perturbed", subsample_size=size, num_data=num_data)
    found = subsample.choose_sizes(estimates(variances), 0.5, settings)
    assert found == {"subsample_size": chosen}


def kept_by_signs(spread, factors):
    """Returns the part of effective draws that is left."""
    negative = 0.5 * math.erfc(factors / math.sqrt(2 * spread))
    return math.exp(-4 * factors * negative)


def test_factors_keep_the_signs_positive():
    # A large variance: that of the log decides. A small one: the signs do.
    assert subsample.choose_num_factors(400.0, 0.5) == 800
    for spread in (0.5, 4.0, 60.0):
        chosen = subsample.choose_num_factors(spread, 1e9)
        assert kept_by_signs(spread, chosen) >= 0.98
        assert chosen > 1
        assert kept_by_signs(spread, chosen - 1 - chosen // 10) < 0.98
    assert subsample.choose_num_factors(0.0, 0.5) == 1
    # A warm-up chooses as many as detect a divergence, if it chooses.
    seen = [subsample.Estimate(log=0.0, variance=1e-9, mean=0.0, sign=1.0, lowest=0.0)]
    given = {"estimator": "signed", "num_factors": 3}
    for wanted, factors in ((0.5, 10), (math.inf, 10), (None, 3)):
        assert subsample.choose_sizes(seen, wanted, given)["num_factors"] == factors


@pytest.mark.parametrize(
    ("variances", "means", "lowest", "chosen"),
    [
        ([2.0, 4.0], (-4.0, -6.0), (-9.5, -11.5), 20),  # three times the deepest fall
        ([2.0, 4.0], (-4.0, -6.0), (-9.5, -999.0), 150),  # or a variance of 1
        ([0.0], (0.0,), (0.0,), 10),
    ],
)
def test_factors_for_the_least_time(variances, means, lowest, chosen):
    settings = group(num_factors=50)
    found = subsample.choose_sizes(
        estimates(variances, means, lowest), math.inf, settings
    )
    mean = sum(means) / len(means)
    assert found == {"mean_difference": mean, "num_factors": chosen}


@pytest.mark.parametrize(("fall", "left"), [(29.9 + 20, False), (30.1 + 20, True)])
def test_how_far_a_draw_may_fall(fall, left):
    """d + sqrt(40 d) + 20, with d = 10."""
    like = {"dtype": torch.float64}
    sums = TaylorSums(torch.zeros((), **like), torch.zeros(10, **like), None, "linear")
    anchor = Anchor(torch.zeros(10, **like), 1, sums, None)
    prior = Prior(torch.zeros(10, **like), torch.zeros(10, **like))
    raised = pytest.raises(RuntimeError, match="has left") if left else nullcontext()
    with raised:
        anchor.check_near(torch.tensor(-fall, **like), anchor.theta, prior, 1.0)


def test_out_of_bounds():
    signed = target.Estimator(400.0, 10, num_factors=10, lower_bound=-3.0)
    few = target.Estimator(400.0, 10, num_factors=9, lower_bound=-3.0)
    perturbed = target.Estimator(400.0)
    assert [signed.has_unreliable_sign(mean) for mean in (-3.1, -3.0)] == [True, False]
    assert not few.has_unreliable_sign(-3.1)
    assert not perturbed.has_unreliable_sign(-3.1)

    density = target.SubsampledTarget(None, None, None, 1.0, signed, max_variance=5.0)

    def rejected(variance, mean, present):
        estimates = [(0.0, variance, mean, 1.0, 0.0), (0.0, present, 0.0, 1.0, 0.0)]
        points = [SimpleNamespace(estimate=target.Estimate(*e)) for e in estimates]
        return density.is_out_of_bounds(*points)

    assert rejected(5.1, 0.0, 1.0)
    assert not rejected(5.0, 0.0, 1.0)
    assert not rejected(7.0, 0.0, 8.0)  # there it comes from worse
    assert rejected(1.0, -3.1, 1.0)
