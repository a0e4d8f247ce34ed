// What compiled blocks of steps call on the CPU: the noise of several steps,
// and with the chains as the last dimension products of matrices and MCLMC's
// turn.
#include <string.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "launch/cpu.h"
#include "launch/plan.h"
#include "ops/gaussian.h"
#include "ops/mclmc_turn.h"
#include "ops/sglrw.h"

namespace torch_sgmcmc {

// out[i, j, c] = sum over l of a[i, l, c] b[l, j, c].
struct ChainProduct {
  int64_t rows, inner, columns, chains;
  const float* a;
  int64_t a_row, a_column;
  const float* b;
  int64_t b_row, b_column;
  float* out;
};

}  // namespace torch_sgmcmc

#define SG_EACH_ISA "ops/chain_product_loop.inl"
#include "random/each_isa.inl"

namespace torch_sgmcmc {

// The noise of an update that takes uniforms (Note kTakesUniforms, roles.h).
template <class Real>
class UniformFill : public GaussianFill<Real> {
 public:
  static constexpr bool kUniformNoise = true;
  explicit UniformFill(const GaussianCoefficients& c) : GaussianFill<Real>(c) {}
};

namespace {

constexpr const char* kOp = "noise_steps_";

// From a step's row to the next, in elements; 0 if it does not matter. Throws
// unless it is equal for all tensors, which have equally many rows.
int64_t RowStride(const TensorList& noise) {
  for (const Tensor& tensor : noise) {
    if (tensor.dim() == 0 || tensor.size(0) == 0) {
      Fail(kOp, "noise must have a row for each step");
    }
  }
  const int64_t steps = noise[0].size(0);
  int64_t stride = -1;
  for (const Tensor& tensor : noise) {
    if (tensor.size(0) != steps) {
      Fail(kOp, "noise must have a row for each step");
    }
    if (steps == 1 || tensor.numel() == 0) continue;
    if (stride < 0) stride = tensor.stride(0);
    if (tensor.stride(0) != stride) {
      Fail(kOp, "noise must be parts of one tensor with a row for each step");
    }
  }
  return std::max<int64_t>(stride, 0);
}

// Row s of each tensor gets the noise of step + s. The tensors have equally
// long rows of memory, since they are parts of one array of rows.
void NoiseSteps(TensorList noise, std::vector<int64_t> offsets, int64_t uniform,
                int64_t seed, int64_t step, int64_t num_chains) {
  if (uniform != 0 && uniform != 1) {
    Fail(kOp, "Invalid uniform: ", uniform, " (must be 0 or 1)");
  }
  if (noise.empty()) return;
  const int64_t stride = RowStride(noise);
  const int64_t steps = noise[0].size(0);
  TensorList first;
  for (const Tensor& tensor : noise) {
    first.push_back(torch::stable::select(tensor, 0, 0));
    if (!first.back().is_contiguous()) {
      Fail(kOp, "noise must be contiguous within a row");
    }
  }
  const NoiseStream stream = MakeStream(kOp, seed, step, Purpose::kUpdate);
  MakeStream(kOp, seed, step + steps, Purpose::kUpdate);  // in range, too
  const Plan plan(kOp, {{"noise", Role::kOutput, first}}, offsets,
                  /*num_chains=*/1, {std::nullopt, num_chains});
  const CpuDriver driver(kOp, plan, std::nullopt);
  const GaussianCoefficients one(1.0);
  std::vector<Segment> segments = plan.segments();
  for (int64_t s = 0; s < steps; ++s) {
    NoiseStream now = stream;
    now.step += static_cast<uint64_t>(s);
    if (uniform == 1) {
      driver.Apply<UniformFill>(one, now, segments);
    } else {
      driver.Apply<GaussianFill>(one, now, segments);
    }
    for (Segment& segment : segments) {
      segment.data[0] =
          static_cast<char*>(segment.data[0]) + stride * segment.bytes[0];
    }
  }
}

Tensor MultiplyChainsLast(Tensor a, Tensor b) {
  constexpr const char* kProduct = "chain_product";
  if (a.dim() != 3 || b.dim() != 3 || a.size(1) != b.size(0) ||
      a.size(2) != b.size(2) || a.scalar_type() != ScalarType::Float ||
      b.scalar_type() != ScalarType::Float) {
    Fail(kProduct,
         "a and b must be float32 [rows, inner, chains] and [inner, columns, "
         "chains]");
  }
  if (a.stride(2) != 1 || b.stride(2) != 1) {
    Fail(kProduct, "the chains of a and b must be contiguous");
  }
  Tensor out = torch::stable::new_empty(a, {a.size(0), b.size(1), a.size(2)});
  const ChainProduct product = {a.size(0),
                                a.size(1),
                                b.size(1),
                                a.size(2),
                                static_cast<const float*>(a.data_ptr()),
                                a.stride(0),
                                a.stride(1),
                                static_cast<const float*>(b.data_ptr()),
                                b.stride(0),
                                b.stride(1),
                                static_cast<float*>(out.data_ptr())};
  SG_CALL_ON(ActiveIsa(), MultiplyChains(product));
  return out;
}

// mclmc_sums of [d, K] tensors.
template <class Real>
Tensor ProductsOfChains(const Tensor& grad, const Tensor& refreshment,
                        const Tensor& direction) {
  const int64_t chains = grad.size(1);
  Tensor sums =
      torch::stable::new_zeros(direction, {1, 6, chains}, ScalarType::Double);
  auto* __restrict const out = static_cast<double*>(sums.data_ptr());
  const auto at = [&](const Tensor& t, int64_t i) {
    return static_cast<const Real*>(t.data_ptr()) + i * chains;
  };
  for (int64_t i = 0; i < grad.size(0); ++i) {
    const Real* const gs = at(grad, i);
    const Real* const zs = at(refreshment, i);
    const Real* const us = at(direction, i);
    for (int64_t k = 0; k < chains; ++k) {
      const double g = gs[k];
      const double z = zs[k];
      const double u = us[k];
      out[k] += g * g;
      out[chains + k] += u * g;
      out[2 * chains + k] += u * u;
      out[3 * chains + k] += u * z;
      out[4 * chains + k] += g * z;
      out[5 * chains + k] += z * z;
    }
  }
  return sums;
}

Turn TurnChains(Tensor grad, Tensor refreshment, Tensor direction,
                Tensor energy, Tensor numbers) {
  constexpr const char* kTurn = "chain_turn";
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const ScalarType type =
      grad.defined() ? grad.scalar_type() : ScalarType::Undefined;
  for (const Tensor* tensor : {&grad, &refreshment, &direction}) {
    if (!tensor->defined() || type == ScalarType::Undefined ||
        tensor->dim() != 2 || !tensor->is_contiguous() ||
        tensor->size(0) != grad.size(0) || tensor->size(1) != grad.size(1) ||
        tensor->scalar_type() != type ||
        (type != ScalarType::Float && type != ScalarType::Double)) {
      Fail(kTurn,
           "grad, refreshment and direction must be contiguous float32 or "
           "float64 of one shape [d, K]");
    }
  }
  if (!numbers.defined() || numbers.dim() != 1 || numbers.size(0) != 3 ||
      !numbers.is_contiguous() || numbers.scalar_type() != ScalarType::Double) {
    Fail(kTurn, "numbers must be 3 contiguous float64");
  }
  const auto* const n = static_cast<const double*>(numbers.data_ptr());
  if (!(n[0] >= 0 && n[0] < kInfinity && n[1] >= 0 && n[1] < 1 && n[2] > 0 &&
        n[2] < kInfinity)) {
    Fail(kTurn,
         "numbers must be step_size >= 0, momentum in [0, 1) and scale > 0, "
         "finite");
  }
  const int64_t dimension = grad.size(0);
  if (dimension < 2) Fail(kTurn, "grad must have at least 2 rows");
  const Tensor sums =
      type == ScalarType::Float
          ? ProductsOfChains<float>(grad, refreshment, direction)
          : ProductsOfChains<double>(grad, refreshment, direction);
  return TurnOfSums(kTurn, sums, energy,
                    {n[0], n[1], static_cast<double>(dimension), n[2]},
                    dimension);
}

}  // namespace
}  // namespace torch_sgmcmc

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CPU, m) {
  m.impl("noise_steps_", TORCH_BOX(&torch_sgmcmc::NoiseSteps));
  m.impl("chain_product", TORCH_BOX(&torch_sgmcmc::MultiplyChainsLast));
  m.impl("chain_turn", TORCH_BOX(&torch_sgmcmc::TurnChains));
}
