// Rows of linear functions are read off their graphs, or refused
// (tests/test_linear_rows.py has more of them).
#include "libtorch/ecs/linear_rows.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <vector>

namespace torch_sgmcmc {
namespace {

using Function = std::function<torch::Tensor(
    const torch::Tensor&, const std::vector<torch::Tensor>&)>;

class LinearRows : public ::testing::Test {
 protected:
  torch::Tensor read(const Function& function,
                     const std::vector<std::vector<int64_t>>& shapes) {
    std::vector<torch::Tensor> params;
    params.reserve(shapes.size());
    for (const std::vector<int64_t>& shape : shapes) {
      params.push_back(torch::rand(shape).set_requires_grad(true));
    }
    return ReadRows(torch::autograd::impl::gradient_edge(function(x_, params)),
                    params,
                    x_.size(0));
  }

  torch::Tensor x_ = torch::rand({7, 3});
  torch::Tensor with_ones_ = torch::cat({x_, torch::ones({7, 1})}, 1);
};

TEST_F(LinearRows, AreThoseOfTheMatrix) {
  const torch::Tensor vector =
      read([](auto& x, auto& p) { return x.matmul(p[0]); }, {{3}});
  ASSERT_TRUE(vector.defined());
  EXPECT_EQ(vector.data_ptr(), x_.data_ptr());
  const torch::Tensor column =
      read([](auto& x, auto& p) { return x.matmul(p[0]).squeeze(); }, {{3, 1}});
  ASSERT_TRUE(column.defined());
  EXPECT_TRUE(column.equal(x_));
}

TEST_F(LinearRows, OfSeveralParametersAreSideBySide) {
  const torch::Tensor sum =
      read([](auto& x, auto& p) { return x.matmul(p[0]) + p[1]; }, {{3}, {}});
  ASSERT_TRUE(sum.defined());
  EXPECT_TRUE(sum.equal(with_ones_));
  const torch::Tensor layer = read(
      [](auto& x, auto& p) { return torch::linear(x, p[0], p[1]).squeeze(-1); },
      {{1, 3}, {1}});
  ASSERT_TRUE(layer.defined());
  EXPECT_TRUE(layer.equal(with_ones_));
  const torch::Tensor unused =
      read([](auto& x, auto& p) { return x.matmul(p[1]); }, {{1}, {3}});
  ASSERT_TRUE(unused.defined());
  EXPECT_TRUE(unused.equal(torch::cat({torch::zeros({7, 1}), x_}, 1)));
}

TEST_F(LinearRows, OfOtherFunctionsAreNotRead) {
  for (const Function& function : std::vector<Function>{
           [](auto&x, auto&p) { return (x * p[0]).sum(1); },
           [](auto&x, auto&p) { return 2 * x.matmul(p[0]); },
           [](auto&x, auto&p) { return x.matmul(2 * p[0]); },
           [](auto&x, auto&p) { return x.matmul(p[0]) + x.matmul(p[0]); },
           [](auto&x, auto&p) { return (x * p[0].sum()).matmul(p[0]); },
           [](auto&x, auto&p) { return torch::mv(x.to_sparse(), p[0]); },
           [](auto&x, auto&p) {
             return torch::add(x.matmul(p[0]), x.cos().matmul(p[0]), 2);
           },
       }) {
    EXPECT_FALSE(read(function, {{3}}).defined());
  }
  const auto addmm = [](double beta, double alpha) {
    return [=](auto& x, auto& p) {
      return torch::addmm(p[1], x, p[0], beta, alpha);
    };
  };
  EXPECT_TRUE(read(addmm(1, 1), {{3, 1}, {1}}).defined());
  EXPECT_FALSE(read(addmm(3, 1), {{3, 1}, {1}}).defined());
  EXPECT_FALSE(read(addmm(1, 3), {{3, 1}, {1}}).defined());
  const Function other_size = [](auto& x, auto& p) {
    return x.slice(0, 0, 6).matmul(p[0]);
  };
  EXPECT_FALSE(read(other_size, {{3}}).defined());
}

}  // namespace
}  // namespace torch_sgmcmc
