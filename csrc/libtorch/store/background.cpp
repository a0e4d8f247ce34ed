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

void Background::WaitForFewer(size_t count) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return error_ || jobs_.size() < count; });
  Throw(lock);
}

void Background::Check() {
  std::unique_lock lock(mutex_);
  Throw(lock);
}

size_t Background::size() const {
  const std::lock_guard guard(mutex_);
  return jobs_.size();
}

void Background::Throw(std::unique_lock<std::mutex>& lock) {
  if (!error_) return;
  const std::exception_ptr error = std::exchange(error_, nullptr);
  lock.unlock();
  changed_.notify_all();
  std::rethrow_exception(error);
}

void Background::Run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return ends_ || (!jobs_.empty() && !error_); });
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
    error_ = error;
    if (!error) jobs_.pop_front();
    changed_.notify_all();
  }
}

}  // namespace torch_sgmcmc
