"""The subsample that HMC-ECS needs with each control variate, on MNIST.

    python benchmarks/ecs_proxies.py --data-root DATA [--model network] [--prior 1]

θ* is the mode, found by L-BFGS, and θ = θ* + t (draw - θ*), the draw being the last of
a chain of HMC that started at the mode; t = 1 is what a sampler of the posterior meets.
For each control variate it prints the m for which the variance of the estimate of
log L, N² Var(d) / m, is 1, as a multiple of N; Var(d) is taken over random data.
"softmax" is a regression on images of 7 x 7 (d = 500), "network" has 14 x 14 inputs and
50 tanh units (d = 10360), "small" 7 x 7 inputs and 10 units (d = 610).
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import torch_sgmcmc as sg
from torch_sgmcmc.core.parameters import exchanged
from torch_sgmcmc.samplers._ecs.taylor import LINEAR, TaylorTerms

# Pixels on a side, and hidden units.
MODELS = {"softmax": (7, 0), "small": (7, 10), "network": (14, 50)}


def load(root: str, num_data: int, side: int) -> tuple[Tensor, Tensor]:
    """Images as rows, shrunk and standardised, and their digits."""
    from torchvision.datasets import MNIST

    data = MNIST(root, train=True)
    x = data.data[:num_data, None].double()
    x = nn.functional.adaptive_avg_pool2d(x, side).flatten(1)
    return (x - x.mean()) / x.std(), data.targets[:num_data]


def network(inputs: int, hidden: int) -> nn.Module:
    if hidden == 0:
        return nn.Linear(inputs, 10).double()
    layers = (nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, 10))
    return nn.Sequential(*layers).double()


class Problem:
    """A network, its data and its log-likelihood, also as a function of θ."""

    def __init__(self, side: int, hidden: int, arguments: argparse.Namespace) -> None:
        torch.manual_seed(arguments.seed)
        self.x, self.y = load(arguments.data_root, arguments.num_data, side)
        self.net = network(side * side, hidden)
        self.params = list(self.net.parameters())
        self.prior = arguments.prior

    def closure(self, indices: Tensor) -> Tensor:
        """The log-likelihoods of the data with these indices."""
        logits = self.net(self.x[indices])
        return -nn.functional.cross_entropy(logits, self.y[indices], reduction="none")

    def theta(self) -> Tensor:
        """The parameters as one row."""
        return nn.utils.parameters_to_vector(self.params).detach().clone()

    def loss(self) -> Tensor:
        """The mean loss of all data."""
        return nn.functional.cross_entropy(self.net(self.x), self.y)

    def find_mode(self, steps: int) -> None:
        """Moves the parameters to a mode."""
        optimizer = torch.optim.LBFGS(
            self.params, max_iter=steps, history_size=30,
            tolerance_grad=1e-9, tolerance_change=0, line_search_fn="strong_wolfe",
        )  # fmt: skip

        def closure() -> Tensor:
            optimizer.zero_grad()
            square = sum((p * p).sum() for p in self.params)
            loss = self.loss() + 0.5 * self.prior / len(self.x) * square
            loss.backward()
            return loss

        optimizer.step(closure)

    def draw(self, steps: int, seed: int) -> float:
        """Moves the parameters by HMC; returns the acceptance rate."""
        sampler = sg.HMC(
            self.params, 2e-3, num_steps=30, num_data=len(self.x),
            prior_precision=self.prior, seed=seed,
        )  # fmt: skip

        def closure() -> Tensor:
            loss = self.loss()
            loss.backward()
            return loss

        sampler.warmup(closure, steps // 3)
        for _ in range(steps - steps // 3):
            sampler.step(closure)
        return sampler.acceptance_rate

    def second_order(self, indices: Tensor, delta: Tensor) -> Tensor:
        """δᵀHₖδ / 2 of the data at the parameters as they are."""
        names = [name for name, _ in self.net.named_parameters()]
        parts = delta.split([p.numel() for p in self.params])
        x, y = self.x[indices], self.y[indices]

        def along(t: Tensor) -> Tensor:
            moved = {
                name: p.detach() + t * part.view_as(p)
                for name, p, part in zip(names, self.params, parts, strict=True)
            }
            logits = torch.func.functional_call(self.net, moved, (x,))
            return -nn.functional.cross_entropy(logits, y, reduction="none")

        def slope(t: Tensor) -> Tensor:
            return torch.func.jvp(along, (t,), (torch.ones_like(t),))[1]

        zero = torch.zeros((), dtype=torch.float64)
        return 0.5 * torch.func.jvp(slope, (zero,), (torch.ones_like(zero),))[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--model", choices=MODELS, default="network")
    parser.add_argument("--num-data", type=int, default=10000)
    parser.add_argument("--prior", type=float, default=1.0)
    parser.add_argument("--modes", type=int, default=400, help="steps of L-BFGS")
    parser.add_argument("--draws", type=int, default=100, help="trajectories of HMC")
    parser.add_argument("--sample", type=int, default=1000, help="data for Var(d)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    side, hidden = MODELS[arguments.model]
    problem = Problem(side, hidden, arguments)
    problem.find_mode(arguments.modes)
    mode, loss = problem.theta(), float(problem.loss().detach())
    rate = problem.draw(arguments.draws, arguments.seed)
    delta = problem.theta() - mode
    nn.utils.vector_to_parameters(mode, problem.params)
    n = len(problem.x)
    print(
        f"{arguments.model}: d = {len(mode)}, N = {n}, λ = {problem.prior:g}; mean "
        f"loss at the mode {loss:.4f}; |δ| = {float(delta.norm()):.3g} after "
        f"{arguments.draws} trajectories, acceptance {rate:.2f}; "
        f"torch {torch.__version__}, {arguments.threads} thread(s)"
    )
    times = (0.01, 0.03, 0.1, 0.3, 1.0)
    indices = torch.randperm(n)[: arguments.sample]
    there = {}
    sizes = [p.numel() for p in problem.params]
    for t in times:
        parts = (mode + t * delta).split(sizes)
        moved = [v.view_as(p) for v, p in zip(parts, problem.params, strict=True)]
        with torch.no_grad(), exchanged(problem.params, moved):
            there[t] = problem.closure(indices)
    rows = {"none": [there[t] for t in times]}
    terms = TaylorTerms.at_current_params(
        problem.closure, problem.params, indices, LINEAR, mode
    )
    first = [terms.values + terms.gradients[0] @ (t * delta) for t in times]
    rows["order 1"] = [there[t] - q for t, q in zip(times, first, strict=True)]
    bend = problem.second_order(indices, delta)
    rows["order 2"] = [
        there[t] - q - t * t * bend for t, q in zip(times, first, strict=True)
    ]
    print("| control variate | " + " | ".join(f"t = {t:g}" for t in times) + " |")
    print("| --- |" + " --- |" * len(times))
    for name, values in rows.items():
        needed = [f"{n * float(d.var()):.3g}" for d in values]
        print(f"| {name} | " + " | ".join(needed) + " |", flush=True)


if __name__ == "__main__":
    main()
