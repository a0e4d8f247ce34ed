"""Cost of a shard's update, relative to a plain tensor of the same size.

    python benchmarks/shards.py [--threads 1] [--ranks 4] [--rounds 40]

Updates only, gradients in place, fp32, of one rank's part of a matrix: as rows of it
(Shard(0)), and as columns, few ones too (Shard(1)), of which there are many rows or so
few that Python takes most of the time. There is one process, whose process group only
says that there are others; steps of the two kinds are made in turns; the median of the
rounds' ratios is reported, with its quartiles. Memory is allocated anew for every few
rounds: where it lies makes several percent.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_sgmcmc as sg

# What gradients are looked at for is added up by all ranks, which takes as long as
# their network does: not a part of the update.
COMMON = {"num_data": 6e4, "seed": 1, "nonfinite": "ignore"}
ROUNDS = 4  # with the same memory
CASES = (
    *((n, n, dim) for n in (4096, 1024, 200) for dim in (0, 1)),
    # Rows of whole quads of noise on 4 ranks, and others.
    *((20_000, n, 1) for n in (400, 256, 80, 200, 100, 68)),
)
SAMPLERS = {
    "SGLD": lambda p: sg.SGLD(p, 1e-6, **COMMON),
    "SGHMC": lambda p: sg.SGHMC(p, 1e-6, 0.9, **COMMON),
    "PSGLD without Γ": lambda p: sg.PSGLD(p, 1e-6, gamma=False, **COMMON),
    "SGNHT": lambda p: sg.SGNHT(p, 1e-6, 0.9, **COMMON),
}


def with_gradient(tensor: Tensor) -> nn.Parameter:
    """A parameter whose gradient is ready."""
    p = nn.Parameter(tensor)
    p.grad = torch.randn_like(p)
    return p


def ratios(make: object, shape: tuple[int, int], dim: int, mesh: object) -> list[float]:
    """The ratio of the times of a step with a shard and with a plain tensor."""
    whole = torch.randn(shape)
    shard = distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None)
    plain = with_gradient(shard.to_local().clone())
    samplers = [make([p]) for p in (plain, with_gradient(shard))]
    repeats = max(1, 2**21 // plain.numel())
    times: list[list[float]] = [[], []]
    for round_ in range(ROUNDS + 2):
        for sampler, taken in zip(samplers, times, strict=True):
            started = time.perf_counter()
            for _ in range(repeats):
                sampler.step()
            if round_ >= 2:
                taken.append(time.perf_counter() - started)
    return [b / a for a, b in zip(*times, strict=True)]


def main() -> None:
    """Prints a line for each sampler and shard."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    ranks = arguments.ranks
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    for name, make in SAMPLERS.items():
        for rows, columns, dim in CASES:
            measured: list[float] = []
            while len(measured) < arguments.rounds:
                measured += ratios(make, (rows, columns), dim, mesh)
            low, middle, high = statistics.quantiles(measured, n=4)
            what = f"{rows} x {columns}, Shard({dim}) on {ranks} ranks"
            print(f"{name:16} {what}: {middle:.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
