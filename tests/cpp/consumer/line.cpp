// A straight line through noisy points: what is known of its slope and
// intercept, by SGLD and by SGHMC.
//
// With one unit of noise and a flat prior the posterior is normal and known, so
// the program can say what it should have found. U is half the squared error of
// all points; the loss, its mean, is what a training program computes anyway.
#include <torch/torch.h>
#include <torch_sgmcmc/torch_sgmcmc.h>

#include <cmath>
#include <cstdint>
#include <iomanip>
#include <iostream>
#include <string>

namespace {

constexpr int64_t kPoints = 50;
constexpr int64_t kBurnIn = 500;
constexpr int64_t kSteps = 5000;

struct Data {
  torch::Tensor x;
  torch::Tensor y;
};

Data MakeData(torch::Device device) {
  torch::manual_seed(0);
  const auto x = torch::linspace(-1, 1, kPoints).unsqueeze(1);
  const auto y = 2 * x - 1 + torch::randn({kPoints, 1});
  return {x.to(device), y.to(device)};
}

void Print(const std::string& name, const torch::Tensor& samples) {
  const auto mean = samples.mean(0);
  const auto std = samples.std(0);
  std::cout << std::setw(6) << name << std::fixed << std::setprecision(2);
  for (int64_t i = 0; i < 2; ++i) {
    std::cout << "   " << std::setw(5) << mean[i].item<double>() << " +- "
              << std[i].item<double>();
  }
  std::cout << '\n';
}

// Draws from the posterior itself, to compare with.
torch::Tensor Exact(const Data& data) {
  const auto columns = torch::cat({data.x, torch::ones_like(data.x)}, 1);
  const auto covariance = columns.t().mm(columns).inverse();
  const auto mean = covariance.mm(columns.t()).mm(data.y);
  const auto noise = torch::randn({kSteps, 2}, data.x.options());
  return mean.t() + noise.mm(torch::linalg_cholesky(covariance).t());
}

// An ordinary training loop that keeps the iterates.
template <typename Method, typename Options>
torch::Tensor Sample(const Data& data, const Options& options) {
  torch::manual_seed(1);
  torch::nn::Linear line(1, 1);
  line->to(data.x.device());
  Method sampler(line->parameters(), options);
  auto samples = torch::empty({kSteps, 2});
  for (int64_t step = -kBurnIn; step < kSteps; ++step) {
    sampler.zero_grad();
    const auto loss = (line->forward(data.x) - data.y).square().mean() / 2;
    loss.backward();
    sampler.step();
    if (step >= 0) {
      samples[step][0] = line->weight.detach()[0][0];
      samples[step][1] = line->bias.detach()[0];
    }
  }
  return samples;
}

}  // namespace

int main() {
  using torch_sgmcmc::SGHMC;
  using torch_sgmcmc::SGHMCOptions;
  using torch_sgmcmc::SGLD;
  using torch_sgmcmc::SGLDOptions;

  const bool cuda = torch::cuda::is_available() && torch_sgmcmc::has_cuda();
  const Data data = MakeData(cuda ? torch::kCUDA : torch::kCPU);
  std::cout << "on " << data.x.device() << "    slope            intercept\n";
  Print("exact", Exact(data));
  Print("SGLD", Sample<SGLD>(data, SGLDOptions(0.1).num_data(kPoints).seed(0)));
  Print("SGHMC",
        Sample<SGHMC>(
            data, SGHMCOptions(0.02).momentum(0.9).num_data(kPoints).seed(0)));
  return 0;
}
