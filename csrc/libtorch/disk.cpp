#include "libtorch/disk.h"

#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <system_error>

namespace torch_sgmcmc::disk {
namespace {

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

}  // namespace

void Unreadable(const std::string& path, const std::string& reason) {
  throw std::runtime_error("Cannot read " + path + ": " + reason);
}

void Unwritable(const std::string& path, int reason) {
  throw std::runtime_error("Cannot write " + path + ": " +
                           std::generic_category().message(reason));
}

void Close::operator()(const int* file) const {
  ::flock(*file, LOCK_UN);
  ::close(*file);
  delete file;
}

OpenFile Open(const std::string& path, int flags) {
  const int file = ::open(path.c_str(), flags | O_CLOEXEC, 0666);
  return OpenFile(file < 0 ? nullptr : new int(file));
}

bool Sync(const std::string& path) {
  const OpenFile file = Open(path.empty() ? "." : path, O_RDONLY);
  return file && ::fsync(*file) == 0;
}

void Append(int file, const std::string& path, std::string_view bytes,
            int64_t at) {
  if (::ftruncate(file, at) == 0 && WriteAll(file, bytes, at) &&
      ::fsync(file) == 0) {
    return;
  }
  const int reason = errno;
  [[maybe_unused]] const int cut = ::ftruncate(file, at);
  Unwritable(path, reason);
}

bool IsSpecial(const std::string& path) {
  struct stat status = {};
  return ::stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode);
}

std::optional<std::string> Read(const std::string& path) {
  if (IsSpecial(path)) Unreadable(path, "it is not a regular file");
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file && errno == ENOENT) return std::nullopt;
  std::string bytes((std::istreambuf_iterator<char>(file)), {});
  if (!file) Unreadable(path, std::generic_category().message(errno));
  return bytes;
}

void Replace(const std::string& path, std::string_view bytes) {
  static std::atomic<int> counter{0};
  // A link may lead to a file that does not exist yet.
  constexpr int kMostLinks = 40;
  std::error_code error;
  std::filesystem::path real = path;
  for (int i = 0; i < kMostLinks && is_symlink(real, error); ++i) {
    real = real.parent_path() / read_symlink(real, error);
  }
  const std::string target = real.string();
  if (IsSpecial(target)) {
    throw std::runtime_error("Cannot write " + path +
                             ": it is not a regular file");
  }
  const std::string partial = target + "." + std::to_string(::getpid()) + "-" +
                              std::to_string(counter++) + ".partial";
  const OpenFile file = Open(partial, O_WRONLY | O_CREAT | O_TRUNC);
  struct stat older = {};
  const bool is_new = ::stat(target.c_str(), &older) != 0;
  if (file && (is_new || ::fchmod(*file, older.st_mode & 07777) == 0) &&
      WriteAll(*file, bytes, 0) && ::fsync(*file) == 0 &&
      std::rename(partial.c_str(), target.c_str()) == 0 &&
      Sync(real.parent_path())) {
    return;
  }
  const int reason = errno;
  ::unlink(partial.c_str());
  Unwritable(path, reason);
}

}  // namespace torch_sgmcmc::disk
