"""One update in plain PyTorch and float64: what the fused operators must equal.

The formulas are those of the methods, written without regard to rounding, with the
noise that ``torch_sgmcmc::gaussian_`` says a step uses. A fused result may then
differ by rounding alone, and :func:`assert_rounded` allows no more than that.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

import torch_sgmcmc._C as _C
from torch_sgmcmc.core import ops as ops

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SIZES = (
    1,
    3,
    4,
    5,
    31,
    32,
    33,
    127,
    128,
    129,
    255,
    256,
    257,
    1000,
    4095,
    4096,
    4097,
)

# Unit roundoffs that a result may be away from the exact one, relative to the sum
# of the absolute values of its terms. The longest way through an update rounds a
# term six times (two coefficients, four operations), the gradient's variance (kept
# below half of the noise's) some more, and for float64 this reference rounds as
# often; roundings partly cancel, and what is seen is below 4.
ROUNDINGS = 8


def arithmetic(dtype):
    """The type of arithmetic and of state for parameters of a type."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def draw(tensors, *, offsets, seed, step, purpose=_C.Purpose.UPDATE):
    """The standard normals, in float64, that a step uses for each tensor."""
    flat = [torch.zeros(t.numel(), dtype=torch.float64) for t in tensors]
    if flat:
        ops.gaussian_(
            flat, std=1.0, offsets=offsets, seed=seed, step=step, purpose=purpose
        )
    return [z.view(t.shape) for z, t in zip(flat, tensors, strict=True)]


@dataclass
class Exact:
    """A value in float64, and the sum of the absolute values of its terms."""

    value: Tensor
    scale: Tensor


def sgld(param, grad, noise, *, lr, num_data, prior_precision, temperature):
    """METHODS, SGLD: the new parameter."""
    param, grad = param.double(), grad.double()
    pull = prior_precision / num_data * param
    jump = (2 * lr * temperature / num_data) ** 0.5 * noise
    return Exact(
        param - lr * (grad + pull) + jump,
        param.abs() + lr * (grad.abs() + pull.abs()) + jump.abs(),
    )


def sghmc(param, grad, momentum_buffer, noise, grad_variance=None, **settings):
    """METHODS, SGHMC: the new parameter and the new momentum.

    With a gradient variance, the noise estimate of a coordinate is
    lr N Var / (2 T).
    """
    c = SimpleNamespace(**settings)
    param, grad = param.double(), grad.double()
    v = momentum_buffer.double()
    beta = c.noise_estimate
    if grad_variance is not None:
        beta = c.lr * c.num_data * grad_variance.double() / (2 * c.temperature)
    variance = 2 * ((1 - c.momentum) - beta) * c.lr * c.temperature / c.num_data
    jump = torch.as_tensor(variance, dtype=torch.float64).sqrt() * noise
    pull = c.prior_precision / c.num_data * param
    new = Exact(
        c.momentum * v - c.lr * (grad + pull) + jump,
        c.momentum * v.abs() + c.lr * (grad.abs() + pull.abs()) + jump.abs(),
    )
    return Exact(param + new.value, param.abs() + new.scale), new


def leapfrog(param, grad, momentum, mass, *, kick, drift, num_data, prior_precision):
    """METHODS, HMC: θ and r after r <- r - kick ∇U, θ <- θ + drift r / m."""
    param, grad, r = param.double(), grad.double(), momentum.double()
    pull, decay = kick * num_data * grad, kick * prior_precision * param
    new = Exact(r - pull - decay, r.abs() + pull.abs() + decay.abs())
    speed = drift / (1.0 if mass is None else mass.double())
    return Exact(param + speed * new.value, param.abs() + speed * new.scale), new


def ewsg_log_weights(
    params, grads, momenta, *, surrogate="momentum", num_chains=1, **settings
):
    """METHODS, EWSG: W of each chain; without momenta v = 0."""
    c = SimpleNamespace(**settings)
    alpha = 1 - c.momentum
    variance = 2 * alpha * c.lr * c.temperature / c.num_data
    total = torch.zeros(num_chains, dtype=torch.float64)
    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
        v = momenta[i].double() if momenta else torch.zeros_like(p, dtype=torch.float64)
        u = {
            "momentum": alpha * v,
            "zero": 0 * v,
            "one": 0 * v + variance**0.5,
            "full_momentum": -(1 - alpha) * v,
        }[surrogate]
        pull = u + c.lr * (g.double() + c.prior_precision / c.num_data * p.double())
        total += pull.reshape(num_chains, -1).square().sum(dim=1) / (2 * variance)
    return total


def psgld(
    param, grad, square_average, noise, sensitivity=None, curvature=None, **settings
):
    """METHODS, pSGLD: the new parameter, V, and J W if Γ is added.

    Γ = dG/dV W with W = a (J W) + 2 (1 - a) ḡ h, h the curvature.
    """
    c = SimpleNamespace(**settings)
    param, grad, v = param.double(), grad.double(), square_average.double()
    if c.adapt:
        v = c.decay * v + (1 - c.decay) * grad**2
    least = max(c.eps, 10 * c.lr * c.prior_precision / c.num_data)
    g_factor = 1 / (v.sqrt() + least)
    pull = c.prior_precision / c.num_data * param
    jump = (2 * c.lr * c.temperature / c.num_data * g_factor).sqrt() * noise
    new = param - c.lr * g_factor * (grad + pull) + jump
    size = param.abs() + c.lr * g_factor * (grad.abs() + pull.abs()) + jump.abs()
    if sensitivity is None or curvature is None:
        return Exact(new, size), Exact(v, v), None
    old, h = c.decay * sensitivity.double(), curvature.double()
    w = old + 2 * (1 - c.decay) * grad * h
    w_size = old.abs() + 2 * (1 - c.decay) * (grad * h).abs()
    slope = c.lr * c.temperature / c.num_data * g_factor**2 / (2 * v.sqrt())
    bend = c.lr * g_factor * (h + c.prior_precision / c.num_data)
    bend_size = c.lr * g_factor * (h.abs() + c.prior_precision / c.num_data)
    jacobian = (1 - bend).clamp(0, 1 / c.decay)
    return (
        Exact(new - slope * w, size + slope * w_size),
        Exact(v, v),
        Exact(w * jacobian, w_size * jacobian + w_size * (1 + bend_size)),
    )


def sgnht(param, grad, momentum_buffer, thermostat, noise, **settings):
    """METHODS, SGNHT: the new parameter, momentum, and thermostat α - A."""
    c = SimpleNamespace(**settings)
    param, grad = param.double(), grad.double()
    v, delta = momentum_buffer.double(), thermostat.double()
    friction = 1 - c.momentum + delta
    pull = c.prior_precision / c.num_data * param
    jump = (2 * (1 - c.momentum) * c.lr * c.temperature / c.num_data) ** 0.5 * noise
    new = Exact(
        (1 - friction) * v - c.lr * (grad + pull) + jump,
        (c.momentum + delta.abs()) * v.abs()
        + c.lr * (grad.abs() + pull.abs())
        + jump.abs(),
    )
    gain = c.thermostat_rate * c.num_data / (c.lr * c.temperature)
    mean = (v + new.value) / 2
    mean_size = (v.abs() + new.scale) / 2
    return (
        Exact(param + new.value, param.abs() + new.scale),
        new,
        Exact(
            delta + gain * mean**2 - c.thermostat_rate,
            # An error of the mean counts twice in its square.
            delta.abs() + 2 * gain * mean.abs() * mean_size + c.thermostat_rate,
        ),
    )


def assert_rounded(actual, expected, roundings=ROUNDINGS):
    """Asserts that a result is the expected value but for rounding.

    Allowed are some roundings of the arithmetic type and, for a parameter in a
    narrower type, the last one to that type.
    """
    storage = torch.finfo(actual.dtype)
    work = torch.finfo(arithmetic(actual.dtype))
    allowed = roundings * work.eps / 2 * expected.scale
    if storage.eps != work.eps:
        # Half a unit in the last place, also of the smallest (subnormal) numbers.
        allowed = allowed + storage.eps / 2 * expected.value.abs()
        allowed = allowed + storage.smallest_normal * storage.eps / 2
    error = (actual.double() - expected.value).abs()
    assert actual.shape == expected.value.shape
    assert bool(torch.isfinite(actual).all())
    assert bool((error <= allowed).all()), (
        f"{actual.dtype}, {actual.numel()} elements: off by up to "
        f"{float((error / allowed).max()):.3g} times the rounding allowed"
    )


def same_bits(a, b):
    """Returns whether type, shape and every bit agree, -0 and NaN included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    raw_a, raw_b = (
        t.detach().cpu().contiguous().flatten().view(torch.uint8) for t in (a, b)
    )
    return torch.equal(raw_a, raw_b)


def assert_same_bits(one, other):
    """Returns whether two nested objects are bitwise identical."""
    if isinstance(one, Tensor):
        assert same_bits(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_same_bits(value, other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_same_bits(*pair)
    else:
        assert one == other
