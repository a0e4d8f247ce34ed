// Temperatures of a chain: is it the posterior that is sampled?
//
// Note [Two temperatures]
// Let x = theta - c for any constant c, d the number of coordinates of a sum, N
// the number of data, and g the gradient in use at theta (prior included). In
// equilibrium expectations do not change by a step. For SGLD, theta' = theta -
// lr g + noise, E|x'|^2 = E|x|^2 says 2 lr E[x . g] = lr^2 E|g|^2 + 2 lr T d /
// N:
//
//   T_conf = N E[x . g] / d,   T_kin = T + lr N E|g|^2 / (2 d),   T_conf =
//   T_kin.
//
// With momentum m, v' = m v - lr g + noise and theta' = theta + v', the same
// and E[x' . v'] = E[x . v] give E[x . v] = E|v|^2 / 2 and lr E[x . g] = (1 +
// m) E|v|^2 / 2:
//
//   T_conf as above,   T_kin = N (1 + m) E|v|^2 / (2 lr d).
//
// Neither the potential, nor the minibatches' noise, nor a noise estimate
// enters: T_kin != T_conf means that there is no equilibrium (or a step that is
// not the one said), and T_kin / T - 1 is the heating, by minibatches and by
// discretisation. On a quadratic T_kin is N k Var(theta): the factor by which
// the sampled variance is wrong. The minibatches' part is, per coordinate,
//
//   (lr N Var(grad) / (2 T) - beta) / alpha,   alpha = 1 - m (SGLD: alpha = 1),
//
// beta the noise estimate (not of SGNHT, whose thermostat takes it off, nor
// with redrawn momenta). Var(grad) is half the mean squared difference of the
// gradients of two steps that follow each other.
//
// Where momenta are drawn afresh before every k-th step, that step takes 1 / (1
// + m) of its gradient and none of the old momentum. The same two conservation
// laws, summed over k steps, are
//   sum (|v|^2 / 2 + m x . v [not drawn]) = lr sum (x . g ([drawn] / (1 + m) +
//   [not drawn])), v the momentum before the step.
//
// SGNHT's momentum is 1 - A - s with A its constant and s its learnt friction:
// lr E[x . g] = (2 - A) E|v|^2 / 2 - E[x . (s v)], by coordinate.
//
// A kick u = v - lr g, a drift of u / 2, friction v' = m u + noise, whose
// variance is s^2, and a drift of v' / 2: the same two, with f = 2 (1 - m) / (1
// + m) and s^2 = lr T (1 + m)^2 (f - beta) / (2 N), give
//
//   T_conf as above,
//   T_kin = N (1 + m)^2 E|u|^2 / (4 lr d) + T (1 + m) (3 + m) (f - beta) / 8,
//
// and f in the place of alpha in the minibatches' part.
//
// SGLRW: theta' = theta +- delta, up with probability (1 - clip(lr g / delta))
// / 2, so that |theta' - theta|^2 = 2 lr T d / N always, and E|x'|^2 = E|x|^2
// says N E[x . clip(g)] / d = T, clip(g) being within delta / lr. With
//
//   T_conf as above,   T_kin = T + N E[x . (g - clip(g))] / d
//
// they are equal in equilibrium, and T_kin / T - 1 is what clipping heats (on a
// quadratic N k Var(theta) / T - 1 again). Minibatches heat by it alone.
//
// pSGLD multiplies by G: in the sums of g, and for |g|^2 and Var(grad), each
// coordinate is weighed with it. While G adapts, this holds as far as G stays
// the same in the time that theta moves.
//
// Note [Another gradient at the same place]
// The identities hold for whatever g a step uses, so they do not see that it is
// not the loss's: clipped, stale, of a minibatch that depends on theta. An
// unbiased one h, computed at the same theta by other minibatches, does:
//   gradient bias = N E[x . (g - h)] / d,
// T_conf by the gradients in use less T_conf by unbiased ones, 0 if g is
// unbiased. (EWSG's is not by itself, on purpose, so it is not asked there.)
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "host/batch_means.h"

namespace torch_sgmcmc {

// Observations between two looks at the minibatches' noise, which takes a copy
// of the gradients.
constexpr int64_t kNoiseEvery = 5;

// Observations that a device keeps before the host waits for them.
constexpr int64_t kMostRows = 64;

// How a sampler moves, as its row says (host/settings.cpp); kNone: only x . g
// is used, and T_kin is T.
enum class Motion {
  kLangevin,
  kMomentum,
  kThermostat,
  kLattice,
  kHalfDrifts,
  kNone
};
Motion MotionOf(std::string_view sampler);
// Whether it steps by unbiased gradients.
bool HasUnbiasedGradients(std::string_view sampler);

// What a tensor's step was made with.
struct GaugeSettings {
  Motion motion;
  double lr;
  double num_data;
  double temperature;
  double momentum;
  double noise_estimate;
  int64_t resample_momentum_every;
  int64_t step;  // the number of steps before this one
};

// The sums of methods/gauge.h, those that the motion has.
struct GaugeSums {
  double force = 0;              // x . g
  double gradient_square = 0;    // sum w g^2
  double momentum_square = 0;    // v . v, of half drifts u . u
  double position_momentum = 0;  // x . v, SGNHT: sum x s v
  double noise = 0;              // sum w (grad - grad before)^2 / 2
  double clipped_force = 0;      // x . clip(g)
  double num_clipped = 0;
};

// Temperatures of one observation: T_kin, T_conf, and minibatches' heating.
struct GaugeValues {
  double kinetic;
  double configurational;
  double minibatch;  // in units of temperature; NaN if not observed
  double clipped;    // the part of coordinates; NaN where nothing is
};
GaugeValues TemperaturesOf(const GaugeSettings& settings,
                           const GaugeSums& sums,
                           double numel,
                           bool has_noise);

// How many steps lie between two observations, `every` or a little more, so
// that all steps of a cycle of `resample_momentum_every` are seen alike.
int64_t ObservationInterval(int64_t every, int64_t resample_momentum_every);

// Means over time of one tensor, group, or all.
struct Gauge {
  BatchMeans kinetic;
  BatchMeans configurational;
  BatchMeans excess;  // T_conf - T_kin
  BatchMeans minibatch;
  BatchMeans gradient_bias;
  BatchMeans clipped;
};

namespace host {

class Gauges {
 public:
  // Sizes of the tensors, and the group of each, from 0 in order.
  Gauges(std::vector<int64_t> numels, std::vector<int64_t> groups);

  // One observation: a tensor's sums and settings for each. A tensor whose sums
  // are not finite was not observed.
  void Add(const std::vector<GaugeSums>& sums,
           const std::vector<GaugeSettings>& settings,
           bool has_noise);

  // x . g of the gradient that a step uses, and of another one, at one place. A
  // tensor that was not compared has what is not finite.
  void AddForces(const std::vector<double>& used,
                 const std::vector<double>& others,
                 const std::vector<GaugeSettings>& settings);

  int64_t num_tensors() const { return static_cast<int64_t>(numels_.size()); }
  int64_t num_groups() const { return num_groups_; }
  // Those of tensors, then of groups, then of all. A group's temperature is the
  // mean over its coordinates.
  const std::vector<Gauge>& gauges() const { return gauges_; }
  const std::vector<int64_t>& numels() const { return numels_; }
  // The last settings of a tensor.
  const std::vector<GaugeSettings>& settings() const { return settings_; }

  // A tensor that is blamed, and how far it is off in units of T.
  enum class Fault { kHot, kCold, kNoEquilibrium, kBiasedGradient };
  struct Finding {
    int64_t tensor;
    Fault fault;
    double size;
  };
  // What is wrong, worst first: heating beyond `budget`, what is not in
  // equilibrium, and gradients that are not those of the loss. A chain without
  // faults is blamed with probability `rate`.
  std::vector<Finding> Findings(double budget, double rate) const;
  // That in words, with the way out, behind a table of all tensors.
  std::string Summary(const std::vector<std::string>& names,
                      bool takes_noise_estimate,
                      double budget,
                      double rate) const;

  std::vector<std::vector<double>> State() const;
  void SetState(const std::vector<std::vector<double>>& state);

 private:
  std::vector<int64_t> numels_;
  std::vector<int64_t> groups_;
  int64_t num_groups_ = 0;
  std::vector<Gauge> gauges_;
  std::vector<GaugeSettings> settings_;
};

// In words.
const char* NameOf(Gauges::Fault fault);

}  // namespace host

}  // namespace torch_sgmcmc
