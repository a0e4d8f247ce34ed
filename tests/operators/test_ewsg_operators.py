"""EWSG's operators equal plain-PyTorch references, and decide as they should."""

import math

import numpy as np
import pytest
import torch
from harness.philox import philox
from operator_tensors import TARGET, assert_all_same, clones, mixed_list, states
from reference import DTYPES, arithmetic, ewsg_log_weights, same_bits

import torch_sgmcmc._C as _C
from torch_sgmcmc.core import ops as ops

SURROGATES = ("momentum", "zero", "one", "full_momentum")


def assert_log_ratio(lists, surrogate, hyper, chains=1):
    params, grads, proposals, momenta = lists
    settings = {**hyper, "surrogate": surrogate, "num_chains": chains}
    before, after = (
        ewsg_log_weights(params, g, momenta, **settings) for g in (grads, proposals)
    )
    choice = {"surrogate": SURROGATES.index(surrogate), "num_chains": chains}
    result = ops.ewsg_log_ratio(*lists, **hyper, **choice)
    assert result.dtype == torch.float64 and result.shape == (chains,)
    # Both are sums in float64, of terms no larger than W's.
    error = (result - (after - before)).abs()
    assert bool((error <= 1e-13 * (after + before)).all())
    if float(before[0]) > 0:
        assert result.abs().max() > 1e-3 * before.max()


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("prior_precision", [0.0, 1.9])
@pytest.mark.parametrize("with_momenta", [True, False])
def test_ewsg_log_ratio_equals_reference(with_momenta, prior_precision, surrogate):
    hyper = {**TARGET, "prior_precision": prior_precision, "momentum": 0.8}
    params, grads, proposals = (mixed_list(i) for i in (1, 2, 3))
    proposals = [1.5 * t for t in proposals]
    momenta = states(params, 4) if with_momenta else []
    lists = [params, grads, proposals, momenta]
    untouched = [clones(ts) for ts in lists]
    assert_log_ratio(lists, surrogate, hyper)
    # Momenta of another lr: the factor is that of what is read.
    scaled = [2.5 * v for v in momenta]
    choice = {**hyper, "surrogate": SURROGATES.index(surrogate), "num_chains": 1}
    expected = ops.ewsg_log_ratio(params, grads, proposals, scaled, **choice)
    found = ops.ewsg_log_ratio(*lists, **choice, momentum_scale=2.5)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    for i in range(0, len(params), 5):
        single = [ts[i : i + 1] for ts in lists]
        assert_log_ratio(single, surrogate, hyper)
    for ts, copies in zip(lists, untouched, strict=True):
        assert_all_same(ts, copies)


@pytest.mark.parametrize("chains", [2, 3, 16, 17, 1000])
def test_ewsg_log_ratio_of_each_chain(chains):
    g = torch.Generator().manual_seed(chains)
    shapes = [(chains,), (chains, 2), (chains, 5, 3), (chains, 4097), (chains, 0)]
    own = (torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.float32)
    of_momenta = map(arithmetic, own)
    lists = [
        [torch.randn(s, generator=g).to(d) for s, d in zip(shapes, dtypes, strict=True)]
        for dtypes in (own, own, own, of_momenta)
    ]
    hyper = {**TARGET, "momentum": 0.8}
    assert_log_ratio(lists, "momentum", hyper, chains)
    # A chain's ratio does not depend on the others: the same bits alone.
    together = ops.ewsg_log_ratio(*lists, **hyper, surrogate=0, num_chains=chains)
    for k in (0, chains - 1):
        alone = [[t[k : k + 1] for t in ts] for ts in lists]
        ratio = ops.ewsg_log_ratio(*alone, **hyper, surrogate=0, num_chains=1)
        assert same_bits(ratio[0], together[k])


def test_ewsg_log_ratio_at_learning_rate_zero():
    # W(g') - W(g) = N v (g' - g) / (2 T), where W itself is infinite.
    g = torch.Generator().manual_seed(0)
    p, a, b, v = ([torch.randn(100, generator=g)] for _ in range(4))
    hyper = {**TARGET, "lr": 0.0, "momentum": 0.8}
    ratio = ops.ewsg_log_ratio(p, a, b, v, **hyper, surrogate=0, num_chains=1)
    rise = (v[0].double() * (b[0].double() - a[0].double())).sum()
    expected = hyper["num_data"] / (2 * hyper["temperature"]) * rise
    torch.testing.assert_close(ratio[0], expected, rtol=1e-12, atol=0)


def test_equal_gradients_have_the_ratio_zero():
    params, grads = mixed_list(1), mixed_list(2)
    numbers = {**TARGET, "momentum": 0.8, "surrogate": 0, "num_chains": 1}
    lists = (params, grads, clones(grads), states(params, 3))
    ratio = ops.ewsg_log_ratio(*lists, **numbers)
    assert float(ratio) == 0.0


def uniforms(chains, *, proposal, purpose, seed, step):
    """Note [Counter layout]: quad 2^24 chain + proposal, 52 bits of two words."""
    quads = (np.arange(chains, dtype=np.uint64) << np.uint64(24)) + np.uint64(proposal)
    low, high = quads & np.uint64(2**32 - 1), quads >> np.uint64(32)
    c2 = np.full_like(quads, step % 2**32)
    c3 = np.full_like(quads, (step >> 32) | purpose << 16)
    key = (seed % 2**32, (seed >> 32) % 2**32)
    words = philox(np.stack([low, high, c2, c3], axis=1), key)
    bits = (words[:, 0] << np.uint64(32) | words[:, 1]) >> np.uint64(12)
    return (bits.astype(np.float64) + 0.5) * 2.0**-52


@pytest.mark.parametrize("purpose", [_C.Purpose.INDEX_CHAIN, _C.Purpose.METROPOLIS])
@pytest.mark.parametrize("proposal", [0, 1, 2**24 - 1])
@pytest.mark.parametrize(("seed", "step"), [(0, 0), (-(2**40) + 77, 2**33 + 4)])
def test_decisions(seed, step, proposal, purpose):
    chains = 20_000
    counter = {"proposal": proposal, "seed": seed, "step": step}
    stream = {**counter, "purpose": purpose}
    log_u = np.log(uniforms(chains, **stream))
    g = torch.Generator().manual_seed(0)
    ratios = torch.randn(chains, generator=g, dtype=torch.float64)
    expected = torch.as_tensor(log_u < ratios.numpy())
    assert torch.equal(ops.metropolis_decide(ratios, **stream), expected)
    # To within a few ulp of the threshold, over its whole range.
    for sign in (-1, 1):
        near = torch.as_tensor(log_u + sign * 1e-15 * np.abs(log_u) + sign * 1e-18)
        near = near.clamp(max=-1e-300)
        decided = ops.metropolis_decide(near, **stream)
        assert decided.all() if sign > 0 else not decided.any()
    # The function for one chain is that of chain 0.
    if purpose == _C.Purpose.INDEX_CHAIN:
        for offset in (-1e-9, 1e-9):
            accepts = _C.index_chain_accepts(log_u[0] + offset, **counter)
            assert accepts == (offset > 0)


def test_decisions_on_unusual_ratios():
    values = [0.0, -0.0, 1.0, math.inf, -math.inf, math.nan, -1e300]
    ratios = torch.tensor(values, dtype=torch.float64)
    for step in range(50):
        counter = {"proposal": 0, "seed": 1, "step": step}
        stream = {**counter, "purpose": _C.Purpose.INDEX_CHAIN}
        expected = [True, True, True, True, False, False, False]
        assert ops.metropolis_decide(ratios, **stream).tolist() == expected
        assert [_C.index_chain_accepts(x, **counter) for x in values] == expected
    empty = torch.empty(0, dtype=torch.float64)
    assert ops.metropolis_decide(empty, **stream).shape == (0,)


@pytest.mark.parametrize("chains", [1, 2, 7, 300])
def test_rows_are_selected(chains):
    g = torch.Generator().manual_seed(chains)
    shapes = [(chains,), (chains, 3), (chains, 0), (chains, 2, 50), (chains, 5000)]
    for dtype in DTYPES:
        a, b = (
            [torch.randn(s, generator=g).to(dtype) for s in shapes] for _ in range(2)
        )
        mask = torch.rand(chains, generator=g) < 0.5
        expected = [
            torch.where(mask.view(-1, *[1] * (x.dim() - 1)), y, x)
            for x, y in zip(a, b, strict=True)
        ]
        kept = clones(b)
        ops.select_chains_(a, b, mask)
        assert_all_same(a, expected)
        assert_all_same(b, kept)
