"""A hierarchical regression: how much groups differ is sampled beside their lines.

    python examples/python/hierarchical.py [--out DIR]

Twelve groups of 3 to 14 points. A group's intercept and slope differ from the common
ones by normal effects, whose precisions have Gamma(1, 1) priors: Gibbs updates draw
them after each step of BAOA. With precisions given all is Gaussian, and a sum over a
grid knows their posterior: printed is how far the sampled one is from it. The picture
has both, and the groups' slopes beside those that each group would find by itself.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import arviz
import torch
from matplotlib import pyplot
from torch import Tensor, nn

import torch_sgmcmc as sg

EFFECTS = {"intercepts": 1.0, "slopes": 0.4}  # and how they differ in truth
GROUPS, NOISE, SIZES = 12, 0.5, torch.arange(12) + 3


class Lines(nn.Module):
    """A line for each group."""

    def __init__(self) -> None:
        super().__init__()
        self.common = nn.Parameter(torch.tensor([1.0, 0.5]))
        self.intercepts = nn.Parameter(torch.zeros(GROUPS))
        self.slopes = nn.Parameter(torch.zeros(GROUPS))

    def forward(self, rows: Tensor) -> Tensor:
        """The mean of y, of columns x and group."""
        x, group = rows[:, 0], rows[:, 1].long()
        slopes = self.common[1] + self.slopes[group]
        return (self.common[0] + self.intercepts[group] + slopes * x)[:, None]


def sampler(named: Iterable[tuple[str, nn.Parameter]], seed: int) -> sg.Sampler:
    """Each tensor is a param group, and so has a precision of its own."""
    groups, count = [{"params": [pair]} for pair in named], int(SIZES.sum())
    return sg.BAOA(groups, lr=0.3, num_data=count, prior_precision=1.0, seed=seed)


def exact(rows: Tensor, y: Tensor, grid: Tensor) -> Tensor:
    """Posterior weights of the precisions' logarithms, [a quarter, all, all points]."""
    x, member = rows[:, :1], nn.functional.one_hot(rows[:, 1].long(), GROUPS)
    z = torch.cat([torch.ones_like(x), x, member, member * x], 1).double() / NOISE
    pull, sizes = z.T @ (y.double() / NOISE), torch.tensor([2, GROUPS, GROUPS])
    planes = []
    for first in grid[::4]:  # of the common line, which is of little weight
        others = torch.meshgrid(grid, grid, indexing="ij")
        logs = torch.stack([first.expand_as(others[0]), *others], -1)
        prior = logs.exp().repeat_interleave(sizes, -1).diag_embed()
        root = torch.linalg.cholesky(z.T @ z + prior)
        part = torch.linalg.solve_triangular(root, pull, upper=False)
        fit = part.square().sum((-2, -1)) / 2 - root.diagonal(0, -2, -1).log().sum(-1)
        # Half the logarithm of |prior|, and of each precision's logarithm Gamma(1, 1).
        planes.append(fit + ((sizes / 2 + 1) * logs - logs.exp()).sum(-1))
    return torch.stack(planes).flatten().softmax(0).view(-1, len(grid), len(grid))


def main() -> None:
    """Samples, compares, and writes ``hierarchical.png``."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/hierarchical"))
    parser.add_argument("--steps", type=int, default=4000, help="of each chain")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    group, true = torch.arange(GROUPS).repeat_interleave(SIZES), Lines()
    for name, sd in EFFECTS.items():
        nn.init.normal_(getattr(true, name), std=sd)
    rows = torch.stack([2 * torch.rand(len(group)) - 1, group], 1)
    y = true(rows).detach() + NOISE * torch.randn(len(rows), 1)
    drawn, burn_in = defaultdict(list), arguments.steps // 4

    def remember(state: sg.ChainState) -> None:
        if state.step > burn_in and state.step % 10 == 0:
            groups = state.sampler.param_groups[1:]
            drawn[state.chain].append([g["prior_precision"] for g in groups])

    store = sg.sample(
        Lines,
        sampler,
        [(rows, y)],
        sg.losses.gaussian(noise=NOISE),
        arguments.out / "draws",
        steps=arguments.steps,
        burn_in=burn_in,
        every=10,
        chains=4,
        schedule=sg.GammaPrecision,
        callbacks=remember,
        seed=0,
        restart=True,
    )
    logs = torch.tensor([*drawn.values()]).log()
    worth = torch.tensor(
        [arviz.ess(one.numpy(), method="bulk") for one in logs.unbind(-1)]
    )
    grid = torch.linspace(-6, 6, 81, dtype=torch.float64)
    weights = exact(rows, y, grid).sum(0)

    figure, panels = pyplot.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    for i, (name, axes) in enumerate(zip(EFFECTS, panels, strict=False)):
        found, weight = logs[..., i], weights.sum(1 - i)
        mean, error = (weight * grid).sum(), found.std() / worth[i].sqrt()
        sd = (weight * (grid - mean).square()).sum().sqrt()
        print(f"log precision of {name}:")
        print(f"  sampled mean {found.mean():.3f} ± {error:.3f}, sd {found.std():.3f}")
        print(f"  exact mean {mean:.3f}, sd {sd:.3f}")
        spreads, sampled = (-grid / 2).exp(), (-found / 2).exp().flatten().tolist()
        axes.hist(sampled, 40, density=True, alpha=0.4, label="sampled")
        axes.plot(spreads, 2 * weight / spreads / (grid[1] - grid[0]), label="exact")
        axes.axvline(EFFECTS[name], color="k", linestyle=":", label="of the data")
        axes.set(xlim=(0, 3 * EFFECTS[name]), xlabel=f"standard deviation of {name}")
        axes.set_ylabel("posterior density")
    slopes = torch.stack([draw["common"][1] + draw["slopes"] for draw in store])
    pairs = [torch.cat([rows[:, :1], y], 1)[group == g].T.cov() for g in range(GROUPS)]
    truth, bars = (true.common[1] + true.slopes).detach(), 2 * slopes.std(0)
    bar = {"fmt": "o", "capsize": 3, "label": "posterior, ± 2 sd"}
    panels[2].errorbar(SIZES, slopes.mean(0), bars, **bar)
    panels[2].plot(SIZES, [p[0, 1] / p[0, 0] for p in pairs], "x", label="by itself")
    panels[2].plot(SIZES, truth, "k_", markersize=9, label="of the data")
    panels[2].set(xlabel="points of the group", ylabel="slope")
    for axes in panels:
        axes.legend(fontsize="small")
    figure.savefig(arguments.out / "hierarchical.png", dpi=100)


if __name__ == "__main__":
    main()
