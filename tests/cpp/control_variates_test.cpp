// Control variates as a LibTorch program uses them. That chains and states have
// the same bits as in Python, and most messages, is tested from Python
// (tests/test_cpp_control_variates.py); here is what belongs to C++: loaders
// and batches of many types, and that a failure changes nothing.
#include "torch_sgmcmc/control_variates.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "message_of.h"
#include "torch_sgmcmc/ewsg.h"
#include "torch_sgmcmc/psgld.h"
#include "torch_sgmcmc/sghmc.h"
#include "torch_sgmcmc/sgld.h"

namespace torch_sgmcmc {
namespace {

using Example = torch::data::Example<>;
using Tensors = std::vector<torch::Tensor>;

constexpr int64_t kNumData = 7;

void ExpectSame(const Tensors& got, const Tensors& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].scalar_type(), want[i].scalar_type());
    EXPECT_TRUE(torch::equal(got[i], want[i])) << got[i] << want[i];
  }
}

void ExpectClose(const Tensors& got, const Tensors& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(torch::allclose(got[i], want[i], 1e-12, 1e-14))
        << got[i] << want[i];
  }
}

// A small network on seven data.
struct Problem {
  explicit Problem(torch::Dtype dtype = torch::kDouble) {
    const auto row = torch::arange(1.0, kNumData + 1.0, torch::kDouble);
    x = torch::sin(row.unsqueeze(1) * torch::arange(1.0, 4.0, torch::kDouble))
            .to(dtype);
    y = torch::cos(row * row).to(dtype);
    params = {torch::tensor({0.5, -1.0, 0.8}, dtype).set_requires_grad(true),
              torch::tensor(0.25, dtype).set_requires_grad(true)};
  }

  torch::Tensor operator()(const Example& batch) {
    if (++calls == fails_at) throw std::runtime_error("no data");
    const torch::Tensor out = (batch.data.mv(params[0]) + params[1]).tanh();
    return (out - batch.target).square().mean();
  }

  std::function<torch::Tensor(const Example&)> loss() {
    return [this](const Example& batch) { return (*this)(batch); };
  }

  Example batch(const std::vector<int64_t>& indices) const {
    const torch::Tensor index = torch::tensor(indices);
    return {x.index({index}), y.index({index})};
  }

  // All data once, in batches of unequal sizes.
  std::vector<Example> loader() const {
    return {batch({0, 1, 2}), batch({3, 4, 5}), batch({6})};
  }

  // The plain gradient, by no estimator.
  Tensors gradient(const Example& batch, const Tensors& at) {
    Tensors own = std::exchange(params, {});
    for (const auto& t : at) {
      params.push_back(t.detach().clone().set_requires_grad(true));
    }
    Tensors grads = torch::autograd::grad({(*this)(batch)}, params);
    params = std::move(own);
    return grads;
  }

  Tensors values() const {
    return {params[0].detach().clone(), params[1].detach().clone()};
  }

  Tensors grads() const {
    return {params[0].grad().detach().clone(),
            params[1].grad().detach().clone()};
  }

  void move(double by) {
    const torch::NoGradGuard no_grad;
    for (auto& param : params) param.add_(by);
  }

  torch::Tensor x;
  torch::Tensor y;
  Tensors params;
  int64_t calls = 0;
  int64_t fails_at = 0;
};

SGLDOptions Langevin() { return SGLDOptions(0.05).num_data(kNumData).seed(3); }

// The tensors of a state dict.
Tensors Kept(const StateDict& dict, const char* name) {
  Tensors result;
  for (const c10::IValue& value : dict.at(name).toListRef()) {
    result.push_back(value.isNone() ? torch::Tensor() : value.toTensor());
  }
  return result;
}

void SetStep(Sampler& sampler, int64_t step) {
  const StateDict state = sampler.state_dict();
  StateDict group = state.at("param_groups").toListRef()[0];
  group.set("step", step);  // of the state: copies share their contents
  sampler.load_state_dict(state);
}

// A data set of torch's.
class Rows : public torch::data::datasets::Dataset<Rows> {
 public:
  explicit Rows(const Problem& problem) : x_(problem.x), y_(problem.y) {}
  Example get(size_t index) override {
    const auto i = static_cast<int64_t>(index);
    return {x_[i], y_[i]};
  }
  std::optional<size_t> size() const override { return kNumData; }

 private:
  torch::Tensor x_;
  torch::Tensor y_;
};

TEST(ControlVariates, TheFormulaWithTorchsLoader) {
  Problem problem;
  SGLD sampler(problem.params, Langevin());
  ControlVariates estimator(
      sampler, [&](const Example& batch) { return problem(batch); });
  const auto loader =
      torch::data::make_data_loader<torch::data::samplers::SequentialSampler>(
          Rows(problem).map(torch::data::transforms::Stack<>()), 3);
  const Example all{problem.x, problem.y};
  for (int i = 0; i < 2; ++i) {  // the loader can be gone through again
    problem.move(0.3);
    EXPECT_NEAR(
        estimator.set_anchor(*loader), problem(all).item<double>(), 1e-14);
  }
  const Tensors anchor = problem.values();
  problem.move(-0.2);
  const Tensors theta = problem.values();
  const void* address = problem.params[0].data_ptr();
  const Example batch = problem.batch({1, 4});
  const auto loss = estimator.backward(batch);
  const Tensors g = problem.gradient(batch, theta);
  const Tensors a = problem.gradient(batch, anchor);
  const Tensors f = problem.gradient(all, anchor);
  ExpectClose(problem.grads(), {g[0] - a[0] + f[0], g[1] - a[1] + f[1]});
  EXPECT_TRUE(torch::equal(loss, problem(batch)));
  ExpectSame(problem.values(), theta);
  EXPECT_EQ(problem.params[0].data_ptr(), address);
}

TEST(ControlVariates, BatchesWeighByTheirSizeWhateverTheirType) {
  Problem problem;
  const auto batches = problem.loader();
  const Tensors want =
      problem.gradient({problem.x, problem.y}, problem.values());
  torch::optim::SGD sgd(problem.params, 0.1);  // any optimizer will do
  const auto check = [&](auto estimator_of, auto batch_of) {
    std::vector<decltype(batch_of(batches[0]))> loader;
    for (const Example& batch : batches) loader.push_back(batch_of(batch));
    auto estimator = estimator_of();
    estimator->set_anchor(loader);
    ExpectClose(Kept(estimator->state_dict(), "full_grads"), want);
  };
  using Pair = std::pair<torch::Tensor, torch::Tensor>;
  check(
      [&] {
        return std::make_unique<ControlVariates<Pair>>(sgd, [&](const Pair& b) {
          return problem({b.first, b.second});
        });
      },
      [](const Example& b) { return Pair(b.data, b.target); });
  // The first tensor is in a pair, after a name.
  using Tuple = std::tuple<std::string, Pair>;
  check(
      [&] {
        return std::make_unique<ControlVariates<Tuple>>(
            sgd, [&](const Tuple& b) {
              return problem({std::get<1>(b).first, std::get<1>(b).second});
            });
      },
      [](const Example& b) { return Tuple("a", Pair(b.data, b.target)); });
  // A loader's batches need only convert to those of the loss.
  check(
      [&] {
        return std::make_unique<ControlVariates<torch::Tensor>>(
            sgd, [&](const torch::Tensor& b) {
              return problem({b.narrow(1, 0, 3), b.select(1, 3)});
            });
      },
      [](const Example& b) {
        return torch::data::TensorExample(
            torch::cat({b.data, b.target.unsqueeze(1)}, 1));
      });
  // As a loader gives them without Stack.
  using Separate = std::vector<Example>;
  check(
      [&] {
        return std::make_unique<ControlVariates<Separate>>(
            sgd, [&](const Separate& b) {
              return problem(torch::data::transforms::Stack<>().apply_batch(b));
            });
      },
      [](const Example& b) {
        Separate result;
        for (int64_t i = 0; i < b.data.size(0); ++i) {
          result.emplace_back(b.data[i], b.target[i]);
        }
        return result;
      });
  // Of a type that does not tell, with a function and a report.
  struct Slice {
    int64_t begin;
    int64_t end;
  };
  ControlVariatesOptions<Slice> options;
  std::vector<int64_t> done;
  options.batch_size = [](const Slice& s) { return s.end - s.begin; };
  options.progress = [&](int64_t count) { done.push_back(count); };
  ControlVariates estimator(
      sgd,
      [&](const Slice& s) {
        return problem({problem.x.slice(0, s.begin, s.end),
                        problem.y.slice(0, s.begin, s.end)});
      },
      options);
  estimator.set_anchor(std::vector<Slice>{{0, 3}, {3, 6}, {6, 7}});
  ExpectClose(Kept(estimator.state_dict(), "full_grads"), want);
  EXPECT_EQ(done, std::vector<int64_t>({3, 6, 7}));
}

TEST(ControlVariates, RefusesWhatIsNoLossAndNoBatch) {
  Problem problem;
  SGLD sampler(problem.params, Langevin());
  EXPECT_EQ(MessageOf([&] { ControlVariates<>(sampler, nullptr); }),
            "Invalid loss_fn: nullptr (must be callable)");
  std::vector<Example> loader = problem.loader();
  EXPECT_EQ(MessageOf([&] { SVRG(sampler, problem.loss(), loader, 0); }),
            "Invalid refresh_every: 0 (must be >= 1)");
  ControlVariates nothing(sampler,
                          [](const Example&) { return torch::Tensor(); });
  EXPECT_EQ(
      MessageOf([&] { nothing.set_anchor(loader); }),
      "loss_fn returned an undefined Tensor, expected the loss as a tensor");
  // It may be one of data or one of fields.
  ControlVariates unknown(sampler, [](const Tensors& b) { return b[0].sum(); });
  EXPECT_NE(MessageOf([&] {
              unknown.set_anchor(std::vector<Tensors>{{problem.x}});
            }).find(" is unknown: give batch_size, a function that returns it"),
            std::string::npos);
  ControlVariates scalar(sampler, [](const torch::Tensor& b) { return b; });
  EXPECT_EQ(MessageOf([&] { scalar.set_anchor(Tensors{torch::tensor(1.0)}); }),
            "the number of data in a batch of type at::Tensor is unknown: give "
            "batch_size, a function that returns it");
}

TEST(ControlVariates, AFailureChangesNothing) {
  Problem problem;
  SGLD sampler(problem.params, Langevin());
  std::vector<Example> loader = problem.loader();
  ControlVariates fixed(sampler, problem.loss());
  SVRG moving(sampler, problem.loss(), loader, 1);
  fixed.set_anchor(loader);
  moving.set_anchor();
  fixed.backward(problem.batch({2}));
  problem.move(0.1);
  const Tensors theta = problem.values();
  const Tensors grads = problem.grads();
  const auto addresses = [&] {
    return std::pair(problem.params[0].data_ptr(),
                     problem.params[0].grad().data_ptr());
  };
  const auto before = addresses();
  const Tensors anchors = {Kept(fixed.state_dict(), "anchor")[0],
                           Kept(moving.state_dict(), "anchor")[0]};
  const auto fails = [&](int64_t call, const std::function<void()>& what) {
    problem.calls = 0;
    problem.fails_at = call;
    EXPECT_EQ(MessageOf(what), "no data");
    ExpectSame(problem.values(), theta);
    ExpectSame(problem.grads(), grads);
    EXPECT_EQ(addresses(), before);
    EXPECT_TRUE(Kept(fixed.state_dict(), "anchor")[0].is_same(anchors[0]));
    EXPECT_TRUE(Kept(moving.state_dict(), "anchor")[0].is_same(anchors[1]));
    EXPECT_EQ(moving.state_dict().at("anchor_step").toInt(), 0);
  };
  for (const int64_t call : {1, 2}) {  // at the anchor, at θ
    fails(call, [&] { fixed.backward(problem.batch({1})); });
  }
  for (const int64_t call : {1, 3}) {
    fails(call, [&] { fixed.set_anchor(loader); });
  }
  SetStep(sampler, 1);  // a pass is due
  fails(3, [&] { moving.backward(problem.batch({1})); });
}

TEST(ControlVariates, NoVarianceAtTheAnchor) {
  for (const auto dtype :
       {torch::kDouble, torch::kFloat, torch::kBFloat16, torch::kHalf}) {
    for (const int64_t order : {1, 2}) {
      Problem problem(dtype);
      SGLD sampler(problem.params, Langevin());
      ControlVariates estimator(sampler, problem.loss(), {.order = order});
      estimator.set_anchor(problem.loader());
      Tensors full = Kept(estimator.state_dict(), "full_grads");
      for (auto& f : full) {
        EXPECT_EQ(f.scalar_type(),
                  dtype == torch::kDouble ? torch::kDouble : torch::kFloat);
        EXPECT_GT(f.abs().max().item<double>(), 0.01);
        f = f.to(dtype);
      }
      for (int64_t i = 0; i < kNumData; ++i) {
        sampler.zero_grad();
        estimator.backward(problem.batch({i}));
        ExpectSame(problem.grads(), full);
      }
    }
  }
}

TEST(ControlVariates, OfSecondOrderAreExactWhereLossesAreQuadratic) {
  Problem problem;
  SGLD sampler(problem.params, Langevin());
  const auto loss = [&](const Example& batch) {
    const auto out = batch.data.mv(problem.params[0]) + problem.params[1];
    return (out - batch.target).square().mean();
  };
  ControlVariates estimator(sampler, loss, {.order = 2});
  estimator.set_anchor(problem.loader());
  problem.move(5);
  const Tensors full =
      torch::autograd::grad({loss({problem.x, problem.y})}, problem.params);
  for (int64_t i = 0; i < kNumData; ++i) {
    sampler.zero_grad();
    estimator.backward(problem.batch({i}));
    ExpectClose(problem.grads(), full);
  }
}

TEST(ControlVariates, RefuseHessiansThatThereCannotBe) {
  Problem problem;
  SGLD sampler(problem.params, Langevin());
  std::vector<Example> loader = problem.loader();
  EXPECT_EQ(MessageOf([&] {
              SVRG(sampler, problem.loss(), loader, 1, {.order = 2});
            }),
            "Invalid order: 2 (must be 1 for SVRG, whose anchor moves)");
  const auto many = torch::zeros({11'586}).set_requires_grad(true);
  torch::optim::SGD sgd({many}, 0.1);
  ControlVariates<> first(sgd, problem.loss());
  EXPECT_EQ(
      MessageOf([&] { ControlVariates<>(sgd, problem.loss(), {.order = 2}); }),
      "Invalid order: 2 (the Hessian of 11586 parameters takes 1.073883 GB, "
      "must be at most that of 11585: use order 1)");
}

TEST(ControlVariates, GradientsAddUpAndHaveAGraph) {
  Problem problem;
  SGLD sampler(problem.params, Langevin());
  ControlVariates estimator(sampler, problem.loss());
  estimator.set_anchor(problem.loader());
  problem.move(0.2);
  estimator.backward(problem.batch({1, 4}));
  const Tensors once = problem.grads();
  estimator.backward(problem.batch({1}), 0.5);
  estimator.backward(problem.batch({4}), 0.5);
  ExpectClose(problem.grads(), {2 * once[0], 2 * once[1]});

  sampler.zero_grad();
  estimator.backward(problem.batch({1, 4}), 1.0, /*create_graph=*/true);
  ExpectClose(problem.grads(), once);
  const auto curvature = [&](const torch::Tensor& grad) {
    return torch::autograd::grad({grad}, {problem.params[1]})[0];
  };
  const torch::Tensor got = curvature(problem.params[1].grad());
  const torch::Tensor plain = torch::autograd::grad(
      {problem(problem.batch({1, 4}))}, {problem.params[1]}, {}, true, true)[0];
  ExpectClose({got}, {curvature(plain)});
  sampler.zero_grad();  // or parameter and graph would hold each other
}

TEST(ControlVariates, ParametersThatSomeMinibatchesDoNotReach) {
  const auto param = [](double value) {
    return torch::full({2}, value, torch::kDouble).set_requires_grad(true);
  };
  const torch::Tensor a = param(1);
  const torch::Tensor b = param(2);
  const torch::Tensor frozen = param(3).set_requires_grad(false);
  const torch::Tensor unused = param(4);
  SGLD sampler({frozen, a, b, unused}, Langevin());
  ControlVariates estimator(sampler, [&](const torch::Tensor& batch) {
    const auto loss = (a.square().sum() * batch).mean() + frozen.sum();
    return batch[0].item<double>() > 2 ? loss + b.square().sum() : loss;
  });
  Tensors data;
  for (const double v : {1, 2, 3, 4}) {
    data.push_back(torch::full({1}, v, torch::kDouble));
  }
  estimator.set_anchor(data);
  {
    const torch::NoGradGuard no_grad;
    a.add_(1);
    b.add_(1);
  }
  // b is reached by half of the data: 2 b / 2 = 2 at the anchor, 3 here.
  for (const auto& [batch, b_grad] :
       {std::pair(data[0], 2.0), {data[3], 6.0 - 4.0 + 2.0}}) {
    sampler.zero_grad();
    estimator.backward(batch);
    ExpectSame({b.grad()}, {torch::full({2}, b_grad, torch::kDouble)});
    EXPECT_FALSE(frozen.grad().defined());
    EXPECT_FALSE(unused.grad().defined());
  }
  const StateDict state = estimator.state_dict();
  EXPECT_EQ(Kept(state, "anchor").size(), 3U);
  EXPECT_FALSE(Kept(state, "full_grads")[2].defined());
  estimator.load_state_dict(state);
}

// Gradients in one and the same memory, time and again.
struct IntoBuffer : torch::autograd::Function<IntoBuffer> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context,
                               const torch::Tensor& value,
                               std::vector<double>* buffer) {
    context->saved_data["buffer"] = reinterpret_cast<int64_t>(buffer->data());
    return value.clone();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      const torch::autograd::variable_list& grads) {
    auto* memory =
        reinterpret_cast<double*>(context->saved_data["buffer"].toInt());
    const auto view =
        torch::from_blob(memory, grads[0].sizes(), grads[0].options());
    return {view.copy_(grads[0]), torch::Tensor()};
  }
};

TEST(ControlVariates, RefusesGradientsThatItCannotUse) {
  const auto param = torch::ones({2}, torch::kDouble).set_requires_grad(true);
  SGLD sampler({param}, Langevin());
  std::vector<double> buffer(2);
  ControlVariates reusing(sampler, [&](const torch::Tensor& batch) {
    return (IntoBuffer::apply(param, &buffer) * batch).sum();
  });
  const Tensors data = {torch::ones({2}, torch::kDouble)};
  reusing.set_anchor(data);
  EXPECT_EQ(MessageOf([&] { reusing.backward(data[0]); }),
            "ControlVariates got the gradients at θ in the memory of those at "
            "the anchor, which it still needs: gradients must not be reused");
  EXPECT_FALSE(param.grad().defined());

  const auto table = torch::ones({5, 2}).set_requires_grad(true);
  SGLD rows({table}, Langevin());
  ControlVariates sparse(rows, [&](const torch::Tensor& batch) {
    return torch::embedding(table, batch, -1, false, /*sparse=*/true).sum();
  });
  EXPECT_EQ(MessageOf([&] { sparse.set_anchor(Tensors{torch::arange(5)}); }),
            "ControlVariates does not support sparse gradients (for "
            "an Embedding, use sparse(false))");
  EXPECT_FALSE(table.grad().defined());
}

TEST(SVRG, RefreshesOnSchedule) {
  for (const bool capturable : {false, true}) {
    Problem problem;
    SGLD sampler(problem.params, Langevin().capturable(capturable));
    std::vector<Example> loader = problem.loader();
    SVRG moving(sampler, problem.loss(), loader, /*refresh_every=*/3);
    ControlVariates<>& estimator = moving;  // also by its base
    const auto step = [&](int64_t i) {
      sampler.zero_grad();
      estimator.backward(problem.batch({i % kNumData}));
      sampler.step();
    };
    for (int64_t i = 0; i < 8; ++i) {
      const Tensors before = problem.values();
      problem.calls = 0;
      step(i);
      EXPECT_EQ(problem.calls, i % 3 == 0 ? 3 + 2 : 2);
      const StateDict state = estimator.state_dict();
      EXPECT_EQ(state.at("anchor_step").toInt(), i / 3 * 3);
      if (i % 3 == 0) ExpectSame(Kept(state, "anchor"), before);
    }
    // Before its time, and after the sampler was put back.
    moving.set_anchor();
    EXPECT_EQ(moving.state_dict().at("anchor_step").toInt(), 8);
    SetStep(sampler, 2);
    step(0);
    EXPECT_EQ(moving.state_dict().at("anchor_step").toInt(), 2);
    // Of some of the data, if the user will have it.
    estimator.set_anchor(std::vector<Example>{loader[0]});
    EXPECT_EQ(moving.state_dict().at("anchor_step").toInt(), 3);
    ExpectClose(Kept(moving.state_dict(), "full_grads"),
                problem.gradient(loader[0], problem.values()));
  }
}

TEST(SVRG, SeveralGradientsOfAStepShareTheirAnchor) {
  Problem problem;
  EWSG sampler(
      problem.params,
      EWSGOptions(0.05).num_data(kNumData).index_chain_length(2).seed(3));
  std::vector<Example> loader = problem.loader();
  SVRG estimator(sampler, problem.loss(), loader, /*refresh_every=*/2);
  std::vector<int64_t> calls;
  for (int64_t i = 0; i < 5; ++i) {
    problem.calls = 0;
    int64_t draws = i;
    sampler.step([&] {
      return estimator.backward(problem.batch({draws++ % kNumData, 1}));
    });
    calls.push_back(problem.calls);
  }
  // Three gradients of two evaluations a step, and three batches every other.
  EXPECT_EQ(calls, std::vector<int64_t>({9, 6, 9, 6, 9}));
}

TEST(SVRG, ResumesInTheMiddleOfAnEpoch) {
  Problem problem;
  Problem other;
  const auto options = SGHMCOptions(0.05).num_data(kNumData);
  SGHMC sampler(problem.params, SGHMCOptions(options).seed(3));
  SGHMC late(other.params, SGHMCOptions(options).seed(99));
  std::vector<Example> loader = problem.loader();
  SVRG estimator(sampler, problem.loss(), loader, /*refresh_every=*/3);
  SVRG resumed(late, other.loss(), loader, /*refresh_every=*/100);
  const auto run = [](Problem& of, auto& chain, auto& gradients, int64_t from) {
    for (int64_t i = from; i < from + 4; ++i) {
      chain.zero_grad();
      gradients.backward(of.batch({i % kNumData}));
      chain.step();
    }
  };
  run(problem, sampler, estimator, 0);
  {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < 2; ++i) other.params[i].copy_(problem.params[i]);
  }
  late.load_state_dict(sampler.state_dict());
  resumed.load_state_dict(estimator.state_dict());
  EXPECT_EQ(resumed.refresh_every(), 3);
  run(problem, sampler, estimator, 4);
  run(other, late, resumed, 4);
  ExpectSame(other.values(), problem.values());
  EXPECT_EQ(other.calls, 4 * 2 + 3);  // one pass, at step 6
}

TEST(SVRG, RefusesStatesThatAreNone) {
  Problem problem;
  SGLD sampler(problem.params, Langevin());
  std::vector<Example> loader = problem.loader();
  SVRG estimator(sampler, problem.loss(), loader, /*refresh_every=*/3);
  const StateDict empty = estimator.state_dict();
  EXPECT_TRUE(empty.at("anchor").isNone() && empty.at("full_grads").isNone());
  estimator.set_anchor();
  const auto loading = [&](const char* key, const c10::IValue& value) {
    StateDict state = estimator.state_dict();
    state.set(key, value);
    return MessageOf([&] { estimator.load_state_dict(state); });
  };
  const Tensors anchor = Kept(estimator.state_dict(), "anchor");
  c10::impl::GenericList some(c10::AnyType::get());
  some.push_back(anchor[0]);
  EXPECT_EQ(loading("anchor", some),
            "Invalid state_dict: anchor has 1 tensors, expected 2");
  some.push_back(c10::IValue());
  EXPECT_EQ(loading("anchor", some),
            "Invalid state_dict: anchor of parameter 1 is a none (must be a "
            "Tensor)");
  some.set(1, torch::zeros({4}));
  EXPECT_EQ(loading("full_grads", some),
            "Invalid state_dict: full_grads of parameter 1 has shape [4], "
            "expected []");
  EXPECT_EQ(loading("full_grads", c10::IValue()),
            "Invalid state_dict: full_grads is a none (must be a list)");
  EXPECT_EQ(loading("anchor_step", -1),
            "Invalid anchor_step: -1 (must be >= 0)");
  EXPECT_EQ(loading("refresh_every", 0),
            "Invalid refresh_every: 0 (must be >= 1)");
  const StateDict good = estimator.state_dict();
  EXPECT_TRUE(Kept(good, "anchor")[0].is_same(anchor[0]));
  EXPECT_EQ(estimator.refresh_every(), 3);

  // What is loaded is a copy; and no anchor is a state as well.
  estimator.load_state_dict(good);
  EXPECT_FALSE(Kept(estimator.state_dict(), "anchor")[0].is_same(anchor[0]));
  ExpectSame(Kept(estimator.state_dict(), "anchor"), anchor);
  ControlVariates fixed(sampler, problem.loss());
  fixed.load_state_dict(good);
  sampler.add_param_group(torch::optim::OptimizerParamGroup(
      {torch::ones({1}).set_requires_grad(true)}));
  const std::string changed =
      " has an anchor for other parameters than the sampler's (their number, a "
      "shape, dtype or device has changed): call set_anchor() again";
  const Example batch = problem.batch({0});
  EXPECT_EQ(MessageOf([&] { fixed.backward(batch); }),
            "ControlVariates" + changed);
  EXPECT_EQ(MessageOf([&] { estimator.backward(batch); }), "SVRG" + changed);
  fixed.load_state_dict(empty);
  EXPECT_EQ(MessageOf([&] { fixed.backward(batch); }),
            "ControlVariates has no anchor yet: call set_anchor() first");
}

}  // namespace
}  // namespace torch_sgmcmc
