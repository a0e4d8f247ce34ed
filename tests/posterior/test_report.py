"""A issue after a run: right on chains of which the truth is known."""

import gc
import json
import sys

import pytest
import torch
from driver_problem import data, loader, loss, model, run, sghmc
from stored_files import contents
from test_report_battery import INPUTS, Drawn, Line, N, slow
from test_report_battery import run as chains_of
from torch import nn

import torch_sgmcmc as sg
from torch_sgmcmc.diagnostics import run_issues
from torch_sgmcmc.diagnostics.convergence import differences
from torch_sgmcmc.diagnostics.report import Report
from torch_sgmcmc.diagnostics.run_issues import check_runs
from torch_sgmcmc.diagnostics.run_record import _RATE as RATE
from torch_sgmcmc.diagnostics.run_record import RunRecord, RunRecorder, Trace
from torch_sgmcmc.diagnostics.temperatures import (
    Reading,
    TemperatureIssue,
    Temperatures,
)

pytestmark = pytest.mark.full


def alarms_of(size, steps, monkeypatch, seed=0):
    """Verdicts on 50 reports of four chains without fault, a tensor each."""
    chains = [nn.Parameter(torch.zeros(size)) for _ in range(200)]
    sampler = sg.SGHMC(chains, 0.1, 0.5, num_data=N, seed=seed)
    monitor = sg.TemperatureMonitor(sampler, every=2)
    draws = []
    for step in range(steps):
        if step == 50:
            monitor.reset()
        for theta in chains:
            theta.grad = theta.detach().clone()
        sampler.step()
        if step >= 50 and step % 4 == 0:
            draws.append([theta.detach().clone() for theta in chains])
    found = monitor.issues(rate=RATE * 200)
    alarms = []
    for first in range(0, 200, 4):
        names = monitor.names[first : first + 4]
        runs = {
            i: RunRecord(
                "SGHMC",
                1.0,
                steps,
                0,
                tensors={"theta": monitor.tensor(name)},
                issues=tuple(f for f in found if f.name == name),
                kinetic=tuple(monitor.over_time(name)[0]),
            )
            for i, name in enumerate(names)
        }
        module = sys.modules["torch_sgmcmc.diagnostics.report"]
        monkeypatch.setattr(module, "_runs", lambda *_, runs=runs: runs)
        some = [
            Drawn({"theta": draw[first + i]}, i) for i in range(4) for draw in draws
        ]
        model = nn.Module()
        model.theta = nn.Parameter(torch.zeros(size))
        forward = lambda model, _: model.theta[None, :5]  # noqa: E731
        one = {"link": "identity", "forward": forward}
        alarms += sg.report(model, some, torch.zeros(1, 1), **one).issues
    return alarms


def test_false_alarms(monkeypatch):
    """False alarms: at most 2 % of 200 reports, for tensors of any size.

    The rates of all parts together are 0.9 %: more than 4 have a probability of 4 %,
    and 4 of 600 did with other seeds.
    """
    kinds = [(1, 300), (1, 1000), (3, 700), (60, 500)]
    alarms = [a for size, steps in kinds for a in alarms_of(size, steps, monkeypatch)]
    assert len(alarms) <= 4, alarms


class Branch(nn.Linear):
    """Its output depends on a comparison, which vmap does not take."""

    def forward(self, x):
        return super().forward(x) if self.weight[0, 0] > 0 else -super().forward(x)


@pytest.mark.parametrize("kind", [nn.Linear, Branch])
def test_draws_are_evaluated_together_or_one_by_one(kind, monkeypatch):
    net, g = kind(3, 2), torch.Generator().manual_seed(0)
    shapes = {name: p.shape for name, p in net.named_parameters()}
    lengths = 130, 70  # the last 70 draws are compared
    draws = [
        Drawn({name: torch.randn(s, generator=g) for name, s in shapes.items()}, chain)
        for chain, length in enumerate(lengths)
        for _ in range(length)
    ]
    x = torch.randn(5, 3, generator=g)
    found = {}
    for together in (50, 1):
        monkeypatch.setattr(run_issues, "_DRAWS", together)
        found[together] = sg.report(net, draws, x, link="identity")
    alone = [torch.func.functional_call(net, draw, x).detach() for draw in draws]
    expected = torch.stack([torch.stack(alone[60:130]), torch.stack(alone[130:])])
    for report in found.values():
        torch.testing.assert_close(report.outputs, expected)
    torch.testing.assert_close(found[50].norms.rhat, found[1].norms.rhat)
    if kind is Branch:
        with pytest.raises(RuntimeError, match="vmap"):
            sg.report(net, draws, x, link="identity", chunk_size=3)


def test_a_draw_of_another_shape_is_named():
    g = torch.Generator().manual_seed(0)
    shapes = [(2, 3)] * 9 + [(2, 4)]
    draws = [
        Drawn({"weight": torch.randn(shape, generator=g), "bias": torch.zeros(2)}, 0)
        for shape in shapes
    ]
    expected = r"Invalid draw: 'weight' has shape \[2, 4\], in the model \[2, 3\]"
    with pytest.raises(ValueError, match=expected):
        sg.report(nn.Linear(3, 2), draws, torch.zeros(5, 3), link="identity")


def test_without_inputs_and_gauges_all_is_unknown():
    found = sg.report(None, chains_of(chains=1, steps=400)[0])
    assert not found.issues
    assert len(found.unknown) == 3
    assert "there is one chain" in str(found)
    assert "no inputs were given" in str(found)
    assert "no monitor has observed" in str(found)


def test_other_forms(tmp_path):
    draws, monitor, _samplers = chains_of(chains=2, steps=600, noise=0.3)
    found = sg.report(Line(), draws, INPUTS, monitor=monitor, link="identity")
    assert len(found.short().splitlines()) <= 5
    found.save(tmp_path)
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["issues"][0]["kind"] == "above T"
    (kinetic,) = (t["kinetic"] for t in content["chains"]["0"]["tensors"].values())
    assert kinetic[0] == pytest.approx(monitor[0].all().kinetic.mean)
    assert content["convergence"]["num_draws"] == found.convergence.num_draws
    table = (tmp_path / "report.md").read_text()
    both = sum(gauge.all().kinetic.mean for gauge in monitor) / 2
    assert f"| {monitor[0].names[0]} | {both:.3g} ±" in table
    assert content["norms"]["num_draws"] == content["convergence"]["num_draws"]
    titles = [axes.get_title() for axes in found.plot().axes]
    assert "autocorrelation, to where noise begins" in titles
    with pytest.raises(ValueError, match="Invalid monitor: 3"):
        sg.report(None, draws, monitor=[*monitor, monitor[0]])
    with pytest.raises(TypeError, match="Invalid monitor: of type str"):
        sg.report(None, draws, monitor="x")
    with pytest.raises(ValueError, match="no draws"):
        sg.report(Line(), [], INPUTS)
    some = sg.report(Line(), draws[::10], INPUTS, link="identity")
    assert some.convergence.num_draws <= 14


def test_numbers_without_a_dimension():
    """A parameter of one number, such as a noise, is its own norm."""
    draws = [{"a": torch.randn(()), "b": torch.randn(3)} for _ in range(40)]
    found = sg.report(None, draws)
    assert found.norms.num_draws == 40 and found.norms.rhat.isfinite().all()


def record_of(sampler, **numbers):
    return RunRecord(sampler, 1.0, 100, 0, **numbers)


@pytest.mark.default
def test_effective_draws_of_short_chains_are_not_known():
    chains = slow(4, 20, 0.0)
    some = [Drawn({"theta": t}, c) for c in range(4) for t in chains[c]]
    found = sg.report(Line(), some, INPUTS, link="identity")
    assert not found.issues
    assert "80 draws of 4 chains have too few draws a chain for an eff" in str(found)
    assert "whether draws are enough (each chain has 20 of 25)" in str(found)
    assert "nan" not in str(found) and "nan" not in found.markdown()


@pytest.mark.default
def test_an_index_chain_may_accept_few():
    """Its acceptance says how unequal minibatches are, and not how long a step is."""
    rejected = check_runs({0: record_of("EWSG", acceptance=0.27)})[0]
    assert not rejected
    (issue,) = check_runs({0: record_of("HMC", acceptance=0.27)})[0]
    assert issue.kind == "rejected"


def test_chains_of_one_sampler_do_not_share_their_noise(tmp_path):
    p, store = nn.Parameter(torch.zeros(3, 4)), sg.SampleStore(tmp_path)
    sampler = sg.SGHMC([p], 0.1, 0.5, num_data=1.0, num_chains=3, seed=0)
    options = {"burn_in": 0, "every": 5}
    collectors = [
        sg.Collector(sampler, {"p": p[k]}, store, chain=k, **options) for k in range(3)
    ]
    for _ in range(400):
        p.grad = p.detach().clone()
        sampler.step()
    for collector in collectors:
        collector.close()
    found = sg.report(None, store.refresh())
    assert "shared noise" not in {issue.kind for issue in found.issues}


def test_a_large_energy_error():
    assert not check_runs({0: record_of("MCLMC", energy_error=4e-3)})[0]
    (issue,) = check_runs({0: record_of("MCLMC", energy_error=0.04)})[0]
    assert issue.kind == "energy error" and "0.23 times the lr" in issue.message


class OwnHMC(sg.HMC):
    """A user's class, of another name."""


@pytest.mark.default
def test_a_subclass_is_judged_as_its_sampler():
    """Each chain's warm-up has set its step."""
    draws, records = [], {}
    for i, kind in enumerate((sg.HMC, OwnHMC)):
        theta = nn.Parameter(torch.zeros(3))
        sampler = kind([theta], 0.1 + i, num_steps=3, num_data=1.0, seed=i)
        for _ in range(20):
            sampler.step(lambda t=theta: energy(t))
            draws.append(Drawn({"theta": theta.detach().clone()}, i))
        records[i] = RunRecorder(sampler).record()
    assert {ran.sampler for ran in records.values()} == {"HMC"}
    series = run_issues.read(run_issues.by_chain(draws), None, None)[0]
    assert not run_issues.compare_chains(series, records)


@pytest.mark.default
def test_the_first_line_and_the_issue_name_one_chain():
    """A tensor of few observations may be higher by chance."""

    def temperatures(mean):
        return Temperatures(*[Reading(mean, 0.01)] * 6)

    runs = {
        i: record_of(
            "SGHMC",
            all=temperatures(mean),
            tensors={"hot": temperatures(mean), "short": temperatures(3.0)},
            issues=(TemperatureIssue("hot", "above T", mean - 1),),
        )
        for i, mean in enumerate((1.5, 1.75, 1.25))
    }
    found = Report((), (), runs, None, None, None)
    assert "highest in hot: 1.75 T (T = 1), chain 1." in str(found)
    (issue,) = check_runs(runs)[0]
    assert "1.75 T in hot (chain 1 most of chains 0, 1, 2)" in issue.message
    (issue,) = check_runs({**runs, 1: record_of("SGHMC"), 2: record_of("SGHMC")})[0]
    assert "1.5 T in hot (chain 0)" in issue.message


def energy(theta):
    theta.grad = None
    loss = theta.square().sum() / 2
    loss.backward()
    return loss


def test_a_trace_is_of_means():
    trace, values = Trace(), torch.arange(9000.0)
    for i, value in enumerate(values):
        trace.add(value)
        if i == 5000:
            trace = Trace(trace.state)
    assert len(trace.means) < 400
    means = values.reshape(-1, trace.width)[: len(trace.means)].mean(1)
    assert trace.means == means.tolist()


def test_sample_writes_a_report_and_resumes(tmp_path, capsys):
    for name, steps in (("whole", [50]), ("parts", [20, 33, 50])):
        for count in steps:
            run(tmp_path / name, steps=count, chains=2)
    assert contents(tmp_path / "whole") == contents(tmp_path / "parts")
    content = json.loads((tmp_path / "whole" / "report.json").read_text())
    assert content["chains"]["1"]["steps"] == 50
    assert content["chains"]["1"]["num_observed"] > 0
    assert len(content["chains"]["1"]["losses"]) == 5
    assert content["convergence"]["num_chains"] == 2
    store = run(tmp_path / "unseen", report=False)
    assert not {*tmp_path.joinpath("unseen").glob("report*")}
    assert len(store) and not capsys.readouterr().out
    run(tmp_path / "unseen", steps=51, progress=True)
    assert "R-hat" in capsys.readouterr().out


def test_predictions_of_all_draws_are_kept(tmp_path):
    store = run(tmp_path, steps=60, chains=2)
    x = data().tensors[0][:5]
    probs = [
        [sg.predict(model(), [draw], x).mean for draw in store.chain(chain)]
        for chain in (0, 1)
    ]
    kept = sg.predict(model(), store, x, keep_draws=True)
    assert torch.equal(kept.draws, torch.stack([p for c in probs for p in c]))
    assert sg.predict(model(), store, x).draws is None


def test_sample_without_a_folder():
    options = {"steps": 20, "seed": 5, "progress": False, "check": False}
    store = sg.sample(model, sghmc, loader(), loss, chains=2, **options)
    assert len(store) == 40 and store.chains == [0, 1]
    assert sg.report(model(), store, data().tensors[0]).runs[1].steps == 20


@pytest.mark.parametrize(
    ("chains", "draws", "rho"), [(4, 40, 0.9), (8, 40, 0.9), (4, 200, 0.97)]
)
def test_slow_chains_are_few_draws_and_not_on_their_way(chains, draws, rho):
    wrong = 0
    for i in range(40):
        values = slow(chains, draws, rho, i)
        some = [
            Drawn({"theta": theta}, c) for c in range(chains) for theta in values[c]
        ]
        found = sg.report(Line(), some, INPUTS, link="identity").issues
        kinds = {issue.kind for issue in found}
        wrong += "few draws" not in kinds or "not converged" in kinds
    assert wrong <= 2


def test_targets_of_a_regression_are_used(tmp_path):
    """The root mean squared error of the mean of all draws, and of one draw."""
    draws, *_ = chains_of(chains=2, steps=600)
    targets = torch.linspace(-0.2, 0.2, 5)
    found = sg.report(Line(), draws, INPUTS, targets, link="identity")
    mean = torch.stack([draw["theta"] for draw in draws]).mean(0)
    error = float((mean - targets).square().mean().sqrt())
    assert f"Root mean squared error of all draws together {error:.3g}, of" in str(
        found
    )
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    loss = sg.losses.gaussian(noise=0.5)
    make = lambda: nn.Linear(4, 1)  # noqa: E731
    options = {"steps": 60, "seed": 0, "progress": False, "check": False}
    sg.sample(make, sghmc, [(x, x[:, :1])], loss, tmp_path, **options)
    assert "Root mean squared error" in (tmp_path / "report.md").read_text()


def score_and_mean(columns, targets, **options):
    """The report's line of errors, and the mean that it is of."""
    g = torch.Generator().manual_seed(0)
    shapes = {"weight": (columns, 3), "bias": (columns,)}
    draws = [
        {k: torch.randn(shape, generator=g) for k, shape in shapes.items()}
        for _ in range(8)
    ]
    x, net = torch.randn(30, 3, generator=g), nn.Linear(3, columns)
    mean = sg.predict(net, draws, x, **options).mean
    return sg.report(net, draws, x, targets, **options).score, mean


def test_errors_are_those_of_the_link():
    labels = torch.arange(30) % 2
    for targets in (labels, labels[:, None], labels.bool(), labels.double()):
        line, p = score_and_mean(1, targets, link="sigmoid")
        wrong = ((p[:, 0] > 0.5) != labels).double().mean()
        assert line.startswith(f"Error of all draws together {wrong:.2%}, of one")
    for options in ({"link": "identity"}, {"likelihood": sg.losses.gaussian(0.5)}):
        line, mean = score_and_mean(1, 3 * labels, **options)
        error = (mean.double()[:, 0] - 3 * labels).square().mean().sqrt()
        assert f"Root mean squared error of all draws together {error:.3g}," in line
        assert not score_and_mean(2, labels, **options)[0]
    assert not score_and_mean(1, labels, link=lambda out: out)[0]

    def pixels(model, batch):  # [inputs, classes, 2]
        return torch.stack([model(batch), model(-batch)], 2)

    options = {"likelihood": sg.losses.categorical(), "forward": pixels}
    both = torch.stack([labels, 1 - labels], 1)
    line, p = score_and_mean(3, both, **options)
    assert (
        f"Error of all draws together {(p.argmax(1) != both).double().mean():.2%}"
        in (line)
    )
    some = both.clone()
    some[::3] = -100  # which cross_entropy ignores
    known = some >= 0
    line, _ = score_and_mean(3, some.numpy(), **options)
    wrong = (p.argmax(1) != both)[known].double().mean()
    assert line.startswith(f"Error of all draws together {wrong:.2%}, of one")


def test_weights_are_unknown_to_it():
    g = torch.Generator().manual_seed(0)
    model, x, y = nn.Linear(3, 2), torch.randn(5, 3), torch.zeros(5).long()
    draws = [
        Drawn({"weight": torch.randn(2, 3, generator=g), "bias": torch.zeros(2)}, 0)
        for _ in range(8)
    ]
    assert sg.report(model, draws, x, y).score
    for draw, weight in zip(draws, (1, 1, -1, 1, 1, 1, 1, 1), strict=True):
        draw.weight = weight
    found = sg.report(model, draws, x, y)
    wanted = "the 8 draws are worth 4.5 of equal weight in predictions"
    assert not found.score and any(wanted in text for text in found.unknown)


def test_targets_that_do_not_fit_have_no_error():
    """It would be of other inputs, or of no class."""
    g = torch.Generator().manual_seed(0)
    draws = [{"weight": torch.randn(2, 3, generator=g)} for _ in range(4)]
    x, net = torch.randn(30, 3, generator=g), nn.Linear(3, 2, bias=False)
    labels = torch.zeros(30, dtype=torch.long)
    for targets, options in (
        (labels[:29], {}),
        (labels[:, None], {}),
        (labels + 2, {}),
        (labels - 100, {}),
        (labels.double(), {}),
        (torch.zeros(2, 30), {"link": "identity"}),
    ):
        found = sg.report(net, draws, x, targets, **options)
        shape, dtype = [*targets.shape], targets.dtype
        why = f"targets of shape {shape} and dtype {dtype} for outputs of shape [30, 2]"
        assert found.score == ""
        assert f"the error ({why})" in found.unknown
        assert why in str(found)
    with pytest.raises(TypeError, match="Invalid targets: of type list"):
        sg.report(net, draws, x, labels.tolist())


def test_temperatures_have_one_unit():
    draws, monitor, _samplers = chains_of(chains=2, temperature=0.25, noise=0.2)
    found = sg.report(None, draws, monitor=monitor)
    heat = max(g.all().kinetic.mean for g in monitor) / 0.25
    assert f"highest in theta: {heat:.3g} T (T = 0.25)" in str(found)
    (hot,) = (v for v in found.issues if v.kind == "above T")
    assert f"{heat:.3g} T in theta" in hot.message
    assert "| theta | " in found.markdown() and "T_kin / T" in found.markdown()


def test_groups_have_their_own_temperatures(tmp_path):
    """Ratios are to the T of the tensor's own group."""
    params = [nn.Parameter(torch.zeros(n)) for n in (300, 600, 100)]
    temperatures = (0.25, 1.0, 4.0)
    groups = [
        {"params": [(f"p{i}", p)], "temperature": t}
        for i, (p, t) in enumerate(zip(params, temperatures, strict=True))
    ]
    sampler = sg.BAOA(groups, 0.05, num_data=N, seed=0)
    monitor = sg.TemperatureMonitor(sampler, every=2)
    named = {f"p{i}": p for i, p in enumerate(params)}
    with sg.Collector(sampler, named, tmp_path, every=10, monitor=monitor):
        for _ in range(400):
            for i, p in enumerate(params):
                p.grad = p.detach() * (1 + (i == 0))
            sampler.step()
    found = sg.report(None, tmp_path)
    [ran] = found.runs.values()
    kinetic = {name: read.kinetic.mean for name, read in ran.tensors.items()}
    ratios = {f"p{i}": kinetic[f"p{i}"] / t for i, t in enumerate(temperatures)}
    assert all(0.8 < ratio < 1.2 for ratio in ratios.values())
    hot = max(ratios, key=ratios.__getitem__)
    mean = ran.all.kinetic.mean / 1.075  # T of all elements
    assert (
        f"T_kin is {mean:.3g} T on average, highest in {hot}: {ratios[hot]:.3g} T "
        "(T = 0.25 or 1 or 4)."
    ) in str(found)
    for name, ratio in ratios.items():
        assert f"| {name} | {ratio:.3g} ± " in found.markdown()


def test_autocorrelations_end_where_noise_begins(tmp_path):
    store = run(tmp_path, steps=400, chains=2, every=4)
    found = sg.report(model(), store, data().tensors[0][:20])
    assert found.spacing == 4
    (axes,) = (a for a in found.plot().axes if a.get_title().startswith("autocorr"))
    assert axes.get_xlabel() == "steps"
    for line in axes.get_lines():
        lags, values = line.get_data()
        assert lags[0] == 0 and set(lags % 4) == {0}
        noise = 2 / 200**0.5
        assert (values[:-1] > noise).all() and len(values) <= 51


def test_what_ran_before_is_not_taken_for_this_run(tmp_path):
    run(tmp_path, steps=40)
    assert sg.report(None, tmp_path).runs[0].tensors
    run(tmp_path, steps=60, report=False)
    assert not sg.report(None, tmp_path).runs[0].tensors
    assert not {*tmp_path.glob("report*")}


def test_the_verdict_is_by_the_loss_s_own_likelihood(tmp_path):
    x = torch.randn(60, 4)
    batches = [(x, (x[:, :1] > 0).float())]
    sg.sample(
        lambda: nn.Linear(4, 1),
        sghmc,
        batches,
        sg.losses.bernoulli(),
        tmp_path,
        steps=400,
        every=2,
        seed=0,
        progress=False,
    )
    text = (tmp_path / "report.md").read_text()
    assert "R-hat" in text and "whether outputs have converged" not in text


def test_draws_outlive_their_store_in_memory():
    options = {"steps": 20, "seed": 5, "progress": False, "check": False}
    draws = sg.sample(model, sghmc, loader(), loss, **options)[10:]
    gc.collect()
    assert sg.predict(model(), draws, data().tensors[0][:3]).num_draws == 10
    last = draws[-1]
    del draws
    gc.collect()
    assert last["0.weight"].shape == (8, 4) and last.path is None


def test_a_rate_equals_that_of_all_outputs_together():
    """The rate over 20 sets of faultless chains with 500 outputs each."""
    generator = torch.Generator().manual_seed(4)
    sets = [torch.randn(4, 64, 500, generator=generator) for _ in range(20)]
    found = [each.probability for values in sets for each in differences(values)]
    assert sum(probability < 0.05 for probability in found) <= 6


def test_temperatures_exclude_the_burn_in(tmp_path):
    line = Line()
    sampler = sg.SGHMC(line.parameters(), 0.1, 0.5, num_data=N, seed=0)
    monitor = sg.TemperatureMonitor(sampler, every=1)
    options = {"burn_in": 40, "every": 10, "monitor": monitor}
    with sg.Collector(sampler, line, tmp_path, **options):
        for _ in range(100):
            line.theta.grad = line.theta.detach().clone()
            sampler.step()
    assert monitor.num_observed == 60
    assert sg.report(None, tmp_path).runs[0].num_observed == 60


def test_any_default_device(set_default_device):
    draws, monitor, _samplers = chains_of(chains=2, steps=600)
    line, options = Line(), {"monitor": monitor, "link": "identity"}
    expected = sg.report(line, draws, INPUTS, **options)
    set_default_device("meta")
    found = sg.report(line, draws, INPUTS, **options)
    titles = [axes.get_title() for axes in found.plot().axes]
    assert found.json() == expected.json() and str(found) == str(expected)
    assert "autocorrelation, to where noise begins" in titles
