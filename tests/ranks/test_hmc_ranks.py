"""HMC in several processes; SBPS and HMC-ECS, which decide alone, are refused there."""

from pathlib import Path

import hmc_rank_programs
import hmc_ranks
import pytest
import torch
from launch import on_ranks
from reference import assert_same_bits

pytestmark = pytest.mark.full

#: What the program has found on each rank.
ranks = on_ranks(Path(hmc_rank_programs.__file__))


@pytest.mark.parametrize("kind", [*hmc_ranks.KINDS, "all data", "gone on"])
def test_ranks_of_hmc_stay_equal(ranks, kind):
    for rank in ranks[1:]:
        assert_same_bits(rank["HMC"][kind], ranks[0]["HMC"][kind])


@pytest.mark.parametrize("kind", hmc_ranks.KINDS)
def test_ranks_of_hmc_sample_what_one_process_samples(ranks, kind, one_thread):
    """Though their shares of the data are of different sizes."""
    found = ranks[0]["HMC"][kind]
    group = found["groups"][0]
    expected = hmc_ranks.one_chain(kind, 0, 1, int(group["seed"]))
    ours, theirs = found["groups"][0], expected["groups"][0]
    assert all(ours[k] == theirs[k] for k in ours if k.startswith("num_"))
    torch.testing.assert_close(found["draws"], expected["draws"], **hmc_ranks.ROUNDED)
    assert group["step"] == hmc_ranks.STEPS
    if kind != "untested":  # something has been decided on
        assert 0.3 < group["num_accepted"] / hmc_ranks.STEPS < 0.9


def test_a_chain_of_hmc_resumes_from_a_state_dict(ranks):
    for rank in ranks:
        assert_same_bits(rank["HMC"]["gone on"], rank["HMC"]["kept"])


def test_all_data_of_hmc_on_each_rank(ranks, one_thread):
    """The mean of equal numbers is that number: the bits are those of one process."""
    assert_same_bits(ranks[0]["HMC"]["all data"], hmc_ranks.all_data_on_each(1))


def test_a_group_of_one(ranks, one_thread):
    for number, rank in enumerate(ranks):
        assert_same_bits(rank["HMC"]["alone"], hmc_ranks.alone(number))
        for name in ("SBPS", "HMCECS"):
            assert_same_bits(rank[name]["alone"], hmc_rank_programs.alone(name))


@pytest.mark.parametrize(
    ("name", "by"), [("SBPS", "minibatches"), ("HMCECS", "subsamples")]
)
def test_what_decides_alone_is_refused(ranks, name, by):
    """Raises in the constructor, or for a later group in its first step."""
    message = (
        f"{name} cannot run in a process group of {len(ranks)} ranks: each would go by "
        f"its own {by}, and replicas would drift apart. Give each rank its own chain, "
        "with a process_group of that rank alone"
    )
    for rank in ranks:
        assert rank[name]["refused"] == message
        assert rank[name]["refused later"] == message
