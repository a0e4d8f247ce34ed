// Values in messages, in the words of LibTorch.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Layout.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <string>

namespace torch_sgmcmc {

// "[2, 3]"
std::string Shape(c10::IntArrayRef sizes);

// "torch::kFloat"
std::string DtypeName(c10::ScalarType dtype);

// "torch::kSparse"
std::string LayoutName(c10::Layout layout);

// "Double", or "none"
std::string KindOf(const c10::IValue& value);

// "50,000"; a number that is not whole has its decimals.
std::string Thousands(int64_t value);
std::string Thousands(double value);

// "%.4g", "%.6g"
std::string FourDigits(double value);
std::string SixDigits(double value);

}  // namespace torch_sgmcmc
