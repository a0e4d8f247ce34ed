"""Regression in one dimension: two chains of a network, and what each has found.

    python examples/python/quickstart.py

The README's first block, and its picture: the mean and a 90 % band of each chain. The
second chain begins at a draw from the prior; chains that agree have left their starts.
``quickstart.ipynb`` has the same cells.
"""

# %%
# fmt: off
from functools import partial
import torch
from torch import nn
import torch_sgmcmc as sg

x = torch.cat([torch.linspace(-2, -0.5, 50), torch.linspace(0.7, 2, 50)])[:, None]
y = torch.sin(3 * x) + 0.2 * torch.randn(x.shape, generator=torch.manual_seed(0))
def network():
    return nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))

store = sg.sample(network, partial(sg.SGHMC, lr=2e-3, momentum=0.99, num_data=len(x)),
                  [(x, y)], sg.losses.gaussian(noise=0.2), steps=6000, burn_in=2000,
                  every=20, chains=2, groups=sg.prior_groups(network(), x, scale=1.5))
found = sg.predict(network(), store, torch.tensor([[1.0], [0.1]]), link="identity")
print("f(1), f(0.1):", found.mean.T, "±", found.variance.sqrt().T)
# fmt: on

# %%
from pathlib import Path

from matplotlib import pyplot

grid = torch.linspace(-3, 3, 200)[:, None]
figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
for chain in store.chains:
    draws, color = store.chain(chain), f"C{chain}"
    f = sg.predict(network(), draws, grid, link="identity", quantiles=(0.05, 0.95))
    low, high = f.quantiles[..., 0]
    axes.fill_between(grid[:, 0], low, high, alpha=0.3, color=color)
    axes.plot(grid, f.mean, color=color, label=f"chain {chain}, 90 %")
axes.plot(x, y, "k.", markersize=3)
axes.set(ylim=(-3, 3), xlabel="x", ylabel="y")
axes.legend(loc="upper center", ncols=2, fontsize="small")
Path("runs").mkdir(exist_ok=True)
figure.savefig("runs/quickstart.png", dpi=110)
