"""State dicts of every sampler: loaded many times, by many ways, into any precision."""

import copy
import pickle

import pytest
import torch
from every_sampler import EVERY, THREE, Chain, bits
from stored_files import through_file
from torch import nn

import torch_sgmcmc as sg
from torch_sgmcmc.core.state_dict import plain_number

# What is kept is each sampler's own; what is done with it is their base class's.
each = pytest.mark.parametrize("kind", EVERY)
each_of_three = pytest.mark.parametrize("kind", THREE)


def held(sampler):
    """The state dict, but for what depends on how often a chain was resumed."""
    state = sampler.state_dict()
    for group in state["param_groups"]:
        group.pop("num_evaluations", None)
    return bits(state)


def same(ours, theirs):
    return all(map(torch.equal, ours, theirs))


def test_a_snapshot_keeps_a_tensor_lr():
    sampler = sg.SGHMC([nn.Parameter(torch.ones(2))], torch.tensor(0.1), num_data=1)
    saved = sampler.state_dict()
    sampler.param_groups[0]["lr"].fill_(0.5)
    assert float(saved["param_groups"][0]["lr"]) == pytest.approx(0.1)


@each
def test_a_state_dict_is_a_snapshot(kind):
    """Without a copy: later steps do not change it, nor does a chain that loads it."""
    chain = Chain(kind)
    chain.run(range(4))
    params = [p.detach().clone() for p in chain.params]
    saved = chain.sampler.state_dict()
    before = bits(saved)
    expected = chain.run(range(4, 9))
    for _ in range(2):
        assert bits(saved) == before
        chain.set(params)
        chain.sampler.load_state_dict(saved)
        assert same(chain.run(range(4, 9)), expected)
    present = held(chain.sampler)
    chain.sampler.load_state_dict(chain.sampler.state_dict())
    assert held(chain.sampler) == present


def wrapped(chain):
    """Gives a sampler a user's subclass of the same name, as Lightning does."""
    own = type(chain.sampler)
    chain.sampler.__class__ = type(own.__name__, (own,), {})
    return chain


@each_of_three
@pytest.mark.parametrize(
    "way",
    [
        copy.deepcopy,
        lambda chain: pickle.loads(pickle.dumps(chain)),
        lambda chain: through_file(chain, weights_only=False),
        wrapped,
    ],
)
def test_copies_and_subclasses_of_a_sampler_load(kind, way):
    chain = Chain(kind)
    chain.run(range(3))
    params = [p.detach().clone() for p in chain.params]
    saved = copy.deepcopy(chain.sampler.state_dict())
    expected = chain.run(range(3, 6))
    other = way(chain)
    assert (other.sampler is chain.sampler) == (way is wrapped)
    for _ in range(2):
        other.set(params)
        other.sampler.load_state_dict(saved)
        assert same(other.run(range(3, 6)), expected)


@each_of_three
def test_hooks_see_a_dict_to_change_and_a_loaded_sampler(kind):
    chain = Chain(kind)
    chain.run(range(3))
    saved = copy.deepcopy(chain.sampler.state_dict())
    twin = chain.twin()
    expected = chain.run(range(3, 6))
    wrapped = {"state": saved["state"], "param_groups": None}
    seen = []

    def adapt(_, given):
        assert given["param_groups"] is None
        return saved

    def look(sampler):
        seen.append(bits(sampler.state_dict()))

    twin.sampler.register_load_state_dict_pre_hook(adapt)
    twin.sampler.register_load_state_dict_post_hook(look)
    twin.sampler.load_state_dict(wrapped)
    assert seen == [bits(saved)]
    assert same(twin.run(range(3, 6)), expected)


@each_of_three
def test_a_failing_hook_changes_no_sampler(kind):
    chain, other = Chain(kind), Chain(kind, seed=8)
    chain.run(range(3))
    other.run(range(2))
    params = [p.detach().clone() for p in chain.params]
    before = bits(chain.sampler.state_dict())

    def fail(_):
        raise KeyboardInterrupt

    handle = chain.sampler.register_load_state_dict_post_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        chain.sampler.load_state_dict(other.sampler.state_dict())
    handle.remove()
    assert bits(chain.sampler.state_dict()) == before
    twin = copy.deepcopy(chain)
    twin.set(params)
    assert same(chain.run(range(3, 6)), twin.run(range(3, 6)))


@each_of_three
def test_a_group_added_after_loading_has_the_loaded_seed(kind):
    chain, ends = Chain(kind), []
    chain.run(range(3))
    loaded = chain.twin()
    loaded.sampler.load_state_dict(copy.deepcopy(chain.sampler.state_dict()))
    for each in (chain, loaded):
        each.params.append(nn.Parameter(torch.ones(5)))
        each.sampler.add_param_group({"params": each.params[-1:]})
        ends.append(each.run(range(3, 6)))
        groups = each.sampler.param_groups
        assert [group["seed"] for group in groups] == [5, 5, 5]
        assert [int(group["step"]) for group in groups] == [int(groups[0]["step"])] * 3
    assert same(*ends)


def test_a_group_added_after_loading_is_as_capturable_as_the_others():
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    sampler = sg.SGLD([p], 0.1, num_data=2)
    other = sg.SGLD([q], 0.1, num_data=2, capturable=True)
    sampler.load_state_dict(other.state_dict())
    sampler.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert all(torch.is_tensor(g["step"]) for g in sampler.param_groups)
    p.grad = torch.ones(3)
    sampler.step()
    assert [int(g["step"]) for g in sampler.param_groups] == [1, 1]


def tensors(sampler, p):
    kept = sampler.state[p].items()
    return {k: v for k, v in kept if torch.is_tensor(v) and k != "step"}


@each_of_three
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (torch.float32, torch.float64),
        (torch.float64, torch.float32),
        (torch.float64, torch.bfloat16),
        (torch.float16, torch.float64),
    ],
)
def test_state_takes_the_precision_that_the_parameter_asks_for(kind, saved, loaded):
    chain = Chain(kind, saved)
    if kind == "HMC":  # which has masses
        chain.sampler.set_mass([0.7, 0.9, 1.1])
    chain.run(range(3))
    twin = chain.twin(loaded)
    twin.sampler.load_state_dict(copy.deepcopy(chain.sampler.state_dict()))
    wanted = torch.float64 if loaded == torch.float64 else torch.float32
    for p, q in zip(chain.params, twin.params, strict=True):
        theirs, ours = tensors(chain.sampler, p), tensors(twin.sampler, q)
        # Parameters in fp32 and fp64 have no master.
        assert theirs.keys() - {"master"} == ours.keys()
        for key, value in ours.items():
            assert value.dtype is wanted
            assert torch.equal(value, theirs[key].to(wanted))
    twin.run(range(3, 6))
    assert [int(g["step"]) for g in twin.sampler.param_groups] == [6, 6]
    # And back, where the momentum of a bf16 model is wider than its parameters.
    back = twin.twin(saved)
    back.sampler.load_state_dict(twin.sampler.state_dict())
    back.run(range(6, 8))


def refused(sampler, state, kind=ValueError):
    before = bits(sampler.state_dict())
    with pytest.raises(kind) as error:
        sampler.load_state_dict(state)
    assert type(error.value) is kind
    assert bits(sampler.state_dict()) == before
    return str(error.value)


def test_another_samplers_state_dict():
    saved = {kind: Chain(kind).sampler.state_dict() for kind in EVERY}
    for loads in EVERY:
        chain = Chain(loads)
        name = type(chain.sampler).__name__
        for kind, state in saved.items():
            other = type(Chain(kind).sampler).__name__
            if name == other:
                continue
            assert refused(chain.sampler, state) == (
                f"Invalid state_dict: got one of {other} (must be of {name}). Load it "
                "into a sampler of its class"
            )


def test_a_subclass_shares_the_state_dicts_of_the_librarys_class():
    class Mine(sg.SGLD):
        pass

    params = [nn.Parameter(torch.zeros(3))]
    saved = Mine(params, lr=0.1, num_data=5, seed=2**40).state_dict()
    plain = sg.SGLD(params, lr=0.1, num_data=5)
    plain.load_state_dict(saved)
    assert plain.seed == 2**40
    Mine(params, lr=0.1, num_data=5).load_state_dict(plain.state_dict())


@each
def test_seed_and_counters_are_int64_tensors(kind):
    """And so is any other int that 32 bits do not hold, which LibTorch cannot read."""
    chain = Chain(kind)
    chain.run(range(3))
    saved = chain.sampler.state_dict()
    counters = {"seed", "step", "num_skipped", "next_offset"}
    counters |= {k for k, v in chain.sampler._SPEC.progress.items() if type(v) is int}
    for group in saved["param_groups"]:
        for key in counters:
            assert group[key].dtype is torch.int64 and group[key].shape == ()
            # Another one's: what is saved does not change.
            assert group[key] is not chain.sampler.param_groups[0][key]
    for state in saved["state"].values():
        assert not isinstance(state, dict) or type(state.get("num_grads")) is not int


def test_ints_that_32_bits_do_not_hold_are_tensors():
    def sampler():
        return sg.SGLD([nn.Parameter(torch.zeros(3))], lr=0.1, num_data=2**31)

    saved = sampler().state_dict()
    group = saved["param_groups"][0]
    assert group["num_data"].dtype is torch.int64 and group["offsets"] == [0]
    group["offsets"] = [torch.tensor(2**40)]
    group["next_offset"] = torch.tensor(2**40 + 128)
    twin = sampler()
    twin.load_state_dict(saved)
    ours = twin.param_groups[0]
    assert ours["offsets"] == [2**40] and type(ours["offsets"][0]) is int
    assert ours["num_data"] == 2**31 and type(ours["num_data"]) is int
    again = twin.state_dict()["param_groups"][0]["offsets"]
    assert torch.equal(again[0], torch.tensor(2**40))


def test_what_is_counted_is_no_hyperparameter():
    for kind in EVERY:
        sampler = Chain(kind).sampler
        counted = {"step", "num_skipped", "offsets", *sampler._SPEC.progress}
        assert counted.isdisjoint(sampler.defaults)
        assert all(counted <= group.keys() for group in sampler.param_groups)


COUNTS = {"HMC": ("num_accepted", "num_divergences")}
COUNTS["HMCECS"] = (*COUNTS["HMC"], "num_subsamples_accepted")
POSITIVE = "must be finite and > 0"
TENSOR = "must be an int, or a Tensor of one int64"
BAD = [
    ("SGLD", "seed", "0", TypeError, "must be an int or None, got str"),
    ("SGLD", "seed", 2**63, ValueError, "must fit in 64 bits"),
    ("SGLD", "step", -1, ValueError, "must be >= 0"),
    ("SGLD", "step", 2**62, ValueError, "must be in [0, 2^62)"),
    ("SGLD", "step", 1.0, TypeError, "must be an int, got float"),
    ("SGHMC capturable", "step", torch.tensor(1.0), TypeError, TENSOR),
    ("EWSG", "num_proposals", -1, ValueError, "must be >= 0"),
    ("EWSG", "num_accepted", 9, ValueError, "must be at most num_proposals = 4"),
    *(
        (kind, name, 3, ValueError, "must be at most num_trajectories = 2")
        for kind, names in COUNTS.items()
        for name in names
    ),
    ("HMCECS", "sign", 0, ValueError, "must be 1 or -1"),
    ("HMCECS", "num_evaluations", -7, ValueError, "must be >= 0"),
    ("HMCECS", "mean_difference", torch.nan, ValueError, "must be finite"),
    ("SBPS", "line_time", -1.0, ValueError, "must be finite and >= 0"),
    ("SBPS", "trajectory_time", "1", TypeError, "must be a number, got str"),
    ("SBPS", "num_samples", -1, ValueError, "must be >= 0"),
    ("SBPS", "num_bounces", 99, ValueError, "must be at most num_proposals = 0"),
    ("SBPS", "observed_interval", 0, ValueError, POSITIVE),
]


@pytest.mark.parametrize(("kind", "key", "value", "error", "wanted"), BAD)
def test_invalid_values(kind, key, value, error, wanted):
    chain = Chain(kind)
    chain.run(range(2))
    state = copy.deepcopy(chain.sampler.state_dict())
    for group in state["param_groups"]:
        group[key] = value
    message = f"Invalid {key}: {value!r} ({wanted})"
    assert refused(chain.sampler, state, error) == message


@each_of_three
def test_values_that_must_be_equal_in_all_groups(kind):
    chain = Chain(kind)
    chain.run(range(2))
    why = chain.sampler._SPEC.why_equal
    for key in chain.sampler._SPEC.managed:
        state = copy.deepcopy(chain.sampler.state_dict())
        value = plain_number(state["param_groups"][1][key])
        if key == "offsets" or isinstance(value, bool) or value is None:
            continue
        if isinstance(value, (int, float)):
            state["param_groups"][1][key] = other = value + value // 2 + 1
            if key not in ("seed", "step", "num_data", "temperature", "step_size"):
                continue  # counts may have become too large
            assert refused(chain.sampler, state) == (
                f"Invalid {key}: {[value, other]} in the param groups (must be equal: "
                f"{why})"
            )


@each_of_three
def test_states_of_other_keys_types_and_shapes(kind):
    chain = Chain(kind)
    chain.run(range(2))
    name = type(chain.sampler).__name__
    good = chain.sampler.state_dict()

    def bad(index, **changes):
        state = copy.deepcopy(good)
        state["state"].setdefault(index, {}).update(changes)
        return refused(chain.sampler, state)

    known = f"which {name} does not know; it is not one of {name}"
    assert bad(1, exp_avg=torch.zeros(3)) == (
        f"Invalid state_dict: the state of parameter 1 has exp_avg, {known}"
    )
    assert bad(7) == f"Invalid state_dict: its state has 7, {known}"
    for key, value in good["state"].get(0, {}).items():
        if not torch.is_tensor(value) or key == "step":
            continue
        of = f"Invalid state_dict: {key} of parameter 0"
        assert bad(0, **{key: None}) == f"{of} is a NoneType (must be a Tensor)"
        assert bad(0, **{key: value.long()}) == (
            f"{of} is of torch.int64 (must be floating point)"
        )
        for other, shape in ((value[:2], [2]), (value[None], [1, 3])):
            assert bad(0, **{key: other}) == f"{of} has shape {shape}, expected [3]"
        for wrong, where in (
            (value.to("meta"), "torch.strided on the device meta"),
            (value.to_sparse(), "torch.sparse_coo on the device cpu"),
        ):
            assert bad(0, **{key: wrong}) == (
                f"{of} has the layout {where} (must be torch.strided, with numbers)"
            )
    for key in ("param_groups", "state"):
        state = {k: v for k, v in good.items() if k != key}
        message = f"Invalid state_dict: it has no key {key!r}"
        assert refused(chain.sampler, state) == message


def test_masses_that_another_precision_cannot_hold():
    chain = Chain("HMC", torch.float64)
    chain.sampler.set_mass([1e-60, 1.0, 1.0])
    twin = chain.twin(torch.float32)
    assert refused(twin.sampler, chain.sampler.state_dict()) == (
        "Invalid state_dict: mass of parameter 0 has elements out of range (must be "
        "finite and > 0)"
    )


def without(kept, key):
    return {k: v for k, v in kept.items() if k != key}


@pytest.mark.parametrize("settings", [{}, {"taylor_order": 1}, {"kind": "tanh"}])
@pytest.mark.parametrize("key", ["control_variates", "subsample"])
def test_hmcecs_loads_all_or_nothing(settings, key):
    """Whatever part is missing, or of another shape or type."""
    from ecs_data import Data
    from ecs_data import make as make_ecs

    kind, settings = settings.get("kind", "logistic"), without(settings, "kind")
    data = Data(kind)
    sampler = make_ecs(data, **settings)
    sampler.warmup(data, 12, anchor_every=5, progress=False)
    good = copy.deepcopy(sampler.state_dict())
    sampler.load_state_dict(copy.deepcopy(good))
    sampler.step(data)
    fresh = make_ecs(Data(kind), **settings)

    def check(kept):
        state = {**good, "state": {**good["state"], key: kept}}
        for each in (sampler, fresh):
            message = refused(each, state)
            assert message.startswith("Invalid ")

    whole = good["state"][key]
    check([])
    for name, value in whole.items():
        check(without(whole, name))
        if torch.is_tensor(value):
            check({**whole, name: value.float() if value.is_floating_point() else 1})
            check({**whole, name: value[None]})
            check({**whole, name: value.flatten()[:-1] if value.ndim else 1.0})
        elif isinstance(value, list):
            check({**whole, name: value[:-1]})
        if name == "terms":
            for i, term in enumerate(value):
                wrong = torch.zeros(2) if term is None else term[..., :-1]
                check({**whole, name: [*value[:i], wrong, *value[i + 1 :]]})
    if key == "control_variates":
        for each in (sampler, fresh):
            state = {**good, "state": without(good["state"], key)}
            assert refused(each, state) == (
                "Invalid state_dict: it has a subsample without control_variates"
            )


@each_of_three
def test_what_torch_and_its_users_keep_in_groups_is_loaded(kind):
    chain = Chain(kind)
    extra = {"initial_lr": 0.1, "max_lr": 1.0, "swa_lr": 0.1, "max_momentum": 0.9}
    for group in chain.sampler.param_groups:
        group.update(extra, differentiable=False, foreach=None, my_own="note")
    chain.run(range(2))
    twin = chain.twin()
    twin.sampler.load_state_dict(copy.deepcopy(chain.sampler.state_dict()))
    for group in twin.sampler.param_groups:
        assert group["my_own"] == "note" and extra.items() <= group.items()
    assert same(chain.run(range(2, 4)), twin.run(range(2, 4)))


@each_of_three
def test_no_key_of_a_group_may_be_missing(kind):
    chain = Chain(kind)
    chain.run(range(2))
    state, twin = chain.sampler.state_dict(), chain.twin().sampler
    for key in twin._group_keys:
        groups = [
            {k: v for k, v in group.items() if k != key}
            for group in state["param_groups"]
        ]
        if twin._SPEC.progress.get(key) == []:  # dropped by torch's checkpoints
            twin.load_state_dict({**state, "param_groups": groups})
            continue
        assert refused(twin, {**state, "param_groups": groups}) == (
            f"Invalid state_dict: param group 0 lacks {key}; it is not one of "
            f"{type(twin).__name__}"
        )


def named_sampler(kind, names, group_by=2, prefix="", seed=1):
    params = {n: nn.Parameter(torch.full((4,), float(ord(n)))) for n in names}
    pairs = [(prefix + n, p) for n, p in params.items()]
    groups = [{"params": pairs[:group_by]}, {"params": pairs[group_by:]}]
    if kind == "SGHMC":
        means = [torch.full((4,), float(ord(n))) for n in names]
        groups[0]["prior_mean"] = means[:group_by]
        groups[1]["prior_mean"] = means[group_by:]
    numbers = {"lr": 0.1, "num_data": 10, "prior_precision": 0.5}
    return params, getattr(sg, kind)(groups, **numbers, seed=seed)


def take_named_steps(params, sampler, steps=2):
    for step in range(steps):
        for name, p in params.items():
            p.grad = torch.full_like(p, float(ord(name) % 7 + step))
        sampler.step()
    return {name: p.detach().clone() for name, p in params.items()}


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod."])
@pytest.mark.parametrize("kind", ["SGLD", "SGHMC", "SGNHT"])
def test_parameters_are_matched_by_name(kind, prefix):
    params, sampler = named_sampler(kind, "abcde", group_by=3)
    take_named_steps(params, sampler)
    saved = copy.deepcopy(sampler.state_dict())
    others, other = named_sampler(kind, "cabed", group_by=3, prefix=prefix, seed=2)
    with torch.no_grad():
        for name, p in others.items():
            p.copy_(params[name])
    other.load_state_dict(saved)
    expected = take_named_steps(params, sampler)
    found = take_named_steps(others, other)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert other.param_groups[0]["param_names"] == [prefix + n for n in "cab"]


def test_other_names_are_refused():
    _, sampler = named_sampler("SGHMC", "abc")
    others, other = named_sampler("SGHMC", "adc")
    before = bits(other.state_dict())
    with pytest.raises(ValueError) as error:
        other.load_state_dict(sampler.state_dict())
    assert str(error.value) == (
        "Invalid state_dict: param group 0 was saved for parameters of other names (it "
        "lacks d, and has b in addition)"
    )
    assert bits(other.state_dict()) == before
    # Where one side has no names, order is all there is.
    rest = [*others.values()]
    groups = [{"params": rest[:2]}, {"params": rest[2:]}]
    plain = sg.SGHMC(groups, lr=0.1, num_data=10)
    plain.load_state_dict(sampler.state_dict())


def test_states_that_lack_what_a_step_creates():
    p = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    sampler = sg.SGNHT([p], 0.1, num_data=5, seed=1)
    p.grad = torch.ones_like(p)
    sampler.step()
    for key in ("momentum", "thermostat"):
        state = sampler.state_dict()
        del state["state"][0][key]
        assert f"the state of parameter 0 lacks {key}" in refused(sampler, state)
