#include "libtorch/trajectory.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <string>

#include "libtorch/checks.h"
#include "libtorch/operators.h"
#include "libtorch/sampler_impl.h"
#include "random/counter.h"

namespace torch_sgmcmc {
namespace {

Tensors EmptyLike(Tensors tensors) {
  for (at::Tensor& t : tensors) t = at::empty_like(t);
  return tensors;
}

Tensors Clones(Tensors tensors) {
  for (at::Tensor& t : tensors) t = t.clone();
  return tensors;
}

// Splits tensors by parts.
class Split {
 public:
  explicit Split(const Tensors& tensors) : tensors_(tensors) {}
  Tensors Next(const TrajectoryPart& part) {
    const auto begin = tensors_.begin() + static_cast<int64_t>(done_);
    done_ += part.params.size();
    return {begin, tensors_.begin() + static_cast<int64_t>(done_)};
  }

 private:
  const Tensors& tensors_;
  size_t done_ = 0;
};

void Learn(TrajectoryPart& part, const Tensors& grads,
           const OptionValues& options) {
  if (part.square_average.empty() || !options.get<bool>("adapt")) return;
  part.square_average = Clones(part.square_average);
  sbps_adapt_(part.params, grads, part.square_average, part.weight_decay(),
              options.number("decay"), part.prior_mean,
              MeansOf(part.prior_means));
}

// A trajectory with A and Av computed from V and v; without a preconditioner,
// with the line's sums, if known.
std::shared_ptr<Trajectory> Steered(std::vector<TrajectoryPart> parts,
                                    const OptionValues& options,
                                    Tensors line_sums) {
  if (options.get<bool>("preconditioned")) {
    double total = 0;
    int64_t count = 0;
    for (const TrajectoryPart& part : parts) {
      total +=
          sbps_preconditioner_sum(part.square_average, options.number("eps"))
              .item<double>();
      for (const at::Tensor& p : part.params) count += p.numel();
    }
    for (TrajectoryPart& part : parts) {
      part.preconditioner = EmptyLike(part.velocity);
      part.direction = EmptyLike(part.velocity);
      const double scale = static_cast<double>(count) / total;
      if (part.prior_precision == 0) {
        sbps_precondition_(part.square_average, part.velocity,
                           part.preconditioner, part.direction,
                           options.number("eps"), scale);
      } else {
        line_sums.push_back(sbps_precondition_sums_(
            part.square_average, part.velocity, part.preconditioner,
            part.direction, part.origin, options.number("eps"), scale,
            part.prior_mean, MeansOf(part.prior_means)));
      }
    }
  }
  return std::make_shared<Trajectory>(std::move(parts), line_sums);
}

constexpr const char* kUnrelated =
    "SBPS got losses from the closure that do not depend on its parameters "
    "(were they computed under a torch::NoGradGuard?)";

void CheckLosses(const at::Tensor& losses, bool has_grads) {
  if (!losses.defined()) {
    Raise(
        "SBPS got an undefined Tensor from the closure (must return the losses "
        "of the examples, a Tensor of shape [n])");
  }
  if (has_grads) {
    Raise(
        "SBPS found gradients after the closure: it must return the losses of "
        "the examples and not call backward()");
  }
  if (losses.dim() != 1) {
    Raise("SBPS got losses of shape ", Shape(losses.sizes()),
          " from the closure (must be the examples' losses, of shape [n]",
          (losses.dim() == 0 ? ": use reduction(torch::kNone))" : ")"));
  }
  if (losses.numel() < 2) {
    Raise("SBPS got the loss of ", losses.numel(),
          " example from the closure (must be of 2 at "
          "least, to estimate the noise of a minibatch)");
  }
  if (!losses.requires_grad()) Raise(kUnrelated);
  if (!losses.is_floating_point()) {
    Raise("SBPS got complex losses from the closure (must be real numbers)");
  }
}

}  // namespace

Trajectory::Trajectory(std::vector<TrajectoryPart> parts,
                       const Tensors& line_sums)
    : parts_(std::move(parts)) {
  for (const TrajectoryPart& part : parts_) {
    params_.insert(params_.end(), part.params.begin(), part.params.end());
  }
  if (!line_sums.empty()) set_prior(line_sums);
}

Tensors Trajectory::directions() const {
  Tensors all;
  for (const TrajectoryPart& part : parts_) {
    all.insert(all.end(), part.directions().begin(), part.directions().end());
  }
  return all;
}

void Trajectory::place(double time) {
  for (const TrajectoryPart& part : parts_) {
    sbps_place_(part.params, part.origin, part.directions(), time);
  }
  BumpVersions(params_);
  mark(time);
}

std::vector<std::pair<int64_t, const void*>> Trajectory::marks() const {
  std::vector<std::pair<int64_t, const void*>> result;
  result.reserve(params_.size());
  for (const at::Tensor& param : params_) {
    result.emplace_back(VersionOf(param), param.const_data_ptr());
  }
  return result;
}

void Trajectory::mark(double time) {
  marked_ = time;
  marks_ = marks();
}

bool Trajectory::is_at(double time) {
  if (time == marked_ && marks_ == marks()) return true;
  for (const TrajectoryPart& part : parts_) {
    const Tensors there = EmptyLike(part.params);
    sbps_place_(there, part.origin, part.directions(), time);
    for (size_t i = 0; i < there.size(); ++i) {
      if (!at::equal(there[i], part.params[i])) return false;
    }
  }
  mark(time);
  return true;
}

std::vector<Tensors> Trajectory::origins(double time) const {
  std::vector<Tensors> result;
  for (const TrajectoryPart& part : parts_) {
    result.push_back(EmptyLike(part.origin));
    sbps_place_(result.back(), part.origin, part.directions(), time);
  }
  return result;
}

std::shared_ptr<Trajectory> Trajectory::rebased() const {
  std::vector<TrajectoryPart> changed = parts_;
  for (TrajectoryPart& part : changed) {
    for (size_t i = 0; i < part.params.size(); ++i) {
      part.origin[i] = part.params[i].detach().to(
          part.origin[i].scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    }
  }
  return std::make_shared<Trajectory>(std::move(changed));
}

std::shared_ptr<Trajectory> Trajectory::refreshed(double time,
                                                  const OptionValues& options,
                                                  int64_t seed,
                                                  int64_t step) const {
  const auto here = origins(time);
  std::vector<TrajectoryPart> changed = parts_;
  for (size_t i = 0; i < changed.size(); ++i) {
    changed[i].origin = here[i];
    changed[i].velocity = EmptyLike(changed[i].velocity);
  }
  // The same normals twice: for their length, and scaled by it.
  double std = 1;
  for (int round = 0; round < 2; ++round) {
    double squares = 0;
    for (const TrajectoryPart& part : changed) {
      gaussian_(part.velocity, std, part.offsets, seed, step,
                static_cast<int64_t>(Purpose::kRefreshment), std::nullopt,
                std::nullopt,
                /*num_chains=*/0);
      squares += sum_of_squares(part.velocity).item<double>();
    }
    if (squares == 0) {  // once in 2^31 draws of a single number
      changed[0].velocity[0].view(-1)[0] = 1.0;
      break;
    }
    std /= std::sqrt(squares);
  }
  return Steered(std::move(changed), options, {});
}

std::shared_ptr<Trajectory> Trajectory::reflected(
    double time, const Tensors& grads, const OptionValues& options) const {
  const TrajectorySums s = sums(grads);
  if (!(std::isfinite(s.gradient) && s.gradient > 0)) {
    const std::string text =
        std::string("SBPS got a gradient from the closure's losses that is ") +
        (s.gradient == 0 ? "zero" : "not finite") +
        ", where they grow along the velocity";
    if (s.gradient == 0) Raise(text);
    throw NonfiniteError(text);
  }
  const double scale = 1 / std::sqrt(s.velocity);
  const double gain = 2 * s.product / s.gradient * scale;
  const auto here = origins(time);
  std::vector<TrajectoryPart> changed = parts_;
  Tensors line_sums;
  Split split(grads);
  for (size_t i = 0; i < changed.size(); ++i) {
    TrajectoryPart& part = changed[i];
    const Tensors part_grads = split.Next(part);
    part.origin = here[i];
    part.velocity = Clones(part.velocity);
    if (options.get<bool>("preconditioned") || part.prior_precision == 0) {
      sbps_reflect_(part.params, part_grads, part.velocity, part.preconditioner,
                    part.weight_decay(), scale, gain, part.prior_mean,
                    MeansOf(part.prior_means));
    } else {
      line_sums.push_back(
          sbps_reflect_sums_(part.params, part_grads, part.velocity,
                             part.origin, part.weight_decay(), scale, gain,
                             part.prior_mean, MeansOf(part.prior_means)));
    }
    Learn(part, part_grads, options);
  }
  return Steered(std::move(changed), options, std::move(line_sums));
}

std::shared_ptr<Trajectory> Trajectory::learned(
    const Tensors& grads, const OptionValues& options) const {
  if (!std::isfinite(sums(grads).gradient)) {
    throw NonfiniteError(
        "SBPS got a gradient from the closure's losses that is not finite");
  }
  auto trajectory = std::make_shared<Trajectory>(*this);
  Split split(grads);
  for (TrajectoryPart& part : trajectory->parts_) {
    Learn(part, split.Next(part), options);
  }
  return trajectory;
}

TrajectorySums Trajectory::sums(const Tensors& grads) const {
  TrajectorySums total;
  Split split(grads);
  for (const TrajectoryPart& part : parts_) {
    const at::Tensor row =
        sbps_reflection_sums(part.params, split.Next(part), part.velocity,
                             part.preconditioner, part.weight_decay(),
                             part.prior_mean, MeansOf(part.prior_means))
            .cpu();
    const auto* s = row.const_data_ptr<double>();
    total.product += s[0];
    total.gradient += s[1];
    total.velocity += s[2];
  }
  return total;
}

double Trajectory::prior(double time) {
  if (!prior_) {
    Tensors line_sums;
    for (const TrajectoryPart& part : parts_) {
      if (part.prior_precision == 0) continue;
      line_sums.push_back(sbps_line_sums(part.origin, part.directions(),
                                         part.prior_mean,
                                         MeansOf(part.prior_means)));
    }
    set_prior(line_sums);
  }
  return prior_->begin + time * prior_->slope;
}

void Trajectory::set_prior(const Tensors& line_sums) {
  prior_.emplace();
  auto next = line_sums.begin();
  for (const TrajectoryPart& part : parts_) {
    if (part.prior_precision == 0) continue;
    const at::Tensor row = (next++)->cpu();
    const auto* s = row.const_data_ptr<double>();
    prior_->begin += part.prior_precision * s[0];
    prior_->slope += part.prior_precision * s[1];
  }
}

// ---- Minibatches ------------------------------------------------------------

// The gradient of the weighted sum of losses is linear in the weights, and so
// is its product with a direction, whose coefficients are the derivatives.
MinibatchView Observe(const LossClosure& closure, const Trajectory& trajectory,
                      const Tensors& all_params) {
  const auto clear = [&] {
    bool found = false;
    for (const at::Tensor& p : all_params) {
      found = found || p.grad().defined();
      p.mutable_grad().reset();
    }
    return found;
  };
  clear();
  Tensors along = trajectory.directions();
  for (size_t i = 0; i < along.size(); ++i) {
    along[i] = along[i].to(trajectory.params()[i].scalar_type());
  }
  const at::AutoGradMode enable_grad(true);
  const at::Tensor losses = closure();
  CheckLosses(losses, clear());
  const at::Tensor weights =
      at::full_like(losses.detach(), 1.0 / static_cast<double>(losses.numel()))
          .requires_grad_();
  const Tensors grads =
      torch::autograd::grad({losses}, trajectory.params(), {weights},
                            /*retain_graph=*/std::nullopt,
                            /*create_graph=*/true,
                            /*allow_unused=*/true);
  Tensors used;
  Tensors directions;
  for (size_t i = 0; i < grads.size(); ++i) {
    if (!grads[i].defined()) continue;
    used.push_back(grads[i]);
    directions.push_back(along[i]);
  }
  if (used.empty()) Raise(kUnrelated);
  const at::Tensor derivatives =
      torch::autograd::grad(used, {weights}, directions)[0];
  MinibatchView result{losses.detach(), derivatives.detach(), {}};
  for (size_t i = 0; i < grads.size(); ++i) {
    result.grads.push_back(grads[i].defined()
                               ? grads[i].detach()
                               : at::zeros_like(trajectory.params()[i]));
  }
  return result;
}

RateEstimate RateOf(Trajectory& trajectory, double time,
                    const MinibatchView& seen, const OptionValues& options) {
  const double num_data = options.num_data();
  if (!options.get<bool>("replacement") &&
      static_cast<double>(seen.losses.numel()) > num_data) {
    Raise("SBPS got the losses of ", seen.losses.numel(),
          " examples from the closure, and num_data = ", Rounded(num_data),
          " (must not be more; if examples are drawn with replacement, set "
          "replacement(true))");
  }
  const auto row = [](const at::Tensor& t) {
    return t.to(at::kCPU, at::kDouble).contiguous();
  };
  const at::Tensor losses = row(seen.losses);
  const at::Tensor derivatives = row(seen.derivatives);
  const Moments m =
      MomentsOf(losses.const_data_ptr<double>(),
                derivatives.const_data_ptr<double>(), losses.numel());
  if (m.bad > 0) {
    throw NonfiniteError(
        c10::str("SBPS got ", m.bad, " of ", seen.losses.numel(),
                 " losses from the closure that are not finite"),
        seen.losses);
  }
  const RateEstimate rate =
      RateOf(m, num_data, options.temperature(),
             options.get<bool>("replacement"), trajectory.prior(time));
  if (!rate.finite()) {
    throw NonfiniteError(
        "SBPS got losses from the closure whose derivatives are not finite",
        seen.losses);
  }
  return rate;
}

}  // namespace torch_sgmcmc
