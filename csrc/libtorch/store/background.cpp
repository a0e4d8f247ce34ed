#include "libtorch/store/background.h"

#include <utility>

namespace torch_sgmcmc {

Background::Background() : thread_([this] { Run(); }) {}

Background::~Background() {
  {
    const std::lock_guard guard(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Background::Put(std::function<void()> job) {
  {
    const std::lock_guard guard(mutex_);
    jobs_.push_back(std::move(job));
  }
  changed_.notify_all();
}

template <typename Ready>
void Background::Wait(Ready ready) {
  std::unique_lock lock(mutex_);
  if (pauses_ && !error_) {  // it was thrown
    pauses_ = false;
    changed_.notify_all();
  }
  changed_.wait(lock, [&] { return error_ || ready(); });
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void Background::WaitForFewer(size_t count) {
  Wait([&] { return jobs_.size() < count; });
}

void Background::Check() {
  Wait([] { return true; });
}

size_t Background::size() const {
  const std::lock_guard guard(mutex_);
  return jobs_.size();
}

void Background::Run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return ends_ || (!jobs_.empty() && !pauses_); });
    if (ends_) return;
    // Only this thread takes jobs away, and a deque's stay where they are.
    const std::function<void()>& job = jobs_.front();
    lock.unlock();
    std::exception_ptr error;
    try {
      job();
    } catch (const std::exception&) {
      error = std::current_exception();
    }
    lock.lock();
    if (error) {
      error_ = error;
      pauses_ = true;
    } else {
      jobs_.pop_front();
    }
    changed_.notify_all();
  }
}

}  // namespace torch_sgmcmc
