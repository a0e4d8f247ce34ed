#include "torch_sgmcmc/sbps.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "host/bounce_clock.h"
#include "host/settings.h"
#include "libtorch/checks.h"
#include "libtorch/sampler_impl.h"
#include "libtorch/trajectory.h"
#include "random/counter.h"

namespace torch_sgmcmc {
namespace {

constexpr const char* kSBPSNeedsClosure =
    "SBPS::step() needs a closure, which returns the losses of the examples:\n"
    "\n"
    "    sampler.step([&] {\n"
    "      auto batch = draw_minibatch();  // fresh, independent of all others\n"
    "      return cross_entropy(net->forward(batch.data), batch.target,\n"
    "          CrossEntropyFuncOptions().reduction(torch::kNone));\n"
    "    });";

constexpr const char* kCounts[] = {
    "num_samples",    "num_observations", "num_proposals",   "num_bounces",
    "num_violations", "num_refreshments", "num_derivatives", "num_gradients"};

class SBPSImpl : public SamplerImpl {
 public:
  SBPSImpl() : SamplerImpl(nullptr) {
    progress_.keep("trajectory_time", 0.0);
    progress_.keep("line_time", 0.0);
    progress_.keep("clock", BounceClock().Save());
    progress_.keep("observed_target", std::vector<double>());
    progress_.keep("observed_interval", std::optional<double>());
    for (const char* count : kCounts) progress_.keep<int64_t>(count, 0);
  }

  torch::Tensor step(const LossClosure& closure) override;
  int64_t register_sample_hook(SBPS::SampleHook hook);
  void remove_sample_hook(int64_t key) { hooks_.erase(key); }
  const NamedValues& counts() const { return progress_; }
  std::pair<int64_t, double> draw_time() const override;

 protected:
  std::vector<std::string> state_keys() const override {
    std::vector<std::string> keys;
    for (const auto& [key, member] : kTrajectoryState) keys.emplace_back(key);
    return keys;
  }
  void update(const TensorLists& /*lists*/) override {}
  void check_options(const OptionValues& options) const override {
    CheckNotCapturable(options);
  }
  void check_progress(const NamedValues& progress,
                      const OptionValues& options) const override;
  std::vector<std::string> shared_names() const override;
  const char* why_equal() const override {
    return "there is one particle for all";
  }
  // It cannot bounce at a rate that is not finite.
  std::vector<std::string> nonfinite_choices() const override {
    return {"raise", "skip"};
  }
  // As in Python: what was observed belongs to another target.
  void means_changed() override {
    progress_.put("observed_target", std::vector<double>());
  }
  void parameters_changed() override { trajectory_ = nullptr; }

 private:
  std::shared_ptr<Trajectory> moving() const;
  std::shared_ptr<Trajectory> resumed();
  std::shared_ptr<Trajectory> trajectory_now(NamedValues& progress,
                                             BounceClock& clock);
  bool is_current(const Trajectory& trajectory);
  torch::Tensor event(std::shared_ptr<Trajectory>& trajectory,
                      NamedValues& progress, BounceClock& clock,
                      const LossClosure& closure);
  void call_sample_hooks(Trajectory& trajectory, NamedValues& progress,
                         double begin, double line_begin, double line_end);
  void remember(const Trajectory& trajectory);
  void check_particle() const;
  bool is_preconditioned() const {
    return options_of(0).get<bool>("preconditioned");
  }

  auto kept_state() const {
    return std::span(kTrajectoryState).first(is_preconditioned() ? 5 : 2);
  }

  std::shared_ptr<Trajectory> trajectory_;
  std::map<int64_t, SBPS::SampleHook> hooks_;
  int64_t next_hook_ = 0;
  std::optional<double> sample_time_;  // in a hook
  bool is_warned_ = false;
};

void SBPSImpl::check_progress(const NamedValues& progress,
                              const OptionValues& /*options*/) const {
  for (const char* time : {"trajectory_time", "line_time"}) {
    CheckReal(time, progress.get<double>(time));
  }
  for (const char* count : kCounts) {
    CheckCount(count, progress.get<int64_t>(count));
  }
  const auto all = progress.get<int64_t>("num_proposals");
  for (const char* part : {"num_bounces", "num_violations"}) {
    CheckPart(part, progress.get<int64_t>(part), "num_proposals", all);
  }
  for (const double value :
       progress.get<std::vector<double>>("observed_target")) {
    CheckReal(
        "observed_target", value,
        {.low = -std::numeric_limits<double>::infinity(), .low_open = true});
  }
  const auto interval =
      progress.get<std::optional<double>>("observed_interval");
  if (interval) CheckReal("observed_interval", *interval, {.low_open = true});
  BounceClock::Load(progress.get<std::vector<double>>("clock"));
}

std::vector<std::string> SBPSImpl::shared_names() const {
  std::vector<std::string> names;
  for (const Setting& row : SettingsOf(name())) {
    const std::string_view name = row.name;
    if (!name.starts_with("prior_")) names.emplace_back(name);
  }
  return names;
}

// ---- A step -----------------------------------------------------------------

torch::Tensor SBPSImpl::step(const LossClosure& closure) {
  if (closure == nullptr) Invalid(kSBPSNeedsClosure);
  begin_step();
  const at::NoGradGuard no_grad;
  check_groups();
  check_particle();
  NamedValues progress = progress_;
  const OptionValues& options = options_of(0);
  BounceClock clock =
      BounceClock::Load(progress.get<std::vector<double>>("clock"));
  clock.set_observation_decay(options.number("observation_decay"));
  const std::shared_ptr<Trajectory> before = trajectory_now(progress, clock);
  const auto line_time = progress.get<double>("line_time");
  std::shared_ptr<Trajectory> trajectory = before;
  torch::Tensor losses;
  try {
    losses = event(trajectory, progress, clock, closure);
  } catch (const NonfiniteError& error) {
    if (!before->is_at(line_time)) before->place(line_time);
    if (nonfinite() != "skip") throw;
    skip_step();
    return error.losses();
  } catch (...) {
    if (!before->is_at(line_time)) before->place(line_time);
    throw;
  }
  progress.put("clock", clock.Save());
  if (trajectory != trajectory_) remember(*trajectory);
  trajectory_ = trajectory;
  progress_ = progress;
  advance({});
  if (!is_warned_) {
    const std::string text = BounceClock::Warning(
        progress.get<int64_t>("num_proposals"),
        progress.get<int64_t>("num_violations"), options.number("num_std"));
    if (!text.empty()) {
      is_warned_ = true;
      TORCH_WARN(text);
    }
  }
  return losses;
}

// True if the preconditioner takes an event's gradients.
bool Learns(const Trajectory& trajectory, const OptionValues& options,
            bool bounces) {
  return trajectory.preconditioned() && options.get<bool>("adapt") &&
         (bounces || options.get<bool>("adapt_every_step"));
}

// Counts an event; `exceeds` says that the rate was above its bound.
void CountEvent(ClockEvent event, bool bounces, bool exceeds,
                int64_t num_losses, NamedValues& progress) {
  const bool proposal = event == ClockEvent::kProposal;
  progress.add("num_observations", event == ClockEvent::kObserve ? 1 : 0);
  progress.add("num_proposals", proposal ? 1 : 0);
  progress.add("num_bounces", bounces ? 1 : 0);
  progress.add("num_violations", proposal && exceeds ? 1 : 0);
  progress.add("num_refreshments", event == ClockEvent::kRefreshment ? 1 : 0);
  progress.add("num_derivatives", num_losses);
  progress.add("num_gradients", num_losses);
}

// Moves to the next event and sets the next trajectory. Also changes the
// position, the clock and `progress`.
torch::Tensor SBPSImpl::event(std::shared_ptr<Trajectory>& trajectory,
                              NamedValues& progress, BounceClock& clock,
                              const LossClosure& closure) {
  const OptionValues& options = options_of(0);
  const NoiseStream stream = KeyedStream(
      seed(), static_cast<uint64_t>(num_steps()), Purpose::kBounceClock);
  const NextEvent next = clock.Next(options.number("num_std"),
                                    options.number("refresh_rate"), stream);
  const auto begin = progress.get<double>("trajectory_time");
  const auto line_begin = progress.get<double>("line_time");
  const double line_end = line_begin + next.wait;
  if (next.wait > 0) trajectory->place(line_end);
  std::shared_ptr<Trajectory> ahead = trajectory;
  if (next.event == ClockEvent::kRefreshment) {
    ahead = trajectory->refreshed(line_end, options, seed(), num_steps());
  }
  const MinibatchView seen = Observe(closure, *ahead, all_params());
  const double line_time = ahead == trajectory ? line_end : 0.0;
  const RateEstimate rate = RateOf(*ahead, line_time, seen, options);
  const bool proposal = next.event == ClockEvent::kProposal;
  const bool bounces =
      proposal && BounceClock::Accepts(next.rate, rate.value, stream);
  const bool learns = Learns(*ahead, options, bounces);
  const double next_line_time = bounces ? 0.0 : line_time;
  try {
    if (bounces) {
      ahead = trajectory->reflected(line_end, seen.grads, options);
    } else if (learns) {
      ahead = ahead->learned(seen.grads, options);
    }
  } catch (const NonfiniteError& error) {
    throw NonfiniteError(error.what(), seen.losses);
  }
  std::optional<double> reflected;
  if (bounces) {
    reflected = -rate.value;
    if (learns) {
      const double scale = options.num_data() / options.temperature();
      reflected = scale * ahead->sums(seen.grads).product;
    }
  }
  clock.Take(next.event, next.wait, rate.value, rate.variance, reflected);
  CountEvent(next.event, bounces, rate.value > next.rate, seen.losses.numel(),
             progress);
  progress.put("trajectory_time", begin + next.wait);
  progress.put("line_time", next_line_time);
  if (next.wait > 0) {
    call_sample_hooks(*trajectory, progress, begin, line_begin, line_end);
  }
  if (ahead != trajectory) ahead->mark(next_line_time);
  trajectory = ahead;
  return seen.losses;
}

// Calls the hooks for samples between the last event and this one.
void SBPSImpl::call_sample_hooks(Trajectory& trajectory, NamedValues& progress,
                                 double begin, double line_begin,
                                 double line_end) {
  const auto end = progress.get<double>("trajectory_time");
  const auto interval =
      options_of(0).get<std::optional<double>>("sample_interval");
  const int64_t first = interval ? SamplesBy(begin, *interval) : 0;
  const int64_t last = interval ? SamplesBy(end, *interval) : 0;
  progress.put("observed_interval", interval);
  progress.put("num_samples", last);
  bool moved = false;
  const auto after =
      c10::make_scope_exit([this] { sample_time_ = std::nullopt; });
  // Without hooks, a free particle may pass any number of samples.
  for (int64_t k = first + 1; k <= last && !hooks_.empty(); ++k) {
    const double time = static_cast<double>(k) * *interval;
    sample_time_ = time;
    const auto hooks = hooks_;
    for (const auto& [key, hook] : hooks) {
      trajectory.place(line_begin + (time - begin));
      moved = true;
      hook(static_cast<SBPS&>(owner()), time);
    }
  }
  if (moved) trajectory.place(line_end);
}

std::pair<int64_t, double> SBPSImpl::draw_time() const {
  if (!sample_time_) {
    Invalid(
        "Invalid draw: SBPS is between two samples, where its positions do not "
        "follow the posterior (collect in a hook of register_sample_hook)");
  }
  return {steps_counted() + 1, *sample_time_};
}

int64_t SBPSImpl::register_sample_hook(SBPS::SampleHook hook) {
  if (hook == nullptr) {
    Invalid("Invalid hook: none (must be something to call at each sample)");
  }
  if (!options_of(0).get<std::optional<double>>("sample_interval")) {
    Invalid(
        "Invalid sample_interval: none (must be a trajectory time, for there "
        "to be samples)");
  }
  hooks_[next_hook_] = std::move(hook);
  return next_hook_++;
}

// ---- The current trajectory -------------------------------------------------

// The parameters that require gradients, by device and prior.
std::shared_ptr<Trajectory> SBPSImpl::moving() const {
  std::vector<TrajectoryPart> parts;
  for (size_t i = 0; i < groups().size(); ++i) {
    const OptionValues& options = options_of(i);
    const auto& params = groups()[i].params();
    check_known(i);
    for (size_t j = 0; j < params.size(); ++j) {
      const at::Tensor& p = params[j];
      if (!p.requires_grad() || p.numel() == 0) continue;
      if (p.is_cuda() && !has_cuda()) {
        Raise(
            "SBPS got parameters on a CUDA device, but torch_sgmcmc was built "
            "without CUDA kernels: rebuild it with -DTORCH_SGMCMC_CUDA=ON");
      }
      const at::Tensor mean = prior_mean_of(p);
      auto part = std::find_if(
          parts.begin(), parts.end(), [&](const TrajectoryPart& x) {
            return x.params[0].device() == p.device() &&
                   x.prior_precision == options.prior_precision() &&
                   x.prior_means.empty() != mean.defined() &&
                   (mean.defined() || x.prior_mean == options.prior_mean());
          });
      if (part == parts.end()) {
        parts.push_back({.prior_precision = options.prior_precision(),
                         .num_data = options.num_data(),
                         .prior_mean = options.prior_mean()});
        part = parts.end() - 1;
      }
      part->params.push_back(p);
      if (mean.defined()) part->prior_means.push_back(mean);
      part->offsets.push_back(offsets_of(i)[j]);
    }
  }
  if (parts.empty()) {
    Raise("SBPS has no parameter that requires gradients");
  }
  return std::make_shared<Trajectory>(std::move(parts));
}

// Throws if an operator would refuse a parameter or its state.
void SBPSImpl::check_particle() const {
  std::vector<TensorLists> all(groups().size());
  for (size_t i = 0; i < all.size(); ++i) {
    all[i].options = &options_of(i);
    all[i].step = {num_steps()};
    for (const at::Tensor& p : groups()[i].params()) {
      if (!p.requires_grad()) continue;
      all[i].params.push_back(p);
      all[i].grads.push_back(p);
    }
  }
  check_fit(all);
}

// The trajectory in the state; null if it does not fit.
std::shared_ptr<Trajectory> SBPSImpl::resumed() {
  const std::shared_ptr<Trajectory> still = moving();
  const auto flying = std::ranges::count_if(states(), [](const auto& known) {
    const auto& state = static_cast<const SamplerParamState&>(*known.second);
    return state["velocity"].defined();
  });
  if (static_cast<size_t>(flying) != still->params().size()) return nullptr;
  std::vector<TrajectoryPart> parts = still->parts();
  for (TrajectoryPart& part : parts) {
    for (const at::Tensor& p : part.params) {
      for (const auto& [key, member] : kept_state()) {
        const at::Tensor& kept = state_of(p)[key];
        if (!kept.defined()) return nullptr;
        (part.*member).push_back(kept);
      }
    }
  }
  return std::make_shared<Trajectory>(std::move(parts));
}

// True if a trajectory is the one in the state, of the same parameters.
bool SBPSImpl::is_current(const Trajectory& trajectory) {
  size_t wanted = 0;
  for (const auto& group : groups()) {
    for (const at::Tensor& p : group.params()) {
      if (p.requires_grad() && p.numel() > 0) ++wanted;
    }
  }
  if (wanted != trajectory.params().size()) return false;
  if (trajectory.preconditioned() != is_preconditioned()) return false;
  for (const TrajectoryPart& part : trajectory.parts()) {
    for (size_t i = 0; i < part.params.size(); ++i) {
      const at::Tensor& p = part.params[i];
      if (!p.requires_grad()) return false;
      if (!state_of(p)["origin"].is_same(part.origin[i])) return false;
    }
  }
  return true;
}

// The current trajectory, a new one after changes by the user.
std::shared_ptr<Trajectory> SBPSImpl::trajectory_now(NamedValues& progress,
                                                     BounceClock& clock) {
  const OptionValues& options = options_of(0);
  std::vector<double> target = {options.num_data(), options.temperature()};
  std::vector<double> means;
  for (size_t i = 0; i < groups().size(); ++i) {
    target.push_back(options_of(i).prior_precision());
    means.push_back(options_of(i).prior_mean());
  }
  // As in Python: only if one is not 0.
  if (std::ranges::any_of(means, [](double mean) { return mean != 0; })) {
    target.insert(target.end(), means.begin(), means.end());
  }
  const bool same_target =
      target == progress.get<std::vector<double>>("observed_target");
  std::shared_ptr<Trajectory> trajectory = trajectory_;
  if (trajectory == nullptr || !same_target || !is_current(*trajectory)) {
    trajectory = resumed();
  }
  if (trajectory != nullptr &&
      trajectory->is_at(progress.get<double>("line_time"))) {
    if (!same_target) clock.Restart();
  } else {
    if (trajectory != nullptr) {
      trajectory = trajectory->rebased();
    } else {
      const std::shared_ptr<Trajectory> still = moving();
      const bool preconditioned = is_preconditioned();
      size_t learned = 0;
      size_t count = 0;
      for (TrajectoryPart& part : still->parts()) {
        for (const at::Tensor& p : part.params) {
          part.velocity.push_back(ZeroState(p));
          part.origin.push_back(p.detach().to(
              part.velocity.back().scalar_type(), false, /*copy=*/true));
          if (!preconditioned) continue;
          const at::Tensor& known = state_of(p)["square_average"];
          part.square_average.push_back(known.defined() ? known : ZeroState(p));
          learned += static_cast<size_t>(known.defined());
          ++count;
        }
      }
      if (learned > 0 && learned < count && !options.get<bool>("adapt")) {
        Raise(
            "SBPS has no squared gradients of a new parameter, whose "
            "preconditioner would be so large that the others hardly move "
            "(after parameters are added or unfrozen set adapt to true for "
            "some steps)");
      }
      trajectory = still->refreshed(0, options, seed(), num_steps());
    }
    trajectory->mark(0);
    progress.put("line_time", 0.0);
    clock.Restart();
  }
  progress.put("observed_target", target);
  return trajectory;
}

void SBPSImpl::remember(const Trajectory& trajectory) {
  states().clear();
  for (const TrajectoryPart& part : trajectory.parts()) {
    for (size_t i = 0; i < part.params.size(); ++i) {
      SamplerParamState& state = own_state_of(part.params[i]);
      for (const auto& [key, member] : kept_state()) {
        state[key] = (part.*member)[i];
      }
    }
  }
}

const bool kSBPS = Register<SBPSOptions, SBPSImpl>();

}  // namespace

// ---- The interface ----------------------------------------------------------

double SBPSOptions::get_lr() const {
  throw std::logic_error(
      "SBPS has no lr: its particle has unit speed, and a scheduler of learning "
      "rates would do nothing (change temperature or refresh_rate by hand)");
}

void SBPSOptions::set_lr(double /*value*/) { get_lr(); }

int64_t SBPS::register_sample_hook(SampleHook hook) {
  return static_cast<SBPSImpl&>(impl()).register_sample_hook(std::move(hook));
}
void SBPS::remove_sample_hook(int64_t key) {
  static_cast<SBPSImpl&>(impl()).remove_sample_hook(key);
}

SBPSDiagnostics SBPS::diagnostics() const {
  const NamedValues& o = static_cast<SBPSImpl&>(impl()).counts();
  const auto time = o.get<double>("trajectory_time");
  const auto proposals = o.get<double>("num_proposals");
  const auto bounces = o.get<double>("num_bounces");
  return {time,
          o.get<int64_t>("num_bounces"),
          o.get<int64_t>("num_refreshments"),
          Ratio(bounces, time),
          Ratio(proposals, bounces),
          Ratio(o.get<double>("num_violations"), proposals),
          Ratio(time, bounces + o.get<double>("num_refreshments"))};
}

}  // namespace torch_sgmcmc
