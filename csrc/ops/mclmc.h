// Microcanonical Langevin, shared by CPU and CUDA (Robnik, De Luca, Silverstein
// and Seljak 2023). With a unit vector u of all d sampled numbers, noise z, the
// gradient G of U / T and e = -G / |G|, a step makes
//
//   turn(u)    u <- (u + e (sinh t + a (cosh t - 1))) / (cosh t + a sinh t)
//              t = eps |G| / (2 (d - 1)),  a = e . u
//   refresh    u <- (m u + sqrt((1 - m^2) / d) z) / |same|
//   turn(u)
//   move       theta <- theta + eps s u
//
// with s = sqrt(preconditioner), or 1, and s G for G. The first turn ends the
// step before, and has its eps: the state is eps u, so its norm is that eps.
// All three changes of u are combinations of u, G and z, so a step needs the
// products of these (mclmc_sums), the factors of the combination (mclmc_turn),
// and one update.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ops/op_spec.h"
#include "ops/posterior_gradient.h"
#include "ops/roles.h"
#include "random/arithmetic.h"
#include "random/macros.h"

namespace torch_sgmcmc {

// With g = s (grad + (lambda / N) (theta - mu)): a map, see Note [Maps] in
// launch/reduce.h.
template <bool is_scaled>
class MCLMCProducts {
 public:
  static constexpr std::array<Role, 6> kRoles = {
      Role::kGradient,  Role::kStatistic, Role::kStatistic,
      Role::kStatistic, Role::kStatistic, Role::kPriorMean};
  static constexpr std::array<bool, 6> kReads = {true, true,      true,
                                                 true, is_scaled, true};

  explicit MCLMCProducts(const auto& number)
      : weight_decay_(WeightDecay(number)), prior_mean_(number("prior_mean")) {}

  SG_INLINE double prior_mean() const { return prior_mean_; }

  // g.g, u.g, u.u, u.z, g.z, z.z
  SG_INLINE std::array<double, 6> operator()(const double (&x)[6]) const {
    double g = x[0] + weight_decay_ * (x[1] - x[5]);
    if constexpr (is_scaled) g *= sqrt(x[4]);
    const double u = x[2];
    const double z = x[3];
    return {g * g, u * g, u * u, u * z, g * z, z * z};
  }

 private:
  double weight_decay_;
  double prior_mean_;
};

struct MCLMCSums {
  static constexpr OpSpec kSpec = {
      .op = "mclmc_sums",
      .lists = {args::kGrads,
                {"positions", Role::kStatistic},
                {"directions", Role::kStatistic},
                {"refreshments", Role::kStatistic},
                {"preconditioners", Role::kStatistic, /*is_optional=*/true}},
      .numbers = {args::kNumData, args::kPriorPrecision, args::kNumChains},
      .has_prior_mean = true,
      .sums = kForEachChain};
  // Of each tensor, so that sums do not depend on param groups.
  static std::vector<int64_t> Sizes(const auto& call) {
    return {static_cast<int64_t>(call.list("grads").size()), 6, call->chains()};
  }
  static void Reduce(const auto& call, const auto& sums) {
    const std::vector<int64_t> rows = RowsOfTensors(call.list("grads"));
    if (call.list("preconditioners").empty()) {
      sums.Each(MCLMCProducts<false>(call), rows);
    } else {
      sums.Each(MCLMCProducts<true>(call), rows);
    }
  }
};

// What mclmc_turn returns for a chain: factors of the state, g and z in u, and
// eps.
constexpr int64_t kTurnNumbers = kNumbersOfChain;
// A chain's record of energy errors: the part of the next one that is known,
// and the number, sum and sum of squares of the errors.
constexpr int64_t kEnergyNumbers = 4;

struct TurnNumbers {
  double step_size;  // eps
  double momentum;   // m
  double dimension;  // d
  double scale;      // N / T: G = scale g
};

// A combination x u + y e + w z of unit vectors u and e, and z.
struct Combination {
  double x, y, w;
};

// The products of u, e and z.
struct Products {
  double ue, uz, ez, zz;

  SG_HOST_DEVICE double Dot(const Combination& a, const Combination& b) const {
    return a.x * b.x + a.y * b.y + a.w * b.w * zz +
           (a.x * b.y + a.y * b.x) * ue + (a.x * b.w + a.w * b.x) * uz +
           (a.y * b.w + a.w * b.y) * ez;
  }
  SG_HOST_DEVICE Combination Unit(const Combination& a) const {
    const double square = Dot(a, a);
    // u and e may cancel to nothing, up to rounding.
    if (!(square > 0)) return {1, 0, 0};
    const double f = 1 / sqrt(square);
    return {a.x * f, a.y * f, a.w * f};
  }
  // Turns a unit vector toward e by the angle's t; adds the kinetic energy's
  // change over d - 1. With exp(-t), which cannot overflow.
  SG_HOST_DEVICE Combination Turned(const Combination& u, double t,
                                    double* kinetic) const {
    const double q = exp(-t);
    const double a = Dot(u, {0, 1, 0});
    const double toward = (1 - q) * (1 + q + a * (1 - q));
    *kinetic += t + log((1 + q * q + a * (1 - q * q)) / 2);
    return Unit({2 * q * u.x, 2 * q * u.y + toward, 2 * q * u.w});
  }
};

// The step of one chain, from its sums over each of `tensors`. `energy` gets
// the new record, which begins with NaN without finite sums.
SG_HOST_DEVICE inline void TurnChain(const TurnNumbers& n, const double* of,
                                     int64_t tensors, int64_t chains,
                                     const double* before, double* turn,
                                     double* energy) {
  double sums[6] = {};
  for (int64_t i = 0; i < 6 * tensors; ++i) sums[i % 6] += of[i * chains];
  const double gg = sums[0];
  const double uu = sums[2];
  const double g_norm = sqrt(gg);
  const double u_norm = sqrt(uu);  // eps of the step before
  const double size = n.scale * g_norm;
  const bool turns = g_norm > 0;
  // e = -g / |g|.
  const double to_e = turns ? -1 / g_norm : 0;
  // A step of such a size that all elements were rounded to 0 leaves no u.
  const bool has_u = uu > 0;
  const double to_u = has_u ? 1 / u_norm : 0;
  const Products products{sums[1] * to_e * to_u, sums[3] * to_u, sums[4] * to_e,
                          sums[5]};
  const double t = turns ? size / (2 * (n.dimension - 1)) : 0;
  double second = 0;  // turn of the step before
  double first = 0;
  Combination u{has_u ? 1.0 : 0.0, 0, has_u ? 0.0 : 1 / sqrt(sums[5])};
  const double arrival = -products.ue * size;  // u . G
  if (turns) u = products.Turned(u, u_norm * t, &second);
  const double fresh = sqrt((1 - n.momentum) * (1 + n.momentum) / n.dimension);
  u = products.Unit(
      {n.momentum * u.x, n.momentum * u.y, n.momentum * u.w + fresh});
  if (turns) u = products.Turned(u, n.step_size * t, &first);
  const double departure = -products.Dot(u, {0, 1, 0}) * size;
  turn[0] = u.x * to_u;
  turn[1] = u.y * to_e;
  turn[2] = u.w;
  turn[3] = n.step_size;
  const double error =
      before[0] + u_norm * arrival / 2 + (n.dimension - 1) * second;
  const double next = n.step_size * departure / 2 + (n.dimension - 1) * first;
  for (int64_t i = 0; i < kEnergyNumbers; ++i) energy[i] = before[i];
  energy[0] = next;
  if (error - error == 0) {  // NaN before the first step
    energy[1] += 1;
    energy[2] += error;
    energy[3] += error * error;
  }
}

// Arrays: theta, grad, eps u, z, the turn's numbers, preconditioner, mu.
template <class Real, bool is_scaled>
class MCLMCMove : public PosteriorGradient<Real> {
 public:
  static constexpr size_t kChainNumbers = 4;  // the list of the numbers

  explicit MCLMCMove(const auto& number) : PosteriorGradient<Real>(number) {}

  SG_INLINE void Take(const double* turn) {
    for (int64_t i = 0; i < kTurnNumbers; ++i) {
      turn_[i] = static_cast<Real>(turn[i]);
    }
  }

 protected:
  SG_INLINE void Move(Real& theta, Real grad, Real& u, Real z, Real mean,
                      [[maybe_unused]] Real preconditioner) const {
    const Real g = this->Gradient(theta, mean, grad);
    if constexpr (is_scaled) {
      const Real s = SquareRoot(preconditioner);
      u = turn_[3] * Fma(turn_[0], u, Fma(turn_[1], g * s, turn_[2] * z));
      theta = Fma(s, u, theta);
    } else {
      u = turn_[3] * Fma(turn_[0], u, Fma(turn_[1], g, turn_[2] * z));
      theta = theta + u;
    }
  }

 private:
  Real turn_[kTurnNumbers] = {};
};

template <class Real>
class MCLMCUpdate : public MCLMCMove<Real, false> {
 public:
  static constexpr std::array<Role, 6> kRoles = {
      Role::kParameter, Role::kGradient,     Role::kState,
      Role::kStatistic, Role::kChainNumbers, Role::kPriorMean};
  explicit MCLMCUpdate(const auto& number) : MCLMCMove<Real, false>(number) {}
  SG_INLINE void operator()(Real (&x)[6], Real /*xi*/) const {
    this->Move(x[0], x[1], x[2], x[3], x[5], 1);
  }
};

template <class Real>
class MCLMCScaledUpdate : public MCLMCMove<Real, true> {
 public:
  static constexpr std::array<Role, 7> kRoles = {
      Role::kParameter,    Role::kGradient,  Role::kState,    Role::kStatistic,
      Role::kChainNumbers, Role::kStatistic, Role::kPriorMean};
  explicit MCLMCScaledUpdate(const auto& number)
      : MCLMCMove<Real, true>(number) {}
  SG_INLINE void operator()(Real (&x)[7], Real /*xi*/) const {
    this->Move(x[0], x[1], x[2], x[3], x[6], x[5]);
  }
};

struct MCLMCStep {
  static constexpr OpSpec kSpec = {
      .op = "mclmc_step_",
      .lists = {args::kParams,
                args::kGrads,
                {.name = "directions",
                 .role = Role::kState,
                 .key = "direction"},
                {"refreshments", Role::kStatistic},
                {"turns", Role::kChainNumbers},
                {"preconditioners", Role::kStatistic, /*is_optional=*/true},
                args::kMasterList},
      .numbers = {args::kNumData, args::kPriorPrecision},
      .noise = Noise::kUpdate,
      .has_prior_mean = true};

  template <class Driver, class Plan>
  static void Apply(const Driver& driver, const Plan& /*plan*/,
                    const auto& call, const NoiseStream& stream) {
    if (call.list("preconditioners").empty()) {
      driver.template Apply<MCLMCUpdate>(call, stream);
    } else {
      driver.template Apply<MCLMCScaledUpdate>(call, stream);
    }
  }
};

// Means of positions: m <- m + w (theta - m).
template <class Real>
class RunningMeanUpdate {
 public:
  static constexpr std::array<Role, 2> kRoles = {Role::kGradient, Role::kState};

  explicit RunningMeanUpdate(const auto& number)
      : weight_(static_cast<Real>(number("weight"))) {}

  SG_INLINE void operator()(Real (&x)[2], Real /*xi*/) const {
    x[1] = Fma(weight_, x[0] - x[1], x[1]);
  }

 private:
  Real weight_;
};

struct RunningMean : UpdatedBy<RunningMeanUpdate> {
  static constexpr OpSpec kSpec = {
      .op = "running_mean_",
      .lists = {{"positions", Role::kGradient}, {"means", Role::kState}},
      .numbers = {{"weight", Domain::kNotNegative}}};
};

}  // namespace torch_sgmcmc
