#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "host/crc32.h"
#include "host/draw_index.h"
#include "host/draw_layout.h"
#include "libtorch/core/checks.h"
#include "libtorch/store/stored_types.h"
#include "store/chain_writer.h"
#include "torch_sgmcmc/store.h"

namespace torch_sgmcmc {

struct Draw::Layout {
  explicit Layout(DrawLayout of_file) : file(std::move(of_file)) {
    for (const StoredTensor& tensor : file.tensors()) {
      places[tensor.name] = names.size();
      names.push_back(tensor.name);
    }
  }

  DrawLayout file;
  std::vector<std::string> names;
  std::map<std::string, size_t> places;
};

struct Draw::File {
  explicit File(DrawRecord record) : of_draw(std::move(record)) {}

  DrawRecord of_draw;
  at::Tensor bytes;
  std::vector<uint32_t> sums;
  std::set<size_t> checked;
};

namespace {

[[noreturn]] void Damaged(const Draw& draw, const std::string& reason) {
  throw std::runtime_error("Cannot read draw " + std::to_string(draw.number) +
                           " of chain " + std::to_string(draw.chain) + ", " +
                           draw.path + ": " + reason);
}

// The draw's bytes: its file, mapped into memory, or its part of one, read.
at::Tensor BytesOf(const Draw& draw,
                   const DrawRecord& record,
                   const DrawLayout& layout) {
  std::error_code error;
  uint64_t found = std::filesystem::file_size(draw.path, error);
  if (error) {
    Damaged(draw,
            error.message() +
                " (a writer deletes draws when its thinning doubles: then "
                "refresh() the store)");
  }
  const auto size = static_cast<int64_t>(layout.size());
  const int64_t begin = record.slot * size;
  if (record.shares()) {
    found -= std::min(found, static_cast<uint64_t>(begin));
    found = std::min(found, layout.size());
  }
  if (found != layout.size()) {
    Damaged(draw,
            "it has " + std::to_string(found) + " bytes of the " +
                std::to_string(size) + " that were written");
  }
  if (!record.shares()) {
    return at::from_file(draw.path, /*shared=*/false, size, at::kByte);
  }
  at::Tensor bytes = at::empty({size}, at::kByte);
  std::ifstream file(draw.path, std::ios::binary);
  // NOLINTNEXTLINE(*-reinterpret-cast)
  auto* const into = reinterpret_cast<char*>(bytes.mutable_data_ptr<uint8_t>());
  if (!file.seekg(begin).read(into, size)) Damaged(draw, "it cannot be read");
  return bytes;
}

}  // namespace

const std::vector<std::string>& Draw::names() const { return layout_->names; }

bool Draw::contains(const std::string& name) const {
  return layout_->places.contains(name);
}

at::Tensor Draw::at(const std::string& name) const {
  const auto found = layout_->places.find(name);
  if (found == layout_->places.end()) {
    Invalid("Invalid name: no draw has '" + name + "'");
  }
  const DrawLayout& layout = layout_->file;
  if (!file_->bytes.defined()) {
    const at::Tensor bytes = BytesOf(*this, file_->of_draw, layout);
    const auto* const header = bytes.const_data_ptr<uint8_t>();
    if (Crc32(header, layout.header_size()) != file_->of_draw.crc32) {
      Damaged(*this, "its header is altered");
    }
    file_->sums = layout.Sums({// NOLINTNEXTLINE(*-reinterpret-cast)
                               reinterpret_cast<const char*>(header),
                               layout.header_size()});
    file_->bytes = bytes;
  }
  const size_t place = found->second;
  const uint64_t begin = layout.begins()[place];
  const uint64_t end = layout.begins()[place + 1];
  const auto* const data = file_->bytes.const_data_ptr<uint8_t>() + begin;
  if (!file_->checked.contains(place)) {
    if (Crc32(data, end - begin) != file_->sums[place]) {
      Damaged(*this, "the numbers of '" + name + "' are altered");
    }
    file_->checked.insert(place);
  }
  const StoredTensor& tensor = layout.tensors()[place];
  return file_->bytes
      .slice(0, static_cast<int64_t>(begin), static_cast<int64_t>(end))
      .view(ScalarTypeOf(tensor.dtype))
      .view(tensor.shape);
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
    const auto found = own.find(name);
    if (found == own.end() || found->second.sizes() != tensor.sizes()) {
      std::ostringstream message;
      message << "Invalid module: '" << name << "' of the draw has the shape "
              << tensor.sizes() << ", the module's ";
      if (found == own.end()) {
        message << "is missing";
      } else {
        message << found->second.sizes();
      }
      Invalid(message.str());
    }
    pairs.emplace_back(found->second, tensor);
  }
  const at::NoGradGuard no_graph;
  for (auto& [into, tensor] : pairs) into.copy_(tensor);
}

SampleStore::SampleStore(std::string path) : path_(std::move(path)) {
  refresh();
}

const SampleStore& SampleStore::refresh() {
  std::vector<Draw> draws;
  std::shared_ptr<const Draw::Layout> layout;
  for (const int64_t number : ChainsIn(path_)) {
    const DrawIndex index = ReadIndex(path_, number);
    if (!layout) layout = std::make_shared<Draw::Layout>(index.layout);
    const std::string difference =
        Difference(layout->file.tensors(), index.layout.tensors());
    if (!difference.empty()) {
      Invalid("Invalid store: chain " + std::to_string(number) + " of " +
              path_ + " is of another model than the first: " + difference);
    }
    const std::string folder = ChainFolder(path_, number);
    if (!index.damaged.empty()) {
      TORCH_WARN("lines ",
                 index.damaged,
                 " of ",
                 folder,
                 "/index are damaged; what they say is left out");
    }
    for (const DrawRecord& record : index.draws) {
      Draw draw;
      draw.chain = number;
      draw.number = record.number;
      draw.step = record.step;
      draw.lr = record.lr;
      draw.temperature = record.temperature;
      draw.weight = record.weight;
      draw.loss = record.loss;
      draw.prior_precision = record.prior_precision;
      draw.path = std::filesystem::path(folder) / DrawFileName(record);
      draw.layout_ = layout;
      draw.file_ = std::make_shared<Draw::File>(record);
      draws.push_back(std::move(draw));
    }
  }
  draws_ = std::move(draws);
  return *this;
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
