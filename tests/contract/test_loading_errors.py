"""State dicts, masses and preconditioners that do not fit are refused."""

import copy

import pytest
import torch
from every_sampler import Chain, bits
from failed_steps import refused
from torch import nn

import torch_sgmcmc as sg

each_kind = pytest.mark.parametrize("kind", [sg.SGLD, sg.SGHMC, sg.EWSG])
SIZES = (4, 200, 3)


def make(kind, sizes=SIZES, split=1):
    params = [nn.Parameter(torch.ones(n)) for n in sizes]

    def closure():
        for p in params:
            p.grad = torch.ones_like(p)

    groups = [{"params": params[:split]}, {"params": params[split:]}]
    options = {"gamma": False} if kind is sg.PSGLD else {}
    sampler = kind(groups, lr=0.1, num_data=10, seed=0, **options)
    sampler.step(closure)
    return sampler


def refuses(sampler, state, message):
    before = copy.deepcopy(sampler.state_dict())
    with refused(ValueError, message):
        sampler.load_state_dict(state)
    after = sampler.state_dict()
    assert after["param_groups"] == before["param_groups"]
    torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)


@each_kind
def test_states_of_other_parameters(kind):
    one_group = kind([nn.Parameter(torch.ones(4))], lr=0.1, num_data=10)
    sizes = "sizes ([300, 3], expected [200, 3])"
    for other, message in (
        (one_group, "it has 1 param groups, expected 2"),
        (make(kind, split=2), "param group 0 has 2 parameters, expected 1"),
        (
            make(kind, sizes=(4, 300, 3)),
            f"param group 1 was saved for parameters of other {sizes}",
        ),
    ):
        refuses(make(kind), other.state_dict(), f"Invalid state_dict: {message}")


FOREIGN = [
    (sg.SGLD, lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9)),
    (sg.SGHMC, lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9)),
    (sg.SGHMC, lambda groups: torch.optim.Adam(groups, lr=0.1)),
    (sg.PSGLD, lambda groups: torch.optim.RMSprop(groups, lr=0.1)),
]


@pytest.mark.parametrize(("kind", "optimizer"), FOREIGN)
def test_another_kind_of_optimizer(kind, optimizer):
    groups = [
        {"params": [nn.Parameter(torch.ones(4))]},
        {"params": [nn.Parameter(torch.ones(n)) for n in (200, 3)]},
    ]
    sampler, state = make(kind), optimizer(groups).state_dict()
    ours, theirs = (
        each["param_groups"][0].keys() for each in (sampler.state_dict(), state)
    )
    what = f"lacks {', '.join(sorted(ours - theirs))}"
    refuses(
        sampler,
        state,
        f"Invalid state_dict: param group 0 {what}; it is not one of {kind.__name__}",
    )


def hyperprior(**options):
    return sg.GammaPrecision(make(sg.SGLD), **options)


def test_a_precision_without_a_law():
    """A shape below 1 at a low temperature."""
    sampler = sg.SGLD([torch.nn.Parameter(torch.ones(1))], 0.1, num_data=1, seed=0)
    sampler.param_groups[0]["temperature"] = 0.1
    with pytest.raises(ValueError, match=r"0.1 .*group 0's .* no finite integral"):
        sg.GammaPrecision(sampler, shape=0.1).step()


@pytest.mark.parametrize("name", ["shape", "rate"])
def test_gamma_precision_arguments(name):
    sampler = make(sg.SGLD)
    for value in (0, -1.0, torch.inf, torch.nan):
        with refused(ValueError, f"Invalid {name}: {value} (must be finite and > 0)"):
            sg.GammaPrecision(sampler, **{name: value})
    with refused(TypeError, f"Invalid {name}: '1' (must be a number, got str)"):
        sg.GammaPrecision(sampler, **{name: "1"})


def test_gamma_precision_needs_a_sampler():
    sgd = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with refused(
        TypeError, "Invalid sampler: got SGD (must be a torch_sgmcmc sampler)"
    ):
        sg.GammaPrecision(sgd)


def test_gamma_precision_of_some_groups():
    """Others keep their precision; each group's draw is that of all groups' update."""
    every, some = hyperprior(), hyperprior(groups=[1])
    second = some.sampler.param_groups[1]
    for _ in range(2):
        assert some.step() == every.step()[1:] == [second["prior_precision"]]
    assert [g["prior_precision"] > 0 for g in some.sampler.param_groups] == [0, 1]
    some.sampler.param_groups[0]["temperature"] = 0.0
    some.step()  # a group without a hyperprior
    again = hyperprior(groups=[1])
    again.load_state_dict(some.state_dict())
    assert again.num_updates == 3 and "groups" not in every.state_dict()
    with refused(ValueError, "Invalid groups: [1] (the state_dict has [0, 1])"):
        again.load_state_dict(every.state_dict())
    for groups in ([2], [-1], [0, 0], []):
        wanted = f"Invalid groups: {groups} (must be some of [0, 1], each once)"
        with refused(ValueError, wanted):
            hyperprior(groups=groups)


def test_gamma_precision_at_temperature_zero():
    precision = hyperprior()
    groups = precision.sampler.param_groups
    groups[1]["temperature"] = 0.0
    with refused(ValueError, "Invalid temperature: 0.0 (must be finite and > 0)"):
        precision.step()
    assert [g["prior_precision"] for g in groups] == [0.0, 0.0]
    assert precision.num_updates == 0


def test_gamma_precision_state_dicts_that_do_not_fit():
    precision = hyperprior()
    precision.step()
    good = precision.state_dict()
    for key, value, kind, wanted in (
        ("shape", -1.0, ValueError, "must be finite and > 0"),
        ("rate", 0.0, ValueError, "must be finite and > 0"),
        ("num_updates", -1, ValueError, "must be >= 0"),
        ("num_updates", 2**63 - 1, ValueError, "must be in [0, 2^62)"),
        ("num_updates", 1.0, TypeError, "must be an int, got float"),
    ):
        with refused(kind, f"Invalid {key}: {value} ({wanted})"):
            precision.load_state_dict({**good, "shape": 3.0, key: value})
        assert precision.state_dict() == good


def vars_of(sampler):
    return {"p": sampler.param_groups[0]["params"][0]}


@pytest.mark.parametrize(
    ("make_owner", "key"),
    [
        (lambda _: sg.IndependentBatchSampler(9, 3, seed=0), "seed"),
        (sg.GammaPrecision, "shape"),
        (sg.TemperatureMonitor, "every"),
        (lambda s: sg.CyclicalSchedule(s, 4), "last_epoch"),
        (lambda s: sg.PolynomialDecay(s, 4), "last_epoch"),
        (lambda s: sg.ControlVariates(s, len), "anchor"),
        (lambda s: sg.SVRG(s, len, [0], refresh_every=3), "anchor_step"),
        (lambda s: sg.Collector(s, vars_of(s), sg.SampleStore()), "position"),
    ],
)
def test_state_dicts_of_other_objects(make_owner, key):
    sampler = sg.SGLD([nn.Parameter(torch.ones(3))], 0.1, num_data=9, seed=0)
    owner = make_owner(sampler)
    before = copy.deepcopy(owner.state_dict())
    kind = type(owner).__name__
    for other in ({}, {"state": {}, "param_groups": []}, None):
        with refused(
            ValueError, f"Invalid state_dict: it lacks {key!r} (must be of a {kind})"
        ):
            owner.load_state_dict(other)
    for lacking in before.keys() - {
        "start",
        "energy",
        "interval",
    }:  # which older ones lack
        if key != "last_epoch" or lacking in ("b", "temperatures"):
            with pytest.raises(ValueError, match=f"it lacks '{lacking}'"):
                owner.load_state_dict({k: before[k] for k in before if k != lacking})
    assert owner.state_dict() == before


#: To whom each is given, how, and its key in the state.
GIVEN = {
    "masses": ("HMC", sg.HMC.set_mass, "mass"),
    "preconditioner": (
        "SBPS preconditioned",
        sg.SBPS.set_preconditioner,
        "preconditioner",
    ),
}
each_given = pytest.mark.parametrize("name", GIVEN)


WRONG = (0.0, -1.0, torch.nan, torch.inf)
OUT_OF_RANGE = "has elements out of range (must be finite and > 0)"


@pytest.mark.parametrize("steps", [0, 4])
@each_given
def test_bad_ones_change_nothing(name, steps):
    kind, set_all, _ = GIVEN[name]
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
            set_all(chain.sampler, tensors)
        assert bits(chain.sampler.state_dict()) == before
    rest = range(steps, steps + 4)
    assert bits(chain.run(rest)) == bits(twin.run(rest))


@each_given
def test_a_state_dict_with_a_bad_one(name):
    kind, set_all, key = GIVEN[name]
    sampler = Chain(kind).sampler
    set_all(sampler, [2.0, 3.0, 4.0])
    saved = copy.deepcopy(sampler.state_dict())
    for number in WRONG:
        saved["state"][1][key][7] = number
        words = f"Invalid state_dict: {key} of parameter 1 {OUT_OF_RANGE}"
        with refused(ValueError, words):
            Chain(kind).sampler.load_state_dict(saved)
