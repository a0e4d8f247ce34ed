// Whether samplers share their noise, as two with one seed do.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

namespace torch_sgmcmc {

// Of one sampler. Nothing here is destroyed with the program: samplers may live
// as long as it does.
class Turns {
 public:
  Turns() = default;
  Turns(const Turns&) = delete;
  Turns(Turns&&) = delete;
  Turns& operator=(const Turns&) = delete;
  Turns& operator=(Turns&&) = delete;
  ~Turns();

  // Takes the next step with this seed. Returns what there is to warn of, once:
  // another sampler with the seed makes steps in turns with this one; or, if
  // this is its first step, an earlier one has made steps with the seed on this
  // parameter, and has not begun where it is now. Any thread may call it.
  std::string take(int64_t seed,
                   const char* name,
                   const at::Tensor& param,
                   bool is_first);

 private:
  struct Seat;
  struct Registry;
  static Registry& registry();
  std::string sit(int64_t seed,
                  const char* name,
                  const at::Tensor& param,
                  bool is_first);

  std::shared_ptr<Seat> seat_;
  bool has_sat_ = false;
};

}  // namespace torch_sgmcmc
