// torch_sgmcmc._C: host-side algorithms and constants, without any torch type.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "host/draws.h"
#include "host/index_chain.h"
#include "host/minibatch.h"
#include "host/parameters.h"
#include "host/settings.h"
#include "ops/op_spec.h"
#include "random/counter.h"
#include "random/isa.h"
#include "random/portable_noise.h"

namespace py = pybind11;

namespace torch_sgmcmc {
namespace {

// Each hyperparameter's name, kind, default, range, whether None is allowed,
// and words.
py::list Settings(const std::string& sampler) {
  constexpr const char* kKinds[] = {"real", "whole", "flag", "word"};
  py::list rows;
  for (const Setting& row : SettingsOf(sampler)) {
    py::list words;
    for (const char* word : row.words) {
      if (word != nullptr) words.append(word);
    }
    rows.append(py::make_tuple(row.name, kKinds[static_cast<int>(row.kind)],
                               row.fallback, row.low, row.high, row.low_open,
                               row.optional, py::tuple(words)));
  }
  return rows;
}

// Device, address, element size, sizes and strides.
using Memory = std::tuple<std::string, int64_t, int64_t, std::vector<int64_t>,
                          std::vector<int64_t>>;

// The memory of int64 numbers.
py::bytearray BytesOf(const std::vector<int64_t>& numbers) {
  return {reinterpret_cast<const char*>(numbers.data()),
          numbers.size() * sizeof(int64_t)};
}

py::dict AsDict(const ScalarArg& number) {
  const Range range = RangeOf(number.domain);
  py::dict item;
  item["name"] = number.name;
  item["is_integer"] = IsInteger(number.domain);
  item["low"] = range.low;
  item["high"] = range.high;
  item["low_open"] = range.low_open;
  item["default"] = number.fallback;
  return item;
}

py::dict AsDict(const OpSpec& spec) {
  constexpr const char* kStarts[] = {"", "zeros", "stationary"};
  py::list lists;
  for (const TensorListArg& list : spec.lists) {
    py::dict item;
    item["name"] = list.name;
    item["is_written"] = IsWritten(list.role);
    item["is_master"] = list.role == Role::kMaster;
    item["is_in_arithmetic_type"] = IsInArithmeticType(list.role);
    item["key"] = list.key == nullptr ? "" : list.key;
    item["start"] = kStarts[static_cast<int>(list.start)];
    lists.append(item);
  }
  py::list numbers;
  for (const ScalarArg& number : spec.numbers) numbers.append(AsDict(number));
  py::list common;
  for (const CommonNumber& number : kCommonNumbers) {
    if (Has(spec, number)) common.append(AsDict(number.scalar));
  }
  py::dict result;
  result["op"] = spec.op;
  result["lists"] = lists;
  result["numbers"] = numbers;
  result["has_noise"] = spec.noise != Noise::kNone;
  result["common"] = common;
  result["has_prior_mean"] = spec.has_prior_mean;
  result["sums"] = spec.sums;
  return result;
}

}  // namespace

void BindBouncy(py::module_& m);
void BindPlanGuard(py::module_& m);

}  // namespace torch_sgmcmc

PYBIND11_MODULE(_C, m) {
  using namespace torch_sgmcmc;  // NOLINT(google-build-using-namespace)
  m.doc() = "Host-side algorithms of torch_sgmcmc, in C++.";

  m.attr("NOISE_BLOCK") = kNoiseBlock;
  m.attr("VARIANCE_DECAY") = kVarianceDecay;
  m.attr("MIN_GRADIENTS") = kMinGradients;
  m.def("settings", &Settings, py::arg("sampler"));
  py::dict purposes;
  purposes["UPDATE"] = static_cast<int>(Purpose::kUpdate);
  purposes["MOMENTUM"] = static_cast<int>(Purpose::kMomentum);
  purposes["PRECISION"] = static_cast<int>(Purpose::kPrecision);
  purposes["INDEX_CHAIN"] = static_cast<int>(Purpose::kIndexChain);
  purposes["PROBE"] = static_cast<int>(Purpose::kProbe);
  purposes["METROPOLIS"] = static_cast<int>(Purpose::kMetropolis);
  purposes["BOUNCE_CLOCK"] = static_cast<int>(Purpose::kBounceClock);
  purposes["REFRESHMENT"] = static_cast<int>(Purpose::kRefreshment);
  purposes["MINIBATCH"] = static_cast<int>(Purpose::kMinibatch);
  purposes["SUBSAMPLE"] = static_cast<int>(Purpose::kSubsample);
  purposes["SUBSAMPLE_BLOCK"] = static_cast<int>(Purpose::kSubsampleBlock);
  purposes["POISSON"] = static_cast<int>(Purpose::kPoisson);
  purposes["SEED"] = static_cast<int>(Purpose::kSeed);
  purposes["PRIOR"] = static_cast<int>(Purpose::kPrior);
  m.attr("Purpose") = py::module_::import("enum").attr("IntEnum")(
      "Purpose", purposes, py::arg("module") = m.attr("__name__"));

  m.def(
      "isa", [] { return IsaName(ActiveIsa()); },
      "The instruction set of the CPU loops: portable, avx2 or avx512.");
  m.def(
      "compiler",
#if defined(__clang__)
      [] { return __VERSION__; },
#else
      [] { return "GCC " __VERSION__; },
#endif
      "The compiler of this module.");

  m.def(
      "philox4x32",
      [](const std::array<uint32_t, 4>& counter,
         const std::array<uint32_t, 2>& key) {
        const uint32_t c[4] = {counter[0], counter[1], counter[2], counter[3]};
        uint32_t out[4];
        portable::PhiloxBlock(c, static_cast<uint64_t>(key[1]) << 32 | key[0],
                              out);
        return std::array<uint32_t, 4>{out[0], out[1], out[2], out[3]};
      },
      py::arg("counter"), py::arg("key"),
      "One block of Philox4x32-10 (Salmon et al. 2011).");

  m.def("fold_in", &FoldIn,
        "The seed of a stream: 64 bits of Philox, a pure function.");

  m.def(
      "gamma",
      [](double shape, int64_t seed, uint64_t step, uint64_t element) {
        return DrawGamma(shape, KeyedStream(seed, step, Purpose::kPrecision),
                         element);
      },
      py::arg("shape"), py::kw_only(), py::arg("seed"), py::arg("step"),
      py::arg("element"),
      "One Gamma(shape, 1) variate, a pure function of its arguments.");

  m.def(
      "index_chain_accepts",
      [](double log_ratio, int64_t seed, uint64_t step, uint64_t proposal) {
        return IndexChainAccepts(log_ratio,
                                 KeyedStream(seed, step, Purpose::kIndexChain),
                                 /*chain=*/0, proposal);
      },
      py::arg("log_ratio"), py::kw_only(), py::arg("seed"), py::arg("step"),
      py::arg("proposal"),
      "Whether EWSG's index chain takes a proposed minibatch: with probability "
      "min(1, exp(log_ratio)), a pure function of the arguments.");
  m.def("equal_running", &EqualRunning, py::arg("before"), py::arg("equal"),
        py::arg("zero"), py::kw_only(), py::arg("hint"), py::arg("off"),
        "Of EWSG's minibatches (csrc/host/index_chain.h).");
  m.def("ratio", &Ratio);

  m.def(
      "draw_below",
      [](uint64_t bound, int64_t count, uint32_t purpose, int64_t seed,
         uint64_t step, uint64_t element) {
        std::vector<int64_t> numbers;
        for (int64_t i = 0; i < count; ++i) {
          numbers.push_back(static_cast<int64_t>(DrawBelow(
              bound, {static_cast<uint64_t>(seed), step, purpose}, element++)));
        }
        return BytesOf(numbers);
      },
      py::arg("bound"), py::arg("count"), py::kw_only(), py::arg("purpose"),
      py::arg("seed"), py::arg("step"), py::arg("element"),
      "The memory of int64 numbers, uniform in [0, bound), of elements from "
      "the given one on.");

  m.def(
      "minibatches",
      [](int64_t num_data, int64_t batch_size, int64_t count, bool replacement,
         int64_t seed, uint64_t step, int64_t num_replicas, int64_t rank) {
        return BytesOf(
            DrawMinibatches(num_data, batch_size, count, replacement,
                            KeyedStream(seed, step, Purpose::kMinibatch),
                            {num_replicas, rank}));
      },
      py::arg("num_data"), py::arg("batch_size"), py::kw_only(),
      py::arg("count"), py::arg("replacement"), py::arg("seed"),
      py::arg("step"), py::arg("num_replicas"), py::arg("rank"),
      "The memory of int64[count, batch_size / num_replicas]: a rank's share of "
      "uniform minibatches of the steps from the given one on, each a pure "
      "function of the arguments.");

  m.def(
      "check_share",
      [](int64_t batch_size, int64_t num_replicas, int64_t rank) {
        CheckShare(batch_size, {num_replicas, rank});
      },
      "Raises unless ranks can share minibatches (csrc/host/minibatch.h).");

  m.def("may_repeat", &MayRepeat<std::vector<int64_t>>, py::arg("sizes"),
        py::arg("strides"),
        "Whether elements of a tensor with these strides may share memory.");
  m.def(
      "find_overlap",
      [](const std::vector<Memory>& parameters) {
        std::vector<ParameterMemory> memories;
        memories.reserve(parameters.size());
        for (const auto& [device, address, element_size, sizes, strides] :
             parameters) {
          memories.push_back({device, address, element_size, sizes, strides});
        }
        return FindOverlap(memories);
      },
      "The indices of two parameters that share a byte, or of one twice, of "
      "(device, address, element size, sizes, strides) each; or None.");
  m.def("next_offset", &NextOffset, py::arg("offset"), py::arg("size"),
        "Where the noise of the next parameter begins.");
  m.def("check_ranges", &CheckRanges, py::arg("offsets"), py::arg("sizes"),
        py::arg("next_offset"),
        "Raises unless groups' parameters have separate ranges "
        "(csrc/host/parameters.h).");

  BindBouncy(m);
  BindPlanGuard(m);
  m.def(
      "op_specs",
      [] {
        py::list specs;
        for (const OpSpec* spec : OpSpecs()) {
          specs.append(AsDict(*spec));
        }
        return specs;
      },
      "What operators on lists of tensors are (csrc/ops/op_spec.h): names of "
      "lists and numbers, the numbers' ranges and defaults (NaN: none), and "
      "the like of those that operators have in common.");
}
