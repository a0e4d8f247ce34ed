#include "libtorch/ecs/warmup.h"

#include <ATen/ATen.h>

#include <string>

#include "host/as_begun.h"
#include "host/ecs_schedule.h"
#include "libtorch/core/checks.h"
#include "libtorch/core/state_checks.h"
#include "libtorch/core/state_values.h"

namespace torch_sgmcmc {

void ECSWarmup::check(int64_t now_steps, const HMCECSWarmup& settings) const {
  const auto check_argument = [](const char* name, auto now, auto begun) {
    CheckAsBegun(name, now, begun, "; set_anchor() gives it up");
  };
  check_argument("steps", now_steps, steps);
  check_argument(
      "target_acceptance", settings.target_acceptance, target_acceptance);
  check_argument("anchor_every", settings.anchor_every, anchor_every);
  check_argument("target_variance", settings.target_variance, target_variance);
}

StateDict ECSWarmup::save() const {
  const StateDict arguments = {
      {"steps", steps},
      {"target_acceptance", target_acceptance},
      {"anchor_every", anchor_every},
      {"target_variance",
       target_variance ? c10::IValue(*target_variance) : c10::IValue()}};
  std::vector<c10::IValue> rows;
  for (const ECSDraw& draw : draws) {
    rows.push_back(ListOfValues(std::vector<c10::IValue>{
        draw.theta, draw.variance, draw.mean, draw.lowest}));
  }
  return {{"arguments", arguments},
          {"done", done},
          {"adaptation", ListOfValues(adaptation.state())},
          {"draws", ListOfValues(rows)}};
}

ECSWarmup ECSWarmup::Load(const StateDict& saved,
                          int64_t size,
                          c10::Device device) {
  const StateDict arguments = saved.at("arguments");
  std::vector<double> numbers;
  detail::FromValue("adaptation", saved.at("adaptation"), numbers);
  ECSWarmup warmup{ValueAt<int64_t>(arguments, "steps"),
                   ValueAt<double>(arguments, "target_acceptance"),
                   ValueAt<int64_t>(arguments, "anchor_every"),
                   ValueAt<std::optional<double>>(arguments, "target_variance"),
                   ValueAt<int64_t>(saved, "done"),
                   DualAveraging(numbers),
                   {}};
  CheckInteger("done", warmup.done);
  for (const c10::IValue& row : ListAt(saved, "draws")) {
    const std::vector<c10::IValue> draw =
        row.isList() ? row.toList().vec() : std::vector<c10::IValue>();
    if (draw.size() != 4) {
      Invalid(
          "Invalid state_dict: a draw of its warm-up is not a list of 4 "
          "elements");
    }
    ECSDraw& read = warmup.draws.emplace_back();
    CheckTensor("a draw of its warm-up", draw[0], {size}, at::kDouble);
    read.theta = draw[0].toTensor().detach().to(device);
    detail::FromValue("draws", draw[1], read.variance);
    detail::FromValue("draws", draw[2], read.mean);
    detail::FromValue("draws", draw[3], read.lowest);
  }
  return warmup;
}

std::vector<ECSDraw> LateDraws(const std::vector<ECSDraw>& draws) {
  const auto first = static_cast<std::ptrdiff_t>(FirstLate(draws.size()));
  return {draws.begin() + first, draws.end()};
}

}  // namespace torch_sgmcmc
