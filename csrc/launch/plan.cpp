#include "launch/plan.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <sstream>

#include "host/parameters.h"

namespace torch_sgmcmc {
namespace {

std::string Shape(const auto& sizes) {
  std::ostringstream out;
  out << "[";
  for (size_t i = 0; i < sizes.size(); ++i) {
    out << (i == 0 ? "" : ", ") << sizes[i];
  }
  out << "]";
  return out.str();
}

const char* Name(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Long:
      return "int64";
    default:
      return "an unsupported dtype";
  }
}

ScalarType Type(const Tensor& t) { return t.scalar_type(); }

bool IsSupported(ScalarType type) {
  return type == ScalarType::Float || type == ScalarType::Double ||
         type == ScalarType::BFloat16 || type == ScalarType::Half;
}

ScalarType ArithmeticType(ScalarType type) {
  return type == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

bool IsStrided(const Tensor& t) {
  int32_t layout = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(t.get(), &layout));
  return layout == aoti_torch_layout_strided();
}

bool Equal(const auto& a, const auto& b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin());
}

std::string Where(const char* name, size_t index) {
  return std::string(name) + "[" + std::to_string(index) + "]";
}

// The memory of t, unknown to autograd, which may refuse writes into t.
Tensor Untracked(const Tensor& t) {
  return torch::stable::from_blob(t.data_ptr(), t.sizes(), t.strides(),
                                  t.device(), Type(t));
}

bool NeedsMaster(const Tensor& param) {
  return Type(param) == ScalarType::BFloat16 || Type(param) == ScalarType::Half;
}

uint8_t Bytes(ScalarType type) {
  uint8_t bytes = 0;
  WithElement(type, [&](auto element) { bytes = sizeof element; });
  return bytes;
}

// True if a parameter has no such argument.
bool IsAbsent(const Argument& a, const Tensor& param) {
  return (a.role == Role::kMaster && !NeedsMaster(param)) ||
         (a.role == Role::kPriorMean && a.tensors.empty());
}

// ---- Checks of arguments ----------------------------------------------------

void CheckDefined(const char* op, const std::vector<Argument>& arguments) {
  for (const Argument& a : arguments) {
    for (size_t i = 0; i < a.tensors.size(); ++i) {
      if (!a.tensors[i].defined()) Fail(op, Where(a.name, i), " is undefined");
    }
  }
}

void CheckLengths(const char* op, const std::vector<Argument>& arguments) {
  const Argument& first = arguments[0];
  const size_t count = first.tensors.size();
  for (const Argument& a : arguments) {
    if (a.role == Role::kMaster) {
      const auto needed = static_cast<size_t>(std::count_if(
          first.tensors.begin(), first.tensors.end(), NeedsMaster));
      if (a.tensors.size() == needed) continue;
      Fail(op, a.name, " has ", a.tensors.size(), " tensors, expected ", needed,
           " (one for each of ", first.name, " in bfloat16 or float16)");
    }
    if (a.role == Role::kPriorMean && a.tensors.empty()) continue;
    if (a.tensors.size() != count) {
      Fail(op, a.name, " has ", a.tensors.size(), " tensors, expected ", count,
           " (as many as ", first.name, ")");
    }
  }
}

// Throws unless there are numbers of elements for each tensor.
void CheckNumbering(const char* op, const Argument& first,
                    const std::vector<int64_t>& offsets, const Rows& rows) {
  const size_t count = first.tensors.size();
  if (offsets.size() != count) {
    Fail(op, "offsets has ", offsets.size(), " entries, expected ", count,
         " (one for each tensor of ", first.name, ")");
  }
  if (rows && rows->size() != 2 * count) {
    Fail(op, "rows has ", rows->size(), " entries, expected ", 2 * count,
         " (two for each tensor of ", first.name, ")");
  }
}

// Element indices must be different, and fit.
void CheckRow(const char* op, size_t i, int64_t row, int64_t pitch,
              int64_t numel) {
  if (row == 0 && pitch == 0) return;
  constexpr int64_t kMaxPitch = int64_t{1} << 40;
  if (row > 0 && row <= pitch && pitch <= kMaxPitch && numel % row == 0) return;
  Fail(op, "Invalid ", Where("rows", i), ": (", row, ", ", pitch, ") for ",
       numel,
       " elements (must be (0, 0), or a length that divides their number, "
       "and a pitch from it to 2^40)");
}

// Throws unless parameter i has a dtype of the operators and, with chains, one
// index for each.
void CheckLead(const char* op, const Argument& first, size_t i,
               ScalarType dtype, std::optional<int64_t> num_chains) {
  const Tensor& lead = first.tensors[i];
  if (!IsSupported(dtype)) {
    Fail(op, Where(first.name, i), " has ", Name(dtype),
         ", expected float32, float64, bfloat16 or float16");
  }
  if (num_chains && (lead.dim() == 0 || lead.sizes()[0] != *num_chains)) {
    Fail(op, Where(first.name, i), " has shape ", Shape(lead.sizes()),
         ", expected a leading dimension of ", *num_chains, " chains");
  }
}

// Throws unless a tensor fits parameter i, which is of this dtype.
void CheckFit(const char* op, const Argument& first, size_t i, ScalarType dtype,
              const Argument& a, size_t place,
              std::optional<int64_t> num_chains) {
  const Tensor& lead = first.tensors[i];
  const Tensor& t = a.tensors[place];
  if (a.role == Role::kChainNumbers) {
    if (Type(t) == ScalarType::Double && t.dim() == 2 && t.is_contiguous() &&
        t.size(0) == num_chains.value_or(1) && t.size(1) == kNumbersOfChain) {
      return;
    }
    Fail(op, Where(a.name, place), " has ", Name(Type(t)), " and shape ",
         Shape(t.sizes()), ", expected contiguous float64 of shape ",
         Shape(std::array{num_chains.value_or(1), kNumbersOfChain}));
  }
  const ScalarType want =
      IsInArithmeticType(a.role) ? ArithmeticType(dtype) : dtype;
  if (Type(t) != want) {
    Fail(op, Where(a.name, place), " has ", Name(Type(t)), ", expected ",
         Name(want), " (for ", Where(first.name, i), " in ", Name(dtype), ")");
  }
  if (!Equal(t.sizes(), lead.sizes())) {
    Fail(op, Where(a.name, place), " has shape ", Shape(t.sizes()),
         ", expected ", Shape(lead.sizes()), " (that of ", Where(first.name, i),
         ")");
  }
}

// Throws if an operator would write to memory of several elements.
void CheckMemory(const char* op, const Argument& a, size_t place) {
  const Tensor& t = a.tensors[place];
  if (IsWritten(a.role) && !t.is_contiguous() &&
      MayRepeat(t.sizes(), t.strides())) {
    Fail(op, Where(a.name, place),
         " is an expanded tensor (several elements share memory) "
         "and cannot be written");
  }
}

}  // namespace

void CheckNumber(const char* op, const char* name, double value,
                 const Range& range) {
  if (range.Has(value)) return;
  Fail(op, "Invalid ", name, ": ", Shortest(value), " (must be ",
       range.Wanted(), ")");
}

void CheckCount(const char* op, const char* name, int64_t value,
                int64_t least) {
  if (value >= least) return;
  Fail(op, "Invalid ", name, ": ", value, " (must be >= ", least, ")");
}

Argument PriorMeans(const std::optional<TensorList>& tensors) {
  static const TensorList kNone;
  return {"prior_means", Role::kPriorMean, tensors ? *tensors : kNone};
}

NoiseStream MakeStream(const char* op, int64_t seed, int64_t step,
                       int64_t purpose) {
  if (step < 0 || step > kMaxStep) {
    Fail(op, "Invalid step: ", step, " (must be in [0, 2^48))");
  }
  if (purpose < 0 || purpose > kMaxPurpose) {
    Fail(op, "Invalid purpose: ", purpose, " (must be in [0, 2^16))");
  }
  return {static_cast<uint64_t>(seed), static_cast<uint64_t>(step),
          static_cast<uint32_t>(purpose)};
}

NoiseStream MakeStream(const char* op, int64_t seed, int64_t step,
                       Purpose purpose) {
  return MakeStream(op, seed, step, static_cast<int64_t>(purpose));
}

const int64_t* DeviceStep(const char* op, const Plan& plan,
                          const std::optional<Tensor>& device_step) {
  return DeviceStep(op, plan.on_cuda(), plan.device_index(), device_step);
}

const int64_t* DeviceStep(const char* op, bool on_cuda, int32_t device_index,
                          const std::optional<Tensor>& device_step) {
  if (!device_step.has_value()) return nullptr;
  const Tensor& t = *device_step;
  if (!t.defined()) Fail(op, "device_step is undefined");
  if (Type(t) != ScalarType::Long || t.numel() != 1) {
    Fail(op, "device_step must hold a single int64, got ", t.numel(),
         " elements of ", Name(Type(t)));
  }
  if (t.is_cuda() != on_cuda || t.get_device_index() != device_index) {
    Fail(op, "device_step is on another device than the parameters");
  }
  return static_cast<const int64_t*>(t.data_ptr());
}

std::vector<Segment> Plan::ArithmeticArgument(int j) const {
  std::vector<Segment> result = segments_;
  for (Segment& s : result) {
    s.data[0] = s.data[j];
    s.bytes[0] = s.bytes[j];
    s.dtype = ArithmeticType(s.dtype);
  }
  return result;
}

Plan::Plan(const char* op, const std::vector<Argument>& arguments,
           const std::vector<int64_t>& offsets, int64_t num_chains,
           const Numbering& numbering) {
  const Rows& rows = numbering.rows;
  const int64_t with_seeds = numbering.num_chains;
  if (with_seeds < 0 || (with_seeds > 0 && rows)) {
    Fail(op, "Invalid num_chains: ", with_seeds,
         " (must be >= 0, and 0 with rows)");
  }
  CheckDefined(op, arguments);
  CheckLengths(op, arguments);
  CheckNumbering(op, arguments[0], offsets, rows);
  std::optional<int64_t> chains;
  if (num_chains > 1) chains = num_chains;
  if (with_seeds > 0) chains = with_seeds;
  CheckTensors(op, arguments, offsets, chains, rows);

  // All arguments are valid.
  const TensorList& leads = arguments[0].tensors;
  segments_.reserve(leads.size());
  size_t master = 0;  // of the next parameter that has one
  for (size_t i = 0; i < leads.size(); ++i) {
    Segment segment{};
    segment.numel = leads[i].numel();
    segment.offset = static_cast<uint64_t>(offsets[i]);
    segment.num_chains = with_seeds;
    segment.dtype = Type(leads[i]);
    if (rows && (*rows)[2 * i] > 0 && (*rows)[2 * i] < segment.numel) {
      segment.row = (*rows)[2 * i];
      segment.pitch = (*rows)[2 * i + 1];
    }
    if (segment.numel > 0) {
      TakeMemory(arguments, i, master, segment);
      segments_.push_back(segment);
    } else if (NeedsMaster(leads[i])) {
      ++master;
    }
  }
}

// Checks each parameter and what belongs to it, in this order.
void Plan::CheckTensors(const char* op, const std::vector<Argument>& arguments,
                        const std::vector<int64_t>& offsets,
                        std::optional<int64_t> chains, const Rows& rows) {
  const Argument& first = arguments[0];
  size_t master = 0;
  for (size_t i = 0; i < first.tensors.size(); ++i) {
    const Tensor& lead = first.tensors[i];
    const ScalarType dtype = Type(lead);
    CheckLead(op, first, i, dtype, chains);
    if (offsets[i] < 0) {
      Fail(op, "Invalid ", Where("offsets", i), ": ", offsets[i],
           " (must be >= 0)");
    }
    if (rows) CheckRow(op, i, (*rows)[2 * i], (*rows)[2 * i + 1], lead.numel());
    if (i == 0) {
      on_cuda_ = lead.is_cuda();
      device_index_ = lead.get_device_index();
    }
    for (const Argument& a : arguments) {
      if (IsAbsent(a, lead)) continue;
      const size_t place = a.role == Role::kMaster ? master++ : i;
      CheckPlace(op, first, a, place);
      CheckFit(op, first, i, dtype, a, place, chains);
      CheckMemory(op, a, place);
    }
  }
}

// Throws unless a tensor is strided and on the plan's device.
void Plan::CheckPlace(const char* op, const Argument& first, const Argument& a,
                      size_t place) const {
  const Tensor& t = a.tensors[place];
  if (!IsStrided(t)) {
    Fail(op, Where(a.name, place), " is sparse, expected a strided tensor");
  }
  if (t.is_cuda() != on_cuda_ || (!on_cuda_ && !t.is_cpu()) ||
      t.get_device_index() != device_index_) {
    Fail(op, Where(a.name, place),
         " is on another device than the first tensor of ", first.name,
         "; call the operator once for each device");
  }
}

// Sets a segment's arrays: tensors of parameter i, or copies of them.
void Plan::TakeMemory(const std::vector<Argument>& arguments, size_t i,
                      size_t& master, Segment& segment) {
  const Tensor& lead = arguments[0].tensors[i];
  for (size_t j = 0; j < arguments.size(); ++j) {
    const Argument& a = arguments[j];
    if (IsAbsent(a, lead)) continue;
    const bool is_master = a.role == Role::kMaster;
    const Tensor& t = a.tensors[is_master ? master++ : i];
    const auto slot = is_master ? kMasters : SlotOf(a.role, j);
    // Chains' numbers stay where they are when elements are cut.
    segment.bytes[slot] = a.role == Role::kChainNumbers ? 0 : Bytes(Type(t));
    void*& data = segment.data[slot];
    if (t.is_contiguous()) {
      data = t.data_ptr();
      continue;
    }
    Tensor work = torch::stable::new_empty(t, t.sizes(), Type(t));
    if (IsRead(a.role)) torch::stable::copy_(work, Untracked(t));
    data = work.data_ptr();
    if (IsWritten(a.role)) copy_backs_.push_back({t, work});
    keep_alive_.push_back(work);
  }
}

void Plan::Finish() {
  for (CopyBack& c : copy_backs_) {
    Tensor memory = Untracked(c.destination);
    torch::stable::copy_(memory, c.source);
  }
}

}  // namespace torch_sgmcmc
