// torch_sgmcmc._C: host-side algorithms and constants, without any torch type.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <vector>

#include "core/counter.h"
#include "core/isa.h"
#include "core/portable_noise.h"
#include "host/gamma.h"
#include "host/index_chain.h"
#include "host/minibatch.h"

namespace py = pybind11;
using torch_sgmcmc::Purpose;

namespace {

// The memory of int64 numbers, which Python can take for an array of its own.
py::bytearray Memory(const std::vector<int64_t>& numbers) {
  return {reinterpret_cast<const char*>(numbers.data()),
          numbers.size() * sizeof(int64_t)};
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Host-side algorithms of torch_sgmcmc, in C++.";

  m.attr("NOISE_BLOCK") = torch_sgmcmc::kNoiseBlock;
  m.attr("PURPOSE_UPDATE") = static_cast<int>(Purpose::kUpdate);
  m.attr("PURPOSE_MOMENTUM") = static_cast<int>(Purpose::kMomentum);
  m.attr("PURPOSE_PRECISION") = static_cast<int>(Purpose::kPrecision);
  m.attr("PURPOSE_INDEX_CHAIN") = static_cast<int>(Purpose::kIndexChain);
  m.attr("PURPOSE_PROBE") = static_cast<int>(Purpose::kProbe);
  m.attr("PURPOSE_MINIBATCH") = static_cast<int>(Purpose::kMinibatch);
  m.attr("PURPOSE_STRATA") = static_cast<int>(Purpose::kStrata);

  m.def(
      "isa",
      [] { return torch_sgmcmc::IsaName(torch_sgmcmc::ActiveIsa()); },
      "The instruction set of the CPU loops: portable, avx2 or avx512.");

  m.def(
      "philox4x32",
      [](const std::array<uint32_t, 4>& counter,
         const std::array<uint32_t, 2>& key) {
        const uint32_t c[4] = {counter[0], counter[1], counter[2], counter[3]};
        uint32_t out[4];
        torch_sgmcmc::portable::PhiloxBlock(
            c, static_cast<uint64_t>(key[1]) << 32 | key[0], out);
        return std::array<uint32_t, 4>{out[0], out[1], out[2], out[3]};
      },
      py::arg("counter"),
      py::arg("key"),
      "One block of Philox4x32-10 (Salmon et al. 2011).");

  m.def(
      "gamma",
      [](double shape, int64_t seed, uint64_t step, uint64_t element) {
        return torch_sgmcmc::DrawGamma(
            shape,
            {static_cast<uint64_t>(seed),
             step,
             static_cast<uint32_t>(Purpose::kPrecision)},
            element);
      },
      py::arg("shape"),
      py::kw_only(),
      py::arg("seed"),
      py::arg("step"),
      py::arg("element"),
      "One Gamma(shape, 1) variate, a pure function of its arguments.");

  m.def(
      "index_chain_accepts",
      [](double log_ratio, int64_t seed, uint64_t step, uint64_t proposal) {
        return torch_sgmcmc::IndexChainAccepts(
            log_ratio,
            {static_cast<uint64_t>(seed),
             step,
             static_cast<uint32_t>(Purpose::kIndexChain)},
            /*chain=*/0,
            proposal);
      },
      py::arg("log_ratio"),
      py::kw_only(),
      py::arg("seed"),
      py::arg("step"),
      py::arg("proposal"),
      "Whether EWSG's index chain takes a proposed minibatch: with probability "
      "min(1, exp(log_ratio)), a pure function of the arguments.");

  m.def(
      "minibatches",
      [](int64_t num_data,
         int64_t batch_size,
         int64_t count,
         bool replacement,
         int64_t seed,
         uint64_t step) {
        return Memory(torch_sgmcmc::DrawMinibatches(
            num_data,
            batch_size,
            count,
            replacement,
            {static_cast<uint64_t>(seed),
             step,
             static_cast<uint32_t>(Purpose::kMinibatch)}));
      },
      py::arg("num_data"),
      py::arg("batch_size"),
      py::kw_only(),
      py::arg("count"),
      py::arg("replacement"),
      py::arg("seed"),
      py::arg("step"),
      "The memory of int64[count, batch_size]: uniform minibatches of the "
      "steps from the given one on, each a pure function of the arguments.");

  m.def(
      "stratified_minibatches",
      [](const std::vector<int64_t>& ends,
         int64_t batch_size,
         int64_t count,
         int64_t seed,
         uint64_t step) {
        return Memory(torch_sgmcmc::DrawStratifiedMinibatches(
            ends,
            batch_size,
            count,
            {static_cast<uint64_t>(seed),
             step,
             static_cast<uint32_t>(Purpose::kStrata)}));
      },
      py::arg("ends"),
      py::arg("batch_size"),
      py::kw_only(),
      py::arg("count"),
      py::arg("seed"),
      py::arg("step"),
      "The same of stratified minibatches, for data in the order of their "
      "strata, of which the k-th ends before ends[k].");
}
