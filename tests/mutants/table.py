"""Bugs in the sources, and the tests that must see each.

Mutants of one build are of different samplers, so that what one test sees is not what
another mutant has done. (EWSG moves as SGHMC, and control variates by SGLD: of these
only their own operators are looked at.)
"""

from typing import NamedTuple

__all__ = ["BUILDS", "Mutant", "level_of"]


class Mutant(NamedTuple):
    """A bug.

    Args:
        name: what is wrong.
        file: which has it: under csrc, or a Python file under torch_sgmcmc.
        old: the right text, which must be there exactly once.
        new: the wrong text.
        tests: arguments of pytest, each of which must find a failing test. They begin
            with their level (--level=full), if that is not the default one.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def path(self) -> str:
        """The file, from the top of the checkout."""
        folder = "torch_sgmcmc" if self.file.endswith(".py") else "csrc"
        return f"{folder}/{self.file}"

    @property
    def is_default(self) -> bool:
        """True if a test of the default level must catch the bug."""
        return any(level_of(arguments) == "default" for arguments in self.tests)


def level_of(arguments: str) -> str:
    """Returns the level of arguments of pytest."""
    first = arguments.split()[0]
    return first.removeprefix("--level=") if "--level=" in first else "default"


def _updates(k: str) -> str:
    return f"tests/operators/test_fused_updates.py -k {k}_equals_reference"


def _law(method: str) -> str:
    return f"tests/laws/test_sampling_law.py -k 'gaussian_targets and {method}'"


def _changes(k: str) -> str:
    return f"tests/laws/test_changing_settings.py -k '{k}'"


_OTHER = "tests/contract/test_preconditioner.py -k 'other_coordinates"
_PRECONDITIONED = "tests/laws/test_preconditioner_law.py -k 'follows_its_law"
_ECS_LAW = "--level=full tests/laws/test_hmc_ecs_law.py -k"

BUILDS: tuple[tuple[Mutant, ...], ...] = (
    (
        Mutant("SGLD: noise scale without its 2", "ops/sgld.h",
            '2 * number("lr") * number("temperature") / number("num_data")',
            'number("lr") * number("temperature") / number("num_data")',
            (_updates("test_sgld"), _law("SGLD"))),
        Mutant("SGLRW: steps without their 2", "ops/sglrw.h",
            '2 * number("lr") * number("temperature") / number("num_data")',
            'number("lr") * number("temperature") / number("num_data")',
            ("tests/laws/test_sglrw_law.py -k every_place",)),
        Mutant("SGHMC: temperature forgotten", "ops/sghmc.h",
            'scaled_temperature(2 * lr * number("temperature") / number("num_data"))',
            'scaled_temperature(2 * lr * (number("temperature") > 0) / '
            'number("num_data"))', (_updates("test_sghmc"), _law("SGHMC"))),
        Mutant("BAOA: parameters move by the new momentum alone", "ops/baoa.h",
            "x[0] = Fma(Real(0.5), kicked + x[2], x[0]);", "x[0] = x[0] + x[2];",
            ("tests/laws/test_baoa_law.py -k equals_its_reference",
             "tests/laws/test_baoa_law.py -k follows_its_law")),
        Mutant("MCLMC: refreshment scaled by 1 - m in place of 1 - m²", "ops/mclmc.h",
            "sqrt((1 - n.momentum) * (1 + n.momentum) / n.dimension)",
            "sqrt((1 - n.momentum) / n.dimension)",
            ("tests/laws/test_mclmc_law.py -k recursion",)),
        Mutant("SGNHT: parameters move by the old momentum", "ops/sgnht.h",
            "x[2] = v;\n    x[0] = x[0] + v;", "x[0] = x[0] + x[2];\n    x[2] = v;",
            (_updates("test_sgnht"), _law("SGNHT"))),
        Mutant("PSGLD: prior dropped", "ops/psgld.h",
            "const Real g = Fma(weight_decay_, theta - mean, grad);",
            "const Real g = grad + 0 * (theta - mean);",
            (_updates("test_frozen_psgld"), _law("PSGLD"))),
        Mutant("EWSG: weights ignored", "ops/ewsg.h", "return c_.scale * sum;",
            "return 0 * sum;",
            ("tests/operators/test_ewsg_operators.py -k equals_reference",)),
        Mutant("HMC: last half step of the momentum missing", "ops/hmc.h",
            "    x[2] = this->Kicked(x[2], x[0], x[3], x[1]);\n  }\n};",
            "    x[2] = x[2] + 0 * (x[1] + x[3]);\n  }\n};",
            ("tests/operators/test_hmc_operators.py -k leapfrog",
             "tests/laws/test_hmc_law.py -k 'test_law and HMC and invariance'")),
        Mutant("SBPS: reflections of the wrong sign", "ops/sbps.h",
            'minus_gain_(static_cast<Real>(-number("gain")))',
            'minus_gain_(static_cast<Real>(number("gain")))',
            ("tests/operators/test_sbps_operators.py -k reflection",
             "tests/laws/test_sbps_law.py -k 'follows and plain'")),
        Mutant("HMC-ECS: sign dropped", "ops/hmc_ecs.cpp",
            "if (excess < 0) result.sign = -result.sign;", "",
            ("tests/operators/test_ecs_operators.py",
             f"{_ECS_LAW} 'keeps_its_law and signed'")),
        Mutant("control variate: gradient at the anchor dropped",
            "ops/gradients.h", "x[0] = (x[0] - x[1]) + x[2];",
            "x[0] = (x[0] - 0 * x[1]) + x[2];", (_updates("test_control_variate"),)),
        Mutant("monitor: the center is not taken off", "ops/temperature_sums.h",
            "const double position = x[1] - n_.center_scale * x[2];",
            "const double position = x[1] - 0 * n_.center_scale * x[2];",
            ("tests/posterior/test_temperatures.py -k sums_each_tensor",)),
    ),
    (
        Mutant("SGLD: prior dropped", "ops/sgld.h",
            "const Real g = this->Gradient(x[0], x[2], x[1]);",
            "const Real g = x[1] + 0 * x[2];", (_updates("test_sgld"), _law("SGLD"))),
        Mutant("SGHMC: half the noise", "ops/sghmc.h",
            "noise_scale_(static_cast<Real>(std::sqrt(c.NoiseVariance())))",
            "noise_scale_(static_cast<Real>(0.5 * std::sqrt(c.NoiseVariance())))",
            (_updates("test_sghmc"), _law("SGHMC"))),
        Mutant("SGNHT: no noise", "ops/sgnht.h",
            'std::sqrt(2 * (1 - number("momentum"))',
            '0 * std::sqrt(2 * (1 - number("momentum"))',
            (_updates("test_sgnht"), _law("SGNHT"))),
        Mutant("PSGLD: noise without the preconditioner", "ops/psgld.h",
            "root_of_g * Fma(minus_lr_ * root_of_g, g, noise_scale_ * xi);",
            "Fma(minus_lr_ * root_of_g * root_of_g, g, noise_scale_ * xi);",
            (_updates("test_frozen_psgld"), _law("PSGLD"))),
        Mutant("EWSG: ratio inverted", "ops/ewsg.h", "return (x[2] - x[1]) * s;",
            "return (x[1] - x[2]) * s;",
            ("tests/operators/test_ewsg_operators.py -k equals_reference",)),
        Mutant("HMC: momenta drawn without their mass", "ops/hmc.h",
            "x[0] = std_ * sqrt(x[1]) * xi;", "x[0] = std_ * (1 + 0 * x[1]) * xi;",
            ("tests/operators/test_hmc_operators.py -k momenta",
             "tests/laws/test_hmc_law.py -k 'test_law and HMC and invariance'")),
        Mutant("SBPS: every proposal a bounce", "host/bounce_clock.cpp",
            "return Uniforms(stream, kDecision).first * rate < value;",
            "return 0 * Uniforms(stream, kDecision).first * rate < value + rate;",
            ("--level=full tests/laws/test_sbps_law.py -k test_gaussian",)),
        Mutant("seeds are folded with half of the stream's number", "host/draws.h",
            "portable::ChainSeed(static_cast<uint64_t>(seed), stream));",
            "portable::ChainSeed(static_cast<uint64_t>(seed), stream / 2));",
            ("tests/contract/test_seeds.py -k known_answers",)),
        Mutant("rows dropped: chains share the numbers of their noise",
            "launch/call.cpp", "/*num_chains=*/1, {rows, num_chains}}",
            "/*num_chains=*/1, {}}",
            ("tests/contract/test_many_chains.py -k each_is_the_chain_alone",
             "--level=full tests/ranks/test_sharded.py "
             "-k 'shards_are_parts and SGLD'")),
    ),
    (
        Mutant("the step is not in the counter: the same noise at each",
            "launch/call.cpp",
            "return MakeStream(spec.op, seed, step, Purpose::kUpdate);",
            "return MakeStream(spec.op, seed, 0, Purpose::kUpdate);",
            (_updates("test_sgld"), _law("SGLD"))),
        Mutant("PSGLD: Gamma of the wrong sign", "ops/psgld.h",
            "this->Theta(x[0], x[5], x[1], root_of_g, xi) + gamma;",
            "this->Theta(x[0], x[5], x[1], root_of_g, xi) - gamma;",
            ("tests/laws/test_sampling_law.py -k preconditioner_without_memory",)),
        Mutant("HMC-ECS: correction without its gradient", "ops/hmc_ecs.cpp",
            "weights[i] = scale - square * weights[i];", "weights[i] = scale;",
            ("tests/operators/test_ecs_operators.py",
             f"{_ECS_LAW} energy_is_conserved")),
        Mutant("Metropolis: every proposal accepted", "host/index_chain.h",
            "if (log_ratio >= 0) return true;",
            "if (log_ratio >= 0 || log_ratio < 0) return true;",
            ("tests/operators/test_ewsg_operators.py -k test_decisions",
             "tests/laws/test_hmc_law.py -k 'test_law and HMC and invariance'")),
        Mutant("infinities are not counted", "ops/nonfinite_loop.inl",
            "total.infinities += infinities;", "total.infinities += 0 * infinities;",
            ("tests/operators/test_nonfinite_operators.py -k every_position",)),
        Mutant("monitor: the momentum's sum is of the position",
            "ops/temperature_sums.h",
            "return {position * g, kicked * kicked, position * kicked};",
            "return {position * g, x[1] * x[1], position * kicked};",
            ("tests/posterior/test_temperatures.py -k sums_each_tensor",)),
        Mutant("control variate: gradient of all data dropped", "ops/gradients.h",
            "x[0] = (x[0] - x[1]) + x[2];", "x[0] = (x[0] - x[1]) + 0 * x[2];",
            (_updates("test_control_variate"),)),
        Mutant("SGHMC: no root of the preconditioner in the noise", "ops/sghmc.h",
            "this->Move(x, x[3] * g, SquareRoot(x[3]) * xi);",
            "this->Move(x, x[3] * g, xi);",
            (f"{_OTHER} and SGHMC'", f"{_PRECONDITIONED} and SGHMC'")),
    ),
    (
        Mutant("means of priors dropped where they are tensors", "launch/call.cpp",
            "arguments.push_back(PriorMeans(prior_means));",
            "arguments.push_back(PriorMeans(std::nullopt));",
            ("tests/contract/test_prior_mean.py -k origin_elsewhere",)),
        Mutant("SGLD: N forgotten in the noise", "ops/sgld.h",
            '2 * number("lr") * number("temperature") / number("num_data")',
            '2 * number("lr") * number("temperature")',
            (_updates("test_sgld"), _law("SGLD"))),
        Mutant("SGHMC: parameters move by the old momentum", "ops/sghmc.h",
            "    x[2] = Fma(momentum_, x[2], Fma(minus_lr_, g, noise));\n"
            "    x[0] = x[0] + x[2];", "    x[0] = x[0] + x[2];\n"
            "    x[2] = Fma(momentum_, x[2], Fma(minus_lr_, g, noise));",
            (_updates("test_sghmc"), _law("SGHMC"))),
        Mutant("SGNHT: thermostats rest", "ops/sgnht.h",
            "x[3] = thermostat + Fma(gain_ * u, u, -rate_);",
            "x[3] = thermostat + 0 * Fma(gain_ * u, u, -rate_);",
            (_updates("test_sgnht"),
             "tests/laws/test_sampling_law.py -k absorb_gradient_noise")),
        Mutant("PSGLD: noise by half", "ops/psgld.h",
            "std::sqrt(2 * ScaledTemperature(number))",
            "std::sqrt(ScaledTemperature(number) / 2)",
            (_updates("test_frozen_psgld"), _law("PSGLD"))),
        Mutant("EWSG: prior left out of the weights", "ops/ewsg.h",
            "    if constexpr (prior == EWSGPrior::kAboutZero) "
            "s += c_.twice_decay * x[0];\n"
            "    if constexpr (prior == EWSGPrior::kAboutMean) {\n"
            "      s += c_.twice_decay * (x[0] - x[4]);\n    }\n", "",
            ("tests/operators/test_ewsg_operators.py -k equals_reference",)),
        Mutant("HMC: the leapfrog moves as with unit masses", "ops/hmc.h",
            "x[0] = Fma(drift_, x[2] / x[3], x[0]);",
            "x[0] = Fma(drift_, x[2] + 0 * x[3], x[0]);",
            ("tests/operators/test_hmc_operators.py -k leapfrog",
             "tests/laws/test_hmc_law.py -k 'test_law and HMC and dynamics'")),
        # On small models the sampler's law moves by less than 1,500 steps show.
        Mutant("HMC-ECS: correction of the variance left out", "ops/hmc_ecs.cpp",
            "result.log = result.mean - result.variance / 2;",
            "result.log = result.mean;", ("tests/operators/test_ecs_operators.py",)),
        Mutant("infinities pass the look before a step", "ops/nonfinite_loop.inl",
            "return largest >= BitsOf<T>::kInfinity;",
            "return largest > BitsOf<T>::kInfinity;",
            ("tests/operators/test_nonfinite_operators.py -k every_position",)),
        Mutant("SBPS: reflections without the prior", "ops/sbps.h",
            "Real g = this->Gradient(x[0], x[kMean], x[1]);",
            "Real g = x[1] + 0 * x[kMean];",
            ("tests/operators/test_sbps_operators.py -k reflect",
             "tests/laws/test_sbps_law.py -k 'follows and plain'")),
        Mutant("BAOA: no root of the preconditioner in the noise", "ops/baoa.h",
            "this->Move(x, x[3] * g, SquareRoot(x[3]) * xi);",
            "this->Move(x, x[3] * g, xi);",
            (f"{_OTHER} and BAOA'", f"{_PRECONDITIONED} and BAOA'")),
    ),
    (
        Mutant("SGHMC: momenta of another lr are not rescaled", "ops/sghmc.h",
            'momentum_scale(number("momentum_scale")) {}', "momentum_scale(1) {}",
            (_changes("follows_the_recursion and SGHMC"),)),
        Mutant("BAOA: momenta of another lr are not rescaled", "ops/baoa.h",
            "Fma(minus_lr_, g, momentum_scale_ * x[2])", "Fma(minus_lr_, g, x[2])",
            (_changes("follows_the_recursion and BAOA"),)),
        Mutant("MCLMC: a turn of the whole step, and not of its half", "ops/mclmc.h",
            "turns ? size / (2 * (n.dimension - 1))",
            "turns ? size / (n.dimension - 1)",
            ("tests/laws/test_mclmc_law.py -k recursion",
             "tests/laws/test_mclmc_law.py -k 'gaussians and isotropic'")),
        Mutant("MCLMC: a move's second turn of another ε", "ops/mclmc.h",
            "products.Turned(u, u_norm * t, &second)",
            "products.Turned(u, n.step_size * t, &second)",
            ("tests/laws/test_mclmc_law.py -k energy_errors_after_changes",)),
        Mutant("MCLMC: L without the memory of θ", "samplers/mclmc_tuning.py",
            "found = _PART * math.sqrt(self.lr * self._unit) * time",
            "found = _PART * math.sqrt(self.lr * self._unit)",
            ("--level=full tests/laws/test_mclmc_law.py -k tuned_length",)),
        Mutant("SGNHT: thermostats of another lr are not rescaled", "ops/sgnht.h",
            "const Real thermostat = thermostat_scale_ * x[3];",
            "const Real thermostat = x[3];",
            ("--level=full " + _changes("thermostats_follow"),)),
        Mutant("EWSG: minibatches are weighed with momenta of another lr", "ops/ewsg.h",
            "twice_share = 2 * alpha * momentum_scale;", "twice_share = 2 * alpha;",
            ("tests/operators/test_ewsg_operators.py -k equals_reference",)),
        Mutant("a plan goes on with parameters of another dtype",
            "bindings/plan_guard.cpp", "dtype.ptr() != known.dtype ||", "",
            ("tests/contract/test_step_plan.py -k as_many_bytes_are_seen",)),
        Mutant("an update that fails is counted", "ops/fused_step.h",
            "if (step != nullptr) --*step;", "",
            ("tests/contract/test_step_plan.py -k is_not_counted",)),
    ),
    (
        Mutant("EWSG: a persistent index chain restarts", "samplers/ewsg.py",
            'minibatches=numbers if first["persistent_index_chain"] else [],',
            "minibatches=[],",
            ("--level=full tests/laws/test_ewsg_law.py -k consecutive",)),
        Mutant("HMC: rejected momenta keep their sign", "samplers/hmc_dynamics.py",
            "[-r for r in self.momenta]", "[+r for r in self.momenta]",
            ("--level=full tests/laws/test_hmc_law.py -k kept_momenta",)),
        Mutant("HMC-ECS: every subsample accepted", "samplers/_ecs/target.py",
            "        return bool(accepted)",
            "        return bool(accepted) or test == _OF_SUBSAMPLE",
            ("tests/laws/test_hmc_ecs_law.py -k 'keeps_its_law and perturbed'",)),
        Mutant("GammaPrecision: d in place of d / 2", "schedules.py",
            "(self.shape + dimension / 2 - 1) / t + 1",
            "(self.shape + dimension - 1) / t + 1",
            ("--level=full tests/laws/test_precision_law.py -k conditional",)),
        Mutant("BAOA: first momenta without the preconditioner", "core/state.py",
            "momentum.mul_(root(context, context.state[p][PRECONDITIONER]))", "pass",
            (f"{_OTHER} and BAOA'", f"{_PRECONDITIONED} and BAOA'")),
    ),
)  # fmt: skip
