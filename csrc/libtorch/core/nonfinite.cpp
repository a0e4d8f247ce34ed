#include "libtorch/core/nonfinite.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "libtorch/core/checks.h"
#include "libtorch/core/ledger.h"
#include "libtorch/core/operators.h"
#include "libtorch/core/text.h"

namespace torch_sgmcmc {
namespace {

bool IsAny(const std::vector<Seen>& seen) {
  return std::any_of(seen.begin(), seen.end(), [](const Seen& s) {
    return s.counts.any().item<bool>();
  });
}

bool IsAnyNonfinite(const std::vector<at::Tensor>& tensors) {
  if (tensors.empty()) return false;
  if (tensors[0].is_cpu()) return any_nonfinite(tensors);
  return count_nonfinite(tensors).any().item<bool>();
}

std::string MessageOf(
    const std::string& got,
    const std::vector<Seen>& seen,
    const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  std::string text;
  int64_t more = -1;
  for (const Seen& s : seen) {
    const at::Tensor counts = s.counts.cpu();
    const auto* numbers = counts.const_data_ptr<int64_t>();
    for (size_t i = 0; i < s.params.size(); ++i) {
      const int64_t nans = numbers[2 * i];
      const int64_t infinities = numbers[2 * i + 1];
      if (nans == 0 && infinities == 0) continue;
      if (++more > 0) continue;
      text = got + " a " + s.what +
             " that is not finite: " + std::to_string(nans) + " NaN and " +
             std::to_string(infinities) + " infinite of " +
             std::to_string(s.params[i].numel()) + " elements, for parameter " +
             NameOf(groups, s.params[i]);
    }
  }
  if (more > 0) text += " (and for " + std::to_string(more) + " more)";
  return text +
         ". The step was not made. If losses have grown, the chain has diverged "
         "and needs a smaller lr; where it is rare, nonfinite(\"skip\") leaves "
         "such steps out";
}

}  // namespace

std::string NameOf(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                   const at::Tensor& param) {
  for (size_t g = 0; g < groups.size(); ++g) {
    for (size_t i = 0; i < groups[g].params().size(); ++i) {
      if (groups[g].params()[i].is_same(param)) {
        return std::to_string(i) + " of group " + std::to_string(g) +
               ", of shape " + Shape(param.sizes());
      }
    }
  }
  return "of shape " + Shape(param.sizes());
}

void CheckNonfinite(const SamplerOptions& options) {
  const std::vector<std::string> choices = options.nonfinite_choices();
  const std::string value = options.nonfinite();
  if (std::find(choices.begin(), choices.end(), value) != choices.end()) return;
  std::string wanted;
  for (size_t i = 0; i < choices.size(); ++i) {
    if (i > 0) wanted += i + 1 < choices.size() ? ", " : " or ";
    wanted += Shown(choices[i]);
  }
  Invalid("Invalid nonfinite: " + Shown(value) + " (must be " + wanted + ")");
}

// What to do, for all groups.
std::string Sampler::nonfinite() const {
  std::string choice = options_of(0).nonfinite();
  CheckNonfinite(options_of(0));
  bool equal = true;
  std::string all;
  for (size_t group = 0; group < param_groups_.size(); ++group) {
    const std::string own = options_of(group).nonfinite();
    equal = equal && own == choice;
    all += (all.empty() ? "" : ", ") + Shown(own);
  }
  if (!equal) {
    Invalid("Invalid nonfinite: [" + all +
            "] in the param groups (must be equal: a step is left out as a "
            "whole)");
  }
  return choice;
}

void Sampler::check_finite(const std::vector<Work>& work) {
  watch_->seen.clear();
  std::vector<std::vector<at::Tensor>> grads;
  grads.reserve(work.size());
  for (const Work& lists : work) grads.push_back(lists.grads);
  check_finite(work, grads, "gradient");
}

void Sampler::check_finite(const std::vector<Work>& work,
                           const std::vector<std::vector<at::Tensor>>& tensors,
                           const char* what) {
  const std::string choice = nonfinite();
  if (choice == "allow") return;
  if (work.empty()) return;
  const bool later = looks_later(work);
  if (!later && std::none_of(tensors.begin(), tensors.end(), IsAnyNonfinite)) {
    return;
  }
  if (!later && choice == "skip") throw StepLeftOut();
  std::vector<Seen> seen;
  for (size_t i = 0; i < work.size(); ++i) {
    if (tensors[i].empty()) continue;
    seen.push_back({what, work[i].params, count_nonfinite(tensors[i])});
  }
  if (!later) {
    throw std::runtime_error(
        MessageOf(std::string(name()) + " got", seen, param_groups_));
  }
  for (Seen& s : seen) watch_->seen.push_back(std::move(s));
}

bool Sampler::looks_later(const std::vector<Work>& work) const {
  const c10::Device device = work[0].params[0].device();
  if (!device.is_cuda()) return false;
  if (ledger_->keeps_momenta && leaves_momenta(work)) return false;
  const std::vector<std::string> keys = state_keys();
  const bool keeps_state = !keys.empty() && keys[0] != "master";
  return std::all_of(work.begin(), work.end(), [&](const Work& lists) {
    if (lists.params[0].device() != device) return false;
    return !keeps_state ||
           std::all_of(lists.params.begin(),
                       lists.params.end(),
                       [&](const at::Tensor& param) {
                         return state_.count(param.unsafeGetTensorImpl()) > 0;
                       });
  });
}

// Lets the device decide whether to make the update, if the host has not
// looked.
void Sampler::set_gate(std::vector<Work>& work) {
  const std::vector<Seen> seen = std::exchange(watch_->seen, {});
  if (seen.empty()) return;
  std::vector<at::Tensor> counts;
  counts.reserve(seen.size());
  for (const Seen& s : seen) counts.push_back(s.counts);
  const Count& made = work[0].step;
  std::optional<at::Tensor> device_step;
  if (made.is_on_device()) device_step = made.device;
  const at::Tensor gate = step_or_nothing(
      counts.size() == 1 ? counts[0] : at::cat(counts), made.host, device_step);
  for (Work& lists : work) lists.gate = gate;
  if (device_step) return;
  const c10::Device device = gate.device();
  watch_->choice = work[0].options->nonfinite();
  for (const Seen& s : seen) {
    watch_->pending.push_back(
        {s.what,
         s.params,
         s.counts.to(at::kCPU, s.counts.scalar_type(), /*non_blocking=*/true)});
  }
  watch_->event.reset();
  if (device.is_cuda()) {
    watch_->event.emplace(device.type());
    watch_->event->record(
        c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }
}

void Sampler::leave_out() {
  for (Ledger::Group& group : ledger_->groups) group.num_skipped.add(1);
}

// Takes into account what the last step's device found, if it is yet to be.
void Sampler::catch_up() {
  ledger();  // throws if there is none
  const std::vector<Seen> seen = std::exchange(watch_->pending, {});
  const auto undo = std::exchange(watch_->undo, {});
  if (seen.empty()) return;
  if (watch_->event) watch_->event->synchronize();
  if (!IsAny(seen)) return;
  for (Ledger::Group& group : ledger_->groups) group.step.add(-1);
  for (const auto& [group, momenta] : undo) {
    ledger_->groups[group].records.momenta = momenta;
  }
  if (watch_->choice == "skip") {
    leave_out();
  } else {
    watch_->error = MessageOf(
        std::string(name()) + " got in its last step", seen, param_groups_);
  }
}

// Throws what the last step's device found, once.
void Sampler::throw_what_was_found() {
  catch_up();
  const std::string error = std::exchange(watch_->error, {});
  if (!error.empty()) throw std::runtime_error(error);
}

int64_t Sampler::num_skipped() const {
  // What is yet to come of the last step is a part of what is asked for.
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast)
  const_cast<Sampler*>(this)->catch_up();
  return ledger_->groups.empty() ? 0 : ledger_->groups[0].num_skipped.get();
}

}  // namespace torch_sgmcmc
