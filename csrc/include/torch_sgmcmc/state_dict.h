// State dicts and the files that Python and C++ exchange.
//
// The format is that of Python's torch.save for nested dicts, lists, tensors,
// numbers and strings. A sampler's state dict is the same in both languages:
//
//   torch_sgmcmc::save({{"model", torch_sgmcmc::state_dict(*net)},
//                       {"sampler", sampler.state_dict()}}, "chain.pt");
//
//   checkpoint = torch.load("chain.pt")
//   model.load_state_dict(checkpoint["model"])
//   sampler.load_state_dict(checkpoint["sampler"])
//
// and back (dict() because LibTorch cannot read Python's OrderedDict):
//
//   torch.save({"model": dict(model.state_dict()),
//               "sampler": sampler.state_dict()}, "chain.pt")
//
//   auto checkpoint = torch_sgmcmc::load("chain.pt");
//   torch_sgmcmc::load_state_dict(*net, checkpoint.at("model"));
//   sampler.load_state_dict(checkpoint.at("sampler"));
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

#include "torch_sgmcmc/export.h"

namespace torch::nn {
class Module;
template <typename Contained>
class ModuleHolder;
}  // namespace torch::nn

namespace torch_sgmcmc {

/// A dict with string or int keys and any values that torch can save. Copies
/// share their contents, as IValues do.
class TORCH_SGMCMC_API StateDict {
 public:
  StateDict();
  StateDict(std::initializer_list<std::pair<std::string, c10::IValue>> entries);

  /// Throws std::invalid_argument if the IValue is not a dict.
  // Converts like an IValue.
  // cppcheck-suppress noExplicitConstructor
  // NOLINTNEXTLINE(google-explicit-constructor)
  StateDict(const c10::IValue& value);

  // As do IValues. NOLINTNEXTLINE(google-explicit-constructor)
  operator c10::IValue() const;

  bool contains(const std::string& key) const;
  bool contains(int64_t key) const;

  /// Throws std::invalid_argument if the key is missing.
  c10::IValue at(const std::string& key) const;
  c10::IValue at(int64_t key) const;

  void set(const std::string& key, const c10::IValue& value);
  void set(int64_t key, const c10::IValue& value);

  size_t size() const;

  /// The entries, in the order in which they were set.
  c10::impl::GenericDict entries() const { return entries_; }

 private:
  c10::impl::GenericDict entries_;
};

/// Writes a file for load() and Python's torch.load (weights_only=True),
/// completely or not at all: until the new file is on the disk, an older one
/// stays. Throws std::runtime_error if it cannot be written.
TORCH_SGMCMC_API void save(const StateDict& dict, const std::string& path);

/// Reads a file of save() or Python's torch.save; all tensors are then on one
/// device. Compares the file's checksums. Throws std::runtime_error if
/// the file is missing, damaged, not torch's, or not a dict.
TORCH_SGMCMC_API StateDict load(const std::string& path,
                                c10::Device device = c10::kCPU);

/// The parameters and buffers of a module by name, as in Python.
TORCH_SGMCMC_API StateDict state_dict(const torch::nn::Module& module);
template <typename Module>
StateDict state_dict(const torch::nn::ModuleHolder<Module>& net) {
  return state_dict(*net);
}

/// Copies parameters and buffers into a module. Throws std::invalid_argument,
/// and copies nothing, if a name is missing or unknown, or a shape differs.
TORCH_SGMCMC_API void load_state_dict(torch::nn::Module& module,
                                      const StateDict& dict);
template <typename Module>
void load_state_dict(torch::nn::ModuleHolder<Module>& net,
                     const StateDict& dict) {
  load_state_dict(*net, dict);
}

}  // namespace torch_sgmcmc
