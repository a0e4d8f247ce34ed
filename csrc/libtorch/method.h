// Calls of operators with a spec: torch_sgmcmc/core/step_plan.py in C++.
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

const OpSpec& OpSpecNamed(std::string_view op);

// The keys of a spec's state, the master's last.
std::vector<std::string> KeysOf(const OpSpec& spec);

// An update's numbers.
struct UpdateNumbers {
  std::array<double, kMaxArguments> own = {};
  CommonNumbers common;
};

// An operator with a spec, called with a class's hyperparameters.
class Method {
 public:
  Method(const char* op, const OptionValues& options);

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
