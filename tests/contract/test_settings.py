"""Every setting of every sampler: what is out of its range is refused at any time."""

import copy

import pytest
import torch
from every_sampler import Chain, bits
from failed_steps import refused
from short_chains import CLASSES

import torch_sgmcmc as sg

#: What a setting must be, in the words of the error. Words are shown in quotes.
WANTED = {
    **dict.fromkeys(("lr", "prior_precision", "temperature"), "finite and >= 0"),
    **dict.fromkeys(("noise_estimate", "thermostat_rate"), "finite and >= 0"),
    **dict.fromkeys(("num_std", "observation_decay"), "finite and >= 0"),
    "refresh_rate": "finite and >= 0",
    **dict.fromkeys(("num_data", "step_size", "trajectory_length"), "finite and > 0"),
    **dict.fromkeys(("eps", "energy_variance"), "finite and > 0"),
    **dict.fromkeys(("max_variance", "sample_interval"), "finite and > 0"),
    **dict.fromkeys(("momentum", "decay"), "in [0, 1)"),
    "prior_mean": "finite",
    **dict.fromkeys(("resample_momentum_every", "index_chain_length"), ">= 0"),
    "tune_steps": ">= 0",
    **dict.fromkeys(("num_chains", "num_steps", "num_blocks"), ">= 1"),
    **dict.fromkeys(("num_factors", "chunk_size", "subsample_size"), ">= 1"),
    "taylor_order": "in [0, 2]",
    "initial_momentum": "'stationary' or 'zeros'",
    "surrogate": "'momentum', 'zero', 'one' or 'full_momentum'",
    "estimator": "'perturbed' or 'signed'",
    "mass_matrix": "'dense', 'diagonal' or 'identity'",
    **dict.fromkeys(("adapt", "gamma", "metropolis", "replacement"), "a bool"),
    **dict.fromkeys(("adapt_every_step", "persistent_index_chain"), "a bool"),
    "preconditioned": "a bool",
}
#: Samplers without a temperature of 0.
HOT = {sg.SGLRW, sg.MCLMC, sg.EWSG, sg.HMC, sg.HMCECS, sg.SBPS}
NOT_FINITE = (torch.nan, torch.inf, -torch.inf)
#: Numbers that are not in a range, and what is no number.
OUTSIDE = {
    "finite": NOT_FINITE,
    "finite and >= 0": (-1e-9, -1, *NOT_FINITE),
    "finite and > 0": (0, 0.0, -1e-9, *NOT_FINITE),
    "in [0, 1)": (-0.1, 1, 1.0, 1.5, *NOT_FINITE),
    ">= 0": (-1,),
    ">= 1": (0, -1),
    "in [0, 2]": (-1, 3),
}
NO_NUMBER = (None, "0.1", True, 1j, (1.0,), torch.tensor([0.1, 0.1]))
NO_INT = (None, 2.0, True, "5")


def wanted(cls, name):
    if name == "temperature" and cls in HOT:
        return "finite and > 0"
    # Whose subsamples are counted.
    return ">= 1" if (cls, name) == (sg.HMCECS, "num_data") else WANTED[name]


def bad_values(cls, row):
    """Yields values that are refused, and the errors."""
    words = wanted(cls, row.name)
    if row.kind in ("flag", "word"):
        error, values = TypeError, (None, 1, "yes")
        if row.kind == "word":
            error, values = ValueError, ("what?", None, 0)
        for value in values:
            yield value, error, f"{value!r} (must be {words})"
        return
    for value in OUTSIDE[words]:
        yield value, ValueError, f"{value} (must be {words})"
    kind = "an int" if row.kind == "whole" else "a number"
    others = NO_INT if row.kind == "whole" else NO_NUMBER
    # HMC-ECS chooses a step size itself.
    may_be_none = row.optional or (cls, row.name) == (sg.HMCECS, "step_size")
    # Means may be tensors.
    for value in ("0.1", True) if row.name == "prior_mean" else others:
        if value is None and may_be_none:
            continue
        if "online" in row.words and isinstance(value, str):
            yield value, ValueError, f"{value!r} (must be a number or 'online')"
            continue
        given = type(value).__name__
        yield value, TypeError, f"{value!r} (must be {kind}, got {given})"


def given_to(sampler):
    """Returns the arguments of the constructor."""
    group, names = sampler.param_groups[0], {r.name for r in sampler._SPEC.settings}
    return {name: group[name] for name in names} | {"seed": 5}


@pytest.mark.parametrize(
    ("cls", "name"), [(cls, r.name) for cls in CLASSES for r in cls._SPEC.settings]
)
def test_what_is_out_of_range_is_refused(cls, name):
    (row,) = (row for row in cls._SPEC.settings if row.name == name)
    chain = Chain(cls.__name__)
    sampler, given = chain.sampler, given_to(chain.sampler)
    chain.run(range(2))
    good = copy.deepcopy(sampler.state_dict())
    before = bits([chain.params, good])
    last = sampler.param_groups[-1]
    which = slice(None) if name in cls._SPEC.shared else slice(-1, None)
    some = sampler.param_groups[which]
    for value, error, text in bad_values(cls, row):
        text = f"Invalid {name}: {text}"
        with refused(error, text):
            cls([torch.ones(3, requires_grad=True)], **{**given, name: value})
        group = {"params": [torch.ones(3, requires_grad=True)], name: value}
        if name not in cls._SPEC.shared:
            with refused(error, text):
                cls([{"params": [torch.zeros(2, requires_grad=True)]}, group], **given)
            with refused(error, text):
                sampler.add_param_group(group)
        state = copy.deepcopy(good)
        for group in state["param_groups"][which]:
            group[name] = value
        with refused(error, text):
            sampler.load_state_dict(state)
        assert bits([chain.params, sampler.state_dict()]) == before
        # Set between steps: another group does not move either.
        former = last[name]
        for group in some:
            group[name] = value
        for _ in range(2):
            with refused(error, text):
                chain.run(range(2, 3))
        if cls is sg.HMC:
            with refused(error, text):
                sampler.warmup(lambda: pytest.fail("it was called"), 1)
        for group in some:
            group[name] = former
        assert bits([chain.params, sampler.state_dict()]) == before
    chain.run(range(2, 4))
    assert int(sampler.param_groups[0]["step"]) == 4
