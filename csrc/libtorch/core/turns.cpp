#include "libtorch/core/turns.h"

#include <ATen/ATen.h>

#include <atomic>
#include <cstddef>
#include <map>
#include <mutex>
#include <utility>

#include "host/crc32.h"

namespace torch_sgmcmc {

// Where the samplers with one seed take turns.
struct Turns::Seat {
  int64_t seed = 0;
  std::atomic<const Turns*> last = nullptr;  // null once it is destroyed
  const char* name = "";                     // of its class
  bool warned = false;
};

struct Turns::Registry {
  // Where a sampler of an earlier time began.
  struct Begin {
    c10::weak_intrusive_ptr<c10::TensorImpl> param;
    uint32_t checksum;  // cppcheck-suppress unusedStructMember
  };

  std::mutex mutex;
  std::map<int64_t, std::weak_ptr<Seat>> seats;
  std::map<std::pair<int64_t, const void*>, Begin> begins;
  size_t sweep_at = 64;

  // Forgets what there is no more, each time there is twice as much.
  void sweep() {
    if (seats.size() + begins.size() < sweep_at) return;
    std::erase_if(seats, [](const auto& s) { return s.second.expired(); });
    std::erase_if(begins,
                  [](const auto& b) { return b.second.param.expired(); });
    sweep_at = 64 + 2 * (seats.size() + begins.size());
  }
};

namespace {

uint32_t ChecksumOf(const at::Tensor& param) {
  const at::Tensor values = param.detach().cpu().contiguous();
  return Crc32(values.const_data_ptr(), values.nbytes());
}

}  // namespace

// Never destroyed: threads and static samplers may still step.
Turns::Registry& Turns::registry() {
  static auto* const registry = new Registry;
  return *registry;
}

Turns::~Turns() {
  if (seat_ == nullptr) return;
  const Turns* self = this;
  seat_->last.compare_exchange_strong(self, nullptr);
}

std::string Turns::take(int64_t seed,
                        const char* name,
                        const at::Tensor& param,
                        bool is_first) {
  if (seat_ != nullptr && seat_->seed == seed &&
      seat_->last.load(std::memory_order_relaxed) == this) {
    return "";
  }
  return sit(seed, name, param, is_first);
}

std::string Turns::sit(int64_t seed,
                       const char* name,
                       const at::Tensor& param,
                       bool is_first) {
  Registry& all = registry();
  const std::scoped_lock lock(all.mutex);
  if (seat_ == nullptr || seat_->seed != seed) {
    has_sat_ = false;
    std::weak_ptr<Seat>& place = all.seats[seed];
    seat_ = place.lock();
    if (seat_ == nullptr) {
      seat_ = std::make_shared<Seat>();
      seat_->seed = seed;
      place = seat_;
    }
  }
  std::string warning;
  if (has_sat_ && seat_->last != nullptr && !seat_->warned) {
    seat_->warned = true;
    warning = "Two samplers with seed " + std::to_string(seed) +
              " make steps in turns (" + name + " and " + seat_->name +
              "): the noise of one is the other's. Give each a seed of its "
              "own, with torch_sgmcmc::fold_in";
  }
  if (!has_sat_ && is_first && param.defined()) {
    const uint32_t checksum = ChecksumOf(param);
    const std::pair<int64_t, const void*> key = {seed,
                                                 param.unsafeGetTensorImpl()};
    const auto found = all.begins.find(key);
    if (found == all.begins.end() || found->second.param.expired()) {
      all.sweep();
      all.begins.insert_or_assign(
          key,
          Registry::Begin{
              c10::weak_intrusive_ptr<c10::TensorImpl>(param.getIntrusivePtr()),
              checksum});
    } else if (found->second.checksum != checksum) {
      warning = std::string(name) + " begins with seed " +
                std::to_string(seed) +
                ", with which a sampler has made steps on these parameters: "
                "its noise is that once more. Keep the sampler, load its state "
                "dict, or give each a seed of its own, with "
                "torch_sgmcmc::fold_in";
    }
  }
  has_sat_ = true;
  seat_->last = this;
  seat_->name = name;
  return warning;
}

}  // namespace torch_sgmcmc
