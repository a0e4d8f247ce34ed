// Files that are on the disk, all of them or nothing.
#pragma once

#include <fcntl.h>

#include <cerrno>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace torch_sgmcmc::disk {

// These throw std::runtime_error: "Cannot read PATH: reason" or "Cannot write".
[[noreturn]] void Unreadable(const std::string& path,
                             const std::string& reason);
[[noreturn]] void Unwritable(const std::string& path, int reason = errno);

// Closes a file; its lock ends even if a forked process has the file, too.
struct Close {
  void operator()(const int* file) const;
};
using OpenFile = std::unique_ptr<const int, Close>;

// These return null or false if they fail; errno has the reason.
OpenFile Open(const std::string& path, int flags = O_RDWR | O_CREAT);
bool Sync(const std::string& path);

// True of a folder, a device and the like, and a FIFO, which would wait.
bool IsSpecial(const std::string& path);

// Returns a file's content, nothing if it is missing.
std::optional<std::string> Read(const std::string& path);

// Replaces what an open file has from `at` on, and waits until it is on the
// disk. Throws std::runtime_error, and the file then ends at `at`.
void Append(int file, const std::string& path, std::string_view bytes,
            int64_t at);

// Writes a file, all of it or nothing, and waits until it and its name are on
// the disk. A link stays, and an older file's mode. Throws std::runtime_error,
// and an older file is as before.
void Replace(const std::string& path, std::string_view bytes);

}  // namespace torch_sgmcmc::disk
