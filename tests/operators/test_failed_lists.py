"""A step that throws has moved none of several groups, whatever is wrong with one."""

import pytest
import torch
from every_sampler import Chain, bits
from short_chains import kept_state

# A sampler without state, one with momenta, one with more state, and those that call
# closures and update list by list. (SBPS and HMC-ECS move all parameters as one.)
LISTS = ["SGLD", "SGHMC", "PSGLD", "EWSG", "HMC"]


def second(chain):
    return chain.params[1]


def state_of(chain, change):
    """Changes all tensors of the second parameter's state."""
    state = chain.sampler.state[second(chain)]
    kept = kept_state(chain.sampler)[second(chain)].items()
    tensors = {key: value for key, value in kept if torch.is_tensor(value)}
    assert tensors
    state.update({key: change(value) for key, value in tensors.items()})


REPLACED = "was the parameter replaced, or moved"
EXPANDED = "cannot sample an expanded parameter"
PARAMETERS = {
    "dtype": (lambda t: t.double(), REPLACED),
    "expanded": (lambda t: torch.zeros(1).expand(t.numel()), EXPANDED),
    "shape": (lambda t: t[:, None].clone(), REPLACED),
}
STATE = {
    "dtype": lambda t: t.double(),
    "shape": lambda t: t[:, None].clone(),
    "shorter": lambda t: t[:-1].clone(),
    "device": lambda t: t.to("meta"),
    "layout": lambda t: t.to_sparse(),
}


def others(chain):
    """All but the parameter that something is wrong with, to the bit."""
    params = (chain.params[0], chain.params[2])
    settings = [dict(group, params=None) for group in chain.sampler.param_groups]
    state = [chain.sampler.state.get(p, {}) for p in params]
    return bits([[p.detach() for p in params], state, settings])


def fails(chain, words=None):
    """The step fails, twice, and nothing has changed."""
    before = others(chain)
    for _ in range(2):
        with pytest.raises((RuntimeError, ValueError, TypeError), match=words):
            chain.run(range(2, 3))
        assert others(chain) == before


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("change", PARAMETERS)
@pytest.mark.parametrize("kind", LISTS)
def test_parameters(kind, change, steps):
    chain = Chain(kind)
    chain.run(range(steps))
    make_unlike, words = PARAMETERS[change]
    second(chain).data = make_unlike(second(chain).data)
    kept = kept_state(chain.sampler).get(second(chain), {}) if steps else {}
    if change != "expanded" and not any(map(torch.is_tensor, kept.values())):
        chain.run(range(2, 3))  # nothing holds it to what it was
        return
    fails(chain, words)


@pytest.mark.parametrize("change", STATE)
@pytest.mark.parametrize("kind", ["SGHMC", "PSGLD", "EWSG"])
def test_state(kind, change):
    chain = Chain(kind)
    chain.run(range(2))
    state_of(chain, STATE[change])
    fails(chain)


def test_the_first_step_of_one_list_leaves_no_state_behind():
    """An operator refuses the only list, when momenta have been drawn."""
    chain = Chain("SGHMC")
    sampler = chain.sampler_of(chain.params)
    sampler.param_groups.pop()
    p = chain.params[0]
    p.grad = torch.ones_like(p)
    kept = p.data
    p.data = kept.double()
    with pytest.raises(RuntimeError):
        sampler.step()
    assert kept_state(sampler) == {} and sampler.param_groups[0]["step"] == 0
    p.data = kept
    sampler.step()


def test_gradients_do_not_enter_an_estimate_in_a_step_that_is_refused():
    chain = Chain("SGHMC online")
    sampler, p = chain.sampler_of(chain.params), chain.params[0]
    sampler.param_groups.pop()
    for _ in range(2):
        p.grad = torch.ones_like(p)
        sampler.step()
    sampler.state[p]["momentum"] = sampler.state[p]["momentum"].double()
    before = bits(sampler.state_dict())
    with pytest.raises(RuntimeError, match=r"SGHMC has a momentum of torch\.float64"):
        sampler.step()
    assert bits(sampler.state_dict()) == before
