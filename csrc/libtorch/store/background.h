// Work that is done beside training, in order.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

namespace torch_sgmcmc {

// A thread that does jobs in order. A job that fails stays the first. Its
// exception is thrown by whatever is called next, and by the call after that it
// is tried again.
class Background {
 public:
  Background();
  // Once the job that it is at is done; gives up the others.
  ~Background();
  Background(const Background&) = delete;
  Background(Background&&) = delete;
  Background& operator=(const Background&) = delete;
  Background& operator=(Background&&) = delete;

  void Put(std::function<void()> job);
  // Waits until there are fewer jobs.
  void WaitForFewer(size_t count);
  void Flush() { WaitForFewer(1); }
  // Throws what a job has thrown.
  void Check();
  size_t size() const;

 private:
  template <typename Ready>
  void Wait(Ready ready);
  void Run();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  std::exception_ptr error_;
  bool pauses_ = false;  // from when a job fails until it is tried again
  bool ends_ = false;
  std::thread thread_;
};

}  // namespace torch_sgmcmc
