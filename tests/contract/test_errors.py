"""Every error of the samplers: its exact text, and that nothing has changed."""

import pytest
import torch
from every_sampler import bits
from failed_steps import refused
from torch import nn

import torch_sgmcmc as sg

GOOD = {"lr": 0.1, "num_data": 10, "seed": 0}
# Without state, with momenta, with closures. Numbers out of range: test_settings.py.
KINDS = [sg.SGLD, sg.SGHMC, sg.EWSG]
each_kind = pytest.mark.parametrize("kind", KINDS)


def parameter(seed=0, **options):
    g = torch.Generator().manual_seed(seed)
    p = nn.Parameter(torch.randn(4, 3, generator=g, **options))
    p.grad = torch.ones_like(p)
    return p


def step(sampler):
    """A step with the gradients that are there."""
    if not isinstance(sampler, sg.EWSG):
        sampler.step()
        return
    params = [p for group in sampler.param_groups for p in group["params"]]
    grads = [p.grad for p in params]

    def closure():
        for p, grad in zip(params, grads, strict=True):
            p.grad = None if grad is None else grad.clone()

    sampler.step(closure)


def snapshot(sampler):
    """Parameters, gradients and state, to the bit."""
    params = [p for group in sampler.param_groups for p in group["params"]]
    grads = [None if p.grad is None else p.grad.to_dense() for p in params]
    return bits([params, grads, sampler.state_dict()])


def step_fails(sampler, kind, message):
    """The step fails twice in the same way, and changes nothing at all."""
    before = snapshot(sampler)
    for _ in range(2):
        with refused(kind, message):
            step(sampler)
        assert snapshot(sampler) == before


FRICTION = (
    "must not exceed the friction 1 - momentum = 0.25: lower momentum or lr, or take "
    "larger minibatches"
)


def options(kind):
    # Gradients are set by hand here, without the graph that Γ needs.
    momentum = {"momentum": 0.75}
    extra = {sg.SGHMC: momentum, sg.EWSG: momentum, sg.PSGLD: {"gamma": False}}
    return GOOD | extra.get(kind, {})


@each_kind
def test_bad_seeds(kind):
    for seed, shown in ((1.0, "float"), (True, "bool"), ("7", "str")):
        wanted = f"must be an int or None, got {shown}"
        with refused(TypeError, f"Invalid seed: {seed!r} ({wanted})"):
            kind([parameter()], lr=0.1, num_data=1, seed=seed)
    for seed in (2**63, -(2**63) - 1):
        with refused(ValueError, f"Invalid seed: {seed} (must fit in 64 bits)"):
            kind([parameter()], lr=0.1, num_data=1, seed=seed)
    for seed in (2**63 - 1, -(2**63)):
        assert kind([parameter()], lr=0.1, num_data=1, seed=seed).seed == seed


@pytest.mark.parametrize("kind", [sg.SGLD, sg.SGHMC])
def test_bad_capturable(kind):
    with refused(TypeError, "Invalid capturable: 1 (must be a bool)"):
        kind([parameter()], **GOOD, capturable=1)


def test_noise_estimate_needs_noise():
    for estimate in (0.1, "online"):
        wanted = "must be 0 at temperature 0, where no noise is injected"
        with refused(ValueError, f"Invalid noise_estimate: {estimate!r} ({wanted})"):
            sg.SGHMC([parameter()], **GOOD, temperature=0, noise_estimate=estimate)


def test_noise_estimate_above_the_friction():
    text, settings = f"Invalid noise_estimate: 0.3 ({FRICTION})", {"momentum": 0.75}
    with refused(ValueError, text):
        sg.SGHMC([parameter()], **GOOD, **settings, noise_estimate=0.3)
    sampler = sg.SGHMC([parameter()], **GOOD, **settings)
    with refused(ValueError, text):
        sampler.add_param_group({"params": [parameter(1)], "noise_estimate": 0.3})


def test_an_estimate_that_excludes_capturable():
    why = "is checked on the host at every step and excludes capturable=True"
    with refused(ValueError, f"Invalid noise_estimate: 'online' {why}"):
        sg.SGHMC([parameter()], **GOOD, noise_estimate="online", capturable=True)


def test_a_scheduler_raises_momentum_too_far():
    sampler = sg.SGHMC([parameter()], **GOOD, momentum=0.5, noise_estimate=0.25)
    cycle = {"step_size_up": 2, "base_momentum": 0.5, "max_momentum": 0.9}
    scheduler = torch.optim.lr_scheduler.CyclicLR(sampler, 0.1, 0.1, **cycle)
    text = f"Invalid noise_estimate: 0.25 ({FRICTION.replace('0.25', '0.1')})"
    for momentum in (0.9, 0.7, 0.5, 0.7, 0.9):
        assert sampler.param_groups[0]["momentum"] == pytest.approx(momentum)
        if momentum < 0.75:
            sampler.step()
        else:
            step_fails(sampler, ValueError, text)
        scheduler.step()
    assert sampler.param_groups[0]["step"] == 3


def test_online_estimate_above_the_friction():
    p, q = parameter(), parameter(1)
    groups = [{"params": [q]}, {"params": [p]}]
    sampler = sg.SGHMC(groups, **GOOD, momentum=0.5, noise_estimate="online")
    size = torch.full((4, 3), 0.1)
    size[2, 1] = 2.0  # half the mean squared difference: 2 * 2.0^2 = 8
    for step in range(100):
        p.grad = size if step % 2 == 0 else -size
        sampler.step()
    p.grad = size

    def kept():
        return bits([[q, p], [sampler.state[each]["momentum"] for each in (q, p)]])

    before = kept()
    # beta = lr N Var / (2 T) = 0.1 * 10 * 8 / 2
    text = (
        "Invalid noise_estimate: 4 in the noisiest coordinate. No parameter has "
        f"changed; the gradients have entered the estimate ({FRICTION})"
    )
    with refused(ValueError, text.replace("0.25", "0.5")):
        sampler.step()
    assert kept() == before
    assert sampler.param_groups[0]["step"] == sampler.param_groups[1]["step"] == 100
    assert sampler.state[p]["num_grads"] == 101
    # Lowering lr, as the message says, lets the chain go on.
    sampler.param_groups[1]["lr"] = 1e-3
    sampler.step()
    assert sampler.param_groups[0]["step"] == 101


def test_gamma_needs_a_graph():
    p, q = parameter(), parameter(1)
    sampler = sg.PSGLD([{"params": [p]}, {"params": [q], "gamma": False}], **GOOD)
    text = (
        "PSGLD got gradients without a graph, and Γ needs second derivatives: call "
        "loss.backward(create_graph=True), or set gamma=False and stop adaptation "
        "(adapt=False) after burn-in"
    )
    step_fails(sampler, RuntimeError, text)
    # Each of the three ways out that the message names.
    p.grad = None
    p.square().sum().backward(create_graph=True)
    sampler.step()
    p.grad = torch.ones_like(p)
    sampler.param_groups[0]["gamma"] = False
    sampler.step()
    sampler.param_groups[0].update(gamma=True, adapt=False)
    sampler.step()
    assert sampler.param_groups[0]["step"] == 3


def test_gamma_excludes_capturable():
    text = "True needs second derivatives from autograd and excludes capturable=True"
    text = f"Invalid gamma: {text} (set gamma=False, or adapt=False)"
    with refused(ValueError, text):
        sg.PSGLD([parameter()], **GOOD, capturable=True)
    for options in ({"gamma": False}, {"adapt": False}):
        sg.PSGLD([parameter()], **GOOD, **options, capturable=True).step()


@each_kind
def test_sparse_gradients(kind):
    first = parameter()
    embedding = nn.Embedding(6, 2, sparse=True)
    groups = [{"params": [first]}, {"params": embedding.parameters()}]
    sampler = kind(groups, **options(kind))
    embedding(torch.tensor([1, 4])).sum().backward()
    text = (
        f"{kind.__name__} does not support sparse gradients: got one of layout "
        "torch.sparse_coo for a parameter of shape [6, 2] (for nn.Embedding, use "
        "sparse=False)"
    )
    step_fails(sampler, RuntimeError, text)


@pytest.mark.parametrize("kind", [sg.SGLD, sg.SGHMC, sg.EWSG])
@pytest.mark.parametrize("observed", [False, True])
def test_a_sparse_gradient_after_a_dense_one(kind, observed):
    p = parameter()
    sampler = kind([p], **options(kind))
    monitor = sg.TemperatureMonitor(sampler, every=1) if observed else None
    is_sparse = False

    def closure():
        p.grad = None
        grad = torch.randn(p.shape, dtype=p.dtype)
        p.grad = grad.to_sparse() if is_sparse else grad

    for _ in range(2):  # of which the second has a plan
        sampler.step(closure)
    before, is_sparse = p.detach().clone(), True
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        sampler.step(closure)
    assert torch.equal(p, before) and torch.is_grad_enabled()
    assert monitor is None or monitor.num_observed == 2


# (EWSG's gradients are set anew in each step, and torch refuses those.)
@pytest.mark.parametrize("kind", [sg.SGLD, sg.SGHMC])
def test_gradients_that_do_not_fit(kind):
    first, second = parameter(), parameter(1)
    sampler = kind([{"params": [first]}, {"params": [second]}], **options(kind))
    second.data = torch.zeros(5)  # the gradient is still [4, 3]
    text = (
        f"{kind.__name__}: parameter 0 of group 1 has 5 elements; it had 12 when noise "
        "offsets were assigned: call reassign_noise_offsets() after parameters have "
        "grown, shrunk or been replaced (add_param_group adds further ones)"
    )
    step_fails(sampler, RuntimeError, text)
    text = (
        f"{kind.__name__} got a gradient of torch.float32 and shape [4, 3] on cpu for "
        "a parameter of {} on cpu (must be equal)"
    )
    second.data = torch.zeros(3, 4)
    message = text.format("torch.float32 and shape [3, 4]")
    step_fails(sampler, RuntimeError, message)
    second.data = torch.zeros(4, 3, dtype=torch.bfloat16)
    message = text.format("torch.bfloat16 and shape [4, 3]")
    step_fails(sampler, RuntimeError, message)


@each_kind
def test_no_and_double_parameters(kind):
    # torch's own messages.
    with pytest.raises(ValueError, match="got an empty parameter list"):
        kind([], **GOOD)
    p = parameter()
    sampler = kind([p], **GOOD)
    with pytest.raises(ValueError, match="parameters appear in more than one"):
        sampler.add_param_group({"params": [p]})
    with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
        kind([p * 1.0], **GOOD)
    assert len(sampler.param_groups) == 1
