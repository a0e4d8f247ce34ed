// torch_sgmcmc::ecs_*: an evaluation of HMC-ECS without the closure and its
// backward pass, and a leapfrog step; on the CPU, in float64.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "launch/plan.h"
#include "launch/rows.h"

namespace torch_sgmcmc {
namespace {

// An estimator's settings; num_factors is 0 for the perturbed estimator, whose
// only batch is the subsample.
struct ECSEstimator {
  double num_data = 1;
  int64_t batch_size = 1;   // m, of the block-Poisson estimator
  int64_t num_factors = 0;  // λ
  double lower_bound = 0;   // a
};

// log|estimate|, its estimated variance, the estimate of Σ d, the sign, and the
// lowest estimate of Σ d by a batch.
struct ECSEstimate {
  double log = 0;
  double variance = 0;
  double mean = 0;
  double sign = 1;
  double lowest = 0;
};

// Σ x, in pieces of 1024.
double ECSSum(const double* x, int64_t count) {
  struct Ones {
    constexpr Ones() { std::fill_n(values, 1024, 1.0); }
    double values[1024] = {};
  };
  static constexpr Ones kOnes;
  double sum = 0;
  for (int64_t i = 0; i < count; i += 1024) {
    const int64_t size = std::min<int64_t>(1024, count - i);
    sum += Product(x + i, kOnes.values, size);
  }
  return sum;
}

// Estimates of exp(Σ d) over all data by the differences d between the
// log-likelihoods of a subsample's data and their expansions (Dang, Quiroz,
// Kohn, Tran and Villani 2019).

// exp(d̂ - σ̂² / 2): eq. 4.1, 4.3 and 4.5. Writes the derivatives by d.
ECSEstimate ECSPerturbed(const ECSEstimator& e, const double* differences,
                         int64_t count, double* weights) {
  const auto size = static_cast<double>(count);
  const double scale = e.num_data / size;
  const double sum = ECSSum(differences, count);
  const double mean = sum / size;
  for (int64_t i = 0; i < count; ++i) weights[i] = differences[i] - mean;
  const double square = scale * scale;
  ECSEstimate result;
  result.mean = scale * sum;
  result.variance = square * Product(weights, weights, count);
  result.lowest = result.mean;
  result.log = result.mean - result.variance / 2;
  // d(σ̂² / 2) / d dᵢ is scale² (dᵢ - d̄): the mean's part adds up to 0.
  for (int64_t i = 0; i < count; ++i) weights[i] = scale - square * weights[i];
  return result;
}

// The block-Poisson estimator, eq. 5.1, of all minibatches one after the other.
ECSEstimate ECSBlockPoisson(const ECSEstimator& e, const double* differences,
                            int64_t count, double* weights) {
  const double scale = e.num_data / static_cast<double>(e.batch_size);
  const auto factors = static_cast<double>(e.num_factors);
  const int64_t batches = count / e.batch_size;
  ECSEstimate result;
  double sum = 0;
  for (int64_t b = 0; b < batches; ++b) {
    const int64_t begin = b * e.batch_size;
    const double estimate = scale * ECSSum(differences + begin, e.batch_size);
    const double excess = estimate - e.lower_bound;
    const double log = std::log(std::abs(excess / factors));
    sum += estimate;
    result.lowest = b == 0 ? estimate : std::min(result.lowest, estimate);
    result.log += log;
    // log|L̂| is a sum over Poisson(λ) minibatches: its variance is λ E[log²].
    result.variance += log * log;
    if (excess < 0) result.sign = -result.sign;
    for (int64_t i = 0; i < e.batch_size; ++i) {
      weights[begin + i] = scale / excess;
    }
  }
  result.log += e.lower_bound + factors;
  if (batches > 0) result.mean = sum / static_cast<double>(batches);
  return result;
}

// ---- The operators ----------------------------------------------------------

using ECSMaybe = std::optional<Tensor>;

class ECSArrays {
 public:
  explicit ECSArrays(const char* op) : op_(op) {}

  const double* Read(const char* name, const Tensor& tensor,
                     const std::vector<int64_t>& shape) const {
    Check(name, tensor, shape);
    return static_cast<const double*>(tensor.const_data_ptr());
  }
  const double* Read(const char* name, const ECSMaybe& tensor,
                     const std::vector<int64_t>& shape) const {
    return tensor ? Read(name, *tensor, shape) : nullptr;
  }
  double* Write(const char* name, Tensor& tensor,
                const std::vector<int64_t>& shape) const {
    Check(name, tensor, shape);
    return static_cast<double*>(tensor.mutable_data_ptr());
  }

 private:
  void Check(const char* name, const Tensor& tensor,
             const std::vector<int64_t>& shape) const {
    if (!tensor.defined()) Fail(op_, name, " is undefined");
    const auto sizes = tensor.sizes();
    if (tensor.is_cpu() && tensor.scalar_type() == ScalarType::Double &&
        tensor.is_contiguous() && sizes.size() == shape.size() &&
        std::equal(shape.begin(), shape.end(), sizes.begin())) {
      return;
    }
    std::string wanted;
    for (const int64_t size : shape) {
      wanted += (wanted.empty() ? "" : ", ") + std::to_string(size);
    }
    Fail(op_, name, " must be contiguous float64 of shape [", wanted,
         "] on the CPU");
  }

  const char* op_;
};

// Numbers of an estimate, as an operator's result.
constexpr int64_t kECSEstimate = 5;

Tensor NewDoubles(const Tensor& like, const std::vector<int64_t>& shape) {
  return torch::stable::new_empty(like, shape, ScalarType::Double);
}

double* DoublesOf(Tensor& tensor) {
  return static_cast<double*>(tensor.mutable_data_ptr());
}

// θ - θ*.
std::vector<double> ECSOffset(const double* theta, const double* anchor,
                              int64_t d) {
  std::vector<double> delta(static_cast<size_t>(d));
  for (int64_t j = 0; j < d; ++j) delta[j] = theta[j] - anchor[j];
  return delta;
}

// True if expansions have no gradients: their shape is [0, M, d].
bool IsConstant(const Tensor& gradients, const ECSMaybe& hessians) {
  return !hessians && gradients.defined() && gradients.dim() == 3 &&
         gradients.size(0) == 0;
}

// Expansions of M data (torch_sgmcmc/samplers/_ecs/taylor.py).
struct ECSTerms {
  ECSTerms(const ECSArrays& arrays, const Tensor& theta,
           const Tensor& gradients_of, const ECSMaybe& scales_of,
           const ECSMaybe& hessians_of, int64_t count)
      : m(count),
        d(theta.numel()),
        kinds(scales_of ? 2 : (IsConstant(gradients_of, hessians_of) ? 0 : 1)),
        gradients(arrays.Read("gradients", gradients_of, {kinds, m, d})),
        scales(arrays.Read("scales", scales_of, {m})),
        hessians(arrays.Read("hessians", hessians_of, {m, d, d})) {}

  int64_t m;
  int64_t d;
  int64_t kinds;
  const double* gradients;
  const double* scales;
  const double* hessians;

  // The shape of `hessian_terms`, of each datum scale yᵀδ or H δ.
  std::vector<int64_t> HessianTermsShape() const {
    if (scales != nullptr) return {m};
    if (hessians != nullptr) return {m, d};
    return {0};
  }
};

Tensor AsTensor(const ECSEstimate& estimate, const Tensor& like) {
  Tensor result = NewDoubles(like, {kECSEstimate});
  double* out = DoublesOf(result);
  out[0] = estimate.log;
  out[1] = estimate.variance;
  out[2] = estimate.mean;
  out[3] = estimate.sign;
  out[4] = estimate.lowest;
  return result;
}

std::tuple<Tensor, Tensor, Tensor> ECSEstimateAt(
    Tensor values, Tensor theta, Tensor anchor, Tensor expansions,
    Tensor gradients, ECSMaybe scales, ECSMaybe hessians, double temperature,
    double num_data, int64_t batch_size, int64_t num_factors,
    double lower_bound) {
  constexpr const char* kOp = "ecs_estimate";
  CheckNumber(kOp, "temperature", temperature, {.low_open = true});
  CheckNumber(kOp, "num_data", num_data, {.low_open = true});
  const int64_t m = values.numel();
  if (batch_size < 1 || m % batch_size != 0) {
    Fail(kOp, "Invalid batch_size: ", batch_size, " (must divide ", m,
         ", the number of values)");
  }
  if (num_factors < 0 || (num_factors == 0 && m == 0)) {
    Fail(kOp, "Invalid num_factors: ", num_factors,
         " (must be >= 1, or 0 with values)");
  }
  const ECSArrays arrays(kOp);
  const int64_t d = theta.numel();
  const double* value = arrays.Read("values", values, {m});
  const double* at = arrays.Read("theta", theta, {d});
  const double* around = arrays.Read("anchor", anchor, {d});
  const double* expansion = arrays.Read("expansions", expansions, {m});
  const ECSTerms terms(arrays, theta, gradients, scales, hessians, m);

  const std::vector<double> delta = ECSOffset(at, around, d);
  Tensor weights = NewDoubles(values, {m});
  Tensor hessian_terms = NewDoubles(values, terms.HessianTermsShape());
  double* weight = DoublesOf(weights);
  double* hessian_term = DoublesOf(hessian_terms);
  // The differences, one term after the other.
  std::vector<double> differences(static_cast<size_t>(m));
  if (terms.kinds > 0) {
    RowProducts(terms.gradients, m, d, delta.data(), weight);
  } else {
    std::fill_n(weight, m, 0.0);
  }
  for (int64_t i = 0; i < m; ++i) {
    differences[i] = value[i] - (expansion[i] + weight[i]);
  }
  if (terms.scales != nullptr) {
    RowProducts(terms.gradients + m * d, m, d, delta.data(), weight);
    for (int64_t i = 0; i < m; ++i) {
      hessian_term[i] = terms.scales[i] * weight[i];
      differences[i] -= 0.5 * hessian_term[i] * weight[i];
    }
  } else if (terms.hessians != nullptr) {
    RowProducts(terms.hessians, m * d, d, delta.data(), hessian_term);
    RowProducts(hessian_term, m, d, delta.data(), weight);
    for (int64_t i = 0; i < m; ++i) differences[i] -= 0.5 * weight[i];
  }
  for (double& difference : differences) difference /= temperature;

  const ECSEstimator estimator{num_data, batch_size, num_factors, lower_bound};
  const auto estimate = num_factors == 0 ? ECSPerturbed : ECSBlockPoisson;
  const ECSEstimate result = estimate(estimator, differences.data(), m, weight);
  return {weights, hessian_terms, AsTensor(result, values)};
}

// log |L̂|^(1/T) + log prior / T and whether all is finite; and the gradient.
std::tuple<Tensor, Tensor> ECSDensityAt(
    Tensor estimate, Tensor gradient, Tensor weights, Tensor hessian_terms,
    Tensor theta, Tensor anchor, Tensor gradients, ECSMaybe scales,
    ECSMaybe hessians, Tensor sum_value, Tensor sum_gradient,
    ECSMaybe sum_hessian, Tensor prior, double temperature,
    ECSMaybe prior_mean) {
  constexpr const char* kOp = "ecs_density";
  CheckNumber(kOp, "temperature", temperature, {.low_open = true});
  const ECSArrays arrays(kOp);
  const int64_t d = theta.numel();
  const int64_t m = weights.numel();
  const double* log = arrays.Read("estimate", estimate, {kECSEstimate});
  const double* towards = arrays.Read("gradient", gradient, {d});
  const double* weight = arrays.Read("weights", weights, {m});
  const double* at = arrays.Read("theta", theta, {d});
  const double* around = arrays.Read("anchor", anchor, {d});
  const ECSTerms terms(arrays, theta, gradients, scales, hessians, m);
  const double* hessian_term =
      arrays.Read("hessian_terms", hessian_terms, terms.HessianTermsShape());
  const double* value = arrays.Read("sum_value", sum_value, {});
  const double* total = arrays.Read("sum_gradient", sum_gradient, {d});
  const double* hessian = arrays.Read("sum_hessian", sum_hessian, {d, d});
  const double* precision = arrays.Read("prior", prior, {d});
  const double* mean = arrays.Read("prior_mean", prior_mean, {d});

  const std::vector<double> delta = ECSOffset(at, around, d);
  // Σ wᵢ ∇qᵢ of the subsample.
  std::vector<double> expanded(static_cast<size_t>(d));
  if (terms.kinds > 0) AddRows(terms.gradients, m, d, weight, expanded.data());
  if (terms.scales != nullptr) {
    std::vector<double> scaled(static_cast<size_t>(m));
    for (int64_t i = 0; i < m; ++i) scaled[i] = weight[i] * hessian_term[i];
    AddRows(terms.gradients + m * d, m, d, scaled.data(), expanded.data());
  } else if (terms.hessians != nullptr) {
    AddRows(hessian_term, m, d, weight, expanded.data());
  }
  // Σ ∇q of all data.
  std::vector<double> turn(static_cast<size_t>(d));
  if (hessian != nullptr) {
    RowProducts(hessian, d, d, delta.data(), turn.data());
  }
  Tensor density_gradient = NewDoubles(theta, {d});
  double* out = DoublesOf(density_gradient);
  bool finite = true;
  std::vector<double> energy(static_cast<size_t>(d));
  for (int64_t j = 0; j < d; ++j) {
    const double away = mean == nullptr ? at[j] : at[j] - mean[j];
    const double decay = precision[j] * away;
    energy[j] = delta[j] * (total[j] + 0.5 * turn[j]) - 0.5 * decay * away;
    out[j] = (((towards[j] - expanded[j]) + (total[j] + turn[j])) - decay) /
             temperature;
    finite = finite && std::isfinite(out[j]);
  }
  Tensor density = NewDoubles(theta, {2});
  double* result = DoublesOf(density);
  result[0] = log[0] + (*value + ECSSum(energy.data(), d)) / temperature;
  result[1] = finite && std::isfinite(result[0]) ? 1 : 0;
  return {density, density_gradient};
}

// In x with θ = origin + W x, where the mass is 1; W is a matrix, a diagonal,
// or absent: 1.
Tensor ECSLeapfrog(Tensor x, Tensor momentum, Tensor gradient,
                   ECSMaybe whitening, Tensor origin, double kick,
                   double drift) {
  constexpr const char* kOp = "ecs_leapfrog_";
  CheckNumber(kOp, "kick", kick);
  CheckNumber(kOp, "drift", drift);
  const ECSArrays arrays(kOp);
  const int64_t d = x.numel();
  double* at = arrays.Write("x", x, {d});
  double* r = arrays.Write("momentum", momentum, {d});
  const double* push = arrays.Read("gradient", gradient, {d});
  const double* from = arrays.Read("origin", origin, {d});
  const bool dense = whitening && whitening->dim() == 2;
  const std::vector<int64_t> shape =
      dense ? std::vector<int64_t>{d, d} : std::vector<int64_t>{d};
  const double* w = arrays.Read("whitening", whitening, shape);

  std::vector<double> whitened(static_cast<size_t>(d));
  if (dense) AddRows(w, d, d, push, whitened.data());
  for (int64_t j = 0; j < d; ++j) {
    if (!dense) whitened[j] = w == nullptr ? push[j] : w[j] * push[j];
    r[j] += kick * whitened[j];
    at[j] += drift * r[j];
  }
  Tensor theta = NewDoubles(x, {d});
  double* out = DoublesOf(theta);
  if (dense) RowProducts(w, d, d, at, out);
  for (int64_t j = 0; j < d; ++j) {
    if (!dense) {
      out[j] = w == nullptr ? at[j] : w[j] * at[j];
    }
    out[j] = from[j] + out[j];
  }
  return theta;
}

}  // namespace
}  // namespace torch_sgmcmc

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CPU, m) {
  m.impl("ecs_estimate", TORCH_BOX(&torch_sgmcmc::ECSEstimateAt));
  m.impl("ecs_density", TORCH_BOX(&torch_sgmcmc::ECSDensityAt));
  m.impl("ecs_leapfrog_", TORCH_BOX(&torch_sgmcmc::ECSLeapfrog));
}
