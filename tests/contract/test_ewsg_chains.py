"""Many chains of EWSG in one tensor."""

import copy
from typing import Any

import pytest
import torch
from ewsg_chains import Draws
from reference import ewsg_log_weights
from short_chains import (
    TARGET,
    advance,
    assert_same,
)
from torch import Tensor, nn

import torch_sgmcmc as sg
import torch_sgmcmc._C as _C


def batched(chains: int) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(2)
    shapes = [(chains,), (chains, 3), (chains, 2, 130)]
    return [nn.Parameter(torch.randn(s, generator=g)) for s in shapes]


@pytest.mark.parametrize("chains", [1, 2, 50])
def test_weights_and_decisions_for_each_chain(chains: int) -> None:
    params = batched(chains)
    sampler = sg.EWSG(
        params, **TARGET, momentum=0.8, num_chains=chains, index_chain_length=2, seed=4
    )
    closure = Draws(params, noise=0.1)
    original = []

    def keeping() -> Tensor:
        loss = closure()
        original.append([p.grad.clone() for p in params])
        return loss

    sampler.step(keeping)
    accepted = 0.0
    for step in range(1, 20):
        original.clear()
        old = [p.detach().clone() for p in params]
        momenta = [sampler.state[p]["momentum"].clone() for p in params]
        before = float(sampler.param_groups[0]["num_accepted"])
        sampler.step(keeping)

        def weight(
            grads: list[Tensor], old: Any = old, momenta: Any = momenta
        ) -> Tensor:
            return ewsg_log_weights(
                old, grads, momenta, **TARGET, momentum=0.8, num_chains=chains
            )

        current = original[0]
        count = 0
        for m, proposed in enumerate(original[1:]):
            rise = weight(proposed) - weight(current)
            yes = torch.ops.torch_sgmcmc.metropolis_decide(
                rise,
                proposal=m,
                purpose=_C.Purpose.INDEX_CHAIN,
                seed=4,
                step=step,
            )
            count += int(yes.sum())
            current = [
                torch.where(yes.view(-1, *[1] * (a.dim() - 1)), b, a)
                for a, b in zip(current, proposed, strict=True)
            ]
        assert_same([p.grad for p in params], current)
        assert float(sampler.param_groups[0]["num_accepted"]) - before == count
        accepted += count
    assert sampler.param_groups[0]["num_proposals"] == 20 * 2 * chains
    assert 0.1 < accepted / (19 * 2 * chains) < 0.9


def test_one_chain_with_a_leading_dimension_is_one_chain() -> None:
    params, others = batched(1), batched(1)
    for ps, chains in ((params, 1), (others, None)):
        sampler = sg.EWSG(ps, **TARGET, num_chains=chains, seed=4)
        closure = Draws(ps)
        for _ in range(10):
            sampler.step(closure)
    assert_same(params, others)


def test_many_chains_resume_bit_for_bit() -> None:
    params = batched(20)
    sampler = sg.EWSG(params, **TARGET, num_chains=20, seed=4)
    advance(sampler, params, range(5))
    others = [nn.Parameter(p.detach().clone()) for p in params]
    twin = sg.EWSG(others, lr=1.0, num_data=1, num_chains=20)
    twin.load_state_dict(copy.deepcopy(sampler.state_dict()))
    for s, ps in ((sampler, params), (twin, others)):
        advance(s, ps, range(5, 10))
    assert_same(params, others)
    assert twin.acceptance_rate == sampler.acceptance_rate > 0


def test_chains_in_several_groups() -> None:
    expected = batched(20)
    advance(sg.EWSG(expected, **TARGET, num_chains=20, seed=4), expected, range(9))
    params = batched(20)
    groups = [{"params": params[:1]}, {"params": params[1:]}]
    sampler = sg.EWSG(groups, **TARGET, num_chains=20, seed=4)
    advance(sampler, params, range(9))
    assert_same(params, expected)
