#include "libtorch/ecs/predictor.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "libtorch/core/gradient_edges.h"
#include "libtorch/ecs/likelihood_graph.h"
#include "libtorch/ecs/linear_rows.h"

namespace torch_sgmcmc {
namespace {

using torch::autograd::Edge;
using torch::autograd::Node;
// Which pointer this is depends on torch's version.
using NodePtr = decltype(Edge::function);
using NodeSet = std::unordered_set<const Node*>;

// Nodes on the paths from the root to leaves, each before those it leads to.
std::vector<NodePtr> LeadingTo(const NodeSet& leaves, const NodePtr& root) {
  std::unordered_map<const Node*, bool> leads;
  for (const Node* leaf : leaves) leads[leaf] = true;
  std::vector<NodePtr> order;
  std::vector<NodePtr> pending = {root};
  while (!pending.empty()) {
    const NodePtr node = pending.back();
    const bool seen = leads.contains(node.get());
    const size_t before = pending.size();
    bool any = false;
    for (const Edge& edge : node->next_edges()) {
      if (seen || edge.function == nullptr) continue;
      const auto found = leads.find(edge.function.get());
      if (found == leads.end()) {
        pending.push_back(edge.function);
      } else {
        any = any || found->second;
      }
    }
    if (pending.size() > before) continue;
    pending.pop_back();
    if (seen) continue;
    leads[node.get()] = any;
    if (any) order.push_back(node);
  }
  std::reverse(order.begin(), order.end());
  return order;
}

// What every path to the parameters leads through, from the values on.
Edges Gates(const at::Tensor& values, const std::vector<at::Tensor>& params) {
  const Edges to_params = EdgesOf(params);
  NodeSet leaves;
  for (const Edge& edge : to_params) leaves.insert(edge.function.get());
  const Edge root = EdgeOf(values);
  const std::vector<NodePtr> order = LeadingTo(leaves, root.function);
  NodeSet within = leaves;
  for (const NodePtr& node : order) within.insert(node.get());
  Edges gates;
  Edges ahead = {root};
  for (const NodePtr& node : order) {
    // All that is ahead are different edges: a single one is a gate.
    if (ahead.size() == 1) gates.push_back(ahead[0]);
    ahead.erase(
        std::remove_if(ahead.begin(),
                       ahead.end(),
                       [&](const Edge& edge) { return edge.function == node; }),
        ahead.end());
    for (const Edge& edge : node->next_edges()) {
      if (within.contains(edge.function.get()) &&
          std::find(ahead.begin(), ahead.end(), edge) == ahead.end()) {
        ahead.push_back(edge);
      }
    }
  }
  return gates;
}

// The last gate with one element for each datum.
std::optional<int64_t> LastOfSize(const at::Tensor& values,
                                  const Edges& gates) {
  if (gates.empty()) return std::nullopt;
  const std::vector<at::Tensor> firsts =
      GradientsAt({EdgeOf(values)},
                  gates,
                  {at::ones_like(values.detach())},
                  /*create_graph=*/false);
  for (size_t i = gates.size(); i > 0; --i) {
    if (firsts[i - 1].numel() == values.numel()) {
      return static_cast<int64_t>(i) - 1;
    }
  }
  return std::nullopt;
}

}  // namespace

std::optional<Predictor> Predictor::Of(const at::Tensor& values,
                                       const std::vector<at::Tensor>& params,
                                       std::optional<int64_t> gate) {
  const Edges gates = Gates(values, params);
  if (!gate) gate = LastOfSize(values, gates);
  if (!gate || *gate >= static_cast<int64_t>(gates.size())) return std::nullopt;
  const Edge& edge = gates[static_cast<size_t>(*gate)];
  at::Tensor first = GradientsAt({EdgeOf(values)},
                                 {edge},
                                 {at::ones_like(values.detach())},
                                 /*create_graph=*/true)[0];
  at::Tensor second;
  if (first.requires_grad()) {
    second = GradientsAt({EdgeOf(first)},
                         {edge},
                         {at::ones_like(first.detach())},
                         /*create_graph=*/false)[0];
  }
  if (!second.defined()) {  // l is linear
    second = at::zeros_like(first.detach());
  }
  first = first.detach();
  at::Tensor rows = ReadRows(edge, params, values.numel());
  if (!rows.defined()) {
    const at::Tensor cotangents = first.clone().requires_grad_();
    const at::Tensor slope = FlatGradient(edge, params, cotangents);
    rows = ColumnsOfLinear(slope, cotangents).t();
  }
  return Predictor{*gate, first.reshape({-1}), second.reshape({-1}), rows};
}

}  // namespace torch_sgmcmc
