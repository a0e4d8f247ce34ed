#include "libtorch/core/parameters.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "libtorch/core/checks.h"

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

// The number of elements from the first in memory to the last.
int64_t Extent(const at::Tensor& param) {
  int64_t extent = 1;
  for (int64_t i = 0; i < param.dim(); ++i) {
    extent += (param.size(i) - 1) * param.stride(i);
  }
  return extent;
}

// The addresses of all bytes, and whose they are.
using Bytes = std::vector<std::pair<intptr_t, size_t>>;

void AppendBytes(const at::Tensor& param, size_t owner, Bytes& bytes) {
  std::vector<int64_t> offsets = {0};
  for (int64_t i = 0; i < param.dim(); ++i) {
    std::vector<int64_t> longer;
    for (const int64_t offset : offsets) {
      for (int64_t j = 0; j < param.size(i); ++j) {
        longer.push_back(offset + j * param.stride(i));
      }
    }
    offsets = std::move(longer);
  }
  const auto size = static_cast<int64_t>(param.element_size());
  for (const int64_t offset : offsets) {
    for (int64_t byte = 0; byte < size; ++byte) {
      bytes.emplace_back(Address(param) + offset * size + byte, owner);
    }
  }
}

// The owners of a byte that there is twice.
std::optional<std::pair<size_t, size_t>> SharedBy(Bytes bytes) {
  std::sort(bytes.begin(), bytes.end());
  for (size_t i = 1; i < bytes.size(); ++i) {
    if (bytes[i].first == bytes[i - 1].first) {
      return std::pair(bytes[i - 1].second, bytes[i].second);
    }
  }
  return std::nullopt;
}

// Throws if any of the spans [begin, end), which overlap as wholes, overlap.
// Columns of a matrix, say, interleave without sharing anything.
void CheckCluster(const std::vector<Span>& spans, size_t begin, size_t end) {
  if (end - begin < 2) return;
  Bytes bytes;
  for (size_t i = begin; i < end; ++i) AppendBytes(spans[i].param, i, bytes);
  const auto shared = SharedBy(std::move(bytes));
  if (!shared) return;
  const auto place = [&](size_t i) {
    return std::pair(spans[i].group, spans[i].number);
  };
  const auto text = [](const std::pair<size_t, size_t>& at) {
    return "number " + std::to_string(at.second) + " of group " +
           std::to_string(at.first);
  };
  const auto [first, second] =
      std::minmax({place(shared->first), place(shared->second)});
  Invalid("Invalid parameters: " + text(first) + " and " + text(second) +
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

void CheckParameter(const char* sampler,
                    const at::Tensor& param,
                    const std::string& place) {
  const std::string cannot =
      std::string("Invalid parameter: ") + sampler + " cannot sample ";
  if (!param.defined()) Invalid(cannot + "an undefined Tensor");
  if (param.layout() != at::kStrided || param.is_nested()) {
    Invalid(cannot + "the layout " +
            (param.is_nested() ? "nested" : LayoutName(param.layout())) +
            " (must be torch::kStrided)");
  }
  switch (param.scalar_type()) {
    case at::kFloat:
    case at::kDouble:
    case at::kBFloat16:
    case at::kHalf:
      break;
    default:
      Invalid(cannot + DtypeName(param.scalar_type()) + place +
              " (must be torch::kFloat, kDouble, kBFloat16 or kHalf; a complex "
              "parameter can be kept as torch::view_as_real of it)");
  }
  if (!param.is_cpu() && !param.is_cuda()) {
    Invalid(cannot + "on the device " + param.device().str() +
            " (must be cpu or cuda; a module on meta has no numbers before "
            "to_empty() and its initialisation)");
  }
  if (param.is_neg()) {
    Invalid(cannot + "a negative view (take resolve_neg() of it)");
  }
  if (!param.is_leaf()) Invalid("can't optimize a non-leaf Tensor");
  if (!MayRepeat(param)) return;
  Bytes bytes;
  AppendBytes(param, 0, bytes);
  if (!SharedBy(std::move(bytes))) return;
  Invalid(cannot +
          "an expanded parameter (several elements share memory): shape " +
          Shape(param.sizes()) + ", strides " + Shape(param.strides()));
}

void CheckChains(const at::Tensor& param,
                 const std::optional<int64_t>& num_chains) {
  if (!num_chains) return;
  if (param.dim() == 0 || param.size(0) != *num_chains) {
    Invalid("Invalid parameter: shape " + Shape(param.sizes()) +
            " (must have a leading dimension of num_chains = " +
            std::to_string(*num_chains) + ")");
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
      spans.push_back({param.device().str(),
                       begin,
                       begin + Extent(param) * size,
                       i,
                       j,
                       param});
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
