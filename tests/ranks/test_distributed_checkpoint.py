"""torch.distributed.checkpoint saves and loads samplers, and never advances a chain."""

import copy

import pytest
import short_chains as chains
import torch
import torch.distributed.checkpoint as dcp
from reference import assert_same_bits
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import torch_sgmcmc as sg
from torch_sgmcmc.core.context import context_of
from torch_sgmcmc.core.groups import fill_state, show_values
from torch_sgmcmc.core.state import given

ALL = [*chains.KINDS, "SBPS", "pSBPS", "pSBPS given"]
EACH = pytest.mark.parametrize("kind", ALL)
# No state has been made before the first step, nor is there ever any of SGLD.
SAVED_AFTER = pytest.mark.parametrize("steps", [0, 3])
GROWS = "EWSG persistent"  # its list of minibatches; SBPS's clock and a tuning do, too
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)

pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(3)
        self.weight = nn.Parameter(torch.randn(7, 5, generator=g))
        self.frozen = nn.Parameter(torch.randn(3, generator=g), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(5, generator=g).bfloat16())

    def trained(self):
        return [self.weight, self.bias]


def groups(net):
    return [{"params": [net.weight, net.frozen]}, {"params": [net.bias]}]


def sampler_of(kind, net):
    if "SBPS" in kind:
        target = {key: value for key, value in chains.TARGET.items() if key != "lr"}
        target = {**target, "preconditioned": "pSBPS" in kind}
        sampler = sg.SBPS(groups(net), **target, seed=5)
        if "given" in kind:
            sampler.set_preconditioner([0.5, 1.0, torch.linspace(1, 2, 5)])
        return sampler
    return chains.make(kind, groups(net))


def stranger_of(sampler, net):
    """A sampler with another seed and other hyperparameters, and the same state."""
    if isinstance(sampler, sg.SBPS):
        twin = sg.SBPS(groups(net), num_data=1, seed=99)
    else:
        # torch loads what is there to be filled.
        has_means = any("prior_mean" in given(s) for s in sampler.state.values())
        own = chains.with_means(groups(net)) if has_means else groups(net)
        twin = chains.twin_of(sampler, own)
        for p in net.trained() if has_means else ():
            twin.state[p]["prior_mean"].fill_(9.0)
    layout = ("preconditioned", "noise_estimate", "resample_momentum_every", "adapt")
    for ours, theirs in zip(twin.param_groups, sampler.param_groups, strict=True):
        for key in (*layout, "gamma", "momentum", "capturable"):
            if key in theirs:
                ours[key] = theirs[key]
        for key in ("step", "num_skipped"):
            if torch.is_tensor(theirs[key]):
                ours[key] = torch.zeros_like(theirs[key])
    show_values(context_of(twin))  # so that counters are where the other has them
    if twin._SPEC.needs_closure:  # its state is that of its settings
        fill_state(twin)
    if any("preconditioner" in given(state) for state in sampler.state.values()):
        assert isinstance(twin, sg.SBPS)
        twin.set_preconditioner([9.0, 1.0, 9.0])
    return twin


def advance(sampler, net, steps):
    for step in steps:
        calls = iter(range(100))

        def closure(step=step, calls=calls):
            if isinstance(sampler, sg.SBPS):
                total = sum(p.float().square().sum() for p in net.trained())
                return total * torch.linspace(0.4, 0.6, 8)
            chains.set_grads(
                net.trained(), *chains.minibatch_of(sampler, step, next(calls))
            )
            halves = [p.detach().double().square().sum() / 2 for p in net.trained()]
            return torch.stack(halves).sum()

        sampler.step(closure)
    sampler.zero_grad()


def saved_groups(sampler):
    """The groups of a state dict, without records of a chain at its start: blank."""
    records = sampler._SPEC.records if sampler.param_groups[0]["step"] == 0 else ()
    groups = copy.deepcopy(sampler.state_dict()["param_groups"])
    for group in groups:
        for key in records:
            record = group.pop(key)
            assert record is None or not any(record)
    return groups


def assert_same_chain(one, other):
    assert_same_bits([*one[0].parameters()], [*other[0].parameters()])
    ours, theirs = (sampler.state_dict() for _, sampler in (one, other))
    assert_same_bits(saved_groups(one[1]), saved_groups(other[1]))
    if int(one[1].param_groups[0]["step"]) > 0:  # before, state is blank or none
        states = [
            {index: state for index, state in each["state"].items() if state}
            for each in (ours, theirs)  # torch may add empty ones
        ]
        assert_same_bits(*states)


@EACH
@SAVED_AFTER
def test_saving_never_advances_the_chain(kind, steps):
    nets = Net(), Net()
    saved, untouched = (sampler_of(kind, net) for net in nets)
    for sampler, net in zip((saved, untouched), nets, strict=True):
        advance(sampler, net, range(steps))
    before = saved_groups(saved)
    for options in (None, FLAT):
        get_optimizer_state_dict(nets[0], saved, options=options)
        get_state_dict(nets[0], saved, options=options)
    assert_same_chain((nets[0], saved), (nets[1], untouched))
    assert before == saved_groups(saved)
    for sampler, net in zip((saved, untouched), nets, strict=True):
        advance(sampler, net, range(steps, steps + 4))
    assert_same_chain((nets[0], saved), (nets[1], untouched))


# Of whose parameters only those in bf16 and fp16 have state: torch would miss that of
# the others.
WITH_MASTERS_ALONE = (*chains.PLAIN, "EWSG overdamped", "HMC")


@EACH
@pytest.mark.parametrize(("steps", "options"), [(0, None), (3, FLAT)])
def test_a_loaded_chain_continues_bit_for_bit(kind, steps, options, tmp_path):
    if options is None and kind in WITH_MASTERS_ALONE:
        options = StateDictOptions(strict=False)
    net = Net()
    sampler = sampler_of(kind, net)
    advance(sampler, net, range(steps))
    model_state, state = get_state_dict(net, sampler, options=options)
    dcp.save({"model": model_state, "sampler": state}, checkpoint_id=tmp_path)

    loaded = Net()
    with torch.no_grad():
        for p in loaded.parameters():
            p.zero_()
    other = stranger_of(sampler, loaded)
    model_state, state = get_state_dict(loaded, other, options=options)
    dcp.load({"model": model_state, "sampler": state}, checkpoint_id=tmp_path)
    states = {"model_state_dict": model_state, "optim_state_dict": state}
    set_state_dict(loaded, other, **states, options=options)
    assert_same_chain((loaded, other), (net, sampler))
    for some, its in ((sampler, net), (other, loaded)):
        advance(some, its, range(steps, steps + 4))
    assert_same_chain((loaded, other), (net, sampler))


@pytest.mark.parametrize(
    "kind", [k for k in ALL if "SBPS" not in k and k not in ("MCLMC tuning", GROWS)]
)
def test_a_full_state_dict_continues_bit_for_bit(kind):
    """torch gives it the structure of the fresh sampler's: no list may have grown."""
    options = StateDictOptions(full_state_dict=True)
    net, loaded = Net(), Net()
    sampler = sampler_of(kind, net)
    advance(sampler, net, range(3))
    state = copy.deepcopy(get_optimizer_state_dict(net, sampler, options=options))
    loaded.load_state_dict(net.state_dict())
    other = stranger_of(sampler, loaded)
    set_optimizer_state_dict(loaded, other, state, options=options)
    assert_same_chain((loaded, other), (net, sampler))
    for some, its in ((sampler, net), (other, loaded)):
        advance(some, its, range(3, 7))
    assert_same_chain((loaded, other), (net, sampler))


@EACH
def test_blank_state_equals_the_first_steps(kind):
    net = Net()
    sampler = sampler_of(kind, net)
    blank = get_optimizer_state_dict(net, sampler)["state"]
    advance(sampler, net, range(1))
    made = get_optimizer_state_dict(net, sampler)["state"]
    assert blank.keys() == made.keys()
    for name, state in made.items():
        assert blank[name].keys() == state.keys()
        for key, value in state.items():
            assert type(blank[name][key]) is type(value)
            if torch.is_tensor(value):
                assert blank[name][key].dtype == value.dtype
                assert blank[name][key].shape == value.shape


def test_unused_blank_state_is_dropped():
    nets = Net(), Net()
    one, other = (sampler_of("SGHMC", net) for net in nets)
    with pytest.raises(KeyError):
        set_optimizer_state_dict(nets[0], one, {"nothing": 0}, options=FLAT)
    for sampler, net in zip((one, other), nets, strict=True):
        advance(sampler, net, range(3))
    assert_same_chain((nets[0], one), (nets[1], other))


def test_a_learning_rate_that_changes_before_the_first_step(tmp_path):
    # The first momentum belongs to the learning rate of the first step.
    nets = Net(), Net()
    one, other = (sampler_of("SGHMC", net) for net in nets)
    state = copy.deepcopy(get_optimizer_state_dict(nets[0], one))
    set_optimizer_state_dict(nets[0], one, state)
    for sampler, net in zip((one, other), nets, strict=True):
        for group in sampler.param_groups:
            group["lr"] = 0.01
        advance(sampler, net, range(3))
    assert_same_chain((nets[0], one), (nets[1], other))


def test_masses_that_were_set_before_the_first_step_are_kept():
    net = Net()
    sampler = sampler_of("HMC of given length", net)
    sampler.set_mass([2.0, 3.0, 4.0])
    new = sampler_of("HMC of given length", Net())
    new.load_state_dict(sampler.state_dict())
    params = [p for group in new.param_groups for p in group["params"]]
    masses = [new.state[p]["mass"].flatten()[0].item() for p in params]
    assert masses == [2.0, 3.0, 4.0]


@pytest.mark.parametrize("kind", ["SGLD", "SGHMC", "PSGLD without gamma", "pSBPS"])
@SAVED_AFTER
def test_means_of_priors_do_not_hide_other_state(kind, steps, tmp_path):
    """They are there before the first step, and torch would make no other state."""

    def begun(mean):
        net = Net()
        made = sampler_of(kind, net)
        common = {
            key: value
            for key, value in made.param_groups[0].items()
            if key in made._group_keys
            and (key in made._SPEC.shared or key not in made._SPEC.managed)
        }
        del common["prior_mean"]
        some = groups(net)
        for group in some:
            group["prior_mean"] = [torch.full_like(p, mean) for p in group["params"]]
        return net, type(made)(some, **common, seed=int(10 * mean))

    net, sampler = begun(0.5)
    advance(sampler, net, range(steps))
    model_state, state = get_state_dict(net, sampler, options=FLAT)
    assert sampler.state_dict()["state"].keys() == {0, 1, 2}
    dcp.save({"model": model_state, "sampler": state}, checkpoint_id=tmp_path)
    loaded, other = begun(-1.0)
    model_state, state = get_state_dict(loaded, other, options=FLAT)
    dcp.load({"model": model_state, "sampler": state}, checkpoint_id=tmp_path)
    states = {"model_state_dict": model_state, "optim_state_dict": state}
    set_state_dict(loaded, other, **states, options=FLAT)
    for p in loaded.trained():
        assert torch.all(other.state[p]["prior_mean"] == 0.5)
    # torch saves nothing of what requires no gradients.
    other.state[loaded.frozen]["prior_mean"].fill_(0.5)
    for some, its in ((sampler, net), (other, loaded)):
        advance(some, its, range(steps, steps + 4))
    assert_same_chain((loaded, other), (net, sampler))


def test_hmcecs_is_refused():
    """Its state that belongs to no single parameter is lost, which loading sees."""
    model = nn.Linear(3, 1)
    sampler = sg.HMCECS(
        model.parameters(), num_data=9, subsample_size=3, num_blocks=3, seed=0
    )
    x = torch.linspace(-1, 1, 27).reshape(9, 3)
    sampler.step(lambda i: -(model(x[i]).squeeze(1) ** 2))
    try:
        saved = get_optimizer_state_dict(model, sampler, options=FLAT)
    except Exception:  # as torch may do by itself
        return
    with pytest.raises(ValueError, match="checkpoint leaves them out"):
        set_optimizer_state_dict(model, sampler, saved, options=FLAT)
