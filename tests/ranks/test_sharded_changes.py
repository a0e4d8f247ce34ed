"""Between steps of shards anything may change: what a sampler keeps of them fits still.

Each change is made to a chain of whole parameters too, whose elements are the same.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_sgmcmc as sg
from torch_sgmcmc.core import dtensor
from torch_sgmcmc.core.context import local

pytestmark = pytest.mark.full

COMMON = {"num_data": 10.0, "seed": 3, "nonfinite": "ignore"}


def random(seed):
    return torch.randn(6, 10, generator=torch.Generator().manual_seed(seed))


MEANS = [random(7 + i) for i in range(3)]
KINDS = {
    "SGLD": lambda p: sg.SGLD(p, 0.1, **COMMON),
    "SGLD with means": lambda p: sg.SGLD(p, 0.1, prior_mean=MEANS, **COMMON),
    "SGHMC": lambda p: sg.SGHMC(p, 0.1, 0.9, **COMMON),
    "PSGLD": lambda p: sg.PSGLD(p, 0.1, gamma=False, **COMMON),
    "SGNHT": lambda p: sg.SGNHT(p, 0.1, 0.9, **COMMON),
}


@pytest.fixture(scope="module")
def mesh():
    """The placement of the second of two ranks, without the first."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


class Chain:
    """Layouts of three parameters: whole, or sharded with the same spec."""

    def __init__(self, kind, mesh, dim):
        self.mesh, self.dim = mesh, dim
        self.specs = {}
        self.params = [nn.Parameter(self.cut(random(i))) for i in range(3)]
        self.sampler = KINDS[kind](self.params)

    def cut(self, whole):
        if self.dim is None:
            return whole.clone()
        key = self.dim, whole.dtype
        local = whole.chunk(2, self.dim)[1].contiguous()
        if key not in self.specs:
            first = DTensor.from_local(local, self.mesh, [Shard(self.dim)])
            self.specs[key] = first._spec
        return DTensor(local, self.specs[key], requires_grad=False)

    def step(self, seed, without=None):
        for i, p in enumerate(self.params):
            grad = random(10 * seed + i).to(p.dtype)
            p.grad = self.cut(grad) if dtensor.is_dtensor(p) else grad
            if i == without:
                p.grad = None
        self.sampler.step()

    def replace(self, i, whole):
        group = self.sampler.param_groups[0]
        state = self.sampler.state.pop(self.params[i], {})
        self.params[i] = group["params"][i] = nn.Parameter(self.cut(whole))
        self.sampler.state[self.params[i]] = {
            key: self.cut(random(30)).abs() for key in state
        }


def _parameters_are_cut_otherwise(chain):
    if chain.dim is not None:
        chain.dim = 1 - chain.dim
    for i in range(3):
        chain.replace(i, random(20 + i))


def _one_is_whole(chain):
    dim, chain.dim = chain.dim, None
    chain.replace(0, random(20))
    chain.dim = dim


def _one_is_whole_for_a_step(chain):
    _one_is_whole(chain)
    chain.step(2)
    chain.replace(0, random(21))


def _memory_is_in_another_order(chain):
    for i, p in enumerate(chain.params):
        other = local(chain.cut(random(20 + i)))
        if chain.dim is not None:  # a whole one would be numbered otherwise, too
            other = other.t().contiguous().t()
        with torch.no_grad():
            local(p).set_(other)


def _a_state_dict_is_loaded(chain):
    saved = chain.sampler.state_dict()
    chain.step(2)
    chain.sampler.load_state_dict(saved)


def _a_group_is_added(chain):
    chain.params.append(nn.Parameter(chain.cut(random(20))))
    chain.sampler.add_param_group(
        {"params": chain.params[3:], "lr": 0.2, "prior_mean": 0.0}
    )


CHANGES = {
    "other gradients are missing": lambda chain: (
        chain.step(2, without=1),
        chain.step(3, without=2),
    ),
    "a parameter is replaced": lambda chain: chain.replace(1, random(20)),
    "parameters are cut otherwise": _parameters_are_cut_otherwise,
    # A parameter has a master then, and the others have none.
    "another dtype": lambda chain: chain.replace(1, random(20).bfloat16()),
    "one is whole for a step": _one_is_whole_for_a_step,
    "one is whole and one has a master": lambda chain: (
        _one_is_whole(chain),
        chain.replace(1, random(20).bfloat16()),
    ),
    "memory is in another order": _memory_is_in_another_order,
    "a state dict is loaded": _a_state_dict_is_loaded,
    "a group is added": _a_group_is_added,
}


@pytest.mark.parametrize(("kind", "dim"), [*zip(KINDS, (0, 1, 1, 0, 1), strict=True)])
@pytest.mark.parametrize("change", CHANGES)
def test_shards_equal_the_whole_after_changes(mesh, kind, dim, change):
    whole, cut = (Chain(kind, mesh, d) for d in (None, dim))
    for chain in (whole, cut):
        chain.step(0)
        chain.step(1)
        CHANGES[change](chain)
        chain.step(4)
        chain.step(5)
    for p, part in zip(whole.params, cut.params, strict=True):
        expected = p.detach()
        if dtensor.is_dtensor(part):
            expected = expected.chunk(2, part.placements[0].dim)[1]
        assert torch.equal(local(part), expected)


def test_each_gradient_must_be_cut_as_its_parameter(mesh):
    chain = Chain("SGLD", mesh, 0)

    def step(shape, dim):
        grad = DTensor.from_local(torch.ones(shape), mesh, [Shard(dim)])
        assert grad._spec is not chain.params[0]._spec
        chain.params[0].grad = grad
        chain.sampler.step()

    for _ in range(2):
        step((3, 10), 0)
        with pytest.raises(RuntimeError, match="must be cut alike"):
            step((6, 5), 1)
