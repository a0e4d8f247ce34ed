"""Samplers that decide for all ranks: HMC, HMC-ECS and SBPS in several processes.

Each has its share of the data, or evaluates a part of each subsample or minibatch.
"""

from itertools import product
from pathlib import Path
from typing import Any

import deciding_ranks
import hmc_ranks
import hmcecs_ranks
import pytest
import sbps_ranks
import torch
from deciding_ranks import SAMPLERS
from launch import on_ranks
from reference import assert_same_bits

#: What the program has found on each rank.
ranks = on_ranks(Path(deciding_ranks.__file__))
EACH = pytest.mark.parametrize("name", SAMPLERS)
#: Of proposals, so many parts are accepted.
ACCEPTED = {"HMC": (0.3, 0.9), "HMCECS": (0.2, 1.0)}
KINDS = [(name, kind) for name in SAMPLERS for kind in SAMPLERS[name].KINDS]
MORE = [
    *product(["HMC"], ["chains", "all data", "gone on"]),
    *product(["HMCECS"], ["warmed up", "gone on"]),
    ("SBPS", "bfloat16"),
]


def counts(found: dict[str, Any]) -> dict[str, int]:
    group = found["groups"][0]
    return {k: v for k, v in group.items() if k.startswith("num_")}


@pytest.mark.parametrize(("name", "kind"), [*KINDS, *MORE])
def test_ranks_stay_equal(ranks: Any, name: str, kind: str) -> None:
    for rank in ranks[1:]:
        assert_same_bits(rank[name][kind], ranks[0][name][kind])
    if name == "SBPS":
        assert counts(ranks[0][name][kind])["num_bounces"] > 10


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_ranks_sample_what_one_process_samples(
    ranks: Any, name: str, kind: str, one_thread: None
) -> None:
    """Though their parts of the data are of different sizes."""
    sampler, found = SAMPLERS[name], ranks[0][name][kind]
    group = found["groups"][0]
    expected = sampler.one_chain(kind, 0, 1, group["seed"])
    assert counts(found) == counts(expected)
    for key in sampler.COMPARED:
        torch.testing.assert_close(found[key], expected[key], **sampler.ROUNDED)
    # Something has been decided on, and minibatches have varied.
    if name == "SBPS":
        assert group["num_bounces"] > 20 and group["num_samples"] > 100
        assert group["num_derivatives"] == sbps_ranks.BATCH_SIZE * sbps_ranks.EVENTS
    else:
        assert group["step"] == sampler.STEPS
        low, high = ACCEPTED[name]
        if kind != "untested":
            assert low < group["num_accepted"] / sampler.STEPS < high


@EACH
def test_ranks_agree_on_a_seed(ranks: Any, name: str) -> None:
    assert len({rank[name]["seed"] for rank in ranks}) == 1


@pytest.mark.parametrize(
    ("name", "kind"),
    [("HMC", "kept"), ("HMCECS", "perturbed"), ("SBPS", "forward mode")],
)
def test_a_chain_goes_on_from_a_state_dict(ranks: Any, name: str, kind: str) -> None:
    for rank in ranks:
        whole, parts = rank[name][kind], rank[name]["gone on"]
        for key in whole.keys() - {"groups", "means"}:  # means are of the second half
            assert_same_bits(parts[key], whole[key])
        for one, other in zip(parts["groups"], whole["groups"], strict=True):
            # HMC-ECS counts those of its own object.
            uncounted = {"num_evaluations": None}
            assert_same_bits(one | uncounted, other | uncounted)


@EACH
def test_a_group_of_one(ranks: Any, name: str, one_thread: None) -> None:
    for number, rank in enumerate(ranks):
        assert_same_bits(rank[name]["alone"], SAMPLERS[name].alone(number))


# ---- What one rank sees --------------------------------------------------------------

NOTHING = "nothing was raised"
STOOD = {"stood still": True, "step": 0, "num_skipped": 0}
OF_HMC = {**STOOD, "num_divergences": 0}


def start(name: str, what: str, of: str) -> str:
    return f"{name} got {what} or parameters that are not finite at the start of a {of}"


def test_what_is_not_finite_on_one_rank_all_ranks_go_by(ranks: Any) -> None:
    at_start = start("HMC", "a loss", "trajectory")
    diverged = {**OF_HMC, "message": NOTHING, "step": 1, "num_divergences": 1}
    bad = sbps_ranks.BATCH_SIZE - 2 * (len(ranks) - 1)
    for rank in ranks:
        found = {name: dict(rank[name]["not finite"]) for name in SAMPLERS}
        gradient = found["HMC"].pop("gradient")
        message = gradient.pop("message")
        assert message.startswith("HMC got a gradient that is not finite: ")
        assert gradient == OF_HMC
        assert found["HMC"] == {
            "end": diverged,
            "gradient at the end": diverged,
            "start": {**OF_HMC, "message": at_start},
            "start skipped": {**OF_HMC, "message": NOTHING, "num_skipped": 1},
        }
        at_start_of_ecs = start("HMCECS", "log-likelihoods", "step")
        ecs = {key: OF_HMC | value for key, value in found["HMCECS"].items()}
        assert ecs == {
            "raise": {**OF_HMC, "message": at_start_of_ecs},
            "skip": {**OF_HMC, "message": NOTHING, "num_skipped": 1},
        }
        assert found["SBPS"] == {
            "losses raise": {
                **STOOD,
                "message": f"SBPS got {bad} of 11 losses from the closure that are not "
                "finite",
            },
            "losses skip": {**STOOD, "message": NOTHING, "num_skipped": 1},
            "slopes raise": {
                **STOOD,
                "message": "SBPS got losses from the closure whose derivatives are not "
                "finite",
            },
            "number raise": {
                **STOOD,
                "message": "SBPS got the losses of 11 examples from the closure, and "
                "num_data = 10 (must not be more; if examples are drawn with "
                "replacement, set replacement=True)",
            },
        }


#: In what ranks may differ, and what they are to be given.
DIFFERENCES = {
    "HMC": ("parameters or momenta", "averaged gradients", 2),
    "HMCECS": ("parameters, subsamples or settings", "one state", 6),
    "SBPS": ("parameters, velocities or settings", "one state", 6),
}


@EACH
def test_ranks_that_do_not_sample_one_chain(ranks: Any, name: str) -> None:
    """They are told so, before any of them decides, and have not moved."""
    what, needed, number = DIFFERENCES[name]
    message = (
        f"{name} cannot decide for the {len(ranks)} ranks of its process group: they "
        f"differ in {what}. Give them one seed and {needed} (check_replicas() says "
        "which differ), or each chain a process_group of its own"
    )
    for rank in ranks:
        assert len(rank[name]["unlike"]) == number
        for found in rank[name]["unlike"].values():
            assert found.pop("num_divergences", 0) == 0
            assert found == {**STOOD, "message": message}


@EACH
def test_a_closure_that_raises_leaves_no_rank_waiting(ranks: Any, name: str) -> None:
    """Those that wait for its values put their parameters back, too."""
    messages = []
    for rank in ranks:
        found = dict(rank[name]["raising"])
        messages.append(found.pop("message"))
        assert found.pop("calls") == {"HMC": 4, "HMCECS": 3, "SBPS": 1}[name]
        assert found.pop("num_divergences", 0) == 0
        assert found == STOOD
    *others, last = messages
    assert last == "the closure's own"
    assert all("gloo" in message for message in others)


# ---- One sampler's own ---------------------------------------------------------------


def test_many_chains_of_hmc(ranks: Any, one_thread: None) -> None:
    found, expected = ranks[0]["HMC"]["chains"], hmc_ranks.many_chains(0, 1)
    assert counts(found) == counts(expected)
    rounded = hmc_ranks.ROUNDED
    torch.testing.assert_close(found["draws"], expected["draws"], **rounded)
    group = found["groups"][0]
    assert 0.3 < group["num_accepted"] / group["num_trajectories"] < 0.9


def test_a_warm_up_of_hmc_is_the_first_to_see_other_ranks(
    ranks: Any, one_thread: None
) -> None:
    """They then agree on the first one's seed, and on the step size."""
    found = [rank["HMC"] for rank in ranks]
    assert found[0]["drawn seed"] != found[1]["drawn seed"]
    step_size, chain = found[0]["warm-up"]
    for rank in found:
        assert rank["late seed"] == found[0]["drawn seed"]
        assert rank["warm-up"][0] == step_size
        assert_same_bits(rank["warm-up"][1], chain)
    model = hmc_ranks.network(1)
    sampler = hmc_ranks.make("drawn", model, seed=found[0]["late seed"])
    expected, draws = hmc_ranks.warmed_up(0, 1, model, sampler)
    assert step_size == pytest.approx(expected, rel=1e-9)
    rounded = hmc_ranks.ROUNDED
    torch.testing.assert_close(chain["draws"], draws["draws"], **rounded)


def test_all_data_of_hmc_on_each_rank(ranks: Any, one_thread: None) -> None:
    """The mean of equal numbers is that number: the bits are those of one process."""
    assert_same_bits(ranks[0]["HMC"]["all data"], hmc_ranks.all_data_on_each(1))


def test_a_warm_up_of_hmcecs(ranks: Any, one_thread: None) -> None:
    """θ*, mass, step size and the subsample's size are those of one process."""
    found, expected = ranks[0]["HMCECS"]["warmed up"], hmcecs_ranks.warmed_up()
    assert counts(found) == counts(expected)
    rounded = hmcecs_ranks.ROUNDED
    torch.testing.assert_close(found["draws"], expected["draws"], **rounded)
    group, other = (each["groups"][0] for each in (found, expected))
    for name in ("subsample_size", "num_blocks"):
        assert group[name] == other[name]
    assert group["step_size"] == pytest.approx(other["step_size"], rel=1e-10)
    assert group["num_accepted"] > 0
    before = hmcecs_ranks.KINDS["first order"]["subsample_size"]
    assert group["subsample_size"] > before


def test_each_rank_evaluates_its_part_of_hmcecs_subsample(ranks: Any) -> None:
    """The first call of a step expands a whole block, the others are shared."""
    parts = [rank["HMCECS"]["calls"] for rank in ranks]
    for subsample, expanded, *evaluated in parts:
        assert torch.equal(expanded, subsample)
        assert len(evaluated) > 1
    for calls in zip(*(part[2:] for part in parts), strict=True):
        assert torch.equal(torch.cat(calls), parts[0][0])
        assert max(map(len, calls)) - min(map(len, calls)) == 1
