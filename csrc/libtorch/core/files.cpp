#include "libtorch/core/files.h"

#include <cerrno>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <system_error>

#include "host/crc32.h"
#include "libtorch/core/disk.h"

namespace torch_sgmcmc {
namespace {

// Little-endian numbers and ranges of an archive, and the sums of the latter.
class Archive {
 public:
  explicit Archive(const std::vector<char>& bytes) : bytes_(bytes) {}

  uint64_t number(uint64_t at, int width) const {
    const char* begin = range(at, static_cast<uint64_t>(width));
    uint64_t value = 0;
    for (int i = width - 1; i >= 0; --i) {
      value = value << 8 | static_cast<uint8_t>(begin[i]);
    }
    return value;
  }

  bool has(uint32_t signature, uint64_t at) const {
    return number(at, 4) == signature;
  }

  std::string text(uint64_t at, uint64_t size) const {
    return {range(at, size), size};
  }

  uint32_t crc32(uint64_t at, uint64_t size) const {
    return Crc32(range(at, size), size);
  }

  // Where the record at the end is; it may be followed by a comment.
  uint64_t end_record() const {
    for (uint64_t behind = kEndSize; behind <= bytes_.size(); ++behind) {
      const uint64_t at = bytes_.size() - behind;
      if (has(0x06054b50, at)) return at;
      if (behind == kEndSize + 0xFFFF) break;
    }
    throw std::runtime_error("no directory at its end");
  }

 private:
  static constexpr uint64_t kEndSize = 22;

  const char* range(uint64_t at, uint64_t size) const {
    if (at > bytes_.size() || size > bytes_.size() - at) {
      throw std::runtime_error("a part reaches beyond its end");
    }
    return bytes_.data() + at;
  }

  const std::vector<char>& bytes_;
};

struct Directory {
  uint64_t entries;
  uint64_t at;
};

Directory FindDirectory(const Archive& archive) {
  const uint64_t end = archive.end_record();
  constexpr uint64_t kLocatorSize = 20;
  if (end < kLocatorSize || !archive.has(0x07064b50, end - kLocatorSize)) {
    return {archive.number(end + 10, 2), archive.number(end + 16, 4)};
  }
  // That of an archive which may be larger than 4 GiB.
  const uint64_t large = archive.number(end - kLocatorSize + 8, 8);
  if (!archive.has(0x06064b50, large)) {
    throw std::runtime_error("no directory at its end");
  }
  return {archive.number(large + 32, 8), archive.number(large + 48, 8)};
}

// An entry of the directory.
struct Part {
  uint64_t method;
  uint64_t crc32;
  uint64_t packed;
  uint64_t size;
  uint64_t attributes;
  uint64_t header;  // where the part begins
  std::string name;
  uint64_t next;  // where the next entry begins
};

Part ReadEntry(const Archive& archive, uint64_t at) {
  if (!archive.has(0x02014b50, at)) {
    throw std::runtime_error("the directory at its end");
  }
  const uint64_t name_size = archive.number(at + 28, 2);
  const uint64_t extra_size = archive.number(at + 30, 2);
  uint64_t extra = at + 46 + name_size;
  Part part = {archive.number(at + 10, 2),
               archive.number(at + 16, 4),
               archive.number(at + 20, 4),
               archive.number(at + 24, 4),
               archive.number(at + 38, 4),
               archive.number(at + 42, 4),
               archive.text(at + 46, name_size),
               extra + extra_size + archive.number(at + 32, 2)};
  // Numbers that 32 bits do not hold are in a field of their own.
  for (const uint64_t end = extra + extra_size; extra + 4 <= end;) {
    const uint64_t id = archive.number(extra, 2);
    const uint64_t next = extra + 4 + archive.number(extra + 2, 2);
    uint64_t field = extra + 4;
    for (uint64_t* number : {&part.size, &part.packed, &part.header}) {
      if (id != 1 || *number != 0xFFFFFFFF) continue;
      *number = archive.number(field, 8);
      field += 8;
    }
    extra = next;
  }
  return part;
}

bool IsWhole(const Archive& archive, const Part& part) {
  // torch neither packs its parts nor gives them attributes, and its reader
  // leaves out what has those of a folder.
  if (part.method != 0 || part.packed != part.size || part.attributes != 0 ||
      !archive.has(0x04034b50, part.header)) {
    return false;
  }
  const uint64_t name_size = archive.number(part.header + 26, 2);
  if (archive.text(part.header + 30, name_size) != part.name) return false;
  const uint64_t data =
      part.header + 30 + name_size + archive.number(part.header + 28, 2);
  const uint32_t sum = archive.crc32(data, part.size);
  return part.crc32 == 0 || part.crc32 == sum;
}

}  // namespace

void WriteWhole(const std::string& path, const std::vector<char>& bytes) {
  disk::Replace(path, {bytes.data(), bytes.size()});
}

std::vector<char> ReadWhole(const std::string& path) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  if (!file) {
    throw std::runtime_error("Cannot read " + path + ": " +
                             std::generic_category().message(errno));
  }
  return bytes;
}

void CheckArchive(const std::vector<char>& bytes) {
  const Archive archive(bytes);
  const Directory directory = FindDirectory(archive);
  uint64_t at = directory.at;
  for (uint64_t i = 0; i < directory.entries; ++i) {
    const Part part = ReadEntry(archive, at);
    if (!IsWhole(archive, part)) throw std::runtime_error(part.name);
    at = part.next;
  }
}

}  // namespace torch_sgmcmc
