"""The samplers in the cases that torch tests its own optimizers in.

Inputs, errors, schedules and devices come from torch's test suite (the installed
``torch.testing._internal``); a case is one of its ``test_optim.py``. What it has of
states, copies and gradients is in test_state_dicts.py and test_optimizer_interface.py.
"""

import pytest
import torch
from short_chains import ALIKE
from torch import nn
from torch.optim import SGD
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_optimizers import (
    OptimizerInfo,
    OptimizerInput,
    get_error_inputs_for_all_optims,
    optim_db,
    optims,
)
from torch.testing._internal.common_utils import TestCase

import torch_sgmcmc as sg

pytestmark = pytest.mark.full

# So cold that samplers go downhill as optimizers do.
COLD = {"num_data": 10, "temperature": 1e-3, "seed": 1}
# Where the samplers' errors are their own.
STRICTER = {
    "a param group cannot have duplicate parameters": (ValueError, "overlap in memory"),
    "Tensor lr must be 1-element": (TypeError, r"Invalid lr: .* \(must be a number"),
}
(OF_SGD,) = (info for info in optim_db if info.optim_cls is SGD)


def info(cls, *inputs, closure=False):
    def optim_inputs(device, dtype=None):
        return [OptimizerInput(None, {**COLD, **i}, str(i)) for i in inputs]

    def error_inputs(device, dtype):
        errors = []
        for error in get_error_inputs_for_all_optims(device, dtype):
            given = error.optimizer_error_input
            if not has_lr and "lr" in given.kwargs:
                continue
            if not has_lr and isinstance(given.params, list):
                for group in given.params:
                    if isinstance(group, dict):
                        group.pop("lr", None)
            if given.desc in STRICTER:
                error.error_type, error.error_regex = STRICTER[given.desc]
            given.kwargs = {**COLD, **inputs[0], **given.kwargs}
            errors.append(error)
        return errors

    has_lr = "lr" in inputs[0]
    schedules = OF_SGD.scheduler_inputs if has_lr else ([],)
    settings = {"scheduler_inputs": schedules, "step_requires_closure": closure}
    settings |= {"supported_impls": (), "supports_complex": False}
    settings |= {"optim_error_inputs_func": error_inputs}
    return OptimizerInfo(cls, optim_inputs_func=optim_inputs, **settings)


LR = {"lr": 0.01}
FROZEN = {"lr": 1e-3, "gamma": False}
WARM = {"lr": 0.01, "temperature": 0.1}
STEPS = {"step_size": 0.05, "num_steps": 3}
ECS = {"subsample_size": 4, "num_blocks": 2, "step_size": 0.05}
RESAMPLED = {"lr": 0.01, "momentum": 0.5, "resample_momentum_every": 3}
OVERDAMPED = {"lr": 0.01, "momentum": 0.0, "index_chain_length": 2}
INFOS = [
    *(info(cls, LR) for cls in ALIKE.values()),
    info(sg.SGHMC, LR, RESAMPLED, {"lr": 0.01, "noise_estimate": "online"}),
    info(sg.PSGLD, FROZEN, {**FROZEN, "adapt": False}),
    info(sg.SGNHT, WARM, {**WARM, "thermostat_rate": 0.02}),
    info(sg.EWSG, LR, OVERDAMPED, closure=True),
    info(sg.HMC, STEPS, {**STEPS, "resample_momentum_every": 0}, closure=True),
    info(sg.SBPS, {}, {"preconditioned": True}, closure=True),
    info(sg.HMCECS, ECS, closure=True),
]


#: Of a sampler without state, one with momenta, one that calls closures.
THREE = [i for i in INFOS if i.optim_cls in (sg.SGLD, sg.SGHMC, sg.HMC)]


class Problem:
    """torch's: ten linear outputs, whose squares are the loss."""

    def __init__(self, of, dtype=torch.float32, contiguous=True):
        g = torch.Generator().manual_seed(0)
        rows = torch.randn(10, 5, 2, generator=g, dtype=dtype)
        self.weight, self.bias = map(nn.Parameter, (rows[..., 0], rows[:, 0, 1]))
        if contiguous:
            for p in self.params:
                p.data = p.data.clone()
        self.x = torch.randn(5, generator=g, dtype=dtype)
        self.of, self.calls = of, 0

    @property
    def params(self):
        return [self.weight, self.bias]

    def losses(self, rows=slice(None)):
        return (self.weight[rows].mv(self.x) + self.bias[rows]).square()

    def closure(self, *indices):
        if self.of is sg.HMCECS:
            return -self.losses(*indices)
        if self.of is sg.SBPS:
            return self.losses()
        for p in self.params:
            p.grad = None
        loss = self.losses().mean()
        if self.of is sg.EWSG:  # a gradient with noise of its own at each call
            self.calls += 1
            loss = loss + 1e-3 * (self.calls % 7) * self.bias.sum()
        loss.backward()
        return loss

    def steps(self, optimizer, number):
        for _ in range(number):
            optimizer.step(self.closure)

    def scheduled_steps(self, optimizer, schedules, number):
        for _ in range(number):
            self.steps(optimizer, 1)
            for schedule in schedules:
                if hasattr(schedule, "num_bad_epochs"):  # ReduceLROnPlateau
                    schedule.step(self.losses().sum().item())
                else:
                    schedule.step()


@pytest.mark.filterwarnings("ignore:HMC got another loss")
class TestSamplers(TestCase):
    """Each of torch's cases, over all samplers."""

    @optims(THREE)
    def test_errors(self, device, dtype, optim_info):
        errors = optim_info.optim_error_inputs_func(device, dtype)
        assert len(errors) >= 5
        for error in errors:
            given = error.optimizer_error_input
            warns = issubclass(error.error_type, Warning)
            expects = self.assertWarnsRegex if warns else self.assertRaisesRegex
            params = given.params or [nn.Parameter(torch.ones(2))]
            with self.subTest(given.desc), expects(error.error_type, error.error_regex):
                optim_info.optim_cls(params, **given.kwargs)

    @optims(INFOS)
    def test_goes_in_the_right_direction(self, device, dtype, optim_info):
        """Chains with each schedule, in one of two layouts."""
        is_of_three = optim_info in THREE
        for given in optim_info.optim_inputs_func(device):
            each = [[], *optim_info.scheduler_inputs] if is_of_three else [[]]
            for i, schedules in enumerate(each):
                problem = Problem(optim_info.optim_cls, dtype, contiguous=i % 2 > 0)
                optimizer = optim_info.optim_cls(problem.params, **given.kwargs)
                scheduled = [make(optimizer) for make in schedules]
                before = problem.losses().sum().item()
                problem.scheduled_steps(optimizer, scheduled, 20)
                assert problem.losses().sum().item() < before, (given.desc, schedules)

    @optims(THREE)
    def test_printing(self, device, dtype, optim_info):
        for given in optim_info.optim_inputs_func(device):
            problem = Problem(optim_info.optim_cls, dtype)
            text = repr(optim_info.optim_cls(problem.params, **given.kwargs))
            assert text.startswith(f"{optim_info.name} (\nParameter Group 0\n")
            for key in given.kwargs.keys() - {"seed"}:
                assert f"    {key}: " in text


instantiate_device_type_tests(TestSamplers, globals(), only_for="cpu")
