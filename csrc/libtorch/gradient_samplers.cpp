// Samplers whose step is an operator's, with a check or a number at most.
#include <optional>

#include "libtorch/sampler_impl.h"
#include "torch_sgmcmc/baoa.h"
#include "torch_sgmcmc/sgld.h"
#include "torch_sgmcmc/sglrw.h"
#include "torch_sgmcmc/sgnht.h"

namespace torch_sgmcmc {
namespace {

class SGLDImpl : public SamplerImpl {
 public:
  SGLDImpl() : SamplerImpl("sgld_step_") {}
};

class SGLRWImpl : public SamplerImpl {
 public:
  SGLRWImpl() : SamplerImpl("sglrw_step_") {}
};

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

class SGNHTImpl : public SamplerImpl {
 public:
  SGNHTImpl() : SamplerImpl("sgnht_step_") {}

 protected:
  void update(const TensorLists& lists) override {
    const OptionValues& options = *lists.options;
    const auto rate = options.get<std::optional<double>>("thermostat_rate");
    const double unit_mass =
        options.lr() * options.temperature() / options.num_data();
    update_by(op_, lists, {{"thermostat_rate", rate.value_or(unit_mass)}});
  }
};

const bool kGradientSamplers[] = {
    Register<SGLDOptions, SGLDImpl>(), Register<SGLRWOptions, SGLRWImpl>(),
    Register<BAOAOptions, BAOAImpl>(), Register<SGNHTOptions, SGNHTImpl>()};

}  // namespace
}  // namespace torch_sgmcmc
