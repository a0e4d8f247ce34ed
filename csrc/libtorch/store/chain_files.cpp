#include "libtorch/store/chain_files.h"

#include <ATen/ATen.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
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
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <utility>

#include "host/crc32.h"
#include "libtorch/core/checks.h"
#include "libtorch/core/disk.h"
#include "libtorch/store/json.h"

namespace torch_sgmcmc {
namespace {

namespace fs = std::filesystem;
using c10::ScalarType;

constexpr std::array<std::pair<const char*, ScalarType>, 14> kDtypes = {{
    {"U64", ScalarType::UInt64},
    {"I64", ScalarType::Long},
    {"F64", ScalarType::Double},
    {"C64", ScalarType::ComplexFloat},
    {"F32", ScalarType::Float},
    {"U32", ScalarType::UInt32},
    {"I32", ScalarType::Int},
    {"BF16", ScalarType::BFloat16},
    {"F16", ScalarType::Half},
    {"U16", ScalarType::UInt16},
    {"I16", ScalarType::Short},
    {"I8", ScalarType::Char},
    {"U8", ScalarType::Byte},
    {"BOOL", ScalarType::Bool},
}};

std::string NameOf(ScalarType dtype) {
  for (const auto& [name, type] : kDtypes) {
    if (type == dtype) return name;
  }
  Invalid("Invalid tensors: " + DtypeName(dtype) + " cannot be stored");
}

ScalarType DtypeOf(const std::string& name) {
  for (const auto& [known, type] : kDtypes) {
    if (known == name) return type;
  }
  throw std::runtime_error("there is no dtype " + Quoted(name));
}

[[noreturn]] void Unreadable(const std::string& path,
                             const std::string& reason) {
  throw std::runtime_error("Cannot read " + path + ": " + reason);
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

constexpr std::string_view kLineSum = ", \"line_crc32\": ";

uint32_t SumOf(std::string_view bytes, uint32_t before = 0) {
  return Crc32(bytes.data(), bytes.size(), before);
}

// The header of a file of safetensors with so many draws.
std::string HeaderOf(const std::vector<StoredTensor>& tensors, size_t count) {
  std::string entries;
  int64_t begin = 0;
  for (const StoredTensor& t : tensors) {
    std::vector<int64_t> shape = t.shape;
    shape.insert(shape.begin(), static_cast<int64_t>(count));
    const int64_t end =
        begin + c10::multiply_integers(shape) *
                    static_cast<int64_t>(c10::elementSize(t.dtype));
    const auto whole = [](int64_t i) { return std::to_string(i); };
    entries += (entries.empty() ? "{" : ", ") + Quoted(t.name) +
               R"(: {"dtype": ")" + NameOf(t.dtype) + R"(", "shape": )" +
               JsonArray(shape, whole) + R"(, "data_offsets": [)" +
               whole(begin) + ", " + whole(end) + "]}";
    begin = end;
  }
  entries += "}";
  entries.append((8 - entries.size() % 8) % 8, ' ');
  const uint64_t size = entries.size();
  std::string header(sizeof(size), '\0');
  std::memcpy(header.data(), &size, sizeof(size));
  return header + entries;
}

std::string LineOf(const std::vector<DrawToWrite>& draws,
                   const std::string& file,
                   size_t size,
                   uint32_t crc32) {
  const auto column = [&](const char* name, auto text_of) {
    return ", \"" + std::string(name) +
           "\": " + JsonArray(draws, [&](const DrawToWrite& draw) {
             return text_of(draw.numbers);
           });
  };
  using Numbers = const DrawNumbers&;
  const std::string start =
      R"({"file": ")" + file + R"(", "count": )" +
      std::to_string(draws.size()) + R"(, "bytes": )" + std::to_string(size) +
      R"(, "crc32": )" + std::to_string(crc32) +
      column("step", [](Numbers d) { return std::to_string(d.step); }) +
      column("lr", [](Numbers d) { return JsonNumber(d.lr); }) +
      column("temperature",
             [](Numbers d) { return JsonNumber(d.temperature); }) +
      column("weight", [](Numbers d) { return JsonNumber(d.weight); }) +
      column("loss", [](Numbers d) { return JsonNumber(d.loss); }) +
      column("prior_precision", [](Numbers d) {
        return JsonArray(d.prior_precision, JsonNumber);
      });
  return start + std::string(kLineSum) + std::to_string(SumOf(start)) + "}\n";
}

std::string TextOf(const std::vector<StoredTensor>& tensors) {
  std::string entries;
  for (const StoredTensor& t : tensors) {
    entries += (entries.empty() ? "" : ",") + ("\n  " + Quoted(t.name)) +
               R"(: {"dtype": ")" + NameOf(t.dtype) + R"(", "shape": )" +
               JsonArray(t.shape, [](int64_t i) { return std::to_string(i); }) +
               "}";
  }
  return "{\n \"format\": 1,\n \"tensors\": {" + entries +
         "\n },\n \"not_sampled\": {}\n}";
}

// Where draws of another model differ; empty if they do not.
std::string Difference(const std::vector<StoredTensor>& there,
                       const std::vector<StoredTensor>& here) {
  const auto words = [](const std::vector<StoredTensor>& tensors,
                        const std::string& name) -> std::string {
    for (const StoredTensor& t : tensors) {
      if (t.name == name) {
        return NameOf(t.dtype) + " of shape " + Shape(t.shape);
      }
    }
    return "missing";
  };
  for (const auto* tensors : {&there, &here}) {
    for (const StoredTensor& t : *tensors) {
      const std::string one = words(there, t.name);
      const std::string other = words(here, t.name);
      if (one != other) {
        std::string text = "its '";
        text.append(t.name).append("' is ").append(one);
        return text.append(", here ").append(other);
      }
    }
  }
  return "";
}

bool HasDraws(const std::string& store) {
  const auto chains = ChainsIn(store);
  return std::any_of(chains.begin(), chains.end(), [&](int64_t chain) {
    const fs::path folder =
        fs::path(store) / ("chain-" + std::to_string(chain));
    std::error_code none;
    const auto size = fs::file_size(folder / "index.jsonl", none);
    return !none && size > 0;
  });
}

}  // namespace

DrawFile::DrawFile(const std::string& line,
                   size_t number,
                   const std::string& folder) {
  const size_t at = line.rfind(kLineSum);
  if (at == std::string::npos ||
      line.substr(at + kLineSum.size()) !=
          std::to_string(SumOf({line.data(), at})) + "}") {
    throw std::runtime_error("its checksum is another");
  }
  const Json content = Json::Parse(line.substr(0, at) + "}");
  if (content.At("file").Text() != FileName(number)) {
    throw std::runtime_error("file " + content.At("file").Text());
  }
  path_ = folder + "/" + FileName(number);
  size_ = content.At("bytes").Integer();
  crc32_ = static_cast<uint32_t>(content.At("crc32").Integer());
  const int64_t count = content.At("count").Integer();
  const auto& steps = content.At("step").Items();
  const auto column = [&](const char* name) -> const Json::Array& {
    const auto& items = content.At(name).Items();
    if (count < 1 || items.size() != static_cast<size_t>(count)) {
      throw std::runtime_error("not " + std::to_string(count) +
                               " numbers for as many draws");
    }
    return items;
  };
  const auto& lrs = column("lr");
  const auto& temperatures = column("temperature");
  const auto& weights = column("weight");
  const auto& losses = column("loss");
  const auto& precisions = column("prior_precision");
  for (size_t i = 0; i < column("step").size(); ++i) {
    DrawNumbers draw{steps[i].Integer(),
                     lrs[i].Number(),
                     temperatures[i].Number(),
                     weights[i].Number(),
                     losses[i].Number(),
                     {}};
    for (const Json& value : precisions[i].Items()) {
      draw.prior_precision.push_back(value.Number());
    }
    draws_.push_back(std::move(draw));
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
  if (error) throw std::runtime_error(error.message());
  if (found != static_cast<uint64_t>(size_)) {
    throw std::runtime_error("it has " + std::to_string(found) +
                             " bytes of the " + std::to_string(size_) +
                             " written");
  }
  const at::Tensor bytes =
      at::from_file(path_,
                    /*shared=*/false,
                    size_,
                    at::TensorOptions(at::kByte).device(at::kCPU));
  const std::string_view whole(static_cast<const char*>(bytes.const_data_ptr()),
                               static_cast<size_t>(size_));
  if (SumOf(whole) != crc32_) throw std::runtime_error("its bytes are altered");
  uint64_t header = 0;
  constexpr size_t kSize = sizeof(header);
  if (whole.size() >= kSize) std::memcpy(&header, whole.data(), kSize);
  if (whole.size() < kSize || header > whole.size() - kSize) {
    throw std::runtime_error("it is too short");
  }
  const std::string_view rest = whole.substr(kSize);
  const auto begin = static_cast<int64_t>(kSize + header);
  const Json content = Json::Parse(rest.substr(0, header));
  for (const auto& [name, entry] : content.Entries()) {
    if (name == "__metadata__") continue;
    std::vector<int64_t> shape;
    for (const Json& size : entry.At("shape").Items()) {
      shape.push_back(size.Integer());
    }
    const auto& ends = entry.At("data_offsets").Items();
    if (shape.empty() || shape[0] != static_cast<int64_t>(draws_.size()) ||
        ends.size() != 2) {
      throw std::runtime_error("its header is damaged");
    }
    tensors_[name] =
        bytes.slice(0, begin + ends[0].Integer(), begin + ends[1].Integer())
            .view(DtypeOf(entry.At("dtype").Text()))
            .view(shape);
  }
}

std::optional<std::vector<StoredTensor>> ReadStore(const std::string& store) {
  const std::string path = store + "/store.json";
  const auto text = TextOfFile(path);
  if (!text) return std::nullopt;
  std::vector<StoredTensor> tensors;
  try {
    const Json content = Json::Parse(*text);
    if (content.Find("deleting") != nullptr) {
      throw std::runtime_error("the deletion of the store was interrupted");
    }
    if (content.At("format").Integer() != 1) {
      throw std::runtime_error("format " +
                               std::to_string(content.At("format").Integer()) +
                               " (must be 1)");
    }
    for (const auto& [name, entry] : content.At("tensors").Entries()) {
      tensors.push_back({name, DtypeOf(entry.At("dtype").Text()), {}});
      for (const Json& size : entry.At("shape").Items()) {
        tensors.back().shape.push_back(size.Integer());
      }
    }
  } catch (const std::runtime_error& error) {
    Unreadable(path, error.what());
  }
  return tensors;
}

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

std::vector<std::shared_ptr<DrawFile>> ReadIndex(const std::string& store,
                                                 int64_t chain) {
  const std::string folder = store + "/chain-" + std::to_string(chain);
  const std::string path = folder + "/index.jsonl";
  std::vector<std::shared_ptr<DrawFile>> files;
  std::ifstream index(path, std::ios::binary);
  for (std::string line; std::getline(index, line);) {
    if (index.eof()) break;  // A writer has not finished it.
    try {
      files.push_back(std::make_shared<DrawFile>(line, files.size(), folder));
    } catch (const std::runtime_error& error) {
      Unreadable(path,
                 "line " + std::to_string(files.size() + 1) + " is damaged (" +
                     error.what() + ")");
    }
  }
  return files;
}

ChainWriter::ChainWriter(const std::string& store,
                         int64_t chain,
                         std::vector<StoredTensor> tensors)
    : store_(fs::absolute(store)),
      folder_(store_ + "/chain-" + std::to_string(chain)),
      place_("chain " + std::to_string(chain) + " of " + store),
      index_path_(folder_ + "/index.jsonl"),
      tensors_(std::move(tensors)) {
  CheckInteger("chain", chain);
  for (const StoredTensor& t : tensors_) NameOf(t.dtype);
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
  if (!there || !difference.empty()) {
    disk::Replace(store_ + "/store.json", TextOf(tensors_));
  }
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
  index_ = ::open(index_path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  try {
    if (index_ < 0 || ::ftruncate(lock_, 0) != 0 ||
        !disk::WriteAll(lock_, id, 0) || !disk::Sync(folder_) ||
        !disk::Sync(store_)) {
      disk::Unwritable(index_path_);
    }
    TakeIndex();
  } catch (const std::exception&) {
    Close();
    throw;
  }
}

ChainWriter::~ChainWriter() { Close(); }

void ChainWriter::Close() {
  if (index_ >= 0) ::close(index_);
  if (lock_ >= 0) {
    ::flock(lock_, LOCK_UN);
    ::close(lock_);
  }
  index_ = lock_ = -1;
}

void ChainWriter::TakeIndex() {
  const std::string whole = TextOfFile(index_path_).value_or("");
  const auto files =
      ReadIndex(store_, std::stoll(folder_.substr(folder_.rfind('-') + 1)));
  num_files_ = files.size();
  num_draws_ = 0;
  last_step_.reset();
  for (const auto& file : files) {
    num_draws_ += static_cast<int64_t>(file->draws().size());
    last_step_ = file->draws().back().step;
  }
  size_ = static_cast<int64_t>(whole.rfind('\n') + 1);
  crc32_ = SumOf({whole.data(), static_cast<size_t>(size_)});
  if (static_cast<int64_t>(whole.size()) != size_ &&
      (::ftruncate(index_, size_) != 0 || ::fsync(index_) != 0)) {
    disk::Unwritable(index_path_);
  }
  // What the index does not name was not finished, or was cut back.
  static const std::regex kOurs(
      R"((draws-[0-9]{6,}\.safetensors)(\.[0-9-]+\.partial)?)");
  std::vector<std::string> left;
  for (const auto& entry : fs::directory_iterator(folder_)) {
    const std::string name = entry.path().filename();
    if (!std::regex_match(name, kOurs)) continue;
    const bool is_kept =
        std::any_of(files.begin(), files.end(), [&](const auto& file) {
          return fs::path(file->path()).filename() == name;
        });
    if (!is_kept) left.push_back(entry.path());
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
  const std::string path = folder_ + "/" + FileName(num_files_);
  struct stat status = {};
  if (::fstat(index_, &status) != 0 || status.st_nlink == 0) {
    disk::Unwritable(path, ENOENT);  // the folder was deleted
  }
  disk::Replace(path, bytes);
  const std::string line =
      LineOf(draws, FileName(num_files_), bytes.size(), SumOf(bytes));
  if (!disk::WriteAll(index_, line, size_) || ::fsync(index_) != 0) {
    const int reason = errno;
    // A part of a line has no end: readers do not count it.
    [[maybe_unused]] const int cut = ::ftruncate(index_, size_);
    disk::Unwritable(index_path_, reason);
  }
  size_ += static_cast<int64_t>(line.size());
  crc32_ = SumOf(line, crc32_);
  ++num_files_;
  num_draws_ += static_cast<int64_t>(draws.size());
  last_step_ = draws.back().numbers.step;
}

void ChainWriter::CutBack(int64_t size, int64_t crc32) {
  const std::string whole = TextOfFile(index_path_).value_or("");
  if (size < 0 || static_cast<size_t>(size) > whole.size() ||
      SumOf({whole.data(), static_cast<size_t>(size)}) != crc32) {
    Invalid("Invalid checkpoint: it is not of " + place_);
  }
  if (::ftruncate(index_, size) != 0 || ::fsync(index_) != 0) {
    disk::Unwritable(index_path_);
  }
  TakeIndex();
}

}  // namespace torch_sgmcmc
