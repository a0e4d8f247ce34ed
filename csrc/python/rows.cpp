// The rows of the operators, for what Python makes of them.
#include "methods/rows.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "core/row.h"

namespace py = pybind11;

namespace {

using torch_sgmcmc::List;
using torch_sgmcmc::Row;
using torch_sgmcmc::Scalar;
using torch_sgmcmc::Start;

const char* NameOf(Start start) {
  switch (start) {
    case Start::kZeros:
      return "zeros";
    case Start::kStationary:
      return "stationary";
    case Start::kByCode:
      break;
  }
  return "";
}

py::dict AsDict(const Scalar& number) {
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

py::dict AsDict(const Row& row) {
  py::list lists;
  for (const List& list : row.lists) {
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
  for (const Scalar& number : row.numbers) numbers.append(AsDict(number));
  py::list common;
  for (const torch_sgmcmc::CommonNumber& number :
       torch_sgmcmc::kCommonNumbers) {
    if (Has(row, number)) common.append(AsDict(number.scalar));
  }
  py::dict result;
  result["op"] = row.op;
  result["lists"] = lists;
  result["numbers"] = numbers;
  result["has_noise"] = row.noise != torch_sgmcmc::Noise::kNone;
  result["common"] = common;
  result["has_prior_mean"] = row.has_prior_mean;
  result["sums"] = row.sums;
  return result;
}

}  // namespace

void BindRows(py::module_& m) {
  m.def(
      "operator_rows",
      [] {
        py::list rows;
        for (const Row* row : torch_sgmcmc::kRows) rows.append(AsDict(*row));
        return rows;
      },
      "What operators on lists of tensors are (csrc/core/row.h): names of "
      "lists and numbers, the numbers' ranges and defaults (NaN: none), and "
      "the like of those that operators have in common.");
}
