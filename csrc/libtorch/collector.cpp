#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fnmatch.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "libtorch/chain_files.h"
#include "libtorch/checks.h"
#include "libtorch/sampler_impl.h"
#include "libtorch/tensor_lists.h"
#include "torch_sgmcmc/sbps.h"
#include "torch_sgmcmc/store.h"

namespace torch_sgmcmc {
namespace {

using Clock = std::chrono::steady_clock;

// Draws are written when they have so many bytes, are so many, or when the
// first of them is so old.
constexpr size_t kBytes = size_t{4} << 20;
constexpr size_t kDraws = 1024;
constexpr std::chrono::seconds kAge(30);

bool Matches(const std::string& pattern, const std::string& name) {
  return pattern == name ||
         ::fnmatch(pattern.c_str(), name.c_str(), FNM_NOESCAPE) == 0;
}

bool IsSampled(Sampler& sampler, const at::Tensor& tensor) {
  for (const auto& group : sampler.param_groups()) {
    for (const at::Tensor& p : group.params()) {
      if (p.is_same(tensor)) return p.requires_grad();
    }
  }
  return false;
}

// The names of what is to be stored.
std::vector<std::string> Chosen(Sampler& sampler,
                                const torch::nn::Module& model,
                                const CollectorOptions& options) {
  const auto named = model.named_parameters();
  const std::vector<std::string>& patterns = options.parameters();
  for (const std::string& pattern : patterns) {
    if (std::ranges::none_of(named.keys(), [&](const std::string& name) {
          return Matches(pattern, name);
        })) {
      Invalid("Invalid parameters: no parameter is named '" + pattern + "'");
    }
  }
  std::vector<std::string> all;
  bool is_any_sampled = false;
  for (const auto& item : named) {
    const bool is_chosen =
        patterns.empty() ||
        std::ranges::any_of(patterns, [&](const std::string& pattern) {
          return Matches(pattern, item.key());
        });
    if (!is_chosen) continue;
    all.push_back(item.key());
    is_any_sampled = is_any_sampled || IsSampled(sampler, item.value());
  }
  if (!is_any_sampled) {
    Invalid(
        "Invalid parameters: the sampler has none of the ones that would be "
        "stored, so all draws would be the same (was the model copied after "
        "the sampler was made?)");
  }
  if (options.buffers()) {
    for (const auto& item : model.named_buffers()) all.push_back(item.key());
  }
  return all;
}

const CollectorOptions& Checked(const CollectorOptions& options) {
  CheckInteger("burn_in", options.burn_in());
  CheckInteger("every", options.every(), 1);
  if (options.dtype() && !c10::isFloatingType(*options.dtype())) {
    Invalid("Invalid dtype: " + DtypeName(*options.dtype()) +
            " (must be a floating-point one)");
  }
  return options;
}

}  // namespace

struct Collector::Work {
  Work(Sampler& of, const torch::nn::Module& its_model,
       const std::string& store, const CollectorOptions& chosen)
      : impl(SamplerAccess::Of(of)),
        is_sbps(dynamic_cast<SBPS*>(&of) != nullptr),
        options(Checked(chosen)),
        model(its_model),
        names(Chosen(of, model, options)),
        writer(store, options.chain(), Stored()),
        is_undecided(writer.index().num_draws > 0) {
    for (const StoredTensor& t : writer.tensors()) {
      draw_bytes += static_cast<size_t>(c10::multiply_integers(t.shape)) *
                    c10::elementSize(t.dtype);
    }
    if (is_sbps) {
      hook = static_cast<SBPS&>(of).register_sample_hook(
          // A step that another hook has undone makes its samples again.
          [this](SBPS&, double time) {
            if (!mark || time > *mark) Take(StepCounter() + 1, time);
          });
    }
  }

  std::vector<at::Tensor> Now() const {
    const auto all = TensorsOf(model);
    std::vector<at::Tensor> now;
    for (const std::string& name : names) now.push_back(all[name]);
    return now;
  }

  std::vector<StoredTensor> Stored() const {
    std::vector<StoredTensor> stored;
    for (const at::Tensor& t : Now()) {
      const bool converts = options.dtype() && t.is_floating_point();
      stored.push_back({names[stored.size()],
                        converts ? *options.dtype() : t.scalar_type(),
                        t.sizes().vec()});
    }
    return stored;
  }

  bool IsNextDue() const {
    const int64_t after = count + 1 - options.burn_in();
    return after > 0 && after % options.every() == 0;
  }

  // Whatever keeps a draw from being stored is an error before the update.
  void BeforeStep() {
    CheckOpen();
    if (is_undecided) {
      Invalid("Invalid store: " + writer.place() + " has " +
              std::to_string(writer.index().num_draws) +
              " draws of an earlier run (load the state dict of its "
              "checkpoint, or restart())");
    }
    if (has_failed) Flush();
    if (IsNextDue()) CheckShapes();
    if (is_sbps) return;
    if (!mark) {
      mark = static_cast<double>(Locked(impl)->num_steps());
    } else if (static_cast<double>(StepCounter()) < *mark - 1) {
      throw std::runtime_error("the sampler went back to step " +
                               std::to_string(Locked(impl)->num_steps()) +
                               ", and its collector is at " +
                               std::to_string(static_cast<int64_t>(*mark)) +
                               ": load the collector's state dict too");
    }
  }

  void CheckShapes() const {
    const auto now = Now();
    for (size_t i = 0; i < now.size(); ++i) {
      const StoredTensor& t = writer.tensors()[i];
      if (now[i].sizes() != t.shape) {
        throw std::runtime_error(
            "Invalid draw: shape " + Shape(now[i].sizes()) + " for '" + t.name +
            "' (must have the shape " + Shape(t.shape) + ")");
      }
    }
  }

  void AfterStep(const at::Tensor& result) {
    int64_t step = StepCounter();
    if (static_cast<double>(step) <= *mark) return;
    const double told = loss;
    if (IsNextDue()) {
      // A GPU reports a skipped step late.
      step = Locked(impl)->num_steps();
      if (static_cast<double>(step) <= *mark) return;
      if (result.defined() && result.numel() == 1) loss = result.item<double>();
    }
    Take(step, static_cast<double>(step));
    loss = told;
  }

  // Counts a step, and stores the draw if it is due.
  void Take(int64_t step, double at) {
    if (IsNextDue()) {
      const at::NoGradGuard no_grad;
      DrawToWrite draw;
      const auto now = Now();
      for (size_t i = 0; i < now.size(); ++i) {
        const StoredTensor& t = writer.tensors()[i];
        draw.tensors.push_back(
            at::empty(t.shape, at::TensorOptions(t.dtype).device(at::kCPU)));
        draw.tensors.back().copy_(now[i]);
      }
      const auto sampler = Locked(impl);
      const OptionValues& first = sampler->options_of(0);
      draw.numbers = {.step = step,
                      .lr = first.lr(),
                      .temperature = first.temperature(),
                      .loss = loss};
      for (size_t i = 0; i < sampler->groups().size(); ++i) {
        draw.numbers.prior_precision.push_back(
            sampler->options_of(i).prior_precision());
      }
      if (waiting.empty()) since = Clock::now();
      waiting.push_back(std::move(draw));
      if (waiting.size() >= kDraws || waiting.size() * draw_bytes >= kBytes ||
          Clock::now() - since >= kAge) {
        // The step was made: an error is the next one's.
        try {
          Flush();
        } catch (const std::exception&) {
          has_failed = true;
        }
      }
    }
    ++count;
    mark = at;
  }

  // Without waiting for a GPU to tell what came of the last step.
  int64_t StepCounter() const { return Locked(impl)->steps_counted(); }

  void CheckOpen() const {
    if (is_closed) {
      throw std::runtime_error("the collector of " + writer.place() +
                               " is closed");
    }
  }

  void Flush() {
    if (waiting.empty()) return;
    try {
      writer.Write(waiting);
    } catch (const std::exception& error) {
      std::string safe = writer.place() + " has no draw yet";
      if (const auto last = writer.index().last_step) {
        safe = std::to_string(writer.index().num_draws) + " draws of " +
               writer.place() + ", up to step " + std::to_string(*last) +
               ", are safe";
      }
      throw std::runtime_error(std::string(error.what()) + ". " + safe + "; " +
                               std::to_string(waiting.size()) +
                               " more wait in memory, and the next step tries "
                               "again");
    }
    waiting.clear();
    has_failed = false;
  }

  // Resumes collecting from an index of this length.
  void Resume(int64_t size, int64_t crc32, int64_t from_count,
              std::optional<double> from_mark) {
    writer.CutBack(size, crc32);
    is_undecided = has_failed = false;
    count = from_count;
    mark = from_mark;
  }

  std::weak_ptr<SamplerImpl> impl;
  bool is_sbps;
  CollectorOptions options;
  const torch::nn::Module& model;
  std::vector<std::string> names;
  ChainWriter writer;
  // True if draws of an earlier run are there, about which nobody has decided.
  bool is_undecided;
  bool is_closed = false;
  // True if draws could not be written.
  bool has_failed = false;
  std::vector<DrawToWrite> waiting;
  size_t draw_bytes = 0;
  Clock::time_point since;
  int64_t hook = 0;
  double loss = std::numeric_limits<double>::quiet_NaN();
  // The number of steps that counted, and where the sampler was then.
  int64_t count = 0;
  std::optional<double> mark;
};

Collector::Collector(Sampler& sampler, const torch::nn::Module& model,
                     const std::string& store, const CollectorOptions& options)
    : work_(std::make_unique<Work>(sampler, model, store, options)) {}

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
  torch::Tensor result = Locked(work_->impl)->step(closure);
  if (!work_->is_sbps) work_->AfterStep(result);
  return result;
}

void Collector::set_loss(double loss) { work_->loss = loss; }

void Collector::flush() {
  work_->CheckOpen();
  work_->Flush();
}

StateDict Collector::state_dict() {
  flush();
  const ChainIndex& index = work_->writer.index();
  c10::IValue mark;
  if (work_->mark && work_->is_sbps) {
    mark = *work_->mark;
  } else if (work_->mark) {
    mark = static_cast<int64_t>(*work_->mark);
  }
  return {{"count", work_->count},
          {"mark", mark},
          {"position", StateDict{{"size", index.size},
                                 {"crc32", static_cast<int64_t>(index.crc32)}}},
          {"burn_in", work_->options.burn_in()},
          {"every", work_->options.every()}};
}

void Collector::load_state_dict(const StateDict& dict) {
  const std::pair<const char*, int64_t> settings[] = {
      {"burn_in", work_->options.burn_in()}, {"every", work_->options.every()}};
  for (const auto& [name, value] : settings) {
    const int64_t begun = dict.at(name).toInt();
    if (begun != value) {
      Invalid("Invalid " + std::string(name) + ": " + std::to_string(value) +
              " (the run in progress has " + std::to_string(begun) + ")");
    }
  }
  const StateDict position = dict.at("position");
  const c10::IValue saved = dict.at("mark");
  std::optional<double> mark;
  if (!saved.isNone()) mark = saved.toScalar().toDouble();
  const int64_t count = dict.at("count").toInt();
  flush();
  work_->Resume(position.at("size").toInt(), position.at("crc32").toInt(),
                count, mark);
}

void Collector::restart() {
  work_->CheckOpen();
  work_->waiting.clear();
  work_->Resume(0, 0, 0, std::nullopt);
}

void Collector::close() {
  if (work_->is_closed) return;
  work_->is_closed = true;
  const auto known = work_->impl.lock();
  if (work_->is_sbps && known != nullptr) {
    static_cast<SBPS&>(known->owner()).remove_sample_hook(work_->hook);
  }
  try {
    work_->Flush();
  } catch (const std::exception&) {
    work_->writer.Close();
    throw;
  }
  work_->writer.Close();
}

}  // namespace torch_sgmcmc
