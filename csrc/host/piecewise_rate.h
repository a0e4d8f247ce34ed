// A Poisson process whose rate is the positive part of a polygon.
//
// The rate is [y(t)]+ with y linear between nodes. Its integral is a piecewise
// quadratic, which is inverted exactly: the first arrival is where it reaches a
// unit exponential variable. Everything is computed relative to the height and
// the length of a piece, so that no scale overflows or loses digits.
#pragma once

#include <vector>

namespace torch_sgmcmc {

class PiecewiseRate {
 public:
  // Appends a node. Times must not decrease.
  void Add(double time, double value);

  struct Arrival {
    bool found;    // false if the rate ends before
    double time;   // else the time of the last node
    double value;  // y there
  };
  // Where the integral of the rate from the first node on reaches `area`.
  Arrival Find(double area) const;

  // The integral of the rate from the first node to `time`.
  double Integral(double time) const;

  // y at `time`, which must be within the nodes.
  double Value(double time) const;

 private:
  std::vector<double> times_;
  std::vector<double> values_;
};

}  // namespace torch_sgmcmc
