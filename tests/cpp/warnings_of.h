// What is warned of.
#pragma once

#include <c10/util/Exception.h>

#include <string>
#include <vector>

namespace torch_sgmcmc {

// Keeps warnings while it lives.
class Warnings : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override {
    messages.push_back(warning.msg());
  }
  std::vector<std::string> messages;

 private:
  c10::WarningUtils::WarningHandlerGuard guard_{this};
};

}  // namespace torch_sgmcmc
