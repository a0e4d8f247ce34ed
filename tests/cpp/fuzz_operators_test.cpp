// Every operator of the library, as its schema says, with arguments that are
// right or nearly so: it either does what it may, or throws an error that names
// the argument and changes nothing.
#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch_sgmcmc/torch_sgmcmc.h>

#include <algorithm>
#include <iostream>

#include "fuzz.h"
#include "launch/packed_step.h"
#include "ops/registry.h"
#include "testing.h"

namespace torch_sgmcmc {
namespace {

using at::Tensor;

std::vector<c10::OperatorHandle> OurOperators() {
  std::map<std::string, c10::OperatorHandle> found;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.name.starts_with("torch_sgmcmc::")) {
      found.emplace(name.name,
                    dispatcher.findSchemaOrThrow(name.name.c_str(), ""));
    }
  }
  std::vector<c10::OperatorHandle> all;
  for (const auto& [name, handle] : found) all.push_back(handle);
  return all;
}

// Shapes of arguments that are single tensors: d parameters, m data, c chains,
// n counts, k kinds of gradients, b for what `hessian_terms` holds, v 16.
const std::map<std::string, std::string>& Shapes() {
  static const std::map<std::string, std::string> shapes = {
      {"values", "m"},        {"theta", "d"},
      {"anchor", "d"},        {"expansions", "m"},
      {"gradients", "kmd"},   {"scales", "m"},
      {"hessians", "mdd"},    {"estimate", "5"},
      {"gradient", "d"},      {"weights", "m"},
      {"hessian_terms", "b"}, {"sum_value", ""},
      {"sum_gradient", "d"},  {"sum_hessian", "dd"},
      {"prior", "d"},         {"x", "d"},
      {"momentum", "d"},      {"origin", "d"},
      {"log_ratios", "m"},    {"chosen", "c"},
      {"counts", "n2"},       {"device_step", ""},
      {"step", ""},           {"num_skipped", ""},
      {"a", "mdv"},           {"b", "dmv"},
      {"sums", "26c"},        {"energy", "c4"},
      {"grad", "dc"},         {"refreshment", "dc"},
      {"direction", "dc"},    {"numbers", "3"},
  };
  return shapes;
}

bool IsLow(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16;
}

// Whether it is such a list, or one that may be left out.
bool IsListOf(const c10::ListTypePtr& elements, const c10::Type& type) {
  const auto* optional = type.castRaw<c10::OptionalType>();
  const c10::Type& list = optional ? *optional->getElementType() : type;
  return list.isSubtypeOf(*elements);
}

bool HasTensors(const c10::Type& type) {
  return IsListOf(c10::ListType::ofTensors(), type);
}

bool HasIntegers(const c10::Type& type) {
  return IsListOf(c10::ListType::ofInts(), type);
}

// The arguments of one call, first right as far as a schema tells, then some of
// them spoiled.
class Arguments {
 public:
  Arguments(const c10::FunctionSchema& schema, int64_t seed) : random_(seed) {
    const size_t count = static_cast<size_t>(1 + random_.below(3));
    const bool with_chains = random_.one_in(2);
    const bool mixed = random_.one_in(3);
    for (size_t i = 0; i < count; ++i) {
      shapes_.push_back(random_.shape());
      if (with_chains) shapes_.back().insert(shapes_.back().begin(), chains_);
      dtypes_.push_back(mixed ? random_.of({at::kFloat, at::kDouble, at::kHalf,
                                            at::kBFloat16})
                              : random_.of({at::kFloat, at::kDouble}));
    }
    for (const c10::Argument& argument : schema.arguments()) {
      values_.push_back(right(argument));
    }
    if (random_.one_in(2)) {
      for (int64_t i = random_.below(3); i >= 0; --i) {
        const auto place = static_cast<size_t>(
            random_.below(static_cast<int64_t>(values_.size())));
        spoil(values_[place], *schema.arguments()[place].type());
      }
    }
  }

  const std::vector<c10::IValue>& values() const { return values_; }

  // The tensors of all arguments, or of those that the operator may write.
  std::vector<Tensor> tensors(
      const c10::FunctionSchema* writing = nullptr) const {
    std::vector<Tensor> all;
    for (size_t i = 0; i < values_.size(); ++i) {
      const auto* alias =
          writing ? writing->arguments()[i].alias_info() : nullptr;
      if (writing && !(alias && alias->isWrite())) continue;
      if (values_[i].isTensor()) all.push_back(values_[i].toTensor());
      if (!values_[i].isTensorList()) continue;
      for (const Tensor& t : values_[i].toTensorVector()) all.push_back(t);
    }
    return all;
  }

 private:
  c10::IValue right(const c10::Argument& argument) {
    const c10::TypePtr& type = argument.type();
    const std::string& name = argument.name();
    if (name == "noise") return parts_of_rows();
    if (type->isSubtypeOf(*c10::ListType::ofTensors())) return list(name);
    if (type->isSubtypeOf(*c10::TensorType::get())) return single(name);
    if (type->kind() == c10::TypeKind::OptionalType) {
      const bool given = name == "scales"     ? kind_ == 1
                         : name == "hessians" ? kind_ == 2
                                              : random_.one_in(2);
      if (given && HasTensors(*type)) return list(name);
      if (given && HasIntegers(*type)) return rows();
      return given ? c10::IValue(single(name)) : c10::IValue();
    }
    if (type->kind() == c10::TypeKind::FloatType) return random_.fraction();
    if (type->kind() == c10::TypeKind::IntType) {
      if (name == "seed") return random_.any();
      // Not of shards.
      if (name == "num_chains" && values_.back().isIntList()) return 0;
      if (of_rows_ && name == "uniform") return random_.below(2);
      if (of_rows_ && name == "num_chains") return 0;
      return random_.of({int64_t{0}, int64_t{1}, int64_t{2}, chains_});
    }
    if (type->isSubtypeOf(*c10::ListType::ofInts())) {
      std::vector<int64_t> offsets;
      for (size_t i = 0; i < shapes_.size(); ++i) {
        offsets.push_back(random_.any() &
                          random_.of({int64_t{0xFFF80}, int64_t{0xFF},
                                      (int64_t{1} << 62) - 1}));
      }
      return offsets;
    }
    ADD_FAILURE() << "no arguments of type " << type->str() << " are made";
    return {};
  }

  // Parts of one tensor with a row for each step.
  std::vector<Tensor> parts_of_rows() {
    of_rows_ = true;
    const int64_t steps = 1 + random_.below(3);
    int64_t total = 0;
    for (const auto& shape : shapes_) total += c10::multiply_integers(shape);
    const Tensor rows = random_.tensor({steps, total}, dtypes_[0]);
    std::vector<Tensor> parts;
    int64_t begin = 0;
    for (const auto& shape : shapes_) {
      const int64_t size = c10::multiply_integers(shape);
      std::vector<int64_t> sizes = shape;
      sizes.insert(sizes.begin(), steps);
      parts.push_back(rows.narrow(1, begin, size).view(sizes));
      begin += size;
    }
    return parts;
  }

  // Of a step of SGLD, and of what EWSG compares by.
  Tensor words(const std::string& name) {
    PackedCall call;
    const OpSpec* row = nullptr;
    call.offsets.assign(shapes_.size(), 0);
    for (int i = 0; i < 4; ++i) call.numbers.push_back(random_.fraction());
    if (name == "packed") {
      row = &SGLDStep::kSpec;
      call.lengths = {count_of(values_.back())};
    } else {
      row = &EWSGLogRatios::kSpec;
      call.lengths = {count_of(values_[2]), 0};
      const auto surrogate = static_cast<double>(random_.below(kSurrogates));
      call.numbers.insert(call.numbers.end(),
                          {random_.fraction(), 1.0, surrogate, 1.0});
    }
    for (const CommonNumber& each : kCommonNumbers) {
      if (Has(*row, each)) call.numbers.push_back(random_.fraction());
    }
    call.op = std::ranges::find(kOpSpecs, row) - kOpSpecs.begin();
    PackedStep step;
    step.checks = random_.below(2);
    step.seed = random_.any();
    step.calls.push_back(std::move(call));
    return at::tensor(step.Pack(), at::kLong);
  }
  static int64_t count_of(const c10::IValue& list) {
    return static_cast<int64_t>(list.toTensorVector().size());
  }

  Tensor single(const std::string& name) {
    const bool is_again = values_.size() > 2 && values_[2].isTensorList();
    if (name == "packed" || (name == "weights" && is_again)) return words(name);
    std::vector<int64_t> sizes;
    const auto known = Shapes().find(name);
    if (name == "whitening") {
      sizes.assign(static_cast<size_t>(1 + random_.below(2)), dims_);
    } else if (known == Shapes().end()) {
      sizes = random_.shape();
    } else {
      for (const char letter : known->second) {
        switch (letter) {
          case 'b':
            sizes.push_back(kind_ == 0 ? 0 : data_);
            if (kind_ == 2) sizes.push_back(dims_);
            break;
          case 'k':
            sizes.push_back(kind_ == 1 ? 2 : 1);
            break;
          default:
            sizes.push_back(letter == 'd'   ? dims_
                            : letter == 'm' ? data_
                            : letter == 'c' ? chains_
                            : letter == 'v' ? 16
                            : letter == 'n' ? random_.below(4)
                                            : letter - '0');
        }
      }
    }
    return random_.tensor(sizes, name == "chosen" ? at::kBool
                                 : name == "counts" || name == "device_step" ||
                                         name == "step" || name == "num_skipped"
                                     ? at::kLong
                                 : name == "a" || name == "b" ? at::kFloat
                                                              : at::kDouble);
  }

  // A row and a pitch for each tensor.
  std::vector<int64_t> rows() {
    std::vector<int64_t> result;
    for (const std::vector<int64_t>& shape : shapes_) {
      const int64_t row = shape.empty() ? 1 : shape.back();
      const bool in_rows = row > 0 && random_.one_in(2);
      result.push_back(in_rows ? row : 0);
      result.push_back(in_rows ? row + random_.below(200) : 0);
    }
    return result;
  }

  std::vector<Tensor> list(std::string name) {
    if (name == "state") name = "masters";  // SGLD's
    std::vector<Tensor> tensors;
    if (name == "turns") {  // the same for all parameters
      const int64_t rows = random_.of({int64_t{1}, chains_});
      tensors.assign(shapes_.size(), random_.tensor({rows, 4}, at::kDouble));
      return tensors;
    }
    const bool is_first = values_.empty();
    if (!is_first && name != "masters" && random_.one_in(8)) return tensors;
    const bool as_parameters = is_first || random_.one_in(2);
    for (size_t i = 0; i < shapes_.size(); ++i) {
      const bool low = IsLow(dtypes_[i]);
      if (name == "masters" && !low) continue;
      const bool in_float = low && (name == "masters" || !as_parameters);
      Tensor t = random_.tensor(shapes_[i], in_float ? at::kFloat : dtypes_[i]);
      tensors.push_back(random_.one_in(4) ? random_.relaid(t) : t);
    }
    return tensors;
  }

  void spoil(c10::IValue& value, const c10::Type& type) {
    if (value.isTensorList()) {
      value = spoiled(value.toTensorVector());
    } else if (value.isTensor()) {
      value = spoiled(value.toTensor());
    } else if (value.isDouble()) {
      value = random_.bad_number();
    } else if (value.isInt()) {
      value = random_.bad_integer();
    } else if (value.isIntList()) {
      std::vector<int64_t> integers = value.toIntVector();
      if (integers.empty() || random_.one_in(2)) {
        integers.resize(static_cast<size_t>(random_.below(5)));
      } else {
        integers.back() = random_.bad_integer();
      }
      value = integers;
    } else if (HasTensors(type)) {  // a list that was left out, as the next
      value = spoiled(std::vector<Tensor>());
    } else if (HasIntegers(type)) {
      value = std::vector<int64_t>(static_cast<size_t>(random_.below(7)),
                                   random_.bad_integer());
    } else {
      value =
          random_.tensor(random_.shape(), random_.of({at::kDouble, at::kLong}));
    }
  }

  Tensor spoiled(const Tensor& tensor) {
    const std::vector<Tensor> others = tensors();
    if (random_.one_in(20)) return others.front();
    if (IsPlain(tensor) && tensor.scalar_type() == at::kLong &&
        random_.one_in(3)) {
      return at::full_like(tensor, random_.bad_integer());
    }
    return random_.spoiled(tensor);
  }

  std::vector<Tensor> spoiled(std::vector<Tensor> tensors) {
    if (tensors.empty() || random_.one_in(4)) {
      tensors.resize(static_cast<size_t>(random_.below(4)),
                     random_.tensor(random_.shape(), at::kFloat));
      return tensors;
    }
    Tensor& one = tensors[static_cast<size_t>(
        random_.below(static_cast<int64_t>(tensors.size())))];
    one = random_.one_in(10) ? tensors.front() : spoiled(one);
    return tensors;
  }

  Choices random_;
  int64_t chains_ = 1 + random_.below(3);
  int64_t data_ = 2 * random_.below(7);
  int64_t dims_ = random_.one_in(8) ? 0 : 1 + random_.below(11);
  int64_t kind_ = random_.below(3);  // of expansions
  bool of_rows_ = false;             // of noise_steps_
  std::vector<std::vector<int64_t>> shapes_;
  std::vector<at::ScalarType> dtypes_;
  std::vector<c10::IValue> values_;
};

void Show(std::ostream& out, const Tensor& t) {
  if (!t.defined()) {
    out << "undefined";
    return;
  }
  out << t.scalar_type() << t.sizes();
  if (t.layout() != at::kStrided || t.is_meta()) {
    out << " " << t.layout() << " on " << t.device();
  } else if (!t.is_contiguous()) {
    out << " strides " << t.strides();
  }
}

std::string Shown(const c10::FunctionSchema& schema,
                  const std::vector<c10::IValue>& values) {
  std::ostringstream out;
  out << schema.name();
  for (size_t i = 0; i < values.size(); ++i) {
    out << "\n  " << schema.arguments()[i].name() << " = ";
    if (values[i].isTensor()) {
      Show(out, values[i].toTensor());
    } else if (values[i].isTensorList()) {
      for (const Tensor& t : values[i].toTensorVector()) {
        Show(out, t);
        out << "; ";
      }
    } else {
      out << values[i];
    }
  }
  return out.str();
}

// What the dispatcher itself says of arguments for which there is no kernel, or
// none at all; it knows no names.
bool IsOfDispatcher(const std::string& message, const std::string& name) {
  return message.starts_with("Could not run '" + name + "'") ||
         message.starts_with(name +
                             ": attempted to run this operator with "
                             "Meta tensors") ||
         message.starts_with("There were no tensor arguments to this function");
}

bool NamesAnArgument(const std::string& message,
                     const c10::FunctionSchema& schema) {
  if (IsOfDispatcher(message, schema.name())) return true;
  if (!message.starts_with(schema.name() + ": ")) {
    const std::string& name = schema.name();
    if (!name.ends_with("fused_step_") && !name.ends_with("deferred_step_") &&
        !name.ends_with("ewsg_step_")) {
      return false;
    }
    // It may be of the operator whose call was packed.
    const auto packed = c10::Dispatcher::singleton().findSchema(
        {message.substr(0, message.find(": ")), ""});
    return packed && packed->schema().name() != schema.name() &&
           NamesAnArgument(message, packed->schema());
  }
  for (const c10::Argument& argument : schema.arguments()) {
    if (Names(message, argument.name())) return true;
  }
  return false;
}

// Throws nothing: whether the operator did.
std::optional<std::string> ErrorOf(const c10::OperatorHandle& op,
                                   std::vector<c10::IValue> stack) {
  try {
    op.callBoxed(stack);
    return std::nullopt;
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
}

bool Call(const c10::OperatorHandle& op, const Arguments& arguments) {
  const c10::FunctionSchema& schema = op.schema();
  const Memory memory(arguments.tensors());
  const std::vector<Tensor> written = arguments.tensors(&schema);
  std::vector<Tensor> before;
  for (const Tensor& t : written) {
    before.push_back(t.defined() ? t.detach().clone() : Tensor());
  }
  const std::optional<std::string> error = ErrorOf(op, arguments.values());
  if (error) {
    EXPECT_TRUE(NamesAnArgument(*error, schema)) << *error;
    EXPECT_TRUE(memory.is_unchanged()) << "changed, though it threw " << *error;
    return false;
  }
  // With what it may write put back, all memory is what it was.
  const at::AutoDispatchBelowADInplaceOrView guard;
  for (size_t i = 0; i < written.size(); ++i) {
    // What overlaps itself cannot have been written.
    if (at::has_internal_overlap(written[i]) != at::MemOverlap::Yes) {
      written[i].copy_(before[i]);
    }
  }
  EXPECT_TRUE(memory.is_unchanged()) << "wrote what it may not";
  return true;
}

TEST(Fuzz, Operators) {
  const std::vector<c10::OperatorHandle> operators = OurOperators();
  ASSERT_FALSE(operators.empty());
  std::map<std::string, Tally> tallies;
  ForEachCall(static_cast<int64_t>(200 * operators.size()), [&](int64_t seed) {
    const auto& op = operators[static_cast<size_t>(seed) % operators.size()];
    const Arguments arguments(op.schema(), seed);
    const std::string text = Shown(op.schema(), arguments.values());
    SCOPED_TRACE(text);
    if (IsTraced()) std::cerr << text << std::endl;
    Tally& tally = tallies[op.schema().name()];
    ++tally.made;
    if (Call(op, arguments)) ++tally.succeeded;
  });
  for (const auto& [name, tally] : tallies) tally.check(name);
}

}  // namespace
}  // namespace torch_sgmcmc
