"""Three ways to choose the steps that become draws, and their weights.

    python examples/python/collected_steps.py [--out runs/collected] [--steps 1000]

Three chains of the regression in ``stored_regression.py``, and a picture of each: the
step size, and the draws that its store has in the end.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot
from stored_regression import Minibatches, loss, network, sampler

import torch_sgmcmc as sg


def ways(steps: int) -> dict[str, dict[str, Any]]:
    """Arguments of ``sample`` besides model, data and sampler, by title."""
    tenth = steps // 10
    cycle, every = 3 * tenth, max(1, steps // 50)
    return {
        f"burn_in={2 * tenth}, every={every}": {"burn_in": 2 * tenth, "every": every},
        f"CyclicalSchedule({cycle}), draws of sampling phases alone": {
            "schedule": lambda s: sg.CyclicalSchedule(s, cycle, exploration=0.6),
            "every": every // 2,
        },
        f"PolynomialDecay(b={tenth}), weighted with the step size": {
            "schedule": lambda s: sg.PolynomialDecay(s, tenth),
            "every": every,
        },
    }


def main() -> None:
    """Runs the chains and shows their draws."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/collected"))
    parser.add_argument("--steps", type=int, default=1000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # of such a network, others would be in the way
    figure, panels = pyplot.subplots(
        3, 1, figsize=(8, 5), sharex=True, layout="constrained"
    )
    chains = zip(panels, ways(arguments.steps).items(), strict=True)
    for i, (axes, (title, options)) in enumerate(chains):
        sizes: list[float] = []

        def recorded(
            parameters: Any, seed: int, sizes: list[float] = sizes
        ) -> sg.Sampler:
            made = sampler(parameters, seed)
            made.register_step_post_hook(
                lambda made, *_: sizes.append(made.param_groups[0]["lr"])
            )
            return made

        store = sg.sample(
            network(),
            recorded,
            Minibatches(),
            loss,
            arguments.out / f"draws-{i}",
            steps=arguments.steps,
            seed=0,
            restart=True,
            progress=False,
            **options,
        )
        print(f"{len(store)} draws of {title}")
        axes.plot(range(1, len(sizes) + 1), sizes, color="0.6")
        heaviest = max(draw.weight for draw in store)
        axes.scatter(
            [draw.step for draw in store],
            [draw.lr for draw in store],
            [40 * draw.weight / heaviest for draw in store],
            color="C3",
            zorder=3,
        )
        axes.set_title(f"{title}: {len(store)} draws", fontsize="medium", loc="left")
        axes.set(ylabel="lr", ylim=(0, 1.15 * max(sizes)))
    panels[-1].set_xlabel("step")
    figure.savefig(arguments.out / "collected.png", dpi=110)


if __name__ == "__main__":
    main()
