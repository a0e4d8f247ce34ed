// The posterior of a network on MNIST, and what it predicts: SGHMC in an
// ordinary training loop.
//
//   mnist_bnn FOLDER [EPOCHS]
//
// The folder has MNIST's four idx files, unpacked. After each epoch a line says
// how often the last draw is wrong, and the mean of all draws since a quarter
// of the epochs. examples/python/mnist_bnn.py is the same with more to look at;
// resumable.cpp has checkpoints and draws on disk.
#include <torch/torch.h>
#include <torch_sgmcmc/torch_sgmcmc.h>

#include <cstdint>
#include <cstdio>
#include <exception>
#include <iostream>
#include <stdexcept>
#include <string>

namespace {

using torch::Tensor;
using torch::data::datasets::MNIST;

constexpr int64_t kBatch = 500;

double ErrorOf(const Tensor& scores, const Tensor& labels) {
  return (scores.argmax(1) != labels).to(torch::kDouble).mean().item<double>();
}

int Run(const std::string& folder, int64_t epochs) {
  if (epochs < 1) throw std::invalid_argument("EPOCHS must be >= 1");
  const MNIST train(folder);
  const MNIST test(folder, MNIST::Mode::kTest);
  const Tensor x = train.images().flatten(1);
  const Tensor test_x = test.images().flatten(1);
  const int64_t num_data = x.size(0);

  torch::manual_seed(0);
  torch::nn::Sequential net(torch::nn::Linear(x.size(1), 100),
                            torch::nn::ReLU(), torch::nn::Linear(100, 10));
  torch_sgmcmc::SGHMC sampler(net->parameters(),
                              torch_sgmcmc::SGHMCOptions(0.1)
                                  .momentum(0.9)
                                  .num_data(static_cast<double>(num_data))
                                  .prior_precision(1)
                                  .seed(0));
  torch_sgmcmc::Predictive predictive;

  for (int64_t epoch = 1; epoch <= epochs; ++epoch) {
    for (int64_t i = 0; i < num_data / kBatch; ++i) {
      const Tensor batch = torch::tensor(torch_sgmcmc::draw_minibatch(
          num_data, kBatch, sampler.seed(), sampler.num_steps()));
      sampler.zero_grad();
      const Tensor outputs = net->forward(x.index_select(0, batch));
      torch::cross_entropy_loss(outputs, train.targets().index_select(0, batch))
          .backward();
      sampler.step();
    }
    const torch::NoGradGuard no_grad;
    const Tensor outputs = net->forward(test_x);
    std::printf("epoch %lld of %lld: error %.2f %%",
                static_cast<long long>(epoch), static_cast<long long>(epochs),
                100 * ErrorOf(outputs, test.targets()));
    if (4 * epoch > epochs) {  // else it is burning in
      predictive.update(outputs);
      const Tensor mean = predictive.result().mean;
      const Tensor nll = torch::nll_loss(mean.log(), test.targets());
      std::printf(", of the posterior %.2f %%, NLL %.4f (%lld draws)",
                  100 * ErrorOf(mean, test.targets()), nll.item<double>(),
                  static_cast<long long>(predictive.num_draws()));
    }
    std::printf("\n");
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc == 2) return Run(argv[1], 20);
    if (argc == 3) return Run(argv[1], std::stoll(argv[2]));
    std::cerr << "usage: mnist_bnn FOLDER [EPOCHS]\n";
  } catch (const c10::Error& error) {
    std::cerr << "mnist_bnn: " << error.what_without_backtrace() << '\n';
  } catch (const std::exception& error) {
    std::cerr << "mnist_bnn: " << error.what() << '\n';
  }
  return 1;
}
