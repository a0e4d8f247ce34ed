#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fnmatch.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "libtorch/core/checks.h"
#include "libtorch/core/sampler_impl.h"
#include "libtorch/store/chain_files.h"
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

const SamplerOptions& SettingsOf(
    const torch::optim::OptimizerParamGroup& group) {
  return static_cast<const SamplerOptions&>(group.options());
}

bool Matches(const std::vector<std::string>& patterns,
             const std::string& name) {
  return std::any_of(
      patterns.begin(), patterns.end(), [&](const std::string& pattern) {
        return pattern == name ||
               ::fnmatch(pattern.c_str(), name.c_str(), FNM_NOESCAPE) == 0;
      });
}

bool IsSampled(Sampler& sampler, const at::Tensor& tensor) {
  for (const auto& group : sampler.param_groups()) {
    for (const at::Tensor& p : group.params()) {
      if (p.is_same(tensor)) return p.requires_grad();
    }
  }
  return false;
}

}  // namespace

struct Collector::Work {
  Work(Sampler& of,
       const torch::nn::Module* its_model,
       Tensors its_tensors,
       const std::string& store,
       const CollectorOptions& chosen)
      : sampler(of),
        is_sbps(dynamic_cast<SBPS*>(&of) != nullptr),
        options(Checked(chosen)),
        model(its_model),
        tensors(std::move(its_tensors)),
        names(Chosen(of)),
        writer(store, options.chain(), Stored()),
        is_undecided(writer.num_draws() > 0) {
    for (const StoredTensor& t : writer.tensors()) {
      draw_bytes += static_cast<size_t>(c10::multiply_integers(t.shape)) *
                    c10::elementSize(t.dtype);
    }
    if (is_sbps) {
      hook = static_cast<SBPS&>(of).register_sample_hook(
          [this](SBPS&, double time) { AtSample(time); });
    }
  }

  static const CollectorOptions& Checked(const CollectorOptions& options) {
    CheckInteger("burn_in", options.burn_in());
    CheckInteger("every", options.every(), 1);
    if (options.dtype() && !c10::isFloatingType(*options.dtype())) {
      Invalid("Invalid dtype: " + std::string(c10::toString(*options.dtype())) +
              " (must be a floating-point one)");
    }
    return options;
  }

  // ---- What is stored -------------------------------------------------------

  Tensors Parameters() const {
    if (model == nullptr) return tensors;
    Tensors named;
    for (const auto& item : model->named_parameters()) {
      named.emplace_back(item.key(), item.value());
    }
    return named;
  }

  std::vector<std::string> Chosen(Sampler& of) const {
    const Tensors named = Parameters();
    const auto& patterns = options.parameters();
    for (const std::string& pattern : patterns) {
      if (std::none_of(named.begin(), named.end(), [&](const auto& item) {
            return Matches({pattern}, item.first);
          })) {
        Invalid("Invalid parameters: no parameter is named '" + pattern + "'");
      }
    }
    std::vector<std::string> all;
    for (const auto& [name, tensor] : named) {
      if ((patterns.empty() || Matches(patterns, name)) &&
          (!options.sampled() || IsSampled(of, tensor))) {
        all.push_back(name);
      }
    }
    if (all.empty()) {
      Invalid("Invalid parameters: none of the model's is chosen");
    }
    if (std::none_of(named.begin(), named.end(), [&](const auto& item) {
          return std::find(all.begin(), all.end(), item.first) != all.end() &&
                 IsSampled(of, item.second);
        })) {
      Invalid(
          "Invalid parameters: the sampler has none of those that would be "
          "stored, so all draws would be the same (was the model copied after "
          "the sampler was made?)");
    }
    if (options.buffers() && model != nullptr) {
      for (const auto& item : model->named_buffers()) {
        all.push_back(item.key());
      }
    }
    return all;
  }

  std::vector<at::Tensor> Now() const {
    std::map<std::string, at::Tensor> all;
    for (const auto& [name, tensor] : Parameters()) all[name] = tensor;
    if (model != nullptr) {
      for (const auto& item : model->named_buffers()) {
        all[item.key()] = item.value();
      }
    }
    std::vector<at::Tensor> now;
    for (const std::string& name : names) now.push_back(all.at(name));
    return now;
  }

  std::vector<StoredTensor> Stored() const {
    std::vector<StoredTensor> stored;
    const auto now = Now();
    for (size_t i = 0; i < names.size(); ++i) {
      const bool converts = options.dtype() && now[i].is_floating_point();
      stored.push_back({names[i],
                        converts ? *options.dtype() : now[i].scalar_type(),
                        now[i].sizes().vec()});
    }
    return stored;
  }

  // ---- Steps
  // ------------------------------------------------------------------

  bool IsDue(int64_t of_count) const {
    return of_count > options.burn_in() &&
           (of_count - options.burn_in()) % options.every() == 0;
  }

  // Whatever keeps a draw from being stored is an error before the update.
  void BeforeStep() {
    CheckOpen();
    if (is_undecided) {
      Invalid("Invalid store: " + writer.place() + " has " +
              std::to_string(writer.num_draws()) +
              " draws of an earlier run (load the state dict of its "
              "checkpoint, or restart())");
    }
    if (has_failed) Flush();
    if (IsDue(count + 1)) CheckShapes();
    if (is_sbps) return;
    if (!mark) {
      mark = static_cast<double>(sampler.get().num_steps());
    } else if (static_cast<double>(StepCounter()) < *mark - 1) {
      throw std::runtime_error("the sampler went back to step " +
                               std::to_string(sampler.get().num_steps()) +
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

  void AfterStep() {
    int64_t step = StepCounter();
    if (static_cast<double>(step) > *mark && IsDue(count + 1)) {
      // A GPU reports a skipped step late.
      step = sampler.get().num_steps();
    }
    if (static_cast<double>(step) > *mark) {
      Take(step, static_cast<double>(step));
    }
  }

  void AtSample(double time) {
    // A step that another hook has undone makes its samples again.
    if (!mark || time > *mark) Take(StepCounter() + 1, time);
  }

  // Counts a step, and stores the draw if it is due.
  void Take(int64_t step, double at) {
    if (IsDue(count + 1)) {
      const at::NoGradGuard no_grad;
      DrawToWrite draw;
      const auto now = Now();
      for (size_t i = 0; i < now.size(); ++i) {
        const StoredTensor& t = writer.tensors()[i];
        draw.tensors.push_back(
            at::empty(t.shape, at::TensorOptions(t.dtype).device(at::kCPU)));
        draw.tensors.back().copy_(now[i]);
      }
      const auto& groups = sampler.get().param_groups();
      const SamplerOptions& first = SettingsOf(groups.at(0));
      draw.numbers = {step,
                      first.lr(),
                      first.temperature(),
                      options.weight() ? options.weight()(sampler.get()) : 1.0,
                      loss,
                      {}};
      for (const auto& group : groups) {
        draw.numbers.prior_precision.push_back(
            SettingsOf(group).prior_precision());
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
  int64_t StepCounter() const { return sampler.impl()->steps_counted(); }

  // ---- Writing
  // ----------------------------------------------------------------

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
      if (const auto last = writer.last_step()) {
        safe = std::to_string(writer.num_draws()) + " draws of " +
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

  void Close() {
    if (is_closed) return;
    is_closed = true;
    Sampler* const known = sampler.find();
    if (is_sbps && known != nullptr) {
      static_cast<SBPS&>(*known).remove_sample_hook(hook);
    }
    writer.Close();
  }

  SamplerRef sampler;
  bool is_sbps;
  CollectorOptions options;
  const torch::nn::Module* model;
  Tensors tensors;
  std::vector<std::string> names;
  ChainWriter writer;
  // Whether draws of an earlier run are there, about which nobody has decided.
  bool is_undecided;
  bool is_closed = false;
  // Whether draws could not be written.
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
        work_->IsDue(work_->count + 1)) {
      work_->loss = result.item<double>();
    }
    work_->AfterStep();
    work_->loss = told;
  }
  return result;
}

void Collector::set_loss(double loss) { work_->loss = loss; }

size_t Collector::num_draws() const {
  return static_cast<size_t>(work_->writer.num_draws());
}

void Collector::flush() {
  work_->CheckOpen();
  work_->Flush();
}

StateDict Collector::state_dict() {
  flush();
  const auto [size, crc32] = work_->writer.position();
  c10::IValue mark;
  if (work_->mark && work_->is_sbps) {
    mark = *work_->mark;
  } else if (work_->mark) {
    mark = static_cast<int64_t>(*work_->mark);
  }
  return {{"count", work_->count},
          {"mark", mark},
          {"position", StateDict{{"size", size}, {"crc32", crc32}}},
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
  const c10::IValue mark = dict.at("mark");
  const int64_t count = dict.at("count").toInt();
  flush();
  work_->writer.CutBack(position.at("size").toInt(),
                        position.at("crc32").toInt());
  work_->is_undecided = false;
  work_->count = count;
  work_->mark.reset();
  if (!mark.isNone()) work_->mark = mark.toScalar().toDouble();
}

void Collector::restart() {
  work_->CheckOpen();
  work_->waiting.clear();
  work_->writer.Clear();
  work_->is_undecided = work_->has_failed = false;
  work_->count = 0;
  work_->mark.reset();
}

void Collector::close() {
  if (work_->is_closed) return;
  try {
    work_->Flush();
  } catch (const std::exception&) {
    work_->Close();
    throw;
  }
  work_->Close();
}

}  // namespace torch_sgmcmc
