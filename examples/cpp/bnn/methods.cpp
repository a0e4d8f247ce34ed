#include "bnn/methods.h"

#include <stdexcept>

namespace bnn {

const std::vector<Method>& Methods() {
  static const std::vector<Method> methods = {
      {"sgd", "SGD", {{"lr", 1.0}, {"precision", 3.0}}},
      {"sgdm",
       "SGD with momentum",
       {{"lr", 0.3}, {"momentum", 0.9}, {"precision", 3.0}}},
      {"sgld", "SGLD", {{"lr", 4.0}}},
      {"sghmc", "SGHMC", {{"lr", 0.1}, {"momentum", 0.99}}},
  };
  return methods;
}

const Method& FindMethod(const std::string& name) {
  for (const Method& method : Methods()) {
    if (method.name == name) return method;
  }
  throw std::out_of_range("There is no method " + name);
}

}  // namespace bnn
