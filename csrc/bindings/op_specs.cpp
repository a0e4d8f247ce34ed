// The specs of the operators, for what Python makes of them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "ops/op_spec.h"
#include "ops/registry.h"

namespace py = pybind11;

namespace {

using torch_sgmcmc::OpSpec;
using torch_sgmcmc::ScalarArg;
using torch_sgmcmc::Start;
using torch_sgmcmc::TensorListArg;

const char* NameOf(Start start) {
  switch (start) {
    case Start::kZeros:
      return "zeros";
    case Start::kStationary:
      return "stationary";
    case Start::kCustom:
      break;
  }
  return "";
}

py::dict AsDict(const ScalarArg& number) {
  const torch_sgmcmc::Range range = torch_sgmcmc::RangeOf(number.domain);
  py::dict item;
  item["name"] = number.name;
  item["is_integer"] = torch_sgmcmc::IsInteger(number.domain);
  item["low"] = range.low;
  item["high"] = range.high;
  item["low_open"] = range.low_open;
  item["default"] = number.fallback;
  return item;
}

py::dict AsDict(const OpSpec& spec) {
  py::list lists;
  for (const TensorListArg& list : spec.lists) {
    py::dict item;
    item["name"] = list.name;
    item["is_written"] = torch_sgmcmc::IsWritten(list.role);
    item["is_master"] = list.role == torch_sgmcmc::Role::kMaster;
    item["is_in_arithmetic_type"] = torch_sgmcmc::IsInArithmeticType(list.role);
    item["key"] = list.key == nullptr ? "" : list.key;
    item["start"] = NameOf(list.start);
    lists.append(item);
  }
  py::list numbers;
  for (const ScalarArg& number : spec.numbers) numbers.append(AsDict(number));
  py::list common;
  for (const torch_sgmcmc::CommonNumber& number :
       torch_sgmcmc::kCommonNumbers) {
    if (Has(spec, number)) common.append(AsDict(number.scalar));
  }
  py::dict result;
  result["op"] = spec.op;
  result["lists"] = lists;
  result["numbers"] = numbers;
  result["has_noise"] = spec.noise != torch_sgmcmc::Noise::kNone;
  result["common"] = common;
  result["has_prior_mean"] = spec.has_prior_mean;
  result["sums"] = spec.sums;
  return result;
}

}  // namespace

void BindOpSpecs(py::module_& m) {
  m.def(
      "op_specs",
      [] {
        py::list specs;
        for (const OpSpec* spec : torch_sgmcmc::kOpSpecs)
          specs.append(AsDict(*spec));
        return specs;
      },
      "What operators on lists of tensors are (csrc/ops/op_spec.h): names of "
      "lists and numbers, the numbers' ranges and defaults (NaN: none), and "
      "the like of those that operators have in common.");
}
