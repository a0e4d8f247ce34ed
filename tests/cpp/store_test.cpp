// The store in C++: what is read, refused and named. Bytes and resuming are
// tested beside Python's (tests/faults/test_killed_stores.py).
#include "torch_sgmcmc/store.h"

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch_sgmcmc/torch_sgmcmc.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "host/crc32.h"
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
  explicit Chain(const std::string& nonfinite = "raise")
      : net(Net()),
        sampler(net->parameters(), SGLDOptions(0.1)
                                       .num_data(10)
                                       .prior_precision(0.5)
                                       .seed(1)
                                       .nonfinite(nonfinite)) {}

  static torch::nn::Sequential Net() {
    torch::manual_seed(0);
    return torch::nn::Sequential(torch::nn::Linear(3, 4),
                                 torch::nn::BatchNorm1d(4));
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
  Collector collector(chain.sampler, *chain.net, folder,
                      CollectorOptions().burn_in(2).every(3));
  const auto states = chain.Run(collector, 12);
  collector.close();
  const SampleStore store(folder);
  ASSERT_EQ(store.size(), 3);
  for (size_t i = 0; i < store.size(); ++i) {
    const Draw& draw = store[i];
    EXPECT_EQ(draw.step, 5 + 3 * i);
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

TEST_F(Store, TakesEveryFourthOfAChain) {
  Chain chain;
  Collector collector(chain.sampler, *chain.net, folder,
                      CollectorOptions().every(4).chain(2));
  chain.Run(collector, 11);
  collector.close();
  const SampleStore store(folder);
  ASSERT_EQ(store.size(), 2);
  for (size_t i = 0; i < store.size(); ++i) {
    EXPECT_EQ(store[i].chain, 2);
    EXPECT_EQ(store[i].step, 4 + 4 * i);
  }
}

// An odd number of elements of 2 bytes before some of 8.
TEST_F(Store, TakesTensorsOfAllSizes) {
  torch::nn::Module model;
  const auto half = torch::dtype(torch::kHalf);
  auto& p = model.register_parameter("p", torch::ones({3}, half));
  model.register_buffer("mask", torch::tensor({true, false, true}));
  model.register_buffer("seen", torch::tensor({int64_t{7}, int64_t{-1}}));
  model.register_buffer("none", torch::empty({2, 0}));
  SGLD sampler({p}, SGLDOptions(0.1).num_data(10).seed(1));
  std::vector<torch::Tensor> points;
  {
    Collector collector(sampler, model, folder);
    for (int i = 0; i < 3; ++i) {
      p.mutable_grad() = torch::ones_like(p);
      collector.step([&] { return torch::full({}, 0.1 + i, torch::kDouble); });
      points.push_back(p.detach().clone());
    }
  }
  const SampleStore store(folder);
  ASSERT_EQ(store.size(), 3);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(torch::equal(store[i].at("p"), points[i]));
    EXPECT_EQ(store[i].at("p").scalar_type(), torch::kHalf);
    EXPECT_EQ(store[i].loss, 0.1 + static_cast<double>(i));
    for (const auto& item : model.named_buffers()) {
      EXPECT_TRUE(torch::equal(store[i].at(item.key()), item.value()));
    }
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

TEST_F(Store, HasPointsOfATrajectory) {
  const auto options = torch::dtype(torch::kDouble);
  torch::nn::Module model;
  auto& theta = model.register_parameter("theta", torch::ones({3}, options));
  torch_sgmcmc::SBPS sampler({theta}, torch_sgmcmc::SBPSOptions()
                                          .num_data(20)
                                          .num_std(3)
                                          .sample_interval(0.3)
                                          .seed(0));
  std::vector<torch::Tensor> points;
  sampler.register_sample_hook([&](torch_sgmcmc::SBPS&, double) {
    points.push_back(theta.detach().clone());
  });
  {
    Collector collector(sampler, model, folder);
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
    EXPECT_TRUE(std::isnan(store[i].loss));
    EXPECT_TRUE(std::isnan(store[i].lr));
  }
}

TEST_F(Store, CopiesADrawIntoAModule) {
  Chain chain;
  {
    Collector collector(chain.sampler, chain.net, folder);
    chain.Run(collector, 2);
  }
  auto other = Chain::Net();
  const SampleStore store(folder);
  store[1].copy_to(other);
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
  EXPECT_EQ(MessageOf([&] { store[1].copy_to(*wide); }),
            "Invalid state dict: 0.weight has shape [4, 3], expected [5, 3]");
  torch::nn::Sequential small(torch::nn::Linear(3, 4));
  EXPECT_EQ(
      MessageOf([&] { store[1].copy_to(*small); }),
      "Invalid state dict: the module has nothing named 1.num_batches_tracked");
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

std::string ReadAll(const Draw& draw) {
  return MessageOf([&] {
    for (const std::string& name : draw.names()) draw.at(name);
  });
}

TEST_F(Store, NamesWhatIsDamaged) {
  Chain chain;
  {
    Collector collector(chain.sampler, *chain.net, folder);
    for (int i = 0; i < 3; ++i) {
      chain.Run(collector, 1);
      collector.flush();
    }
  }
  SampleStore store(folder);
  ASSERT_EQ(store.size(), 3);
  std::fstream(store[1].path, std::ios::in | std::ios::out)
      .seekp(-1, std::ios::end)
      .put('\x55');
  fs::resize_file(store[2].path, fs::file_size(store[2].path) - 1);
  EXPECT_EQ(ReadAll(store[0]), "no error");
  EXPECT_EQ(ReadAll(store[1]).find("Cannot read " + store[1].path +
                                   ": its bytes are altered"),
            0);
  EXPECT_EQ(
      ReadAll(store[2]).find("Cannot read " + store[2].path + ": it has "), 0);
  EXPECT_EQ(MessageOf([&] { store[0].at("2"); }),
            "Invalid name: no draw has '2'");
  EXPECT_EQ(MessageOf([&] { store[3]; }),
            "Invalid index: 3 (" + folder.string() + " has 3 draws)");
}

// Every bit of an index and of store.json, and each truncation.
TEST_F(Store, RefusesDamagedTexts) {
  Chain chain;
  {
    Collector collector(chain.sampler, *chain.net, folder);
    chain.Run(collector, 2);
  }
  for (const fs::path& path :
       {folder / "chain-0" / "index.jsonl", folder / "store.json"}) {
    const bool is_index = path.filename() == "index.jsonl";
    std::ifstream file(path, std::ios::binary);
    const std::string whole((std::istreambuf_iterator<char>(file)), {});
    for (size_t bit = 0; bit < 8 * (whole.size() - 1); bit += 3) {
      std::string text = whole;
      text[bit / 8] = static_cast<char>(text[bit / 8] ^ (1 << bit % 8));
      std::ofstream(path, std::ios::binary) << text;
      const std::string message = MessageOf([&] {
        const SampleStore store(folder);
        for (const Draw& draw : store) ReadAll(draw);
      });
      // Without a checksum, store.json may be another that is possible.
      if (is_index) {
        EXPECT_EQ(message.find("Cannot read " + path.string() + ": line 1"), 0)
            << bit;
      }
    }
    for (size_t size = 0; size < whole.size(); ++size) {
      std::ofstream(path, std::ios::binary) << whole.substr(0, size);
      const std::string message =
          MessageOf([&] { EXPECT_EQ(SampleStore(folder).size(), 0); });
      EXPECT_EQ(
          message.find(is_index ? "no error" : "Cannot read " + path.string()),
          0)
          << size;
    }
    std::ofstream(path, std::ios::binary) << whole;
  }
  EXPECT_EQ(SampleStore(folder).size(), 2);
}

TEST_F(Store, RefusesWhatIsNotSampledAndWhatHasGrown) {
  torch::nn::Module model;
  const auto p = model.register_parameter("p", torch::ones({5}));
  auto seen = model.register_buffer("seen", torch::ones({2}));
  SGLD sampler({p}, SGLDOptions(0.1).num_data(10).seed(1));
  EXPECT_NE(MessageOf([&] {
              const Collector of_others(sampler, Chain::Net(), folder);
            }).find("Invalid model: the sampler has none of its parameters"),
            std::string::npos);
  torch::nn::Module wide;
  wide.register_parameter("p", p);
  wide.register_buffer("phase", torch::ones({2}, torch::kComplexDouble));
  EXPECT_EQ(MessageOf([&] { const Collector none(sampler, wide, folder); }),
            "Invalid model: 'phase', torch::kComplexDouble of layout "
            "torch::kStrided, cannot be stored");
  EXPECT_FALSE(fs::exists(folder));
  Collector collector(sampler, model, folder);
  seen.resize_({3});
  const torch::Tensor before = p.detach().clone();
  p.mutable_grad() = torch::ones_like(p);
  EXPECT_EQ(
      MessageOf([&] { collector.step(); }),
      "Invalid draw: 'seen' is F32 of shape [3], unlike when the collector "
      "was made");
  EXPECT_TRUE(torch::equal(p, before));
}

// As of a line that was made to mislead, with the right checksum.
TEST_F(Store, RefusesAbsurdNumbers) {
  Chain chain;
  {
    Collector collector(chain.sampler, *chain.net, folder);
    chain.Run(collector, 2);
  }
  const fs::path path = folder / "chain-0" / "index.jsonl";
  std::ifstream file(path, std::ios::binary);
  const std::string whole((std::istreambuf_iterator<char>(file)), {});
  const std::string start = whole.substr(0, whole.rfind(", \"line_crc32\""));
  const auto message_with = [&](const std::string& old,
                                const std::string& absurd) {
    std::string text = start;
    EXPECT_NE(text.find(old), std::string::npos);
    text.replace(text.find(old), old.size(), absurd);
    std::ofstream(path, std::ios::binary)
        << text
        << ", \"line_crc32\": " << torch_sgmcmc::Crc32(text.data(), text.size())
        << "}\n";
    return MessageOf([&] {
      for (const Draw& draw : SampleStore(folder)) draw.at("0.weight");
    });
  };
  EXPECT_EQ(message_with("1, 2", "1, 2"), "no error");
  const std::pair<const char*, const char*> absurd[] = {
      {"\"count\": 2", "\"count\": 4611686018427387904"},
      {"\"count\": 2", "\"count\": -2"},
      {"\"count\": 2", "\"count\": 1e999"},
      {"[1, 2]", "[]"},
      {"[1, 2]", "[1, 99999999999999999999]"},
      {"[1, 2]", "[1, 2, 3]"},
      {"[1, 2]", "[[1], 2]"},
      {"[1, 2]", "2"},
      {"000000", "000001"},
      {"draws-", "../../draws-"}};
  for (const auto& [old, by] : absurd) {
    EXPECT_EQ(message_with(old, by),
              "Cannot read " + path.string() + ": line 1 is damaged")
        << by;
  }
  const std::string draws = folder / "chain-0" / "draws-000000.safetensors";
  for (const char* by : {"\"bytes\": -", "\"bytes\": 99999", "\"crc32\": 1"}) {
    const std::string old(by, std::string(by).find(' ') + 1);
    EXPECT_EQ(message_with(old, by).find("Cannot read " + draws), 0) << by;
  }
}

TEST_F(Store, KeepsAndIgnoresWhatIsNotItsOwn) {
  Chain chain;
  {
    Collector collector(chain.sampler, *chain.net, folder);
    chain.Run(collector, 2);
  }
  const fs::path place = folder / "chain-0";
  for (const char* name : {"chain-00", "chain-1x", "chain--1"}) {
    fs::copy(place, folder / name);
  }
  for (const char* name : {"draws-1.safetensors", "draws-000009.pt", "notes"}) {
    std::ofstream(place / name) << "kept";
  }
  const fs::path unnamed = place / "draws-000001.safetensors";
  std::ofstream(unnamed) << "a file that was not finished";
  EXPECT_EQ(SampleStore(folder).size(), 2);
  Chain again;
  Collector collector(again.sampler, *again.net, folder);
  EXPECT_FALSE(fs::exists(unnamed));
  collector.restart();
  EXPECT_EQ(SampleStore(folder).size(), 0);
  EXPECT_FALSE(fs::exists(place / "draws-000000.safetensors"));
  EXPECT_TRUE(fs::exists(folder / "chain-00" / "draws-000000.safetensors"));
  for (const char* name : {"draws-1.safetensors", "draws-000009.pt", "notes"}) {
    EXPECT_TRUE(fs::exists(place / name)) << name;
  }
}

TEST_F(Store, NoticesThatItsFolderWasDeleted) {
  Chain chain;
  Collector collector(chain.sampler, *chain.net, folder);
  chain.Run(collector, 1);
  fs::remove_all(folder);
  const std::string message = MessageOf([&] { collector.flush(); });
  EXPECT_EQ(message.find("Cannot write " + folder.string() + "/chain-0/draws-"),
            0);
  EXPECT_NE(message.find("1 more wait in memory"), std::string::npos);
  EXPECT_FALSE(fs::exists(folder));
  EXPECT_EQ(MessageOf([&] { collector.close(); }), message);
}

TEST_F(Store, RefusesOthers) {
  Chain chain;
  Collector collector(chain.sampler, *chain.net, folder);
  const auto refusal = [&](const CollectorOptions& options) {
    return MessageOf([&] {
      const Collector second(chain.sampler, *chain.net, folder, options);
    });
  };
  EXPECT_EQ(refusal({}), "Cannot write to chain 0 of " + folder.string() +
                             ": process " + std::to_string(::getpid()) +
                             " writes to it");
  chain.Run(collector, 1);
  collector.flush();
  const auto of_another = [&](const torch::nn::Module& net) {
    SGLD sampler(net.parameters(), SGLDOptions(0.1).num_data(10).seed(1));
    return MessageOf([&] {
      const Collector none(sampler, net, folder, CollectorOptions().chain(1));
    });
  };
  const std::string start = "Invalid store: the draws in " + folder.string() +
                            " are of another model: ";
  EXPECT_EQ(
      of_another(*torch::nn::Sequential(torch::nn::Linear(3, 4))),
      start +
          "'1.num_batches_tracked' is I64 of shape [] in one alone. Give another "
          "folder");
  EXPECT_EQ(of_another(*torch::nn::Sequential(torch::nn::Linear(3, 5),
                                              torch::nn::BatchNorm1d(4))),
            start +
                "'0.weight' is F32 of shape [4, 3] in one alone. Give another "
                "folder");
  EXPECT_EQ(refusal(CollectorOptions().every(0)),
            "Invalid every: 0 (must be >= 1)");
  EXPECT_EQ(SampleStore(folder / "none").size(), 0);
}

}  // namespace
