#include "torch_sgmcmc/hmcecs.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/counter.h"
#include "host/ecs_schedule.h"
#include "host/leapfrog_steps.h"
#include "libtorch/core/checks.h"
#include "libtorch/core/closures.h"
#include "libtorch/core/nonfinite.h"
#include "libtorch/core/operators.h"
#include "libtorch/core/step_observer.h"
#include "libtorch/core/text.h"
#include "libtorch/core/trajectory_heat.h"
#include "libtorch/ecs/prior.h"
#include "libtorch/ecs/sampling.h"
#include "libtorch/ecs/target.h"
#include "libtorch/ecs/whitening.h"

namespace torch_sgmcmc {
namespace {

constexpr const char* kHMCECSNeedsClosure =
    "HMCECS.step() needs a closure, which is called several times a step:\n"
    "\n"
    "    sampler.step([&](const torch::Tensor& indices) {\n"
    "      return -cross_entropy(net->forward(x.index({indices})),\n"
    "          y.index({indices}),\n"
    "          CrossEntropyFuncOptions().reduction(torch::kNone));\n"
    "    });";

// Which of a step's two Metropolis tests.
constexpr int64_t kOfTrajectory = 0;
constexpr int64_t kOfSubsample = 1;

std::vector<at::Tensor> CopiesOf(const std::vector<at::Tensor>& params) {
  std::vector<at::Tensor> copies;
  copies.reserve(params.size());
  for (const at::Tensor& param : params) {
    copies.push_back(param.detach().clone());
  }
  return copies;
}

void PutBack(const std::vector<at::Tensor>& params,
             const std::vector<at::Tensor>& copies) {
  for (size_t i = 0; i < params.size(); ++i) params[i].copy_(copies[i]);
}

// Where the parameters are, for gauges: flat, as they move.
std::vector<Moving> MovingOf(const std::vector<at::Tensor>& params,
                             const ECSPoint& point,
                             const at::Tensor& r) {
  std::vector<int64_t> sizes;
  sizes.reserve(params.size());
  for (const at::Tensor& p : params) sizes.push_back(p.numel());
  Moving moving;
  moving.params = params;
  moving.grads = point.gradient.split_with_sizes(sizes);
  moving.positions = point.theta.split_with_sizes(sizes);
  moving.momenta = r.split_with_sizes(sizes);
  return {std::move(moving)};  // the gradient has the prior's
}

}  // namespace

HMCECS::HMCECS(std::vector<at::Tensor> params, const HMCECSOptions& defaults)
    : SamplerOf(std::move(params), defaults.complete()) {}

HMCECS::HMCECS(
    const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
    const HMCECSOptions& defaults)
    : SamplerOf(param_groups, defaults.complete()) {}

// A step does all by itself.
void HMCECS::update(const Work&) {}

// ---- What it has done -------------------------------------------------------

int64_t HMCECS::sign() const { return progress().sign_.get(); }

double HMCECS::rate(int64_t count) const {
  const int64_t all = progress().num_trajectories_.get();
  if (all == 0) return std::numeric_limits<double>::quiet_NaN();
  return static_cast<double>(count) / static_cast<double>(all);
}

double HMCECS::acceptance_rate() const {
  return rate(progress().num_accepted_.get());
}

double HMCECS::subsample_acceptance_rate() const {
  return rate(progress().num_subsamples_accepted_.get());
}

int64_t HMCECS::num_divergences() const {
  return progress().num_divergences_.get();
}

int64_t HMCECS::num_evaluations() const {
  return progress().num_evaluations_.get();
}

double HMCECS::estimator_variance() const {
  if (present_ == nullptr) return std::numeric_limits<double>::quiet_NaN();
  return present_->variance;
}

// ---- What is common to all groups -------------------------------------------

void HMCECS::check_ready() const {
  check_groups();
  if (all_params().empty()) {
    throw std::runtime_error("HMCECS has no parameters");
  }
  // Which needs as many weights as data.
  if (sampling_ != nullptr) layout().draws();
}

ECSPrior HMCECS::prior() const {
  std::vector<at::Tensor> precisions;
  std::vector<at::Tensor> means;
  const auto like =
      at::TensorOptions(at::kDouble).device(all_params()[0].device());
  for (size_t group = 0; group < param_groups_.size(); ++group) {
    const SamplerOptions& options = options_of(group);
    for (const at::Tensor& param : param_groups_[group].params()) {
      const int64_t size = param.numel();
      precisions.push_back(at::full({size}, options.prior_precision(), like));
      const at::Tensor mean = prior_mean_of(param);
      means.push_back(mean.defined()
                          ? mean.reshape(-1).to(at::kDouble)
                          : at::full({size}, options.prior_mean(), like));
    }
  }
  return {at::cat(precisions), at::cat(means)};
}

// ---- The anchor -------------------------------------------------------------

AllData HMCECS::data(const Closure& closure,
                     const ProgressHook& progress) const {
  const HMCECSOptions& group = first();
  return {closure,
          all_params(),
          static_cast<int64_t>(group.num_data()),
          group.chunk_size(),
          seed(),
          progress};
}

void HMCECS::add_param_group(
    const torch::optim::OptimizerParamGroup& param_group) {
  Sampler::add_param_group(param_group);
  // All of it is of other parameters.
  anchor_ = nullptr;
  warmup_ = nullptr;
  forget_subsample();
}

// Whether there is no theta*, or the sums are those of other data.
bool HMCECS::needs_anchor() const {
  return anchor_ == nullptr ||
         anchor_->num_data != static_cast<int64_t>(first().num_data());
}

void HMCECS::set_anchor(const Closure& closure, const ProgressHook& progress) {
  if (closure == nullptr) step();  // says what is missing
  const at::NoGradGuard no_grad;
  check_ready();
  anchor_at(closure, FlatRow(all_params()).to(at::kDouble), progress);
  warmup_ = nullptr;
}

void HMCECS::anchor_at(const Closure& closure,
                       const at::Tensor& theta,
                       const ProgressHook& progress,
                       bool moved) {
  const at::NoGradGuard no_grad;
  const ECSPrior gaussian = prior();
  ECSAnchor chosen =
      ECSAnchor::Choose(data(closure, progress), theta, gaussian, first());
  if (moved) {
    anchor_->check_near(
        chosen.sums.value, chosen.theta, gaussian, first().temperature());
  }
  std::shared_ptr<const ExpandedSubsample> kept;
  if (subsample_ != nullptr && subsample_->layout == layout()) {
    // The same data, with other expansions.
    kept = std::make_shared<const ExpandedSubsample>(
        ExpandedSubsample{subsample_->layout,
                          subsample_->counts,
                          subsample_->indices,
                          expand(closure, subsample_->indices, chosen)});
  }  // else of other sizes: the next step draws one
  // Nothing fails from here on.
  anchor_ = std::make_shared<const ECSAnchor>(std::move(chosen));
  subsample_ = std::move(kept);
  present_ = nullptr;
  proposals_ = nullptr;
  count(anchor_->num_data);
  this->progress().mean_difference_.set(0.0);
}

// Throws if the parameters are not near theta*, with a pass through all data.
void HMCECS::check_place(const Closure& closure, const ProgressHook& progress) {
  const at::NoGradGuard no_grad;
  const at::Tensor total = data(closure, progress).log_likelihood();
  count(anchor_->num_data);
  anchor_->check_near(total,
                      FlatRow(all_params()).to(at::kDouble),
                      prior(),
                      first().temperature());
}

void HMCECS::count(int64_t evaluations) {
  Hyperparameter<int64_t>& all = progress().num_evaluations_;
  all.set(all.get() + evaluations);
}

// The expansions of the data with these indices, which count as evaluations.
TaylorTerms HMCECS::expand(const Closure& closure,
                           const at::Tensor& indices,
                           const ECSAnchor& anchor) {
  count(indices.numel());
  return anchor.expand(data(closure), indices);
}

// ---- The subsample ----------------------------------------------------------

SubsampleLayout HMCECS::layout() const {
  const HMCECSOptions& group = first();
  const bool is_signed = group.variant() == "signed";
  const int64_t cells =
      is_signed ? group.num_products() : group.subsample_size();
  return {static_cast<int64_t>(group.num_data()),
          cells,
          std::min(group.num_blocks(), cells),
          is_signed ? group.subsample_size() : 1,
          is_signed,
          seed(),
          sampling_ == nullptr ? nullptr : sampling_->law};
}

void HMCECS::set_sampling_weights(const at::Tensor& weights) {
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> params = all_params();
  if (params.empty()) throw std::runtime_error("HMCECS has no parameters");
  sampling_ = ECSSampling::Given(
      weights, static_cast<int64_t>(first().num_data()), params[0].device());
  forget_subsample();
}

void HMCECS::set_sampling_weights(std::nullopt_t /*none*/) {
  if (sampling_ == nullptr) return;
  sampling_ = nullptr;
  forget_subsample();
}

// The next step draws one.
void HMCECS::forget_subsample() {
  subsample_ = nullptr;
  present_ = nullptr;
  proposals_ = nullptr;
}

// That of the state, or a new one if sizes, blocks or the seed were changed.
std::shared_ptr<const ExpandedSubsample> HMCECS::subsample(
    const Closure& closure) {
  const SubsampleLayout wanted = layout();
  if (subsample_ != nullptr && subsample_->layout == wanted) return subsample_;
  const auto expansions = [&](const at::Tensor& indices) {
    return expand(closure, indices, *anchor_);
  };
  return ExpandedSubsample::Draw(
      wanted, num_steps(), expansions, anchor_->theta.device());
}

std::shared_ptr<const ExpandedSubsample> HMCECS::proposed(
    const Closure& closure, const ExpandedSubsample& current) {
  const SubsampleLayout wanted = layout();
  const int64_t now = num_steps();
  if (proposals_ == nullptr || proposals_->layout() != wanted ||
      !proposals_->covers(now)) {
    const auto expansions = [&](const at::Tensor& indices) {
      return expand(closure, indices, *anchor_);
    };
    proposals_ = std::make_shared<const BlockProposals>(
        wanted, now, expansions, anchor_->theta.device());
  }
  return proposals_->apply(now, current);
}

// ---- Steps ------------------------------------------------------------------

// NOLINTNEXTLINE(google-default-arguments): as torch's own.
torch::Tensor HMCECS::step(LossClosure) { Invalid(kHMCECSNeedsClosure); }

torch::Tensor HMCECS::step(const Closure& closure) {
  try {
    sweep(closure, std::nullopt);
  } catch (const NonfiniteError&) {
    if (nonfinite() != "skip") throw;
    leave_out();
    return at::full({},
                    std::numeric_limits<double>::quiet_NaN(),
                    at::TensorOptions(at::kDouble));
  }
  const at::NoGradGuard no_grad;
  const at::Tensor& theta = present_->theta;
  const at::Tensor decay = prior().energy(theta);
  return -(decay + present_->log * first().temperature()) / first().num_data();
}

// One step; returns the log of the ratio in the trajectory's test.
double HMCECS::sweep(const Closure& closure,
                     std::optional<int64_t> most_steps) {
  if (closure == nullptr) Invalid(kHMCECSNeedsClosure);
  begin_step();
  const at::NoGradGuard no_grad;
  check_ready();
  if (needs_anchor()) {
    anchor_at(closure, FlatRow(all_params()).to(at::kDouble), nullptr);
  }
  ECSTarget density = target(closure);
  const std::vector<at::Tensor> params = all_params();
  const std::vector<at::Tensor> before = CopiesOf(params);
  Move renewed{};
  Move moved{};
  try {
    const std::shared_ptr<const ECSPoint> begin = start(density);
    if (!most_steps && is_check_due()) check_place(closure, nullptr);
    renewed = update_subsample(density, begin);
    moved = trajectory(density, renewed.end, most_steps);
  } catch (...) {
    PutBack(params, before);
    throw;
  }
  if (!moved.accepted) PutBack(params, before);
  present_ = moved.end;
  present_target_ = target_key();
  subsample_ = present_->subsample;
  HMCECSOptions& counted = progress();
  const auto add = [](Hyperparameter<int64_t>& count, int64_t more) {
    count.set(count.get() + more);
  };
  add(counted.num_trajectories_, 1);
  add(counted.num_accepted_, moved.accepted ? 1 : 0);
  add(counted.num_divergences_, std::isfinite(moved.log_ratio) ? 0 : 1);
  add(counted.num_subsamples_accepted_, renewed.accepted ? 1 : 0);
  add(counted.num_evaluations_, density.evaluations());
  counted.sign_.set(present_->sign);
  advance({});
  return moved.log_ratio;
}

ECSTarget HMCECS::target(const Closure& closure) const {
  const HMCECSOptions& group = first();
  ECSEstimator estimator;
  estimator.num_data = group.num_data();
  if (group.variant() == "signed") {
    estimator.batch_size = group.subsample_size();
    estimator.num_products = group.num_products();
    estimator.lower_bound = progress().mean_difference_.get() -
                            static_cast<double>(estimator.num_products);
  }
  return {closure,
          all_params(),
          anchor_,
          prior(),
          group.temperature(),
          estimator,
          sampling_ == nullptr ? at::Tensor() : sampling_->importance};
}

// What else the estimated density depends on.
std::vector<double> HMCECS::target_key() const {
  std::vector<double> key = {first().temperature(),
                             progress().mean_difference_.get()};
  for (size_t group = 0; group < param_groups_.size(); ++group) {
    key.push_back(options_of(group).prior_precision());
    key.push_back(options_of(group).prior_mean());
  }
  return key;
}

// The last step's end, or where the parameters have been put since.
std::shared_ptr<const ECSPoint> HMCECS::start(ECSTarget& target) {
  const auto current = subsample(target.closure());
  const at::Tensor theta = FlatRow(all_params()).to(at::kDouble);
  std::shared_ptr<const ECSPoint> last = present_;
  if (last == nullptr || present_target_ != target_key() ||
      last->subsample != current || !at::equal(last->theta, theta)) {
    last = target.evaluate(current, theta);
  }
  if (!std::isfinite(last->log)) {
    throw NonfiniteError(
        "HMCECS got log-likelihoods or parameters that are not finite at the "
        "start of a step");
  }
  if (IsOverturned(target.estimator(), last->mean)) {
    throw std::runtime_error(
        "HMCECS's estimate of the sum of all d at the start of a step is " +
        FourDigits(last->mean) +
        " (must be > a = " + FourDigits(target.estimator().lower_bound) +
        ": beyond, |L̂| grows as the likelihood falls). Choose θ* nearer, by "
        "set_anchor() or warmup(), or use control_variate(2) or a larger "
        "num_products");
  }
  return last;
}

// The Gibbs step for u.
HMCECS::Move HMCECS::update_subsample(
    ECSTarget& target, const std::shared_ptr<const ECSPoint>& present) {
  const auto drawn = proposed(target.closure(), *present->subsample);
  // If it is accepted, as nearly always, the gradient is the trajectory's
  // first.
  const auto proposal = target.evaluate(drawn, present->theta);
  double log_ratio = proposal->log - present->log;
  if (is_out_of_bounds(target, *proposal, *present)) {
    log_ratio = -std::numeric_limits<double>::infinity();
  }
  const bool accepted = decide(log_ratio, kOfSubsample);
  return {accepted ? proposal : present, log_ratio, accepted};
}

// The step for theta.
HMCECS::Move HMCECS::trajectory(ECSTarget& target,
                                const std::shared_ptr<const ECSPoint>& present,
                                std::optional<int64_t> most_steps) {
  const at::Tensor r = at::empty_like(present->theta);
  const int64_t offset = 0;
  hmc_momenta_(
      {r}, {}, /*temperature=*/1, offset, seed(), num_steps(), std::nullopt);
  if (observer() == nullptr) return travel(target, present, r, most_steps);
  std::vector<Work> work(1);
  work[0].options = &options_of(0);
  work[0].step.host = num_steps();
  work[0].params = all_params();
  const std::unique_ptr<TrajectoryHeat> heat = observer()->trajectory(work);
  if (heat == nullptr) return travel(target, present, r, most_steps);
  const double temperature = first().temperature();
  const at::Tensor turned = -r;
  // The gradient is that of -U / T.
  heat->look(MovingOf(work[0].params, *present, r),
             {-temperature / first().num_data(), 0, 0});
  Move moved = travel(target, present, r, most_steps);
  heat->look(MovingOf(work[0].params, *present, moved.accepted ? r : turned),
             {0, temperature, 0});
  if (observer() != nullptr) observer()->take(*heat, work);
  return moved;
}

// The trajectory with a momentum, which is changed in place, and its test.
HMCECS::Move HMCECS::travel(ECSTarget& target,
                            const std::shared_ptr<const ECSPoint>& present,
                            const at::Tensor& r,
                            std::optional<int64_t> most_steps) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const at::Tensor& factor = anchor_->whitening;
  // Along x with theta = theta_0 + W x, W W' = M^-1, the mass is 1.
  const at::Tensor x = at::zeros_like(present->theta);
  const double before = present->log - KineticEnergy(r);
  const double step_size = first().step_size();
  double wanted = leapfrog_steps();
  if (most_steps) wanted = std::min(wanted, static_cast<double>(*most_steps));
  const auto steps = static_cast<int64_t>(wanted);
  std::shared_ptr<const ECSPoint> point = present;
  for (int64_t i = 0; i < steps; ++i) {
    const double kick = i > 0 ? step_size : step_size / 2;
    point = target.evaluate(
        present->subsample,
        WhitenedLeapfrog(
            x, r, factor, point->gradient, present->theta, kick, step_size));
    // Its way back meets the same point, so to stop here is reversible.
    if (!point->finite) return {present, -kInfinity, false};
  }
  WhitenedLeapfrog(x,
                   r,
                   factor,
                   point->gradient,
                   present->theta,
                   step_size / 2,
                   /*drift=*/0);
  double log_ratio = point->log - KineticEnergy(r) - before;
  if (is_out_of_bounds(target, *point, *present)) log_ratio = -kInfinity;
  const bool accepted = decide(log_ratio, kOfTrajectory);
  return {accepted ? point : present, log_ratio, accepted};
}

double HMCECS::leapfrog_steps() const {
  return static_cast<double>(
      LeapfrogSteps({}, first().trajectory_length(), first().step_size()));
}

// Whether to look at all data, as the warm-up has done at its end.
bool HMCECS::is_check_due() const {
  const SubsampleLayout sizes = layout();
  const double cost = static_cast<double>(sizes.num_cells * sizes.batch_size) *
                      (leapfrog_steps() + 1);
  return IsCheckDue(
      progress().num_trajectories_.get(), first().num_data(), cost);
}

bool HMCECS::is_out_of_bounds(const ECSTarget& target,
                              const ECSPoint& point,
                              const ECSPoint& present) const {
  return IsOutOfBounds(target.estimator(),
                       point.variance,
                       point.mean,
                       present.variance,
                       first().max_variance());
}

// A Metropolis test; what is not finite is rejected.
bool HMCECS::decide(double log_ratio, int64_t test) const {
  if (!std::isfinite(log_ratio)) return false;
  return metropolis_decide(
             at::full({1}, log_ratio, at::TensorOptions(at::kDouble)),
             test,
             static_cast<int64_t>(Purpose::kMetropolis),
             seed(),
             num_steps())
      .item<bool>();
}

}  // namespace torch_sgmcmc
