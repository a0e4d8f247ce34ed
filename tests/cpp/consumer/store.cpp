// A short run that stores draws and makes checkpoints, to be killed and started
// again: store FOLDER. tests/faults/test_killed_stores.py makes the same in
// Python.
#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>
#include <torch_sgmcmc/torch_sgmcmc.h>

#include <cstdint>
#include <exception>
#include <filesystem>
#include <iostream>
#include <string>

namespace {

constexpr int kSteps = 200;

struct Net : torch::nn::Module {
  Net()
      : weight(register_parameter("weight", torch::zeros({30, 20}))),
        bias(register_parameter("bias", torch::zeros({20}))),
        seen(register_buffer("seen",
                             torch::zeros({}, torch::dtype(torch::kLong)))) {}
  torch::Tensor weight;
  torch::Tensor bias;
  torch::Tensor seen;
};

void Run(const std::string& folder) {
  Net net;
  torch_sgmcmc::SGLD sampler(
      net.parameters(), torch_sgmcmc::SGLDOptions(0.1).num_data(10).seed(7));
  torch_sgmcmc::Collector collector(sampler, net, folder + "/store");
  at::Generator data = at::detail::createCPUGenerator(3);
  int first = 0;
  const std::string path = folder + "/run.pt";
  if (std::filesystem::exists(path)) {
    const torch_sgmcmc::StateDict run = torch_sgmcmc::load(path);
    torch_sgmcmc::load_state_dict(net, run.at("model"));
    sampler.load_state_dict(run.at("sampler"));
    collector.load_state_dict(run.at("collector"));
    data.set_state(run.at("data").toTensor());
    first = static_cast<int>(run.at("step").toInt());
  } else {
    collector.restart();
  }
  for (int step = first; step < kSteps; ++step) {
    for (torch::Tensor& p : net.parameters()) {
      p.mutable_grad() = p.detach() + torch::randn(p.sizes(), data);
    }
    net.seen.add_(1);
    sampler.step();
    if (step > 5 && step % 2 == 0) collector.collect(step / 7.0);
    if (step % 10 == 9) {
      torch_sgmcmc::save({{"model", torch_sgmcmc::state_dict(net)},
                          {"sampler", sampler.state_dict()},
                          {"collector", collector.state_dict()},
                          {"data", data.get_state()},
                          {"step", step + 1}},
                         path);
    }
  }
  collector.close();
}

// Reads all draws, or says what is wrong.
void Read(const std::string& folder) {
  const torch_sgmcmc::SampleStore store(folder + "/store");
  for (const torch_sgmcmc::Draw& draw : store) {
    double sum = 0;
    for (const std::string& name : draw.names()) {
      sum += draw.at(name).to(torch::kDouble).sum().item<double>();
    }
    std::cout << draw.step << ' ' << draw.weight << ' ' << draw.loss << ' '
              << sum << '\n';
  }
}

}  // namespace

int main(int argc, char** argv) {
  torch::set_num_threads(1);
  std::cout.precision(17);
  try {
    if (argc == 3) {
      Read(argv[2]);
    } else {
      Run(argv[1]);
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
  return 0;
}
