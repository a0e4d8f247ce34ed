// Files that are on the disk, all of them or nothing.
#pragma once

#include <cerrno>
#include <cstdint>
#include <string>
#include <string_view>

namespace torch_sgmcmc::disk {

// Throws std::runtime_error "Cannot write PATH: reason".
[[noreturn]] void Unwritable(const std::string& path, int reason = errno);

// These return whether they worked; errno has the reason.
bool Sync(const std::string& path);
bool WriteAll(int file, std::string_view bytes, int64_t at);

// Writes a file, all of it or nothing, and waits until it and its name are on
// the disk. Throws std::runtime_error, and an older file is as before.
void Replace(const std::string& path, std::string_view bytes);

}  // namespace torch_sgmcmc::disk
