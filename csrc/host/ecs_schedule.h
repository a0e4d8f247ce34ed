// What HMC-ECS does when: when it looks at all data, and which step of a
// warm-up does what besides.
#pragma once

#include <cstddef>
#include <cstdint>

namespace torch_sgmcmc {

// Whether to look, after so many trajectories, if the chain is still in the
// posterior: a tenth of the evaluations are for that. `cost` is that of one
// step, in evaluations.
bool IsCheckDue(int64_t trajectories, double num_data, double cost);

// Of the log posterior of all data below that at θ*: what lies deeper is no
// draw. For a log-concave density in d dimensions, the fall from its mode to a
// draw is at most d + sqrt(2 d x) + x but for a probability of exp(-x), here
// with x = 20: M. Fradelizi, M. Madiman and L. Wang, Optimal Concentration of
// Information Content for Log-Concave Densities, 2016. Other posteriors are
// taken to be like these.
double DeepestFall(int64_t dimension);

// A warm-up chooses θ* anew after every `anchor_every` steps, and the sizes
// half-way between the last time and the end.
class ECSSchedule {
 public:
  // Throws std::invalid_argument unless both are >= 1.
  ECSSchedule(int64_t steps, int64_t anchor_every);

  // Throws std::invalid_argument if there are no draws by which to choose the
  // sizes.
  void CheckSizing() const;
  bool MovesAnchorAfter(int64_t done) const;
  bool ChoosesSizesAfter(int64_t done) const { return done == sizing_; }

 private:
  int64_t steps_;
  int64_t anchor_every_;
  int64_t last_ = 0;
  int64_t sizing_ = 0;
};

// Of the draws since θ* was chosen last, the second half is used: the first of
// it.
constexpr size_t FirstLate(size_t draws) { return draws / 2; }

}  // namespace torch_sgmcmc
