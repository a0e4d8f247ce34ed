"""Hashes of what the operators and samplers compute, to compare processes with.

Run as a program it prints the instruction set in use and the hashes, as JSON.
"""

import hashlib
import json
from collections.abc import Iterable

import torch
from operator_tensors import masters_of
from reference import DTYPES, SIZES, arithmetic
from torch import Tensor

import torch_sgmcmc as sg
import torch_sgmcmc._C as _C
from torch_sgmcmc.chain import operators as ops

__all__ = ["digest", "fingerprints"]


def digest(tensors: Iterable[Tensor]) -> str:
    """A hash of the bits of some tensors."""
    h = hashlib.sha256()
    for t in tensors:
        h.update(f"{t.dtype}{list(t.shape)}".encode())
        raw = t.detach().contiguous().flatten().view(torch.uint8)
        h.update(raw.numpy().tobytes())
    return h.hexdigest()


def values(like: list[Tensor], scale: float) -> list[Tensor]:
    """Values of many magnitudes without any random number generator."""
    return [
        (scale * torch.sin(torch.arange(t.numel(), dtype=torch.float64) * 0.7 + i)).to(
            t.dtype
        )
        for i, t in enumerate(like)
    ]


def operators(dtype: torch.dtype) -> list[Tensor]:
    """Results of every operator for one dtype, all sizes and many alignments."""
    target = {"lr": 0.3, "num_data": 7.0, "prior_precision": 1.9, "temperature": 0.7}
    like = [torch.empty(n, dtype=dtype) for n in SIZES for _ in range(3)]
    # Alignments of all kinds; some near 2^34, where the quad's low word overflows.
    offsets = [(2**34 - 300 if i % 4 == 3 else 0) + 131 * i for i in range(len(like))]
    stream = {"offsets": offsets, "seed": 2**62 + 12345, "step": 2**40 + 3}
    params, grads = values(like, 2.0), values(like, -0.9)
    work = [torch.empty(t.shape, dtype=arithmetic(dtype)) for t in like]
    momenta, variances = values(work, 0.3), [v.abs() for v in values(work, 0.02)]
    masters = masters_of(params)
    noise = [torch.empty_like(t) for t in like]
    ops.gaussian_(noise, std=1.0, purpose=0, **stream)
    ops.sgld_step_(params, grads, masters, **target, **stream)
    for statistic in ([], variances):
        ops.sghmc_step_(
            params,
            grads,
            momenta,
            statistic,
            masters,
            **target,
            momentum=0.8,
            noise_estimate=0.01,
            resample_momentum_every=0,
            **stream,
        )
    masses = [1 + 10 * v for v in variances]
    for statistic, frictions in (([], []), (variances, variances)):
        ops.sghmc_by_coordinate_step_(
            *(params, grads, momenta, statistic, masses, frictions, masters),
            **target,
            momentum=0.8,
            noise_estimate=0.01,
            resample_momentum_every=1 if frictions else 0,
            **stream,
        )
    squares, curvatures = [v.square() for v in momenta], values(like, 0.4)
    sensitivities, thermostats = values(work, 0.7), values(work, 0.05)
    ops.psgld_frozen_step_(params, grads, squares, masters, **target, **stream)
    for w, h in (([], []), (sensitivities, curvatures)):
        ops.psgld_step_(
            params,
            grads,
            squares,
            w,
            h,
            masters,
            **target,
            decay=0.9,
            eps=1e-3,
            **stream,
        )
    ops.sgnht_step_(
        params,
        grads,
        momenta,
        thermostats,
        masters,
        **target,
        momentum=0.8,
        thermostat_rate=0.03,
        **stream,
    )
    ops.gradient_variance_(grads, variances, momenta, weight=0.3)
    ops.control_variate_(grads, curvatures, momenta)
    total = ops.sum_of_squares(params)
    ratios = [
        ops.ewsg_log_ratio(
            params,
            grads,
            noise,
            momenta if surrogate != 1 else [],
            **target,
            momentum=0.8,
            surrogate=surrogate,
            num_chains=1,
        )
        for surrogate in range(4)
    ]
    decisions = ops.metropolis_decide(
        torch.cat(ratios) / 1e4, proposal=1, purpose=3, seed=2, step=3
    )
    masses = [0.5 + v.square() for v in values(work, 1.1)]
    drawn = [torch.empty_like(t) for t in work]
    trajectory = {"kick": 0.2, "num_data": 7.0, "prior_precision": 1.9}
    energies = []
    for mass in ([], masses):
        ops.hmc_momenta_(drawn, mass, temperature=0.7, **stream)
        lists = (params, grads, drawn, mass, masters)
        ops.hmc_leapfrog_(*lists, drift=0.3, **trajectory)
        ops.hmc_leapfrog_(*lists, drift=0.0, **trajectory)
        for prior in (0.0, 1.9):
            energies.append(
                ops.hmc_energy(params, drawn, mass, prior_precision=prior, num_chains=1)
            )
    states = [
        *drawn,
        *energies,
        *momenta,
        *variances,
        *squares,
        *sensitivities,
        *thermostats,
    ]
    return [*noise, *params, *grads, *states, total, *ratios, decisions]


def subsampled() -> list[Tensor]:
    """Results of the operators of HMC-ECS, for rows of all kinds of lengths."""
    results = []
    for d in (3, 8, 29, 301):
        m = 33
        shapes = (m, d, d, m, (2, m, d), m, (m, d, d), d, (d, d))
        like = [torch.empty(shape, dtype=torch.float64) for shape in shapes]
        made = zip(values(like, 0.3), like, strict=True)
        y, theta, anchor, v, slopes, scales, hessians, s, b = (
            t.view(shaped.shape) for t, shaped in made
        )
        prior = s.exp()
        for fields in ((slopes, scales, None), (slopes[:1].clone(), None, hessians)):
            for products in (0, 5):
                weights, bends, numbers = ops.ecs_estimate(
                    *(y, theta, anchor, v, *fields),
                    temperature=0.9,
                    num_data=50.0,
                    batch_size=3,
                    num_products=products,
                    lower_bound=-5.5,
                )
                density, gradient = ops.ecs_density(
                    *(numbers, s, weights, bends, theta, anchor, *fields),
                    *(v[0].clone(), s, b, prior),
                    temperature=0.9,
                )
                results += [weights, bends, numbers, density, gradient]
        place = ops.ecs_leapfrog_(theta, s, gradient, b, anchor, kick=0.1, drift=0.3)
        results += [theta, s, place]
    return results


def not_finite() -> list[Tensor]:
    """What is said of tensors with NaN and infinities, each at one place or at many."""
    tensors = values(
        [torch.empty(n, dtype=dtype) for dtype in DTYPES for n in SIZES], 1
    )
    for i, t in enumerate(tensors):
        t[i % 5 :: i + 1] = (torch.nan, torch.inf, -torch.inf)[i % 3]
        t[3 :: 2 * i + 7] = torch.inf
    found = torch.tensor([ops.any_nonfinite([t]) for t in tensors])
    return [ops.count_nonfinite(tensors), found]


def sampler_chain(kind: type[sg.Sampler], **options: object) -> list[Tensor]:
    """A short chain of a sampler with a hyperprior, on a linear model."""
    params = [torch.nn.Parameter(t) for t in values([torch.empty(301)] * 3, 1.0)]
    if kind is not sg.HMC:
        options["lr"] = 0.05
    sampler = kind(params, num_data=100, seed=-7, **options)
    precision = sg.GammaPrecision(sampler)
    scales = iter([1.0, 1.25, 0.75, 1.5, 1.0, 0.5] * 4)

    def closure() -> Tensor:
        sampler.zero_grad()
        scale = next(scales)
        terms = ((p * (i + scale)).square().mean() for i, p in enumerate(params))
        loss = torch.stack([*terms]).sum()
        loss.backward()
        return loss

    for _ in range(5):
        sampler.step(closure)
        precision.step()
    last = torch.tensor([g["prior_precision"] for g in sampler.param_groups])
    return [*params, last.double()]


def fingerprints() -> dict[str, str]:
    """Everything, by name."""
    result = {str(dtype): digest(operators(dtype)) for dtype in DTYPES}
    result["HMC-ECS"] = digest(subsampled())
    result["not finite"] = digest(not_finite())
    result["SGLD"] = digest(sampler_chain(sg.SGLD))
    result["PSGLD"] = digest(sampler_chain(sg.PSGLD, gamma=False))
    result["SGNHT"] = digest(sampler_chain(sg.SGNHT, thermostat_rate=0.01))
    result["SGHMC"] = digest(sampler_chain(sg.SGHMC, resample_momentum_every=2))
    result["HMC"] = digest(sampler_chain(sg.HMC, step_size=0.05, num_steps=2))
    result["EWSG"] = digest(sampler_chain(sg.EWSG, index_chain_length=3))
    return result


if __name__ == "__main__":
    print(json.dumps({"isa": _C.isa(), "fingerprints": fingerprints()}))
