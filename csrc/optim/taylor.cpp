#include "optim/taylor.h"

#include <ATen/ATen.h>

#include <limits>

#include "optim/likelihood_graph.h"

namespace torch_sgmcmc {
namespace {

// Parameters from which on each datum's gradient is a backward pass of its own,
// and not each parameter's derivatives of all data (as in Python).
constexpr int64_t kManyParameters = 256;

// 1 / x, and 0 where that is no number of use: for 0 and subnormal numbers.
at::Tensor Inverse(const at::Tensor& x) {
  return at::where(
      x.abs() < std::numeric_limits<double>::min(), 0.0, x.reciprocal());
}

// The closure need not know how to compute nothing.
TaylorTerms TermsOfNothing(const std::string& form, const at::Tensor& z) {
  const int64_t d = z.numel();
  const bool rank_one = form == kRankOneForm;
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
                                   const at::Tensor& z) {
  if (indices.numel() == 0) return TermsOfNothing(form, z);
  if (form == kLinearForm && z.numel() > kManyParameters) {
    const LikelihoodRows data = GradientsByData(closure, params, indices);
    return {data.values.to(at::kDouble),
            data.gradients.to(at::kDouble).unsqueeze(0),
            {},
            {}};
  }
  const LikelihoodGraph graph(closure, params, indices);
  const at::Tensor values = graph.values().detach().to(at::kDouble);
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
    const at::Tensor& probes,
    bool with_hessian) {
  const int64_t d = probes.size(1);
  const auto like = probes.options().dtype(at::kDouble);
  TaylorSums sums{at::zeros({}, like), at::zeros({d}, like), {}, form};
  if (with_hessian) sums.hessian = at::zeros({d, d}, like);
  at::Tensor error = at::zeros({}, like);
  at::Tensor size = at::zeros({}, like);
  const double tolerance = params[0].scalar_type() == at::kDouble ? 1e-6 : 1e-2;
  for (at::Tensor indices = next_chunk(); indices.defined();
       indices = next_chunk()) {
    const LikelihoodGraph graph(closure, params, indices);
    sums.value += graph.values().detach().to(at::kDouble).sum();
    sums.gradient += graph.slope().detach().to(at::kDouble);
    if (!with_hessian) continue;
    if (form != kRankOneForm) {
      sums.hessian += graph.hessian().to(at::kDouble);
      continue;
    }
    const at::Tensor factors =
        graph.hessian_products(probes[0]).to(at::kDouble);
    const at::Tensor scales = Inverse(at::matmul(factors, probes[0]));
    sums.hessian += at::matmul(factors.t() * scales, factors);
    const at::Tensor guess = scales * at::matmul(factors, probes[1]).pow(2);
    const at::Tensor truth = graph.curvatures(probes[1]).to(at::kDouble);
    error += (guess - truth).abs().sum();
    size += truth.abs().sum();
    if (!(error <= size * tolerance).item<bool>()) return std::nullopt;
  }
  return sums;
}

}  // namespace torch_sgmcmc
