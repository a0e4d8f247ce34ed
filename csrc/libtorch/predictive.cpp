#include "torch_sgmcmc/predictive.h"

#include <ATen/ATen.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "libtorch/checks.h"
#include "libtorch/options.h"

namespace torch_sgmcmc {
namespace {

[[noreturn]] void Refuse(const at::Tensor& outputs, const std::string& wanted) {
  Invalid("Invalid outputs: shape ", Shape(outputs.sizes()), " (", wanted, ")");
}

// In Python.
const char* NameOf(Link link) {
  constexpr std::array names = {"softmax", "sigmoid", "identity"};
  return names.at(static_cast<size_t>(link));
}

double Tiniest(const at::Tensor& p) {
  return p.scalar_type() == at::kDouble ? std::numeric_limits<double>::min()
                                        : std::numeric_limits<float>::min();
}

// p log p, and 0 where p is.
at::Tensor Logarithms(const at::Tensor& p) {
  return p.clamp_min(Tiniest(p)).log_().mul_(p);
}

}  // namespace

at::Tensor Predictive::Values(const at::Tensor& outputs) const {
  if (link_ == Link::kIdentity) return outputs;
  if (link_ == Link::kSigmoid) return outputs.sigmoid();
  if (outputs.dim() < 2 || outputs.size(-1) < 2) {
    Refuse(outputs, "its last dimension must be that of two classes or more");
  }
  at::Tensor powers = (outputs - outputs.amax(-1, true)).exp_();
  return powers.div_(powers.sum(-1, true));
}

at::Tensor Predictive::Entropy(const at::Tensor& values) const {
  if (link_ == Link::kSigmoid) {
    return -Logarithms(values) - Logarithms(1 - values);
  }
  return -Logarithms(values).sum(-1);
}

void Predictive::update(const at::Tensor& outputs, double weight) {
  if (!std::isfinite(weight)) {
    Invalid("Invalid weight: ", weight, " (must be finite)");
  }
  if (!outputs.defined() || !outputs.is_floating_point()) {
    Invalid("Invalid outputs: undefined, or no floating-point numbers");
  }
  if (outputs.dim() == 0) Refuse(outputs, "must have a row for each input");
  const at::NoGradGuard no_graph;
  const bool is_low = outputs.scalar_type() == at::kHalf ||
                      outputs.scalar_type() == at::kBFloat16;
  // log and softmax need more digits than 16 bits have.
  const at::Tensor values =
      Values(is_low ? outputs.to(at::kFloat) : outputs.detach());
  if (!weights_.empty() && values.sizes() != origin_.sizes()) {
    Refuse(outputs, "earlier draws gave " + Shape(origin_.sizes()));
  }
  const bool has_entropy = link_ != Link::kIdentity;
  if (weights_.empty()) {
    origin_ = values.to(at::kDouble, /*non_blocking=*/false, /*copy=*/true);
    distances_ = at::zeros_like(origin_);
    squares_ = at::zeros_like(origin_);
    dtype_ = values.scalar_type();
  }
  const at::Tensor distance = values - origin_;
  distances_.add_(distance, weight);
  squares_.addcmul_(distance, distance, weight);
  if (has_entropy) {
    const at::Tensor entropy = Entropy(values);
    if (weights_.empty()) {
      entropies_ =
          at::zeros_like(entropy, entropy.options().dtype(at::kDouble));
    }
    entropies_.add_(entropy, weight);
  }
  weights_.push_back(weight);
}

Prediction Predictive::result() const {
  if (weights_.empty()) {
    Invalid("There is nothing to predict with: no draw was added");
  }
  double sum = 0;
  double squares = 0;
  for (const double weight : weights_) {
    sum += weight;
    squares += weight * weight;
  }
  if (sum == 0) {
    Invalid("Invalid weights: they sum to 0");
  }
  Prediction result;
  const at::Tensor shift = distances_ / sum;
  const at::Tensor mean = origin_ + shift;
  result.mean = mean.to(dtype_);
  result.variance = (squares_ / sum - shift.square()).to(dtype_);
  if (link_ != Link::kIdentity) {
    const at::Tensor aleatoric = entropies_ / sum;
    // Negative probabilities, possible with signed draws, have no entropy.
    const at::Tensor total = Entropy(mean.masked_fill(mean < 0, std::nan("")));
    result.total = total.to(dtype_);
    result.aleatoric = aleatoric.to(dtype_);
    result.epistemic = (total - aleatoric).to(dtype_);
  }
  result.num_draws = num_draws();
  result.weight = sum;
  result.effective_draws = sum * sum / squares;
  return result;
}

StateDict Predictive::state_dict() const {
  const c10::IValue weights = ToValue(weights_);
  if (weights_.empty()) return {{"weights", weights}, {"sums", c10::IValue()}};
  StateDict means;
  if (link_ != Link::kIdentity) means.set("", entropies_);
  // As in Python, where classes may be in another dimension than the last.
  const c10::IValue dim =
      link_ == Link::kSoftmax ? c10::IValue(origin_.dim() - 1) : c10::IValue();
  const StateDict sums = {
      {"link", NameOf(link_)},
      {"dim", dim},
      {"origin", origin_},
      {"distances", distances_},
      {"squares", squares_},
      {"means", means},
      {"dtype", dtype_ == at::kDouble ? "float64" : "float32"},
      {"kept", c10::impl::GenericList(c10::AnyType::get())}};
  return {{"weights", weights}, {"sums", sums}};
}

void Predictive::load_state_dict(const StateDict& state, c10::Device device) {
  Predictive loaded(link_);
  loaded.weights_ =
      FromValue<std::vector<double>>("weights", state.at("weights"));
  const bool has_entropy = link_ != Link::kIdentity;
  const auto require = [](bool fits) {
    if (fits) return;
    Invalid(
        "Invalid state_dict: it has other averages, or quantiles (must be of a "
        "Predictive with the same link, and no functions)");
  };
  if (const c10::IValue value = state.at("sums"); !value.isNone()) {
    const StateDict sums(value);
    const StateDict means = sums.at("means");
    const c10::IValue kept = sums.at("kept");
    const auto link = FromValue<std::string>("link", sums.at("link"));
    require(link == NameOf(link_) && means.contains("") == has_entropy &&
            means.size() == (has_entropy ? 1U : 0U) && kept.isList() &&
            kept.toListRef().empty());
    const auto taken = [device](const StateDict& from, const char* key) {
      const c10::IValue tensor = from.at(key);
      if (!tensor.isTensor()) WrongType(key, tensor, "a tensor");
      return tensor.toTensor().to(device,
                                  /*non_blocking=*/false,
                                  /*copy=*/true);
    };
    loaded.origin_ = taken(sums, "origin");
    loaded.distances_ = taken(sums, "distances");
    loaded.squares_ = taken(sums, "squares");
    if (has_entropy) loaded.entropies_ = taken(means, "");
    if (link_ == Link::kSoftmax) {
      require(FromValue<int64_t>("dim", sums.at("dim")) ==
              loaded.origin_.dim() - 1);
    }
    const auto dtype = FromValue<std::string>("dtype", sums.at("dtype"));
    loaded.dtype_ = dtype == "float64" ? at::kDouble : at::kFloat;
  } else {
    loaded.weights_.clear();
  }
  *this = std::move(loaded);
}

}  // namespace torch_sgmcmc
