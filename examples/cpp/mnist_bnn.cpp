// The posterior of a network on MNIST, and what it predicts: SGHMC in an
// ordinary training loop, with a prior for each layer.
//
//   mnist_bnn FOLDER [EPOCHS]
//
// The folder has MNIST's four idx files, unpacked. Two chains begin at torch's
// initial values and at a draw from the prior. After each epoch a line says how
// often the last draw is wrong, and the mean of all draws since a third of the
// epochs; at the end stands whether the chains agree. More to look at is in
// examples/python/mnist_bnn.py; resumable.cpp has checkpoints and draws on
// disk.
#include <torch/torch.h>
#include <torch_sgmcmc/torch_sgmcmc.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

using torch::Tensor;
using torch::data::datasets::MNIST;
using torch::optim::OptimizerParamGroup;
using torch_sgmcmc::SGHMCOptions;

constexpr int64_t kBatch = 500;

double ErrorOf(const Tensor& scores, const Tensor& labels) {
  return (scores.argmax(1) != labels).to(torch::kDouble).mean().item<double>();
}

void PrintScores(const torch_sgmcmc::Predictive& predictive,
                 const Tensor& labels) {
  const Tensor mean = predictive.result().mean;
  std::printf(" of the posterior %.2f %%, NLL %.4f (%lld draws)",
              100 * ErrorOf(mean, labels),
              torch::nll_loss(mean.log(), labels).item<double>(),
              static_cast<long long>(predictive.num_draws()));
}

// Mean and standard error, by five batches of consecutive numbers.
std::pair<double, double> MeanOf(const std::vector<double>& numbers) {
  const Tensor all = torch::tensor(numbers, torch::kDouble);
  std::vector<Tensor> means;
  for (const Tensor& part : all.tensor_split(5)) means.push_back(part.mean());
  return {all.mean().item<double>(),
          torch::stack(means).std().item<double>() / std::sqrt(5.0)};
}

int Run(const std::string& folder, int64_t epochs) {
  if (epochs < 1) throw std::invalid_argument("EPOCHS must be >= 1");
  const MNIST train(folder);
  const MNIST test(folder, MNIST::Mode::kTest);
  const Tensor x = train.images().flatten(1);
  const Tensor test_x = test.images().flatten(1);
  const int64_t num_data = x.size(0);
  // Weights whose precision is half of their inputs' mean squared length have
  // outputs of variance 2, and ReLU's 100 outputs then have squared length 100.
  const double first = x.square().sum(1).mean().item<double>() / 2;
  const double last = 50;

  torch_sgmcmc::Predictive both;
  std::vector<std::pair<double, double>> losses;
  for (int64_t chain = 0; chain < 2; ++chain) {
    torch::manual_seed(chain);
    torch::nn::Linear hidden(x.size(1), 100);
    torch::nn::Linear output(100, 10);
    torch::nn::Sequential net(hidden, torch::nn::ReLU(), output);
    const auto group = [](const torch::nn::Linear& layer, double precision) {
      return OptimizerParamGroup(
          layer->parameters(),
          std::make_unique<SGHMCOptions>(
              SGHMCOptions(0.1).prior_precision(precision)));
    };
    torch_sgmcmc::SGHMC sampler({group(hidden, first), group(output, last)},
                                SGHMCOptions(0.1)
                                    .momentum(0.9)
                                    .num_data(static_cast<double>(num_data))
                                    .seed(chain));
    if (chain == 1) {  // begins at a draw from the prior
      const torch::NoGradGuard no_grad;
      for (Tensor& p : hidden->parameters()) p.normal_(0, 1 / std::sqrt(first));
      for (Tensor& p : output->parameters()) p.normal_(0, 1 / std::sqrt(last));
    }
    torch_sgmcmc::Predictive predictive;
    std::vector<double> found;
    for (int64_t epoch = 1; epoch <= epochs; ++epoch) {
      for (int64_t i = 0; i < num_data / kBatch; ++i) {
        const Tensor batch = torch::tensor(torch_sgmcmc::draw_minibatch(
            num_data, kBatch, sampler.seed(), sampler.num_steps()));
        sampler.zero_grad();
        const Tensor outputs = net->forward(x.index_select(0, batch));
        torch::cross_entropy_loss(outputs,
                                  train.targets().index_select(0, batch))
            .backward();
        sampler.step();
      }
      const torch::NoGradGuard no_grad;
      const Tensor outputs = net->forward(test_x);
      std::printf("chain %lld, epoch %lld of %lld: error %.2f %%",
                  static_cast<long long>(chain), static_cast<long long>(epoch),
                  static_cast<long long>(epochs),
                  100 * ErrorOf(outputs, test.targets()));
      if (3 * epoch > epochs) {  // else it is burning in
        predictive.update(outputs);
        both.update(outputs);
        found.push_back(
            torch::cross_entropy_loss(outputs, test.targets()).item<double>());
        std::printf(",");
        PrintScores(predictive, test.targets());
      }
      std::printf("\n");
      std::fflush(stdout);
    }
    losses.push_back(MeanOf(found));
  }
  std::printf("both chains:");
  PrintScores(both, test.targets());
  const double error = std::hypot(losses[0].second, losses[1].second);
  std::printf(
      "\nNLL of a draw: %.4f and %.4f, which differ by %.1f standard "
      "errors\n",
      losses[0].first, losses[1].first,
      std::abs(losses[0].first - losses[1].first) / error);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc == 2) return Run(argv[1], 60);
    if (argc == 3) return Run(argv[1], std::stoll(argv[2]));
    std::cerr << "usage: mnist_bnn FOLDER [EPOCHS]\n";
  } catch (const c10::Error& error) {
    std::cerr << "mnist_bnn: " << error.what_without_backtrace() << '\n';
  } catch (const std::exception& error) {
    std::cerr << "mnist_bnn: " << error.what() << '\n';
  }
  return 1;
}
