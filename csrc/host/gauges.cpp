#include "host/gauges.h"

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace torch_sgmcmc {

namespace {

constexpr auto kLastMotion = static_cast<double>(Motion::kNone);
constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();
// A lack of equilibrium or a bias that is not worth a word, in units of T.
constexpr double kLeastExcess = 0.01;

void Format(std::string& out, const char* format, ...)
    __attribute__((format(printf, 2, 3)));

void Format(std::string& out, const char* format, ...) {
  char text[512];
  va_list values;
  va_start(values, format);
  std::vsnprintf(text, sizeof text, format, values);
  va_end(values);
  out += text;
}

// What takes heat off in a step: minibatches heat by their part of it.
double FrictionOf(const GaugeSettings& s) {
  if (s.motion == Motion::kLangevin) return 1;
  if (s.motion == Motion::kHalfDrifts) {
    return 2 * (1 - s.momentum) / (1 + s.momentum);
  }
  return 1 - s.momentum;
}

// The factor by which a mean of squares of so many normal numbers exceeds its
// expectation with a probability (Wilson and Hilferty 1931); below it for
// probabilities under one half.
double SquaresQuantile(double p, double degrees_of_freedom) {
  constexpr double kInfinite = 1e12;
  const double part = 2 / (9 * degrees_of_freedom);
  const double root =
      1 - part + StudentQuantile(p, kInfinite) * std::sqrt(part);
  return std::pow(std::max(root, 0.0), 3);
}

// Whether T_kin is a mean of squares of momenta or gradients, and no more.
bool IsSumOfSquares(const GaugeSettings& s) {
  return s.motion == Motion::kLangevin || s.motion == Motion::kMomentum ||
         s.motion == Motion::kHalfDrifts;
}

// A mean with the half width of its 95 % interval.
std::string Interval(const BatchMeans& means) {
  std::string text;
  if (means.count() == 0) return "-";
  const double width = means.HalfWidth(0.95);
  Format(text, "%.3g", means.Mean());
  if (std::isfinite(width)) Format(text, " ± %.2g", width);
  return text;
}

}  // namespace

bool HasUnbiasedGradients(std::string_view sampler) {
  const Motion motion = MotionOf(sampler);
  return sampler != "EWSG" && motion != Motion::kNone;
}

GaugeValues TemperaturesOf(const GaugeSettings& s,
                           const GaugeSums& sums,
                           double numel,
                           bool has_noise) {
  const double lr = s.lr;
  const double scale = s.num_data / numel;
  GaugeValues values{s.temperature, scale * sums.force, kUnknown, kUnknown};
  const double friction = FrictionOf(s);
  switch (s.motion) {
    case Motion::kNone:
      return values;
    case Motion::kLattice:
      values.kinetic += scale * (sums.force - sums.clipped_force);
      values.clipped = sums.num_clipped / numel;
      return values;
    case Motion::kLangevin:
      values.kinetic += lr * scale / 2 * sums.gradient_square;
      break;
    case Motion::kHalfDrifts:
      values.kinetic =
          (1 + s.momentum) / 8 *
          (2 * scale / lr * (1 + s.momentum) * sums.momentum_square +
           s.temperature * (3 + s.momentum) * (friction - s.noise_estimate));
      break;
    case Motion::kThermostat:
      values.kinetic = scale / lr *
                       ((1 + s.momentum) / 2 * sums.momentum_square -
                        sums.position_momentum);
      break;
    case Motion::kMomentum:
      if (s.resample_momentum_every == 0) {
        values.kinetic =
            scale / lr * (1 + s.momentum) / 2 * sums.momentum_square;
        break;
      }
      const auto every = static_cast<double>(s.resample_momentum_every);
      const bool is_drawn = s.step % s.resample_momentum_every == 0;
      const double part = is_drawn ? 1 / (1 + s.momentum) : 1;
      const double mean_part = ((every - 1) + 1 / (1 + s.momentum)) / every;
      values.kinetic = scale / (lr * mean_part) *
                       (sums.momentum_square / 2 +
                        (is_drawn ? 0 : s.momentum * sums.position_momentum));
      values.configurational *= part / mean_part;
      break;
  }
  // The thermostat takes the minibatches' heat off, redrawn momenta some of it.
  if (has_noise && s.motion != Motion::kThermostat &&
      s.resample_momentum_every == 0) {
    values.minibatch =
        (lr * scale / 2 * sums.noise - s.noise_estimate * s.temperature) /
        friction;
  }
  return values;
}

int64_t ObservationInterval(int64_t every, int64_t resample_momentum_every) {
  while (resample_momentum_every > 0 &&
         std::gcd(every, resample_momentum_every) > 1) {
    ++every;
  }
  return every;
}

namespace host {

const char* NameOf(Gauges::Fault fault) {
  switch (fault) {
    case Gauges::Fault::kHot:
      return "hot";
    case Gauges::Fault::kCold:
      return "cold";
    case Gauges::Fault::kBiasedGradient:
      return "biased gradient";
    default:
      return "not in equilibrium";
  }
}

Gauges::Gauges(std::vector<int64_t> numels, std::vector<int64_t> groups)
    : numels_(std::move(numels)), groups_(std::move(groups)) {
  if (numels_.size() != groups_.size()) {
    throw std::invalid_argument("as many groups as tensors are needed");
  }
  if (!groups_.empty()) {
    num_groups_ = 1 + *std::max_element(groups_.begin(), groups_.end());
  }
  settings_.resize(numels_.size());
  gauges_.resize(numels_.size() + static_cast<size_t>(num_groups_) + 1);
}

void Gauges::Add(const std::vector<GaugeSums>& sums,
                 const std::vector<GaugeSettings>& settings,
                 bool has_noise) {
  if (sums.size() != numels_.size() || settings.size() != numels_.size()) {
    throw std::invalid_argument("sums and settings of all tensors are needed");
  }
  const size_t tensors = numels_.size();
  std::vector<GaugeValues> values(gauges_.size(), {0, 0, 0, 0});
  std::vector<double> sizes(gauges_.size());
  for (size_t i = 0; i < tensors; ++i) {
    const auto numel = static_cast<double>(numels_[i]);
    values[i] = TemperaturesOf(settings[i], sums[i], numel, has_noise);
    if (!std::isfinite(values[i].kinetic) ||
        !std::isfinite(values[i].configurational)) {
      continue;  // as of an empty tensor
    }
    sizes[i] = numel;
    settings_[i] = settings[i];
    for (const size_t sum :
         {tensors + static_cast<size_t>(groups_[i]), gauges_.size() - 1}) {
      values[sum].kinetic += numel * values[i].kinetic;
      values[sum].configurational += numel * values[i].configurational;
      values[sum].minibatch += numel * values[i].minibatch;
      values[sum].clipped += numel * values[i].clipped;
      sizes[sum] += numel;
    }
  }
  for (size_t i = 0; i < gauges_.size(); ++i) {
    if (sizes[i] == 0) continue;
    const double scale = i < tensors ? 1 : 1 / sizes[i];
    const GaugeValues& v = values[i];
    gauges_[i].kinetic.Add(scale * v.kinetic);
    gauges_[i].configurational.Add(scale * v.configurational);
    gauges_[i].excess.Add(scale * (v.configurational - v.kinetic));
    if (std::isfinite(v.minibatch)) {
      gauges_[i].minibatch.Add(scale * v.minibatch);
    }
    if (std::isfinite(v.clipped)) gauges_[i].clipped.Add(scale * v.clipped);
  }
}

void Gauges::AddForces(const std::vector<double>& used,
                       const std::vector<double>& others,
                       const std::vector<GaugeSettings>& settings) {
  const size_t tensors = numels_.size();
  if (used.size() != tensors || others.size() != tensors ||
      settings.size() != tensors) {
    throw std::invalid_argument(
        "forces and settings of all tensors are needed");
  }
  std::vector<double> biases(gauges_.size());
  std::vector<double> sizes(gauges_.size());
  for (size_t i = 0; i < tensors; ++i) {
    const double bias = settings[i].num_data * (used[i] - others[i]);
    if (numels_[i] == 0 || !std::isfinite(bias)) continue;
    settings_[i].temperature = settings[i].temperature;
    for (const size_t sum :
         {i, tensors + static_cast<size_t>(groups_[i]), gauges_.size() - 1}) {
      biases[sum] += bias;
      sizes[sum] += static_cast<double>(numels_[i]);
    }
  }
  for (size_t i = 0; i < gauges_.size(); ++i) {
    if (sizes[i] > 0) gauges_[i].gradient_bias.Add(biases[i] / sizes[i]);
  }
}

std::vector<Gauges::Finding> Gauges::Findings(double budget,
                                              double rate) const {
  std::vector<Finding> findings;
  // Each tensor is looked at twice, or thrice.
  const double looks = gauges_.back().gradient_bias.count() > 0 ? 3 : 2;
  const double sure = 1 - rate / (looks * static_cast<double>(numels_.size()));
  for (size_t i = 0; i < settings_.size(); ++i) {
    const double t = settings_[i].temperature;
    const Gauge& gauge = gauges_[i];
    if (t <= 0) continue;
    const auto tensor = static_cast<int64_t>(i);
    // Whether a mean is beyond doubt not 0.
    const auto look = [&](const BatchMeans& means, double width, Fault fault) {
      const double size = std::abs(means.Mean()) / t;
      if (size > width / t && size > kLeastExcess) {
        findings.push_back({tensor, fault, size});
      }
    };
    look(gauge.gradient_bias,
         gauge.gradient_bias.HalfWidth(sure),
         Fault::kBiasedGradient);
    if (gauge.kinetic.count() == 0) continue;
    const double ratio = gauge.kinetic.Mean() / t;
    const double width = gauge.kinetic.HalfWidth(sure) / t;
    const auto numel = static_cast<double>(numels_[i]);
    const auto count = static_cast<double>(gauge.kinetic.count());
    const double tail = 0.5 - sure / 2;
    // Squares of few elements are skewed: a mean that is too small by chance
    // comes with a width that is too small.
    const double logarithm = std::log(ratio) + width / ratio;
    const bool is_hot =
        ratio - width > 1 + budget ||
        // As if the few observations were one.
        (std::isnan(width) && count > 1 && IsSumOfSquares(settings_[i]) &&
         ratio > (1 + budget) * SquaresQuantile(1 - tail, numel));
    const bool is_cold =
        (ratio <= 0 && ratio + width < 1 - budget) ||
        (logarithm < std::log(1 - budget) &&
         ratio < (1 - budget) * SquaresQuantile(tail, numel * count));
    if (is_hot) {
      findings.push_back({tensor, Fault::kHot, ratio - 1});
    } else if (is_cold) {
      findings.push_back({tensor, Fault::kCold, 1 - ratio});
    }
    look(gauge.excess,
         gauge.excess.WidestHalfWidth(sure),
         Fault::kNoEquilibrium);
  }
  std::stable_sort(
      findings.begin(), findings.end(), [](const Finding& a, const Finding& b) {
        return a.size > b.size;
      });
  return findings;
}

namespace {

void AdviseOnHeat(const GaugeSettings& s,
                  double clipped,
                  double heating,
                  double minibatch,
                  double budget,
                  bool takes_noise_estimate,
                  std::string& text) {
  if (s.motion == Motion::kNone) return;
  if (s.motion == Motion::kLattice) {
    Format(
        text,
        "; that is clipping, of %.3g %% of its coordinates' steps: a smaller "
        "lr clips fewer, and so do larger minibatches",
        100 * clipped);
    return;
  }
  Format(text,
         "; heating grows with lr: within %.3g %% it takes lr <= %.2g",
         100 * budget,
         s.lr * budget / heating);
  const double alpha = FrictionOf(s);
  if (!(minibatch > heating / 2)) {
    text +=
        " (little of it is the minibatches': the step is long for the "
        "curvature)";
    return;
  }
  Format(text,
         ", or minibatches %.2g times as large",
         std::ceil(10 * minibatch / budget) / 10);
  const double wanted = alpha * minibatch / budget;
  const bool drifts_twice = s.motion == Motion::kHalfDrifts;
  const double momentum =
      drifts_twice ? (2 - wanted) / (2 + wanted) : 1 - wanted;
  if ((drifts_twice || s.motion == Motion::kMomentum) && momentum > 0) {
    Format(text, ", or momentum <= %.3g", momentum);
  }
  const double estimate = minibatch * alpha + s.noise_estimate;
  if (takes_noise_estimate && estimate <= alpha) {
    Format(text,
           ", or an estimate of the minibatches' noise (noise_estimate; beta "
           "is %.2g here)",
           estimate);
  }
}

}  // namespace

std::string Gauges::Summary(const std::vector<std::string>& names,
                            bool takes_noise_estimate,
                            double budget,
                            double rate) const {
  std::string text;
  const Gauge& all = gauges_.back();
  const bool compared = all.gradient_bias.count() > 0;
  if (all.kinetic.count() == 0 && !compared) return "No step was observed yet.";
  Format(text,
         "Temperatures over %lld observed steps (T_kin: of the motion, T_conf: "
         "of the position; equal in equilibrium, and T if nothing heats)\n",
         static_cast<long long>(all.kinetic.count()));
  std::vector<size_t> order(numels_.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto findings = Findings(budget, rate);
  const auto place = [&](size_t i) {
    const auto found =
        std::find_if(findings.begin(), findings.end(), [&](const Finding& f) {
          return f.tensor == static_cast<int64_t>(i);
        });
    return found - findings.begin();
  };
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return place(a) < place(b);
  });
  size_t widest = 6;
  for (const std::string& name : names) widest = std::max(widest, name.size());
  const auto row =
      [&](const std::string& name, int64_t numel, const Gauge& gauge) {
        const std::string cells[] = {Interval(gauge.kinetic),
                                     Interval(gauge.configurational)};
        text += "  " + name +
                std::string(widest - std::min(widest, name.size()), ' ');
        Format(text, "  %10lld", static_cast<long long>(numel));
        for (const std::string& cell : cells) {
          // "±" takes two bytes.
          const size_t width =
              cell.size() - (cell.find(' ') == std::string::npos ? 0 : 1);
          text += "  " + cell + std::string(width < 18 ? 18 - width : 0, ' ');
        }
        if (gauge.minibatch.count() > 0) {
          Format(text, "  %+.3g", gauge.minibatch.Mean());
        }
        if (gauge.clipped.count() > 0) {
          Format(text, "  %.3g %%", 100 * gauge.clipped.Mean());
        }
        text.erase(text.find_last_not_of(' ') + 1);
        text += '\n';
      };
  text += "  tensor" + std::string(widest - 6, ' ') +
          "    elements  T_kin               T_conf              ";
  text += all.clipped.count() > 0 ? "clipped\n" : "minibatches\n";
  for (const size_t i : order) {
    if (numels_[i] > 0) row(names[i], numels_[i], gauges_[i]);
  }
  row("all", std::accumulate(numels_.begin(), numels_.end(), int64_t{0}), all);
  if (findings.empty() && !std::isfinite(all.kinetic.Error())) {
    return text + "Too few steps for a verdict.";
  }
  if (findings.empty()) {
    Format(text,
           "Nothing is found: no tensor is heated by more than %.3g %%, and "
           "none is seen out of equilibrium%s.",
           100 * budget,
           compared ? " or with gradients that are not the closure's" : "");
    return text;
  }
  for (const Finding& finding : findings) {
    const auto i = static_cast<size_t>(finding.tensor);
    const GaugeSettings& s = settings_[i];
    const Gauge& gauge = gauges_[i];
    const double kinetic = gauge.kinetic.Mean() / s.temperature;
    text += "- " + names[i];
    if (finding.fault == Fault::kHot) {
      Format(text, " is hot: %.3g times the temperature asked for", kinetic);
      AdviseOnHeat(s,
                   gauge.clipped.Mean(),
                   finding.size,
                   gauge.minibatch.Mean() / s.temperature,
                   budget,
                   takes_noise_estimate,
                   text);
    } else if (finding.fault == Fault::kCold) {
      Format(text,
             " is cold: %.3g times the temperature asked for; %s",
             kinetic,
             s.motion == Motion::kLattice
                 ? "steps clip on its way outward (time, or a smaller lr)"
                 : "noise is missing (a noise estimate that is too large, "
                   "momenta that were changed)");
    } else if (finding.fault == Fault::kBiasedGradient) {
      Format(text,
             " has gradients that are not those of the closure that was "
             "observed: T_conf by them, less T_conf by those, is %s (clipped, "
             "stale or summed ones, a penalty in the loss, minibatches that "
             "depend on the parameters, batch norm in training mode)",
             Interval(gauge.gradient_bias).c_str());
    } else {
      const bool spreads = gauge.configurational.Mean() < gauge.kinetic.Mean();
      Format(text,
             " is not in equilibrium: T_conf is %.3g and T_kin %.3g; it still "
             "%s. Time lacks, not a smaller step",
             gauge.configurational.Mean(),
             gauge.kinetic.Mean(),
             spreads ? "moves outward" : "moves inward");
      // What heats a lattice is clipping, which is nothing and then much.
      const double room =
          s.lr > 0 && s.motion != Motion::kLattice ? kinetic - 1 : 0;
      if (room > 0 && room < budget / 2) {
        Format(text,
               ": lr could be %.2g times as large within the budget of heat",
               budget / room);
      }
    }
    text += ".\n";
  }
  text.pop_back();
  return text;
}

std::vector<std::vector<double>> Gauges::State() const {
  std::vector<std::vector<double>> state;
  for (const Gauge& g : gauges_) {
    for (const BatchMeans* means : {&g.kinetic,
                                    &g.configurational,
                                    &g.excess,
                                    &g.minibatch,
                                    &g.gradient_bias,
                                    &g.clipped}) {
      state.push_back(means->State());
    }
  }
  for (const GaugeSettings& s : settings_) {
    state.push_back({static_cast<double>(s.motion),
                     s.lr,
                     s.num_data,
                     s.temperature,
                     s.momentum,
                     // NaN is not like itself, and states are compared.
                     std::isnan(s.noise_estimate) ? -1 : s.noise_estimate,
                     static_cast<double>(s.resample_momentum_every),
                     static_cast<double>(s.step)});
  }
  return state;
}

void Gauges::SetState(const std::vector<std::vector<double>>& state) {
  constexpr size_t kEach = 6;
  constexpr size_t kNumbers = 8;  // of a tensor's settings
  const size_t series = kEach * gauges_.size();
  const size_t expected = series + settings_.size();
  if (state.size() != expected) {
    throw std::invalid_argument(
        "Invalid state: " + std::to_string(state.size()) + " series (must be " +
        std::to_string(expected) + ")");
  }
  std::vector<Gauge> loaded(gauges_.size());
  for (size_t i = 0; i < loaded.size(); ++i) {
    const auto* of_one = &state[kEach * i];
    loaded[i] = {BatchMeans(of_one[0]),
                 BatchMeans(of_one[1]),
                 BatchMeans(of_one[2]),
                 BatchMeans(of_one[3]),
                 BatchMeans(of_one[4]),
                 BatchMeans(of_one[5])};
  }
  std::vector<GaugeSettings> made_with;
  for (size_t i = 0; i < settings_.size(); ++i) {
    const std::vector<double>& n = state[series + i];
    const auto counts = [](double x) { return x >= 0 && x < 0x1p53; };
    if (n.size() != kNumbers || !(n[0] >= 0 && n[0] <= kLastMotion) ||
        !counts(n[6]) || !counts(n[7])) {
      throw std::invalid_argument("Invalid state: settings of a tensor");
    }
    made_with.push_back({static_cast<Motion>(static_cast<int>(n[0])),
                         n[1],
                         n[2],
                         n[3],
                         n[4],
                         n[5] < 0 ? kUnknown : n[5],
                         static_cast<int64_t>(n[6]),
                         static_cast<int64_t>(n[7])});
  }
  gauges_ = std::move(loaded);
  settings_ = std::move(made_with);
}

}  // namespace host

}  // namespace torch_sgmcmc
