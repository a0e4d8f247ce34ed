#include "bnn/folder_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>

namespace bnn {

namespace fs = std::filesystem;

FolderLock::FolderLock(const fs::path& folder) {
  const fs::path path = folder / ".lock";
  std::error_code problem;
  fs::create_directories(folder, problem);
  file_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
  if (file_ < 0) {
    throw std::runtime_error("Cannot write " + path.string() + ": " +
                             std::generic_category().message(errno));
  }
  if (::flock(file_, LOCK_EX | LOCK_NB) != 0) {
    const int reason = errno;
    ::close(file_);
    if (reason == EWOULDBLOCK) {
      throw std::runtime_error("Another run writes to " + folder.string() +
                               ".\nWait until it ends or choose another "
                               "--out.");
    }
    throw std::runtime_error("Cannot lock " + path.string() + ": " +
                             std::generic_category().message(reason));
  }
}

FolderLock::~FolderLock() { ::close(file_); }

}  // namespace bnn
