// Gradient estimators of less variance: control variates with an anchor.
//
//   optimize(*net);  // to a mode
//   torch_sgmcmc::SGLD sampler(
//       net->parameters(), torch_sgmcmc::SGLDOptions(0.1).num_data(50'000));
//   torch_sgmcmc::ControlVariates estimator(
//       sampler, [&](const torch::data::Example<>& batch) {
//         return cross_entropy(net->forward(batch.data), batch.target);
//       });
//   estimator.set_anchor(*large_batches);
//   for (const auto& batch : *loader) {
//     sampler.zero_grad();
//     auto loss = estimator.backward(batch);
//     sampler.step();
//   }
//
// With a sampler that draws minibatches itself:
//
//   sampler.step([&] { return estimator.backward(draw_minibatch()); });
//
// The classes are templates for the sake of the batches' type, which the loss
// function's argument tells; all that is done with losses is in detail.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/data/example.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "torch_sgmcmc/export.h"
#include "torch_sgmcmc/sampler.h"
#include "torch_sgmcmc/state_dict.h"

namespace torch_sgmcmc {

namespace detail {

// The mean loss of a minibatch, with a graph, at the parameters as they are.
using BatchLoss = std::function<at::Tensor()>;
// Takes the number of data of a batch and its loss.
using BatchVisitor = std::function<void(int64_t size, const BatchLoss& loss)>;
// Hands every batch of all data to a visitor.
using FullPass = std::function<void(const BatchVisitor& visit)>;

// The anchor, and gradients with the control variate there.
class TORCH_SGMCMC_API AnchoredGradients {
 public:
  // The name is that of the class in messages.
  AnchoredGradients(torch::optim::Optimizer& sampler,
                    const char* name,
                    int64_t order);
  virtual ~AnchoredGradients() = default;
  AnchoredGradients(const AnchoredGradients&) = delete;
  AnchoredGradients& operator=(const AnchoredGradients&) = delete;
  AnchoredGradients(AnchoredGradients&&) = delete;
  AnchoredGradients& operator=(AnchoredGradients&&) = delete;

  virtual double set_anchor(const FullPass& pass);
  virtual at::Tensor backward(const BatchLoss& loss,
                              double weight,
                              bool create_graph);
  virtual StateDict state_dict() const;
  virtual void load_state_dict(const StateDict& dict);

 protected:
  bool has_anchor() const { return anchor_.has_value(); }

 private:
  struct Gradients {
    at::Tensor loss;
    std::vector<at::Tensor> grads;  // undefined where there is none
  };
  // What is differentiated besides the loss, and with which weights.
  struct Roots {
    std::vector<at::Tensor> tensors;
    std::vector<at::Tensor> weights;
  };
  // Makes them of a loss.
  using Look = std::function<Roots(const at::Tensor& loss)>;

  std::vector<at::Tensor> trained() const;
  void check_order(const std::vector<at::Tensor>& params) const;
  const std::vector<at::Tensor>& fitting_anchor(
      const std::vector<at::Tensor>& params) const;
  Gradients gradients(const std::vector<at::Tensor>& params,
                      const BatchLoss& loss_fn,
                      bool create_graph = false,
                      const Look& look = nullptr) const;
  std::vector<at::Tensor> slopes(const std::vector<at::Tensor>& params,
                                 const at::Tensor& loss) const;
  Roots hessian_product(const std::vector<at::Tensor>& params,
                        const std::vector<at::Tensor>& moves,
                        const at::Tensor& loss) const;
  void check_dense(const std::vector<at::Tensor>& grads) const;
  void combine(const std::vector<at::Tensor>& params,
               const std::vector<at::Tensor>& anchor_grads,
               const std::vector<at::Tensor>& full_grads,
               bool create_graph,
               std::vector<at::Tensor>& grads) const;

  torch::optim::Optimizer& sampler_;
  const char* name_;
  int64_t order_;
  std::optional<std::vector<at::Tensor>> anchor_;
  std::vector<at::Tensor> full_grads_;
  at::Tensor full_hessian_;  // [d, d], with order 2
};

// The same with an anchor that is put anew every so many steps.
class TORCH_SGMCMC_API RefreshedGradients : public AnchoredGradients {
 public:
  RefreshedGradients(Sampler& sampler,
                     FullPass pass,
                     int64_t refresh_every,
                     int64_t order);

  // With no other pass, its own.
  double set_anchor(const FullPass& pass) override;
  at::Tensor backward(const BatchLoss& loss,
                      double weight,
                      bool create_graph) override;
  StateDict state_dict() const override;
  void load_state_dict(const StateDict& dict) override;

  int64_t refresh_every() const { return refresh_every_; }

 private:
  int64_t step() const;

  const Sampler& sampler_;
  FullPass pass_;
  int64_t refresh_every_;
  int64_t anchor_step_ = 0;
};

// Throw what there is to say of functions that are none, and of batches whose
// type does not tell how many data they have.
TORCH_SGMCMC_API void CheckLossFunction(bool is_callable);
[[noreturn]] TORCH_SGMCMC_API void ThrowUnknownSize(const std::type_info& type);

// The number of data in a batch, if its type tells.
template <typename Batch>
struct BatchLength {
  static std::optional<int64_t> of(const Batch&) { return std::nullopt; }
};

// The length of the first tensor.
template <typename... Parts>
std::optional<int64_t> FirstLength(const Parts&... parts) {
  std::optional<int64_t> length;
  ((length = length ? length : BatchLength<Parts>::of(parts)), ...);
  return length;
}

template <>
struct BatchLength<at::Tensor> {
  static std::optional<int64_t> of(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.dim() == 0) return std::nullopt;
    return tensor.size(0);
  }
};

template <typename Data, typename Target>
struct BatchLength<torch::data::Example<Data, Target>> {
  static std::optional<int64_t> of(
      const torch::data::Example<Data, Target>& batch) {
    if constexpr (std::is_void_v<Target>) {
      return FirstLength(batch.data);
    } else {
      return FirstLength(batch.data, batch.target);
    }
  }
};

template <typename First, typename Second>
struct BatchLength<std::pair<First, Second>> {
  static std::optional<int64_t> of(const std::pair<First, Second>& batch) {
    return FirstLength(batch.first, batch.second);
  }
};

template <typename... Parts>
struct BatchLength<std::tuple<Parts...>> {
  static std::optional<int64_t> of(const std::tuple<Parts...>& batch) {
    return std::apply(FirstLength<Parts...>, batch);
  }
};

// Examples that a loader has not stacked. A vector of anything else may be one
// of data or one of fields: it does not tell.
template <typename Data, typename Target>
struct BatchLength<std::vector<torch::data::Example<Data, Target>>> {
  static std::optional<int64_t> of(
      const std::vector<torch::data::Example<Data, Target>>& batch) {
    return static_cast<int64_t>(batch.size());
  }
};

// The type of batches that a loss function takes.
template <typename Function>
struct ArgumentOf;
template <typename Result, typename Argument>
struct ArgumentOf<std::function<Result(Argument)>> {
  using Type = std::remove_cvref_t<Argument>;
};
template <typename LossFunction>
using BatchOf = typename ArgumentOf<decltype(std::function(
    std::declval<LossFunction>()))>::Type;

}  // namespace detail

/// What ControlVariates and SVRG may be told besides.
template <typename Batch>
struct ControlVariatesOptions {
  /// Returns the number of data of a batch, >= 1, its weight in the full
  /// gradient. Default: the length of the first tensor in a tensor, an Example,
  /// a pair or a tuple; of a vector of Examples, its length. Other types need
  /// this function.
  std::function<int64_t(const Batch&)> batch_size = nullptr;
  /// Called after each batch of a pass through all data, with the number of
  /// data that the pass has done.
  std::function<void(int64_t done)> progress = nullptr;
  /// Of the expansion around the anchor, 1 or 2; of SVRG 1, since with 2 a pass
  /// costs as much as there are parameters.
  int64_t order = 1;
};

/// Gradients with a control variate at a fixed point, the anchor.
///
/// With ḡ the gradient of a minibatch's mean loss and ∇L̄ that of all data,
///
///   g = ḡ(θ) - ḡ(θ*) + ∇L̄(θ*)
///
/// is unbiased, and its variance vanishes as θ comes to θ*, where g is the full
/// gradient. It takes the place of loss.backward() before any sampler's step,
/// and costs two backward passes and memory for one copy of the parameters and
/// one of their gradients. That is order 1. With order 2, δ = θ - θ*, and
/// Hessians h̄ and H̄ of the same losses as ḡ and ∇L̄,
///
///   g = ḡ(θ) - [ḡ(θ*) + h̄(θ*) δ] + ∇L̄(θ*) + H̄(θ*) δ
///
/// is unbiased too, exact where losses are quadratic, and its variance vanishes
/// like |δ|⁴ and not |δ|². With d parameters, at most 11585, it costs a
/// backward pass through a backward pass, memory for d² numbers, and for the
/// anchor as much as d passes through all data.
///
/// The loss function is called twice for a minibatch, first at the anchor: use
/// eval() for batch norm. For several chains in a leading dimension of the
/// parameters, let it return the sum of the chains' mean losses. More:
/// docs/samplers/control_variates.md.
///
/// Errors: std::invalid_argument and std::runtime_error as for Sampler, with
/// Python's messages. Parameters and gradients are as before then, and so is
/// the anchor if a pass through the data has failed.
///
/// Reference: J. Baker, P. Fearnhead, E. B. Fox and C. Nemeth, Control variates
/// for stochastic gradient MCMC, Statistics and Computing 29, 2019. Order 2:
/// K.-D. Dang et al., Hamiltonian Monte Carlo with Energy Conserving
/// Subsampling, JMLR 20, 2019, section 6.2.
template <typename Batch = torch::data::Example<>>
class ControlVariates {
 public:
  /// Returns the mean loss of a minibatch with a graph, from which it does not
  /// call backward() itself. Prior and temperature are the sampler's affair.
  using LossFunction = std::function<at::Tensor(const Batch& batch)>;

  /// The sampler, whose parameters get the gradients, must outlive this object;
  /// any torch optimizer will do.
  ControlVariates(torch::optim::Optimizer& sampler,
                  LossFunction loss_fn,
                  ControlVariatesOptions<Batch> options = {})
      : ControlVariates(std::make_unique<detail::AnchoredGradients>(
                            sampler, "ControlVariates", options.order),
                        std::move(loss_fn),
                        std::move(options)) {}
  virtual ~ControlVariates() = default;
  ControlVariates(const ControlVariates&) = delete;
  ControlVariates& operator=(const ControlVariates&) = delete;
  ControlVariates(ControlVariates&&) = delete;
  ControlVariates& operator=(ControlVariates&&) = delete;

  /// Puts the anchor where the parameters are, with a pass through all data,
  /// and returns their mean loss there.
  ///
  /// The loader is anything that a range-based for goes through, which gives
  /// every datum once, in batches of any sizes: a torch::data loader, or a
  /// vector of batches. Not the very loader of a loop around the call: a
  /// torch::data loader is in one place at a time.
  ///
  /// Throws std::invalid_argument if there are no data, or too many parameters
  /// for order 2, and std::runtime_error if the full gradient or Hessian is not
  /// finite.
  template <typename Loader>
  double set_anchor(Loader&& loader) {
    return gradients_->set_anchor(
        [&](const detail::BatchVisitor& visit) { go_through(loader, visit); });
  }

  /// Adds the gradient of a minibatch that was drawn uniformly, with the
  /// control variate, to the parameters' grad; returns the minibatch's loss at
  /// θ.
  ///
  /// The weight, >= 0, is the gradient's factor: to accumulate the gradient of
  /// a minibatch over parts of it, give each the weight of its share. With
  /// create_graph there is a graph of the gradient, as for
  /// torch::Tensor::backward; PSGLD with Γ needs it. Not with order 2.
  at::Tensor backward(const Batch& batch,
                      double weight = 1.0,
                      bool create_graph = false) {
    return gradients_->backward(
        [&] { return loss_fn_(batch); }, weight, create_graph);
  }

  /// What Python's state_dict() returns, to be saved along with the sampler's.
  /// Tensors are shared, and never changed later.
  StateDict state_dict() const { return gradients_->state_dict(); }

  /// Loads what state_dict() returned, here or in Python. Throws
  /// std::invalid_argument, and loads nothing, if it is of other parameters or
  /// another order.
  void load_state_dict(const StateDict& dict) {
    gradients_->load_state_dict(dict);
  }

 protected:
  ControlVariates(std::unique_ptr<detail::AnchoredGradients> gradients,
                  LossFunction loss_fn,
                  ControlVariatesOptions<Batch> options)
      : gradients_(std::move(gradients)),
        loss_fn_(std::move(loss_fn)),
        options_(std::move(options)) {
    detail::CheckLossFunction(loss_fn_ != nullptr);
  }

  template <typename Loader>
  void go_through(Loader& loader, const detail::BatchVisitor& visit) const {
    int64_t done = 0;
    for (auto&& item : loader) {
      const Batch& batch = item;
      const int64_t size = size_of(batch);
      visit(size, [&] { return loss_fn_(batch); });
      done += size;
      if (options_.progress) options_.progress(done);
    }
  }

  detail::AnchoredGradients& gradients() const { return *gradients_; }

 private:
  int64_t size_of(const Batch& batch) const {
    if (options_.batch_size) return options_.batch_size(batch);
    const std::optional<int64_t> length = detail::BatchLength<Batch>::of(batch);
    if (!length) detail::ThrowUnknownSize(typeid(Batch));
    return *length;
  }

  std::unique_ptr<detail::AnchoredGradients> gradients_;
  LossFunction loss_fn_;
  ControlVariatesOptions<Batch> options_;
};

template <typename LossFunction>
ControlVariates(torch::optim::Optimizer&,
                LossFunction,
                ControlVariatesOptions<detail::BatchOf<LossFunction>> = {})
    -> ControlVariates<detail::BatchOf<LossFunction>>;

/// Control variates whose anchor follows the chain.
///
/// ControlVariates with the anchor put anew where the parameters are, with a
/// pass through all data, at the first backward() and whenever the sampler has
/// made refresh_every steps since. It needs no mode to start from. With SGLD
/// this is SVRG-LD.
///
///   torch_sgmcmc::SVRG estimator(
///       sampler, loss_fn, *large_batches, /*refresh_every=*/100);
///
/// With the sampler's, a state dict resumes in the middle of an epoch, without
/// another pass.
///
/// Reference: A. Dubey et al., Variance Reduction in Stochastic Gradient
/// Langevin Dynamics, NIPS 2016 (SVRG-LD).
template <typename Batch = torch::data::Example<>>
class SVRG : public ControlVariates<Batch> {
 public:
  using typename ControlVariates<Batch>::LossFunction;
  using ControlVariates<Batch>::set_anchor;

  /// The sampler and the loader must outlive this object. refresh_every, >= 1,
  /// is the number of the sampler's steps between passes: N / n for minibatches
  /// of n is one pass for an epoch. The loader is gone through for each pass,
  /// see ControlVariates::set_anchor: the loop that calls backward() needs
  /// another one. Throws std::invalid_argument if refresh_every is out of
  /// range.
  template <typename Loader>
  SVRG(Sampler& sampler,
       LossFunction loss_fn,
       Loader& loader,
       int64_t refresh_every,
       ControlVariatesOptions<Batch> options = {})
      : ControlVariates<Batch>(
            std::make_unique<detail::RefreshedGradients>(
                sampler,
                [this, &loader](const detail::BatchVisitor& visit) {
                  this->go_through(loader, visit);
                },
                refresh_every,
                options.order),
            std::move(loss_fn),
            std::move(options)) {}

  /// Puts the anchor where the parameters are, before its time, with a pass
  /// through the loader of the constructor; returns the mean loss there.
  double set_anchor() { return this->gradients().set_anchor(nullptr); }

  /// The number of the sampler's steps between passes, which may be that of a
  /// state dict that was loaded.
  int64_t refresh_every() const {
    return static_cast<const detail::RefreshedGradients&>(this->gradients())
        .refresh_every();
  }
};

template <typename LossFunction, typename Loader>
SVRG(Sampler&,
     LossFunction,
     Loader&,
     int64_t,
     ControlVariatesOptions<detail::BatchOf<LossFunction>> = {})
    -> SVRG<detail::BatchOf<LossFunction>>;

}  // namespace torch_sgmcmc
