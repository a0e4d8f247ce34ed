// The store in C++: what is read, refused and named. Bytes and resuming are
// tested beside Python's (tests/faults/test_killed_stores.py).
#include "torch_sgmcmc/store.h"

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch_sgmcmc/torch_sgmcmc.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "message_of.h"

namespace {

using torch_sgmcmc::Collector;
using torch_sgmcmc::CollectorOptions;
using torch_sgmcmc::Draw;
using torch_sgmcmc::MessageOf;
using torch_sgmcmc::SampleStore;
using torch_sgmcmc::SGLD;
using torch_sgmcmc::SGLDOptions;
namespace fs = std::filesystem;

class Store : public testing::Test {
 protected:
  void SetUp() override {
    folder = fs::temp_directory_path() /
             (std::string("torch_sgmcmc_store_") +
              testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(folder);
  }
  void TearDown() override { fs::remove_all(folder); }

  fs::path folder;
};

// A network with batch norm, so with buffers that each step changes.
struct Chain {
  explicit Chain(const std::string& nonfinite = "raise", int width = 4)
      : net(Net(width)),
        sampler(net->parameters(),
                SGLDOptions(0.1)
                    .num_data(10)
                    .prior_precision(0.5)
                    .seed(1)
                    .nonfinite(nonfinite)) {}

  static torch::nn::Sequential Net(int width = 4) {
    torch::manual_seed(0);
    return torch::nn::Sequential(torch::nn::Linear(3, width),
                                 torch::nn::BatchNorm1d(width));
  }

  void Gradients() {
    net->forward(torch::arange(15, torch::kFloat).view({5, 3})).sum();
    for (torch::Tensor& p : net->parameters()) {
      p.mutable_grad() = p.detach().clone();
    }
  }

  // The state after each step.
  std::vector<torch::OrderedDict<std::string, torch::Tensor>> Run(
      Collector& collector, int steps) {
    std::vector<torch::OrderedDict<std::string, torch::Tensor>> states;
    for (int i = 0; i < steps; ++i) {
      Gradients();
      collector.step();
      states.emplace_back();
      for (const auto& item : net->named_parameters()) {
        states.back().insert(item.key(), item.value().detach().clone());
      }
      for (const auto& item : net->named_buffers()) {
        states.back().insert(item.key(), item.value().clone());
      }
    }
    return states;
  }

  torch::nn::Sequential net;
  SGLD sampler;
};

TEST_F(Store, HasTheModelAfterEachStep) {
  Chain chain;
  Collector collector(chain.sampler,
                      *chain.net,
                      folder,
                      CollectorOptions().burn_in(2).every(3));
  const auto states = chain.Run(collector, 12);
  collector.close();
  const SampleStore store(folder);
  ASSERT_EQ(store.size(), 3);
  for (const Draw& draw : store) {
    EXPECT_EQ(draw.step, 2 + 3 * draw.number);
    EXPECT_EQ(draw.lr, 0.1);
    EXPECT_EQ(draw.weight, 1);
    EXPECT_EQ(draw.prior_precision, std::vector<double>{0.5});
    EXPECT_TRUE(std::isnan(draw.loss));
    const auto& state = states[draw.step - 1];
    EXPECT_EQ(draw.names().size(), state.size());
    for (const auto& item : state) {
      EXPECT_TRUE(torch::equal(draw.at(item.key()), item.value()));
    }
  }
}

TEST_F(Store, TakesSubsetsAndDtypes) {
  Chain chain;
  Collector collector(chain.sampler,
                      *chain.net,
                      folder,
                      CollectorOptions()
                          .parameters({"0.*"})
                          .buffers(false)
                          .dtype(torch::kBFloat16)
                          .max_samples(4)
                          .chain(2));
  const auto states = chain.Run(collector, 11);
  collector.close();
  const SampleStore store(folder);
  EXPECT_EQ(store.chains(), std::vector<int64_t>{2});
  EXPECT_EQ(store.chain(0).size(), 0);
  ASSERT_EQ(store.chain(2).size(), 2);  // 4 and 8
  for (const Draw& draw : store) {
    EXPECT_EQ(draw.names(), (std::vector<std::string>{"0.bias", "0.weight"}));
    EXPECT_TRUE(
        torch::equal(draw.at("0.bias"),
                     states[draw.step - 1]["0.bias"].to(torch::kBFloat16)));
  }
}

TEST_F(Store, HasNoStepThatWasLeftOut) {
  Chain chain("skip");
  Collector collector(chain.sampler, *chain.net, folder);
  for (int i = 0; i < 6; ++i) {
    chain.Gradients();
    if (i % 2 == 0) {
      chain.net->parameters()[0].mutable_grad().fill_(
          std::numeric_limits<float>::quiet_NaN());
    }
    collector.step();
  }
  collector.close();
  const SampleStore store(folder);
  ASSERT_EQ(store.size(), 3);
  EXPECT_EQ(store[2].step, 3);
}

TEST_F(Store, HasPointsOfATrajectoryAndLosses) {
  const auto options = torch::dtype(torch::kDouble);
  auto theta = torch::ones({3}, options).requires_grad_();
  torch_sgmcmc::SBPS sampler({theta},
                             torch_sgmcmc::SBPSOptions()
                                 .num_data(20)
                                 .confidence(3)
                                 .sample_interval(0.3)
                                 .seed(0));
  std::vector<torch::Tensor> points;
  sampler.register_sample_hook([&](torch_sgmcmc::SBPS&, double) {
    points.push_back(theta.detach().clone());
  });
  {
    Collector collector(sampler, {{"theta", theta}}, folder);
    collector.set_loss(0.5);
    for (int i = 0; i < 40; ++i) {
      collector.step(
          [&] { return theta.square().sum() * torch::ones({8}, options); });
    }
  }
  const SampleStore store(folder);
  ASSERT_GT(points.size(), 10);
  ASSERT_EQ(store.size(), points.size());
  for (size_t i = 0; i < points.size(); ++i) {
    EXPECT_TRUE(torch::equal(store[i].at("theta"), points[i]));
    EXPECT_EQ(store[i].loss, 0.5);
    EXPECT_TRUE(std::isnan(store[i].lr));
  }
}

TEST_F(Store, CopiesADrawIntoAModule) {
  Chain chain;
  {
    Collector collector(chain.sampler, *chain.net, folder);
    chain.Run(collector, 2);
  }
  auto other = Chain::Net();
  const SampleStore store(folder);
  store[1].copy_to(*other);
  const auto wanted = chain.net->named_parameters();
  for (const auto& item : other->named_parameters()) {
    EXPECT_TRUE(torch::equal(item.value(), wanted[item.key()]));
  }
  const auto buffers = chain.net->named_buffers();
  for (const auto& item : other->named_buffers()) {
    EXPECT_TRUE(torch::equal(item.value(), buffers[item.key()]));
  }
  torch::nn::Sequential wide(torch::nn::Linear(3, 5),
                             torch::nn::BatchNorm1d(4));
  const torch::Tensor before = wide->named_parameters()["1.weight"].clone();
  EXPECT_NE(
      MessageOf([&] { store[1].copy_to(*wide); }).find("the module's [5]"),
      std::string::npos);
  torch::nn::Sequential small(torch::nn::Linear(3, 4));
  EXPECT_NE(MessageOf([&] { store[1].copy_to(*small); }).find("is missing"),
            std::string::npos);
  EXPECT_TRUE(torch::equal(wide->named_parameters()["1.weight"], before));
}

// Those of runs that are resumed: tests/faults/test_killed_stores.py.
TEST_F(Store, KeepsDrawsOfAnEarlierRun) {
  Chain chain;
  {
    Collector collector(chain.sampler, *chain.net, folder);
    chain.Run(collector, 2);
  }
  Chain again;
  Collector collector(again.sampler, *again.net, folder);
  EXPECT_NE(MessageOf([&] {
              again.Run(collector, 1);
            }).find("draws of an earlier run"),
            std::string::npos);
  EXPECT_EQ(SampleStore(folder).size(), 2);
}

// Draw 2 of 3 has an altered number, and draw 3 lacks a byte.
void ExpectNamed(const SampleStore& store) {
  const auto read = [&](size_t i) {
    return MessageOf([&] {
      for (const std::string& name : store[i].names()) store[i].at(name);
    });
  };
  EXPECT_EQ(read(0), "no error");
  const std::string damaged = "Cannot read draw 2 of chain 0, " +
                              store[1].path + ": the numbers of '1.weight'";
  EXPECT_EQ(read(1).substr(0, damaged.size()), damaged);
  EXPECT_NE(read(2).find(store[2].path + ": it has "), std::string::npos);
  EXPECT_EQ(MessageOf([&] { store[0].at("2"); }),
            "Invalid name: no draw has '2'");
}

// Of draws that share a file, and of wide networks that have files of their
// own.
TEST_F(Store, NamesWhatIsDamaged) {
  for (const int width : {4, 2000}) {
    SCOPED_TRACE(width);
    const fs::path of_width = folder / std::to_string(width);
    Chain chain("raise", width);
    {
      Collector collector(chain.sampler, *chain.net, of_width);
      chain.Run(collector, 3);
    }
    const SampleStore store(of_width);
    ASSERT_EQ(store.size(), 3);
    const bool shares = width == 4;
    EXPECT_EQ(store[0].path == store[2].path, shares);
    const auto last = static_cast<std::streamoff>(
        fs::file_size(store[1].path) / (shares ? 3 : 1) * (shares ? 2 : 1) - 1);
    std::fstream(store[1].path, std::ios::in | std::ios::out)
        .seekp(last)
        .put('\x55');
    fs::resize_file(store[2].path, fs::file_size(store[2].path) - 1);
    ExpectNamed(store);
  }
}

TEST_F(Store, RefusesOthers) {
  Chain chain;
  Collector collector(chain.sampler, *chain.net, folder);
  const auto refusal = [&](const CollectorOptions& options) {
    return MessageOf([&] {
      const Collector second(chain.sampler, *chain.net, folder, options);
    });
  };
  EXPECT_EQ(refusal({}),
            "Cannot write to chain 0 of " + folder.string() +
                ": this process writes to it already");
  EXPECT_EQ(refusal(CollectorOptions().chain(1).buffers(false)),
            "Invalid store: " + folder.string() +
                " is of another model: it has '1.num_batches_tracked' besides");
  EXPECT_EQ(refusal(CollectorOptions().chain(1).parameters({"2.*"})),
            "Invalid parameters: no parameter is named '2.*'");
  EXPECT_EQ(refusal(CollectorOptions().every(0)),
            "Invalid every: 0 (must be >= 1)");
  EXPECT_EQ(SampleStore(folder / "none").size(), 0);
}

}  // namespace
