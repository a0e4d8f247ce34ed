#include "launch/call.h"

#include <cmath>
#include <exception>
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
    VisitAt(slots.items[i], *this, [&]<class T>(T& argument) {
      argument = torch::stable::detail::to<T>(stack[i]);
    });
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

// ---- Calls of a packed step -------------------------------------------------

PackedStep Unpacked(const char* op, const char* name, const Tensor& packed) {
  if (!packed.defined() || packed.scalar_type() != ScalarType::Long ||
      !packed.is_contiguous() || !packed.is_cpu()) {
    Fail(op, name, " must be contiguous, of int64 and on the CPU");
  }
  try {
    return PackedStep::Unpack(static_cast<const int64_t*>(packed.data_ptr()),
                              static_cast<size_t>(packed.numel()));
  } catch (const std::exception& error) {
    Fail(op, name, ": ", error.what());
  }
}

TensorList PackedTensors::Source::Take(const char* op, int64_t length) {
  const auto begin = tensors.begin() + taken;
  if (length < 0 || length > tensors.end() - begin) {
    Fail(op, name, " has fewer tensors than packed says");
  }
  taken += length;
  return {begin, begin + length};
}

void PackedTensors::Source::CheckIsEmpty(const char* op) const {
  if (taken == static_cast<int64_t>(tensors.size())) return;
  Fail(op, name, " has more tensors than packed says");
}

Call PackedTensors::Next(const OpSpec& spec, const PackedCall& packed) {
  constexpr size_t kFirst = 2;  // params, grads
  size_t count = spec.numbers.count;
  for (const CommonNumber& each : kCommonNumbers) {
    if (Has(spec, each)) ++count;
  }
  if (packed.lengths.size() + kFirst != spec.lists.count ||
      packed.numbers.size() != count) {
    Fail(op_, "packed is not a call of ", spec.op);
  }
  Call call(spec);
  const auto length = static_cast<int64_t>(packed.offsets.size());
  call.lists[0] = params_.Take(op_, length);
  call.lists[1] = grads_.Take(op_, length);
  for (size_t i = 0; i < packed.lengths.size(); ++i) {
    call.lists[kFirst + i] = state_.Take(op_, packed.lengths[i]);
  }
  if (packed.has_means != 0) {
    call.prior_means = state_.Take(op_, length);
  }
  for (size_t i = 0; i < spec.numbers.count; ++i) {
    const double number = packed.numbers[i];
    if (!IsInteger(spec.numbers[i].domain)) {
      call.numbers[i] = number;
    } else if (std::fabs(number) < 0x1p53) {
      call.integers[i] = static_cast<int64_t>(number);
    } else {
      Fail(op_, "packed has a ", spec.numbers[i].name,
           " that is not a whole number");
    }
  }
  size_t next = spec.numbers.count;
  for (const CommonNumber& each : kCommonNumbers) {
    if (Has(spec, each)) call.common.*each.place = packed.numbers[next++];
  }
  call.offsets = packed.offsets;
  if (!packed.rows.empty()) call.rows = packed.rows;
  return call;
}

void PackedTensors::CheckIsEmpty() const {
  for (const Source* source : {&params_, &grads_, &state_}) {
    source->CheckIsEmpty(op_);
  }
}

}  // namespace torch_sgmcmc
