// State dicts of samplers: torch's serialization, files, what is refused.
#include <caffe2/serialize/inline_container.h>
#include <sys/stat.h>
#include <torch/torch.h>
#include <torch_sgmcmc/torch_sgmcmc.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string_view>

#include "small_chains.h"
#include "testing.h"

namespace torch_sgmcmc {
namespace {

using torch::optim::OptimizerParamGroup;

// Two samplers of different parameters, one of which has run.
template <typename Method, typename Options>
struct Pair {
  explicit Pair(const Options& options)
      : params(Params()),
        others(Params()),
        sampler(params, options),
        other(others, Options(0.3).num_data(1)) {
    for (int i = 0; i < 3; ++i) sampler.step();
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < params.size(); ++i) others[i].copy_(params[i]);
  }

  void ExpectSameChain() {
    for (int i = 0; i < 3; ++i) {
      sampler.step();
      other.step();
    }
    ExpectEqual(params, others);
  }

  std::vector<torch::Tensor> params;
  std::vector<torch::Tensor> others;
  Method sampler;
  Method other;
};

template <typename Method, typename Options>
void ExpectTorchSaves(const Options& options) {
  Pair<Method, Options> pair(options);
  std::stringstream stream;
  torch::save(pair.sampler, stream);
  torch::load(pair.other, stream);
  pair.ExpectSameChain();
}

TEST(Serialization, TorchSavesAndLoads) {
  ExpectTorchSaves<SGLD>(Langevin());
  ExpectTorchSaves<SGHMC>(Hamiltonian());
  ExpectTorchSaves<SGHMC>(Hamiltonian().noise_estimate("online"));
  ExpectTorchSaves<SGHMC>(Hamiltonian().capturable(true));
}

class Files : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() /
              ("torch_sgmcmc_" + std::to_string(::getpid()));
    std::filesystem::create_directory(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string Path(const char* name) const { return folder_ / name; }

 private:
  std::filesystem::path folder_;
};

TEST_F(Files, HoldAModule) {
  torch::nn::Sequential net(torch::nn::Linear(3, 2), torch::nn::BatchNorm1d(2));
  torch::nn::Sequential other(torch::nn::Linear(3, 2),
                              torch::nn::BatchNorm1d(2));
  net->forward(torch::randn({5, 3}));
  save(state_dict(*net), Path("net.pt"));
  load_state_dict(*other, load(Path("net.pt")));
  net->eval();
  other->eval();
  const auto x = torch::randn({4, 3});
  EXPECT_TRUE(torch::equal(net->forward(x), other->forward(x)));

  torch::nn::Sequential wide(torch::nn::Linear(3, 4),
                             torch::nn::BatchNorm1d(4));
  const auto before = wide[0]->parameters()[0].detach().clone();
  EXPECT_EQ(MessageOf<std::invalid_argument>(
                [&] { load_state_dict(*wide, load(Path("net.pt"))); }),
            "Invalid state_dict: 0.weight has shape [2, 3], expected [4, 3]");
  EXPECT_TRUE(torch::equal(wide[0]->parameters()[0], before));
  torch::nn::Sequential small(torch::nn::Linear(3, 2));
  EXPECT_EQ(MessageOf<std::invalid_argument>(
                [&] { load_state_dict(*small, load(Path("net.pt"))); }),
            "Invalid state_dict: the module has nothing named 1.weight");
  EXPECT_EQ(MessageOf<std::invalid_argument>(
                [&] { load_state_dict(*net, state_dict(*small)); }),
            "Invalid state_dict: it has no key '1.weight'");
}

TEST_F(Files, ThatAreNotOnesOfTorchAreRefused) {
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { load(Path("none.pt")); }),
            "Cannot read " + Path("none.pt") + ": No such file or directory");
  std::ofstream(Path("text.pt")) << "text";
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { load(Path("text.pt")); })
                .find("Cannot read " + Path("text.pt") +
                      ": cut off, damaged, or not a file of torch.save ("),
            0U);
  ASSERT_EQ(::mkfifo(Path("fifo").c_str(), 0600), 0);
  EXPECT_EQ(MessageOf<std::runtime_error>([&] { load(Path("fifo")); }),
            "Cannot read " + Path("fifo") + ": it is not a regular file");
  EXPECT_EQ(
      MessageOf<std::runtime_error>([&] { save({}, Path("no/folder.pt")); }),
      "Cannot write " + Path("no/folder.pt") + ": No such file or directory");
}

std::vector<char> Bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// What a file with such bytes is refused for; empty if it can be read, and all
// its tensors, too.
std::string Refusal(const std::string& path, const std::vector<char>& bytes) {
  std::ofstream(path, std::ios::binary)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  try {
    const StateDict dict = load(path);
    for (const auto& entry : dict.entries()) {
      if (entry.value().isTensor()) entry.value().toTensor().clone();
    }
    return "";
  } catch (const std::runtime_error& error) {
    const std::string text = error.what();
    EXPECT_EQ(text.find("Cannot read " + path + ": "), 0U) << text;
    return text.substr(path.size() + 14);
  }
}

// A pickle as a file of torch.save, with four bytes of a storage.
std::vector<char> Archived(const std::string& pickle) {
  std::vector<char> archive;
  caffe2::serialize::PyTorchStreamWriter writer(
      [&](const void* data, size_t size) {
        const auto* bytes = static_cast<const char*>(data);
        archive.insert(archive.end(), bytes, bytes + size);
        return size;
      });
  writer.writeRecord("data.pkl", pickle.data(), pickle.size());
  writer.writeRecord("data/0", "four", 4);
  writer.writeEndOfFile();
  return archive;
}

TEST_F(Files, ThatAreCutOffAreRefused) {
  save({{"a", torch::randn({40})}, {"b", 0.5}}, Path("x.pt"));
  const auto whole = Bytes(Path("x.pt"));
  for (size_t size = 0; size < whole.size(); size += 7) {
    EXPECT_NE(Refusal(Path("x.pt"), {whole.begin(), whole.begin() + size}), "")
        << size;
  }
  EXPECT_EQ(Refusal(Path("x.pt"), whole), "");
}

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kHasAsan = true;
#elif defined(__has_feature)
constexpr bool kHasAsan = __has_feature(address_sanitizer);
#else
constexpr bool kHasAsan = false;
#endif

TEST_F(Files, WithAFlippedBitAreReadOrRefused) {
  save({{"a", torch::randn({40})}, {"b", 0.5}, {"c", torch::ones({2, 2})}},
       Path("x.pt"));
  const auto whole = Bytes(Path("x.pt"));
  const std::string_view text(whole.data(), whole.size());
  const size_t pickle = text.find("data.pkl");
  const size_t pickle_end = text.find("PK\x03\x04", pickle);
  size_t refused = 0;
  size_t damaged_files = 0;
  for (size_t bit = 0; bit < 8 * whole.size(); bit += 37) {
    // torch's reader asks for as much memory as a damaged pickle says, and
    // catches std::bad_alloc, in place of which the sanitizer ends the program.
    if (kHasAsan && bit / 8 >= pickle && bit / 8 < pickle_end) continue;
    auto damaged = whole;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ 1 << bit % 8);
    refused += Refusal(Path("x.pt"), damaged).empty() ? 0 : 1;
    ++damaged_files;
    if (HasFailure()) FAIL() << "bit " << bit;
  }
  EXPECT_GT(refused, damaged_files / 10);
}

TEST_F(Files, WithAFlippedBitInATensorAreRefused) {
  const auto a = torch::randn({40});
  save({{"a", a}, {"b", 0.5}}, Path("x.pt"));
  const auto whole = Bytes(Path("x.pt"));
  const std::string_view text(whole.data(), whole.size());
  const std::string_view numbers(static_cast<const char*>(a.const_data_ptr()),
                                 a.nbytes());
  const size_t begin = text.find(numbers);
  ASSERT_NE(begin, std::string_view::npos);
  for (size_t bit = 0; bit < 8 * numbers.size(); bit += 7) {
    auto damaged = whole;
    char& byte = damaged[begin + bit / 8];
    byte = static_cast<char>(byte ^ 1 << bit % 8);
    EXPECT_NE(
        Refusal(Path("x.pt"), damaged).find("the checksum of data/0 differs"),
        std::string::npos);
  }
}

TEST_F(Files, OfATensorThatIsLargerThanItsRecordAreRefused) {
  // {"a": torch.zeros(n)}, whose storage has four bytes.
  const auto pickle = [](char n) {
    return std::string(
               "\x80\x02}X\x01\0\0\0actorch._utils\n_rebuild_tensor_v2\n(("
               "X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\0"
               "0X\x03\0\0\0cpuK",
               91) +
           n + "tQK" + std::string(1, '\0') + "K" + n +
           "\x85K\x01\x85\x89}tRs.";
  };
  EXPECT_EQ(Refusal(Path("x.pt"), Archived(pickle(1))), "");
  const std::string refusal = Refusal(Path("x.pt"), Archived(pickle(2)));
  EXPECT_NE(refusal.find("(a Tensor is larger than its record)"),
            std::string::npos)
      << refusal;
}

TEST(StateDict, OfUnknownKeysOrLackingStateIsRefused) {
  Pair<SGNHT, SGNHTOptions> pair(SGNHTOptions(0.1).num_data(50).seed(7));
  const auto good = pair.sampler.state_dict();
  const auto refusal = [&] {
    return MessageOf<std::invalid_argument>(
        [&] { pair.other.load_state_dict(good); });
  };
  StateDict group = good.at("param_groups").toListRef()[0];
  group.set("mass_matrix", 2.0);
  EXPECT_EQ(refusal(),
            "Invalid state_dict: param group 0 has mass_matrix, which SGNHT "
            "does not know; it is not one of SGNHT");
  EXPECT_EQ(group.entries().erase("mass_matrix"), 1U);
  group.set("initial_lr", 0.1);  // of Python's schedulers
  group.set("my_own", 0.5);
  StateDict state = good.at("state");
  StateDict first = state.at(0);
  const auto momentum = first.at("momentum");
  EXPECT_EQ(first.entries().erase("momentum"), 1U);
  EXPECT_EQ(refusal(),
            "Invalid state_dict: the state of parameter 0 lacks momentum");
  first.set("momentum", momentum);
  pair.other.load_state_dict(good);
  pair.ExpectSameChain();
}

TEST(StateDict, IsASnapshot) {
  Pair<SGHMC, SGHMCOptions> pair(Hamiltonian());
  const auto saved = pair.sampler.state_dict();
  const auto start = Copies(pair.params);
  for (int i = 0; i < 3; ++i) pair.sampler.step();
  const auto end = Copies(pair.params);
  {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < start.size(); ++i) pair.params[i].copy_(start[i]);
  }
  pair.sampler.load_state_dict(saved);
  for (int i = 0; i < 3; ++i) pair.sampler.step();
  ExpectEqual(pair.params, end);
}

TEST(StateDict, GivesItsSeedToGroupsThatAreAddedLater) {
  SGLD sampler(Params(), Langevin());
  SGLD other(Params(), Langevin().seed(1));
  sampler.step();
  other.load_state_dict(sampler.state_dict());
  const auto p = Param(9);
  const auto q = Param(9);
  sampler.add_param_group(OptimizerParamGroup({p}));
  other.add_param_group(OptimizerParamGroup({q}));
  EXPECT_EQ(other.seed(), 7);
  sampler.step();
  other.step();
  ExpectEqual({p}, {q});
}

}  // namespace
}  // namespace torch_sgmcmc
