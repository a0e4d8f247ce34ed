// Noise offsets (Note [Numbers of elements],
// torch_sgmcmc/core/random_state.py), and options of groups.
#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <typeinfo>
#include <vector>

#include "host/parameters.h"
#include "libtorch/checks.h"
#include "libtorch/sampler_impl.h"
#include "random/counter.h"

namespace torch_sgmcmc {
namespace {

std::vector<const void*> ImplsOf(const Tensors& params) {
  std::vector<const void*> impls;
  impls.reserve(params.size());
  for (const at::Tensor& param : params) {
    impls.push_back(param.unsafeGetTensorImpl());
  }
  return impls;
}

bool AreSame(const std::vector<const void*>& impls, const Tensors& params) {
  return std::equal(impls.begin(), impls.end(), params.begin(), params.end(),
                    [](const void* impl, const at::Tensor& param) {
                      return impl == param.unsafeGetTensorImpl();
                    });
}

template <typename... Part>
[[noreturn]] void RefuseOther(const std::string& sampler, const Part&... what) {
  Raise(sampler, ": ", what...,
        " when noise offsets were assigned: make another sampler after "
        "parameters have grown, shrunk or been replaced (further ones come "
        "with add_param_group)");
}

}  // namespace

void CheckNotCapturable(const OptionValues& options) {
  if (!options.is_capturable()) return;
  Invalid("Invalid capturable: true (", options.sampler(),
          " decides on the host, which a CUDA graph cannot)");
}

int64_t SizeOf(const at::Tensor& param, int64_t num_chains) {
  return num_chains > 1 ? param.numel() / num_chains : param.numel();
}

int64_t GroupState::number(const Tensors& all, int64_t num_chains,
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

void GroupState::set_counters(int64_t steps, int64_t skipped, bool capturable,
                              const Tensors& all) {
  step = {steps};
  num_skipped = {skipped};
  if (!capturable || all.empty()) return;
  const auto like = all[0].options().dtype(at::kLong);
  step = {0, at::full({}, steps, like)};
  num_skipped = {0, at::full({}, skipped, like)};
}

// Follows groups that were reordered or removed.
void SamplerImpl::follow_groups() {
  std::vector<GroupState>& known = chain_.groups;
  for (size_t i = 0; i < std::min(known.size(), groups().size()); ++i) {
    const auto& params = groups()[i].params();
    const auto from = known.begin() + static_cast<int64_t>(i);
    const auto found = std::find_if(from, known.end(), [&](const auto& group) {
      return AreSame(group.params, params);
    });
    if (found != known.end()) std::iter_swap(from, found);
  }
  if (known.size() > groups().size()) known.resize(groups().size());
}

// Throws unless parameters have the sizes of their noise offsets.
void SamplerImpl::check_numbers() {
  const bool is_as_before =
      std::ranges::equal(chain_.groups, groups(),
                         [](const GroupState& known, const ParamGroup& group) {
                           return AreSame(known.params, group.params());
                         });
  if (!is_as_before) follow_groups();
  const int64_t chains = chain_.num_chains;
  for (size_t i = 0; i < groups().size(); ++i) {
    check_known(i);
    const GroupState& known = chain_.groups[i];
    const auto& params = groups()[i].params();
    if (params.size() != known.sizes.size()) {
      RefuseOther(name(), "group ", i, " has ", params.size(),
                  " parameters; it had ", known.sizes.size());
    }
    for (size_t j = 0; j < params.size(); ++j) {
      const int64_t size = SizeOf(params[j], chains);
      if (size == known.sizes[j]) continue;
      RefuseOther(name(), "parameter ", j, " of group ", i, " has ", size,
                  " elements; it had ", known.sizes[j]);
    }
  }
  if (is_as_before) return;
  for (size_t i = 0; i < groups().size(); ++i) {
    chain_.groups[i].params = ImplsOf(groups()[i].params());
  }
  parameters_changed();
}

// ---- Before a step ----------------------------------------------------------

void SamplerImpl::begin_step() {
  throw_pending_error();
  if (groups().empty()) {
    Raise(name(), " has no param groups");
  }
  for (size_t i = 0; i < groups().size(); ++i) complete(i);
  check_numbers();
}

// Completes a group's options from the sampler's; refuses late changes.
void SamplerImpl::complete(size_t group) {
  check_known(group);
  const auto& kept = groups()[group];
  const std::string where = " of group " + std::to_string(group);
  const torch::optim::OptimizerOptions& made_of = owner_->defaults();
  const auto& own = kept.has_options() ? kept.options() : made_of;
  if (!kept.has_options() || typeid(own) != typeid(made_of)) {
    Invalid("Invalid options: those", where, " are not of class ", name(),
            "Options");
  }
  OptionValues& options = options_of(group);
  if (options.seed) {
    Invalid("Invalid seed: ", *options.seed, " in the options", where, " (",
            name(), " has seed ", seed(),
            "; give it to the sampler's constructor)");
  }
  if (!options.is_complete) {
    options.inherit(defaults());
    options.is_complete = true;
  }
  if (options.is_capturable() != chain_.capturable) {
    const auto shown = [](bool value) { return value ? "true" : "false"; };
    Invalid("Invalid capturable: ", shown(options.is_capturable()),
            " in the options", where, " (", name(), " has ",
            shown(chain_.capturable),
            "; give it to the sampler's constructor)");
  }
  if (chains_with_seeds(options) != chain_.num_chains) {
    Invalid("Invalid num_chains: ", chains_with_seeds(options),
            " in the options", where, " (", name(), " has ", chain_.num_chains,
            "; give it to the sampler's constructor)");
  }
  complete_means(group, options);
}

// Takes the tensors of options to itself.
void SamplerImpl::keep_means(OptionValues& options, const Tensors& params) {
  const auto means = CopiesOfMeans(options.prior_means, params);
  options.prior_means.clear();
  for (size_t i = 0; i < means.size(); ++i) {
    prior_means_[params[i].unsafeGetTensorImpl()] = means[i];
  }
  options.means_are_kept = true;
}

void SamplerImpl::complete_means(size_t group, OptionValues& options) {
  bool& has_means = chain_.groups[group].has_means;
  const auto& params = groups()[group].params();
  if (!options.prior_means.empty()) {
    keep_means(options, params);
    has_means = true;
    means_changed();
  }
  if (has_means == options.means_are_kept) return;
  if (!has_means) {
    Invalid("Invalid prior_mean: the options of group ", group,
            " are of a group with tensors, which are its sampler's (give this "
            "group its own, or a number)");
  }
  if (!options.is_set("prior_mean")) {  // left open
    options.means_are_kept = true;
    return;
  }
  for (const at::Tensor& param : params) {
    prior_means_.erase(param.unsafeGetTensorImpl());
  }
  has_means = false;
  means_changed();
}

void SamplerImpl::complete_all() const {
  for (size_t i = 0; i < groups().size(); ++i) {
    // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast)
    if (i < chain_.groups.size()) const_cast<SamplerImpl*>(this)->complete(i);
  }
}

}  // namespace torch_sgmcmc
