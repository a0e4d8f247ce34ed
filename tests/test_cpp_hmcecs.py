"""HMC-ECS: C++ and Python give the same bits, and continue each other's chains."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ecs_data import F64, Data, Regression
from harness.exactness import assert_same
from torch import Tensor
from words_of_cpp import in_words_of_cpp

import torch_sgmcmc as sg

pytestmark = [pytest.mark.cpp, pytest.mark.usefixtures("one_thread")]

Job = dict[str, Any]
InCpp = Callable[[Job], Job]

#: For each chain the model, the type of its parameters, the variance that its size is
#: chosen for, and hyperparameters.
CHAINS: dict[str, tuple[str, torch.dtype, float | None, dict[str, Any]]] = {
    "perturbed": ("logistic", F64, 0.002, {"subsample_size": 12}),
    "perturbed-fp32": ("logistic", torch.float32, 0.002, {"subsample_size": 12}),
    "perturbed-whole": (
        "tanh",
        F64,
        0.3,
        {"mass_matrix": "diagonal", "subsample_size": 20},
    ),
    "perturbed-rows": ("rows", F64, 0.002, {"subsample_size": 12}),
    "perturbed-rows-first": (
        "rows",
        torch.float32,
        None,
        {"control_variate": 1, "subsample_size": 30},
    ),
    "signed-rows": ("rows", F64, 0.3, {"variant": "signed", "num_products": 9}),
    # So many data that each parameter's derivatives are passes of their own.
    "perturbed-many": (
        "logistic",
        F64,
        None,
        {"num_data": 1500, "subsample_size": 40, "chunk_size": 1100},
    ),
    "perturbed-first": (
        "logistic",
        F64,
        0.05,
        {"control_variate": 1, "subsample_size": 20, "temperature": 1.5},
    ),
    # So many parameters that each datum's gradient is made on its own.
    "perturbed-wide": (
        "logistic",
        F64,
        None,
        {"control_variate": 1, "mass_matrix": "identity", "subsample_size": 30},
    ),
    "signed": ("logistic", F64, 0.3, {"variant": "signed", "num_products": 9}),
    "signed-least-time": (
        "logistic",
        F64,
        math.inf,
        {"variant": "signed", "control_variate": 1, "subsample_size": 5},
    ),
    "signed-fp32": (
        "logistic",
        torch.float32,
        0.3,
        {"variant": "signed", "num_products": 9, "mass_matrix": "identity"},
    ),
    # Priors about other places than 0.
    "perturbed-mean": ("logistic", F64, None, {"temperature": 1.5}),
    "signed-mean": ("logistic", F64, 0.3, {"variant": "signed", "num_products": 9}),
    # So many factors that a bounds them, as it does when the step size is adapted anew.
    "signed-bound": (
        "logistic",
        F64,
        None,
        {"variant": "signed", "num_products": 20, "control_variate": 1},
    ),
    # The Hessian is for the mass alone, or there is none.
    "perturbed-constant": (
        "rows",
        F64,
        None,
        {"control_variate": 0, "subsample_size": 60},
    ),
    "signed-constant": (
        "logistic",
        F64,
        None,
        {
            "variant": "signed",
            "num_products": 30,
            "control_variate": 0,
            "mass_matrix": "identity",
            "step_size": 0.05,
        },
    ),
    "perturbed-weighted": ("logistic", F64, 0.002, {"subsample_size": 12}),
    "signed-weighted": ("rows", F64, 0.3, {"variant": "signed", "num_products": 9}),
    # So few factors that signs differ.
    "signed-first": (
        "tanh",
        F64,
        None,
        {
            "variant": "signed",
            "num_products": 6,
            "subsample_size": 12,
            "control_variate": 1,
        },
    ),
}
WARMUP = {
    "steps": 60,
    "target_acceptance": 0.8,
    "anchor_every": 15,
    "target_variance": None,
}


def make_data(name: str) -> Data:
    kind, dtype, _, _ = CHAINS[name]
    data = (Regression if kind == "rows" else Data)(kind, dtype=dtype)
    if name.endswith("-wide"):
        g = torch.Generator().manual_seed(5)
        data.x = 0.1 * torch.randn(60, 300, generator=g, dtype=dtype)
        data.weight = torch.zeros(300, dtype=dtype, requires_grad=True)
    if name.endswith("-many"):
        g = torch.Generator().manual_seed(6)
        data.x = torch.randn(1500, 3, generator=g, dtype=dtype)
        data.y = (torch.rand(1500, generator=g) < 0.5).to(dtype)
    return data


def make_sampler(job: Job) -> tuple[sg.HMCECS, Data]:
    settings = CHAINS[job["name"]][3]
    data = make_data(job["name"])
    for name, value in job["model"].items():
        getattr(data, name).data.copy_(value)
    groups = [
        {"params": [data.weight], "prior_precision": 1.0},
        {"params": [data.bias], "prior_precision": 3.0},
    ]
    if "mean" in job:
        groups[0]["prior_mean"] = job["mean"]
        groups[1]["prior_mean"] = -0.25
    common = {"num_data": 60, "subsample_size": 8, "num_blocks": 4, "chunk_size": 23}
    return sg.HMCECS(groups, seed=2**61, **{**common, **settings}), data


def make_job(name: str) -> Job:
    data = make_data(name)
    job = {
        "name": name,
        "sampler": "HMCECS",
        "kind": data.kind,
        "fault": "",
        "x": data.x,
        "y": data.y,
        "model": {"weight": data.weight.detach(), "bias": data.bias.detach()},
        "steps": 30,
    }
    if name.endswith("-mean"):
        job["mean"] = torch.tensor([0.5, -1.0, 2.0])
    if "-weighted" in name:
        job["weights"] = torch.linspace(1.0, 3.0, 60)
    sampler, _ = make_sampler(job)
    return {
        **job,
        "seed": sampler.seed,
        "groups": sampler.state_dict()["param_groups"],
    }


def spoiled(data: Data, fault: str) -> Callable[[Tensor], Tensor]:
    if isinstance(data, Regression):
        rows: Callable[[Tensor], Tensor] = {
            "columns": lambda i: data.x[i],
            "rows": lambda i: 2 * data.rows(i),
        }.get(fault, data.rows)
        return sg.LogLikelihood(
            lambda i: data.predictor(data.x[i])[slice(fault == "outputs", None)],
            data.of_predictors,
            rows=rows,
        )

    def closure(indices: Tensor) -> Tensor:
        values = data(indices)
        if fault == "shape":
            return values.sum()
        if fault == "graph":
            return values.detach()
        return values / 0.0 if fault == "infinite" else values

    return closure


def run_in_python(job: Job) -> Job:
    sampler, data = make_sampler(job)
    closure = spoiled(data, job["fault"])
    gauges = sg.Gauges(sampler, every=3, center=[0.125, 0.125])
    if "weights" in job:
        sampler.set_sampling_weights(job["weights"])
    if "state" in job:
        sampler.load_state_dict(job["state"])
    if "warmup" in job:
        sampler.warmup(closure, **job["warmup"], progress=False)
    draws = []
    for _ in range(job["steps"]):
        loss = sampler.step(closure)
        numbers = [float(sampler.sign), sampler.estimator_variance]
        flat = [p.detach().double().reshape(-1) for p in data.params]
        draws.append(torch.cat([loss[None], torch.tensor(numbers, dtype=F64), *flat]))
    return {
        "model": {"weight": data.weight.detach(), "bias": data.bias.detach()},
        "state": sampler.state_dict(),
        "draws": torch.stack(draws),
        "rates": torch.tensor(
            [sampler.acceptance_rate, sampler.subsample_acceptance_rate], dtype=F64
        ),
        "counts": torch.tensor([sampler.num_divergences, sampler.num_evaluations]),
        "summary": sampler.target_summary(),
        "gauges": gauges.state_dict(),
        "temperatures": gauges.summary(),
    }


@pytest.mark.parametrize("name", CHAINS)
def test_the_same_bits(name: str, run_in_cpp: InCpp) -> None:
    target = CHAINS[name][2]
    job = {**make_job(name), "warmup": {**WARMUP, "target_variance": target}}
    expected = run_in_python(job)
    assert len(expected["draws"].unique(dim=0)) > 20
    if name == "signed-first":
        assert set(expected["draws"][:, 1].tolist()) == {-1.0, 1.0}
    group = expected["state"]["param_groups"][0]
    chosen = "num_products" if group["variant"] == "signed" else "subsample_size"
    assert (group[chosen] == job["groups"][0][chosen]) == (target is None)
    assert_same(expected, run_in_cpp(job))


@pytest.mark.parametrize(
    "name", ["perturbed-whole", "signed", "perturbed-constant", "signed-weighted"]
)
def test_each_continues_the_others_chain(name: str, run_in_cpp: InCpp) -> None:
    job = {**make_job(name), "warmup": WARMUP}
    whole = run_in_python(job)
    first = {**job, "steps": 7}  # to the middle of what is proposed ahead of time
    begun = {"python": run_in_python(first), "cpp": run_in_cpp(first)}
    assert_same(begun["python"], begun["cpp"])
    rest = {**job, "steps": job["steps"] - first["steps"]}
    del rest["warmup"]
    rest.pop("weights", None)  # the state dict has them
    resumed = [
        run({**rest, "model": start["model"], "state": start["state"]})
        for start, run in ((begun["python"], run_in_cpp), (begun["cpp"], run_in_python))
    ]
    # What was looked up ahead has to be evaluated again, which counts.
    assert_same(*resumed)
    for ours, theirs in zip(whole["draws"][7:], resumed[0]["draws"], strict=True):
        assert torch.equal(ours, theirs)


def test_a_warmup_goes_on_in_cpp(run_in_cpp: InCpp) -> None:
    job = {**make_job("signed"), "warmup": {**WARMUP, "target_variance": math.inf}}
    whole = run_in_python(job)
    sampler, data = make_sampler(job)

    def interrupted(indices: Tensor) -> Tensor:
        if sampler.param_groups[0]["step"] == 40:
            raise KeyboardInterrupt
        return data(indices)

    with pytest.raises(KeyboardInterrupt):
        sampler.warmup(interrupted, **job["warmup"], progress=False)
    model = {"weight": data.weight.detach(), "bias": data.bias.detach()}
    rest = {**job, "model": model, "state": sampler.state_dict()}
    assert rest["state"]["state"]["warmup"]["done"] == 40
    assert torch.equal(run_in_cpp(rest)["draws"], whole["draws"])
    for key, value in (("steps", 61), ("target_variance", None), ("anchor_every", 16)):
        changed = {**rest, "warmup": {**job["warmup"], key: value}}
        assert_same_message(changed, run_in_cpp, f"Invalid {key}: .*in progress has")


def assert_same_message(job: Job, run_in_cpp: InCpp, match: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=match) as in_python:
        run_in_python(job)
    with pytest.raises(ValueError) as in_cpp:
        run_in_cpp(job)
    assert str(in_cpp.value) == in_words_of_cpp(in_python.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_data", 3.5),
        ("variant", "exact"),
        ("subsample_size", 1),
    ],
)
def test_the_same_is_refused(key: str, value: object, run_in_cpp: InCpp) -> None:
    job = make_job("perturbed")
    settings = {"num_data": 60, "subsample_size": 8, key: value}
    with pytest.raises((ValueError, TypeError), match=f"Invalid {key}: "):
        sg.HMCECS([torch.zeros(3, requires_grad=True)], **settings)
    for group in job["groups"]:
        group[key] = value
    with pytest.raises(ValueError) as in_cpp:
        run_in_cpp(job)
    assert str(in_cpp.value).startswith(f"Invalid {key}: ")


@pytest.mark.parametrize(
    ("fault", "match"),
    [
        ("shape", r"shape \[\] \(must be \[23\], one for each index\)"),
        ("graph", "do not depend on the parameters"),
        ("infinite", "not finite at the anchor"),
    ],
)
def test_the_same_message_of_a_closure(
    fault: str, match: str, run_in_cpp: InCpp
) -> None:
    assert_same_message({**make_job("perturbed"), "fault": fault}, run_in_cpp, match)


@pytest.mark.parametrize(
    ("fault", "match"),
    [
        ("outputs", r"Invalid outputs: shape \[22\] \(must be \[23, ...\]"),
        ("columns", r"Invalid rows: shape \[23, 3\] \(must be \[23, 4\]"),
        ("rows", "Invalid rows: they are not the derivatives of the outputs"),
    ],
)
def test_the_same_message_of_rows(fault: str, match: str, run_in_cpp: InCpp) -> None:
    job = {**make_job("perturbed-rows"), "fault": fault}
    assert_same_message(job, run_in_cpp, match)


@pytest.mark.parametrize("name", ["perturbed-rows", "perturbed"])
def test_another_closure(name: str, run_in_cpp: InCpp) -> None:
    """Control variates that were made with rows need them, and others do not."""
    saved = run_in_python({**make_job(name), "steps": 2})["state"]
    other = {"perturbed": "perturbed-rows", "perturbed-rows": "perturbed"}[name]
    job = {**make_job(other), "state": saved}
    if name == "perturbed":
        return assert_same(run_in_python(job), run_in_cpp(job))
    match = "control variates are those of a LogLikelihood with rows"
    return assert_same_message(job, run_in_cpp, match)


@pytest.mark.parametrize(
    ("weights", "match"),
    [
        (torch.ones(59), r"shape \[59\] \(must be \[60\], one for each datum\)"),
        (torch.arange(60.0), r"0 at 0 \(must be > 0 and finite, as their sum\)"),
        (torch.full((60,), 1e308, dtype=F64), "1e[+]308 at 1 .*finite, as their sum"),
        (torch.arange(60.0).exp(), r"1 at 0 \(must be at least 2\^-40 of their sum\)"),
    ],
)
def test_the_same_message_of_weights(
    weights: Tensor, match: str, run_in_cpp: InCpp
) -> None:
    job = {**make_job("perturbed"), "weights": weights}
    assert_same_message(job, run_in_cpp, match)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (
            {"steps": 1, "target_variance": 1.0},
            "Invalid steps: 1 .*which anchor_every = 15 makes after 0",
        ),
        (
            {"steps": 3, "anchor_every": 1, "target_variance": 1.0},
            "Invalid steps: 3 .*which anchor_every = 1 makes after 3",
        ),
    ],
)
def test_the_same_message_of_a_warmup(
    settings: dict[str, Any], match: str, run_in_cpp: InCpp
) -> None:
    job = {**make_job("perturbed"), "warmup": {**WARMUP, **settings}}
    assert_same_message(job, run_in_cpp, match)


@pytest.mark.parametrize(
    ("key", "value"),
    [("temperature", 2.0), ("variant", "signed")],
)
def test_the_same_message_of_groups_that_differ(
    key: str, value: object, run_in_cpp: InCpp
) -> None:
    job = {**make_job("perturbed"), "steps": 2}
    job["state"] = run_in_python(job)["state"]
    job["state"]["param_groups"][1][key] = value
    assert_same_message(job, run_in_cpp, f"Invalid {key}: .*one trajectory for all")


@pytest.mark.parametrize("done", [10, 35])
def test_the_same_message_of_a_warmup_that_left(done: int, run_in_cpp: InCpp) -> None:
    """Where θ* is chosen again, and at the end."""
    job = {**make_job("perturbed-first"), "warmup": {**WARMUP, "steps": 37}}
    sampler, data = make_sampler(job)

    def interrupted(indices: Tensor) -> Tensor:
        if sampler.param_groups[0]["step"] == done:
            raise KeyboardInterrupt
        return data(indices)

    with pytest.raises(KeyboardInterrupt):
        sampler.warmup(interrupted, **job["warmup"], progress=False)
    job["state"] = sampler.state_dict()
    job["model"] = {"weight": data.weight.detach(), "bias": data.bias.detach()}
    # As if θ* had been a better place.
    job["state"]["state"]["control_variates"]["value"] += 300
    match = r"is \d+\.?\d* below that at θ\* \(that of draws is at most 36.65 below"
    assert_same_message(job, run_in_cpp, match)


def test_the_same_message_of_a_chain_that_left(run_in_cpp: InCpp) -> None:
    job = {**make_job("perturbed"), "steps": 3}
    job["state"] = run_in_python(job)["state"]
    job["state"]["state"]["control_variates"]["value"] += 300
    assert_same_message({**job, "steps": 30}, run_in_cpp, "has left the posterior")


def test_the_same_message_of_a_start_beyond_the_bound(run_in_cpp: InCpp) -> None:
    job = {**make_job("signed-bound"), "steps": 3}
    job["state"] = run_in_python(job)["state"]
    job["model"] = {name: value + 30 for name, value in job["model"].items()}
    assert_same_message(job, run_in_cpp, r"\(must be > a = -20: beyond")


def test_the_same_message_of_other_parameters(run_in_cpp: InCpp) -> None:
    job = {**make_job("perturbed"), "steps": 2}
    job["state"] = run_in_python(job)["state"]
    kept = job["state"]["state"]["control_variates"]
    kept["anchor"] = kept["anchor"][:3]
    assert_same_message(job, run_in_cpp, "are those of 3 parameters, expected 4")


@pytest.mark.parametrize(
    ("name", "part", "change"),
    [
        ("perturbed", "control_variates", lambda kept: kept.pop("gradient")),
        ("perturbed", "control_variates", lambda kept: kept.pop("whitening")),
        (
            *("perturbed", "control_variates"),
            lambda kept: kept.update(anchor=kept["anchor"][None]),
        ),
        (
            *("perturbed", "control_variates"),
            lambda kept: kept.update(hessian=kept["hessian"][:2]),
        ),
        (
            *("perturbed", "control_variates"),
            lambda kept: kept.update(value=kept["value"].float()),
        ),
        ("perturbed", "control_variates", lambda kept: kept.update(num_data=0)),
        (
            *("perturbed-whole", "control_variates"),
            lambda kept: kept.update(whitening=torch.ones(3, dtype=F64)),
        ),
        ("perturbed", "subsample", lambda kept: [kept.pop(k) for k in ("counts",)]),
        ("perturbed", "subsample", lambda kept: kept["layout"].pop()),
        ("perturbed", "subsample", lambda kept: kept["counts"].pop()),
        ("perturbed", "subsample", lambda kept: kept["indices"].add_(60)),
        ("perturbed", "subsample", lambda kept: kept["terms"].pop()),
        (
            *("signed", "subsample"),
            lambda kept: kept["terms"].__setitem__(1, kept["terms"][1][0]),
        ),
        ("perturbed-first", "subsample", lambda kept: kept["counts"].append(1)),
        (
            *("signed-constant", "subsample"),
            lambda kept: kept["terms"].__setitem__(1, kept["terms"][1].new_ones(1, 5)),
        ),
        (
            *("signed-constant", "control_variates"),
            lambda kept: kept.update(hessian=torch.ones(4, 4, dtype=F64)),
        ),
        ("perturbed-weighted", "sampling", lambda kept: kept.pop("weights")),
        ("perturbed-weighted", "sampling", lambda kept: kept["weights"].neg_()),
        (
            *("perturbed-weighted", "sampling"),
            lambda kept: kept.update(weights=kept["weights"].float()),
        ),
        ("perturbed", "state", lambda state: state.pop("control_variates")),
        ("perturbed", "state", lambda state: state.update(momenta={})),
        ("perturbed", "state", lambda state: state.update({0: {"momentum": 1}})),
        ("perturbed", "groups", lambda groups: groups[1].update(sign=0)),
        ("perturbed", "groups", lambda groups: groups[1].update(num_accepted=99)),
        ("perturbed", "groups", lambda groups: groups[1].update(num_evaluations=7)),
    ],
)
def test_the_same_message_of_a_state_dict(
    name: str, part: str, change: Callable[[Any], Any], run_in_cpp: InCpp
) -> None:
    job = {**make_job(name), "steps": 2}
    saved = run_in_python(job)["state"]
    job["state"] = saved
    if part == "groups":
        change(saved["param_groups"])
    else:
        change(saved["state"] if part == "state" else saved["state"][part])
    assert_same_message(job, run_in_cpp, "Invalid ")
