// What HMC-ECS keeps in a state dict beside its hyperparameters and counts.
#include <ATen/ATen.h>
#include <ATen/core/List.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "libtorch/core/checks.h"
#include "libtorch/core/state_checks.h"
#include "libtorch/core/state_values.h"
#include "libtorch/core/text.h"
#include "libtorch/ecs/sampling.h"
#include "libtorch/ecs/target.h"
#include "libtorch/ecs/warmup.h"
#include "torch_sgmcmc/hmcecs.h"

namespace torch_sgmcmc {
namespace {

constexpr int64_t kMaxIndices = int64_t{1} << 62;

StateDict Written(const ECSAnchor& anchor) {
  return {{"anchor", anchor.theta},
          {"num_data", anchor.num_data},
          {"value", anchor.sums.value},
          {"gradient", anchor.sums.gradient},
          {"hessian", OrNone(anchor.sums.hessian)},
          {"form", anchor.sums.form},
          {"whitening", OrNone(anchor.whitening)}};
}

// Throws unless it is a dict with these keys.
StateDict Need(const char* what,
               const c10::IValue& value,
               const std::vector<std::string>& keys) {
  if (!value.isGenericDict()) {
    Invalid(std::string("Invalid state_dict: ") + what + " is a " +
            KindOf(value) + " (must be a dict)");
  }
  StateDict dict = value;
  std::string missing;
  for (const std::string& key : keys) {  // in alphabetical order
    if (!dict.contains(key)) missing += (missing.empty() ? "" : ", ") + key;
  }
  if (!missing.empty()) {
    Invalid(std::string("Invalid state_dict: its ") + what + " lacks " +
            missing);
  }
  return dict;
}

at::Tensor Double(const char* what,
                  const c10::IValue& value,
                  c10::IntArrayRef shape,
                  c10::Device device) {
  CheckTensor(what, value, shape, at::kDouble);
  return value.toTensor().detach().to(device);
}

at::Tensor Optional(const char* what,
                    const c10::IValue& value,
                    bool wanted,
                    c10::IntArrayRef shape,
                    c10::Device device) {
  if (wanted) return Double(what, value, shape, device);
  if (!value.isNone()) {
    Invalid(std::string("Invalid state_dict: ") + what + " is a " +
            KindOf(value) + " (must be none)");
  }
  return {};
}

std::vector<c10::IValue> ListOfSize(const char* what,
                                    const c10::IValue& value,
                                    size_t size) {
  if (!value.isList() || value.toListRef().size() != size) {
    Invalid(std::string("Invalid state_dict: ") + what + " is not a list of " +
            std::to_string(size) + " elements");
  }
  return value.toList().vec();
}

// That of d parameters.
ECSAnchor ReadAnchor(const c10::IValue& value, int64_t d, c10::Device device) {
  const StateDict dict = Need("control_variates",
                              value,
                              {"anchor",
                               "form",
                               "gradient",
                               "hessian",
                               "num_data",
                               "value",
                               "whitening"});
  ECSAnchor anchor;
  anchor.sums.form = ValueAt<std::string>(dict, "form");
  const std::string& form = anchor.sums.form;
  if (form != kConstantForm && form != kLinearForm && form != kPredictorForm &&
      form != kRankOneForm && form != kWholeForm) {
    Invalid("Invalid state_dict: its control variates are of the form " +
            Shown(form) + " (Gauss-Newton's are Python's alone)");
  }
  const c10::IValue theta = dict.at("anchor");
  if (theta.isTensor() && theta.toTensor().dim() == 1 &&
      theta.toTensor().numel() != d) {
    Invalid("Invalid state_dict: its control variates are those of " +
            std::to_string(theta.toTensor().numel()) +
            " parameters, expected " + std::to_string(d));
  }
  anchor.theta = Double("anchor", theta, {d}, device);
  anchor.num_data = ValueAt<int64_t>(dict, "num_data");
  CheckInteger("num_data", anchor.num_data, 1);
  anchor.sums.value = Double("value", dict.at("value"), {}, device);
  anchor.sums.gradient = Double("gradient", dict.at("gradient"), {d}, device);
  const std::vector<int64_t> square = {d, d};
  anchor.sums.hessian =
      Optional("hessian", dict.at("hessian"), HasHessian(form), square, device);
  const c10::IValue whitening = dict.at("whitening");
  const bool matrix = whitening.isTensor() && whitening.toTensor().dim() == 2;
  anchor.whitening = Optional("whitening",
                              whitening,
                              !whitening.isNone(),
                              matrix ? square : std::vector<int64_t>{d},
                              device);
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

ExpandedSubsample ReadSubsample(const c10::IValue& value,
                                const std::string& form,
                                int64_t d,
                                c10::Device device) {
  const StateDict dict =
      Need("subsample", value, {"counts", "indices", "layout", "terms"});
  const auto sizes = ListOfSize("layout", dict.at("layout"), 6);
  ExpandedSubsample result;
  SubsampleLayout& layout = result.layout;
  detail::FromValue("num_data", sizes[0], layout.num_data);
  CheckInteger("num_data", layout.num_data, 1);
  detail::FromValue("num_cells", sizes[1], layout.num_cells);
  CheckInteger("num_cells", layout.num_cells, 1);
  detail::FromValue("num_blocks", sizes[2], layout.num_blocks);
  CheckInteger("num_blocks", layout.num_blocks, 1);
  detail::FromValue("batch_size", sizes[3], layout.batch_size);
  CheckInteger("batch_size", layout.batch_size, 1);
  detail::FromValue("poisson", sizes[4], layout.poisson);
  detail::FromValue("seed", sizes[5], layout.seed);
  int64_t m = 0;
  for (const c10::IValue& count :
       ListOfSize("counts",
                  dict.at("counts"),
                  static_cast<size_t>(layout.num_cells))) {
    detail::FromValue("counts", count, result.counts.emplace_back());
    CheckCount("counts", result.counts.back());
    if (result.counts.back() > (kMaxIndices - m) / layout.batch_size) {
      Invalid("Invalid counts: their sum times the batch size is above 2^62");
    }
    m += layout.batch_size * result.counts.back();
  }
  CheckTensor("indices", dict.at("indices"), {m}, at::kLong);
  result.indices = dict.at("indices").toTensor().to(device);
  if (m > 0 && (result.indices.min().item<int64_t>() < 0 ||
                result.indices.max().item<int64_t>() >= layout.num_data)) {
    Invalid("Invalid state_dict: indices of its subsample are not in [0, " +
            std::to_string(layout.num_data) + ")");
  }
  const auto terms = ListOfSize("terms", dict.at("terms"), 4);
  const int64_t kinds = KindsOf(form);
  result.terms = {
      Double("values", terms[0], {m}, device),
      Double("slopes", terms[1], {kinds, m, d}, device),
      Optional("scales", terms[2], kinds == 2, {m}, device),
      Optional("hessians", terms[3], form == kWholeForm, {m, d, d}, device)};
  return result;
}

}  // namespace

void HMCECS::write_common(StateDict& state) const {
  if (anchor_ != nullptr) state.set("control_variates", Written(*anchor_));
  if (subsample_ != nullptr) state.set("subsample", Written(*subsample_));
  if (warmup_ != nullptr) state.set("warmup", warmup_->save());
  if (sampling_ != nullptr) {
    state.set("sampling", StateDict{{"weights", sampling_->weights}});
  }
}

std::vector<std::string> HMCECS::common_keys() const {
  return {"control_variates", "subsample", "warmup", "sampling"};
}

std::function<void()> HMCECS::read_common(const StateDict& state) {
  const std::vector<at::Tensor> params = all_params();
  // All groups may be empty so far.
  const c10::Device device = params.empty() ? at::kCPU : params[0].device();
  int64_t size = 0;
  for (const at::Tensor& param : params) size += param.numel();
  std::shared_ptr<const ECSSampling> saved_sampling;
  if (state.contains("sampling")) {
    const c10::IValue weights =
        Need("sampling", state.at("sampling"), {"weights"}).at("weights");
    const int64_t number = weights.isTensor() ? weights.toTensor().numel() : 0;
    saved_sampling =
        ECSSampling::Of(Double("weights", weights, {number}, device));
  }
  std::shared_ptr<const ECSAnchor> saved_anchor;
  std::shared_ptr<const ExpandedSubsample> saved_subsample;
  if (state.contains("control_variates")) {
    saved_anchor = std::make_shared<const ECSAnchor>(
        ReadAnchor(state.at("control_variates"), size, device));
  }
  for (const char* key : {"subsample", "warmup"}) {
    if (state.contains(key) && saved_anchor == nullptr) {
      Invalid(std::string("Invalid state_dict: it has a ") + key +
              " without control_variates");
    }
  }
  if (state.contains("subsample")) {
    ExpandedSubsample read = ReadSubsample(
        state.at("subsample"), saved_anchor->sums.form, size, device);
    if (saved_sampling != nullptr) read.layout.weights = saved_sampling->law;
    saved_subsample =
        std::make_shared<const ExpandedSubsample>(std::move(read));
  }
  std::shared_ptr<const ECSWarmup> saved_warmup;
  if (state.contains("warmup")) {
    saved_warmup = std::make_shared<const ECSWarmup>(
        ECSWarmup::Load(Need("warmup",
                             state.at("warmup"),
                             {"adaptation", "arguments", "done", "draws"}),
                        size,
                        device));
  }
  // With theta* rounded the sums would not be its.
  if (saved_anchor != nullptr &&
      !at::equal(
          FlatRow(SplitLike(saved_anchor->theta, params)).to(at::kDouble),
          saved_anchor->theta)) {
    saved_anchor = nullptr;
    saved_subsample = nullptr;
    saved_warmup = nullptr;
  }
  return [this, saved_sampling, saved_anchor, saved_subsample, saved_warmup] {
    sampling_ = saved_sampling;
    anchor_ = saved_anchor;
    subsample_ = saved_subsample;
    warmup_ = saved_warmup;
    present_ = nullptr;
    proposals_ = nullptr;
  };
}

}  // namespace torch_sgmcmc
