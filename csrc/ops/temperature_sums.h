// The sums of a tensor for TemperatureMonitor, before an update, shared by CPU
// and CUDA.
//
// With x = theta - center, g = grad + (lambda / N) (theta - mu), and the
// gradient of the step before:
//   kLangevin, kPreconditioned    x . g,  sum w g^2
//   kMomentum                     x . g,  u . u,  x . u,  u = v - eps g
//   kThermostat                   x . g,  v . v,  sum x s v
//   kLattice                      x . g,  x . clip(g),  how many clip(g) != g
//   kNoise, kPreconditionedNoise  sum w (grad - grad before)^2 / 2
// w = 1 / (sqrt(V) + eps) with the update's V, else 1; s is the thermostat;
// clip(g) is within a bound, given as eps. temperature_means.py in
// torch_sgmcmc/diagnostics computes temperatures. A missing list is replaced by
// another one, which is not read.
#pragma once

#include <math.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "ops/op_spec.h"
#include "ops/roles.h"
#include "random/macros.h"

namespace torch_sgmcmc {

enum class TemperatureSum {
  kLangevin,
  kPreconditioned,
  kMomentum,
  kThermostat,
  kNoise,
  kPreconditionedNoise,
  kLattice
};

constexpr TemperatureSum kLastTemperatureSum = TemperatureSum::kLattice;

constexpr size_t CountOf(TemperatureSum kind) {
  if (kind < TemperatureSum::kMomentum) return 2;
  const bool of_noise = kind == TemperatureSum::kNoise ||
                        kind == TemperatureSum::kPreconditionedNoise;
  return of_noise ? 1 : 3;
}

struct TemperatureNumbers {
  double weight_decay;
  double center_scale;  // 0 without centers
  double decay;         // of V
  double eps;
  double prior_mean;  // mu, where there is no array of it
};

// Arrays: grad, theta, center, v or the gradient before, V or s, mu.
template <TemperatureSum kKind>
class TemperatureTerms {
 public:
  static constexpr bool kOfNoise = CountOf(kKind) == 1;
  static constexpr bool kWeighted =
      kKind == TemperatureSum::kPreconditioned ||
      kKind == TemperatureSum::kPreconditionedNoise;
  static constexpr std::array<Role, 6> kRoles = {
      Role::kGradient,  Role::kStatistic,
      Role::kStatistic, kOfNoise ? Role::kGradient : Role::kStatistic,
      Role::kStatistic, Role::kPriorMean};
  static constexpr std::array<bool, 6> kReads = {
      true,
      !kOfNoise,
      !kOfNoise,
      CountOf(kKind) != 2 && kKind != TemperatureSum::kLattice,
      kWeighted || kKind == TemperatureSum::kThermostat,
      !kOfNoise};

  explicit TemperatureTerms(const TemperatureNumbers& numbers) : n_(numbers) {}

  SG_INLINE double prior_mean() const { return n_.prior_mean; }

  SG_INLINE std::array<double, CountOf(kKind)> operator()(
      const double (&x)[6]) const {
    double weight = 1;
    if constexpr (kWeighted) {
      weight =
          1 / (sqrt(n_.decay * x[4] + (1 - n_.decay) * x[0] * x[0]) + n_.eps);
    }
    if constexpr (kOfNoise) {
      const double change = x[0] - x[3];
      return {0.5 * weight * change * change};
    } else {
      const double g = x[0] + n_.weight_decay * (x[1] - x[5]);
      const double position = x[1] - n_.center_scale * x[2];
      if constexpr (CountOf(kKind) == 2) {
        return {position * g, weight * g * g};
      } else if constexpr (kKind == TemperatureSum::kLattice) {
        const double clipped = fmin(fmax(g, -n_.eps), n_.eps);
        return {position * g, position * clipped, clipped == g ? 0.0 : 1.0};
      } else if constexpr (kKind == TemperatureSum::kMomentum) {
        // Of none, whatever g is.
        const double kicked = n_.eps == 0 ? x[3] : x[3] - n_.eps * g;
        return {position * g, kicked * kicked, position * kicked};
      } else {
        return {position * g, x[3] * x[3], position * (x[4] * x[3])};
      }
    }
  }

 private:
  TemperatureNumbers n_;
};

// Row i of the result has the sums over tensor i.
struct TemperatureSums {
  static constexpr OpSpec kSpec = {
      .op = "temperature_sums",
      .lists = {args::kGrads,
                {"positions", Role::kStatistic},
                {"centers", Role::kStatistic},
                {"movers", Role::kStatistic},
                {"statistics", Role::kStatistic}},
      .numbers = {{"kind", Domain::kCode},
                  {"weight_decay", Domain::kNotNegative},
                  {"decay", Domain::kFinite},
                  {"eps", Domain::kNotNegative}},
      .has_prior_mean = true,
      .sums = kCustom};

  static std::string Refusal(const auto& call) {
    const int64_t kind = call.integer("kind");
    if (kind < 0 || kind > static_cast<int64_t>(kLastTemperatureSum)) {
      return "Invalid kind: " + std::to_string(kind) + " (must be in [0, 6])";
    }
    if (call("decay") < 0 || call("decay") > 1) {
      return "Invalid decay: " + std::to_string(call("decay")) +
             " (must be in [0, 1])";
    }
    return "";
  }
  static std::vector<int64_t> Sizes(const auto& call) {
    const size_t count =
        CountOf(static_cast<TemperatureSum>(call.integer("kind")));
    return {static_cast<int64_t>(call.list("grads").size()),
            static_cast<int64_t>(count)};
  }
  static auto Lists(const auto& call) {
    const auto reads = ForKind(call, [](const auto* map) {
      return std::decay_t<decltype(*map)>::kReads;
    });
    const auto roles = ForKind(call, [](const auto* map) {
      return std::decay_t<decltype(*map)>::kRoles;
    });
    const auto all = call->Arguments({});
    std::decay_t<decltype(all)> chosen;
    for (size_t i = 0; i < all.size(); ++i) {
      // Unread lists, and centers, may be absent.
      const bool may_be_absent = i < 5 && (!reads[i] || i == 2);
      const bool is_replaced = may_be_absent && call->lists[i].empty();
      chosen.push_back(
          {all[i].name, roles[i], all[is_replaced ? 1 : i].tensors});
    }
    return chosen;
  }
  static void Reduce(const auto& call, const auto& sums) {
    const TemperatureNumbers numbers{
        .weight_decay = call("weight_decay"),
        .center_scale = call.list("centers").empty() ? 0.0 : 1.0,
        .decay = call("decay"),
        .eps = call("eps"),
        .prior_mean = call("prior_mean")};
    const std::vector<int64_t> rows = RowsOfTensors(call.list("grads"));
    ForKind(call, [&](const auto* map) {
      using Map = std::decay_t<decltype(*map)>;
      sums.Each(Map(numbers), rows);
    });
  }

 private:
  // Calls use(pointer to the kind's terms).
  template <int kKind = 0>
  static auto ForKind(const auto& call, const auto& use) {
    constexpr auto kTried = static_cast<TemperatureSum>(kKind);
    if constexpr (kTried != kLastTemperatureSum) {
      if (call.integer("kind") != kKind) return ForKind<kKind + 1>(call, use);
    }
    return use(static_cast<const TemperatureTerms<kTried>*>(nullptr));
  }
};

}  // namespace torch_sgmcmc
