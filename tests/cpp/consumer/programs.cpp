// Programs that tests run, as one that goes by the name by which it is called:
// LibTorch's headers take most of a compilation.
#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>
#include <torch_sgmcmc/torch_sgmcmc.h>

#include <cmath>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <iomanip>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

// What they include is read already.
namespace chain {
#include "chain.cpp"
}
#ifdef DOCUMENTS
namespace documents {
#include DOCUMENTS
}
#endif
namespace line {
#include "line.cpp"
}
namespace resumable {
#include "../../../examples/cpp/resumable.cpp"
}
namespace store {
#include "store.cpp"
}

int main(int argc, char** argv) {
  const std::string name = std::filesystem::path(argv[0]).filename();
  if (name == "chain") return chain::main();
#ifdef DOCUMENTS
  if (name == "documents") return documents::main();
#endif
  if (name == "line") return line::main();
  if (name == "resumable") return resumable::main(argc, argv);
  if (name == "store") return store::main(argc, argv);
  std::cerr << "no program " << name << '\n';
  return 1;
}
