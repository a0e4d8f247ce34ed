#include "libtorch/core/method.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <optional>
#include <stdexcept>
#include <type_traits>

#include "libtorch/core/ledger.h"
#include "libtorch/core/momentum.h"
#include "libtorch/core/noise_key.h"
#include "libtorch/core/operators.h"
#include "libtorch/core/prior.h"
#include "methods/rows.h"

namespace torch_sgmcmc {
namespace {

// Lists of a row that updates: the parameters, their gradients, state, masters.
constexpr size_t kFirstState = 2;

template <class Op>
constexpr bool kUpdates =
    Op::kRow.noise == Noise::kUpdate&& Op::kRow.lists[0].role ==
    Role::kParameter;

// An integer that was a double on its way: beyond 2^63 the largest there is.
int64_t WholeOf(double number) {
  return number < 0x1p63 ? static_cast<int64_t>(number)
                         : std::numeric_limits<int64_t>::max();
}

// An argument of an update, by its slot.
template <class Op, Slot kSlot>
auto ArgumentAt(const Work& work,
                const NoiseKey& key,
                const UpdateNumbers& numbers) {
  constexpr Kind kKind = kSlot.kind;
  if constexpr (kKind == Kind::kList) {
    if constexpr (kSlot.index + 1 == Op::kRow.lists.count) {
      static_assert(Op::kRow.lists[kSlot.index].role == Role::kMaster);
      return SomeTensors(work.masters);
    } else if constexpr (kSlot.index >= kFirstState) {
      return SomeTensors(work.state.at(kSlot.index - kFirstState));
    } else {
      return SomeTensors(kSlot.index == 0 ? work.params : work.grads);
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
    return MeansOf(work.prior_means);
  } else if constexpr (kKind == Kind::kRows) {
    return std::nullopt;  // of shards, which C++ has none of
  } else {
    static_assert(kKind == Kind::kNumChains);
    return key.num_chains;
  }
}

// Where a number is that work says, and not a hyperparameter.
double Work::*FromWork(std::string_view name) {
  if (name == rows::kMomentumScale.name) return &Work::momentum_scale;
  if (name == rows::kThermostatScale.name) return &Work::thermostat_scale;
  if (name == rows::kNoiseEstimate.name) return &Work::noise_estimate;
  return nullptr;
}

template <class Op>
void CallUpdate(const Work& work, const UpdateNumbers& numbers) {
  constexpr Slots kSlots = SlotsOf(Op::kRow);
  const NoiseKey key = KeyOf(work);
  [&]<size_t... kIndex>(std::index_sequence<kIndex...> /*slots*/) {
    RowOperator<Op>()(
        ArgumentAt<Op, kSlots.items[kIndex]>(work, key, numbers)...);
  }
  (std::make_index_sequence<kSlots.count>());
}

}  // namespace

const Row& RowNamed(std::string_view op) {
  for (const Row* row : kRows) {
    if (row->op == op) return *row;
  }
  throw std::out_of_range("no operator " + std::string(op));
}

std::vector<std::string> KeysOf(const Row& row) {
  std::vector<std::string> keys;
  for (const List& list : row.lists) {
    if (list.key != nullptr) keys.emplace_back(list.key);
  }
  return keys;
}

Method::Method(const char* op, const SamplerOptions& options)
    : op_(op), row_(RowNamed(op)) {
  AllOperators::ForEach([&](auto each) {
    using Op = typename decltype(each)::type;
    if constexpr (kUpdates<Op>) {
      if (&Op::kRow == &row_) call_ = &CallUpdate<Op>;
    }
  });
  const std::vector<std::string> known = options.keys();
  for (const Scalar& number : row_.numbers) {
    const auto found = std::ranges::find(known, number.name);
    from_work_.push_back(FromWork(number.name));
    auto& place = places_.emplace_back();
    if (found != known.end()) place = found - known.begin();
  }
  for (const CommonNumber& number : kCommonNumbers) {
    common_places_.push_back(options.place_of(number.scalar.name));
  }
}

void Method::update(
    const Work& work,
    std::initializer_list<std::pair<std::string_view, double>> instead) const {
  UpdateNumbers numbers;
  for (size_t i = 0; i < common_places_.size(); ++i) {
    numbers.common.*kCommonNumbers[i].place =
        work.options->number_at(common_places_[i]);
  }
  for (size_t i = 0; i < places_.size(); ++i) {
    const auto* const given = std::ranges::find_if(
        instead,
        [&](const auto& each) { return each.first == row_.numbers[i].name; });
    if (given != instead.end()) {
      numbers.own[i] = given->second;
    } else if (from_work_[i] != nullptr) {
      numbers.own[i] = work.*from_work_[i];
    } else {
      numbers.own[i] = places_[i] ? work.options->number_at(*places_[i])
                                  : row_.numbers[i].fallback;
    }
  }
  call_(work, numbers);
}

Start Sampler::start_of_momenta(const SamplerOptions& /*options*/) const {
  return Start::kStationary;
}

// ---- Samplers as their rows say ---------------------------------------------

std::vector<std::string> Sampler::state_keys() const {
  return KeysOf(RowNamed(method()));
}

void Sampler::prepare(Work& work) {
  for (const List& list : method_of(method(), *work.options).row().lists) {
    if (list.start == Start::kByCode) continue;
    std::vector<at::Tensor*> tensors;
    tensors.reserve(work.params.size());
    for (const at::Tensor& param : work.params) {
      tensors.push_back(&own_state_of(param)[list.key]);
    }
    StartState(work, tensors, list.start);
    auto& all = work.state.emplace_back();
    all.reserve(tensors.size());
    for (const at::Tensor* tensor : tensors) all.push_back(*tensor);
  }
  start_masters(work);
}

void Sampler::update(const Work& work) { update_by(method(), work); }

void Sampler::update_by(const char* op,
                        const Work& work,
                        std::initializer_list<Instead> instead) {
  method_of(op, *work.options).update(work, instead);
}

// What a sampler names at every step, by the same literal, is made once.
const Method& Sampler::method_of(const char* op,
                                 const SamplerOptions& options) {
  for (const Method& known : ledger_->methods) {
    if (known.op() == op) return known;
  }
  return ledger_->methods.emplace_back(op, options);
}

}  // namespace torch_sgmcmc
