"""Cost of SBPS beyond the network's own passes.

    python benchmarks/sbps.py

On one thread, in processor time, which other programs disturb less; each table from
what is measured in turns in one run. The MNIST network is 784-100-10 with minibatches
of 100; a proposal is one that does not bounce. The first one after a bounce is shown by
itself: it sums up nothing more, but it finds the caches full of what the bounce has
worked on, and asks for the new line's memory for the first time.

* The clock alone: what a step asks it.
* The operators alone: the move, and the sums over the minibatch. And the pass of a
  bounce, with the prior's sums over the new line and without.
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
* The move of the network's parameters, and of 10^7 ones in one tensor, relative to a
  plain in-place add of two tensors of that size.
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

import torch_sgmcmc._C as _C
from torch_sgmcmc import SBPS
from torch_sgmcmc.core.ops import sbps_place_, sbps_reflect_, sbps_reflect_sums_
from torch_sgmcmc.samplers._sbps import event
from torch_sgmcmc.samplers._sbps.event import Observation, observe, rate_of


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
            num_std=3.0,
            model=self.net if forward else None,
            seed=0,
        )


class Proposals:
    """Times of steps that proposed and did not bounce: the first on a line, later."""

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
    """Replays a chain's observations, with gradients that exist already."""
    kept: list[Observation] = []

    def keep(*arguments: Any) -> Observation:
        seen = observe(*arguments)
        grads = seen.gradient()
        kept.append(seen._replace(gradient=lambda: grads))
        return seen

    sampler = network.sampler(forward=False)
    with mock.patch.object(event, "observe", keep):
        for _ in range(count):
            network.draw()
            sampler.step(network.losses)
    return cycle(kept)


def clock(turns: int) -> None:
    """Times the clock's work for a line with a usual number of observations."""
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
    origins, directions, grads = (
        [torch.randn_like(p) for p in params] for _ in range(3)
    )
    losses = network.losses().detach()
    times = defaultdict(list)

    turn = {"weight_decay": 1e-5, "scale": 1.0, "gain": 1e-9}

    def proposal() -> None:
        sbps_place_(params, origins, directions, time=1e-3)
        rate_of(losses, losses, 1000.0, 1.0, False, 0.0)

    def bounce() -> None:
        sbps_reflect_(params, grads, directions, [], **turn)

    def bounce_with_sums() -> None:
        sbps_reflect_sums_(params, grads, directions, origins, **turn).tolist()

    for _ in range(turns):
        for what, run in (
            ("a proposal", proposal),
            ("a reflection", bounce),
            ("a reflection and the line's sums", bounce_with_sums),
        ):
            run()
            times[f"operators of {what}"].append(seconds(run))
            network.draw()
            network.forward(directions)
            times[f"operators of {what}, cold"].append(seconds(run))
    for what in sorted(times, key=lambda name: (name.endswith("cold"), name)):
        report(what, times[what])


def stored(network: Network, steps: int, cold: bool) -> None:
    """Whole steps but for the observation."""
    seen = observations(network, 200)
    sampler = network.sampler(forward=False)
    proposals = Proposals(sampler)
    with mock.patch.object(event, "observe", lambda *arguments: next(seen)):
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
    """The extra time of passes right after a move, which is to the same place."""
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


def move(shapes: list[tuple[int, ...]], turns: int) -> None:
    """The move, relative to an in-place add."""
    p, x, u = ([torch.randn(shape) for shape in shapes] for _ in range(3))
    one, other = (torch.cat([t.flatten() for t in ts]) for ts in (p, u))
    adds, moves = [], []
    for _ in range(turns):
        adds.append(seconds(lambda: one.add_(other, alpha=1e-3)))
        moves.append(seconds(lambda: sbps_place_(p, x, u, time=0.5)))
    ratio = statistics.median(moves) / statistics.median(adds)
    print(
        f"the move of {one.numel():,} parameters, in in-place adds of them: {ratio:.2f}"
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
    move([tuple(p.shape) for p in network.params], arguments.steps)
    move([(10**7,)], 15)


if __name__ == "__main__":
    main()
