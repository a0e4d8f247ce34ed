// Which steps of a chain become draws.
//
// Note [Thinning]
// After the burn-in every `every`-th step is a candidate, and these are counted
// from 1 on. Draws are the candidates whose number is a multiple of an
// interval, which is 1 at first and doubles when there would be more than
// max_samples of them; those that are no multiples any more are dropped. What
// is stored after n candidates is so a pure function of n, for a run of any
// length evenly spaced, and a chain that is resumed keeps what an unbroken one
// does.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace torch_sgmcmc {

class DrawSchedule {
 public:
  // Of max_samples, 0 is no limit. Throws std::invalid_argument.
  DrawSchedule(int64_t burn_in, int64_t every, int64_t max_samples)
      : burn_in_(burn_in), every_(every), max_samples_(max_samples) {
    Check("burn_in", burn_in, 0);
    Check("every", every, 1);
    Check("max_samples", max_samples, 0);
  }

  // The number of the candidate that step `count` is, from 1 on; 0 for none.
  int64_t Number(int64_t count) const {
    const int64_t after = count - burn_in_;
    return after > 0 && after % every_ == 0 ? after / every_ : 0;
  }

  // The interval once there were `number` candidates.
  int64_t Interval(int64_t number) const {
    int64_t interval = 1;
    while (max_samples_ > 0 && number / interval > max_samples_) interval *= 2;
    return interval;
  }

  // Whether step `count` is stored.
  bool Keeps(int64_t count) const {
    const int64_t number = Number(count);
    return number > 0 && number % Interval(number) == 0;
  }

  // Whether draws are dropped at step `count`, before it is stored.
  bool Thins(int64_t count) const {
    const int64_t number = Number(count);
    return number > 1 && Interval(number) != Interval(number - 1);
  }

 private:
  static void Check(const std::string& name, int64_t value, int64_t low) {
    if (value < low) {
      throw std::invalid_argument("Invalid " + name + ": " +
                                  std::to_string(value) +
                                  " (must be >= " + std::to_string(low) + ")");
    }
  }

  int64_t burn_in_;
  int64_t every_;
  int64_t max_samples_;
};

}  // namespace torch_sgmcmc
