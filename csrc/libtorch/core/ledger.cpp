#include "libtorch/core/ledger.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <typeinfo>
#include <utility>

#include "libtorch/core/checks.h"
#include "libtorch/core/nonfinite.h"
#include "libtorch/core/prior.h"
#include "libtorch/core/text.h"

namespace torch_sgmcmc {
namespace {

// So many steps without a gradient, after one with it, are not waited for to
// end.
constexpr int64_t kLong = 20;

}  // namespace

// ---- Moving -----------------------------------------------------------------

Sampler::Sampler(Sampler&& other) noexcept
    : Optimizer(std::move(other)),
      watch_(std::move(other.watch_)),
      prior_means_(std::move(other.prior_means_)),
      ledger_(std::move(other.ledger_)),
      place_(std::move(other.place_)) {
  if (place_ != nullptr) *place_ = this;
}

Sampler& Sampler::operator=(Sampler&& other) noexcept {
  if (this == &other) return *this;
  leave();
  // NOLINTBEGIN(bugprone-use-after-move): torch's part is moved, then ours.
  Optimizer::operator=(std::move(other));
  watch_ = std::move(other.watch_);
  prior_means_ = std::move(other.prior_means_);
  ledger_ = std::move(other.ledger_);
  place_ = std::move(other.place_);
  // NOLINTEND(bugprone-use-after-move)
  if (place_ != nullptr) *place_ = this;
  return *this;
}

Sampler::~Sampler() { leave(); }

// Tells those that refer to it that there is nothing more.
void Sampler::leave() noexcept {
  if (place_ != nullptr) *place_ = nullptr;
}

Sampler& SamplerRef::get() const {
  if (place_ == nullptr || *place_ == nullptr) {
    throw std::logic_error(
        "the sampler that this belongs to has been destroyed");
  }
  return **place_;
}

Sampler::Ledger& Sampler::ledger() const {
  if (ledger_ == nullptr) {
    throw std::logic_error(
        "this sampler was moved from: use the one that has "
        "its parameters now");
  }
  return *ledger_;
}

// ---- Before a step ----------------------------------------------------------

void Sampler::begin_step() {
  throw_what_was_found();
  if (param_groups_.empty()) {
    throw std::runtime_error(std::string(name()) + " has no param groups");
  }
  for (size_t i = 0; i < param_groups_.size(); ++i) complete(i);
  check_numbers();
}

// Takes what a group's options leave open from the sampler's, and what has been
// set late, unless it is refused.
void Sampler::complete(size_t group) {
  check_known(group);
  const auto& kept = param_groups_[group];
  const std::string where = " of group " + std::to_string(group);
  const auto& defaults = static_cast<const SamplerOptions&>(*defaults_);
  const torch::optim::OptimizerOptions& made_of = defaults;
  const auto& own = kept.has_options() ? kept.options() : made_of;
  if (!kept.has_options() || typeid(own) != typeid(made_of)) {
    Invalid("Invalid options: those" + where + " are not of class " + name() +
            "Options");
  }
  SamplerOptions& options = options_of(group);
  if (options.seed_) {
    Invalid("Invalid seed: " + std::to_string(*options.seed_) +
            " in the options" + where + " (" + name() + " has seed " +
            std::to_string(seed()) + "; set it for a sampler to be)");
  }
  if (!options.is_complete_) {
    options.inherit(defaults);
    if (!options.capturable_) options.capturable_ = ledger_->capturable;
    if (!options.nonfinite_) options.nonfinite_ = defaults.nonfinite();
    options.is_complete_ = true;
  }
  if (options.capturable() != ledger_->capturable) {
    const auto shown = [](bool value) { return value ? "true" : "false"; };
    Invalid(std::string("Invalid capturable: ") + shown(options.capturable()) +
            " in the options" + where + " (" + name() + " has " +
            shown(ledger_->capturable) + "; set it for a sampler to be)");
  }
  if (options.chains_with_seeds() != ledger_->progress->chains_with_seeds()) {
    Invalid(
        "Invalid num_chains: " + std::to_string(options.chains_with_seeds()) +
        " in the options" + where + " (" + name() + " has " +
        std::to_string(ledger_->progress->chains_with_seeds()) +
        "; set it for a sampler to be)");
  }
  complete_means(group, options);
}

void Sampler::complete_means(size_t group, SamplerOptions& options) {
  bool& has_means = ledger_->groups[group].has_means;
  const auto& params = param_groups_[group].params();
  if (!options.prior_means_.empty()) {
    const auto means = CopiesOfMeans(options.prior_means_, params);
    options.prior_means_.clear();
    for (size_t i = 0; i < means.size(); ++i) {
      prior_means_[params[i].unsafeGetTensorImpl()] = means[i];
    }
    options.means_are_kept_ = has_means = true;
  }
  if (has_means == options.means_are_kept_) return;
  if (!has_means) {
    Invalid("Invalid prior_mean: the options of group " +
            std::to_string(group) +
            " are of a group with tensors, which are its sampler's (give this "
            "group its own, or a number)");
  }
  if (!options.is_set("prior_mean")) {  // left open
    options.means_are_kept_ = true;
    return;
  }
  for (const at::Tensor& param : params) {
    prior_means_.erase(param.unsafeGetTensorImpl());
  }
  has_means = false;
}

// What is left open is no part of what is seen from outside.
void Sampler::complete_all() const {
  ledger();
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast)
    if (i < ledger_->groups.size()) const_cast<Sampler*>(this)->complete(i);
  }
}

// ---- After a step -----------------------------------------------------------

// Whether these parameters are all that moved in the last step.
bool Sampler::has_moved(const std::vector<Work>& work) const {
  auto known = ledger_->moved.begin();
  for (const Work& lists : work) {
    for (const at::Tensor& param : lists.params) {
      if (known == ledger_->moved.end() ||
          *known++ != param.unsafeGetTensorImpl()) {
        return false;
      }
    }
  }
  return known == ledger_->moved.end();
}

// Note [Steps without a gradient] in torch_sgmcmc/chain/absence.py.
void Sampler::look_for_absences(const std::vector<Work>& work) {
  Ledger::Absences& seen = ledger_->absences;
  ++seen.steps;
  if (has_moved(work) && (!seen.any || seen.said)) return;
  ledger_->moved.clear();
  for (const Work& lists : work) {
    for (const at::Tensor& param : lists.params) {
      ledger_->moved.push_back(param.unsafeGetTensorImpl());
    }
  }
  if (seen.said) return;
  seen.any = false;
  bool returned = false;
  int64_t more = -1;
  std::string first;
  seen.missed.resize(param_groups_.size());
  seen.later.resize(param_groups_.size());
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    const auto& params = param_groups_[g].params();
    seen.missed[g].resize(params.size());
    seen.later[g].resize(params.size());
    for (size_t i = 0; i < params.size(); ++i) {
      int64_t& missed = seen.missed[g][i];
      int64_t& later = seen.later[g][i];
      const bool is_sampled = params[i].requires_grad();
      const bool has_one = params[i].grad().defined();
      if (is_sampled && !has_one) {
        if (seen.steps > missed + 1) ++later;
        ++missed;
        seen.any = true;
      }
      if (later == 0) continue;
      if (++more == 0) {
        first = NameOf(param_groups_, params[i]) + "# in " +
                std::to_string(missed) + " of " + std::to_string(seen.steps) +
                " steps";
      }
      returned = returned || has_one || later >= kLong;
    }
  }
  // Until all have one again, those that are to come are looked at.
  seen.any = seen.any || more >= 0;
  if (!returned) return;
  seen.said = true;
  const std::string others =
      more > 0 ? " (and " + std::to_string(more) + " more)" : "";
  first.replace(first.find('#'), 1, others);
  TORCH_WARN(name(),
             " got no gradient for parameter ",
             first,
             ", and left it out there. That samples another target: num_data "
             "counts its data in each step that it has a gradient in. Call "
             "zero_grad(/*set_to_none=*/false), so that it is zero in the "
             "others, give it a param group with the num_data of its own data, "
             "or sum the losses of all tasks");
}

}  // namespace torch_sgmcmc
