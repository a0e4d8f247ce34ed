#include "store/disk.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace torch_sgmcmc::disk {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void Fail(const std::string& path,
                       int reason,
                       const char* what = "Cannot write ") {
  throw std::runtime_error(what + path + ": " +
                           std::generic_category().message(reason));
}

// These return whether they worked; errno has the reason.

bool WriteAll(int file, const Piece& piece) {
  const auto* bytes = static_cast<const char*>(piece.bytes);
  for (size_t done = 0; done < piece.size;) {
    const ssize_t written = ::write(file, bytes + done, piece.size - done);
    if (written < 0 && errno != EINTR) return false;
    if (written > 0) done += static_cast<size_t>(written);
  }
  return true;
}

// Closes the file in any case.
bool SyncAndClose(int file) {
  const bool synced = ::fsync(file) == 0;
  const int reason = errno;
  const bool closed = ::close(file) == 0;
  if (!synced) errno = reason;
  return synced && closed;
}

// Whether a file's writes go by the page cache, where the file system can:
// copies into its pages take most of a large draw's time, and drive out what
// others read again.
bool SetDirect(int file, bool direct) {
  const int flags = ::fcntl(file, F_GETFL);
  return flags >= 0 &&
         ::fcntl(
             file, F_SETFL, direct ? flags | O_DIRECT : flags & ~O_DIRECT) == 0;
}

// Of these many bytes, and from memory at such multiples, direct writes are.
constexpr size_t kBlock = size_t{1} << 20;
constexpr size_t kAlignment = 4096;

// Pieces as blocks in memory of its own, as direct writes need them; what is
// left goes the usual way, as all does where they are not possible.
bool WriteBlocks(int file, const std::vector<Piece>& pieces) {
  const std::unique_ptr<char, decltype(&std::free)> block(
      static_cast<char*>(std::aligned_alloc(kAlignment, kBlock)), &std::free);
  if (!block) {
    errno = ENOMEM;
    return false;
  }
  bool direct = SetDirect(file, true);
  size_t filled = 0;
  for (const Piece& piece : pieces) {
    const auto* bytes = static_cast<const char*>(piece.bytes);
    for (size_t done = 0; done < piece.size;) {
      const size_t count = std::min(piece.size - done, kBlock - filled);
      std::memcpy(block.get() + filled, bytes + done, count);
      done += count;
      filled += count;
      if (filled < kBlock) continue;
      size_t written = 0;
      if (direct) {
        const ssize_t now = ::write(file, block.get(), kBlock);
        if (now < 0 && errno != EINVAL && errno != EINTR) return false;
        written = now > 0 ? static_cast<size_t>(now) : 0;
        // The rest of a block that was not written whole has another alignment.
        if (written < kBlock) {
          direct = false;
          if (!SetDirect(file, false)) return false;
        }
      }
      if (!WriteAll(file, {block.get() + written, kBlock - written})) {
        return false;
      }
      filled = 0;
    }
  }
  return (!direct || SetDirect(file, false)) &&
         WriteAll(file, {block.get(), filled});
}

bool WritePieces(int file, const std::vector<Piece>& pieces) {
  size_t size = 0;
  for (const Piece& piece : pieces) size += piece.size;
  if (size >= kBlock) return WriteBlocks(file, pieces);
  return std::ranges::all_of(
      pieces, [&](const Piece& piece) { return WriteAll(file, piece); });
}

bool WriteSynced(const std::string& path, const std::vector<Piece>& pieces) {
  const int file =
      ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file < 0) return false;
  if (!WritePieces(file, pieces)) {
    const int reason = errno;
    ::close(file);
    errno = reason;
    return false;
  }
  return SyncAndClose(file);
}

bool SyncFolder(const std::string& folder) {
  const int file = ::open(folder.empty() ? "." : folder.c_str(),
                          O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  return file >= 0 && SyncAndClose(file);
}

// The files that this process has locked.
std::mutex locked_mutex;
std::set<std::pair<uint64_t, uint64_t>>& Locked() {
  static auto* const files = new std::set<std::pair<uint64_t, uint64_t>>;
  return *files;
}

}  // namespace

void WriteWhole(const std::string& path,
                const std::vector<Piece>& pieces,
                const char* unfinished) {
  const std::string partial = path + unfinished;
  if (WriteSynced(partial, pieces) &&
      std::rename(partial.c_str(), path.c_str()) == 0 &&
      SyncFolder(fs::path(path).parent_path())) {
    return;
  }
  const int reason = errno;
  std::remove(partial.c_str());
  Fail(path, reason);
}

void MakeFolder(const std::string& path) {
  const fs::path whole(path);
  fs::path made;
  for (const fs::path& part : whole) {
    const fs::path parent = made;
    made /= part;
    if (made.filename().empty() || ::mkdir(made.c_str(), 0777) == 0) {
      if (!made.filename().empty() && !SyncFolder(parent)) Fail(made, errno);
      continue;
    }
    // Where it may not be written to, a folder that is there will do.
    const int reason = errno;
    std::error_code ignored;
    if (!fs::is_directory(made, ignored)) Fail(made, reason);
  }
}

void Delete(const std::string& folder, const std::vector<std::string>& names) {
  if (names.empty()) return;
  for (const std::string& name : names) {
    const std::string path = fs::path(folder) / name;
    if (::unlink(path.c_str()) != 0 && errno != ENOENT) Fail(path, errno);
  }
  if (!SyncFolder(folder)) Fail(folder, errno);
}

std::string Read(const std::string& path) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(file)), {});
  if (!file) Fail(path, errno, "Cannot read ");
  return bytes;
}

std::vector<std::string> NamesIn(const std::string& folder) {
  std::error_code error;
  std::vector<std::string> names;
  for (fs::directory_iterator at(folder, error), end; !error && at != end;
       at.increment(error)) {
    names.push_back(at->path().filename());
  }
  if (error) Fail(folder, error.value(), "Cannot read ");
  return names;
}

Tail::Tail(const std::string& path)
    : path_(path), file_(::open(path.c_str(), O_WRONLY | O_CLOEXEC)) {
  if (file_ >= 0) return;
  file_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
  if (file_ < 0) Fail(path, errno);
  if (SyncFolder(fs::path(path).parent_path())) return;
  const int reason = errno;
  ::close(file_);
  ::unlink(path.c_str());
  Fail(path, reason);
}

Tail::~Tail() {
  if (file_ >= 0) ::close(file_);
}

Tail::Tail(Tail&& other) noexcept
    : path_(std::move(other.path_)), file_(std::exchange(other.file_, -1)) {}

Tail& Tail::operator=(Tail&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(file_, other.file_);
  return *this;
}

void Tail::Append(uint64_t size, const std::vector<Piece>& pieces) {
  if (::lseek(file_, static_cast<off_t>(size), SEEK_SET) >= 0 &&
      WritePieces(file_, pieces) && ::fsync(file_) == 0) {
    return;
  }
  const int reason = errno;
  // What cannot be cut off is torn, and no part of an index.
  if (::ftruncate(file_, static_cast<off_t>(size)) != 0) errno = reason;
  Fail(path_, reason);
}

void Tail::Cut(uint64_t size) {
  if (::ftruncate(file_, static_cast<off_t>(size)) != 0 ||
      ::fsync(file_) != 0) {
    Fail(path_, errno);
  }
}

Lock::Lock(const std::string& path, const std::string& place) {
  const std::lock_guard guard(locked_mutex);
  // To close a file, whichever way it was opened, ends the process's locks of
  // it: so it is not opened where this process has one.
  const auto key_of = [](const struct stat& status) {
    return std::pair<uint64_t, uint64_t>(status.st_dev, status.st_ino);
  };
  struct stat status = {};
  if (::stat(path.c_str(), &status) == 0 && Locked().contains(key_of(status))) {
    throw std::runtime_error("Cannot write to " + place +
                             ": this process writes to it already");
  }
  file_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (file_ < 0) Fail(path, errno);
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  if (::fcntl(file_, F_SETLK, &lock) != 0) {
    const int reason = errno;
    const bool asked = ::fcntl(file_, F_GETLK, &lock) == 0;
    ::close(file_);
    if (reason != EACCES && reason != EAGAIN) Fail(path, reason);
    throw std::runtime_error("Cannot write to " + place + ": process " +
                             (asked && lock.l_type != F_UNLCK
                                  ? std::to_string(lock.l_pid) + " writes"
                                  : "another one writes") +
                             " to it");
  }
  if (::fstat(file_, &status) != 0) {
    const int reason = errno;
    ::close(file_);
    Fail(path, reason);
  }
  key_ = key_of(status);
  Locked().insert(key_);
}

Lock::~Lock() {
  const std::lock_guard guard(locked_mutex);
  Locked().erase(key_);
  ::close(file_);
}

}  // namespace torch_sgmcmc::disk
