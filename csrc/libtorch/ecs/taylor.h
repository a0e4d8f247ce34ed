// Taylor expansions of each datum's log-likelihood around a fixed point theta*:
// torch_sgmcmc/ecs/taylor.py in C++, with which go its notes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "torch_sgmcmc/log_likelihood.h"

namespace torch_sgmcmc {

// Maps indices of data to their log-likelihoods.
using DataClosure = std::function<at::Tensor(const at::Tensor&)>;

// What is kept of each datum's Hessian and how it is computed, by its name in a
// state dict.
inline constexpr const char* kConstantForm = "constant";  // no gradient either
inline constexpr const char* kLinearForm = "none";
inline constexpr const char* kPredictorForm = "predictor";
inline constexpr const char* kRankOneForm = "rank one";
inline constexpr const char* kWholeForm = "whole";

// How many rows [d] are kept of each datum.
int64_t KindsOf(const std::string& form);
// Whether the expansions are of second order.
bool HasHessian(const std::string& form);

// All elements in one row.
at::Tensor FlatRow(const std::vector<at::Tensor>& tensors);

// A row's parts in the shapes and types of the parameters.
std::vector<at::Tensor> SplitLike(const at::Tensor& row,
                                  const std::vector<at::Tensor>& params);

// The closure itself if it is a LogLikelihood with rows, else null.
const LogLikelihood* RowsOf(const DataClosure& closure);

// Calls the closure and checks what it returns.
at::Tensor LogLikelihoods(const DataClosure& closure,
                          const at::Tensor& indices);

// Expansions of M data, in float64: q_i = v_i + g_i'δ + δ'H_i δ / 2 with
// δ = theta - theta*.
struct TaylorTerms {
  at::Tensor values;  // [M]
  // [1, M, d], g_i; with Hessians of rank one [2, M, d]; constant [0, M, d]
  at::Tensor slopes;
  at::Tensor scales;    // [M], H_i = scale_i y_i y_i', or undefined
  at::Tensor hessians;  // [M, d, d], or undefined

  // Those of the data with these indices, around the parameters as they are:
  // with Hessians of rank one found by their product with z, or by the rows
  // of a LogLikelihood.
  static TaylorTerms AtPresent(const DataClosure& closure,
                               const std::vector<at::Tensor>& params,
                               const at::Tensor& indices,
                               const std::string& form,
                               const at::Tensor& z);
  // One after the other.
  static TaylorTerms Join(const std::vector<TaylorTerms>& parts);

  std::vector<at::Tensor> fields() const;
  // Those of the data [begin, end), as views.
  TaylorTerms part(int64_t begin, int64_t end) const;

  struct Expansion {
    at::Tensor values;  // q_i at theta* + δ
    at::Tensor bends;   // what pull() needs for that δ
  };
  Expansion expand(const at::Tensor& delta) const;
  // The sum of w_i grad q_i at the δ of expand().
  at::Tensor pull(const at::Tensor& weights, const at::Tensor& bends) const;
};

// The sum over all data of what TaylorTerms has of each.
struct TaylorSums {
  at::Tensor value;
  at::Tensor gradient;  // [d]
  at::Tensor hessian;   // [d, d], or undefined
  std::string form;     // of each datum's Hessian

  // The indices of a chunk of data; undefined after the last.
  using Chunks = std::function<at::Tensor()>;
  // The sums over all chunks, around the parameters as they are, by two random
  // directions; none if the Hessians are not of this form. Of the linear form
  // they are not summed up, of the constant one gradients neither. Throws if
  // the closure's rows are not the derivatives of its outputs.
  static std::optional<TaylorSums> AtPresent(
      const DataClosure& closure,
      const std::vector<at::Tensor>& params,
      const Chunks& next_chunk,
      const std::string& form,
      const at::Tensor& probes);
};

}  // namespace torch_sgmcmc
