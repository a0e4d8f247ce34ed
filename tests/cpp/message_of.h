// What a call complains of.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>

namespace torch_sgmcmc {

// The message of the exception that a call throws, which must be of this type;
// "no error" if it throws none.
template <class Error = std::exception>
std::string MessageOf(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace torch_sgmcmc
