#include "host/draw_index.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "core/range.h"
#include "host/crc32.h"

namespace torch_sgmcmc {
namespace {

constexpr const char* kOwn = ".safetensors";
constexpr const char* kShared = ".draws";
constexpr int kDrawDigits = 10;

std::string Sealed(const std::string& body) {
  return body + " " + HexSum(Crc32(body.data(), body.size())) + "\n";
}

// Of a line without its end; nothing if the sum is another.
std::optional<std::string_view> Unsealed(std::string_view line) {
  if (line.size() < 9 || line[line.size() - 9] != ' ') return std::nullopt;
  const std::string_view body = line.substr(0, line.size() - 9);
  if (HexSum(Crc32(body.data(), body.size())) != line.substr(line.size() - 8)) {
    return std::nullopt;
  }
  return body;
}

// Names may have spaces, but no end of a line.
std::string Escaped(std::string_view name) {
  std::string text;
  for (const char c : name) {
    if (c == '\\') {
      text += "\\\\";
    } else if (c == '\n') {
      text += "\\n";
    } else {
      text += c;
    }
  }
  return text;
}

std::string Unescaped(std::string_view text) {
  std::string name;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && i + 1 < text.size()) {
      name += text[++i] == 'n' ? '\n' : text[i];
    } else {
      name += text[i];
    }
  }
  return name;
}

std::string Number(double value) {
  return std::isnan(value) ? "nan" : Shortest(value);
}

std::string Number(int64_t value) { return std::to_string(value); }

// Between commas, as one word.
template <typename T>
std::string Commas(const std::vector<T>& values) {
  std::string text;
  for (const T value : values) {
    if (!text.empty()) text += ',';
    text += Number(value);
  }
  return text.empty() ? "-" : text;
}

// The words of a line; throws std::runtime_error where they are none of its.
class Words {
 public:
  explicit Words(std::string_view line) : rest_(line) {}

  std::string_view Next() {
    const size_t end = std::min(rest_.find(' '), rest_.size());
    const std::string_view word = rest_.substr(0, end);
    rest_.remove_prefix(std::min(end + 1, rest_.size()));
    return word;
  }

  void Expect(std::string_view word) {
    if (Next() != word) Fail();
  }

  template <typename T>
  T NextNumber(std::string_view name = "") {
    if (!name.empty()) Expect(name);
    return As<T>(Next());
  }

  uint32_t NextSum(std::string_view name) {
    Expect(name);
    const std::string_view word = Next();
    uint32_t value = 0;
    const auto end =
        std::from_chars(word.data(), word.data() + word.size(), value, 16);
    if (end.ptr != word.data() + word.size()) Fail();
    return value;
  }

  template <typename T>
  std::vector<T> NextList() {
    std::string_view word = Next();
    std::vector<T> values;
    while (word != "-" && !word.empty()) {
      const size_t end = std::min(word.find(','), word.size());
      values.push_back(As<T>(word.substr(0, end)));
      word.remove_prefix(std::min(end + 1, word.size()));
    }
    return values;
  }

  std::string_view rest() const { return rest_; }

 private:
  [[noreturn]] static void Fail() {
    throw std::runtime_error("it is of another version");
  }

  template <typename T>
  static T As(std::string_view word) {
    T value = 0;
    const auto end =
        std::from_chars(word.data(), word.data() + word.size(), value);
    if (end.ec != std::errc() || end.ptr != word.data() + word.size()) Fail();
    return value;
  }

  std::string_view rest_;
};

DrawRecord ParseDraw(Words& words) {
  DrawRecord record;
  record.number = words.NextNumber<int64_t>();
  record.step = words.NextNumber<int64_t>("step");
  record.lr = words.NextNumber<double>("lr");
  record.temperature = words.NextNumber<double>("temperature");
  record.weight = words.NextNumber<double>("weight");
  record.loss = words.NextNumber<double>("loss");
  words.Expect("prior");
  record.prior_precision = words.NextList<double>();
  record.crc32 = words.NextSum("crc32");
  if (!words.rest().empty()) {
    record.file = words.NextNumber<int64_t>("file");
    record.slot = words.NextNumber<int64_t>("slot");
  }
  return record;
}

}  // namespace

std::string IndexHead(const DrawLayout& layout) {
  std::string head = Sealed("torch_sgmcmc draws 1 tensors " +
                            std::to_string(layout.tensors().size()));
  for (const StoredTensor& t : layout.tensors()) {
    head += Sealed("tensor " + t.dtype + " " + Commas(t.shape) + " " +
                   Escaped(t.name));
  }
  return head;
}

std::string IndexLine(const DrawRecord& record) {
  return Sealed("draw " + std::to_string(record.number) + " step " +
                std::to_string(record.step) + " lr " + Number(record.lr) +
                " temperature " + Number(record.temperature) + " weight " +
                Number(record.weight) + " loss " + Number(record.loss) +
                " prior " + Commas(record.prior_precision) + " crc32 " +
                HexSum(record.crc32) +
                (record.shares() ? " file " + std::to_string(record.file) +
                                       " slot " + std::to_string(record.slot)
                                 : ""));
}

std::string IndexThinning(int64_t interval) {
  return Sealed("thin " + std::to_string(interval));
}

DrawIndex ParseIndex(std::string_view text) {
  DrawIndex index;
  std::vector<StoredTensor> tensors;
  std::vector<int64_t> doubtful;
  size_t expected = 0;
  int64_t line = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = text.find('\n', begin);
    if (end == std::string_view::npos) break;
    ++line;
    const auto body = Unsealed(text.substr(begin, end - begin));
    begin = end + 1;
    const bool in_head = index.head_size == 0;
    if (!body) {
      if (in_head) break;
      doubtful.push_back(line);
      continue;
    }
    Words words(*body);
    const std::string_view kind = words.Next();
    if (line == 1) {
      words.Expect("draws");
      words.Expect("1");
      expected = words.NextNumber<size_t>("tensors");
    } else if (in_head) {
      StoredTensor tensor;
      tensor.dtype = words.Next();
      tensor.shape = words.NextList<int64_t>();
      tensor.name = Unescaped(words.rest());
      tensors.push_back(std::move(tensor));
      if (tensors.size() == expected) {
        index.layout = DrawLayout(std::exchange(tensors, {}));
        index.head_size = begin;
      }
    } else if (kind == "thin") {
      const auto interval = words.NextNumber<int64_t>();
      std::erase_if(index.draws, [&](const DrawRecord& record) {
        const bool drops = record.number % interval != 0;
        if (drops) index.dropped.push_back(record);
        return drops;
      });
    } else {
      index.draws.push_back(ParseDraw(words));
    }
    index.size = begin;
    index.damaged.insert(index.damaged.end(), doubtful.begin(), doubtful.end());
    doubtful.clear();
  }
  if (index.head_size == 0) {
    throw std::runtime_error("its line " + std::to_string(line) +
                             ", of the model's tensors, is damaged");
  }
  index.damaged.insert(index.damaged.end(), doubtful.begin(), doubtful.end());
  return index;
}

std::string DrawFileName(const DrawRecord& record) {
  std::string digits =
      std::to_string(record.shares() ? record.file : record.number);
  if (digits.size() < kDrawDigits) {
    digits.insert(0, kDrawDigits - digits.size(), '0');
  }
  return digits + (record.shares() ? kShared : kOwn);
}

}  // namespace torch_sgmcmc
