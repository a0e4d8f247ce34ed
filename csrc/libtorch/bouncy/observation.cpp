#include "libtorch/bouncy/observation.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <sstream>
#include <stdexcept>
#include <string>

#include "libtorch/core/checks.h"
#include "libtorch/core/sampler_impl.h"

namespace torch_sgmcmc {
namespace {

constexpr const char* kUnrelated =
    "SBPS got losses from the closure that do not depend on its parameters "
    "(were they computed under a torch::NoGradGuard?)";

void CheckLosses(const at::Tensor& losses, bool has_grads) {
  if (!losses.defined()) {
    throw std::runtime_error(
        "SBPS got an undefined Tensor from the closure (must return the losses "
        "of the examples, a Tensor of shape [n])");
  }
  if (has_grads) {
    throw std::runtime_error(
        "SBPS found gradients after the closure: it must return the losses of "
        "the examples and not call backward()");
  }
  if (losses.dim() != 1) {
    throw std::runtime_error(
        "SBPS got losses of shape " + Shape(losses.sizes()) +
        " from the closure (must be those of the examples, of shape [n]" +
        (losses.dim() == 0 ? ": use reduction(torch::kNone))" : ")"));
  }
  if (losses.numel() < 2) {
    throw std::runtime_error("SBPS got the loss of " +
                             std::to_string(losses.numel()) +
                             " example from the closure (must be of 2 at "
                             "least, to estimate the noise of a minibatch)");
  }
  if (!losses.requires_grad()) throw std::runtime_error(kUnrelated);
  if (!losses.is_floating_point()) {
    throw std::runtime_error(
        "SBPS got complex losses from the closure (must be real numbers)");
  }
}

}  // namespace

// Reverse mode: the gradient of the weighted sum of the losses is linear in the
// weights, and so is its product with a direction, whose coefficients are the
// derivatives of the examples.
MinibatchView Observe(const torch::optim::Optimizer::LossClosure& closure,
                      const Flight& flight,
                      const std::vector<at::Tensor>& all_params) {
  const auto clear = [&] {
    bool found = false;
    for (const at::Tensor& p : all_params) {
      found = found || p.grad().defined();
      p.mutable_grad().reset();
    }
    return found;
  };
  clear();
  std::vector<at::Tensor> along = flight.directions();
  for (size_t i = 0; i < along.size(); ++i) {
    along[i] = along[i].to(flight.params()[i].scalar_type());
  }
  const at::AutoGradMode enable_grad(true);
  const at::Tensor losses = closure();
  CheckLosses(losses, clear());
  const at::Tensor weights =
      at::full_like(losses.detach(), 1.0 / static_cast<double>(losses.numel()))
          .requires_grad_();
  const std::vector<at::Tensor> grads =
      torch::autograd::grad({losses},
                            flight.params(),
                            {weights},
                            /*retain_graph=*/std::nullopt,
                            /*create_graph=*/true,
                            /*allow_unused=*/true);
  std::vector<at::Tensor> used;
  std::vector<at::Tensor> directions;
  for (size_t i = 0; i < grads.size(); ++i) {
    if (!grads[i].defined()) continue;
    used.push_back(grads[i]);
    directions.push_back(along[i]);
  }
  if (used.empty()) throw std::runtime_error(kUnrelated);
  const at::Tensor derivatives =
      torch::autograd::grad(used, {weights}, directions)[0];
  MinibatchView result{losses.detach(), derivatives.detach(), {}};
  for (size_t i = 0; i < grads.size(); ++i) {
    result.grads.push_back(grads[i].defined()
                               ? grads[i].detach()
                               : at::zeros_like(flight.params()[i]));
  }
  return result;
}

RateEstimate RateOf(Flight& flight,
                    double time,
                    const MinibatchView& seen,
                    const OptionValues& options) {
  const double num_data = options.num_data();
  if (!options.get<bool>("replacement") &&
      static_cast<double>(seen.losses.numel()) > num_data) {
    std::ostringstream text;
    text << "SBPS got the losses of " << seen.losses.numel()
         << " examples from the closure, and num_data = " << num_data
         << " (must not be more; if examples are drawn with replacement, set "
            "replacement(true))";
    throw std::runtime_error(text.str());
  }
  const auto row = [](const at::Tensor& t) {
    return t.to(at::kCPU, at::kDouble).contiguous();
  };
  const at::Tensor losses = row(seen.losses);
  const at::Tensor derivatives = row(seen.derivatives);
  const Moments m = MomentsOf(losses.const_data_ptr<double>(),
                              derivatives.const_data_ptr<double>(),
                              losses.numel());
  if (m.bad > 0) {
    std::ostringstream text;
    text << "SBPS got " << m.bad << " of " << seen.losses.numel()
         << " losses from the closure that are not finite";
    throw NonfiniteError(text.str(), seen.losses);
  }
  const RateEstimate rate = RateOf(m,
                                   num_data,
                                   options.temperature(),
                                   options.get<bool>("replacement"),
                                   flight.prior(time));
  if (!rate.finite()) {
    throw NonfiniteError(
        "SBPS got losses from the closure whose derivatives are not finite",
        seen.losses);
  }
  return rate;
}

}  // namespace torch_sgmcmc
