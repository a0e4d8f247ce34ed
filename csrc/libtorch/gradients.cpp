// The finite check of gradients.
#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include "libtorch/checks.h"
#include "libtorch/operators.h"
#include "libtorch/sampler_impl.h"

namespace torch_sgmcmc {
namespace {

// Without it, only tests on a GPU would run deferred checks.
#ifdef TORCH_SGMCMC_TESTS
std::atomic<bool> defers_on_cpu = false;
bool Defers(const c10::Device& device) {
  return device.is_cuda() || defers_on_cpu;
}
#else
bool Defers(const c10::Device& device) { return device.is_cuda(); }
#endif

bool IsAnyNonfinite(const Tensors& tensors) {
  if (tensors[0].is_cpu()) return any_nonfinite(tensors);
  return count_nonfinite(tensors).any().item<bool>();
}

std::string MessageOf(const std::string& got,
                      const std::vector<FiniteCheck>& seen,
                      const std::vector<ParamGroup>& groups) {
  std::string text;
  int64_t more = -1;
  for (const FiniteCheck& s : seen) {
    const at::Tensor counts = s.counts.cpu();
    const auto* numbers = counts.const_data_ptr<int64_t>();
    for (size_t i = 0; i < s.params.size(); ++i) {
      const int64_t nans = numbers[2 * i];
      const int64_t infinities = numbers[2 * i + 1];
      if (nans == 0 && infinities == 0) continue;
      if (++more > 0) continue;
      text =
          c10::str(got, " a gradient that is not finite: ", nans, " NaN and ",
                   infinities, " infinite of ", s.params[i].numel(),
                   " elements, for parameter ", NameOf(groups, s.params[i]));
    }
  }
  if (more > 0) text += " (and for " + std::to_string(more) + " more)";
  return text +
         ". The step was not made. If losses have grown, the chain has diverged "
         "and needs a smaller lr; where it is rare, nonfinite(\"skip\") skips "
         "such steps";
}

}  // namespace

#ifdef TORCH_SGMCMC_TESTS
void DeferFiniteChecksOnCpu(bool value) { defers_on_cpu = value; }
#endif

std::string NameOf(const std::vector<ParamGroup>& groups,
                   const at::Tensor& param) {
  for (size_t g = 0; g < groups.size(); ++g) {
    for (size_t i = 0; i < groups[g].params().size(); ++i) {
      if (groups[g].params()[i].is_same(param)) {
        return c10::str(i, " of group ", g, ", of shape ",
                        Shape(param.sizes()));
      }
    }
  }
  return "of shape " + Shape(param.sizes());
}

std::string SamplerImpl::nonfinite() const {
  check_equal({"nonfinite"}, "a step is skipped as a whole");
  return options_of(0).nonfinite_choice();
}

void SamplerImpl::check_finite(const std::vector<TensorLists>& lists) {
  finite_check_.asked.clear();
  const std::string choice = nonfinite();
  if (choice == "ignore" || lists.empty()) return;
  const bool later = is_check_deferred(lists);
  const auto has_nonfinite = [](const TensorLists& each) {
    return IsAnyNonfinite(each.grads);
  };
  if (!later && std::ranges::none_of(lists, has_nonfinite)) return;
  if (!later && choice == "skip") throw StepSkipped();
  std::vector<FiniteCheck> seen;
  seen.reserve(lists.size());
  for (const TensorLists& each : lists) {
    seen.push_back({each.params, count_nonfinite(each.grads)});
  }
  if (!later) {
    Raise(MessageOf(std::string(name()) + " got", seen, groups()));
  }
  finite_check_.asked = std::move(seen);
}

bool SamplerImpl::is_check_deferred(
    const std::vector<TensorLists>& lists) const {
  const c10::Device device = lists[0].params[0].device();
  if (!Defers(device)) return false;
  if (keeps_momenta_ && leaves_momenta(lists)) return false;
  const std::vector<std::string> keys = state_keys();
  const bool keeps_state = !keys.empty() && keys[0] != "master";
  return std::all_of(lists.begin(), lists.end(), [&](const TensorLists& each) {
    if (each.params[0].device() != device) return false;
    return !keeps_state ||
           std::all_of(each.params.begin(), each.params.end(),
                       [&](const at::Tensor& param) {
                         return states().count(param.unsafeGetTensorImpl()) > 0;
                       });
  });
}

// Sets the gate of updates whose check is deferred.
void SamplerImpl::set_gate(std::vector<TensorLists>& lists) {
  const std::vector<FiniteCheck> seen = std::exchange(finite_check_.asked, {});
  if (seen.empty()) return;
  Tensors counts;
  counts.reserve(seen.size());
  for (const FiniteCheck& s : seen) counts.push_back(s.counts);
  const Count& made = lists[0].step;
  std::optional<at::Tensor> device_step;
  if (made.is_on_device()) device_step = made.device;
  const at::Tensor gate = step_or_nothing(
      counts.size() == 1 ? counts[0] : at::cat(counts), made.host, device_step);
  for (TensorLists& each : lists) each.gate = gate;
  if (device_step) return;
  const c10::Device device = gate.device();
  finite_check_.choice = lists[0].options->nonfinite_choice();
  for (const FiniteCheck& s : seen) {
    finite_check_.pending.push_back(
        {s.params,
         s.counts.to(at::kCPU, s.counts.scalar_type(), /*non_blocking=*/true)});
  }
  finite_check_.event.reset();
  if (device.is_cuda()) {
    finite_check_.event.emplace(device.type());
    finite_check_.event->record(
        c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }
}

void SamplerImpl::skip_step() {
  for (GroupState& group : chain_.groups) group.num_skipped.add(1);
}

// Reads the last step's deferred check.
void SamplerImpl::catch_up() {
  const std::vector<FiniteCheck> seen =
      std::exchange(finite_check_.pending, {});
  const auto undo = std::exchange(finite_check_.undo, {});
  if (seen.empty()) return;
  if (finite_check_.event) finite_check_.event->synchronize();
  const auto is_any = [](const FiniteCheck& s) {
    return s.counts.any().item<bool>();
  };
  if (std::ranges::none_of(seen, is_any)) return;
  for (GroupState& group : chain_.groups) group.step.add(-1);
  for (const auto& [group, momenta] : undo) {
    chain_.groups[group].records.momenta = momenta;
  }
  if (finite_check_.choice == "skip") {
    skip_step();
  } else {
    finite_check_.error = MessageOf(
        std::string(name()) + " got in its last step", seen, groups());
  }
}

// Throws the error of the last step's deferred check, once.
void SamplerImpl::throw_pending_error() {
  catch_up();
  const std::string error = std::exchange(finite_check_.error, {});
  if (!error.empty()) Raise(error);
}

int64_t SamplerImpl::num_skipped() const {
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast)
  const_cast<SamplerImpl*>(this)->catch_up();
  return chain_.groups.empty() ? 0 : chain_.groups[0].num_skipped.get();
}

}  // namespace torch_sgmcmc
