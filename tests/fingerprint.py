"""Hashes of what the operators and samplers compute, to compare processes with.

Run as a program it prints the instruction set in use and the hashes, as JSON.
"""

import hashlib
import json
from functools import cache

import torch
from operator_tensors import TARGET, arguments_of, by_gradients, masters_of
from reference import DTYPES, SIZES, arithmetic

import torch_sgmcmc as sg
import torch_sgmcmc._C as _C
from torch_sgmcmc.core import ops as ops


def digest(tensors):
    """A hash of the bits of some tensors."""
    h = hashlib.sha256()
    for t in tensors:
        h.update(f"{t.dtype}{list(t.shape)}".encode())
        raw = t.detach().contiguous().flatten().view(torch.uint8)
        h.update(raw.numpy().tobytes())
    return h.hexdigest()


def values(like, scale):
    """Values of many magnitudes without any random number generator."""
    waves = (torch.arange(t.numel(), dtype=torch.float64) * 0.7 for t in like)
    return [
        (scale * torch.sin(wave + i)).to(t.dtype)
        for i, (t, wave) in enumerate(zip(like, waves, strict=True))
    ]


def operators(dtype, sizes=(*(n for n in SIZES for _ in range(3)),)):
    """Results of every operator that takes lists, for tensors of these sizes."""
    like = [torch.empty(n, dtype=dtype) for n in sizes]
    # Alignments of all kinds; some near 2^34, where the quad's low word overflows.
    offsets = [(2**34 - 300 if i % 4 == 3 else 0) + 131 * i for i in range(len(like))]
    stream = {"offsets": offsets, "seed": 2**62 + 12345, "step": 2**40 + 3}
    params, grads = values(like, 2.0), values(like, -0.9)
    work = [torch.empty(t.shape, dtype=arithmetic(dtype)) for t in like]
    momenta, variances = values(work, 0.3), [v.abs() for v in values(work, 0.02)]
    masters = masters_of(params)

    def empty(tensors):
        return [torch.empty_like(t) for t in tensors]

    noise = empty(like)
    ops.gaussian_(noise, std=1.0, purpose=0, **stream)
    for op in by_gradients():
        lists, numbers = arguments_of(op, params, grads, momenta, masters)
        getattr(ops, op)(*lists, **numbers, **stream)
    update = {**TARGET, **stream}
    friction = {"momentum": 0.8, "noise_estimate": 0.01}
    for statistic in ([], variances):
        lists = (params, grads, momenta, statistic, masters)
        ops.sghmc_step_(*lists, **update, **friction, resample_momentum_every=0)
    squares, curvatures = [v.square() for v in momenta], values(like, 0.4)
    sensitivities, thermostats = values(work, 0.7), values(work, 0.05)
    ops.psgld_frozen_step_(params, grads, squares, masters, **update)
    for w, h in (([], []), (sensitivities, curvatures)):
        lists = (params, grads, squares, w, h, masters)
        ops.psgld_step_(*lists, **update, decay=0.9, eps=1e-3)
    lists = (params, grads, momenta, thermostats, masters)
    ops.sgnht_step_(*lists, **update, momentum=0.8, thermostat_rate=0.03)
    ops.gradient_variance_(grads, variances, momenta, weight=0.3)
    ops.control_variate_(grads, curvatures, momenta)
    found = [ops.sum_of_squares(params)]
    weights = {**TARGET, "momentum": 0.8, "num_chains": 1}
    for surrogate in range(4):
        lists = (params, grads, noise, momenta if surrogate != 1 else [])
        found.append(ops.ewsg_log_ratio(*lists, **weights, surrogate=surrogate))
    ratios = torch.cat(found[1:]) / 1e4
    found.append(ops.metropolis_decide(ratios, proposal=1, purpose=3, seed=2, step=3))
    masses, drawn = [0.5 + v.square() for v in values(work, 1.1)], empty(work)
    trajectory = {"kick": 0.2, "num_data": 7.0, "prior_precision": 1.9}
    for mass in ([], masses):
        ops.hmc_momenta_(drawn, mass, temperature=0.7, **stream)
        lists = (params, grads, drawn, mass, masters)
        ops.hmc_leapfrog_(*lists, drift=0.3, **trajectory)
        ops.hmc_leapfrog_(*lists, drift=0.0, **trajectory)
        for prior in (0.0, 1.9):
            numbers = {"prior_precision": prior, "num_chains": 1}
            found.append(ops.hmc_energy(params, drawn, mass, **numbers))
    placed, turned, again = empty(like), values(work, 0.6), values(work, 0.6)
    ops.sbps_place_(placed, drawn, turned, time=0.3)
    lists = (placed, grads, turned, masses)
    found.append(ops.sbps_reflection_sums(*lists, weight_decay=0.1))
    turn = {"weight_decay": 0.1, "scale": 0.9, "gain": 0.3}
    ops.sbps_reflect_(*lists, **turn)
    found.append(ops.sbps_reflect_sums_(placed, grads, again, drawn, **turn))
    ops.sbps_adapt_(placed, grads, squares, weight_decay=0.1, decay=0.9)
    found.append(ops.sbps_preconditioner_sum(squares, eps=0.1))
    scales, along, by = empty(work), empty(work), {"eps": 0.1, "scale": 2.0}
    ops.sbps_precondition_(squares, turned, scales, along, **by)
    found.append(ops.sbps_line_sums(drawn, along))
    others = empty(work), empty(work)
    found.append(ops.sbps_precondition_sums_(squares, again, *others, drawn, **by))
    roots = [s.clone() for s in squares]
    ops.square_root_(roots)
    gauged = {"kind": 3, "weight_decay": 0.1, "decay": 1.0, "eps": 0.0}
    found.append(ops.temperature_sums(grads, momenta, [], drawn, squares, **gauged))
    states = [*momenta, *variances, *squares, *sensitivities, *thermostats, *roots]
    moved = [*drawn, *placed, *turned, *again, *scales, *along, *others[0], *others[1]]
    return [*noise, *params, *masters, *grads, *states, *moved, *found]


def subsampled():
    """Results of the operators of HMC-ECS, for rows of all kinds of lengths."""
    results = []
    for d in (3, 8, 29, 301):
        m = 33
        shapes = (m, d, d, m, (2, m, d), m, (m, d, d), d, (d, d))
        like = [torch.empty(shape, dtype=torch.float64) for shape in shapes]
        made = zip(values(like, 0.3), like, strict=True)
        y, theta, anchor, v, gradients, scales, hessians, s, b = (
            t.view(shaped.shape) for t, shaped in made
        )
        prior = s.exp()
        for fields in (
            (gradients, scales, None),
            (gradients[:1].clone(), None, hessians),
        ):
            for factors in (0, 5):
                sizes = {"num_data": 50.0, "batch_size": 3, "num_factors": factors}
                weights, hessian_terms, numbers = ops.ecs_estimate(
                    y,
                    theta,
                    anchor,
                    v,
                    *fields,
                    **{"temperature": 0.9, "lower_bound": -5.5, **sizes},
                )
                density, gradient = ops.ecs_density(
                    numbers,
                    s,
                    weights,
                    hessian_terms,
                    theta,
                    anchor,
                    *fields,
                    v[0].clone(),
                    s,
                    b,
                    prior,
                    temperature=0.9,
                )
                results += [weights, hessian_terms, numbers, density, gradient]
        place = ops.ecs_leapfrog_(theta, s, gradient, b, anchor, kick=0.1, drift=0.3)
        results += [theta, s, place]
    return results


def not_finite():
    """Records messages about NaN and infinities, at one place or many."""
    tensors = values(
        [torch.empty(n, dtype=dtype) for dtype in DTYPES for n in SIZES], 1
    )
    for i, t in enumerate(tensors):
        t[i % 5 :: i + 1] = (torch.nan, torch.inf, -torch.inf)[i % 3]
        t[3 :: 2 * i + 7] = torch.inf
    found = torch.tensor([ops.any_nonfinite([t]) for t in tensors])
    return [ops.count_nonfinite(tensors), found]


def sampler_chain(kind, **options):
    """A short chain of a sampler with a hyperprior, on a linear model."""
    params = [torch.nn.Parameter(t) for t in values([torch.empty(301)] * 3, 1.0)]
    if kind is not sg.HMC:
        options["lr"] = 0.05
    sampler = kind(params, num_data=100, seed=-7, **options)
    precision = sg.GammaPrecision(sampler)
    scales = iter([1.0, 1.25, 0.75, 1.5, 1.0, 0.5] * 4)

    def closure():
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


@cache
def fingerprints():
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
