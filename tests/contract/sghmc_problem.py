"""SGHMC on a few parameters in two groups, and algorithm 2 in the paper's symbols."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from reference import same_bits
from torch import Tensor, nn

import torch_sgmcmc as sg
import torch_sgmcmc._C as _C

COMMON = {"num_data": 50, "prior_precision": 2.0, "seed": 3}
SHAPES = ((3, 4), (), (5,), (0,))


def some(seed: int, low: float, high: float) -> list[Tensor]:
    """A tensor of numbers in this range for each parameter."""
    generator = torch.Generator().manual_seed(seed)
    return [
        low + (high - low) * torch.rand(s, generator=generator, dtype=torch.float64)
        for s in SHAPES
    ]


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    return [nn.Parameter(t.to(dtype)) for t in some(1, -1.5, 1.5)]


def make(params: list[nn.Parameter], **settings: Any) -> sg.SGHMC:
    groups = [{"params": params[:1]}, {"params": params[1:], "momentum": 0.8}]
    return sg.SGHMC(groups, **{"lr": 0.01, **COMMON, **settings})


def advance(sampler: sg.SGHMC, params: list[nn.Parameter], steps: int = 20) -> None:
    begin = sampler.param_groups[0]["step"]
    for step in range(begin, begin + steps):
        for p in params:
            p.grad = p.detach() ** 3 + 0.1
        if step % 4 == 2:
            params[0].grad = None
        sampler.step()


def check_a_state_dict_continues(
    sampler: sg.SGHMC, params: list[nn.Parameter], before: int
) -> None:
    """From after some steps, in another sampler and in a copy, to the bit."""
    advance(sampler, params, before)
    theirs = copy.deepcopy(params)
    saved = copy.deepcopy(sampler.state_dict())
    other = make(theirs, seed=8)
    other.load_state_dict(saved)
    twin = copy.deepcopy((sampler, params))
    for state in saved["state"].values():  # copies, of which the file has its own
        for value in state.values():
            value.zero_()
    advance(sampler, params)
    advance(other, theirs)
    advance(*twin)
    for p, q, r in zip(params, theirs, twin[1], strict=True):
        assert same_bits(p, q) and same_bits(p, r)


def check_algorithm_2(
    estimate: float | str,
    masses: Sequence[Tensor] | None = None,
    frictions: Sequence[Tensor] | None = None,
    *,
    steps: int = 5,
) -> None:
    """Chen et al. 2014: θ += ε M⁻¹ r; r += -ε ∇Ũ - ε C M⁻¹ r + N(0, 2 (C - B̂) ε).

    Here η = lr / N = ε² / M₀, α = ε C₀ / M₀, v = ε r / M, in each group; M and C are in
    units of M₀ and C₀. The paper moves θ first; the chain is the same, looked at half a
    step later.

    Args:
        estimate: β̂, or of which kind Var(ḡ) is: "given" or "matrix".
        masses: M, of the parameters that have elements; 1 without.
        frictions: C; M without.
        steps: how many.
    """
    params = parameters()[:3]
    is_number = not isinstance(estimate, str)
    sampler = make(params, noise_estimate=estimate if is_number else "given")
    if masses is not None:
        sampler.set_mass(masses, frictions)
    masses = masses or [torch.ones_like(p) for p in params]

    eps, lr, n = 0.02, 0.01, 50
    unit = eps**2 * n / lr
    mass = unit * _flat(masses)
    alpha = torch.tensor([0.1] * 12 + [0.2] * 6, dtype=torch.float64)
    friction = alpha * _flat(frictions or masses) * unit / eps
    if is_number:
        b_hat = (estimate * unit / eps) * torch.eye(18, dtype=torch.float64)
    else:
        covariance = _covariance()
        parts = covariance.diagonal().split([12, 1, 5])
        if estimate == "given":
            covariance = covariance.diagonal().diag()
            sampler.set_gradient_variance(
                [v.view(p.shape) for v, p in zip(parts, params, strict=True)]
            )
        else:
            sampler.set_gradient_covariance(covariance)
        b_hat = eps * n**2 * covariance / 2
    theta = _flat([p.detach() for p in params])
    # v ~ N(0, lr T / (N M)), M in units
    first = _normals(sampler, params, _C.Purpose.MOMENTUM)
    r = first * (lr / n * unit / mass).sqrt() * mass / eps
    for _ in range(steps):
        gradient = n * (theta**3 + 0.1) + 2.0 * theta
        factor = torch.linalg.cholesky(2 * eps * (friction.diag() - b_hat))
        noise = factor @ _normals(sampler, params, _C.Purpose.UPDATE)
        r = r - eps * gradient - eps * friction / mass * r + noise
        theta = theta + eps * r / mass

        for p in params:
            p.grad = p.detach() ** 3 + 0.1
        sampler.step()
        ours = _flat([p.detach() for p in params])
        torch.testing.assert_close(ours, theta, rtol=1e-12, atol=1e-13)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors])


def _covariance() -> Tensor:
    """Of a minibatch's mean gradient, of a rank far below 18."""
    generator = torch.Generator().manual_seed(6)
    rows = torch.randn(6, 18, generator=generator, dtype=torch.float64).cumsum(1)
    covariance = sg.minibatch_covariance(
        [rows[:, :12].view(6, 3, 4), rows[:, 12], rows[:, 13:]], 50
    )
    # B̂ takes up to 0.9 of the least friction.
    return covariance * (0.9 * 0.05 / (0.25 * torch.linalg.eigvalsh(covariance)[-1]))


def _normals(sampler: sg.SGHMC, params: list[nn.Parameter], purpose: int) -> Tensor:
    """Those of the next step."""
    out = [torch.zeros_like(p) for p in params]
    torch.ops.torch_sgmcmc.gaussian_(
        out,
        std=1.0,
        offsets=[o for group in sampler.param_groups for o in group["offsets"]],
        seed=COMMON["seed"],
        step=sampler.param_groups[0]["step"],
        purpose=purpose,
    )
    return _flat(out)
