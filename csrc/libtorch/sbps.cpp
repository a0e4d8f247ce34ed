#include "torch_sgmcmc/sbps.h"

#include <ATen/core/grad_mode.h>

#include <optional>
#include <string>

#include "core/counter.h"
#include "host/bounce_clock.h"
#include "host/ratio.h"
#include "host/sample_times.h"
#include "libtorch/bouncy/flight.h"
#include "libtorch/bouncy/observation.h"
#include "libtorch/core/checks.h"
#include "libtorch/core/closures.h"
#include "libtorch/core/nonfinite.h"

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

NoiseStream ClockStream(int64_t seed, int64_t step) {
  return {static_cast<uint64_t>(seed),
          static_cast<uint64_t>(step),
          static_cast<uint32_t>(Purpose::kBounceClock)};
}

}  // namespace

std::vector<std::string> SBPS::state_keys() const {
  return {
      "origin", "velocity", "square_average", "preconditioner", "direction"};
}

// A step does all by itself.
void SBPS::update(const Work&) {}

// NOLINTNEXTLINE(google-default-arguments): as torch's own.
torch::Tensor SBPS::step(LossClosure closure) {
  if (closure == nullptr) Invalid(kSBPSNeedsClosure);
  begin_step();
  const at::NoGradGuard no_grad;
  check_groups();
  check_particle();
  SBPSOptions progress = options_at(0);
  progress.take_progress(this->progress());
  BounceClock clock =
      BounceClock::Load(progress.get<std::vector<double>>("clock"));
  clock.set_forgetting(progress.forgetting());
  const std::shared_ptr<Flight> before = flight_now(progress, clock);
  const auto line_time = progress.get<double>("line_time");
  std::shared_ptr<Flight> flight = before;
  torch::Tensor losses;
  try {
    losses = event(flight, progress, clock, closure);
  } catch (const NonfiniteError& error) {
    if (!before->is_at(line_time)) before->place(line_time);
    if (nonfinite() != "skip") throw;
    leave_out();
    return error.losses();
  } catch (...) {
    if (!before->is_at(line_time)) before->place(line_time);
    throw;
  }
  progress.put("clock", clock.Save());
  if (flight != flight_) remember(*flight);
  flight_ = flight;
  this->progress().take_progress(progress);
  advance({});
  if (!warned_) {
    const std::string text =
        BounceClock::Warning(progress.get<int64_t>("num_proposals"),
                             progress.get<int64_t>("num_violations"),
                             progress.confidence());
    if (!text.empty()) {
      warned_ = true;
      TORCH_WARN(text);
    }
  }
  return losses;
}

// Flies to the next event; `flight` is then the one from there. Nothing else is
// changed but the position, the clock and `progress`.
torch::Tensor SBPS::event(std::shared_ptr<Flight>& flight,
                          SBPSOptions& progress,
                          BounceClock& clock,
                          const LossClosure& closure) {
  const NoiseStream stream = ClockStream(seed(), num_steps());
  const NextEvent next =
      clock.Next(progress.confidence(), progress.refresh_rate(), stream);
  const auto begin = progress.get<double>("trajectory_time");
  const auto line_begin = progress.get<double>("line_time");
  const double line_end = line_begin + next.wait;
  if (next.wait > 0) flight->place(line_end);
  std::shared_ptr<Flight> ahead = flight;
  if (next.event == ClockEvent::kRefreshment) {
    ahead = flight->refreshed(line_end, progress, seed(), num_steps());
  }
  const MinibatchView seen = Observe(closure, *ahead, all_params());
  const double line_time = ahead == flight ? line_end : 0.0;
  const RateEstimate rate = RateOf(*ahead, line_time, seen, progress);
  const bool proposal = next.event == ClockEvent::kProposal;
  const bool bounces =
      proposal && BounceClock::Accepts(next.rate, rate.value, stream);
  const bool learns = ahead->learns() && progress.adapt() &&
                      (bounces || progress.adapt_always());
  const double next_line_time = bounces ? 0.0 : line_time;
  try {
    if (bounces) {
      ahead = flight->reflected(line_end, seen.grads, progress);
    } else if (learns) {
      ahead = ahead->learned(seen.grads, progress);
    }
  } catch (const NonfiniteError& error) {
    throw NonfiniteError(error.what(), seen.losses);
  }
  std::optional<double> reflected;
  if (bounces) {
    reflected = -rate.value;
    if (learns) {
      const double scale = progress.num_data() / progress.temperature();
      reflected = scale * ahead->sums(seen.grads).product;
    }
  }
  clock.Take(next.event, next.wait, rate.value, rate.variance, reflected);
  const bool violated = proposal && rate.value > next.rate;
  progress.add("num_looks", next.event == ClockEvent::kLook ? 1 : 0);
  progress.add("num_proposals", proposal ? 1 : 0);
  progress.add("num_bounces", reflected ? 1 : 0);
  progress.add("num_violations", violated ? 1 : 0);
  progress.add("num_refreshments",
               next.event == ClockEvent::kRefreshment ? 1 : 0);
  progress.add("num_derivatives", seen.losses.numel());
  progress.add("num_gradients", seen.losses.numel());
  progress.put("trajectory_time", begin + next.wait);
  progress.put("line_time", next_line_time);
  if (next.wait > 0) come_by(*flight, progress, begin, line_begin, line_end);
  if (ahead != flight) ahead->mark(next_line_time);
  flight = ahead;
  return seen.losses;
}

// Calls the hooks for what lies between the last event and this one.
void SBPS::come_by(Flight& flight,
                   SBPSOptions& progress,
                   double begin,
                   double line_begin,
                   double line_end) {
  const auto end = progress.get<double>("trajectory_time");
  const std::optional<double> interval = progress.sample_interval();
  const int64_t first = interval ? SamplesBy(begin, *interval) : 0;
  const int64_t last = interval ? SamplesBy(end, *interval) : 0;
  progress.put("observed_interval", interval);
  progress.put("num_samples", last);
  bool moved = false;
  for (int64_t k = first + 1; k <= last; ++k) {
    const double time = static_cast<double>(k) * *interval;
    const auto hooks = hooks_;
    for (const auto& [key, hook] : hooks) {
      flight.place(line_begin + (time - begin));
      moved = true;
      hook(*this, time);
    }
  }
  if (moved) flight.place(line_end);
}

int64_t SBPS::register_sample_hook(SampleHook hook) {
  if (hook == nullptr) {
    Invalid("Invalid hook: none (must be something to call at each sample)");
  }
  if (!options_at(0).sample_interval()) {
    Invalid(
        "Invalid sample_interval: none (must be a trajectory time, for there "
        "to be samples)");
  }
  hooks_[next_hook_] = std::move(hook);
  return next_hook_++;
}

void SBPS::remove_sample_hook(int64_t key) { hooks_.erase(key); }

SBPSDiagnostics SBPS::diagnostics() const {
  const SBPSOptions& o = progress();
  const auto time = o.get<double>("trajectory_time");
  const auto bounces = o.get<int64_t>("num_bounces");
  const auto refreshments = o.get<int64_t>("num_refreshments");
  const auto b = static_cast<double>(bounces);
  const auto p = o.get<double>("num_proposals");
  const auto r = static_cast<double>(refreshments);
  return {time,
          bounces,
          refreshments,
          Ratio(b, time),
          Ratio(p, b),
          Ratio(o.get<double>("num_violations"), p),
          Ratio(time, b + r)};
}

SBPSEvaluations SBPS::evaluations() const {
  const SBPSOptions& o = progress();
  return {o.get<int64_t>("num_derivatives"), o.get<int64_t>("num_gradients")};
}

}  // namespace torch_sgmcmc
