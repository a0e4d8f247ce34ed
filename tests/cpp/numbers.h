// Numbers by their names, of which coefficients are made.
#pragma once

#include <cstdint>
#include <map>
#include <string_view>
#include <utility>

namespace torch_sgmcmc {

class Numbers {
 public:
  using Values = std::map<std::string_view, double>;

  explicit Numbers(Values values) : values_(std::move(values)) {
    values_.insert(
        {{"momentum_scale", 1}, {"thermostat_scale", 1}, {"prior_mean", 0}});
  }
  // The same with some numbers changed.
  Numbers With(Values others) const {
    others.insert(values_.begin(), values_.end());
    return Numbers(others);
  }

  double operator()(std::string_view name) const { return values_.at(name); }
  int64_t integer(std::string_view name) const {
    return static_cast<int64_t>(values_.at(name));
  }

 private:
  Values values_;
};

}  // namespace torch_sgmcmc
