// Samplers made of options, parameters and param groups that are right or
// nearly so: they are made, or an error says what is wrong; and so with a group
// that is added later, which changes nothing then.
#include <torch/torch.h>
#include <torch_sgmcmc/torch_sgmcmc.h>

#include "fuzz.h"
#include "same_values.h"
#include "testing.h"

namespace torch_sgmcmc {
namespace {

using torch::Tensor;
using torch::optim::OptimizerParamGroup;

double SomeNumber(Choices& random) {
  return random.one_in(3) ? random.fraction() : random.bad_number();
}

int64_t SomeInteger(Choices& random) {
  return random.one_in(3) ? random.below(5) : random.bad_integer();
}

std::string SomeWord(Choices& random) {
  return random.of({"online", "zeros", "one", "what?"});
}

// Sets some of the options that there are, or none; returns the names of all.
template <typename Options>
std::set<std::string> SetSome(Options& options, Choices& random) {
  std::set<std::string> names = {"seed", "capturable", "nonfinite"};
  const bool sets = random.one_in(2);
#define SET_SOME(name, value)                          \
  if constexpr (requires { options.name(value); }) {   \
    if (sets && random.one_in(6)) options.name(value); \
    names.insert(#name);                               \
  }
  SET_SOME(num_data, SomeNumber(random))
  SET_SOME(prior_precision, SomeNumber(random))
  SET_SOME(prior_mean, SomeNumber(random))
  SET_SOME(temperature, SomeNumber(random))
  SET_SOME(momentum, SomeNumber(random))
  SET_SOME(noise_estimate, SomeNumber(random))
  SET_SOME(noise_estimate, SomeWord(random))
  SET_SOME(resample_momentum_every, SomeInteger(random))
  SET_SOME(initial_momentum, SomeWord(random))
  SET_SOME(num_chains, SomeInteger(random))
  SET_SOME(thermostat_rate, SomeNumber(random))
  SET_SOME(decay, SomeNumber(random))
  SET_SOME(eps, SomeNumber(random))
  SET_SOME(surrogate, SomeWord(random))
  SET_SOME(index_chain_length, SomeInteger(random))
  SET_SOME(num_std, SomeNumber(random))
  SET_SOME(observation_decay, SomeNumber(random))
  SET_SOME(refresh_rate, SomeNumber(random))
  SET_SOME(sample_interval, SomeNumber(random))
  SET_SOME(adapt, random.one_in(2))
  SET_SOME(preconditioned, random.one_in(2))
#undef SET_SOME
  if constexpr (requires { options.lr(0.1); }) {
    if (sets && random.one_in(6)) options.lr(SomeNumber(random));
    names.insert("lr");
  }
  return names;
}

Tensor SomeParameter(Choices& random) {
  const auto dtype = random.of({at::kFloat, at::kDouble, at::kBFloat16});
  std::vector<int64_t> shape = random.shape();
  shape.insert(shape.begin(), 4);  // of which there may be chains
  return random.tensor(shape, dtype).requires_grad_();
}

std::vector<OptimizerParamGroup> SomeGroups(Choices& random, bool spoils) {
  std::vector<OptimizerParamGroup> groups;
  Tensor last = SomeParameter(random);
  for (int64_t i = spoils ? random.below(4) : 1 + random.below(3); i > 0; --i) {
    std::vector<Tensor> params = {SomeParameter(random)};
    if (random.one_in(2)) params.push_back(SomeParameter(random));
    if (spoils && random.one_in(2)) params.push_back(random.spoiled(last));
    if (spoils && random.one_in(4)) params.push_back(last.detach());
    if (spoils && random.one_in(8)) params.clear();
    if (!params.empty()) last = params.front();
    groups.emplace_back(std::move(params));
  }
  return groups;
}

template <typename Options>
void Require(Options& options) {
  if constexpr (!std::is_same_v<Options, SBPSOptions>) options.lr(0.1);
  options.num_data(50);
}

template <typename Options>
std::unique_ptr<torch::optim::OptimizerOptions> OptionsOfGroup(
    Choices& random) {
  if (random.one_in(8)) {
    return std::make_unique<torch::optim::SGDOptions>(0.1);
  }
  auto options = std::make_unique<Options>();
  if (random.one_in(8)) options->num_data(random.bad_number());
  if (random.one_in(8)) options->seed(1);
  options->prior_precision(random.one_in(4) ? random.bad_number() : 0.5);
  return options;
}

// Calls; whether there was no error, which must be one of these.
bool Succeeds(const std::function<void()>& call,
              const std::set<std::string>& names) {
  try {
    call();
    return true;
  } catch (const std::invalid_argument& error) {
    const std::string text = error.what();
    bool is_named = Names(text, "parameter") || Names(text, "parameters") ||
                    Names(text, "param") || Names(text, "Tensor");
    for (const std::string& name : names) {
      is_named = is_named || Names(text, name);
    }
    EXPECT_TRUE(is_named) << text;
  }  // all else is an error of the test
  return false;
}

template <typename Method, typename Options>
bool Makes(Choices& random) {
  Options options;
  Require(options);
  const std::set<std::string> names = SetSome(options, random);
  if (random.one_in(8)) options.capturable(true);
  if (random.one_in(8)) options.nonfinite(random.of({"skip", "all", ""}));
  if (random.one_in(2)) options.seed(random.any());
  const bool spoils = random.one_in(3);
  std::vector<OptimizerParamGroup> groups = SomeGroups(random, spoils);
  OptimizerParamGroup later = SomeGroups(random, false).front();
  if (random.one_in(3)) {
    later =
        OptimizerParamGroup(later.params(), OptionsOfGroup<Options>(random));
  }
  std::vector<Tensor> params = later.params();
  for (auto& group : groups) {
    params.insert(params.end(), group.params().begin(), group.params().end());
    if (!spoils || !random.one_in(4)) continue;
    group =
        OptimizerParamGroup(group.params(), OptionsOfGroup<Options>(random));
  }
  const Memory memory(params);
  std::unique_ptr<Method> sampler;
  const bool is_made = Succeeds(
      [&] { sampler = std::make_unique<Method>(groups, options); }, names);
  EXPECT_TRUE(memory.is_unchanged());
  if (!is_made) return false;
  const c10::IValue before = c10::IValue(sampler->state_dict()).deepcopy();
  EXPECT_TRUE(Succeeds([&] { sampler->load_state_dict(before); }, {}));
  EXPECT_TRUE(SameValues(sampler->state_dict(), before));
  if (!Succeeds([&] { sampler->add_param_group(later); }, names)) {
    EXPECT_TRUE(SameValues(sampler->state_dict(), before));
  }
  EXPECT_TRUE(memory.is_unchanged());
  return true;
}

TEST(Fuzz, Constructors) {
  const std::vector<std::pair<std::string, bool (*)(Choices&)>> makers = {
      {"EWSG", Makes<EWSG, EWSGOptions>},
      {"MCLMC", Makes<MCLMC, MCLMCOptions>},
      {"PSGLD", Makes<PSGLD, PSGLDOptions>},
      {"SBPS", Makes<SBPS, SBPSOptions>},
      {"SGHMC", Makes<SGHMC, SGHMCOptions>},
      {"SGLD", Makes<SGLD, SGLDOptions>},
      {"SGNHT", Makes<SGNHT, SGNHTOptions>}};
  std::map<std::string, Tally> tallies;
  ForEachCall(static_cast<int64_t>(200 * makers.size()), [&](int64_t seed) {
    const auto& [name, makes] =
        makers[static_cast<size_t>(seed) % makers.size()];
    SCOPED_TRACE(name);
    Choices random(seed);
    Tally& tally = tallies[name];
    ++tally.made;
    if (makes(random)) ++tally.succeeded;
  });
  for (const auto& [name, tally] : tallies) tally.check(name);
}

}  // namespace
}  // namespace torch_sgmcmc
