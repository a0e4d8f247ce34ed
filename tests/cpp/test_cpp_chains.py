"""One chain: C++ and Python give the same bits, and continue each other's."""

from itertools import product

import pytest
import torch
from harness import cpp_jobs as jobs
from harness.exactness import assert_same
from torch import nn

import torch_sgmcmc as sg

pytestmark = pytest.mark.usefixtures("one_thread")


# Of float32 see test_each_continues_the_others_chain.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.bfloat16) for name in jobs.CHAINS),
        *product(jobs.ONE_EACH, (torch.float64, torch.float16)),
    ],
    ids=str,
)
def test_the_same_bits(name, dtype, run_in_cpp):
    steps = 480 if "SBPS" in name else 120  # some of its events are bounces
    job = jobs.first_steps(jobs.make_job(name, dtype), name, steps)
    expected = jobs.run_in_python(name, job)
    moved = expected["model"]["0.weight"] - job["model"]["0.weight"]
    assert moved.abs().max() > 0.01
    group = expected["state"]["param_groups"][0]
    if "num_bounces" in group:
        assert 20 < group["num_bounces"] < group["num_proposals"]
    if "num_accepted" in group:
        proposals = group["num_proposals"]
        if proposals > 0:
            assert 0.05 < group["num_accepted"] / proposals < 0.95
    assert_same(expected, run_in_cpp(job))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", jobs.SHORT)
def test_the_same_bits_of_a_few_steps(name, dtype, run_in_cpp):
    job = jobs.first_steps(jobs.make_job(name, dtype), name, 40)
    assert_same(jobs.run_in_python(name, job), run_in_cpp(job))


@pytest.mark.parametrize("name", jobs.CHAINS)
def test_each_continues_the_others_chain(name, run_in_cpp):
    job = jobs.make_job(name, torch.float32)
    job["gibbs_every"] //= 5
    # Missing gradients, comparisons and Gibbs updates fall on the same steps as in
    # the whole.
    split, steps = 7 * 20, 160
    first, rest = (
        jobs.first_steps(job, name, split),
        jobs.steps_from(job, name, split, steps),
    )
    whole = jobs.run_in_python(name, jobs.first_steps(job, name, steps))

    begun = jobs.run_in_python(name, first)
    assert_same(whole, run_in_cpp({**rest, **begun}))

    begun = run_in_cpp(first)
    assert_same(whole, jobs.run_in_python(name, {**rest, **begun}))


def test_a_checkpoint_of_a_gpu_is_read_without_one(run_in_cpp, monkeypatch):
    name = "SGHMC"
    job = jobs.first_steps(jobs.make_job(name, torch.float32), name)
    begun = jobs.run_in_python(name, job)
    expected = jobs.run_in_python(name, {**job, **begun})
    # torch.save has it written to the file that storages are a GPU's.
    monkeypatch.setattr(torch.serialization, "location_tag", lambda _: "cuda:0")
    assert_same(expected, run_in_cpp({**job, **begun}))


@pytest.mark.parametrize("name", jobs.CHAINS)
def test_priors_about_other_places(name, run_in_cpp):
    """Means that C++ was given, and those of a state dict that it continues."""
    dtype = torch.bfloat16 if name == "SGHMC" else torch.float32
    net = jobs.make_net(name, dtype)
    means = [0.5 + p.detach().float() for p in net[2].parameters()]
    job = jobs.make_job(name, dtype, means)
    job["gibbs_every"] //= 2
    plain, rest = jobs.first_steps(job, name, 70), jobs.steps_from(job, name, 70, 120)
    begun = jobs.run_in_python(name, plain)
    for i, mean in enumerate(means):
        assert torch.equal(begun["state"]["state"][2 + i]["prior_mean"], mean)
    assert_same(begun, run_in_cpp(plain))
    del rest["means"]
    assert_same(
        jobs.run_in_python(name, {**rest, **begun}), run_in_cpp({**rest, **begun})
    )


@pytest.mark.parametrize("name", jobs.FAULTY)
def test_steps_that_are_skipped(name, run_in_cpp):
    job = jobs.make_faulty_job(name, "skip")
    expected = jobs.run_in_python(name, job)
    group = expected["state"]["param_groups"][0]
    assert 3 < group["num_skipped"] == 200 - group["step"] < 80
    assert_same(expected, run_in_cpp(job))


@pytest.mark.parametrize("name", [*jobs.ONE_EACH, "SGHMC-online", "PSBPS"])
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [(torch.float32, torch.float64), (torch.float64, torch.bfloat16)],
)
def test_a_state_of_another_precision(name, saved, loaded, run_in_cpp):
    begun = jobs.run_in_python(name, jobs.first_steps(jobs.make_job(name, saved), name))
    begun["model"] = {key: value.to(loaded) for key, value in begun["model"].items()}
    # What torch and its schedulers keep there, and users, is none of C++'s business.
    for group in begun["state"]["param_groups"]:
        group.update(initial_lr=0.1, differentiable=False, name="layer", my_own=None)
        if "lr" in group:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)
    job = {**jobs.first_steps(jobs.make_job(name, loaded), name), **begun}
    expected = jobs.run_in_python(name, job)
    for group in expected["state"]["param_groups"]:
        for key in ("initial_lr", "differentiable", "name", "my_own"):
            group.pop(key)
    assert_same(expected, run_in_cpp(job))


def test_the_same_seed_from_torchs_generator(run_in_cpp):
    job = {
        **jobs.first_steps(jobs.make_job("SGLD", torch.float32), "SGLD", 1),
        "seed": None,
    }
    drawn = run_in_cpp(job)["state"]["param_groups"][0]["seed"]
    torch.manual_seed(0)
    assert drawn == sg.SGLD([nn.Parameter(torch.zeros(1))], lr=1, num_data=1).seed
