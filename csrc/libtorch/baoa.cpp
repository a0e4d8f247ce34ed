#include "torch_sgmcmc/baoa.h"

#include "libtorch/sampler_impl.h"

namespace torch_sgmcmc {
namespace {

class BAOAImpl : public SamplerImpl {
 public:
  BAOAImpl() : SamplerImpl("baoa_step_") {}

 protected:
  void check_options(const OptionValues& options) const override {
    const double momentum = options.number("momentum");
    options.check_noise_estimate(2 * (1 - momentum) / (1 + momentum),
                                 "2 (1 - momentum) / (1 + momentum)");
  }
};

const bool kBAOA = Register<BAOAOptions, BAOAImpl>();

}  // namespace
}  // namespace torch_sgmcmc
