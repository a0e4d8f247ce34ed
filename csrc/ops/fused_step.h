// torch_sgmcmc::fused_step_, deferred_step_ and ewsg_step_: a sampler's step
// for all param groups on a device.
//
// All updates are checked before the first. The operator itself advances the
// step counter: no interrupt of Python can separate an update and its count.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <type_traits>
#include <vector>

#include "launch/boxed.h"
#include "launch/call.h"
#include "ops/nonfinite.h"
#include "ops/op_spec.h"

namespace torch_sgmcmc {

// The operator of a packed call; null if there is none.
inline const OpSpec* SpecOf(const PackedCall& call) {
  const auto place = static_cast<uint64_t>(call.op);
  return place < OpSpecs().size() ? OpSpecs()[place] : nullptr;
}

// The updates of a step, on one device.
class Updates {
 public:
  virtual ~Updates() = default;
  // Throws as an operator would; nothing has changed.
  virtual std::unique_ptr<PreparedUpdate> Prepare(const char* op,
                                                  const Call& call) const = 0;
};

template <class Driver, class Operators>
class UpdatesOn final : public Updates {
 public:
  std::unique_ptr<PreparedUpdate> Prepare(const char* op,
                                          const Call& call) const override {
    std::unique_ptr<PreparedUpdate> update;
    Operators::ForEach([&]<class Op>(std::type_identity<Op> /*op*/) {
      if (&call.spec == &Op::kSpec) {
        update = std::make_unique<Update<Op, Driver>>(call);
      }
    });
    if (update == nullptr) Fail(op, "packed is not a call of a sampler's step");
    return update;
  }
};

const Updates& CpuUpdates();
const Updates& CudaUpdates();

// A step with checked updates. With `device_step`, `step` is 0.
class PreparedStep {
 public:
  PreparedStep(const char* op, const Updates& device, const PackedStep& packed,
               const TensorList& params, const TensorList& grads,
               const TensorList& state, int64_t step,
               const std::optional<Tensor>& device_step = std::nullopt) {
    PackedTensors tensors(op, params, grads, state);
    calls_.reserve(packed.calls.size());  // updates refer to them
    for (const PackedCall& each : packed.calls) {
      const OpSpec* spec = SpecOf(each);
      if (spec == nullptr) Fail(op, "packed is not a call of a sampler's step");
      calls_.push_back(tensors.Next(*spec, each));
      Call& call = calls_.back();
      call.seed = packed.seed;
      call.step = step;
      call.device_step = device_step;
      call.num_chains = packed.num_chains;
    }
    tensors.CheckIsEmpty();
    for (const Call& call : calls_) {
      updates_.push_back(device.Prepare(op, call));
    }
  }

  // Makes all updates, and counts the step on the host, if given.
  void Apply(int64_t* step) {
    if (step != nullptr) ++*step;
    try {
      for (const auto& update : updates_) update->Apply();
    } catch (...) {
      if (step != nullptr) --*step;
      throw;
    }
  }

 private:
  std::vector<Call> calls_;
  std::vector<std::unique_ptr<PreparedUpdate>> updates_;
};

inline bool IsCounter(const Tensor& counter) {
  return counter.defined() && counter.scalar_type() == ScalarType::Long &&
         counter.numel() == 1;
}

// The address of a step counter on the host.
inline int64_t* HostCounter(const char* op, const Tensor& step) {
  if (IsCounter(step) && step.is_cpu()) {
    return static_cast<int64_t*>(step.data_ptr());
  }
  Fail(op, "step must be a single int64 on the CPU");
}

// The address of a counter on a GPU.
inline int64_t* DeviceCounter(const char* op, const char* name,
                              const Tensor& counter, int32_t device) {
  if (IsCounter(counter) && counter.is_cuda() &&
      counter.get_device_index() == device) {
    return static_cast<int64_t*>(counter.data_ptr());
  }
  Fail(op, name, " must be a single int64 on the device of grads");
}

// fused_step_: false, without a change, if a checked gradient is not finite.
bool FusedStepOn(const Updates& device, const auto& any_nonfinite,
                 const TensorList& params, const TensorList& grads,
                 const TensorList& state, const Tensor& packed,
                 const Tensor& step) {
  constexpr const char* kOp = "fused_step_";
  const PackedStep known = Unpacked(kOp, "packed", packed);
  int64_t* count = HostCounter(kOp, step);
  PreparedStep prepared(kOp, device, known, params, grads, state, *count);
  if (known.checks != 0 && any_nonfinite(kOp, grads)) return false;
  prepared.Apply(count);
  return true;
}

// The log ratio of a proposed minibatch to the current one (operators.cpp).
double LogRatioOf(const Call& call);

}  // namespace torch_sgmcmc
