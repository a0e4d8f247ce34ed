// Whose elements are which in the noise stream: Note [Numbers of elements] in
// ledger.h.
#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/counter.h"
#include "libtorch/core/checks.h"
#include "libtorch/core/ledger.h"
#include "libtorch/core/parameters.h"
#include "libtorch/core/state_checks.h"
#include "libtorch/core/text.h"

namespace torch_sgmcmc {
namespace {

std::vector<const void*> ImplsOf(const std::vector<at::Tensor>& params) {
  std::vector<const void*> impls;
  impls.reserve(params.size());
  for (const at::Tensor& param : params) {
    impls.push_back(param.unsafeGetTensorImpl());
  }
  return impls;
}

bool AreSame(const std::vector<const void*>& impls,
             const std::vector<at::Tensor>& params) {
  return std::equal(impls.begin(),
                    impls.end(),
                    params.begin(),
                    params.end(),
                    [](const void* impl, const at::Tensor& param) {
                      return impl == param.unsafeGetTensorImpl();
                    });
}

[[noreturn]] void RefuseOther(const std::string& sampler,
                              const std::string& what) {
  throw std::runtime_error(
      sampler + " got " + what +
      ": make another sampler after parameters have grown, shrunk or been "
      "replaced (further ones come with add_param_group)");
}

}  // namespace

int64_t NextOffset(int64_t offset, int64_t size) {
  return (offset + size + kNoiseBlock - 1) / kNoiseBlock * kNoiseBlock;
}

int64_t SizeOf(const at::Tensor& param, int64_t num_chains) {
  return num_chains > 1 ? param.numel() / num_chains : param.numel();
}

int64_t Sampler::Ledger::Group::number(const std::vector<at::Tensor>& all,
                                       int64_t num_chains,
                                       int64_t begin) {
  params = ImplsOf(all);
  offsets.clear();
  sizes.clear();
  for (const at::Tensor& param : all) {
    offsets.push_back(begin);
    sizes.push_back(SizeOf(param, num_chains));
    begin = NextOffset(begin, sizes.back());
  }
  return begin;
}

void Sampler::Ledger::Group::set_counters(int64_t steps,
                                          int64_t skipped,
                                          bool capturable,
                                          const std::vector<at::Tensor>& all) {
  step = {steps};
  num_skipped = {skipped};
  if (!capturable || all.empty()) return;
  const auto like = all[0].options().dtype(at::kLong);
  step = {0, at::full({}, steps, like)};
  num_skipped = {0, at::full({}, skipped, like)};
}

// Groups may have been put in another order, or taken out.
void Sampler::follow_groups() {
  std::vector<Ledger::Group>& known = ledger_->groups;
  for (size_t i = 0; i < std::min(known.size(), param_groups_.size()); ++i) {
    const auto& params = param_groups_[i].params();
    const auto from = known.begin() + static_cast<int64_t>(i);
    const auto found = std::find_if(from, known.end(), [&](const auto& group) {
      return AreSame(group.params, params);
    });
    if (found != known.end()) std::iter_swap(from, found);
  }
  if (known.size() > param_groups_.size()) known.resize(param_groups_.size());
}

// Throws unless the parameters are as they were numbered.
void Sampler::check_numbers() {
  const auto are_followed = [&] {
    if (ledger_->groups.size() != param_groups_.size()) return false;
    for (size_t i = 0; i < param_groups_.size(); ++i) {
      if (!AreSame(ledger_->groups[i].params, param_groups_[i].params())) {
        return false;
      }
    }
    return true;
  };
  const bool is_as_before = are_followed();
  if (!is_as_before) follow_groups();
  const int64_t chains = ledger_->progress->chains_with_seeds();
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    check_known(i);
    const Ledger::Group& known = ledger_->groups[i];
    const auto& params = param_groups_[i].params();
    const std::string group = std::to_string(i);
    if (params.size() != known.sizes.size()) {
      RefuseOther(name(),
                  std::to_string(params.size()) + " parameters in group " +
                      group + ", whose noise is numbered for " +
                      std::to_string(known.sizes.size()));
    }
    for (size_t j = 0; j < params.size(); ++j) {
      const int64_t size = SizeOf(params[j], chains);
      if (size == known.sizes[j]) continue;
      RefuseOther(name(),
                  "a parameter of " + std::to_string(size) +
                      " elements, number " + std::to_string(j) + " of group " +
                      group + ", whose noise is numbered for " +
                      std::to_string(known.sizes[j]));
    }
  }
  if (is_as_before) return;
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    ledger_->groups[i].params = ImplsOf(param_groups_[i].params());
  }
  parameters_changed();
}

// Throws unless each parameter has a saved range of its own.
void Sampler::check_saved(const Ledger& saved) {
  std::vector<std::pair<int64_t, int64_t>> ranges;
  for (size_t i = 0; i < saved.groups.size(); ++i) {
    const Ledger::Group& group = saved.groups[i];
    const std::string where = "param group " + std::to_string(i);
    const auto& ours = group.sizes;
    if (group.offsets.size() != ours.size()) {
      Invalid("Invalid state_dict: " + where + " has " +
              std::to_string(group.offsets.size()) + " offsets for " +
              std::to_string(ours.size()) + " parameters");
    }
    for (size_t j = 0; j < ours.size(); ++j) {
      const int64_t offset = group.offsets[j];
      CheckCount("offsets", offset);
      if (offset % kNoiseBlock != 0) {
        Invalid("Invalid offsets: " + std::to_string(offset) + " in " + where +
                " (must be multiples of " + std::to_string(kNoiseBlock) + ")");
      }
      if (ours[j] > 0) ranges.emplace_back(offset, NextOffset(offset, ours[j]));
    }
  }
  const int64_t next = saved.next_offset;
  CheckCount("next_offset", next);
  if (next % kNoiseBlock != 0) {
    Invalid("Invalid next_offset: " + std::to_string(next) +
            " (must be a multiple of " + std::to_string(kNoiseBlock) + ")");
  }
  std::sort(ranges.begin(), ranges.end());
  for (size_t i = 0; i < ranges.size(); ++i) {
    const int64_t following =
        i + 1 < ranges.size() ? ranges[i + 1].first : next;
    if (ranges[i].second <= following) continue;
    Invalid("Invalid offsets: the range [" + std::to_string(ranges[i].first) +
            ", " + std::to_string(ranges[i].second) + ") reaches beyond " +
            std::to_string(following) +
            " (each parameter needs one of its own, before next_offset = " +
            std::to_string(next) + ")");
  }
}

}  // namespace torch_sgmcmc
