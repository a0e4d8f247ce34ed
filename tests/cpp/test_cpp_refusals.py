"""C++ raises Python's errors, in the same words up to the language's own."""

import copy
import re

import pytest
import torch
from harness import cpp_jobs as jobs

import torch_sgmcmc as sg

pytestmark = pytest.mark.usefixtures("one_thread")


def in_words_of_cpp(error):
    """The message with arguments, types and constants as C++ has them."""
    text = re.sub(r"\b(\w+)='(\w+)'", r'\1("\2")', str(error))
    text = re.sub(r"\b(\w+)=(True|False)\b", r"\1(\2)", text)
    text = text.replace("torch.int64", "torch::kLong")
    return re.sub(r"\b(None|True|False)\b", lambda word: word[0].lower(), text)


def begun(name):
    """A job that goes on after three steps."""
    job = jobs.first_steps(jobs.make_job(name, torch.float32), name)
    return {**job, **jobs.run_in_python(name, job)}


def refusal(run_in_cpp, job):
    with pytest.raises(ValueError) as error:
        run_in_cpp(job)
    return str(error.value)


def assert_same_message(name, job, run_in_cpp, match="", kind=ValueError):
    with pytest.raises(kind, match=match) as in_python:
        jobs.run_in_python(name, job)
    assert refusal(run_in_cpp, job) == in_words_of_cpp(in_python.value)


def assert_same_refused(in_cpp, in_python):
    """Each language says in its own words what it got and expected of what."""
    texts = [in_cpp, str(in_python)]
    what = [text.partition(":")[0] for text in texts]
    assert what[0] == what[1]
    assert all(len(text) > len(what[0]) + 10 for text in texts)


@pytest.mark.parametrize("name", jobs.FAULTY)
def test_the_same_message_of_a_gradient_that_is_not_finite(name, run_in_cpp):
    job = jobs.make_faulty_job(name, "raise")
    assert_same_message(name, job, run_in_cpp, "not finite", RuntimeError)


BAD_SETTINGS = {
    "SGLD": (
        ("lr", -0.5),
        ("lr", float("nan")),
        ("num_data", 0.0),
        ("prior_precision", float("inf")),
        ("temperature", -1e-05),
    ),
    "SGHMC": (
        ("momentum", 1.0),
        ("momentum", -1e20),
        ("noise_estimate", "offline"),
        ("noise_estimate", 0.25),
        ("noise_estimate", -1.5),
        ("resample_momentum_every", -1),
        ("initial_momentum", "random"),
    ),
    "SGHMC-online": (("temperature", 0.0),),
    "PSGLD": (("decay", 1.0), ("eps", 0.0)),
    "SGNHT": (("momentum", -0.1), ("thermostat_rate", -2.0)),
    "EWSG": (("momentum", 1.0), ("temperature", 0.0), ("surrogate", "friction")),
    "SBPS": (("prior_precision", -2.0),),
}


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [(name, *row) for name, rows in BAD_SETTINGS.items() for row in rows],
)
def test_the_same_is_refused(name, key, value, run_in_cpp):
    job = jobs.make_job(name, torch.float32)
    net = jobs.make_net(name, torch.float32)
    method, common, special = jobs.CHAINS[name]
    bad = {"params": net[2].parameters(), **special, key: value}
    with pytest.raises(ValueError) as in_python:
        method([{"params": net[0].parameters()}, bad], **common, num_data=500)
    job["groups"][1][key] = value
    assert_same_refused(refusal(run_in_cpp, job), in_python.value)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("EWSG", "index_chain_length", -1),
        ("EWSG-chains", "num_chains", 0),
        ("EWSG-chains", "num_chains", 4),
        ("SBPS", "temperature", 0.0),
        ("MCLMC", "momentum", 1.0),
        ("MCLMC", "temperature", 0.0),
        ("SBPS", "num_std", -1.0),
        ("SBPS", "sample_interval", 0.0),
    ],
)
def test_shared_settings_are_refused_alike(name, key, value, run_in_cpp):
    job = jobs.make_job(name, torch.float32)
    net = jobs.make_net(name, torch.float32)
    method, common, _ = jobs.CHAINS[name]
    with pytest.raises(ValueError) as in_python:
        method(net.parameters(), **{**common, key: value}, num_data=500)
    for group in job["groups"]:
        group[key] = value
    assert_same_refused(refusal(run_in_cpp, job), in_python.value)


DIFFERENT = {"temperature": 2.0, "preconditioned": True, "num_std": 2.5}
DIFFERENT["sample_interval"] = None


@pytest.mark.parametrize(("key", "value"), DIFFERENT.items())
def test_groups_that_differ(key, value, run_in_cpp):
    name = "SBPS"
    job = begun(name)
    job["state"]["param_groups"][1][key] = value
    assert_same_message(name, job, run_in_cpp, f"Invalid {key}: .*one particle")


# A sampler and what is done to param groups and state of its state dict.
BAD_STATES = [
    ("SGLD", lambda groups, _: groups[1].update(seed=3)),
    ("SGLD", lambda groups, _: groups[1].update(step=2)),
    ("SGLD", lambda groups, _: groups[0].update(step=-1)),
    ("SGLD", lambda groups, _: groups[0].pop("step")),
    ("SGLD", lambda groups, _: groups[1].update(sampler="SGHMC")),
    ("SGLD", lambda groups, _: groups[1].update(seed=torch.tensor(3))),
    ("SGLD", lambda _, state: state.update({0: {"momentum": torch.zeros(33, 7)}})),
    ("SGLD", lambda _, state: state.update({9: {}, "subsample": {}})),
    ("SGLD", lambda groups, _: groups.pop()),
    ("SGLD", lambda groups, _: groups[1].update(sizes=[700, 5])),
    ("SGHMC", lambda groups, _: groups[0].update(momentum=2.0)),
    ("SGHMC", lambda _, state: state[1]["momentum"].fill_(torch.nan)),
    ("SGHMC", lambda groups, _: (groups[1].pop("lr"), groups[1].pop("momentum"))),
    ("SGHMC", lambda _, state: state[1].update(momentum=torch.zeros(2))),
    ("SGHMC", lambda _, state: state[1].update(momentum=torch.zeros(33).long())),
    ("SGHMC", lambda _, state: state[1].update(exp_avg=torch.zeros(33), step=1)),
    ("SGHMC-online", lambda _, state: state[2].pop("previous_grad")),
    ("SGHMC-online", lambda _, state: state[2].update(num_grads=-1)),
    ("SGNHT", lambda _, state: state[3].update(thermostat=torch.zeros(()))),
    ("EWSG", lambda groups, _: groups[1].update(num_accepted=10**6)),
    ("EWSG", lambda groups, _: groups[1].update(num_proposals=7)),
    ("EWSG", lambda groups, _: groups[1].update(capturable=True)),
    ("EWSG-overdamped", lambda groups, _: groups[0].update(minibatches=[10**6])),
    ("EWSG-overdamped", lambda groups, _: groups[1].update(num_drawn=-1)),
    ("EWSG-overdamped", lambda groups, _: groups[0].update(index_chain_length=-1)),
    ("SBPS", lambda groups, _: groups[1].update(line_time=-1.0)),
    ("SBPS", lambda groups, _: groups[0].update(num_bounces=10**6)),
    ("SBPS", lambda groups, _: groups[1].update(num_observations=10**6)),
    ("SBPS", lambda groups, _: groups[1].update(observed_interval=0.0)),
    ("SBPS", lambda groups, _: groups[1].update(observed_target=[1.0, 2.0])),
    ("PSBPS", lambda groups, _: groups[1].update(capturable=True)),
]


@pytest.mark.parametrize(("name", "change"), BAD_STATES)
def test_the_same_state_dicts_are_refused(name, change, run_in_cpp):
    job = begun(name)
    job["state"] = copy.deepcopy(job["state"])
    change(job["state"]["param_groups"], job["state"]["state"])
    assert_same_message(name, job, run_in_cpp)


@pytest.mark.parametrize(
    "changes",
    [
        {"offsets": [0, 128, 512]},
        {"offsets": [-128, 512]},
        {"offsets": [130, 512]},
        {"offsets": [0, 512]},
        {"next_offset": 128},
        {"next_offset": 2**62},
    ],
)
def test_the_same_noise_offsets_are_refused(changes, run_in_cpp):
    job = begun("SGLD")
    for group in job["state"]["param_groups"][-1 if "offsets" in changes else 0 :]:
        group.update(changes)
    with pytest.raises(ValueError) as in_python:
        jobs.run_in_python("SGLD", job)
    assert_same_refused(refusal(run_in_cpp, job), in_python.value)


def test_a_tuned_chain_goes_on_and_one_in_tuning_does_not(run_in_cpp):
    job = begun("MCLMC")
    job["state"] = copy.deepcopy(job["state"])
    for group in job["state"]["param_groups"]:
        group.update(tune_steps=2)
    assert run_in_cpp(job)["state"]["param_groups"][0]["tune_steps"] == 2
    for group in job["state"]["param_groups"]:
        group.update(tune_steps=400)
    assert "3 of tune_steps = 400 steps" in refusal(run_in_cpp, job)
    for group in job["state"]["param_groups"]:
        group.update(tuning=[0.0])
    assert "Invalid tuning: not finished" in refusal(run_in_cpp, job)


def of_frozen_gamma(params):
    """State of Γ is refused where Γ is not used."""
    sampler = sg.PSGLD(params, lr=1e-3, num_data=500)
    loss = sum(p.pow(3).sum() for p in params)
    loss.backward(create_graph=True)
    sampler.step()
    sampler.zero_grad()
    sampler.param_groups[0].update(adapt=False, gamma=False)
    return sampler.state_dict()


def of_a_given_preconditioner(params):
    sampler = sg.SBPS(params, num_data=500, preconditioned=True)
    sampler.set_preconditioner([torch.ones(1)] * len(params))
    return sampler.state_dict()


def of_control_variates(params):
    sampler = sg.SGLD(params, lr=0.1, num_data=500)
    estimator = sg.ControlVariates(sampler, lambda _: params[0].sum())
    estimator.set_anchor([torch.ones(1)])
    return estimator.state_dict()


def of_target(make, **settings):
    """Makes the state dict of what is made of parameters."""
    return lambda params: make(params, num_data=500, **settings).state_dict()


def of_temperatures(params):
    return sg.TemperatureMonitor(sg.SGLD(params, lr=0.1, num_data=500)).state_dict()


@pytest.mark.parametrize(
    ("loads", "saved", "kind"),
    [
        ("SGLD", of_target(sg.HMCECS, subsample_size=10), "HMCECS"),
        ("SGLD", of_target(sg.HMC, step_size=0.1, num_steps=2), "HMC"),
        ("PSGLD", of_target(sg.PSGLD, lr=0.1), "PSGLD with Γ"),
        ("PSGLD", of_frozen_gamma, "PSGLD with Γ"),
        ("EWSG", of_target(sg.EWSG, lr=0.1, persistent_index_chain=True),
         "EWSG with a persistent index chain"),
        ("PSBPS", of_a_given_preconditioner, "a sampler with a given preconditioner"),
        *((name, of_target(maker, lr=0.1, preconditioner=[1.0] * 4),
           "a sampler with a given preconditioner")
          for name, maker in (("SGHMC", sg.SGHMC), ("BAOA", sg.BAOA))),
        ("SGLD", of_temperatures, "TemperatureMonitor"),
        ("SBPS", lambda ps: sg.TimeAverage(sg.SBPS(ps, num_data=500)).state_dict(),
         "TimeAverage"),
        ("SGLD", of_control_variates, "ControlVariates or SVRG"),
    ],
)  # fmt: skip
def test_what_python_alone_has_is_refused_by_name(loads, saved, kind, run_in_cpp):
    job = begun(loads)
    job["state"] = saved([*jobs.make_net(loads, torch.float32).parameters()])
    assert refusal(run_in_cpp, job) == (
        f"Invalid state_dict: got one of {kind}, which C++ does not have. Continue "
        "it in Python"
    )


@pytest.mark.parametrize("loads", jobs.ONE_EACH)
def test_the_same_message_of_another_samplers_state_dict(loads, run_in_cpp):
    job = begun(loads)
    for saved in jobs.ONE_EACH:
        if saved == loads:
            continue
        net = jobs.make_net(saved, torch.float32)
        job["state"] = jobs.make_sampler(saved, net).state_dict()
        match = rf"got one of {saved} \(must be of {loads}\)"
        assert_same_message(loads, job, run_in_cpp, match)


@pytest.mark.parametrize(
    ("name", "key", "factors", "match"),
    [
        ("SGHMC-online", "lrs", [1000, 1000], "in the noisiest coordinate"),
        ("MCLMC", "lrs", [1, 2], "Invalid lr: .*one unit vector"),
        ("MCLMC", "temperatures", [1, 2], "Invalid temperature: .*one unit vector"),
    ],
)
def test_the_same_message_of_a_step(name, key, factors, match, run_in_cpp):
    job = jobs.make_job(name, torch.float32)
    job[key] = job[key] * torch.tensor(factors)
    assert_same_message(name, job, run_in_cpp, match)
