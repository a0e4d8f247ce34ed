#include "libtorch/core/pickles.h"

#include <caffe2/serialize/in_memory_adapter.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/serialization/pickler.h>
#include <torch/csrc/jit/serialization/unpickler.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <tuple>

namespace torch_sgmcmc {
namespace {

using torch::jit::PickleOpCode;

// Where the next instruction of a pickle begins, or the pickle's end where the
// instruction is none that torch.save writes or is cut off: torch's reader says
// so when it comes there.
size_t Next(const std::vector<char>& pickle, size_t at) {
  const auto byte = [&](size_t i) -> size_t {
    return i < pickle.size() ? static_cast<uint8_t>(pickle[i]) : 0;
  };
  const auto line = [&](size_t i) {
    return static_cast<size_t>(
        std::find(
            pickle.begin() + static_cast<ptrdiff_t>(std::min(i, pickle.size())),
            pickle.end(),
            '\n') -
        pickle.begin() + 1);
  };
  switch (static_cast<PickleOpCode>(pickle[at])) {
    case PickleOpCode::BININT1:
    case PickleOpCode::BINGET:
    case PickleOpCode::BINPUT:
    case PickleOpCode::PROTO:
      return at + 2;
    case PickleOpCode::BININT2:
      return at + 3;
    case PickleOpCode::BININT:
    case PickleOpCode::LONG_BINGET:
    case PickleOpCode::LONG_BINPUT:
      return at + 5;
    case PickleOpCode::BINFLOAT:
      return at + 9;
    case PickleOpCode::LONG1:
    case PickleOpCode::SHORT_BINSTRING:
      return at + 2 + byte(at + 1);
    case PickleOpCode::BINSTRING:
    case PickleOpCode::BINUNICODE:
      return at + 5 + byte(at + 1) + (byte(at + 2) << 8U) +
             (byte(at + 3) << 16U) + (byte(at + 4) << 24U);
    case PickleOpCode::GLOBAL:
      return line(line(at));
    case PickleOpCode::MARK:
    case PickleOpCode::POP:
    case PickleOpCode::POP_MARK:
    case PickleOpCode::DUP:
    case PickleOpCode::NONE:
    case PickleOpCode::BINPERSID:
    case PickleOpCode::REDUCE:
    case PickleOpCode::APPEND:
    case PickleOpCode::APPENDS:
    case PickleOpCode::BUILD:
    case PickleOpCode::DICT:
    case PickleOpCode::EMPTY_DICT:
    case PickleOpCode::LIST:
    case PickleOpCode::EMPTY_LIST:
    case PickleOpCode::SETITEM:
    case PickleOpCode::SETITEMS:
    case PickleOpCode::TUPLE:
    case PickleOpCode::EMPTY_TUPLE:
    case PickleOpCode::TUPLE1:
    case PickleOpCode::TUPLE2:
    case PickleOpCode::TUPLE3:
    case PickleOpCode::NEWTRUE:
    case PickleOpCode::NEWFALSE:
      return at + 1;
    default:
      return pickle.size();
  }
}

// Python writes an int that 32 bits do not hold in as few bytes as it needs, 5
// for a sum of 32 bits or a seed of 2^38; torch's reader takes 8 and no other
// number of them.
std::vector<char> WithWideInts(const std::vector<char>& pickle) {
  constexpr size_t kWidth = sizeof(int64_t);
  std::vector<char> wide;
  wide.reserve(pickle.size() + kWidth);
  for (size_t at = 0; at < pickle.size();) {
    const size_t next = std::min(Next(pickle, at), pickle.size());
    const bool is_int =
        static_cast<PickleOpCode>(pickle[at]) == PickleOpCode::LONG1;
    const size_t width = next - at - 2;
    if (is_int && next - at > 2 && width < kWidth) {
      const bool negative = static_cast<int8_t>(pickle[next - 1]) < 0;
      wide.push_back(pickle[at]);
      wide.push_back(static_cast<char>(kWidth));
      wide.insert(wide.end(),
                  pickle.begin() + static_cast<ptrdiff_t>(at + 2),
                  pickle.begin() + static_cast<ptrdiff_t>(next));
      wide.insert(wide.end(), kWidth - width, negative ? '\xFF' : '\0');
    } else {
      wide.insert(wide.end(),
                  pickle.begin() + static_cast<ptrdiff_t>(at),
                  pickle.begin() + static_cast<ptrdiff_t>(next));
    }
    at = next;
  }
  return wide;
}

}  // namespace

c10::IValue Unpickled(const std::vector<char>& archive) {
  caffe2::serialize::PyTorchStreamReader reader(
      std::make_shared<caffe2::serialize::MemoryReadAdapter>(
          archive.data(), static_cast<off_t>(archive.size())));
  const auto [data, size] = reader.getRecord("data.pkl");
  const char* const begin = static_cast<const char*>(data.get());
  const std::vector<char> pickle = WithWideInts({begin, begin + size});
  size_t at = 0;
  torch::jit::Unpickler unpickler(
      [&](char* to, size_t wanted) {
        const size_t got = std::min(wanted, pickle.size() - at);
        std::memcpy(to, pickle.data() + at, got);
        at += got;
        return got;
      },
      /*type_resolver=*/nullptr,
      /*obj_loader=*/nullptr,
      [&](const std::string& name) {
        return std::get<0>(reader.getRecord("data/" + name));
      },
      /*device=*/std::nullopt);
  unpickler.set_version(reader.version());
  return unpickler.parse_ivalue();
}

}  // namespace torch_sgmcmc
