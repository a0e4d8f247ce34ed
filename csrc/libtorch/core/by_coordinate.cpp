#include "libtorch/core/by_coordinate.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <string>
#include <variant>

#include "libtorch/core/checks.h"
#include "libtorch/core/momentum.h"
#include "libtorch/core/operators.h"
#include "libtorch/core/options_of_work.h"
#include "libtorch/core/text.h"
#include "methods/gauge.h"

namespace torch_sgmcmc {
namespace {

// C / M is rounded as masses are, to fp32 for most.
constexpr double kRatesRounding = 1e-6;

// Undefined where it was not given.
at::Tensor FrictionOf(const MassAndFriction& given) {
  return given.friction.defined() ? given.friction : given.mass;
}

at::Tensor OverFriction(const MassAndFriction& given,
                        const at::Tensor& variance) {
  const at::Tensor c = FrictionOf(given);
  return c.defined() ? variance / c : variance;
}

// The gradient with the prior's.
at::Tensor ForceOf(const SGHMCOptions& options, const Operands& operands) {
  const at::Tensor& theta = operands.theta;
  at::Tensor g = operands.mean.defined() ? theta - operands.mean
                                         : theta - options.prior_mean();
  g = g * (options.prior_precision() / options.num_data());
  return g += operands.grad;
}

// Of each coordinate α C / M, in the type of its mass.
at::Tensor FrictionRates(const SGHMCOptions& options,
                         const at::Tensor& mass,
                         const MassAndFriction& given) {
  at::Tensor rates = at::full_like(mass, 1.0 - options.momentum());
  if (!given.friction.defined()) return rates;
  return rates.mul_(given.friction / mass);
}

// What a coordinate adds to x . g and v . v.
std::pair<at::Tensor, at::Tensor> TermsByCoordinate(const SGHMCOptions& options,
                                                    const at::Tensor& mass,
                                                    const at::Tensor& friction,
                                                    const at::Tensor& position,
                                                    const at::Tensor& force,
                                                    const at::Tensor& momentum,
                                                    bool is_drawn) {
  const at::Tensor carried = 1 - friction;
  const int64_t every = options.resample_momentum_every();
  if (every == 0) {
    const at::Tensor weight = mass * (1 + carried) / (1 + options.momentum());
    return {position * force, weight * momentum.square()};
  }
  // What of a gradient enters after a draw, and in the mean over all steps.
  const at::Tensor part = (1 + carried).reciprocal();
  const auto others = static_cast<double>(every - 1);
  const double of_group = others + 1 / (1 + options.momentum());
  const at::Tensor weight = (part + others).reciprocal() * of_group;
  at::Tensor square = momentum.square();
  at::Tensor of_force = weight;
  if (is_drawn) {
    of_force = weight * part * (1 + options.momentum());
  } else {
    square = square + 2 * carried * position * momentum;
  }
  return {of_force * position * force, weight * mass * square};
}

}  // namespace

RateLimits LimitsOf(const MassAndFriction& given) {
  if (!given.mass.defined() || given.mass.numel() == 0) return {};
  const at::Tensor mass = given.mass.to(at::kDouble);
  const at::Tensor friction =
      given.friction.defined() ? given.friction.to(at::kDouble) : mass;
  return {(friction / mass).max().item<double>(),
          friction.reciprocal().max().item<double>()};
}

std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>> MassesAndFrictions(
    const std::vector<at::Tensor>& params,
    const std::vector<MassAndFriction>& given) {
  std::vector<at::Tensor> masses;
  bool has_friction = false;
  for (size_t i = 0; i < params.size(); ++i) {
    masses.push_back(given[i].mass.defined() ? given[i].mass
                                             : ZeroState(params[i]).fill_(1));
    has_friction |= given[i].friction.defined();
  }
  std::vector<at::Tensor> frictions;
  for (size_t i = 0; has_friction && i < params.size(); ++i) {
    frictions.push_back(given[i].friction.defined() ? given[i].friction
                                                    : masses[i]);
  }
  return {std::move(masses), std::move(frictions)};
}

bool IsDrawn(const Work& work) {
  const int64_t every =
      OptionsOfWork<SGHMCOptions>(work).resample_momentum_every();
  return every > 0 && work.step.host % every == 0;
}

void CheckRates(const SGHMCOptions& options,
                const std::vector<MassAndFriction>& given,
                const std::vector<RateLimits>& limits,
                const std::vector<at::Tensor>& variances,
                const char* state_of_things) {
  const double alpha = 1.0 - options.momentum();
  double largest = 0;
  double most_share = 0;
  for (const RateLimits& limit : limits) {
    largest = std::max(largest, alpha * limit.most_friction);
    most_share = std::max(most_share, limit.most_share);
  }
  if (largest > 1 + kRatesRounding) {
    Invalid("Invalid momentum: " + SixDigits(options.momentum()) +
            ", with which the largest friction (1 - momentum) C / M is " +
            SixDigits(largest) + state_of_things +
            " (must not exceed 1: raise momentum, or give more mass or less "
            "friction)");
  }
  double worst = 0;
  double friction_there = alpha;
  if (variances.empty()) {
    const auto given_number = options.noise_estimate();
    const auto* number = std::get_if<double>(&given_number);
    const double share = number != nullptr ? *number / alpha : 0;
    worst = share * most_share;
    if (worst > 0) friction_there = *number / worst;
  }
  double most = 0;  // Var(grad) / C
  size_t where = 0;
  for (size_t i = 0; i < variances.size(); ++i) {
    if (variances[i].numel() == 0) continue;
    const auto of_this =
        OverFriction(given[i], variances[i]).max().item<double>();
    if (of_this > most) {
      most = of_this;
      where = i;
    }
  }
  if (!variances.empty()) {
    const double scale =
        options.lr() * options.num_data() / (2 * options.temperature());
    worst = scale * most / alpha;
  }
  if (worst > 1 + kRatesRounding && !variances.empty()) {
    const at::Tensor c = FrictionOf(given[where]);
    const auto at =
        OverFriction(given[where], variances[where]).argmax().item<int64_t>();
    friction_there = alpha * (c.defined() ? c.flatten()[at].item<double>() : 1);
  }
  if (worst > 1 + kRatesRounding) {
    Invalid("Invalid noise_estimate: " + SixDigits(worst * friction_there) +
            " in the noisiest coordinate" + state_of_things +
            " (must not exceed its friction (1 - momentum) C = " +
            SixDigits(friction_there) +
            ": lower momentum or lr, or take larger minibatches)");
  }
}

CoordinateSums SumByCoordinate(const SGHMCOptions& options,
                               const MassAndFriction& given,
                               const Operands& operands,
                               const at::Tensor& center,
                               const at::Tensor& before,
                               bool is_drawn) {
  const at::Tensor& theta = operands.theta;
  const auto [masses, frictions] = MassesAndFrictions({theta}, {given});
  const at::Tensor& mass = masses[0];
  const auto sum = [](const at::Tensor& grad,
                      const at::Tensor& position,
                      const at::Tensor& mover,
                      GaugeKind kind) {
    return gauge_sums({grad},
                      {position},
                      {},
                      {mover},
                      {},
                      static_cast<int64_t>(kind),
                      /*weight_decay=*/0.0,
                      /*decay=*/1.0,
                      /*eps=*/0.0,
                      /*prior_mean=*/0.0,
                      std::nullopt);
  };
  const auto [of_force, of_square] =
      TermsByCoordinate(options,
                        mass,
                        FrictionRates(options, mass, given),
                        center.defined() ? theta - center : theta - 0.0,
                        ForceOf(options, operands),
                        operands.momentum,
                        is_drawn);
  const at::Tensor inverse =
      (frictions.empty() ? mass : frictions[0]).reciprocal();
  // Beside ones, x . g and x . v are plain sums.
  const at::Tensor ones = at::ones_like(theta);
  CoordinateSums result{sum(of_force, ones, of_square, GaugeKind::kMomentum),
                        {},
                        inverse.mean().item<double>()};
  if (before.defined()) {
    const auto weighted = [&](const at::Tensor& grad) {
      return grad.to(mass.scalar_type()) * inverse.sqrt();
    };
    result.noise =
        sum(weighted(operands.grad), ones, weighted(before), GaugeKind::kNoise);
  }
  return result;
}

}  // namespace torch_sgmcmc
