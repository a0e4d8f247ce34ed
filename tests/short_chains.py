"""Short chains of every sampler, for tests that compare them bit for bit."""

from itertools import count

import torch
from operator_tensors import by_gradients
from reference import same_bits
from torch import nn

import torch_sgmcmc as sg
from torch_sgmcmc.core import ops as ops

TARGET = {"lr": 0.1, "num_data": 50.0, "prior_precision": 2.0, "temperature": 0.9}
#: Samplers that go by gradients, what all of them take, and perhaps momenta: SGLD, and
#: whoever is like it.
ALIKE = {
    name: cls
    for name, cls in vars(sg).items()
    if isinstance(cls, type)
    and issubclass(cls, sg.Sampler)
    and hasattr(cls, "_SPEC")
    and cls._SPEC.operator is not None
    and cls._SPEC.operator.function in [getattr(ops, op) for op in by_gradients()]
}
#: Those that keep nothing.
PLAIN = {
    k: cls
    for k, cls in ALIKE.items()
    if cls._SPEC.operator.state.keys() <= {"master", "prior_mean"}
}
assert "SGLD" in PLAIN
CLASSES = (
    *ALIKE.values(),
    sg.SGHMC,
    sg.MCLMC,
    sg.PSGLD,
    sg.SGNHT,
    sg.EWSG,
    sg.HMC,
    sg.HMCECS,
    sg.SBPS,
)
KINDS = {
    **{name: (cls, {}) for name, cls in ALIKE.items()},
    "SGHMC": (sg.SGHMC, {"momentum": 0.9}),
    "SGHMC resampling": (sg.SGHMC, {"momentum": 0.9, "resample_momentum_every": 3}),
    "SGHMC online": (sg.SGHMC, {"momentum": 0.5, "noise_estimate": "online"}),
    "SGHMC with means": (sg.SGHMC, {"momentum": 0.8, "resample_momentum_every": 3}),
    "SGHMC capturable": (sg.SGHMC, {"momentum": 0.9, "capturable": True}),
    "MCLMC": (sg.MCLMC, {"momentum": 0.8}),
    "MCLMC tuning": (sg.MCLMC, {"tune_steps": 40}),
    "MCLMC capturable": (sg.MCLMC, {"momentum": 0.8, "capturable": True}),
    "EWSG": (sg.EWSG, {"momentum": 0.9, "index_chain_length": 2}),
    "EWSG overdamped": (sg.EWSG, {"momentum": 0.0, "surrogate": "zero"}),
    "EWSG persistent": (sg.EWSG, {"persistent_index_chain": True}),
    "HMC": (sg.HMC, {"num_steps": 3}),
    "HMC of given length": (
        sg.HMC,
        {"trajectory_length": 0.2, "resample_momentum_every": 3},
    ),
    "HMC without test": (
        sg.HMC,
        {"num_steps": 1, "metropolis": False, "resample_momentum_every": 0},
    ),
    "PSGLD": (sg.PSGLD, {"decay": 0.8, "eps": 0.1}),
    "PSGLD without gamma": (sg.PSGLD, {"decay": 0.8, "eps": 0.1, "gamma": False}),
    "PSGLD frozen": (sg.PSGLD, {"eps": 0.1, "adapt": False}),
    "PSGLD capturable": (sg.PSGLD, {"eps": 0.1, "gamma": False, "capturable": True}),
    "SGNHT": (sg.SGNHT, {"momentum": 0.9}),
    "SGNHT fast": (sg.SGNHT, {"momentum": 0.9, "thermostat_rate": 2e-3}),
    "SGNHT capturable": (sg.SGNHT, {"momentum": 0.9, "capturable": True}),
}
#: A sampler without state, one with momenta, one that calls closures: what their base
#: class does is tested with these.
THREE = ("SGLD", "SGHMC", "HMC")
#: Whose parameters have state before the first step.
WITH_MEANS = "SGHMC with means"
#: Those that do not ask their closure for minibatches by number.
ANY_DRAWS = [kind for kind in KINDS if kind != "EWSG persistent"]
SIZES = (3, 128, 257, 1, 40, 1000)


def kept_state(sampler):
    """Returns the state of the parameters without the step counter."""
    kept = {
        p: {key: value for key, value in state.items() if key != "step"}
        for p, state in sampler.state.items()
    }
    return {p: state for p, state in kept.items() if state}


def make_params(dtype=torch.float32):
    g = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(n, generator=g).to(dtype)) for n in SIZES]


def make(kind, params, seed=5, **hyperparameters):
    cls, options = KINDS[kind]
    settings = {**TARGET, **options, **hyperparameters}
    if cls is sg.HMC:  # a step size that accepts some trajectories and rejects others
        settings["step_size"] = 0.6 * settings.pop("lr")
    if kind == WITH_MEANS:
        params = with_means(params)
    return cls(params, **settings, seed=seed)


def with_means(params):
    """Groups whose priors have tensors of means, however parameters are grouped."""
    groups = list(params)
    if not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    for group in groups:
        group["params"] = list(group["params"])
        group["prior_mean"] = [
            torch.linspace(-0.5, 0.5, p.numel(), device=p.device).view(p.shape)
            for p in group["params"]
        ]
    return groups


def needs_closure(sampler):
    """Returns whether a step takes a closure."""
    return isinstance(sampler, (sg.EWSG, sg.HMC))


def twin_of(sampler, params):
    """A sampler of the same class, with other hyperparameters and another seed."""
    if isinstance(sampler, sg.HMC):
        return sg.HMC(params, step_size=1.0, num_steps=1, num_data=1, seed=99)
    return type(sampler)(params, lr=1.0, num_data=1, seed=99)


def set_grads(params, step, draw=0):
    """Gradients of ‖θ‖²/2 with minibatch noise that depends on step and draw alone.

    They carry a graph, as after ``backward(create_graph=True)``.
    """
    g = torch.Generator().manual_seed(1000 + step + 10_000 * draw)
    for p in params:
        noise = 0.02 * torch.randn(p.shape, generator=g).to(p.device)
        p.grad = (p.float() + noise).to(p.dtype)


def minibatch_of(sampler, step, call):
    """Step and draw that the gradients of a call of the closure depend on."""
    if sampler.param_groups[0].get("persistent_index_chain", False):
        (number,) = sampler.minibatches.tolist()
        return 0, number
    return step, call


def take_step(sampler, params, step, edit=lambda: None):
    """One step with :func:`set_grads`; ``edit`` may change the gradients."""
    draws = count()

    def closure():
        set_grads(params, *minibatch_of(sampler, step, next(draws)))
        edit()
        halves = [p.detach().double().square().sum() / 2 for p in params]
        return torch.stack(halves).sum()

    if needs_closure(sampler):
        sampler.step(closure)
    else:
        closure()
        sampler.step()


def advance(sampler, params, steps):
    for step in steps:
        take_step(sampler, params, step)
    return params


def assert_same(a, b):
    for x, y in zip(a, b, strict=True):
        assert same_bits(x, y)


def one_parameter(numel=5):
    """A parameter with a gradient."""
    p = nn.Parameter(torch.linspace(-1, 1, numel))
    p.grad = torch.linspace(0.5, 2, numel)
    return p


def two():
    """A row in fp32 and a matrix in fp64."""
    g = torch.Generator().manual_seed(9)
    return [
        nn.Parameter(torch.randn(7, generator=g)),
        nn.Parameter(torch.randn(3, 2, generator=g, dtype=torch.float64)),
    ]
