// What has a state dict takes one that is right or nearly so, or throws an
// error that says what is wrong; then parameters and state are as before.
#include <torch/torch.h>
#include <torch_sgmcmc/torch_sgmcmc.h>

#include <iostream>

#include "fuzz.h"
#include "same_values.h"
#include "testing.h"

namespace torch_sgmcmc {
namespace {

using torch::Tensor;
using Tensors = std::vector<Tensor>;
using Groups = std::vector<torch::optim::OptimizerParamGroup>;

Tensors TwoParams() {
  return {torch::linspace(-1, 1, 4).set_requires_grad(true),
          torch::linspace(-0.5, 0.7, 6, torch::kDouble)
              .view({2, 3})
              .to(torch::kBFloat16)
              .set_requires_grad(true)};
}

// Of 6 data. What was loaded may ask for any number of calls: it gets a few.
struct Data {
  Tensor losses(const Tensors& params) {
    if (--calls < 0) throw std::runtime_error("no more calls");
    Tensor sum = torch::zeros(6, torch::kDouble);
    for (const Tensor& p : params) {
      p.mutable_grad().reset();
      sum = sum + (p.to(torch::kDouble).flatten() - x).square().sum(1);
    }
    return sum;
  }

  Tensor x = torch::arange(6, torch::kDouble).sin().unsqueeze(1);
  int64_t calls = 0;
};

// Something with a state dict.
struct Subject {
  std::string name;
  Tensors params;
  std::function<StateDict()> state;
  std::function<void(const StateDict&)> load;
  std::function<void()> step;  // or whatever uses the state
  c10::IValue saved = {};      // after some of them
};

template <typename Method>
std::function<void()> StepOf(const std::shared_ptr<Method>& sampler,
                             const Tensors& params) {
  return [=, data = std::make_shared<Data>()] {
    data->calls = 20;
    sampler->step([&] {
      const Tensor losses = data->losses(params);
      if constexpr (std::is_same_v<Method, SBPS>) return losses;
      const Tensor loss = losses.mean();
      loss.backward();
      return loss;
    });
  };
}

template <typename Kept>
Subject SubjectOf(const char* name, const std::shared_ptr<Kept>& kept,
                  const Tensors& params, const std::function<void()>& step) {
  return {name, params, [=] { return kept->state_dict(); },
          [=](const StateDict& dict) { kept->load_state_dict(dict); }, step};
}

template <typename Method, typename Options>
Subject SamplerOf(const char* name, Options options) {
  const Tensors params = TwoParams();
  options.num_data(50).seed(5);
  Groups groups;
  for (const Tensor& p : params) groups.emplace_back(Tensors{p});
  const auto sampler = std::make_shared<Method>(groups, options);
  return SubjectOf(name, sampler, params, StepOf(sampler, params));
}

Subject Precision() {
  const Tensors params = TwoParams();
  const auto sampler =
      std::make_shared<SGLD>(params, SGLDOptions(0.1).num_data(6).seed(1));
  const std::shared_ptr<GammaPrecision> precision(
      new GammaPrecision(*sampler),
      [sampler](const GammaPrecision* it) { delete it; });
  return SubjectOf("GammaPrecision", precision, params,
                   [=] { precision->step(); });
}

Subject Module() {
  const auto net = std::make_shared<torch::nn::LinearImpl>(3, 2);
  return {"Module", net->parameters(), [=] { return state_dict(*net); },
          [=](const StateDict& dict) { load_state_dict(*net, dict); },
          [=] {
            net->forward(torch::ones({1, 3}));
          }};
}

std::vector<Subject> Subjects() {
  SBPSOptions bouncy;
  bouncy.prior_precision(20).preconditioned(true).sample_interval(0.1);
  std::vector<Subject> all = {
      SamplerOf<SGLD>("SGLD", SGLDOptions(0.1)),
      SamplerOf<SGLD>("SGLD, capturable", SGLDOptions(0.1).capturable(true)),
      SamplerOf<SGHMC>("SGHMC", SGHMCOptions(0.1).noise_estimate("online")),
      SamplerOf<MCLMC>("MCLMC", MCLMCOptions(0.1)),
      SamplerOf<PSGLD>("PSGLD", PSGLDOptions(0.1)),
      SamplerOf<SGNHT>("SGNHT", SGNHTOptions(0.1)),
      SamplerOf<EWSG>("EWSG", EWSGOptions(0.1).index_chain_length(2)),
      SamplerOf<SBPS>("SBPS", bouncy),
      Precision(),
      Module()};
  for (Subject& subject : all) {
    for (int i = 0; i < 3; ++i) {
      try {
        subject.step();
      } catch (const std::runtime_error&) {  // no more calls
      }
      for (const Tensor& p : subject.params) p.mutable_grad().reset();
    }
    subject.saved = c10::IValue(subject.state()).deepcopy();
  }
  return all;
}

// Spoils a nest of dicts and lists in one place.
class Spoiler {
 public:
  explicit Spoiler(Choices& random) : random_(random) {}

  // The keys on the way to what was spoiled.
  const std::vector<std::string>& path() const { return path_; }

  c10::IValue spoil(const c10::IValue& value) {
    if (value.isGenericDict() && value.toGenericDict().size() > 0 &&
        !random_.one_in(30)) {
      auto dict = value.toGenericDict();
      auto entry = dict.begin();
      std::advance(entry, random_.below(static_cast<int64_t>(dict.size())));
      const c10::IValue key = entry->key();
      path_.push_back(key.isString() ? key.toStringRef() : "parameter");
      if (random_.one_in(10)) {
        EXPECT_EQ(dict.erase(key), 1);
      } else if (random_.one_in(10)) {
        path_.emplace_back("unheard_of");
        dict.insert(random_.of({c10::IValue("unheard_of"), c10::IValue(77),
                                c10::IValue(0.5)}),
                    entry->value());
      } else {
        dict.insert_or_assign(key, spoil(entry->value()));
      }
      return value;
    }
    if (value.isList() && value.toListRef().size() > 0 && !random_.one_in(3)) {
      auto list = value.toList();
      const auto place =
          static_cast<size_t>(random_.below(static_cast<int64_t>(list.size())));
      if (random_.one_in(6)) {
        list.push_back(list.get(place));
      } else if (random_.one_in(6)) {
        list.erase(list.begin() + static_cast<int64_t>(place));
      } else {
        list.set(place, spoil(list.get(place)));
      }
      return value;
    }
    return instead_of(value);
  }

 private:
  c10::IValue instead_of(const c10::IValue& value) {
    if (value.isTensor() && !random_.one_in(4)) {
      return random_.spoiled(value.toTensor());
    }
    if (value.isInt() && random_.one_in(2)) return random_.bad_integer();
    if (value.isDouble() && random_.one_in(2)) return random_.bad_number();
    switch (random_.below(12)) {
      case 0:
        return {};
      case 1:
        return random_.bad_number();
      case 2:
        return random_.bad_integer();
      case 3:
        return random_.one_in(2);
      case 4:
        return random_.of({"", "zeros", "one", "skip", "unheard of"});
      case 5:
        return random_.tensor(random_.shape(),
                              random_.of({at::kFloat, at::kLong}));
      case 6:
        return c10::impl::GenericList(c10::AnyType::get());
      case 7:
        return c10::impl::GenericDict(c10::AnyType::get(), c10::AnyType::get());
      case 8:
        return std::vector<int64_t>{0, 128};
      case 9:
        return std::vector<double>{0.5, random_.bad_number()};
      case 10:
        return random_.below(4);
      default:
        return random_.fraction();
    }
  }

  Choices& random_;
  std::vector<std::string> path_;
};

// The message of the error, if there is one.
std::optional<std::string> ErrorOf(const std::function<void()>& call) {
  try {
    call();
    return std::nullopt;
  } catch (const std::exception& error) {
    const std::string text = error.what();
    return text.substr(0, text.find('\n'));
  }
}

bool LoadSpoiled(Subject& subject, Choices& random) {
  StateDict dict = subject.saved.deepcopy();
  // Keys, and what messages call the numbers in rows without keys.
  std::vector<std::string> names = {"state_dict", "state dict", "state",
                                    "num_data",   "seed",       "target"};
  if (!random.one_in(4)) {
    for (int64_t i = random.below(2); i >= 0; --i) {
      Spoiler spoiler(random);
      spoiler.spoil(dict);
      names.insert(names.end(), spoiler.path().begin(), spoiler.path().end());
    }
  }
  const c10::IValue before = c10::IValue(subject.state()).deepcopy();
  const Memory memory(subject.params);
  const auto error = ErrorOf([&] { subject.load(dict); });
  if (error) {
    EXPECT_TRUE(error->starts_with("Invalid ") &&
                std::any_of(names.begin(), names.end(),
                            [&](const std::string& name) {
                              return Names(*error, name);
                            }))
        << *error << "\n"
        << names;
    EXPECT_TRUE(memory.is_unchanged()) << *error;
    EXPECT_TRUE(SameValues(subject.state(), before)) << *error;
    return false;
  }
  // What was taken can be worked with, or refused.
  const Memory loaded(subject.params);
  const auto refused = ErrorOf(subject.step);
  for (const Tensor& p : subject.params) p.mutable_grad().reset();
  EXPECT_TRUE(!refused || loaded.is_unchanged());
  return true;
}

TEST(Fuzz, StateDicts) {
  std::vector<Subject> subjects = Subjects();
  std::map<std::string, Tally> tallies;
  ForEachCall(static_cast<int64_t>(120 * subjects.size()), [&](int64_t seed) {
    Subject& subject = subjects[static_cast<size_t>(seed) % subjects.size()];
    SCOPED_TRACE(subject.name);
    Choices random(seed);
    Tensors values;
    for (const Tensor& p : subject.params) values.push_back(p.detach().clone());
    Tally& tally = tallies[subject.name];
    ++tally.made;
    if (!LoadSpoiled(subject, random)) return;
    ++tally.succeeded;
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < values.size(); ++i) {
      subject.params[i].copy_(values[i]);
    }
    subject.load(subject.saved);
  });
  for (const auto& [name, tally] : tallies) tally.check(name);
}

}  // namespace
}  // namespace torch_sgmcmc
