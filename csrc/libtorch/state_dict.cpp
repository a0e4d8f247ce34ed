#include "torch_sgmcmc/state_dict.h"

#include <ATen/ATen.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/serialization/export.h>
#include <torch/csrc/jit/serialization/pickler.h>
#include <torch/csrc/jit/serialization/unpickler.h>
#include <torch/nn/module.h>
#include <torch/serialize.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <exception>
#include <fstream>
#include <optional>
#include <string>
#include <system_error>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "libtorch/checks.h"
#include "libtorch/disk.h"
#include "libtorch/tensor_lists.h"

namespace torch_sgmcmc {
namespace {

using caffe2::serialize::PyTorchStreamReader;
using caffe2::serialize::PyTorchStreamWriter;

c10::impl::GenericDict EmptyDict() {
  return c10::impl::GenericDict(c10::AnyType::get(), c10::AnyType::get());
}

// torch::pickle_save tags dicts and lists with types, which torch.load refuses.
std::vector<char> Pickled(const c10::IValue& value) {
  std::vector<char> pickle;
  torch::jit::Pickler pickler(
      [&](const char* data, size_t size) {
        pickle.insert(pickle.end(), data, data + size);
      },
      /*tensor_table=*/nullptr,
      /*type_renamer=*/nullptr,
      /*memoized_class_types=*/nullptr,
      /*get_tensor_id=*/nullptr,
      /*tag_aggregates=*/false);
  pickler.protocol();
  pickler.pushIValue(value);
  pickler.stop();

  std::vector<char> archive;
  PyTorchStreamWriter writer([&](const void* data, size_t size) {
    const char* bytes = static_cast<const char*>(data);
    archive.insert(archive.end(), bytes, bytes + size);
    return size;
  });
  torch::jit::writeArchiveAndTensors("data", pickle.data(), pickle.size(),
                                     pickler.tensorData(), writer);
  writer.writeEndOfFile();
  return archive;
}

// The bytes that storages were read from.
using Records = std::unordered_map<const void*, size_t>;

// torch does not check the sizes of storages in a pickle.
// NOLINTNEXTLINE(misc-no-recursion)
void CheckStorages(const c10::IValue& value, const Records& records) {
  if (value.isTensor() && value.toTensor().has_storage()) {
    const at::Storage& storage = value.toTensor().storage();
    const auto record = records.find(storage.data());
    if (record != records.end() && storage.nbytes() > record->second) {
      Raise("a Tensor is larger than its record");
    }
  } else if (value.isGenericDict()) {
    for (const auto& entry : value.toGenericDict()) {
      CheckStorages(entry.value(), records);
    }
  } else if (value.isList() || value.isTuple()) {
    const auto elements = value.isList() ? value.toListRef().vec()
                                         : value.toTupleRef().elements().vec();
    for (const c10::IValue& each : elements) CheckStorages(each, records);
  }
}

// The checksums of an archive's records, from its central directory: the
// reader compares none (APPNOTE.TXT of PKWARE, 4.3.12 to 4.3.16).
using Sums = std::unordered_map<std::string, uint32_t>;

Sums ReadSums(const std::string& path) {
  const std::optional<std::string> bytes = disk::Read(path);
  const auto number = [&](size_t at, size_t size) {
    uint64_t value = 0;
    if (!bytes || at > bytes->size() || size > bytes->size() - at) {
      Raise("its directory is damaged");
    }
    for (size_t i = size; i-- > 0;) {
      value = value << 8 | static_cast<uint8_t>((*bytes)[at + i]);
    }
    return value;
  };
  constexpr size_t kEnd = 22;  // bytes of the end record; torch adds no comment
  constexpr size_t kLocator = 20;
  const size_t end = bytes->size() - std::min(kEnd, bytes->size());
  const bool is_zip64 = number(end - kLocator, 4) == 0x07064b50;
  size_t at = is_zip64 ? number(number(end - kLocator + 8, 8) + 48, 8)
                       : number(end + 16, 4);
  Sums sums;
  for (constexpr uint64_t kEntry = 0x02014b50; number(at, 4) == kEntry;) {
    const uint64_t length = number(at + 28, 2);
    number(at + 46, length);  // checks that the name is whole
    const std::string name = bytes->substr(at + 46, length);
    // All are in one folder.
    sums[name.substr(name.find('/') + 1)] =
        static_cast<uint32_t>(number(at + 16, 4));
    at += 46 + length + number(at + 30, 2) + number(at + 32, 2);
  }
  return sums;
}

// A record whose checksum is right.
std::tuple<at::DataPtr, size_t> RecordOf(PyTorchStreamReader& reader,
                                         const Sums& sums,
                                         const std::string& name) {
  auto [data, size] = reader.getRecord(name);
  const auto sum = sums.find(name);
  if (sum == sums.end() || disk::Crc32(data.get(), size) != sum->second) {
    Raise("the checksum of ", name, " differs");
  }
  return {std::move(data), size};
}

c10::IValue Unpickled(PyTorchStreamReader& reader, const Sums& sums,
                      c10::Device device) {
  const auto [pickle, pickle_size] = RecordOf(reader, sums, "data.pkl");
  const char* next = static_cast<const char*>(pickle.get());
  const char* const end = next + pickle_size;
  Records records;
  torch::jit::Unpickler unpickler(
      [&](char* to, size_t wanted) {
        const size_t size = std::min(wanted, static_cast<size_t>(end - next));
        std::memcpy(to, next, size);
        next += size;
        return size;
      },
      /*type_resolver=*/nullptr,
      /*obj_loader=*/nullptr,
      [&](const std::string& name) {
        auto [data, size] = RecordOf(reader, sums, "data/" + name);
        records[data.get()] = size;
        return std::move(data);
      },
      device);
  unpickler.set_version(reader.version());
  c10::IValue value = unpickler.parse_ivalue();
  CheckStorages(value, records);
  return value;
}

// The first line of torch's message, without its stack trace.
std::string FirstLine(const std::exception& error) {
  const std::string text = error.what();
  // This text asks for a report to PyTorch.
  if (text.find("INTERNAL ASSERT") != std::string::npos) {
    return "it has an object that LibTorch does not read";
  }
  return text.substr(0, text.find('\n'));
}

}  // namespace

StateDict::StateDict() : entries_(EmptyDict()) {}

StateDict::StateDict(
    std::initializer_list<std::pair<std::string, c10::IValue>> entries)
    : StateDict() {
  for (const auto& [key, value] : entries) set(key, value);
}

StateDict::StateDict(const c10::IValue& value) : entries_(EmptyDict()) {
  if (!value.isGenericDict()) {
    Invalid("Invalid state_dict: a ", KindOf(value),
            " (must be a dict; from Python, save dict(model.state_dict()) in "
            "place of an OrderedDict)");
  }
  entries_ = value.toGenericDict();
}

StateDict::operator c10::IValue() const { return entries_; }

bool StateDict::contains(const std::string& key) const {
  return entries_.contains(key);
}

bool StateDict::contains(int64_t key) const { return entries_.contains(key); }

c10::IValue StateDict::at(const std::string& key) const {
  const auto entry = entries_.find(key);
  if (entry == entries_.end()) {
    Invalid("Invalid state_dict: it has no key ", Shown(key));
  }
  return entry->value();
}

c10::IValue StateDict::at(int64_t key) const {
  const auto entry = entries_.find(key);
  if (entry == entries_.end()) {
    Invalid("Invalid state_dict: it has no key ", key);
  }
  return entry->value();
}

void StateDict::set(const std::string& key, const c10::IValue& value) {
  entries_.insert_or_assign(key, value);
}

void StateDict::set(int64_t key, const c10::IValue& value) {
  entries_.insert_or_assign(key, value);
}

size_t StateDict::size() const { return entries_.size(); }

void save(const StateDict& dict, const std::string& path) {
  const std::vector<char> bytes = Pickled(dict);
  disk::Replace(path, {bytes.data(), bytes.size()});
}

StateDict load(const std::string& path, c10::Device device) {
  if (disk::IsSpecial(path)) {
    disk::Unreadable(path, "it is not a regular file");
  }
  errno = 0;
  if (!std::ifstream(path, std::ios::binary)) {
    disk::Unreadable(path, std::generic_category().message(errno));
  }
  const auto refuse = [&](const char* what, const std::exception& error) {
    Raise("Cannot read ", path, ": ", what, " (", FirstLine(error), ")");
  };
  std::optional<PyTorchStreamReader> reader;
  try {
    reader.emplace(path);
  } catch (const std::exception& error) {
    refuse("cut off, damaged, or not a file of torch.save", error);
  }
  c10::IValue value;
  try {
    value = Unpickled(*reader, ReadSums(path), device);
  } catch (const std::exception& error) {
    refuse(
        "damaged, or not a file of torch.save with dicts, lists, tensors, "
        "numbers and strings alone; from Python, save "
        "dict(model.state_dict()) in place of an OrderedDict, and ints that 32 "
        "bits do not hold as tensors",
        error);
  }
  if (!value.isGenericDict()) {
    Raise("Cannot read ", path, ": it holds a ", KindOf(value),
          " (must be a dict)");
  }
  return value;
}

torch::OrderedDict<std::string, at::Tensor> TensorsOf(
    const torch::nn::Module& module) {
  auto tensors = module.named_parameters();
  tensors.update(module.named_buffers());
  return tensors;
}

StateDict state_dict(const torch::nn::Module& module) {
  StateDict dict;
  for (const auto& item : TensorsOf(module)) {
    dict.set(item.key(), item.value().detach());
  }
  return dict;
}

// Not const: the module's tensors change.
// cppcheck-suppress constParameter
void load_state_dict(torch::nn::Module& module, const StateDict& dict) {
  auto tensors = TensorsOf(module);
  for (const auto& item : tensors) {
    CheckTensor("Invalid state_dict: " + item.key(), dict.at(item.key()),
                item.value().sizes());
  }
  for (const auto& entry : dict.entries()) {
    const std::string key = KeyText(entry.key());
    if (!entry.key().isString() || !tensors.contains(key)) {
      Invalid("Invalid state_dict: the module has nothing named ", key);
    }
  }
  const at::NoGradGuard no_grad;
  for (auto& item : tensors) {
    item.value().copy_(dict.at(item.key()).toTensor());
  }
}

}  // namespace torch_sgmcmc
