// The tensor work of SBPS and pSBPS, shared by CPU and CUDA.
//
//   theta(t) = origin + t A v            position on a straight line
//   v . A g, |A g|^2, |v|^2              sums over all parameters
//   v <- (v - 2 (v . A g) / |A g|^2 A g) / |v|
//                                        reflection (Pakman et al. 2017, eq.
//                                        16)
//   V <- b V + (1 - b) g^2,  A = 1 / (sqrt(V) + eps) / (mean of the same)
//
// with g = grad + (lambda / N) (theta - mu). Positions are computed from the
// line's origin, without accumulated rounding, and reflections normalise v.
#pragma once

#include <math.h>

#include <array>
#include <cstddef>

#include "ops/op_spec.h"
#include "ops/posterior_gradient.h"
#include "ops/roles.h"
#include "random/arithmetic.h"
#include "random/counter.h"
#include "random/macros.h"

namespace torch_sgmcmc {

// Arrays: theta, origin, direction A v.
template <class Real>
class SBPSPlaceUpdate {
 public:
  static constexpr std::array<Role, 3> kRoles = {
      Role::kOutput, Role::kStatistic, Role::kStatistic};

  explicit SBPSPlaceUpdate(const auto& number)
      : time_(static_cast<Real>(number("time"))) {}

  SG_INLINE void operator()(Real (&x)[3], Real /*xi*/) const {
    x[0] = Fma(time_, x[2], x[1]);
  }

 private:
  Real time_;
};

// v <- scale v - gain A g. Arrays: theta, grad, v, A if preconditioned, and mu.
template <class Real, bool preconditioned>
class SBPSReflection : public PosteriorGradient<Real> {
 public:
  explicit SBPSReflection(const auto& number)
      : PosteriorGradient<Real>(number("weight_decay"), number("prior_mean")),
        scale_(static_cast<Real>(number("scale"))),
        minus_gain_(static_cast<Real>(-number("gain"))) {}

  SG_INLINE void operator()(Real (&x)[preconditioned ? 5 : 4],
                            Real /*xi*/) const {
    constexpr int kMean = preconditioned ? 4 : 3;
    Real g = this->Gradient(x[0], x[kMean], x[1]);
    if constexpr (preconditioned) g *= x[3];
    x[2] = Fma(minus_gain_, g, scale_ * x[2]);
  }

 private:
  Real scale_;       // 1 / |v|
  Real minus_gain_;  // -2 (v . A g) / (|A g|^2 |v|)
};

template <class Real>
class SBPSReflectUpdate : public SBPSReflection<Real, false> {
 public:
  using SBPSReflection<Real, false>::SBPSReflection;
  static constexpr std::array<Role, 4> kRoles = {
      Role::kGradient, Role::kGradient, Role::kState, Role::kPriorMean};
};

template <class Real>
class SBPSPreconditionedReflectUpdate : public SBPSReflection<Real, true> {
 public:
  using SBPSReflection<Real, true>::SBPSReflection;
  static constexpr std::array<Role, 5> kRoles = {
      Role::kGradient, Role::kGradient, Role::kState, Role::kStatistic,
      Role::kPriorMean};
};

// V <- b V + (1 - b) g^2. Arrays: theta, grad, V, mu.
template <class Real>
class SBPSAdaptUpdate : public PosteriorGradient<Real> {
 public:
  static constexpr std::array<Role, 4> kRoles = {
      Role::kGradient, Role::kGradient, Role::kState, Role::kPriorMean};

  explicit SBPSAdaptUpdate(const auto& number)
      : PosteriorGradient<Real>(number("weight_decay"), number("prior_mean")),
        decay_(static_cast<Real>(number("decay"))),
        weight_(static_cast<Real>(1 - number("decay"))) {}

  SG_INLINE void operator()(Real (&x)[4], Real /*xi*/) const {
    const Real g = this->Gradient(x[0], x[3], x[1]);
    x[2] = Fma(weight_ * g, g, decay_ * x[2]);
  }

 private:
  Real decay_;
  Real weight_;
};

// A = scale / (sqrt(V) + eps) and A v. Arrays: V, v, A, A v.
template <class Real>
class SBPSPreconditionUpdate {
 public:
  static constexpr std::array<Role, 4> kRoles = {
      Role::kStatistic, Role::kStatistic, Role::kState, Role::kState};

  explicit SBPSPreconditionUpdate(const auto& number)
      : eps_(static_cast<Real>(number("eps"))),
        scale_(static_cast<Real>(number("scale"))) {}

  SG_INLINE void operator()(Real (&x)[4], Real /*xi*/) const {
    x[2] = scale_ / (sqrt(x[0]) + eps_);
    x[3] = x[2] * x[1];
  }

 private:
  Real eps_;
  Real scale_;  // 1 / mean of 1 / (sqrt(V) + eps)
};

// (origin - mu) . A v and |A v|^2 of a line; two of a plan's arrays are the
// origin and A v.
template <size_t kArrays, size_t kOrigin, size_t kDirection>
class SBPSLineSums {
 public:
  static constexpr std::array<Role, kArrays + 1> kRoles = [] {
    std::array<Role, kArrays + 1> roles = {};
    for (Role& role : roles) role = Role::kStatistic;
    roles[kArrays] = Role::kPriorMean;
    return roles;
  }();
  static constexpr std::array<bool, kArrays + 1> kReads = [] {
    std::array<bool, kArrays + 1> reads = {};
    reads[kOrigin] = reads[kDirection] = reads[kArrays] = true;
    return reads;
  }();

  explicit SBPSLineSums(double prior_mean) : prior_mean_(prior_mean) {}

  SG_INLINE double prior_mean() const { return prior_mean_; }
  SG_INLINE std::array<double, 2> operator()(
      const double (&x)[kArrays + 1]) const {
    return {(x[kOrigin] - x[kArrays]) * x[kDirection],
            x[kDirection] * x[kDirection]};
  }

 private:
  double prior_mean_;
};

// v . A g, |A g|^2 and |v|^2. Arrays: theta, grad, v, A, mu.
template <bool preconditioned>
class SBPSReflectionSums {
 public:
  static constexpr std::array<Role, 5> kRoles = {
      Role::kGradient, Role::kGradient, Role::kStatistic, Role::kStatistic,
      Role::kPriorMean};
  static constexpr std::array<bool, 5> kReads = {true, true, true,
                                                 preconditioned, true};

  SBPSReflectionSums(double weight_decay, double prior_mean)
      : weight_decay_(weight_decay), prior_mean_(prior_mean) {}

  SG_INLINE double prior_mean() const { return prior_mean_; }
  SG_INLINE std::array<double, 3> operator()(const double (&x)[5]) const {
    double g = x[1] + weight_decay_ * (x[0] - x[4]);
    if constexpr (preconditioned) g *= x[3];
    return {g * x[2], g * g, x[2] * x[2]};
  }

 private:
  double weight_decay_;
  double prior_mean_;
};

// Sum of 1 / (sqrt(V) + eps).
class SBPSPreconditionerSum {
 public:
  static constexpr std::array<Role, 1> kRoles = {Role::kStatistic};
  static constexpr std::array<bool, 1> kReads = {true};
  explicit SBPSPreconditionerSum(double eps) : eps_(eps) {}
  SG_INLINE double operator()(const double (&x)[1]) const {
    return 1 / (sqrt(x[0]) + eps_);
  }

 private:
  double eps_;
};

inline constexpr TensorListArg kVelocities{"velocities", Role::kState};
inline constexpr TensorListArg kPositions{"params", Role::kGradient};
inline constexpr TensorListArg kOrigins{"origins", Role::kStatistic};
inline constexpr ScalarArg kWeightDecay{"weight_decay", Domain::kNotNegative};
inline constexpr ScalarArg kScale{"scale", Domain::kPositive};

struct SBPSPlace : UpdatedBy<SBPSPlaceUpdate> {
  static constexpr OpSpec kSpec = {.op = "sbps_place_",
                                   .lists = {{"params", Role::kOutput},
                                             kOrigins,
                                             {"directions", Role::kStatistic}},
                                   .numbers = {{"time"}}};
};

struct SBPSReflect {
  static constexpr OpSpec kSpec = {
      .op = "sbps_reflect_",
      .lists = {kPositions,
                args::kGrads,
                kVelocities,
                {"preconditioners", Role::kStatistic, /*is_optional=*/true}},
      .numbers = {kWeightDecay, kScale, {"gain"}},
      .has_prior_mean = true};

  static void Apply(const auto& driver, const auto& /*plan*/, const auto& call,
                    const NoiseStream& none) {
    if (call.list("preconditioners").empty()) {
      driver.template Apply<SBPSReflectUpdate>(call, none);
    } else {
      driver.template Apply<SBPSPreconditionedReflectUpdate>(call, none);
    }
  }
};

struct SBPSAdapt : UpdatedBy<SBPSAdaptUpdate> {
  static constexpr OpSpec kSpec = {
      .op = "sbps_adapt_",
      .lists = {kPositions, args::kGrads, {"square_averages", Role::kState}},
      .numbers = {kWeightDecay, args::kDecay},
      .has_prior_mean = true};
};

struct SBPSPrecondition : UpdatedBy<SBPSPreconditionUpdate> {
  static constexpr OpSpec kSpec = {
      .op = "sbps_precondition_",
      .lists = {{"square_averages", Role::kStatistic},
                {"velocities", Role::kStatistic},
                {"preconditioners", Role::kState},
                {"directions", Role::kState}},
      .numbers = {args::kEps, kScale}};
};

// SBPSReflect without a preconditioner, and the new line's sums, in one pass.
struct SBPSReflectSums {
  static constexpr OpSpec kSpec = {
      .op = "sbps_reflect_sums_",
      .lists = {kPositions, args::kGrads, kVelocities, kOrigins},
      .numbers = {kWeightDecay, kScale, {"gain"}},
      .has_prior_mean = true,
      .sums = 2};

  static void Reduce(const auto& call, const auto& sum) {
    using Line = SBPSLineSums</*kArrays=*/4, /*kOrigin=*/3, /*kDirection=*/2>;
    sum.template After<SBPSReflectUpdate>(Line(call("prior_mean")));
  }
};

// SBPSPrecondition, and the new line's sums, in one pass.
struct SBPSPreconditionSums {
  static constexpr OpSpec kSpec = {
      .op = "sbps_precondition_sums_",
      .lists = {{"square_averages", Role::kStatistic},
                {"velocities", Role::kStatistic},
                {"preconditioners", Role::kState},
                {"directions", Role::kState},
                kOrigins},
      .numbers = {args::kEps, kScale},
      .has_prior_mean = true,
      .sums = 2};

  static void Reduce(const auto& call, const auto& sum) {
    using Line = SBPSLineSums</*kArrays=*/5, /*kOrigin=*/4, /*kDirection=*/3>;
    sum.template After<SBPSPreconditionUpdate>(Line(call("prior_mean")));
  }
};

struct SBPSSumsOfLine {
  static constexpr OpSpec kSpec = {
      .op = "sbps_line_sums",
      .lists = {kOrigins, {"directions", Role::kStatistic}},
      .has_prior_mean = true,
      .sums = 2};

  static void Reduce(const auto& call, const auto& sum) {
    using Line = SBPSLineSums</*kArrays=*/2, /*kOrigin=*/0, /*kDirection=*/1>;
    sum(Line(call("prior_mean")));
  }
};

struct SBPSSumsOfReflection {
  static constexpr OpSpec kSpec = {
      .op = "sbps_reflection_sums",
      .lists = {kPositions,
                args::kGrads,
                {"velocities", Role::kStatistic},
                {"preconditioners", Role::kStatistic, /*is_optional=*/true}},
      .numbers = {kWeightDecay},
      .has_prior_mean = true,
      .sums = 3};

  static void Reduce(const auto& call, const auto& sum) {
    if (call.list("preconditioners").empty()) {
      sum(SBPSReflectionSums<false>(call("weight_decay"), call("prior_mean")));
    } else {
      sum(SBPSReflectionSums<true>(call("weight_decay"), call("prior_mean")));
    }
  }
};

struct SBPSSumOfPreconditioner {
  static constexpr OpSpec kSpec = {
      .op = "sbps_preconditioner_sum",
      .lists = {{"square_averages", Role::kStatistic}},
      .numbers = {args::kEps},
      .sums = 1};

  static void Reduce(const auto& call, const auto& sum) {
    sum(SBPSPreconditionerSum(call("eps")));
  }
};

}  // namespace torch_sgmcmc
