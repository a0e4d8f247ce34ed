#include "torch_sgmcmc/gibbs.h"

#include <ATen/ATen.h>

#include <cmath>
#include <utility>

#include "host/draws.h"
#include "libtorch/checks.h"
#include "libtorch/operators.h"
#include "libtorch/sampler_impl.h"
#include "random/counter.h"

namespace torch_sgmcmc {
namespace {

// θ - μ of a parameter, in the dtype of arithmetic if μ is not 0.
at::Tensor AwayFromMean(const SamplerImpl& sampler, double mean_of_group,
                        const at::Tensor& param) {
  const at::NoGradGuard no_grad;
  const at::Tensor mean = sampler.prior_mean_of(param);
  if (mean.defined()) return param.detach().to(StateDtype(param)) - mean;
  if (mean_of_group == 0) return param.detach();
  return param.detach().to(StateDtype(param)) - mean_of_group;
}

}  // namespace

GammaPrecision::GammaPrecision(Sampler& sampler,
                               const GammaPrecisionOptions& options)
    : sampler_(SamplerAccess::Of(sampler)), options_(options) {
  if (Locked(sampler_)->options_of(0).chains()) {
    Invalid(
        "Invalid sampler: it has num_chains, and a group's prior_precision "
        "would be drawn for all of them (use a sampler for each chain)");
  }
  CheckReal("shape", options.shape(), {.low_open = true});
  CheckReal("rate", options.rate(), {.low_open = true});
}

std::vector<double> GammaPrecision::step() {
  const auto sampler = Locked(sampler_);
  const size_t num_groups = sampler->groups().size();
  std::vector<double> precisions;
  for (size_t i = 0; i < num_groups; ++i) {
    CheckReal("temperature", sampler->options_of(i).temperature(),
              {.low_open = true});
  }
  for (size_t i = 0; i < num_groups; ++i) precisions.push_back(draw(i));
  for (size_t i = 0; i < num_groups; ++i) {
    sampler->options_of(i).put("prior_precision", precisions[i]);
  }
  ++num_updates_;
  return precisions;
}

double GammaPrecision::draw(size_t index) const {
  const auto sampler = Locked(sampler_);
  const OptionValues& group = sampler->options_of(index);
  const double t = group.temperature();
  int64_t dimension = 0;
  // One sum for each device, in the order of their first parameters.
  std::vector<std::pair<c10::Device, Tensors>> by_device;
  for (const at::Tensor& param : sampler->groups()[index].params()) {
    if (!param.requires_grad()) continue;  // it is not sampled
    dimension += param.numel();
    auto place = by_device.begin();
    while (place != by_device.end() && place->first != param.device()) ++place;
    if (place == by_device.end()) {
      place = by_device.insert(place, {param.device(), {}});
    }
    place->second.push_back(AwayFromMean(*sampler, group.prior_mean(), param));
  }
  double squares = 0;
  for (const auto& [device, params] : by_device) {
    squares += sum_of_squares(params).item<double>();
  }
  const double shape =
      (options_.shape() + static_cast<double>(dimension) / 2 - 1) / t + 1;
  const double rate = (options_.rate() + squares / 2) / t;
  if (!std::isfinite(rate)) {
    Raise("Cannot draw prior_precision of group ", index,
          ": the sum of squares of its parameters is ", Shown(squares),
          ". No group has changed. Begin again with a smaller lr");
  }
  if (shape <= 0) {
    Invalid("Invalid shape: ", options_.shape(), " (the density of group ",
            index, "'s prior_precision, with d = ", dimension,
            " and temperature ", t,
            ", has no finite integral: shape + d / 2 must be > 1 - "
            "temperature)");
  }
  const NoiseStream stream =
      KeyedStream(sampler->seed(), static_cast<uint64_t>(num_updates_),
                  Purpose::kPrecision);
  return DrawGamma(shape, stream, index) / rate;
}

StateDict GammaPrecision::state_dict() const {
  return {{"shape", options_.shape()},
          {"rate", options_.rate()},
          {"num_updates", SavedCount({num_updates_})}};
}

void GammaPrecision::load_state_dict(const StateDict& dict) {
  if (dict.contains("groups")) {
    Invalid(
        "Invalid state_dict: it is of some param groups, which C++ cannot "
        "choose (must be a GammaPrecision's without groups)");
  }
  const auto shape = FromValue<double>("shape", dict.at("shape"));
  const auto rate = FromValue<double>("rate", dict.at("rate"));
  const auto updates =
      FromValue<int64_t>("num_updates", dict.at("num_updates"));
  CheckReal("shape", shape, {.low_open = true});
  CheckReal("rate", rate, {.low_open = true});
  CheckCount("num_updates", updates);
  options_.shape(shape).rate(rate);
  num_updates_ = updates;
}

}  // namespace torch_sgmcmc
