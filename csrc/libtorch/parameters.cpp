#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "libtorch/checks.h"
#include "libtorch/tensor_lists.h"

namespace torch_sgmcmc {
namespace {

struct Span {
  std::string device;
  intptr_t begin;
  intptr_t end;
  size_t group;
  size_t number;  // in the group
  at::Tensor param;
};

intptr_t Address(const at::Tensor& param) {
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-reinterpret-cast)
  return reinterpret_cast<intptr_t>(param.const_data_ptr());
}

// The number of elements between the first in memory and the last, inclusive.
int64_t Extent(const at::Tensor& param) {
  int64_t extent = 1;
  for (int64_t i = 0; i < param.dim(); ++i) {
    extent += (param.size(i) - 1) * param.stride(i);
  }
  return extent;
}

// The address of each byte.
at::Tensor BytesOf(const at::Tensor& param) {
  const auto size = static_cast<int64_t>(param.element_size());
  const at::TensorOptions integers(at::kLong);
  const at::Tensor elements = at::arange(Extent(param), integers)
                                  .as_strided(param.sizes(), param.strides())
                                  .reshape({-1, 1});
  return (elements * size + at::arange(size, integers)).flatten() +
         Address(param);
}

// The places of the first two equal numbers; empty if all differ.
std::vector<int64_t> FirstTwoEqual(const at::Tensor& numbers) {
  const auto [sorted, order] = at::sort(numbers);
  const at::Tensor equal = sorted.diff().eq(0).nonzero();
  if (equal.numel() == 0) return {};
  const auto first = equal.min().item<int64_t>();
  return {order[first].item<int64_t>(), order[first + 1].item<int64_t>()};
}

// Throws if two of the spans [begin, end) share a byte; columns of a matrix,
// for example, interleave without sharing any.
void CheckCluster(const std::vector<Span>& spans, size_t begin, size_t end) {
  if (end - begin < 2) return;
  std::vector<at::Tensor> bytes;
  for (size_t i = begin; i < end; ++i) {
    bytes.push_back(BytesOf(spans[i].param));
  }
  std::vector<std::pair<size_t, size_t>> owners;
  for (int64_t place : FirstTwoEqual(at::cat(bytes))) {
    size_t i = 0;
    while (place >= bytes[i].numel()) place -= bytes[i++].numel();
    owners.emplace_back(spans[begin + i].group, spans[begin + i].number);
  }
  if (owners.empty()) return;
  std::sort(owners.begin(), owners.end());
  const auto text = [](const std::pair<size_t, size_t>& at) {
    return "number " + std::to_string(at.second) + " of group " +
           std::to_string(at.first);
  };
  Invalid("Invalid parameters: ", text(owners[0]), " and ", text(owners[1]),
          " overlap in memory (each must have its own)");
}

}  // namespace

bool MayRepeat(const at::Tensor& param) {
  if (param.numel() == 0) return false;
  std::vector<std::pair<int64_t, int64_t>> dims;
  for (int64_t i = 0; i < param.dim(); ++i) {
    if (param.size(i) > 1) dims.emplace_back(param.stride(i), param.size(i));
  }
  std::sort(dims.begin(), dims.end());
  int64_t extent = 1;
  for (const auto& [stride, size] : dims) {
    if (stride < extent) return true;
    extent += (size - 1) * stride;
  }
  return false;
}

void CheckParameter(const char* sampler, const at::Tensor& param,
                    const std::string& place) {
  const std::string cannot =
      std::string("Invalid parameter: ") + sampler + " cannot sample ";
  if (!param.defined()) Invalid(cannot, "an undefined Tensor");
  if (param.layout() != at::kStrided || param.is_nested()) {
    Invalid(cannot, "the layout ",
            (param.is_nested() ? "nested" : LayoutName(param.layout())),
            " (must be torch::kStrided)");
  }
  switch (param.scalar_type()) {
    case at::kFloat:
    case at::kDouble:
    case at::kBFloat16:
    case at::kHalf:
      break;
    default:
      Invalid(cannot, DtypeName(param.scalar_type()), place,
              " (must be torch::kFloat, kDouble, kBFloat16 or kHalf; a complex "
              "parameter can be kept as torch::view_as_real of it)");
  }
  if (!param.is_cpu() && !param.is_cuda()) {
    Invalid(cannot, "on the device ", param.device().str(),
            " (must be cpu or cuda; a module on meta has no numbers before "
            "to_empty() and its initialisation)");
  }
  if (param.is_neg()) {
    Invalid(cannot, "a negative view (take resolve_neg() of it)");
  }
  if (!param.is_leaf()) Invalid("can't optimize a non-leaf Tensor");
  if (!MayRepeat(param) || FirstTwoEqual(BytesOf(param)).empty()) return;
  Invalid(cannot,
          "an expanded parameter (several elements share memory): shape ",
          Shape(param.sizes()), ", strides ", Shape(param.strides()));
}

void CheckChains(const at::Tensor& param,
                 const std::optional<int64_t>& num_chains) {
  if (!num_chains) return;
  if (param.dim() == 0 || param.size(0) != *num_chains) {
    Invalid("Invalid parameter: shape ", Shape(param.sizes()),
            " (must have a leading dimension of num_chains = ", *num_chains,
            ")");
  }
}

void CheckMemory(const std::vector<std::vector<at::Tensor>>& groups) {
  std::vector<Span> spans;
  for (size_t i = 0; i < groups.size(); ++i) {
    for (size_t j = 0; j < groups[i].size(); ++j) {
      const at::Tensor& param = groups[i][j];
      if (param.numel() == 0) continue;
      const intptr_t begin = Address(param);
      const auto size = static_cast<int64_t>(param.element_size());
      spans.push_back({param.device().str(), begin,
                       begin + Extent(param) * size, i, j, param});
    }
  }
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) {
    return std::tie(a.device, a.begin) < std::tie(b.device, b.begin);
  });
  size_t begin = 0;
  intptr_t furthest = 0;
  for (size_t i = 0; i < spans.size(); ++i) {
    if (spans[i].device != spans[begin].device || spans[i].begin >= furthest) {
      CheckCluster(spans, begin, i);
      begin = i;
      furthest = spans[i].end;
    }
    furthest = std::max(furthest, spans[i].end);
  }
  CheckCluster(spans, begin, spans.size());
}

}  // namespace torch_sgmcmc
