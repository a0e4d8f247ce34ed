#include "torch_sgmcmc/sbps.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>

#include "core/counter.h"
#include "host/bounce_clock.h"
#include "optim/checks.h"
#include "optim/flight.h"
#include "optim/momentum.h"
#include "optim/python_text.h"
#include "torch_sgmcmc/operators.h"

namespace torch_sgmcmc {
namespace {

constexpr const char* kSBPSNeedsClosure =
    "SBPS.step() needs a closure, which returns the losses of the examples:\n"
    "\n"
    "    sampler.step([&] {\n"
    "      auto batch = draw_minibatch();  // fresh, independent of all others\n"
    "      return cross_entropy(net->forward(batch.data), batch.target,\n"
    "          CrossEntropyFuncOptions().reduction(torch::kNone));\n"
    "    });";

constexpr const char* kUnrelated =
    "SBPS got losses from the closure that do not depend on its parameters "
    "(were they computed under torch.no_grad()?)";

// What a minibatch says along a direction.
struct MinibatchView {
  at::Tensor losses;
  at::Tensor derivatives;  // float64, on the CPU
  std::vector<at::Tensor> grads;
};

void CheckLosses(const at::Tensor& losses, bool has_grads) {
  if (!losses.defined()) {
    throw std::runtime_error(
        "SBPS got an undefined Tensor from the closure (must return the losses "
        "of the examples, a Tensor of shape [n])");
  }
  if (has_grads) {
    throw std::runtime_error(
        "SBPS found gradients after the closure: it must return the losses of "
        "the examples and not call backward()");
  }
  if (losses.dim() != 1) {
    throw std::runtime_error(
        "SBPS got losses of shape " + Shape(losses.sizes()) +
        " from the closure (must be those of the examples, of shape [n]" +
        (losses.dim() == 0 ? ": use reduction='none')" : ")"));
  }
  if (losses.numel() < 2) {
    throw std::runtime_error("SBPS got the loss of " +
                             std::to_string(losses.numel()) +
                             " example from the closure (must be of 2 at "
                             "least, to estimate the noise of a minibatch)");
  }
  if (!losses.requires_grad()) throw std::runtime_error(kUnrelated);
  const at::Tensor finite = at::isfinite(losses.detach());
  const int64_t bad = losses.numel() - finite.sum().item<int64_t>();
  if (bad > 0) {
    throw std::runtime_error("SBPS got " + std::to_string(bad) + " of " +
                             std::to_string(losses.numel()) +
                             " losses from the closure that are not finite");
  }
}

// Reverse mode: the gradient of the weighted sum of the losses is linear in the
// weights, and so is its product with a direction, whose coefficients are the
// derivatives of the examples.
MinibatchView Observe(const torch::optim::Optimizer::LossClosure& closure,
                      const Flight& flight,
                      const std::vector<at::Tensor>& all_params) {
  const auto clear = [&] {
    bool found = false;
    for (const at::Tensor& p : all_params) {
      found = found || p.grad().defined();
      p.mutable_grad().reset();
    }
    return found;
  };
  clear();
  std::vector<at::Tensor> along = flight.directions();
  for (size_t i = 0; i < along.size(); ++i) {
    along[i] = along[i].to(flight.params()[i].scalar_type());
  }
  const at::AutoGradMode enable_grad(true);
  const at::Tensor losses = closure();
  CheckLosses(losses, clear());
  const at::Tensor weights =
      at::full_like(losses.detach(), 1.0 / static_cast<double>(losses.numel()))
          .requires_grad_();
  const std::vector<at::Tensor> grads =
      torch::autograd::grad({losses},
                            flight.params(),
                            {weights},
                            /*retain_graph=*/std::nullopt,
                            /*create_graph=*/true,
                            /*allow_unused=*/true);
  std::vector<at::Tensor> used;
  std::vector<at::Tensor> directions;
  for (size_t i = 0; i < grads.size(); ++i) {
    if (!grads[i].defined()) continue;
    used.push_back(grads[i]);
    directions.push_back(along[i]);
  }
  if (used.empty()) throw std::runtime_error(kUnrelated);
  const at::Tensor derivatives =
      torch::autograd::grad(used, {weights}, directions)[0];
  MinibatchView result{
      losses.detach(),
      derivatives.detach().to(at::kCPU, at::kDouble).contiguous(),
      {}};
  for (size_t i = 0; i < grads.size(); ++i) {
    result.grads.push_back(grads[i].defined()
                               ? grads[i].detach()
                               : at::zeros_like(flight.params()[i]));
  }
  return result;
}

struct Rate {
  double value;     // G
  double variance;  // c^2
};

Rate RateOf(const Flight& flight,
            const MinibatchView& seen,
            const SBPSOptions& options) {
  const auto n = static_cast<double>(seen.losses.numel());
  const double num_data = options.num_data();
  if (!options.replacement() && n > num_data) {
    std::ostringstream text;
    text << "SBPS got the losses of " << seen.losses.numel()
         << " examples from the closure, and num_data = " << num_data
         << " (must not be more; if examples are drawn with replacement, set "
            "replacement=True)";
    throw std::runtime_error(text.str());
  }
  const at::Tensor moments = sbps_moments(seen.derivatives);
  const double mean = moments.const_data_ptr<double>()[0];
  double variance = moments.const_data_ptr<double>()[1];
  if (!options.replacement()) variance *= 1 - n / num_data;
  const double scale = num_data / options.temperature();
  const double value = scale * mean + flight.prior() / options.temperature();
  variance *= scale * scale / n;
  if (!std::isfinite(value) || !std::isfinite(variance)) {
    throw std::runtime_error(
        "SBPS got losses from the closure whose derivatives are not finite");
  }
  return {value, variance};
}

NoiseStream ClockStream(int64_t seed, int64_t step) {
  return {static_cast<uint64_t>(seed),
          static_cast<uint64_t>(step),
          static_cast<uint32_t>(Purpose::kBounceClock)};
}

void Increment(Hyperparameter<int64_t>& count, int64_t by = 1) {
  count.set(count.get() + by);
}

}  // namespace

std::vector<double> SBPSOptions::FreshClock() { return BounceClock().Save(); }

void SBPSOptions::check() const {
  if (!num_data_.is_set() && std::isnan(num_data())) {
    Invalid(
        "Invalid num_data: not set (SBPS needs the number of training "
        "examples; 1 if the loss is U itself)");
  }
  CheckReal("num_data", num_data(), {.low_open = true});
  CheckReal("prior_precision", prior_precision());
  CheckReal("temperature", temperature(), {.low_open = true});
  CheckReal("confidence", confidence());
  CheckReal("refresh_rate", refresh_rate());
  CheckReal("decay", decay(), {.high = 1.0});
  CheckReal("eps", eps(), {.low_open = true});
  if (sample_interval()) {
    CheckReal("sample_interval", *sample_interval(), {.low_open = true});
  }
  BounceClock::Load(clock_.get());
  if (capturable()) {
    Invalid(
        "Invalid capturable: true (SBPS decides on the host, which a CUDA "
        "graph cannot)");
  }
}

std::vector<std::pair<const char*, bool>> SBPSOptions::shared() const {
  auto all = OptionsOf::shared();
  std::apply(
      [&](const auto&... field) {
        (all.emplace_back(field.first, (this->*field.second).is_set()), ...);
      },
      trajectory());
  return all;
}

void SBPSOptions::share(const SamplerOptions& other) {
  OptionsOf::share(other);
  const auto& from = dynamic_cast<const SBPSOptions&>(other);
  const auto copy = [&](const auto&... field) {
    ((this->*field.second = from.*field.second), ...);
  };
  std::apply(copy, trajectory());
  std::apply(copy, progress());
}

std::unique_ptr<SamplerParamState> SBPS::new_state() const {
  return std::make_unique<SBPSParamState>();
}

// A step does all by itself.
void SBPS::update(const Work&) {}

const SBPSOptions& SBPS::options_at(size_t group) const {
  return static_cast<const SBPSOptions&>(options_of(group));
}

void SBPS::check_common() const {
  const SBPSOptions& first = options_at(0);
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    const SBPSOptions& other = options_at(i);
    other.check();
    const auto compare = [&](const auto&... field) {
      const auto one = [&](const char* name, auto member) {
        if ((first.*member).get() != (other.*member).get()) {
          Invalid(std::string("Invalid ") + name +
                  ": it differs between the param groups (must be equal: there "
                  "is one particle for all)");
        }
      };
      (one(field.first, field.second), ...);
    };
    std::apply(compare, SBPSOptions::trajectory());
  }
}

// The parameters that require gradients, by device and prior.
std::shared_ptr<Flight> SBPS::moving() const {
  std::vector<FlightPart> parts;
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    const SBPSOptions& options = options_at(i);
    const auto& params = param_groups_[i].params();
    if (options.offsets().size() != params.size()) {
      throw std::runtime_error(
          "SBPS does not know the parameters of group " + std::to_string(i) +
          ": add groups with the add_param_group of torch_sgmcmc::Sampler, not "
          "through a reference to torch::optim::Optimizer");
    }
    for (size_t j = 0; j < params.size(); ++j) {
      const at::Tensor& p = params[j];
      if (!p.requires_grad() || p.numel() == 0) continue;
      if (p.is_cuda() && !has_cuda()) {
        throw std::runtime_error(
            "SBPS got parameters on a CUDA device, but torch_sgmcmc was built "
            "without CUDA kernels: rebuild it with -DTORCH_SGMCMC_CUDA=ON");
      }
      auto part =
          std::find_if(parts.begin(), parts.end(), [&](const FlightPart& x) {
            return x.params[0].device() == p.device() &&
                   x.prior_precision == options.prior_precision();
          });
      if (part == parts.end()) {
        parts.push_back({options.prior_precision(),
                         options.num_data(),
                         {},
                         {},
                         {},
                         {},
                         {},
                         {},
                         {}});
        part = parts.end() - 1;
      }
      part->params.push_back(p);
      part->offsets.push_back(options.offsets()[j]);
    }
  }
  if (parts.empty()) {
    throw std::runtime_error("SBPS has no parameter that requires gradients");
  }
  return std::make_shared<Flight>(std::move(parts));
}

// The flight that the state holds; null if it fits no longer.
std::shared_ptr<Flight> SBPS::resumed() {
  std::vector<FlightPart> parts = moving()->parts();
  const bool preconditioned = options_at(0).preconditioned();
  size_t flying = 0;
  for (FlightPart& part : parts) {
    for (const at::Tensor& p : part.params) {
      const auto found = state_.find(p.unsafeGetTensorImpl());
      if (found == state_.end()) return nullptr;
      const auto& state = static_cast<const SBPSParamState&>(*found->second);
      if (!state.velocity.defined() || !state.origin.defined()) return nullptr;
      if (preconditioned && !state.direction.defined()) return nullptr;
      ++flying;
      part.origin.push_back(state.origin);
      part.velocity.push_back(state.velocity);
      if (!preconditioned) continue;
      part.square_average.push_back(state.square_average);
      part.preconditioner.push_back(state.preconditioner);
      part.direction.push_back(state.direction);
    }
  }
  if (flying != state_.size()) return nullptr;
  return std::make_shared<Flight>(std::move(parts));
}

// Whether a flight is the one that the state holds, of the same parameters.
bool SBPS::is_current(const Flight& flight) {
  size_t wanted = 0;
  for (const auto& group : param_groups_) {
    for (const at::Tensor& p : group.params()) {
      if (p.requires_grad() && p.numel() > 0) ++wanted;
    }
  }
  if (wanted != flight.params().size()) return false;
  for (const FlightPart& part : flight.parts()) {
    if (part.square_average.empty() == options_at(0).preconditioned()) {
      return false;
    }
    for (size_t i = 0; i < part.params.size(); ++i) {
      const auto found = state_.find(part.params[i].unsafeGetTensorImpl());
      if (found == state_.end() || !part.params[i].requires_grad()) {
        return false;
      }
      const auto& state = static_cast<const SBPSParamState&>(*found->second);
      if (!state.origin.is_same(part.origin[i])) return false;
    }
  }
  return true;
}

// The current flight; another one if the user has changed something.
std::shared_ptr<Flight> SBPS::flight_now(SBPSOptions& progress,
                                         BounceClock& clock) {
  std::vector<double> target = {progress.num_data(), progress.temperature()};
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    target.push_back(options_at(i).prior_precision());
  }
  const bool same_target = target == progress.observed_target_.get();
  std::shared_ptr<Flight> flight = flight_;
  if (flight == nullptr || !same_target || !is_current(*flight)) {
    flight = resumed();
  }
  if (flight != nullptr && flight->is_at(progress.line_time_.get())) {
    if (!same_target) clock.Restart();
  } else {
    if (flight != nullptr) {
      flight = flight->rebased();
    } else {
      std::vector<FlightPart> parts = moving()->parts();
      for (FlightPart& part : parts) {
        for (const at::Tensor& p : part.params) {
          part.velocity.push_back(ZeroState(p));
          part.origin.push_back(p.detach().to(
              part.velocity.back().scalar_type(), false, /*copy=*/true));
          if (!progress.preconditioned()) continue;
          const auto found = state_.find(p.unsafeGetTensorImpl());
          const auto* known =
              found == state_.end()
                  ? nullptr
                  : static_cast<const SBPSParamState*>(found->second.get());
          part.square_average.push_back(known != nullptr &&
                                                known->square_average.defined()
                                            ? known->square_average
                                            : ZeroState(p));
        }
      }
      const Flight still(std::move(parts));
      flight = still.refreshed(0, progress, seed());
    }
    flight->mark(0);
    progress.line_time_.set(0.0);
    clock.Restart();
  }
  progress.observed_target_.set(std::move(target));
  return flight;
}

// NOLINTNEXTLINE(google-default-arguments): as torch's own.
torch::Tensor SBPS::step(LossClosure closure) {
  if (closure == nullptr) Invalid(kSBPSNeedsClosure);
  const at::NoGradGuard no_grad;
  check_common();
  SBPSOptions progress = options_at(0);
  BounceClock clock = BounceClock::Load(progress.clock_.get());
  const std::shared_ptr<Flight> before = flight_now(progress, clock);
  const double line_time = progress.line_time_.get();
  std::shared_ptr<Flight> flight = before;
  torch::Tensor losses;
  try {
    losses = event(flight, progress, clock, closure);
  } catch (...) {
    if (!before->is_at(line_time)) before->place(line_time);
    throw;
  }
  progress.clock_.set(clock.Save());
  if (flight != flight_) remember(*flight);
  flight_ = flight;
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    options(i).share(progress);
  }
  advance({});
  const auto proposals = static_cast<double>(progress.num_proposals_.get());
  const auto violations = static_cast<double>(progress.num_violations_.get());
  const double expected = 0.5 * std::erfc(progress.confidence() / std::sqrt(2));
  if (proposals >= 1000 && !warned_ &&
      violations / proposals > 3 * expected + 0.01) {
    warned_ = true;
    char text[512];
    std::snprintf(
        text,
        sizeof text,
        "At %.0f of %.0f proposals of SBPS (%.1f%%) the observed rate was "
        "above the proposed one; %.1f%% are expected with confidence = %g. "
        "Bounces are lost there, which biases the posterior: use a larger "
        "confidence or larger minibatches, and make sure that these are "
        "independent",
        violations,
        proposals,
        100 * violations / proposals,
        100 * expected,
        progress.confidence());
    TORCH_WARN(text);
  }
  return losses;
}

// Flies to the next event; `flight` is then the one from there. Nothing else is
// changed but the position, the clock and `progress`.
torch::Tensor SBPS::event(std::shared_ptr<Flight>& flight,
                          SBPSOptions& progress,
                          BounceClock& clock,
                          const LossClosure& closure) {
  const NoiseStream stream = ClockStream(seed(), progress.step());
  const NextEvent next =
      clock.Next(progress.confidence(), progress.refresh_rate(), stream);
  const double begin = progress.trajectory_time_.get();
  const double line_begin = progress.line_time_.get();
  const double line_end = line_begin + next.wait;
  if (next.wait > 0) flight->place(line_end);
  std::shared_ptr<Flight> ahead = flight;
  if (next.event == ClockEvent::kRefreshment) {
    ahead = flight->refreshed(line_end, progress, seed());
  }
  std::vector<at::Tensor> all_params;
  for (const auto& group : param_groups_) {
    all_params.insert(
        all_params.end(), group.params().begin(), group.params().end());
  }
  const MinibatchView seen = Observe(closure, *ahead, all_params);
  const Rate rate = RateOf(*ahead, seen, progress);
  const bool proposal = next.event == ClockEvent::kProposal;
  if (proposal && BounceClock::Accepts(next.rate, rate.value, stream)) {
    ahead = flight->reflected(line_end, seen.grads, progress);
    double reflected = -rate.value;
    if (progress.preconditioned() && progress.adapt()) {
      const double scale = progress.num_data() / progress.temperature();
      reflected = scale * ahead->sums(seen.grads).product;
    }
    clock.Bounce(next.wait, rate.value, rate.variance, reflected);
    Increment(progress.num_bounces_);
  } else if (next.event == ClockEvent::kRefreshment) {
    clock.Restart();
    clock.Observe(0, rate.value, rate.variance);
    Increment(progress.num_refreshments_);
  } else {
    clock.Observe(next.wait, rate.value, rate.variance);
  }
  if (proposal) {
    Increment(progress.num_proposals_);
    if (rate.value > next.rate) Increment(progress.num_violations_);
  }
  if (next.event == ClockEvent::kLook) Increment(progress.num_looks_);
  Increment(progress.num_derivatives_, seen.losses.numel());
  Increment(progress.num_gradients_, seen.losses.numel());
  progress.trajectory_time_.set(begin + next.wait);
  progress.line_time_.set(ahead == flight ? line_end : 0.0);
  if (next.wait > 0) come_by(*flight, progress, begin, line_begin);
  ahead->mark(progress.line_time_.get());
  flight = ahead;
  return seen.losses;
}

// Calls the hooks for what lies between the last event and this one.
void SBPS::come_by(Flight& flight,
                   SBPSOptions& progress,
                   double begin,
                   double line_begin) {
  const double end = progress.trajectory_time_.get();
  const double line_end = line_begin + (end - begin);
  const std::optional<double> interval = progress.sample_interval();
  if (interval != progress.observed_interval_.get()) {
    progress.observed_interval_.set(interval);
    progress.num_samples_.set(
        interval ? static_cast<int64_t>(std::floor(begin / *interval)) : 0);
  }
  bool moved = false;
  while (interval) {
    const double time =
        static_cast<double>(progress.num_samples_.get() + 1) * *interval;
    if (time > end) break;
    Increment(progress.num_samples_);
    const auto hooks = hooks_;
    for (const auto& [key, hook] : hooks) {
      flight.place(line_begin + (time - begin));
      moved = true;
      hook(*this, time);
    }
  }
  if (moved) flight.place(line_end);
}

// Takes a flight into the state of the parameters.
void SBPS::remember(const Flight& flight) {
  state_.clear();
  for (const FlightPart& part : flight.parts()) {
    for (size_t i = 0; i < part.params.size(); ++i) {
      auto& state = static_cast<SBPSParamState&>(state_of(part.params[i]));
      state.origin = part.origin[i];
      state.velocity = part.velocity[i];
      if (part.square_average.empty()) continue;
      state.square_average = part.square_average[i];
      state.preconditioner = part.preconditioner[i];
      state.direction = part.direction[i];
    }
  }
}

int64_t SBPS::register_sample_hook(SampleHook hook) {
  if (!options_at(0).sample_interval()) {
    Invalid(
        "Invalid sample_interval: None (must be a trajectory time, for there "
        "to be samples)");
  }
  hooks_[next_hook_] = std::move(hook);
  return next_hook_++;
}

void SBPS::remove_sample_hook(int64_t key) { hooks_.erase(key); }

SBPSDiagnostics SBPS::diagnostics() const {
  const SBPSOptions& o = options_at(0);
  const double time = o.trajectory_time_.get();
  const int64_t bounces = o.num_bounces_.get();
  const int64_t proposals = o.num_proposals_.get();
  const auto ratio = [](double a, double b) {
    return b > 0 ? a / b : std::numeric_limits<double>::quiet_NaN();
  };
  const auto b = static_cast<double>(bounces);
  const auto p = static_cast<double>(proposals);
  const auto r = static_cast<double>(o.num_refreshments_.get());
  return {time,
          bounces,
          o.num_refreshments_.get(),
          ratio(b, time),
          ratio(p, b),
          ratio(static_cast<double>(o.num_violations_.get()), p),
          ratio(time, b + r)};
}

SBPSEvaluations SBPS::evaluations() const {
  const SBPSOptions& o = options_at(0);
  return {o.num_derivatives_.get(), o.num_gradients_.get()};
}

}  // namespace torch_sgmcmc
