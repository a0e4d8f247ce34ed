// What Gauges see of a step: rows of sums, read once there are many.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "host/flight_heat.h"
#include "host/gauges.h"
#include "libtorch/bouncy/flight.h"
#include "libtorch/core/checks.h"
#include "libtorch/core/momentum.h"
#include "libtorch/core/operators.h"
#include "libtorch/core/prior.h"
#include "libtorch/core/state_checks.h"
#include "libtorch/core/step_observer.h"
#include "libtorch/core/text.h"
#include "libtorch/core/trajectory_heat.h"
#include "methods/gauge.h"
#include "torch_sgmcmc/gauges.h"

namespace torch_sgmcmc {

constexpr double kUnseen = std::numeric_limits<double>::quiet_NaN();

using Tensors = std::vector<at::Tensor>;

inline Gauges::Temperatures ReadGauge(const Gauge& gauge) {
  const auto reading = [](const BatchMeans& means) -> Gauges::Reading {
    return {means.Mean(), means.HalfWidth(0.95)};
  };
  return {reading(gauge.kinetic),
          reading(gauge.configurational),
          reading(gauge.excess),
          reading(gauge.minibatch),
          reading(gauge.gradient_bias),
          reading(gauge.clipped)};
}

struct Gauges::Observer : StepObserver {
  // The tensors of one group on one device, at one observation.
  struct Row {
    std::vector<size_t> places;
    std::vector<size_t> columns;  // of sums, among those of GaugeSums
    at::Tensor sums;
    at::Tensor noise;  // may be undefined
    GaugeSettings settings{};
  };

  Observer(Sampler& of, const GaugesOptions& options)
      : sampler(&of), every(options.every()), names(options.names()) {
    if (every < 1) {
      Invalid("Invalid every: " + std::to_string(every) + " (must be >= 1)");
    }
    for (size_t g = 0; g < of.param_groups().size(); ++g) {
      if (of.options_of(g).capturable()) {
        Invalid(
            "Invalid sampler: it is capturable, and gauges are read on the "
            "host");
      }
      const auto& params = of.param_groups()[g].params();
      for (size_t i = 0; i < params.size(); ++i) {
        place[params[i].unsafeGetTensorImpl()] = all.size();
        all.push_back(params[i]);
        groups.push_back(static_cast<int64_t>(g));
        numels.push_back(params[i].numel());
        if (options.names().empty()) {
          names.push_back(std::to_string(g) + "." + std::to_string(i) + " " +
                          Shape(params[i].sizes()));
        }
      }
    }
    const auto as_many = [&](const char* what, size_t count) {
      if (count == all.size()) return;
      Invalid(std::string("Invalid ") + what + ": " + std::to_string(count) +
              " (must be one for each of the " + std::to_string(all.size()) +
              " parameters)");
    };
    as_many("names", names.size());
    if (!options.centers().empty()) {
      as_many("centers", options.centers().size());
    }
    for (size_t i = 0; i < options.centers().size(); ++i) {
      const at::Tensor& center = options.centers()[i];
      const std::string which = "Invalid centers: number " + std::to_string(i);
      if (!center.defined() || center.sizes() != all[i].sizes()) {
        Invalid(which + " has shape " +
                (center.defined() ? Shape(center.sizes()) : "of no tensor") +
                " (must be " + Shape(all[i].sizes()) + ")");
      }
      if (!center.isfinite().all().item<bool>()) {
        Invalid(which + " is not finite");
      }
      centers.push_back(
          at::empty_like(all[i], StateDtype(all[i])).copy_(center.detach()));
    }
    reset();
  }

  void reset() {
    forget();
    host.emplace(numels, groups);
  }

  void follow(Sampler* of) noexcept override { sampler = of; }

  void look(const std::vector<Work>& work) override {
    if (work.empty() || motion() == Motion::kTrajectory) return;
    const at::NoGradGuard no_grad;
    compare(work);
    const int64_t step = work[0].step.host;
    const int64_t interval = interval_of(*work[0].options);
    if (step % interval == 0) {
      const bool has_noise = previous_step == step - 1 && knows(work);
      add(work, /*plain=*/false, has_noise);
      previous.clear();
    }
    if ((step + 1) % (kNoiseEvery * interval) == 0) {
      previous_step = step;
      previous.clear();
      for (const Work& lists : work) {
        for (size_t i = 0; i < lists.params.size(); ++i) {
          // A clone: a later backward pass may add to the same memory.
          previous[lists.params[i].unsafeGetTensorImpl()] =
              lists.grads[i].detach().clone();
        }
      }
    }
  }

  // Sets the step's gradients beside those of observe().
  void compare(const std::vector<Work>& work) {
    if (others.empty()) return;
    // Somebody else, a checkpoint, may have moved the parameters.
    if (versions() == others_at) {
      forces.emplace_back(std::move(others), forces_of(work));
    }
    others.clear();
    if (static_cast<int64_t>(forces.size()) >= kMostRows) read();
  }

  std::unique_ptr<TrajectoryHeat> trajectory(
      const std::vector<Work>& work) override {
    compare(work);
    if (work[0].step.host % interval_of(*work[0].options) != 0) return nullptr;
    return std::make_unique<TrajectoryHeat>(
        [this](const Tensors& params) { return centers_of(params); });
  }

  void take(const TrajectoryHeat& heat,
            const std::vector<Work>& work) override {
    std::vector<Row> ended;
    for (size_t i = 0; i < work.size(); ++i) {
      Row& row = ended.emplace_back();
      for (const at::Tensor& p : work[i].params) {
        row.places.push_back(place.at(p.unsafeGetTensorImpl()));
      }
      row.columns = {0, 2};
      row.sums = heat.sums(i);
      row.settings = settings_of(*work[i].options, motion(), work[i].step.host);
    }
    rows.emplace_back(std::move(ended), /*has_noise=*/false);
    if (static_cast<int64_t>(rows.size()) >= kMostRows) read();
  }

  void fly(const std::shared_ptr<const Flight>& flown,
           const FlightPiece& piece) override {
    if (line != flown) {
      line = flown;
      sum_line();
    }
    std::vector<GaugeSettings> settings;
    for (size_t g = 0; g < sampler->param_groups().size(); ++g) {
      const GaugeSettings each =
          settings_of(sampler->options_of(g), motion(), sampler->num_steps());
      const size_t count = sampler->param_groups()[g].params().size();
      settings.insert(settings.end(), count, each);
    }
    read();  // first what observe() has seen
    host->AddFlight(piece, squares, products, settings, every);
  }

  void add(const std::vector<Work>& work, bool plain, bool has_noise) {
    std::vector<Row> added;
    added.reserve(work.size());
    for (const Work& lists : work) {
      added.push_back(sum(lists, plain, has_noise));
    }
    rows.emplace_back(std::move(added), has_noise);
    if (static_cast<int64_t>(rows.size()) >= kMostRows) read();
  }

  // Where the chain is, by a closure's gradients.
  void observe(const std::vector<Work>& work) {
    const at::NoGradGuard no_grad;
    if (HasUnbiasedGradients(sampler->name())) {
      others = forces_of(work);
      others_at = versions();
    } else {
      add(work, /*plain=*/true, /*has_noise=*/false);
    }
  }

  // The index-th of `count` gauges from `first` on.
  Temperatures at(int64_t index,
                  int64_t first,
                  int64_t count,
                  const char* what) {
    CheckInteger("index", index);
    if (index >= count) {
      Invalid("Invalid index: " + std::to_string(index) + " (there are " +
              std::to_string(count) + " " + what + ")");
    }
    read();
    return ReadGauge(host->gauges()[static_cast<size_t>(first + index)]);
  }

  // Takes in what devices have summed since the last time.
  void read() {
    for (const auto& [added, has_noise] : rows) {
      const auto [sums, settings] = tables(added);
      host->Add(sums, settings, has_noise);
    }
    for (const auto& [by_closure, by_step] : forces) {
      const auto [used, settings] = tables(by_step);
      host->AddForces(
          forces_in(used), forces_in(tables(by_closure).first), settings);
    }
    rows.clear();
    forces.clear();
  }

  // The step and the gradients before the observation that is to come, if a
  // state dict has them.
  std::pair<int64_t, std::unordered_map<const void*, at::Tensor>> read_previous(
      const StateDict& dict) const {
    if (!dict.contains("previous_gradients")) return {-1, {}};
    const StateDict saved = dict.at("previous_gradients");
    const StateDict gradients = saved.at("gradients");
    const auto step = detail::FromValue<int64_t>("step", saved.at("step"));
    CheckCount("step", step);
    std::unordered_map<const void*, at::Tensor> found;
    for (const auto& entry : gradients.entries()) {
      const int64_t number = entry.key().isInt() ? entry.key().toInt() : -1;
      if (number < 0 || number >= static_cast<int64_t>(all.size())) {
        Invalid("Invalid state_dict: previous_gradients (must be of the " +
                std::to_string(all.size()) + " parameters, by their numbers)");
      }
      const at::Tensor& param = all[static_cast<size_t>(number)];
      const std::string what =
          "previous gradient of parameter " + std::to_string(number);
      CheckTensor(what, entry.value(), param.sizes());
      const at::Tensor gradient =
          entry.value().toTensor().detach().to(param.options(), false, true);
      CheckFiniteState("previous gradient", number, gradient);
      found[param.unsafeGetTensorImpl()] = gradient;
    }
    return {step, std::move(found)};
  }

  // Forgets what has not been read.
  void forget() {
    rows.clear();
    others.clear();
    forces.clear();
  }

  Sampler* sampler;
  int64_t every;
  std::vector<std::string> names;
  Tensors all;
  Tensors centers;
  std::vector<int64_t> groups;
  std::vector<int64_t> numels;
  std::unordered_map<const void*, size_t> place;
  // Gradients of the step before.
  std::unordered_map<const void*, at::Tensor> previous;
  int64_t previous_step = -1;
  std::vector<std::pair<std::vector<Row>, bool>> rows;
  // Forces of observe() where the chain still is, and beside those of the step.
  std::vector<Row> others;
  std::vector<uint32_t> others_at;  // versions of the parameters
  std::vector<std::pair<std::vector<Row>, std::vector<Row>>> forces;
  // What is summed once for a line of SBPS.
  std::shared_ptr<const Flight> line;
  std::vector<double> squares;
  std::vector<double> products;
  std::optional<torch_sgmcmc::host::Gauges> host;

 private:
  Motion motion() const { return MotionOf(sampler->name()); }

  static int64_t redraws_every(const SamplerOptions& options) {
    const double every = options.number_or("resample_momentum_every", 0);
    return every < 0x1p63 ? static_cast<int64_t>(every)
                          : std::numeric_limits<int64_t>::max();
  }
  int64_t interval_of(const SamplerOptions& options) const {
    return ObservationInterval(every, redraws_every(options));
  }

  static GaugeSettings settings_of(const SamplerOptions& options,
                                   Motion moves,
                                   int64_t step) {
    return {moves,
            options.number_or("lr", 0),
            options.num_data(),
            options.temperature(),
            options.number_or("momentum", 0),
            options.number_or("noise_estimate", 0),
            redraws_every(options),
            step};
  }

  // Of each tensor, |v|^2 and, where the line begins, (theta - c) . v / A.
  void sum_line() {
    squares.assign(all.size(), kUnseen);
    products.assign(all.size(), kUnseen);
    for (const FlightPart& part : line->parts()) {
      const Tensors factors =
          part.preconditioner.empty()
              ? part.velocity
              : at::_foreach_div(part.velocity, part.preconditioner);
      const at::Tensor sums =
          gauge_sums(factors,
                     part.origin,
                     centers_of(part.params),
                     part.velocity,
                     {},
                     static_cast<int64_t>(GaugeKind::kMomentum),
                     /*weight_decay=*/0,
                     /*decay=*/1,
                     /*eps=*/0,
                     /*prior_mean=*/0,
                     MeansOf({}))
              .cpu();
      const auto* row = sums.const_data_ptr<double>();
      for (const at::Tensor& p : part.params) {
        const size_t number = place.at(p.unsafeGetTensorImpl());
        products[number] = row[0];
        squares[number] = row[1];
        row += CountOf(GaugeKind::kMomentum);
      }
    }
  }

  // Those of parameters; empty if there are none.
  Tensors centers_of(const Tensors& params) const {
    Tensors some;
    for (const at::Tensor& p : params) {
      if (!centers.empty()) {
        some.push_back(centers[place.at(p.unsafeGetTensorImpl())]);
      }
    }
    return some;
  }

  bool knows(const std::vector<Work>& work) const {
    return std::all_of(work.begin(), work.end(), [&](const Work& lists) {
      return std::all_of(
          lists.params.begin(), lists.params.end(), [&](const at::Tensor& p) {
            return previous.contains(p.unsafeGetTensorImpl());
          });
    });
  }

  // Sums and settings of all tensors.
  std::pair<std::vector<GaugeSums>, std::vector<GaugeSettings>> tables(
      const std::vector<Row>& added) const {
    // A tensor that was not observed has sums that are not finite.
    std::vector<GaugeSums> sums(all.size(), {.force = kUnseen});
    std::vector<GaugeSettings> settings(all.size());
    for (const Row& row : added) {
      const at::Tensor numbers = row.sums.cpu();
      const at::Tensor noise =
          row.noise.defined() ? row.noise.cpu() : row.noise;
      for (size_t i = 0; i < row.places.size(); ++i) {
        std::array<double, 7> of_tensor = {};
        const auto* from =
            numbers.const_data_ptr<double>() + i * row.columns.size();
        for (size_t k = 0; k < row.columns.size(); ++k) {
          of_tensor[row.columns[k]] = from[k];
        }
        if (noise.defined()) of_tensor[4] = noise.const_data_ptr<double>()[i];
        const auto [a, b, c, d, e, f, g] = of_tensor;
        sums[row.places[i]] = {a, b, c, d, e, f, g};
        settings[row.places[i]] = row.settings;
      }
    }
    return {std::move(sums), std::move(settings)};
  }

  std::vector<uint32_t> versions() const {
    std::vector<uint32_t> of_all;
    of_all.reserve(all.size());
    for (const at::Tensor& p : all) {
      of_all.push_back(p.is_inference() ? 0
                                        : static_cast<uint32_t>(p._version()));
    }
    return of_all;
  }

  static std::vector<double> forces_in(const std::vector<GaugeSums>& sums) {
    std::vector<double> result;
    result.reserve(sums.size());
    for (const GaugeSums& s : sums) result.push_back(s.force);
    return result;
  }

  // Of each tensor, x . g.
  std::vector<Row> forces_of(const std::vector<Work>& work) const {
    std::vector<Row> result;
    result.reserve(work.size());
    for (const Work& lists : work) {
      result.push_back(sum(lists, /*plain=*/true, /*has_noise=*/false));
    }
    return result;
  }

  Row sum(const Work& lists, bool plain, bool has_noise) const {
    const SamplerOptions& options = *lists.options;
    const SamplerParamState& first = sampler->state_of(lists.params[0]);
    const auto all_of = [&](const char* key) {
      Tensors tensors;
      for (const at::Tensor& p : lists.params) {
        tensors.push_back(sampler->state_of(p)[key]);
      }
      return tensors;
    };
    Motion moves = plain ? Motion::kNone : motion();
    GaugeKind kind = GaugeKind::kLangevin;
    Tensors movers;
    Tensors statistics;
    const bool drifts_twice = moves == Motion::kHalfDrifts;
    if (moves == Motion::kMomentum || moves == Motion::kThermostat ||
        drifts_twice) {
      if (first["momentum"].defined()) {
        kind = GaugeKind::kMomentum;
        movers = all_of("momentum");
      } else {
        moves = Motion::kLangevin;  // overdamped EWSG
      }
    }
    if (moves == Motion::kThermostat) {
      kind = GaugeKind::kThermostat;
      statistics = all_of("thermostat");
    } else if (moves == Motion::kLattice) {
      kind = GaugeKind::kLattice;
    }
    if (moves == Motion::kLangevin && first["square_average"].defined()) {
      kind = GaugeKind::kPreconditioned;
      statistics = all_of("square_average");
    }
    Row row;
    Tensors positions;
    Tensors before;
    for (const at::Tensor& p : lists.params) {
      const size_t number = place.at(p.unsafeGetTensorImpl());
      row.places.push_back(number);
      // Before its first step, a parameter has no master yet.
      const at::Tensor& master = sampler->state_of(p)["master"];
      positions.push_back(master.defined() ? master
                          : HasMaster(p)   ? p.detach().to(StateDtype(p))
                                           : p.detach());
      if (has_noise) before.push_back(previous.at(p.unsafeGetTensorImpl()));
    }
    const double decay =
        options.number_or("adapt", 0) != 0 ? options.number_or("decay", 1) : 1;
    double eps = options.number_or("eps", 0);
    if (drifts_twice) {
      eps = options.lr();  // of a kick
    } else if (kind == GaugeKind::kLattice) {
      // Beyond what a gradient is clipped; none is by steps that do not move.
      const double heat = 2 * options.temperature() / options.num_data();
      eps = std::min(std::sqrt(heat / options.lr()),
                     std::numeric_limits<double>::max());
    }
    const auto sums = [&](const Tensors& around,
                          const Tensors& moving,
                          const Tensors& beside,
                          GaugeKind what) {
      return gauge_sums(lists.grads,
                        positions,
                        around,
                        moving,
                        beside,
                        static_cast<int64_t>(what),
                        options.prior_precision() / options.num_data(),
                        decay,
                        eps,
                        options.prior_mean(),
                        MeansOf(lists.prior_means));
    };
    row.sums = sums(centers_of(lists.params), movers, statistics, kind);
    if (kind == GaugeKind::kLattice) {
      row.columns = {0, 5, 6};
    } else {
      row.columns = movers.empty() ? std::vector<size_t>{0, 1}
                                   : std::vector<size_t>{0, 2, 3};
    }
    if (has_noise) {
      const bool weighted = kind == GaugeKind::kPreconditioned;
      row.noise =
          sums({},
               before,
               weighted ? statistics : Tensors(),
               weighted ? GaugeKind::kPreconditionedNoise : GaugeKind::kNoise);
    }
    row.settings = settings_of(options, moves, lists.step.host);
    return row;
  }
};

}  // namespace torch_sgmcmc
