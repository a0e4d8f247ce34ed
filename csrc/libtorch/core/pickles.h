// Reading what Python's torch.save wrote.
#pragma once

#include <ATen/core/ivalue.h>

#include <vector>

namespace torch_sgmcmc {

/// The value in a file of torch.save, as torch::pickle_load reads it, but for
/// ints of any width. Throws what torch does.
c10::IValue Unpickled(const std::vector<char>& archive);

}  // namespace torch_sgmcmc
