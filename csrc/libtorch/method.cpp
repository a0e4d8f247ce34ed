// Calls of operators with a spec: torch_sgmcmc/core/step_plan.py in C++.
#include <algorithm>
#include <functional>
#include <limits>
#include <optional>
#include <stdexcept>

#include "libtorch/operators.h"
#include "libtorch/sampler_impl.h"
#include "ops/registry.h"

namespace torch_sgmcmc {
namespace {

// The lists of an update: parameters, gradients, state, masters.
constexpr size_t kFirstState = 2;

template <class Op>
constexpr bool kUpdates =
    Op::kSpec.noise == Noise::kUpdate&& Op::kSpec.lists[0].role ==
    Role::kParameter;

// A double as an integer, at most the largest int64.
int64_t WholeOf(double number) {
  return number < 0x1p63 ? static_cast<int64_t>(number)
                         : std::numeric_limits<int64_t>::max();
}

template <class Op, Slot kSlot>
auto ArgumentAt(const TensorLists& lists, const NoiseKey& key,
                const UpdateNumbers& numbers) {
  constexpr Kind kKind = kSlot.kind;
  if constexpr (kKind == Kind::kList) {
    if constexpr (kSlot.index + 1 == Op::kSpec.lists.count) {
      static_assert(Op::kSpec.lists[kSlot.index].role == Role::kMaster);
      return SomeTensors(lists.masters);
    } else if constexpr (kSlot.index >= kFirstState) {
      return SomeTensors(lists.state.at(kSlot.index - kFirstState));
    } else {
      return SomeTensors(kSlot.index == 0 ? lists.params : lists.grads);
    }
  } else if constexpr (kKind == Kind::kNumber) {
    return numbers.own[kSlot.index];
  } else if constexpr (kKind == Kind::kInteger) {
    return WholeOf(numbers.own[kSlot.index]);
  } else if constexpr (kKind == Kind::kOffsets) {
    return key.offsets;
  } else if constexpr (kKind == Kind::kSeed) {
    return key.seed;
  } else if constexpr (kKind == Kind::kStep) {
    return key.step;
  } else if constexpr (kKind == Kind::kDeviceStep) {
    return std::cref(key.device_step);
  } else if constexpr (kKind == Kind::kCommon) {
    return numbers.common.*kCommonNumbers[kSlot.index].place;
  } else if constexpr (kKind == Kind::kPriorMeans) {
    return MeansOf(lists.prior_means);
  } else if constexpr (kKind == Kind::kShardRows) {
    return std::nullopt;  // of shards, which C++ has none of
  } else {
    static_assert(kKind == Kind::kNumChains);
    return key.num_chains;
  }
}

// The member of TensorLists that holds a number; null for hyperparameters.
double TensorLists::*FromLists(std::string_view name) {
  if (name == args::kMomentumScale.name) return &TensorLists::momentum_scale;
  if (name == args::kThermostatScale.name) {
    return &TensorLists::thermostat_scale;
  }
  if (name == args::kNoiseEstimate.name) return &TensorLists::noise_estimate;
  return nullptr;
}

template <class Op>
void CallUpdate(const TensorLists& lists, const UpdateNumbers& numbers) {
  constexpr ArgLayout kSlots = ArgLayoutOf(Op::kSpec);
  const NoiseKey key = KeyOf(lists);
  [&]<size_t... kIndex>(std::index_sequence<kIndex...> /*slots*/) {
    RowOperator<Op>()(
        ArgumentAt<Op, kSlots.items[kIndex]>(lists, key, numbers)...);
  }
  (std::make_index_sequence<kSlots.count>());
}

}  // namespace

const OpSpec& OpSpecNamed(std::string_view op) {
  for (const OpSpec* spec : kOpSpecs) {
    if (spec->op == op) return *spec;
  }
  throw std::out_of_range("no operator " + std::string(op));
}

std::vector<std::string> KeysOf(const OpSpec& spec) {
  std::vector<std::string> keys;
  for (const TensorListArg& list : spec.lists) {
    if (list.key != nullptr) keys.emplace_back(list.key);
  }
  return keys;
}

Method::Method(const char* op, const OptionValues& options)
    : op_(op), spec_(OpSpecNamed(op)) {
  AllOperators::ForEach([&](auto each) {
    using Op = typename decltype(each)::type;
    if constexpr (kUpdates<Op>) {
      if (&Op::kSpec == &spec_) call_ = &CallUpdate<Op>;
    }
  });
  const std::vector<std::string> known = options.keys();
  for (const ScalarArg& number : spec_.numbers) {
    const auto found = std::ranges::find(known, number.name);
    from_lists_.push_back(FromLists(number.name));
    auto& place = places_.emplace_back();
    if (found != known.end()) place = found - known.begin();
  }
  for (const CommonNumber& number : kCommonNumbers) {
    common_places_.push_back(options.place_of(number.scalar.name));
  }
}

void Method::update(
    const TensorLists& lists,
    std::initializer_list<std::pair<std::string_view, double>> instead) const {
  UpdateNumbers numbers;
  for (size_t i = 0; i < common_places_.size(); ++i) {
    numbers.common.*kCommonNumbers[i].place =
        lists.options->number_at(common_places_[i]);
  }
  for (size_t i = 0; i < places_.size(); ++i) {
    const auto* const given = std::ranges::find_if(
        instead,
        [&](const auto& each) { return each.first == spec_.numbers[i].name; });
    if (given != instead.end()) {
      numbers.own[i] = given->second;
    } else if (from_lists_[i] != nullptr) {
      numbers.own[i] = lists.*from_lists_[i];
    } else {
      numbers.own[i] = places_[i] ? lists.options->number_at(*places_[i])
                                  : spec_.numbers[i].fallback;
    }
  }
  call_(lists, numbers);
}

// ---- Samplers defined by their specs ----------------------------------------

std::vector<std::string> SamplerImpl::state_keys() const {
  return KeysOf(OpSpecNamed(op_));
}

void SamplerImpl::prepare(TensorLists& lists) {
  for (const TensorListArg& list :
       method_of(op_, *lists.options).spec().lists) {
    if (list.start == Start::kCustom) continue;
    std::vector<at::Tensor*> tensors;
    tensors.reserve(lists.params.size());
    for (const at::Tensor& param : lists.params) {
      tensors.push_back(&own_state_of(param)[list.key]);
    }
    StartState(lists, tensors,
               list.start == Start::kStationary
                   ? start_of_momenta(*lists.options)
                   : list.start);
    auto& all = lists.state.emplace_back();
    all.reserve(tensors.size());
    for (const at::Tensor* tensor : tensors) all.push_back(*tensor);
  }
}

void SamplerImpl::update_by(
    const char* op, const TensorLists& lists,
    std::initializer_list<std::pair<std::string_view, double>> instead) {
  method_of(op, *lists.options).update(lists, instead);
}

// Each operator is looked up once.
const Method& SamplerImpl::method_of(const char* op,
                                     const OptionValues& options) {
  for (const Method& known : methods_) {
    if (known.op() == op) return known;
  }
  return methods_.emplace_back(op, options);
}

}  // namespace torch_sgmcmc
