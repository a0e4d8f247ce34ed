// JSON, as far as the files of a store need it: dicts, lists, strings, numbers.
#pragma once

#include <ATen/core/ivalue.h>

#include <string>
#include <string_view>

namespace torch_sgmcmc {

// null is NaN. Throws std::runtime_error if the text is not one value of JSON.
c10::IValue ParseJson(std::string_view text);

// Numbers have as many digits as it takes to read them back; those that are not
// finite are null.
std::string ToJson(const c10::IValue& value);

}  // namespace torch_sgmcmc
