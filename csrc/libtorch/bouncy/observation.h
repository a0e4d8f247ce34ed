// What SBPS sees of a minibatch: torch_sgmcmc/bouncy/directional.py in C++,
// reverse mode.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <vector>

#include "host/moments.h"
#include "libtorch/bouncy/flight.h"
#include "libtorch/core/options.h"

namespace torch_sgmcmc {

// What a minibatch says along a direction.
struct MinibatchView {
  at::Tensor losses;
  at::Tensor derivatives;
  std::vector<at::Tensor> grads;  // of the mean loss
};

// Calls the closure once and differentiates what it returns along the flight's
// directions. Throws if that is not the losses of at least 2 examples, or if
// any of `all_params` has a gradient then.
MinibatchView Observe(const torch::optim::Optimizer::LossClosure& closure,
                      const Flight& flight,
                      const std::vector<at::Tensor>& all_params);

// The rate of change of U / T along the flight, at a time since its line began.
RateEstimate RateOf(Flight& flight,
                    double time,
                    const MinibatchView& seen,
                    const OptionValues& options);

}  // namespace torch_sgmcmc
