#include "libtorch/disk.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <filesystem>
#include <stdexcept>
#include <system_error>

namespace torch_sgmcmc::disk {

void Unwritable(const std::string& path, int reason) {
  throw std::runtime_error("Cannot write " + path + ": " +
                           std::generic_category().message(reason));
}

bool Sync(const std::string& path) {
  const int file =
      ::open(path.empty() ? "." : path.c_str(), O_RDONLY | O_CLOEXEC);
  const bool synced = file >= 0 && ::fsync(file) == 0;
  if (file >= 0) ::close(file);
  return synced;
}

bool WriteAll(int file, std::string_view bytes, int64_t at) {
  while (!bytes.empty()) {
    const ssize_t done = ::pwrite(file, bytes.data(), bytes.size(), at);
    if (done < 0 && errno != EINTR) return false;
    if (done > 0) {
      bytes.remove_prefix(static_cast<size_t>(done));
      at += done;
    }
  }
  return true;
}

void Replace(const std::string& path, std::string_view bytes) {
  static std::atomic<int> counter{0};
  const std::string partial = path + "." + std::to_string(::getpid()) + "-" +
                              std::to_string(counter++) + ".partial";
  const int file =
      ::open(partial.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file < 0) Unwritable(path);
  bool done = WriteAll(file, bytes, 0) && ::fsync(file) == 0;
  int reason = errno;
  ::close(file);
  if (done) {
    done = std::rename(partial.c_str(), path.c_str()) == 0 &&
           Sync(std::filesystem::path(path).parent_path());
    reason = errno;
  }
  if (done) return;
  ::unlink(partial.c_str());
  Unwritable(path, reason);
}

}  // namespace torch_sgmcmc::disk
