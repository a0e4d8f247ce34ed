// What a sampler counts, on the host or on a device.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <utility>

namespace torch_sgmcmc {

/// A count; on a device it is an int64 scalar, for which nobody has waited yet.
class Count {
 public:
  Count() = default;
  // cppcheck-suppress noExplicitConstructor
  // NOLINTNEXTLINE(google-explicit-constructor): a number is one.
  Count(int64_t host) : host_(host) {}
  explicit Count(at::Tensor device) : device_(std::move(device)) {}

  bool is_on_device() const { return device_.defined(); }
  /// Of one on the host, and otherwise 0.
  int64_t host() const { return host_; }
  /// Undefined on the host.
  const at::Tensor& device() const { return device_; }
  /// Waits for the device.
  int64_t get() const {
    return is_on_device() ? device_.item<int64_t>() : host_;
  }
  /// In place, on the device too.
  void add(int64_t more) {
    if (is_on_device()) {
      device_.add_(more);
    } else {
      host_ += more;
    }
  }
  /// For a state dict, which shares the scalar.
  c10::IValue saved() const {
    return is_on_device() ? c10::IValue(device_) : c10::IValue(host_);
  }

  bool operator==(const Count& other) const { return get() == other.get(); }

 private:
  int64_t host_ = 0;
  at::Tensor device_;
};

}  // namespace torch_sgmcmc
