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
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "libtorch/disk.h"
#include "message_of.h"

namespace {

using torch_sgmcmc::Collector;
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

using State = std::map<std::string, torch::Tensor>;

State StateOf(const torch::nn::Module& module) {
  State state;
  for (const auto& entry : torch_sgmcmc::state_dict(module).entries()) {
    state[entry.key().toStringRef()] = entry.value().toTensor().clone();
  }
  return state;
}

void ExpectState(const Draw& draw, const State& state) {
  EXPECT_EQ(draw.names().size(), state.size());
  for (const auto& [name, value] : state) {
    EXPECT_TRUE(torch::equal(draw.at(name), value)) << name;
  }
}

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

  // The state after each step, all of which are stored.
  std::vector<State> Run(Collector& collector, int steps) {
    std::vector<State> states;
    for (int i = 0; i < steps; ++i) {
      Gradients();
      sampler.step();
      collector.collect();
      states.push_back(StateOf(*net));
    }
    return states;
  }

  void Store(const std::string& folder) {
    Collector collector(sampler, *net, folder);
    Run(collector, 2);
  }

  torch::nn::Sequential net;
  SGLD sampler;
};

// For Python's report(): tests/posterior/test_relaxation.py.
TEST_F(Store, HasTheRunRecord) {
  Chain chain;
  Collector collector(chain.sampler, *chain.net, folder);
  EXPECT_EQ(MessageOf([&] { collector.describe("prior", 0); }),
            "Invalid steps_per_pass: 0 (must be >= 1)");
  collector.describe("prior", 12);
  chain.Run(collector, 3);
  const auto record = [&] {
    std::ifstream file(folder / "chain-0" / "run.json");
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  EXPECT_EQ(record(), "");
  collector.state_dict();
  const std::string expected =
      R"({"names":[["0.weight","0.bias","1.weight","1.bias"]],"num_skipped":0,)"
      R"("sampler":"SGLD","seed":1,"settings":[{"lr":0.1,"num_data":10.0,)"
      R"("prior_precision":0.5,"temperature":1.0}],"start":"prior","steps":3,)"
      R"("steps_per_pass":12,"temperature":1.0})";
  EXPECT_EQ(record(), expected);
  collector.close();
  // A later writer does not know the start, and keeps it.
  Collector(chain.sampler, *chain.net, folder).close();
  EXPECT_EQ(record(), expected);
}

TEST_F(Store, HasEachDrawOnceAfterAnError) {
  torch::nn::Module model;
  auto& p = model.register_parameter("p", torch::ones({1 << 18}));
  SGLD sampler({p}, SGLDOptions(0.1).num_data(10).seed(1));
  Collector collector(sampler, model, folder);
  const fs::path in_the_way = folder / "chain-0" / "draws-000001.safetensors";
  fs::create_directories(in_the_way);
  for (int i = 0; i < 9; ++i) {  // a MiB each, and four to a file
    p.mutable_grad() = torch::ones_like(p);
    sampler.step();
    const std::string message = MessageOf([&] { collector.collect(i); });
    const auto place = message.find(" has 4 draws; 4 more wait in memory");
    EXPECT_EQ(place != std::string::npos, i == 8) << message;
  }
  fs::remove(in_the_way);
  collector.collect(8);
  collector.collect(9);
  collector.close();
  const SampleStore store(folder);
  ASSERT_EQ(store.size(), 9);
  for (int i = 0; i < 9; ++i) {
    EXPECT_EQ(store[i].step, i + 1);
    EXPECT_EQ(store[i].loss, i);
  }
  EXPECT_TRUE(torch::equal(store[8].at("p"), p));
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
  std::vector<State> states;
  {
    Collector collector(sampler, model, folder);
    for (int i = 0; i < 3; ++i) {
      p.mutable_grad() = torch::ones_like(p);
      sampler.step();
      collector.collect(torch::full({}, 0.1 + i, torch::kDouble));
      states.push_back(StateOf(model));
    }
  }
  const SampleStore store(folder);
  ASSERT_EQ(store.size(), 3);
  for (size_t i = 0; i < 3; ++i) {
    ExpectState(store[i], states[i]);
    EXPECT_EQ(store[i].at("p").scalar_type(), torch::kHalf);
    EXPECT_EQ(store[i].loss, 0.1 + static_cast<double>(i));
  }
}

TEST_F(Store, HasNoStepThatWasSkipped) {
  Chain chain("skip");
  Collector collector(chain.sampler, *chain.net, folder);
  for (int i = 0; i < 6; ++i) {
    chain.Gradients();
    if (i % 2 == 0) {
      chain.net->parameters()[0].mutable_grad().fill_(
          std::numeric_limits<float>::quiet_NaN());
    }
    chain.sampler.step();
    collector.collect();
    collector.collect();
  }
  chain.sampler.load_state_dict(Chain().sampler.state_dict());
  const std::string message = MessageOf([&] { collector.collect(); });
  EXPECT_EQ(message.find("the sampler went back"), 0) << message;
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
  std::map<double, std::pair<int64_t, torch::Tensor>> points;
  {
    Collector collector(sampler, model, folder);
    sampler.register_sample_hook([&](torch_sgmcmc::SBPS&, double time) {
      collector.collect();
      const std::pair point(sampler.num_steps() + 1, theta.detach().clone());
      const bool is_new = points.emplace(time, point).second;
      // The step is undone and repeated.
      if (is_new && points.size() % 4 == 0) throw std::runtime_error("stop");
    });
    for (int i = 0; i < 40; ++i) {
      MessageOf([&] {
        sampler.step(
            [&] { return theta.square().sum() * torch::ones({8}, options); });
      });
    }
    const std::string message = MessageOf([&] { collector.collect(); });
    EXPECT_EQ(message.find("Invalid draw: SBPS is between two samples"), 0);
  }
  const SampleStore store(folder);
  ASSERT_GT(points.size(), 10);
  ASSERT_EQ(store.size(), points.size());
  size_t i = 0;
  for (const auto& [time, point] : points) {
    EXPECT_EQ(store[i].step, point.first);
    EXPECT_TRUE(torch::equal(store[i].at("theta"), point.second));
    EXPECT_TRUE(std::isnan(store[i].loss));
    EXPECT_TRUE(std::isnan(store[i++].lr));
  }
}

TEST_F(Store, CopiesADrawIntoAModule) {
  Chain().Store(folder);
  auto other = Chain::Net();
  const SampleStore store(folder);
  store[1].copy_to(*other);
  ExpectState(store[1], StateOf(*other));
  torch::nn::Sequential wide(torch::nn::Linear(3, 5),
                             torch::nn::BatchNorm1d(4));
  const torch::Tensor before = wide->named_parameters()["1.weight"].clone();
  EXPECT_EQ(MessageOf([&] { store[1].copy_to(*wide); }),
            "Invalid state_dict: 0.weight has shape [4, 3], expected [5, 3]");
  torch::nn::Sequential small(torch::nn::Linear(3, 4));
  EXPECT_EQ(MessageOf([&] { store[1].copy_to(*small); }),
            "Invalid state_dict: the module has nothing named 1.bias");
  EXPECT_TRUE(torch::equal(wide->named_parameters()["1.weight"], before));
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
  EXPECT_THROW(store[3], std::out_of_range);
}

// Every bit of an index and of store.json, and each truncation.
TEST_F(Store, RefusesDamagedTexts) {
  Chain().Store(folder);
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
  const std::string message =
      MessageOf([&] { const Collector none(sampler, *Chain::Net(), folder); });
  EXPECT_EQ(message.find("Invalid model: the sampler has none of its"), 0);
  torch::nn::Module wide;
  wide.register_parameter("p", p);
  wide.register_buffer("phase", torch::ones({2}, torch::kComplexDouble));
  EXPECT_EQ(MessageOf([&] { const Collector none(sampler, wide, folder); }),
            "Invalid model: 'phase', torch::kComplexDouble of layout "
            "torch::kStrided, cannot be stored");
  EXPECT_FALSE(fs::exists(folder));
  Collector collector(sampler, model, folder);
  seen.resize_({3});
  p.mutable_grad() = torch::ones_like(p);
  sampler.step();
  EXPECT_EQ(
      MessageOf<std::invalid_argument>([&] { collector.collect(); }),
      "Invalid draw: 'seen' is not {\"dtype\":\"F32\",\"shape\":[2]} as when "
      "the collector was made");
}

// As of a line that was made to mislead, with the right checksum.
TEST_F(Store, RefusesAbsurdNumbers) {
  Chain().Store(folder);
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
        << text << ", \"line_crc32\": "
        << torch_sgmcmc::disk::Crc32(text.data(), text.size()) << "}\n";
    return MessageOf([&] {
      for (const Draw& draw : SampleStore(folder)) draw.at("0.weight");
    });
  };
  EXPECT_EQ(message_with("1,2", "1,2"), "no error");
  const std::string damaged =
      "Cannot read " + path.string() + ": line 1 is damaged";
  for (const char* count :
       {"4611686018427387904", "-2", "1e999", "null", "true", "2.5"}) {
    const std::string by = "\"count\":" + std::string(count);
    EXPECT_EQ(message_with("\"count\":2", by), damaged) << by;
  }
  for (const char* steps :
       {"[]", "[1,99999999999999999999]", "[1,2,3]", "[[1],2]", "2"}) {
    EXPECT_EQ(message_with("[1,2]", steps), damaged) << steps;
  }
  EXPECT_EQ(message_with("000000", "000001"), damaged);
  EXPECT_EQ(message_with("draws-", "../../draws-"), damaged);
  const std::string draws = folder / "chain-0" / "draws-000000.safetensors";
  for (const char* by : {"\"bytes\":-", "\"bytes\":99999", "\"crc32\":1"}) {
    const std::string old(by, std::string(by).find(':') + 1);
    EXPECT_EQ(message_with(old, by).find("Cannot read " + draws), 0) << by;
  }
  const std::string store = folder / "store.json";
  for (const char* t :
       {"7", "[]", R"({"p": 1})", R"({"p": {"dtype": "F32", "shape": [1e9]}})",
        R"({"p": {"dtype": "F31", "shape": []}})"}) {
    std::ofstream(store) << R"({"format": 1, "tensors": )" << t << "}";
    const std::string message = MessageOf([&] { SampleStore{folder}; });
    EXPECT_EQ(message.find("Cannot read " + store + ": "), 0) << t;
  }
}

TEST_F(Store, KeepsAndIgnoresWhatIsNotItsOwn) {
  Chain().Store(folder);
  const fs::path place = folder / "chain-0";
  const auto kept = {"draws-1.safetensors", "draws-000009.pt", "notes",
                     "draws-000009.safetensors.old.partial"};
  for (const char* name : {"chain-00", "chain-1x", "chain--1"}) {
    fs::copy(place, folder / name);
  }
  for (const char* name : kept) std::ofstream(place / name) << "kept";
  const std::string unnamed = place / "draws-000001.safetensors";
  std::ofstream(unnamed) << "a file that the index does not name";
  std::ofstream(unnamed + ".12-3.partial") << "one that was not finished";
  Chain again;
  Collector collector(again.sampler, *again.net, folder);
  EXPECT_FALSE(fs::exists(unnamed) || fs::exists(unnamed + ".12-3.partial"));
  // How runs are resumed: tests/faults/test_killed_stores.py.
  const std::string message = MessageOf([&] { again.Run(collector, 1); });
  EXPECT_NE(message.find("draws of an earlier run"), std::string::npos);
  EXPECT_EQ(SampleStore(folder).size(), 2);
  collector.restart();
  EXPECT_EQ(SampleStore(folder).size(), 0);
  EXPECT_FALSE(fs::exists(place / "draws-000000.safetensors"));
  EXPECT_TRUE(fs::exists(folder / "chain-00" / "draws-000000.safetensors"));
  for (const char* name : kept) {
    EXPECT_TRUE(fs::exists(place / name)) << name;
  }
}

// Of draws whose store.json was replaced.
TEST_F(Store, ComparesHeaders) {
  Chain().Store(folder);
  const fs::path path = folder / "store.json";
  std::ifstream file(path, std::ios::binary);
  const std::string whole((std::istreambuf_iterator<char>(file)), {});
  for (const auto& [old, by] : std::map<std::string, std::string>{
           {"F32", "I32"}, {"1.bias", "1.sibs"}, {"I64", "F64"}}) {
    std::string text = whole;
    text.replace(text.find(old), old.size(), by);
    std::ofstream(path, std::ios::binary) << text;
    const SampleStore store(folder);
    const std::string message = MessageOf([&] { store[0].at("0.weight"); });
    EXPECT_EQ(message.find("Cannot read " + store[0].path + ": its '"), 0)
        << message;
  }
}

TEST_F(Store, SavesToLinksAndRefusesOtherKindsOfFiles) {
  fs::create_directories(folder);
  const fs::path path = folder / "run.pt";
  const fs::path link = folder / "latest.pt";
  torch_sgmcmc::save({{"step", 1}}, path);
  fs::permissions(path, fs::perms::owner_read | fs::perms::owner_write);
  fs::create_symlink("run.pt", link);
  torch_sgmcmc::save({{"step", 2}}, link);
  EXPECT_TRUE(fs::is_symlink(link));
  EXPECT_EQ(torch_sgmcmc::load(path).at("step").toInt(), 2);
  EXPECT_EQ(fs::status(path).permissions(),
            fs::perms::owner_read | fs::perms::owner_write);
  fs::create_symlink("new.pt", folder / "next.pt");
  torch_sgmcmc::save({{"step", 3}}, folder / "next.pt");
  EXPECT_TRUE(fs::is_symlink(folder / "next.pt"));
  EXPECT_EQ(torch_sgmcmc::load(folder / "new.pt").at("step").toInt(), 3);
  for (const auto& other : {folder.string(), std::string("/dev/null")}) {
    EXPECT_EQ(MessageOf([&] {
                torch_sgmcmc::save({{"step", 1}}, other);
              }),
              "Cannot write " + other + ": it is not a regular file");
  }
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
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
  const auto refusal = [&](int64_t number) {
    return MessageOf([&] {
      const Collector second(chain.sampler, *chain.net, folder, number);
    });
  };
  EXPECT_EQ(refusal(0), "Cannot write to chain 0 of " + folder.string() +
                            ": process " + std::to_string(::getpid()) +
                            " writes to it");
  EXPECT_EQ(refusal(-1), "Invalid chain: -1 (must be >= 0)");
  EXPECT_EQ(MessageOf<std::invalid_argument>([&] {
              collector.load_state_dict(
                  {{"position",
                    torch_sgmcmc::StateDict{{"size", "a"}, {"crc32", 0}}}});
            }),
            "Invalid size in a state dict: a String (must be an int, or a "
            "Tensor of one int64)");
  chain.Run(collector, 1);
  collector.flush();
  const auto of_another = [&](const torch::nn::Module& net) {
    SGLD sampler(net.parameters(), SGLDOptions(0.1).num_data(10).seed(1));
    return MessageOf([&] { const Collector none(sampler, net, folder, 1); });
  };
  const std::string start = "Invalid store: the draws in " + folder.string() +
                            " are of another model: ";
  const std::string bias = R"('1.bias' is {"dtype":"F32","shape":[4]}, here )";
  EXPECT_EQ(of_another(*torch::nn::Sequential(torch::nn::Linear(3, 4))),
            start + "its " + bias + "null. Give another folder");
  EXPECT_EQ(of_another(*torch::nn::Sequential(torch::nn::Linear(3, 5),
                                              torch::nn::BatchNorm1d(5))),
            start + "its " +
                R"('0.bias' is {"dtype":"F32","shape":[4]}, here )" +
                R"({"dtype":"F32","shape":[5]}. Give another folder)");
  EXPECT_EQ(SampleStore(folder / "none").size(), 0);
}

TEST_F(Store, NamesWhatIsWrongWithAnArgument) {
  Chain chain;
  EXPECT_EQ(MessageOf<std::invalid_argument>([] { SampleStore(""); }),
            "Invalid store: '' (must be the name of a folder)");
  EXPECT_EQ(MessageOf<std::invalid_argument>(
                [&] { const Collector none(chain.sampler, *chain.net, ""); }),
            "Invalid store: '' (must be the name of a folder)");
  chain.Store(folder);
  const SampleStore store(folder);
  EXPECT_EQ(MessageOf<std::out_of_range>([&] { store[7].names(); }),
            "Invalid index: 7 (the store has 2 draws)");
  Collector collector(chain.sampler, *chain.net, folder, 1);
  EXPECT_EQ(MessageOf<std::invalid_argument>(
                [&] { collector.collect(torch::zeros({3})); }),
            "Invalid loss: shape [3] (must be a number, or a tensor of one "
            "element)");
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { torch_sgmcmc::load(folder); }),
            "Cannot read " + folder.string() + ": it is not a regular file");
}

// A module that has one layer under two names.
struct Tied : torch::nn::Module {
  Tied() {
    first = register_module("first", torch::nn::Linear(3, 3));
    second = register_module("second", first);
  }
  torch::nn::Linear first = nullptr;
  torch::nn::Linear second = nullptr;
};

TEST_F(Store, OfTiedModules) {
  Tied net;
  SGLD sampler(net.parameters(), SGLDOptions(0.1).num_data(10).seed(1));
  Collector collector(sampler, net, folder);
  net.first(torch::ones({1, 3})).sum().backward();
  sampler.step();
  collector.collect();
  collector.close();
  const SampleStore store(folder);
  Tied other;
  store[0].copy_to(other);
  EXPECT_TRUE(torch::equal(other.first->weight, net.first->weight));
}

}  // namespace
