#include "libtorch/chain_files.h"

#include <ATen/ATen.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <torch/nn/module.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <set>
#include <stdexcept>
#include <string_view>
#include <system_error>

#include "host/crc32.h"
#include "libtorch/checks.h"
#include "libtorch/disk.h"
#include "libtorch/options.h"
#include "libtorch/tensor_lists.h"
#include "torch_sgmcmc/state_dict.h"

namespace torch_sgmcmc {
namespace {

namespace fs = std::filesystem;
using c10::ScalarType;

constexpr std::pair<const char*, ScalarType> kDtypes[] = {
    {"U64", ScalarType::UInt64}, {"I64", ScalarType::Long},
    {"F64", ScalarType::Double}, {"C64", ScalarType::ComplexFloat},
    {"F32", ScalarType::Float},  {"U32", ScalarType::UInt32},
    {"I32", ScalarType::Int},    {"BF16", ScalarType::BFloat16},
    {"F16", ScalarType::Half},   {"U16", ScalarType::UInt16},
    {"I16", ScalarType::Short},  {"I8", ScalarType::Char},
    {"U8", ScalarType::Byte},    {"BOOL", ScalarType::Bool},
};
// The columns of an index besides the steps and the groups' precisions.
constexpr std::pair<const char*, double DrawNumbers::*> kColumns[] = {
    {"lr", &DrawNumbers::lr},
    {"temperature", &DrawNumbers::temperature},
    {"weight", &DrawNumbers::weight},
    {"loss", &DrawNumbers::loss}};
constexpr std::string_view kLineSum = ", \"line_crc32\": ";

std::string StoredDtype(ScalarType dtype) {
  for (const auto& [name, type] : kDtypes) {
    if (type == dtype) return name;
  }
  Invalid("Invalid tensors: " + DtypeName(dtype) + " cannot be stored");
}

uint32_t SumOf(std::string_view bytes, uint32_t before = 0) {
  return Crc32(bytes.data(), bytes.size(), before);
}

[[noreturn]] void Unreadable(const std::string& path,
                             const std::string& reason) {
  throw std::runtime_error("Cannot read " + path + ": " + reason);
}

void Expect(bool is_so, const std::string& otherwise) {
  if (!is_so) throw std::runtime_error(otherwise);
}

template <class T>
T Value(const StateDict& dict, const char* key) {
  return FromValue<T>(key, dict.at(key));
}

// Nothing where there is no file.
std::optional<std::string> TextOfFile(const std::string& path) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file && errno == ENOENT) return std::nullopt;
  std::string bytes((std::istreambuf_iterator<char>(file)), {});
  if (!file) Unreadable(path, std::generic_category().message(errno));
  return bytes;
}

std::string FileName(size_t number) {
  std::array<char, 64> name{};
  std::snprintf(name.data(), name.size(), "draws-%06zu.safetensors", number);
  return name.data();
}

std::string FolderOf(const std::string& store, int64_t chain) {
  return store + "/chain-" + std::to_string(chain);
}

// Tensors as store.json and the headers of safetensors describe them.
StoredTensor TensorOf(const std::string& name, const StateDict& entry) {
  const c10::IValue dtype = entry.at("dtype");
  for (const auto& [known, type] : kDtypes) {
    if (!Alike(dtype, known)) continue;
    return {name, type, Value<std::vector<int64_t>>(entry, "shape")};
  }
  throw std::runtime_error("no dtype");
}

// Each tensor's dtype and shape in words.
std::map<std::string, std::string> WordsOf(
    const std::vector<StoredTensor>& tensors) {
  std::map<std::string, std::string> words;
  for (const StoredTensor& t : tensors) {
    words[t.name] = StoredDtype(t.dtype) + " of shape " + Shape(t.shape);
  }
  return words;
}

// Where draws of another model differ; empty if they do not.
std::string Difference(const std::vector<StoredTensor>& there,
                       const std::vector<StoredTensor>& here) {
  auto one = WordsOf(there);
  auto other = WordsOf(here);
  for (const auto* tensors : {&there, &here}) {
    for (const StoredTensor& t : *tensors) {
      if (one[t.name] == other[t.name]) continue;
      const auto text = [](const std::string& words) {
        return words.empty() ? "missing" : words;
      };
      return "its '" + t.name + "' is " + text(one[t.name]) + ", here " +
             text(other[t.name]);
    }
  }
  return "";
}

// ---- What is written --------------------------------------------------------

// The header of a file of safetensors with so many draws.
std::string HeaderOf(const std::vector<StoredTensor>& tensors, size_t count) {
  StateDict entries;
  int64_t begin = 0;
  for (const StoredTensor& t : tensors) {
    std::vector<int64_t> shape = t.shape;
    shape.insert(shape.begin(), static_cast<int64_t>(count));
    const int64_t end =
        begin + c10::multiply_integers(shape) *
                    static_cast<int64_t>(c10::elementSize(t.dtype));
    entries.set(t.name,
                StateDict{{"dtype", StoredDtype(t.dtype)},
                          {"shape", shape},
                          {"data_offsets", std::vector<int64_t>{begin, end}}});
    begin = end;
  }
  std::string text = ToJson(entries);
  text.append((8 - text.size() % 8) % 8, ' ');
  const uint64_t size = text.size();
  std::string header(sizeof(size), '\0');
  std::memcpy(header.data(), &size, sizeof(size));
  return header + text;
}

std::string LineOf(const std::vector<DrawToWrite>& draws,
                   const std::string& file, std::string_view bytes) {
  StateDict line = {{"file", file},
                    {"count", static_cast<int64_t>(draws.size())},
                    {"bytes", static_cast<int64_t>(bytes.size())},
                    {"crc32", static_cast<int64_t>(SumOf(bytes))}};
  const auto set_column = [&](const char* name, const auto& value_of) {
    c10::impl::GenericList column(c10::AnyType::get());
    for (const DrawToWrite& draw : draws) {
      column.push_back(value_of(draw.numbers));
    }
    line.set(name, column);
  };
  set_column("step", [](const DrawNumbers& of) { return of.step; });
  for (const auto& column : kColumns) {
    set_column(column.first,
               [&](const DrawNumbers& of) { return of.*column.second; });
  }
  set_column("prior_precision",
             [](const DrawNumbers& of) { return of.prior_precision; });
  std::string text = ToJson(line);
  text.pop_back();
  return text + std::string(kLineSum) + std::to_string(SumOf(text)) + "}\n";
}

// Of store.json; nothing where there is no store. Throws std::runtime_error
// if it cannot be read.
std::optional<std::vector<StoredTensor>> ReadStore(const std::string& store) {
  const std::string path = store + "/store.json";
  const auto text = TextOfFile(path);
  if (!text) return std::nullopt;
  std::string reason = "it is empty or damaged";
  try {
    const StateDict content = ParseJson(*text);
    if (content.contains("deleting")) {
      reason = "the deletion of the store was interrupted";
    } else if (const auto format = Value<int64_t>(content, "format");
               format != 1) {
      reason = "format " + std::to_string(format) + " (must be 1)";
    } else {
      std::vector<StoredTensor> tensors;
      const StateDict entries = content.at("tensors");
      for (const auto& entry : entries.entries()) {
        tensors.push_back(TensorOf(entry.key().toStringRef(), entry.value()));
      }
      return tensors;
    }
  } catch (const std::exception&) {  // said below
  }
  Unreadable(path, reason);
}

void WriteStore(const std::string& store,
                const std::vector<StoredTensor>& tensors) {
  StateDict entries;
  for (const StoredTensor& t : tensors) {
    entries.set(t.name,
                StateDict{{"dtype", StoredDtype(t.dtype)}, {"shape", t.shape}});
  }
  const StateDict content = {
      {"format", 1}, {"tensors", entries}, {"not_sampled", StateDict()}};
  disk::Replace(store + "/store.json", ToJson(content));
}

// The numbers of a store's chains, sorted.
std::vector<int64_t> ChainsIn(const std::string& store) {
  static const std::regex kName("chain-(0|[1-9][0-9]{0,17})");
  std::vector<int64_t> chains;
  std::error_code error;
  for (fs::directory_iterator at(store, error), end; !error && at != end;
       at.increment(error)) {
    const std::string name = at->path().filename();
    std::smatch match;
    if (std::regex_match(name, match, kName)) {
      chains.push_back(std::stoll(match[1]));
    }
  }
  std::sort(chains.begin(), chains.end());
  return chains;
}

bool HasDraws(const std::string& store) {
  return std::ranges::any_of(ChainsIn(store), [&](int64_t chain) {
    std::error_code none;
    const auto size =
        fs::file_size(FolderOf(store, chain) + "/index.jsonl", none);
    return !none && size > 0;
  });
}

// Throws std::runtime_error that names the line.
ChainIndex ReadIndex(const std::string& folder) {
  const std::string path = folder + "/index.jsonl";
  ChainIndex index;
  std::ifstream file(path, std::ios::binary);
  for (std::string line; std::getline(file, line);) {
    if (file.eof()) break;  // A writer has not finished it.
    try {
      index.files.push_back(
          std::make_shared<DrawFile>(line, index.num_files++, folder));
    } catch (const std::exception&) {
      Unreadable(path,
                 "line " + std::to_string(index.num_files) + " is damaged");
    }
    const auto& draws = index.files.back()->draws();
    line += '\n';
    index.size += static_cast<int64_t>(line.size());
    index.crc32 = SumOf(line, index.crc32);
    index.num_draws += static_cast<int64_t>(draws.size());
    index.last_step = draws.back().step;
  }
  return index;
}

}  // namespace

// ---- Reading ----------------------------------------------------------------

DrawFile::DrawFile(const std::string& line, size_t number,
                   const std::string& folder)
    : path_(folder + "/" + FileName(number)) {
  const size_t at = line.rfind(kLineSum);
  Expect(at != std::string::npos &&
             line.substr(at + kLineSum.size()) ==
                 std::to_string(SumOf({line.data(), at})) + "}",
         "damaged");
  const StateDict content = ParseJson(line.substr(0, at) + "}");
  Expect(Value<std::string>(content, "file") == FileName(number), "damaged");
  size_ = Value<int64_t>(content, "bytes");
  crc32_ = Value<int64_t>(content, "crc32");
  const auto steps = Value<std::vector<int64_t>>(content, "step");
  const auto precisions = content.at("prior_precision").toList();
  const size_t count = steps.size();
  Expect(count > 0 && precisions.size() == count &&
             Value<int64_t>(content, "count") == static_cast<int64_t>(count),
         "damaged");
  draws_.resize(count);
  for (size_t i = 0; i < count; ++i) {
    draws_[i].step = steps[i];
    draws_[i].prior_precision =
        FromValue<std::vector<double>>("prior_precision", precisions.get(i));
  }
  for (const auto& [name, member] : kColumns) {
    const auto numbers = Value<std::vector<double>>(content, name);
    Expect(numbers.size() == count, "damaged");
    for (size_t i = 0; i < count; ++i) draws_[i].*member = numbers[i];
  }
}

at::Tensor DrawFile::Read(const std::string& name) {
  const std::lock_guard guard(mutex_);
  if (tensors_.empty()) {
    try {
      Load();
    } catch (const std::exception& error) {
      tensors_.clear();
      Unreadable(path_,
                 std::string(error.what()) +
                     " (if its chain was cut back or restarted, refresh() the "
                     "store)");
    }
  }
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? at::Tensor() : found->second;
}

void DrawFile::Load() {
  std::error_code error;
  const uint64_t found = fs::file_size(path_, error);
  Expect(!error, error.message());
  Expect(found == static_cast<uint64_t>(size_),
         "it has " + std::to_string(found) + " bytes of the " +
             std::to_string(size_) + " written");
  const at::Tensor bytes = at::from_file(
      path_,
      /*shared=*/false, size_, at::TensorOptions(at::kByte).device(at::kCPU));
  const std::string_view whole(static_cast<const char*>(bytes.const_data_ptr()),
                               static_cast<size_t>(size_));
  Expect(SumOf(whole) == crc32_, "its bytes are altered");
  uint64_t header = 0;
  constexpr size_t kSize = sizeof(header);
  Expect(whole.size() >= kSize, "it is too short");
  std::memcpy(&header, whole.data(), kSize);
  Expect(header <= whole.size() - kSize, "it is too short");
  const auto begin = static_cast<int64_t>(kSize + header);
  const StateDict content = ParseJson(whole.substr(kSize, header));
  for (const auto& entry : content.entries()) {
    const std::string& name = entry.key().toStringRef();
    if (name == "__metadata__") continue;
    const StoredTensor t = TensorOf(name, entry.value());
    const auto ends =
        Value<std::vector<int64_t>>(entry.value(), "data_offsets");
    Expect(t.shape.at(0) == static_cast<int64_t>(draws_.size()),
           "its header is damaged");
    tensors_[name] = bytes.slice(0, begin + ends.at(0), begin + ends.at(1))
                         .view(t.dtype)
                         .view(t.shape);
  }
}

at::Tensor Draw::at(const std::string& name) const {
  const bool is_stored = std::ranges::count(*names_, name) > 0;
  const at::Tensor all = is_stored ? file_->Read(name) : at::Tensor();
  if (!all.defined()) Invalid("Invalid name: no draw has '" + name + "'");
  return all.select(0, row_);
}

// Not const: what the module holds changes.
// cppcheck-suppress constParameter
void Draw::copy_to(torch::nn::Module& module) const {
  const auto own = TensorsOf(module);
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
  for (const std::string& name : names()) {
    const at::Tensor tensor = at(name);
    const at::Tensor* into = own.find(name);
    if (into == nullptr || into->sizes() != tensor.sizes()) {
      Invalid("Invalid module: '" + name + "' of the draw has the shape " +
              Shape(tensor.sizes()) + ", the module's " +
              (into != nullptr ? Shape(into->sizes()) : "is missing"));
    }
    pairs.emplace_back(*into, tensor);
  }
  const at::NoGradGuard no_graph;
  for (auto& [into, tensor] : pairs) into.copy_(tensor);
}

const SampleStore& SampleStore::refresh() {
  std::vector<Draw> draws;
  if (const auto tensors = ReadStore(path_)) {
    auto names = std::make_shared<std::vector<std::string>>();
    for (const StoredTensor& t : *tensors) names->push_back(t.name);
    for (const int64_t chain : ChainsIn(path_)) {
      for (const auto& file : ReadIndex(FolderOf(path_, chain)).files) {
        int64_t row = 0;
        for (const DrawNumbers& numbers : file->draws()) {
          Draw& draw = draws.emplace_back();
          static_cast<DrawNumbers&>(draw) = numbers;
          draw.chain = chain;
          draw.path = file->path();
          draw.names_ = names;
          draw.file_ = file;
          draw.row_ = row++;
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

// ---- Writing ----------------------------------------------------------------

ChainWriter::ChainWriter(const std::string& store, int64_t chain,
                         std::vector<StoredTensor> tensors)
    : store_(fs::absolute(store)),
      folder_(FolderOf(store_, chain)),
      place_("chain " + std::to_string(chain) + " of " + store),
      index_path_(folder_ + "/index.jsonl"),
      tensors_(std::move(tensors)) {
  CheckInteger("chain", chain);
  for (const StoredTensor& t : tensors_) StoredDtype(t.dtype);
  const auto there = ReadStore(store_);
  const std::string difference =
      there ? Difference(*there, tensors_) : std::string();
  if (!difference.empty() && HasDraws(store_)) {
    Invalid("Invalid store: the draws in " + store +
            " are of another model: " + difference + ". Give another folder");
  }
  std::error_code error;
  fs::create_directories(store_, error);
  if (error) disk::Unwritable(store_, error.value());
  if (!there || !difference.empty()) WriteStore(store_, tensors_);
  if (::mkdir(folder_.c_str(), 0777) != 0 && errno != EEXIST) {
    disk::Unwritable(folder_);
  }
  const std::string lock = folder_ + "/lock";
  lock_ = ::open(lock.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (lock_ < 0) disk::Unwritable(lock);
  // A lock of flock belongs to the open file: closing another one of the same
  // file does not release it.
  if (::flock(lock_, LOCK_EX | LOCK_NB) != 0) {
    std::array<char, 20> holder{};
    const ssize_t size = ::pread(lock_, holder.data(), holder.size() - 1, 0);
    ::close(lock_);
    const std::string id(holder.data(),
                         size > 0 ? std::strcspn(holder.data(), "\n") : 0);
    throw std::runtime_error("Cannot write to " + place_ + ": " +
                             (id == std::to_string(::getpid())
                                  ? "this process writes to it already"
                                  : "process " + id + " writes to it"));
  }
  const std::string id = std::to_string(::getpid()) + "\n";
  index_file_ = ::open(index_path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  try {
    if (index_file_ < 0 || ::ftruncate(lock_, 0) != 0 ||
        !disk::WriteAll(lock_, id, 0) || !disk::Sync(folder_) ||
        !disk::Sync(store_)) {
      disk::Unwritable(index_path_);
    }
    ReadIndexAgain();
  } catch (const std::exception&) {
    Close();
    throw;
  }
}

void ChainWriter::Close() {
  if (index_file_ >= 0) ::close(index_file_);
  if (lock_ >= 0) {
    ::flock(lock_, LOCK_UN);
    ::close(lock_);
  }
  index_file_ = lock_ = -1;
}

void ChainWriter::ReadIndexAgain() {
  index_ = ReadIndex(folder_);
  index_.files.clear();
  struct stat status = {};
  if (::fstat(index_file_, &status) != 0 ||
      (status.st_size != index_.size &&
       (::ftruncate(index_file_, index_.size) != 0 ||
        ::fsync(index_file_) != 0))) {
    disk::Unwritable(index_path_);
  }
  // What the index does not name was not finished, or was cut back.
  static const std::regex kOurs(
      R"((draws-[0-9]{6,}\.safetensors)(\.[0-9-]+\.partial)?)");
  std::set<std::string> kept;
  for (size_t i = 0; i < index_.num_files; ++i) kept.insert(FileName(i));
  std::vector<std::string> left;
  for (const auto& entry : fs::directory_iterator(folder_)) {
    const std::string name = entry.path().filename();
    if (std::regex_match(name, kOurs) && !kept.contains(name)) {
      left.push_back(entry.path());
    }
  }
  for (const std::string& path : left) ::unlink(path.c_str());
}

void ChainWriter::Write(const std::vector<DrawToWrite>& draws) {
  std::string bytes = HeaderOf(tensors_, draws.size());
  for (size_t i = 0; i < tensors_.size(); ++i) {
    for (const DrawToWrite& draw : draws) {
      const at::Tensor& t = draw.tensors[i];
      bytes.append(static_cast<const char*>(t.const_data_ptr()), t.nbytes());
    }
  }
  const std::string name = FileName(index_.num_files);
  struct stat status = {};
  if (::fstat(index_file_, &status) != 0 || status.st_nlink == 0) {
    disk::Unwritable(folder_ + "/" + name, ENOENT);  // the folder was deleted
  }
  disk::Replace(folder_ + "/" + name, bytes);
  const std::string line = LineOf(draws, name, bytes);
  if (!disk::WriteAll(index_file_, line, index_.size) ||
      ::fsync(index_file_) != 0) {
    const int reason = errno;
    // A part of a line has no end: readers do not count it.
    [[maybe_unused]] const int cut = ::ftruncate(index_file_, index_.size);
    disk::Unwritable(index_path_, reason);
  }
  index_.size += static_cast<int64_t>(line.size());
  index_.crc32 = SumOf(line, index_.crc32);
  ++index_.num_files;
  index_.num_draws += static_cast<int64_t>(draws.size());
  index_.last_step = draws.back().numbers.step;
}

void ChainWriter::CutBack(int64_t size, int64_t crc32) {
  const std::string whole = TextOfFile(index_path_).value_or("");
  if (size < 0 || static_cast<size_t>(size) > whole.size() ||
      SumOf({whole.data(), static_cast<size_t>(size)}) !=
          static_cast<uint32_t>(crc32)) {
    Invalid("Invalid checkpoint: it is not of " + place_);
  }
  if (::ftruncate(index_file_, size) != 0 || ::fsync(index_file_) != 0) {
    disk::Unwritable(index_path_);
  }
  ReadIndexAgain();
}

}  // namespace torch_sgmcmc
