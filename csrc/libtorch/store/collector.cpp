#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <limits>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "host/draw_index.h"
#include "host/draw_layout.h"
#include "host/draw_schedule.h"
#include "libtorch/core/checks.h"
#include "libtorch/core/sampler_impl.h"
#include "libtorch/store/background.h"
#include "libtorch/store/chosen_tensors.h"
#include "libtorch/store/stored_types.h"
#include "store/chain_writer.h"
#include "torch_sgmcmc/sbps.h"
#include "torch_sgmcmc/store.h"

namespace torch_sgmcmc {
namespace {

constexpr double kNoNumber = std::numeric_limits<double>::quiet_NaN();

const SamplerOptions& SettingsOf(
    const torch::optim::OptimizerParamGroup& group) {
  return static_cast<const SamplerOptions&>(group.options());
}

const SamplerOptions& FirstOptions(Sampler& sampler) {
  return SettingsOf(sampler.param_groups().at(0));
}

// NaN if there is none.
double StepSize(Sampler& sampler) { return FirstOptions(sampler).lr(); }

DrawLayout LayoutOf(const std::map<std::string, at::Tensor>& tensors,
                    const CollectorOptions& options) {
  std::vector<StoredTensor> stored;
  for (const auto& [name, tensor] : tensors) {
    const bool converts = options.dtype() && tensor.is_floating_point();
    stored.push_back(
        {name,
         StoredTypeOf(converts ? *options.dtype() : tensor.scalar_type()),
         tensor.sizes().vec()});
  }
  return DrawLayout(std::move(stored));
}

}  // namespace

struct Collector::Work {
  Work(Sampler& of,
       const torch::nn::Module* model,
       const Tensors& tensors,
       const std::string& store,
       const CollectorOptions& chosen_options)
      : sampler(of),
        is_sbps(dynamic_cast<SBPS*>(&of) != nullptr),
        options(Checked(chosen_options)),
        schedule(options.burn_in(), options.every(), options.max_samples()),
        chosen(model, tensors, of, options),
        place("chain " + std::to_string(options.chain()) + " of " + store),
        writer(store, options.chain(), LayoutOf(chosen.Now(), options)),
        background(std::make_unique<Background>()) {
    if (is_sbps) {
      hook = static_cast<SBPS&>(of).register_sample_hook(
          [this](SBPS&, double time) { AtSample(time); });
    }
  }

  static const CollectorOptions& Checked(const CollectorOptions& options) {
    CheckInteger("queue_size", options.queue_size(), 1);
    if (options.dtype() && !c10::isFloatingType(*options.dtype())) {
      Invalid("Invalid dtype: " + std::string(c10::toString(*options.dtype())) +
              " (must be a floating-point one)");
    }
    return options;
  }

  template <typename Wait>
  void Raising(Wait wait) {
    try {
      wait();
    } catch (const std::exception& error) {
      throw std::runtime_error(std::string(error.what()) + ". " + Safe());
    }
  }

  std::string Safe() const {
    const auto last = writer.last();
    const std::string stored = std::to_string(writer.num_draws());
    return (last ? stored + " draws of " + place + ", up to step " +
                       std::to_string(last->step) + ", are safe"
                 : place + " has no draw yet") +
           "; " + std::to_string(background->size()) +
           " more wait in memory, and the next step tries again";
  }

  void CheckOpen() const {
    if (!background) {
      throw std::runtime_error("the collector of " + place + " is closed");
    }
  }

  void WaitForRoom() {
    Raising([&] {
      background->WaitForFewer(static_cast<size_t>(options.queue_size()));
    });
  }

  // Whatever keeps a draw from being stored is an error before the update.
  void BeforeStep() {
    CheckOpen();
    writer.Check();
    if (is_sbps) {
      Raising([&] { background->Check(); });
      return;
    }
    if (!mark) {
      mark = static_cast<double>(sampler.get().num_steps());
    } else if (static_cast<double>(StepCounter()) < *mark - 1) {
      throw std::runtime_error("the sampler went back to step " +
                               std::to_string(sampler.get().num_steps()) +
                               ", and its collector is at " +
                               std::to_string(static_cast<int64_t>(*mark)) +
                               ": load the collector's state dict too");
    }
    if (schedule.Keeps(count + 1)) {
      WaitForRoom();
    } else {
      Raising([&] { background->Check(); });
    }
  }

  void AfterStep() {
    int64_t step = StepCounter();
    if (static_cast<double>(step) > *mark && schedule.Keeps(count + 1)) {
      // A GPU tells late that it has left out the step.
      step = sampler.get().num_steps();
    }
    if (static_cast<double>(step) > *mark) {
      Take(step, static_cast<double>(step));
    }
  }

  void AtSample(double time) {
    // A step that another hook has undone comes by its samples again.
    if (mark && time <= *mark) return;
    if (schedule.Keeps(count + 1)) WaitForRoom();
    Take(StepCounter() + 1, time);
  }

  // Counts a step, and stores the draw if it is one.
  void Take(int64_t step, double at) {
    const int64_t number = schedule.Number(count + 1);
    if (schedule.Thins(count + 1)) {
      const int64_t interval = schedule.Interval(number);
      background->Put([this, interval] { writer.Thin(interval); });
    }
    if (schedule.Keeps(count + 1)) {
      DrawRecord record;
      record.number = number;
      record.step = step;
      record.lr = StepSize(sampler.get());
      record.temperature = FirstOptions(sampler.get()).temperature();
      record.weight = options.weight() ? options.weight()(sampler.get()) : 1.0;
      record.loss = loss;
      for (const auto& group : sampler.get().param_groups()) {
        record.prior_precision.push_back(SettingsOf(group).prior_precision());
      }
      background->Put([this, record, draw = Snapshot()] {
        std::vector<const void*> memory;
        memory.reserve(draw.size());
        for (const at::Tensor& t : draw) memory.push_back(t.const_data_ptr());
        writer.Append(record, memory);
      });
    }
    ++count;
    mark = at;
  }

  // Copies in the order, the dtypes and the memory format of the file.
  std::vector<at::Tensor> Snapshot() const {
    const at::NoGradGuard no_grad;
    const auto now = chosen.Now();
    std::vector<at::Tensor> draw;
    for (const StoredTensor& t : writer.layout().tensors()) {
      draw.push_back(at::empty(t.shape, ScalarTypeOf(t.dtype)));
      draw.back().copy_(now.at(t.name));
    }
    return draw;
  }

  void End() {
    Sampler* const known = sampler.find();
    if (is_sbps && known != nullptr) {
      static_cast<SBPS&>(*known).remove_sample_hook(hook);
    }
    background.reset();
    writer.Close();
  }

  // Without waiting for a GPU to tell what came of the last step.
  int64_t StepCounter() const { return sampler.impl()->steps_counted(); }

  SamplerRef sampler;
  bool is_sbps;
  CollectorOptions options;
  DrawSchedule schedule;
  ChosenTensors chosen;
  std::string place;
  ChainWriter writer;
  std::unique_ptr<Background> background;
  int64_t hook = 0;
  double loss = kNoNumber;
  // Of the steps that were made, the number, and how far the sampler was.
  int64_t count = 0;
  std::optional<double> mark;
};

Collector::Collector(Sampler& sampler,
                     const torch::nn::Module& model,
                     const std::string& store,
                     const CollectorOptions& options)
    : work_(
          std::make_unique<Work>(sampler, &model, Tensors(), store, options)) {}

Collector::Collector(Sampler& sampler,
                     const Tensors& tensors,
                     const std::string& store,
                     const CollectorOptions& options)
    : work_(std::make_unique<Work>(sampler, nullptr, tensors, store, options)) {
}

Collector::~Collector() {
  try {
    close();
  } catch (const std::exception& error) {
    TORCH_WARN(error.what());
  }
}

torch::Tensor Collector::step(
    const torch::optim::Optimizer::LossClosure& closure) {
  work_->BeforeStep();
  torch::Tensor result = work_->sampler.get().step(closure);
  if (!work_->is_sbps) {
    const double told = work_->loss;
    // Read only if it is stored, as a GPU may have to be waited for.
    if (result.defined() && result.numel() == 1 &&
        work_->schedule.Keeps(work_->count + 1)) {
      work_->loss = result.item<double>();
    }
    work_->AfterStep();
    work_->loss = told;
  }
  return result;
}

void Collector::set_loss(double loss) { work_->loss = loss; }

size_t Collector::num_draws() const { return work_->writer.num_draws(); }

void Collector::flush() {
  work_->CheckOpen();
  work_->Raising([&] { work_->background->Flush(); });
}

StateDict Collector::state_dict() {
  flush();
  const StorePosition position = work_->writer.Checkpoint();
  c10::IValue mark;
  if (work_->mark && work_->is_sbps) {
    mark = *work_->mark;
  } else if (work_->mark) {
    mark = static_cast<int64_t>(*work_->mark);
  }
  const StateDict at = {{"size", static_cast<int64_t>(position.size)},
                        {"crc32", static_cast<int64_t>(position.crc32)}};
  return {{"count", work_->count},
          {"mark", mark},
          {"position", at},
          {"burn_in", work_->options.burn_in()},
          {"every", work_->options.every()},
          {"max_samples", work_->options.max_samples()}};
}

void Collector::load_state_dict(const StateDict& dict) {
  const std::pair<const char*, int64_t> settings[] = {
      {"burn_in", work_->options.burn_in()},
      {"every", work_->options.every()},
      {"max_samples", work_->options.max_samples()}};
  for (const auto& [name, value] : settings) {
    const int64_t begun = dict.at(name).toInt();
    if (begun != value) {
      Invalid("Invalid " + std::string(name) + ": " + std::to_string(value) +
              " (the run in progress has " + std::to_string(begun) + ")");
    }
  }
  const StateDict position = dict.at("position");
  const c10::IValue mark = dict.at("mark");
  const int64_t count = dict.at("count").toInt();
  flush();
  const auto lost = work_->writer.CutBack(
      {static_cast<uint64_t>(position.at("size").toInt()),
       static_cast<uint32_t>(position.at("crc32").toInt())});
  if (!lost.empty()) {
    TORCH_WARN("draws ",
               lost,
               " of ",
               work_->place,
               " were dropped after this checkpoint, and deleted as there were "
               "later ones");
  }
  work_->count = count;
  work_->mark.reset();
  if (!mark.isNone()) work_->mark = mark.toScalar().toDouble();
}

void Collector::restart() {
  flush();
  work_->writer.Restart();
  work_->count = 0;
  work_->mark.reset();
}

void Collector::close() {
  if (!work_->background) return;
  try {
    flush();
  } catch (const std::exception&) {
    work_->End();
    throw;
  }
  work_->End();
}

}  // namespace torch_sgmcmc
