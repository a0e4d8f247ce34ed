// What a program that refers to none of it has loaded nevertheless: the
// operators, and the CUDA side of torch and of the operators.
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <iostream>

int main() {
  const auto op =
      c10::Dispatcher::singleton().findSchema({"torch_sgmcmc::sgld_step_", ""});
  const auto has_kernel = [&](c10::DispatchKey key) {
    return op.has_value() && op->hasKernelForDispatchKey(key);
  };
  std::cout << std::boolalpha
            << "operators: " << has_kernel(c10::DispatchKey::CPU) << '\n'
            << "torch with CUDA: " << at::globalContext().hasCUDART() << '\n'
            << "operators with CUDA: " << has_kernel(c10::DispatchKey::CUDA)
            << '\n';
}
