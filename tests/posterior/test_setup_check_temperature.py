"""Heat and curvature that a look before a run foretells."""

import math
import re
from functools import partial

import pytest
import torch
from test_setup_check import BATCH, SGHMC, N, classes, independent, loader_of, setup
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import torch_sgmcmc as sg
from torch_sgmcmc.diagnostics.setup_gradients import guess_calls
from torch_sgmcmc.diagnostics.setup_steps import Curvature
from torch_sgmcmc.diagnostics.temperature_means import Motion, Step


def with_replacement(*tensors):
    batches = sg.IndependentBatchSampler(N, BATCH, replacement=True, seed=0)
    return DataLoader(TensorDataset(*tensors), batch_sampler=batches)


@pytest.mark.parametrize(
    ("kind", "limit", "part"),
    [(sg.SGHMC, 2 * 1.9, 1.0), (sg.BAOA, 4.0, 0.95)],
    ids=["SGHMC", "BAOA"],
)
def test_curvature_and_heat_equal_those_of_a_quadratic(kind, limit, part):
    # Loss h/2 (θ - y)²: the curvature is h and λ/N, noise h² Var(y) / batch.
    torch.manual_seed(0)
    y = torch.randn(N, 1, dtype=torch.float64)
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    loader = with_replacement(y)
    sampler = kind(
        model.parameters(), lr=0.01, momentum=0.9, num_data=N, prior_precision=60.0
    )
    found = sg.check_setup(
        model, lambda m, b: 2 * (m.weight - b[0]).square().mean(), loader, sampler
    )
    assert found.curvature == pytest.approx(4.1, rel=1e-6)
    assert found.largest_lr == pytest.approx(limit / 4.1, rel=1e-6)
    (heat,) = found.heating.values()
    # Eight pairs know it to a factor of exp(± 2 √(2/8)).
    exact = part * 0.01 * N * 16 * float(y.var()) / BATCH / (2 * 0.1)
    assert exact / 2.7 < heat < exact * 2.7
    # Heat is proportional to lr.
    assert found.noise_lr == pytest.approx(0.01 * 0.05 / heat, rel=1e-6)
    summary = str(found)
    assert f"stable up to lr = {found.largest_lr:.2g}." in summary
    assert f"Minibatches add 5 % to T_kin at lr = {found.noise_lr:.2g}." in summary
    assert f"smaller limit of lr is gradient noise: {found.noise_lr:.2g}." in summary


def flat_and_noisy(y, curvature):
    """Two parameters: one curved, without noise; one flat, whose gradient is y."""
    params = [nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(2)]
    model = nn.ParameterList(params)

    def loss(model, batch):
        return curvature * (model[0] ** 2).sum() / 2 + (model[1] * batch[0]).mean()

    loader = with_replacement(y)
    return model, loss, loader


@pytest.mark.parametrize(
    ("spread", "limit"), [(1.0, "gradient noise"), (1e-4, "stability")]
)
def test_the_smaller_limit_of_lr_is_named(spread, limit):
    torch.manual_seed(0)
    y = spread * torch.randn(N, 1, dtype=torch.float64)
    model, loss, loader = flat_and_noisy(y, curvature=2.0)
    sampler = sg.SGHMC(model.parameters(), lr=0.01, momentum=0.5, num_data=N, seed=0)
    found = sg.check_setup(model, loss, loader, sampler)
    assert found.largest_lr == pytest.approx(2 * 1.5 / 2, rel=1e-6)
    # Half of the coordinates have all of the heat.
    exact = 0.05 * 4 * 0.5 * BATCH / (N * float(y.var()))
    assert exact / 2.7 < found.noise_lr < exact * 2.7
    smaller = min(found.largest_lr, found.noise_lr)
    assert f"The smaller limit of lr is {limit}: {smaller:.2g}." in str(found)


def test_without_noise_stability_is_the_limit():
    model, loss, loader = flat_and_noisy(torch.ones(N, 1, dtype=torch.float64), 2.0)
    sampler = sg.SGLD(model.parameters(), lr=0.01, num_data=N, seed=0)
    found = sg.check_setup(model, loss, loader, sampler)
    assert found.noise_lr == math.inf
    assert f"limit of lr is stability: {found.largest_lr:.2g}." in str(found)
    assert "Minibatches add 5 %" not in str(found)


@pytest.mark.parametrize("kind", [sg.SGHMC, sg.BAOA])
def test_both_limits_of_lr_by_group(kind):
    """Each is the limit of a sampler of that group alone."""
    torch.manual_seed(0)
    x, y = torch.randn(N, 3, dtype=torch.float64), torch.randint(2, (N,))
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).double()
    loader = with_replacement(x, y)
    loss = sg.losses.categorical()
    numbers = {"lr": 1e-4, "momentum": 0.5, "num_data": N}
    groups = [
        {"params": [*part.parameters()], "prior_precision": precision, "lr": lr}
        for part, precision, lr in zip(model, (0.0, 300.0), (1e-4, 3e-4), strict=True)
    ]
    found = sg.check_setup(model, loss, loader, kind(groups, **numbers))
    assert found.gradients <= 80 + 2 * 10
    lines = [line for line in str(found).splitlines() if "by group" in line]
    assert [line.partition(":")[0] for line in lines] == [
        "Limits of lr by group, stability alone",
        "Limits of lr by group, 5 % of T_kin",
    ]
    for i, group in enumerate(groups):
        alone = sg.check_setup(model, loss, loader, kind([group], **numbers))
        assert found.largest_lrs[i] == pytest.approx(alone.largest_lr, rel=0.02)
        assert found.noise_lrs[i] == pytest.approx(alone.noise_lr, rel=1e-6)
        assert (alone.largest_lrs, alone.noise_lrs) == ((), ())
        assert f"{found.noise_lrs[i]:.2g} (group {i})" in lines[1]


def test_limits_of_groups_without_a_gradient_and_of_unlike_sizes():
    """A frozen group, one behind zeros, and one number beside large weights."""
    torch.manual_seed(0)
    x = torch.randn(N, 20, dtype=torch.float64)
    labels = torch.randint(2, (N,))
    model = nn.Sequential(*(nn.Linear(20, 20, bias=False) for _ in range(2)))
    model.append(nn.Linear(20, 2)).double()
    nn.init.zeros_(model[1].weight)
    nn.init.constant_(model[2].weight, 20.0)
    model[0].weight.requires_grad_(False)
    loader = DataLoader(TensorDataset(x, labels), batch_size=BATCH, shuffle=True)
    parts = (model[0].weight, model[1].weight, model[2].weight, model[2].bias)
    groups = [{"params": [p], "prior_precision": 1.0} for p in parts]
    sampler = sg.SGHMC(groups, lr=0.01, momentum=0.5, num_data=N)
    found = sg.check_setup(model, sg.losses.categorical(), loader, sampler)
    frozen, behind, weight, bias = found.largest_lrs
    assert math.isnan(frozen)
    # The Hessian of two classes' biases at outputs of 0: eigenvalue 1/2.
    assert bias == pytest.approx(2 * 1.5 / (0.5 + 1 / N), rel=0.01)
    assert behind < weight < 2 * 1.5 * N  # which the prior alone has
    assert "(group 0)" not in str(found).partition("5 % of T_kin")[0]


@pytest.mark.parametrize("scales", [(1.0, 1.0), (1.0, 0.1), (0.0, 1.0)])
def test_lanczos_iterations_find_the_largest_eigenvalue(scales):
    torch.manual_seed(0)
    p, q = (nn.Parameter(torch.randn(n, dtype=torch.float64)) for n in (4, 2))
    h = torch.randn(6, 6, dtype=torch.float64)
    h = h + h.T  # of both signs
    curvature = Curvature([p, q], lambda: h @ torch.cat([p, q]).detach())
    d = torch.tensor(scales, dtype=torch.float64).repeat_interleave(
        torch.tensor([4, 2])
    )
    expected = float(torch.linalg.eigvalsh(d[:, None] * h * d)[-1])
    assert curvature.largest([*scales]) == pytest.approx(expected, rel=1e-6)
    # A start in an invariant space of one dimension, where nothing else is found.
    values, vectors = torch.linalg.eigh(h)
    along = vectors[:, -1]
    start = Curvature([p, q], lambda: h @ torch.cat([p, q]).detach())
    start._start = along
    start._gradient = lambda: along + h @ (torch.cat([p, q]).detach() - fixed)
    fixed = torch.cat([p, q]).detach().clone()
    assert start.largest([1.0, 1.0]) == pytest.approx(float(values[-1]), rel=1e-6)


def test_predicted_temperatures_follow_the_residuals():
    """A start's residuals do not count; an offset that all share never did."""
    torch.manual_seed(0)
    x = torch.randn(N, 50)
    y = 3 + x.sum(1, keepdim=True) + 0.1 * torch.randn(N, 1)
    model, loss = nn.Linear(50, 1), sg.losses.gaussian(noise=0.1)
    sampler = SGHMC(model.named_parameters(), lr=1e-5, seed=0)
    loader = independent(TensorDataset(x, y))
    found = []
    for weight in (0.0, 1.0):
        nn.init.constant_(model.weight, weight)
        nn.init.constant_(model.bias, 3 * weight)
        found.append(sg.check_setup(model, loss, loader, sampler))
    # lr N (1/σ²) / batch / (2 (1 - m)), known to 50 coordinates of six pairs.
    exact = 1e-5 * N * 100 / BATCH / (2 * 0.1)
    for each in found:
        assert each.heating["weight"] == pytest.approx(exact, rel=0.3)
        # 32 draws of one number: 25 %.
        assert exact / 2 < each.heating["bias"] < 2 * exact
    # After the first step the present residuals count.
    loss(model, next(iter(loader))).backward()
    sampler.step()
    heats = []
    for weight in (0.0, 1.0):
        nn.init.constant_(model.weight, weight)
        nn.init.constant_(model.bias, 3 * weight)
        heats.append(sg.check_setup(model, loss, loader, sampler).heating["weight"])
    assert heats[0] > 20 * exact and heats[1] == pytest.approx(exact, rel=0.3)


def test_heat_above_twice_t_is_remarked():
    """A doubtful start must not be reported as "nothing found"."""
    found = sg.check_setup(*setup(sampler=partial(SGHMC, lr=0.1)))
    assert not found.issues
    name, heat = max(found.heating.items(), key=lambda item: item[1])
    assert 1 < heat < 40
    (remark,) = found.remarks
    assert f"{1 + heat:.3g} in {name}" in remark and remark in str(found)
    assert "with the present gradient noise" in remark
    assert "No issue was found" not in str(found)


def test_a_classifier_that_has_learned_has_the_heat_of_here():
    """A tensor's larger heat is allowed at a random start alone."""
    model, loss, loader, sampler = setup(sampler=partial(SGHMC, lr=0.5))
    assert not sg.check_setup(model, loss, loader, sampler).issues
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(6):
        for batch in loader:
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
    found = sg.check_setup(model, loss, loader, sampler)
    (issue,) = found.issues
    assert issue.kind == "above T" and "5 in a tensor" in issue.message, found


def test_stability_equals_that_of_each_group_s_lr():
    """Two curvatures, 1 and 100, and lrs that are beyond or within what they allow."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    model = nn.ParameterList(params)
    x = torch.zeros(N, 1)
    loader = loader_of(TensorDataset(x, x))

    def quadratic(model, batch):
        return (model[0] ** 2 + 100 * model[1] ** 2).sum() / 2 + 0 * batch[0].sum()

    for lrs, is_stable in (((3.0, 0.03), True), ((3.0, 0.05), False)):
        groups = [{"params": [p], "lr": lr} for p, lr in zip(params, lrs, strict=True)]
        sampler = sg.SGHMC(groups, 0.1, 0.9, num_data=N, seed=0)
        kinds = {
            p.kind for p in sg.check_setup(model, quadratic, loader, sampler).issues
        }
        assert ("unstable" not in kinds) == is_stable


def test_heat_of_one_noise_by_other_samplers():
    """The same minibatches: friction differs, and what an estimate takes off."""
    model, loss, _, _ = setup()
    data = classes()

    def heats(kind, **settings):
        loader = DataLoader(
            data, batch_sampler=sg.IndependentBatchSampler(N, BATCH, seed=0)
        )
        sampler = kind(model.named_parameters(), num_data=N, **settings)
        return torch.tensor(
            [*sg.check_setup(model, loss, loader, sampler).heating.values()]
        )

    plain = heats(sg.SGHMC, lr=0.01, momentum=0.9)
    torch.testing.assert_close(heats(sg.SGLD, lr=0.1), plain)
    torch.testing.assert_close(heats(sg.BAOA, lr=0.01, momentum=0.9), 0.95 * plain)
    taken = heats(sg.SGHMC, lr=0.01, momentum=0.9, noise_estimate=0.02)
    torch.testing.assert_close(taken, plain - 0.2)
    taken = heats(sg.BAOA, lr=0.01, momentum=0.9, noise_estimate=0.02)
    torch.testing.assert_close(taken, 0.95 * (plain - 0.2))


def test_targets_are_where_outputs_are():
    """A loader's are on the CPU, where the model's are on a GPU."""
    moves = []

    class Target(torch.Tensor):
        def to(self, device):
            moves.append(device)
            return self.as_subclass(torch.Tensor)

    x, y = torch.zeros(4, 2), torch.zeros(4, dtype=torch.long).as_subclass(Target)
    outputs = torch.zeros(4, 3)
    (call,) = guess_calls([outputs], (y,))
    assert call.function is F.cross_entropy
    assert moves == [outputs.device] and guess_calls([x], (y,))


def shuffled_moments(curvature, lr, momentum, batches):
    """Mean squares of v and θ over a pass, for errors of variance 1 and no other noise.

    The exact linear recursion over one pass: errors e of a pass are u - mean(u) for
    independent u, and passes are independent.
    """
    step = torch.tensor(
        [[1 - lr * curvature, momentum], [-lr * curvature, momentum]],
        dtype=torch.float64,
    )  # of (θ, v): v' = m v - lr h θ, θ' = θ + v'
    kick = -lr * torch.ones(2, 1, dtype=torch.float64)
    count = batches
    errors = torch.eye(count, dtype=torch.float64) - 1 / count
    errors *= (count / (count - 1)) ** 0.5
    at = [torch.zeros(2, count, dtype=torch.float64)]  # by the pass's u
    for error in errors:
        at.append(step @ at[-1] + kick @ error[None])
    powers = [torch.matrix_power(step, t) for t in range(count + 1)]
    # C = P C P' + B B' of the state at the start of a pass.
    whole = powers[-1]
    system = torch.eye(4, dtype=torch.float64) - torch.kron(whole, whole)
    start = torch.linalg.solve(system, (at[-1] @ at[-1].T).flatten()).view(2, 2)
    means = torch.zeros(2, 2, dtype=torch.float64)
    for power, part in zip(powers[1:], at[1:], strict=True):
        means += (power @ start @ power.T + part @ part.T) / count
    return float(means[1, 1]), float(means[0, 0])


@pytest.mark.parametrize("momentum", [0.9, 0.5, 0.0])
@pytest.mark.parametrize("curvature", [0.01, 1.0, 20.0])
@pytest.mark.parametrize("batches", [2, 10, 50])
def test_heat_of_shuffled_minibatches_is_exact(momentum, curvature, batches):
    lr = 0.03
    motion = Motion.MOMENTUM if momentum else Motion.LANGEVIN
    step = Step(motion, lr=lr, momentum=momentum)
    k = lr * curvature
    v, theta = shuffled_moments(curvature, lr, momentum, batches)
    # Of independent errors of variance 1.
    scale = lr * lr / (1 - momentum) / (1 - k / 2 / (1 + momentum))
    whole = scale * 2 / (1 + momentum) / 2, scale / (2 * k)
    found = step.shuffled_parts(curvature, batches)
    assert found == pytest.approx((v / whole[0], theta / whole[1]), abs=1e-8)


def mean_of_numbers(draws, seed=0, spread=1.0, d=200, size=50):
    """A Gaussian mean: curvature 1, and a datum's gradient has variance spread²."""
    torch.manual_seed(seed)
    x = torch.randn(500, d, dtype=torch.float64)
    x = spread * 500**0.5 * torch.linalg.qr(x - x.mean(0))[0]
    model = nn.ParameterList([nn.Parameter(torch.zeros(d, dtype=torch.float64))])
    loss = lambda m, b: (m[0] - b[0]).square().sum(1).mean() / 2  # noqa: E731
    data = TensorDataset(x)
    if draws == "shuffled":
        return model, loss, DataLoader(data, size, shuffle=True)
    options = {"replacement": draws == "repeated", "seed": seed}
    batches = sg.IndependentBatchSampler(500, size, **options)
    return model, loss, DataLoader(data, batch_sampler=batches)


def sampler_of(model):
    return sg.SGHMC(model.parameters(), 0.03, 0.9, num_data=500, seed=0)


# By the exact recursion.
VARIANCES = {"shuffled": 1.306, "afresh": 2.371, "repeated": 2.520}


@pytest.mark.parametrize("draws", VARIANCES)
def test_predicted_temperature_is_what_a_monitor_shows(draws):
    model, loss, loader = mean_of_numbers(draws)
    sampler = sampler_of(model)
    (p,) = model.parameters()
    found = sg.check_setup(model, loss, loader, sampler)
    (heat,) = found.heating.values()
    monitor, square, count = sg.TemperatureMonitor(sampler), 0.0, 0
    for epoch in range(220):
        for batch in loader:
            sampler.zero_grad()
            loss(model, batch).backward()
            sampler.step()
            if epoch >= 20:
                square, count = square + float(p.detach().square().mean()), count + 1
        if epoch == 20:
            monitor.reset()
    read = monitor.all()
    # Eight pairs and 200 coordinates know a variance to 2.5 %.
    assert 1 + heat == pytest.approx(read.kinetic.mean, rel=0.1)
    assert 500 * square / count == pytest.approx(VARIANCES[draws], rel=0.03)
    assert found.stiff_variance == pytest.approx(VARIANCES[draws], rel=0.1)
    assert (found.flat_variance < 1.01) == (draws == "shuffled")
    assert "variance" in str(found).lower()
    excess = read.kinetic.mean - 1
    assert read.minibatch_heating.mean <= excess + read.kinetic.half_width
    assert read.minibatch_heating.mean > 0.8 * excess
    kinds = {issue.fault for issue in monitor.issues()}
    assert kinds == {"above T"}  # in equilibrium, as means over whole passes are


@pytest.mark.parametrize("draws", VARIANCES)
def test_advice_comes_from_one_formula(draws):
    """There is no issue at the lr, nor with the minibatches, that an issue names."""
    model, loss, loader = mean_of_numbers(draws, spread=3.0)
    sampler = sampler_of(model)
    loss(model, next(iter(loader))).backward()
    sampler.step()
    (issue,) = sg.check_setup(model, loss, loader, sampler).issues
    lr, size = re.search(
        r"lr = ([\d.e-]+), or use minibatches of (\d+)\.$", issue.message
    ).groups()
    large = mean_of_numbers(draws, spread=3.0, size=int(size))[2]
    assert 50 < int(size) <= 500
    assert not sg.check_setup(model, loss, large, sampler).issues
    assert 0.03 / float(lr) == pytest.approx(int(size) / 50, rel=0.1) or size == "500"
    for group in sampler.param_groups:
        group["lr"] = float(lr)
    found = sg.check_setup(model, loss, loader, sampler)
    assert not found.issues
    # noise_lr has 5 %.
    for group in sampler.param_groups:
        group["lr"] = found.noise_lr
    again = sg.check_setup(model, loss, loader, sampler)
    assert [*again.heating.values()] == pytest.approx([0.05], rel=0.01)


def test_the_start_of_a_warm_up_has_no_heat_of_its_own():
    found = sg.check_setup(*setup(sampler=partial(SGHMC, lr=0.0)))
    assert not found.issues and found.largest_lr > 0
    (remark,) = found.remarks
    assert remark.startswith("lr is 0") and "No issue was found" not in str(found)
