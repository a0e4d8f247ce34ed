#include <cmath>
#include <tuple>

#include "host/bounce_clock.h"
#include "optim/checks.h"
#include "torch_sgmcmc/sbps.h"

namespace torch_sgmcmc {

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

}  // namespace torch_sgmcmc
