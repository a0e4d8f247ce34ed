// What HMC-ECS keeps in a state dict beside its hyperparameters and counts.
#include <ATen/ATen.h>
#include <ATen/core/List.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "optim/checks.h"
#include "optim/ecs_target.h"
#include "optim/ecs_warmup.h"
#include "optim/state_values.h"
#include "torch_sgmcmc/hmcecs.h"

namespace torch_sgmcmc {
namespace {

c10::IValue OrNone(const at::Tensor& tensor) {
  return tensor.defined() ? c10::IValue(tensor) : c10::IValue();
}

StateDict Written(const ECSAnchor& anchor) {
  return {{"anchor", anchor.theta},
          {"num_data", anchor.num_data},
          {"value", anchor.sums.value},
          {"gradient", anchor.sums.gradient},
          {"hessian", OrNone(anchor.sums.hessian)},
          {"form", anchor.sums.form},
          {"gate", anchor.sums.gate},
          {"whitening", OrNone(anchor.whitening)}};
}

ECSAnchor ReadAnchor(const StateDict& dict, c10::Device device) {
  ECSAnchor anchor;
  anchor.sums.form = ValueAt<std::string>(dict, "form");
  if (anchor.sums.form != kLinearForm && anchor.sums.form != kPredictorForm &&
      anchor.sums.form != kRankOneForm && anchor.sums.form != kWholeForm) {
    Invalid("Invalid state_dict: its control variates are of the form " +
            Repr(anchor.sums.form) + " (Gauss-Newton's are Python's alone)");
  }
  anchor.sums.gate = ValueAt<int64_t>(dict, "gate");
  anchor.theta = TensorAt(dict, "anchor", device);
  anchor.num_data = ValueAt<int64_t>(dict, "num_data");
  anchor.sums.value = TensorAt(dict, "value", device);
  anchor.sums.gradient = TensorAt(dict, "gradient", device);
  anchor.sums.hessian = TensorOrNone("hessian", dict.at("hessian"), device);
  anchor.whitening = TensorOrNone("whitening", dict.at("whitening"), device);
  return anchor;
}

StateDict Written(const ExpandedSubsample& subsample) {
  const SubsampleLayout& layout = subsample.layout;
  const std::vector<c10::IValue> sizes = {layout.num_data,
                                          layout.num_cells,
                                          layout.num_blocks,
                                          layout.batch_size,
                                          layout.poisson,
                                          layout.seed};
  std::vector<c10::IValue> terms;
  for (const at::Tensor& field : subsample.terms.fields()) {
    terms.push_back(OrNone(field));
  }
  return {{"layout", ListOfValues(sizes)},
          {"counts", ListOfValues(subsample.counts)},
          {"indices", subsample.indices},
          {"terms", ListOfValues(terms)}};
}

ExpandedSubsample ReadSubsample(const StateDict& dict, c10::Device device) {
  const std::vector<c10::IValue> sizes = ListAt(dict, "layout");
  const std::vector<c10::IValue> terms = ListAt(dict, "terms");
  if (sizes.size() != 6 || terms.size() != 4) {
    Invalid("Invalid state_dict: its subsample has a layout of " +
            std::to_string(sizes.size()) + " numbers and terms of " +
            std::to_string(terms.size()) + " tensors (must be 6 and 4)");
  }
  ExpandedSubsample result;
  SubsampleLayout& layout = result.layout;
  detail::FromValue("layout", sizes[0], layout.num_data);
  detail::FromValue("layout", sizes[1], layout.num_cells);
  detail::FromValue("layout", sizes[2], layout.num_blocks);
  detail::FromValue("layout", sizes[3], layout.batch_size);
  detail::FromValue("layout", sizes[4], layout.poisson);
  detail::FromValue("layout", sizes[5], layout.seed);
  for (const c10::IValue& count : ListAt(dict, "counts")) {
    detail::FromValue("counts", count, result.counts.emplace_back());
  }
  result.indices = TensorAt(dict, "indices", device);
  result.terms = {TensorOrNone("terms", terms[0], device),
                  TensorOrNone("terms", terms[1], device),
                  TensorOrNone("terms", terms[2], device),
                  TensorOrNone("terms", terms[3], device)};
  return result;
}

}  // namespace

void HMCECS::write_common(StateDict& state) const {
  if (anchor() == nullptr) return;
  state.set("control_variates", Written(*anchor_));
  if (subsample_ != nullptr) state.set("subsample", Written(*subsample_));
  if (warmup_ != nullptr) state.set("warmup", warmup_->save());
}

std::function<void()> HMCECS::read_common(const StateDict& state) {
  const std::vector<at::Tensor> params = all_params();
  const c10::Device device = params[0].device();
  std::shared_ptr<const ECSAnchor> saved_anchor;
  std::shared_ptr<const ExpandedSubsample> saved_subsample;
  if (state.contains("control_variates")) {
    saved_anchor = std::make_shared<const ECSAnchor>(
        ReadAnchor(state.at("control_variates"), device));
    int64_t size = 0;
    for (const at::Tensor& param : params) size += param.numel();
    if (saved_anchor->theta.numel() != size) {
      Invalid("Invalid state_dict: its control variates are those of " +
              std::to_string(saved_anchor->theta.numel()) +
              " parameters, expected " + std::to_string(size));
    }
  }
  if (state.contains("subsample")) {
    saved_subsample = std::make_shared<const ExpandedSubsample>(
        ReadSubsample(state.at("subsample"), device));
  }
  std::shared_ptr<const ECSWarmup> saved_warmup;
  if (state.contains("warmup")) {
    saved_warmup = std::make_shared<const ECSWarmup>(
        ECSWarmup::Load(state.at("warmup"), device));
  }
  // With theta* rounded the sums would not be its.
  if (saved_anchor != nullptr &&
      !at::equal(
          FlatRow(SplitLike(saved_anchor->theta, params)).to(at::kDouble),
          saved_anchor->theta)) {
    saved_anchor = nullptr;
    saved_subsample = nullptr;
  }
  return [this, saved_anchor, saved_subsample, saved_warmup] {
    anchor_ = saved_anchor;
    subsample_ = saved_subsample;
    warmup_ = saved_warmup;
    present_ = nullptr;
    proposals_ = nullptr;
  };
}

}  // namespace torch_sgmcmc
