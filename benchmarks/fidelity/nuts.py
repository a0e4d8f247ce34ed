"""Checks a gold standard by NumPyro's NUTS.

    python benchmarks/fidelity/nuts.py digits --data-root DATA

Four chains from draws of the prior; needs numpyro. Printed are the distances of their
predictions to the stored gold standard, and NUTS's own R-hat.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import numpy as np
import numpyro
import torch
from gold import Gold, agreement_of, values_of
from jax import numpy as jnp
from numpyro import distributions as dist
from numpyro.infer import MCMC, NUTS, init_to_sample
from tasks import TASKS, Params, Task

from torch_sgmcmc import scoring

CHAINS = 4


def model(task: Task, x: jax.Array, y: jax.Array) -> None:
    """The network with its priors, written for NumPyro."""
    h, params = x, [*task.network().named_parameters()]
    for (name, weight), (other, _) in zip(params[::2], params[1::2], strict=True):
        sd, bias_sd = (task.precisions[n] ** -0.5 for n in (name, other))
        normal = dist.Normal(0, sd).expand(tuple(weight.shape))
        w = numpyro.sample(name, normal.to_event())
        b = numpyro.sample(
            other, dist.Normal(0, bias_sd).expand(w.shape[:1]).to_event()
        )
        h = (h if name == params[0][0] else jnp.tanh(h)) @ w.T + b
    if task.classes:
        numpyro.sample("y", dist.Categorical(logits=h), obs=y)
    else:
        numpyro.sample("y", dist.Normal(h[:, 0], task.noise), obs=y)


def main() -> None:
    """Prints the distances."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    parser.add_argument("--gold", type=Path, default=Path(__file__).parent / "gold")
    parser.add_argument("--warmup", type=int, default=300)
    parser.add_argument("--draws", type=int, default=300)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    task = TASKS[arguments.task](arguments.data_root)
    gold = Gold.load(arguments.gold / f"{task.name}.npz")
    x, y = np.asarray(task.x.T), np.asarray(task.y)
    kernel = NUTS(lambda: model(task, x, y), init_strategy=init_to_sample)
    options = {"num_chains": CHAINS, "chain_method": "sequential"}
    sampler = MCMC(
        kernel, num_warmup=arguments.warmup, num_samples=arguments.draws, **options
    )
    sampler.run(jax.random.key(0))
    found = {k: np.asarray(v) for k, v in sampler.get_samples(True).items()}
    predictions = []
    for i in range(arguments.draws):
        params: Params = {k: torch.from_numpy(v[:, i].copy()) for k, v in found.items()}
        ordered = {name: params[name] for name, _ in task.network().named_parameters()}
        predictions.append(task.predictions(ordered))
    draws = torch.stack(predictions)
    mean, sd = draws.mean((0, 1)), draws.flatten(0, 1).std(0)
    off = (mean - gold.mean).square().mean().sqrt() / gold.sd.square().mean().sqrt()
    print(f"means: {off:.4f} sd, sds: {float(sd.mean() / gold.sd.mean()) - 1:+.2%}")
    if task.classes:
        print(f"total variation: {scoring.total_variation(mean, gold.mean):.3%}")
        print(f"agreement: {scoring.agreement(mean, gold.mean):.2%}")
    print("R-hat and effective sample size:", agreement_of(values_of(task, draws)))


if __name__ == "__main__":
    main()
