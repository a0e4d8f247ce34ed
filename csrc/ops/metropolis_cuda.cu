#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "launch/cuda.cuh"
#include "ops/metropolis_op.h"

namespace torch_sgmcmc {
namespace {

__global__ void __launch_bounds__(kThreads)
    DecideKernel(const double* log_ratios, int64_t chains,
                 const NoiseStream stream, uint64_t proposal, bool* accepted) {
  const int64_t k = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (k < chains) {
    accepted[k] = IndexChainAccepts(log_ratios[k], stream,
                                    static_cast<uint64_t>(k), proposal);
  }
}

unsigned BlocksFor(int64_t threads) {
  return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

Tensor Decide(Tensor log_ratios, int64_t proposal, int64_t purpose,
              int64_t seed, int64_t step) {
  const NoiseStream stream =
      MetropolisDecisions(log_ratios, proposal, purpose, seed, step);
  const int64_t chains = log_ratios.numel();
  const int32_t device = log_ratios.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  Tensor result =
      torch::stable::new_empty(log_ratios, {chains}, ScalarType::Bool);
  if (chains == 0) return result;
  DecideKernel<<<BlocksFor(chains), kThreads, 0, CurrentStream(device)>>>(
      static_cast<const double*>(log_ratios.data_ptr()), chains, stream,
      static_cast<uint64_t>(proposal), static_cast<bool*>(result.data_ptr()));
  CheckCuda(cudaGetLastError(), "kernel launch failed");
  return result;
}

template <class Word>
__global__ void __launch_bounds__(kThreads)
    SelectKernel(Word* tensors, const Word* others, const bool* chosen,
                 int64_t numel, int64_t row) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < numel && chosen[i / row]) tensors[i] = others[i];
}

template <class Word>
void SelectRows(const Segment& s, const bool* chosen, int64_t chains,
                cudaStream_t stream) {
  SelectKernel<<<BlocksFor(s.numel), kThreads, 0, stream>>>(
      static_cast<Word*>(s.data[0]), static_cast<const Word*>(s.data[1]),
      chosen, s.numel, s.numel / chains);
  CheckCuda(cudaGetLastError(), "kernel launch failed");
}

void Select(TensorList tensors, TensorList others, Tensor chosen) {
  Plan plan = ChainSelection(tensors, others, chosen);
  const torch::stable::accelerator::DeviceGuard guard(plan.device_index());
  const cudaStream_t stream = CurrentStream(plan.device_index());
  const bool* yes = static_cast<const bool*>(chosen.data_ptr());
  for (const Segment& s : plan.segments()) {
    switch (s.bytes[0]) {
      case 8:
        SelectRows<uint64_t>(s, yes, chosen.numel(), stream);
        break;
      case 4:
        SelectRows<uint32_t>(s, yes, chosen.numel(), stream);
        break;
      default:
        SelectRows<uint16_t>(s, yes, chosen.numel(), stream);
    }
  }
  plan.Finish();
}

}  // namespace
}  // namespace torch_sgmcmc

STABLE_TORCH_LIBRARY_IMPL(torch_sgmcmc, CUDA, m) {
  m.impl("metropolis_decide", TORCH_BOX(&torch_sgmcmc::Decide));
  m.impl("select_chains_", TORCH_BOX(&torch_sgmcmc::Select));
}
