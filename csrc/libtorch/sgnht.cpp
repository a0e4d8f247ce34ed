#include "torch_sgmcmc/sgnht.h"

#include <optional>

#include "libtorch/sampler_impl.h"

namespace torch_sgmcmc {
namespace {

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

const bool kSGNHT = Register<SGNHTOptions, SGNHTImpl>();

}  // namespace
}  // namespace torch_sgmcmc
