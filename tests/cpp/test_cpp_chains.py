"""One chain: C++ and Python give the same bits, and continue each other's."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from harness.exactness import assert_same
from torch import Tensor, nn
from torch.nn import functional as F

import torch_sgmcmc as sg

pytestmark = [pytest.mark.cpp, pytest.mark.usefixtures("one_thread")]

STEPS = 600
ONE_EACH = ("SGLD", "SGHMC", "PSGLD", "SGNHT", "EWSG", "HMC", "SBPS")
#: For each sampler, hyperparameters of its two groups.
CHAINS: dict[str, tuple[type[sg.Sampler], dict[str, Any], dict[str, Any]]] = {
    "SGLD": (
        sg.SGLD,
        {"lr": 0.1, "prior_precision": 2.0},
        {"temperature": 0.5},
    ),
    "SGHMC": (
        sg.SGHMC,
        {"lr": 0.02, "momentum": 0.95, "prior_precision": 2.0},
        {"momentum": 0.8, "noise_estimate": 0.03, "initial_momentum": "zeros"},
    ),
    "SGHMC-resampled": (
        sg.SGHMC,
        {"lr": 0.02, "resample_momentum_every": 10},
        {"temperature": 1.5},
    ),
    "SGHMC-online": (
        sg.SGHMC,
        {"lr": 1e-3, "momentum": 0.5},
        {"noise_estimate": "online"},
    ),
    "SGHMC-mass-online": (
        sg.SGHMC,
        {"lr": 1e-3, "momentum": 0.5, "noise_estimate": "online"},
        {"prior_precision": 2.0},
    ),
    "PSGLD": (
        sg.PSGLD,
        {"lr": 1e-3, "gamma": False, "prior_precision": 1.0},
        {"adapt": False, "eps": 1e-3, "temperature": 0.5},
    ),
    "PSGLD-gamma": (
        sg.PSGLD,
        {"lr": 1e-3, "decay": 0.9, "eps": 1e-2},
        {"decay": 0.99},
    ),
    "SGNHT": (
        sg.SGNHT,
        {"lr": 0.02, "prior_precision": 2.0},
        {"momentum": 0.8, "thermostat_rate": 1e-3},
    ),
    "EWSG": (
        sg.EWSG,
        {"lr": 0.02, "prior_precision": 2.0, "index_chain_length": 2},
        {"momentum": 0.8, "surrogate": "full_momentum", "temperature": 1.5},
    ),
    "EWSG-overdamped": (
        sg.EWSG,
        {
            **{"lr": 0.02, "momentum": 0.0, "surrogate": "zero"},
            "persistent_index_chain": True,
        },
        {"surrogate": "one", "prior_precision": 2.0},
    ),
    "SBPS": (
        sg.SBPS,
        {"prior_precision": 2.0, "refresh_rate": 1.0, "sample_interval": 0.3},
        {"prior_precision": 1.0},
    ),
    "PSBPS": (
        sg.SBPS,
        {"preconditioned": True, "decay": 0.9, "confidence": 2.0},
        {"prior_precision": 2.0},
    ),
    "PSBPS-given": (
        sg.SBPS,
        {
            **{"preconditioned": True, "refresh_rate": 1.0, "confidence": 2.0},
            "forgetting": 1.5,
        },
        {"prior_precision": 2.0},
    ),
    # For the sampler the rows of all parameters are chains; that the network couples
    # them is no concern of its arithmetic.
    "EWSG-chains": (
        sg.EWSG,
        {
            **{"lr": 0.02, "index_chain_length": 2, "num_chains": 5},
            "persistent_index_chain": True,
        },
        {"momentum": 0.8},
    ),
    "SGHMC-chains": (
        sg.SGHMC,
        {"lr": 0.02, "num_chains": 5, "prior_precision": 2.0},
        {"resample_momentum_every": 10},
    ),
    "PSGLD-chains": (
        sg.PSGLD,
        {"lr": 1e-3, "decay": 0.9, "eps": 1e-2, "num_chains": 5},
        {"gamma": False},
    ),
    "HMC": (
        sg.HMC,
        {"step_size": 0.006, "num_steps": 2, "temperature": 1.5},
        {"prior_precision": 2.0},
    ),
    "HMC-kept": (
        sg.HMC,
        {
            "step_size": 0.004,
            "trajectory_length": 0.01,
            "resample_momentum_every": 3,
            "prior_precision": 1.0,
        },
        {},
    ),
    "HMC-naive": (
        sg.HMC,
        {"step_size": 0.002, "num_steps": 1, "metropolis": False},
        {"prior_precision": 2.0},
    ),
    "HMC-naive-kept": (
        sg.HMC,
        {
            **{"step_size": 0.002, "num_steps": 3, "metropolis": False},
            "resample_momentum_every": 4,
        },
        {},
    ),
    "HMC-chains": (
        sg.HMC,
        {"step_size": 0.006, "num_steps": 2, "num_chains": 5},
        {"prior_precision": 2.0},
    ),
}


#: What adds to those only how an operator is called.
SHORT: dict[str, tuple[type[sg.Sampler], dict[str, Any], dict[str, Any]]] = {
    "SGLD-chains": (sg.SGLD, {"lr": 0.1, "num_chains": 5}, {"temperature": 0.5}),
    "SGNHT-chains": (sg.SGNHT, {"lr": 0.02, "num_chains": 5}, {"momentum": 0.8}),
    "SGHMC-mass": (
        sg.SGHMC,
        {"lr": 0.02, "noise_estimate": 0.02, "prior_precision": 2.0},
        {"momentum": 0.8, "resample_momentum_every": 5, "prior_mean": 0.25},
    ),
    "PSGLD-chains-frozen": (
        sg.PSGLD,
        {"lr": 1e-3, "adapt": False, "num_chains": 5},
        {"adapt": True, "gamma": False},
    ),
}


def width(name: str) -> int:
    return 5 if "-chains" in name else 33


def draws(name: str) -> int:
    """The number of minibatches that a step draws, at most."""
    method, common, _ = {**CHAINS, **SHORT}[name]
    if method is sg.HMC:
        return 1 + common.get("num_steps", 5)
    return 1 + common.get("index_chain_length", 1) if method is sg.EWSG else 1


def step_size_of(method: type[sg.Sampler]) -> str:
    """What a schedule changes."""
    return "step_size" if method is sg.HMC else "lr"


def make_net(name: str, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(1)
    hidden = width(name)
    return nn.Sequential(nn.Linear(7, hidden), nn.Tanh(), nn.Linear(hidden, 5)).to(
        dtype
    )


def make_sampler(
    name: str, net: nn.Sequential, means: list[Tensor] | None = None
) -> sg.Sampler:
    """With means, priors are about a number in one group and these in the other."""
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
    if isinstance(sampler, sg.SBPS) and "-given" in name:
        sampler.set_preconditioner(preconditioner(net))
    if isinstance(sampler, sg.SGHMC) and "-mass" in name:
        masses, frictions = masses_of(name, net)
        sampler.set_mass(masses, frictions)
    return sampler


def masses_of(name: str, net: nn.Module) -> tuple[list[Tensor], list[Tensor] | None]:
    """M, and but for one chain C, some to be broadcast."""
    masses = [torch.linspace(0.7, 2.0, p.shape[-1]) for p in net.parameters()]
    return masses, None if "-online" in name else [1.5 - m / 4 for m in masses]


def preconditioner(net: nn.Module) -> list[Tensor]:
    """One for each parameter, in a precision of their own, some to be broadcast."""
    return [
        torch.linspace(0.2, 2.0, p.shape[-1], dtype=torch.float64)
        for p in net.parameters()
    ]


def make_job(
    name: str, dtype: torch.dtype, means: list[Tensor] | None = None
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    net = make_net(name, dtype)
    sampler = make_sampler(name, net, means)
    groups = sampler.state_dict()["param_groups"]
    base = torch.tensor(
        [group.get(step_size_of(type(sampler)), 0.0) for group in groups],
        dtype=torch.float64,
    )
    wave = torch.linspace(0, 50, STEPS, dtype=torch.float64).sin()
    job = {
        "sampler": type(sampler).__name__,
        "seed": sampler.seed,
        "groups": groups,
        "model": dict(net.state_dict()),
        "x": torch.randn(200, 7, generator=generator).to(dtype),
        "y": torch.randint(5, (200,), generator=generator),
        "batches": torch.randint(200, (STEPS * draws(name), 10), generator=generator),
        "lrs": torch.outer(1 + 0.5 * wave, base),
        "create_graph": name in ("PSGLD-gamma", "PSGLD-chains"),
        # HMC is given a loss for each chain; here all are equal.
        "rows": 5 if name == "HMC-chains" else 0,
        "per_example": isinstance(sampler, sg.SBPS),
        # A precision would be that of all chains.
        "gibbs_every": 0 if "-chains" in name else 100,
    }
    if means is not None:
        job["means"] = means
    if "-given" in name:
        job["preconditioner"] = preconditioner(net)
    if "-mass" in name:
        job["mass"], frictions = masses_of(name, net)
        job["friction"] = frictions or []
    # PSGLD's first gradients are 0 for some coordinates.
    job["x"][job["batches"][0], 0] = 0
    return job


def run_in_python(name: str, job: dict[str, Any]) -> dict[str, Any]:
    net = make_net(name, job["x"].dtype)
    net.load_state_dict(job["model"])
    sampler = make_sampler(name, net, job.get("means"))
    precision = sg.GammaPrecision(sampler) if job["gibbs_every"] else None
    centers = [0.125 for group in sampler.param_groups for _ in group["params"]]
    gauges = sg.Gauges(sampler, every=11, center=centers)
    average = sg.TimeAverage(sampler) if isinstance(sampler, sg.SBPS) else None
    if "state" in job:
        sampler.load_state_dict(job["state"])
        if precision is not None:
            precision.load_state_dict(job["precision"])
        if "gauges" in job:
            gauges.load_state_dict(job["gauges"])
        if average is not None:
            average.load_state_dict(job["average"])
    # Each step has minibatches of its own; it may leave some of them.
    steps = job["batches"].tensor_split(len(job["lrs"]))
    for i, (lrs, drawn) in enumerate(zip(job["lrs"], steps, strict=True)):
        batches = iter(drawn)
        if not job["per_example"]:  # SBPS has no step size
            for group, lr in zip(sampler.param_groups, lrs.tolist(), strict=True):
                group[step_size_of(type(sampler))] = lr

        def closure(i: int = i, batches: Any = batches) -> Tensor:
            sampler.zero_grad()
            batch = next(batches)
            if sampler.param_groups[0].get("persistent_index_chain", False):
                numbers = sampler.minibatches
                batch = numbers.sum() + numbers.max() + torch.arange(10)
                batch %= len(job["x"])
            logits, y = net(job["x"][batch]), job["y"][batch]
            if job["per_example"]:
                return F.cross_entropy(logits, y, reduction="none")
            loss = F.cross_entropy(logits, y)
            loss.backward(create_graph=job["create_graph"])
            if i % 7 == 3:
                net[2].bias.grad = None
            return loss.detach().expand(job["rows"]) if job["rows"] else loss

        if i % 60 == 7 and not job["create_graph"]:
            gauges.observe(
                lambda: F.cross_entropy(net(job["x"][:10]), job["y"][:10]).backward()
            )
        sampler.step(closure)
        if precision is not None and (i + 1) % job["gibbs_every"] == 0:
            precision.step()
    return {
        "model": dict(net.state_dict()),
        "state": sampler.state_dict(),
        "precision": {} if precision is None else precision.state_dict(),
        "gauges": gauges.state_dict(),
        "temperatures": gauges.summary(),
        "average": {} if average is None else average.state_dict(),
        "summary": sampler.target_summary(),
    }


# Of float32 see test_each_continues_the_others_chain.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.bfloat16) for name in CHAINS),
        *product(ONE_EACH, (torch.float64, torch.float16)),
    ],
    ids=str,
)
def test_the_same_bits(
    name: str, dtype: torch.dtype, run_in_cpp: Callable[..., dict[str, Any]]
) -> None:
    job = make_job(name, dtype)
    expected = run_in_python(name, job)
    moved = expected["model"]["0.weight"] - job["model"]["0.weight"]
    assert moved.abs().max() > 0.01
    group = expected["state"]["param_groups"][0]
    if "num_bounces" in group:
        assert 20 < group["num_bounces"] < group["num_proposals"]
    if "num_accepted" in group:
        proposals = (
            "num_trajectories" if "num_trajectories" in group else "num_proposals"
        )
        if group[proposals] > 0:
            assert 0.05 < group["num_accepted"] / group[proposals] < 0.95
    assert_same(expected, run_in_cpp(job))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SHORT)
def test_the_same_bits_of_a_few_steps(
    name: str, dtype: torch.dtype, run_in_cpp: Callable[..., dict[str, Any]]
) -> None:
    job = make_job(name, dtype)
    job["batches"], job["lrs"] = job["batches"][:40], job["lrs"][:40]
    assert_same(run_in_python(name, job), run_in_cpp(job))


@pytest.mark.parametrize("name", CHAINS)
def test_each_continues_the_others_chain(
    name: str, run_in_cpp: Callable[..., dict[str, Any]]
) -> None:
    job = make_job(name, torch.float32)
    job["gibbs_every"] //= 5
    # Missing gradients, comparisons and Gibbs updates fall on the same steps as in
    # the whole.
    split = 7 * 20 * 3
    drawn = split * draws(name)
    first = {**job, "batches": job["batches"][:drawn], "lrs": job["lrs"][:split]}
    rest = {**job, "batches": job["batches"][drawn:], "lrs": job["lrs"][split:]}
    whole = run_in_python(name, job)

    begun = run_in_python(name, first)
    assert_same(whole, run_in_cpp({**rest, **begun}))

    begun = run_in_cpp(first)
    assert_same(whole, run_in_python(name, {**rest, **begun}))


@pytest.mark.parametrize("name", CHAINS)
def test_priors_about_other_places(
    name: str, run_in_cpp: Callable[..., dict[str, Any]]
) -> None:
    """Means that C++ was given, and those of a state dict that it continues."""
    dtype = torch.bfloat16 if name in ("SGHMC", "HMC") else torch.float32
    net = make_net(name, dtype)
    means = [0.5 + p.detach().float() for p in net[2].parameters()]
    job, steps = make_job(name, dtype, means), 120
    job["gibbs_every"] //= 2
    plain = {
        **job,
        "batches": job["batches"][: 70 * draws(name)],
        "lrs": job["lrs"][:70],
    }
    rest = {
        **job,
        "batches": job["batches"][70 * draws(name) : steps * draws(name)],
        "lrs": job["lrs"][70:steps],
    }
    begun = run_in_python(name, plain)
    assert "Σ λ‖θ − μ‖²/2" in begun["summary"]
    for i, mean in enumerate(means):
        assert torch.equal(begun["state"]["state"][2 + i]["prior_mean"], mean)
    assert_same(begun, run_in_cpp(plain))
    del rest["means"]
    assert_same(run_in_python(name, {**rest, **begun}), run_in_cpp({**rest, **begun}))


def make_faulty_job(name: str, choice: str) -> dict[str, Any]:
    """A short job with a datum that makes NaN, in a twentieth of the minibatches."""
    job, steps = make_job(name, torch.float32), 200
    job["x"][0, 3] = torch.nan
    job["batches"] = job["batches"][: steps * draws(name)]
    job["lrs"] = job["lrs"][:steps]
    sampler = make_sampler(name, make_net(name, torch.float32))
    for group in sampler.param_groups:
        group["nonfinite"] = choice
    average = sg.TimeAverage(sampler) if job["per_example"] else None
    return {
        **job,
        "state": sampler.state_dict(),
        "precision": (
            sg.GammaPrecision(sampler).state_dict() if job["gibbs_every"] else {}
        ),
        "average": {} if average is None else average.state_dict(),
    }


FAULTY = (
    *("SGLD", "SGHMC-online", "PSGLD-gamma", "SGNHT"),
    *("EWSG", "EWSG-overdamped", "EWSG-chains", "HMC", "HMC-naive", "SBPS"),
)


@pytest.mark.parametrize("name", FAULTY)
def test_steps_that_are_left_out(
    name: str, run_in_cpp: Callable[..., dict[str, Any]]
) -> None:
    job = make_faulty_job(name, "skip")
    expected = run_in_python(name, job)
    group = expected["state"]["param_groups"][0]
    assert 3 < group["num_skipped"] == 200 - group["step"] < 80
    assert_same(expected, run_in_cpp(job))


@pytest.mark.parametrize("name", FAULTY)
def test_the_same_message_of_a_gradient_that_is_not_finite(
    name: str, run_in_cpp: Callable[..., dict[str, Any]]
) -> None:
    job = make_faulty_job(name, "raise")
    with pytest.raises(RuntimeError, match="not finite") as in_python:
        run_in_python(name, job)
    with pytest.raises(ValueError) as in_cpp:
        run_in_cpp(job)
    assert str(in_cpp.value) == in_words_of_cpp(in_python.value)


def in_words_of_cpp(error: BaseException) -> str:
    """The message with arguments, types and constants as C++ has them."""
    text = re.sub(r"\b(\w+)='(\w+)'", r'\1("\2")', str(error))
    text = re.sub(r"\b(\w+)=(True|False)\b", r"\1(\2)", text)
    text = text.replace("torch.int64", "torch::kLong")
    return re.sub(r"\b(None|True|False)\b", lambda word: word[0].lower(), text)


def assert_same_refused(in_cpp: BaseException, in_python: BaseException) -> None:
    """Each language says in its own words what it got and expected of what."""
    texts = [str(in_cpp), str(in_python)]
    what = [text.partition(":")[0] for text in texts]
    assert what[0] == what[1]
    assert all(len(text) > len(what[0]) + 10 for text in texts)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("SGLD", "lr", -0.5),
        ("SGLD", "lr", float("nan")),
        ("SGLD", "num_data", 0.0),
        ("SGLD", "prior_precision", float("inf")),
        ("SGLD", "temperature", -1e-05),
        ("SGHMC", "momentum", 1.0),
        ("SGHMC", "momentum", -1e20),
        ("SGHMC", "noise_estimate", "offline"),
        ("SGHMC", "noise_estimate", 0.25),
        ("SGHMC", "noise_estimate", -1.5),
        ("SGHMC", "resample_momentum_every", -1),
        ("SGHMC", "initial_momentum", "random"),
        ("SGHMC-online", "temperature", 0.0),
        ("PSGLD", "decay", 1.0),
        ("PSGLD", "eps", 0.0),
        ("SGNHT", "momentum", -0.1),
        ("SGNHT", "thermostat_rate", -2.0),
        ("EWSG", "momentum", 1.0),
        ("EWSG", "temperature", 0.0),
        ("EWSG", "surrogate", "friction"),
        ("HMC", "prior_precision", -1.0),
        ("SBPS", "prior_precision", -2.0),
    ],
)
def test_the_same_is_refused(
    name: str, key: str, value: object, run_in_cpp: Callable[..., dict[str, Any]]
) -> None:
    job = make_job(name, torch.float32)
    net = make_net(name, torch.float32)
    method, common, special = {**CHAINS, **SHORT}[name]
    bad = {"params": net[2].parameters(), **special, key: value}
    with pytest.raises(ValueError) as in_python:
        method([{"params": net[0].parameters()}, bad], **common, num_data=500)
    job["groups"][1][key] = value
    with pytest.raises(ValueError) as in_cpp:
        run_in_cpp(job)
    assert_same_refused(in_cpp.value, in_python.value)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("HMC", {"step_size": 0.0}),
        ("HMC", {"num_steps": 0}),
        ("HMC", {"num_steps": None}),
        ("HMC", {"trajectory_length": 2.0}),
        ("HMC", {"num_steps": None, "trajectory_length": -2.0}),
        ("HMC", {"temperature": 0.0}),
        ("HMC", {"resample_momentum_every": -1}),
        ("HMC", {"num_chains": 0}),
        ("HMC", {"num_chains": 4}),
    ],
)
def test_the_same_is_refused_of_what_groups_share(
    name: str, changes: dict[str, Any], run_in_cpp: Callable[..., dict[str, Any]]
) -> None:
    job = make_job(name, torch.float32)
    net = make_net(name, torch.float32)
    method, common, _ = {**CHAINS, **SHORT}[name]
    with pytest.raises(ValueError) as in_python:
        method(net.parameters(), **{**common, **changes}, num_data=500)
    for group in job["groups"]:
        group.update(changes)
    with pytest.raises(ValueError) as in_cpp:
        run_in_cpp(job)
    assert_same_refused(in_cpp.value, in_python.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", 2.0),
        ("preconditioned", True),
        ("sample_interval", None),
        ("confidence", 2.5),
    ],
)
def test_groups_that_differ(
    key: str, value: object, run_in_cpp: Callable[..., dict[str, Any]]
) -> None:
    name = "SBPS"
    job = make_job(name, torch.float32)
    job = {**job, "batches": job["batches"][:3], "lrs": job["lrs"][:3]}
    job.update(run_in_python(name, job))
    job["state"]["param_groups"][1][key] = value
    with pytest.raises(ValueError, match=f"Invalid {key}: .*one particle") as in_python:
        run_in_python(name, job)
    with pytest.raises(ValueError) as in_cpp:
        run_in_cpp(job)
    assert str(in_cpp.value) == in_words_of_cpp(in_python.value)


def shorten(job: dict[str, Any], name: str) -> dict[str, Any]:
    """Three steps of it."""
    drawn = 3 * draws(name)
    return {**job, "batches": job["batches"][:drawn], "lrs": job["lrs"][:3]}


def changed(state: dict[str, Any], change: Callable[[Any, Any], Any]) -> dict[str, Any]:
    state = copy.deepcopy(state)
    change(state["param_groups"], state["state"])
    return state


# A sampler and what is done to param groups and state of its state dict.
BAD_STATES: list[tuple[str, Callable[[Any, Any], Any]]] = [
    ("SGLD", lambda groups, _: groups[1].update(seed=3)),
    ("SGLD", lambda groups, _: groups[1].update(step=2)),
    ("SGLD", lambda groups, _: groups[0].update(step=-1)),
    ("SGLD", lambda groups, _: groups[0].pop("step")),
    ("SGLD", lambda groups, _: groups[1].update(momentum=0.5, clock=[])),
    ("SGLD", lambda _, state: state.update({0: {"momentum": torch.zeros(33, 7)}})),
    ("SGLD", lambda _, state: state.update({9: {}, "subsample": {}})),
    ("SGHMC", lambda groups, _: (groups[1].pop("lr"), groups[1].pop("momentum"))),
    ("SGHMC", lambda _, state: state[1].update(momentum=torch.zeros(2))),
    ("SGHMC", lambda _, state: state[1].update(momentum=torch.zeros(33).long())),
    ("SGHMC", lambda _, state: state[1].update(exp_avg=torch.zeros(33), step=1)),
    ("SGHMC-online", lambda _, state: state[2].pop("previous_grad")),
    ("SGHMC-online", lambda _, state: state[2].update(num_grads=-1)),
    ("SGNHT", lambda _, state: state[3].update(thermostat=torch.zeros(()))),
    ("EWSG", lambda groups, _: groups[1].update(num_accepted=10**6)),
    ("EWSG", lambda groups, _: groups[1].update(num_proposals=7)),
    ("EWSG", lambda groups, _: groups[1].update(capturable=True)),
    ("EWSG-overdamped", lambda groups, _: groups[0].update(minibatches=[10**6])),
    ("EWSG-overdamped", lambda groups, _: groups[1].update(minibatches=[])),
    ("EWSG-overdamped", lambda groups, _: groups[1].update(num_drawn=-1)),
    ("EWSG-overdamped", lambda groups, _: groups[0].update(index_chain_length=0)),
    ("HMC", lambda groups, _: groups[0].update(num_divergences=10**6)),
    ("HMC", lambda groups, _: groups[1].update(num_steps=7)),
    ("HMC", lambda groups, _: groups[1].update(dual_averaging=[1.0])),
    ("HMC", lambda _, state: state.update({0: {"mass": torch.zeros(33, 7)}})),
    ("SBPS", lambda groups, _: groups[1].update(line_time=-1.0)),
    ("SBPS", lambda groups, _: groups[0].update(num_bounces=10**6)),
    ("SBPS", lambda groups, _: groups[1].update(num_looks=10**6)),
    ("SBPS", lambda groups, _: groups[1].update(observed_interval=0.0)),
    ("SBPS", lambda groups, _: groups[1].update(observed_target=[1.0, 2.0])),
    ("PSBPS", lambda groups, _: groups[1].update(capturable=True)),
]


@pytest.mark.parametrize(("name", "change"), BAD_STATES)
def test_the_same_state_dicts_are_refused(
    name: str,
    change: Callable[[Any, Any], Any],
    run_in_cpp: Callable[..., dict[str, Any]],
) -> None:
    job = shorten(make_job(name, torch.float32), name)
    job.update(run_in_python(name, job))
    job["state"] = changed(job["state"], change)
    with pytest.raises(ValueError) as in_python:
        run_in_python(name, job)
    with pytest.raises(ValueError) as in_cpp:
        run_in_cpp(job)
    assert str(in_cpp.value) == in_words_of_cpp(in_python.value)


def of_hmcecs(params: list[Tensor]) -> dict[str, Any]:
    return sg.HMCECS(params, num_data=500, subsample_size=10).state_dict()


def of_control_variates(params: list[Tensor]) -> dict[str, Any]:
    sampler = sg.SGLD(params, lr=0.1, num_data=500)
    estimator = sg.ControlVariates(sampler, lambda _: params[0].sum())
    estimator.set_anchor([torch.ones(1)])
    return estimator.state_dict()


def of_a_given_variance(params: list[Tensor]) -> dict[str, Any]:
    """What a sampler does not use it keeps."""
    sampler = sg.SGHMC(params, lr=0.1, num_data=500)
    sampler.set_gradient_variance([0.0 for _ in params])
    return sampler.state_dict()


def of_no_variance_yet(params: list[Tensor]) -> dict[str, Any]:
    return sg.SGHMC(params, lr=1, num_data=1, noise_estimate="given").state_dict()


def of_a_given_covariance(params: list[Tensor]) -> dict[str, Any]:
    sampler = sg.SGHMC(params, lr=0.1, num_data=500)
    sampler.set_gradient_covariance(torch.eye(sum(p.numel() for p in params)))
    return sampler.state_dict()


@pytest.mark.parametrize(
    ("loads", "saved", "kind"),
    [
        ("HMC", of_hmcecs, "HMCECS"),
        ("SGLD", of_control_variates, "ControlVariates or SVRG"),
        ("SGHMC", of_a_given_variance, "SGHMC with a Var(ḡ) that was given"),
        ("SGHMC", of_no_variance_yet, "SGHMC with a Var(ḡ) that was given"),
        ("SGHMC", of_a_given_covariance, "SGHMC with a Var(ḡ) that was given"),
    ],
)
def test_what_python_alone_has_is_refused_by_name(
    loads: str,
    saved: Callable[[list[Tensor]], dict[str, Any]],
    kind: str,
    run_in_cpp: Callable[..., dict[str, Any]],
) -> None:
    job = shorten(make_job(loads, torch.float32), loads)
    job.update(run_in_python(loads, job))
    job["state"] = saved([*make_net(loads, torch.float32).parameters()])
    with pytest.raises(ValueError) as in_cpp:
        run_in_cpp(job)
    assert str(in_cpp.value) == (
        f"Invalid state_dict: it is of {kind}, which C++ does not have "
        "(continue it in Python)"
    )


def test_an_average_of_a_function_is_refused(
    run_in_cpp: Callable[..., dict[str, Any]],
) -> None:
    job = shorten(make_job("SBPS", torch.float32), "SBPS")
    job.update(run_in_python("SBPS", job))
    job["average"] = {**job["average"], "value": torch.ones(3)}
    with pytest.raises(ValueError) as in_cpp:
        run_in_cpp(job)
    assert str(in_cpp.value) == (
        "Invalid state_dict: it is of the average of a function, which C++ does not "
        "have (continue it in Python)"
    )


@pytest.mark.parametrize("loads", ONE_EACH)
def test_the_same_message_of_another_samplers_state_dict(
    loads: str,
    run_in_cpp: Callable[..., dict[str, Any]],
) -> None:
    job = shorten(make_job(loads, torch.float32), loads)
    job.update(run_in_python(loads, job))
    for saved in ONE_EACH:
        if saved == loads:
            continue
        net = make_net(saved, torch.float32)
        job["state"] = make_sampler(saved, net).state_dict()
        with pytest.raises(ValueError, match="it is not one of") as in_python:
            run_in_python(loads, job)
        with pytest.raises(ValueError) as in_cpp:
            run_in_cpp(job)
        assert str(in_cpp.value) == in_words_of_cpp(in_python.value)


@pytest.mark.parametrize("name", [*ONE_EACH, "SGHMC-online", "HMC-kept", "PSBPS"])
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [(torch.float32, torch.float64), (torch.float64, torch.bfloat16)],
)
def test_the_same_bits_from_a_state_of_another_precision(
    name: str,
    saved: torch.dtype,
    loaded: torch.dtype,
    run_in_cpp: Callable[..., dict[str, Any]],
) -> None:
    begun = run_in_python(name, shorten(make_job(name, saved), name))
    begun["model"] = {key: value.to(loaded) for key, value in begun["model"].items()}
    # What torch and its schedulers keep there, and users, is none of C++'s business.
    for group in begun["state"]["param_groups"]:
        group.update(initial_lr=0.1, differentiable=False, name="layer", my_own=None)
        if "lr" in group:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)
    begun.pop("average")  # in the parameters' precision
    job = {**shorten(make_job(name, loaded), name), **begun, "average": {}}
    if name.endswith("SBPS"):
        job["average"] = sg.TimeAverage(
            make_sampler(name, make_net(name, loaded))  # type: ignore[arg-type]
        ).state_dict()
    expected = run_in_python(name, job)
    for group in expected["state"]["param_groups"]:
        for key in ("initial_lr", "differentiable", "name", "my_own"):
            group.pop(key)
    assert_same(expected, run_in_cpp(job))


def test_the_same_message_of_a_step(
    run_in_cpp: Callable[..., dict[str, Any]],
) -> None:
    name = "SGHMC-online"
    job = make_job(name, torch.float32)
    job["lrs"] = 1000 * job["lrs"]
    with pytest.raises(ValueError, match="in the noisiest coordinate") as in_python:
        run_in_python(name, job)
    with pytest.raises(ValueError) as in_cpp:
        run_in_cpp(job)
    assert str(in_cpp.value) == in_words_of_cpp(in_python.value)


def test_the_same_seed_from_torchs_generator(
    run_in_cpp: Callable[..., dict[str, Any]],
) -> None:
    job = make_job("SGLD", torch.float32)
    job["seed"] = None
    job["batches"], job["lrs"] = job["batches"][:1], job["lrs"][:1]
    drawn = run_in_cpp(job)["state"]["param_groups"][0]["seed"]
    torch.manual_seed(0)
    assert drawn == sg.SGLD([nn.Parameter(torch.zeros(1))], lr=1, num_data=1).seed


def test_a_missing_graph(
    run_in_cpp: Callable[..., dict[str, Any]],
) -> None:
    name = "PSGLD-gamma"
    job = {**make_job(name, torch.float32), "create_graph": False}
    with pytest.raises(RuntimeError, match="gradients without a graph") as in_python:
        run_in_python(name, job)
    with pytest.raises(ValueError) as in_cpp:
        run_in_cpp(job)
    assert_same_refused(in_cpp.value, in_python.value)
