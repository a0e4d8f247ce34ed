"""HMC on several ranks, and samplers that decide alone.

``python hmc_rank_programs.py RANK SIZE FOLDER`` does what test_hmc_ranks.py looks at,
and saves it as FOLDER/RANK.pt.
"""

from functools import partial

import hmc_ranks
import torch
import torch.distributed as dist
from one_rank import join, refusal, run, theta

import torch_sgmcmc as sg


def make(name, **settings):
    """A sampler of a small regression, with a closure."""
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(20, 3, generator=g), torch.randn(20, generator=g)
    p = torch.zeros(3, requires_grad=True)
    common = {"num_data": 20, "prior_precision": 1.0, "seed": 2, **settings}

    def losses(indices=None):
        rows = slice(None) if indices is None else indices
        return (x[rows] @ p - y[rows]).square() / 2

    if name == "HMCECS":
        sampler = sg.HMCECS([p], subsample_size=5, num_blocks=5, **common)
        return p, sampler, lambda indices: -losses(indices)
    return p, sg.SBPS([p], **common), losses


def alone(name, **settings):
    """Returns the end of a chain on one rank."""
    p, sampler, closure = make(name, **settings)
    for _ in range(20):
        sampler.step(closure)
    return theta([p])


def main(rank, size, folder):
    early = {}
    for name in ("SBPS", "HMCECS"):
        _, sampler, closure = make(name)
        early[name] = sampler.step, closure
    join(rank, size, folder)
    group = [dist.new_group([i]) for i in range(size)][rank]
    return {
        "HMC": hmc_ranks.found(rank, size, group),
        **{
            name: {
                "refused": refusal(partial(make, name)),
                "refused later": refusal(partial(*early[name])),
                "alone": alone(name, process_group=group),
            }
            for name in early
        },
    }


if __name__ == "__main__":
    run(main)
