#include "torch_sgmcmc/store.h"

#include <ATen/ATen.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <torch/nn/module.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <iterator>
#include <limits>
#include <locale>
#include <map>
#include <mutex>
#include <optional>
#include <regex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <utility>

#include "host/crc32.h"
#include "libtorch/checks.h"
#include "libtorch/disk.h"
#include "libtorch/sampler_impl.h"
#include "libtorch/tensor_lists.h"
#include "torch_sgmcmc/sbps.h"

// torch_sgmcmc/posterior/store_files.py does the same in Python.
namespace torch_sgmcmc {

// A tensor in store.json, or in the header of a file.
struct StoredTensor {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape = {};
  // Begin and end of its bytes, in a header.
  std::vector<int64_t> offsets = {};
  bool operator==(const StoredTensor&) const = default;
};
using StoredTensors = std::vector<StoredTensor>;

// Totals of the complete lines of a chain's index.
struct ChainIndex {
  int64_t size = 0;
  uint32_t crc32 = 0;
  size_t num_files = 0;
  size_t num_draws = 0;

  void Add(std::string_view line, size_t draws) {
    size += static_cast<int64_t>(line.size());
    crc32 = Crc32(line.data(), line.size(), crc32);
    ++num_files;
    num_draws += draws;
  }
};

// An open file. The lock is released explicitly: a forked process may hold it.
struct Close {
  void operator()(const int* file) const {
    ::flock(*file, LOCK_UN);
    ::close(*file);
    delete file;
  }
};
using OpenFile = std::unique_ptr<const int, Close>;

namespace {

namespace fs = std::filesystem;
using c10::ScalarType;

constexpr double kNoNumber = std::numeric_limits<double>::quiet_NaN();

[[noreturn]] void Unreadable(const std::string& path,
                             const std::string& reason) {
  Raise("Cannot read ", path, ": ", reason);
}

void Expect(bool condition, const std::string& message) {
  if (!condition) Raise(message);
}

// The content of a file, nothing if it is missing.
std::optional<std::string> TextOfFile(const std::string& path) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file && errno == ENOENT) return std::nullopt;
  std::string bytes((std::istreambuf_iterator<char>(file)), {});
  if (!file) Unreadable(path, std::generic_category().message(errno));
  return bytes;
}

uint32_t SumOf(std::string_view bytes) {
  return Crc32(bytes.data(), bytes.size());
}

// ---- JSON; both languages write keys in one order ---------------------------

// Reads expected content; throws std::runtime_error for other content.
class JsonReader {
 public:
  explicit JsonReader(const std::string& text) : in_(text) {
    in_.imbue(std::locale::classic());
  }

  bool Takes(char wanted) {
    if ((in_ >> std::ws).peek() != wanted) return false;
    in_.get();
    return true;
  }
  // Also fails after an unreadable number or string.
  void Take(char wanted) { Expect(Takes(wanted), "it is empty or damaged"); }
  // A key of an object, after an optional comma.
  void Key(std::string_view wanted) {
    Takes(',');
    std::string key;
    Read(key);
    Expect(key == wanted, "it is damaged");
    Take(':');
  }
  void Read(std::string& text) {
    Take('"');
    text.clear();
    for (char c = 0; in_.get(c) && c != '"'; text += c) {
      if (c != '\\') continue;
      in_.get(c);  // what is escaped
      if (c != '"' && c != '\\') {
        Raise("a name has a control character");
      }
    }
  }
  void Read(int64_t& number) { in_ >> number; }
  void Read(double& number) {
    if (Takes('n')) {  // null
      number = kNoNumber;
      in_.ignore(3);
    } else {
      in_ >> number;
    }
  }
  template <class T>
  void Read(std::vector<T>& list) {
    list.clear();
    Items('[', ']', [&] { Read(list.emplace_back()); });
  }
  // Calls `read` for each item.
  template <class Item>
  void Items(char begin, char end, const Item& read) {
    Take(begin);
    if (Takes(end)) return;
    do {
      read();
    } while (Takes(','));
    Take(end);
  }

 private:
  std::istringstream in_;
};

std::string ToJson(const std::string& text) {
  std::ostringstream out;
  out << std::quoted(text);
  return out.str();
}
// With the fewest digits that identify the number.
template <class T>
std::string ToJson(T number) {
  if (!std::isfinite(static_cast<double>(number))) return "null";
  std::array<char, 32> digits{};
  const auto end = std::to_chars(digits.begin(), digits.end(), number);
  return {digits.data(), end.ptr};
}
// Joins the texts of values.
template <class Values, class Text>
std::string InARow(char begin, char end, const Values& values,
                   const Text& text_of) {
  std::string text(1, begin);
  for (const auto& value : values) {
    if (text.size() > 1) text += ", ";
    text += text_of(value);
  }
  return text + end;
}
template <class T>
std::string ToJson(const std::vector<T>& list) {
  return InARow('[', ']', list, [](const T& value) { return ToJson(value); });
}

// ---- store.json and headers of files ----------------------------------------

constexpr std::pair<const char*, ScalarType> kDtypes[] = {
    {"U64", ScalarType::UInt64}, {"I64", ScalarType::Long},
    {"F64", ScalarType::Double}, {"C64", ScalarType::ComplexFloat},
    {"F32", ScalarType::Float},  {"U32", ScalarType::UInt32},
    {"I32", ScalarType::Int},    {"BF16", ScalarType::BFloat16},
    {"F16", ScalarType::Half},   {"U16", ScalarType::UInt16},
    {"I16", ScalarType::Short},  {"I8", ScalarType::Char},
    {"U8", ScalarType::Byte},    {"BOOL", ScalarType::Bool},
};

ScalarType DtypeOf(const StoredTensor& t) {
  for (const auto& [name, dtype] : kDtypes) {
    if (t.dtype == name) return dtype;
  }
  Raise("it has an unknown dtype");
}

int64_t ElementSize(const StoredTensor& t) {
  return static_cast<int64_t>(c10::elementSize(DtypeOf(t)));
}

// A model's tensors, large elements first, which aligns all of them.
StoredTensors StoredAs(const torch::nn::Module& model) {
  StoredTensors stored;
  for (const auto& item : TensorsOf(model)) {
    const at::Tensor& t = item.value();
    const auto* const dtype = std::ranges::find_if(
        kDtypes, [&](const auto& e) { return e.second == t.scalar_type(); });
    const auto is_control = [](unsigned char c) { return c < ' '; };
    if (dtype == std::end(kDtypes) || t.layout() != at::kStrided ||
        std::ranges::any_of(item.key(), is_control)) {
      Invalid("Invalid model: ", Shown(item.key()), ", ",
              DtypeName(t.scalar_type()), " of layout ", LayoutName(t.layout()),
              ", cannot be stored");
    }
    stored.push_back({item.key(), dtype->first, t.sizes().vec()});
  }
  std::ranges::stable_sort(stored, std::ranges::greater(), ElementSize);
  return stored;
}

// Describes the first difference; empty if there is none.
std::string Difference(const StoredTensors& one, const StoredTensors& other) {
  if (one == other) return "";  // without comparing each with each
  for (const auto& [all, among] :
       {std::pair(&one, &other), std::pair(&other, &one)}) {
    for (const StoredTensor& t : *all) {
      if (std::ranges::find(*among, t) != among->end()) continue;
      return "'" + t.name + "' is " + t.dtype + " of shape " + Shape(t.shape);
    }
  }
  return "";
}

// Tensors as in store.json, or in the header of a file of `count` draws.
std::string TensorsText(const StoredTensors& tensors,
                        std::optional<int64_t> count = {}) {
  int64_t begin = 0;
  const auto text_of = [&](StoredTensor t) {
    std::string offsets;
    if (count) {
      t.shape.insert(t.shape.begin(), *count);
      const int64_t end =
          begin + c10::multiply_integers(t.shape) * ElementSize(t);
      offsets = ", \"data_offsets\": " + ToJson(std::vector{begin, end});
      begin = end;
    }
    return ToJson(t.name) + ": {\"dtype\": " + ToJson(t.dtype) +
           ", \"shape\": " + ToJson(t.shape) + offsets + "}";
  };
  return InARow('{', '}', tensors, text_of);
}

StoredTensors ReadTensors(JsonReader& json, bool has_offsets) {
  StoredTensors tensors;
  json.Items('{', '}', [&] {
    StoredTensor& t = tensors.emplace_back();
    json.Read(t.name);
    json.Take(':');
    json.Take('{');
    json.Key("dtype");
    json.Read(t.dtype);
    json.Key("shape");
    json.Read(t.shape);
    if (has_offsets) {
      json.Key("data_offsets");
      json.Read(t.offsets);
    }
    json.Take('}');
    DtypeOf(t);
  });
  return tensors;
}

// The tensors of store.json, nothing without a store.
std::optional<StoredTensors> ReadStore(const std::string& store) {
  const std::string path = store + "/store.json";
  const auto text = TextOfFile(path);
  if (!text) return std::nullopt;
  try {
    JsonReader json(*text);
    json.Take('{');
    json.Key("tensors");
    auto tensors = ReadTensors(json, /*has_offsets=*/false);
    // Only Python reads the keys between.
    JsonReader end(
        text->substr(std::min(text->rfind("\"format\""), text->size())));
    int64_t format = 0;
    end.Key("format");
    end.Read(format);
    end.Take('}');
    Expect(format == 1, "format " + std::to_string(format) + " (must be 1)");
    return tensors;
  } catch (const std::exception& error) {
    Unreadable(path, error.what());
  }
}

// ---- Indices and files of draws ---------------------------------------------

// The columns of an index, with an entry for each draw.
template <class Visit>
void ForEachColumn(const Visit& visit) {
  visit("step", &Draw::step);
  visit("lr", &Draw::lr);
  visit("temperature", &Draw::temperature);
  visit("weight", &Draw::weight);
  visit("loss", &Draw::loss);
  visit("prior_precision", &Draw::prior_precision);
}

std::string ChainOf(const std::string& store, int64_t chain) {
  return store + "/chain-" + std::to_string(chain);
}

std::string FileName(size_t number) {
  std::array<char, 64> name{};
  std::snprintf(name.data(), name.size(), "draws-%06zu.safetensors", number);
  return name.data();
}

constexpr std::string_view kLineSum = ", \"line_crc32\": ";
std::string EndOf(std::string_view line) {
  return std::string(kLineSum) + std::to_string(SumOf(line)) + "}\n";
}

std::string LineOf(const std::vector<Draw>& draws, const std::string& file,
                   std::string_view bytes) {
  std::string line = "{\"file\": " + ToJson(file) +
                     ", \"count\": " + ToJson(draws.size()) +
                     ", \"bytes\": " + ToJson(bytes.size()) +
                     ", \"crc32\": " + ToJson(SumOf(bytes));
  ForEachColumn([&](const std::string& name, auto member) {
    const auto text_of = [&](const Draw& d) { return ToJson(d.*member); };
    line += ", \"" + name + "\": " + InARow('[', ']', draws, text_of);
  });
  return line + EndOf(line);
}

}  // namespace

// A file of draws; its tensors, [count, ...], stay mapped after the first read.
struct DrawFile {
  std::string path;
  int64_t size = 0;
  int64_t crc32 = 0;
  int64_t count = 0;
  std::mutex mutex;
  std::map<std::string, at::Tensor> tensors;

  // The draws of line `number` of an index.
  static std::vector<Draw> Listed(const std::string& line, size_t number,
                                  const std::string& folder);
  void Read();
};

std::vector<Draw> DrawFile::Listed(const std::string& line, size_t number,
                                   const std::string& folder) {
  const size_t end = std::min(line.rfind(kLineSum), line.size());
  const std::string content = line.substr(0, end);
  Expect(line.substr(end) == EndOf(content), "another checksum");
  const auto file = std::make_shared<DrawFile>();
  std::string name;
  JsonReader json(content);
  json.Take('{');
  json.Key("file");
  json.Read(name);
  json.Key("count");
  json.Read(file->count);
  json.Key("bytes");
  json.Read(file->size);
  json.Key("crc32");
  json.Read(file->crc32);
  Expect(name == FileName(number), "another file");
  file->path = folder + "/" + name;
  std::vector<Draw> draws;
  ForEachColumn([&](std::string_view column, auto member) {
    size_t row = 0;
    json.Key(column);
    json.Items('[', ']', [&] {
      if (row == draws.size()) draws.emplace_back();
      json.Read(draws[row++].*member);
    });
    Expect(row > 0 && static_cast<int64_t>(row) == file->count,
           "another count");
  });
  for (Draw& draw : draws) {
    draw.path = file->path;
    draw.file_ = file;
    draw.row_ = &draw - draws.data();
  }
  return draws;
}

void DrawFile::Read() {
  std::error_code error;
  const auto found = static_cast<int64_t>(fs::file_size(path, error));
  Expect(!error, error.message());
  Expect(found == size,
         c10::str("it has ", found, " bytes of the ", size, " written"));
  const at::Tensor bytes = at::from_file(
      path, /*shared=*/false, size, at::TensorOptions(at::kByte).device("cpu"));
  const std::string_view whole(static_cast<const char*>(bytes.const_data_ptr()),
                               static_cast<size_t>(size));
  Expect(SumOf(whole) == crc32, "its bytes are altered");
  uint64_t header = 0;
  Expect(whole.size() >= sizeof(header), "it is too short");
  std::memcpy(&header, whole.data(), sizeof(header));
  Expect(header <= whole.size() - sizeof(header), "it is too short");
  JsonReader json(std::string(whole.substr(sizeof(header), header)));
  const auto begin = static_cast<int64_t>(sizeof(header) + header);
  const at::Tensor data = bytes.slice(0, begin);
  for (const StoredTensor& t : ReadTensors(json, /*has_offsets=*/true)) {
    Expect(t.shape.at(0) == count, "its header is damaged");
    const at::Tensor part = data.slice(0, t.offsets.at(0), t.offsets.at(1));
    tensors[t.name] = part.view(DtypeOf(t)).view(t.shape);
  }
}

namespace {

// Adds a chain's draws. Throws std::runtime_error with the line's number.
ChainIndex ReadIndex(const std::string& folder, std::vector<Draw>& draws) {
  const std::string path = folder + "/index.jsonl";
  std::istringstream lines(TextOfFile(path).value_or(""));
  ChainIndex index;
  for (std::string line; std::getline(lines, line);) {
    if (lines.eof()) break;  // A writer has not finished it.
    line += '\n';
    std::vector<Draw> listed;
    try {
      listed = DrawFile::Listed(line, index.num_files, folder);
    } catch (const std::exception&) {
      const std::string number = std::to_string(index.num_files + 1);
      Unreadable(path, "line " + number + " is damaged");
    }
    index.Add(line, listed.size());
    std::ranges::move(listed, std::back_inserter(draws));
  }
  return index;
}

}  // namespace

at::Tensor Draw::at(const std::string& name) const {
  const std::lock_guard guard(file_->mutex);
  try {
    if (file_->tensors.empty()) file_->Read();
  } catch (const std::exception& error) {
    file_->tensors.clear();
    Unreadable(path, std::string(error.what()) +
                         " (if its chain was cut back or restarted, refresh() "
                         "the store)");
  }
  const auto found = file_->tensors.find(name);
  if (found == file_->tensors.end()) {
    Invalid("Invalid name: no draw has '", name, "'");
  }
  return found->second.select(0, row_);
}

// Not const: the module's tensors change.
// cppcheck-suppress constParameter
void Draw::copy_to(torch::nn::Module& module) const {
  StateDict dict = state_dict(module);
  for (const std::string& name : names()) dict.set(name, at(name));
  load_state_dict(module, dict);
}

const SampleStore& SampleStore::refresh() {
  std::vector<Draw> draws;
  auto names = std::make_shared<std::vector<std::string>>();
  std::set<int64_t> chains;
  if (const auto tensors = ReadStore(path_)) {
    for (const StoredTensor& t : *tensors) names->push_back(t.name);
    static const std::regex kName("chain-(0|[1-9][0-9]{0,17})");
    for (const auto& entry : fs::directory_iterator(path_)) {
      const std::string name = entry.path().filename();
      std::smatch match;
      if (std::regex_match(name, match, kName)) {
        chains.insert(std::stoll(match[1]));
      }
    }
  }
  for (const int64_t chain : chains) {
    const size_t before = draws.size();
    ReadIndex(ChainOf(path_, chain), draws);
    for (size_t i = before; i < draws.size(); ++i) {
      draws[i].chain = chain;
      draws[i].names_ = names;
    }
  }
  draws_ = std::move(draws);
  return *this;
}

const Draw& SampleStore::operator[](size_t index) const {
  if (index < size()) return draws_[index];
  throw std::out_of_range(c10::str("Invalid index: ", index, " (", path_,
                                   " has ", size(), " draws)"));
}

// ---- Writing ----------------------------------------------------------------

namespace {

// Draws are written at so many bytes or draws.
constexpr size_t kBytes = size_t{4} << 20;
constexpr size_t kDraws = 1024;

OpenFile Open(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (file < 0) disk::Unwritable(path);
  return OpenFile(new int(file));
}

bool SamplesAny(Sampler& sampler, const std::vector<at::Tensor>& params) {
  return std::ranges::any_of(sampler.param_groups(), [&](const auto& group) {
    return std::ranges::any_of(group.params(), [&](const at::Tensor& own) {
      const auto is_own = [&](const at::Tensor& p) { return p.is_same(own); };
      return own.requires_grad() && std::ranges::any_of(params, is_own);
    });
  });
}

}  // namespace

struct Collector::Work {
  Work(Sampler& of, const torch::nn::Module& its_model,
       const std::string& its_store, const CollectorOptions& chosen)
      : impl(SamplerAccess::Of(of)),
        options(chosen),
        model(its_model),
        place("chain " + std::to_string(options.chain()) + " of " + its_store),
        store(fs::absolute(its_store)),
        folder(ChainOf(store, options.chain())),
        index_path(folder + "/index.jsonl") {
    CheckInteger("burn_in", options.burn_in());
    CheckInteger("every", options.every(), 1);
    CheckInteger("chain", options.chain());
    if (!SamplesAny(of, model.parameters())) {
      Invalid(
          "Invalid model: the sampler has none of its parameters, so all draws "
          "would be the same (was the model copied after the sampler was "
          "made?)");
    }
    tensors = StoredAs(model);
    bytes.resize(tensors.size());
    MakeFolder();
    Lock();
    TakeIndex();
    is_undecided = index.num_draws > 0;
    if (auto* const sbps = dynamic_cast<SBPS*>(&of)) {
      hook = sbps->register_sample_hook(
          // A step that another hook has undone repeats its samples.
          [this](SBPS&, double time) {
            if (!mark || time > *mark) Take(StepCounter() + 1, time, kNoNumber);
          });
    }
  }

  // ---- The chain's files; an error leaves them as before --------------------

  void MakeFolder() const {
    const auto there = ReadStore(store);
    const auto difference = Difference(there.value_or(tensors), tensors);
    if (!difference.empty() && SampleStore(store).size() > 0) {
      Invalid("Invalid store: the draws in ", store,
              " are of another model: ", difference,
              " in one alone. Give another folder");
    }
    std::error_code error;
    fs::create_directories(folder, error);
    if (error) disk::Unwritable(folder, error.value());
    if (there && difference.empty()) return;
    disk::Replace(store + "/store.json",
                  "{\"tensors\": " + TensorsText(tensors) +
                      R"(, "not_sampled": {}, "format": 1})");
  }

  void Lock() {
    lock = Open(folder + "/lock");
    if (::flock(*lock, LOCK_EX | LOCK_NB) != 0) {
      const std::string holder = TextOfFile(folder + "/lock").value_or("");
      Raise("Cannot write to ", place, ": process ",
            holder.substr(0, holder.find('\n')), " writes to it");
    }
    file = Open(index_path);
    const std::string id = std::to_string(::getpid()) + "\n";
    if (::ftruncate(*lock, 0) != 0 || !disk::WriteAll(*lock, id, 0) ||
        !disk::Sync(folder) || !disk::Sync(store)) {
      disk::Unwritable(folder);
    }
  }

  void TakeIndex() {
    std::vector<Draw> draws;
    index = ReadIndex(folder, draws);
    Cut(index.size);
    // Other files were not finished, or were cut back.
    static const std::regex kOurs(
        R"(draws-[0-9]{6,}\.safetensors(\.[0-9-]+\.partial)?)");
    std::set<std::string> kept;
    for (const Draw& draw : draws) kept.insert(draw.path);
    for (const auto& entry : fs::directory_iterator(folder)) {
      const fs::path& found = entry.path();
      if (std::regex_match(found.filename().string(), kOurs) &&
          !kept.contains(found)) {
        ::unlink(found.c_str());
      }
    }
  }

  void Cut(int64_t size) const {
    if (::ftruncate(*file, size) != 0 || ::fsync(*file) != 0) {
      disk::Unwritable(index_path);
    }
  }

  void Write() {
    const auto num_rows = static_cast<int64_t>(waiting.size());
    std::string header = TensorsText(tensors, num_rows);
    header.append((8 - header.size() % 8) % 8, ' ');
    const uint64_t header_size = header.size();
    std::string whole(sizeof(header_size), '\0');
    std::memcpy(whole.data(), &header_size, sizeof(header_size));
    whole += header;
    for (const std::string& of_tensor : bytes) whole += of_tensor;
    const std::string name = FileName(index.num_files);
    struct stat status = {};
    if (::fstat(*file, &status) != 0 || status.st_nlink == 0) {
      disk::Unwritable(folder + "/" + name, ENOENT);  // the folder was deleted
    }
    disk::Replace(folder + "/" + name, whole);
    const std::string line = LineOf(waiting, name, whole);
    if (!disk::WriteAll(*file, line, index.size) || ::fsync(*file) != 0) {
      const int reason = errno;
      // Readers ignore a line without an end.
      [[maybe_unused]] const int cut = ::ftruncate(*file, index.size);
      disk::Unwritable(index_path, reason);
    }
    index.Add(line, waiting.size());
  }

  // Cuts the index back to this length.
  void Resume(int64_t size, int64_t crc32, int64_t from_count,
              std::optional<double> from_mark) {
    const std::string lines = TextOfFile(index_path).value_or("");
    const auto kept = static_cast<size_t>(size);
    if (kept > lines.size() ||
        SumOf({lines.data(), kept}) != static_cast<uint32_t>(crc32)) {
      Invalid("Invalid checkpoint: it is not of ", place);
    }
    Cut(size);
    TakeIndex();
    is_undecided = false;
    count = from_count;
    mark = from_mark;
  }

  // ---- Steps ----------------------------------------------------------------

  bool IsNextDue() const {
    const int64_t after = count + 1 - options.burn_in();
    return after > 0 && after % options.every() == 0;
  }

  // Throws, before the update, any error that would prevent storing the draw.
  void BeforeStep() {
    CheckOpen();
    if (is_undecided) {
      Invalid("Invalid store: ", place, " has ", index.num_draws,
              " draws of an earlier run (load the state dict of its "
              "checkpoint, or restart())");
    }
    if (IsFull()) Flush();
    const auto changed =
        IsNextDue() ? Difference(StoredAs(model), tensors) : "";
    if (!changed.empty()) {
      Raise("Invalid draw: ", changed, ", unlike when the collector was made");
    }
    if (hook) return;
    if (!mark) mark = static_cast<double>(Locked(impl)->num_steps());
    const int64_t step = StepCounter();
    if (static_cast<double>(step) < *mark - 1) {
      Raise("the sampler went back to step ", step,
            ", and its collector is at ", Rounded(*mark),
            ": load the collector's state dict too");
    }
  }

  void AfterStep(const at::Tensor& result) {
    const bool is_due = IsNextDue();
    // A GPU reports a skipped step late.
    const int64_t step = is_due ? Locked(impl)->num_steps() : StepCounter();
    if (static_cast<double>(step) <= *mark) return;
    const bool has_loss = is_due && result.defined() && result.numel() == 1;
    const double loss = has_loss ? result.item<double>() : kNoNumber;
    Take(step, static_cast<double>(step), loss);
  }

  // Counts a step, and stores the draw if it is due.
  void Take(int64_t step, double at, double loss) {
    if (IsNextDue()) Store(step, loss);
    ++count;
    mark = at;
  }

  void Store(int64_t step, double loss) {
    const at::NoGradGuard no_grad;
    const auto now = TensorsOf(model);
    std::vector<at::Tensor> copies;
    for (const StoredTensor& t : tensors) {
      const at::TensorOptions kind(DtypeOf(t));
      const at::Tensor& copy = copies.emplace_back(
          at::empty(t.shape, kind.device(at::kCPU)).copy_(now[t.name]));
      // Nothing can fail between the first tensor and the last.
      std::string& all = bytes[copies.size() - 1];
      all.reserve(all.size() + copy.nbytes());
    }
    for (size_t i = 0; i < bytes.size(); ++i) {
      const at::Tensor& copy = copies[i];
      bytes[i].append(static_cast<const char*>(copy.const_data_ptr()),
                      copy.nbytes());
    }
    const auto sampler = Locked(impl);
    Draw& draw = waiting.emplace_back();
    draw.step = step;
    draw.lr = sampler->options_of(0).lr();
    draw.temperature = sampler->options_of(0).temperature();
    draw.loss = loss;
    for (size_t i = 0; i < sampler->groups().size(); ++i) {
      draw.prior_precision.push_back(sampler->options_of(i).prior_precision());
    }
    try {
      if (IsFull()) Flush();
    } catch (const std::exception&) {
      // The next step tries again, and throws.
    }
  }

  // Without waiting for a GPU.
  int64_t StepCounter() const { return Locked(impl)->steps_counted(); }

  bool IsFull() const {
    size_t size = 0;
    for (const std::string& of_tensor : bytes) size += of_tensor.size();
    return waiting.size() >= kDraws || size >= kBytes;
  }

  void CheckOpen() const {
    if (!lock) Raise("the collector of ", place, " is closed");
  }

  void Flush() {
    if (waiting.empty()) return;
    try {
      Write();
    } catch (const std::exception& error) {
      Raise(error.what(), ". ", place, " has ", index.num_draws, " draws; ",
            waiting.size(),
            " more wait in memory, and the next step tries again");
    }
    DropWaiting();
  }

  void DropWaiting() {
    waiting.clear();
    for (std::string& of_tensor : bytes) of_tensor.clear();
  }

  std::weak_ptr<SamplerImpl> impl;
  CollectorOptions options;
  const torch::nn::Module& model;
  std::string place;
  std::string store;
  std::string folder;
  std::string index_path;
  OpenFile lock;  // none once the collector was closed
  OpenFile file;  // the index
  ChainIndex index;
  StoredTensors tensors;
  // True while draws of an earlier run await a decision of the caller.
  bool is_undecided = false;
  // Draws in memory, and their tensors' bytes: [count, ...] of each tensor.
  std::vector<Draw> waiting;
  std::vector<std::string> bytes;
  std::optional<int64_t> hook;  // of SBPS
  // The number of counted steps, and the sampler's step or time after the last.
  int64_t count = 0;
  std::optional<double> mark;
};

Collector::Collector(Sampler& sampler, const torch::nn::Module& model,
                     const std::string& store, const CollectorOptions& options)
    : work_(std::make_unique<Work>(sampler, model, store, options)) {}

Collector::~Collector() {
  try {
    close();
  } catch (const std::exception& error) {
    TORCH_WARN(error.what());
  }
}

torch::Tensor Collector::step(
    const torch::optim::Optimizer::LossClosure& closure) {
  work_->BeforeStep();
  torch::Tensor result = Locked(work_->impl)->step(closure);
  if (!work_->hook) work_->AfterStep(result);
  return result;
}

void Collector::flush() {
  work_->CheckOpen();
  work_->Flush();
}

StateDict Collector::state_dict() {
  flush();
  const ChainIndex& index = work_->index;
  c10::IValue mark;
  if (work_->mark && work_->hook) {
    mark = *work_->mark;
  } else if (work_->mark) {
    mark = static_cast<int64_t>(*work_->mark);
  }
  return {{"count", work_->count},
          {"mark", mark},
          {"position", StateDict{{"size", index.size},
                                 {"crc32", static_cast<int64_t>(index.crc32)}}},
          {"burn_in", work_->options.burn_in()},
          {"every", work_->options.every()}};
}

void Collector::load_state_dict(const StateDict& dict) {
  const std::pair<const char*, int64_t> settings[] = {
      {"burn_in", work_->options.burn_in()}, {"every", work_->options.every()}};
  for (const auto& [name, value] : settings) {
    const int64_t begun = dict.at(name).toInt();
    if (begun == value) continue;
    Invalid("Invalid ", name, ": ", value, " (the run in progress has ", begun,
            ")");
  }
  const StateDict position = dict.at("position");
  const c10::IValue saved = dict.at("mark");
  std::optional<double> mark;
  if (!saved.isNone()) mark = saved.toScalar().toDouble();
  const int64_t count = dict.at("count").toInt();
  flush();
  work_->Resume(position.at("size").toInt(), position.at("crc32").toInt(),
                count, mark);
}

void Collector::restart() {
  work_->CheckOpen();
  work_->DropWaiting();
  work_->Resume(0, 0, 0, std::nullopt);
}

void Collector::close() {
  if (!work_->lock) return;
  const auto known = work_->impl.lock();
  if (work_->hook && known != nullptr) {
    static_cast<SBPS&>(known->owner()).remove_sample_hook(*work_->hook);
  }
  const OpenFile until_written = std::move(work_->lock);
  work_->Flush();
}

}  // namespace torch_sgmcmc
