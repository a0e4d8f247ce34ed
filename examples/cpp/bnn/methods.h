// The four methods of the SGHMC paper's figure 4, and their step sizes.
#pragma once

#include <string>
#include <vector>

#include "bnn/config.h"

namespace bnn {

struct Method {
  std::string name;
  std::string label;
  /// The tuned settings. `precision` is the regulariser λ of the point
  /// estimates; the samplers start from λ = 1 and draw it.
  Settings settings;
};

/// All methods. Their step sizes, friction and weight decay were chosen on the
/// validation set, by the Python example's --tune.
const std::vector<Method>& Methods();

/// The method of a name; throws std::out_of_range if there is none.
const Method& FindMethod(const std::string& name);

}  // namespace bnn
