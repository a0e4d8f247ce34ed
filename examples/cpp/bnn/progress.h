// A progress line on stderr: one that is rewritten on a terminal, and ten lines
// a run in a file.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace bnn {

class Progress {
 public:
  /// A run of which `done` epochs of `total` were made earlier.
  Progress(std::string name, int64_t done, int64_t total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Shows how far the run is, and its test error.
  void show(int64_t done, double error);

 private:
  std::string name_;
  int64_t first_;
  int64_t total_;
  bool terminal_;
  bool dirty_ = false;  // the terminal's line is not ended
  std::chrono::steady_clock::time_point start_;
};

}  // namespace bnn
