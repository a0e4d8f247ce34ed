#include "libtorch/options.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <stdexcept>

#include "libtorch/checks.h"

namespace torch_sgmcmc {

namespace {

constexpr double kExactIntegers = 9007199254740992.0;  // 2^53
constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

// True for a tensor of one readable number.
bool IsNumber(const c10::IValue& value) {
  if (!value.isTensor() || !value.toTensor().defined()) return false;
  const at::Tensor& tensor = value.toTensor();
  return tensor.numel() == 1 && tensor.layout() == at::kStrided &&
         !tensor.is_meta();
}

// num_data as an int where possible, as in Python.
c10::IValue WholeIfData(std::string_view name, const c10::IValue& value) {
  if (name != "num_data" || !value.isDouble()) return value;
  const double number = value.toDouble();
  if (number != std::floor(number) || std::abs(number) >= kExactIntegers) {
    return value;
  }
  return static_cast<int64_t>(number);
}

c10::IValue ReadSetting(const Setting& row, const c10::IValue& value) {
  if (row.optional && value.isNone()) return value;
  switch (row.kind) {
    case SettingKind::kWhole:
      return FromValue<int64_t>(row.name, value);
    case SettingKind::kFlag:
      return FromValue<bool>(row.name, value);
    case SettingKind::kWord:
      return FromValue<std::string>(row.name, value);
    case SettingKind::kReal:
      break;
  }
  if (row.words[0] != nullptr && value.isString()) return value;
  return WholeIfData(row.name, FromValue<double>(row.name, value));
}

double NumberOf(const c10::IValue& value, double otherwise) {
  if (value.isDouble()) return value.toDouble();
  return value.isInt() ? static_cast<double>(value.toInt()) : otherwise;
}

c10::IValue DefaultOf(const Setting& row) {
  if (row.optional) return {};
  if (row.kind == SettingKind::kWhole && !std::isnan(row.fallback)) {
    return static_cast<int64_t>(row.fallback);
  }
  if (row.kind == SettingKind::kFlag) return row.fallback == 1;
  if (row.kind == SettingKind::kWord) return std::string(row.words[0]);
  return row.fallback;
}

// Throws if a required value was not set, or is out of range.
void CheckSetting(const Setting& row, const c10::IValue& value,
                  const char* sampler, bool is_set) {
  if (value.isNone() || value.isBool()) return;
  if (value.isString()) {
    const auto* const end = std::ranges::find(row.words, nullptr);
    return CheckWord(row.name, value.toStringRef(), {row.words.begin(), end},
                     row.kind != SettingKind::kWord);
  }
  if (row.kind == SettingKind::kWhole) {
    return CheckInteger(row.name, value.toInt(), static_cast<int64_t>(row.low),
                        row.high);
  }
  const double number = NumberOf(value, kNone);
  if (row.purpose != nullptr && !is_set && std::isnan(number)) {
    Invalid("Invalid ", row.name, ": not set (", sampler, " needs ",
            row.purpose, ")");
  }
  CheckReal(row.name, number, row.range());
}

}  // namespace

void WrongType(std::string_view name, const c10::IValue& value,
               const char* wanted) {
  Invalid("Invalid ", name, " in a state dict: a ", KindOf(value), " (must be ",
          wanted, ")");
}

double RealFrom(std::string_view name, const c10::IValue& value) {
  if (value.isDouble()) return value.toDouble();
  if (value.isInt()) return static_cast<double>(value.toInt());
  if (IsNumber(value) && (value.toTensor().is_floating_point() ||
                          value.toTensor().scalar_type() == at::kLong)) {
    return value.toTensor().item<double>();  // a step size may be one
  }
  WrongType(name, value, "a number");
}

int64_t WholeFrom(std::string_view name, const c10::IValue& value) {
  if (value.isInt()) return value.toInt();
  if (IsNumber(value) && value.toTensor().scalar_type() == at::kLong) {
    return value.toTensor().item<int64_t>();
  }
  WrongType(name, value, "an int, or a Tensor of one int64");
}

c10::IValue SavedCount(const Count& count) {
  if (count.is_on_device()) return count.device.clone();
  return at::scalar_tensor(count.host, at::kLong);
}

c10::IValue Narrow(const c10::IValue& value) {
  if (!value.isInt() || value.toInt() == static_cast<int32_t>(value.toInt())) {
    return value;
  }
  return SavedCount({value.toInt()});
}

// ---- Equal values -----------------------------------------------------------

namespace {

// NOLINTNEXTLINE(misc-no-recursion)
std::string TextOf(const c10::IValue& value) {
  if (value.isNone()) return "none";
  if (value.isBool()) return value.toBool() ? "true" : "false";
  if (value.isInt()) return std::to_string(value.toInt());
  if (value.isString()) return Shown(value.toStringRef());
  if (value.isDouble()) return Shown(value.toDouble());
  if (value.isTensor()) {
    return std::to_string(value.toTensor().item<int64_t>());
  }
  std::vector<std::string> texts;
  for (const c10::IValue& element : value.toList().vec()) {
    texts.push_back(TextOf(element));
  }
  return "[" + Enumerated(texts) + "]";
}

}  // namespace

bool Alike(const c10::IValue& a, const c10::IValue& b) {
  if (a.isList() && b.isList()) {
    const auto x = a.toList().vec();
    const auto y = b.toList().vec();
    return x.size() == y.size() &&
           std::equal(x.begin(), x.end(), y.begin(), Alike);
  }
  if (a.isTensor() && b.isTensor()) {
    return a.toTensor().item<int64_t>() == b.toTensor().item<int64_t>();
  }
  if (a.isDouble() && b.isDouble() && std::isnan(a.toDouble())) {
    return std::isnan(b.toDouble());
  }
  return a == b;
}

void CheckEqual(const std::vector<StateDict>& groups,
                const std::vector<std::string>& keys, const char* why) {
  if (groups.size() == 1) return;
  for (const std::string& key : keys) {
    bool equal = true;
    std::vector<std::string> texts;
    for (const StateDict& group : groups) {
      equal = equal && Alike(group.at(key), groups[0].at(key));
      texts.push_back(TextOf(group.at(key)));
    }
    if (equal) continue;
    Invalid("Invalid ", key, ": [", Enumerated(texts),
            "] in the param groups (must be equal: ", why, ")");
  }
}

// ---- Values by name ---------------------------------------------------------

void NamedValues::put(std::string_view name, const c10::IValue& value) {
  Value& own = values_[place_of(name)];
  own.value = WholeIfData(name, value);
  own.is_set = true;
  is_checked_ = false;
}

size_t NamedValues::place_of(std::string_view name) const {
  for (size_t i = 0; i < values_.size(); ++i) {
    if (values_[i].name == name) return i;
  }
  throw std::out_of_range(c10::str("'", name, "' is not known for ", sampler_));
}

double NamedValues::number_or(std::string_view name, double otherwise) const {
  for (const Value& each : values_) {
    if (each.name != name) continue;
    const c10::IValue& value = each.value;
    return NumberOf(
        value, value.isBool() ? static_cast<double>(value.toBool()) : kNone);
  }
  return otherwise;
}

double NamedValues::number_at(size_t place) const {
  return NumberOf(values_[place].value, 0);
}

double NamedValues::number(std::string_view name) const {
  return number_or(name, kNone);
}

std::vector<std::string> NamedValues::keys() const {
  std::vector<std::string> names;
  for (const Value& each : values_) names.emplace_back(each.name);
  return names;
}

void NamedValues::write(StateDict& group) const {
  for (const Value& each : values_) {
    const c10::IValue& value = each.value;
    const std::string name(each.name);
    if (value.isList()) {  // of one type if it was put
      group.set(name, ToValue(value.toListRef().vec()));
    } else if (each.row == nullptr && (value.isInt() || value.isTensor())) {
      group.set(name, SavedCount(FromValue<Count>(each.name, value)));
    } else {
      group.set(name, Narrow(value));
    }
  }
}

void NamedValues::read(const StateDict& group) {
  is_checked_ = false;
  for (Value& each : values_) {
    const c10::IValue value = group.at(std::string(each.name));
    each.value = each.row == nullptr ? each.read(each.name, value)
                                     : ReadSetting(*each.row, value);
    each.is_set = true;
  }
}

// ---- Options ----------------------------------------------------------------

OptionValues::OptionValues(const char* sampler) {
  // What Python keeps beside the hyperparameters.
  static constexpr Setting kManaged[] = {
      {.name = "capturable", .kind = SettingKind::kFlag, .fallback = 0},
      {.name = "nonfinite",
       .kind = SettingKind::kWord,
       .words = {"raise", "skip", "ignore"}}};
  sampler_ = sampler;
  for (const auto rows :
       {SettingsOf(sampler), std::span<const Setting>(kManaged)}) {
    for (const Setting& row : rows) {
      values_.push_back({row.name, &row, nullptr, DefaultOf(row)});
    }
  }
}

std::optional<int64_t> OptionValues::chains() const {
  const double chains = number_or("num_chains", kNone);
  if (std::isnan(chains)) return std::nullopt;
  // check_ranges() refuses numbers beyond int64.
  return static_cast<int64_t>(std::clamp(chains, -1.0, 0x1p62));
}

void OptionValues::check_ranges() const {
  for (const Value& each : values_) {
    CheckSetting(*each.row, each.value, sampler_, each.is_set);
  }
  // Products of valid numbers may overflow.
  const double step_size = number_or("lr", 0);
  const double t = number_or("temperature", 1);
  const double count = number_or("num_data", 1);
  const double scale = std::sqrt(2 * step_size) * std::sqrt(t / count);
  if (!(scale <= std::numeric_limits<float>::max())) {
    Invalid("Invalid lr: ", Shown(step_size), " with temperature ", Shown(t),
            " and num_data ", Shown(count),
            ": the noise has standard deviation sqrt(2 lr T / N) = ",
            Shown(scale), ", which float32 cannot hold. Give smaller numbers");
  }
}

void OptionValues::check_noise_estimate(double friction,
                                        const char* what) const {
  const c10::IValue& given = values_[place_of("noise_estimate")].value;
  const bool is_word = given.isString();
  const double value = is_word ? 0 : given.toDouble();
  if (!is_word && value == 0) return;
  std::string where;
  if (estimate_scale != 1) {
    where = " at lr " + Rounded(lr(), 4) + ", from " + Rounded(value, 4) +
            " where it was given";
  }
  CheckFriction(value * estimate_scale, friction, what, where);
  if (temperature() == 0) {
    Invalid("Invalid noise_estimate: ",
            (is_word ? Shown(given.toStringRef()) : Shown(value)),
            " (must be 0 at temperature 0, where no noise is injected)");
  }
}

void OptionValues::inherit(const OptionValues& defaults) {
  for (size_t i = 0; i < values_.size(); ++i) {
    if (!values_[i].is_set) values_[i].value = defaults.values_[i].value;
  }
  is_checked_ = false;
}

bool OptionValues::agrees_with(const OptionValues& other,
                               const std::vector<std::string>& names) const {
  return std::ranges::all_of(names, [&](const std::string& name) {
    const size_t place = place_of(name);
    return Alike(values_[place].value, other.values_[place].value);
  });
}

void OptionValues::share(const OptionValues& other,
                         const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    const size_t place = place_of(name);
    values_[place] = other.values_[place];
  }
  is_checked_ = false;
}

std::vector<std::string> OptionValues::set_for_all(
    const OptionValues& ours, const std::vector<std::string>& shared) const {
  std::vector<std::string> names;
  if (seed) names.emplace_back("seed");
  for (const std::string& name : shared) {
    if (is_set(name) && !agrees_with(ours, {name})) names.push_back(name);
  }
  return names;
}

// ---- The public options -----------------------------------------------------

SamplerOptions::SamplerOptions(const char* sampler)
    : values_(std::make_unique<OptionValues>(sampler)) {}
SamplerOptions::SamplerOptions(const SamplerOptions& other)
    : values_(std::make_unique<OptionValues>(*other.values_)) {}
SamplerOptions& SamplerOptions::operator=(const SamplerOptions& other) {
  if (this != &other) *values_ = *other.values_;
  return *this;
}
SamplerOptions::~SamplerOptions() = default;

std::optional<int64_t> SamplerOptions::seed() const { return values_->seed; }
double SamplerOptions::number(std::string_view name) const {
  return values_->number(name);
}

c10::IValue SamplerOptions::value(std::string_view name) const {
  return values_->value_of(name);
}
void SamplerOptions::put(std::string_view name, const c10::IValue& value) {
  values_->put(name, value);
}

void SamplerOptions::put_prior_means(const Tensors& values) {
  values_->prior_means = values;
  values_->means_are_kept = false;
}
void SamplerOptions::put_seed(int64_t value) { values_->seed = value; }
}  // namespace torch_sgmcmc
