#include "torch_sgmcmc/store.h"

#include <ATen/ATen.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <torch/nn/module.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string_view>
#include <system_error>
#include <utility>

#include "libtorch/checks.h"
#include "libtorch/disk.h"
#include "libtorch/options.h"
#include "libtorch/sampler_impl.h"
#include "libtorch/tensor_lists.h"

// torch_sgmcmc/draws/store_files.py does the same in Python.
namespace torch_sgmcmc {

using Json = nlohmann::json;
namespace fs = std::filesystem;

// A model's tensor: its entry in store.json, and its bytes in waiting draws.
struct Column {
  std::string name;
  Json entry;
  std::string bytes;
};

namespace {

// Draws are written at so many bytes or draws.
constexpr size_t kBytes = size_t{4} << 20;
constexpr size_t kDraws = 1024;

constexpr std::pair<const char*, at::ScalarType> kDtypes[] = {
    {"U64", at::kUInt64},       {"I64", at::kLong},      {"F64", at::kDouble},
    {"C64", at::kComplexFloat}, {"F32", at::kFloat},     {"U32", at::kUInt32},
    {"I32", at::kInt},          {"BF16", at::kBFloat16}, {"F16", at::kHalf},
    {"U16", at::kUInt16},       {"I16", at::kShort},     {"I8", at::kChar},
    {"U8", at::kByte},          {"BOOL", at::kBool},
};

void Expect(bool condition, const std::string& message) {
  if (!condition) Raise(message);
}

// The name of a store's folder, which must not be empty.
const std::string& NamedFolder(const std::string& name) {
  if (name.empty()) Invalid("Invalid store: '' (must be the name of a folder)");
  return name;
}

uint32_t SumOf(std::string_view bytes) {
  return disk::Crc32(bytes.data(), bytes.size());
}

// Json's get() would also convert other numbers.
int64_t IntegerIn(const Json& value) {
  Expect(value.is_number_integer() && value <= INT64_MAX, "it is damaged");
  return value.get<int64_t>();
}

// Numbers that are not finite are null.
double NumberIn(const Json& value) {
  return value.is_null() ? std::nan("") : value.get<double>();
}

// Dtype and shape in an entry of store.json or of a file's header.
std::pair<at::ScalarType, std::vector<int64_t>> KindIn(const Json& entry) {
  std::vector<int64_t> shape;
  for (const Json& size : entry.at("shape").get_ref<const Json::array_t&>()) {
    shape.push_back(IntegerIn(size));
  }
  for (const auto& [name, dtype] : kDtypes) {
    if (entry.at("dtype") == name) return {dtype, shape};
  }
  Raise("it has an unknown dtype");
}

// The entry of a tensor in store.json; null if it cannot be stored.
Json EntryOf(const at::Tensor& t) {
  for (const auto& [name, dtype] : kDtypes) {
    if (t.scalar_type() == dtype && t.layout() == at::kStrided) {
      return {{"dtype", name}, {"shape", t.sizes().vec()}};
    }
  }
  return nullptr;
}

// The tensors in store.json, null without a store.
Json ReadStore(const std::string& store) {
  const std::string path = store + "/store.json";
  const auto text = disk::Read(path);
  if (!text) return nullptr;
  try {
    const Json content = Json::parse(*text);
    const Json& format = content.at("format");
    Expect(format == 1, "format " + format.dump() + " (must be 1)");
    const Json& tensors = content.at("tensors");
    for (const auto& [name, t] : tensors.get_ref<const Json::object_t&>()) {
      KindIn(t);
    }
    return tensors;
  } catch (const std::exception& error) {
    disk::Unreadable(path, error.what());
  }
}

// The number after a word that a file's name begins with, else 0.
int64_t NumberAfter(std::string_view word, const std::string& name) {
  if (!name.starts_with(word)) return 0;
  return std::strtoll(name.c_str() + word.size(), nullptr, 10);
}

std::string FileName(size_t number) {
  const std::string digits = std::to_string(number);
  const size_t zeros = 6 - std::min<size_t>(digits.size(), 6);
  return "draws-" + std::string(zeros, '0') + digits + ".safetensors";
}

// The end of a line of an index.
constexpr std::string_view kLineSum = ", \"line_crc32\": ";
std::string EndOf(std::string_view line) {
  return std::string(kLineSum) + std::to_string(SumOf(line)) + "}";
}

}  // namespace

// A file of draws; its tensors, [count, ...], stay mapped after the first read.
struct DrawFile {
  int64_t size = 0;
  int64_t crc32 = 0;
  int64_t count = 0;
  std::shared_ptr<const Json> described = nullptr;  // by store.json
  std::mutex mutex;
  std::map<std::string, at::Tensor> tensors;

  // Adds the draws of a line of an index, which is of the file `path`.
  static void List(const std::string& line, const std::string& path,
                   std::vector<Draw>& draws) {
    const size_t end = std::min(line.rfind(kLineSum), line.size());
    const std::string content = line.substr(0, end);
    Expect(line.substr(end) == EndOf(content), "another checksum");
    const Json json = Json::parse(content + "}");
    Expect(json.at("file") == path.substr(path.rfind('/') + 1), "another file");
    const auto file = std::make_shared<DrawFile>();
    file->size = IntegerIn(json.at("bytes"));
    file->crc32 = IntegerIn(json.at("crc32"));
    file->count = IntegerIn(json.at("count"));
    Expect(file->count > 0, "no draw");
    for (int64_t row = 0; row < file->count; ++row) {
      const auto entry = [&](const char* column) -> const Json& {
        const auto& all = json.at(column).get_ref<const Json::array_t&>();
        Expect(static_cast<int64_t>(all.size()) == file->count,
               "another count");
        return all[row];
      };
      Draw& draw = draws.emplace_back();
      draw.step = IntegerIn(entry("step"));
      draw.lr = NumberIn(entry("lr"));
      draw.temperature = NumberIn(entry("temperature"));
      draw.weight = NumberIn(entry("weight"));
      draw.loss = NumberIn(entry("loss"));
      for (const Json& value : entry("prior_precision")) {
        draw.prior_precision.push_back(NumberIn(value));
      }
      draw.path = path;
      draw.file_ = file;
      draw.row_ = row;
    }
  }

  void Read(const std::string& path) {
    const auto found = static_cast<int64_t>(fs::file_size(path));
    Expect(found == size,
           c10::str("it has ", found, " bytes of the ", size, " written"));
    const at::Tensor bytes = at::from_file(
        path, /*shared=*/false, size, at::device(at::kCPU).dtype(at::kByte));
    const std::string_view whole(
        static_cast<const char*>(bytes.const_data_ptr()),
        static_cast<size_t>(size));
    Expect(SumOf(whole) == crc32, "its bytes are altered");
    uint64_t header = 0;
    Expect(whole.size() >= sizeof(header), "it is too short");
    std::memcpy(&header, whole.data(), sizeof(header));
    Expect(header <= whole.size() - sizeof(header), "it is too short");
    const Json json = Json::parse(whole.substr(sizeof(header), header));
    const auto begin = static_cast<int64_t>(sizeof(header) + header);
    const at::Tensor data = bytes.slice(0, begin);
    Expect(json.size() == described->size(),
           "its names differ from store.json's");
    for (const auto& [name, t] : json.get_ref<const Json::object_t&>()) {
      const auto [dtype, shape] = KindIn(t);
      const Json& place = t.at("data_offsets");
      Expect(!shape.empty() && shape[0] == count, "its header is damaged");
      Json known = t;
      known.erase("data_offsets");
      known.at("shape").erase(0);
      Expect(known == described->value(name, Json()),
             "its '" + name + "' is not as in store.json");
      const at::Tensor part =
          data.slice(0, IntegerIn(place.at(0)), IntegerIn(place.at(1)));
      tensors[name] = part.view(dtype).view(shape);
    }
  }
};

// Adds a chain's draws; returns the complete lines of its index. Throws
// std::runtime_error with the line's number.
static std::string ReadIndex(const std::string& folder,
                             std::vector<Draw>& draws) {
  const std::string path = folder + "/index.jsonl";
  std::string text = disk::Read(path).value_or("");
  text.resize(text.rfind('\n') + 1);  // A writer has not finished the rest.
  std::istringstream lines(text);
  size_t number = 0;
  for (std::string line; std::getline(lines, line); ++number) {
    try {
      DrawFile::List(line, folder + "/" + FileName(number), draws);
    } catch (const std::exception&) {
      disk::Unreadable(path, c10::str("line ", number + 1, " is damaged"));
    }
  }
  return text;
}

at::Tensor Draw::at(const std::string& name) const {
  const std::lock_guard guard(file_->mutex);
  try {
    if (file_->tensors.empty()) file_->Read(path);
  } catch (const std::exception& error) {
    file_->tensors.clear();
    disk::Unreadable(
        path,
        c10::str(error.what(), " (if its chain was cut back or restarted, ",
                 "refresh() the store)"));
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

const Draw& SampleStore::operator[](size_t index) const {
  if (index < draws_.size()) return draws_[index];
  throw std::out_of_range(c10::str("Invalid index: ", index, " (the store has ",
                                   draws_.size(), " draws)"));
}

const SampleStore& SampleStore::refresh() {
  NamedFolder(path_);
  const auto described = std::make_shared<const Json>(ReadStore(path_));
  const Json& tensors = *described;
  auto names = std::make_shared<std::vector<std::string>>();
  for (const auto& [name, t] : tensors.items()) names->push_back(name);
  std::set<int64_t> chains;
  if (!tensors.is_null()) {
    for (const auto& entry : fs::directory_iterator(path_)) {
      const std::string name = entry.path().filename();
      const int64_t chain = NumberAfter("chain-", name);
      const bool is_chain = name == "chain-" + std::to_string(chain);
      if (is_chain && chain >= 0) chains.insert(chain);
    }
  }
  std::vector<Draw> draws;
  for (const int64_t chain : chains) {
    size_t next = draws.size();
    ReadIndex(path_ + "/chain-" + std::to_string(chain), draws);
    for (; next < draws.size(); ++next) {
      draws[next].chain = chain;
      draws[next].names_ = names;
      draws[next].file_->described = described;
    }
  }
  draws_ = std::move(draws);
  return *this;
}

// ---- Writing ----------------------------------------------------------------

struct Collector::Work {
  Work(const Sampler& sampler, const torch::nn::Module& its_model,
       const std::string& its_store, int64_t chain)
      : impl(SamplerAccess::Of(sampler)),
        model(its_model),
        place("chain " + std::to_string(chain) + " of " + its_store),
        store(fs::absolute(NamedFolder(its_store))),
        folder(store + "/chain-" + std::to_string(chain)),
        index_path(folder + "/index.jsonl") {
    CheckInteger("chain", chain);
    const auto sampled = Locked(impl)->all_params();
    const auto is_sampled = [&](const at::Tensor& own) {
      const auto is_own = [&](const at::Tensor& p) { return p.is_same(own); };
      return own.requires_grad() && std::ranges::any_of(sampled, is_own);
    };
    if (std::ranges::none_of(model.parameters(), is_sampled)) {
      Invalid(
          "Invalid model: the sampler has none of its parameters, so all draws "
          "would be the same (was the model copied after the sampler was "
          "made?)");
    }
    auto items = TensorsOf(model).items();
    // Large elements first, which aligns all of them in a file.
    std::ranges::stable_sort(items, std::ranges::greater(), [](const auto& x) {
      return x.value().element_size();
    });
    for (const auto& item : items) {
      const at::Tensor& t = item.value();
      draw_size += t.nbytes();
      columns.push_back({item.key(), EntryOf(t), ""});
      if (!columns.back().entry.is_null()) continue;
      Invalid("Invalid model: ", Shown(item.key()), ", ",
              DtypeName(t.scalar_type()), " of layout ", LayoutName(t.layout()),
              ", cannot be stored");
    }
    std::error_code error;
    fs::create_directories(store, error);
    if (error) disk::Unwritable(store, error.value());
    {
      // Waits for others that open chains, and excludes them.
      const disk::OpenFile opening = disk::Open(store, O_RDONLY);
      if (!opening || ::flock(*opening, LOCK_EX) != 0) disk::Unwritable(store);
      MakeFolder();
      Lock();
    }
    TakeIndex();
    is_undecided = num_draws > 0;
  }

  // True if the store has draws, or a chain has a writer.
  bool IsUsed() const {
    if (SampleStore(store).size() > 0) return true;
    const auto is_held = [](const fs::directory_entry& entry) {
      const disk::OpenFile lock = disk::Open(entry.path() / "lock", O_RDONLY);
      return lock && ::flock(*lock, LOCK_SH | LOCK_NB) != 0;
    };
    return std::any_of(fs::directory_iterator(store), {}, is_held);
  }

  void MakeFolder() const {
    Json tensors;
    for (const Column& c : columns) tensors[c.name] = c.entry;
    const Json content = {
        {"tensors", tensors}, {"not_sampled", Json::object()}, {"format", 1}};
    const std::string text = content.dump(1);
    const Json there = ReadStore(store);
    if (there != tensors && !there.is_null() && IsUsed()) {
      Json all = there;
      all.update(tensors);
      for (const auto& [name, t] : all.items()) {
        const Json known = there.value(name, Json());
        const Json given = tensors.value(name, Json());
        if (known == given) continue;
        Invalid("Invalid store: the draws in ", store,
                " are of another model: its '", name, "' is ", known.dump(),
                ", here ", given.dump(), ". Give another folder");
      }
    }
    std::error_code error;
    fs::create_directories(folder, error);
    if (error) disk::Unwritable(folder, error.value());
    if (there != tensors) disk::Replace(store + "/store.json", text);
  }

  void Lock() {
    lock = disk::Open(folder + "/lock");
    file = disk::Open(index_path);
    if (!lock || !file) disk::Unwritable(folder);
    if (::flock(*lock, LOCK_EX | LOCK_NB) != 0) {
      const std::string holder = disk::Read(folder + "/lock").value_or("");
      Raise("Cannot write to ", place, ": process ",
            holder.substr(0, holder.find('\n')), " writes to it");
    }
    disk::Append(*lock, folder, std::to_string(::getpid()) + "\n", 0);
    if (!disk::Sync(folder) || !disk::Sync(store)) disk::Unwritable(folder);
  }

  void TakeIndex() {
    std::vector<Draw> draws;
    const std::string lines = ReadIndex(folder, draws);
    size = static_cast<int64_t>(lines.size());
    num_files = std::ranges::count(lines, '\n');
    num_draws = draws.size();
    disk::Append(*file, index_path, "", size);
    last = {draws.empty() ? 0 : draws.back().step, INFINITY};
    // Other files were not finished, or were cut back.
    for (const auto& entry : fs::directory_iterator(folder)) {
      const std::string name = entry.path().filename();
      const size_t number = NumberAfter("draws-", name);
      const std::string own = FileName(number);
      const size_t end = name.find_first_not_of("0123456789-", own.size() + 1);
      const bool is_partial = name.starts_with(own + ".") &&
                              end != std::string::npos &&
                              name.substr(end) == ".partial";
      const bool is_record =
          name.starts_with("run.json.") && name.ends_with(".partial");
      if (is_partial || is_record || (name == own && number >= num_files)) {
        ::unlink(entry.path().c_str());
      }
    }
  }

  void Write() {
    Json header;
    size_t end = 0;
    for (const Column& c : columns) {
      const size_t begin = std::exchange(end, end + c.bytes.size());
      Json& entry = header[c.name] = c.entry;
      entry["shape"].insert(entry["shape"].begin(), num_waiting);
      entry["data_offsets"] = {begin, end};
    }
    std::string whole = std::string(sizeof(uint64_t), '\0') + header.dump();
    whole.append((8 - whole.size() % 8) % 8, ' ');
    const uint64_t header_size = whole.size() - sizeof(uint64_t);
    std::memcpy(whole.data(), &header_size, sizeof(header_size));
    for (const Column& c : columns) whole += c.bytes;
    const std::string name = FileName(num_files);
    struct stat status = {};
    if (::fstat(*file, &status) != 0 || status.st_nlink == 0) {
      disk::Unwritable(folder + "/" + name, ENOENT);  // the folder was deleted
    }
    disk::Replace(folder + "/" + name, whole);
    numbers.update({{"file", name},
                    {"count", num_waiting},
                    {"bytes", whole.size()},
                    {"crc32", SumOf(whole)}});
    std::string line = numbers.dump();
    line.pop_back();  // the brace, which EndOf() has
    line += EndOf(line) + "\n";
    disk::Append(*file, index_path, line, size);
    size += static_cast<int64_t>(line.size());
    ++num_files;
    num_draws += num_waiting;
  }

  uint32_t SumOfIndex(int64_t end) const {
    return SumOf(disk::Read(index_path).value_or("").substr(0, end));
  }

  // Cuts the index back to this length.
  void Resume(int64_t end) {
    disk::Append(*file, index_path, "", end);
    TakeIndex();
    is_undecided = false;
  }

  void Collect(double loss) {
    CheckOpen();
    if (is_undecided) {
      Invalid("Invalid store: ", place, " has ", num_draws,
              " draws of an earlier run (load the state dict of its "
              "checkpoint, or restart())");
    }
    const auto sampler = Locked(impl);
    const auto now = sampler->draw_time();
    if (now.first < last.first) {
      Raise("the sampler went back before the last draw, of step ", last.first,
            ": load the collector's state dict too");
    }
    if (now <= last) return;
    if (num_waiting >= kDraws || num_waiting * draw_size >= kBytes) Flush();
    const at::NoGradGuard no_grad;
    const auto values = TensorsOf(model);
    Tensors copies;
    for (Column& c : columns) {
      const at::Tensor* value = values.find(c.name);
      if (value == nullptr || EntryOf(*value) != c.entry) {
        Invalid("Invalid draw: '", c.name, "' is not ", c.entry.dump(),
                " as when the collector was made");
      }
      const auto kind = value->options().device(at::kCPU);
      copies.push_back(at::empty(value->sizes(), kind).copy_(*value));
      // The rest cannot fail between two tensors.
      c.bytes.reserve(c.bytes.size() + copies.back().nbytes());
    }
    std::vector<double> precisions;
    for (size_t i = 0; i < sampler->groups().size(); ++i) {
      precisions.push_back(sampler->options_of(i).prior_precision());
    }
    for (size_t i = 0; i < copies.size(); ++i) {
      const auto* bytes = static_cast<const char*>(copies[i].const_data_ptr());
      columns[i].bytes.append(bytes, copies[i].nbytes());
    }
    numbers["step"].push_back(now.first);
    numbers["lr"].push_back(sampler->options_of(0).lr());
    numbers["temperature"].push_back(sampler->options_of(0).temperature());
    numbers["weight"].push_back(1.0);
    numbers["loss"].push_back(loss);
    numbers["prior_precision"].push_back(precisions);
    ++num_waiting;
    last = now;
  }

  void CheckOpen() const {
    if (!lock) Raise("the collector of ", place, " is closed");
  }

  void Flush() {
    CheckOpen();
    if (num_waiting == 0) return;
    try {
      Write();
    } catch (const std::exception& error) {
      Raise(error.what(), ". ", place, " has ", num_draws, " draws; ",
            num_waiting, " more wait in memory, and the next call tries again");
    }
    DropWaiting();
  }

  // Writes run.json, which Python's report() reads, once the sampler has moved.
  void WriteRun() const {
    const auto sampler = impl.lock();
    if (!sampler || sampler->num_steps() == 0) return;
    Json settings = Json::array();
    Json names = Json::array();
    for (size_t i = 0; i < sampler->groups().size(); ++i) {
      Json own = Json::object();
      for (const char* name :
           {"num_data", "prior_precision", "temperature", "lr", "momentum"}) {
        const double number = sampler->options_of(i).number_or(name, NAN);
        if (std::isfinite(number)) own[name] = number;
      }
      settings.push_back(own);
      names.push_back(Json::array());
      for (const auto& item : model.named_parameters()) {
        const auto is_own = [&](const at::Tensor& p) {
          return p.is_same(item.value());
        };
        const bool is_here =
            std::ranges::any_of(sampler->groups()[i].params(), is_own);
        if (is_here) names.back().push_back(item.key());
      }
    }
    // Python's temperatures of the chain's first part stay.
    const std::string path = folder + "/run.json";
    Json run = Json::parse(disk::Read(path).value_or("{}"), nullptr, false);
    if (!run.is_object() || is_new) run = Json::object();
    run.update({{"sampler", sampler->name()},
                {"temperature", sampler->options_of(0).temperature()},
                {"steps", sampler->num_steps()},
                {"num_skipped", sampler->num_skipped()},
                {"seed", sampler->seed()},
                {"settings", settings},
                {"names", names}});
    run.update(described);
    disk::Replace(path, run.dump());
  }

  void DropWaiting() {
    num_waiting = 0;
    numbers.clear();
    for (Column& c : columns) c.bytes.clear();
  }

  std::weak_ptr<SamplerImpl> impl;
  const torch::nn::Module& model;
  std::string place;
  std::string store;
  std::string folder;
  std::string index_path;
  disk::OpenFile lock;  // none once the collector was closed
  disk::OpenFile file;  // the index
  // The length of the index, and its numbers of lines and draws.
  int64_t size = 0;
  size_t num_files = 0;
  size_t num_draws = 0;
  // True while draws of an earlier run await a decision of the caller.
  bool is_undecided = false;
  // True after restart(), when run.json is another run's.
  bool is_new = false;
  // How the chain began, and steps of a pass, if known.
  Json described = Json::object();
  // The step and time of the last draw.
  std::pair<int64_t, double> last;
  // The draws in memory: their number, tensors, and lists for the index.
  size_t num_waiting = 0;
  size_t draw_size = 0;
  std::vector<Column> columns;
  Json numbers;
};

Collector::Collector(Sampler& sampler, const torch::nn::Module& model,
                     const std::string& store, int64_t chain)
    : work_(std::make_unique<Work>(sampler, model, store, chain)) {}

Collector::~Collector() {
  try {
    close();
  } catch (const std::exception& error) {
    TORCH_WARN(error.what(), ", but the collector is gone, and they are lost");
  }
}

void Collector::collect(double loss) { work_->Collect(loss); }

void Collector::collect(const at::Tensor& loss) {
  if (!loss.defined() || loss.numel() != 1) {
    Invalid("Invalid loss: ",
            loss.defined() ? "shape " + Shape(loss.sizes()) : "undefined",
            " (must be a number, or a tensor of one element)");
  }
  collect(loss.item<double>());
}

void Collector::flush() { work_->Flush(); }

void Collector::describe(const std::string& start, int64_t steps_per_pass) {
  CheckInteger("steps_per_pass", steps_per_pass, 1);
  work_->described = {{"start", start}, {"steps_per_pass", steps_per_pass}};
}

StateDict Collector::state_dict() {
  flush();
  work_->WriteRun();
  const int64_t size = work_->size;
  const int64_t crc32 = work_->SumOfIndex(size);
  return {{"position", StateDict{{"size", size}, {"crc32", crc32}}}};
}

void Collector::load_state_dict(const StateDict& dict) {
  const StateDict position = dict.at("position");
  const auto size = FromValue<int64_t>("size", position.at("size"));
  const auto crc32 =
      static_cast<uint32_t>(FromValue<int64_t>("crc32", position.at("crc32")));
  flush();
  if (size < 0 || size > work_->size || work_->SumOfIndex(size) != crc32) {
    Invalid("Invalid checkpoint: it is not of ", work_->place);
  }
  work_->Resume(size);
}

void Collector::restart() {
  work_->CheckOpen();
  work_->DropWaiting();
  work_->Resume(0);
  work_->is_new = true;
}

void Collector::close() {
  if (!work_->lock) return;
  work_->Flush();
  work_->WriteRun();
  work_->lock = nullptr;
}

}  // namespace torch_sgmcmc
