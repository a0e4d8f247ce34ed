#include "store/chain_writer.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <map>
#include <set>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <utility>

#include "host/crc32.h"

namespace torch_sgmcmc {
namespace {

constexpr std::string_view kChainPrefix = "chain-";
constexpr const char* kIndex = "index";
constexpr const char* kLock = "lock";

// The path of a file in a folder.
std::string In(const std::string& folder, const std::string& name) {
  return std::filesystem::path(folder) / name;
}

DrawIndex Parsed(const std::string& path, const std::string& text) {
  try {
    return ParseIndex(text);
  } catch (const std::exception& error) {
    throw std::runtime_error("Cannot read " + path + ": " + error.what());
  }
}

}  // namespace

std::vector<int64_t> ChainsIn(const std::string& store) {
  std::vector<int64_t> chains;
  if (!std::filesystem::is_directory(store)) return chains;
  for (const std::string& name : disk::NamesIn(store)) {
    if (!name.starts_with(kChainPrefix)) continue;
    int64_t chain = 0;
    const char* const begin = name.data() + kChainPrefix.size();
    const char* const end = name.data() + name.size();
    if (std::from_chars(begin, end, chain).ptr != end || begin == end) continue;
    // A chain whose writer was killed before it was made is none yet.
    if (std::filesystem::exists(In(ChainFolder(store, chain), kIndex))) {
      chains.push_back(chain);
    }
  }
  std::sort(chains.begin(), chains.end());
  return chains;
}

std::string ChainFolder(const std::string& store, int64_t chain) {
  return In(store, std::string(kChainPrefix) + std::to_string(chain));
}

DrawIndex ReadIndex(const std::string& store, int64_t chain) {
  const std::string path = In(ChainFolder(store, chain), kIndex);
  return Parsed(path, disk::Read(path));
}

ChainWriter::ChainWriter(const std::string& store,
                         int64_t chain,
                         const DrawLayout& layout)
    : folder_(ChainFolder(store, chain)),
      place_("chain " + std::to_string(chain) + " of " + store) {
  if (chain < 0) {
    throw std::invalid_argument("Invalid chain: " + std::to_string(chain) +
                                " (must be >= 0)");
  }
  for (const int64_t other : ChainsIn(store)) {
    const std::string difference =
        Difference(layout.tensors(), ReadIndex(store, other).layout.tensors());
    if (!difference.empty()) {
      std::string message = "Invalid store: ";
      message.append(store).append(" is of another model: ").append(difference);
      throw std::invalid_argument(message);
    }
  }
  disk::MakeFolder(folder_);
  lock_ = std::make_unique<disk::Lock>(In(folder_, kLock), place_);
  const std::string path = In(folder_, kIndex);
  if (!std::filesystem::exists(path)) {
    text_ = IndexHead(layout);
    disk::WriteWhole(path, {{text_.data(), text_.size()}});
  }
  tail_ = disk::Tail(path);
  text_ = disk::Read(path);
  index_ = Parsed(path, text_);
  undecided_ = text_.size() > index_.head_size;
  if (!undecided_) CutTo(index_.size);  // files that were not named yet
}

ChainWriter::~ChainWriter() { Close(); }

void ChainWriter::Close() {
  if (!lock_) return;
  // A run that is resumed at the last checkpoint needs none of these.
  DeleteDropped(checkpoint_);
  tail_ = {};
  shared_ = {};
  lock_.reset();
}

size_t ChainWriter::num_draws() const {
  const std::lock_guard guard(mutex_);
  return index_.draws.size();
}

std::optional<DrawRecord> ChainWriter::last() const {
  const std::lock_guard guard(mutex_);
  if (index_.draws.empty()) return std::nullopt;
  return index_.draws.back();
}

void ChainWriter::Check() const {
  if (undecided_) {
    throw std::invalid_argument(
        "Invalid store: " + place_ + " has " +
        std::to_string(index_.draws.size()) +
        " draws of an earlier run (load a checkpoint to go on with it, or "
        "restart() to delete them)");
  }
}

void ChainWriter::Append(DrawRecord record,
                         const std::vector<const void*>& tensors) {
  Check();
  const auto& begins = index_.layout.begins();
  if (tensors.size() + 1 != begins.size()) {
    throw std::invalid_argument(
        "Invalid draw: it has " + std::to_string(tensors.size()) +
        " tensors (must be " + std::to_string(begins.size() - 1) + ")");
  }
  if (!index_.draws.empty() && record.number <= index_.draws.back().number) {
    throw std::invalid_argument(
        "Invalid number: " + std::to_string(record.number) +
        " (must be more than that of the last draw)");
  }
  std::vector<disk::Piece> pieces = {{nullptr, 0}};
  std::vector<uint32_t> sums;
  for (size_t i = 0; i < tensors.size(); ++i) {
    pieces.push_back({tensors[i], begins[i + 1] - begins[i]});
    sums.push_back(Crc32(pieces.back().bytes, pieces.back().size));
  }
  const std::string header = index_.layout.Header(sums);
  pieces[0] = {header.data(), header.size()};
  record.crc32 = Crc32(header.data(), header.size());
  Place(record);
  WriteDraw(record, pieces);
  AppendToIndex(IndexLine(record));
  newest_ = record;
  const std::lock_guard guard(mutex_);
  index_.draws.push_back(record);
}

void ChainWriter::Place(DrawRecord& record) const {
  const int64_t capacity = index_.layout.draws_per_file();
  record.file = record.slot = 0;
  if (capacity == 1) return;
  const bool goes_on = newest_ && newest_->slot + 1 < capacity;
  record.file = goes_on ? newest_->file : record.number;
  record.slot = goes_on ? newest_->slot + 1 : 0;
}

void ChainWriter::WriteDraw(const DrawRecord& record,
                            const std::vector<disk::Piece>& pieces) {
  const std::string name = DrawFileName(record);
  if (!record.shares()) return disk::WriteWhole(In(folder_, name), pieces);
  if (shared_name_ != name) {
    shared_ = disk::Tail(In(folder_, name));
    shared_name_ = name;
  }
  shared_.Append(static_cast<uint64_t>(record.slot) * index_.layout.size(),
                 pieces);
}

void ChainWriter::AppendToIndex(const std::string& line) {
  tail_.Append(index_.size, {{line.data(), line.size()}});
  text_ += line;
  index_.size += line.size();
}

void ChainWriter::Thin(int64_t interval) {
  Check();
  AppendToIndex(IndexThinning(interval));
  {
    const std::lock_guard guard(mutex_);
    std::erase_if(index_.draws, [&](const DrawRecord& record) {
      const bool drops = record.number % interval != 0;
      if (drops) dropped_.push_back({record, index_.size});
      return drops;
    });
  }
  if (!has_checkpoint_) DeleteDropped(index_.size);
}

StorePosition ChainWriter::Checkpoint() {
  Check();
  DeleteDropped(checkpoint_);
  has_checkpoint_ = true;
  checkpoint_ = index_.size;
  return {index_.size, Crc32(text_.data(), index_.size)};
}

std::vector<int64_t> ChainWriter::CutBack(const StorePosition& position) {
  if (position.size < index_.head_size || position.size > text_.size() ||
      Crc32(text_.data(), position.size) != position.crc32) {
    throw std::invalid_argument("Invalid checkpoint: it is not of " + place_ +
                                ", or of an earlier run");
  }
  CutTo(position.size);
  has_checkpoint_ = true;
  checkpoint_ = position.size;
  std::vector<int64_t> lost;
  for (const DrawRecord& record : index_.draws) {
    if (!IsThere(record)) lost.push_back(record.number);
  }
  return lost;
}

void ChainWriter::Restart() {
  CutTo(index_.head_size);
  has_checkpoint_ = false;
  checkpoint_ = 0;
}

void ChainWriter::CutTo(uint64_t size) {
  tail_.Cut(size);
  text_.resize(size);
  {
    const std::lock_guard guard(mutex_);
    index_ = ParseIndex(text_);
  }
  undecided_ = false;
  newest_.reset();
  // How many draws the index knows of each file.
  std::map<std::string, int64_t> known;
  const auto knows = [&](const DrawRecord& record) {
    int64_t& count = known[DrawFileName(record)];
    count = std::max(count, record.slot + 1);
    if (!newest_ || newest_->number < record.number) newest_ = record;
  };
  std::ranges::for_each(index_.dropped, knows);
  std::ranges::for_each(index_.draws, knows);
  // Deleted when an unbroken run would.
  dropped_.clear();
  for (const DrawRecord& record : index_.dropped) {
    if (record.shares() || IsThere(record)) dropped_.push_back({record, size});
  }
  shared_ = {};
  shared_name_.clear();
  std::vector<std::string> unnamed;
  for (const std::string& name : disk::NamesIn(folder_)) {
    if (name == kIndex || name == kLock) continue;
    const auto found = known.find(name);
    if (found == known.end()) {
      unnamed.push_back(name);
    } else if (index_.layout.draws_per_file() > 1) {
      const std::string path = In(folder_, name);
      const uint64_t whole =
          static_cast<uint64_t>(found->second) * index_.layout.size();
      if (std::filesystem::file_size(path) > whole) disk::Tail(path).Cut(whole);
    }
  }
  disk::Delete(folder_, unnamed);
}

bool ChainWriter::IsThere(const DrawRecord& record) const {
  std::error_code error;
  const auto size =
      std::filesystem::file_size(In(folder_, DrawFileName(record)), error);
  const uint64_t end =
      static_cast<uint64_t>(record.slot + 1) * index_.layout.size();
  return !error && (!record.shares() || size >= end);
}

void ChainWriter::DeleteDropped(uint64_t by) {
  std::set<std::string> needed;
  const auto needs = [&](const DrawRecord& record) {
    if (record.shares()) needed.insert(DrawFileName(record));
  };
  std::ranges::for_each(index_.draws, needs);
  if (newest_) needs(*newest_);
  for (const Dropped& dropped : dropped_) {
    if (dropped.by > by) needs(dropped.record);
  }
  const auto goes = [&](const Dropped& dropped) {
    return dropped.by <= by && !needed.contains(DrawFileName(dropped.record));
  };
  std::set<std::string> names;
  for (const Dropped& dropped : dropped_) {
    if (goes(dropped)) names.insert(DrawFileName(dropped.record));
  }
  try {
    disk::Delete(folder_, {names.begin(), names.end()});
  } catch (const std::runtime_error&) {
    return;  // They are no part of the store, and tried again the next time.
  }
  std::erase_if(dropped_, goes);
}

}  // namespace torch_sgmcmc
