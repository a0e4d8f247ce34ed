// A straight line of the bouncy particle:
// torch_sgmcmc/samplers/_sbps/trajectory.py in C++. A bounce or refreshment
// makes another trajectory, so that a failed step changes nothing.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "host/bounce_clock.h"
#include "libtorch/options.h"

namespace torch_sgmcmc {

// Moving parameters on one device with one prior, and their state.
struct TrajectoryPart {
  double prior_precision = 0;
  double num_data = 1;
  double prior_mean = 0;
  // Empty if prior_mean is the mean.
  Tensors prior_means = {};
  Tensors params = {};
  std::vector<int64_t> offsets = {};
  Tensors origin = {};
  Tensors velocity = {};
  // Empty unless preconditioned:
  Tensors square_average = {};
  Tensors preconditioner = {};
  Tensors direction = {};

  const Tensors& directions() const {
    return direction.empty() ? velocity : direction;
  }
  double weight_decay() const { return prior_precision / num_data; }
};

// What the state of a parameter keeps of a trajectory, by its keys; unless it
// is preconditioned, of the first two alone.
constexpr std::pair<const char*, Tensors TrajectoryPart::*> kTrajectoryState[] =
    {{"origin", &TrajectoryPart::origin},
     {"velocity", &TrajectoryPart::velocity},
     {"square_average", &TrajectoryPart::square_average},
     {"preconditioner", &TrajectoryPart::preconditioner},
     {"direction", &TrajectoryPart::direction}};

struct TrajectorySums {
  double product = 0;   // v . Ag
  double gradient = 0;  // |Ag|^2
  double velocity = 0;  // |v|^2
};

// The prior's part of the directional derivative along a line.
struct PriorLine {
  double begin = 0;
  double slope = 0;
};

class Trajectory {
 public:
  // `line_sums` are sbps_line_sums of the parts with a prior, if known.
  explicit Trajectory(std::vector<TrajectoryPart> parts,
                      const Tensors& line_sums = {});

  const std::vector<TrajectoryPart>& parts() const { return parts_; }
  std::vector<TrajectoryPart>& parts() { return parts_; }
  const Tensors& params() const { return params_; }
  Tensors directions() const;
  bool preconditioned() const { return !parts_[0].preconditioner.empty(); }

  // Moves the parameters to a time since the line's start.
  void place(double time);
  // Records that the parameters are at the place of this time.
  void mark(double time);
  // True if the parameters are at the place of this time.
  bool is_at(double time);

  // Other lines from here.
  std::shared_ptr<Trajectory> rebased() const;
  std::shared_ptr<Trajectory> refreshed(double time,
                                        const OptionValues& options,
                                        int64_t seed, int64_t step) const;
  std::shared_ptr<Trajectory> reflected(double time, const Tensors& grads,
                                        const OptionValues& options) const;
  // The same line with V after learning. A is updated at the line's end, since
  // Av must not turn within the line on which G is regressed.
  std::shared_ptr<Trajectory> learned(const Tensors& grads,
                                      const OptionValues& options) const;

  TrajectorySums sums(const Tensors& grads) const;
  // The derivative of the prior's part of U along the line, not at the rounded
  // parameters.
  double prior(double time);

 private:
  std::vector<Tensors> origins(double time) const;
  std::vector<std::pair<int64_t, const void*>> marks() const;

  void set_prior(const Tensors& line_sums);

  std::vector<TrajectoryPart> parts_;
  Tensors params_;
  std::optional<PriorLine> prior_;
  std::vector<std::pair<int64_t, const void*>> marks_;
  double marked_ = std::numeric_limits<double>::quiet_NaN();
};

// A minibatch's losses and derivatives along a direction.
struct MinibatchView {
  at::Tensor losses;
  at::Tensor derivatives;
  Tensors grads;  // of the mean loss
};

// Calls the closure once and differentiates its losses along the trajectory.
// Throws unless there are losses of 2 examples and `all_params` have no
// gradients.
MinibatchView Observe(const LossClosure& closure, const Trajectory& trajectory,
                      const Tensors& all_params);

// The rate of change of U / T along the trajectory, at a time since the line's
// start.
RateEstimate RateOf(Trajectory& trajectory, double time,
                    const MinibatchView& seen, const OptionValues& options);

}  // namespace torch_sgmcmc
