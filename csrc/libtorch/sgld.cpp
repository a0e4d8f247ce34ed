#include "torch_sgmcmc/sgld.h"

#include "libtorch/sampler_impl.h"

namespace torch_sgmcmc {
namespace {

class SGLDImpl : public SamplerImpl {
 public:
  SGLDImpl() : SamplerImpl("sgld_step_") {}
};

const bool kSGLD = Register<SGLDOptions, SGLDImpl>();

}  // namespace
}  // namespace torch_sgmcmc
