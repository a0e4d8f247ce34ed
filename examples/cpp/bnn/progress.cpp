#include "bnn/progress.h"

#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <utility>

namespace bnn {
namespace {

std::string Duration(double seconds) {
  const auto all = std::llround(seconds);
  char text[32];
  if (all < 3600) {
    std::snprintf(text, sizeof text, "%lld:%02lld", all / 60, all % 60);
  } else {
    std::snprintf(text,
                  sizeof text,
                  "%lld:%02lld:%02lld",
                  all / 3600,
                  all / 60 % 60,
                  all % 60);
  }
  return text;
}

}  // namespace

Progress::Progress(std::string name, int64_t done, int64_t total)
    : name_(std::move(name)),
      first_(done),
      total_(total),
      terminal_(isatty(STDERR_FILENO) != 0),
      start_(std::chrono::steady_clock::now()) {}

Progress::~Progress() {
  if (dirty_) std::fputc('\n', stderr);
}

void Progress::show(int64_t done, double error) {
  const bool last = done >= total_;
  if (!terminal_ && !last && done * 10 / total_ == (done - 1) * 10 / total_) {
    return;
  }
  char line[160];
  int length = std::snprintf(line,
                             sizeof line,
                             "%s: epoch %lld of %lld, error %.2f %%",
                             name_.c_str(),
                             static_cast<long long>(done),
                             static_cast<long long>(total_),
                             100 * error);
  const std::chrono::duration<double> passed =
      std::chrono::steady_clock::now() - start_;
  if (done > first_ && length > 0) {
    const double each = passed.count() / static_cast<double>(done - first_);
    const double left = each * static_cast<double>(total_ - done);
    std::snprintf(line + length,
                  sizeof line - static_cast<size_t>(length),
                  ", %.2f s an epoch, %s left",
                  each,
                  Duration(left).c_str());
  }
  if (terminal_) {
    std::fprintf(stderr, "\r\033[K%s", line);
    dirty_ = true;
  } else {
    std::fprintf(stderr, "%s\n", line);
  }
}

}  // namespace bnn
