// Files that are there after a power cut, and folders with one writer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace torch_sgmcmc::disk {

struct Piece {
  const void* bytes;
  size_t size;
};

// All of these throw std::runtime_error, "Cannot write PATH: reason".

// Writes a file, all of it or nothing: beside its final name, synced, renamed,
// and the folder synced. `unfinished` is what its name ends with until then.
void WriteWhole(const std::string& path,
                const std::vector<Piece>& pieces,
                const char* unfinished = ".unfinished");

// Makes a folder, with those that it is in, and syncs where they are named.
void MakeFolder(const std::string& path);

// Deletes files that may not be there, and syncs the folder.
void Delete(const std::string& folder, const std::vector<std::string>& names);

std::string Read(const std::string& path);
std::vector<std::string> NamesIn(const std::string& folder);

// The end of a file that grows.
class Tail {
 public:
  Tail() = default;
  // The file is made if need be.
  explicit Tail(const std::string& path);
  ~Tail();
  Tail(Tail&& other) noexcept;
  Tail& operator=(Tail&& other) noexcept;
  Tail(const Tail&) = delete;
  Tail& operator=(const Tail&) = delete;

  // Appends after `size` bytes, and syncs. If it throws the file is as before.
  void Append(uint64_t size, const std::vector<Piece>& pieces);
  // Cuts off what comes after, and syncs.
  void Cut(uint64_t size);

 private:
  std::string path_;
  int file_ = -1;
};

// Keeps other writers away, of this process and of others, until it ends or
// the process does. (POSIX's locks, unlike flock's, do not live on in children
// that a process has forked.)
class Lock {
 public:
  // The file is made if need be. Throws std::runtime_error "Cannot write to
  // PLACE: ..." that names the process that has it.
  Lock(const std::string& path, const std::string& place);
  ~Lock();
  Lock(const Lock&) = delete;
  Lock(Lock&&) = delete;
  Lock& operator=(const Lock&) = delete;
  Lock& operator=(Lock&&) = delete;

 private:
  int file_ = -1;
  std::pair<uint64_t, uint64_t> key_;
};

}  // namespace torch_sgmcmc::disk
