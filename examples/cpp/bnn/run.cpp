#include "bnn/run.h"

#include <c10/util/Exception.h>
#include <c10/util/hash.h>
#include <torch/nn/functional/loss.h>

#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bnn/json.h"
#include "bnn/progress.h"
#include "bnn/trainer.h"

namespace bnn {

namespace fs = std::filesystem;
using torch::Tensor;
using torch_sgmcmc::StateDict;
using Clock = std::chrono::steady_clock;

namespace {

using NamedTensors = std::vector<std::pair<std::string, Tensor>>;

template <typename Named>
std::string Names(const Named& all) {
  std::string names;
  for (const auto& [name, value] : all) {
    names += (names.empty() ? "" : " and ") + name;
  }
  return names;
}

// The folder of the draws. What there is if the run has no checkpoint, is of
// one that was killed in its first epoch.
fs::path Store(fs::path folder, bool begun) {
  if (!begun) fs::remove_all(folder);
  return folder;
}

// Everything of a run that changes.
class Runner {
 public:
  Runner(const RunConfig& config, const Images& images, const fs::path& folder)
      : images_(images),
        path_(folder / (config.name() + ".pt")),
        begun_(fs::exists(path_)),
        model_(BuildModel(
            images.train_x.size(1), config.seed, images.train_x.device())),
        trainer_(BuildTrainer(config,
                              model_,
                              images.train_y.size(0),
                              Store(folder / config.name(), begun_))) {
    state_.config = config;
    if (begun_) resume();
  }

  RunState run() {
    const RunConfig& config = state_.config;
    Progress progress(config.name(), state_.epoch, config.epochs);
    if (!state_.history.empty()) {
      progress.show(state_.epoch, state_.history.back().scores.error);
    }
    while (state_.epoch < config.epochs) {
      const auto start = Clock::now();
      Epoch epoch;
      epoch.epoch = ++state_.epoch;
      train();
      epoch.precisions = trainer_->end_epoch();
      state_.seconds +=
          std::chrono::duration<double>(Clock::now() - start).count();

      predict();
      epoch.scores = Evaluate(state_.predictions.front().second.result().mean,
                              images_.test_y);
      state_.history.push_back(epoch);
      save();
      progress.show(state_.epoch, epoch.scores.error);
    }
    state_.digest = digest();
    return state_;
  }

 private:
  void train() {
    const RunConfig& config = state_.config;
    model_->train();
    for (const auto& [x, y] : Minibatches(images_.train_x,
                                          images_.train_y,
                                          config.batch_size,
                                          config.seed,
                                          state_.epoch)) {
      trainer_->optimizer().zero_grad();
      torch::nn::functional::cross_entropy(model_->forward(x), y).backward();
      trainer_->step();
    }
  }

  // Before burn-in ends, and of point estimates, predictions are the present
  // network's.
  void predict() {
    const torch::NoGradGuard no_grad;
    model_->eval();
    const bool averaging =
        state_.config.samples() && state_.epoch > state_.config.burn_in;
    if (!averaging || state_.samples == 0) {
      state_.predictions.clear();
      for (const auto& [name, x] : inputs()) {
        state_.predictions.emplace_back(name, torch_sgmcmc::Predictive());
      }
    }
    size_t i = 0;
    for (const auto& [name, x] : inputs()) {
      state_.predictions.at(i++).second.update(outputs(x));
    }
    state_.samples += averaging ? 1 : 0;
  }

  // As many at once as Python's Predictive takes: products of matrices of
  // other sizes may have other bits.
  Tensor outputs(const Tensor& x) {
    std::vector<Tensor> parts;
    for (const Tensor& part : x.split(1000)) {
      parts.push_back(model_->forward(part));
    }
    return torch::cat(parts);
  }

  NamedTensors inputs() const {
    NamedTensors inputs = {{"labelled", images_.test_x}};
    if (images_.other_x.defined()) {
      inputs.emplace_back("other", images_.other_x);
    }
    return inputs;
  }

  void save() {
    StateDict checkpoint = state_.to_dict();
    checkpoint.set("model", torch_sgmcmc::state_dict(*model_));
    trainer_->save(checkpoint);
    torch_sgmcmc::save(checkpoint, path_.string());
  }

  void resume() {
    const StateDict checkpoint = torch_sgmcmc::load(path_.string());
    const auto refuse = [this](const std::string& reason) {
      throw std::runtime_error(path_.string() + " does not fit: " + reason +
                               "\nDelete it or choose another --out.");
    };
    try {
      take(checkpoint);
    } catch (const std::invalid_argument& error) {
      refuse(error.what());
    } catch (const c10::Error& error) {  // a value of another type
      refuse(error.what_without_backtrace());
    }
  }

  void take(const StateDict& checkpoint) {
    RunState saved = RunState::FromDict(checkpoint, images_.train_x.device());
    if (!saved.config.continues(state_.config)) {
      throw std::runtime_error(path_.string() +
                               " holds a run with other settings:\n  " +
                               ToJson(saved.config.to_dict()) + "\nnot\n  " +
                               ToJson(state_.config.to_dict()) +
                               "\nDelete it or choose another --out.");
    }
    if (Names(saved.predictions) != Names(inputs())) {
      throw std::runtime_error(path_.string() + " holds predictions for " +
                               Names(saved.predictions) + " images, not for " +
                               Names(inputs()) +
                               ": with another --data-root, Fashion-MNIST came "
                               "or went.\nDelete it or choose another --out.");
    }
    saved.config = state_.config;
    state_ = std::move(saved);
    torch_sgmcmc::load_state_dict(*model_, checkpoint.at("model"));
    trainer_->load(checkpoint);
  }

  std::string digest() const {
    std::string bytes;
    const auto add = [&bytes](const Tensor& tensor) {
      const Tensor here = tensor.detach().cpu().contiguous();
      bytes.append(static_cast<const char*>(here.const_data_ptr()),
                   here.nbytes());
    };
    for (const Tensor& p : model_->parameters()) add(p);
    for (const auto& [name, predictive] : state_.predictions) {
      add(predictive.result().mean);
    }
    return c10::sha1(bytes).str();
  }

  const Images& images_;
  fs::path path_;
  bool begun_;
  torch::nn::Sequential model_;
  std::unique_ptr<Trainer> trainer_;
  RunState state_;
};

}  // namespace

void CheckCheckpoint(const RunConfig& config,
                     const Images& images,
                     const fs::path& folder) {
  const Runner runner(config, images, folder);
}

RunState Run(const RunConfig& config,
             const Images& images,
             const fs::path& folder) {
  return Runner(config, images, folder).run();
}

}  // namespace bnn
