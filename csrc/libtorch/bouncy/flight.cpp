#include "libtorch/bouncy/flight.h"

#include <ATen/ATen.h>

#include <cmath>
#include <stdexcept>
#include <string>

#include "core/counter.h"
#include "libtorch/core/operators.h"
#include "libtorch/core/sampler_impl.h"

namespace torch_sgmcmc {
namespace {

std::vector<at::Tensor> EmptyLike(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  result.reserve(tensors.size());
  for (const at::Tensor& t : tensors) result.push_back(at::empty_like(t));
  return result;
}

std::vector<at::Tensor> Clones(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  result.reserve(tensors.size());
  for (const at::Tensor& t : tensors) result.push_back(t.clone());
  return result;
}

// Hands out tensors, as many as each part has parameters.
class Split {
 public:
  explicit Split(const std::vector<at::Tensor>& tensors) : tensors_(tensors) {}
  std::vector<at::Tensor> Next(const FlightPart& part) {
    const auto begin = tensors_.begin() + static_cast<int64_t>(done_);
    done_ += part.params.size();
    return {begin, tensors_.begin() + static_cast<int64_t>(done_)};
  }

 private:
  const std::vector<at::Tensor>& tensors_;
  size_t done_ = 0;
};

// Takes gradients into V, if it learns.
void Learn(FlightPart& part,
           const std::vector<at::Tensor>& grads,
           const OptionValues& options) {
  if (part.square_average.empty() || !options.get<bool>("adapt")) return;
  part.square_average = Clones(part.square_average);
  sbps_adapt_(part.params,
              grads,
              part.square_average,
              part.weight_decay(),
              options.number("decay"),
              part.prior_mean,
              MeansOf(part.prior_means));
}

// A flight of these parts whose A and Av follow from V and v, or Av from A and
// v. Without them it has the line's sums, if they are known.
std::shared_ptr<Flight> Steered(std::vector<FlightPart> parts,
                                const OptionValues& options,
                                std::vector<at::Tensor> line_sums) {
  if (options.get<bool>("preconditioned") && parts[0].square_average.empty()) {
    for (FlightPart& part : parts) {
      part.direction = at::_foreach_mul(part.preconditioner, part.velocity);
    }
  } else if (options.get<bool>("preconditioned")) {
    double total = 0;
    int64_t count = 0;
    for (const FlightPart& part : parts) {
      total +=
          sbps_preconditioner_sum(part.square_average, options.number("eps"))
              .item<double>();
      for (const at::Tensor& p : part.params) count += p.numel();
    }
    for (FlightPart& part : parts) {
      part.preconditioner = EmptyLike(part.velocity);
      part.direction = EmptyLike(part.velocity);
      const double scale = static_cast<double>(count) / total;
      if (part.prior_precision == 0) {
        sbps_precondition_(part.square_average,
                           part.velocity,
                           part.preconditioner,
                           part.direction,
                           options.number("eps"),
                           scale);
      } else {
        line_sums.push_back(sbps_precondition_sums_(part.square_average,
                                                    part.velocity,
                                                    part.preconditioner,
                                                    part.direction,
                                                    part.origin,
                                                    options.number("eps"),
                                                    scale,
                                                    part.prior_mean,
                                                    MeansOf(part.prior_means)));
      }
    }
  }
  return std::make_shared<Flight>(std::move(parts), line_sums);
}

}  // namespace

Flight::Flight(std::vector<FlightPart> parts,
               const std::vector<at::Tensor>& line_sums)
    : parts_(std::move(parts)) {
  for (const FlightPart& part : parts_) {
    params_.insert(params_.end(), part.params.begin(), part.params.end());
  }
  if (!line_sums.empty()) set_prior(line_sums);
}

std::vector<at::Tensor> Flight::directions() const {
  std::vector<at::Tensor> all;
  for (const FlightPart& part : parts_) {
    all.insert(all.end(), part.directions().begin(), part.directions().end());
  }
  return all;
}

void Flight::place(double time) {
  for (const FlightPart& part : parts_) {
    sbps_place_(part.params, part.origin, part.directions(), time);
  }
  BumpVersions(params_);
  mark(time);
}

std::vector<std::pair<int64_t, const void*>> Flight::marks() const {
  std::vector<std::pair<int64_t, const void*>> result;
  result.reserve(params_.size());
  for (const at::Tensor& param : params_) {
    result.emplace_back(VersionOf(param), param.const_data_ptr());
  }
  return result;
}

void Flight::mark(double time) {
  marked_ = time;
  marks_ = marks();
}

bool Flight::is_at(double time) {
  if (time == marked_ && marks_ == marks()) return true;
  for (const FlightPart& part : parts_) {
    const std::vector<at::Tensor> there = EmptyLike(part.params);
    sbps_place_(there, part.origin, part.directions(), time);
    for (size_t i = 0; i < there.size(); ++i) {
      if (!at::equal(there[i], part.params[i])) return false;
    }
  }
  mark(time);
  return true;
}

std::vector<std::vector<at::Tensor>> Flight::origins(double time) const {
  std::vector<std::vector<at::Tensor>> result;
  for (const FlightPart& part : parts_) {
    result.push_back(EmptyLike(part.origin));
    sbps_place_(result.back(), part.origin, part.directions(), time);
  }
  return result;
}

std::shared_ptr<Flight> Flight::rebased() const {
  std::vector<FlightPart> changed = parts_;
  for (FlightPart& part : changed) {
    for (size_t i = 0; i < part.params.size(); ++i) {
      part.origin[i] = part.params[i].detach().to(
          part.origin[i].scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    }
  }
  return std::make_shared<Flight>(std::move(changed));
}

std::shared_ptr<Flight> Flight::refreshed(double time,
                                          const OptionValues& options,
                                          int64_t seed,
                                          int64_t step) const {
  const auto here = origins(time);
  std::vector<FlightPart> changed = parts_;
  for (size_t i = 0; i < changed.size(); ++i) {
    changed[i].origin = here[i];
    changed[i].velocity = EmptyLike(changed[i].velocity);
  }
  // The same normals twice: for their length, and divided by it.
  double std = 1;
  for (int round = 0; round < 2; ++round) {
    double squares = 0;
    for (const FlightPart& part : changed) {
      gaussian_(part.velocity,
                std,
                part.offsets,
                seed,
                step,
                static_cast<int64_t>(Purpose::kRefreshment),
                std::nullopt,
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

std::shared_ptr<Flight> Flight::reflected(double time,
                                          const std::vector<at::Tensor>& grads,
                                          const OptionValues& options) const {
  const FlightSums s = sums(grads);
  if (!(std::isfinite(s.gradient) && s.gradient > 0)) {
    const std::string text =
        std::string("SBPS got a gradient from the closure's losses that is ") +
        (s.gradient == 0 ? "zero" : "not finite") +
        ", where they grow along the velocity";
    if (s.gradient == 0) throw std::runtime_error(text);
    throw NonfiniteError(text);
  }
  const double scale = 1 / std::sqrt(s.velocity);
  const double gain = 2 * s.product / s.gradient * scale;
  const auto here = origins(time);
  std::vector<FlightPart> changed = parts_;
  std::vector<at::Tensor> line_sums;
  Split split(grads);
  for (size_t i = 0; i < changed.size(); ++i) {
    FlightPart& part = changed[i];
    const std::vector<at::Tensor> part_grads = split.Next(part);
    part.origin = here[i];
    part.velocity = Clones(part.velocity);
    if (options.get<bool>("preconditioned") || part.prior_precision == 0) {
      sbps_reflect_(part.params,
                    part_grads,
                    part.velocity,
                    part.preconditioner,
                    part.weight_decay(),
                    scale,
                    gain,
                    part.prior_mean,
                    MeansOf(part.prior_means));
    } else {
      line_sums.push_back(sbps_reflect_sums_(part.params,
                                             part_grads,
                                             part.velocity,
                                             part.origin,
                                             part.weight_decay(),
                                             scale,
                                             gain,
                                             part.prior_mean,
                                             MeansOf(part.prior_means)));
    }
    Learn(part, part_grads, options);
  }
  return Steered(std::move(changed), options, std::move(line_sums));
}

std::shared_ptr<Flight> Flight::learned(const std::vector<at::Tensor>& grads,
                                        const OptionValues& options) const {
  if (!std::isfinite(sums(grads).gradient)) {
    throw NonfiniteError(
        "SBPS got a gradient from the closure's losses that is not finite");
  }
  auto flight = std::make_shared<Flight>(*this);
  Split split(grads);
  for (FlightPart& part : flight->parts_) {
    Learn(part, split.Next(part), options);
  }
  return flight;
}

FlightSums Flight::sums(const std::vector<at::Tensor>& grads) const {
  FlightSums total;
  Split split(grads);
  for (const FlightPart& part : parts_) {
    const at::Tensor row = sbps_reflection_sums(part.params,
                                                split.Next(part),
                                                part.velocity,
                                                part.preconditioner,
                                                part.weight_decay(),
                                                part.prior_mean,
                                                MeansOf(part.prior_means))
                               .cpu();
    const auto* s = row.const_data_ptr<double>();
    total.product += s[0];
    total.gradient += s[1];
    total.velocity += s[2];
  }
  return total;
}

double Flight::prior(double time) {
  if (!prior_) {
    std::vector<at::Tensor> line_sums;
    for (const FlightPart& part : parts_) {
      if (part.prior_precision == 0) continue;
      line_sums.push_back(sbps_line_sums(part.origin,
                                         part.directions(),
                                         part.prior_mean,
                                         MeansOf(part.prior_means)));
    }
    set_prior(line_sums);
  }
  return prior_->begin + time * prior_->slope;
}

void Flight::set_prior(const std::vector<at::Tensor>& line_sums) {
  prior_.emplace();
  auto next = line_sums.begin();
  for (const FlightPart& part : parts_) {
    if (part.prior_precision == 0) continue;
    const at::Tensor row = (next++)->cpu();
    const auto* s = row.const_data_ptr<double>();
    prior_->begin += part.prior_precision * s[0];
    prior_->slope += part.prior_precision * s[1];
  }
}

}  // namespace torch_sgmcmc
