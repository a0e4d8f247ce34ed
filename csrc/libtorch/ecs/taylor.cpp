#include "libtorch/ecs/taylor.h"

#include <ATen/ATen.h>

#include <limits>
#include <optional>
#include <stdexcept>
#include <utility>

#include "libtorch/ecs/likelihood_graph.h"
#include "libtorch/ecs/predictor.h"

namespace torch_sgmcmc {
namespace {

// Parameters from which on each datum's gradient is a backward pass of its own,
// and not each parameter's derivatives of all data (as in Python).
constexpr int64_t kManyParameters = 256;

// Data of the first chunk by which it is found out whether a predictor is
// linear.
constexpr int64_t kTested = 256;

// 1 / x, and 0 where that is no number of use: for 0 and subnormal numbers.
at::Tensor Inverse(const at::Tensor& x) {
  return at::where(
      x.abs() < std::numeric_limits<double>::min(), 0.0, x.reciprocal());
}

// The closure need not know how to compute nothing.
TaylorTerms TermsOfNothing(const std::string& form, const at::Tensor& z) {
  const int64_t d = z.numel();
  const bool rank_one = form == kRankOneForm || form == kPredictorForm;
  const auto empty = [&](at::IntArrayRef shape) {
    return at::empty(shape, z.options());
  };
  return {empty({0}),
          empty({rank_one ? 2 : 1, 0, d}),
          rank_one ? empty({0}) : at::Tensor(),
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

// The scaled rows in float64; where they fit, in the memory of others.
at::Tensor Product(const at::Tensor& rows,
                   const at::Tensor& scales,
                   at::Tensor out) {
  if (!out.defined() || out.sizes() != rows.sizes()) {
    out = at::empty_like(rows, rows.options().dtype(at::kDouble));
  }
  return at::mul_out(out, rows, scales.to(at::kDouble).unsqueeze(1));
}

// z' H_i z by the predictor and as it is: [M].
std::pair<at::Tensor, at::Tensor> Curvatures(
    const DataClosure& closure,
    const std::vector<at::Tensor>& params,
    const at::Tensor& indices,
    int64_t gate,
    const at::Tensor& z) {
  const at::Tensor values = ValuesWithGraph(closure, indices);
  const std::optional<Predictor> predictor =
      Predictor::Of(values, params, gate);
  const at::Tensor truth =
      LikelihoodGraph(values, params).curvatures(z).to(at::kDouble);
  if (!predictor) {
    return {at::full_like(truth, std::numeric_limits<double>::quiet_NaN()),
            truth};
  }
  const at::Tensor along = at::matmul(predictor->rows.to(at::kDouble), z);
  return {predictor->second.to(at::kDouble) * along.pow(2), truth};
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

at::Tensor RowsOf(const at::Tensor& tensor, int64_t begin, int64_t end) {
  return tensor.defined() ? tensor.slice(0, begin, end) : at::Tensor();
}

}  // namespace

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
                                   const at::Tensor& z,
                                   int64_t gate) {
  if (indices.numel() == 0) return TermsOfNothing(form, z);
  if (form == kLinearForm && z.numel() > kManyParameters) {
    const LikelihoodRows data = GradientsByData(closure, params, indices);
    return {data.values.to(at::kDouble),
            data.gradients.to(at::kDouble).unsqueeze(0),
            {},
            {}};
  }
  const at::Tensor log_likelihoods = ValuesWithGraph(closure, indices);
  const at::Tensor values = log_likelihoods.detach().to(at::kDouble);
  if (form == kPredictorForm) {
    const std::optional<Predictor> predictor =
        Predictor::Of(log_likelihoods, params, gate);
    if (!predictor) {
      throw std::runtime_error(
          "HMCECS got log-likelihoods that are computed in another way than "
          "before: the closure must do the same for any data, or set_anchor must "
          "be called again");
    }
    const at::Tensor rows = predictor->rows.to(at::kDouble);
    const at::Tensor gradients =
        predictor->first.to(at::kDouble).unsqueeze(1) * rows;
    return {values,
            at::stack({gradients, rows}),
            predictor->second.to(at::kDouble),
            {}};
  }
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
  return {RowsOf(values, begin, end),
          slopes.slice(1, begin, end),
          RowsOf(scales, begin, end),
          RowsOf(hessians, begin, end)};
}

TaylorTerms::Expansion TaylorTerms::expand(const at::Tensor& delta) const {
  const int64_t kinds = slopes.size(0);
  const int64_t size = slopes.size(1);
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
  if (form != kLinearForm) sums.hessian = at::zeros({d, d}, like);
  Fit fit(params[0].scalar_type(), like);
  std::optional<int64_t> gate;
  at::Tensor scaled;
  for (at::Tensor indices = next_chunk(); indices.defined();
       indices = next_chunk()) {
    const at::Tensor values = ValuesWithGraph(closure, indices);
    sums.value += values.detach().to(at::kDouble).sum();
    if (form == kPredictorForm) {
      const std::optional<Predictor> predictor =
          Predictor::Of(values, params, gate);
      if (!predictor) return std::nullopt;
      if (!gate) {  // the other chunks are the same functions
        gate = predictor->gate;
        const auto [guess, truth] = Curvatures(
            closure, params, indices.slice(0, 0, kTested), *gate, probes[0]);
        if (!fit.adds(guess, truth)) return std::nullopt;
      }
      const at::Tensor rows = predictor->rows.to(at::kDouble);
      sums.gradient += at::mv(rows.t(), predictor->first.to(at::kDouble));
      scaled = Product(rows, predictor->second, scaled);
      sums.hessian += at::matmul(scaled.t(), rows);
      continue;
    }
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
  sums.gate = gate.value_or(0);
  return sums;
}

}  // namespace torch_sgmcmc
