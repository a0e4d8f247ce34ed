"""What SBPS costs beyond the network's own passes.

    python benchmarks/sbps.py

On one thread, in processor time, which other programs disturb less; each table from
what is measured in turns in one run. The MNIST network is 784-100-10 with minibatches
of 100; a proposal is one that does not bounce. The first one on a line is shown by
itself, because the prior is summed up there, once for the line.

* The clock alone: what a step asks it.
* The operators alone: the move, with the prior's sums if it is the first, and the sums
  over the minibatch.
* ``step()`` with a stored observation: clock, operators, and all bookkeeping in Python.
  **This is what a proposal costs beyond the network's own passes**, which are all that
  is left out.
* The same right after the network's passes, which leave the caches full of other things
  (cold).
* ``step()`` in the loop less the passes that nothing can do without. These are written
  out here, with torch alone, and made in turns with the steps: in forward mode the
  closure with dual numbers for parameters, in reverse mode the closure, the gradient of
  the weighted losses, and its product with the direction, differentiated by the
  weights. The difference has in it what an observation needs besides (slots of the
  parameters, gradients cleared, checks of the losses), and what the passes lose because
  a step has moved the parameters out of their caches: shown by passes right after a
  move, less passes right after passes.
* The move and the prior's sums on 10^7 parameters, relative to a plain in-place add of
  two such tensors.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from torch_sgmcmc import _C, SBPS
from torch_sgmcmc import sbps as sbps_module
from torch_sgmcmc._directional import Observation, moments, observe
from torch_sgmcmc._library import sbps_place_, sbps_place_sums_


def seconds(run: Callable[[], object]) -> float:
    start = time.thread_time()
    run()
    return time.thread_time() - start


def report(what: str, times: list[float]) -> None:
    low, middle, high = (
        1e6 * q for q in statistics.quantiles(times, n=4, method="inclusive")
    )
    print(
        f"{what:<52}{1e6 * min(times):8.1f}{low:8.1f}{middle:8.1f}{high:8.1f}"
        f"{len(times):8d}"
    )


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

    def sampler(self, forward: bool) -> SBPS:
        """A sampler of it, in forward or in reverse mode."""
        return SBPS(
            self.params,
            num_data=50_000,
            prior_precision=1.0,
            model=self.net if forward else None,
            seed=0,
        )


class Proposals:
    """Times of steps that proposed and did not bounce: the first on a line, others."""

    def __init__(self, sampler: SBPS) -> None:
        self.sampler = sampler
        self.times: dict[str, list[float]] = {"first": [], "later": []}
        self._line = 0

    def take(self, run: Callable[[], float]) -> None:
        """Makes a step by a function that returns the time to keep."""
        group = self.sampler.param_groups[0]
        before = group["num_proposals"], group["num_bounces"]
        line = self.sampler.state[group["params"][0]]["velocity"].data_ptr()
        extra = run()
        if (group["num_proposals"], group["num_bounces"]) == (before[0] + 1, before[1]):
            self.times["later" if line == self._line else "first"].append(extra)
        self._line = line


def observations(network: Network, count: int) -> Iterator[Observation]:
    """What a chain has seen, again and again, with gradients that are there already."""
    kept: list[Observation] = []

    def keep(*arguments: Any) -> Observation:
        seen = observe(*arguments)
        grads = seen.gradient()
        kept.append(seen._replace(gradient=lambda: grads))
        return seen

    sampler = network.sampler(forward=False)
    with mock.patch.object(sbps_module, "observe", keep):
        for _ in range(count):
            network.draw()
            sampler.step(network.losses)
    return cycle(kept)


def clock(turns: int) -> None:
    """What a step asks the clock of a line with as many observations as is usual."""
    kept = _C.BounceClock()
    for i in range(8):
        kept.observe(0.01 * (i > 0), -50.0 + 20.0 * i, 100.0)
    key = {"seed": 0, "step": 5}

    def ask() -> None:
        copy = kept.copy()
        _, wait, rate = copy.next(3.0, 0.0, **key)
        copy.accepts(rate, 1.0, **key)
        copy.observe(wait, 1.0, 100.0)

    report("clock alone", [seconds(ask) for _ in range(turns)])


def operators(network: Network, turns: int) -> None:
    """The operators of a proposal, alone and right after the network's passes."""
    params = [p.detach() for p in network.params]
    origins, directions = ([torch.randn_like(p) for p in params] for _ in range(2))
    losses = network.losses().detach()
    times = defaultdict(list)

    def later() -> None:
        sbps_place_(params, origins, directions, time=1e-3)
        moments(losses, losses)

    def first() -> None:
        sbps_place_sums_(params, origins, directions, time=1e-3).tolist()
        moments(losses, losses)

    for _ in range(turns):
        for what, run in (("first", first), ("later", later)):
            run()
            times[f"operators alone, {what} on a line"].append(seconds(run))
            network.draw()
            network.forward(directions)
            times[f"operators alone, {what} on a line, cold"].append(seconds(run))
    for what in sorted(times, key=lambda name: (name.endswith("cold"), name)):
        report(what, times[what])


def stored(network: Network, steps: int, cold: bool) -> None:
    """Whole steps but for the observation."""
    seen = observations(network, 200)
    sampler = network.sampler(forward=False)
    proposals = Proposals(sampler)
    with mock.patch.object(sbps_module, "observe", lambda *arguments: next(seen)):
        sampler.step(network.losses)
        for _ in range(steps):
            if cold:
                network.draw()
                network.forward([torch.ones_like(p) for p in network.params])
            proposals.take(lambda: seconds(lambda: sampler.step(network.losses)))
    for what, times in proposals.times.items():
        report(
            f"step() with a stored observation, {what}{', cold' if cold else ''}",
            times,
        )


def slowed_by_a_move(sampler: SBPS, passes: Callable[[list[Tensor]], object]) -> float:
    """How much longer passes take right after a move, which is to where they are."""
    group = sampler.param_groups[0]
    params = [p.detach() for p in group["params"]]
    origins, directions = (
        [sampler.state[p][key] for p in group["params"]]
        for key in ("origin", "velocity")
    )
    passes(directions)
    before = seconds(lambda: passes(directions))
    sbps_place_(params, origins, directions, time=group["line_time"])
    return seconds(lambda: passes(directions)) - before


def in_the_loop(forward: bool, steps: int) -> None:
    """Steps less the passes."""
    network = Network()
    sampler = network.sampler(forward)
    proposals = Proposals(sampler)
    passes = network.forward if forward else network.reverse
    slower = []
    for _ in range(20):
        sampler.step(network.losses)
    for i in range(steps):
        network.draw()
        directions = [sampler.state[p]["velocity"] for p in network.params]

        def extra(directions: list[Tensor] = directions) -> float:
            bare = seconds(lambda: passes(directions))
            return seconds(lambda: sampler.step(network.losses)) - bare

        proposals.take(extra)
        if i % 10 == 0:
            slower.append(slowed_by_a_move(sampler, passes))
    mode = "forward" if forward else "reverse"
    for what, times in proposals.times.items():
        report(f"step() less passes, {mode} mode, {what}", times)
    report(f"passes after a move less passes after passes, {mode}", slower)


def move(numel: int = 10**7, turns: int = 15) -> None:
    """The move and the sums, relative to an in-place add."""
    p, x, u = (torch.randn(numel) for _ in range(3))
    adds, firsts, laters = [], [], []
    for _ in range(turns):
        adds.append(seconds(lambda: p.add_(u, alpha=1e-3)))
        laters.append(seconds(lambda: sbps_place_([p], [x], [u], time=0.5)))
        firsts.append(seconds(lambda: sbps_place_sums_([p], [x], [u], time=0.5)))
    add = statistics.median(adds)
    print(
        f"move and sums of {numel:,} parameters, in in-place adds of them: "
        f"{statistics.median(firsts) / add:.2f} for the first proposal on a line, "
        f"{statistics.median(laters) / add:.2f} for those that follow"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    network = Network()
    print(f"torch {torch.__version__}, one thread; microseconds of processor time")
    print(f"{'':<52}{'min':>8}{'25%':>8}{'50%':>8}{'75%':>8}{'of':>8}")
    clock(arguments.steps)
    operators(network, arguments.steps)
    for cold in (False, True):
        stored(network, arguments.steps, cold)
    for forward in (True, False):
        in_the_loop(forward, arguments.steps)
    move()


if __name__ == "__main__":
    main()
