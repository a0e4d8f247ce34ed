// EWSG's weights, shared by CPU and CUDA. The decision between two minibatches
// needs the difference
//   W(g') - W(g) = N / (4 alpha T) sum (g' - g) (lr (g + g') + 2 u),
// without theta in g' - g, the large common |u|^2, or a special case for lr =
// 0. W is derived in docs/samplers/ewsg.md.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>

#include "ops/op_spec.h"
#include "ops/roles.h"
#include "random/macros.h"

namespace torch_sgmcmc {

// The values of the operators' argument `surrogate`.
enum class Surrogate : int64_t {
  kMomentum = 0,
  kZero = 1,
  kOne = 2,
  kFullMomentum = 3
};
constexpr int64_t kSurrogates = 4;

struct EWSGCoefficients {
  explicit EWSGCoefficients(const auto& number)
      : lr(number("lr")),
        twice_decay(2 * lr * number("prior_precision") / number("num_data")),
        scale(number("num_data") /
              (4 * (1 - number("momentum")) * number("temperature"))),
        prior_mean(number("prior_mean")) {
    const double momentum = number("momentum");
    const double momentum_scale = number("momentum_scale");
    const double alpha = 1 - momentum;
    switch (static_cast<Surrogate>(number.integer("surrogate"))) {
      case Surrogate::kMomentum:
        twice_share = 2 * alpha * momentum_scale;
        break;
      case Surrogate::kZero:
        break;
      case Surrogate::kOne:
        twice_shift = 2 * std::sqrt(2 * alpha * lr * number("temperature") /
                                    number("num_data"));
        break;
      case Surrogate::kFullMomentum:
        twice_share = -2 * momentum * momentum_scale;
        break;
    }
  }

  double lr;
  double twice_decay;      // 2 lr lambda / N
  double scale;            // N / (4 alpha T)
  double prior_mean;       // mu, where there is no array of it
  double twice_share = 0;  // 2 u = twice_share v + twice_shift
  double twice_shift = 0;
};

// The prior in a log ratio; subtracting a mean of 0 would take time.
enum class EWSGPrior { kFlat, kAboutZero, kAboutMean };

// A term of W(g') - W(g). Arrays: theta, grad, proposed grad, v, mu; all but
// the gradients are read only if needed.
template <EWSGPrior prior, bool has_momentum>
class EWSGLogRatio {
 public:
  static constexpr std::array<Role, 5> kRoles = {
      Role::kGradient, Role::kGradient, Role::kGradient, Role::kStatistic,
      Role::kPriorMean};
  static constexpr std::array<bool, 5> kReads = {
      prior != EWSGPrior::kFlat, true, true, has_momentum,
      prior == EWSGPrior::kAboutMean};

  explicit EWSGLogRatio(const EWSGCoefficients& c) : c_(c) {}

  SG_INLINE double prior_mean() const { return c_.prior_mean; }

  // Not fused, like all arithmetic without Fma.
  SG_INLINE double operator()(const double (&x)[5]) const {
    double s = c_.lr * (x[1] + x[2]);
    if constexpr (prior == EWSGPrior::kAboutZero) s += c_.twice_decay * x[0];
    if constexpr (prior == EWSGPrior::kAboutMean) {
      s += c_.twice_decay * (x[0] - x[4]);
    }
    if constexpr (has_momentum) {
      s += c_.twice_share * x[3];
    }
    s += c_.twice_shift;
    return (x[2] - x[1]) * s;
  }
  SG_INLINE double Finish(double sum) const { return c_.scale * sum; }

 private:
  EWSGCoefficients c_;
};

struct EWSGLogRatios {
  static constexpr OpSpec kSpec = {
      .op = "ewsg_log_ratio",
      .lists = {{"params", Role::kGradient},
                args::kGrads,
                {"proposals", Role::kGradient},
                {"momenta", Role::kStatistic, /*is_optional=*/true}},
      .numbers = {args::kLr,
                  args::kMomentum,
                  args::kNumData,
                  args::kPriorPrecision,
                  args::kPositiveTemperature,
                  args::kMomentumScale,
                  {"surrogate", Domain::kCode},
                  args::kNumChains},
      .has_prior_mean = true,
      .sums = kForEachChain};

  static std::string Refusal(const auto& call) {
    const int64_t surrogate = call.integer("surrogate");
    if (surrogate >= 0 && surrogate < kSurrogates) return "";
    return "Invalid surrogate: " + std::to_string(surrogate) +
           " (must be 0, 1, 2 or 3)";
  }
  static void Reduce(const auto& call, const auto& sum) {
    const EWSGCoefficients c(call);
    const bool has_momentum =
        !call.list("momenta").empty() && c.twice_share != 0;
    const auto reduce = [&](auto prior) {
      if (has_momentum) {
        sum(EWSGLogRatio<prior.value, true>(c));
      } else {
        sum(EWSGLogRatio<prior.value, false>(c));
      }
    };
    using Prior = EWSGPrior;
    if (c.twice_decay == 0) {
      reduce(std::integral_constant<Prior, Prior::kFlat>());
    } else if (call("prior_mean") == 0 && !call->prior_means) {
      reduce(std::integral_constant<Prior, Prior::kAboutZero>());
    } else {
      reduce(std::integral_constant<Prior, Prior::kAboutMean>());
    }
  }
};

}  // namespace torch_sgmcmc
