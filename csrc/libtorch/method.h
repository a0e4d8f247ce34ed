// What a step makes of the spec of an operator that updates parameters:
// torch_sgmcmc/_impl/step_plan.py in C++.
#pragma once

#include <array>
#include <cstddef>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "libtorch/tensor_lists.h"
#include "ops/op_spec.h"

namespace torch_sgmcmc {

// The spec of the operator with this name.
const OpSpec& OpSpecNamed(std::string_view op);

// The keys of what a spec keeps of a parameter, the master's last.
std::vector<std::string> KeysOf(const OpSpec& spec);

// What an update's operator takes besides what its lists say.
struct UpdateNumbers {
  std::array<double, kMaxArguments> own = {};  // of its spec
  CommonNumbers common;
};

// An operator with a spec, called with the hyperparameters of one class.
class Method {
 public:
  Method(const char* op, const OptionValues& options);

  // As it was named.
  const char* op() const { return op_; }
  const OpSpec& spec() const { return spec_; }

  void update(
      const TensorLists& lists,
      std::initializer_list<std::pair<std::string_view, double>> instead) const;

 private:
  const char* op_;
  const OpSpec& spec_;
  void (*call_)(const TensorLists& lists,
                const UpdateNumbers& numbers) = nullptr;
  // Places of the spec's numbers in the options, which may lack some.
  std::vector<std::optional<size_t>> places_;
  std::vector<double TensorLists::*> from_lists_;  // or null
  std::vector<size_t> common_places_;              // of kCommonNumbers
};

}  // namespace torch_sgmcmc
