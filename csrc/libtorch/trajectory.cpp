#include "torch_sgmcmc/trajectory.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <string>
#include <utility>

#include "libtorch/bouncy/flight.h"
#include "libtorch/core/checks.h"
#include "libtorch/core/state_checks.h"
#include "libtorch/core/text.h"

namespace torch_sgmcmc {

TimeAverage::TimeAverage(SBPS& sampler)
    : sampler_(sampler),
      hook_(sampler.register_segment_hook(
          [this](const Flight& flight, double begin, double end) {
            follow(flight, begin, end);
          })) {}

TimeAverage::~TimeAverage() { remove(); }

void TimeAverage::remove() {
  Sampler* const sampler = sampler_.find();
  if (std::exchange(follows_, false) && sampler != nullptr) {
    static_cast<SBPS&>(*sampler).remove_segment_hook(hook_);
  }
}

// The same operations on tensors as in Python, for the same bits.
void TimeAverage::follow(const Flight& flight, double begin, double end) {
  const at::NoGradGuard no_grad;
  const double length = end - begin;
  const double middle = (begin + end) / 2;
  const double share = length / (time_ + length);
  for (const FlightPart& part : flight.parts()) {
    for (size_t i = 0; i < part.params.size(); ++i) {
      const at::Tensor u = part.directions()[i].to(at::kDouble);
      const at::Tensor origin = part.origin[i].to(at::kDouble);
      const at::Tensor centre = origin + u * middle;
      const at::Tensor square =
          centre * centre + (u * u) * (length * length / 12);
      Moments& moments = moments_[part.params[i].unsafeGetTensorImpl()];
      if (!moments.mean.defined()) {  // it has stood still until now
        moments.mean = origin + u * begin;
        moments.square = moments.mean * moments.mean;
      }
      moments.mean.lerp_(centre, share);
      moments.square.lerp_(square, share);
    }
  }
  time_ += length;
}

const TimeAverage::Moments& TimeAverage::of(const at::Tensor& param) const {
  const auto found = moments_.find(param.unsafeGetTensorImpl());
  if (found == moments_.end()) {
    Invalid("There is no average of this parameter, of shape " +
            Shape(param.sizes()));
  }
  return found->second;
}

at::Tensor TimeAverage::mean(const at::Tensor& param) const {
  return of(param).mean.clone();
}

at::Tensor TimeAverage::mean_square(const at::Tensor& param) const {
  return of(param).square.clone();
}

at::Tensor TimeAverage::variance(const at::Tensor& param) const {
  const Moments& moments = of(param);
  return moments.square - moments.mean * moments.mean;
}

std::vector<at::Tensor> TimeAverage::params() const {
  if (!follows_) {
    Invalid("The average no longer follows its sampler: it was removed");
  }
  std::vector<at::Tensor> all;
  for (const auto& group : sampler_.get().param_groups()) {
    all.insert(all.end(), group.params().begin(), group.params().end());
  }
  return all;
}

StateDict TimeAverage::state_dict() const {
  const std::vector<at::Tensor> all = params();
  StateDict means;
  for (size_t i = 0; i < all.size(); ++i) {
    const auto found = moments_.find(all[i].unsafeGetTensorImpl());
    if (found == moments_.end()) continue;
    means.set(
        static_cast<int64_t>(i),
        c10::ivalue::Tuple::create(found->second.mean, found->second.square));
  }
  return {{"time", time_}, {"means", means}, {"value", c10::IValue()}};
}

void TimeAverage::load_state_dict(const StateDict& dict) {
  if (!dict.at("value").isNone()) {
    Invalid(
        "Invalid state_dict: it is of the average of a function, which C++ does "
        "not have (continue it in Python)");
  }
  const std::vector<at::Tensor> all = params();
  const auto length = detail::FromValue<double>("time", dict.at("time"));
  CheckReal("time", length);
  const StateDict means = dict.at("means");
  std::unordered_map<const void*, Moments> loaded;
  for (const auto& entry : means.entries()) {
    const int64_t i = entry.key().isInt() ? entry.key().toInt() : -1;
    if (i < 0 || i >= static_cast<int64_t>(all.size())) {
      Invalid("Invalid state_dict: its means have a key that is no number of " +
              std::to_string(all.size()) + " parameters");
    }
    const at::Tensor& param = all[static_cast<size_t>(i)];
    const std::string whose = " of parameter " + std::to_string(i);
    if (!entry.value().isTuple() ||
        entry.value().toTupleRef().elements().size() != 2) {
      Invalid("Invalid state_dict: means" + whose +
              " is no tuple of 2 Tensors");
    }
    const auto& pair = entry.value().toTupleRef().elements();
    CheckTensor("mean" + whose, pair[0], param.sizes(), at::kDouble);
    CheckTensor("mean square" + whose, pair[1], param.sizes(), at::kDouble);
    loaded[param.unsafeGetTensorImpl()] = {pair[0].toTensor().clone(),
                                           pair[1].toTensor().clone()};
  }
  time_ = length;
  moments_ = std::move(loaded);
}

}  // namespace torch_sgmcmc
