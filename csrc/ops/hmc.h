// The leapfrog of Hamiltonian Monte Carlo, shared by CPU and CUDA.
//
// With H(theta, r) = U(theta) + r^T M^-1 r / 2, M diagonal, one call makes
//   r     <- r - kick grad U(theta),   grad U = N grad + lambda theta,
//   theta <- theta + drift M^-1 r,
// and a trajectory of m steps of size eps (algorithm 1 of Chen, Fox and
// Guestrin 2014) is kick eps / 2, drift eps; m - 1 times kick eps, drift eps;
// kick eps / 2 without a drift. Calls are shears: trajectories keep volume, and
// are reversible up to rounding.
#pragma once

#include <array>
#include <cmath>

#include "ops/gaussian.h"
#include "ops/op_spec.h"
#include "ops/roles.h"
#include "random/arithmetic.h"
#include "random/counter.h"
#include "random/macros.h"

namespace torch_sgmcmc {

// The common part of leapfrogs: r + kick grad U, without the mass.
template <class Real>
class Kicks {
 public:
  explicit Kicks(const auto& number)
      : pull_(static_cast<Real>(-number("kick") * number("num_data"))),
        decay_(static_cast<Real>(-number("kick") * number("prior_precision"))),
        prior_mean_(static_cast<Real>(number("prior_mean"))) {}

  SG_HOST_DEVICE Real prior_mean() const { return prior_mean_; }

 protected:
  SG_INLINE Real Kicked(Real r, Real theta, Real mean, Real grad) const {
    return Fma(pull_, grad, Fma(decay_, theta - mean, r));
  }

 private:
  Real pull_;   // of the mean loss's gradient
  Real decay_;  // of theta - mu
  Real prior_mean_;
};

// theta, grad, r, mu.
template <class Real>
class LeapfrogUpdate : public Kicks<Real> {
 public:
  static constexpr std::array<Role, 4> kRoles = {
      Role::kParameter, Role::kGradient, Role::kState, Role::kPriorMean};

  explicit LeapfrogUpdate(const auto& number)
      : Kicks<Real>(number), drift_(static_cast<Real>(number("drift"))) {}

  SG_INLINE void operator()(Real (&x)[4], Real /*xi*/) const {
    x[2] = this->Kicked(x[2], x[0], x[3], x[1]);
    x[0] = Fma(drift_, x[2], x[0]);
  }

 private:
  Real drift_;
};

// theta, grad, r, mass, mu.
template <class Real>
class LeapfrogMassUpdate : public Kicks<Real> {
 public:
  static constexpr std::array<Role, 5> kRoles = {
      Role::kParameter, Role::kGradient, Role::kState, Role::kStatistic,
      Role::kPriorMean};

  explicit LeapfrogMassUpdate(const auto& number)
      : Kicks<Real>(number), drift_(static_cast<Real>(number("drift"))) {}

  SG_INLINE void operator()(Real (&x)[5], Real /*xi*/) const {
    x[2] = this->Kicked(x[2], x[0], x[4], x[1]);
    x[0] = Fma(drift_, x[2] / x[3], x[0]);
  }

 private:
  Real drift_;
};

// theta, grad, r, mu: the last half step, with theta unchanged. It reads
// theta's master like other half steps, so that the trajectory is reversible.
template <class Real>
class KickUpdate : public Kicks<Real> {
 public:
  static constexpr std::array<Role, 4> kRoles = {
      Role::kPosition, Role::kGradient, Role::kState, Role::kPriorMean};

  using Kicks<Real>::Kicks;

  SG_INLINE void operator()(Real (&x)[4], Real /*xi*/) const {
    x[2] = this->Kicked(x[2], x[0], x[3], x[1]);
  }
};

// r, mass: r <- sqrt(T m) xi.
template <class Real>
class MomentumFill {
 public:
  static constexpr std::array<Role, 2> kRoles = {Role::kOutput,
                                                 Role::kStatistic};

  explicit MomentumFill(const auto& number)
      : std_(static_cast<Real>(std::sqrt(number("temperature")))) {}

  SG_HOST_DEVICE bool needs_noise() const { return true; }

  SG_INLINE void operator()(Real (&x)[2], Real xi) const {
    x[0] = std_ * sqrt(x[1]) * xi;
  }

 private:
  Real std_;  // of a unit mass: sqrt(T)
};

// A term of lambda (theta - mu)^2 / 2 + r^2 / (2 m). Arrays: theta, r, mass,
// mu; all but r are read only if needed.
template <bool has_prior, bool has_mass>
class EnergyTerm {
 public:
  static constexpr std::array<Role, 4> kRoles = {
      Role::kGradient, Role::kStatistic, Role::kStatistic, Role::kPriorMean};
  static constexpr std::array<bool, 4> kReads = {has_prior, true, has_mass,
                                                 has_prior};

  EnergyTerm(double prior_precision, double prior_mean)
      : prior_precision_(prior_precision), prior_mean_(prior_mean) {}

  SG_INLINE double prior_mean() const { return prior_mean_; }

  SG_INLINE double operator()(const double (&x)[4]) const {
    double term = x[1] * x[1];
    if constexpr (has_mass) term /= x[2];
    if constexpr (has_prior) {
      const double away = x[0] - x[3];
      term += prior_precision_ * (away * away);
    }
    return term;
  }
  SG_INLINE static double Finish(double sum) { return 0.5 * sum; }

 private:
  double prior_precision_;
  double prior_mean_;
};

struct HMCMomenta {
  static constexpr OpSpec kSpec = {
      .op = "hmc_momenta_",
      .lists = {{"momenta", Role::kOutput},
                {"masses", Role::kStatistic, /*is_optional=*/true}},
      .numbers = {args::kPositiveTemperature},
      .noise = Noise::kMomenta};

  static void Apply(const auto& driver, const auto& /*plan*/, const auto& call,
                    const NoiseStream& stream) {
    if (call.list("masses").empty()) {
      const GaussianCoefficients root(std::sqrt(call("temperature")));
      driver.template Apply<GaussianFill>(root, stream);
    } else {
      driver.template Apply<MomentumFill>(call, stream);
    }
  }
};

struct HMCLeapfrog {
  static constexpr OpSpec kSpec = {
      .op = "hmc_leapfrog_",
      .lists = {args::kParams,
                args::kGrads,
                {"momenta", Role::kState},
                {"masses", Role::kStatistic, /*is_optional=*/true},
                args::kMasterList},
      .numbers = {{"kick", Domain::kNotNegative},
                  {"drift", Domain::kNotNegative},
                  args::kNumData,
                  args::kPriorPrecision},
      .has_prior_mean = true};

  static bool Moves(const auto& call) { return call("drift") != 0; }
  static Role Lead(const auto& call) {
    return Moves(call) ? Role::kParameter : Role::kPosition;
  }
  static void Apply(const auto& driver, const auto& /*plan*/, const auto& call,
                    const NoiseStream& none) {
    if (!Moves(call)) {
      driver.template Apply<KickUpdate>(call, none);
    } else if (call.list("masses").empty()) {
      driver.template Apply<LeapfrogUpdate>(call, none);
    } else {
      driver.template Apply<LeapfrogMassUpdate>(call, none);
    }
  }
};

struct HMCEnergy {
  static constexpr OpSpec kSpec = {
      .op = "hmc_energy",
      .lists = {{"params", Role::kGradient},
                {"momenta", Role::kStatistic},
                {"masses", Role::kStatistic, /*is_optional=*/true}},
      .numbers = {args::kPriorPrecision, args::kNumChains},
      .has_prior_mean = true,
      .sums = kForEachChain};

  static void Reduce(const auto& call, const auto& sum) {
    const double precision = call("prior_precision");
    const double mean = call("prior_mean");
    const bool has_mass = !call.list("masses").empty();
    if (precision != 0 && has_mass) {
      sum(EnergyTerm<true, true>(precision, mean));
    } else if (precision != 0) {
      sum(EnergyTerm<true, false>(precision, mean));
    } else if (has_mass) {
      sum(EnergyTerm<false, true>(precision, mean));
    } else {
      sum(EnergyTerm<false, false>(precision, mean));
    }
  }
};

}  // namespace torch_sgmcmc
