"""The part of a minibatch's noise that control variates leave, and their cost.

    python benchmarks/control_variates.py --data-root DATA [--model small] [--prior 1]

Images of MNIST, models and θ = θ* + t (draw - θ*) as in ecs_proxies.py, the anchor θ*
being the mode. Prints E|g - ∇L̄|² over random minibatches as a part of that without
control variates, and the time of a gradient, alternately measured, as a multiple.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from ecs_proxies import MODELS, Problem
from torch import Tensor, nn

import torch_sgmcmc as sg

TIMES = (0.03, 0.1, 0.3, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--model", choices=("softmax", "small"), default="softmax")
    parser.add_argument("--num-data", type=int, default=10000)
    parser.add_argument("--prior", type=float, default=1.0)
    parser.add_argument("--modes", type=int, default=400, help="steps of L-BFGS")
    parser.add_argument("--draws", type=int, default=100, help="trajectories of HMC")
    parser.add_argument("--batch", type=int, default=100, help="data of a minibatch")
    parser.add_argument("--repeats", type=int, default=200, help="minibatches")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    problem = Problem(*MODELS[arguments.model], arguments)
    problem.find_mode(arguments.modes)
    mode = problem.theta()
    problem.draw(arguments.draws, arguments.seed)
    delta = problem.theta() - mode
    nn.utils.vector_to_parameters(mode, problem.params)

    def loss_fn(indices: Tensor) -> Tensor:
        return nn.functional.cross_entropy(
            problem.net(problem.x[indices]), problem.y[indices]
        )

    n = len(problem.x)
    sampler = torch.optim.SGD(problem.params)
    gradients: dict[str, Callable[[Tensor], Tensor]] = {
        "none": lambda indices: loss_fn(indices).backward()  # type: ignore[dict-item]
    }
    estimator = sg.ControlVariates(sampler, loss_fn, progress=False)
    begin = time.perf_counter()
    estimator.set_anchor(torch.arange(n).split(1000))
    print(f"{time.perf_counter() - begin:.3g} s for the anchor")
    gradients["control variates"] = estimator.backward

    def gradient(name: str, indices: Tensor) -> Tensor:
        sampler.zero_grad()
        gradients[name](indices)
        return torch.cat([p.grad.flatten() for p in problem.params])  # type: ignore[union-attr]

    batches = torch.randint(n, (arguments.repeats, arguments.batch))
    noise: dict[str, list[float]] = {name: [] for name in gradients}
    seconds = dict.fromkeys(gradients, 0.0)
    for t in TIMES:
        nn.utils.vector_to_parameters(mode + t * delta, problem.params)
        full = gradient("none", torch.arange(n))
        squares = dict.fromkeys(gradients, 0.0)
        for batch in batches:
            for name in gradients:
                begin = time.perf_counter()
                g = gradient(name, batch)
                seconds[name] += time.perf_counter() - begin
                squares[name] += float((g - full).square().sum())
        for name, square in squares.items():
            noise[name].append(square / squares["none"])
    print(
        f"{arguments.model}: d = {len(mode)}, N = {n}, λ = {problem.prior:g}, "
        f"minibatches of {arguments.batch}; torch {torch.__version__}, "
        f"{arguments.threads} thread(s)"
    )
    head = ["gradient", *(f"t = {t:g}" for t in TIMES), "time"]
    print("| " + " | ".join(head) + " |\n" + "| --- " * len(head) + "|")
    for name, values in noise.items():
        cells = [f"{value:.2g}" for value in values]
        cells.append(f"{seconds[name] / seconds['none']:.2g}")
        print("| " + " | ".join([name, *cells]) + " |")


if __name__ == "__main__":
    main()
