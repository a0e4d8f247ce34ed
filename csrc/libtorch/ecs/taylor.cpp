#include "libtorch/ecs/taylor.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <limits>
#include <optional>
#include <stdexcept>
#include <utility>

#include "libtorch/core/checks.h"
#include "libtorch/core/text.h"
#include "libtorch/ecs/likelihood_graph.h"

namespace torch_sgmcmc {
namespace {

// Parameters from which on each datum's gradient is a backward pass of its own,
// and not each parameter's derivatives of all data (as in Python).
constexpr int64_t kManyParameters = 256;

// Data of the first chunk whose rows are compared with the predictors'
// derivatives.
constexpr int64_t kTested = 256;

// 1 / x, and 0 where that is no number of use: for 0 and subnormal numbers.
at::Tensor Inverse(const at::Tensor& x) {
  return at::where(
      x.abs() < std::numeric_limits<double>::min(), 0.0, x.reciprocal());
}

// The closure need not know how to compute nothing.
TaylorTerms TermsOfNothing(const std::string& form, const at::Tensor& z) {
  const int64_t d = z.numel();
  const int64_t kinds = KindsOf(form);
  const auto empty = [&](at::IntArrayRef shape) {
    return at::empty(shape, z.options());
  };
  return {empty({0}),
          empty({kinds, 0, d}),
          kinds == 2 ? empty({0}) : at::Tensor(),
          form == kWholeForm ? empty({0, d, d}) : at::Tensor()};
}

at::Tensor JoinColumn(const std::vector<TaylorTerms>& parts,
                      at::Tensor TaylorTerms::*field,
                      int64_t dim) {
  if (!(parts[0].*field).defined()) return {};
  std::vector<at::Tensor> column;
  column.reserve(parts.size());
  for (const TaylorTerms& part : parts) column.push_back(part.*field);
  return at::cat(column, dim);
}

// The scaled rows; where they fit, in the memory of others.
at::Tensor Product(const at::Tensor& rows,
                   const at::Tensor& scales,
                   at::Tensor out) {
  if (!out.defined() || out.sizes() != rows.sizes()) out = at::empty_like(rows);
  return at::mul_out(out, rows, scales.unsqueeze(1));
}

// Whether curvatures of one form are those that there are, up to rounding.
class Fit {
 public:
  Fit(c10::ScalarType dtype, const at::TensorOptions& like)
      : error_(at::zeros({}, like)),
        size_(at::zeros({}, like)),
        tolerance_(dtype == at::kDouble ? 1e-6 : 1e-2) {}

  // Takes those of more data into account.
  bool adds(const at::Tensor& guess, const at::Tensor& truth) {
    const at::Tensor wanted = truth.to(at::kDouble);
    error_ += (guess - wanted).abs().sum();
    size_ += wanted.abs().sum();
    return (error_ <= size_ * tolerance_).item<bool>();
  }

 private:
  at::Tensor error_;
  at::Tensor size_;
  double tolerance_;
};

void CheckPredictors(const at::Tensor& eta, const at::Tensor& indices) {
  if (eta.sizes() == indices.sizes()) return;
  Invalid("Invalid outputs: shape " + Shape(eta.sizes()) + " (must be " +
          Shape(indices.sizes()) + ", one linear predictor for each index)");
}

// Of some data, in float64.
struct ByPredictor {
  at::Tensor values;
  at::Tensor first;   // derivatives of the values by the predictors
  at::Tensor second;  // and second ones
  at::Tensor rows;

  static ByPredictor Of(const DataClosure& closure,
                        const at::Tensor& indices,
                        int64_t d) {
    const LogLikelihood* likelihood = RowsOf(closure);
    if (likelihood == nullptr) {
      throw std::runtime_error(
          "HMCECS's control variates are those of a LogLikelihood with rows: "
          "give step() such a closure, or call set_anchor() with this one");
    }
    at::Tensor eta;
    {
      const at::NoGradGuard no_grad;
      eta = likelihood->outputs(indices).detach().requires_grad_();
    }
    CheckPredictors(eta, indices);
    const at::Tensor values = ValuesWithGraph(
        [&](const at::Tensor& i) { return likelihood->of_outputs(eta, i); },
        indices);
    const at::Tensor first =
        torch::autograd::grad({values},
                              {eta},
                              {at::ones_like(values.detach())},
                              /*retain_graph=*/std::nullopt,
                              /*create_graph=*/true)[0];
    at::Tensor second;
    if (first.requires_grad()) {  // else l is linear in eta
      second = torch::autograd::grad({first},
                                     {eta},
                                     {at::ones_like(first.detach())},
                                     /*retain_graph=*/std::nullopt,
                                     /*create_graph=*/false,
                                     /*allow_unused=*/true)[0];
    }
    if (!second.defined()) second = at::zeros_like(first.detach());
    const auto in_double = [](const at::Tensor& part) {
      return part.detach().to(at::kDouble);
    };
    return {in_double(values),
            in_double(first),
            in_double(second),
            in_double(likelihood->rows(indices, d))};
  }
};

// Throws if rows are not the derivatives of the outputs, in the direction z.
void CheckRows(const LogLikelihood& likelihood,
               const std::vector<at::Tensor>& params,
               const at::Tensor& indices,
               const at::Tensor& z) {
  at::Tensor eta;
  {
    const at::AutoGradMode enable_grad(true);
    eta = likelihood.outputs(indices);
  }
  CheckPredictors(eta, indices);
  const at::Tensor truth = LikelihoodGraph(eta, params).along(z).detach();
  const at::Tensor guess =
      at::matmul(likelihood.rows(indices, z.numel()).to(at::kDouble), z);
  if (Fit(params[0].scalar_type(), z.options()).adds(guess, truth)) return;
  Invalid(
      "Invalid rows: they are not the derivatives of the outputs by the "
      "parameters (must be x, where the outputs are x θ + const and θ is the "
      "parameters, flattened, in their order)");
}

at::Tensor Slice(const at::Tensor& tensor, int64_t begin, int64_t end) {
  return tensor.defined() ? tensor.slice(0, begin, end) : at::Tensor();
}

at::Tensor ValuesWithoutGraph(const DataClosure& closure,
                              const at::Tensor& indices) {
  const at::NoGradGuard no_grad;
  return LogLikelihoods(closure, indices).to(at::kDouble);
}

}  // namespace

int64_t KindsOf(const std::string& form) {
  if (form == kConstantForm) return 0;
  return form == kPredictorForm || form == kRankOneForm ? 2 : 1;
}

bool HasHessian(const std::string& form) {
  return form != kConstantForm && form != kLinearForm;
}

const LogLikelihood* RowsOf(const DataClosure& closure) {
  const auto* likelihood = closure.target<LogLikelihood>();
  return likelihood != nullptr && likelihood->has_rows() ? likelihood : nullptr;
}

std::vector<at::Tensor> SplitLike(const at::Tensor& row,
                                  const std::vector<at::Tensor>& params) {
  std::vector<int64_t> sizes;
  sizes.reserve(params.size());
  for (const at::Tensor& param : params) sizes.push_back(param.numel());
  std::vector<at::Tensor> parts = row.split_with_sizes(sizes);
  for (size_t i = 0; i < parts.size(); ++i) {
    parts[i] = parts[i].view(params[i].sizes()).to(params[i].scalar_type());
  }
  return parts;
}

at::Tensor FlatRow(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> rows;
  rows.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) rows.push_back(tensor.reshape({-1}));
  return at::cat(rows);
}

TaylorTerms TaylorTerms::AtPresent(const DataClosure& closure,
                                   const std::vector<at::Tensor>& params,
                                   const at::Tensor& indices,
                                   const std::string& form,
                                   const at::Tensor& z) {
  if (indices.numel() == 0) return TermsOfNothing(form, z);
  if (form == kConstantForm) {
    return {ValuesWithoutGraph(closure, indices),
            at::empty({0, indices.numel(), z.numel()}, z.options()),
            {},
            {}};
  }
  if (form == kPredictorForm ||
      (form == kLinearForm && RowsOf(closure) != nullptr)) {
    const ByPredictor parts = ByPredictor::Of(closure, indices, z.numel());
    const at::Tensor gradients = parts.first.unsqueeze(1) * parts.rows;
    if (form == kLinearForm) {
      return {parts.values, gradients.unsqueeze(0), {}, {}};
    }
    return {parts.values, at::stack({gradients, parts.rows}), parts.second, {}};
  }
  if (form == kLinearForm && z.numel() > kManyParameters) {
    const LikelihoodRows data = GradientsByData(closure, params, indices);
    return {data.values.to(at::kDouble),
            data.gradients.to(at::kDouble).unsqueeze(0),
            {},
            {}};
  }
  const at::Tensor log_likelihoods = ValuesWithGraph(closure, indices);
  const at::Tensor values = log_likelihoods.detach().to(at::kDouble);
  const LikelihoodGraph graph(log_likelihoods, params);
  const at::Tensor gradients = graph.gradients().to(at::kDouble);
  if (form == kLinearForm) {
    return {values, gradients.unsqueeze(0).contiguous(), {}, {}};
  }
  if (form == kRankOneForm) {
    const at::Tensor factors = graph.hessian_products(z).to(at::kDouble);
    return {values,
            at::stack({gradients, factors}),
            Inverse(at::matmul(factors, z)),
            {}};
  }
  std::vector<at::Tensor> columns;
  for (const at::Tensor& e : at::eye(z.numel(), z.options()).unbind()) {
    columns.push_back(graph.hessian_products(e));
  }
  return {values,
          gradients.unsqueeze(0).contiguous(),
          {},
          at::stack(columns, 2).to(at::kDouble)};
}

TaylorTerms TaylorTerms::Join(const std::vector<TaylorTerms>& parts) {
  return {JoinColumn(parts, &TaylorTerms::values, 0),
          JoinColumn(parts, &TaylorTerms::slopes, 1),
          JoinColumn(parts, &TaylorTerms::scales, 0),
          JoinColumn(parts, &TaylorTerms::hessians, 0)};
}

std::vector<at::Tensor> TaylorTerms::fields() const {
  return {values, slopes, scales, hessians};
}

TaylorTerms TaylorTerms::part(int64_t begin, int64_t end) const {
  return {Slice(values, begin, end),
          slopes.slice(1, begin, end),
          Slice(scales, begin, end),
          Slice(hessians, begin, end)};
}

TaylorTerms::Expansion TaylorTerms::expand(const at::Tensor& delta) const {
  const int64_t kinds = slopes.size(0);
  const int64_t size = slopes.size(1);
  if (kinds == 0) return {values, slopes};
  const at::Tensor along =
      at::mv(slopes.view({kinds * size, slopes.size(2)}), delta)
          .view({kinds, size});
  at::Tensor result = values + along[0];
  if (scales.defined()) {
    const at::Tensor bends = scales * along[1];
    return {result.addcmul_(bends, along[1], 0.5), bends};
  }
  if (hessians.defined()) {
    const at::Tensor bends = at::matmul(hessians, delta);
    return {result.add_(at::matmul(bends, delta), 0.5), bends};
  }
  return {result, along};
}

at::Tensor TaylorTerms::pull(const at::Tensor& weights,
                             const at::Tensor& bends) const {
  if (slopes.size(0) == 0) return at::zeros({slopes.size(2)}, slopes.options());
  const at::Tensor matrix =
      slopes.view({slopes.size(0) * slopes.size(1), slopes.size(2)});
  const at::Tensor both =
      scales.defined() ? at::cat({weights, weights * bends}) : weights;
  const at::Tensor result = at::mv(matrix.t(), both);
  return hessians.defined() ? result + at::matmul(weights, bends) : result;
}

std::optional<TaylorSums> TaylorSums::AtPresent(
    const DataClosure& closure,
    const std::vector<at::Tensor>& params,
    const Chunks& next_chunk,
    const std::string& form,
    const at::Tensor& probes) {
  const int64_t d = probes.size(1);
  const auto like = probes.options().dtype(at::kDouble);
  TaylorSums sums{at::zeros({}, like), at::zeros({d}, like), {}, form};
  if (HasHessian(form)) sums.hessian = at::zeros({d, d}, like);
  Fit fit(params[0].scalar_type(), like);
  at::Tensor scaled;
  bool tested = RowsOf(closure) == nullptr;
  for (at::Tensor indices = next_chunk(); indices.defined();
       indices = next_chunk()) {
    if (!tested) {
      CheckRows(
          *RowsOf(closure), params, indices.slice(0, 0, kTested), probes[0]);
      tested = true;
    }
    if (form == kConstantForm) {
      sums.value += ValuesWithoutGraph(closure, indices).sum();
      continue;
    }
    if (form == kPredictorForm) {
      const ByPredictor parts = ByPredictor::Of(closure, indices, d);
      sums.value += parts.values.sum();
      sums.gradient += at::mv(parts.rows.t(), parts.first);
      scaled = Product(parts.rows, parts.second, scaled);
      sums.hessian += at::matmul(scaled.t(), parts.rows);
      continue;
    }
    const at::Tensor values = ValuesWithGraph(closure, indices);
    sums.value += values.detach().to(at::kDouble).sum();
    const LikelihoodGraph graph(values, params);
    sums.gradient += graph.slope().detach().to(at::kDouble);
    if (form == kWholeForm) {
      sums.hessian += graph.hessian().to(at::kDouble);
    } else if (form == kRankOneForm) {
      const at::Tensor factors =
          graph.hessian_products(probes[0]).to(at::kDouble);
      const at::Tensor scales = Inverse(at::matmul(factors, probes[0]));
      const at::Tensor guess = scales * at::matmul(factors, probes[1]).pow(2);
      if (!fit.adds(guess, graph.curvatures(probes[1]))) return std::nullopt;
      sums.hessian += at::matmul(factors.t() * scales, factors);
    }
  }
  return sums;
}

}  // namespace torch_sgmcmc
