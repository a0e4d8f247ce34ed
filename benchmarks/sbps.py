"""What SBPS costs beyond the network's own passes.

    python benchmarks/sbps.py

On one thread, each number from what is measured side by side in one run:

* a proposal that does not bounce, on the MNIST network 784-100-10 with minibatches of
  100: ``step()`` less the passes that nothing can do without, in microseconds of
  processor time. These are written out here, with torch alone, and made in turns with
  the steps: in forward mode the closure with dual numbers for parameters, in reverse
  mode the closure, the gradient of the weighted losses, and its product with the
  direction, differentiated by the weights. What is left is the sampler's: checks, the
  clock, the move, all sums. The first proposal on a line is shown by itself, because
  the prior is summed up there, once for the line.
* the move and the prior's sums on 10^7 parameters, relative to a plain in-place add of
  two such tensors: for the first proposal on a line, and for those that follow.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from torch_sgmcmc import SBPS
from torch_sgmcmc._library import sbps_dot, sbps_place_, sum_of_squares


def seconds(run: Callable[[], object]) -> float:
    """Processor time, which other programs disturb less."""
    start = time.thread_time()
    run()
    return time.thread_time() - start


class Network:
    """The network, its data, and the passes that an observation cannot do without."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(784, 100), nn.Sigmoid(), nn.Linear(100, 10))
        self.x, self.y = torch.randn(5000, 784), torch.randint(10, (5000,))
        self.params = list(self.net.parameters())
        self.places = [
            (layer._parameters, key)
            for layer in (self.net[0], self.net[2])
            for key in ("weight", "bias")
        ]
        self.index = 0

    def draw(self) -> None:
        """The next minibatch."""
        self.index = (self.index + 100) % 5000

    def losses(self) -> Tensor:
        """The closure."""
        rows = slice(self.index, self.index + 100)
        return F.cross_entropy(self.net(self.x[rows]), self.y[rows], reduction="none")

    def forward(self, directions: list[Tensor]) -> Tensor:
        """Derivatives of the losses along the directions by dual numbers."""
        with forward_ad.dual_level():
            for (holder, key), p, u in zip(
                self.places, self.params, directions, strict=True
            ):
                holder[key] = forward_ad.make_dual(p, u)
            dual = self.losses()
            for (holder, key), p in zip(self.places, self.params, strict=True):
                holder[key] = p
            return forward_ad.unpack_dual(dual).tangent

    def reverse(self, directions: list[Tensor]) -> Tensor:
        """The same by the gradient of the weighted losses."""
        losses = self.losses()
        weights = torch.full_like(losses, 0.01, requires_grad=True)
        grads = torch.autograd.grad(losses, self.params, weights, create_graph=True)
        return torch.autograd.grad(grads, weights, directions)[0]


def proposals(forward: bool, steps: int) -> tuple[list[float], list[float]]:
    """Seconds beyond the passes: of first proposals on a line, and of later ones."""
    network = Network()
    params = network.params
    sampler = SBPS(
        params,
        num_data=50_000,
        prior_precision=1.0,
        model=network.net if forward else None,
        seed=0,
    )
    passes = network.forward if forward else network.reverse
    first: list[float] = []
    later: list[float] = []
    line = bare = 0.0
    new = True

    def whole() -> None:
        sampler.step(network.losses)

    for _ in range(20):
        whole()
    for _ in range(steps):
        network.draw()
        group = sampler.param_groups[0]
        before = (group["num_proposals"], group["num_bounces"])
        directions = [sampler.state[p]["velocity"] for p in params]
        new = sampler.state[params[0]]["velocity"].data_ptr() != line
        line = sampler.state[params[0]]["velocity"].data_ptr()
        bare = seconds(lambda directions=directions: passes(directions))
        extra = seconds(whole) - bare
        group = sampler.param_groups[0]
        if (group["num_proposals"], group["num_bounces"]) == (before[0] + 1, before[1]):
            (first if new else later).append(extra)
    return first, later


def move(numel: int = 10**7, turns: int = 15) -> tuple[float, float]:
    """The first and a later move on a line, relative to an in-place add."""
    p, x, u = (torch.randn(numel) for _ in range(3))
    adds, firsts, laters = [], [], []

    def later() -> None:
        sbps_place_([p], [x], [u], time=0.5)

    def first() -> None:
        later()
        sbps_dot([x], [u])
        sum_of_squares([u])

    for _ in range(turns):
        adds.append(seconds(lambda: p.add_(u, alpha=1e-3)))
        laters.append(seconds(later))
        firsts.append(seconds(first))
    add = statistics.median(adds)
    return statistics.median(firsts) / add, statistics.median(laters) / add


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread")
    for mode in ("forward", "reverse"):
        for what, extra in zip(
            ("first on a line", "later on a line"),
            proposals(mode == "forward", arguments.steps),
            strict=True,
        ):
            low, middle, high = (
                1e6 * q for q in statistics.quantiles(extra, n=4, method="inclusive")
            )
            print(
                f"a proposal, {mode} mode, {what}: {middle:.0f} us beyond the passes "
                f"(quartiles {low:.0f} to {high:.0f}, {len(extra)} proposals)"
            )
    first, later = move()
    print(
        f"move and sums of 10^7 parameters: {first:.2f} times an in-place add for the "
        f"first proposal on a line, {later:.2f} for those that follow"
    )


if __name__ == "__main__":
    main()
