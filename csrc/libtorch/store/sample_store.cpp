#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "libtorch/core/checks.h"
#include "libtorch/store/chain_files.h"
#include "torch_sgmcmc/store.h"

namespace torch_sgmcmc {

const std::vector<std::string>& Draw::names() const { return *names_; }

bool Draw::contains(const std::string& name) const {
  return std::find(names_->begin(), names_->end(), name) != names_->end();
}

at::Tensor Draw::at(const std::string& name) const {
  const at::Tensor all = contains(name) ? file_->Read(name) : at::Tensor();
  if (!all.defined()) Invalid("Invalid name: no draw has '" + name + "'");
  return all.select(0, row_);
}

void Draw::copy_to(torch::nn::Module& module) const {
  std::map<std::string, at::Tensor> own;
  for (const auto& item : module.named_parameters()) {
    own[item.key()] = item.value();
  }
  for (const auto& item : module.named_buffers()) {
    own[item.key()] = item.value();
  }
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
  for (const std::string& name : names()) {
    const at::Tensor tensor = at(name);
    const at::Tensor& into = own[name];
    if (!into.defined() || into.sizes() != tensor.sizes()) {
      Invalid("Invalid module: '" + name + "' of the draw has the shape " +
              Shape(tensor.sizes()) + ", the module's " +
              (into.defined() ? Shape(into.sizes()) : "is missing"));
    }
    pairs.emplace_back(into, tensor);
  }
  const at::NoGradGuard no_graph;
  for (auto& [into, tensor] : pairs) into.copy_(tensor);
}

SampleStore::SampleStore(std::string path) : path_(std::move(path)) {
  refresh();
}

const SampleStore& SampleStore::refresh() {
  std::vector<Draw> draws;
  if (const auto tensors = ReadStore(path_)) {
    auto names = std::make_shared<std::vector<std::string>>();
    for (const StoredTensor& t : *tensors) names->push_back(t.name);
    for (const int64_t number : ChainsIn(path_)) {
      for (const auto& file : ReadIndex(path_, number)) {
        for (size_t row = 0; row < file->draws().size(); ++row) {
          const DrawNumbers& numbers = file->draws()[row];
          Draw draw;
          draw.chain = number;
          draw.step = numbers.step;
          draw.lr = numbers.lr;
          draw.temperature = numbers.temperature;
          draw.weight = numbers.weight;
          draw.loss = numbers.loss;
          draw.prior_precision = numbers.prior_precision;
          draw.path = file->path();
          draw.names_ = names;
          draw.file_ = file;
          draw.row_ = static_cast<int64_t>(row);
          draws.push_back(std::move(draw));
        }
      }
    }
  }
  draws_ = std::move(draws);
  return *this;
}

const Draw& SampleStore::operator[](size_t index) const {
  if (index >= draws_.size()) {
    throw std::out_of_range("Invalid index: " + std::to_string(index) + " (" +
                            path_ + " has " + std::to_string(draws_.size()) +
                            " draws)");
  }
  return draws_[index];
}

std::vector<Draw> SampleStore::chain(int64_t chain) const {
  std::vector<Draw> some;
  std::copy_if(draws_.begin(),
               draws_.end(),
               std::back_inserter(some),
               [&](const Draw& draw) { return draw.chain == chain; });
  return some;
}

std::vector<int64_t> SampleStore::chains() const {
  std::set<int64_t> all;
  for (const Draw& draw : draws_) all.insert(draw.chain);
  return {all.begin(), all.end()};
}

}  // namespace torch_sgmcmc
