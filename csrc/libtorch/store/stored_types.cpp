#include "libtorch/store/stored_types.h"

#include <array>
#include <stdexcept>
#include <utility>

namespace torch_sgmcmc {
namespace {

using c10::ScalarType;

constexpr std::array<std::pair<const char*, ScalarType>, 14> kStoredNames = {{
    {"U64", ScalarType::UInt64},
    {"I64", ScalarType::Long},
    {"F64", ScalarType::Double},
    {"C64", ScalarType::ComplexFloat},
    {"F32", ScalarType::Float},
    {"U32", ScalarType::UInt32},
    {"I32", ScalarType::Int},
    {"BF16", ScalarType::BFloat16},
    {"F16", ScalarType::Half},
    {"U16", ScalarType::UInt16},
    {"I16", ScalarType::Short},
    {"I8", ScalarType::Char},
    {"U8", ScalarType::Byte},
    {"BOOL", ScalarType::Bool},
}};

}  // namespace

std::string StoredTypeOf(ScalarType dtype) {
  for (const auto& [name, type] : kStoredNames) {
    if (type == dtype) return name;
  }
  return c10::toString(dtype);
}

ScalarType ScalarTypeOf(const std::string& stored) {
  for (const auto& [name, type] : kStoredNames) {
    if (stored == name) return type;
  }
  throw std::runtime_error("no dtype is stored as " + stored);
}

}  // namespace torch_sgmcmc
