#include "torch_sgmcmc/has_cuda.h"

#include <ATen/core/dispatch/Dispatcher.h>

namespace torch_sgmcmc {

bool has_cuda() {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow("torch_sgmcmc::gaussian_", "")
      .hasKernelForDispatchKey(c10::DispatchKey::CUDA);
}

}  // namespace torch_sgmcmc
