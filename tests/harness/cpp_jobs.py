"""Chains that a program in C++ runs as well (``tests/cpp/consumer/chain.cpp``)."""

from typing import Any

import torch
from short_chains import ALIKE, PLAIN
from torch import Tensor, nn
from torch.nn import functional as F

import torch_sgmcmc as sg

STEPS = 480
ONE_EACH = (*ALIKE, "SGHMC", "MCLMC", "PSGLD", "SGNHT", "EWSG", "SBPS")
#: For each sampler, hyperparameters of its two groups.
#: Class, settings of both groups, and those of the second alone.
Row = tuple[type[sg.Sampler], dict[str, Any], dict[str, Any]]
SHARED = {"lr": 0.02, "prior_precision": 2.0}
ADAPTING = {"preconditioned": True, "decay": 0.9}
PRIOR = {"prior_precision": 2.0}
FRICTION = {"momentum": 0.8, "noise_estimate": 0.03}
CHAINS: dict[str, Row] = {
    **{name: (cls, {"lr": 0.1, "prior_precision": 2.0},
     {"temperature": 0.5} | ({} if name in PLAIN else FRICTION))
     for name, cls in ALIKE.items()},
    "SGHMC": (sg.SGHMC, {"momentum": 0.95, **SHARED},
     {"initial_momentum": "zeros", **FRICTION}),
    "SGHMC-resampled": (sg.SGHMC, {"lr": 0.02, "resample_momentum_every": 10},
     {"temperature": 1.5}),
    "SGHMC-online": (sg.SGHMC, {"lr": 1e-3, "momentum": 0.5},
     {"noise_estimate": "online"}),
    "MCLMC": (sg.MCLMC, {"momentum": 0.8, **SHARED}, {"prior_precision": 3.0}),
    "PSGLD": (sg.PSGLD, {"lr": 1e-3, "gamma": False, "prior_precision": 1.0},
     {"adapt": False, "eps": 1e-3, "temperature": 0.5}),
    "SGNHT": (sg.SGNHT, SHARED, {"momentum": 0.8, "thermostat_rate": 1e-3}),
    "EWSG": (sg.EWSG, {"index_chain_length": 2, **SHARED},
     {"momentum": 0.8, "surrogate": "full_momentum", "temperature": 1.5}),
    "EWSG-overdamped": (sg.EWSG, {"lr": 0.02, "momentum": 0.0, "surrogate": "zero"},
     {"surrogate": "one", "prior_precision": 2.0}),
    "SBPS": (sg.SBPS,
     {"prior_precision": 2.0, "refresh_rate": 1.0, "sample_interval": 0.3,
      "num_std": 2.0, "observation_decay": 1.5},
     {"prior_precision": 1.0}),
    "PSBPS": (sg.SBPS, {"num_std": 2.0, **ADAPTING}, PRIOR),
    "PSBPS-always": (sg.SBPS,
     {"refresh_rate": 1.0, "adapt_every_step": True, **ADAPTING}, PRIOR),
    # For the sampler the rows of all parameters are chains; that the network couples
    # them is no concern of its arithmetic.
    "EWSG-chains": (sg.EWSG, {"lr": 0.02, "index_chain_length": 2, "num_chains": 5},
     {"momentum": 0.8}),
    "SGHMC-chains": (sg.SGHMC, {"num_chains": 5, **SHARED},
     {"resample_momentum_every": 10}),
    "PSGLD-chains": (sg.PSGLD,
     {"lr": 1e-3, "decay": 0.9, "eps": 1e-2, "num_chains": 5, "gamma": False},
     {"decay": 0.99}),
}  # fmt: skip


#: What adds to those only how an operator is called.
SHORT: dict[str, Row] = {
    "SGLD-chains": (sg.SGLD, {"lr": 0.1, "num_chains": 5}, {"temperature": 0.5}),
    "MCLMC-chains": (sg.MCLMC, {"lr": 0.02, "num_chains": 5}, {"prior_precision": 3.0}),
    "SGNHT-chains": (sg.SGNHT, {"lr": 0.02, "num_chains": 5}, {"momentum": 0.8}),
    "PSGLD-chains-frozen": (
        sg.PSGLD,
        {"lr": 1e-3, "adapt": False, "gamma": False, "num_chains": 5},
        {"adapt": True},
    ),
}


def width(name: str) -> int:
    return 5 if "-chains" in name else 33


def draws(name: str) -> int:
    """The number of minibatches that a step draws, at most."""
    method, common, _ = {**CHAINS, **SHORT}[name]
    return 1 + common.get("index_chain_length", 1) if method is sg.EWSG else 1


def make_net(name: str, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(1)
    hidden = width(name)
    return nn.Sequential(nn.Linear(7, hidden), nn.Tanh(), nn.Linear(hidden, 5)).to(
        dtype
    )


def make_sampler(
    name: str, net: nn.Sequential, means: list[Tensor] | None = None
) -> sg.Sampler:
    """Prior means: a number in one group, tensors in the other."""
    method, common, special = {**CHAINS, **SHORT}[name]
    groups: list[dict[str, Any]] = [
        {"params": net[0].parameters()},
        {"params": net[2].parameters(), **special},
    ]
    if means is not None:
        common = {**common, "prior_precision": 20.0}
        groups[0]["prior_mean"] = -0.75
        groups[1]["prior_mean"] = means
    sampler = method(groups, **common, num_data=500, seed=-(2**38))
    return sampler


def make_job(
    name: str, dtype: torch.dtype, means: list[Tensor] | None = None
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    net = make_net(name, dtype)
    sampler = make_sampler(name, net, means)
    groups = sampler.state_dict()["param_groups"]
    base = torch.tensor([group.get("lr", 0.0) for group in groups], dtype=torch.float64)
    wave = torch.linspace(0, 50, STEPS, dtype=torch.float64).sin()
    lrs = torch.outer(1 + 0.5 * wave, base)
    lrs[20:23] = 0
    lrs[24:27, 1] = 0
    if "lr" in sampler._SPEC.shared:
        lrs[:, 1] = lrs[:, 0]
    temperatures = torch.tensor(
        [[group["temperature"] for group in groups]] * STEPS, dtype=torch.float64
    )
    if isinstance(sampler, (sg.SGLD, sg.SGHMC, sg.BAOA, sg.PSGLD, sg.SGNHT)):
        temperatures[10:18, 0] = 0
    job = {
        "sampler": type(sampler).__name__,
        "seed": torch.tensor(sampler.seed),
        "groups": groups,
        "model": dict(net.state_dict()),
        "x": torch.randn(200, 7, generator=generator).to(dtype),
        "y": torch.randint(5, (200,), generator=generator),
        "batches": torch.randint(200, (STEPS * draws(name), 10), generator=generator),
        "lrs": lrs,
        "temperatures": temperatures,
        "per_example": isinstance(sampler, sg.SBPS),
        # A precision would be that of all chains.
        "gibbs_every": 0 if "-chains" in name else 100,
    }
    if means is not None:
        job["means"] = means
    # PSGLD's first gradients are 0 for some coordinates.
    job["x"][job["batches"][0], 0] = 0
    return job


def steps_from(
    job: dict[str, Any], name: str, begin: int, end: int = STEPS
) -> dict[str, Any]:
    """The job of some of its steps."""
    drawn = slice(begin * draws(name), end * draws(name))
    kept = {key: job[key][begin:end] for key in ("lrs", "temperatures")}
    return {**job, "batches": job["batches"][drawn], **kept}


def first_steps(job: dict[str, Any], name: str, count: int = 3) -> dict[str, Any]:
    return steps_from(job, name, 0, count)


def run_in_python(name: str, job: dict[str, Any]) -> dict[str, Any]:
    net = make_net(name, job["x"].dtype)
    net.load_state_dict(job["model"])
    sampler = make_sampler(name, net, job.get("means"))
    precision = sg.GammaPrecision(sampler) if job["gibbs_every"] else None
    if "state" in job:
        sampler.load_state_dict(job["state"])
        if precision is not None:
            precision.load_state_dict(job["precision"])
    # Each step has minibatches of its own; it may leave some of them.
    steps = job["batches"].tensor_split(len(job["lrs"]))
    for i, (lrs, drawn) in enumerate(zip(job["lrs"], steps, strict=True)):
        batches = iter(drawn)
        if not job["per_example"]:  # SBPS has no step size
            temperatures = job["temperatures"][i].tolist()
            for group, lr, temperature in zip(
                sampler.param_groups, lrs.tolist(), temperatures, strict=True
            ):
                group.update(lr=lr, temperature=temperature)

        def closure(i: int = i, batches: Any = batches) -> Tensor:
            sampler.zero_grad()
            batch = next(batches)
            logits, y = net(job["x"][batch]), job["y"][batch]
            if job["per_example"]:
                return F.cross_entropy(logits, y, reduction="none")
            loss = F.cross_entropy(logits, y)
            loss.backward()
            if i % 7 == 3:
                net[2].bias.grad = None
            return loss

        sampler.step(closure)
        if precision is not None and (i + 1) % job["gibbs_every"] == 0:
            precision.step()
    return {
        "model": dict(net.state_dict()),
        "state": sampler.state_dict(),
        "precision": {} if precision is None else precision.state_dict(),
    }


#: Samplers that look at gradients at different times.
FAULTY = (
    "SGLD",
    "SGHMC-online",
    "PSGLD",
    "SGNHT",
    "EWSG",
    "EWSG-overdamped",
    "EWSG-chains",
    "SBPS",
)


def make_faulty_job(name: str, choice: str) -> dict[str, Any]:
    """A short job with a datum that makes NaN, in a twentieth of the minibatches."""
    job = first_steps(make_job(name, torch.float32), name, 200)
    job["x"][0, 3] = torch.nan
    job["lrs"].clamp_(min=1e-4)  # every step is made or skipped
    sampler = make_sampler(name, make_net(name, torch.float32))
    for group in sampler.param_groups:
        group["nonfinite"] = choice
    gibbs = sg.GammaPrecision(sampler).state_dict() if job["gibbs_every"] else {}
    return {**job, "state": sampler.state_dict(), "precision": gibbs}
