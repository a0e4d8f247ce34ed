"""TemperatureMonitor: readings of right and of wrong chains, and its errors.

Fixed seeds. Tensors of one sampler are independent chains here: what is asserted of
their intervals is asserted of that many repetitions.
"""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import torch_sgmcmc as sg
from torch_sgmcmc.core.context import context_of
from torch_sgmcmc.diagnostics.temperature_means import BatchMeans

# Sampled laws, except what is marked as default.
pytestmark = pytest.mark.full

N, PRIOR, SPREAD = 100.0, 20.0, 0.4

#: Samplers that are observed while they step, with settings for the target below.
TARGET = {"num_data": N, "prior_precision": PRIOR, "seed": 3}
ESTIMATED = {"noise_estimate": 0.015, "temperature": 2.0, **TARGET}
RESAMPLED = {"resample_momentum_every": 4, **TARGET}
STEPPING = {
    "SGLD": lambda p: sg.SGLD(p, 0.05, **TARGET),
    "SGLD-cold": lambda p: sg.SGLD(p, 0.05, temperature=0.3, **TARGET),
    "SGHMC": lambda p: sg.SGHMC(p, 0.02, 0.9, **TARGET),
    "SGHMC-short-memory": lambda p: sg.SGHMC(p, 0.1, 0.3, **TARGET),
    "SGHMC-noise-estimate": lambda p: sg.SGHMC(p, 0.005, 0.9, **ESTIMATED),
    "SGHMC-online": lambda p: sg.SGHMC(p, 4e-3, noise_estimate="online", **TARGET),
    "SGHMC-resampled": lambda p: sg.SGHMC(p, 0.02, 0.9, **RESAMPLED),
    "SGNHT": lambda p: sg.SGNHT(p, 0.02, 0.9, thermostat_rate=1e-3, **TARGET),
    "PSGLD": lambda p: sg.PSGLD(p, 0.01, decay=0.999, gamma=False, **TARGET),
    "EWSG": lambda p: sg.EWSG(p, 0.02, 0.9, **TARGET),
    "EWSG-overdamped": lambda p: sg.EWSG(p, 0.02, 0.0, **TARGET),
}


def curvatures(d):
    return torch.linspace(0.5, 2.0, d)


def run(sampler, params, steps, *, spread=SPREAD, before=lambda i: None):
    """Steps on Gaussians with curvatures of the mean loss, and noisy gradients."""
    generator = torch.Generator().manual_seed(5)

    def closure():
        for p in params:
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float32)
            grad = curvatures(p.numel()).view(p.shape) * p.detach() + spread * noise
            p.grad = grad.to(p.dtype)
        return torch.tensor(0.0)

    for i in range(steps):
        before(i)
        sampler.step(closure)


def parameters(count, shape, dtype):
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(count, *shape, generator=generator) / math.sqrt(N)
    return [nn.Parameter(p.to(dtype)) for p in start]


def assert_near(value, expected, half_width):
    """Within 1.75 times the 95 % interval: about 3.5 standard errors."""
    assert half_width < 0.1 * abs(expected) + 0.1
    assert abs(value - expected) < 1.75 * half_width


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in STEPPING]
    + [(name, torch.bfloat16) for name in ("SGLD", "SGHMC-resampled", "EWSG")],
)
def test_both_temperatures_equal_those_of_the_samples(name, dtype):
    """T_kin = T_conf = N k Var(θ), with minibatch noise."""
    (p,) = params = parameters(1, (8, 16), dtype)
    sampler = STEPPING[name](params)
    run(sampler, params, 400)
    if name == "PSGLD":
        sampler.param_groups[0]["adapt"] = False
    monitor = sg.TemperatureMonitor(sampler, every=3)
    k = curvatures(p.numel()).view(p.shape) + PRIOR / N
    series = []

    def see(_):
        x = sampler.state[p].get("master", p).detach().double()
        series.append(float((k * x * x).sum() * N / p.numel()))

    run(sampler, params, 3000, before=see)
    kinetic, configurational, excess, minibatch, bias, _ = monitor.all()
    assert math.isnan(bias.mean)  # observe() was not asked
    assert monitor.num_observed == 1000 if "resampled" not in name else 750
    assert_near(excess.mean, 0.0, excess.half_width)
    if "EWSG" not in name:  # whose gradients are chosen by where θ is
        batches = np.reshape(series, (20, -1)).mean(axis=1)
        error = batches.std(ddof=1) / math.sqrt(20)
        assert abs(configurational.mean - batches.mean()) < 4 * error + 0.01
    temperature = sampler.param_groups[0]["temperature"]
    if name == "SGHMC-online":
        assert_near(kinetic.mean, temperature, kinetic.half_width)
        assert math.isnan(minibatch.mean)
    elif name == "SGNHT" or "resampled" in name:
        assert math.isnan(minibatch.mean)
    elif "EWSG" not in name:  # which chooses its noise
        assert minibatch.mean > -0.01
        # What is left is discretisation, small here.
        predicted = temperature + minibatch.mean
        assert abs(kinetic.mean - predicted) < 0.1 * predicted


@pytest.mark.nightly
def test_intervals_cover():
    """95 % intervals of 400 independent chains hold what is known exactly."""
    count, d, lr, steps = 400, 6, 0.2, 1600
    generator = torch.Generator().manual_seed(5)
    theta = torch.randn(count, d, generator=generator) / math.sqrt(N)
    params = [nn.Parameter(row) for row in theta]  # in one memory
    grads = torch.empty_like(theta)
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad
    sampler = sg.SGLD(params, lr, **TARGET)
    monitor = sg.TemperatureMonitor(sampler, every=5)

    def exactly():
        right = theta * curvatures(d)
        for p, grad in zip(params, right, strict=True):
            p.grad = grad

    for i in range(steps):
        torch.randn(theta.shape, generator=generator, out=grads)
        grads.mul_(SPREAD).addcmul_(theta, curvatures(d))
        if i % 25 == 0:
            monitor.observe(exactly)
        sampler.step()
        if i == 100:
            monitor.reset()
    k = curvatures(6).double().numpy() + PRIOR / N
    noise = 2 * lr / N + (lr * SPREAD) ** 2
    # N k Var(θ) of SGLD on a quadratic.
    exact = (N * k * noise / (1 - (1 - lr * k) ** 2)).mean()
    covered = np.zeros(4)
    for i in range(count):
        kinetic, configurational, excess, _, bias, _ = monitor.tensor(i)
        known = ((kinetic, exact), (configurational, exact), (excess, 0.0), (bias, 0.0))
        covered += [abs(r.mean - value) < r.half_width for r, value in known]
    assert (covered > 0.92 * count).all() and (covered < 0.98 * count).all(), covered
    # No alarm but for heat, at the rate that is promised for all of them.
    issues = monitor.issues(budget=2 * (exact - 1), rate=0.05)
    assert issues == []


class _Wrong(sg.SGHMC):
    """SGHMC whose update is told other numbers than its groups have."""

    told: dict[str, Any]

    def _operator_numbers(self, group):
        return {**super()._operator_numbers(group), **self.told}


class _Euler(sg.SGHMC):
    """Moves θ with the momentum of the step before."""

    def _launch(self, chain, plan, grads):
        start = [p.detach().clone() for p in plan.params]
        old = [self.state[p]["momentum"].clone() for p in plan.params]
        super()._launch(chain, plan, grads)
        for p, x, v in zip(plan.params, start, old, strict=True):
            p.copy_(x + v)


def _clip(sampler, params):
    for p in params:
        if "momentum" in sampler.state[p]:
            sampler.state[p]["momentum"].clamp_(-0.004, 0.004)


WRONG = {
    "twice the noise's variance": ({"temperature": 2.0}, "above T"),
    "T = 0.5 applied twice": ({"temperature": 0.25}, "below T"),
    "prior dropped": ({"prior_precision": 0.0}, "not in equilibrium"),
    "another friction": ({"momentum": 0.5}, "not in equilibrium"),
    "explicit Euler": (_Euler, "above T"),
    "momentum clipped": (_clip, "below T"),
    "noise estimate too large": ({"noise_estimate": 0.08}, "below T"),
    "step other than lr": ({"lr": 0.5 * 0.005}, "not in equilibrium"),
}


class Seen(Exception):
    """A fault has been found."""


@pytest.mark.parametrize("name", WRONG)
def test_known_bugs_are_caught(name):
    """Within 5,000 steps of a small issue, with minibatch noise within budget."""
    wrong, fault = WRONG[name]
    params = parameters(1, (64,), torch.float32)
    asked = 0.5 if "T = 0.5" in name else 1.0
    kind = wrong if isinstance(wrong, type) else _Wrong
    sampler = kind(params, 0.005, 0.9, temperature=asked, **TARGET)
    if isinstance(sampler, _Wrong):
        sampler.told = wrong if isinstance(wrong, dict) else {}
    monitor = sg.TemperatureMonitor(sampler, every=5)

    def before(i):
        if wrong is _clip:
            _clip(sampler, params)
        if i % 500 == 499:  # ten looks, at one's rate of false alarms
            issues = monitor.issues(rate=0.001)
            if fault in {found.fault for found in issues}:
                raise Seen

    with pytest.raises(Seen):
        run(sampler, params, 5000, spread=0.05, before=before)
    assert monitor.names[0] in monitor.summary()


@pytest.mark.default
def test_no_equilibrium_differs_from_above_t():
    far, hot = parameters(2, (64,), torch.float32)
    with torch.no_grad():
        far.mul_(30.0)
    sampler = sg.SGHMC([("far", far), ("above T", hot)], 2e-5, 0.9, num_data=N, seed=0)
    monitor = sg.TemperatureMonitor(sampler, every=2)
    for _ in range(1000):
        far.grad = far.detach().clone()
        hot.grad = 50 * hot.detach() + 20 * torch.randn(64)
        sampler.step()
    faults = {(found.name, found.fault) for found in monitor.issues()}
    assert ("far", "not in equilibrium") in faults
    assert ("above T", "above T") in faults
    text = monitor.summary()
    assert "Make more steps" in text and "lr <=" in text and "minibatches" in text
    assert "noise_estimate" not in text or "beta" in text
    # Following what it says brings the heating within the budget.
    said = float(text.split("it takes lr <= ")[1].split()[0].rstrip(".,"))
    assert 0 < said < 2e-5


@pytest.mark.default
def test_advice_that_is_followed_helps():
    params = parameters(1, (200,), torch.float32)
    hot = sg.TemperatureMonitor(sampler := sg.SGLD(params, 0.05, **TARGET), every=2)
    run(sampler, params, 2000)
    lr = float(hot.summary().split("it takes lr <= ")[1].split()[0].rstrip(",."))
    params = parameters(1, (200,), torch.float32)
    cool = sg.TemperatureMonitor(sampler := sg.SGLD(params, lr, **TARGET), every=2)
    run(sampler, params, 2000)
    assert hot.all().kinetic.mean > 1.2
    assert 0.03 < cool.all().kinetic.mean - 1 < 0.055
    assert not any(found.fault == "above T" for found in cool.issues(budget=0.06))


@pytest.mark.default
def test_what_is_asked_for_a_sample_at_a_time():
    """EWSG: T_conf, by gradients of their own, beside T."""
    k, temperature = 4.0, 0.5
    p = nn.Parameter(torch.zeros(6, 5))
    sampler = sg.EWSG([p], 0.01, 0.5, num_data=2.0, temperature=temperature, seed=0)
    monitor = sg.TemperatureMonitor(sampler, every=10**9)
    noise = torch.Generator().manual_seed(1)

    def closure():  # N times the loss is k/2 |p|², and hardly any noise
        sampler.zero_grad()
        tilt = 1e-3 * torch.randn(p.shape, generator=noise)
        loss = k / 4 * (p * p).sum() + (tilt * p).sum()
        loss.backward()
        return loss

    sampler.step(closure)
    monitor.reset()  # the first step is observed by itself
    for step in range(6000):
        sampler.step(closure)
        if step % 10 == 0:
            p.grad = torch.full_like(p, 7.0)
            monitor.observe(lambda: closure().detach())
            assert bool((p.grad == 7.0).all())
    kinetic, configurational, excess, *_ = monitor.all()
    assert kinetic.mean == temperature
    assert_near(excess.mean, 0.0, excess.half_width)
    assert_near(configurational.mean, temperature, configurational.half_width)


@pytest.mark.default
def test_groups_missing_gradients_and_steps_that_are_skipped():
    a, b = parameters(2, (30,), torch.float32)
    c = nn.Parameter(torch.zeros(0))
    groups = [{"params": [a]}, {"params": [b, c], "temperature": 0.5}]
    sampler = sg.SGLD(groups, 0.01, nonfinite="skip", **TARGET)
    monitor = sg.TemperatureMonitor(sampler, every=1)
    for i in range(300):
        a.grad, b.grad = a.detach().clone(), b.detach().clone()
        if i % 3 == 0:
            b.grad = None
        if i % 10 == 0:
            a.grad[0] = torch.nan
        sampler.step()
    assert monitor.num_observed == 270
    assert len(monitor.names) == 3
    assert math.isnan(monitor.tensor(2).kinetic.mean)
    for group, tensor in zip(monitor.group(0), monitor.tensor(0), strict=True):
        assert group == pytest.approx(tensor, rel=1e-12, nan_ok=True)
    assert monitor.group(1).kinetic.mean < monitor.group(0).kinetic.mean
    assert "0.0 [30]" in monitor.summary()


@pytest.mark.default
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", range(7))
def test_the_operator_sums_each_tensor_by_itself(kind, dtype):
    """Against the same sums in NumPy, of whole, empty, strided and large tensors."""
    generator = torch.Generator().manual_seed(kind)
    shapes = [(3, 5), (0, 4), (), (70_001,)]
    state = torch.float64 if dtype is torch.float64 else torch.float32

    def make(of):
        made = [torch.randn(s, generator=generator).to(of) for s in shapes]
        strided = torch.randn(6, 14, generator=generator).to(of)[::2, ::3]
        return [*made, strided]

    grads, positions, centers = make(dtype), make(state), make(state)
    movers = make(dtype if kind >= 4 else state) if 2 <= kind < 6 else []
    statistics = [s.abs() for s in make(state)] if kind in (1, 3, 5) else []
    decay, eps, weight_decay = 0.9, 0.1, 0.3
    numbers = {"kind": kind, "weight_decay": weight_decay, "decay": decay, "eps": eps}
    lists = grads, positions, centers, movers, statistics
    result = torch.ops.torch_sgmcmc.temperature_sums(*lists, **numbers)
    nothing = [torch.zeros(())] * 5
    lists = (grads, positions, centers, movers or nothing, statistics or nothing)
    for row, tensors in zip(result, zip(*lists, strict=True), strict=True):
        raw, x, c, v, s = (t.double().numpy() for t in tensors)
        g, y = raw + weight_decay * x, x - c
        kept = np.clip(g, -eps, eps)
        u = v - eps * g
        w = 1 / (np.sqrt(decay * s + (1 - decay) * raw**2) + eps)
        expected = (
            (y * g, g * g),
            (y * g, w * g * g),
            (y * g, u * u, y * u),
            (y * g, v * v, y * s * v),
            ((raw - v) ** 2 / 2,),
            (w * (raw - v) ** 2 / 2,),
            (y * g, y * kept, 1.0 * (g != kept)),
        )[kind]
        sums = [float(np.sum(e)) for e in expected]
        scale = max(float(np.sum(np.abs(e))) for e in expected)
        assert row.tolist() == pytest.approx(sums, rel=0, abs=1e-13 * scale)


@pytest.mark.default
def test_threads_and_state_do_not_change_a_bit(set_threads):
    def series(threads, interrupted):
        set_threads(threads)
        params = [nn.Parameter(torch.linspace(-1, 1, 50_000))]
        sampler = sg.SGHMC(params, 0.01, **TARGET)
        monitor = sg.TemperatureMonitor(sampler, every=2, center="current")
        run(sampler, params, 24)
        if interrupted:
            state = copy.deepcopy(monitor.state_dict())
            monitor.detach()
            center = [torch.linspace(-1, 1, 50_000)]
            monitor = sg.TemperatureMonitor(sampler, every=7, center=center)
            monitor.load_state_dict(state)
        run(sampler, params, 26)
        return tree_map_only(Tensor, Tensor.tolist, monitor.state_dict())

    whole = series(1, False)
    assert series(4, False) == whole
    assert series(2, True) == whole


@pytest.mark.parametrize("at", range(20, 32))
def test_minibatch_readings_resume_from_any_step(at):
    """The gradients of the step before the next look are saved with the rest."""

    def readings(interrupted):
        params = [nn.Parameter(torch.linspace(-1, 1, 40))]
        sampler = sg.SGHMC(params, 0.01, **TARGET)
        monitor = sg.TemperatureMonitor(sampler, every=2)
        run(sampler, params, at)
        if interrupted:
            state = copy.deepcopy(monitor.state_dict())
            monitor.detach()
            monitor = sg.TemperatureMonitor(sampler, every=2)
            monitor.load_state_dict(state)
        run(sampler, params, 40)
        return monitor.state_dict()["series"], monitor.all().minibatch_heating

    assert repr(readings(True)) == repr(readings(False))


def test_previous_gradients_that_cannot_be():
    params = [nn.Parameter(torch.ones(4))]
    monitor = sg.TemperatureMonitor(sg.SGHMC(params, 0.01, **TARGET), every=1)
    before = monitor.state_dict()
    for gradients, message in (
        ({1: torch.ones(4)}, "previous_gradients .must be of the 1 parameters"),
        ({0: torch.ones(3)}, r"previous gradient of parameter 0 has shape \[3\]"),
        ({0: torch.full((4,), math.nan)}, "elements that are not finite"),
    ):
        previous = {"step": 3, "gradients": gradients}
        with pytest.raises(ValueError, match=message):
            monitor.load_state_dict({**before, "previous_gradients": previous})
        assert monitor.state_dict() == before


@pytest.mark.default
def test_state_and_pickles_have_no_monitor():
    params = parameters(1, (4,), torch.float32)
    sampler = sg.SGLD(params, 0.01, **TARGET)
    plain = sampler.state_dict()
    monitor = sg.TemperatureMonitor(sampler)
    assert sampler.state_dict() == plain
    assert context_of(copy.deepcopy(sampler)).monitor is None
    more = parameters(1, (3,), torch.float32)
    with pytest.raises(ValueError, match="Monitor observes the present groups"):
        sampler.add_param_group({"params": more})
    assert len(sampler.param_groups) == 1
    monitor.detach()
    sampler.add_param_group({"params": more})
    run(sampler, params, 21)
    assert monitor.num_observed == 0
    with pytest.raises(RuntimeError, match="detached"):
        monitor.observe(lambda: None)


@pytest.mark.default
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, "every: 0"),
        ({"center": "there"}, "center: 'there'"),
        ({"center": [0.0]}, "center: 1 .must be one for each of the 2"),
        ({"center": [0.0, torch.zeros(3)]}, r"number 1 has shape \[3\]"),
        ({"center": [0.0, math.nan]}, "number 1 is not finite"),
        ({"names": ["a"]}, "names: 1 "),
    ],
)
def test_bad_arguments(arguments, message):
    sampler = sg.SGLD(parameters(2, (4,), torch.float32), 0.01, **TARGET)
    with pytest.raises(ValueError, match=message):
        sg.TemperatureMonitor(sampler, **arguments)
    assert context_of(sampler).monitor is None
    monitor = sg.TemperatureMonitor(sampler)
    with pytest.raises(ValueError, match="a TemperatureMonitor already"):
        sg.TemperatureMonitor(sampler)
    for wrong in ("nobody", 2, -1):
        with pytest.raises(ValueError, match="name"):
            monitor.tensor(wrong)
    with pytest.raises(ValueError, match="groups"):
        monitor.group(1)
    with pytest.raises(ValueError, match="budget"):
        monitor.issues(budget=0.0)
    with pytest.raises(ValueError, match="rate"):
        monitor.summary(rate=1.0)
    state = monitor.state_dict()
    with pytest.raises(ValueError, match="series"):
        monitor.load_state_dict({**state, "series": state["series"][1:]})
    with pytest.raises(ValueError, match="batch means"):
        monitor.load_state_dict({**state, "series": [[1.0, 2.0, 3.0, 0.0]] * 26})
    assert monitor.state_dict() == state
    assert monitor.summary() == "No step was observed yet."


@pytest.mark.default
def test_samplers_that_cannot_be_observed():
    params = parameters(1, (4,), torch.float32)
    with pytest.raises(ValueError, match="capturable"):
        sg.TemperatureMonitor(sg.SGLD(params, 0.1, num_data=1.0, capturable=True))

    class Bouncy(sg.SBPS):
        pass

    class New(sg.SGLD):
        """A sampler of which the monitor has no equations."""

    New.__module__ = "torch_sgmcmc.samplers.new"

    hmc = sg.HMC(params, 0.1, num_steps=2, num_data=1.0)
    bouncy = Bouncy(params, num_data=1.0)
    new = New(params, 0.1, num_data=1.0)
    reasons = {hmc: "acceptance_rate", bouncy: "violation_rate", new: "no equations"}
    for sampler, reason in reasons.items():
        with pytest.raises(ValueError, match=f"cannot be monitored .*{reason}"):
            sg.TemperatureMonitor(sampler)
    with pytest.raises(TypeError, match="of type SGD"):
        sg.TemperatureMonitor(torch.optim.SGD(params, 0.1))


@pytest.mark.default
def test_plot_shows_every_tensor():
    pytest.importorskip("matplotlib").use("Agg")
    params = parameters(5, (4,), torch.float32)
    monitor = sg.TemperatureMonitor(sampler := sg.SGLD(params, 0.01, **TARGET), every=1)
    run(sampler, params, 64)
    figure = monitor.plot()
    assert [axis.get_title() for axis in figure.axes][:5] == monitor.names
    lines = figure.axes[0].lines
    assert [line.get_label() for line in lines] == ["T_kin", "T_conf"]
    mean = monitor.tensor(0).kinetic.mean
    assert np.mean(lines[0].get_ydata()) == pytest.approx(mean)


@pytest.mark.default
def test_batch_means():
    """Mean and error of AR(1) series; the quantile is Student's."""
    generator = np.random.default_rng(0)
    rho, count, length = 0.9, 400, 10_000
    covered = 0
    for _ in range(count):
        noise = generator.standard_normal(length)
        means, x = BatchMeans(), noise[0] / math.sqrt(1 - rho**2)
        total = 0.0
        for z in noise:
            x = rho * x + z
            total += x
            means.add(x)
        assert means.count == length
        assert means.mean == pytest.approx(total / length, abs=1e-12)
        covered += abs(means.mean) < means.half_width(0.95)
    assert 0.92 * count < covered < 0.98 * count
    batches = len(means.means)
    assert 16 <= batches < 32
    for p in (0.5, 0.95, 0.999, 0.99999):
        quantile = stats.t.ppf(0.5 + p / 2, batches - 1)
        assert means.half_width(p) / means.error == pytest.approx(quantile, rel=2e-3)
    expected = math.sqrt(1 / (1 - rho) ** 2 / length)
    assert 0.5 * expected < means.error < 2 * expected
    assert math.isnan(BatchMeans().mean)


@pytest.mark.default
@pytest.mark.parametrize(("estimate", "noise"), [(0.0, 1.0), ("online", 0.1)])
def test_what_was_found_is_found_after_loading(estimate, noise):
    p = torch.zeros(500, requires_grad=True)
    sampler = sg.SGHMC([p], 0.02, 0.5, num_data=50, noise_estimate=estimate, seed=0)
    monitor = sg.TemperatureMonitor(sampler, every=1)
    g = torch.Generator().manual_seed(0)
    for _ in range(200):
        p.grad = p.detach() + noise * torch.randn(500, generator=g)
        sampler.step()
    assert estimate == "online" or "is above T" in monitor.summary()
    twin = copy.deepcopy(sampler)
    again = sg.TemperatureMonitor(twin, every=1)
    again.load_state_dict(copy.deepcopy(monitor.state_dict()))
    assert again.summary() == monitor.summary()
    assert again.state_dict()["series"] == monitor.state_dict()["series"]


@pytest.mark.parametrize(
    ("every", "redraws", "interval"), [(3, (2, 3), 5), (9, (2, 3), 11), (5, (5, 3), 7)]
)
def test_no_group_is_observed_at_one_place_of_its_cycle(every, redraws, interval):
    """Momenta that were just redrawn move less than those before the next redraw."""
    params = [torch.zeros(4, requires_grad=True) for _ in redraws]
    groups = [
        {"params": p, "resample_momentum_every": k}
        for p, k in zip(params, redraws, strict=True)
    ]
    sampler = sg.SGHMC(groups, 0.02, 0.3, num_data=1, seed=0)
    monitor = sg.TemperatureMonitor(sampler, every=every)
    assert monitor.interval == interval
    for _ in range(30):
        for p in params:
            p.grad = p.detach().clone()
        sampler.step()
    assert monitor.interval == interval
    twin = sg.SGHMC(groups, 0.02, 0.3, num_data=1, seed=0)
    other = sg.TemperatureMonitor(twin, every=1)
    other.load_state_dict(monitor.state_dict())
    assert other.interval == interval
