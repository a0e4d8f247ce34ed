"""Regression on a table: networks that Adam has trained, and the posterior from there.

    python examples/python/tabular_regression.py [--out DIR] [--steps 10000]

600 rows with ten features, of which six matter (Friedman 1991, with noise that grows
with one of them), and eight networks 10-16-16-2 with a mean and log σ as outputs, in
one loop: first with Adam, and from there eight chains of MCLMC, all rows in each
gradient. Printed are scores of the networks, of each alone and of the posterior's
draws, and whether the chains agree. The picture has intervals of new rows.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from matplotlib import pyplot
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from tqdm import trange

import torch_sgmcmc as sg
from torch_sgmcmc.scoring import regression_scores

CHAINS, TRAINED, DRAWS = 8, 500, 50
LOSS = sg.losses.heteroscedastic()


def network() -> nn.Module:
    """A mean and log σ."""
    units = [nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU()]
    return nn.Sequential(*units, nn.Linear(16, 2))


def table(rows: int) -> tuple[Tensor, Tensor]:
    """Features and the target [rows, 1], about standardised."""
    u = torch.rand(rows, 10)
    f = 10 * torch.sin(torch.pi * u[:, 0] * u[:, 1]) + 20 * (u[:, 2] - 0.5) ** 2
    y = f + 10 * u[:, 3] + 5 * u[:, 4] + (0.2 + 2 * u[:, 5]) * torch.randn(rows)
    return (u - 0.5) * 12**0.5, (y[:, None] - 14.4) / 5


def main() -> None:
    """Trains, samples, prints scores, and writes ``table.png``."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/table"))
    parser.add_argument("--steps", type=int, default=10_000)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    (x, y), (new_x, new_y) = table(600), table(1000)
    params, _ = stack_module_state([network() for _ in range(CHAINS)])
    base = network().to("meta")

    def loss_of(params: dict[str, Tensor]) -> Tensor:
        return LOSS.of(functional_call(base, params, (x,)), y, base)

    def train(optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in trange(steps, desc=type(optimizer).__name__):
            optimizer.zero_grad()
            vmap(loss_of)(params).sum().backward()
            optimizer.step()

    def each() -> list[dict[str, Tensor]]:
        return [{n: p.detach()[k] for n, p in params.items()} for k in range(CHAINS)]

    prior, half = 1.0, arguments.steps // 2
    train(torch.optim.Adam(params.values(), 3e-3, weight_decay=prior / len(x)), TRAINED)
    trained = [{n: p.clone() for n, p in one.items()} for one in each()]
    sampler = sg.MCLMC(
        params.items(),
        lr=4e-4,
        momentum=0.999,
        num_data=len(x),
        prior_precision=prior,
        num_chains=CHAINS,
        seed=0,
    )
    options = {"burn_in": half, "every": half // DRAWS}
    collectors = [
        sg.Collector(sampler, one, arguments.out / "draws", chain=k, **options)
        for k, one in enumerate(each())
    ]
    for collector in collectors:
        collector.restart()  # over what an earlier run has left
    train(sampler, arguments.steps)
    for collector in collectors:
        collector.close()
    draws = sg.SampleStore(arguments.out / "draws")
    inputs = [(x[:200], y[:200])]
    report = sg.report(network(), draws, inputs, likelihood=LOSS)
    print(report.convergence, *(issue.message for issue in report.issues), sep="\n")
    named = {"one network": trained[:1], f"{CHAINS} networks": trained}
    for name, some in {**named, f"{len(draws)} draws": draws}.items():
        print(f"{name}: {regression_scores(network(), some, new_x, new_y, LOSS)}")

    found = sg.predict(network(), draws, new_x, likelihood=LOSS)
    assert found.total is not None and found.aleatoric is not None
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(9, 3.4), layout="constrained"
    )
    truth, mean, sd = (t[:100, 0] for t in (new_y, found.mean, found.total.sqrt()))
    left.errorbar(truth, mean, 1.645 * sd, fmt=".", linewidth=0.8)
    left.axline((0, 0), slope=1, color="0.6", linewidth=1)
    left.set(xlabel="y of new rows", ylabel="predicted, 90 % intervals")
    noise = (0.2 + 2 * (new_x[:, 5] / 12**0.5 + 0.5)) / 5
    right.plot(noise, found.aleatoric[:, 0].sqrt(), ".", markersize=2)
    right.axline((0, 0), slope=1, color="0.6", linewidth=1)
    right.set(xlabel="true σ of the noise", ylabel="predicted", ylim=(0, 0.8))
    figure.savefig(arguments.out / "table.png", dpi=110)


if __name__ == "__main__":
    main()
