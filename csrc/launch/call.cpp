#include "launch/call.h"

#include <cmath>
#include <utility>

namespace torch_sgmcmc {
namespace {

// "float prior_mean=0.0"
std::string TextOf(const ScalarArg& number) {
  const bool is_integer = IsInteger(number.domain);
  std::string text = std::string(is_integer ? "int " : "float ") + number.name;
  if (std::isnan(number.fallback)) return text;
  const std::string value = Shortest(number.fallback);
  const bool has_no_point = value.find_first_of(".e") == std::string::npos;
  return text + "=" + value + (has_no_point && !is_integer ? ".0" : "");
}

std::string TextOf(const OpSpec& spec, const Slot& slot, char& alias) {
  switch (slot.kind) {
    case Kind::kList: {
      const TensorListArg& list = spec.lists[slot.index];
      std::string type = "Tensor";
      if (IsWritten(list.role)) type += std::string("(") + alias++ + "!)";
      return type + "[] " + list.name;
    }
    case Kind::kNumber:
    case Kind::kInteger:
      return TextOf(spec.numbers[slot.index]);
    case Kind::kOffsets:
      return "int[] offsets";
    case Kind::kSeed:
      return "int seed";
    case Kind::kStep:
      return "int step";
    case Kind::kPurpose:
      return "int purpose";
    case Kind::kDeviceStep:
      return "Tensor? device_step=None";
    case Kind::kCommon:
      return TextOf(kCommonNumbers[slot.index].scalar);
    case Kind::kPriorMeans:
      return "Tensor[]? prior_means=None";
    case Kind::kShardRows:
      return "int[]? rows=None";
    case Kind::kNumChains:
      return "int num_chains=0";
  }
  return "";
}

template <class T>
T Taken(StableIValue value) {
  return torch::stable::detail::to<T>(value);
}

}  // namespace

std::string SchemaOf(const OpSpec& spec) {
  const ArgLayout slots = ArgLayoutOf(spec);
  std::string text = std::string(spec.op) + "(";
  char alias = 'a';
  for (size_t i = 0; i < slots.count; ++i) {
    if (i > 0) text += ", ";
    if (i == spec.lists.count) text += "*, ";
    text += TextOf(spec, slots.items[i], alias);
  }
  return text + (spec.sums != 0 ? ") -> Tensor" : ") -> ()");
}

Call::Call(const OpSpec& spec, const StableIValue* stack) : spec(spec) {
  const ArgLayout slots = ArgLayoutOf(spec);
  for (size_t i = 0; i < slots.count; ++i) {
    const StableIValue value = stack[i];
    const size_t index = slots.items[i].index;
    switch (slots.items[i].kind) {
      case Kind::kList:
        lists[index] = Taken<TensorList>(value);
        break;
      case Kind::kNumber:
        numbers[index] = Taken<double>(value);
        break;
      case Kind::kInteger:
        integers[index] = Taken<int64_t>(value);
        break;
      case Kind::kOffsets:
        offsets = Taken<std::vector<int64_t>>(value);
        break;
      case Kind::kSeed:
        seed = Taken<int64_t>(value);
        break;
      case Kind::kStep:
        step = Taken<int64_t>(value);
        break;
      case Kind::kPurpose:
        purpose = Taken<int64_t>(value);
        break;
      case Kind::kDeviceStep:
        device_step = Taken<std::optional<Tensor>>(value);
        break;
      case Kind::kCommon:
        common.*kCommonNumbers[index].place = Taken<double>(value);
        break;
      case Kind::kPriorMeans:
        prior_means = Taken<std::optional<TensorList>>(value);
        break;
      case Kind::kShardRows:
        rows = Taken<Rows>(value);
        break;
      case Kind::kNumChains:
        num_chains = Taken<int64_t>(value);
        break;
    }
  }
}

void Call::CheckNumbers() const {
  for (size_t i = 0; i < spec.numbers.count; ++i) {
    const ScalarArg& known = spec.numbers[i];
    if (known.domain == Domain::kCode) continue;
    const Range range = RangeOf(known.domain);
    if (IsInteger(known.domain)) {
      const auto least = static_cast<int64_t>(range.low);
      CheckCount(spec.op, known.name, integers[i], least);
    } else {
      CheckNumber(spec.op, known.name, numbers[i], range);
    }
  }
  for (const CommonNumber& each : kCommonNumbers) {
    if (!Has(spec, each)) continue;
    const ScalarArg& known = each.scalar;
    CheckNumber(spec.op, known.name, common.*each.place, RangeOf(known.domain));
  }
}

NoiseStream Call::Stream() const {
  switch (spec.noise) {
    case Noise::kUpdate:
      return MakeStream(spec.op, seed, step, Purpose::kUpdate);
    case Noise::kMomenta:
      return MakeStream(spec.op, seed, step, Purpose::kMomentum);
    case Noise::kGiven:
      return MakeStream(spec.op, seed, step, purpose);
    case Noise::kNone:
      break;
  }
  return {0, 0, 0};
}

std::vector<Argument> Call::Arguments(std::optional<Role> lead) const {
  bool has_optional = false;
  for (size_t i = 0; i < spec.lists.count; ++i) {
    has_optional |= spec.lists[i].is_optional && !lists[i].empty();
  }
  std::vector<Argument> arguments;
  arguments.reserve(spec.lists.count + 1);
  bool has_means = false;
  const auto add_means = [&] {
    if (spec.has_prior_mean && !std::exchange(has_means, true)) {
      arguments.push_back(PriorMeans(prior_means));
    }
  };
  for (size_t i = 0; i < spec.lists.count; ++i) {
    const TensorListArg& known = spec.lists[i];
    if (known.is_optional && !has_optional) continue;
    if (known.role == Role::kMaster) add_means();
    const Role role = i == 0 && lead ? *lead : known.role;
    arguments.push_back({known.name, role, lists[i]});
  }
  add_means();
  return arguments;
}

int64_t Call::chains() const {
  return spec.sums == kForEachChain ? integers[spec.numbers.count - 1] : 1;
}

Plan Call::MakePlan(const std::vector<Argument>& arguments) const {
  if (spec.noise != Noise::kNone) {
    return {spec.op, arguments, offsets, /*num_chains=*/1, {rows, num_chains}};
  }
  const std::vector<int64_t> none(lists[0].size(), 0);
  return {spec.op, arguments, none, chains()};
}

}  // namespace torch_sgmcmc
