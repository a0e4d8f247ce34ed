"""HMC's operators equal plain-PyTorch references, to rounding."""

import operator_tensors as tensors
import pytest
import torch
from reference import DTYPES, Exact, assert_rounded, draw, leapfrog, same_bits

import torch_sgmcmc._C as _C
from torch_sgmcmc.core import ops as ops


@pytest.mark.parametrize("massive", [False, True])
@pytest.mark.parametrize("prior_precision", [0.0, 1.9])
@pytest.mark.parametrize("drift", [0.0, 0.3])
def test_leapfrog_equals_reference(drift, prior_precision, massive):
    params, grads = tensors.mixed_list(1), tensors.mixed_list(2)
    momenta = tensors.states(params, 3)
    masses = [0.3 + s.square() for s in tensors.states(params, 4)] if massive else []
    move = {"kick": 0.2, "num_data": 7.0, "prior_precision": prior_precision}
    masters = tensors.masters_of(params)
    values = tensors.values_of(params, masters)
    expected = [
        leapfrog(p, g, r, masses[i] if massive else None, drift=drift, **move)
        for i, (p, g, r) in enumerate(zip(values, grads, momenta, strict=True))
    ]
    untouched, before = tensors.clones(grads + masses), tensors.clones(params + masters)
    ops.hmc_leapfrog_(params, grads, momenta, masses, masters, drift=drift, **move)
    tensors.assert_updated(params, masters, [new for new, _ in expected])
    for r, (_, new_r) in zip(momenta, expected, strict=True):
        assert_rounded(r, new_r)
    tensors.assert_all_same(grads + masses, untouched)
    if drift == 0:
        tensors.assert_all_same(params + masters, before)


@pytest.mark.parametrize("massive", [False, True])
def test_momenta_equal_reference(massive):
    momenta = tensors.states(tensors.mixed_list(1), 3)
    masses = (
        [0.3 + s.square() for s in tensors.states(tensors.mixed_list(1), 4)]
        if massive
        else []
    )
    offsets = tensors.scattered_offsets(momenta)
    noise = draw(
        momenta, offsets=offsets, purpose=_C.Purpose.MOMENTUM, **tensors.STREAM
    )
    ops.hmc_momenta_(
        momenta, masses, temperature=0.7, offsets=offsets, **tensors.STREAM
    )
    for i, (r, z) in enumerate(zip(momenta, noise, strict=True)):
        mass = masses[i].double() if massive else 1.0
        value = torch.as_tensor(0.7 * mass, dtype=torch.float64).sqrt() * z
        assert_rounded(r, Exact(value, value.abs()))


@pytest.mark.parametrize("massive", [False, True])
@pytest.mark.parametrize("prior_precision", [0.0, 1.9])
@pytest.mark.parametrize("chains", [1, 2, 17, 1000])
def test_energy_equals_reference(chains, prior_precision, massive):
    g = torch.Generator().manual_seed(chains)
    shapes = [(chains,), (chains, 2), (chains, 5, 3), (chains, 4097), (chains, 0)]
    dtypes = [*DTYPES, torch.float32]
    params = [
        torch.randn(s, generator=g).to(d) for s, d in zip(shapes, dtypes, strict=True)
    ]
    momenta = tensors.states(params, 3)
    masses = [0.3 + s.square() for s in tensors.states(params, 4)] if massive else []
    lists = [params, momenta, masses]
    hyper = {"prior_precision": prior_precision}
    energy = ops.hmc_energy(*lists, **hyper, num_chains=chains)
    expected = torch.zeros(chains, dtype=torch.float64)
    for i, (p, r) in enumerate(zip(params, momenta, strict=True)):
        terms = r.double().square() / (masses[i].double() if massive else 1.0)
        terms = terms + prior_precision * p.double().square()
        expected += terms.reshape(chains, -1).sum(dim=1) / 2
    torch.testing.assert_close(energy, expected, rtol=1e-13, atol=0)
    # A chain's energy does not depend on the others: the same bits alone.
    for k in (0, chains - 1):
        alone = [[t[k : k + 1] for t in ts] for ts in lists]
        assert same_bits(ops.hmc_energy(*alone, **hyper, num_chains=1)[0], energy[k])
