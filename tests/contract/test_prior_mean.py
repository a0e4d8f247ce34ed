"""prior_mean: priors about other places than 0, in every sampler."""

import collections
import copy
import math

import pytest
import torch
from ecs_data import Data, target_of
from every_sampler import THREE, Chain, bits
from stored_files import through_file
from torch import nn

import torch_sgmcmc as sg

N = 50
SIZES = (3, 37, 2)
SHARED = {"num_data": N, "prior_precision": 2.0, "temperature": 0.9, "seed": 5}
STRONG = {**SHARED, "prior_precision": 100.0}
HMC = {"step_size": 0.05, "num_steps": 3, **SHARED}
ECS = {**SHARED, "subsample_size": 8, "num_blocks": 4, "step_size": 0.4}


def overdamped(p):
    settings = {"momentum": 0.0, "surrogate": "zero", "index_chain_length": 3}
    return sg.EWSG(p, lr=0.01, **settings, **STRONG)


PSGLD = {"lr": 0.02, "eps": 0.1, **SHARED}
ONLINE = {"lr": 1e-3, "momentum": 0.5, "noise_estimate": "online", **SHARED}
SIGNED = {"estimator": "signed", "num_factors": 9, **ECS}
SBPS = {"refresh_rate": 0.5, **SHARED}
#: With how many steps. Samplers of param groups.
SAMPLERS = {
    "SGLD": (9, lambda p: sg.SGLD(p, lr=0.1, **SHARED)),
    "SGHMC": (9, lambda p: sg.SGHMC(p, lr=0.1, noise_estimate=0.02, **SHARED)),
    "SGHMC resampling": (
        9,
        lambda p: sg.SGHMC(p, lr=0.1, resample_momentum_every=3, **SHARED),
    ),
    "SGHMC online": (104, lambda p: sg.SGHMC(p, **ONLINE)),
    "PSGLD": (9, lambda p: sg.PSGLD(p, **PSGLD)),
    "PSGLD without gamma": (9, lambda p: sg.PSGLD(p, gamma=False, **PSGLD)),
    "PSGLD frozen": (9, lambda p: sg.PSGLD(p, adapt=False, **PSGLD)),
    "SGNHT": (9, lambda p: sg.SGNHT(p, lr=0.1, thermostat_rate=2e-3, **SHARED)),
    # A prior so strong that its part of the weights decides.
    "EWSG": (20, lambda p: sg.EWSG(p, lr=0.01, index_chain_length=3, **STRONG)),
    "EWSG overdamped": (20, overdamped),
    "HMC": (8, lambda p: sg.HMC(p, **HMC)),
    "HMC kept": (8, lambda p: sg.HMC(p, **HMC, resample_momentum_every=3)),
    "SBPS": (25, lambda p: sg.SBPS(p, **SBPS)),
    "SBPS preconditioned": (25, lambda p: sg.SBPS(p, preconditioned=True, **SBPS)),
    "HMCECS": (8, lambda p: sg.HMCECS(p, **ECS)),
    "HMCECS signed": (8, lambda p: sg.HMCECS(p, **SIGNED)),
}


class Problem:
    """A loss of θ - c, at θ₀ + c."""

    def __init__(self, shifts):
        g = torch.Generator().manual_seed(3)
        self.shifts = shifts
        start = [0.5 * torch.randn(c.shape, generator=g).double() for c in shifts]
        self.params = [nn.Parameter(x + c) for x, c in zip(start, shifts, strict=True)]
        self.draw = torch.Generator().manual_seed(4)

    def losses(self, index):
        total = torch.zeros(len(index), dtype=torch.float64)
        for p, c in zip(self.params, self.shifts, strict=True):
            x = torch.sin(index.double()[:, None] + torch.arange(p.numel()))
            away = (p - c).flatten() - x
            total = total + (0.5 * away**2 + 0.05 * away**4).sum(dim=1)
        return total

    def minibatch(self):
        return torch.randperm(N, generator=self.draw)[:10]

    def step(self, sampler):
        if isinstance(sampler, sg.HMCECS):
            sampler.step(lambda index: -self.losses(index))
            return
        if isinstance(sampler, sg.SBPS):
            sampler.step(lambda: self.losses(self.minibatch()))
            return

        def closure():
            sampler.zero_grad()
            is_all = isinstance(sampler, sg.HMC)
            loss = self.losses(torch.arange(N) if is_all else self.minibatch()).mean()
            loss.backward(create_graph=sampler.param_groups[0].get("gamma", False))
            return loss

        sampler.step(closure)
        sampler.zero_grad()

    def run(self, kind, groups):
        steps, make = SAMPLERS[kind]
        sampler = make(groups)
        path = []
        for _ in range(steps):
            self.step(sampler)
            there = zip(self.params, self.shifts, strict=True)
            path.append(torch.cat([(p.detach() - c).flatten() for p, c in there]))
        return path


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("kind", SAMPLERS)
def test_it_is_the_model_with_the_origin_elsewhere(kind):
    """A number in one group, tensors in another: the same path about them."""
    origin = Problem([torch.zeros(n, dtype=torch.float64) for n in SIZES])
    first, second = origin.params[:1], origin.params[1:]
    expected = origin.run(kind, [{"params": first}, {"params": second}])
    g = torch.Generator().manual_seed(8)
    means = [torch.randn(n, generator=g).double() for n in SIZES]
    means[0].fill_(1.375)
    moved = Problem(means)
    first, second = moved.params[:1], moved.params[1:]
    groups = [{"params": first, "prior_mean": 1.375}]
    groups.append({"params": second, "prior_mean": means[1:]})
    found = moved.run(kind, groups)
    assert len({*map(bytes, (p.numpy() for p in expected))}) > 3  # it has moved
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("kind", ["SGLD", "EWSG", "HMC", "SBPS", "HMCECS"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_replaced_parameter_needs_a_mean(kind, place):
    """Without one, no parameter of the group had a mean."""
    problem = Problem([torch.full((3,), 7.0, dtype=torch.float64)] * 2)
    sampler = SAMPLERS[kind][1](
        [{"params": problem.params, "prior_mean": problem.shifts}]
    )
    problem.step(sampler)
    new = nn.Parameter(problem.params[place].detach().clone())
    problem.params[place] = sampler.param_groups[0]["params"][place] = new
    before = bits(problem.params)
    for act in (lambda: problem.step(sampler), sampler.reassign_noise_offsets):
        with pytest.raises(ValueError, match=r"shape \[3\] has no prior_mean, and oth"):
            act()
    assert bits(problem.params) == before
    sampler.state[new]["prior_mean"] = problem.shifts[place]
    sampler.reassign_noise_offsets()
    problem.step(sampler)


@pytest.mark.parametrize("chains", [1, 3])
def test_hmc_of_chains_accepts_by_the_right_energy(chains):
    """A prior alone, far from 0: trajectories keep its energy, and are accepted."""
    p = nn.Parameter(torch.full((chains, 40), 30.0, dtype=torch.float64))
    mean = torch.full((chains, 40), 30.0)
    settings = {"num_steps": 4, "num_data": 1, "prior_precision": 4.0}
    sampler = sg.HMC([p], 0.05, num_chains=chains, prior_mean=mean, seed=1, **settings)

    def closure():
        p.grad = torch.zeros_like(p)
        return torch.zeros(chains)

    for _ in range(20):
        sampler.step(closure)
    assert sampler.acceptance_rate > 0.95
    assert float((p.detach() - 30).abs().mean()) > 0.1


def two():
    g = torch.Generator().manual_seed(1)
    return [
        nn.Parameter(torch.randn(3, 2, generator=g)),
        nn.Parameter(torch.randn(5, generator=g).double()),
    ]


def sgld(params, **settings):
    return sg.SGLD(params, 0.1, num_data=N, prior_precision=3.0, seed=2, **settings)


def follow(sampler, params, steps=3):
    for _ in range(steps):
        for p in params:
            p.grad = p.detach().sin()
        sampler.step()
    return [p.detach().clone() for p in params]


def same(a, b):
    return bits(a) == bits(b)


def test_a_number_is_a_tensor_of_equal_numbers():
    ends = []
    for mean in (0.7, torch.tensor(0.7), [torch.full_like(p, 0.7) for p in two()]):
        params = two()
        ends.append(follow(sgld(params, prior_mean=mean), params))
    # As fp32 has it: a number in fp64 is another one where the parameter is in fp64.
    number, scalar, tensors = ends
    assert same(number[0], scalar[0])
    assert same(number, tensors)


def test_parameters_themselves_localise_around_where_they_are():
    params = two()
    start = [p.detach().clone() for p in params]
    sampler = sgld(params, prior_mean=iter(params), temperature=0.0)
    kept = [sampler.state[p]["prior_mean"] for p in params]
    for mean, p, value in zip(kept, params, start, strict=True):
        assert mean.data_ptr() != p.data_ptr()
        assert not mean.requires_grad
        assert mean.dtype == p.dtype
        assert same(mean, value)
    with torch.no_grad():
        for p in params:
            p.add_(1.0)
    for p in params:
        p.grad = torch.zeros_like(p)
    sampler.step()
    for p, value in zip(params, start, strict=True):
        expected = value + 1 - 0.1 * 3.0 / N
        torch.testing.assert_close(p.detach(), expected)
    for mean, value in zip(kept, start, strict=True):
        assert same(mean, value)  # and are left alone


def test_a_lone_tensor_for_a_lone_parameter():
    p = two()[0]
    mean = torch.ones(3, 2)
    sampler = sgld([p], prior_mean=mean)
    mean.zero_()  # it is a copy
    assert same(sampler.state[p]["prior_mean"], torch.ones(3, 2))
    assert sampler.param_groups[0]["prior_mean"] == 0.0
    assert sampler.defaults["prior_mean"] == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_means_of_low_precision_parameters_are_not_rounded(dtype):
    mean = torch.linspace(1, 2, 9) / 3
    ends = []
    for kind in (dtype, torch.float32):
        p = nn.Parameter(torch.ones(9, dtype=kind))
        sampler = sgld([p], prior_mean=mean)
        for _ in range(3):
            p.grad = torch.full_like(p, 0.25)
            sampler.step()
        assert same(sampler.state[p]["prior_mean"], mean)
        loaded = sgld([p])
        loaded.load_state_dict(sampler.state_dict())
        assert same(loaded.state[p]["prior_mean"], mean)
        ends.append(sampler.state[p].get("master", p.detach()))
    assert same(ends[0], ends[1])


def settings_of(sampler):
    """Returns the arguments of the constructor, but for the prior's means."""
    group, spec = sampler.param_groups[0], sampler._SPEC
    names = sampler._group_keys - {*spec.managed, "prior_mean"} | {*spec.shared}
    return {key: group[key] for key in names & {*group}}


@pytest.mark.parametrize("kind", [*THREE, "SBPS", "HMCECS"])
def test_a_chain_resumes_with_its_means(kind):
    """State dicts, before the first step and later."""
    chain = Chain(kind)
    means = [p.detach() * 0.5 + 1 for p in chain.params]
    settings = settings_of(chain.sampler)

    def make(means, seed):
        first, second = {"params": chain.params[:1]}, {"params": chain.params[1:]}
        if means is not None:
            first["prior_mean"], second["prior_mean"] = means[:1], means[1:]
        return type(chain.sampler)([first, second], **settings, seed=seed)

    chain.sampler = make(means, 5)
    before = copy.deepcopy(chain.sampler.state_dict())
    start = [p.detach().clone() for p in chain.params]
    middle = chain.run(range(3))
    saved = through_file(chain.sampler.state_dict())
    end = chain.run(range(3, 6))
    kept = chain.sampler.state_dict()["state"]
    for i, mean in enumerate(means):
        assert same(kept[i]["prior_mean"], mean)
    chain.set(middle)
    chain.sampler = make(None, 99)
    chain.sampler.load_state_dict(saved)
    assert same(chain.run(range(3, 6)), end)
    chain.set(start)
    chain.sampler = make([torch.zeros_like(m) for m in means], 99)
    chain.sampler.load_state_dict(before)
    assert same(chain.run(range(6)), end)


def _cleared(sampler, way):
    if way == "clear":
        sampler.state.clear()
    elif way == "dicts":
        for p in [*sampler.state]:
            sampler.state[p] = {}
    else:
        sampler.state = collections.defaultdict(dict)


@pytest.mark.parametrize("way", ["clear", "dicts", "state"])
@pytest.mark.parametrize("kind", [*THREE, "SGNHT", "SBPS", "SBPS preconditioned"])
def test_means_stay_when_a_user_clears_the_state(kind, way):
    """Restarts of momenta clear it."""
    ends = []
    for mean in (2.0, [torch.full((n,), 2.0) for n in (3, 130, 4)]):
        chain = Chain(kind)
        settings = settings_of(chain.sampler)
        settings |= {"prior_mean": mean, "prior_precision": 5.0}
        chain.sampler = type(chain.sampler)(chain.params, **settings, seed=5)
        chain.run(range(3))
        _cleared(chain.sampler, way)
        ends.append(chain.run(range(3, 9)))
        if mean != 2.0:
            kept = chain.sampler.state_dict()["state"]
            assert all(float(kept[i]["prior_mean"].mean()) == 2 for i in range(3))
    assert same(*ends)


def test_all_that_reads_means_finds_them_after_the_state_was_cleared():
    p, q = (nn.Parameter(torch.zeros(500)) for _ in range(2))
    samplers = [
        sg.SGLD([p], 0.1, num_data=1, prior_precision=4.0, prior_mean=mean, seed=1)
        for p, mean in ((p, 3.0), (q, [torch.full((500,), 3.0)]))
    ]
    for read in (lambda s: s.draw_from_prior(), lambda s: sg.GammaPrecision(s).step()):
        samplers[1].state.clear()
        found = [read(sampler) for sampler in samplers]
        assert found[0] == found[1] and torch.equal(p, q)
    samplers[1].state.clear()
    kept = samplers[1].state_dict()["state"][0]["prior_mean"]
    assert torch.equal(kept, torch.full((500,), 3.0))


def test_masses_and_preconditioners_stay_when_a_user_clears_the_state():
    hmc, sbps = Chain("HMC"), Chain("SBPS preconditioned")
    given = [torch.full_like(p, 3.0).detach() for p in hmc.params]
    hmc.sampler.set_mass(given)
    sbps.sampler.set_preconditioner(given)
    for chain, key in ((hmc, "mass"), (sbps, "preconditioner")):
        chain.run(range(2))
        chain.sampler.state.clear()
        chain.run(range(2, 4))
        state = chain.sampler.state_dict()["state"]
        assert same([state[i][key] for i in range(3)], given)
    # What is taken back stays so.
    hmc.sampler.set_mass(None)
    hmc.run(range(4, 6))
    assert "mass" not in hmc.sampler.state[hmc.params[0]]


def test_a_number_can_be_changed():
    params = two()
    start = [p.detach().clone() for p in params]
    sampler = sgld(params, prior_mean=-1.0)
    sampler.param_groups[0]["prior_mean"] = 2
    after = follow(sampler, params)
    with torch.no_grad():
        for p, value in zip(params, start, strict=True):
            p.copy_(value)
    assert same(after, follow(sgld(params, prior_mean=2), params))


def test_in_words():
    params = two()
    group = {"params": params[1:], "prior_mean": 0.25}
    sampler = sgld([{"params": params[:1], "prior_mean": [params[0]]}, group])
    text = sampler.target_summary()
    assert "Σ λ‖θ − μ‖²/2" in text
    assert "prior N(μ, 0.3333) on each" in text
    assert "prior N(0.25, 0.3333) on each" in text
    assert "Σ λ‖θ‖²/2" in sgld(two()).target_summary()


@pytest.mark.parametrize("mean", [10.0, None], ids=["number", "tensors"])
def test_gamma_precision_uses_distances_from_the_mean(mean):
    drawn = []
    for shift in (0.0, 10.0):
        params = [nn.Parameter(p.detach().double() + shift) for p in two()]
        given = [torch.full_like(p, shift) for p in params] if mean is None else shift
        precision = sg.GammaPrecision(sgld(params, prior_mean=given))
        drawn.append(precision.step()[0])
    assert drawn[1] == pytest.approx(drawn[0], rel=1e-12)


@pytest.mark.parametrize("tensors", [False, True])
def test_temperatures_use_the_whole_gradient(tensors):
    readings = []
    for shift in (0.0, 4.0):
        p = nn.Parameter(torch.full((200,), shift, dtype=torch.float64))
        mean = torch.full_like(p, shift) if tensors else shift
        prior = {"prior_precision": 5, "prior_mean": mean}
        sampler = sg.SGLD([p], 0.5, num_data=10, seed=1, **prior)
        monitor = sg.TemperatureMonitor(sampler, every=1, center="prior_mean")
        for _ in range(200):
            p.grad = torch.zeros_like(p)
            sampler.step()
        readings.append(monitor.all().configurational)
    assert readings[0].mean == pytest.approx(readings[1].mean, rel=1e-9)
    assert readings[1].mean == pytest.approx(1.0, abs=0.3)


def test_errors():
    params = two()

    def refused(mean, error, words):
        with pytest.raises(error) as info:
            sgld(params, prior_mean=mean)
        assert words in str(info.value)

    good = [p.detach() for p in params]
    refused(good[:1], ValueError, "prior_mean: 1 tensors for a group of 2 parameters")
    refused(good[::-1], ValueError, "number 0 has shape [5] (must be [3, 2], its ")
    refused([good[0], good[1].long()], ValueError, "number 1 is of torch.int64")
    refused([good[0], good[1] / 0], ValueError, "number 1 has elements that are not")
    refused([good[0], 1.0], TypeError, "number 1 is a float (must be a Tensor)")
    refused(torch.tensor(math.inf), ValueError, "Invalid prior_mean: inf")
    with pytest.raises(ValueError, match="give each group its own prior_mean"):
        sgld([{"params": [p]} for p in params], prior_mean=[good[0]])
    sampler = sgld(params[:1], prior_mean=good[:1])
    with pytest.raises(ValueError, match="give each group its own prior_mean"):
        sampler.add_param_group({"params": params[1:]})
    sampler.add_param_group({"params": params[1:], "prior_mean": 0.0})


def test_errors_change_nothing():
    params = two()
    sampler = sgld(params[:1], prior_mean=[torch.ones(3, 2)])
    with pytest.raises(ValueError, match="has shape"):
        sampler.add_param_group({"params": params[1:], "prior_mean": [torch.ones(2)]})
    assert len(sampler.param_groups) == 1
    assert list(sampler.state) == params[:1]
    group = sampler.param_groups[0]
    group["prior_mean"] = torch.ones(3, 2)
    params[0].grad = torch.ones(3, 2)
    with pytest.raises(TypeError, match=r'state\[p\]\["prior_mean"\]'):
        sampler.step()
    group["prior_mean"] = 0.0
    saved = sampler.state_dict()
    saved["state"][0]["prior_mean"] = torch.full((3, 2), math.nan)
    with pytest.raises(ValueError, match="prior_mean of parameter 0 has elements"):
        sampler.load_state_dict(saved)
    both = sgld(params, prior_mean=params)
    saved = both.state_dict()
    saved["state"] = {0: dict(saved["state"][0])}
    with pytest.raises(ValueError, match="parameter 1 has no prior_mean"):
        both.load_state_dict(saved)
    assert same(both.state[params[1]]["prior_mean"], params[1].detach())


def test_ecs_sees_a_mean_that_was_written_to():
    """The density at the last draw is then another one."""
    ends = []
    for written in (False, True):
        data = Data()
        settings = {**ECS, "num_data": 60, "prior_mean": data.params}
        sampler = sg.HMCECS(data.params, **settings)
        sampler.step(data)
        if written:
            sampler.state[data.params[0]]["prior_mean"].add_(5.0)
        target = target_of(sampler, data)
        former, present = sampler._last
        assert target.density.is_equal(former) == (not written)
        ends.append(target.at(sampler._subsample(target), present.theta).log)
    assert ends[0] - ends[1] > 5
