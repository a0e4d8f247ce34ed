#include "torch_sgmcmc/control_variates.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Type.h>
#include <torch/csrc/autograd/autograd.h>

#include <numeric>
#include <stdexcept>
#include <string>

#include "host/hessian_size.h"
#include "libtorch/core/checks.h"
#include "libtorch/core/closures.h"
#include "libtorch/core/jacobians.h"
#include "libtorch/core/operators.h"
#include "libtorch/core/state_checks.h"
#include "libtorch/core/state_values.h"
#include "libtorch/core/text.h"

namespace torch_sgmcmc::detail {
namespace {

// Puts the parameters' gradients back in the end.
class KeptGradients {
 public:
  explicit KeptGradients(const std::vector<at::Tensor>& params)
      : params_(params) {
    before_.reserve(params.size());
    for (const at::Tensor& param : params) before_.push_back(param.grad());
  }
  ~KeptGradients() {
    for (size_t i = 0; i < params_.size(); ++i) {
      params_[i].mutable_grad() = before_[i];
    }
  }
  KeptGradients(const KeptGradients&) = delete;
  KeptGradients& operator=(const KeptGradients&) = delete;
  KeptGradients(KeptGradients&&) = delete;
  KeptGradients& operator=(KeptGradients&&) = delete;

 private:
  const std::vector<at::Tensor>& params_;
  std::vector<at::Tensor> before_;
};

// What control_variate_ takes of one device.
struct VariateLists {
  c10::Device device;
  std::vector<at::Tensor> grads;
  std::vector<at::Tensor> anchor_grads;
  std::vector<at::Tensor> full_grads;
};

VariateLists& ListsOf(c10::Device device, std::vector<VariateLists>& all) {
  for (VariateLists& lists : all) {
    if (lists.device == device) return lists;
  }
  return all.emplace_back(VariateLists{device, {}, {}, {}});
}

// The type that the operators compute in.
c10::ScalarType Arithmetic(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// The tensors of a list in a state dict, as many and of the shapes of the
// parameters.
std::vector<at::Tensor> ReadTensors(const StateDict& dict,
                                    const char* name,
                                    const std::vector<at::Tensor>& params) {
  const std::vector<c10::IValue> values = ListAt(dict, name);
  if (values.size() != params.size()) {
    Invalid(std::string("Invalid state_dict: ") + name + " has " +
            std::to_string(values.size()) + " tensors, expected " +
            std::to_string(params.size()));
  }
  std::vector<at::Tensor> tensors;
  for (size_t i = 0; i < values.size(); ++i) {
    tensors.emplace_back();
    if (values[i].isNone()) continue;
    CheckTensor(std::string(name) + " of parameter " + std::to_string(i),
                values[i],
                params[i].sizes());
    tensors.back() = values[i].toTensor().to(params[i].device());
  }
  return tensors;
}

int64_t NumElements(const std::vector<at::Tensor>& tensors) {
  return std::accumulate(
      tensors.begin(),
      tensors.end(),
      int64_t{0},
      [](int64_t sum, const at::Tensor& t) { return sum + t.numel(); });
}

// The type that arithmetic with all parameters takes.
c10::ScalarType Widest(const std::vector<at::Tensor>& params) {
  for (const at::Tensor& param : params) {
    if (param.scalar_type() == at::kDouble) return at::kDouble;
  }
  return at::kFloat;
}

// Of no data: [d, d].
at::Tensor NoHessian(const std::vector<at::Tensor>& params) {
  const int64_t d = NumElements(params);
  const auto device =
      params.empty() ? c10::Device(at::kCPU) : params[0].device();
  return at::zeros({d, d}, at::device(device).dtype(at::kDouble));
}

// Of the mean loss of some data, with the gradients `slopes`: [d, d].
at::Tensor HessianOf(const std::vector<at::Tensor>& slopes,
                     const std::vector<at::Tensor>& params,
                     int64_t num_data) {
  std::vector<at::Tensor> parts;
  for (size_t i = 0; i < params.size(); ++i) {
    parts.push_back(slopes[i].defined()
                        ? slopes[i].flatten()
                        : at::zeros_like(params[i].detach()).flatten());
  }
  const at::Tensor row = at::cat(parts);
  const int64_t d = row.numel();
  if (!row.requires_grad()) {  // the loss is linear
    return at::zeros({d, d}, row.options());
  }
  // A network's activations of a datum are about as many as its parameters at
  // most.
  return Jacobian(row, params, d * num_data);
}

// The full gradients with the Hessian's term, H δ.
std::vector<at::Tensor> Bent(std::vector<at::Tensor> full_grads,
                             const at::Tensor& hessian,
                             const std::vector<at::Tensor>& moves) {
  std::vector<at::Tensor> rows;
  std::vector<int64_t> sizes;
  for (const at::Tensor& move : moves) {
    rows.push_back(move.flatten());
    sizes.push_back(move.numel());
  }
  const at::Tensor row = at::cat(rows).to(hessian.scalar_type());
  const std::vector<at::Tensor> parts =
      at::mv(hessian, row).split_with_sizes(sizes);
  for (size_t i = 0; i < moves.size(); ++i) {
    at::Tensor& f = full_grads[i];
    if (f.defined()) f = f + parts[i].view(f.sizes()).to(f.scalar_type());
  }
  return full_grads;
}

at::Tensor CopyAs(const at::Tensor& tensor, c10::ScalarType dtype) {
  return tensor.detach().to(dtype, /*non_blocking=*/false, /*copy=*/true);
}

}  // namespace

void CheckLossFunction(bool is_callable) {
  if (!is_callable) Invalid("Invalid loss_fn: nullptr (must be callable)");
}

void ThrowUnknownSize(const std::type_info& type) {
  throw std::runtime_error("the number of data in a batch of type " +
                           c10::demangle(type.name()) +
                           " is unknown: give batch_size, a function that "
                           "returns it");
}

AnchoredGradients::AnchoredGradients(torch::optim::Optimizer& sampler,
                                     const char* name,
                                     int64_t order)
    : sampler_(sampler), name_(name), order_(order) {
  CheckInteger("order", order, 1, 3);
  check_order(trained());
}

double AnchoredGradients::set_anchor(const FullPass& pass) {
  const std::vector<at::Tensor> params = trained();
  check_order(params);
  double total_loss = 0;
  int64_t count = 0;
  std::vector<at::Tensor> sums(params.size());
  at::Tensor hessian;
  if (order_ == 2) hessian = NoHessian(params);
  {
    const KeptGradients kept(params);
    pass([&](int64_t size, const BatchLoss& loss_fn) {
      if (size < 1) {
        throw std::runtime_error("batch_size returned " + std::to_string(size) +
                                 " for a batch (must be an int >= 1)");
      }
      const auto add_hessian = [&](const at::Tensor& loss) -> Roots {
        hessian.add_(HessianOf(slopes(params, loss), params, size), size);
        return {};
      };
      const Gradients batch =
          gradients(params,
                    loss_fn,
                    /*create_graph=*/false,
                    order_ == 2 ? Look(add_hessian) : Look());
      total_loss += batch.loss.item<double>() * static_cast<double>(size);
      count += size;
      for (size_t i = 0; i < sums.size(); ++i) {
        const at::Tensor& grad = batch.grads[i];
        if (!grad.defined()) continue;
        if (!sums[i].defined()) sums[i] = at::zeros_like(grad, at::kDouble);
        sums[i].add_(grad, size);
      }
    });
  }
  if (count == 0) Invalid("Invalid loader: it has no data");
  for (size_t i = 0; i < sums.size(); ++i) {
    if (!sums[i].defined()) continue;
    sums[i] = (sums[i] / count).to(Arithmetic(params[i]));
    if (!sums[i].isfinite().all().item<bool>()) {
      throw std::runtime_error(
          "the full gradient is not finite: there can be no anchor here");
    }
  }
  if (hessian.defined()) {
    hessian = (hessian / count).to(Widest(params));
    if (!hessian.isfinite().all().item<bool>()) {
      throw std::runtime_error(
          "the full Hessian is not finite: there can be no anchor here");
    }
  }
  std::vector<at::Tensor> anchor;
  anchor.reserve(params.size());
  for (const at::Tensor& param : params) {
    anchor.push_back(param.detach().clone());
  }
  anchor_ = std::move(anchor);
  full_grads_ = std::move(sums);
  full_hessian_ = std::move(hessian);
  return total_loss / static_cast<double>(count);
}

at::Tensor AnchoredGradients::backward(const BatchLoss& loss,
                                       double weight,
                                       bool create_graph) {
  CheckReal("weight", weight);
  if (create_graph && order_ == 2) {
    Invalid(
        "Invalid create_graph: true (must be false with order(2), whose "
        "expansion has no graph: use order(1), or PSGLD's gamma(false))");
  }
  const std::vector<at::Tensor> params = trained();
  const std::vector<at::Tensor>& anchor = fitting_anchor(params);
  std::vector<at::Tensor> full = full_grads_;
  Look look;
  if (full_hessian_.defined()) {
    // In the parameters' type: the same for the minibatch and for all data.
    std::vector<at::Tensor> moves;
    for (size_t i = 0; i < params.size(); ++i) {
      moves.push_back(params[i].detach() - anchor[i]);
    }
    full = Bent(std::move(full), full_hessian_, moves);
    look = [&params, moves, this](const at::Tensor& at_anchor) {
      return hessian_product(params, moves, at_anchor);
    };
  }
  Gradients result;
  {
    const KeptGradients kept(params);
    Gradients at_anchor;
    {
      const Exchanged exchanged(params, anchor);
      at_anchor = gradients(params, loss, /*create_graph=*/false, look);
    }
    result = gradients(params, loss, create_graph);
    combine(params, at_anchor.grads, full, create_graph, result.grads);
  }
  for (size_t i = 0; i < params.size(); ++i) {
    at::Tensor grad = result.grads[i];
    if (!grad.defined()) continue;
    if (weight != 1.0) grad = grad * weight;
    at::Tensor& total = params[i].mutable_grad();
    total = total.defined() ? total + grad : grad;
  }
  return result.loss;
}

StateDict AnchoredGradients::state_dict() const {
  if (!anchor_) {
    return {{"anchor", c10::IValue()}, {"full_grads", c10::IValue()}};
  }
  std::vector<c10::IValue> full;
  for (const at::Tensor& grad : full_grads_) full.push_back(OrNone(grad));
  StateDict dict{{"anchor", ListOfValues(*anchor_)},
                 {"full_grads", ListOfValues(full)}};
  if (full_hessian_.defined()) dict.set("full_hessian", full_hessian_);
  return dict;
}

void AnchoredGradients::load_state_dict(const StateDict& dict) {
  if (dict.at("anchor").isNone()) {
    anchor_ = std::nullopt;
    full_grads_.clear();
    full_hessian_.reset();
    return;
  }
  const int64_t order = dict.contains("full_hessian") ? 2 : 1;
  if (order != order_) {
    Invalid("Invalid state_dict: it is of order " + std::to_string(order) +
            ", expected " + std::to_string(order_));
  }
  const std::vector<at::Tensor> params = trained();
  std::vector<at::Tensor> anchor = ReadTensors(dict, "anchor", params);
  std::vector<at::Tensor> full = ReadTensors(dict, "full_grads", params);
  for (size_t i = 0; i < params.size(); ++i) {
    if (!anchor[i].defined()) {
      Invalid("Invalid state_dict: anchor of parameter " + std::to_string(i) +
              " is a none (must be a Tensor)");
    }
    // Copies: the caller may change what it holds.
    anchor[i] = CopyAs(anchor[i], params[i].scalar_type());
    if (full[i].defined()) full[i] = CopyAs(full[i], Arithmetic(params[i]));
  }
  at::Tensor hessian;
  if (order == 2) {
    const int64_t d = NumElements(params);
    const c10::IValue& value = dict.at("full_hessian");
    CheckTensor("full_hessian", value, {d, d});
    hessian = CopyAs(value.toTensor().to(params[0].device()), Widest(params));
  }
  anchor_ = std::move(anchor);
  full_grads_ = std::move(full);
  full_hessian_ = std::move(hessian);
}

// The sampler's parameters that are not frozen.
std::vector<at::Tensor> AnchoredGradients::trained() const {
  std::vector<at::Tensor> params;
  for (const auto& group : sampler_.param_groups()) {
    for (const at::Tensor& param : group.params()) {
      if (param.requires_grad()) params.push_back(param);
    }
  }
  return params;
}

// Throws if there can be no Hessian of all data.
void AnchoredGradients::check_order(
    const std::vector<at::Tensor>& params) const {
  if (order_ == 1) return;
  CheckHessianSize(NumElements(params));
  for (const at::Tensor& param : params) {
    if (param.device() == params[0].device()) continue;
    Invalid("Invalid order: 2 (must be 1 for parameters on several devices)");
  }
}

const std::vector<at::Tensor>& AnchoredGradients::fitting_anchor(
    const std::vector<at::Tensor>& params) const {
  if (!anchor_) {
    throw std::runtime_error(std::string(name_) +
                             " has no anchor yet: call set_anchor() first");
  }
  bool fits = params.size() == anchor_->size();
  for (size_t i = 0; fits && i < params.size(); ++i) {
    const at::Tensor& a = (*anchor_)[i];
    fits = params[i].sizes() == a.sizes() &&
           params[i].scalar_type() == a.scalar_type() &&
           params[i].device() == a.device();
  }
  if (!fits) {
    throw std::runtime_error(
        std::string(name_) +
        " has an anchor for other parameters than the sampler's (their number, "
        "a shape, dtype or device has changed): call set_anchor() again");
  }
  return *anchor_;
}

// The loss of a batch and its gradients, taken out of the parameters' grad. By
// backward(), and not by torch::autograd::grad, so that hooks run, for instance
// those that average over data-parallel replicas. What `look` makes of the loss
// is differentiated along with it.
AnchoredGradients::Gradients AnchoredGradients::gradients(
    const std::vector<at::Tensor>& params,
    const BatchLoss& loss_fn,
    bool create_graph,
    const Look& look) const {
  for (const at::Tensor& param : params) param.mutable_grad().reset();
  const at::AutoGradMode enable_grad(true);
  Gradients result{loss_fn(), {}};
  const at::Tensor& loss = result.loss;
  if (!loss.defined()) {
    throw std::runtime_error(
        "loss_fn returned an undefined Tensor, expected the loss as a tensor");
  }
  if (loss.numel() != 1) {
    throw std::runtime_error("loss_fn returned a tensor of shape " +
                             Shape(loss.sizes()) + ", expected one number");
  }
  for (const at::Tensor& param : params) {
    if (!param.grad().defined()) continue;
    throw std::runtime_error(
        "loss_fn has made gradients: it must return the loss and leave "
        "backward() to the estimator");
  }
  if (!loss.requires_grad()) {
    throw std::runtime_error(
        "loss_fn returned a loss without a graph: it must compute it from the "
        "sampler's parameters, with gradients enabled");
  }
  Roots roots;
  if (look) roots = look(loss);
  roots.tensors.insert(roots.tensors.begin(), loss);
  roots.weights.insert(roots.weights.begin(), at::Tensor());
  torch::autograd::backward(roots.tensors,
                            roots.weights,
                            /*retain_graph=*/std::nullopt,
                            create_graph);
  for (const at::Tensor& param : params) result.grads.push_back(param.grad());
  check_dense(result.grads);
  return result;
}

// The gradients of a loss, with a graph.
std::vector<at::Tensor> AnchoredGradients::slopes(
    const std::vector<at::Tensor>& params, const at::Tensor& loss) const {
  std::vector<at::Tensor> result =
      torch::autograd::grad({loss},
                            params,
                            /*grad_outputs=*/{},
                            /*retain_graph=*/std::nullopt,
                            /*create_graph=*/true,
                            /*allow_unused=*/true);
  check_dense(result);
  return result;
}

// What has the gradient h δ.
AnchoredGradients::Roots AnchoredGradients::hessian_product(
    const std::vector<at::Tensor>& params,
    const std::vector<at::Tensor>& moves,
    const at::Tensor& loss) const {
  Roots roots;
  const std::vector<at::Tensor> at_anchor = slopes(params, loss);
  for (size_t i = 0; i < params.size(); ++i) {
    if (!at_anchor[i].defined() || !at_anchor[i].requires_grad()) continue;
    roots.tensors.push_back(at_anchor[i]);
    roots.weights.push_back(moves[i]);
  }
  return roots;
}

void AnchoredGradients::check_dense(
    const std::vector<at::Tensor>& grads) const {
  for (const at::Tensor& grad : grads) {
    if (grad.defined() && grad.layout() != at::kStrided) {
      throw std::runtime_error(
          std::string(name_) +
          " does not support sparse gradients (for an Embedding, use "
          "sparse(false))");
    }
  }
}

// Makes (g - a) + f of grads; one that is missing counts as zero.
void AnchoredGradients::combine(const std::vector<at::Tensor>& params,
                                const std::vector<at::Tensor>& anchor_grads,
                                const std::vector<at::Tensor>& full_grads,
                                bool create_graph,
                                std::vector<at::Tensor>& grads) const {
  std::vector<VariateLists> by_device;
  for (size_t i = 0; i < params.size(); ++i) {
    at::Tensor g = grads[i];
    at::Tensor a = anchor_grads[i];
    at::Tensor f = full_grads[i];
    if (!g.defined() && !a.defined() && !f.defined()) continue;
    // No graph can miss its gradient: only values are made up here.
    if (!g.defined()) g = at::zeros_like(params[i].detach());
    if (!a.defined()) a = at::zeros_like(g.detach());
    if (!f.defined()) f = at::zeros_like(g.detach(), Arithmetic(g));
    if (g.numel() > 0 && g.const_data_ptr() == a.const_data_ptr()) {
      throw std::runtime_error(
          std::string(name_) +
          " got the gradients at θ in the memory of those at the anchor, which "
          "it still needs: gradients must not be reused");
    }
    grads[i] = create_graph
                   ? ((g.to(f.scalar_type()) - a) + f).to(g.scalar_type())
                   : g;
    if (create_graph) continue;
    VariateLists& lists = ListsOf(params[i].device(), by_device);
    lists.grads.push_back(g);
    lists.anchor_grads.push_back(a);
    lists.full_grads.push_back(f);
  }
  for (const VariateLists& lists : by_device) {
    control_variate_(lists.grads, lists.anchor_grads, lists.full_grads);
  }
}

RefreshedGradients::RefreshedGradients(Sampler& sampler,
                                       FullPass pass,
                                       int64_t refresh_every,
                                       int64_t order)
    : AnchoredGradients(sampler, "SVRG", order),
      sampler_(sampler),
      pass_(std::move(pass)),
      refresh_every_(refresh_every) {
  CheckInteger("refresh_every", refresh_every, 1);
  if (order == 1) return;
  Invalid("Invalid order: 2 (must be 1 for SVRG, whose anchor moves)");
}

double RefreshedGradients::set_anchor(const FullPass& pass) {
  const double loss =
      AnchoredGradients::set_anchor(pass == nullptr ? pass_ : pass);
  anchor_step_ = step();
  return loss;
}

at::Tensor RefreshedGradients::backward(const BatchLoss& loss,
                                        double weight,
                                        bool create_graph) {
  // A sampler whose step count has gone back was given another state.
  const int64_t age = step() - anchor_step_;
  if (!has_anchor() || age < 0 || age >= refresh_every_) set_anchor(pass_);
  return AnchoredGradients::backward(loss, weight, create_graph);
}

StateDict RefreshedGradients::state_dict() const {
  StateDict dict = AnchoredGradients::state_dict();
  dict.set("anchor_step", anchor_step_);
  dict.set("refresh_every", refresh_every_);
  return dict;
}

void RefreshedGradients::load_state_dict(const StateDict& dict) {
  const auto step_of_anchor = ValueAt<int64_t>(dict, "anchor_step");
  const auto steps_between = ValueAt<int64_t>(dict, "refresh_every");
  CheckInteger("anchor_step", step_of_anchor);
  CheckInteger("refresh_every", steps_between, 1);
  AnchoredGradients::load_state_dict(dict);
  anchor_step_ = step_of_anchor;
  refresh_every_ = steps_between;
}

// The number of steps that the sampler has made.
int64_t RefreshedGradients::step() const { return sampler_.num_steps(); }

}  // namespace torch_sgmcmc::detail
