"""What SBPS costs beyond the network's own passes.

    python benchmarks/sbps.py

Two numbers, on one thread, each from what is measured side by side in one run:

* a proposal on the MNIST network 784-100-10 (step() less the closure and the passes
  that differentiate it, which are made alone in turns with it), in microseconds;
* the move and the sum over the prior on 10^7 parameters, relative to a plain in-place
  add of two such tensors.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_sgmcmc import SBPS
from torch_sgmcmc._directional import observe
from torch_sgmcmc._library import sbps_dot, sbps_place_


def seconds(run: Callable[[], object]) -> float:
    """Processor time, which other programs disturb less."""
    start = time.thread_time()
    run()
    return time.thread_time() - start


def proposal(turns: int = 1500) -> float:
    """Microseconds of a step that does not bounce, beyond the passes."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(784, 100), nn.Sigmoid(), nn.Linear(100, 10))
    x, y = torch.randn(100, 784), torch.randint(10, (100,))
    sampler = SBPS(
        net.parameters(), num_data=50_000, prior_precision=1.0, model=net, seed=0
    )

    def closure() -> Tensor:
        return F.cross_entropy(net(x), y, reduction="none")

    for _ in range(20):
        sampler.step(closure)
    params = list(net.parameters())
    directions = [sampler.state[p]["velocity"] for p in params]
    extra = []
    for _ in range(turns):
        bounces = sampler.diagnostics.bounces
        passes = seconds(
            lambda: observe("SBPS", closure, params, directions, net, params)
        )
        whole = seconds(lambda: sampler.step(closure))
        if sampler.diagnostics.bounces == bounces:
            extra.append(whole - passes)
    return 1e6 * statistics.median(extra)


def move(numel: int = 10**7, turns: int = 15) -> float:
    """The move and the prior's sum, relative to an in-place add."""
    p, x, u = (torch.randn(numel) for _ in range(3))
    adds, moves = [], []
    for _ in range(turns):
        adds.append(seconds(lambda: p.add_(u, alpha=1e-3)))

        def both() -> None:
            sbps_place_([p], [x], [u], time=0.5)
            sbps_dot([p], [u])

        moves.append(seconds(both))
    return statistics.median(moves) / statistics.median(adds)


def main() -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread")
    print(f"a proposal on the MNIST network: {proposal():.0f} us beyond the passes")
    print(f"move and sum of 10^7 parameters: {move():.2f} times an in-place add")


if __name__ == "__main__":
    main()
