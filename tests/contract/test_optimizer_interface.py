"""The samplers are torch optimizers, with everything that torch hangs on those."""

import copy

import pytest
import short_chains as short
import torch
from reference import draw, same_bits
from short_chains import set_grads as set_gradients
from torch import nn

import torch_sgmcmc as sg

# With closures: test_closures.py.
EACH = pytest.mark.parametrize("kind", ["SGLD", "SGHMC", "PSGLD without gamma"])


@EACH
def test_is_an_optimizer(kind):
    sampler = short.make(kind, short.make_params())
    assert isinstance(sampler, torch.optim.Optimizer)
    assert isinstance(sampler, sg.Sampler)
    assert sampler.step() is None  # without any gradient: nothing to do
    assert short.kept_state(sampler) == {}


@EACH
def test_closure(kind):
    p, twin = short.one_parameter(), short.one_parameter()
    sampler, other = short.make(kind, [p]), short.make(kind, [twin])
    seen = []

    def closure():
        seen.append((torch.is_grad_enabled(), p.detach().clone()))
        sampler.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = sampler.step(closure)
    assert len(seen) == 1 and seen[0][0]
    assert float(loss.detach()) == float((seen[0][1] ** 2).sum())
    twin.grad = 2 * twin.detach()
    other.step()
    assert same_bits(p, twin)


@EACH
def test_gradients_are_never_changed(kind):
    params = short.make_params()
    sampler = short.make(kind, params)
    for step in range(3):
        set_gradients(params, step)
        grads = [p.grad for p in params]
        copies = [g.clone() for g in grads]
        sampler.step()
        for p, g, c in zip(params, grads, copies, strict=True):
            assert p.grad is g
            assert same_bits(g, c)


@EACH
def test_step_counts_as_an_inplace_change(kind):
    p, idle = short.one_parameter(), short.one_parameter()
    idle.grad = None
    sampler = short.make(kind, [p, idle])
    versions = p._version, idle._version
    loss = (p * p).sum()
    sampler.step()
    assert (p._version, idle._version) == (versions[0] + 1, versions[1])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@EACH
def test_parameters_stay_leaves_and_clipping_works(kind):
    net = nn.Linear(3, 2)
    sampler = short.make(kind, net.parameters())
    for _ in range(2):
        sampler.zero_grad()
        (100 * net(torch.ones(4, 3)).square().sum()).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        norm = torch.cat([p.grad.flatten() for p in net.parameters()]).norm()
        assert float(norm) == pytest.approx(1.0, rel=1e-4)
        sampler.step()
        assert all(p.is_leaf and p.requires_grad for p in net.parameters())
    assert torch.isfinite(nn.utils.parameters_to_vector(net.parameters())).all()


@EACH
def test_hyperparameters_of_a_group(kind):
    # Two groups with everything different equal two samplers, but for the noise.
    special = {"lr": 0.02, "num_data": 3, "prior_precision": 7.0, "temperature": 0.0}
    a, b = short.one_parameter(), short.one_parameter()
    sampler = short.make(kind, [{"params": [a]}, {"params": [b], **special}])
    assert {k: sampler.param_groups[0][k] for k in short.TARGET} == short.TARGET
    assert {k: sampler.param_groups[1][k] for k in special} == special
    c, d = short.one_parameter(), short.one_parameter()
    first, second = short.make(kind, [c]), short.make(kind, [d], seed=1, **special)
    for s in (sampler, first, second):
        s.step()
        s.step()
    assert same_bits(a, c)
    assert same_bits(b, d)  # temperature 0: the noise does not matter
    assert not torch.equal(a, b)


def test_named_parameters():
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    sampler = sg.SGHMC(net.named_parameters(), 0.1, num_data=2, seed=0)
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert sampler.param_groups[0]["param_names"] == names
    plain = sg.SGHMC(net.parameters(), 0.1, num_data=2, seed=0)
    assert sampler.param_groups[0]["offsets"] == plain.param_groups[0]["offsets"]
    sampler.load_state_dict(copy.deepcopy(sampler.state_dict()))
    assert sampler.state_dict()["param_groups"][0]["param_names"] == names


def test_offsets_are_aligned_and_disjoint():
    shapes = [(3,), (128,), (), (2, 0), (129,), (50, 40)]
    groups = [
        {"params": [nn.Parameter(torch.zeros(s)) for s in shapes[:4]]},
        {"params": [nn.Parameter(torch.zeros(s)) for s in shapes[4:]]},
    ]
    sampler = sg.SGLD(groups, 0.1, num_data=1)
    offsets = [g["offsets"] for g in sampler.param_groups]
    assert offsets == [[0, 128, 256, 384], [384, 640]]


def test_first_momentum_is_drawn_from_its_stationary_law():
    for initial in ("stationary", "zeros"):
        p = short.one_parameter(1000)
        sampler = sg.SGHMC([p], 0.2, 0.75, num_data=7, initial_momentum=initial, seed=4)
        p.grad = torch.zeros(1000)
        stream = {"offsets": [0], "seed": 4, "step": 0}
        (start,) = draw([p], purpose=1, **stream)
        (noise,) = draw([p], purpose=0, **stream)
        if initial == "zeros":
            start = torch.zeros_like(start)
        expected = 0.75 * (0.2 / 7) ** 0.5 * start + (2 * 0.25 * 0.2 / 7) ** 0.5 * noise
        sampler.step()
        momentum = sampler.state[p]["momentum"]
        torch.testing.assert_close(momentum.double(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16]
)
def test_state_dtypes_and_layouts(dtype):
    values = torch.zeros(2, 3, 4, 5, dtype=dtype)
    p = nn.Parameter(values.to(memory_format=torch.channels_last))
    p.grad = torch.ones_like(p)
    sampler = short.make("SGHMC online", [p])
    sampler.step()
    wanted = torch.float64 if dtype == torch.float64 else torch.float32
    kept = {"momentum", "previous_grad", "grad_variance"}
    kept |= {"master"} if dtype.itemsize == 2 else set()
    assert set(sampler.state[p]) == kept | {"num_grads", "step"}
    for key in kept:
        value = sampler.state[p][key]
        assert value.dtype is wanted
        assert (value.shape, value.stride()) == (p.shape, p.stride())
    assert sampler.state[p]["num_grads"] == 1


def test_online_noise_estimate():
    # Gradients of alternating sign: half the mean squared difference of consecutive
    # ones is 2 (g)^2, exactly, for each coordinate.
    p = short.one_parameter(300)
    size = torch.linspace(0, 0.05, 300)
    sampler = sg.SGHMC([p], 0.1, 0.5, num_data=10, noise_estimate="online", seed=1)
    for step in range(101):
        p.grad = size if step % 2 == 0 else -size
        sampler.step()
        expected = 2 * size**2 if step > 0 else torch.zeros(300)
        variance = sampler.state[p]["grad_variance"]
        torch.testing.assert_close(variance, expected, rtol=1e-5, atol=0)
    # From the 101st gradient on, beta = lr N Var / (2 T) in every coordinate.
    for beta in (0.1 * 10 * 2 * size.double() ** 2 / 2, torch.zeros(())):
        momentum = sampler.state[p]["momentum"].double()
        step = int(sampler.param_groups[0]["step"])
        (noise,) = draw([p], offsets=[0], seed=1, step=step)
        deviation = (2 * (0.5 - beta) * 0.1 / 10).sqrt()
        p.grad = -size
        expected = 0.5 * momentum + 0.1 * size.double() + deviation * noise
        sampler.step()
        torch.testing.assert_close(
            sampler.state[p]["momentum"].double(), expected, rtol=1e-5, atol=1e-7
        )
        sampler.param_groups[0]["noise_estimate"] = 0.0  # switched off again


def test_online_noise_estimate_of_an_empty_parameter():
    p = nn.Parameter(torch.zeros(0))
    p.grad = torch.zeros(0)
    sampler = sg.SGHMC([p], 0.1, 0.5, num_data=1, noise_estimate="online")
    for _ in range(102):  # more gradients than the estimate waits for
        sampler.step()
    assert sampler.param_groups[0]["step"] == 102
    assert sampler.state[p]["momentum"].shape == (0,)


def test_curvatures_are_probed_with_signs_of_their_own():
    # lr = 0 leaves J = 1, so that the state is 2 (1 - a) ḡ h with h = z ∘ (H z).
    g = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.randn(200, generator=g, dtype=torch.float64))
    a = torch.randn(200, 200, generator=g, dtype=torch.float64)
    sampler = sg.PSGLD([p], 1e-30, num_data=7, decay=0.75, seed=3)
    expected = square = torch.zeros_like(p.detach())
    for step in range(2):
        sampler.zero_grad()
        (0.5 * p @ (a + a.T) @ p).backward(create_graph=True)
        (normal,) = draw([p], offsets=[0], seed=3, step=step, purpose=4)
        signs = normal.sign()
        grad = p.grad.detach().clone()
        h = signs * ((a + a.T) @ signs)
        last = 2 * grad * h
        # They start with the first gradient, and this is it.
        expected = 0.75 * expected + 0.25 * last if step else last
        square = (
            0.75 * square + 0.25 * grad**2 if step else grad**2 + 0.75 / 7 * h.abs()
        )
        sampler.step()
        torch.testing.assert_close(sampler.state[p]["sensitivity"], expected)
        torch.testing.assert_close(sampler.state[p]["square_average"], square)


def test_groups_that_the_hessian_couples():
    # Probed together: the chain does not depend on how parameters are grouped.
    chains = []
    for split in ([[0, 1, 2, 3]], [[0], [1, 2], [3]]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        params = list(net.parameters())
        groups = [{"params": [params[i] for i in members]} for members in split]
        sampler = sg.PSGLD(groups, 0.01, num_data=20, eps=0.1, seed=1)
        for step in range(5):
            sampler.zero_grad()
            loss = net(torch.linspace(-1, 1, 12).view(4, 3) + step).square().mean()
            loss.backward(create_graph=True)
            sampler.step()
        sampler.zero_grad()
        chains.append([p.detach() for p in params])
    short.assert_same(*chains)


def test_parameters_without_second_derivatives():
    # The loss is linear in q: its gradient carries no graph, and h is 0.
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    sampler = sg.PSGLD([p, q], 0.1, num_data=7, decay=0.5, seed=1)
    (p.square().sum() + 2 * q.sum()).backward(create_graph=True)
    sampler.step()
    assert not sampler.state[q]["sensitivity"].any()
    assert sampler.state[p]["sensitivity"].all()


def test_target_summary():
    p = [nn.Parameter(torch.zeros(n)) for n in (1234, 5, 6, 7)]

    def groups():
        return [
            {"params": p[:1]},
            {"params": p[1:2], "prior_precision": 4.0, "temperature": 0.5},
            {"params": p[2:3], "num_data": 1, "temperature": 0},
            {"params": p[3:], "prior_precision": 0.3, "temperature": 2.0},
        ]

    target = "samples p(θ) ∝ exp(−U(θ)/T), U(θ) = N · (mean loss) + Σ λ‖θ‖²/2."
    data = "the loss is a mean over N = 50,000 data"
    for cls in (sg.SGLD, sg.SGHMC, sg.PSGLD, sg.SGNHT):
        assert cls(groups(), 0.1, num_data=50_000).target_summary().split("\n") == [
            f"{cls.__name__} {target}",
            f"Group 0, 1,234 parameters: {data}; flat prior (λ = 0); "
            "T = 1: the Bayesian posterior.",
            f"Group 1, 5 parameters: {data}; prior N(0, 0.25) on each (λ = 4); "
            "T = 0.5: below the posterior's temperature.",
            "Group 2, 6 parameters: the loss is U itself (N = 1); flat prior (λ = 0); "
            "T = 0: no noise, an optimizer and not a sampler.",
            f"Group 3, 7 parameters: {data}; prior N(0, 3.333) on each (λ = 0.3); "
            "T = 2: above the posterior's temperature.",
        ]
    for other in (sg.EWSG(p, 0.1, num_data=2), sg.HMC(p, 0.1, num_steps=3, num_data=2)):
        text = other.target_summary()
        assert text.startswith(f"{type(other).__name__} {target}")
