// What safetensors calls torch's dtypes.
#pragma once

#include <c10/core/ScalarType.h>

#include <string>

namespace torch_sgmcmc {

// Its name, or torch's where a draw cannot be stored in it.
std::string StoredTypeOf(c10::ScalarType dtype);
c10::ScalarType ScalarTypeOf(const std::string& stored);

}  // namespace torch_sgmcmc
