"""Any memory format, any strides: right results, and nothing else is touched."""

import pytest
import reference
import torch
from operator_tensors import TARGET, assert_updated, masters_of, values_of

from torch_sgmcmc.core import ops as ops

FRICTION = {"momentum": 0.8, "noise_estimate": 0.05}
THERMOSTAT = {"momentum": 0.8, "thermostat_rate": 0.05}
MEAN = {"decay": 0.8, "eps": 0.1}
STREAM = {"seed": 11, "step": 3}

# Each takes a contiguous 4- or 5-dimensional tensor to one with the same values in
# another layout.
LAYOUTS = {
    "contiguous": lambda t: t.clone(),
    "channels_last": lambda t: t.to(memory_format=torch.channels_last),
    "transposed": lambda t: t.transpose(0, 2).contiguous().transpose(0, 2),
    "permuted": lambda t: t.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2),
    "every third": lambda t: t.repeat_interleave(3, dim=-1)[..., ::3],
    "cut out": lambda t: torch.nn.functional.pad(t, (1, 2, 3, 1))[..., 3:-1, 1:-2],
    "odd rows": lambda t: t.repeat_interleave(2, dim=1)[:, 1::2],
    "sparse and transposed": lambda t: (
        t.transpose(1, 3).repeat_interleave(2, dim=0)[::2].transpose(1, 3)
    ),
    "offset view": lambda t: torch.cat([t.new_zeros(3), t.flatten()])[3:].view(t.shape),
}


def normal(*shape, seed, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)


def test_layouts_match_their_names():
    t = normal(5, 4, 6, 7, seed=0)
    for name, layout in LAYOUTS.items():
        assert torch.equal(layout(t), t)
        is_same = name in ("contiguous", "offset view")
        assert layout(t).is_contiguous() == is_same


@pytest.mark.parametrize("dtype", reference.DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_every_argument(layout, dtype):
    theta, gradient, velocity = (
        normal(5, 4, 6, 7, seed=i + 1, dtype=each)
        for i, each in enumerate((dtype, dtype, reference.arithmetic(dtype)))
    )
    one = LAYOUTS[layout]
    for two in LAYOUTS.values():
        # The parameter in one layout, gradient and momentum in another one; momentum
        # and thermostat in different layouts.
        (noise,) = reference.draw([one(theta)], offsets=[9], **STREAM)
        g, h, u, v = map(two, (gradient, gradient / 2, velocity, velocity.square()))
        faster, a, w = two(velocity), one(velocity / 8), one(velocity)
        whole = {"resample_momentum_every": 0}
        # The state, in the reference before and after the noise, and in the operator.
        for name, before, after, lists, numbers, more in (
            ("sgld", [], [], [], {}, {}),
            ("sghmc", [u], [], [[u], []], FRICTION, whole),
            ("sgnht", [faster, a], [], [[faster], [a]], THERMOSTAT, {}),
            ("psgld", [v], [w, h], [[v], [w], [h]], MEAN, {}),
        ):
            p = one(theta)
            masters = masters_of([p])
            (value,) = values_of([p], masters)
            masters = [two(m) for m in masters]
            adapt = {"adapt": True} if name == "psgld" else {}
            numbers = {**TARGET, **numbers}
            formula, op = getattr(reference, name), getattr(ops, f"{name}_step_")
            expected = formula(value, g, *before, noise, *after, **numbers, **adapt)
            op([p], [g], *lists, masters, **numbers, **more, offsets=[9], **STREAM)
            moved, *states = [expected] if name == "sgld" else expected
            allowed = {"roundings": 24} if name == "psgld" else {}
            assert_updated([p], masters, [moved], **allowed)
            for got, want in zip((*before, *after[:1]), states, strict=True):
                reference.assert_rounded(got, want, **allowed)
            assert torch.equal(g, gradient) and torch.equal(h, gradient / 2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_noise_and_statistics_in_every_layout(layout):
    make = LAYOUTS[layout]
    values = normal(5, 4, 6, 7, seed=1)
    out = make(values)
    (noise,) = reference.draw([out], offsets=[9], **STREAM)
    ops.gaussian_([out], std=1.0, offsets=[9], purpose=0, **STREAM)
    assert torch.equal(out.double(), noise)

    exact = float(values.double().square().sum())
    found = float(ops.sum_of_squares([make(values)]))
    assert found == pytest.approx(exact, rel=1e-14, abs=0)

    expected = values.clone()
    before = torch.zeros_like(values)
    ops.gradient_variance_([values], [expected], [before], weight=0.5)
    for other in LAYOUTS.values():
        grad, variance = make(values), other(values)
        previous = other(torch.zeros_like(values))
        ops.gradient_variance_([grad], [variance], [previous], weight=0.5)
        assert torch.equal(variance, expected)
        assert torch.equal(previous, values)
        assert torch.equal(grad, values)

    anchor, full = normal(5, 4, 6, 7, seed=2), normal(5, 4, 6, 7, seed=3)
    for other in LAYOUTS.values():
        grad, at_anchor = make(values), other(anchor)
        ops.control_variate_([grad], [at_anchor], [other(full)])
        assert torch.equal(grad, values - anchor + full)
        assert torch.equal(at_anchor, anchor)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("chains", [1, 5])
def test_weights_and_selection_in_every_layout(chains, layout):
    shape = (5, 4, 6, 7)
    p, g, h, v = (normal(*shape, seed=i) for i in range(4))
    hyper = {**TARGET, "momentum": 0.8, "surrogate": 0, "num_chains": chains}
    mask = torch.arange(chains) % 2 == 0

    def weights(*lists):
        return ops.ewsg_log_ratio(*([t] for t in lists), **hyper)

    expected = weights(p, g, h, v)
    rows = mask if chains == 5 else mask.expand(5)
    selected = torch.where(rows[:, None, None, None], h, g)
    make = LAYOUTS[layout]
    for other in LAYOUTS.values():
        ratio = weights(make(p), other(g), make(h), other(v))
        # Elements are added in another order.
        torch.testing.assert_close(ratio, expected, rtol=1e-12, atol=0)
        target = {"prior_precision": 0.3, "num_chains": chains}
        energy = ops.hmc_energy([make(p)], [other(v)], [], **target)
        rows_of = (0.15 * p.square() + 0.5 * v.square()).reshape(chains, -1)
        torch.testing.assert_close(energy, rows_of.double().sum(1), rtol=1e-5, atol=0)
        grad, proposal = make(g), other(h)
        ops.select_chains_([grad], [proposal], mask)
        assert torch.equal(grad, selected)
        assert torch.equal(proposal, h)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_noise_follows_indices_and_not_memory(layout):
    p, g = (normal(5, 4, 6, 7, seed=i) for i in range(2))
    q = LAYOUTS[layout](p)
    for param in (p, q):
        ops.sgld_step_([param], [g], [], **TARGET, offsets=[9], **STREAM)
    assert reference.same_bits(p, q.contiguous())


# Columns of a matrix: (rows, columns, first, end), from single ones to many blocks.
COLUMNS = [
    (5, 3, 0, 2),
    (5, 3, 2, 3),
    (1, 7, 2, 6),
    (300, 50, 10, 31),
    (3, 256, 128, 256),
    (7, 1000, 3, 900),
    (4, 9000, 1000, 8999),
    (200, 300, 1, 300),
    (0, 9, 2, 5),
    *((150, 23, first, first + 5) for first in (0, 1, 18)),
    *((40, 4 * n + 1, n, 2 * n) for n in (17, 33, 100, 127, 129)),
]
# The latter cross a multiple of 2^34 elements, 2^32 quads.
OFFSETS = [0, 128, 5, 2**34 - 512, 2**34 - 2048]


@pytest.mark.parametrize("dtype", reference.DTYPES)
@pytest.mark.parametrize("offset", OFFSETS)
def test_rows_of_a_shard_are_numbered_as_in_the_whole(offset, dtype):
    stream = {**STREAM, "offsets": [offset]}
    for n, m, first, end in COLUMNS:
        whole = [normal(n, m, seed=i, dtype=dtype) for i in range(2)]
        state = reference.arithmetic(dtype)
        whole += [normal(n, m, seed=i, dtype=state) for i in range(2, 4)]
        whole += masters_of(whole[:1])
        parts = [t[:, first:end].clone() for t in whole]
        # A transposed one goes through a copy, but is numbered in row-major order.
        parts[0] = parts[0].t().contiguous().t()
        at = {"offsets": [offset + first], "rows": [end - first, m]}
        for lists, more in ((whole, {}), (parts, at)):
            p, g, v, mean, *masters = lists
            settings = TARGET | FRICTION | {"resample_momentum_every": 3}
            settings |= {"prior_means": [mean]} | stream | more
            ops.sghmc_step_([p], [g], [v], [], masters, **settings)
            ops.sgld_step_([p], [v.to(p.dtype)], masters, **TARGET, **(stream | more))
        for t, part in zip(whole, parts, strict=True):
            assert reference.same_bits(t[:, first:end], part)


def test_size_one_dimensions_do_not_matter():
    # torch gives such dimensions arbitrary strides.
    p = torch.empty_strided((4, 1, 6), (6, 999, 1)).copy_(normal(4, 1, 6, seed=1))
    q = p.contiguous().view(24).clone()
    g = normal(4, 1, 6, seed=2)
    ops.sgld_step_([p], [g], [], **TARGET, offsets=[0], **STREAM)
    ops.sgld_step_([q], [g.view(24)], [], **TARGET, offsets=[0], **STREAM)
    assert reference.same_bits(p.flatten(), q)


def test_scalars_and_empty_tensors():
    shapes = [(), (0,), (3,), (2, 0, 5), (1, 1), (0,), ()]
    params, grads, momenta = (
        [normal(*s, seed=i) for i, s in enumerate(shapes, first)]
        for first in (0, 9, 19)
    )
    offsets = [128 * i for i in range(len(shapes))]
    noise = reference.draw(params, offsets=offsets, **STREAM)
    expected = [
        reference.sghmc(p, g, v, z, **TARGET, **FRICTION)
        for p, g, v, z in zip(params, grads, momenta, noise, strict=True)
    ]
    lists = (params, grads, momenta, [], [])
    numbers = {**TARGET, **FRICTION, "resample_momentum_every": 0}
    ops.sghmc_step_(*lists, **numbers, offsets=offsets, **STREAM)
    for p, v, (new_p, new_v) in zip(params, momenta, expected, strict=True):
        if p.numel() > 0:
            reference.assert_rounded(p, new_p)
            reference.assert_rounded(v, new_v)
    # Lists of nothing but empty tensors are no special case.
    ops.sgld_step_(params[1:2], grads[1:2], [], **TARGET, offsets=[0], **STREAM)


@pytest.mark.parametrize("dtype", reference.DTYPES)
def test_surrounding_memory_is_untouched(dtype):
    # Slices of bigger buffers, at every alignment and around block boundaries; the
    # rest of the buffers holds NaNs, which must stay as they are and stay out.
    for numel in (1, 2, 5, 31, 127, 128, 129, 513, 4095, 4097):
        for lead in (1, 2, 3, 16, 33):
            span = slice(lead, lead + numel)
            state = reference.arithmetic(dtype)
            buffers = [
                torch.full((numel + 160,), torch.nan, dtype=t)
                for t in (dtype, dtype, state, state, torch.float32)
            ]
            for i, b in enumerate(buffers):
                b[span] = normal(numel, seed=i, dtype=b.dtype).abs()
            p, g, v, w, master = (b[span] for b in buffers)
            m = [master] if dtype.itemsize == 2 else []
            stream = {"offsets": [lead], **STREAM}
            ops.gradient_variance_([g], [w], [v], weight=0.5)
            ops.control_variate_([g], [p], [v])
            ops.sgld_step_([p], [g], m, **TARGET, **stream)
            lists = ([p], [g], [v], [w * 1e-3], m)
            friction = {"momentum": 0.8, "noise_estimate": 0.0}
            every = {"resample_momentum_every": 3}
            ops.sghmc_step_(*lists, **TARGET, **friction, **every, **stream)
            ops.psgld_step_([p], [g], [w], [v], [g], m, **TARGET, **MEAN, **stream)
            ops.sgnht_step_([p], [g], [v], [w], m, **TARGET, **THERMOSTAT, **stream)
            ops.hmc_momenta_([v], [1 + w.abs()], temperature=1.0, **stream)
            drift = {"kick": 0.1, "drift": 0.1, "num_data": 1, "prior_precision": 0.1}
            ops.hmc_leapfrog_([p], [g], [v], [w], m, **drift)
            ops.gaussian_([g], std=0.5, purpose=0, **stream)
            for b in buffers:
                outside = torch.cat([b[:lead], b[lead + numel :]])
                assert reference.same_bits(outside, torch.full_like(outside, torch.nan))
                assert bool(torch.isfinite(b[span]).all())
            assert torch.isfinite(ops.sum_of_squares([p, g, v, w]))
            chain = {"momentum": 0.8, "surrogate": 0, "num_chains": 1}
            ratio = ops.ewsg_log_ratio([p], [g], [p], [v], **TARGET, **chain)
            assert torch.isfinite(ratio)
            ops.select_chains_([p], [g], torch.tensor([True]))
            assert reference.same_bits(p, g)
            for b in buffers:
                outside = torch.cat([b[:lead], b[lead + numel :]])
                assert reference.same_bits(outside, torch.full_like(outside, torch.nan))


def test_whether_autograd_follows_does_not_matter():
    def make():
        return normal(4, 6, seed=3)[:, ::2]

    with torch.inference_mode():
        inferred = make()
    expected, leaf = make(), make().requires_grad_()
    for t in (expected, leaf, inferred):
        ops.sgld_step_([t], [make()], [], **TARGET, offsets=[0], **STREAM)
        assert reference.same_bits(t.detach(), expected)
    assert not reference.same_bits(expected, make())


def test_gradient_views_are_resolved():
    # A view that carries a pending negation (as real views of conjugates do).
    values = normal(50, seed=1)
    p, q = normal(50, seed=2), normal(50, seed=2)
    ops.sgld_step_([p], [torch._neg_view(values)], [], **TARGET, offsets=[0], **STREAM)
    ops.sgld_step_([q], [-values], [], **TARGET, offsets=[0], **STREAM)
    assert reference.same_bits(p, q)
