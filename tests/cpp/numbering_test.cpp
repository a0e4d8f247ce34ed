// Whose noise is whose when parameters grow, shrink, are replaced, reordered or
// frozen; and that a step which fails has moved nothing: of every sampler.
#include <torch/torch.h>
#include <torch_sgmcmc/torch_sgmcmc.h>

#include "same_values.h"
#include "small_chains.h"
#include "testing.h"

namespace torch_sgmcmc {
namespace {

using torch::Tensor;
using torch::optim::OptimizerParamGroup;
using Groups = std::vector<OptimizerParamGroup>;

// A sampler, and a step that is tampered with once there are gradients.
struct Method {
  std::string name;
  std::function<std::unique_ptr<Sampler>(const Groups&)> make;
  // Adds to the losses where examples are observed one by one.
  bool has_grads = true;
};

template <typename Kind, typename Options>
Method Of(const std::string& name, const Options& options) {
  return {name, [options](const Groups& groups) {
            return std::make_unique<Kind>(groups, options);
          }};
}

std::vector<Method> EveryMethod() {
  const auto with = [](auto options) { return options.num_data(50).seed(7); };
  std::vector<Method> all = {
      Of<SGLD>("SGLD", with(SGLDOptions(0.1))),
      Of<SGHMC>("SGHMC", with(SGHMCOptions(0.1))),
      Of<SGHMC>("SGHMC", with(SGHMCOptions(0.1)).noise_estimate("online")),
      Of<MCLMC>("MCLMC", with(MCLMCOptions(0.1))),
      Of<PSGLD>("PSGLD", with(PSGLDOptions(0.1))),
      Of<SGNHT>("SGNHT", with(SGNHTOptions(0.1))),
      Of<EWSG>("EWSG", with(EWSGOptions(0.1))),
      Of<SBPS>("SBPS", with(SBPSOptions())),
      Of<SBPS>("SBPS", with(SBPSOptions()).preconditioned(true))};
  for (Method& method : all) method.has_grads = method.name != "SBPS";
  return all;
}

using Tamper = std::function<void()>;

// Takes gradients away, also from a step that throws: those with a graph, and
// their parameters, would hold each other.
class Gradients {
 public:
  explicit Gradients(Sampler& sampler) : sampler_(sampler) {}
  ~Gradients() {
    for (const auto& group : sampler_.param_groups()) {
      for (const Tensor& p : group.params()) p.mutable_grad() = Tensor();
    }
  }
  Gradients(const Gradients&) = delete;
  Gradients& operator=(const Gradients&) = delete;

 private:
  Sampler& sampler_;
};

void Step(Sampler& sampler, const Tamper& tamper = nullptr) {
  static int64_t draw = 0;
  const Gradients gradients(sampler);
  const bool is_bouncy = dynamic_cast<SBPS*>(&sampler) != nullptr;
  sampler.step([&] {
    const Tensor x = torch::sin(10.0 * ++draw + torch::arange(6));
    Tensor losses = torch::zeros({6});
    for (const auto& group : sampler.param_groups()) {
      for (const Tensor& p : group.params()) {
        p.mutable_grad() = Tensor();
        const Tensor row = p.to(torch::kFloat).reshape({-1, 1});
        losses = losses + (row - x).square().sum(0);
      }
    }
    if (is_bouncy) {
      if (tamper) tamper();
      return losses;
    }
    const Tensor loss = losses.mean();
    loss.backward({}, std::nullopt, /*create_graph=*/true);
    if (tamper) tamper();
    return loss.detach();
  });
}

// Of everything, to the bit.
c10::IValue Snapshot(const Sampler& sampler,
                     const std::vector<Tensor>& params) {
  c10::impl::GenericList list(c10::AnyType::get());
  for (const Tensor& p : params) list.push_back(p.detach());
  return c10::IValue(
             StateDict{{"params", list}, {"sampler", sampler.state_dict()}})
      .deepcopy();
}

std::vector<int64_t> Numbers(const Sampler& sampler, size_t group,
                             const char* key) {
  const StateDict saved =
      sampler.state_dict().at("param_groups").toListRef()[group];
  std::vector<int64_t> numbers;
  for (const c10::IValue& number : saved.at(key).toListRef()) {
    numbers.push_back(number.toInt());
  }
  return numbers;
}

using Counts = std::vector<int64_t>;

Groups TwoGroups(const std::vector<Tensor>& params) {
  Groups groups;
  for (const Tensor& p : params) groups.emplace_back(std::vector{p});
  return groups;
}

TEST(Numbers, OfEverySamplerAreOfParametersWithTheirSizes) {
  for (const Method& method : EveryMethod()) {
    for (const int64_t size : {300, 2}) {
      SCOPED_TRACE(method.name);
      const std::vector<Tensor> params = {Param(3), Param(5)};
      const auto sampler = method.make({OptimizerParamGroup(params)});
      Step(*sampler);
      Step(*sampler);
      params[0].set_data(torch::linspace(-1, 1, size));
      const c10::IValue before = Snapshot(*sampler, params);
      EXPECT_EQ(MessageOf<std::runtime_error>([&] { Step(*sampler); }),
                method.name + ": parameter 0 of group 0 has " +
                    std::to_string(size) +
                    " elements; it had 3 when noise offsets were assigned: "
                    "make another sampler after parameters have grown, shrunk "
                    "or been replaced (further ones come with "
                    "add_param_group)");
      EXPECT_TRUE(SameValues(Snapshot(*sampler, params), before));
    }
  }
}

TEST(Numbers, OfListsOfAnotherLengthAreRefused) {
  for (const Method& method : EveryMethod()) {
    SCOPED_TRACE(method.name);
    const std::vector<Tensor> params = {Param(3), Param(5)};
    const auto sampler = method.make({OptimizerParamGroup(params)});
    Step(*sampler);
    sampler->param_groups()[0].params().push_back(Param(4));
    EXPECT_EQ(MessageOf<std::runtime_error>([&] { Step(*sampler); }),
              method.name +
                  ": group 0 has 3 parameters; it had 2 when noise offsets "
                  "were assigned: make another sampler after parameters have "
                  "grown, shrunk or been replaced (further ones come with "
                  "add_param_group)");
    sampler->param_groups()[0].params().pop_back();
    Step(*sampler);
  }
}

TEST(Numbers, FollowGroupsThatAreReorderedOrTakenOut) {
  for (const Method& method : EveryMethod()) {
    SCOPED_TRACE(method.name);
    const std::vector<Tensor> params = {Param(300), Param(5), Param(300)};
    const auto sampler = method.make(TwoGroups(params));
    auto& groups = sampler->param_groups();
    std::swap(groups[0], groups[1]);
    Step(*sampler);
    EXPECT_EQ(Numbers(*sampler, 0, "offsets"), Counts({384}));
    EXPECT_EQ(Numbers(*sampler, 1, "offsets"), Counts({0}));
    EXPECT_EQ(Numbers(*sampler, 2, "offsets"), Counts({512}));
    groups.pop_back();
    Step(*sampler);
    sampler->add_param_group(OptimizerParamGroup(std::vector{Param(7)}));
    EXPECT_EQ(Numbers(*sampler, 0, "offsets"), Counts({384}));
    EXPECT_EQ(Numbers(*sampler, 1, "offsets"), Counts({0}));
    EXPECT_EQ(Numbers(*sampler, 2, "offsets"), Counts({896}));
    Step(*sampler);
  }
}

// ---- A step that throws -----------------------------------------------------

// What breaks the last of several lists.
struct Break {
  const char* what;
  std::function<void(Sampler&, Tensor&)> make;
  bool of_grads = false;  // once there are some
};

std::vector<Break> Breaks() {
  const auto data = [](auto change) {
    return [change](Sampler&, Tensor& p) { p.set_data(change(p.detach())); };
  };
  const auto grad = [](auto change) {
    return [change](Sampler&, Tensor& p) {
      p.mutable_grad() = change(p.grad().detach());
    };
  };
  const auto state = [](auto change) {
    return [change](Sampler& sampler, Tensor& p) {
      for (const char* key : {"momentum", "direction", "square_average",
                              "thermostat", "velocity"}) {
        if (!sampler.state_of(p)[key].defined()) continue;
        Tensor& tensor = sampler.own_state_of(p)[key];
        tensor = change(tensor);
      }
    };
  };
  const auto to_double = [](const Tensor& t) { return t.to(torch::kDouble); };
  const auto column = [](const Tensor& t) { return t.reshape({-1, 1}); };
  const auto expanded = [](const Tensor& t) {
    return t.flatten()[0].reshape({1}).expand(t.sizes());
  };
  const auto meta = [](const Tensor& t) { return t.to(torch::kMeta); };
  return {{"a parameter's dtype", data(to_double)},
          // Whose state would fit.
          {"a parameter's half",
           data([](const Tensor& t) { return t.to(torch::kBFloat16); }), true},
          {"a parameter's shape", data(column)},
          {"a parameter's size", data([](const Tensor& t) {
             return torch::cat({t, t});
           })},
          {"a parameter's strides", data(expanded)},
          {"a gradient's dtype", grad(to_double), true},
          {"a gradient's shape", grad(column), true},
          {"a gradient's device", grad(meta), true},
          {"a gradient's layout",
           grad([](const Tensor& t) { return t.to_sparse(); }), true},
          {"a gradient's NaN", grad([](const Tensor& t) {
             return t * std::numeric_limits<float>::quiet_NaN();
           }),
           true},
          {"a state's dtype", state(to_double)},
          {"a state's shape", state(column)},
          {"a state's device", state(meta)},
          {"a state's layout",
           state([](const Tensor& t) { return t.to_sparse(); })},
          {"a state's strides", state(expanded)},
          {"a range",
           [](Sampler& sampler, Tensor&) {
             static_cast<SamplerOptions&>(sampler.param_groups()[1].options())
                 .set_prior_precision(-1);
           }},
          {"a prior's mean", [](Sampler& sampler, Tensor&) {
             static_cast<SamplerOptions&>(sampler.param_groups()[1].options())
                 .set_prior_precision(std::numeric_limits<double>::infinity());
           }}};
}

// What was broken itself cannot be compared: the first list is looked at, with
// its state and counters.
TEST(FailedStep, OfEverySamplerHasMovedNothing) {
  for (const Method& method : EveryMethod()) {
    for (const bool is_first : {true, false}) {
      for (const Break& broken : Breaks()) {
        SCOPED_TRACE(method.name + ", " + broken.what +
                     (is_first ? ", first" : ""));
        std::vector<Tensor> params = {Param(3), Param(5)};
        const auto sampler = method.make(TwoGroups(params));
        if (!is_first) Step(*sampler);
        const bool of_state = std::string(broken.what).find("state") < 9;
        if (of_state &&
            sampler->state().count(params[1].unsafeGetTensorImpl()) == 0) {
          continue;
        }
        // A parameter without state may be exchanged, but not once it has a
        // gradient.
        const bool of_data = std::string(broken.what).find("parameter") < 3;
        const bool has_state =
            sampler->state().count(params[1].unsafeGetTensorImpl()) > 0;
        const bool late = broken.of_grads || (of_data && !has_state);
        if (late && !method.has_grads) continue;
        if (!late) broken.make(*sampler, params[1]);
        const auto counters = [&] {
          return sampler->num_steps() + (sampler->num_skipped() << 20);
        };
        const auto kept = [&] {
          const c10::IValue groups = sampler->state_dict().at("param_groups");
          const StateDict states = sampler->state_dict().at("state");
          StateDict of_first;
          if (states.contains(0)) of_first = states.at(0);
          return c10::IValue(StateDict{{"first", of_first},
                                       {"theta", params[0].detach()},
                                       {"second", states.contains(1)},
                                       {"groups", groups}})
              .deepcopy();
        };
        const c10::IValue before = kept();
        const int64_t counted = counters();
        EXPECT_ANY_THROW(Step(*sampler, [&] {
          if (late) broken.make(*sampler, params[1]);
        }));
        EXPECT_TRUE(SameValues(kept(), before));
        EXPECT_EQ(counters(), counted);
      }
    }
  }
}

// ---- What requires no gradient ----------------------------------------------

TEST(Frozen, ParametersOfEverySamplerStayWhereTheyAre) {
  for (const Method& method : EveryMethod()) {
    SCOPED_TRACE(method.name);
    const std::vector<Tensor> params = {Param(3), Param(5)};
    const auto sampler = method.make({OptimizerParamGroup(params)});
    for (const bool is_frozen : {true, false, true}) {
      params[1].set_requires_grad(!is_frozen);
      const auto before = Copies(params);
      for (int i = 0; i < 3; ++i) {
        Step(*sampler, [&] {
          if (is_frozen && method.has_grads) {
            params[1].mutable_grad() = torch::zeros({5});
          }
        });
      }
      EXPECT_FALSE(torch::equal(params[0], before[0]));
      EXPECT_EQ(torch::equal(params[1], before[1]), is_frozen);
    }
  }
}

// Momenta keep the lr and T of their last update, as in Python.
TEST(Frozen, StepsWithoutAnyGradientRescaleNoMomenta) {
  for (const Method& method :
       {Of<SGHMC>("SGHMC", Hamiltonian()),
        Of<BAOA>("BAOA", BAOAOptions(0.1).num_data(50).seed(7)),
        Of<SGNHT>("SGNHT", SGNHTOptions(0.1).num_data(50).seed(7))}) {
    SCOPED_TRACE(method.name);
    const auto run = [&](double lr, double temperature) {
      const Tensor p = Param(3);
      const auto sampler = method.make(TwoGroups({p}));
      auto& options =
          static_cast<SamplerOptions&>(sampler->param_groups()[0].options());
      for (const bool is_frozen : {false, true, false}) {
        p.set_requires_grad(!is_frozen);
        options.set_lr(is_frozen ? lr : 0.1);
        options.set_temperature(is_frozen ? temperature : 1);
        sampler->step();
      }
      return Snapshot(*sampler, {p});
    };
    const c10::IValue unchanged = run(0.1, 1);
    EXPECT_TRUE(SameValues(run(0.1, 0), unchanged));
    EXPECT_TRUE(SameValues(run(0.03, 1), unchanged));
  }
}

// The estimate belongs to the settings of its first step that is made.
TEST(NoiseEstimates, AreNotDatedByASkippedStep) {
  const auto run = [](bool has_failed) {
    const Tensor p = Param(3);
    SGHMC sampler({p}, Hamiltonian().nonfinite("skip"));
    sampler.step();
    auto& options = sampler.options(0);
    options.noise_estimate(0.08);
    if (has_failed) {
      const Tensor grad = p.grad();
      p.mutable_grad() = torch::full_like(p, NAN);
      sampler.step();
      p.mutable_grad() = grad;
    }
    options.lr(options.lr() / 4);
    sampler.step();
    return p.detach().clone();
  };
  EXPECT_TRUE(torch::equal(run(true), run(false)));
}

TEST(Frozen, ParametersAreNotCounted) {
  const std::vector<Tensor> params = {Param(100), torch::full({900}, 0.01)};
  SGLD sampler(params, Langevin().prior_precision(1));
  const std::vector<Tensor> alone = {Param(100)};
  SGLD other(alone, Langevin().prior_precision(1));
  EXPECT_EQ(GammaPrecision(sampler).step(), GammaPrecision(other).step());
}

}  // namespace
}  // namespace torch_sgmcmc
