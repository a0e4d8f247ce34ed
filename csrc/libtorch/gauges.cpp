#include "torch_sgmcmc/gauges.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "host/gauges.h"
#include "libtorch/core/checks.h"
#include "libtorch/core/state_checks.h"
#include "libtorch/core/text.h"
#include "libtorch/gauge_observer.h"

namespace torch_sgmcmc {

Gauges::Gauges(Sampler& sampler, const GaugesOptions& options) {
  sampler.ledger();  // throws if it was moved from
  if (sampler.observer_ != nullptr) {
    Invalid("Invalid sampler: it has Gauges already (detach() them)");
  }
  observer_ = std::make_unique<Observer>(sampler, options);
  sampler.observer_ = observer_.get();
}

Gauges::~Gauges() { detach(); }

void Gauges::detach() {
  if (observer_->sampler != nullptr) observer_->sampler->observer_ = nullptr;
  observer_->sampler = nullptr;
}

void Gauges::reset() { observer_->reset(); }

void Gauges::observe(const torch::optim::Optimizer::LossClosure& closure) {
  if (observer_->sampler == nullptr) {
    throw std::runtime_error("these Gauges are detached from their sampler");
  }
  if (closure == nullptr) {
    Invalid("Invalid closure: none (must compute a loss and call backward())");
  }
  Tensors before;
  Tensors values;
  for (const at::Tensor& p : observer_->all) {
    before.push_back(p.grad());
    values.push_back(p.grad().defined() ? p.grad().detach().clone()
                                        : at::Tensor());
    p.mutable_grad() = at::Tensor();
  }
  const auto put_back = [&] {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < before.size(); ++i) {
      at::Tensor& grad = observer_->all[i].mutable_grad();
      // A backward pass may write to the same memory each time. Other gradients
      // are not touched: autograd may have saved them.
      if (grad.defined() && before[i].defined() && grad.numel() > 0 &&
          !grad.is_same(before[i]) && grad.data_ptr() == before[i].data_ptr()) {
        before[i].copy_(values[i]);
      }
      grad = before[i];
    }
  };
  try {
    {
      const at::AutoGradMode enable_grad(true);
      closure();
    }
    observer_->observe(observer_->sampler->gather());
  } catch (...) {
    put_back();
    throw;
  }
  put_back();
}

int64_t Gauges::num_observed() const {
  observer_->read();
  return observer_->host->gauges().back().kinetic.count();
}

Gauges::Temperatures Gauges::tensor(int64_t index) const {
  return observer_->at(index, 0, observer_->host->num_tensors(), "tensors");
}

Gauges::Temperatures Gauges::group(int64_t index) const {
  const int64_t first = observer_->host->num_tensors();
  return observer_->at(index, first, observer_->host->num_groups(), "groups");
}

Gauges::Temperatures Gauges::all() const {
  observer_->read();
  return ReadGauge(observer_->host->gauges().back());
}

namespace {

void CheckRates(double budget, double rate) {
  CheckReal("budget", budget, {.low_open = true});
  CheckReal("rate", rate, {.high = 1, .low_open = true});
}

}  // namespace

std::vector<Gauges::Finding> Gauges::findings(double budget,
                                              double rate) const {
  CheckRates(budget, rate);
  observer_->read();
  std::vector<Finding> found;
  for (const auto& f : observer_->host->Findings(budget, rate)) {
    found.push_back({f.tensor, host::NameOf(f.fault), f.size});
  }
  return found;
}

std::string Gauges::summary(double budget, double rate) const {
  CheckRates(budget, rate);
  observer_->read();
  bool takes_noise_estimate = false;
  if (observer_->sampler != nullptr) {
    const auto keys = observer_->sampler->options_of(0).keys();
    takes_noise_estimate =
        std::find(keys.begin(), keys.end(), "noise_estimate") != keys.end();
  }
  return observer_->host->Summary(
      observer_->names, takes_noise_estimate, budget, rate);
}

StateDict Gauges::state_dict() const {
  observer_->read();
  c10::impl::GenericList series(c10::AnyType::get());
  for (const std::vector<double>& numbers : observer_->host->State()) {
    c10::impl::GenericList one(c10::AnyType::get());
    for (const double number : numbers) one.push_back(number);
    series.push_back(one);
  }
  StateDict dict = {{"every", observer_->every}, {"series", series}};
  if (!observer_->previous.empty()) {
    StateDict gradients;
    for (const auto& [param, gradient] : observer_->previous) {
      gradients.set(static_cast<int64_t>(observer_->place.at(param)), gradient);
    }
    dict.set("previous_gradients",
             StateDict{{"step", observer_->previous_step},
                       {"gradients", gradients}});
  }
  return dict;
}

void Gauges::load_state_dict(const StateDict& dict) {
  const c10::IValue every = dict.at("every");
  if (!every.isInt()) Invalid("Invalid state_dict: every is no int");
  CheckInteger("every", every.toInt(), 1);
  const c10::IValue series = dict.at("series");
  std::vector<std::vector<double>> state;
  const auto check_list = [](const c10::IValue& value) {
    if (!value.isList()) Invalid("Invalid state_dict: series is no list");
  };
  check_list(series);
  for (const c10::IValue& one : series.toList().vec()) {
    check_list(one);
    state.emplace_back();
    for (const c10::IValue& number : one.toList().vec()) {
      if (!number.isDouble()) {
        Invalid("Invalid state_dict: series has what is no number");
      }
      state.back().push_back(number.toDouble());
    }
  }
  auto [step, previous] = observer_->read_previous(dict);
  observer_->host->SetState(state);
  observer_->forget();
  observer_->every = every.toInt();
  observer_->previous_step = step;
  observer_->previous = std::move(previous);
}

}  // namespace torch_sgmcmc
