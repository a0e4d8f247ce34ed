"""Chains side by side: each is, bit for bit, the chain that runs alone."""

import copy
import pickle
from functools import partial

import pytest
import torch
from failed_steps import refused
from harness.exactness import assert_same
from short_chains import ALIKE, kept_state
from stored_files import contents
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional as F

import torch_sgmcmc as sg
from torch_sgmcmc.core import ops as ops

CHAINS, SEED = 3, -(2**61)
#: More than a noise block, a part of one, and one that is moved by a matrix below.
SHAPES = ((9, 17), (5,), (1,), (3, 4, 2, 5))
SAMPLERS = {
    **{name: (cls, {"prior_precision": 3.0}) for name, cls in ALIKE.items()},
    "SGHMC": (sg.SGHMC, {"momentum": 0.8, "resample_momentum_every": 4}),
    "SGHMC-online": (sg.SGHMC, {"momentum": 0.1, "noise_estimate": "online"}),
    "PSGLD": (sg.PSGLD, {"gamma": False}),
    "PSGLD-frozen": (sg.PSGLD, {"adapt": False}),
    "SGNHT": (sg.SGNHT, {"momentum": 0.7}),
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def normal(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Chains:
    """Chains in one sampler, and the same ones in a sampler each."""

    def __init__(self, name, *dtypes, **options):
        self.method, self.options = SAMPLERS[name][0], dict(SAMPLERS[name][1])
        self.options.update(options, lr=0.01, num_data=50)
        self.together = [
            normal(CHAINS, *shape, seed=i).to(dtypes[i % len(dtypes)]).requires_grad_()
            for i, shape in enumerate(SHAPES)
        ]
        with torch.no_grad():  # another order in memory, chain by chain
            last = self.together[-1]
            last.data = last.permute(0, 2, 4, 1, 3).contiguous().permute(0, 3, 1, 4, 2)
        self.alone = [
            [p.detach()[k].clone().requires_grad_() for p in self.together]
            for k in range(CHAINS)
        ]
        self.sampler = self.make(self.together, seed=SEED, num_chains=CHAINS)
        self.samplers = self.make_alone()
        self.step_number = 0

    def make(self, params, *, means=None, **arguments):
        groups = [{"params": params[:2]}, {"params": params[2:], "temperature": 2.0}]
        if means is not None:
            groups[1]["prior_mean"] = means
        return self.method(groups, **self.options, **arguments)

    def make_alone(self, means=None):
        """Samplers of chains by themselves, of which each has its part of the means."""
        own = [means and [mean[k] for mean in means] for k in range(CHAINS)]
        seeds = [sg.fold_in(SEED, k) for k in range(CHAINS)]
        each = zip(self.alone, seeds, own, strict=True)
        return [self.make(params, seed=seed, means=m) for params, seed, m in each]

    def step(self, *, missing=None):
        for i, p in enumerate(self.together):
            grad = normal(*p.shape, seed=100 * self.step_number + i).to(p.dtype)
            p.grad = None if i == missing else grad
            for k, params in enumerate(self.alone):
                params[i].grad = None if i == missing else grad[k].clone()
        self.step_number += 1
        for sampler in (self.sampler, *self.samplers):
            sampler.step()

    def assert_same(self):
        each = zip(self.alone, self.samplers, strict=True)
        for k, (params, sampler) in enumerate(each):
            for p, own in zip(self.together, params, strict=True):
                assert torch.equal(p[k], own), k
                for key, value in kept_state(sampler).get(own, {}).items():
                    theirs = self.sampler.state[p][key]
                    if torch.is_tensor(value):
                        theirs = theirs[k]
                    assert_same(theirs, value)


@pytest.mark.parametrize("name", SAMPLERS)
def test_each_is_the_chain_alone(name):
    chains = Chains(name, *DTYPES)
    begun = [p.detach().clone() for p in chains.together]
    for i in range(110 if name == "SGHMC-online" else 12):
        chains.step(missing=1 if i == 5 else None)
    chains.assert_same()
    for p, before in zip(chains.together, begun, strict=True):
        assert (p != before).any()
    # And no two are alike.
    moved = chains.together[0] - begun[0]
    assert not torch.equal(moved[0], moved[1])


@pytest.mark.parametrize("threads", [1, 2])
def test_large_chains(threads, set_threads):
    """Chains in several stretches of work, and in blocks of a GPU's threads."""
    set_threads(threads)
    p = torch.zeros(2, 20001)
    p.grad = torch.zeros_like(p)
    sg.SGLD([p], 0.1, num_data=1, num_chains=2, seed=1).step()
    for k in range(2):
        alone = torch.zeros(20001)
        alone.grad = torch.zeros_like(alone)
        sg.SGLD([alone], 0.1, num_data=1, seed=sg.fold_in(1, k)).step()
        assert torch.equal(p[k], alone)


def test_priors_means_belong_to_chains():
    chains = Chains("SGHMC", torch.float32, prior_precision=40.0)
    means = [normal(*p.shape, seed=9) for p in chains.together[2:]]
    whole = {"seed": SEED, "num_chains": CHAINS, "means": means}
    chains.sampler = chains.make(chains.together, **whole)
    chains.samplers = chains.make_alone(means)
    for _ in range(3):
        chains.step()
    chains.assert_same()


def nets(count, dtype):
    torch.manual_seed(0)
    layers = ((nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)) for _ in range(count))
    return [nn.Sequential(*each).to(dtype) for each in layers]


def test_networks_in_one():
    """The documented way: stacked by torch.func, a loop as for one chain."""
    models = nets(CHAINS, torch.float64)
    params, buffers = stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")

    def outputs(params, x):
        return functional_call(base, (params, buffers), (x,))

    options = {"lr": 0.05, "num_data": 64, "prior_precision": 1.0}
    sampler = sg.SGHMC(params.values(), num_chains=CHAINS, seed=SEED, **options)
    alone = [
        sg.SGHMC(model.parameters(), seed=sg.fold_in(SEED, k), **options)
        for k, model in enumerate(models)
    ]
    x, y = normal(64, 6, seed=1).double(), torch.arange(64) % 3
    for _ in range(20):
        sampler.zero_grad()
        logits = vmap(outputs, (0, None))(params, x)
        losses = vmap(F.cross_entropy, (0, None))(logits, y)
        losses.sum().backward()
        sampler.step()
        for model, one in zip(models, alone, strict=True):
            one.zero_grad()
            F.cross_entropy(model(x), y).backward()
            one.step()
    for k, model in enumerate(models):
        for name, p in model.named_parameters():
            # Gradients of a stack are rounded in another order.
            torch.testing.assert_close(params[name][k], p, rtol=1e-9, atol=1e-9)


def test_a_correction_equals_that_of_each_chain():
    """PSGLD's Γ, where gradients that are 0 begin with the chain's own mean."""
    together = normal(CHAINS, 40, seed=3).double().requires_grad_()
    alone = [together.detach()[k].clone().requires_grad_() for k in range(CHAINS)]
    scale = normal(CHAINS, 40, seed=4).double().abs()
    scale[:, :7] = 0
    options = {"lr": 1e-3, "num_data": 10, "decay": 0.9}
    sampler = sg.PSGLD([together], num_chains=CHAINS, seed=SEED, **options)
    samplers = [
        sg.PSGLD([p], seed=sg.fold_in(SEED, k), **options) for k, p in enumerate(alone)
    ]
    for _ in range(5):
        loss = (scale * together**4).sum()
        (together.grad,) = torch.autograd.grad(loss, together, create_graph=True)
        sampler.step()
        for k, p in enumerate(alone):
            loss = (scale[k] * p**4).sum()
            (p.grad,) = torch.autograd.grad(loss, p, create_graph=True)
            samplers[k].step()
    for k, p in enumerate(alone):
        assert torch.equal(together[k], p)


def make(**arguments):
    p = torch.zeros(CHAINS, 4, requires_grad=True)
    return p, sg.SGHMC([p], 0.1, num_data=10, **arguments)


def steps(p, sampler, first, count):
    for i in range(first, first + count):
        p.grad = normal(*p.shape, seed=i)
        sampler.step()


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_a_chain_resumes(copied):
    p, sampler = make(num_chains=CHAINS, seed=5)
    steps(p, sampler, 0, 6)
    q, other = make(num_chains=CHAINS, seed=6)
    steps(q, other, 0, 3)
    r, third = make(num_chains=CHAINS, seed=5)
    steps(r, third, 0, 3)
    other.load_state_dict(copied(third.state_dict()))
    with torch.no_grad():
        q.copy_(r)
    steps(q, other, 3, 3)
    assert torch.equal(p, q)
    s = copied(third)
    t = s.param_groups[0]["params"][0]
    steps(t, s, 3, 3)
    assert torch.equal(p, t)


def test_a_group_added_later_follows():
    _, sampler = make(num_chains=CHAINS, seed=5)
    q = torch.zeros(CHAINS, 300, requires_grad=True)
    sampler.add_param_group({"params": [q]})
    r = torch.zeros(CHAINS, 2, requires_grad=True)
    sampler.add_param_group({"params": [r]})
    # Numbered as of one chain: 4 elements, then 300.
    assert [g["offsets"] for g in sampler.param_groups] == [[0], [128], [512]]
    with pytest.raises(ValueError, match=r"'num_chains' is managed by SGHMC"):
        sampler.add_param_group({"params": [torch.zeros(3)], "num_chains": 3})


CLASSES = (sg.SGLD, sg.SGHMC, sg.PSGLD, sg.SGNHT, sg.EWSG)


@pytest.mark.parametrize("method", [*CLASSES, partial(sg.HMC, num_steps=3)])
def test_what_is_refused(method):
    p = torch.zeros(CHAINS, 4, requires_grad=True)
    shape_of = "shape {} (must have a leading dimension of num_chains = {})"
    message = f"Invalid parameter: {shape_of}"
    sampler = method([p], 0.1, num_data=10, num_chains=CHAINS)
    for shape in ([4, 3], []):
        q = torch.zeros(shape, requires_grad=True)
        with refused(ValueError, message.format(shape, CHAINS)):
            method([p, q], 0.1, num_data=10, num_chains=CHAINS)
        with refused(ValueError, message.format(shape, CHAINS)):
            sampler.add_param_group({"params": [q]})
    assert len(sampler.param_groups) == 1
    with pytest.raises(ValueError, match="has num_chains"):
        sg.GammaPrecision(sampler)
    # Of other numbers of chains.
    saved = sampler.state_dict()
    saved["param_groups"][0]["num_chains"] = 2
    with refused(ValueError, message.format([CHAINS, 4], 2)):
        sampler.load_state_dict(saved)
    assert sampler.param_groups[0]["num_chains"] == CHAINS


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("method", [*CLASSES, partial(sg.HMC, num_steps=3), sg.MCLMC])
def test_a_number_that_is_written_later(method, steps_before):
    if method is sg.PSGLD:
        method = partial(sg.PSGLD, gamma=False)
    for before, after in ((CHAINS, None), (None, CHAINS), (CHAINS, 1)):
        p = torch.ones(CHAINS, 4, requires_grad=True)
        sampler = method([p], 0.01, num_data=10, num_chains=before, seed=0)

        def closure(p=p, before=before):
            p.grad = p.detach().clone()
            return torch.zeros(before or ())

        for _ in range(steps_before):
            sampler.step(closure)
        (group,) = sampler.param_groups
        group["num_chains"] = after
        here = p.detach().clone()
        with pytest.raises(ValueError, match=rf"^Invalid num_chains: {after} \(it was"):
            sampler.step(closure)
        assert torch.equal(p, here)
        group["num_chains"] = before
        sampler.step(closure)


def test_what_operators_refuse():
    target = {"lr": 0.1, "num_data": 1, "prior_precision": 0, "temperature": 1}
    arguments = {**target, "offsets": [0], "seed": 0, "step": 0}
    p = torch.zeros(3, 4)
    for wrong in ({"num_chains": -1}, {"num_chains": 3, "rows": [0, 0]}):
        with pytest.raises(RuntimeError, match="Invalid num_chains"):
            ops.sgld_step_([p], [p.clone()], [], **arguments, **wrong)
    for chains in (1, 2, 12):
        with pytest.raises(RuntimeError, match=f"leading dimension of {chains} chains"):
            ops.sgld_step_([p], [p.clone()], [], **arguments, num_chains=chains)
    assert not p.any()


def test_a_gradient_that_is_not_finite_stops_all():
    p, sampler = make(num_chains=CHAINS, seed=5, nonfinite="skip")
    p.grad = torch.ones_like(p)
    p.grad[1, 2] = torch.nan
    sampler.step()
    assert sampler.num_skipped == 1
    assert not p.any()


def test_each_chain_has_its_draws(tmp_path):
    """A store takes them side by side, each as the draws of a model alone."""
    models = nets(CHAINS, torch.float32)
    params, _ = stack_module_state(models)
    sampler = sg.SGLD(params.values(), 0.1, num_data=10, num_chains=CHAINS, seed=1)
    stacks = [{k: p.detach()[i] for k, p in params.items()} for i in range(CHAINS)]
    collectors = [
        sg.Collector(sampler, stack, tmp_path / "together", chain=k)
        for k, stack in enumerate(stacks)
    ]
    seeds = [sg.fold_in(1, k) for k in range(CHAINS)]
    alone = [
        sg.SGLD(model.parameters(), 0.1, num_data=10, seed=seed)
        for model, seed in zip(models, seeds, strict=True)
    ]
    collectors += [
        sg.Collector(one, dict(model.named_parameters()), tmp_path / "alone", chain=k)
        for k, (one, model) in enumerate(zip(alone, models, strict=True))
    ]
    for _ in range(4):
        for p in (*params.values(), *(p for m in models for p in m.parameters())):
            p.grad = torch.zeros_like(p)
        for each in (sampler, *alone):
            each.step()
    for collector in collectors:
        collector.close()
    stores = (tmp_path / "together", tmp_path / "alone")
    together, apart = (contents(store)["draws"] for store in stores)
    assert together == apart
    assert len(sg.SampleStore(tmp_path / "together")) == 4 * CHAINS
