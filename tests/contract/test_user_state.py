"""Masses and preconditioners that users give: what is refused."""

import copy

import pytest
import torch
from every_sampler import Chain, bits
from failed_steps import refused

#: To whom each is given, how, and its key in the state.
GIVEN = {
    "masses": ("HMC", lambda sampler: sampler.set_mass, "mass"),
    "preconditioner": (
        "SBPS preconditioned",
        lambda sampler: sampler.set_preconditioner,
        "preconditioner",
    ),
}
each_given = pytest.mark.parametrize("name", GIVEN)


WRONG = (0.0, -1.0, torch.nan, torch.inf)
OUT_OF_RANGE = "has elements out of range (must be finite and > 0)"


@pytest.mark.parametrize("steps", [0, 4])
@each_given
def test_bad_ones_change_nothing(name, steps):
    kind, setter_of, _ = GIVEN[name]
    chain, twin = Chain(kind), Chain(kind)
    for each in (chain, twin):
        each.run(range(steps))
    before = bits(chain.sampler.state_dict())
    for tensors, message in (
        ([1.0], "1 (must be one for each of the 3 parameters)"),
        ([1.0, 1.0, torch.ones(3)], "number 2 has shape [3] (must broadcast to [4])"),
        *(
            ([torch.tensor([1.0, number, 1.0]), 1.0, 1.0], f"number 0 {OUT_OF_RANGE}")
            for number in WRONG
        ),
    ):
        with refused(ValueError, f"Invalid {name}: {message}"):
            setter_of(chain.sampler)(tensors)
        assert bits(chain.sampler.state_dict()) == before
    rest = range(steps, steps + 4)
    assert bits(chain.run(rest)) == bits(twin.run(rest))


@each_given
def test_a_state_dict_with_a_bad_one(name):
    kind, setter_of, key = GIVEN[name]
    sampler = Chain(kind).sampler
    setter_of(sampler)([2.0, 3.0, 4.0])
    saved = copy.deepcopy(sampler.state_dict())
    for number in WRONG:
        saved["state"][1][key][7] = number
        words = f"Invalid state_dict: {key} of parameter 1 {OUT_OF_RANGE}"
        with refused(ValueError, words):
            Chain(kind).sampler.load_state_dict(saved)
