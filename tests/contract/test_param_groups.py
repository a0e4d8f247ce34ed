"""Parameters, keys, kinds of numbers and defaults of param groups."""

import inspect
import math

import numpy as np
import pytest
import torch
from every_sampler import THREE, Chain
from failed_steps import refused
from short_chains import CLASSES
from stored_files import through_file
from torch import nn

import torch_sgmcmc as sg

each = pytest.mark.parametrize("kind", THREE)


def parameter(numel=3):
    return nn.Parameter(torch.ones(numel, dtype=torch.float64))


@each
def test_a_key_that_would_be_ignored(kind):
    chain = Chain(kind)
    name = type(chain.sampler).__name__
    num_data = chain.sampler.param_groups[0]["num_data"]
    decay = 0.02 * num_data
    decay = (
        f"weight_decay = 0.02 is prior_precision = weight_decay * num_data = {decay:g}"
    )
    for key, value, reason in (
        ("prior_precison", 2.0, "did you mean 'prior_precision'?"),
        ("priorprecision", 2.0, "did you mean 'prior_precision'?"),
        ("weight_decay", 0.02, decay),
    ):
        message = (
            f"Invalid param group: {name} has no hyperparameter {key!r} ({reason})"
        )
        group = {"params": [parameter()], key: value}
        with refused(ValueError, message):
            chain.sampler.add_param_group(group)
        assert set(group) == {"params", key}
        assert len(chain.sampler.param_groups) == 2
        # In one that is there already.
        chain.sampler.param_groups[1][key] = value
        before = [p.detach().clone() for p in chain.params]
        for _ in range(2):
            with refused(ValueError, message):
                chain.run(range(1))
        assert all(map(torch.equal, before, chain.params))
        assert int(chain.sampler.param_groups[0]["step"]) == 0
        del chain.sampler.param_groups[1][key]
    chain.run(range(2))


@each
def test_what_the_sampler_has_for_all_groups(kind):
    chain = Chain(kind)
    name = type(chain.sampler).__name__
    assert {"seed", "step", "offsets", "num_skipped"} < {*chain.sampler._SPEC.managed}
    for key in chain.sampler._SPEC.managed:
        managed = f"{key!r} is managed by {name}"
        message = f"Invalid param group: {managed} and cannot be set for a group"
        with refused(ValueError, message):
            group = {"params": [parameter()], key: 0}
            chain.sampler.add_param_group(group)
        mixed = [{"params": [parameter()]}, {"params": [parameter()], key: 0}]
        with pytest.raises(ValueError, match=managed):
            type(chain.sampler)(mixed, **given_to(chain.sampler))
    assert len(chain.sampler.param_groups) == 2


def given_to(sampler):
    """Returns the constructor's required arguments."""
    needed = ("lr", "num_data", "step_size", "num_steps", "subsample_size")
    return {k: v for k, v in sampler.param_groups[0].items() if k in needed}


def test_keys_without_a_near_one():
    own = {row.name for row in sg.SGLD._SPEC.settings} - {"num_chains"}
    unknown = "Invalid param group: {} has no hyperparameter {!r} (it has {})"
    for key in ("betas", "maximize", "nesterov"):
        group = {"params": [parameter()], key: True}
        has = ", ".join(sorted(own))
        with refused(ValueError, unknown.format("SGLD", key, has)):
            sg.SGLD([group], 0.1, num_data=1)
    has = "prior_mean, prior_precision"
    with refused(ValueError, unknown.format("HMC", "lr", has)):
        sg.HMC([{"params": [parameter()], "lr": 1.0}], 0.1, num_steps=1, num_data=1)


def test_what_torch_writes_is_known():
    """Every scheduler's keys, when groups are made of such groups again."""
    sampler = sg.SGHMC([parameter()], 0.1, 0.9, num_data=2)
    lr = torch.optim.lr_scheduler
    lr.OneCycleLR(sampler, 0.1, total_steps=10)
    torch.optim.swa_utils.SWALR(sampler, 0.05)
    sampler.load_state_dict(sampler.state_dict())
    written = sampler.param_groups[0]
    managed = ("params", *sampler._SPEC.managed)
    given = {key: value for key, value in written.items() if key not in managed}
    keys = "initial_lr max_lr min_lr base_momentum max_momentum swa_lr"
    assert set(keys.split()) < set(given)
    groups = [{"params": [parameter()], **given}]
    groups.append({"params": [parameter()], "name": "head"})
    again = sg.SGHMC(groups, 0.2, 0.5, num_data=2)
    assert given.items() <= again.param_groups[0].items()
    again.param_groups[1]["initial_lr"] = 0.2
    lr.StepLR(again, 5, last_epoch=3)
    # As Hugging Face's Trainer makes them, with its default.
    sg.SGLD([{"params": [parameter()], "weight_decay": 0.0}], 0.1, num_data=2)


def test_keys_of_ones_own_may_be_set_later():
    sampler = sg.SGLD([parameter()], 0.1, num_data=2)
    sampler.param_groups[0].update(my_own=1, lr_scale=0.5, name="body")
    sampler.step()
    sampler.param_groups[0]["temperatur"] = 2.0
    with pytest.raises(ValueError, match="did you mean 'temperature'"):
        sampler.step()


def test_group_dicts_can_be_used_twice():
    groups = [{"params": [parameter()]}]
    sg.SGLD(groups, 0.1, num_data=1)
    sg.SGHMC(groups, 0.1, num_data=1)
    assert set(groups[0]) == {"params"}


def unusable():
    dtypes = "must be float32, float64, bfloat16 or float16; a complex parameter can be"
    dtypes = f"({dtypes} kept as torch.view_as_real of it)"
    meta = "must be cpu or cuda; a module on meta has no numbers before to_empty() and"
    shared = "an expanded parameter (several elements share memory): shape"
    lazy = "an uninitialized parameter (run the lazy module once before)"
    ones = torch.ones(3)
    return {
        "meta": (ones.to("meta"), f"on the device meta ({meta} its initialisation)"),
        "complex": (ones.to(torch.complex64), f"torch.complex64 {dtypes}"),
        "conjugate": (ones.to(torch.complex128).conj(), f"torch.complex128 {dtypes}"),
        "integer": (ones.long(), f"torch.int64 {dtypes}"),
        "float8": (ones.to(torch.float8_e4m3fn), f"torch.float8_e4m3fn {dtypes}"),
        "negative": (
            torch._neg_view(ones),
            "a negative view (take resolve_neg() of it)",
        ),
        "sparse": (
            ones.to_sparse(),
            "the layout torch.sparse_coo (must be torch.strided)",
        ),
        "expanded": (torch.ones(2, 1).expand(2, 4), f"{shared} [2, 4], strides [1, 0]"),
        "windows": (torch.ones(8).unfold(0, 3, 2), f"{shared} [3, 3], strides [2, 1]"),
        "lazy": (nn.LazyLinear(2).weight, lazy),
    }


@each
@pytest.mark.parametrize("which", unusable())
def test_parameters_that_cannot_be_sampled(kind, which):
    chain = Chain(kind)
    value, reason = unusable()[which]
    name = type(chain.sampler).__name__
    message = f"Invalid parameter: {name} cannot sample {reason}"
    for group in ([value], [parameter(), value]):
        with refused(ValueError, message):
            chain.sampler_of([parameter(), *group])
        added = {"params": group}
        with refused(ValueError, message):
            chain.sampler.add_param_group(added)
    assert len(chain.sampler.param_groups) == 2
    chain.run(range(2))


@each
def test_parameters_in_the_same_memory(kind):
    chain = Chain(kind)
    memory = torch.zeros(6, 7)
    overlap = (
        "Invalid parameters: number {} of group {} and number {} of group {} overlap "
        "in memory (each must have its own)"
    )
    overlaps = [
        (memory[:3], memory[2:]),
        (memory[1], memory[:, 2]),
        (memory, memory.view(torch.int16).view(torch.bfloat16)[5:, 3:5]),
    ]
    for a, b in overlaps:
        with refused(ValueError, overlap.format(0, 0, 0, 1)):
            chain.sampler_of([a, b])
    first = chain.params[0].detach()
    with refused(ValueError, overlap.format(0, 0, 1, 2)):
        chain.sampler.add_param_group({"params": [parameter(), first]})
    assert len(chain.sampler.param_groups) == 2
    with pytest.warns(UserWarning, match="duplicate parameters"):
        p = parameter()
        with refused(ValueError, overlap.format(0, 1, 1, 1)):
            chain.sampler_of([parameter(), p, p])


@each
def test_parameters_side_by_side_in_memory(kind):
    """Groups like flattened modules; interleaved; empty; with gaps; of size one."""
    chain = Chain(kind)
    memory = torch.linspace(-1, 1, 200, dtype=torch.float64)
    grid = memory[:60].view(6, 10)
    params = [
        *grid.unbind(1),
        *memory[60:].split([100, 0, 30, 10]),
        torch.empty_strided((1, 3), (0, 1)).fill_(0.5),
        torch.empty(0).expand(4, 0),
    ]
    sampler = chain.sampler_of(params)
    assert sum(len(group["params"]) for group in sampler.param_groups) == 16


def test_empty_groups_are_allowed():
    a, b = parameter(), parameter()
    groups = [{"params": []}, {"params": [a]}, {"params": []}]
    sampler = sg.SGLD(groups, 0.1, num_data=1, seed=0)
    sampler.add_param_group({"params": [b]})
    assert [g["offsets"] for g in sampler.param_groups] == [[], [0], [], [128]]
    a.grad = torch.ones_like(a)
    groups = [{"params": [a]}, {"params": []}]
    sg.SGLD(groups, 0.1, num_data=1, capturable=True).step()


def test_fake_tensors_have_no_memory_to_share():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        params = [parameter(), parameter()]
        assert len(sg.SGLD(params, 0.1, num_data=1, seed=0).param_groups) == 1


@each
def test_numbers_of_numpy(kind):
    """NumPy's numbers in constructors, groups and later; files are as before."""
    chain, other = Chain(kind), Chain(kind)

    def numpy_s(value):
        if isinstance(value, bool):
            return value
        if isinstance(value, int):
            return np.int64(value)
        return np.float64(value) if isinstance(value, float) else value

    sampler = chain.sampler
    own = sampler._group_keys & type(sampler).__init__.__annotations__.keys()
    given = {
        key: numpy_s(value)
        for key, value in sampler.param_groups[0].items()
        if key in own - {"step", "offsets", "capturable"}
    }
    groups = [{"params": other.params[:1]}, {"params": other.params[1:]}]
    precision = sampler.param_groups[1]["prior_precision"]
    groups[1]["prior_precision"] = np.float64(precision)
    other.sampler = type(sampler)(groups, **given)
    expected = chain.run(range(2))
    assert all(map(torch.equal, expected, other.run(range(2))))
    through_file(other.sampler.state_dict())
    for group in other.sampler.param_groups:
        for key in given.keys() - {"seed"}:
            group[key] = numpy_s(group[key])
    assert all(map(torch.equal, chain.run(range(2, 4)), other.run(range(2, 4))))


@pytest.mark.parametrize("kind", ["SGLD", "SGHMC", "EWSG"])
def test_lr_as_a_tensor(kind):
    """Read at every step: whoever writes into it changes the step size."""
    chain, other = Chain(kind), Chain(kind)
    lr = torch.tensor(0.1, dtype=torch.float64)
    other.sampler.param_groups[0]["lr"] = lr
    schedulers = [
        torch.optim.lr_scheduler.ExponentialLR(c.sampler, 0.5) for c in (chain, other)
    ]
    for step in range(3):
        now = (each.run(range(step, step + 1)) for each in (chain, other))
        assert all(map(torch.equal, *now))
        for scheduler in schedulers:
            scheduler.step()
    assert other.sampler.param_groups[0]["lr"] is lr
    assert float(lr) == chain.sampler.param_groups[0]["lr"] == 0.1 * 0.5**3
    twin = other.twin()
    twin.sampler.load_state_dict(other.sampler.state_dict())
    assert all(map(torch.equal, chain.run(range(3, 5)), twin.run(range(3, 5))))
    # In a constructor.
    made = type(chain.sampler)([parameter()], torch.tensor([0.2]), num_data=3)
    assert made.param_groups[0]["lr"].shape == (1,)
    with pytest.raises(ValueError, match=r"Invalid lr: -0\.5 \(must be finite"):
        type(chain.sampler)([parameter()], torch.tensor(-0.5), num_data=3)


def test_lr_as_a_tensor_excludes_capturable():
    why = "a Tensor is read on the host at every step and excludes capturable=True"
    with refused(ValueError, f"Invalid lr: {why}"):
        sg.SGLD([parameter()], torch.tensor(0.1), num_data=1, capturable=True)


# What the table does not have: what is more than a number, a word or a flag.
ELSEWHERE = {"self", "params", "seed", "capturable", "nonfinite", "model"}
ELSEWHERE |= {"process_group", "preconditioner"}


def default_of(row):
    if row.optional:
        return None
    if row.kind == "word":
        return row.words[0]
    if math.isnan(row.default):
        return inspect.Parameter.empty
    return {"real": float, "whole": int, "flag": bool}[row.kind](row.default)


@pytest.mark.parametrize("sampler", CLASSES)
def test_defaults(sampler):
    given = inspect.signature(sampler.__init__).parameters
    expected = {row.name: default_of(row) for row in sampler._SPEC.settings}
    if sampler is sg.HMCECS:
        expected["step_size"] = None  # of which trajectory_length decides
    found = {k: row.default for k, row in given.items() if k not in ELSEWHERE}
    assert found == expected
    for name, default in expected.items():
        assert type(found[name]) is type(default)


@each
@pytest.mark.parametrize(("key", "value"), [("weight_decay", 0.02), ("maximize", True)])
def test_a_foreign_key_whose_value_changes(kind, key, value):
    """A schedule sets it later, as those of timm and transformers do."""
    chain = Chain(kind)
    for group in chain.sampler.param_groups:
        group.update(weight_decay=0.0, maximize=False)
    chain.run(range(3))
    chain.sampler.param_groups[1][key] = value
    before = [p.detach().clone() for p in chain.params]
    with pytest.raises(ValueError, match=f"has no hyperparameter '{key}'"):
        chain.run(range(3, 4))
    assert all(map(torch.equal, before, chain.params))
    chain.sampler.param_groups[1][key] = type(value)(0)
    chain.run(range(3, 5))
