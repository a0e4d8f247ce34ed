#include "torch_sgmcmc/sglrw.h"

#include "libtorch/sampler_impl.h"

namespace torch_sgmcmc {
namespace {

class SGLRWImpl : public SamplerImpl {
 public:
  SGLRWImpl() : SamplerImpl("sglrw_step_") {}
};

const bool kSGLRW = Register<SGLRWOptions, SGLRWImpl>();

}  // namespace
}  // namespace torch_sgmcmc
