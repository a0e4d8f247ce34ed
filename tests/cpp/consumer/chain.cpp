// Runs chains that files describe and writes where they end. On its standard
// input are the names of a job and of its result, each on a line; the answer is
// a line too.
//
// The job is a dict that Python's torch.save wrote
// (tests/harness/cpp_jobs.py has the same loop in Python): a small network
// and its data, the minibatches in the order in which they are drawn, the class
// and the hyperparameters of a sampler with lr and T of every step, and
// optionally the state from which an earlier chain is continued. The result
// holds the same state after the last step, and torch.load reads it.
#include <torch/torch.h>
#include <torch_sgmcmc/torch_sgmcmc.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace sg = torch_sgmcmc;
namespace nn = torch::nn;

namespace {

sg::StateDict GroupAt(const sg::StateDict& job, size_t index) {
  return job.at("groups").toListRef()[index];
}

// A value of a state dict as a hyperparameter has it.
template <typename T>
T Value(const c10::IValue& value) {
  if constexpr (std::is_same_v<T, double>) {
    return value.toScalar().toDouble();
  } else if constexpr (std::is_same_v<T, std::optional<double>> ||
                       std::is_same_v<T, std::optional<int64_t>>) {
    if (value.isNone()) return std::nullopt;
    return Value<typename T::value_type>(value);
  } else if constexpr (std::is_same_v<T, sg::SGHMCOptions::NoiseEstimate>) {
    if (value.isString()) return value.toStringRef();
    return Value<double>(value);
  } else {
    return value.to<T>();
  }
}

// A group's options, from the dict that they are in a state dict.
template <typename Options>
Options Read(const sg::StateDict& group) {
  Options options;
#define READ(name)                                                  \
  if constexpr (requires { options.name(options.name()); }) {       \
    options.name(Value<decltype(options.name())>(group.at(#name))); \
  }
  READ(lr)
  READ(num_data)
  READ(prior_precision)
  READ(temperature)
  READ(num_chains)
  READ(momentum)
  READ(noise_estimate)
  READ(resample_momentum_every)
  READ(initial_momentum)
  READ(decay)
  READ(eps)
  READ(adapt)
  READ(thermostat_rate)
  READ(surrogate)
  READ(index_chain_length)
  READ(num_std)
  READ(observation_decay)
  READ(refresh_rate)
  READ(preconditioned)
  READ(adapt_every_step)
  READ(sample_interval)
  READ(replacement)
#undef READ
  if constexpr (std::is_same_v<Options, sg::SGHMCOptions>) {
    std::visit(
        [&](const auto& value) { options.noise_estimate(value); },
        Value<sg::SGHMCOptions::NoiseEstimate>(group.at("noise_estimate")));
  }
  return options.prior_mean(Value<double>(group.at("prior_mean")));
}

// Those of its options that a group may set for itself.
template <typename Options>
Options OfGroup(const Options& all) {
  return all;
}

sg::EWSGOptions OfGroup(const sg::EWSGOptions& all) {
  return sg::EWSGOptions(all.lr())
      .num_data(all.num_data())
      .prior_precision(all.prior_precision())
      .prior_mean(all.prior_mean())
      .temperature(all.temperature())
      .momentum(all.momentum())
      .surrogate(all.surrogate());
}

sg::MCLMCOptions OfGroup(const sg::MCLMCOptions& all) {
  return sg::MCLMCOptions()
      .prior_precision(all.prior_precision())
      .prior_mean(all.prior_mean());
}

sg::SBPSOptions OfGroup(const sg::SBPSOptions& all) {
  return sg::SBPSOptions()
      .prior_precision(all.prior_precision())
      .prior_mean(all.prior_mean());
}

std::vector<torch::Tensor> TensorsAt(const sg::StateDict& job,
                                     const char* key) {
  std::vector<torch::Tensor> tensors;
  for (const c10::IValue& value : job.at(key).toListRef()) {
    tensors.push_back(value.toTensor());
  }
  return tensors;
}

// One group for each linear layer.
template <typename Method, typename Options>
std::unique_ptr<sg::Sampler> Make(const sg::StateDict& job,
                                  nn::SequentialImpl& net) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const size_t layer : {0, 2}) {
    const size_t index = groups.size();
    auto options = OfGroup(Read<Options>(GroupAt(job, index)));
    if (layer == 2 && job.contains("means")) {
      options.prior_mean(TensorsAt(job, "means"));
    }
    groups.emplace_back(net[layer]->parameters(),
                        std::make_unique<Options>(options));
  }
  auto defaults = Read<Options>(GroupAt(job, 0));
  torch::manual_seed(0);  // for a seed that is None, to be drawn
  if (!job.at("seed").isNone())
    defaults.seed(job.at("seed").toTensor().item<int64_t>());
  return std::make_unique<Method>(std::move(groups), defaults);
}

const std::map<std::string, std::function<std::unique_ptr<sg::Sampler>(
                                const sg::StateDict&, nn::SequentialImpl&)>>
    kSamplers = {
        {"SGLD", Make<sg::SGLD, sg::SGLDOptions>},
        {"SGLRW", Make<sg::SGLRW, sg::SGLRWOptions>},
        {"BAOA", Make<sg::BAOA, sg::BAOAOptions>},
        {"MCLMC", Make<sg::MCLMC, sg::MCLMCOptions>},
        {"SGHMC", Make<sg::SGHMC, sg::SGHMCOptions>},
        {"PSGLD", Make<sg::PSGLD, sg::PSGLDOptions>},
        {"SGNHT", Make<sg::SGNHT, sg::SGNHTOptions>},
        {"EWSG", Make<sg::EWSG, sg::EWSGOptions>},
        {"SBPS", Make<sg::SBPS, sg::SBPSOptions>},
};

nn::Sequential Network(const sg::StateDict& job) {
  const torch::Tensor x = job.at("x").toTensor();
  const sg::StateDict model = job.at("model");
  const auto hidden = model.at("0.weight").toTensor().size(0);
  nn::Sequential net(nn::Linear(x.size(1), hidden), nn::Tanh(),
                     nn::Linear(hidden, model.at("2.bias").toTensor().size(0)));
  net->to(x.scalar_type());
  sg::load_state_dict(*net, model);
  return net;
}

void Run(const std::string& job_path, const std::string& result_path) {
  const sg::StateDict job = sg::load(job_path);
  const torch::Tensor x = job.at("x").toTensor();
  const torch::Tensor y = job.at("y").toTensor();
  const torch::Tensor batches = job.at("batches").toTensor();
  const torch::Tensor lrs = job.at("lrs").toTensor();
  const torch::Tensor temperatures = job.at("temperatures").toTensor();
  const int64_t gibbs_every = job.at("gibbs_every").toInt();
  // The closure returns the losses of the examples, and there is no lr.
  const bool per_example = job.at("per_example").toBool();

  nn::Sequential net = Network(job);
  const auto sampler = kSamplers.at(job.at("sampler").toStringRef())(job, *net);
  std::optional<sg::GammaPrecision> precision;
  if (gibbs_every > 0) precision.emplace(*sampler);
  if (job.contains("state")) {
    sampler->load_state_dict(job.at("state"));
    if (precision) precision->load_state_dict(job.at("precision"));
  }

  const int64_t most_draws = batches.size(0) / lrs.size(0);
  for (int64_t i = 0; i < lrs.size(0); ++i) {
    // Each step has minibatches of its own; it may leave some of them.
    int64_t draws = i * most_draws;
    const size_t groups = per_example ? 0 : sampler->param_groups().size();
    for (size_t group = 0; group < groups; ++group) {
      const auto column = static_cast<int64_t>(group);
      auto& options = dynamic_cast<sg::SamplerOptions&>(
          sampler->param_groups()[group].options());
      options.set_lr(lrs[i][column].item<double>());
      options.set_temperature(temperatures[i][column].item<double>());
    }
    sampler->step([&] {
      sampler->zero_grad();
      const torch::Tensor batch = batches[draws++];
      const torch::Tensor logits = net->forward(x.index({batch}));
      if (per_example) {
        return nn::functional::cross_entropy(
            logits, y.index({batch}),
            nn::functional::CrossEntropyFuncOptions().reduction(torch::kNone));
      }
      auto loss = nn::functional::cross_entropy(logits, y.index({batch}));
      loss.backward();
      // A parameter without a gradient must not shift the others' noise.
      if (i % 7 == 3) net[2]->named_parameters()["bias"].mutable_grad().reset();
      return loss;
    });
    if (precision && (i + 1) % gibbs_every == 0) precision->step();
  }
  sg::save(
      {{"model", sg::state_dict(*net)},
       {"state", sampler->state_dict()},
       {"precision", precision ? precision->state_dict() : sg::StateDict()}},
      result_path);
}

}  // namespace

// Runs the jobs that are named on standard input, a job and a result a line,
// and answers each with a line. What is thrown is a result too.
int main() {
  torch::set_num_threads(1);
  std::string job;
  std::string result;
  while (std::getline(std::cin, job) && job != "end" &&
         std::getline(std::cin, result)) {
    try {
      Run(job, result);
    } catch (const std::exception& error) {
      sg::save({{"error", std::string(error.what())}}, result);
    }
    std::cout << "done" << std::endl;
  }
  return 0;
}
