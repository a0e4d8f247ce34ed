// How often something was so, of what samplers have counted.
#pragma once

#include <limits>

namespace torch_sgmcmc {

// part / whole; NaN before there is any.
inline double Ratio(double part, double whole) {
  return whole > 0 ? part / whole : std::numeric_limits<double>::quiet_NaN();
}

}  // namespace torch_sgmcmc
