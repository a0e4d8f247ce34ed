#include "every_chain.h"

namespace torch_sgmcmc {
namespace {

std::vector<Tensor> TwoParams(int64_t width) {
  return {torch::linspace(-1, 1, 4 * width)
              .view({4, width})
              .set_requires_grad(true),
          torch::linspace(-0.5, 0.7, 8 * width, torch::kDouble)
              .view({4, 2 * width})
              .set_requires_grad(true)};
}

// Of 6 examples, other ones at every draw.
Tensor Losses(const std::vector<Tensor>& params, int64_t draw) {
  const Tensor x =
      torch::sin(10.0 * draw + torch::arange(6, torch::kDouble)).unsqueeze(1);
  Tensor losses = torch::zeros(6, torch::kDouble);
  for (const Tensor& p : params) {
    losses = losses + (p.to(torch::kDouble).flatten() - x).square().sum(1);
  }
  return losses;
}

// The mean loss of each of 4 chains.
Tensor LossesOfChains(const std::vector<Tensor>& params, int64_t draw) {
  const Tensor x = torch::sin(10.0 * draw + torch::arange(6, torch::kDouble));
  Tensor losses = torch::zeros(4, torch::kDouble);
  for (const Tensor& p : params) {
    const Tensor sums = p.to(torch::kDouble).reshape({4, -1}).sum(1, true);
    losses = losses + (0.1 * sums - x).square().mean(1);
  }
  return losses;
}

// With chains, each has a loss of its own.
template <typename Method, typename Options>
Chain Minibatched(int64_t width, const Options& options) {
  Chain chain = {TwoParams(width), nullptr, std::make_shared<Calls>(), nullptr};
  auto sampler = std::make_shared<Method>(chain.params, options);
  const bool has_chains = options.num_chains().has_value();
  chain.sampler = sampler;
  chain.step = [=, params = chain.params, calls = chain.calls] {
    sampler->step([&] {
      return calls->call([&](int64_t draw) {
        ZeroGrad(params);
        const Tensor loss = has_chains ? LossesOfChains(params, draw)
                                       : Losses(params, draw).mean();
        loss.sum().backward();
        return loss;
      });
    });
  };
  return chain;
}

Chain Bouncy(int64_t width, bool preconditioned) {
  Chain chain = {TwoParams(width), nullptr, std::make_shared<Calls>(), nullptr};
  auto sampler =
      std::make_shared<SBPS>(chain.params, SBPSOptions()
                                               .num_data(50)
                                               .prior_precision(20)
                                               .preconditioned(preconditioned)
                                               .seed(5));
  chain.sampler = sampler;
  chain.step = [=, params = chain.params, calls = chain.calls] {
    sampler->step([&] {
      return calls->call([&](int64_t draw) { return Losses(params, draw); });
    });
  };
  return chain;
}

template <typename Options>
Options Common(Options options) {
  return options.num_data(50).seed(5);
}

}  // namespace

const std::map<std::string, Maker>& Makers() {
  static const std::map<std::string, Maker> makers = {
      {"SGLD",
       [](int64_t width) {
         return Minibatched<SGLD>(width, Common(SGLDOptions(0.1)));
       }},
      {"SGHMC",
       [](int64_t width) {
         return Minibatched<SGHMC>(
             width, Common(SGHMCOptions(0.1)).noise_estimate("online"));
       }},
      {"PSGLD",
       [](int64_t width) {
         return Minibatched<PSGLD>(width, Common(PSGLDOptions(0.1)));
       }},
      {"SGNHT",
       [](int64_t width) {
         return Minibatched<SGNHT>(width, Common(SGNHTOptions(0.1)));
       }},
      {"MCLMC",
       [](int64_t width) {
         return Minibatched<MCLMC>(width, Common(MCLMCOptions(0.1)));
       }},
      {"EWSG",
       [](int64_t width) {
         return Minibatched<EWSG>(
             width, Common(EWSGOptions(0.1)).index_chain_length(3));
       }},
      {"EWSG, overdamped",
       [](int64_t width) {
         return Minibatched<EWSG>(width, Common(EWSGOptions(0.1)).momentum(0));
       }},
      {"EWSG, many chains",
       [](int64_t width) {
         return Minibatched<EWSG>(width,
                                  Common(EWSGOptions(0.1)).num_chains(4));
       }},
      {"SBPS", [](int64_t width) { return Bouncy(width, false); }},
      {"pSBPS", [](int64_t width) { return Bouncy(width, true); }},
  };
  return makers;
}

void ZeroGrad(const std::vector<Tensor>& params) {
  for (const Tensor& p : params) p.mutable_grad().reset();
}

c10::IValue Snapshot(const Chain& chain) {
  c10::impl::GenericList params(c10::AnyType::get());
  for (const Tensor& p : chain.params) params.push_back(p.detach());
  return c10::IValue(StateDict({{"params", params},
                                {"sampler", chain.sampler->state_dict()}}))
      .deepcopy();
}

}  // namespace torch_sgmcmc
