// A chain that may be killed at any time: started again, it goes on, and ends
// with the bits of a chain that was never interrupted.
//
//   resumable FOLDER STEPS
//
// A Bayesian neural network is sampled by SGHMC, with its prior's precision.
// Model, sampler, precision and collected draws go into one checkpoint, which
// is replaced as a whole. Minibatches are a function of the number of the step,
// so they need no state.
#include <torch/torch.h>
#include <torch_sgmcmc/torch_sgmcmc.h>

#include <cstdint>
#include <exception>
#include <filesystem>
#include <iostream>
#include <string>

namespace {

constexpr int64_t kPoints = 500;
constexpr int64_t kSteps = 100;  // from one checkpoint to the next

int Run(const std::filesystem::path& folder, int64_t steps) {
  std::filesystem::create_directories(folder);
  const std::string file = folder / "chain.pt";

  const auto x = torch::linspace(-2, 2, kPoints).unsqueeze(1);
  const auto y = torch::sin(3 * x) + 0.1 * torch::cos(40 * x);
  torch::manual_seed(0);
  torch::nn::Sequential net(torch::nn::Linear(1, 30), torch::nn::Tanh(),
                            torch::nn::Linear(30, 1));
  torch_sgmcmc::SGHMC sampler(net->parameters(),
                              torch_sgmcmc::SGHMCOptions(0.01)
                                  .num_data(kPoints)
                                  .prior_precision(1)
                                  .seed(1));
  torch_sgmcmc::GammaPrecision precision(sampler);
  torch_sgmcmc::Collector collector(sampler, *net, folder / "draws");
  if (std::filesystem::exists(file)) {
    const auto saved = torch_sgmcmc::load(file);
    torch_sgmcmc::load_state_dict(*net, saved.at("model"));
    sampler.load_state_dict(saved.at("sampler"));
    precision.load_state_dict(saved.at("precision"));
    collector.load_state_dict(saved.at("collector"));
    std::cout << "goes on from step " << sampler.num_steps() << std::endl;
  } else {
    collector.restart();  // what a run left behind that was killed early
  }

  while (sampler.num_steps() < steps) {
    const auto batch = torch::tensor(torch_sgmcmc::draw_minibatch(
        kPoints, /*batch_size=*/50, sampler.seed(), sampler.num_steps()));
    const auto loss = sampler.step([&] {
      sampler.zero_grad();
      const auto out = net->forward(x.index_select(0, batch));
      auto energy = 10 * torch::mse_loss(out, y.index_select(0, batch));
      energy.backward();
      return energy;
    });
    const int64_t step = sampler.num_steps();
    if (step > 200 && step % 20 == 0) collector.collect(loss);
    if (step % kSteps == 0) {
      precision.step();
      torch_sgmcmc::save({{"model", torch_sgmcmc::state_dict(*net)},
                          {"sampler", sampler.state_dict()},
                          {"precision", precision.state_dict()},
                          {"collector", collector.state_dict()}},
                         file);
    }
  }
  collector.close();

  const torch::NoGradGuard no_grad;
  torch::Tensor sum = torch::zeros_like(y);
  const torch_sgmcmc::SampleStore store(folder / "draws");
  for (const auto& draw : store) {
    draw.copy_to(*net);
    sum += net->forward(x);
  }
  const auto error =
      torch::mse_loss(sum / static_cast<double>(store.size()), y);
  std::cout << store.size() << " draws, mean squared error "
            << error.item<double>() << std::endl;
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc == 3) return Run(argv[1], std::stoll(argv[2]));
    std::cerr << "usage: resumable FOLDER STEPS\n";
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
  }
  return 1;
}
