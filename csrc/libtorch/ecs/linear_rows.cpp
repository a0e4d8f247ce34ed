#include "libtorch/ecs/linear_rows.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <string>
#include <unordered_map>
#include <unordered_set>

namespace torch_sgmcmc {
namespace {

namespace generated = torch::autograd::generated;
using torch::autograd::Node;
using torch::autograd::SavedVariable;

// These leave the order of elements as it is, in tensors of one row or column.
bool Reshapes(const Node& node) {
  static const std::unordered_set<std::string> names = {
      "ReshapeAliasBackward0",
      "SelectBackward0",
      "SqueezeBackward0",
      "SqueezeBackward1",
      "SqueezeBackward2",
      "TBackward0",
      "TransposeBackward0",
      "UnsafeViewBackward0",
      "UnsqueezeBackward0",
      "ViewBackward0",
  };
  return names.contains(node.name());
}

const Node* Input(const Node& node, size_t place) {
  return node.next_edge(place).function.get();
}

bool IsOne(const at::Scalar& number) { return number.equal(1); }

// The rows by each parameter, as they are found.
class Parts {
 public:
  Parts(const std::vector<at::Tensor>& params, int64_t size)
      : params_(params), size_(size), found_(params.size()) {
    for (size_t i = 0; i < params.size(); ++i) {
      const at::Tensor& param = params[i];
      places_[torch::autograd::impl::gradient_edge(param).function.get()] = i;
    }
  }

  // Reads a term of the outputs, or adds its own to the terms; false if
  // neither.
  bool take(const Node* node, std::vector<const Node*>& terms) {
    if (node == nullptr) return true;  // without parameters
    if (const auto place = places_.find(node); place != places_.end()) {
      const at::TensorOptions like = params_[place->second].options();
      return keep(node, at::ones({size_, 1}, like.requires_grad(false)));
    }
    if (Reshapes(*node)) {
      terms.push_back(Input(*node, 0));
      return true;
    }
    if (const auto* sum = dynamic_cast<const generated::AddBackward0*>(node)) {
      terms.push_back(Input(*node, 0));
      terms.push_back(Input(*node, 1));
      return IsOne(sum->alpha);
    }
    if (const auto* product =
            dynamic_cast<const generated::AddmmBackward0*>(node)) {
      terms.push_back(Input(*node, 0));
      return IsOne(product->alpha) && IsOne(product->beta) &&
             multiply(*node, product->mat1_, 1);
    }
    if (const auto* product =
            dynamic_cast<const generated::MmBackward0*>(node)) {
      return multiply(*node, product->self_, 0);
    }
    if (const auto* product =
            dynamic_cast<const generated::MvBackward0*>(node)) {
      return multiply(*node, product->self_, 0);
    }
    return false;
  }

  at::Tensor rows() const {
    std::vector<at::Tensor> rows = found_;
    for (size_t i = 0; i < rows.size(); ++i) {
      if (rows[i].defined()) continue;
      rows[i] = at::zeros({size_, params_[i].numel()},
                          params_[i].options().requires_grad(false));
    }
    return rows.size() == 1 ? rows[0] : at::cat(rows, 1);
  }

 private:
  // Takes the matrix of a product; `place` is its own among the inputs, that of
  // the parameters is next.
  bool multiply(const Node& node, const SavedVariable& matrix, size_t place) {
    // Does the matrix depend on parameters too?
    if (Input(node, place) != nullptr) return false;
    const Node* leaf = Input(node, place + 1);
    while (leaf != nullptr && Reshapes(*leaf)) leaf = Input(*leaf, 0);
    return keep(leaf, matrix.unpack());
  }

  // Takes the rows by one parameter, a row or column; whether they fit.
  bool keep(const Node* leaf, const at::Tensor& rows) {
    const auto place = places_.find(leaf);
    if (place == places_.end() || found_[place->second].defined() ||
        rows.layout() != at::kStrided) {
      return false;
    }
    const at::Tensor& param = params_[place->second];
    const at::IntArrayRef shape = param.sizes();
    if (!shape.empty() &&
        *std::max_element(shape.begin(), shape.end()) != param.numel()) {
      return false;
    }
    if (rows.sizes() != at::IntArrayRef{size_, param.numel()}) return false;
    found_[place->second] = rows.detach();
    return true;
  }

  const std::vector<at::Tensor>& params_;
  int64_t size_;
  std::unordered_map<const Node*, size_t> places_;
  std::vector<at::Tensor> found_;
};

}  // namespace

at::Tensor ReadRows(const torch::autograd::Edge& edge,
                    const std::vector<at::Tensor>& params,
                    int64_t size) {
  Parts parts(params, size);
  std::vector<const Node*> terms = {edge.function.get()};
  while (!terms.empty()) {
    const Node* term = terms.back();
    terms.pop_back();
    if (!parts.take(term, terms)) return {};
  }
  return parts.rows();
}

}  // namespace torch_sgmcmc
