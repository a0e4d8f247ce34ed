// A folder of results belongs to one run at a time, in either language.
#pragma once

#include <filesystem>

namespace bnn {

/// Makes a folder and keeps other processes' runs out of it as long as this
/// lives. The lock ends with the process, however that ends; its file stays.
class FolderLock {
 public:
  /// Throws std::runtime_error if another process has the folder.
  explicit FolderLock(const std::filesystem::path& folder);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  int file_;
};

}  // namespace bnn
