"""The posteriors of ``bias.table`` by NUTS (NumPyro, in an environment of its own).

    python examples/papers/bias/truth.py runs/bias.table/logistic-data.npz

reads what ``bias.table --write-data`` has written and writes the draws beside it, as
``logistic-truth.npz``. It needs numpyro and not torch.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import numpy as jnp
from numpyro.infer import MCMC, NUTS

HIDDEN = 10


def logistic(x: jax.Array, y: jax.Array) -> None:
    """p(y = 1) = 1 / (1 + exp(-θᵀx))."""
    with numpyro.plate("coefficients", x.shape[1]):
        theta = numpyro.sample("theta", dist.Normal())
    numpyro.sample("y", dist.Bernoulli(logits=x @ theta), obs=y)


def network(x: jax.Array, y: jax.Array) -> None:
    """A hidden layer of tanh units."""
    w = numpyro.sample("w", dist.Normal().expand([x.shape[1], HIDDEN]).to_event())
    b = numpyro.sample("b", dist.Normal().expand([HIDDEN]).to_event())
    v = numpyro.sample("v", dist.Normal().expand([HIDDEN]).to_event())
    c = numpyro.sample("c", dist.Normal())
    logits = jnp.tanh(x @ w + b) @ v + c
    numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


def main() -> None:
    """Four chains; prints their diagnostics."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path, help="NAME-data.npz")
    parser.add_argument("--warmup", type=int, default=500)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    numpyro.enable_x64()
    name = args.data.name.partition("-")[0]
    data = np.load(args.data)
    x, y, test_x = (data[k].astype(np.float64) for k in ("x", "y", "test_x"))
    is_logistic = name == "logistic"
    sampler = MCMC(
        NUTS(logistic if is_logistic else network, dense_mass=is_logistic),
        num_warmup=args.warmup,
        num_samples=args.draws,
        num_chains=4,
        chain_method="sequential",
    )
    sampler.run(jax.random.key(args.seed), x, y)
    if is_logistic:
        sampler.print_summary()
    draws = {k: np.asarray(v) for k, v in sampler.get_samples(True).items()}
    if is_logistic:
        theta = draws["theta"]
        logits = theta @ test_x.T
        kept = {"draws": theta}
    else:
        w, b, v, c = (draws[k] for k in "wbvc")
        # [4, draws, rows]: a chain at a time, for memory's sake.
        logits = np.stack(
            [
                np.einsum("snh,sh->sn", np.tanh(test_x @ w[i] + b[i][:, None]), v[i])
                + c[i][:, None]
                for i in range(len(w))
            ]
        )
        kept = {}
    probabilities = 1 / (1 + np.exp(-logits))
    chains = probabilities.mean(1)
    print("spread of the chains' predictive means:", chains.std(0).mean())
    between, within = chains.var(0, ddof=1), probabilities.var(1).mean(0)
    r_hat = np.sqrt(1 + between / within).max()
    print("R-hat of predictive probabilities, largest:", r_hat)
    np.savez(
        args.data.with_name(f"{name}-truth.npz"),
        p_mean=probabilities.mean((0, 1)),
        p_sd=probabilities.std((0, 1)),
        **kept,
    )


if __name__ == "__main__":
    main()
