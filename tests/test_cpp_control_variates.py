"""Control variates and SVRG: C++ and Python give the same bits, states, messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness.exactness import assert_same
from torch import Tensor, nn
from torch.nn import functional as F
from words_of_cpp import in_words_of_cpp

import torch_sgmcmc as sg

pytestmark = [pytest.mark.cpp, pytest.mark.usefixtures("one_thread")]

Job = dict[str, Any]
InCpp = Callable[[Job], Job]

DATA, BATCH, STEPS = 40, 4, 30
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
#: For each chain the sampler, its hyperparameters, and what else there is: of an
#: anchor that stays refresh_every is 0.
CHAINS: dict[str, tuple[type[sg.Sampler], dict[str, Any], Job]] = {
    "SGLD": (sg.SGLD, {"lr": 0.1}, {"frozen": True}),
    "SGHMC": (sg.SGHMC, {"lr": 0.05, "momentum": 0.8}, {"refresh_every": 7}),
    "SGHMC-parts": (sg.SGHMC, {"lr": 0.05}, {"weights": [0.3, 0.7]}),
    "PSGLD": (
        sg.PSGLD,
        {"lr": 1e-3, "eps": 1e-2},
        {"refresh_every": 4, "create_graph": True},
    ),
    "EWSG": (sg.EWSG, {"lr": 0.05, "index_chain_length": 2}, {"refresh_every": 7}),
    "EWSG-fixed": (sg.EWSG, {"lr": 0.05, "momentum": 0.0}, {}),
    "SGLD-second": (sg.SGLD, {"lr": 0.1}, {"order": 2, "frozen": True}),
    "EWSG-second": (sg.EWSG, {"lr": 0.05}, {"order": 2}),
}


def draws(name: str) -> int:
    """The number of gradients that a step takes."""
    method, options, _ = CHAINS[name]
    return 1 + options.get("index_chain_length", 1) if method is sg.EWSG else 1


def make_net(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3)).to(dtype)


def make_sampler(name: str, net: nn.Sequential) -> sg.Sampler:
    method, options, _ = CHAINS[name]
    groups = [{"params": layer.parameters()} for layer in (net[0], net[2])]
    return method(groups, **options, num_data=DATA, seed=2**61)


def make_job(name: str, dtype: torch.dtype, **changes: Any) -> Job:
    g = torch.Generator().manual_seed(2)
    net = make_net(dtype)
    sampler = make_sampler(name, net)
    special = CHAINS[name][2]
    return {
        "sampler": type(sampler).__name__,
        "seed": sampler.seed,
        "groups": sampler.state_dict()["param_groups"],
        "model": dict(net.state_dict()),
        "x": torch.randn(DATA, 5, generator=g).to(dtype),
        "y": torch.randint(3, (DATA,), generator=g),
        "estimator": "SVRG" if "refresh_every" in special else "ControlVariates",
        "refresh_every": 0,
        "order": 1,
        "loader": list(torch.randperm(DATA, generator=g).split([17, 17, 6])),
        "batches": torch.randint(DATA, (STEPS * draws(name), BATCH), generator=g),
        "steps": STEPS,
        "weights": [1.0],
        "create_graph": False,
        "frozen": False,
        "fault": "",
        **special,
        **changes,
    }


class Loss:
    """The mean loss of a minibatch, and what a test has it spoiled to."""

    def __init__(self, job: Job, net: nn.Sequential) -> None:
        self.x, self.y, self.fault = job["x"], job["y"], job["fault"]
        self.net = net
        self.calls = 0

    def __call__(self, batch: Tensor) -> Tensor:
        self.calls += 1
        first, _, last = self.net
        hidden = first(self.x[batch]).tanh()
        # Some minibatches do not reach the bias.
        bias = last.bias if int(batch.min()) < 10 else None
        loss = F.cross_entropy(F.linear(hidden, last.weight, bias), self.y[batch])
        if self.fault == "backward":
            loss.backward()
        if self.fault == "graph":
            return loss.detach()
        if self.fault == "infinite":
            return loss / 0.0
        return loss.expand(2, 3) if self.fault == "shape" else loss


def run_in_python(name: str, job: Job) -> Job:
    net = make_net(job["x"].dtype)
    net.load_state_dict(job["model"])
    sampler = make_sampler(name, net)
    if job["frozen"]:
        net[0].bias.requires_grad_(False)
    loss_fn = Loss(job, net)
    loader = job["loader"]
    options: Job = {"batch_size": lambda batch: 0} if job["fault"] == "size" else {}
    estimator: sg.ControlVariates
    if job["estimator"] == "SVRG":
        options = {**options, "refresh_every": job["refresh_every"]}
        estimator = sg.SVRG(sampler, loss_fn, loader, **options)
    else:
        options["order"] = job["order"]
        estimator = sg.ControlVariates(sampler, loss_fn, **options)
    if "estimated" in job:
        sampler.load_state_dict(job["state"])
        estimator.load_state_dict(job["estimated"])
    elif job["refresh_every"] == 0 and job["fault"] != "anchor":
        estimator.set_anchor(loader)
    if job["fault"] == "frozen":
        net[2].bias.requires_grad_(False)

    batches, losses = iter(job["batches"]), []

    def closure() -> Tensor:
        sampler.zero_grad()
        parts = next(batches).chunk(len(job["weights"]))
        for part, weight in zip(parts, job["weights"], strict=True):
            loss = estimator.backward(
                part, weight=weight, create_graph=job["create_graph"]
            )
        losses.append(loss.detach())
        return loss

    for _ in range(job["steps"]):
        sampler.step(closure)
    return {
        "model": dict(net.state_dict()),
        "state": sampler.state_dict(),
        "estimated": estimator.state_dict(),
        "grads": [
            None if p.grad is None else p.grad.detach() for p in net.parameters()
        ],
        "losses": torch.stack(losses),
        "calls": loss_fn.calls,
    }


def evaluations(name: str, passes: int, steps: int = STEPS) -> int:
    """Of the loss: two for each gradient, three for a pass."""
    parts = len(CHAINS[name][2].get("weights", [1.0]))
    return 3 * passes + 2 * parts * draws(name) * steps


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name in CHAINS
        for dtype in (
            DTYPES if name in ("SGHMC", "EWSG", "SGLD-second") else DTYPES[:1]
        )
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_the_same_bits(name: str, dtype: torch.dtype, run_in_cpp: InCpp) -> None:
    job = make_job(name, dtype)
    expected = run_in_python(name, job)
    moved = expected["model"]["0.weight"] - job["model"]["0.weight"]
    assert moved.abs().max() > 0.01
    every = job["refresh_every"] or STEPS
    assert expected["calls"] == evaluations(name, passes=-(-STEPS // every))
    assert (expected["grads"][1] is None) == job["frozen"]
    if job["sampler"] == "EWSG":
        group = expected["state"]["param_groups"][0]
        assert 0 < group["num_accepted"] < group["num_proposals"]
    assert_same(expected, run_in_cpp(job))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("SGLD", torch.float32),
        ("SGHMC", torch.bfloat16),
        ("EWSG", torch.float32),
        ("SGLD-second", torch.float64),
        ("SGLD-second", torch.bfloat16),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_each_continues_the_others_chain(
    name: str, dtype: torch.dtype, run_in_cpp: InCpp
) -> None:
    job = make_job(name, dtype)
    whole = run_in_python(name, job)
    split = 17  # three steps after an anchor, four before the next
    first = {**job, "steps": split, "batches": job["batches"][: split * draws(name)]}
    rest = {
        **job,
        "steps": STEPS - split,
        "batches": job["batches"][split * draws(name) :],
    }
    begun = {"python": run_in_python(name, first), "cpp": run_in_cpp(first)}
    assert_same(begun["python"], begun["cpp"])
    for start, run in (
        (begun["python"], run_in_cpp),
        (begun["cpp"], lambda job: run_in_python(name, job)),
    ):
        kept = {key: start[key] for key in ("model", "state", "estimated")}
        # The schedule is that of the state, and no pass is made for its sake.
        other = {"refresh_every": 1} if job["refresh_every"] else {}
        done = run({**rest, **kept, **other})
        passes = 2 if job["refresh_every"] else 0  # at steps 21 and 28
        assert done["calls"] == evaluations(name, passes, rest["steps"])
        for key in ("model", "state", "estimated", "grads"):
            assert_same(whole[key], done[key], key)
        assert_same(whole["losses"][split * draws(name) :], done["losses"])


FAULTS: dict[str, tuple[Job, str]] = {
    "anchor": ({}, "ControlVariates has no anchor yet: call set_anchor"),
    "frozen": ({}, "ControlVariates has an anchor for other parameters than the"),
    "size": ({}, r"batch_size returned 0 for a batch \(must be an int >= 1\)"),
    "shape": ({}, r"loss_fn returned a tensor of shape \[2, 3\], expected one number"),
    "graph": ({}, "loss_fn returned a loss without a graph: it must compute it"),
    "backward": ({}, "loss_fn has made gradients: it must return the loss"),
    "infinite": ({}, "the full gradient is not finite: there can be no anchor"),
    "no data": ({"loader": []}, "Invalid loader: it has no data"),
    "order": ({"order": 3}, r"Invalid order: 3 \(must be in \[1, 2\]\)"),
    "graph of order 2": (
        {"order": 2, "create_graph": True},
        r"Invalid create_graph: True \(must be False with order=2, whose",
    ),
    "weight": ({"weights": [-0.5]}, r"Invalid weight: -0\.5 \(must be finite and >="),
    "refresh_every": (
        {"estimator": "SVRG"},
        r"Invalid refresh_every: 0 \(must be >= 1\)",
    ),
    "SVRG": (
        {"estimator": "SVRG", "refresh_every": 3, "loader": []},
        "Invalid loader: it has no data",
    ),
}


def bad_states() -> list[tuple[str, Job, str]]:
    """Chains and jobs with states that are refused, and the messages."""
    done = {}
    for name in ("SGHMC", "SGLD-second"):
        job = make_job(name, torch.float32)
        done[name] = {**job, **run_in_python(name, {**job, "steps": 1})}
    good, second = (done[name]["estimated"] for name in done)
    wrong = [torch.zeros(2), *good["full_grads"][1:]]
    return [
        (name, {**done[name], "estimated": estimated}, message)
        for name, estimated, message in (
            (
                "SGHMC",
                {**good, "anchor": good["anchor"][:2]},
                r"anchor has 2 tensors, expected 4",
            ),
            (
                "SGHMC",
                {**good, "full_grads": wrong},
                r"full_grads of parameter 0 has shape \[2\], expected \[9, 5\]",
            ),
            (
                "SGHMC",
                {**good, "anchor_step": -1},
                r"Invalid anchor_step: -1 \(must be >= 0\)",
            ),
            (
                "SGHMC",
                {**good, "refresh_every": 0},
                r"Invalid refresh_every: 0 \(must be >= 1\)",
            ),
            ("SGHMC", {**good, **second}, "it is of order 2, expected 1"),
            (
                "SGLD-second",
                {key: second[key] for key in ("anchor", "full_grads")},
                "it is of order 1, expected 2",
            ),
            (
                "SGLD-second",
                {**second, "full_hessian": torch.zeros(3, 4)},
                r"full_hessian has shape \[3, 4\], expected \[75, 75\]",
            ),
        )
    ]


def test_the_same_messages(run_in_cpp: InCpp) -> None:
    failing = [
        ("EWSG-fixed", make_job("EWSG-fixed", torch.float32, fault=fault, **changes), m)
        for fault, (changes, m) in FAULTS.items()
    ] + bad_states()
    messages = []
    for name, job, match in failing:
        with pytest.raises((ValueError, RuntimeError), match=match) as error:
            run_in_python(name, job)
        messages.append(in_words_of_cpp(error.value))
    assert run_in_cpp({"failing": [job for _, job, _ in failing]}) == {
        "messages": messages
    }
